"""Every primitive of core/tape/ops.py: values, both orders against central differences, both ways of its rule."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable
from dbrdist.core.array import backend
from dbrdist.core.tape import ops
from tests.each import each

CONDITION = np.array([[True, False, True], [False, False, True]])
INDEX = np.array([1, 0, 1])


def case(name, function, *shapes, low=0.5, high=1.5):
    """A row of the table: a primitive as a function of Variables with these shapes, and a domain away from kinks."""
    return name, function, shapes, (low, high)


BINARY = [("add", ops.add), ("sub", ops.sub), ("mul", ops.mul), ("div", ops.div), ("power", ops.power)]
UNARY = [
    ("neg", ops.neg), ("exp", ops.exp), ("log", ops.log), ("sqrt", ops.sqrt), ("tanh", ops.tanh),
    ("absolute", ops.absolute), ("negative absolute", lambda x: ops.absolute(ops.neg(x))),
]  # fmt: skip
SHAPES = [(2, 3), (), (0, 3), (2, 3, 2, 2)]
BROADCAST = [
    ((2, 3), (3,)),
    ((2, 1), (3,)),
    ((), (2, 3)),
    ((2, 3, 2, 2), (1, 3, 1, 1)),
    ((0, 3), (1, 3)),
    ((1,), (4, 1)),
]
CASES = [
    *[case(f"{n} {s}", f, s, s) for n, f in BINARY for s in SHAPES],
    *[case(f"{n} {a} {b}", f, a, b) for n, f in BINARY for a, b in BROADCAST],
    *[case(f"{n} {b} {a}", f, b, a) for n, f in BINARY for a, b in BROADCAST[:2]],
    *[case(f"{n} {s}", f, s) for n, f in UNARY for s in SHAPES],
    *[case(f"power {c}", lambda x, c=c: ops.power(x, c), (2, 3)) for c in (3, 2, 1, 0, -1, 0.5, -1.5)],
    case("number minus", lambda x: ops.sub(2.0, x), (2, 3)),
    case("number over", lambda x: ops.div(2.0, x), (2, 3)),
    case("number to the power", lambda x: ops.power(2.0, x), (2, 3)),
    case("same twice", lambda x: ops.mul(x, x), (2, 3)),
    *[
        case(f"remainder {s}", lambda a, b: ops.remainder(a * 0.1 + 2.3, b * 0.1 + 0.9), *s)  # 2 whole parts
        for s in (((2, 3), (2, 3)), ((2, 3, 2, 2), (1, 3, 1, 1)))
    ],
    case("where", lambda a, b: ops.where(CONDITION, a, b), (2, 3), (2, 3)),
    case("where broadcast", lambda a, b: ops.where(CONDITION, a, b), (3,), (2, 1)),
    case("where number", lambda a: ops.where(CONDITION, a, 0.0), (2, 3)),
    case("reshape", lambda x: ops.reshape(x, (3, -1)), (2, 6)),
    case("reshape 0-d", lambda x: ops.reshape(x, ()), (1, 1)),
    case("reshape 4-d", lambda x: ops.reshape(x, (2, 12)), (2, 3, 2, 2)),
    case("transpose", ops.transpose, (2, 3)),
    case("transpose axes", lambda x: ops.transpose(x, (2, 0, -2)), (2, 3, 4)),
    case("transpose 4-d", lambda x: ops.transpose(x, (0, 2, 3, 1)), (2, 3, 2, 4)),
    case("broadcast_to", lambda x: ops.broadcast_to(x, (4, 2, 3)), (2, 1)),
    case("broadcast_to 0-d", lambda x: ops.broadcast_to(x, (2, 2)), ()),
    case("broadcast_to empty", lambda x: ops.broadcast_to(x, (0, 3)), (1, 3)),
    case("sum", ops.sum, (2, 3)),
    case("sum axis", lambda x: ops.sum(x, 1), (2, 3)),
    case("sum axes", lambda x: ops.sum(x, (0, -1)), (2, 3, 4)),
    case("sum keepdims", lambda x: ops.sum(x, (0, 2), True), (2, 3, 4)),
    case("sum 4-d", lambda x: ops.sum(x, (0, 2, 3), True), (2, 3, 2, 2)),
    case("sum empty", lambda x: ops.sum(x, 0), (0, 3)),
    case("mean", ops.mean, (2, 3)),
    case("mean axes", lambda x: ops.mean(x, (0, -1), True), (2, 3, 4)),
    case("sum_to", lambda x: ops.sum_to(x, (2, 1)), (4, 2, 3)),
    case("sum_to 0-d", lambda x: ops.sum_to(x, ()), (2, 3)),
    case("concat", lambda a, b: ops.concat([a, b], 1), (2, 3), (2, 2)),
    case("concat last", lambda a, b, c: ops.concat([a, b, c], -1), (2, 1), (2, 2), (2, 0)),
    *[case(f"concat 4-d {i}", lambda a, b, i=i: ops.concat([a, b], i), (2, 3, 2, 2), (2, 3, 2, 2)) for i in range(4)],
    case("getitem", lambda x: ops.getitem(x, (slice(None), 1)), (2, 3)),
    case("getitem step", lambda x: ops.getitem(x, (Ellipsis, slice(None, None, -2))), (2, 5)),
    case("getitem None", lambda x: ops.getitem(x, (None, 0)), (2, 3)),
    case("getitem repeated", lambda x: ops.getitem(x, INDEX), (2, 3)),
    case("getitem pairs", lambda x: ops.getitem(x, (INDEX, np.array([2, 2, 2]))), (2, 3)),
    case("getitem bool", lambda x: ops.getitem(x, CONDITION), (2, 3)),
    case("getitem 4-d", lambda x: ops.getitem(x, INDEX), (2, 3, 2, 2)),
    case("scatter", lambda x: ops.scatter(x, INDEX, (2, 4)), (3, 4)),
    case("scatter 4-d", lambda x: ops.scatter(x, (slice(None), slice(1, 3)), (2, 4, 2, 2)), (2, 2, 2, 2)),
    *[
        case(f"matmul {a} {b}", ops.matmul, a, b)
        for a, b in [
            ((2, 3), (3, 4)), ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((5, 2, 3), (3, 4)),
            ((2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 2)), ((3,), (5, 3, 4)), ((5, 2, 3), (3,)), ((0, 3), (3, 2)),
            ((2, 0), (0, 3)),
        ]
    ],
]  # fmt: skip


def prepare(shapes, domain, dtype=np.float64, seed=0):
    random = np.random.default_rng(seed)
    arrays = []
    for shape in shapes:
        a = backend.empty(shape, dtype)
        a[...] = random.uniform(*domain, shape)
        arrays.append(a)
    return arrays


def gradients_of(function, arrays, higher):
    """Gradients of all inputs for a gradient of the output without symmetry."""
    xs = [Variable(a) for a in arrays]
    y = function(*xs)
    y.grad = np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)
    y.backward(enable_double_backprop=higher)
    return y, xs


def test_the_table_names_every_primitive():
    classes = {
        c for c in vars(ops).values()
        if isinstance(c, type) and issubclass(c, dbrdist.FunctionNode) and c.__module__ == ops.__name__
    }  # fmt: skip
    seen = set()
    for parameters in CASES:
        _, function, shapes, domain = parameters
        nodes = [function(*map(Variable, prepare(shapes, domain))).creator]
        while nodes:
            node = nodes.pop()
            seen.add(type(node))
            nodes += [n.living_creator() for n in node.inputs if n.living_creator() is not None]
    elsewhere = {ops.Cast}  # below
    assert classes - seen <= elsewhere | {dbrdist.FunctionNode}
    rows = {f.row.node for f in vars(ops).values() if hasattr(getattr(f, "row", None), "node")}
    assert len(rows) > 9 and rows <= seen


every_primitive = each(name=sorted({case[0].split()[0] for case in CASES}))


def named(name):
    """The rows of a primitive."""
    return [case for case in CASES if case[0].split()[0] == name]


@every_primitive
@each(row=named)
def test_first_order_against_central_differences(name, row):
    _, function, shapes, domain = row
    arrays = prepare(shapes, domain)
    y, xs = gradients_of(function, arrays, False)
    gy, random = y.grad, np.random.default_rng(1)
    for _ in range(2):
        directions = [random.normal(size=a.shape) for a in arrays]
        eps = 1e-5
        ends = [function(*[a + s * eps * d for a, d in zip(arrays, directions)]) for s in (1, -1)]
        numerical = float((gy * (ends[0] - ends[1])).sum()) / (2 * eps)
        analytic = sum(float((x.grad * d).sum()) for x, d in zip(xs, directions))
        np.testing.assert_allclose(analytic, numerical, rtol=2e-8, atol=1e-8)
    for x, a in zip(xs, arrays):
        assert x.grad.shape == a.shape and x.grad.dtype == a.dtype and isinstance(x.grad, np.ndarray)


@pytest.mark.slow
@every_primitive
@each(row=named)
def test_second_order_against_central_differences(name, row):
    _, function, shapes, domain = row
    arrays, random = prepare(shapes, domain), np.random.default_rng(2)
    y = function(*arrays)
    gy = np.cos(np.arange(y.size)).reshape(y.shape)
    u = [random.normal(size=a.shape) for a in arrays]

    def along(xs, gy_):
        """<u, gradient> as a Variable: a scalar function of the inputs and of gy."""
        ys = function(*xs)
        gs = dbrdist.grad([ys], xs, [gy_], enable_double_backprop=True)
        total = Variable(np.zeros(()))
        for g, d in zip(gs, u):
            total = total if g is None else total + ops.sum(g * d)
        return total

    xs, gy_variable = [Variable(a) for a in arrays], Variable(gy)
    s = along(xs, gy_variable)
    found = dbrdist.grad([s], [*xs, gy_variable])
    directions = [random.normal(size=a.shape) for a in (*arrays, gy)]
    eps = 1e-5
    ends = []
    for sign in (1, -1):
        moved = [Variable(np.asarray(a + sign * eps * d)) for a, d in zip((*arrays, gy), directions)]
        ends.append(float(along(moved[:-1], moved[-1]).array))
    numerical = (ends[0] - ends[1]) / (2 * eps)
    analytic = sum(float((g.array * d).sum()) for g, d in zip(found, directions) if g is not None)
    np.testing.assert_allclose(analytic, numerical, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@every_primitive
@each(row=named, dtype=[np.float32, np.float64, np.float16])
def test_one_rule_for_every_order(name, row, dtype):
    """On bare arrays and on Variables the same rule gives the same bits and types.

    In 16 bits a first-order rule rounds once, a recorded one after each step.
    """
    _, function, shapes, domain = row
    arrays = prepare(shapes, domain, dtype)
    _, first = gradients_of(function, arrays, False)
    y, higher = gradients_of(function, arrays, True)
    assert y.dtype == dtype
    np.testing.assert_array_equal(function(*arrays), y.array)  # arrays in, array out
    for a, b in zip(first, higher):
        assert isinstance(b.grad_var, Variable)
        assert a.grad.dtype == b.grad.dtype == dtype
        if dtype is np.float16:
            np.testing.assert_allclose(a.grad, b.grad, rtol=8 * 2.0**-11, atol=1e-3)
        else:
            np.testing.assert_array_equal(a.grad, b.grad)


def test_higher_orders_against_closed_forms():
    x = Variable(np.linspace(0.3, 2.0, 7))

    def derivatives(y, n):
        out = []
        for _ in range(n):
            (y,) = dbrdist.grad([y], [x], enable_double_backprop=True)
            out.append(y.array.copy())
        return out

    v = x.array
    for got, expected in (
        (derivatives(ops.exp(x * 2.0), 4), [2.0**k * np.exp(2 * v) for k in (1, 2, 3, 4)]),
        (derivatives(ops.log(x), 4), [1 / v, -(v**-2), 2 * v**-3, -6 * v**-4]),
        (derivatives(x**5, 5), [5 * v**4, 20 * v**3, 60 * v**2, 120 * v, np.full(7, 120.0)]),
        (derivatives(1.0 / x, 3), [-(v**-2), 2 * v**-3, -6 * v**-4]),
        (derivatives(ops.sqrt(x), 3), [0.5 * v**-0.5, -0.25 * v**-1.5, 0.375 * v**-2.5]),
        (derivatives(ops.tanh(x), 2), [1 - np.tanh(v) ** 2, -2 * np.tanh(v) * (1 - np.tanh(v) ** 2)]),
    ):
        for g, e in zip(got, expected):
            np.testing.assert_allclose(g, e, rtol=1e-11)


def test_hessian_of_a_quadratic_form():
    random = np.random.default_rng(0)
    A = random.normal(size=(4, 4))
    x = Variable(random.normal(size=4))
    (g,) = dbrdist.grad([ops.matmul(ops.matmul(x, A), x)], [x], enable_double_backprop=True)
    rows = [dbrdist.grad([g[i]], [x])[0].array for i in range(4)]
    np.testing.assert_allclose(rows, A + A.T, rtol=1e-13)


# ---- types ----------------------------------------------------------------------------------------------------------
def test_cast_and_its_gradient():
    x = Variable(np.array([1.5, 2.5], np.float32))
    y = ops.cast(x, np.dtype(np.float16))
    assert y.dtype == np.float16 and ops.cast(y, np.dtype(np.float16)) is y
    y.grad = np.array([1.0, 2.0], np.float16)
    y.backward()
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(x.grad, [1.0, 2.0])
    assert type(ops.cast(x.array, np.dtype(np.float64))) is np.ndarray


@pytest.mark.parametrize("op", [ops.add, ops.mul, ops.matmul])
def test_gradients_have_the_type_of_their_input(op):
    a, b = Variable(np.ones((2, 2), np.float32)), Variable(np.full((2, 2), 3.0))
    y = op(a, b)
    assert y.dtype == np.float64
    y.grad = np.ones((2, 2))
    y.backward()
    assert a.grad.dtype == np.float32 and b.grad.dtype == np.float64


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_over_16_bits_run_in_float32(name):
    """4096 + 1 is 4096 in 16 bits: summing in the narrow type stops growing."""
    dtype = dbrdist.get_dtype(name)
    n = 8192
    ones = np.ones(n, dtype)
    expected = float(np.array(n, np.float32).astype(dtype))
    assert float(ops.sum(ones)) == expected
    assert float(ops.sum_to(ones.reshape(n, 1), (1, 1))[0, 0]) == expected
    assert float(ops.matmul(ones, ones)) == expected
    assert float(ops.scatter(ones, np.zeros(n, int), (2,))[0]) == expected
    assert ops.matmul(ones.reshape(1, n), ones.reshape(n, 1)).dtype == dtype
    x = Variable(np.ones((), dtype))
    y = ops.broadcast_to(x, (n,))
    y.grad = ones
    y.backward()
    assert x.grad.dtype == dtype and float(x.grad) == expected


def test_matrix_products_of_mixed_and_whole_numbers():
    a, b = np.ones((2, 3), np.float16), np.ones((3, 2), np.float32)
    assert ops.matmul(a, b).dtype == ops.matmul(b, a).dtype == np.float32
    big = np.full((1, 1), 32767, np.int16)
    assert ops.matmul(big.astype(np.int64), big.astype(np.int64))[0, 0] == 32767**2
    assert ops.matmul(np.full((1, 1), 181, np.int16), np.full((1, 1), 181, np.int16))[0, 0] == 32761


# ---- layout ---------------------------------------------------------------------------------------------------------
class LikeCuPy(np.ndarray):
    """Elementwise results are C-contiguous whatever the operands' strides, as CuPy's kernels allocate them."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(np.asarray(o) if o is not None else None for o in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        if out is not None:
            return out[0]
        return np.ascontiguousarray(result).view(LikeCuPy) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function, types, args, kwargs):
        result = super().__array_function__(function, types, args, kwargs)
        if function in (np.where, np.concatenate):
            return np.ascontiguousarray(result).view(LikeCuPy)
        return result

    def astype(self, dtype, **kwargs):
        kwargs.pop("order", None)
        return np.ascontiguousarray(np.asarray(self).astype(dtype, **kwargs)).view(LikeCuPy)


