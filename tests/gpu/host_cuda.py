"""The kernels of ``kernels/gpu/cuda`` on the host, compiled by g++: formulas, indices, sizes and orders without a GPU.

Arrays are NumPy's, of a class that passes for CuPy's. Nothing is said about memory of several levels, or about speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import host_cudnn
import numpy as np

from dbrdist.core.array import backend, memory
from dbrdist.kernels import keys
from dbrdist.kernels.gpu import cuda_source

HERE = Path(__file__).parent
_folder = tempfile.TemporaryDirectory()
launched = []  # file, name, grid and block of each launch
_one_at_a_time = threading.Lock()  # a file's blocks and threads are variables of the file


class Pointer(int):
    """An address as CuPy has it."""

    device_id = 0
    ptr = property(int)

    def __new__(cls, address, device_id=0):
        pointer = super().__new__(cls, address)
        pointer.device_id = device_id
        return pointer


class ndarray(np.ndarray):
    """An array of NumPy with CuPy's ``data`` and constructor; device 0 is the current one."""

    device_id = 0

    def __new__(cls, shape, dtype=float, memptr=None, strides=None):
        if strides is None:
            return np.full(shape, _unwritten(dtype), dtype).view(cls)
        flat = np.full(max(int(np.prod(shape)), 1), _unwritten(dtype), dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, strides).view(cls)

    def __array_finalize__(self, other):
        self.device_id = getattr(other, "device_id", 0)

    @property
    def data(self):
        return Pointer(self.__array_interface__["data"][0], self.device_id)

    @property
    def device(self):
        return types.SimpleNamespace(id=self.device_id)


ndarray.__module__ = "cupy"


def _unwritten(dtype):
    dtype = np.dtype(dtype)
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.nan


class Memory:
    """What CuPy's pool gives: an address, until it is dropped."""

    def __init__(self, num_bytes):
        self.held = np.empty(num_bytes + 16, np.uint8)
        self.ptr = int(self.held.ctypes.data)


class Device(contextlib.nullcontext):
    """There is one."""

    def use(self): ...


_streams = threading.local()


class Stream:
    """Work on the host waits for nothing; each thread has a current one."""

    def __init__(self, ptr=None, non_blocking=False):
        self.ptr = id(self) if ptr is None else ptr

    def __enter__(self):
        self.outer, _streams.current = getattr(_streams, "current", Stream.of_all), self
        return self

    def __exit__(self, *exc):
        _streams.current = self.outer

    def synchronize(self): ...


Stream.of_all = Stream(0)


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return getattr(np, name)


def _module():
    module = _Module("cupy")
    module.ndarray = ndarray
    module.asarray = lambda a, order="C": np.array(a, order=order).view(ndarray)
    module.empty = lambda shape, dtype=float: ndarray(shape, dtype)
    module.zeros = lambda shape, dtype=float: np.zeros(shape, dtype).view(ndarray)
    module.cuda = types.SimpleNamespace(
        alloc=Memory,
        Stream=Stream,
        get_current_stream=lambda: getattr(_streams, "current", Stream.of_all),
        Device=Device,
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        is_available=lambda: True,
    )
    return module


# What template parameters of the files may be: all instances of a file are compiled at once.
_FLOATS = ["float", "__half", "__nv_bfloat16"]
_VALUES = {
    "typename T": _FLOATS, "typename From": _FLOATS, "typename To": _FLOATS, "typename B": _FLOATS,
    "typename O": _FLOATS, "typename I": ["unsigned char", "int"],
    "typename L": ["int", "long long"], "typename A": ["float"],
    "int V": [1, 4], "int RELU": [0, 1], "int MAX": [0, 1],
}  # fmt: skip
_TEMPLATE = re.compile(r"template <([^>]*)>\n__global__ void (\w+)\(")


def _instances(text):
    """The names of all kernels with their template arguments."""
    for parameters, name in _TEMPLATE.findall(text):
        for values in itertools.product(*[_VALUES[p] for p in parameters.split(", ")]):
            yield f"{name}<{', '.join(map(str, values))}>"


@functools.cache
def _library(file):
    """The compiled file, and which of its functions is which instance."""
    text = cuda_source.source(file).replace(
        "extern __shared__ float shared[];", "float* shared = shared_floats.data();"
    )
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("#include <cuda", "#pragma unroll")))
    names = list(_instances(text))
    calls = "\n".join(f"        case {i}: return launch({n}, ARGUMENTS);" for i, n in enumerate(names))
    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    (folder / "kernel.cpp").write_text(
        f'#include "{HERE / "host_cuda.h"}"\n{text}\n'
        "#define ARGUMENTS grid, block, shared, values, sizes, count\n"
        'extern "C" int run(int which, const unsigned* grid, const unsigned* block, size_t shared, void** values,'
        f" const size_t* sizes, size_t count) {{\n    switch (which) {{\n{calls}\n    }}\n    return -2;\n}}\n"
    )
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-w",
        "kernel.cpp",
        "-o",
        "kernel.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so")).run, names


def compiled(device, file, name):
    """In the place of ``cuda_source._compiled``: a function of grid, block and arguments."""
    run, names = _library(file)
    which = names.index(name)

    def kernel(grid, block, arguments, shared_mem=0):
        assert np.prod(block) in range(32, 1025, 32), f"{name}: blocks of {block} threads, expected whole warps"
        foreign = [i for i, a in enumerate(arguments) if isinstance(a, ndarray) and a.device_id != 0]
        assert not foreign, f"{name}: arguments {foreign} are on another device than the kernel"
        launched.append((file, name, grid, block))
        values = [_argument(a) for a in arguments]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        sizes = (ctypes.c_size_t * len(values))(*[ctypes.sizeof(v) for v in values])
        numbers = _two(grid), _two(block), ctypes.c_size_t(shared_mem), addresses, sizes, ctypes.c_size_t(len(values))
        with _one_at_a_time:
            wrong = run(which, *numbers)
        assert wrong == 0, f"{name}: argument {wrong} has another size than {arguments}"

    return kernel


def _two(numbers):
    return (ctypes.c_uint * 2)(*numbers, *[1] * (2 - len(numbers)))


def _argument(a):
    """As CuPy passes it on."""
    if a is None or isinstance(a, ndarray):
        return ctypes.c_void_p(None if a is None else int(a.data))
    if isinstance(a, int):
        return ctypes.c_longlong(a)
    if isinstance(a, float):
        return ctypes.c_double(a)
    assert isinstance(a, np.generic), type(a)
    return (ctypes.c_ubyte * a.itemsize).from_buffer_copy(a.tobytes())


def why_not():
    """Why it cannot be done here, or None."""
    return None if shutil.which("g++") else "there is no g++"


def install():
    """Let dbrdist take this for CuPy and its compiler."""
    sys.modules["cupy"] = _module()
    sys.modules["cudnn"] = host_cudnn.module
    cuda_source._compiled = compiled
    host_device_of = backend.device_of
    backend.device_of = lambda a: backend.GpuDevice(a.device_id) if isinstance(a, ndarray) else host_device_of(a)

    def place_of(a):
        return (a.device_id, 0) if isinstance(a, ndarray) else None

    backend.place_of = memory.place_of = keys.place_of = place_of
