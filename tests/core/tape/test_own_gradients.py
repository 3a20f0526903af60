"""Gradients that nobody else has are completed in place; whatever others can reach stays as it is."""

import functools

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.core.tape import backprop
from dbrdist.functions import rectifier
from tests.each import each

SHAPE = (2, 64, 64, 64)  # a gradient of 2 MB; large enough for the ways of large images
HUGE = (8, 64, 64, 64)  # and 8 MB
STEP = 2


@functools.lru_cache(maxsize=8)
def drawn(seed, shape):
    return backend.channels_last(np.random.default_rng(seed).standard_normal(shape, np.float32))


def draw(seed, shape=SHAPE):
    return drawn(seed, shape).copy(order="K")  # a tenth of the time that drawing takes


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


class Remembers(dbrdist.FunctionNode):
    """The identity, whose rule hands on the very gradient that it got, and keeps it"""

    def forward(self, xs):
        return (xs[0] * 1.0,)

    def derive(self, wanted, gys):
        self.seen = gys[0]
        self.copy = self.seen.copy()
        return gys


def strided(y, W):
    return F.convolution_2d(y, W, stride=STEP)


def spread(g, W):
    """The gradient of a strided 1x1 convolution, by its definition."""
    gx = np.zeros(SHAPE)
    gx[:, :, ::STEP, ::STEP] = np.einsum("nohw,oc->nchw", g.astype("d"), W[:, :, 0, 0].astype("d"))
    return gx


BRANCHES = {
    "strided alone": lambda y, W: [strided(y, W)],
    "strided first": lambda y, W: [strided(y, W), y * 3.0],
    "strided last": lambda y, W: [y * 3.0, strided(y, W)],
    "twice": lambda y, W: [strided(y, W), strided(y, W)],
    "with a sum of others": lambda y, W: [y * 1.0, strided(y, W), y * 2.0],
    "with a gradient that others have": lambda y, W: [strided(y, W), y + np.float32(1)],
    "behind a deeper one": lambda y, W: [strided(y, W), (y * 1.5) * 2.0],
}


@pytest.mark.slow
@pytest.mark.parametrize("observed", [False, True])
@each(name=list(BRANCHES))
def test_a_strided_convolution_sends_what_it_saw_to_a_relu(name, observed):
    x, W = Variable(draw(0)), draw(1, (8, 64, 1, 1))
    y = F.relu(x)
    ends = BRANCHES[name](y, W)
    gys = [draw(i + 2, e.shape) for i, e in enumerate(ends)]
    before = [g.copy() for g in gys]
    expected = np.zeros(SHAPE)
    for i, (e, g) in enumerate(zip(ends, gys)):
        e.grad = g
        scale = {"with a sum of others": (1, 0, 2)}.get(name, (1, 1) if "have" in name else (3, 3))[i]
        expected += spread(g, W) if e.shape != SHAPE else scale * g.astype("d")
    backprop.backward(ends, retain_grad=observed)
    close(x.grad, expected * (x.array > 0))
    if observed:
        close(y.grad, expected)
    for g, old in zip(gys, before):
        np.testing.assert_array_equal(g, old)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stops_at_a_closed_relu_and_passes_an_open_one(value):
    x, W = Variable(draw(0)), np.ones((1, 64, 1, 1), np.float32)
    x.array[0, :, 0, 0], x.array[1, 0, 2, 4] = -1, 1
    end = strided(F.relu(x), W)
    end.grad = np.ones(end.shape, np.float32)
    end.grad[0, 0, 0, 0] = end.grad[1, 0, 1, 2] = value
    with np.errstate(invalid="ignore"):
        end.backward()
    assert not x.grad[0, :, 0, 0].any()
    np.testing.assert_array_equal(x.grad[1, :, 2, 4], np.where(x.array[1, :, 2, 4] > 0, np.float32(value), 0))
    np.testing.assert_array_equal(x.grad[1, :, 6::STEP, ::STEP], x.array[1, :, 6::STEP, ::STEP] > 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_is_masked_where_it_lies(dtype):
    y, gy = (draw(i).astype(backend.as_dtype(dtype)) for i in (0, 1))
    y[y < 0] = 0
    gy[0, 0, 0, 0], gy[1, 3, 20, 5], gy[1, 63, 63, 63] = np.nan, np.inf, -np.inf
    expected = np.where(y != 0, gy.astype("f"), 0).astype(gy.dtype)
    with np.errstate(invalid="ignore"):
        gx = kernels.relu_backward_over(y, gy)
    np.testing.assert_array_equal(gx.astype("f"), expected.astype("f"))
    assert gx is gy or kernels.provider_of("relu_backward_over", y, gy) == "numpy"
    gy.flags.writeable = False
    with np.errstate(invalid="ignore"):
        assert kernels.relu_backward_over(y, gy) is not gy


@pytest.mark.slow
@pytest.mark.parametrize("relu", [False, True])
def test_a_normalization_writes_its_gradient_over_one_that_it_may_overwrite(relu):
    x, gy, (gamma, beta) = draw(0, HUGE), draw(1, HUGE), np.random.default_rng(2).standard_normal((2, 64), np.float32)
    _, mean, var, saved = kernels.bn_forward(x, gamma, beta, 2e-5, relu)
    before, arguments = gy.copy(), (x, gamma, mean, var, gy, 2e-5, saved, relu)
    first = kernels.bn_backward(*arguments)
    np.testing.assert_array_equal(gy, before)
    second = kernels.bn_backward(*arguments, is_ours=True)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)
    assert np.shares_memory(second[0], gy) == (saved[0] == "onednn")


