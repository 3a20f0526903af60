"""Names that old programs take from NumPy and NumPy 2 dropped, for those programs alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def _asscalar(a: Any) -> Any:
    return a.item()


def _asfarray(a: Any, dtype: Any = np.float64) -> Any:
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


NAMES: dict[str, Any] = {
    "alltrue": np.all,
    "asfarray": _asfarray,
    "asscalar": _asscalar,
    "bool": bool,
    "bool8": np.bool_,
    "cfloat": np.complex128,
    "complex": complex,
    "complex_": np.complex128,
    "cumproduct": np.cumprod,
    "float": float,
    "float_": np.float64,
    "in1d": np.isin,
    "Inf": np.inf,
    "Infinity": np.inf,
    "infty": np.inf,
    "int": int,
    "int0": np.intp,
    "long": int,
    "mat": np.asmatrix,
    "msort": lambda a: np.sort(a, axis=0),
    "NaN": np.nan,
    "NINF": -np.inf,
    "NZERO": -0.0,
    "object": object,
    "object0": np.object_,
    "PINF": np.inf,
    "product": np.prod,
    "PZERO": 0.0,
    "round_": np.round,
    "row_stack": np.vstack,
    "singlecomplex": np.complex64,
    "sometrue": np.any,
    "str": str,
    "str0": np.str_,
    "string_": np.bytes_,
    "trapz": np.trapezoid,
    "unicode": str,
    "unicode_": np.str_,
}

_folders: set[str] = set()
_numpy_getattr: Callable[[str], Any] | None = None


def restore_numpy_names(folder: str) -> None:
    """Let files under ``folder`` use NumPy's old names (``numpy.int``, ``numpy.float_`` and so on).

    Other modules, libraries among them, see NumPy as it is. Names that NumPy still has, such as ``numpy.bool`` and
    ``numpy.long``, keep NumPy's meaning.
    """
    global _numpy_getattr
    _folders.add(os.path.join(os.path.realpath(folder), ""))
    if _numpy_getattr is None:
        _numpy_getattr = np.__getattr__
        np.__getattr__ = _getattr  # type: ignore[assignment]


def _getattr(name: str) -> Any:
    if name in NAMES:
        asker = os.path.realpath(sys._getframe(1).f_code.co_filename)
        if any(asker.startswith(folder) for folder in _folders):
            return NAMES[name]
    assert _numpy_getattr is not None
    return _numpy_getattr(name)
