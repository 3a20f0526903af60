"""Kernels in CUDA C++: the files of ``kernels/cuda``, compiled by CuPy for the types they are asked for, and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbrdist.core import backend
from dbrdist.kernels.onednn import Unsupported

Array = Any

C_TYPES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
OPTIONS = ("-std=c++17",)
_HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
_THREADS = 256
_BLOCKS = 132 * 16  # as many as a large device holds at once; more elements are worked through in a loop


def source(file: str) -> str:
    """The text of ``kernels/cuda/<file>.cu`` with the headers of 16-bit types."""
    return _HEADERS + (Path(__file__).parent / "cuda" / f"{file}.cu").read_text()


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


def kernel(file: str, name: str, *parameters: Any) -> Callable[..., None]:
    """The kernel ``name`` of a file for these template arguments, on the current device."""
    return _compiled(int(backend.import_cupy().cuda.runtime.getDevice()), file, instance(name, *parameters))


def over(size: int) -> tuple[tuple[int], tuple[int]]:
    """Grid and block for so many elements."""
    return (min(max(-(-size // _THREADS), 1), _BLOCKS),), (_THREADS,)


def require(*arrays: Any) -> None:
    """Raise Unsupported unless these are CuPy arrays that are not empty, of types that the kernels know."""
    for a in arrays:
        if not backend.is_on_gpu(a) or not a.size or a.dtype.name not in C_TYPES:
            raise Unsupported("other arrays, empty ones or other types")
