"""What lies just within and just outside of the conditions in which links and models choose or refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, initializers, models
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


REFUSED = {
    "MultiHeadAttention: n_heads: expected a divisor of n_units=4": [
        lambda: L.MultiHeadAttention(4, 0), lambda: L.MultiHeadAttention(4, 3)],
    "Maxout: initialW: expected shape (2, 3, 4)": [
        lambda: L.Maxout(4, 2, 3, initialW=ones(2, 3, 5)), lambda: L.Maxout(4, 2, 3, initialW=ones(2, 3)),
        lambda: L.Maxout(4, 2, 3, initialW=ones(3, 2, 4))],
    "Maxout: initial_bias: expected shape (2, 3)": [lambda: L.Maxout(4, 2, 3, initial_bias=ones(6))],
    "Classifier: label_key: expected an int or str, got float": [
        lambda: L.Classifier(L.Linear(2, 2), label_key=1.0)],
    "Linear: out_size: expected a number of outputs, got None for both sizes": [lambda: L.Linear(None)],
    "Convolution2D: in_channels: expected a multiple of groups=2": [lambda: L.Convolution2D(3, 4, 1, groups=2)],
    "Deconvolution2D: out_channels: expected a multiple of groups=2": [lambda: L.Deconvolution2D(2, 3, 1, groups=2)],
    "Deconvolution2D: in_channels: expected a multiple of groups=2": [lambda: L.Deconvolution2D(3, 2, 1, groups=2)],
    "Scale: bias_shape: expected a shape, since bias_term is True and W_shape is None": [
        lambda: L.Scale(bias_term=True)],
    "Scale: expected x, got 2 arguments": [lambda: L.Scale(W_shape=(3,))(ones(2, 3), ones(3))],
    "Scale: expected x and W, got 1 arguments": [lambda: L.Scale()(ones(2, 3))],
    "Bias: expected x, got 2 arguments": [lambda: L.Bias(shape=(3,))(ones(2, 3), ones(3))],
    "Bias: expected x and b, got 1 arguments": [lambda: L.Bias()(ones(2, 3))],
    "Initializer defines no __call__(array)": [lambda: initializers.Initializer()(ones(1))],
    "Constant: fill_value: expected shape (2,) to match the parameter": [
        lambda: initializers.Constant(ones(3))(ones(2)), lambda: initializers.Constant(ones(1, 2))(ones(2))],
    "Identity: array: expected a square matrix": [
        lambda: initializers.Identity()(ones(2, 3)), lambda: initializers.Identity()(ones(2)),
        lambda: initializers.Identity()(ones(2, 2, 2))],
    "LocalConvolution2D: ksize: expected a number or a pair": [lambda: L.LocalConvolution2D(1, 1, 2)],
    "LocalConvolution2D: in_size: expected at least the window (2, 2)": [
        lambda: L.LocalConvolution2D(1, 1, (1, 2), 2), lambda: L.LocalConvolution2D(1, 1, (2, 1), 2)],
    "DecorrelatedBatchNormalization: groups: expected a divisor of size=4": [
        lambda: L.DecorrelatedBatchNormalization(4, 0), lambda: L.DecorrelatedBatchNormalization(4, 3)],
    "LSTM: c: expected a state (N, U), got None": [lambda: L.LSTM(2, 3).set_state(None, ones(1, 3))],
    "LSTM: h: expected a state (N, U), got None": [lambda: L.LSTM(2, 3).set_state(ones(1, 3), None)],
    "NaryTreeLSTM: n_ary: expected at least 1, got 0": [lambda: L.NaryTreeLSTM(2, 3, 0)],
    "GRU: out_size: expected a number of units, got None": [lambda: L.GRU(2, None)],
    "ResNetCIFAR: expected a depth of 6 n + 2, such as 20 or 56, got": [
        lambda: models.ResNetCIFAR(depth=7), lambda: models.ResNetCIFAR(depth=2), lambda: models.ResNetCIFAR(depth=9)],
}  # fmt: skip


@pytest.mark.parametrize("block", range(3))
@each(words=lambda block: list(REFUSED)[block::3])
def test_refused(block, words):
    for call in REFUSED[words]:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"^{re.escape(words)}"):
            call()


def test_taken():
    assert L.MultiHeadAttention(4, 1)(ones(1, 2, 4)).shape == (1, 2, 4)
    assert L.MultiHeadAttention(4, 4)(ones(1, 2, 4)).shape == (1, 2, 4)
    assert L.LocalConvolution2D(1, 1, (2, 2), 2)(ones(1, 1, 2, 2)).shape == (1, 1, 1, 1)
    assert L.LocalConvolution2D(1, 1, None, 2).W.array is None
    assert L.LocalConvolution2D(None, 1, (3, 3), 2)(ones(1, 2, 3, 3)).shape == (1, 1, 2, 2)
    assert L.DecorrelatedBatchNormalization(4, 1).avg_mean.shape == (1, 4)
    assert L.DecorrelatedBatchNormalization(4, 4).avg_mean.shape == (4, 1)
    assert len(list(L.NaryTreeLSTM(2, 3, 1).children())) == 2
    assert L.Maxout(4, 2, 3, initialW=ones(2, 3, 4)).linear.W.shape == (6, 4)
    assert L.Maxout(None, 2, 3, initialW=ones(2, 3, 4))(ones(1, 4)).shape == (1, 2)
    assert L.Maxout(4, 2, 3, initialW=0.5, initial_bias=np.array(2.0)).linear.b.array.tolist() == [2] * 6
    assert L.Classifier(L.Linear(2, 2), label_key="t").label_key == "t"
    assert sum(1 for _ in models.ResNetCIFAR(depth=8).links()) < sum(1 for _ in models.ResNetCIFAR(depth=14).links())


def test_what_links_say_of_themselves():
    for link, words in (
        (L.Linear(2, 3), "Linear(in_size=2, out_size=3, nobias=False)"),
        (L.Linear(3, nobias=True), "Linear(in_size=None, out_size=3, nobias=True)"),
        (L.EmbedID(4, 3), "EmbedID(in_size=4, out_size=3, ignore_label=None)"),
        (L.EmbedID(4, 3, ignore_label=-1), "EmbedID(in_size=4, out_size=3, ignore_label=-1)"),
    ):
        assert repr(link) == words
    for in_channels, groups in ((4, 1), (None, 1), (4, 2)):
        words = repr(L.Convolution2D(in_channels, 2, 3, 2, 1, groups=groups))
        assert words.startswith(f"Convolution2D(in_channels={in_channels}, out_channels=2, ksize=3, stride=(2, 2)")
        assert f"groups={groups}" in words and "nobias=False" in words


def test_sizes_may_be_left_out_in_front():
    link = L.Deconvolution2D(2, 3)
    assert (link.out_channels, link.ksize, link.W.array) == (2, 3, None)
    assert link(ones(1, 4, 2, 2)).shape == (1, 2, 4, 4)
    link = L.Linear(None, 3)
    assert link(ones(2, 4, 5), n_batch_axes=2).shape == (2, 4, 3) and link.in_size == 5
    link = L.DepthwiseConvolution2D(None, 2, 3)
    assert link(ones(1, 3, 4, 4)).shape == (1, 6, 2, 2) and link.b.shape == (6,)
    link = L.DepthwiseConvolution2D(3, 2, 3, initial_bias=np.arange(6, dtype="f"))
    assert link.b.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert L.DepthwiseConvolution2D(3, 2, 3, nobias=True)(ones(1, 3, 4, 4)).shape == (1, 6, 2, 2)


@each(given=[None, 2.0, 2, np.array([1.0, 2.0], "f"), "callable"])
def test_scales_and_shifts_given_in_any_form(given):
    if isinstance(given, str):
        given = initializers.Constant(3.0)
    for make in (
        lambda: L.BatchNormalization(2, initial_gamma=given, initial_beta=given),
        lambda: L.LayerNormalization(2, initial_gamma=given, initial_beta=given),
        lambda: L.GroupNormalization(1, 2, initial_gamma=given, initial_beta=given),
    ):
        link = make()
        value = 3.0 if callable(given) else given
        assert link.gamma.array.tolist() == (np.ones(2) if given is None else np.ones(2) * value).tolist()
        assert link.beta.array.tolist() == (np.zeros(2) if given is None else np.ones(2) * value).tolist()
    rms = L.RMSNormalization(2, initial_gamma=given)
    assert (
        rms.gamma.array.tolist() == (np.ones(2) * (1 if given is None else 3.0 if callable(given) else given)).tolist()
    )


def test_initializers_have_types_by_name():
    for dtype in (None, "mixed16", "mixedbf16"):
        assert initializers.Constant(1, dtype).dtype == dtype
    assert initializers.Constant(1, "float16").dtype == np.float16
    a = np.empty((2, 2), np.float64)
    initializers.Identity(3.0)(a)
    assert a.tolist() == [[3, 0], [0, 3]]
    initializers.Constant(np.array(2.0))(a)
    assert a.tolist() == [[2, 2], [2, 2]]
    initializers.Constant(Variable(ones(2, 2)).array)(a)
    assert a.tolist() == [[1, 1], [1, 1]]


def test_states_are_arrays_or_variables_and_go_on():
    link, x = L.LSTM(2, 3), ones(1, 2)
    first, second = link(x), link(x)
    c, h = link.c, link.h
    assert h is second
    for wrap in (lambda v: v, lambda v: v.array):
        link.reset_state()
        assert link.c is None and link.h is None
        link(x)
        np.testing.assert_array_equal(link.h.array, first.array)
        link.set_state(wrap(c), wrap(h))
        assert (link.c is c) == (wrap(c) is c) and isinstance(link.h, Variable)
        third = link(x)
    link.reset_state()
    for _ in range(3):
        y = link(x)
    np.testing.assert_array_equal(third.array, y.array)
    zoned = L.StatefulZoneoutLSTM(2, 3)
    zoned.set_state(c, h.array)
    assert zoned.c is c and zoned.h.array is h.array
    with pytest.raises(ValueError, match=r"LSTM: x: expected at most 1 examples, as in the call before"):
        link(ones(2, 2))
    link.to_cpu()
    link.reset_state()
    link.to_cpu()
    assert link(ones(2, 2)).shape == (2, 3)


def test_a_block_has_a_projection_where_the_shape_changes():
    from dbrdist.models.resnet import Basic

    for in_channels, stride, projected in ((4, 1, False), (4, 2, True), (3, 1, True), (3, 2, True)):
        block = Basic(in_channels, 4, stride, 1.0)
        assert block.is_projected == projected == hasattr(block, "shortcut")
        assert block(ones(1, in_channels, 4, 4)).shape == (1, 4, 4 // stride, 4 // stride)


def test_scale_and_bias_along_axes():
    x, w = np.arange(6, dtype="f").reshape(1, 2, 3), np.array([2, 3], "f")
    np.testing.assert_array_equal(L.Scale()(x, w).array, x * w[:, None])
    np.testing.assert_array_equal(L.Scale(axis=2)(x, ones(3) * 2).array, x * 2)
    np.testing.assert_array_equal(L.Bias()(x, w).array, x + w[:, None])
    link = L.Scale(W_shape=(2,), bias_term=True)
    link.W.array[:], link.b.array[:] = w, [1, 2]
    np.testing.assert_array_equal(link(x).array, x * w[:, None] + np.array([[1], [2]]))
    assert L.Scale(W_shape=(2,), bias_term=True, bias_shape=(2, 3)).b.shape == (2, 3)
    given = L.Scale(bias_term=True, bias_shape=(2,))
    given.b.array[:] = [1, 2]
    np.testing.assert_array_equal(given(x, w).array, x * w[:, None] + np.array([[1], [2]]))


def test_words_of_a_tree():
    tree = L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 8, 1: 4, 2: 2, 3: 1})
    link = L.BinaryHierarchicalSoftmax(2, tree)
    x = ones(2, 2)
    assert link(x, ints(0, 3)).shape == ()
    assert link(x, Variable(ints(0, 3))).array == link(x, ints(0, 3)).array
    for words, call in {
        "x: expected shape (N, 2)": [lambda: link(ones(2, 3), ints(0, 1)), lambda: link(ones(2, 2, 1), ints(0, 1))],
        "t: expected integers of shape (2,)": [
            lambda: link(x, ints(0)), lambda: link(x, ones(2)), lambda: link(x, [0, 1])],
        "t: expected words of the tree": [lambda: link(x, ints(0, 4)), lambda: link(x, ints(-1, 0))],
    }.items():  # fmt: skip
        for one in call:
            with pytest.raises((ValueError, TypeError), match=f"BinaryHierarchicalSoftmax: {re.escape(words)}"):
                one()


def test_double_words_count_twice_in_losses():
    dbrdist.random.set_seed(0)
    link = L.NegativeSampling(2, [5, 3, 1], 4)
    x = ones(2, 2)
    y = link(x, ints(0, 1), reduce="no")
    assert y.shape == (2,) and link(x, ints(0, 2)).shape == ()
    assert F.sum(y).array > 0
