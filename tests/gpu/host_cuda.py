"""The kernels of ``kernels/gpu/cuda`` on the host, compiled by g++: formulas, indices, sizes and orders without a GPU.

Arrays are NumPy's, of a class that passes for CuPy's. Nothing is said about memory of several levels, or about speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
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
from dbrdist.kernels.gpu import cublaslt, cuda_source

HERE = Path(__file__).parent
_folder = tempfile.TemporaryDirectory()
folder = Path(_folder.name)  # for libraries; conftest.py names one that stays
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


def is_array(a):
    """True for arrays of this module and of the stand-in."""
    return type(a).__module__ == "cupy"


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


# Reads and writes of a kernel, from its declaration: pointers to what is const are read.
_TEMPLATE = re.compile(r"template <[^>]*>\n__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\)")
_OPTIONS = ("g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-w")
_SANITIZE = ("-g1", "-fsanitize=address,undefined", "-fsanitize-recover=address,undefined")
built = 0  # how many kernels g++ has compiled in this process
is_sanitized = False  # whether kernels check each access, see sanitizers.cpp


@functools.cache
def writes(file):
    """By kernel: for each argument whether it is a pointer through which the kernel may write."""
    found = _TEMPLATE.findall(cuda_source.source(file))
    return {name: ["*" in p and "const" not in p for p in text.split(",")] for name, text in found}


def _run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def built_once(name, text, options):
    """A shared library of C++ code, compiled at its first use; kept in :data:`folder` for other processes, too."""
    global built
    key = hashlib.sha256("\0".join((text, repr(options))).encode()).hexdigest()[:24]
    target = folder / f"{name}-{key}.so"
    with open(folder / f"{name}-{key}.lock", "w") as lock:  # others may compile other code meanwhile
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            built += 1
            with tempfile.TemporaryDirectory(dir=folder) as place:
                (Path(place) / "code.cpp").write_text(text)
                _run([*_OPTIONS, *options, "-shared", "code.cpp", "-o", "code.so"], place)
                (Path(place) / "code.so").rename(target)
    return ctypes.CDLL(str(target))


@functools.cache
def _common(options):
    """The folder with what is compiled once for all kernels: host_cuda.h, and what runs threads, host_cuda.cpp."""
    texts = [(HERE / name).read_text() for name in ("host_cuda.h", "host_cuda.cpp")]
    key = hashlib.sha256("".join([*texts, repr(options)]).encode()).hexdigest()[:24]
    place = folder / f"common-{key}"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "threads.o").exists():
            place.mkdir(exist_ok=True)
            for name, text in zip(("host_cuda.h", "threads.cpp"), texts, strict=True):
                (place / name).write_text(text)
            _run([*_OPTIONS, *options, "-x", "c++-header", "host_cuda.h", "-o", "host_cuda.h.gch"], place)
            _run([*_OPTIONS, *options, "-c", "threads.cpp", "-o", "made.o"], place)
            (place / "made.o").rename(place / "threads.o")
    return place


def launcher(name, text, options):
    """The function that launches the kernel of this name in the text."""
    common = _common(options)
    code = (
        f'#include "host_cuda.h"\n{text}\n'
        'extern "C" int run(const unsigned* grid, const unsigned* block, size_t shared, void** values,'
        " const size_t* sizes, size_t count) {\n"
        f"    return launch({name}, grid, block, shared, values, sizes, count);\n}}\n"
    )
    options = (*options, f"-I{common}", f"{common}/threads.o")
    return built_once(name.partition("<")[0], code, options).run


@functools.cache
def _library(file, name):
    """The function that launches one kernel of a file."""
    text = cuda_source.source(file).replace("extern __shared__ float shared[];", "float* shared = shared_floats;")
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("#include <cuda", "#pragma unroll")))
    return launcher(name, text, _SANITIZE if is_sanitized else ())


def compiled(device, file, name):
    """In the place of ``cuda_source._compiled``: a function of grid, block and arguments."""
    run = _library(file, name)

    def kernel(grid, block, arguments, shared_mem=0):
        assert np.prod(block) in range(32, 1025, 32), f"{name}: blocks of {block} threads, expected whole warps"
        foreign = [i for i, a in enumerate(arguments) if is_array(a) and a.data.device_id != device]
        assert not foreign, f"{name}: arguments {foreign} are on another device than the kernel"
        launched.append((file, name, grid, block))
        values = [_argument(a) for a in arguments]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        sizes = (ctypes.c_size_t * len(values))(*[ctypes.sizeof(v) for v in values])
        numbers = _two(grid), _two(block), ctypes.c_size_t(shared_mem), addresses, sizes, ctypes.c_size_t(len(values))
        with _one_at_a_time:
            wrong = run(*numbers)
        assert wrong != -3, f"{name}: not all threads of a block or a warp come to the same barrier"
        assert wrong == 0, f"{name}: argument {wrong} has another size than {arguments}"

    return kernel


def _two(numbers):
    return (ctypes.c_uint * 2)(*numbers, *[1] * (2 - len(numbers)))


def _argument(a):
    """As CuPy passes it on."""
    if a is None:
        raise TypeError("CuPy passes an address that is not null for None (its issue 9046); pass 0")
    if is_array(a):
        return ctypes.c_void_p(a.data.ptr)
    if isinstance(a, int):
        return ctypes.c_longlong(a)
    if isinstance(a, float):
        return ctypes.c_double(a)
    assert isinstance(a, np.generic) or (isinstance(a, np.ndarray) and a.size == 1), type(a)  # structs are of size 1
    return (ctypes.c_ubyte * a.itemsize).from_buffer_copy(a.tobytes())


def why_not():
    """Why it cannot be done here, or None."""
    return None if shutil.which("g++") else "there is no g++"


def _no_library():
    raise cublaslt.Unsupported("cuBLASLt multiplies nothing in host memory")


def install():
    """Let dbrdist take this for CuPy and its compiler."""
    cublaslt._load = _no_library
    sys.modules["cupy"] = _module()
    sys.modules["cudnn"] = host_cudnn.module
    cuda_source._compiled = compiled
    host_device_of = backend.device_of
    backend.device_of = lambda a: backend.GpuDevice(a.device_id) if isinstance(a, ndarray) else host_device_of(a)

    def place_of(a):
        return (a.device_id, 0) if isinstance(a, ndarray) else None

    backend.place_of = memory.place_of = keys.place_of = place_of
