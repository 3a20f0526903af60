"""The hooks of dbrdist.link_hooks: the weights that forward sees, what is saved, and times."""

from __future__ import annotations

import copy
import io
import threading

import numpy as np
import pytest

import dbrdist
from dbrdist import Chain, Parameter, Variable, link_hooks, optimizers, serializers
from dbrdist import functions as F
from dbrdist import links as L
from tests.each import each

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype("f")
IMAGES = RNG.standard_normal((2, 4, 5, 5)).astype("f")
LINKS = {
    "Linear": (lambda size: L.Linear(size, 3), X, 0),
    "Convolution2D": (lambda size: L.Convolution2D(size, 3, 2), IMAGES, 0),
    "Deconvolution2D": (lambda size: L.Deconvolution2D(size, 3, 2), IMAGES, 1),
    "ConvolutionND": (lambda size: L.ConvolutionND(2, size, 3, 2), IMAGES, 0),
    "DeconvolutionND": (lambda size: L.DeconvolutionND(2, size, 3, 2), IMAGES, 1),
    "EmbedID": (lambda size: L.EmbedID(5, 3), np.arange(5), 0),
}


def norm(link, axis, W=None):
    W = np.moveaxis(np.asarray(link.W.array if W is None else W, np.float64), axis, 0)
    return np.linalg.svd(W.reshape(len(W), -1), compute_uv=False)[0]


def with_weight(link, W, x):
    """What a copy of the link without hooks gives with another weight."""
    other = copy.deepcopy(link)
    for name in list(other.local_link_hooks):
        other.delete_hook(name)
    other.W.array = np.asarray(W, "f")
    return other(x).array


