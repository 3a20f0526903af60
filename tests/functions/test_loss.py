"""softmax_cross_entropy, softmax and log_softmax on every path, against sums written out in float64."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.core.tape.gradient_check import check_backward, check_double_backward
from dbrdist.functions.loss import LabelCrossEntropy, MeanOverLabels
from dbrdist.kernels.cpu import onednn
from tests.each import each

try:
    import torch
except ImportError:
    if os.environ.get("DBRDIST_REQUIRE_TORCH"):
        raise
    torch = None


try:
    onednn.library()
    PROVIDERS = ["numpy", "onednn"]
except onednn.Unavailable:
    PROVIDERS = ["numpy"]


INF = np.inf
SHAPES = [(6, 5), (300, 10), (40, 1000), (3, 7, 11), (2, 6, 9, 8), (2, 3, 4, 3, 2), (0, 4), (5, 1)]


def reference(x, t, weight=None, ignore=-1, smoothing=0.0):
    """Losses of each label and the gradient of their sum, label by label; what has no weight adds nothing."""
    x = np.moveaxis(x.astype(np.float64), 1, -1)
    num_classes = x.shape[-1]
    losses, gx = np.zeros(t.shape), np.zeros(x.shape)
    for i in np.ndindex(t.shape):
        if t[i] == ignore:
            continue
        q = np.full(num_classes, smoothing / num_classes)
        q[int(t[i])] += 1 - smoothing
        q *= 1 if weight is None else weight
        largest = x[i].max()
        log_total = largest + np.log(np.exp(x[i] - largest).sum())
        has_weight = q != 0
        losses[i] = (q[has_weight] * (log_total - x[i][has_weight])).sum()
        gx[i] = np.exp(x[i] - log_total) * q.sum() - q
    return losses, np.moveaxis(gx, -1, 1)


def drawn(shape, dtype="float32", masked=False, ignored=False, seed=0):
    """Scores and labels; ``masked``: a third of the scores are -inf, none of them at its label."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, shape).astype(backend.as_dtype(dtype))
    t = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if masked:
        at_label = np.expand_dims(t, 1) == np.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2))
        x[(rng.random(shape) < 0.3) & ~at_label] = -INF
    if ignored:
        t[rng.random(t.shape) < 0.3] = -1
    return backend.channels_last(x) if x.ndim == 4 else x, t


def check(x, t, rtol, provider="numpy", **options):
    weight, ignore = options.get("class_weight"), options.get("ignore_label", -1)
    losses, gx = reference(x, t, weight, ignore, options.get("label_smoothing", 0.0))
    count = max((t != ignore).sum(), 1) if options.get("normalize", True) else max(len(t), 1)
    a, b = Variable(x), Variable(x)
    with kernels.use(provider):
        mean = F.softmax_cross_entropy(a, t, **options)
        mean.backward()
        each = F.softmax_cross_entropy(b, t, reduce="no", **options)
        each.grad = np.ones(each.shape, each.dtype)
        each.backward()
    assert mean.dtype == each.dtype == a.grad.dtype == x.dtype
    scale = max(1.0, np.abs(losses[np.isfinite(losses)]).max(initial=0))
    np.testing.assert_allclose(mean.array.astype("d"), losses.sum() / count, rtol=rtol, atol=rtol * scale)
    np.testing.assert_allclose(each.array.astype("d"), losses, rtol=rtol, atol=rtol * scale)
    np.testing.assert_allclose(a.grad.astype("d"), gx / count, rtol=rtol, atol=rtol / count)
    np.testing.assert_allclose(b.grad.astype("d"), gx, rtol=rtol, atol=rtol)
    if x.ndim == 4:
        assert backend.is_channels_last(a.grad)


@pytest.mark.filterwarnings("ignore:softmax_cross_entropy. x. there is one class")
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", SHAPES)
@each(masked=[False, True])
def test_every_argument(shape, masked, provider):
    x, t = drawn(shape, masked=masked)
    weight = np.linspace(0, 2, shape[1]).astype(np.float32)
    for ignored, w, normalize in itertools.product((False, True), (None, weight), (True, False)):
        t = drawn(shape, ignored=ignored)[1]
        check(x, t, 2e-5, provider, class_weight=w, normalize=normalize)
    check(x, np.where(t == -1, 0, t), 2e-5, provider, ignore_label=0)
    if not masked:  # each masked class has a share of the smoothed labels: an infinite loss, see below
        check(x, t, 2e-5, provider, class_weight=weight, label_smoothing=0.3)
        check(x, t, 2e-5, provider, label_smoothing=1.0)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("shape", [(6, 5), (40, 100), (2, 6, 9, 8)])