@pytest.mark.slow
def test_gradients_that_a_user_holds_stay_as_they_are():
    for make in (F.relu, lambda h: L.BatchNormalization(64)(h), lambda h: F.relu(L.BatchNormalization(64)(h))):
        x = Variable(draw(0, HUGE))
        y = make(x * 1.0)
        y.grad = given = draw(1, HUGE)
        before = given.copy()
        y.backward()
        y.backward()
        np.testing.assert_array_equal(given, before)
        assert y.grad is given


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_that_a_users_rule_keeps_stay_as_they_are(normalize):
    keeper, link, x = Remembers(), L.BatchNormalization(64), Variable(draw(0, HUGE))
    h = link(x * 1.0) if normalize else x * 1.0
    y = F.convolution_2d(keeper.apply((F.relu(h),))[0], draw(1, (4, 64, 1, 1)))
    F.sum(y).backward()
    np.testing.assert_array_equal(keeper.seen, keeper.copy)


@pytest.mark.slow
def test_a_pass_in_place_gives_the_numbers_of_one_that_is_observed():
    def gradients(observed):
        link, x, W = L.BatchNormalization(64), Variable(draw(0, HUGE)), draw(1, (64, 64, 1, 1))
        h = F.max_pooling_2d(F.relu(link(x * 1.0)), 3, stride=1, pad=1)
        y = F.relu(link(F.convolution_2d(h, W)) + h)
        y.grad = draw(2, y.shape)
        y.backward(retain_grad=observed)
        return x.grad, link.gamma.grad, link.beta.grad

    for a, b in zip(gradients(False), gradients(True)):
        np.testing.assert_array_equal(a, b)


class Listens:
    """Hears when gradients are complete, as a reduction does that overlaps with the pass."""

    def expect(self, used):
        self.heard = []

    def ready(self, node):
        self.heard.append(node)


def small_network():
    """(its output, its gradients by leaf) of layers that go backward in place where they may; with flat memory."""
    net = dbrdist.Sequential(
        L.Convolution2D(64, 64, 1, nobias=True), L.BatchNormalization(64), F.relu,
        L.Convolution2D(64, 8, 1, stride=STEP, nobias=True),
    )  # fmt: skip
    for i, (_, p) in enumerate(sorted(net.namedparams())):
        p.array = draw(i + 5, p.shape) if p.ndim == 4 else p.array
    dbrdist.optimizers.SGD().setup(net)
    y = net(draw(0, HUGE))
    y.grad = draw(1, y.shape)
    return y, net


