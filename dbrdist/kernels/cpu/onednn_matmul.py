"""Matrix products on oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, address
from dbrdist.kernels.cpu.onednn_bfloat16 import also_in_bfloat16, narrow
from dbrdist.kernels.cpu.onednn_float16 import also_float16

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array

_SMALL_PRODUCT = 1 << 19  # multiplications; below, NumPy's product takes less time than the call
_DEPTH = 1312  # columns of a and rows of b; products of more are faster as a sum of several
_SOME_ROWS = 64  # of a; with fewer, one product takes as long as its pieces, or 0.9 of that
_MANY_ROWS = 256  # of a, from which on it pays to bring b to another layout first
_NARROW = 8  # rows or columns of a matrix in a stack, below which NumPy's products take less time
_LARGEST_PACKED = 1 << 22  # elements

# The library's second implementation of products, and the products of float32 for which it takes less time than its
# first, whose kernels need AVX-512: by whether a and b lie in rows, (least rows, least and largest depth, least
# columns). Written by benchmarks/products.py; see its record of each processor. Left out are products of a
# transposed a with a transposed b, for which it takes up to 2.5 of the time.
GEMM = "gemm:jit:f32"
_GEMM_SHAPES = {
    (False, True): (64, 64, 1 << 31, 128),
    (True, True): (256, 512, 1 << 31, 256),
    (True, False): (768, 64, 1024, 768),
}


def build(
    a: HostArray, b: HostArray, y: HostArray, bias: bool = False, adds: bool = False, implementation: str | None = None
) -> Primitive:
    """The product of a and b, written to y or added to it; by the implementation of that name, if there is one."""
    with Builder() as builder:
        left, right, result = (
            builder.memory(m.shape, onednn.data_type(m.dtype), onednn.element_strides(m)) for m in (a, b, y)
        )
        row = builder.memory((1, y.shape[1]), onednn.F32) if bias else None
        attributes = builder.attributes([(onednn.SUM,)] * adds)
        description = builder.describe_as(implementation, "matmul", left, right, row, result, attributes)
        memories = {onednn.SRC: left, onednn.WEIGHTS: right, onednn.DST: result}
        return builder.primitive(description, memories | ({onednn.BIAS: row} if bias else {}))


def build_packed(a: HostArray, b: HostArray, y: HostArray, adds: bool) -> tuple[Primitive, Primitive | None, int]:
    """As :func:`build` for a b in the layout that the library likes best; what brings b to it (None where it lies so
    already) and how many bytes that takes.
    """
    with Builder() as builder:
        left, right, result = (
            builder.memory(m.shape, onednn.data_type(m.dtype), onednn.element_strides(m)) for m in (a, b, y)
        )
        free, attributes = builder.any(b.shape, onednn.data_type(b.dtype)), builder.attributes([(onednn.SUM,)] * adds)
        description = builder.describe("matmul", left, free, None, result, attributes)
        wanted = builder.query(description, onednn.QUERY_WEIGHTS)
        primitive = builder.primitive(description, {onednn.SRC: left, onednn.WEIGHTS: wanted, onednn.DST: result})
        return primitive, builder.reorder(right, wanted), builder.size(wanted)


def _matrix(a: HostArray) -> HostArray:
    """A matrix whose rows or columns lie densely; oneDNN falls back to slow code for others."""
    rows, columns = a.strides
    size = a.itemsize
    if (columns == size and rows >= a.shape[1] * size) or (rows == size and columns >= a.shape[0] * size):
        return a
    return np.ascontiguousarray(a)


def _as_is(a: HostArray) -> HostArray:
    return a


def _adapter(a: HostArray, dtype: DType) -> Callable[[HostArray], HostArray]:
    """What turns matrices like ``a`` into what the library takes well: dense in rows or columns, of type ``dtype``."""
    if a.dtype != dtype:
        return caster(a, dtype)
    return _as_is if _matrix(a) is a else np.ascontiguousarray


def caster(a: HostArray, dtype: DType) -> Callable[[HostArray], HostArray]:
    """A function that brings matrices like ``a`` to another type; the result lies in rows as ``a`` or its transpose."""
    is_turned = _matrix(a) is a and a.strides[0] == a.itemsize
    shape = a.shape[::-1] if is_turned else a.shape
    with Builder() as b:
        source = b.memory(shape, onednn.data_type(a.dtype))
        primitive = b.reorder(source, b.memory(shape, onednn.data_type(dtype)))
    assert primitive is not None
    new = backend.allocator(shape, dtype)

    def cast(a: HostArray) -> HostArray:
        source, target = np.ascontiguousarray(a.T if is_turned else a), new()
        primitive.on(source, target)
        return target.T if is_turned else target

    return cast


def plan_matmul(a: HostArray, b: HostArray, out: HostArray | None, made: DType | None = None) -> Any:
    """See numpy_.matmul."""
    shape, dtype = (a.shape[0], b.shape[1]), min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    new = backend.allocator(shape, a.dtype if made is None else made)
    left, right = _adapter(a, dtype), _adapter(b, dtype)
    product = _plan_product(left(a), right(b), new() if out is None else out)

    def matmul(a: HostArray, b: HostArray, out: HostArray | None) -> HostArray:
        a, b = left(a), right(b)
        if out is None:
            out = new()
        product(a, b, out)
        return out

    return matmul


def _plan_product(a: HostArray, b: HostArray, y: HostArray) -> Callable[[HostArray, HostArray, HostArray], None]:
    """A function of a, b and y that writes the product to y."""
    if a.dtype != np.float32 or y.dtype != np.float32:
        return build(a, b, y).on
    if is_for_gemm(a, b):
        return build(a, b, y, implementation=GEMM).on
    return plan_by_default(a, b, y)


def plan_by_default(a: HostArray, b: HostArray, y: HostArray) -> Callable[[HostArray, HostArray, HostArray], None]:
    """A product of float32 by the library's own choice: with b in rows, piece by piece where it is deep, and with b
    packed where its rows are many and no multiple of 16.

    Measured on one core with AVX-512, in the library's own time: 0.76 for 700 x 10,000 by 10,000 x 650, 0.80 for
    700 x 2,600 by 2,600 x 650, 0.55 for 64 x 4,096 by 4,096 x 9,216; 0.86 for 10,000 x 700 by 700 x 650. A b that lies
    in columns gains nothing.
    """
    if b.strides[1] != b.itemsize:
        return build(a, b, y).on
    depth = a.shape[1]
    is_deep = depth > _DEPTH and len(a) >= _SOME_ROWS and a.strides[1] == a.itemsize
    step = -(-depth // -(-depth // _DEPTH)) if is_deep else depth
    cuts = [slice(start, start + step) for start in range(0, depth, step)]
    plan = _plan_packing if _is_packing_worth_it(len(a), step, b.shape[1]) else _plan_plainly
    pieces = [(cut, plan(a[:, cut], b[cut], y, cut.start > 0)) for cut in cuts]
    if len(pieces) == 1:
        return pieces[0][1]

    def product(a: HostArray, b: HostArray, y: HostArray) -> None:
        for cut, piece in pieces:
            piece(a[:, cut], b[cut], y)

    return product


def is_for_gemm(a: HostArray, b: HostArray) -> bool:
    """Whether a product of float32 takes less time by ``GEMM`` than by the library's own choice."""
    bounds = _GEMM_SHAPES.get((a.strides[1] == a.itemsize, b.strides[1] == b.itemsize))
    if bounds is None:
        return False
    rows, least, largest, columns = bounds
    return len(a) >= rows and least <= a.shape[1] <= largest and b.shape[1] >= columns