def test_other_types(shape, dtype, rtol):
    x, t = drawn(shape, dtype, masked=True, ignored=True)
    check(x, t, rtol)
    check(x, t, rtol, class_weight=np.linspace(0.5, 2, shape[1]))


@pytest.mark.parametrize("shape", [(6, 5), (300, 10), (2, 6, 9, 8)])
@each(dtype=[np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_labels_of_any_integer_type(shape, dtype):
    x, t = drawn(shape)
    check(x, t.astype(dtype), 2e-5)
    check(x, t.astype(dtype), 2e-5, ignore_label=2)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("options", [{}, {"ignore_label": 0}, {"class_weight": np.ones(100, np.float32)}])
def test_a_label_whose_score_is_masked_costs_infinity_and_keeps_its_gradient_finite(options, provider):
    for num_rows in (4, 300):
        x, t = drawn((num_rows, 100))
        t[1] = 7
        x[1, 7] = -INF
        v = Variable(x)
        with kernels.use(provider):
            loss = F.softmax_cross_entropy(v, t, **options)
            loss.backward()
        count = (t != options.get("ignore_label", -1)).sum()
        assert loss.array == INF
        np.testing.assert_allclose(
            v.grad, reference(x, t, ignore=options.get("ignore_label", -1))[1] / count, atol=1e-6
        )
        assert v.grad[1, 7] == pytest.approx(-1 / count)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ignored_rows_count_nothing_whatever_their_scores(provider):
    for num_rows, bad in itertools.product((4, 300), (-INF, np.nan, INF)):
        x, t = drawn((num_rows, 100))
        t[2], x[2] = -1, bad
        v = Variable(x)
        with kernels.use(provider), np.errstate(invalid="ignore"):
            loss = F.softmax_cross_entropy(v, t)
            loss.backward()
        x[2] = 0
        losses, gx = reference(x, t)
        assert loss.array == pytest.approx(losses.sum() / (num_rows - 1), rel=1e-5)
        np.testing.assert_allclose(v.grad, gx / (num_rows - 1), atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_classes_without_weight_or_probability_may_be_masked(provider):
    for num_rows in (4, 300):
        x, t = drawn((num_rows, 100))
        t = np.maximum(t, 1)
        x[:, 0] = -INF
        weight = np.ones(100, np.float32)
        weight[0] = 0
        check(x, t, 2e-5, provider, class_weight=weight, label_smoothing=0.2)
        q = np.full((num_rows, 100), 1 / 99, np.float32)
        q[:, 0] = 0
        v = Variable(x)
        with kernels.use(provider):
            loss = F.softmax_cross_entropy(v, q)
            loss.backward()
        log_total = np.log(np.exp(x[:, 1:].astype("d")).sum(1))
        assert loss.array == pytest.approx((log_total - x[:, 1:].mean(1)).mean(), rel=1e-5)
        p = np.exp(x - log_total[:, None])
        np.testing.assert_allclose(v.grad, (p - q) / num_rows, atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nan_in_a_row_is_seen_in_that_row_alone(provider):
    for num_rows in (4, 300):
        x, t = drawn((num_rows, 100))
        x[1, 3] = np.nan
        with kernels.use(provider):
            losses = F.softmax_cross_entropy(x, t, reduce="no").array
            outputs = [f(x).array for f in (F.softmax, F.log_softmax)]
        assert np.isnan(losses).tolist() == [i == 1 for i in range(num_rows)]
        for y in outputs:
            assert np.isnan(y[1]).all()
            assert not np.isnan(np.delete(y, 1, 0)).any()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((6, 5), 1), ((300, 10), 1), ((300, 10), 0), ((4, 6, 9, 8), 1), ((4, 6, 9, 8), 2), ((3, 40, 50), 2), ((0, 3), 1)],
)
def test_softmax(shape, axis, provider):
    for masked in (False, True):
        x = drawn(shape, masked=masked)[0]
        exponentials = np.exp(x.astype("d"))
        p = exponentials / exponentials.sum(axis, keepdims=True)
        gy = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        gp = p * (gy - (p * gy).sum(axis, keepdims=True))
        a, b = Variable(x), Variable(x)
        with kernels.use(provider), np.errstate(divide="ignore"):
            y, z = F.softmax(a, axis), F.log_softmax(b, axis)
            y.grad, z.grad = gy, gy
            y.backward()
            z.backward()
            np.testing.assert_allclose(y.array, p, atol=2e-6)
            np.testing.assert_allclose(z.array, np.log(p), rtol=2e-6, atol=1e-5)
            np.testing.assert_allclose(a.grad, gp, atol=5e-6)
            np.testing.assert_allclose(b.grad, gy - p * gy.sum(axis, keepdims=True), atol=3e-5)
            is_served = x.size >= 512 and axis == (1 if x.ndim == 4 else x.ndim - 1)
            served = {kernels.provider_of(k, x, axis) for k in ("softmax", "log_softmax")}
            assert served == {provider if is_served else "numpy"}


def test_integers_are_refused_in_words():
    scores, t = np.ones((2, 3), int), np.array([0, 1])
    for name in ("softmax", "log_softmax"):
        with pytest.raises(TypeError, match=rf"{name}: x: expected a floating type, got shape \(2, 3\) and dtype i"):
            getattr(F, name)(scores)
    with pytest.raises(TypeError, match=r"softmax_cross_entropy: x: expected a floating type, got shape"):
        F.softmax_cross_entropy(scores, t)


@pytest.mark.torch
@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", [(6, 5), (40, 1000), (3, 7, 11), (2, 6, 9, 8), (2, 3, 4, 3, 2)])
def test_against_pytorch(shape, provider):
    x, t = drawn(shape, ignored=True)
    t[(0,) * t.ndim] = 1
    x[(0, 0, *(0,) * (x.ndim - 2))] = -INF
    weight = np.linspace(0.5, 2, shape[1]).astype(np.float32)
    for w, ignore, smoothing, reduce in itertools.product((None, weight), (-1, 2), (0.0, 0.2), ("mean", "no")):
        if smoothing and np.isinf(x).any():
            continue
        peer = torch.from_numpy(np.array(x)).requires_grad_()
        labels = torch.from_numpy(np.where(t == -1, ignore, t))
        losses = torch.nn.functional.cross_entropy(
            peer, labels, None if w is None else torch.from_numpy(w), ignore_index=ignore, label_smoothing=smoothing,
            reduction="none",
        )  # fmt: skip
        expected = losses.sum() / (labels != ignore).sum() if reduce == "mean" else losses
        expected.sum().backward()
        v = Variable(x)
        with kernels.use(provider):
            y = F.softmax_cross_entropy(
                v, labels.numpy(), class_weight=w, ignore_label=ignore, label_smoothing=smoothing, reduce=reduce
            )
            F.sum(y).backward()
        np.testing.assert_allclose(y.array, expected.detach().numpy(), rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(v.grad, peer.grad.numpy(), rtol=2e-5, atol=2e-6)


def test_lists_are_refused_in_words():
    with pytest.raises(TypeError, match="softmax_cross_entropy: x: expected an array or Variable, got list"):
        F.softmax_cross_entropy([[1.0, 2.0]], np.array([0]))
    with pytest.raises(ValueError, match="softmax_cross_entropy: t: expected an array or Variable, got list"):
        F.softmax_cross_entropy(np.ones((1, 2), np.float32), [0])


# ---- what is ignored counts nothing, whatever stands there
IGNORING = {
    "sigmoid_cross_entropy": (lambda x, t, **kw: F.sigmoid_cross_entropy(x, t, **kw), (3, 4), (3, 4)),
    "sigmoid_cross_entropy_unnormalized": (
        lambda x, t, **kw: F.sigmoid_cross_entropy(x, t, normalize=False, **kw), (3, 4), (3, 4),
    ),
    "sigmoid_focal_loss": (lambda x, t, **kw: F.sigmoid_focal_loss(x, t, **kw), (3, 4), (3, 4)),
    "softmax_cross_entropy": (lambda x, t, **kw: F.softmax_cross_entropy(x, t, **kw), (12, 5), (12,)),
    "softmax_cross_entropy_of_images": (
        lambda x, t, **kw: F.softmax_cross_entropy(x, t, **kw), (2, 3, 2, 3), (2, 2, 3),
    ),
    "softmax_cross_entropy_of_many": (lambda x, t, **kw: F.softmax_cross_entropy(x, t, **kw), (300, 70), (300,)),
    "softmax_cross_entropy_smoothed": (
        lambda x, t, **kw: F.softmax_cross_entropy(x, t, label_smoothing=0.1, **kw), (12, 5), (12,),
    ),
}  # fmt: skip
BAD = [
    ("float64", np.nan),
    ("float64", INF),
    ("float32", np.nan),
    ("float32", INF),
    ("float32", -INF),
    ("float16", -INF),
    ("bfloat16", INF),
    ("bfloat16", np.nan),
]


@pytest.mark.slow
@each(**{"dtype, bad": BAD}, name=IGNORING)
def test_what_is_not_finite_at_an_ignored_label_counts_nothing(name, bad, dtype):
    """Value and gradient are those of ordinary scores there, and so is the second derivative."""
    loss, shape, label_shape = IGNORING[name]
    rng = np.random.default_rng(0)
    t = rng.integers(0, 2, label_shape).astype(np.int32)
    t.reshape(-1)[::3] = -1
    x = rng.standard_normal(shape).astype(backend.as_dtype(dtype))
    ignored = t == -1 if shape == label_shape else np.broadcast_to(np.expand_dims(t == -1, 1), shape)
    for reduce in ("mean", "no"):
        results = []
        for scores in (np.where(ignored, x.dtype.type(bad), x), x):
            v = Variable(scores)
            with np.errstate(invalid="ignore"):
                y = loss(v, t, reduce=reduce)
                gy = Variable(np.ones(y.shape, y.dtype))
                (gx,) = dbrdist.grad([y], [v], [gy], enable_double_backprop=True)
                (plain,) = dbrdist.grad([y], [v], [gy])
                (ggx,) = dbrdist.grad([F.sum(gx * gx)], [v])
            assert not gx.array[ignored].any()
            assert not plain.array[ignored].any()
            assert not ggx.array[ignored].any()
            results.append([a.array.astype("d") for a in (y, gx, plain, ggx)])
        for a, b in zip(*results, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3 if x.itemsize == 2 else 1e-8)  # by another kernel


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_scores_keep_their_digits_beside_weights_of_classes(smoothing):
    """The logarithm of the sum is not rounded to the digits of the largest score: 0.4 % at scores of 1e5."""
    rng = np.random.default_rng(0)
    x, t = (rng.normal(size=(6, 5)) + 1e5).astype(np.float32), rng.integers(0, 5, 6)
    weight = np.linspace(0.5, 2, 5)
    losses, gx = reference(x, t, weight, smoothing=smoothing)
    v = Variable(x)
    y = F.softmax_cross_entropy(v, t, class_weight=weight.astype("f"), reduce="no", label_smoothing=smoothing)
    y.grad = np.ones(6, np.float32)
    y.backward()
    np.testing.assert_allclose(y.array, losses, rtol=1e-5)
    np.testing.assert_allclose(v.grad, gx, rtol=0, atol=1e-6)


# ---- the node for devices, whose kernels have a plain form on the host
def mean_over_labels(x, t, ignore=-1, normalize=True):
    return MeanOverLabels(t, ignore, normalize).apply((x,))[0]


@each(shape=SHAPES, ignore=[-1, 2], normalize=[True, False], dtype=["int16", "uint32", "int32", "int64"])
def test_the_mean_over_labels_on_devices(shape, ignore, normalize, dtype):
    x, t = drawn(shape, ignored=ignore == -1 and dtype != "uint32")
    losses, gx = reference(x, t, ignore=ignore)
    count = max((t != ignore).sum() if normalize else len(t), 1)
    if x.size:
        v = Variable(x)
        y = mean_over_labels(v, t.astype(dtype), ignore, normalize)
        y.grad = np.asarray(1.5, np.float32)
        y.backward()
        assert y.dtype == v.grad.dtype == np.float32
        np.testing.assert_allclose(y.array, losses.sum() / count, rtol=2e-5)
        np.testing.assert_allclose(v.grad, 1.5 * gx / count, rtol=2e-5, atol=2e-6)


@each(shape=[(6, 5), (3, 4, 2), (2, 3, 2, 2)], normalize=[True, False], ignore=[-1, 1])
def test_the_mean_over_labels_on_devices_has_every_derivative(shape, normalize, ignore):
    x, t = drawn(shape, "float64", ignored=ignore == -1)
    loss = lambda v: mean_over_labels(v, t, ignore, normalize)  # noqa: E731
    check_backward(loss, x / 3, np.asarray(0.7), eps=1e-4, atol=1e-9, rtol=1e-6)
    ggx = np.cos(np.arange(x.size)).reshape(shape)
    check_double_backward(loss, x / 3, np.asarray(0.7), ggx, eps=1e-4, atol=1e-8, rtol=1e-5)
    v = Variable(x.astype(np.float16))
    (first,) = dbrdist.grad([mean_over_labels(v, t, ignore, normalize)], [v], enable_double_backprop=True)
    assert first.dtype == np.float16


@each(shape=[(6, 5), (3, 4, 2), (2, 3, 2, 2)])
def test_gradients_of_scores_are_new_where_they_lie_as_the_scores_do(shape):
    """Those of images are views with the classes moved to their place: the next rule is not to write there."""
    x, t = drawn(shape)
    for y in (
        mean_over_labels(Variable(x), t),
        F.softmax_cross_entropy(Variable(x), t, class_weight=np.ones(shape[1])),
    ):
        function = y.creator_node
        while not isinstance(function, (MeanOverLabels, LabelCrossEntropy)):
            function = function.inputs[0].creator_node
        assert function.gives_new == (len(shape) == 2)


@each(num_ignored=[0, 1, 4])
def test_a_mask_is_kept_only_where_labels_are_ignored(num_ignored):
    x, t = drawn((4, 5))
    t[:num_ignored] = -1
    y = F.softmax_cross_entropy(Variable(x), t, reduce="no")
    mask = y.creator_node.valid
    assert mask is None if not num_ignored else mask.tolist() == [i >= num_ignored for i in range(4)]


def ones(*shape):
    return np.ones(shape, np.float32)


def test_both_ways_of_softmax_cross_entropy_agree():
    """The lean path and the general one, which a weight of one forces."""
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(6, 5)), rng.integers(0, 5, 6)
    a, b = Variable(x), Variable(x)
    lean, general = F.softmax_cross_entropy(a, t), F.softmax_cross_entropy(b, t, class_weight=np.ones(5))
    assert type(lean.creator) is not type(general.creator)
    lean.backward()
    general.backward()
    np.testing.assert_allclose(lean.array, general.array, rtol=1e-14)
    np.testing.assert_allclose(a.grad, b.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8])
def test_labels_of_any_integer_type_are_taken(dtype):
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    t = np.array([0, 1, 2, 3, 4, 0])
    expected = F.softmax_cross_entropy(x, t).array
    np.testing.assert_allclose(F.softmax_cross_entropy(x, t.astype(dtype)).array, expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [5, -2])
@pytest.mark.parametrize("options", [{}, {"reduce": "no"}, {"label_smoothing": 0.1}])
def test_softmax_cross_entropy_refuses_labels_out_of_range(bad, options):
    t = np.array([0, bad, 1])
    with pytest.raises(ValueError, match="expected labels from 0 to 4, or -1 to be ignored, got labels from"):
        F.softmax_cross_entropy(ones(3, 5), t, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_of_1000_classes_lies_between_its_floor_and_that_of_no_knowledge(smoothing):
    """Golden numbers of recipes: ln 1000 for equal scores; the entropy of smoothed labels for the best scores."""
    t = np.array([0, 999])
    equal = F.softmax_cross_entropy(np.zeros((2, 1000)), t, label_smoothing=smoothing)
    np.testing.assert_allclose(equal.array, 6.907755279, rtol=1e-9)
    target = smoothing / 1000 + (1 - smoothing) * np.eye(1000)[t]
    best = F.softmax_cross_entropy(np.log(np.maximum(target, 1e-300)), t, label_smoothing=smoothing)
    np.testing.assert_allclose(best.array, 1.0148479977 if smoothing else 0.0, rtol=1e-9, atol=1e-12)


def test_all_labels_ignored_give_zero():
    x = Variable(ones(3, 5))
    loss = F.softmax_cross_entropy(x, np.full(3, -1))
    loss.backward()
    assert loss.array == 0
    assert not x.grad.any()


def test_large_scores_do_not_overflow():
    x = Variable(np.array([[1000.0, 0.0], [0.0, -1000.0]], np.float32))
    loss = F.softmax_cross_entropy(x, np.array([1, 0]))
    loss.backward()
    assert loss.array == 500
    assert np.isfinite(x.grad).all()


def test_means_of_float16_do_not_overflow():
    x = Variable(np.full((300, 300), 60.0, np.float16))
    assert F.mean(x).array == 60
    assert F.mean_squared_error(x, np.zeros((300, 300), np.float16)).array == 3600


def test_focal_derivatives_stay_finite_at_extremes():
    """The power of a vanishing 1 - p has an infinite slope, which the loss does not."""
    x = Variable(np.array([-1e4, -700.0, 0.0, 700.0, 1e4]))
    y = F.sigmoid_focal_loss(x, np.array([1, 1, 1, 1, 1]), None, 0.5, "sum")
    (first,) = dbrdist.grad([y], [x], enable_double_backprop=True)
    (second,) = dbrdist.grad([first], [x], [Variable(np.ones(5))])
    assert np.isfinite(first.array).all() and np.isfinite(second.array).all()
    np.testing.assert_allclose(first.array[[0, 1, 3, 4]], [-1, -1, 0, 0], atol=1e-12)


def test_focal_loss_takes_nothing_from_ignored_scores():
    x = Variable(np.array([np.nan, np.inf, 1.0]))
    loss = F.sigmoid_focal_loss(x, np.array([-1, -1, 1]))
    loss.backward()
    assert loss.array == F.sigmoid_focal_loss(np.array([1.0]), np.array([1])).array
    assert x.grad[:2].tolist() == [0, 0] and x.grad[2] < 0


RNG = np.random.default_rng(0)


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


def cross_entropy(x, t, weight=None, smoothing=0.0, ignore=-1):
    """Losses and which labels count, in float64, by the formula."""
    x = np.asarray(x, np.float64)
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    weight = np.ones(x.shape[1]) if weight is None else weight.astype(np.float64)
    counts = t != ignore
    losses = np.zeros(t.shape)
    for place in np.ndindex(*t.shape):
        if counts[place]:
            row = logs[(place[0], slice(None), *place[1:])]
            wanted = np.full(len(row), smoothing / len(row))
            wanted[t[place]] += 1 - smoothing
            losses[place] = -(weight * wanted * row).sum()
    return losses, counts


@each(
    shape=[(5, 3), (2, 3, 4)], weight=[None, np.array([0.5, 2.0, 0.0], "f")], smoothing=[0.0, 0.25, 1.0],
    ignored=["none", "some", "all"], normalize=[True, False], reduce=["mean", "no"],
)  # fmt: skip
def test_cross_entropy_of_labels(shape, weight, smoothing, ignored, normalize, reduce):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape).astype("f")
    t = rng.integers(0, 3, (shape[0], *shape[2:]))
    if ignored != "none":
        t[rng.random(t.shape) < (0.5 if ignored == "some" else 2)] = 7
    options = {"class_weight": weight, "label_smoothing": smoothing, "ignore_label": 7, "normalize": normalize}
    losses, counts = cross_entropy(x, t, weight, smoothing, 7)
    expected = losses if reduce == "no" else losses.sum() / (max(counts.sum(), 1) if normalize else max(len(t), 1))
    given = {**options, "class_weight": None if weight is None else Variable(weight)}
    for debug in (False, True):
        with dbrdist.using_config("debug", debug):
            for arguments in (options, given):
                y = F.softmax_cross_entropy(x, t, reduce=reduce, **arguments)
                np.testing.assert_allclose(y.array, expected, rtol=2e-5, atol=1e-6)
                assert y.dtype == np.float32


@each(n=[1, 2], normalize=[True, False], smoothing=[0.0, 0.5])
def test_cross_entropy_of_every_small_set_of_labels(n, normalize, smoothing):
    x = np.array([[0.5, -1.0, 2.0], [1.0, 0.0, 0.25]])[:n]
    for labels in itertools.product([-1, 0, 1, 2], repeat=n):
        t = ints(*labels)
        losses, counts = cross_entropy(x, t, None, smoothing)
        y = F.softmax_cross_entropy(x, t, normalize=normalize, label_smoothing=smoothing)
        np.testing.assert_allclose(y.array, losses.sum() / (max(counts.sum(), 1) if normalize else n), rtol=1e-12)
        binary = np.where(t < 0, 0, np.log1p(np.exp(x[:, 0])) - (t > 0) * x[:, 0])
        y = F.sigmoid_cross_entropy(x[:, 0], np.minimum(t, 1), normalize=normalize)
        np.testing.assert_allclose(y.array, binary.sum() / (max(counts.sum(), 1) if normalize else n), rtol=1e-12)


@each(normalize=[True, False], shape=[(4,), (2, 3)])
def test_sigmoid_cross_entropy_counts_labels_or_examples(normalize, shape):
    x, t = RNG.standard_normal(shape), RNG.integers(-1, 2, shape)
    terms = np.where(t == -1, 0, np.log1p(np.exp(x)) - t * x)
    y = F.sigmoid_cross_entropy(x, t, normalize=normalize)
    np.testing.assert_allclose(y.array, terms.sum() / (max((t != -1).sum(), 1) if normalize else len(t)), rtol=1e-12)
    np.testing.assert_allclose(F.sigmoid_cross_entropy(x, t, reduce="no").array, terms, rtol=1e-12, atol=1e-15)
    single = F.sigmoid_cross_entropy(np.array(0.5), np.array(1), normalize=normalize)
    np.testing.assert_allclose(single.array, np.log1p(np.exp(-0.5)), rtol=1e-12)


def test_no_labels_at_all():
    for normalize in (True, False):
        assert F.softmax_cross_entropy(ones_of(0, 3), np.zeros(0, int), normalize=normalize).array == 0
        assert F.sigmoid_cross_entropy(ones_of(0), np.zeros(0, int), normalize=normalize).array == 0
    assert F.embed_id(np.zeros((0, 2), int), ones_of(3, 4)).shape == (0, 2, 4)
    assert F.embed_id(ints(-1, -1), ones_of(3, 4), ignore_label=-1).array.tolist() == [[0] * 4] * 2
    assert F.embed_id(Variable(ints(1)), ones_of(3, 4)).shape == (1, 4)


@each(dtype=[np.float32, np.float64], smoothing=[0.0, 0.3])
def test_probabilities_as_labels_are_smoothed(dtype, smoothing):
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 3)), rng.dirichlet(np.ones(3), 4)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    expected = -((t * (1 - smoothing) + smoothing / 3) * log_p).sum(1).mean()
    y = F.softmax_cross_entropy(x.astype(dtype), t.astype(dtype), label_smoothing=smoothing)
    np.testing.assert_allclose(y.array, expected, rtol=1e-6)


