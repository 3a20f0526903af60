"""What the table of cases cannot say: chance, measures, errors, and options that change no gradient."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core import random
from dbrdist.core.backend import as_dtype
from tests.each import each


def ones(*shape):
    return np.ones(shape, np.float32)


# ---- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(ratio):
    y = F.dropout(ones(1000, 50), ratio).array
    assert set(np.unique(y)) <= {np.float32(0), np.float32(1 / (1 - ratio))}
    assert (y == 0).mean() == pytest.approx(ratio, abs=0.01)


def test_dropout_does_not_depend_on_the_number_of_ranks():
    for shape in ((6,), (6, 5), (6, 3, 4, 5)):
        x = ones(*shape)
        random.set_stream(3, 1, 7)
        whole = F.dropout(x).array
        parts = []
        for row in (0, 2):  # two ranks, with two and four rows
            random.set_stream(3, 1, 7, row)
            parts.append(F.dropout(x[:2] if row == 0 else x[2:]).array)
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_dropout_draws_anew_at_each_call_and_repeats_a_step():
    x = ones(20, 20)
    random.set_stream(0, 0, 0)
    a, b = F.dropout(x).array, F.dropout(x).array
    random.set_stream(0, 0, 0)
    np.testing.assert_array_equal(F.dropout(x).array, a)
    random.set_stream(0, 0, 1)
    assert (F.dropout(x).array != a).any()
    assert (a != b).any()


def test_dropout_is_nothing_outside_of_training():
    x = Variable(ones(3, 3))
    with dbrdist.using_config("train", False):
        assert F.dropout(x) is x
        assert F.dropout(x, return_mask=True) == (x, None)


def test_dropout_of_no_element_draws_nothing():
    x, before = Variable(ones(3, 3)), random.get_state()
    assert F.dropout(x, 0.0) is x and random.get_state() == before
    y, mask = F.dropout(x, 0.0, return_mask=True)
    np.testing.assert_array_equal([y.array, mask], np.ones((2, 3, 3)))


def test_dropout_gives_its_mask():
    x = ones(4, 4)
    y, mask = F.dropout(x, return_mask=True)
    np.testing.assert_array_equal(y.array, x * mask)
    np.testing.assert_array_equal(F.dropout(x, mask=mask).array, y.array)


def test_gaussian_has_the_mean_and_the_variance():
    mean, ln_var = np.full((500, 100), 2.0, np.float32), np.full((500, 100), np.log(9.0), np.float32)
    y, eps = F.gaussian(mean, ln_var, return_eps=True)
    assert y.array.mean() == pytest.approx(2, abs=0.1)
    assert y.array.std() == pytest.approx(3, abs=0.1)
    np.testing.assert_allclose(y.array, 2 + 3 * eps, rtol=1e-4, atol=1e-4)


# ---- rrelu ----------------------------------------------------------------------------------------------------------


def test_rrelu_draws_its_slopes_between_the_bounds():
    x = Variable(-ones(200, 300))
    y, r = F.rrelu(x, 0.1, 0.7, return_r=True)
    assert r.dtype == np.float32 and r.min() >= 0.1 and r.max() <= 0.7
    assert r.mean() == pytest.approx(0.4, abs=0.005)
    assert r.std() == pytest.approx(0.6 / 12**0.5, rel=0.01)
    np.testing.assert_array_equal(y.array, -r)
    F.sum(y).backward()
    np.testing.assert_array_equal(x.grad, r)
    np.testing.assert_array_equal(F.rrelu(ones(3, 4)).array, ones(3, 4))


def test_rrelu_outside_of_training_takes_the_mean_slope():
    x = np.array([-2.0, 0.0, 3.0], np.float32)
    with dbrdist.using_config("train", False):
        y, r = F.rrelu(x, 0.25, 0.75, r=np.zeros(3, np.float32), return_r=True)
    assert r.tolist() == [0.5, 0.5, 0.5]
    assert y.array.tolist() == [-1.0, 0.0, 3.0]


def test_rrelu_does_not_depend_on_the_number_of_ranks():
    for shape in ((6,), (6, 5), (6, 3, 4, 5)):
        random.set_stream(3, 1, 7)
        whole = F.rrelu(-ones(*shape)).array
        parts = []
        for row, stop in ((0, 2), (2, 6)):
            random.set_stream(3, 1, 7, row)
            parts.append(F.rrelu(-ones(*shape)[row:stop]).array)
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rrelu_repeats_with_its_slopes():
    x = -ones(4, 5)
    y, r = F.rrelu(x, return_r=True)
    np.testing.assert_array_equal(F.rrelu(x, r=r).array, y.array)
    assert (F.rrelu(x).array != y.array).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l": 0.5, "u": 0.5}, "rrelu: l, u: expected 0 <= l < u < 1, got 0.5 and 0.5"),
        ({"l": -0.1}, "rrelu: l, u: expected 0 <= l < u < 1"),
        ({"u": 1.0}, "rrelu: l, u: expected 0 <= l < u < 1"),
        ({"r": np.ones(3)}, r"rrelu: r: expected shape \(2, 3\) to match x"),
    ],
)
def test_rrelu_refuses_what_is_no_slope(options, message):
    with pytest.raises(ValueError, match=message):
        F.rrelu(ones(2, 3), **options)


# ---- measures and indices -------------------------------------------------------------------------------------------


def test_accuracy():
    y = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]], np.float32)
    assert F.accuracy(y, np.array([1, 0, 0, 0])).array == np.float32(0.75)
    for dtype in "bBhHiIlL":  # labels of any integer type, also one that has no room for the number of classes
        scores, labels = np.eye(300, dtype=np.float32)[[5, 44, 256, 299]], np.array([5, 44, 0, 43]).astype(dtype)
        assert F.accuracy(scores, labels).array == np.float32(0.5), dtype
    assert F.accuracy(y, np.array([1, -1, 0, -1]), ignore_label=-1).array == np.float32(0.5)
    assert F.accuracy(y, np.full(4, -1), ignore_label=-1).array == 0
    assert F.accuracy(y, np.array([1, 0, 0, 0])).dtype == np.float32
    pixels = y.reshape(2, 2, 2)
    t = np.array([[1, 1], [0, 0]])
    assert F.accuracy(pixels, t).array == (pixels.argmax(1) == t).mean()
    with pytest.raises(ValueError, match=r"accuracy: t: expected integer labels of shape \(4,\)"):
        F.accuracy(y, np.array([1, 0]))


def test_binary_accuracy_and_r2():
    assert F.binary_accuracy(np.array([1.0, -1.0, 2.0]), np.array([1, 1, -1])).array == 0.5
    true, pred = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0])
    assert F.r2_score(pred, true).array == pytest.approx(0.5)


def test_indices_and_steps(xp):
    x = xp.asarray([[1.5, -2.5], [0.0, 3.5]])
    assert int(F.argmax(x).array) == 3
    assert F.argmin(x, axis=1).array.tolist() == [1, 0]
    assert F.argmax(x).dtype == np.int32
    assert F.floor(x).array.tolist() == [[1, -3], [0, 3]]
    assert F.ceil(x).array.tolist() == [[2, -2], [0, 4]]
    assert F.fix(x).array.tolist() == [[1, -2], [0, 3]]
    assert F.sign(x).array.tolist() == [[1, -1], [0, 1]]
    assert not F.sign(Variable(x)).requires_grad


# ---- losses ---------------------------------------------------------------------------------------------------------


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
def test_labels_of_any_integer_type(dtype):
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


# ---- errors ---------------------------------------------------------------------------------------------------------

BAD = {
    "linear: x: expected 3 elements per example": lambda: F.linear(ones(2, 4), ones(5, 3)),
    r"linear: b: expected shape \(5,\)": lambda: F.linear(ones(2, 3), ones(5, 3), ones(4)),
    "linear: n_batch_axes: expected 1 to 1": lambda: F.linear(ones(2, 3), ones(5, 3), n_batch_axes=2),
    "embed_id: x: expected integers": lambda: F.embed_id(ones(2), ones(5, 3)),
    "softmax_cross_entropy: reduce: expected 'mean' or 'no', got 'sum'": lambda: F.softmax_cross_entropy(
        ones(2, 3), np.zeros(2, int), reduce="sum"
    ),
    r"softmax_cross_entropy: t: expected integer labels of shape \(2,\)": lambda: F.softmax_cross_entropy(
        ones(2, 3), np.zeros(3, int)
    ),
    "softmax_cross_entropy: label_smoothing: expected a number from 0 to 1": lambda: F.softmax_cross_entropy(
        ones(2, 3), np.zeros(2, int), label_smoothing=1.5
    ),
    r"mean_squared_error: x1: expected shape \(2,\) to match x0": lambda: F.mean_squared_error(ones(2), ones(3)),
    r"concat: xs\[1\]: expected shape \(2, 3\)": lambda: F.concat([ones(2, 3), ones(3, 3)]),
    r"stack: xs\[1\]": lambda: F.stack([ones(2), ones(3)]),
    "reshape: shape: expected a shape of 6 elements": lambda: F.reshape(ones(2, 3), (4,)),
    "transpose: axes: expected each axis": lambda: F.transpose(ones(2, 3), (0, 0)),
    "sum: axis: expected from -2 to 1": lambda: F.sum(ones(2, 3), 2),
    "matmul: b: expected 3 rows": lambda: F.matmul(ones(2, 3), ones(4, 2)),
    "split_axis: indices_or_sections: expected a divisor of 4": lambda: F.split_axis(ones(4, 4), 3, 0),
    "dropout: ratio: expected a number from 0 to less than 1": lambda: F.dropout(ones(2), 1.0),
    "broadcast_to: shape": lambda: F.broadcast_to(ones(3), (2,)),
    "where: condition: expected an array of bool": lambda: F.where(ones(2), ones(2), ones(2)),
    "maxout: pool_size: expected a divisor of the 3": lambda: F.maxout(ones(2, 3), 2),
    "clip: x_min: expected at most": lambda: F.clip(ones(2), 2, 1),
    r"permutate: indices: expected integers of shape \(3,\)": lambda: F.permutate(
        ones(3, 2), np.array([0.0, 1.0, 2.0])
    ),
    "permutate: indices: expected places from -3 to 2, got 0 to 5": lambda: F.permutate(
        ones(3, 2), np.array([0, 1, 5])
    ),
}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
@pytest.mark.parametrize("order", [np.arange(300)[::-1] % 100, np.arange(300) % 100 - 100])
def test_permutate_takes_elements_twice_by_indices_of_any_type(order, dtype):
    """300 is more than an index of 8 bits holds; what is taken three times gets three gradients."""
    x = Variable(np.random.default_rng(0).normal(size=(300, 2)))
    y = F.permutate(x, order.astype("int8" if dtype == "uint8" and order.min() < 0 else dtype))
    np.testing.assert_array_equal(y.array, x.array[order])
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_array_equal(x.grad[:, 0], np.bincount(order % 300, minlength=300))


@pytest.mark.parametrize("message", BAD)
def test_errors_say_what_was_expected(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), ("float64", 1e-13), ("bfloat16", 1e-2), ("float16", 2e-3)]
)
@pytest.mark.parametrize("provider", ["numpy", "onednn"])
def test_large_linear_layers_agree_with_float64(dtype, tolerance, provider):
    """Sizes at which the fastest kernel for products is asked, with rows of x and gy that do not lie densely."""
    dtype = as_dtype(dtype)
    rng = np.random.default_rng(0)
    draw = [rng.standard_normal(shape).astype(dtype) for shape in ((96, 300), (200, 150), (200,), (96, 200))]
    x, W, b, gy = (Variable(a) for a in (draw[0][:, ::2], *draw[1:]))
    with kernels.use(provider):
        y = F.linear(x, W, b)
        y.grad = gy.array
        y.backward()
    x64, W64, b64, gy64 = (v.array.astype(np.float64) for v in (x, W, b, gy))
    pairs = [(y.array, x64 @ W64.T + b64), (x.grad, gy64 @ W64), (W.grad, gy64.T @ x64), (b.grad, gy64.sum(0))]
    for got, expected in pairs:
        assert got.dtype == dtype
        assert np.abs(got.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()


@each(name=sorted(n for n in dir(F) if callable(getattr(F, n)) and not n.startswith("_")))
def test_functions_can_be_pickled(name):
    function = getattr(F, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_chain_of_links_and_functions_can_be_pickled():
    model = dbrdist.Sequential(dbrdist.links.Linear(3, 2), F.leaky_relu)
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model))(x).array, model(x).array)


# ---- embeddings -----------------------------------------------------------------------------------------------------

PAIR = (ones(2, 3), ones(2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.contrastive(*PAIR, np.ones(2)), r"contrastive: y: expected integers of shape \(2,\)"),
        (lambda: F.contrastive(*PAIR, [0, 1]), r"contrastive: y: expected integers of .*, got \[0, 1\]"),
        (lambda: F.contrastive(*PAIR, np.array([0, 2])), "contrastive: y: expected labels from 0 to 1, got labels fro"),
        (lambda: F.contrastive(*PAIR, np.array([-1, 1])), "contrastive: y: expected labels from 0 to 1, got labels "),
        (lambda: F.sigmoid_focal_loss(ones(2), [0, 1]), r"sigmoid_focal_loss: t: expected integers of .*, got \[0, 1"),
        (
            lambda: F.sigmoid_focal_loss(ones(2), np.array([0, 2])),
            "focal_loss: t: expected labels from -1 to 1, got la",
        ),
        (lambda: F.rrelu(ones(2), r=[0.2, 0.3]), r"rrelu: r: expected shape \(2,\) to match x, got \[0.2, 0.3\]"),
        (lambda: F.contrastive(*PAIR, np.ones(3, int)), r"contrastive: y: expected integers of shape \(2,\)"),
        (lambda: F.contrastive(*PAIR, np.ones(2, int), 0), "contrastive: margin: expected a number above 0, got 0"),
        (lambda: F.contrastive(*PAIR, np.ones(2, int), reduce="sum"), "contrastive: reduce: expected 'mean' or 'no'"),
        (lambda: F.contrastive(ones(2, 3), ones(2, 4), np.ones(2, int)), r"contrastive: x1: expected shape \(2, 3\)"),
        (lambda: F.contrastive(ones(2), ones(2), np.ones(2, int)), r"contrastive: x0: expected shape \(N, K\)"),
        (lambda: F.triplet(*PAIR, ones(2, 3), float("nan")), "triplet: margin: expected a number above 0, got nan"),
        (lambda: F.triplet(*PAIR, ones(3, 3)), r"triplet: negative: expected shape \(2, 3\) to match anchor"),
        (lambda: F.cross_covariance(ones(2, 3), ones(3, 3)), r"cross_covariance: z: expected shape \(2, number of"),
        (lambda: F.cross_covariance(ones(2), ones(2)), r"cross_covariance: y: expected shape \(N, number of"),
        (lambda: F.decov(ones(2, 3, 4)), r"decov: h: expected shape \(N, number of features\)"),
        (lambda: F.decov(ones(2, 3), "mean"), "decov: reduce: expected 'half_squared_sum' or 'no', got 'mean'"),
        (lambda: F.sigmoid_focal_loss(ones(2), ones(2)), r"sigmoid_focal_loss: t: expected integers of shape \(2,\)"),
        (lambda: F.sigmoid_focal_loss(ones(1), np.ones(1, int), 1.5), "sigmoid_focal_loss: alpha: expected a number"),
        (lambda: F.sigmoid_focal_loss(ones(1), np.ones(1, int), gamma=-1), "sigmoid_focal_loss: gamma: expected a num"),
        (lambda: F.laplace_nll(ones(2), ones(2), ones(1)), r"laplace_nll: ln_scale: expected shape \(2,\) to match x"),
    ],
)
def test_losses_refuse_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_distances_of_16_bit_types_do_not_overflow():
    a, b = np.full((2, 100), 200.0, np.float16), np.zeros((2, 100), np.float16)
    losses = F.contrastive(a, b, np.array([0, 0]), 1.0, "no")
    assert losses.dtype == np.float16 and losses.array.tolist() == [0, 0]  # of |a - b|^2 = 4e6, above 65504
    assert F.triplet(a, a, b, reduce="no").array.tolist() == [0, 0]


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


def test_the_gradient_of_swish_by_beta_does_not_overflow():
    x = np.array([1e20, -1e20, 2e38, 1.0, -2.0], np.float32)
    beta = Variable(np.array(1.5, np.float32))
    y = F.swish(x, beta)
    (g,) = dbrdist.grad([y], [beta], [np.ones_like(x)])
    s = 1 / (1 + np.exp(-1.5 * x.astype("d")[3:]))
    np.testing.assert_allclose(g.array, (x[3:] ** 2 * s * (1 - s)).sum(), rtol=1e-5)  # nothing from where s is 0 or 1


@each(dtype=["float16", "bfloat16"], stride=[None, 100], pad_value=[0, None])
def test_means_over_large_windows_run_in_a_wider_type(dtype, stride, pad_value):
    x = np.full((1, 1, 2500, 1), 60.0, as_dtype(dtype))  # the sum is beyond float16, and bfloat16 counts to 256
    y = F.average_pooling_nd(x, (2000, 1), stride, 0, pad_value)
    assert y.dtype == x.dtype and (y.array.astype(np.float64) == 60.0).all()


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["floor", "ceil", "fix", "sign"])
@each(value=[-1.5, 0.0, 2.25])
def test_step_functions_of_one_number(name, value):
    y = getattr(F, name)(np.array(value, np.float32))
    formula = {"fix": np.trunc}.get(name) or getattr(np, name)
    assert type(y.array) is np.ndarray and y.shape == () and y.dtype == np.float32
    assert y.array == formula(value)


def test_floor_division_is_a_constant():
    x, d = np.array([-7.0, 7.0, 7.5], np.float32), np.array([2.0, -2.0, 2.5], np.float32)
    a = Variable(x)
    for y in (a // Variable(d), a // d, x // Variable(d)):
        np.testing.assert_array_equal(y.array, [-4, -4, 3])
        assert y.dtype == np.float32 and y.creator is None
    np.testing.assert_array_equal((a // 2).array, [-4, 3, 3])
    np.testing.assert_array_equal((15 // Variable(d)).array, [7, -8, 6])
    assert (Variable(np.array(7.0)) // 2).array == 3


def test_embeddings_of_pixels_along_one_axis():
    rng = np.random.default_rng(0)
    embeddings, labels = rng.standard_normal((2, 3, 6)), np.array([[0, 1, 1, 2, 2, 2], [1, 1, 0, 0, 2, 2]])
    of_lines, of_images = (
        F.discriminative_margin_based_clustering_loss(e, t, 0.1, 1.5, 2)
        for e, t in ((embeddings, labels), (embeddings[..., None], labels[..., None]))
    )
    for a, b in zip(of_lines, of_images, strict=True):
        np.testing.assert_array_equal(a.array, b.array)


WORDS, SAMPLES = np.arange(12.0).reshape(4, 3) / 10, np.array([[0, 3]])
MEANS = {
    "hinge": lambda x: F.hinge(x, np.full(len(x), 2)),
    "contrastive": lambda x: F.contrastive(x, 0.5 - x, np.full(len(x), 1)),
    "triplet": lambda x: F.triplet(x, 2 * x, x * x, 3.0),
    "black_out": lambda x: F.black_out(x, np.full(len(x), 1), WORDS, np.repeat(SAMPLES, len(x), 0)),
    "crf1d": lambda x: F.crf1d(np.eye(3), [x, 2 * x], [np.full(len(x), 1)] * 2),
    "connectionist_temporal_classification": lambda x: F.connectionist_temporal_classification(
        [x, 2 * x], np.full((len(x), 1), 1), 0),
    "softmax_cross_entropy": lambda x: F.softmax_cross_entropy(x, np.full(len(x), 1), label_smoothing=0.1),
    "softmax_cross_entropy over all": lambda x: F.softmax_cross_entropy(x, np.full(len(x), 1), False, ignore_label=0),
    "softmax_cross_entropy of probabilities": lambda x: F.softmax_cross_entropy(x, np.full(x.shape, 1 / 3)),
    "sigmoid_cross_entropy": lambda x: F.sigmoid_cross_entropy(x, np.full(x.shape, 1)),
    "sigmoid_cross_entropy of one": lambda x: F.sigmoid_cross_entropy(x[:, 0], np.full(len(x), 1)),
    "sigmoid_cross_entropy over all": lambda x: F.sigmoid_cross_entropy(x, np.full(x.shape, 1), False),
    "sigmoid_focal_loss": lambda x: F.sigmoid_focal_loss(x[:, 0], np.full(len(x), 1)),
    "mean_squared_error": lambda x: F.mean_squared_error(x[:, 0], np.zeros(len(x))),
    "mean_absolute_error": lambda x: F.mean_absolute_error(x[:, 0], np.zeros(len(x))),
}  # fmt: skip


@each(name=MEANS, num=[1, 2, 3])
def test_means_over_one_example_and_over_copies_of_it_are_equal(name, num):
    x = np.array([[0.3, -0.4, 0.9]])
    values, gradients = [], []
    for n in (num, 4):
        v = Variable(np.repeat(x, n, 0))
        y = MEANS[name](v)
        y.backward()
        values.append(y.array)
        gradients.append(v.grad.sum(0))
    assert values[0] != 0 and gradients[0].any()
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-12)


def test_rows_of_one_number():
    x = np.array([[2.0], [-3.0]])
    np.testing.assert_allclose(F.rms_normalization(x, np.ones(1), 0.5).array, x / np.sqrt(x * x + 0.5))
    q, k, v = (np.array([[[a], [b]]]) for a, b in ((1.0, 2.0), (0.5, -1.0), (3.0, 7.0)))
    weights = np.exp(q @ k.swapaxes(1, 2))
    expected = weights / weights.sum(2, keepdims=True) @ v
    np.testing.assert_allclose(F.scaled_dot_product_attention(q, k, v).array, expected)
