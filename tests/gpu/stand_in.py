"""A module that stands for CuPy where there is no GPU: what CuPy refuses, it refuses.

Its arrays lie in host memory but are no NumPy arrays. They do not mix with NumPy arrays, have only CuPy's functions and
methods with CuPy's arguments, allocate in C order, give 0-d arrays where NumPy gives scalars, and count what waits for
the device. It shows that code is written for CuPy, not that CuPy computes the same numbers. The rules were read in
the sources of CuPy 14.2; ``test_stand_in.py`` compares names with CuPy where that can be imported.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

# Functions of the module that take and give arrays.
FUNCTIONS = (
    "all", "any", "arange", "argmax", "argmin", "argsort", "array_equal", "broadcast_to", "clip", "concatenate", "dot",
    "empty", "empty_like", "expand_dims", "eye", "full", "full_like", "isfinite", "isnan", "linspace", "matmul", "mean",
    "ones", "ones_like", "prod", "stack", "std", "sum", "transpose", "where", "zeros", "zeros_like", "max", "min",
)  # fmt: skip
METHODS = (
    "all", "any", "argmax", "argmin", "argsort", "clip", "copy", "cumsum", "dot", "fill", "max", "mean", "min",
    "prod", "ravel", "repeat", "reshape", "squeeze", "std", "sum", "swapaxes", "take", "transpose", "var", "view",
)  # fmt: skip
ATTRIBUTES = ("dtype", "itemsize", "nbytes", "ndim", "shape", "size", "strides")
KEEPS_ORDER = ("broadcast_to", "copy", "ravel", "reshape", "squeeze", "swapaxes", "transpose", "view", "expand_dims")
# NumPy's ufuncs that CuPy 14.2 lacks.
MISSING = ("bitwise_count", "float_power", "isnat", "matvec", "spacing", "vecdot", "vecmat")
WIDENS = ("where", "clip")  # for want of a loop for bfloat16
COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")


class Waits:
    """How often the host waited for the device."""

    def __init__(self) -> None:
        self.count = 0
        self.allowed = True

    def declare(self) -> None:
        """Called by what waits."""
        if not self.allowed:
            raise RuntimeError("the host waits for the device here")
        self.count += 1


waits = Waits()


def _wrap(a: Any, keeps_order: bool = False) -> Any:
    if isinstance(a, (tuple, list)):
        return type(a)(_wrap(v, keeps_order) for v in a)
    if not isinstance(a, (np.ndarray, np.generic)):
        return a
    a = np.asarray(a)
    return ndarray(a if keeps_order or a.flags.c_contiguous else np.ascontiguousarray(a))


def _plain(x: Any) -> Any:
    """The host's array behind a device array; NumPy arrays are refused, as by CuPy's kernels."""
    if isinstance(x, ndarray):
        return x.host
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (tuple, list)):
        return type(x)(map(_plain, x))
    return x


def _index(slices: Any) -> Any:
    """Indices may be lists and NumPy arrays, too."""
    parts = slices if isinstance(slices, tuple) else (slices,)
    plain = tuple(p.host if isinstance(p, ndarray) else p for p in parts)
    return plain if isinstance(slices, tuple) else plain[0]


def _masks(slices: Any) -> bool:
    parts = slices if isinstance(slices, tuple) else (slices,)
    return any(np.asarray(p).dtype == bool for p in _index(parts) if isinstance(p, (np.ndarray, list)))


class ndarray:
    """An array on the device."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return getattr(self.host, name)
        if name not in METHODS:
            raise AttributeError(f"CuPy's ndarray has no {name!r}, or tests/gpu/stand_in.py does not know it")
        method = getattr(self.host, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("out")
            result = method(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
            return out if out is not None else _wrap(result, name in KEEPS_ORDER)

        return call

    @property
    def T(self) -> ndarray:
        return ndarray(self.host.T)

    @property
    def flags(self) -> Any:
        return self.host.flags

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=0)

    @property
    def data(self) -> Any:
        """The pointer to the memory."""
        return types.SimpleNamespace(ptr=self.host.ctypes.data)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        assert casting is None and subok is None, "CuPy supports neither casting nor subok"
        return self if not copy and self.host.dtype == dtype else ndarray(self.host.astype(dtype, order))

    def dot(self, b: ndarray, out: ndarray | None = None) -> ndarray:
        if not isinstance(b, ndarray):
            raise TypeError(f"Argument 'b' has incorrect type (expected an array on the device, got {type(b)})")
        if out is None:
            return _wrap(self.host.dot(b.host))
        if out.dtype != np.result_type(self.dtype, b.dtype) or not out.host.flags.c_contiguous:
            raise ValueError("Not supported dtype combination.")
        self.host.dot(b.host, out.host)
        return out

    # what waits for the device

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        if blocking:
            waits.declare()
        if out is None:
            return np.array(self.host, copy=True, order=order)
        if not out.flags.c_contiguous or out.dtype != self.dtype or out.shape != self.shape:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        out[...] = self.host
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"{self.dtype} {self.shape} cannot be set from {type(arr)}")
        if not (self.host.flags.c_contiguous or self.host.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        self.host[...] = arr

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __reduce__(self) -> Any:
        return _from_host, (self.get(),)

    def __deepcopy__(self, memo: Any) -> ndarray:
        return ndarray(self.host.copy())

    def __copy__(self) -> ndarray:
        return ndarray(self.host.copy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    # indexing

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self.host)))

    def __getitem__(self, slices: Any) -> ndarray:
        if _masks(slices):
            waits.declare()  # for the number of elements
        a = self.host[_index(slices)]
        return ndarray(np.asarray(a) if isinstance(a, np.generic) else a)

    def __setitem__(self, slices: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            is_whole = isinstance(slices, slice) and slices == slice(None)
            if not is_whole or value.shape != self.shape or value.dtype != self.dtype:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if _masks(slices) and isinstance(value, ndarray):
            waits.declare()
        self.host[_index(slices)] = value.host if isinstance(value, ndarray) else value

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method not in ("__call__", "at", "reduce", "outer") or ufunc.__name__ in MISSING:
            return NotImplemented
        if ufunc.__name__ in COMPARISONS:
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs)
        if method == "at":
            np.add.at(_plain(inputs[0]), _index(inputs[1]), _plain(inputs[2]))
            return None
        out = kwargs.pop("out", None)
        plain = [_plain(x) for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(_plain(o) for o in out)
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*plain, **kwargs)
        return out[0] if out is not None else _wrap(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        mine = globals()["module"].__dict__.get(func.__name__)
        return NotImplemented if mine is None else mine(*args, **kwargs)


def _operator(name: str, ufunc: Any) -> None:
    def forward(self: Any, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, bool)):
            return NotImplemented
        return ufunc(self, other)

    def backward(self: Any, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, bool)):
            return NotImplemented
        return ufunc(other, self)

    def in_place(self: Any, other: Any) -> Any:
        return ufunc(self, other, out=self)

    setattr(ndarray, f"__{name}__", forward)
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(ndarray, f"__r{name}__", backward)
        setattr(ndarray, f"__i{name}__", in_place)


