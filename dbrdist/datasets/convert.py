"""From a list of examples to the arrays of a batch, on the device where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.core.backend import Array
from dbrdist.datasets.base import Batch


class Converter:
    """Base of converters: callables ``(batch, device)`` that make arrays of a list of examples."""

    def __call__(self, batch: Any, device: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(batch, device)")


class _FunctionConverter(Converter):
    """A function as a converter; its device argument may be any specifier and arrives as a Device or None."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"expected a function (batch, device) to convert with, got {function!r}")
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, batch: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.function(batch, None if device is None else backend.get_device(device), *args, **kwargs)

    def __reduce__(self) -> Any:
        return (_FunctionConverter, (self.function,)) if self is not concat_examples else "concat_examples"


def converter() -> Callable[[Callable[..., Any]], Converter]:
    """Decorator that turns a function ``(batch, device)`` into a :class:`Converter`."""
    return _FunctionConverter


def to_device(device: Any, x: Any) -> Any:
    """``x`` (an array, or tuples, lists and dictionaries of them) on ``device``; where that is None, ``x`` itself."""
    return x if device is None else backend.get_device(device).send(x)


def concat_examples_func(batch: Any, device: Any = None, padding: Any = None) -> Any:
    """Stack examples along a new first axis: a list of tuples becomes a tuple of arrays.

    Examples may be arrays or numbers, tuples of them, or dictionaries of them; the result is one array, a tuple or a
    dictionary. Images (C, H, W) become a batch (N, C, H, W) that lies channels-last in memory.

    Args:
        batch: a non-empty list of examples, or a :class:`~dbrdist.datasets.Batch` (also an empty one).
        device: where the arrays go; None leaves them where they are.
        padding: a number that fills smaller examples up to the largest (a tuple or dictionary gives one per entry);
            None: examples of different shapes are a ValueError.
    """
    if isinstance(batch, Batch):
        return batch.arrays if device is None else batch.to_device(backend.get_device(device))
    if len(batch) == 0:
        raise ValueError("expected at least one example to concatenate, got an empty list")
    first = batch[0]
    if isinstance(first, tuple):
        pads = padding if isinstance(padding, tuple) else (padding,) * len(first)
        return tuple(to_device(device, stack([e[k] for e in batch], pads[k], k)) for k in range(len(first)))
    if isinstance(first, dict):
        fills = padding if isinstance(padding, dict) else dict.fromkeys(first, padding)
        return {k: to_device(device, stack([e[k] for e in batch], fills[k], k)) for k in first}
    return to_device(device, stack(batch, padding, None))


concat_examples = converter()(concat_examples_func)


def stack(values: Any, padding: Any, entry: Any) -> Array:
    """Values along a new first axis, filled up with ``padding`` where that is not None; errors name their ``entry``."""
    first = values[0]
    if not backend.is_array(first):
        if padding is None:
            return np.asarray(values)
        values = [np.asarray(v) for v in values]
        first = values[0]
    shapes = {v.shape for v in values}
    if padding is None:
        if len(shapes) > 1:
            where = "" if entry is None else f" in entry {entry!r}"
            raise ValueError(
                f"expected examples of one shape{where}, got {sorted(shapes)}; "
                "bring them to one size first, or give padding= to fill them up"
            )
        out = backend.empty((len(values), *first.shape), first.dtype, first)
        for i, v in enumerate(values):
            out[i] = v
        return out
    shape = tuple(max(s[axis] for s in shapes) for axis in range(first.ndim))
    out = backend.full((len(values), *shape), padding, first.dtype, first)
    for i, v in enumerate(values):
        out[(i, *map(slice, v.shape))] = v
    return out