@each(name=LINKS, is_lazy=[False, True])
def test_spectral_normalization(name, is_lazy):
    make, x, axis = LINKS[name]
    hook = link_hooks.SpectralNormalization(n_power_iteration=100)
    link = make(None if is_lazy else 4).add_hook(hook)
    y = link(x)
    W = link.W
    assert isinstance(W, dbrdist.Parameter) and "W_u" in link._persistent and link.W_u.shape == (W.shape[axis],)
    assert hook.axis == axis and hook.vector_name == "W_u"
    np.testing.assert_allclose(y.array, with_weight(link, W.array / norm(link, axis), x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(link.W_u), 1, rtol=1e-4)
    link.delete_hook("SpectralNormalization")
    assert not hasattr(link, "W_u") and link._persistent == []


@each(use_gamma=[False, True], factor=[None, 2.0])
def test_factor_and_gamma(use_gamma, factor):
    hook = link_hooks.SpectralNormalization(100, 1e-6, use_gamma, factor)
    link = L.Linear(None, 3).add_hook(hook)
    assert [name for name, _ in link.namedparams()] == ["/W", "/b"] + ["/gamma"] * use_gamma
    y = link(X)
    s = norm(link, 0)
    scale = (s if use_gamma else 1.0) * (factor or 1.0) / s
    np.testing.assert_allclose(y.array, X @ (link.W.array.T * scale), rtol=1e-3, atol=1e-4)
    if use_gamma:
        assert link.gamma.shape == ()
        np.testing.assert_allclose(link.gamma.array, s, rtol=1e-5)
        link.cleargrads()
        F.sum(link(X)).backward()
        np.testing.assert_allclose(link.gamma.grad, (X @ link.W.array.T / s).sum() * (factor or 1.0), rtol=1e-3)
        link.delete_hook(hook.name)
        assert [name for name, _ in link.namedparams()] == ["/W", "/b"]


def test_steps_of_power_iteration():
    link = L.Linear(4, 3, nobias=True).add_hook(link_hooks.SpectralNormalization(eps=1e-12))
    W, u = link.W.array.astype("d"), link.W_u.astype("d")
    for _ in range(2):
        v = u @ W / np.linalg.norm(u @ W)
        u = W @ v / np.linalg.norm(W @ v)
        y = link(X)
        np.testing.assert_allclose(link.W_u, u, rtol=1e-4)
        np.testing.assert_allclose(y.array, X @ W.T / (u @ W @ v), rtol=1e-4)
    before = link.W_u.copy()
    with dbrdist.using_config("train", False):
        link(X)
    np.testing.assert_array_equal(link.W_u, before)


def differences(link, x, W):
    """The gradient of the sum of squares by finite differences, without hooks having side effects."""
    g = np.zeros_like(W.array)
    for i in np.ndindex(W.shape):
        old, values = W.array[i], []
        for step in (1e-6, -1e-6):
            W.array[i] = old + step
            with dbrdist.using_config("train", False):
                values.append(float(F.sum(link(x) ** 2).array))
        W.array[i] = old
        g[i] = (values[0] - values[1]) / 2e-6
    return g


@pytest.mark.slow
@each(hook=[lambda: link_hooks.SpectralNormalization(300), link_hooks.WeightStandardization])
def test_gradients_reach_the_weight(hook):
    with dbrdist.using_config("dtype", np.float64):
        link = L.Linear(4, 3).add_hook(hook())
    x = X.astype("d")
    link(x)
    link.cleargrads()
    F.sum(link(x) ** 2).backward()
    np.testing.assert_allclose(link.W.grad, differences(link, x, link.W), rtol=1e-4, atol=1e-5)


@each(is_lazy=[False, True])
def test_a_normalized_link_is_saved_and_loaded(is_lazy):
    def make(size):
        return L.Linear(size, 3).add_hook(link_hooks.SpectralNormalization(use_gamma=True))

    link = make(4)
    link(X)
    file = io.BytesIO()
    serializers.save_npz(file, link)
    file.seek(0)
    assert sorted(np.load(file)) == ["W", "W_u", "b", "dbrdist.json", "gamma"]
    file.seek(0)
    other = make(None if is_lazy else 4)
    serializers.load_npz(file, other)
    np.testing.assert_array_equal(other.W_u, link.W_u)
    np.testing.assert_array_equal(other(X).array, link(X).array)


@each(name=["Linear", "Convolution2D", "DeconvolutionND"], is_lazy=[False, True])
def test_weight_standardization(name, is_lazy):
    make, x, _ = LINKS[name]
    link = make(None if is_lazy else 4).add_hook(link_hooks.WeightStandardization(eps=0.01))
    y = link(x)
    W = link.W.array.astype("d")
    axes = tuple(range(1, W.ndim))
    W = (W - W.mean(axes, keepdims=True)) / (W.std(axes, keepdims=True) + 0.01)
    np.testing.assert_allclose(y.array, with_weight(link, W, x), rtol=1e-4, atol=1e-5)
    assert isinstance(link.W, dbrdist.Parameter)


def test_a_weight_without_deviation():
    link = L.Linear(4, 3, initialW=0.5).add_hook(link_hooks.WeightStandardization())
    F.sum(link(X)).backward()
    assert np.isfinite(link.W.grad).all()


def test_training_with_hooks():
    class Net(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.a = L.Convolution2D(None, 6, 3).add_hook(link_hooks.WeightStandardization())
                self.b = L.Linear(None, 2).add_hook(link_hooks.SpectralNormalization(use_gamma=True))

        def forward(self, x, t):
            return F.softmax_cross_entropy(self.b(F.relu(self.a(x))), t)

    net, t = Net(), np.array([0, 1])
    optimizer = optimizers.SGD(0.1).setup(net)
    losses = []
    net(IMAGES, t)
    first = net.b.gamma.array.copy()
    for _ in range(10):
        optimizer.update(net, IMAGES, t)
        losses.append(float(net(IMAGES, t).array))
    assert losses[-1] < losses[0]
    assert net.b.gamma.array != first


def test_two_hooks_of_one_weight():
    link = L.Linear(4, 3).add_hook(link_hooks.WeightStandardization())
    link.add_hook(link_hooks.SpectralNormalization(100))
    W = link.W
    y = link(X)
    assert link.W is W and "_own_W" not in vars(link)
    standard = (W.array - W.array.mean(1, keepdims=True)) / (W.array.std(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.array, X @ (standard / norm(link, 0, standard)).T, rtol=1e-3, atol=1e-4)


@each(hook=[link_hooks.SpectralNormalization, link_hooks.WeightStandardization])
def test_the_weight_comes_back_after_an_error(hook):
    link = L.Linear(4, 3).add_hook(hook())
    W = link.W
    with pytest.raises(ValueError, match="link Linear: linear: x: expected 4 elements"):
        link(X[:, :3])
    assert link.W is W and "_own_W" not in vars(link)
    link(X)
    assert link.W is W


def test_copies_have_vectors_of_their_own():
    link = L.Linear(4, 3).add_hook(link_hooks.SpectralNormalization())
    for mode in ("copy", "init"):
        other = link.copy(mode)
        before = link.W_u.copy()
        other(X)
        np.testing.assert_array_equal(link.W_u, before)
        assert not np.array_equal(other.W_u, before)


@each(
    case=[
        (lambda: L.Linear(4, 3).add_hook(link_hooks.SpectralNormalization(weight_name="V")), "the name of a parameter"),
        (
            lambda: L.Linear(4, 3).add_hook(link_hooks.WeightStandardization(weight_name="V")),
            "parameter of Linear, got",
        ),
        (lambda: link_hooks.SpectralNormalization(0), "n_power_iteration: expected 1 or more, got 0"),
        (
            lambda: L.Linear(4, 3).add_hook(link_hooks.WeightStandardization(weight_name="b"))(X),
            "WeightStandardization: b: expected two axes or more",
        ),
    ]
)
def test_wrong_arguments_are_named(case):
    call, words = case
    with pytest.raises(ValueError, match=words):
        call()


def test_hooks_of_one_link_are_not_for_with():
    for hook in (link_hooks.SpectralNormalization(name="a"), link_hooks.WeightStandardization(name="b")):
        with pytest.raises(NotImplementedError, match="hook of one link"), hook:
            pass
    link = L.Linear(4, 3)
    with pytest.raises(ValueError):
        link.add_hook(link_hooks.SpectralNormalization(weight_name="V"))
    assert not link.local_link_hooks
    assert list(link.add_hook(link_hooks.SpectralNormalization(name="a")).local_link_hooks) == ["a"]


# ---- Links that several threads call at once: each call sees its own weights and returns its own results ----


HOOKS = {
    "spectral": link_hooks.SpectralNormalization,
    "standardized": link_hooks.WeightStandardization,
}


EVENTS = {}  # by the id of an input


class Paused(L.Linear):
    """A linear link whose forward says that it has begun and waits."""

    def forward(self, x):
        self.seen = self.W
        events = EVENTS[id(x)]
        events["begun"].set()
        assert events["go"].wait(30)
        y = super().forward(x)
        self.calls = getattr(self, "calls", 0) + 1
        return y


def paused_input(seed):
    x = Variable(np.random.default_rng(seed).normal(size=(2, 5)).astype("f"))
    EVENTS[id(x)] = {"begun": threading.Event(), "go": threading.Event()}
    return x


def in_thread(function):
    results = []

    def run():
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@each(name=HOOKS)
def test_the_parameter_stays_in_the_link_during_a_call(name):
    link = Paused(5, 3)
    link.add_hook(HOOKS[name]())
    W = link.W
    xs = [paused_input(0), paused_input(1)]
    alone = []
    for x in xs:
        EVENTS[id(x)]["go"].set()
        with dbrdist.using_config("train", False):
            alone.append(link(x).array)
        EVENTS[id(x)]["go"].clear()
        EVENTS[id(x)]["begun"].clear()
    first, first_result = in_thread(lambda: link(xs[0]))
    assert EVENTS[id(xs[0])]["begun"].wait(30)
    assert link.W is W
    second, second_result = in_thread(lambda: link(xs[1]))  # begins while the first call is under way
    assert EVENTS[id(xs[1])]["begun"].wait(30)
    assert link.W is W
    for thread, x in ((first, xs[0]), (second, xs[1])):  # and ends after it
        EVENTS[id(x)]["go"].set()
        thread.join(30)
        assert link.W is W
        assert isinstance(link.W, Parameter)
    np.testing.assert_allclose(first_result[0].array, alone[0], rtol=1e-5)
    np.testing.assert_allclose(second_result[0].array, alone[1], rtol=1e-5)
    assert [name for name, _ in link.namedparams()] == ["/W", "/b"]
    assert not isinstance(link.seen, Parameter)
    assert link.calls >= 3


class Failing(L.Linear):
    def forward(self, x):
        raise ValueError("as planned")


def test_the_parameter_stays_in_a_link_whose_call_fails():
    link = Failing(5, 3)
    link.add_hook(link_hooks.SpectralNormalization())
    W = link.W
    try:
        link(np.zeros((2, 5), "f"))
    except ValueError:
        assert link.W is W


def test_two_hooks_see_each_others_weight():
    link = L.Linear(5, 3)
    x = np.random.default_rng(0).normal(size=(2, 5)).astype("f")
    link.add_hook(link_hooks.WeightStandardization())
    link.add_hook(link_hooks.SpectralNormalization(n_power_iteration=100))
    W = link.W.array.astype("d")
    centred = W - W.mean(1, keepdims=True)
    standard = centred / (np.sqrt((centred**2).mean(1, keepdims=True)) + 1e-5)
    wanted = x @ (standard / np.linalg.svd(standard, compute_uv=False)[0]).T + link.b.array
    np.testing.assert_allclose(link(x).array, wanted, rtol=1e-4, atol=1e-5)
    assert isinstance(link.W, Parameter)


class Predictor(dbrdist.Chain):
    def forward(self, x):
        EVENTS[id(x)]["begun"].set()
        assert EVENTS[id(x)]["go"].wait(30)
        return x * 1.0


def test_a_classifier_returns_its_own_loss():
    model = L.Classifier(Predictor())
    xs, t = [paused_input(k) for k in range(2)], np.array([1, 2])
    reached, release = threading.Event(), threading.Event()

    def loss_of(y, t):
        loss = F.softmax_cross_entropy(y, t)
        if not reached.is_set():  # the first call stops after its loss until the second has ended
            reached.set()
            assert release.wait(30)
        return loss

    def slow_accuracy(y, t):
        return F.accuracy(y, t)

    model.lossfun, model.accfun = loss_of, slow_accuracy
    wanted = [float(F.softmax_cross_entropy(x, t).array) for x in xs]
    for x in xs:
        EVENTS[id(x)]["go"].set()
    first, first_result = in_thread(lambda: model(xs[0], t))
    assert reached.wait(30)
    second, second_result = in_thread(lambda: model(xs[1], t))
    second.join(30)
    release.set()
    first.join(30)
    assert [float(first_result[0].array), float(second_result[0].array)] == wanted


def test_a_classifier_whose_other_call_ends_first():
    """The second call begins and ends while the first one computes its accuracy."""
    model = L.Classifier(Predictor())
    xs, t = [paused_input(k) for k in range(2)], np.array([1, 2])
    reached, release = threading.Event(), threading.Event()

    def accuracy(y, t):
        if not reached.is_set():
            reached.set()
            assert release.wait(30)
        return F.accuracy(y, t)

    model.accfun = accuracy
    for x in xs:
        EVENTS[id(x)]["go"].set()
    first, result = in_thread(lambda: model(xs[0], t))
    assert reached.wait(30)
    in_thread(lambda: model(xs[1], t))[0].join(30)
    release.set()
    first.join(30)
    assert float(result[0].array) == float(F.softmax_cross_entropy(xs[0], t).array)


@pytest.mark.filterwarnings("ignore:Linear. out_size is 0")
def test_spectral_normalization_refuses_a_weight_without_elements():
    for link, hook in (
        (L.Linear(10, 0), link_hooks.SpectralNormalization()),
        (L.Linear(None, 0), link_hooks.SpectralNormalization()),
    ):
        with pytest.raises(ValueError, match="SpectralNormalization: W: expected a weight that has elements"):
            link.add_hook(hook)
            link(np.zeros((1, 10), np.float32))


def test_a_forward_that_a_link_has_of_its_own_stays_bound_to_it():
    """The call runs it on a copy with other weights, whose forward stays behind."""
    link = L.Linear(4, 3)
    link.forward = link.forward
    link.add_hook(dbrdist.link_hooks.WeightStandardization())
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    for _ in range(2):
        W = link.W.array.astype(np.float64)
        W = (W - W.mean(1, keepdims=True)) / (W.std(1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(link(x).array, x @ W.T + link.b.array, rtol=1e-3, atol=1e-4)
        assert link.forward.__self__ is link
