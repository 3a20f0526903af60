"""A module that stands for CuPy where there is no GPU: what CuPy refuses, it refuses.

Its arrays lie in host memory but are no NumPy arrays. They do not mix with NumPy arrays or with those of another device
(there are two, and each array knows its own), have only CuPy's functions and methods with CuPy's arguments, allocate in
C order, give 0-d arrays where NumPy gives scalars, and count what waits for the device. Fresh memory holds NaN, and
integer arrays as indices wrap around. It shows that code is written for CuPy, not that CuPy computes the same numbers.
The rules were read in the sources of CuPy 14.2; ``test_stand_in.py`` compares names and arguments with CuPy where that
can be imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import types
import weakref
from typing import Any, NamedTuple

import clocks
import numpy as np
from numpy.lib.array_utils import byte_bounds

NUM_DEVICES = 2
_REDUCTION = "axis=None, dtype=None, out=None, keepdims=False"
_EXTREMUM = "axis=None, out=None, keepdims=False"
_LIKE = "a, dtype=None, order='K', subok=None, shape=None"
# Functions of the module that take and give arrays, with CuPy's arguments.
FUNCTIONS = {
    "all": f"a, {_EXTREMUM}", "any": f"a, {_EXTREMUM}", "max": f"a, {_EXTREMUM}", "min": f"a, {_EXTREMUM}",
    "argmax": f"a, {_REDUCTION}", "argmin": f"a, {_REDUCTION}", "argsort": "a, axis=-1, kind=None",
    "sum": f"a, {_REDUCTION}", "mean": f"a, {_REDUCTION}", "prod": f"a, {_REDUCTION}",
    "std": "a, axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "percentile": "a, q, axis=None, out=None, overwrite_input=False, method='linear', keepdims=False, *,"
    " interpolation=None",
    "count_nonzero": "a, axis=None", "bincount": "x, weights=None, minlength=None",
    "tri": "N, M=None, k=0, dtype=float", "tril": "m, k=0", "triu": "m, k=0",
    "arange": "start, stop=None, step=1, dtype=None",
    "linspace": "start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0",
    "array_equal": "a1, a2, equal_nan=False", "broadcast_to": "array, shape", "clip": "a, a_min, a_max, out=None",
    "concatenate": "tup, axis=0, out=None, *, dtype=None, casting='same_kind'",
    "stack": "tup, axis=0, out=None, *, dtype=None, casting='same_kind'",
    "dot": "a, b, out=None", "matmul": "a, b, /, out=None, *, casting='same_kind', dtype=None",
    "empty": "shape, dtype=float, order='C'", "ones": "shape, dtype=float, order='C'",
    "zeros": "shape, dtype=float, order='C'", "full": "shape, fill_value, dtype=None, order='C'",
    "empty_like": _LIKE.replace("a,", "prototype,"), "ones_like": _LIKE, "zeros_like": _LIKE,
    "full_like": _LIKE.replace("a,", "a, fill_value,"), "eye": "N, M=None, k=0, dtype=float, order='C'",
    "copyto": "dst, src, casting='same_kind', where=None",
    "expand_dims": "a, axis", "transpose": "a, axes=None", "where": "condition, x=None, y=None",
    "isfinite": "x, /, out=None, *, casting='same_kind', dtype=None",
    "isnan": "x, /, out=None, *, casting='same_kind', dtype=None",
}  # fmt: skip
METHODS = {
    "all": _EXTREMUM, "any": _EXTREMUM, "max": _EXTREMUM, "min": _EXTREMUM,
    "argmax": "axis=None, out=None, dtype=None, keepdims=False",
    "argmin": "axis=None, out=None, dtype=None, keepdims=False",
    "sum": _REDUCTION, "mean": _REDUCTION, "prod": _REDUCTION, "cumsum": "axis=None, dtype=None, out=None",
    "cumprod": "axis=None, dtype=None, out=None", "diagonal": "offset=0, axis1=0, axis2=1",
    "std": "axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "var": "axis=None, dtype=None, out=None, ddof=0, keepdims=False",
    "argsort": "axis=-1, kind=None", "clip": "min=None, max=None, out=None", "copy": "order='C'", "fill": "value",
    "ravel": "order='C'", "repeat": "repeats, axis=None", "reshape": "*shape, order='C', copy=None",
    "squeeze": "axis=None", "swapaxes": "axis1, axis2", "take": "indices, axis=None, out=None", "transpose": "*axes",
    "view": "dtype=None, type=None",
}  # fmt: skip
SIGNATURES = {name: inspect.signature(eval(f"lambda {text}: None")) for name, text in FUNCTIONS.items()}
METHOD_SIGNATURES = {name: inspect.signature(eval(f"lambda {text}: None")) for name, text in METHODS.items()}
ATTRIBUTES = ("dtype", "itemsize", "nbytes", "ndim", "shape", "size", "strides")
VIEWS = ("broadcast_to", "ravel", "reshape", "squeeze", "swapaxes", "transpose", "view", "expand_dims", "diagonal")
KEEPS_ORDER = (*VIEWS, "copy")
# The ufuncs with ``at`` and those with ``reduce``; the arguments of a call.
SCATTERS = ("add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
REDUCES = ("add", "multiply")
UFUNC_ARGUMENTS = {"out", "dtype", "casting"}
# NumPy's ufuncs that CuPy 14.2 lacks.
MISSING = ("bitwise_count", "float_power", "isnat", "matvec", "spacing", "vecdot", "vecmat")
WIDENS = ("where", "clip")  # for want of a loop for bfloat16
# Functions of cupyx.scipy.special.
SPECIAL = (
    "digamma", "erf", "erfc", "erfcinv", "erfcx", "erfinv", "gamma", "gammaln", "log_ndtr", "ndtri", "zeta",
)  # fmt: skip
COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")


class Waits:
    """How often the host waited for the device."""

    def __init__(self) -> None:
        self.count = 0
        self.allowed = True

    def declare(self) -> None:
        """Called by what waits."""
        if clocks.capture is not None:
            clocks.capture.refuse("a read or a wait of the host")
        if not self.allowed:
            raise RuntimeError("the host waits for the device here")
        self.count += 1


waits = Waits()


class OutOfMemoryError(MemoryError):
    """CuPy's."""

    def __init__(self, size: int, total: int) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


