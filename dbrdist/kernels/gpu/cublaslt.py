"""Products of matrices by cuBLASLt, through ctypes: those of 16-bit types, and all of captured steps.

CuPy 14 raises NotImplementedError for each call of cuBLAS while a stream is captured, widens stacks of 16-bit matrices
to float32 and rounds 16-bit products before they can be stored in float32. cuBLASLt takes the stream with each call, so
that nothing has to be set, stores what it sums in float32, and adds up the rows of an operand on the way; its algorithm
is chosen once for each kind of product, before the capture.

cuBLASLt's matrices are stored by columns. The product Y = A B of matrices that are stored by rows is asked for as
Y^T = B^T A^T, where each stored matrix is the transpose of what it is here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array, CudaPointer, DType
from dbrdist.errors import CaptureError
from dbrdist.kernels.unsupported import Unsupported

_NAMES = "libcublasLt.so.13", "libcublasLt.so.12"
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
_SUMS_IN_FLOAT32, _SUMS_IN_FLOAT64 = 68, 70  # cublasComputeType_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 4, 7, 8, 26  # cublasLtMatmulDescAttributes_t
_SUMS_OF_B = 512  # cublasLtEpilogue_t: the sums over the axis that is multiplied away, of the second operand
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
_WORKSPACE_LIMIT, _ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; those of A, B, C and D
_MOST_ALIGNED = 256  # bytes: what cuBLASLt expects of each address where it is not told
_WORKSPACE_BYTES = 32 << 20
_FUNCTIONS = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: the algorithm, the workspace that it takes, and whether it can be used."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def _names() -> list[str]:
    """What the linker is asked for: first the library of the CUDA that CuPy is for, as the driver may be too old."""
    version: int = backend.import_cupy().cuda.runtime.runtimeGetVersion()
    return sorted(_NAMES, key=lambda name: not name.endswith(f".{version // 1000}"))


def _load() -> ctypes.CDLL:
    """The library, from the packages of CUDA or from where the linker looks."""
    names = _names()
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        names.insert(0, pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path)
    except Exception:  # no such package, or whatever it raises where there is no library
        pass
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported(f"cuBLASLt was not found ({', '.join(_NAMES)}); install nvidia-cublas")


@functools.cache
def _library() -> ctypes.CDLL:
    library = _load()
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:  # where nothing has been begun yet, CuPy may do it
        kind = RuntimeError if name == "cublasLtMatmul" else Unsupported
        raise kind(f"{name}: cuBLASLt returned status {status}")


def _set(setter: str, what: Any, attribute: int, value: Any) -> None:
    _call(setter, what, attribute, byref(value), sizeof(value))


class _Handles(threading.local):
    """cuBLASLt's handles of a thread by device, and its products that are planned."""

    def __init__(self) -> None:
        self.handles: dict[int, c_void_p] = {}
        self.products: dict[Any, _Product | Unsupported] = {}  # or why there is no algorithm

    def handle(self, device: int) -> c_void_p:
        """That of a device, which is the current one."""
        found = self.handles.get(device)
        if found is None:
            found = c_void_p()
            _call("cublasLtCreate", byref(found))
            self.handles[device] = found
        return found


_local = _Handles()


class _Operand(NamedTuple):
    """A matrix as cuBLASLt is told of it: whether it is stored by columns, its leading dimension, its stack."""

    is_by_columns: bool
    leading: int
    num_stacked: int
    stride: int


def _operand(a: Array) -> _Operand | None:
    """Of (..., M, N) in memory without a copy; None where that cannot be."""
    item, (rows, columns) = a.itemsize, a.shape[-2:]
    along, across = a.strides[-1] // item, a.strides[-2] // item
    if (along == 1 or columns == 1) and (across >= columns or rows == 1):
        is_by_columns, leading = False, max(across, columns)
    elif (across == 1 or rows == 1) and (along >= rows or columns == 1):
        is_by_columns, leading = True, max(along, rows)
    else:
        return None
    if a.ndim == 2:
        return _Operand(is_by_columns, leading, 1, 0)
    stride = a.strides[-3] // item
    for k in range(a.ndim - 3):
        if a.shape[k] > 1 and a.strides[k] != math.prod(a.shape[k + 1 : -2]) * stride * item:
            return None
    return _Operand(is_by_columns, leading, math.prod(a.shape[:-2]), stride)