def _plan_plainly(
    a: HostArray, b: HostArray, y: HostArray, adds: bool,
) -> Callable[[HostArray, HostArray, HostArray], None]:  # fmt: skip
    return build(a, b, y, adds=adds).on


def _plan_packing(
    a: HostArray, b: HostArray, y: HostArray, adds: bool,
) -> Callable[[HostArray, HostArray, HostArray], None]:  # fmt: skip
    primitive, reorder, num_bytes = build_packed(a, b, y, adds)
    if reorder is None:
        return primitive.on
    pack = reorder.on

    def product(a: HostArray, b: HostArray, y: HostArray) -> None:
        weights = onednn.scratch("weights", num_bytes)
        pack(b, weights)
        primitive.on(a, weights, y)

    return product


def _is_packing_worth_it(rows: int, depth: int, columns: int) -> bool:
    return rows >= _MANY_ROWS and columns % 16 > 0 and depth * columns <= _LARGEST_PACKED


def _check(a: HostArray, b: HostArray) -> None:
    """Two matrices that are large enough, of float32 or of 16 bits."""
    onednn.require(a)
    onednn.require(b)
    if a.ndim != 2 or b.ndim != 2 or a.size * b.shape[1] < _SMALL_PRODUCT >> 2 * (a.itemsize == 2):
        raise onednn.Unsupported("a small product, or none of two matrices")


