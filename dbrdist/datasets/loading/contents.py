"""What can be told of a dataset's examples without reading files or calling a program's code.

Ranks that divide one dataset among them compare it: the same files in another order are another dataset.
"""

from __future__ import annotations

import numbers
import os
from typing import Any

import numpy as np

from dbrdist.core.array.types import HostArray

_NUM_EXAMPLES = 16
_MOST_ENTRIES, _MOST_ELEMENTS = 16, 64  # of an example, and of an array in it

Known = str | HostArray  # a word, or numbers, which may differ by rounding


def known_examples(dataset: Any) -> list[Known]:
    """What is known of some examples of ``dataset``, the first and the last among them, in order; may be empty."""
    n = len(dataset)
    count = min(n, _NUM_EXAMPLES)
    found: list[Known] = []
    for k in range(count):
        _add(found, known_example(dataset, k * (n - 1) // max(count - 1, 1)))
    return found


def known_example(dataset: Any, i: int) -> object:
    """Example ``i``, or what it is made of, as far as that costs nothing to tell; None where it does."""
    if type(dataset) in (list, tuple, range, np.ndarray):
        return dataset[i]
    tell = getattr(type(dataset), "known_example", None)  # of the class: a program's dataset may answer to any name
    return None if tell is None else tell(dataset, i)


def are_alike(one: list[Known], other: list[Known]) -> bool:
    """Whether two ranks know the same of their examples, but for rounding."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Known, other: Known) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return type(one) is type(other) and one == other
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True))


def _add(found: list[Known], value: Any) -> None:
    """Put a value's words and numbers behind those found so far; other objects are left out."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            found.append(f"{value.dtype.name} {value.shape}")
            flat = value.reshape(-1) if value.size <= _MOST_ELEMENTS else value[_some_places(value)]
            found.append(np.asarray(flat, np.float64))
    elif isinstance(value, (bool, str)):
        # Folders may differ between hosts.
        found.append(os.path.basename(value) if isinstance(value, str) else str(value))
    elif isinstance(value, numbers.Real):
        found.append(np.array([float(value)]))
    elif type(value) in (list, tuple):
        for entry in value[:_MOST_ENTRIES]:
            _add(found, entry)
    elif type(value) is dict:
        for entry in list(value.values())[:_MOST_ENTRIES]:
            _add(found, entry)


def _some_places(value: HostArray) -> Any:
    return np.unravel_index(np.linspace(0, value.size - 1, _MOST_ELEMENTS).astype(np.int64), value.shape)