OutOfMemoryError.__module__ = "cupy.cuda.memory"


class Peers:
    """Whether devices reach each other's memory, and then how often a kernel did so: CuPy warns of it each time."""

    are_there = False
    accesses = 0


peers = Peers()


class Flags(NamedTuple):
    """What CuPy's arrays say of their memory; nothing of it can be set."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


def _fresh(a: np.ndarray) -> np.ndarray:
    """Fills memory that nobody has written yet with what shows."""
    if a.dtype.kind in "iu":
        a.fill(np.iinfo(a.dtype).max)
    elif a.dtype.kind != "b":
        a.fill(np.nan)
    return a


def _wrap(a: Any, keeps_order: bool = False, device: int | None = None) -> Any:
    if isinstance(a, (tuple, list)):
        return type(a)(_wrap(v, keeps_order, device) for v in a)
    if not isinstance(a, (np.ndarray, np.generic)):
        return a
    a = np.asarray(a)
    return ndarray(a if keeps_order or a.flags.c_contiguous else np.ascontiguousarray(a), device)


def _view(a: np.ndarray, of: ndarray) -> ndarray:
    """An array over memory of another one."""
    return ndarray(a, of.device_id, of.lease, of if of.base is None else of.base)


def _reads(*xs: Any) -> list[Any]:
    """The memory of all device arrays among operands."""
    found = []
    for x in xs:
        if isinstance(x, ndarray):
            found.append(x.lease if x.base is None or not x.host.size else _part_of(x))
        elif isinstance(x, (tuple, list)):
            found += _reads(*x)
    return found


def _part_of(x: ndarray) -> clocks.Part:
    """The bytes of a view."""
    first, last = byte_bounds(x.host)
    start = byte_bounds(x.base.host)[0] if x.base.host.size else first
    return clocks.Part(x.lease, first - start, last - start)


def _work(out: Any, *inputs: Any, again: Any = None) -> None:
    """A kernel of the current stream reads the inputs and writes ``out``; ``again`` does it once more."""
    clocks.touch(_reads(*inputs), _reads(out))
    if clocks.capture is not None:
        assert again is not None, "the stand-in cannot replay this"
        clocks.capture.add("CuPy's", (out, inputs), again)


def _into(made: Any, compute: Any) -> Any:
    """A function that computes once more, into memory of ``made``."""
    if isinstance(made, (tuple, list)):
        hosts = [m.host for m in made]
        return lambda: [np.copyto(host, value, "unsafe") for host, value in zip(hosts, compute())]
    host = made.host
    return lambda: np.copyto(host, compute(), "unsafe")


def _refuse_cublas() -> None:
    if clocks.capture is not None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")


def _plain(x: Any) -> Any:
    """The host's array behind a device array; those of NumPy and of other devices are refused, as by CuPy's kernels."""
    if isinstance(x, ndarray):
        if x.device_id != clocks.current_device():
            if not peers.are_there:
                raise ValueError(
                    f"Array device must be same as the current device: array device = {x.device_id} while current = "
                    f"{clocks.current_device()}"
                )
            peers.accesses += 1
        return x.host
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, (tuple, list)):
        return type(x)(map(_plain, x))
    return x


def _index(slices: Any, shape: tuple[int, ...]) -> Any:
    """Indices may be lists and NumPy arrays, too; arrays of integers wrap around, as CuPy looks at no bounds."""
    is_tuple = isinstance(slices, tuple)
    parts = [p.host if isinstance(p, ndarray) else p for p in (slices if is_tuple else (slices,))]
    axes = sum(np.ndim(p) if _is_mask(p) else p is not None and p is not Ellipsis for p in parts)
    plain, axis = [], 0
    for p in parts:
        if p is Ellipsis:
            axis += len(shape) - axes
        elif p is not None:
            if isinstance(p, (list, np.ndarray)) and np.ndim(p) and not _is_mask(p) and np.size(p):
                p = np.asarray(p) % max(shape[axis], 1)
            axis += np.ndim(p) if _is_mask(p) else 1
        plain.append(p)
    return tuple(plain) if is_tuple else plain[0]


def _is_mask(p: Any) -> bool:
    return isinstance(p, (np.ndarray, list)) and np.asarray(p).dtype == bool


def _masks(slices: Any) -> bool:
    parts = slices if isinstance(slices, tuple) else (slices,)
    return any(_is_mask(p.host if isinstance(p, ndarray) else p) for p in parts)


_places: dict[int, tuple[int, Any]] = {}  # where memory begins, its bytes, and who holds it


def part_at(address: int, num_bytes: int) -> clocks.Part | None:
    """These bytes of what holds the memory; None if nobody does."""
    for start, (size, held) in reversed(_places.items()):
        if start <= address < start + size and held() is not None:
            return clocks.Part(held(), address - start, address - start + num_bytes)
    return None


class ndarray:
    """An array on the device."""

    def __init__(
        self, host: np.ndarray, device: int | None = None, lease: Any = None, base: ndarray | None = None
    ) -> None:
        self.host, self.base = host, base
        self.device_id = clocks.current_device() if device is None else device
        self.lease = clocks.allocate(host.nbytes) if lease is None else lease
        if lease is None and host.nbytes:
            _places[host.__array_interface__["data"][0]] = host.nbytes, weakref.ref(self.lease)

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return getattr(self.host, name)
        if name not in METHODS:
            raise AttributeError(f"CuPy's ndarray has no {name!r}, or tests/gpu/stand_in.py does not know it")
        method = getattr(self.host, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            METHOD_SIGNATURES[name].bind(*args, **kwargs)
            out = kwargs.get("out")
            if name in VIEWS:
                seen = method(*args, **kwargs)
                if np.may_share_memory(seen, self.host):
                    return _view(seen, self)
                made = ndarray(seen, self.device_id)
                _work(made, self, again=_into(made, lambda: method(*args, **kwargs)))
                return made
            if name == "take":
                kwargs["mode"] = "wrap"
            if name != "copy":  # which brings the array to the current device
                _plain(self)
            plain, named = _plain(args), {k: _plain(v) for k, v in kwargs.items()}
            result = method(*plain, **named)
            made = self if name == "fill" else out if out is not None else _wrap(result, name in KEEPS_ORDER)
            again = _again_of(made if result is not None and out is None else None, method, plain, named)
            _work(made, self, args, again=again)
            return None if name == "fill" else made

        return call

    @property
    def real(self) -> ndarray:
        return _view(self.host.real, self)

    @property
    def imag(self) -> ndarray:
        return _view(self.host.imag, self)

    @property
    def T(self) -> ndarray:
        return _view(self.host.T, self)

    @property
    def flags(self) -> Flags:
        flags = self.host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, flags.owndata)

    @property
    def device(self) -> _Device:
        return _Device(self.device_id)

    @property
    def data(self) -> Any:
        """The pointer to the memory."""
        return types.SimpleNamespace(ptr=self.host.ctypes.data, device_id=self.device_id, mem=self.lease)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        assert casting is None and subok is None, "CuPy supports neither casting nor subok"
        if not copy and self.host.dtype == dtype:
            return self
        host = _plain(self)
        made = ndarray(host.astype(dtype, order))
        _work(made, self, again=_into(made, lambda: host.astype(dtype, order)))
        return made

    def dot(self, b: ndarray, out: ndarray | None = None) -> ndarray:
        if not isinstance(b, ndarray):
            raise TypeError(f"Argument 'b' has incorrect type (expected an array on the device, got {type(b)})")
        _refuse_cublas()
        if out is None:
            made = _wrap(_plain(self).dot(_plain(b)))
            _work(made, self, b)
            return made
        if out.dtype != np.result_type(self.dtype, b.dtype) or not out.host.flags.c_contiguous:
            raise ValueError("Not supported dtype combination.")
        _plain(self).dot(_plain(b), _plain(out))
        _work(out, self, b)
        return out

    # what waits for the device

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        if blocking or clocks.capture is not None:
            waits.declare()
        queue = clocks.current_stream(self.device_id) if stream is None else stream
        clocks.touch([self.lease], [], queue)
        if blocking:
            queue.synchronize()
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
        if clocks.capture is not None:
            clocks.capture.refuse("a copy of the host's memory")
        clocks.touch([], [self.lease], clocks.current_stream(self.device_id) if stream is None else stream)
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
        with _Device(self.device_id):
            return self.copy()

    def __copy__(self) -> ndarray:
        return self.__deepcopy__({})

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
        index = _index(slices, self.shape)
        index = index if isinstance(index, tuple) else (index,)
        is_open = any(i is Ellipsis for i in index)
        a = self.host[index if is_open else (*index, ...)]  # a view, where NumPy would make a number of one element
        if isinstance(slices, (ndarray, np.ndarray, list)) or (
            isinstance(slices, tuple) and any(isinstance(s, (ndarray, np.ndarray, list)) for s in slices)
        ):
            with _Device(self.device_id):  # CuPy gathers on the current device
                made, host = ndarray(a), self.host

                def gather() -> Any:
                    at = _index(slices, host.shape)  # with the indices that are there now
                    at = at if isinstance(at, tuple) else (at,)
                    return host[at if is_open else (*at, ...)]

                _work(made, self, slices, again=_into(made, gather))
            return made
        return _view(a, self)

    def __setitem__(self, slices: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            is_whole = isinstance(slices, slice) and slices == slice(None)
            if not is_whole or value.shape != self.shape or value.dtype != self.dtype:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if _masks(slices):
            waits.declare()  # whatever the value is
        host, at = _plain(self), _index(slices, self.shape)
        given = _plain(value) if isinstance(value, ndarray) else value
        if isinstance(given, np.ndarray) and given is value and clocks.capture is not None:
            clocks.capture.refuse("a copy of the host's memory")
        host[at] = given
        _work(self, value, slices, again=lambda: host.__setitem__(_index(slices, host.shape), given))

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method not in ("__call__", "at", "reduce", "outer") or ufunc.__name__ in MISSING:
            return NotImplemented
        if ufunc.__name__ in COMPARISONS:
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs)
        if method == "at":
            if ufunc.__name__ not in SCATTERS:
                raise NotImplementedError(f"`{ufunc.__name__}.at` is not supported yet")
            host, values = _plain(inputs[0]), [_plain(v) for v in inputs[2:]]

            def scatter() -> None:
                ufunc.at(host, _index(inputs[1], host.shape), *values)

            scatter()
            _work(inputs[0], inputs, again=scatter)
            return None
        if method == "reduce" and ufunc.__name__ not in REDUCES:
            raise NotImplementedError(f"`{ufunc.__name__}.reduce` is not supported yet")
        unknown = set(kwargs) - (UFUNC_ARGUMENTS | ({"axis", "keepdims"} if method == "reduce" else set()))
        if unknown:
            raise TypeError(f"Wrong arguments {sorted(unknown)}")
        out = kwargs.pop("out", None)
        plain = [_plain(x) for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(_plain(o) for o in out)
        if ufunc is np.matmul:
            _refuse_cublas()
        run = getattr(ufunc, method)
        with np.errstate(all="ignore"):
            result = run(*plain, **kwargs)
        made = out[0] if out is not None else _wrap(result)
        _work(made, inputs, again=_again_of(None if out is not None else made, run, plain, kwargs))
        return made

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        mine = globals()["module"].__dict__.get(func.__name__)
        return NotImplemented if mine is None else mine(*args, **kwargs)


def _again_of(made: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """What calls a function of the host's arrays once more; ``made`` takes the result, unless it is None."""
    if clocks.capture is None:
        return None

    def compute() -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return compute if made is None else _into(made, compute)


