"""The provider ``loops``: update rules in one pass over memory, in own C (``vector_loops.h``), on OpenMP's threads.

It serves float32 and float64 where dbrdist is compiled; NumPy's formulas, which take several passes over pieces that
stay in cache, serve elsewhere, with the same results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.kernels.cpu import onednn

try:
    from dbrdist.kernels.cpu import vector_loops as _found
except ImportError:  # not compiled
    _found = None

Array = np.ndarray
Plan = Callable[..., Any]

_PLACES: dict[str, int] = {} if _found is None else _found.PLACES
_REAL = np.dtype(np.float32), np.dtype(np.float64)


def _plan_update(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> Plan:
    """See dispatch.update. Absent arrays are the last ones."""
    name = "amsgrad" if rule == "adam" and arrays[-1] is not None else rule
    present = [a for a in arrays if a is not None]
    dtype = present[0].dtype
    if name not in _PLACES or dtype not in _REAL or any(type(a) is not np.ndarray or a.dtype != dtype for a in present):
        raise onednn.Unsupported("a rule, a type, or no compiled loops")
    place, is_double, count = _PLACES[name], dtype.itemsize == 8, len(present)
    run = _found.run

    def update(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> bool:
        return bool(run(place, is_double, arrays[:count], numbers))

    return update


ROWS = {"update": _plan_update}