for _name, _ufunc in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "matmul": np.matmul, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}.items():  # fmt: skip
    _operator(_name, _ufunc)
ndarray.__neg__ = lambda self: np.negative(self)  # type: ignore[attr-defined]
ndarray.__abs__ = lambda self: np.absolute(self)  # type: ignore[attr-defined]
ndarray.__invert__ = lambda self: np.invert(self)  # type: ignore[attr-defined]
ndarray.__hash__ = None  # type: ignore[assignment]


def _from_host(a: Any, dtype: Any = None) -> ndarray:
    return ndarray(np.array(a, dtype, copy=True, order="C"))


def asarray(a: Any, dtype: Any = None, order: Any = None) -> ndarray:
    """To the device; nothing is copied where ``a`` is there and has that type."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    if isinstance(a, (tuple, list)) and any(isinstance(v, ndarray) for v in a):
        return _wrap(np.asarray([v.host for v in a], dtype))
    return _from_host(a, dtype)


def as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """As CuPy's, within the memory that belongs to ``x``."""
    view = np.lib.stride_tricks.as_strided(x.host, shape, strides)
    assert view.size == 0 or byte_bounds(view)[1] <= byte_bounds(x.host)[1], "beyond the end of the memory"
    return ndarray(view)


class _Device:
    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def use(self) -> None:
        """There is one device."""

    def synchronize(self) -> None:
        """Everything is done already."""


def _function(name: str) -> Any:
    numpy_function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        with np.errstate(all="ignore"):
            result = numpy_function(*_plain(args), **{k: _plain(v) for k, v in kwargs.items()})
        if name == "array_equal":
            result = np.asarray(result)
        if name in WIDENS and result.dtype.name == "bfloat16":
            result = result.astype(np.float32)
        return out if out is not None else _wrap(result, name in KEEPS_ORDER)

    return call


def _make() -> Any:
    m: Any = types.ModuleType("cupy")
    m.__version__ = "stand-in"
    m.ndarray, m.asarray, m.array = ndarray, asarray, _from_host
    m.ascontiguousarray = lambda a, dtype=None: _wrap(_plain(a).astype(dtype or a.dtype, copy=False))
    m.asnumpy = lambda a: a.get() if isinstance(a, ndarray) else np.asarray(a)
    m.cuda = types.SimpleNamespace(
        Device=_Device, is_available=lambda: True, runtime=types.SimpleNamespace(getDeviceCount=lambda: 1)
    )
    m.lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=as_strided))
    for name in FUNCTIONS:
        setattr(m, name, _function(name))
    for name in dir(np):  # NumPy's ufuncs ask the array
        if isinstance(getattr(np, name), np.ufunc) and name not in (*FUNCTIONS, *MISSING):
            setattr(m, name, getattr(np, name))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float16", "float32", "float64"):
        setattr(m, name, getattr(np, name))
    m.pi, m.inf, m.nan, m.newaxis, m.bool_ = np.pi, np.inf, np.nan, None, np.bool_
    return m


module = _make()


@contextlib.contextmanager
def no_waits() -> Any:
    """Within the block, what waits for the device is an error."""
    waits.allowed = False
    try:
        yield
    finally:
        waits.allowed = True