def _operator(name: str, ufunc: Any) -> None:
    def forward(self: Any, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, complex, bool)):
            return NotImplemented
        return ufunc(self, other)

    def backward(self: Any, other: Any) -> Any:
        if not isinstance(other, (ndarray, np.ndarray, np.generic, int, float, complex, bool)):
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
    if clocks.capture is not None:
        _pinned[0](np.asarray(a, dtype).nbytes)  # CuPy copies from there
        clocks.capture.refuse("a copy of the host's memory")
    made = ndarray(np.array(a, dtype, copy=True, order="C"))
    _work(made)
    return made


def asarray(a: Any, dtype: Any = None, order: Any = None) -> ndarray:
    """To the device; nothing is copied where ``a`` is there and has that type."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    if isinstance(a, (tuple, list)) and any(isinstance(v, ndarray) for v in a):
        hosts = [v.host for v in a]
        made = _wrap(np.asarray(hosts, dtype))
        _work(made, a, again=_into(made, lambda: np.asarray(hosts, dtype)))
        return made
    return _from_host(a, dtype)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    """As CuPy's: the array itself where it is in C order, else a copy."""
    dtype = a.dtype if dtype is None else dtype
    return a if _plain(a).flags.c_contiguous and a.dtype == dtype else a.astype(dtype, "C")


