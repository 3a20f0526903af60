"""Kernels in CUDA C++: the files of ``kernels/gpu/cuda``, compiled by CuPy for the types asked for, and kept."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array, Shape
from dbrdist.kernels.cpu.onednn import Unsupported

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType

C_TYPES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
OPTIONS = ("-std=c++17",)
NULL = 0  # the null pointer as an argument of a kernel; for None CuPy passes an address that is not null
_HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
_THREADS = 256
_BLOCKS = 132 * 16  # as many as a large device holds at once; more elements are worked through in a loop
_OFF_16_BYTES = 15  # bits of an address


def source(file: str) -> str:
    """The text of ``kernels/gpu/cuda/<file>.cu`` with the headers of 16-bit types."""
    with open(os.path.join(os.path.dirname(__file__), "cuda", f"{file}.cu"), encoding="utf-8") as source:
        return _HEADERS + source.read()


def instance(name: str, *parameters: Any) -> str:
    """A template with its arguments: types by dtype, numbers as they are."""
    return f"{name}<{', '.join(str(p) if isinstance(p, (int, str)) else C_TYPES[p.name] for p in parameters)}>"


@functools.cache
def _compiled(device: int, file: str, name: str) -> Callable[..., None]:
    """A kernel of CuPy's: a function of grid, block and arguments."""
    cupy = backend.import_cupy()
    module = cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=(name,))
    kernel: Callable[..., None] = module.get_function(name)
    return kernel


def current_device() -> int:
    """The number of this thread's device."""
    return int(backend.import_cupy().cuda.runtime.getDevice())


def kernel(file: str, name: str, *parameters: Any) -> Callable[..., None]:
    """The kernel ``name`` of a file for these template arguments, on the current device."""
    return _compiled(current_device(), file, instance(name, *parameters))


def over(size: int) -> tuple[tuple[int], tuple[int]]:
    """Grid and block for so many elements."""
    return (min(max(-(-size // _THREADS), 1), _BLOCKS),), (_THREADS,)


def pack(channels: int, most: int = 4) -> int:
    """How many neighbouring channels a thread reads at once: ``most``, 4 or 1."""
    return most if channels % most == 0 else 4 if channels % 4 == 0 else 1


def is_aligned(a: Array) -> bool:
    """Does an array start where 16 bytes can be read at once, and where cuDNN expects it? Slices may not."""
    return not a.data.ptr & _OFF_16_BYTES


def aligned_images(x: Array) -> Callable[[Array], Array]:
    """A function from arrays with the strides of x to channels-last ones that are aligned."""
    if not backend.is_channels_last(x):
        return backend.channels_last
    return lambda x: backend.copy(x) if x.data.ptr & _OFF_16_BYTES else x


def images(shape: Shape, dtype: DType) -> Callable[[], Array]:
    """What makes uninitialised channels-last arrays of a shape, in a third of the time of ``backend.empty``."""
    _n, c, h, w = shape
    item = dtype.itemsize
    strides, num_bytes = (h * w * c * item, item, w * c * item, c * item), prod(shape) * item
    cupy = backend.import_cupy()
    make, alloc = cupy.ndarray, cupy.cuda.alloc
    return lambda: make(shape, dtype, alloc(num_bytes), strides)


def plain(shape: Shape, dtype: DTypeLike) -> Callable[[], Array]:
    """What makes uninitialised arrays in C order."""
    return functools.partial(backend.import_cupy().ndarray, shape, dtype)  # which allocates by itself


def require(*arrays: Array | None) -> None:
    """Raise Unsupported for arrays that are not CuPy's, empty, of unknown types or of another device; None passes."""
    for a in arrays:
        if a is not None:
            if not backend.is_on_gpu(a) or not a.size or a.dtype.name not in C_TYPES:
                raise Unsupported("other arrays, empty ones or other types")
            require_here(a)


def require_here(*arrays: Array | None) -> None:
    """Raise Unsupported for memory of the host or of another device than this thread's."""
    for a in arrays:
        if a is not None:
            place = backend.place_of(a)
            if place is None or place[0] != place[1]:
                raise Unsupported("memory of another device")