class _Product:
    """A product of given types, shapes, layouts and alignments: what describes it, and the algorithm for it."""

    def __init__(
        self, device: int, dtype: DType, sizes: tuple[int, int, int], a: _Operand, b: _Operand, y: _Operand,
        alignments: tuple[int, int, int], made: DType, factor: float, sums: DType | None,
    ) -> None:  # fmt: skip
        m, k, n = sizes
        self._handle = _local.handle(device)
        self._description = c_void_p()
        wide = dtype.itemsize == 8
        adds_in, kind = (_SUMS_IN_FLOAT64, 1) if wide else (_SUMS_IN_FLOAT32, 0)
        _call("cublasLtMatmulDescCreate", byref(self._description), adds_in, kind)
        for attribute, operand in ((_TRANSPOSE_A, b), (_TRANSPOSE_B, a)):
            _set("cublasLtMatmulDescSetAttribute", self._description, attribute, c_int32(operand.is_by_columns))
        if sums is not None:
            _set("cublasLtMatmulDescSetAttribute", self._description, _EPILOGUE, c_uint32(_SUMS_OF_B))
            _set("cublasLtMatmulDescSetAttribute", self._description, _BIAS_TYPE, c_int32(_TYPES[sums.name]))
        stacked = y.num_stacked
        self._layouts = [
            _layout(of, *sizes, x, stacked)
            for of, x, sizes in ((dtype, b, (n, k)), (dtype, a, (k, m)), (made, y, (n, m)))
        ]
        number = ctypes.c_double if wide else c_float
        self._factor, self._zero = number(factor), number(0)
        self._algorithm = self._chosen(m, k, n, alignments)
        self.workspace_bytes = int(self._algorithm.workspace_bytes)

    def _chosen(self, m: int, k: int, n: int, alignments: tuple[int, int, int]) -> _Heuristic:
        preference, found, count = c_void_p(), _Heuristic(), c_int()
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        setter = "cublasLtMatmulPreferenceSetAttribute"
        _set(setter, preference, _WORKSPACE_LIMIT, c_uint64(_WORKSPACE_BYTES))
        of_a, of_b, of_y = alignments
        for attribute, alignment in zip(_ALIGNMENTS, (of_b, of_a, of_y, of_y)):
            _set(setter, preference, attribute, c_uint32(alignment))
        b, a, y = self._layouts
        operands = self._handle, self._description, b, a, y, y, preference
        _call("cublasLtMatmulAlgoGetHeuristic", *operands, 1, byref(found), byref(count))
        if not count.value or found.state:
            raise Unsupported(f"cuBLASLt has no algorithm for ({m}, {k}) times ({k}, {n})")
        return found

    def run(self, a: int, b: int, y: int, workspace: int, stream: int, sums: int = 0) -> None:
        """The product of what is at these addresses, on a stream."""
        of_b, of_a, of_y = self._layouts
        if sums:
            _set("cublasLtMatmulDescSetAttribute", self._description, _BIAS_POINTER, c_uint64(sums))
        _call(
            "cublasLtMatmul", self._handle, self._description, byref(self._factor), b, of_b, a, of_a,
            byref(self._zero), y, of_y, y, of_y, byref(self._algorithm), workspace, self.workspace_bytes, stream,
        )  # fmt: skip


def _layout(dtype: DType, rows: int, columns: int, x: _Operand, num_stacked: int) -> c_void_p:
    """A matrix (rows, columns) by columns; or its transpose, where that is what is stored so."""
    made = c_void_p()
    size = (columns, rows) if x.is_by_columns else (rows, columns)
    _call("cublasLtMatrixLayoutCreate", byref(made), _TYPES[dtype.name], *size, x.leading)
    if num_stacked > 1:
        stride = x.stride if x.num_stacked > 1 else 0
        _set("cublasLtMatrixLayoutSetAttribute", made, _BATCH_COUNT, c_int32(num_stacked))
        _set("cublasLtMatrixLayoutSetAttribute", made, _BATCH_STRIDE, c_int64(stride))
    return made


@functools.cache
def is_there() -> bool:
    """Whether products of eager steps may ask for it; looked up once."""
    return why_not() is None


def why_not() -> str | None:
    """Why it cannot be used here, or None."""
    try:
        _library()
    except Unsupported as e:
        return str(e)
    return None