def as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    """As CuPy's, within the memory that belongs to ``x``."""
    view = np.lib.stride_tricks.as_strided(x.host, shape, strides)
    assert view.size == 0 or byte_bounds(view)[1] <= byte_bounds(x.host)[1], "beyond the end of the memory"
    return _view(view, x)


class _Device:
    """A device of the machine; as a context, the current one."""

    def __init__(self, id: int | None = None) -> None:
        self.id = clocks.current_device() if id is None else id
        if not 0 <= self.id < NUM_DEVICES:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.before: list[int] = []

    def __enter__(self) -> _Device:
        self.before.append(clocks.current_device())
        clocks.use_device(self.id)
        return self

    def __exit__(self, *exc: object) -> None:
        clocks.use_device(self.before.pop())

    def use(self) -> None:
        """Make it the thread's current device."""
        clocks.use_device(self.id)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        for stream in clocks._streams.get(self.id, ()):
            stream.synchronize()


def _function(name: str) -> Any:
    numpy_function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        SIGNATURES[name].bind(*args, **kwargs)
        out = kwargs.get("out")
        if name in VIEWS:
            return _view(numpy_function(args[0].host, *args[1:], **kwargs), args[0])
        if name in ("dot", "matmul"):
            _refuse_cublas()
        plain, named = _plain(args), {k: _plain(v) for k, v in kwargs.items()}
        with np.errstate(all="ignore"):
            result = numpy_function(*plain, **named)
        if name in ("empty", "empty_like"):
            _fresh(result)
        if name == "array_equal":
            result = np.asarray(result)
        if name in WIDENS and result.dtype.name == "bfloat16":
            result = result.astype(np.float32)
        made = args[0] if name == "copyto" else out if out is not None else _wrap(result, name in KEEPS_ORDER)
        if name not in ("empty", "empty_like"):
            again = _again_of(made if result is not None and out is None else None, numpy_function, plain, named)
            _work(made, args, list(kwargs.values()), again=again)
        return None if name == "copyto" else made

    return call


