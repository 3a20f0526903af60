"""The primitives of ``core.ops`` on bare device arrays and on Variables, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_close, assert_same, is_on, put

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import array_operations, backend
from dbrdist.core.tape import ops
from tests.each import each

A = (2, 3, 4)
PRIMITIVES = {
    "add": (ops.add, A, (4,)), "add number": (lambda a: ops.add(2.5, a), A), "sub": (ops.sub, A, A),
    "mul": (ops.mul, A, (3, 1)), "mul numpy number": (lambda a: ops.mul(a, np.float64(1.5)), A),
    "div": (ops.div, A, A), "div number": (lambda a: ops.div(1.0, a), A), "neg": (ops.neg, A),
    "exp": (ops.exp, A), "log": (ops.log, A), "sqrt": (ops.sqrt, A), "tanh": (ops.tanh, A),
    "absolute": (ops.absolute, A), "power": (ops.power, A, A), "square": (lambda a: ops.power(a, 2), A),
    "power of number": (lambda a: ops.power(2.0, a), A),
    "where": (lambda a, b: ops.where(a > 1.2 if not isinstance(a, Variable) else a.array > 1.2, a, b), A, A),
    "where number": (lambda a: ops.where(a > 1.2 if not isinstance(a, Variable) else a.array > 1.2, a, 0.0), A),
    "cast": (lambda a: ops.cast(a, np.dtype(np.float64)), A), "reshape": (lambda a: ops.reshape(a, (6, 4)), A),
    "transpose": (ops.transpose, A), "transpose axes": (lambda a: ops.transpose(a, (1, 0, 2)), A),
    "broadcast_to": (lambda a: ops.broadcast_to(a, (5, *A)), A), "sum": (ops.sum, A),
    "sum axis": (lambda a: ops.sum(a, 1), A), "sum keepdims": (lambda a: ops.sum(a, (0, 2), True), A),
    "mean": (ops.mean, A), "mean axis": (lambda a: ops.mean(a, (0, 1)), A),
    "sum_to": (lambda a: ops.sum_to(a, (3, 1)), A), "sum_to rows": (lambda a: ops.sum_to(a, (4,)), (3, 4)),
    "concat": (lambda a, b: ops.concat((a, b)), A, A),
    "concat images": (lambda a, b: ops.concat((a, b)), (2, 3, 4, 5), (2, 1, 4, 5)),
    "getitem": (lambda a: ops.getitem(a, (slice(None), 1, slice(None, None, -1))), A),
    "getitem list": (lambda a: ops.getitem(a, ([0, 1, 1], [2, 0, 0])), A),
    "scatter": (lambda a: ops.scatter(a, (slice(0, 2), slice(1, 4)), (2, 5, 4)), A),
    "scatter list": (lambda a: ops.scatter(a, [1, 1], (4, 3, 4)), A),
    "matmul": (ops.matmul, (3, 4), (4, 5)), "matmul stacks": (ops.matmul, (2, 3, 4), (4, 5)),
    "matmul vectors": (ops.matmul, (4,), (4,)),
}  # fmt: skip


def draw(rng, shape, dtype):
    a = rng.uniform(0.5, 2.0, shape)
    return backend.copy(np.asarray(a, dtype))


@pytest.mark.parametrize("name", PRIMITIVES)
@each(dtype=["float64", "float32", "float16"])
def test_primitive(name, dtype, device, xp, rng):
    function, *shapes = PRIMITIVES[name]
    xs = [draw(rng, s, dtype) for s in shapes]
    exact = np.asarray(function(*[x.astype(np.float64) for x in xs]))
    on_device = put(device, *xs) if len(xs) > 1 else [put(device, *xs)]
    bare, variable = function(*on_device), function(*[Variable(x) for x in on_device]).array
    assert bare.dtype == variable.dtype == np.asarray(function(*xs)).dtype
    for result in (xp.asarray(bare), variable):  # NumPy's reductions give scalars
        assert_close(device, result, exact, 16)


def test_matmul_and_sums_into_given_memory(device, xp, rng):
    a, b = draw(rng, (3, 4), np.float32), draw(rng, (4, 5), np.float32)
    out = xp.zeros(15, np.float32).reshape(3, 5)
    x, y = put(device, a, b)
    assert ops.matmul(x, y, out) is out
    assert_close(device, out, a @ b.astype(np.float64), 8)
    assert_close(device, ops.sum_to(x, (4,), xp.zeros(4, np.float32)), a.sum(0, np.float64), 8)


def test_indices_may_lie_on_the_device(device, xp, rng):
    a, index = draw(rng, (4, 3), np.float32), np.array([2, 0, 2])
    there, where = put(device, a), xp.asarray(index)
    assert_same(device, ops.getitem(there, where), a[index])
    assert_close(
        device, ops.scatter(there[:3], where, (5, 3)), array_operations.scattered(a[:3], index, (5, 3), False), 4
    )
    assert_close(device, F.scatter_add(there, where, there[:3]).array, F.scatter_add(a, index, a[:3]).array, 4)
    expected = F.scatter_add(a, a > 1, a[0, :1]).array
    assert_close(device, F.scatter_add(there, there > 1, there[0, :1]).array, expected, 4)


def test_memory_comes_from_the_device(device, xp):
    like = xp.zeros(3, np.float32)
    for shape in ((), (0,), (7,), (2, 3, 4, 5)):
        assert_same(device, backend.full(shape, 2.0, np.float32, like), np.full(shape, 2.0, np.float32))
        assert is_on(device, backend.empty(shape, np.float16, like))
    assert_same(device, backend.aligned_zeros(5, np.float64, like), np.zeros(5))


def test_operators_of_the_device_array_leave_it_to_the_variable(device, xp):
    a, v = xp.ones(3, np.float32), Variable(xp.full(3, 2, np.float32))
    for y, value in ((a + v, 3), (a - v, -1), (a * v, 2), (a / v, 0.5), (a @ v, 6)):
        assert isinstance(y, Variable)
        assert_same(device, y.array, np.full(y.shape, value, np.float32))


def test_a_host_array_beside_a_device_array_is_refused(device, xp, on):
    if on == "numpy":
        pytest.skip("host and device are the same here")
    with pytest.raises(TypeError):
        ops.add(Variable(xp.ones(3, np.float32)), np.ones(3, np.float32))