PLAIN4 = (2, 3, 4, 5)
LAYOUT_CASES = {
    "add": lambda x, b: ops.add(x, b),
    "add number": lambda x, b: ops.add(x, 1.0),
    "add itself": lambda x, b: ops.add(x, x),
    "sub": lambda x, b: ops.sub(b, x),
    "mul": ops.mul,
    "div": lambda x, b: ops.div(b, x),
    "neg": lambda x, b: ops.neg(x),
    "exp": lambda x, b: ops.exp(x),
    "log": lambda x, b: ops.log(x),
    "sqrt": lambda x, b: ops.sqrt(x),
    "tanh": lambda x, b: ops.tanh(x),
    "absolute": lambda x, b: ops.absolute(x),
    "power": lambda x, b: ops.power(x, 3),
    "power of": lambda x, b: ops.power(x, b),
    "where": lambda x, b: ops.where(np.arange(120).reshape(PLAIN4) % 2 == 0, x, b),
    "cast": lambda x, b: ops.cast(ops.cast(x, np.dtype(np.float64)), np.dtype(np.float32)),
    "concat": lambda x, b: ops.concat([x, x], 1),
    "concat batch": lambda x, b: ops.concat([x, x], 0),
    "reshape": lambda x, b: ops.reshape(ops.reshape(x, (6, 20)), PLAIN4, to_images=True),
    "getitem index": lambda x, b: ops.getitem(x, np.array([1, 0, 1])),
    "getitem channels": lambda x, b: ops.getitem(x, (slice(None), np.array([1, 0, 1, 2]))),
    "scatter": lambda x, b: ops.scatter(x, (slice(None), slice(1, 4)), (2, 5, 4, 5)),
}


