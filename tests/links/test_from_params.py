"""Links made from given weights, and members of links and functions that Chainer documents."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import gradient_check, utils

rng = np.random.default_rng(5)


def drawn(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_linear_and_embed_id():
    W, b, x = drawn(2, 3), drawn(2), drawn(4, 3)
    np.testing.assert_allclose(L.Linear.from_params(W, b)(x).array, x @ W.T + b, rtol=1e-5, atol=1e-6)
    link = L.Linear.from_params(dbrdist.Variable(W), nobias=True)
    assert link.b is None and (link.W.array == W).all() and link.W.array is not W
    ids = np.array([2, 0, 1], np.int32)
    embed = L.EmbedID.from_params(W.T, ignore_label=1)
    np.testing.assert_array_equal(embed(ids).array, np.where(ids[:, None] == 1, 0, W.T[ids]))


@pytest.mark.parametrize("options", [{}, {"stride": 2, "pad": 1}], ids=["by default", "with options"])
@pytest.mark.parametrize("kind", ["Convolution2D", "ConvolutionND"])
def test_convolutions_by_windows(kind, options):
    W, b, x = drawn(2, 3, 3, 2), drawn(2), drawn(1, 3, 6, 5)
    y = getattr(L, kind).from_params(W, b, **options)(x).array
    stride, pad = options.get("stride", 1), options.get("pad", 0)
    wide = np.pad(x[0], ((0, 0), (pad, pad), (pad, pad)))
    for k in range(2):
        plane = sum((sliding_window_view(wide[c], (3, 2)) * W[k, c]).sum((2, 3)) for c in range(3)) + b[k]
        np.testing.assert_allclose(y[0, k], plane[::stride, ::stride], rtol=1e-4, atol=1e-5)


def test_other_numbers_of_axes_and_groups():
    for kind, axes in ((L.Convolution1D, 1), (L.ConvolutionND, 1), (L.Convolution3D, 3)):
        W = drawn(4, 1, *[2] * axes)
        link = kind.from_params(W, groups=2)
        assert link(drawn(1, 2, *[3] * axes)).shape == (1, 4, *[2] * axes) and (link.W.array == W).all()


@pytest.mark.parametrize("kind", [L.Linear, L.Convolution2D, L.ConvolutionND])
def test_too_many_biases_are_refused(kind):
    W = drawn(2, 3) if kind is L.Linear else drawn(2, 3, 2, 2)
    with pytest.raises(ValueError, match=f"{kind.__name__}.from_params: b: expected 2 biases"):
        kind.from_params(W, drawn(3))


def test_links_without_it_say_so():
    with pytest.raises(NotImplementedError, match="Maxout defines no from_params"):
        L.Maxout.from_params(drawn(2, 3))


# ---- trees whose nodes lack parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [L.ChildSumTreeLSTM(3, 2), L.NaryTreeLSTM(3, 2)], ids=lambda link: type(link).__name__)
def test_absent_parts_of_a_node_count_as_zeros(link):
    states, x = [drawn(4, 2) for _ in range(4)], drawn(4, 3)
    zero = np.zeros((4, 2), np.float32)
    for gone in ({0}, {2}, {1, 3}, {0, 1, 2, 3}):
        some = [None if i in gone else s for i, s in enumerate(states)]
        full = [zero if i in gone else s for i, s in enumerate(states)]
        for got, due in zip(link(*some, x), link(*full, x)):
            np.testing.assert_allclose(got.array, due.array, rtol=1e-5, atol=1e-6)
    for got, due in zip(link(*states, None), link(*states, np.zeros((4, 3), np.float32))):
        np.testing.assert_allclose(got.array, due.array, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"all inputs .* are None"):
        link(*[None] * 5)


# ---- masks, frames, scores -------------------------------------------------------------------------------------------


def test_zoneout_shows_what_stayed():
    h, x = dbrdist.Variable(drawn(50, 4)), dbrdist.Variable(drawn(50, 4))
    y = F.zoneout(h, x, 0.3)
    flags = y.creator
    assert (flags.flag_h ^ flags.flag_x).all() and 0.1 < flags.flag_h.mean() < 0.5
    np.testing.assert_array_equal(y.array, h.array * flags.flag_h + x.array * flags.flag_x)
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_array_equal(h.grad, flags.flag_h.astype(np.float32))
    np.testing.assert_array_equal(x.grad, flags.flag_x.astype(np.float32))


@pytest.mark.parametrize("value", [3, (1, 2), ((1, 2), (3, 4))])
def test_pad_takes_numpys_constant_values(value):
    x = dbrdist.Variable(drawn(2, 3))
    y = F.pad(x, ((1, 2), (0, 1)), "constant", constant_values=value)
    np.testing.assert_array_equal(y.array, np.pad(x.array, ((1, 2), (0, 1)), "constant", constant_values=value))
    y.grad = drawn(*y.shape)
    y.backward()
    np.testing.assert_array_equal(x.grad, y.grad[1:3, :3])


def test_a_score_without_hits_is_nan_as_in_chainer():
    y, t = np.eye(3, dtype=np.float32)[[0, 1, 1]], np.array([0, 1, 2], np.int32)
    precision, recall, score, support = (v.array for v in F.classification_summary(y, t, 3, beta=2.0))
    np.testing.assert_allclose(precision, [1, 0.5, np.nan])
    np.testing.assert_allclose(recall, [1, 1, 0])
    np.testing.assert_allclose(score, [1, 5 * 0.5 / (4 * 0.5 + 1), np.nan], rtol=1e-6)
    assert support.tolist() == [1, 1, 1]


# ---- gradients of parameters that are arguments ----------------------------------------------------------------------


def test_gradients_by_parameters_that_are_arguments():
    W, x = rng.standard_normal((2, 3)), rng.standard_normal((4, 3))

    def right(xs, params):
        return F.tanh(F.matmul(xs[0], params[0], transb=True))

    def wrong(xs, params):
        return F.tanh(F.matmul(xs[0], params[0].array.T))  # loses the gradient of the parameter

    gradient_check.check_backward_with_params(right, x, np.ones((4, 2)), params=[W], dtype=np.float64)
    with pytest.raises(AssertionError, match="first-order backward"):
        gradient_check.check_backward_with_params(wrong, x, np.ones((4, 2)), params=[W], dtype=np.float64)


def test_cached_property_is_computed_once_with_a_graph_and_once_without():
    calls = []

    class Layer:
        @utils.cached_property
        def scale(self):
            """The scale."""
            calls.append(dbrdist.config.enable_backprop)
            return F.exp(dbrdist.Variable(np.ones(1, np.float32)))

    a, b = Layer(), Layer()
    assert a.scale is a.scale and calls == [True]
    with dbrdist.no_backprop_mode():
        assert a.scale is a.scale and calls == [True, False]
    assert b.scale is not a.scale and Layer.scale.__doc__ == "The scale."
    with pytest.raises(AttributeError, match="attribute 'scale' of Layer is readonly"):
        a.scale = 1