def _plan_large(a: HostArray, b: HostArray, out: HostArray | None = None, made: DType | None = None) -> Any:
    _check(a, b)
    return plan_matmul(a, b, out, made)


def _plan_stacks(a: HostArray, b: HostArray) -> Callable[..., Array]:
    """See dispatch.stacked_matmul; of heads that lie between others as they stand, in 0.7 to 0.9 of NumPy's time.

    A turned left matrix is multiplied by ``GEMM``.
    """
    onednn.require(a, b)
    if a.dtype != np.float32 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise onednn.Unsupported("another type, or stacks that broadcast")
    if not (_lies_well(a) and _lies_well(b)) or min(*a.shape[-2:], b.shape[-1]) < _NARROW:
        raise onednn.Unsupported("matrices that do not lie densely, or narrow ones")
    shape = (*a.shape[:-1], b.shape[-1])
    new = backend.plain_allocator(shape, a.dtype)
    is_turned = a.strides[-1] != a.itemsize
    primitive = build(a, b, np.empty(shape, a.dtype), implementation=GEMM if is_turned else None)
    if primitive.implementation.startswith("ref"):
        raise onednn.Unsupported("such stacks on this processor")

    def stacked_matmul(a: HostArray, b: HostArray) -> HostArray:
        y = new()
        primitive.on(a, b, y)
        return y

    return stacked_matmul


def _lies_well(a: HostArray) -> bool:
    """Whether the matrices of a stack lie in dense rows or columns, and no two elements in one place."""
    if min(a.strides) <= 0 or a.itemsize not in a.strides[-2:]:
        return False
    steps = sorted((step, n) for step, n in zip(a.strides, a.shape) if n > 1)
    return all(step * n <= wider for (step, n), (wider, _) in pairwise(steps))


def _plan_linear(x: HostArray, W: HostArray, b: HostArray | None, made: DType | None = None) -> Any:
    if b is None:
        return _without_bias(x, W, made)
    _check(x, W.T)
    if x.dtype.itemsize > W.dtype.itemsize:
        raise onednn.Unsupported("W narrower than x")
    left, right = _adapter(x, x.dtype), _adapter(W.T, x.dtype)
    new = backend.allocator((x.shape[0], W.shape[0]), x.dtype if made is None else made)
    x_here, w_here = left(x), right(W.T)
    best = GEMM if x.dtype == np.float32 and is_for_gemm(x_here, w_here) else None
    primitive = build(x_here, w_here, new(), bias=True, implementation=best)

    def linear(x: HostArray, W: HostArray, b: HostArray) -> HostArray:
        x, W, b = left(x), right(W.T), np.ascontiguousarray(b, np.float32)
        y = new()
        primitive(address(x), address(W), address(y), address(b))
        return y

    return linear


def _without_bias(x: HostArray, W: HostArray, made: DType | None) -> Any:
    product = _plan_large(x, W.T, made=made)
    return lambda x, W, b: product(x, W.T, None)


def _plan_packed(b: HostArray, rows: int, is_often: bool, made: DType | None = None) -> Any:
    """See numpy_.packed; ``b`` is brought to the library's own layout where the calls are enough to pay for it.

    20 rows times 650 by 2600: 0.54 ms, and 0.75 with ``b`` as it lies. The reorder takes as long as a product.
    """
    onednn.require(b)
    if rows * b.size < _SMALL_PRODUCT or (b.dtype != np.float32 and not onednn.has_bfloat16()):
        raise onednn.Unsupported("a small product, or a type that the processor does not multiply")
    lies_well = _adapter(b, b.dtype)
    out_dtype, left = (b.dtype, _as_is) if made is None else (made, narrow)
    arrays = np.empty((rows, len(b)), b.dtype), lies_well(b), np.empty((rows, b.shape[1]), out_dtype)
    primitive, reorder, num_bytes = (
        build_packed(*arrays, adds=True) if is_often else (build(*arrays, adds=True), None, 0)
    )

    def packed(b: HostArray, rows: int, is_often: bool) -> Callable[[HostArray, HostArray], None]:
        weights = b = lies_well(b)
        if reorder is not None:
            weights = backend.empty((num_bytes,), np.uint8)
            reorder.on(b, weights)
        return lambda a, out: primitive.on(left(a), weights, out)

    return packed


ROWS = {
    "stacked_matmul": _plan_stacks,
    "matmul": also_in_bfloat16(also_float16(_plan_large, out=2), 0, 1),
    "linear": also_in_bfloat16(also_float16(_plan_linear), 0, 1),
    "packed": also_in_bfloat16(_plan_packed, 0),
}