@each(name=LAYOUT_CASES, higher=[False, True], array_type=[np.ndarray, LikeCuPy])
def test_results_and_gradients_stay_channels_last(name, higher, array_type):
    a = backend.empty(PLAIN4, np.float32)
    a[...] = np.random.default_rng(0).uniform(0.5, 1.5, PLAIN4)
    x = Variable(a.view(array_type))
    b = Variable(np.linspace(1, 2, 3, dtype=np.float32).reshape(1, 3, 1, 1).view(array_type))
    h = x * 1.5  # so that the gradient of x passes an operation, and is not made channels-last by the leaf
    y = LAYOUT_CASES[name](h, b)
    assert backend.is_channels_last(y.array), y.array.strides
    gy = backend.empty(y.shape, np.float32)
    gy[...] = 1.0
    y.grad = gy.view(array_type)
    y.backward(enable_double_backprop=higher, retain_grad=True)
    for g in (h.grad, x.grad):
        is_slice = name == "scatter" and g is h.grad  # a view of the gradient, which stays where it is
        assert g.shape == PLAIN4 and (g.strides[1] == 4 if is_slice else backend.is_channels_last(g)), g.strides
    if array_type is LikeCuPy:
        assert isinstance(y.array, LikeCuPy)


def test_the_fake_array_type_would_lose_the_layout():
    a = backend.empty(PLAIN4, np.float32).view(LikeCuPy)
    a[...] = 1
    assert backend.is_channels_last(a) and not backend.is_channels_last(a + a)