@pytest.mark.parametrize("is_heard", [False, True])
def test_gradients_are_overwritten_in_a_pass_with_a_listener_too(monkeypatch, is_heard):
    y, net = small_network()
    backprop.backward([y], retain_grad=True)
    expected = {name: p.grad.copy() for name, p in net.namedparams()}
    (y, net), claims, listener = small_network(), [], Listens()
    rule = rectifier.ReLU.derive
    monkeypatch.setattr(rectifier.ReLU, "derive", lambda f, *args: claims.append(f.owns_gy) or rule(f, *args))
    backprop.backward([y], listener=listener if is_heard else None)
    assert claims == [True]
    for name, p in net.namedparams():
        np.testing.assert_array_equal(p.grad, expected[name])
    assert not is_heard or len(listener.heard) == len(expected)


def test_gradients_that_a_hook_keeps_stay_as_they_are_beside_a_listener():
    class Keeps(dbrdist.FunctionHook):
        def __init__(self):
            self.seen = []

        def backward_preprocess(self, function, in_data, out_grad):
            self.seen += [(g, g.copy()) for g in out_grad]

    y, _ = small_network()
    with Keeps() as hook:
        backprop.backward([y], listener=Listens())
    assert len(hook.seen) == 4
    for g, before in hook.seen:
        np.testing.assert_array_equal(g, before)


def test_a_pass_that_failed_leaves_no_claim_on_what_the_next_one_gets():
    class Fails(dbrdist.FunctionNode):
        def forward(self, xs):
            return (xs[0] * 1.0,)

        def derive(self, wanted, gys):
            raise RuntimeError("here")

    x, W = Variable(draw(0)), draw(1, (4, 64, 1, 1))
    y = F.relu(x * 1.0)
    end = F.sum(F.convolution_2d(y, W)) + F.sum(Fails().apply((y * 2.0,))[0])
    with pytest.raises(RuntimeError, match="here"):
        end.backward()
    y.grad = given = draw(2)
    before = given.copy()
    y.backward()
    np.testing.assert_array_equal(given, before)


PARTS = {
    "concat": lambda a, b: F.concat((a, b), 0),
    "concat of columns": lambda a, b: F.concat((a, b), 1),
    "stack": lambda a, b: F.stack((a, b)),
    "reshape": lambda a, b: F.reshape(a, (-1, 2)) + F.reshape(b, (-1, 2)),
    "reshape of a sum": lambda a, b: F.sum(F.reshape(a, (2, 3, 4)), 1) + F.sum(F.reshape(b, (2, 3, 4)), 1),
    "scatter": lambda a, b: F.scatter_add(a, np.array([1, 0, 1, 2, 2, 5]), b),
}


def _owner(a):
    while a.base is not None:
        a = a.base
    return a


@each(name=list(PARTS), among=["the seed", "a new gradient", "two uses"])
def test_leaves_never_share_their_gradients_with_each_other_nor_with_what_others_hold(name, among):
    """A part of a gradient goes to a leaf without a copy where nobody else has that gradient."""
    x = np.random.default_rng(0).standard_normal((2, 6, 4))
    a, b = (Variable(v) for v in x)
    y = PARTS[name](a, b)
    if among == "two uses":
        y = y * y + y
    elif among == "a new gradient":
        y = y * 2.0
    gy = np.random.default_rng(1).standard_normal(y.shape)
    before = gy.copy()
    backprop.backward([y], [gy])
    grads = a.grad.copy(), b.grad.copy()
    for g in (a.grad, b.grad):
        assert not np.shares_memory(g, gy) and g.flags.c_contiguous
    assert not np.shares_memory(a.grad, b.grad)
    a.grad[...] = 7  # as a hook may
    np.testing.assert_array_equal(gy, before)
    np.testing.assert_array_equal(b.grad, grads[1])
    a, b = (Variable(v) for v in x)
    y = PARTS[name](a, b)
    y = y * y + y if among == "two uses" else y * 2.0 if among == "a new gradient" else y
    for v, g in zip((a, b), dbrdist.grad([y], [a, b], [Variable(gy)], enable_double_backprop=True)):
        np.testing.assert_allclose(g.array, grads[v is b], rtol=1e-12)