def einsum(*operands: Any, out: Any = None, optimize: Any = False) -> ndarray:
    """The sum of products; as with CuPy, a view where nothing is summed."""
    _refuse_cublas()
    made = _wrap(np.einsum(*map(_plain, operands), out=_plain(out), optimize=optimize), True)
    _work(made if out is None else out, operands)
    return made


def _of_matrices(function: Any) -> Any:
    """A function of one array, of types that the libraries of CUDA have."""

    def call(a: ndarray) -> ndarray:
        if a.dtype.char not in "fdFD":
            raise TypeError(f"array type {a.dtype} is unsupported in linalg and fft")
        _refuse_cublas()
        result = function(_plain(a))
        return tuple(map(_wrap, result)) if isinstance(result, tuple) else _wrap(result)

    return call


class _Stream(clocks.Stream):
    def synchronize(self) -> None:
        waits.declare()
        super().synchronize()


class _Event(clocks.Event):
    def synchronize(self) -> None:
        waits.declare()
        super().synchronize()


def _stream_of(device_id: int | None) -> clocks.Stream:
    device = clocks.current_device() if device_id is None or device_id < 0 else device_id
    if device not in clocks._legacy:
        clocks._legacy[device] = _Stream(null=True, device=device)
    return clocks.current_stream(device)