def test_gradients_of_sums_are_views_without_memory():
    y = ops.sum(Variable(np.ones(PLAIN4, np.float32)), (2, 3))
    (gx,) = y.creator.derive((0,), (np.ones((2, 3), np.float32),))
    assert gx.shape == PLAIN4 and gx.strides[2:] == (0, 0)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (), (5, 2, 3)], ids=str)
def test_a_gradient_of_another_shape_is_refused(shape):
    v = Variable(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"grad_outputs: expected shape \(2, 3\)"):
        dbrdist.grad([ops.exp(v)], [v], [np.ones(shape)])
    with pytest.raises(ValueError, match=r"grad_outputs: expected shape \(2, 3\)"):
        dbrdist.backward([ops.exp(v)], [np.ones(shape)])
    assert v.grad is None


def test_each_output_has_a_gradient_of_its_own():
    v = Variable(np.ones(3))
    for given in ([np.ones(3)], [np.ones(3)] * 3):
        with pytest.raises(ValueError, match="grad_outputs: expected 2"):
            dbrdist.grad([ops.exp(v), ops.neg(v)], [v], given)
        with pytest.raises(ValueError, match="grad_outputs: expected 2"):
            dbrdist.backward([ops.exp(v), ops.neg(v)], given)


@pytest.mark.parametrize("function", [dbrdist.backward, lambda ys: dbrdist.grad(ys, [Variable(np.ones(2))])])
def test_outputs_are_a_list_of_variables(function):
    y = ops.exp(Variable(np.ones(2)))
    with pytest.raises(TypeError, match="outputs: expected a tuple or list of Variables, got Variable"):
        function(y)
    with pytest.raises(TypeError, match=r"outputs\[1\]: expected a Variable, got ndarray"):
        function([ops.sum(y), np.ones(2)])


