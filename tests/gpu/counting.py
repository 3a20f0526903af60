"""Counts what a step launches on a GPU, without one: own kernels and cuDNN are noted in place of being run.

Arrays of the stand-in pass for CuPy's own (whole.py). What CuPy itself computes is computed, as its results decide
about sizes; everything else keeps whatever its memory holds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import clocks
import host_cudnn
import numpy as np
import stand_in
import whole
from stand_in import ndarray

from dbrdist.kernels.gpu import cublaslt, cuda_source
from dbrdist.kernels.gpu.cuda_layout import FilterPieces

CLASSES = ("cudnn", "own", "cublas", "cupy")
_PRODUCTS = {"dot", "matmul", "tensordot", "einsum"}


class Launch(NamedTuple):
    """One kernel: its class and name, the bytes of its operands, floating-point operations of products."""

    kind: str
    name: str
    num_bytes: int
    flops: int = 0
    arguments: tuple[Any, ...] = ()  # numbers, and addresses of arrays


class Counts:
    """What was launched while ``counted`` ran, and the host's time without that of the stand-in."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.num_copies = self.num_allocations = 0
        self.host_seconds = 0.0

    def by_class(self) -> dict[str, int]:
        """Launches of all classes together, and of each."""
        found = Counter(launch.kind for launch in self.launches)
        return {"launches": len(self.launches), **{kind: found[kind] for kind in CLASSES}}

    def num_bytes(self, kind: str | None = None) -> int:
        """Bytes of all launches, or those of one class."""
        return sum(launch.num_bytes for launch in self.launches if kind in (None, launch.kind))

    @property
    def flops(self) -> int:
        """Of products and convolutions."""
        return sum(launch.flops for launch in self.launches)

    def names(self) -> list[tuple[str, str, int, int]]:
        """Class, name, launches and bytes of each kernel, the most frequent first."""
        found = Counter((launch.kind, launch.name) for launch in self.launches)
        sizes: Counter[tuple[str, str]] = Counter()
        for launch in self.launches:
            sizes[launch.kind, launch.name] += launch.num_bytes
        return [(*key, count, sizes[key]) for key, count in found.most_common()]


_counts: Counts | None = None


def _note(kind: str, name: str, num_bytes: int, flops: int = 0, arguments: tuple[Any, ...] = ()) -> None:
    if _counts is not None:
        _counts.launches.append(Launch(kind, name, num_bytes, flops, arguments))


def _compiled(device: int, file: str, name: str) -> Any:
    short = name.partition("<")[0]

    def kernel(grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
        if _counts is not None:
            arguments = _unpacked(arguments)
            size = sum(a.nbytes for a in arguments if isinstance(a, ndarray))
            plain = tuple([a.data.ptr if isinstance(a, ndarray) else a for a in arguments])
            _note("own", short, size, 0, plain)

    return kernel


def _unpacked(arguments: Any) -> list[Any]:
    """Structs as their arrays and what else is in them."""
    return [
        x for a in arguments for x in ((*a.sources, *a.targets, a.numbers) if isinstance(a, FilterPieces) else (a,))
    ]  # fmt: skip


def _execute(graph: Any, addresses: Any, workspace: int, handle: Any) -> None:
    if graph.kind.startswith("sdpa"):
        q, k, v = graph.tensors[:3]
        products = 2 * q.num_elements * k.dim[2], 2 * v.num_elements * q.dim[2]
        flops = sum(products) * (1 if graph.kind == "sdpa" else 2)
    else:
        _, weight, output = graph.roles()
        flops = 2 * weight.num_elements * output.num_elements // output.dim[1]
    _note("cudnn", graph.kind, sum(t.num_bytes for t in graph.all_tensors), flops, tuple(addresses.values()))


def _arrays(*xs: Any) -> Iterator[Any]:
    for x in xs:
        if isinstance(x, ndarray):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _arrays(*x)


_KNOWN = {"call": "name", "__array_ufunc__": "ufunc"}


def _work(out: Any, *inputs: Any, again: Any = None) -> None:
    """In the place of the stand-in's: a kernel of CuPy's."""
    if _counts is None:
        return
    frame = sys._getframe(1)
    code = frame.f_code.co_name
    if code in ("_from_host",):
        _counts.num_copies += 1
        return
    known = frame.f_locals.get(_KNOWN.get(code, ""))
    name = getattr(known, "__name__", known) or code
    arrays = {id(a): a for a in _arrays(out, *inputs)}.values()
    kind = "cublas" if name in _PRODUCTS else "cupy"
    flops = 0
    if kind == "cublas":
        a, made = next(_arrays(inputs)), next(_arrays(out))
        flops = 2 * made.size * a.shape[-1]
    _note(kind, name, sum(a.nbytes for a in arrays), flops)


def _touch(reads: Any, writes: Any, stream: Any = None) -> None:
    """Nothing is ordered here; a copy to the host is one."""
    if _counts is not None and sys._getframe(1).f_code.co_name in ("get", "set"):
        _counts.num_copies += 1


def _product(a: Any, b: Any, shape: tuple[int, ...], out: Any) -> Any:
    """The result of a product that is not computed: NumPy takes long for 16 bits."""
    made = ndarray(shape, np.result_type(a.dtype, b.dtype)) if out is None else out
    size = a.nbytes + b.nbytes + made.nbytes
    _note("cublas", "dot" if a.ndim == b.ndim == 2 else "matmul", size, 2 * made.size * a.shape[-1])
    return made


def _dot(self: Any, b: Any, out: Any = None) -> Any:
    assert self.ndim == b.ndim == 2 and (out is None or out.flags.c_contiguous)
    return _product(self, b, (len(self), b.shape[1]), out)


class _Planned:
    """In the place of ``cublaslt._Product``."""

    workspace_bytes = 0

    def __init__(self, *description: Any) -> None: ...


def _multiplied(planned: Any, a: Any, b: Any, y: Any, room: Any, stream: int, sums: Any) -> None:
    """In the place of ``cublaslt._run``."""
    arrays = [x for x in (a, b, y, sums) if x is not None]
    name, size = "product" if sums is None else "product and sums", sum(x.nbytes for x in arrays)
    _note("cublas", name, size, 2 * y.size * a.shape[-1], tuple([x.data.ptr for x in arrays]))


_ufunc = ndarray.__array_ufunc__


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if ufunc is not np.matmul:
        return _ufunc(self, ufunc, method, *inputs, **kwargs)
    a, b = inputs
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return _product(a, b, shape, (kwargs.get("out") or [None])[0])


_allocate = clocks.allocate


def _allocated(num_bytes: int) -> Any:
    if _counts is not None:
        _counts.num_allocations += 1
    return _allocate(num_bytes)


def install() -> None:
    """Let dbrdist take the stand-in for CuPy, for counting."""
    whole.take_place()
    cuda_source._compiled = _compiled
    host_cudnn.Graph.execute = _execute
    stand_in._work = _work
    ndarray.dot, ndarray.__array_ufunc__ = _dot, _array_ufunc
    cublaslt.is_there, cublaslt._Product, cublaslt._run = lambda: True, _Planned, _multiplied
    stand_in.module.matmul = np.matmul
    clocks.touch, clocks.allocate = _touch, _allocated
    stand_in._fresh = lambda a: a


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what is launched within the block."""
    global _counts
    _counts = counts = Counts()
    start = time.process_time()
    try:
        with np.errstate(all="ignore"):
            yield counts
    finally:
        counts.host_seconds = time.process_time() - start
        _counts = None