ranges: list[str] = []  # what was marked for a profiler; empty where a range ends


class PinnedMemory(bytearray):
    """CuPy's class; a pool's memory knows the pool."""

    pool: Any = None

    @property
    def mem(self) -> PinnedMemory:
        return self


class PinnedMemoryPool:
    """CuPy's class."""

    num_given = 0

    def malloc(self, num_bytes: int) -> PinnedMemory:
        memory = PinnedMemory(num_bytes)
        memory.pool = weakref.ref(self)
        self.num_given += 1
        return memory


_pinned_pool = PinnedMemoryPool()
_pinned: list[Any] = [_pinned_pool.malloc]  # what makes pinned memory


def _make() -> Any:
    m: Any = types.ModuleType("cupy")
    m.__version__ = "stand-in"
    m.ndarray, m.asarray, m.array = ndarray, asarray, _from_host
    m.ascontiguousarray = ascontiguousarray
    m.asnumpy = lambda a: a.get() if isinstance(a, ndarray) else np.asarray(a)
    # What lies in host memory takes none of a device.
    m.get_default_memory_pool = lambda: types.SimpleNamespace(used_bytes=lambda: 0, total_bytes=lambda: 0)
    m.get_default_pinned_memory_pool = lambda: _pinned_pool
    m.cuda = types.SimpleNamespace(
        Device=_Device,
        is_available=lambda: True,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: NUM_DEVICES,
            getDevice=clocks.current_device,
            runtimeGetVersion=lambda: 13000,
            memGetInfo=lambda: (80_000_000_000, 80_000_000_000),
            getDeviceProperties=lambda number: {"name": b"stand-in", "totalGlobalMem": 80_000_000_000},
            deviceGetPCIBusId=lambda number: f"{os.environ.get('STAND_IN_BUS', '0000')}:{number}",
        ),
        alloc_pinned_memory=lambda num_bytes: _pinned[0](num_bytes),
        set_pinned_memory_allocator=lambda allocator=None: _pinned.__setitem__(0, allocator or PinnedMemory),
        PinnedMemoryPool=PinnedMemoryPool,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=lambda memory, offset: memory,
        get_current_stream=lambda device_id=None: _stream_of(device_id),
        nvtx=types.SimpleNamespace(
            RangePush=lambda message: ranges.append(message), RangePop=lambda: ranges.append("")
        ),
        Stream=_Stream,
        Event=_Event,
        get_elapsed_time=clocks.get_elapsed_time,
    )
    m.einsum = einsum
    m.linalg = types.SimpleNamespace(
        **{n: _of_matrices(getattr(np.linalg, n)) for n in ("inv", "det", "cholesky", "eigh")}
    )
    m.fft = types.SimpleNamespace(**{n: _of_matrices(getattr(np.fft, n)) for n in ("fft", "ifft")})
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


def _make_special() -> Any:
    """cupyx.scipy.special, by SciPy; without functions where SciPy is missing."""
    m: Any = types.ModuleType("cupyx.scipy.special")
    for name in SPECIAL if importlib.util.find_spec("scipy") else ():
        setattr(m, name, _special(name))
    return m


def _special(name: str) -> Any:
    def call(*xs: Any) -> Any:
        from scipy import special

        if not any(isinstance(x, ndarray) for x in xs):
            raise TypeError(f"{name} takes arrays of this module")
        plain, function = [_plain(x) for x in xs], getattr(special, name)
        made = _wrap(function(*plain))
        _work(made, xs, again=_again_of(made, function, plain, {}))
        return made

    return call


module = _make()
cupyx_scipy: Any = types.ModuleType("cupyx.scipy")
cupyx_scipy.special = _make_special()


@contextlib.contextmanager
def no_waits() -> Any:
    """Within the block, what waits for the device is an error."""
    waits.allowed = False
    try:
        yield
    finally:
        waits.allowed = True