def soft(n, k, dtype=np.float32):
    weights = np.random.default_rng(1).random((n, k))
    return (weights / weights.sum(1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_loss_smooths_soft_labels_as_it_does_hard_ones(smoothing, dtype):
    x = np.random.default_rng(0).standard_normal((6, 5)).astype(dtype)
    q = soft(6, 5, dtype)
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    expected = -((q * (1 - smoothing) + smoothing / 5) * logs).sum(1).mean()
    loss = F.softmax_cross_entropy(Variable(x), q, label_smoothing=smoothing)
    np.testing.assert_allclose(float(loss.array), expected, rtol=1e-5)
    hard = np.array([0, 4, 2, 1, 1, 3], np.int32)
    np.testing.assert_allclose(
        float(F.softmax_cross_entropy(x, np.eye(5, dtype=dtype)[hard], label_smoothing=smoothing).array),
        float(F.softmax_cross_entropy(x, hard, label_smoothing=smoothing).array),
        rtol=1e-5,
    )


def test_weights_of_classes_that_would_be_learned_are_warned_of():
    x, t, weights = np.ones((2, 3), np.float32), np.array([0, 2]), Variable(np.ones(3, np.float32))
    F.softmax_cross_entropy(x, t, class_weight=weights)
    for learned in (weights * 1.0, dbrdist.Parameter(np.ones(3, np.float32))):
        with pytest.warns(dbrdist.errors.UsageWarning, match="class_weight gets no gradient; write class"):
            F.softmax_cross_entropy(x, t, class_weight=learned)