def serve(a: Array, b: Array, out: Array | None = None, factor: float = 1.0) -> Array:
    """:func:`product`; what cuBLASLt lacks is done by CuPy, and refused in a capture."""
    try:
        return product(a, b, out, factor)
    except Unsupported as e:
        if backend.capturing.is_on:
            raise CaptureError(str(e)) from e
        if out is None or out.dtype == a.dtype:
            y = backend.get_array_module(a).matmul(a, b, out=out)
            if factor != 1:
                y *= factor
            return y
        out[...] = backend.get_array_module(a).matmul(a, b) * factor
        return out


def product(
    a: Array, b: Array, out: Array | None = None, factor: float = 1.0, sums: Array | None = None
) -> Array:  # fmt: skip
    """a b for matrices or stacks of them of one type, as ``numpy.matmul``; sums run in float32, or in float64.

    ``out`` takes the result, for two matrices, in its type or, of 16-bit ones, in float32. The result is multiplied by
    ``factor``. ``sums`` (M,), of two matrices a (M, K) and b, takes the sum of each row of a.
    """
    if a.dtype != b.dtype or a.dtype.name not in _TYPES or min(a.ndim, b.ndim) < 2 or not (a.size and b.size):
        raise Unsupported(f"products of {a.dtype} {a.shape} and {b.dtype} {b.shape} by cuBLASLt")
    lead = _lead(a, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    y = out if out is not None and _is_made(a.dtype, out.dtype) else None
    if y is None:
        y = backend.get_array_module(a).empty((*lead, m, n), a.dtype)
    a, of_a = _as_operand(a, lead)
    b, of_b = _as_operand(b, lead)
    of_y = _operand(y)
    if of_y is None or of_y.is_by_columns or (sums is not None and (sums.shape != (m,) or not sums.flags.c_contiguous)):
        raise Unsupported("a result that is not stored by rows")
    cuda = backend.import_cupy().cuda
    device = int(cuda.runtime.getDevice())
    alignments = _alignment(a, of_a), _alignment(b, of_b), _alignment(y, of_y, 0 if sums is None else sums.data.ptr)
    kinds = y.dtype, factor, None if sums is None else sums.dtype
    key = device, a.dtype, m, k, n, of_a, of_b, of_y, alignments, kinds
    planned = _local.products.get(key)
    if type(planned) is not _Product:
        planned = _planned(key, device, a.dtype, (m, k, n), of_a, of_b, of_y, alignments, *kinds)
    room = cuda.alloc(planned.workspace_bytes) if planned.workspace_bytes else None
    _run(planned, a, b, y, room, cuda.get_current_stream().ptr, sums)
    if out is not None and out is not y:
        out[...] = y
        return out
    return y


def _is_made(dtype: DType, made: DType) -> bool:
    """Whether a product of a type is stored in another one as it is made."""
    return dtype == made or (dtype.itemsize == 2 and made == np.float32)


def _planned(key: Any, *description: Any) -> _Product:
    """What is planned once; where cuBLASLt has no algorithm, its refusal is repeated without asking again."""
    found = _local.products.get(key)
    if found is None:
        try:
            found = _Product(*description)
        except Unsupported as e:
            found = e
        _local.products[key] = found
    if isinstance(found, Unsupported):
        raise Unsupported(str(found))
    return found


def _run(
    planned: _Product, a: Array, b: Array, y: Array, room: CudaPointer | None, stream: int, sums: Array | None
) -> None:
    at = 0 if room is None else room.ptr
    planned.run(a.data.ptr, b.data.ptr, y.data.ptr, at, stream, 0 if sums is None else sums.data.ptr)


def _alignment(a: Array, operand: _Operand, also: int = 0) -> int:
    """The power of two that divides the address of each matrix of a stack, and ``also``; slices may begin anywhere."""
    found: int = a.data.ptr | operand.stride * a.itemsize | _MOST_ALIGNED | also
    return found & -found


def _lead(a: Array, b: Array) -> tuple[int, ...]:
    """The axes of the stack."""
    if a.ndim == b.ndim == 2:
        return ()
    return np.broadcast_shapes(a.shape[:-2], b.shape[:-2])


def _as_operand(a: Array, lead: tuple[int, ...]) -> tuple[Array, _Operand]:
    """A matrix or a stack, copied where cuBLASLt cannot take it as it lies."""
    if a.ndim > 2 and a.shape[:-2] != lead and math.prod(a.shape[:-2]) > 1:
        a = backend.get_array_module(a).broadcast_to(a, (*lead, *a.shape[-2:])).copy()
    operand = _operand(a)
    if operand is None:
        a = a.copy()
        operand = _operand(a)
        assert operand is not None
    return a, operand
