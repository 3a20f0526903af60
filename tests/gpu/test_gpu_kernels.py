"""Own CUDA kernels against formulas in float64 on the host: every type, sizes that fill no block, memory at any place.

On the stand-in NumPy's kernels answer; on a GPU the test also says who did.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_close, assert_same, eps_of, images, put

import dbrdist.functions as F
from dbrdist import kernels, optimizers
from dbrdist.core.array import backend
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.variable import Variable

TYPES = ["float64", "float32", "float16", "bfloat16"]
SHAPES = [(1,), (5,), (1027,), (3, 4), (70_001,), (2, 3, 4)]


@pytest.fixture
def served(on):
    """``served(kernel, *arguments)``: on a GPU the provider ``cuda`` must take them."""

    def check(kernel, *arguments):
        if on == "cupy":
            assert kernels.provider_of(kernel, *arguments) == "cuda"

    return check


def numbers(rng, shape, dtype):
    return rng.standard_normal(shape).astype(backend.as_dtype(dtype))


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


@pytest.mark.parametrize("dtype", TYPES)
def test_rectified(dtype, device, rng, served):
    """NaN stays, and so does the layout; where the output is 0 no gradient passes."""
    cases = [numbers(rng, shape, dtype) for shape in SHAPES] + [images(rng, (2, 3, 5, 7), backend.as_dtype(dtype))]
    for x in cases:
        x.reshape(-1)[0] = np.nan
        gy = numbers(rng, x.shape, dtype)
        gy = backend.channels_last(gy) if x.ndim == 4 else gy
        there, g = put(device, x, gy)
        served("relu_forward", there)
        y = kernels.relu_forward(there)
        assert_same(device, y, np.maximum(x, x.dtype.type(0)))
        served("relu_backward", y, g)
        gx = kernels.relu_backward(y, g)
        assert_same(device, gx, np.where(x.astype(np.float64) <= 0, gy.dtype.type(0), gy))
        if x.ndim == 4:
            assert backend.is_channels_last(y) and backend.is_channels_last(gx)


def test_rectified_from_any_element_on(device, rng):
    """Four at a time are read only where all begin at a multiple of 16 bytes."""
    x = numbers(rng, 103, "float32")
    there = put(device, x)
    for first in range(5):
        y = kernels.relu_forward(there[first:])
        assert_same(device, y, np.maximum(x[first:], 0))
        assert_same(device, kernels.relu_backward(y[1:], there[first + 1 :]), np.maximum(x[first + 1 :], 0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 8, 8), (5, 33, 7), (300, 17, 65)])
def test_linear(sizes, dtype, device, rng, served):
    n, inputs, outputs = sizes
    x, W, b = numbers(rng, (n, inputs), dtype), numbers(rng, (outputs, inputs), dtype), numbers(rng, outputs, dtype)
    gy = numbers(rng, (n, outputs), dtype)
    there = put(device, x, W, b, gy)
    wx, wW, wb, wgy = wide(x, W, b, gy)
    served("linear", *there[:3])
    v = [Variable(a) for a in there[:3]]
    y = F.linear(*v)
    assert_close(device, y.array, wx @ wW.T + wb, 8)
    y.grad = there[3]
    y.backward()
    for p, exact in zip(v, (wgy @ wW, wgy.T @ wx, wgy.sum(0))):
        assert_close(device, p.grad, exact, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_linear_with_weights_in_float32(dtype, device, rng, served, on):
    """As mixed precision has it: outputs of 16 bits, gradients of the weights in float32."""
    x, gy = numbers(rng, (9, 20), dtype), numbers(rng, (9, 12), dtype)
    W, b = numbers(rng, (12, 20), "float32"), numbers(rng, 12, "float32")
    there = put(device, x, W, b, gy)
    served("linear", *there[:3])
    v = [Variable(a) for a in there[:3]]
    y = F.linear(*v)
    wx, wW, wb, wgy = wide(x, W, b, gy)
    assert_close(device, y.array, wx @ wW.T + wb, 8)
    y.grad = there[3]
    y.backward()
    assert_close(device, v[0].grad, wgy @ wW, 8)
    rounded = 8 * eps_of(there[0].dtype) / eps_of(W.dtype)  # CuPy's product is rounded to 16 bits
    assert_close(device, v[1].grad, wgy.T @ wx, rounded if on == "cupy" else 64)
    assert_close(device, v[2].grad, wgy.sum(0), 64)


@pytest.mark.parametrize("dtype", TYPES)
def test_products(dtype, device, rng, served, xp, on):
    """In every layout, into new memory and into given one, of the type or of that of its sums."""
    for m, k, n in [(1, 1, 1), (5, 1, 3), (1, 4, 6), (6, 7, 1), (17, 33, 12), (256, 64, 128)]:
        a, b = numbers(rng, (m, k), dtype), numbers(rng, (k, n), dtype)
        exact = np.matmul(*wide(a, b))
        there, other = put(device, a, b)
        padded = put(device, np.pad(a, ((0, 2), (0, 3))))[:m, :k]
        for left in (there, put(device, np.ascontiguousarray(a.T)).T, padded):
            for right in (other, put(device, np.ascontiguousarray(b.T)).T):
                assert_close(device, kernels.matmul(left, right), exact, 32)
                for kind in (a.dtype, backend.accumulation_dtype(a.dtype)):
                    room = xp.full((m, n), np.nan, kind)
                    assert kernels.matmul(left, right, room) is room
                    rounded = 32 if on != "cupy" or kind == a.dtype else 8 * eps_of(a.dtype) / eps_of(kind)
                    assert_close(device, room, exact, rounded)
        served("matmul", there.T, there)
    every_other = put(device, np.zeros((8, 8), a.dtype))[::2, ::2]
    assert_close(device, kernels.matmul(every_other, every_other), np.zeros((4, 4)), 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_column_sums(dtype, device, rng, served, xp):
    for shape in [(1, 1), (3, 70), (1000, 3), (4096, 33), (5000, 4)]:
        x = numbers(rng, shape, dtype)
        there = put(device, x)
        for kind in (x.dtype, backend.accumulation_dtype(x.dtype)):
            assert_close(device, kernels.column_sums(there, kind), x.astype(np.float64).sum(0), 200)
            room = xp.full(shape[1:], np.nan, kind)
            assert kernels.column_sums(there, kind, room) is room
            assert_close(device, room, x.astype(np.float64).sum(0), 200)
    served("column_sums", put(device, numbers(rng, (4096, 33), dtype)), x.dtype, None)


def mean_cross_entropy(x, t, ignored=-1, divisor=0):
    """The mean and the gradient, in float64."""
    x = x.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    counts = t != ignored
    rows = np.arange(len(t))[counts]
    over = divisor or max(counts.sum(), 1)
    gx = np.where(counts[:, None], p, 0)
    gx[rows, t[counts]] -= 1
    return -np.log(p[rows, t[counts]]).sum() / over, gx / over


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("labels", ["int32", "int64", "int16"])
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (3, 1000), (513, 67), (3000, 40)])
def test_cross_entropy(shape, labels, dtype, device, rng, on):
    """A few rows in one block, many in several; each fifth label is ignored."""
    x = numbers(rng, shape, dtype) * backend.as_dtype(dtype).type(3)
    t = rng.integers(0, shape[1], shape[0]).astype(labels)
    t[::5] = ignored = -7
    for normalize in (True, False):
        exact, gradient = mean_cross_entropy(x, t.astype(int), ignored, 0 if normalize else len(t))
        v = Variable(put(device, x))
        y = F.softmax_cross_entropy(v, put(device, t), normalize=normalize, ignore_label=ignored)
        y.backward()
        assert_close(device, y.array, np.asarray(exact), 16)
        assert_close(device, v.grad, gradient, 16)
    if on == "cupy":
        key = v.array, put(device, t.astype(np.int32)), -1, 0
        assert kernels.provider_of("cross_entropy", *key) == "cuda"


def test_cross_entropy_of_images(device, rng):
    """(N, K, H, W), in either layout, and rows in memory with gaps."""
    x, t = images(rng, (2, 5, 3, 4)), rng.integers(0, 5, (2, 3, 4))
    exact, gradient = mean_cross_entropy(x.transpose(0, 2, 3, 1).reshape(-1, 5), t.reshape(-1))
    there = put(device, x)
    for a in (there, device.xp.ascontiguousarray(there)):
        v = Variable(a)
        y = F.softmax_cross_entropy(v, put(device, t))
        y.backward()
        assert_close(device, y.array, np.asarray(exact, np.float64), 16)
        assert_close(device, v.grad, gradient.reshape(2, 3, 4, 5).transpose(0, 3, 1, 2), 16)
    half = Variable(put(device, np.repeat(x[:, :, 0, 0], 2, axis=1))[:, ::2])
    exact, _ = mean_cross_entropy(x[:, :, 0, 0], t[:, 0, 0])
    assert_close(device, F.softmax_cross_entropy(half, put(device, t)[:, 0, 0]).array, np.asarray(exact), 16)


def test_cross_entropy_of_what_is_not_finite(device, rng, on):
    """-inf has probability 0, ignored rows do not matter, and labels of no class give NaN instead of a neighbour."""
    if on == "numpy":
        pytest.skip("the host warns of such scores and refuses such labels")
    x = numbers(rng, (4, 3), "float32")
    x[0, 1], x[1], x[2] = -np.inf, np.nan, -np.inf
    t = np.array([0, -1, -1, 2], np.int32)
    exact, gradient = mean_cross_entropy(np.where(t[:, None] < 0, 0, x), t)
    v = Variable(put(device, x))
    y = F.softmax_cross_entropy(v, put(device, t))
    y.backward()
    assert_close(device, y.array, np.asarray(exact), 16)
    assert_close(device, v.grad, gradient, 16)
    for bad in (3, 1 << 30, -2):
        t[0] = bad
        v = Variable(put(device, np.zeros((4, 3), np.float32)))
        y = F.softmax_cross_entropy(v, put(device, t))
        y.backward()
        assert np.isnan(float(backend.to_cpu(y.array)))
        assert np.isnan(backend.to_cpu(v.grad)[0]).all()


def host_gradient(x):
    y = F.relu(Variable(x))
    y.grad = np.ones((4, 3), np.float32)
    y.backward()


def host_seed(x):
    y = F.softmax_cross_entropy(Variable(x), x.argmax(1))
    y.grad = np.ones((), np.float32)
    y.backward()


ELSEWHERE = {
    "labels": lambda xp, x: F.softmax_cross_entropy(Variable(x), np.zeros(4, np.int32)),
    "bias": lambda xp, x: F.linear(Variable(x), x[:2], np.ones(2, np.float32)),
    "weights": lambda xp, x: F.linear(Variable(x), np.ones((2, 3), np.float32)),
    "gradient": lambda xp, x: host_gradient(x),
    "gradient of the loss": lambda xp, x: host_seed(x),
    "state": lambda xp, x: kernels.update("momentum_sgd", (x[0], x[1], np.ones(3, np.float32)), (0.1, 0.9)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_operand_in_host_memory_is_refused(name, device, xp, on):
    """Our kernels would take its bytes for an address."""
    if on == "numpy":
        pytest.skip("everything lies there")
    x = xp.ones((4, 3), np.float32)
    if name == "state":
        assert not ELSEWHERE[name](xp, x)
        return
    with pytest.raises((TypeError, ValueError)):
        ELSEWHERE[name](xp, x)


def test_numpys_numbers_are_taken_as_python_has_them(device, rng):
    """They are narrower than what a kernel reads."""
    x, t = numbers(rng, (6, 4), "float32"), np.array([0, -3, 1, 2, -3, 3], np.int32)
    exact, _ = mean_cross_entropy(x, t, -3)
    y = F.softmax_cross_entropy(Variable(put(device, x)), put(device, t), ignore_label=np.int8(-3), normalize=np.True_)
    assert_close(device, y.array, np.asarray(exact), 16)


def test_second_derivative_of_cross_entropy(device, rng):
    x, t = numbers(rng, (5, 4), "float64"), np.array([1, -1, 3, 0, 0], np.int32)
    v = Variable(put(device, x))
    y = F.softmax_cross_entropy(v, put(device, t))
    (g,) = grad([y], [v], enable_double_backprop=True)
    direction = numbers(rng, (5, 4), "float64")
    F.sum(g * put(device, direction)).backward()
    step = 1e-6
    upper, lower = (mean_cross_entropy(x + s * direction, t)[1] for s in (step, -step))
    np.testing.assert_allclose(backend.to_cpu(v.grad), (upper - lower) / (2 * step), rtol=1e-6, atol=1e-8)


# ---- updates

METHODS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "MomentumSGD": lambda: optimizers.MomentumSGD(0.1, 0.8),
    "whole numbers": lambda: optimizers.MomentumSGD(1, 0),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay_rate=0.1, eta=0.5),
    "AMSGrad": lambda: optimizers.AMSGrad(0.01),
    "Adam without eps": lambda: optimizers.Adam(0.01, eps=0),
    "AdaBound": lambda: optimizers.AdaBound(0.01),
    "LARS": lambda: optimizers.LARS(0.1, weight_decay=0.01),
    "LARS of vectors": lambda: optimizers.LARS(0.1, skip_vectors=False, eps=0.1),
}
# One larger than a block takes, one of a single element, two of vectors, one that gets no gradient.
PARAMETERS = [(130, 130), (1, 1), (7,), (3,), (4, 2, 3), (40_000,), (2, 2)]


def parameters(place, dtype, rng):
    """A link with parameters of these shapes."""
    link = Link()
    with link.init_scope():
        for i, shape in enumerate(PARAMETERS):
            setattr(link, f"p{i}", Parameter(numbers(rng, shape, dtype)))
    link.p3.array[...] = 0
    return link.to_device(place)


def updated(place, name, dtype):
    """The parameters after four updates from equal gradients."""
    link = parameters(place, dtype, np.random.default_rng(1))
    optimizer = METHODS[name]().setup(link)
    rng = np.random.default_rng(2)
    for _ in range(4):
        for p in list(link.params())[:-1]:
            p.grad = put(place, numbers(rng, p.shape, dtype))
        optimizer.update()
    return [backend.to_cpu(p.array) for p in link.params()]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", METHODS)
def test_updates(name, dtype, device):
    """Those of NumPy on the host."""
    num_eps = {"float64": 64, "float32": 64, "float16": 4, "bfloat16": 4}[dtype]
    tolerance = num_eps * eps_of(backend.as_dtype(dtype))
    for got, expected in zip(updated(device, name, dtype), updated(backend.get_device("@numpy"), name, dtype)):
        np.testing.assert_allclose(*wide(got, expected), rtol=tolerance, atol=tolerance)


RULES = {
    "sgd": (0, (0.1,)), "momentum_sgd": (1, (0.1, 0.9)), "adam": (3, (0.9, 0.1, 0.99, 0.01, 0.1, 1e-8, 1.0)),
    "lars": (1, (((0, 7, True), (8, 16, False)), 0.1, 0.9, 0.1, 0.1, 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_one_kernel_updates(rule, dtype, device, xp, on):
    """On a GPU each rule has one; elsewhere the formula has to do."""
    count, rates = RULES[rule]
    kind = backend.as_dtype(dtype)
    arrays = (*(xp.ones(16, kind) for _ in range(2)), *(xp.zeros(16, backend.accumulation_dtype(kind)),) * count)
    assert kernels.update(rule, arrays, rates) == (on == "cupy")


def test_a_rule_with_its_own_step_is_heard(device, xp):
    """A subclass of a rule that has a kernel."""

    class Rule(optimizers.MomentumSGD.rule_class):
        def step(self, hp, t, p, g, *state):
            p -= 7

    class Method(optimizers.MomentumSGD):
        rule_class = Rule

    link = parameters(device, "float32", np.random.default_rng(1))
    before = backend.to_cpu(link.p0.array)
    optimizer = Method().setup(link)
    for p in link.params():
        p.grad = xp.ones(p.shape, np.float32)
    optimizer.update()
    np.testing.assert_array_equal(backend.to_cpu(link.p0.array), before - 7)