def test_a_part_of_a_gradient_that_nobody_else_has_is_not_copied():
    a, b = (Variable(np.ones((50, 40), "f")) for _ in range(2))
    y = F.concat((a, b), 0) * 2.0
    backprop.backward([y], [np.ones((100, 40), "f")])
    assert _owner(a.grad) is _owner(b.grad)
    small = Variable(np.ones((1, 40), "f"))  # whose gradient would keep that of all
    large = Variable(np.ones((99, 40), "f"))
    y = F.concat((small, large), 0) * 2.0
    backprop.backward([y], [np.ones((100, 40), "f")])
    assert _owner(small.grad).size == 40


def test_a_gradient_that_a_hook_or_a_variable_keeps_is_copied():
    a, b = (Variable(np.ones((50, 40), "f")) for _ in range(2))
    joined = F.concat((a, b), 0)
    y = joined * 2.0
    y.grad = np.ones(y.shape, "f")
    y.backward(retain_grad=True)
    assert not np.shares_memory(joined.grad, a.grad)
    a.grad[...] = 7
    assert (joined.grad == 2).all()


class Gives(dbrdist.FunctionNode):
    """The identity, whose rule gives new arrays, and remembers them"""

    gives_new = True

    def __init__(self, seen):
        self.seen = seen

    def forward(self, xs):
        return (xs[0] * 1.0,)

    def derive(self, wanted, gys):
        self.seen.append(gys[0] * 2.0)
        return (self.seen[-1],)


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_leafs_second_gradient_takes_the_first_where_nobody_else_has_it(is_turned):
    """What a program was shown before, and the gradient that it gives, stay as they are."""
    seen, x = [], Variable(np.arange(12.0).reshape(3, 4))
    x.grad = given = np.ones((3, 4)).T.copy().T if is_turned else np.ones((3, 4))
    dbrdist.backward([Gives(seen).apply((x,))[0]], [np.full((3, 4), 5.0)])
    np.testing.assert_array_equal(x.grad, np.full((3, 4), 11.0))
    np.testing.assert_array_equal(given, np.ones((3, 4)))
    assert (x.grad is seen[-1]) == (not is_turned)
    before, gy = x.grad, np.ones((3, 4))
    dbrdist.backward([F.identity(x)], [gy])  # hands on what it was given
    np.testing.assert_array_equal(x.grad, np.full((3, 4), 12.0))
    np.testing.assert_array_equal(before, np.full((3, 4), 11.0))
    np.testing.assert_array_equal(gy, np.ones((3, 4)))


def test_a_leaf_takes_the_gradient_of_a_layer_normalization_as_its_own(monkeypatch):
    made = []
    rule = kernels.ln_backward
    monkeypatch.setattr(kernels, "ln_backward", lambda *words: made.append(rule(*words)) or made[-1])
    x, gamma, beta = (Variable(np.random.default_rng(0).standard_normal(s, np.float32)) for s in ((6, 9), 9, 9))
    dbrdist.backward([F.layer_normalization(x, gamma, beta)], [np.ones((6, 9), "f")])
    assert all(v.grad is g for v, g in zip((x, gamma, beta), made[0]))
    assert not np.shares_memory(gamma.grad, beta.grad)


def test_a_leaf_takes_what_a_difference_does_not_hand_on():
    a, b, gy = (Variable(drawn(i, (30, 40, 2, 2))) for i in range(3))
    negated = []
    y = a - b
    rule = y.creator_node.derive
    y.creator_node.derive = lambda *words: negated.append(rule(*words)) or negated[-1]
    dbrdist.backward([y], [gy.array])
    assert b.grad is negated[0][1] and negated[0][0] is gy.array
    assert not np.shares_memory(a.grad, gy.array)
    np.testing.assert_array_equal(a.grad, gy.array)
    np.testing.assert_array_equal(b.grad, -gy.array)
