"""Names that old programs take from NumPy and NumPy 2 dropped, for those programs alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.compat.program import is_own
from dbrdist.core.array.types import Array


def _asscalar(a: Any) -> Any:
    return a.item()


def _asfarray(a: Sequence[int], dtype: DTypeLike = np.float64) -> Array:
    return np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else np.float64)


class _Casts(Mapping[Any, Callable[[Any], Any]]):
    """``numpy.cast``: for each type the function that converts to it."""

    def __getitem__(self, dtype: DTypeLike) -> Callable[[Any], Any]:
        return lambda x: np.asarray(x, dtype)

    def __iter__(self) -> Any:
        return iter(np.typecodes["All"])

    def __len__(self) -> int:
        return len(np.typecodes["All"])


NAMES: dict[str, Any] = {
    "AxisError": np.exceptions.AxisError,
    "ComplexWarning": np.exceptions.ComplexWarning,
    "RankWarning": np.exceptions.RankWarning,
    "VisibleDeprecationWarning": np.exceptions.VisibleDeprecationWarning,
    "alltrue": np.all,
    "asfarray": _asfarray,
    "asscalar": _asscalar,
    "bool": bool,
    "bool8": np.bool_,
    "cast": _Casts(),
    "cfloat": np.complex128,
    "complex": complex,
    "complex_": np.complex128,
    "cumproduct": np.cumprod,
    "float": float,
    "find_common_type": lambda arrays, scalars: np.result_type(*arrays, *(np.dtype(t).type(0) for t in scalars)),
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
    "obj2sctype": lambda x, default=None: np.dtype(x).type,
    "object": object,
    "object0": np.object_,
    "PINF": np.inf,
    "product": np.prod,
    "PZERO": 0.0,
    "round_": np.round,
    "row_stack": np.vstack,
    "sctypes": {
        "int": [np.int8, np.int16, np.int32, np.int64],
        "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
        "float": [np.float16, np.float32, np.float64, np.longdouble],
        "complex": [np.complex64, np.complex128, np.clongdouble],
        "others": [bool, object, bytes, str, np.void],
    },
    "singlecomplex": np.complex64,
    "sometrue": np.any,
    "str": str,
    "str0": np.str_,
    "string_": np.bytes_,
    "trapz": np.trapezoid,
    "unicode": str,
    "unicode_": np.str_,
}

_numpy_getattr: Callable[[str], Any] | None = None


def restore_numpy_names() -> None:
    """Let the program use NumPy's old names: ``numpy.int``, ``numpy.float_`` and so on.

    Those are the files outside of installed packages, and modules of packages that import Chainer. Others see NumPy as
    it is. Names that NumPy still has, such as ``numpy.bool`` and ``numpy.long``, keep NumPy's meaning.
    """
    global _numpy_getattr
    if _numpy_getattr is None:
        _numpy_getattr = np.__getattr__
        np.__getattr__ = _getattr  # type: ignore[assignment]


def _getattr(name: str) -> Any:
    if name in NAMES:
        asker = sys._getframe(1)
        if is_own(asker.f_code.co_filename) or _uses_chainer(asker.f_globals):
            return NAMES[name]
    assert _numpy_getattr is not None
    return _numpy_getattr(name)


def _uses_chainer(names: dict[str, Any]) -> bool:
    """Whether a module has imported something of Chainer by name."""
    chainer = sys.modules.get("chainer")
    return chainer is not None and any(type(value) is type(chainer) for value in list(names.values()))