def test_wrong_gradients_are_refused_in_words():
    x = Variable(np.ones(2))
    with pytest.raises(TypeError, match="grad_outputs: expected arrays, Variables or None, got list"):
        dbrdist.grad([ops.exp(x)], [x], [[1.0, 1.0]])
    with pytest.raises(ValueError, match="grad_inputs: expected 1, one for each input, got 2"):
        dbrdist.grad([ops.exp(x)], [x], grad_inputs=[None, None])
    with pytest.raises(TypeError, match=r"inputs\[0\]: expected a Variable, got ndarray"):
        dbrdist.grad([ops.exp(x)], [x.array])


def test_sums_over_many_rows_keep_no_memory():
    x = np.ones((200_100, 2), np.float32)
    tracemalloc.start()
    try:
        for n in range(200_000, 200_020):
            assert ops.sum_to(x[:n], (2,)).tolist() == [n, n]
        assert tracemalloc.get_traced_memory()[0] < 2 * x.nbytes
    finally:
        tracemalloc.stop()


def test_powers_of_zero_have_finite_gradients_by_the_exponent():
    """0^b does not move with b where it is 0 or 1, for either sign of gy."""
    a, b = Variable(np.array([0.0, 0.0, 0.25, 2.0])), Variable(np.array([0.0, 2.0, 1.0, 3.0]))
    (gb,) = dbrdist.grad([ops.power(a, b)], [b], [np.array([1.0, -1.0, 1.0, 1.0])])
    np.testing.assert_allclose(gb.array, [0.0, 0.0, 0.25 * np.log(0.25), 8 * np.log(2.0)], rtol=1e-14)


@each(first=["f", "d", "e", "i8"], second=["f", "d", "e", "i8"])
def test_products_are_written_into_memory_of_their_type(first, second):
    a, b = np.arange(6).reshape(2, 3).astype(first), np.arange(12).reshape(3, 4).astype(second)
    exact, kind = np.arange(6).reshape(2, 3) @ np.arange(12).reshape(3, 4), np.result_type(a, b)
    for room in (None, np.full((2, 4), 7, "f"), np.full((2, 4), 7, "d")):
        y = ops.matmul(a, b, room)
        assert y.dtype == kind and np.array_equal(y, exact)
        if first == second and room is not None and room.dtype == kind:
            assert y is room
        elif room is not None:
            assert (room == 7).all()
