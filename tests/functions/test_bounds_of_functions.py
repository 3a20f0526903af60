"""What lies just within and just outside of the conditions in which functions choose or refuse; ways seldom taken.

``test_refused_arguments.py`` has what each function refuses.
"""

from __future__ import annotations

import inspect
import itertools
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, config
from dbrdist.core import arrays
from tests.each import each

RNG = np.random.default_rng(0)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


TAKEN = {
    "one array": lambda: F.concat([ones(3)], 0),
    "axes from -n to n - 1": lambda: F.concat([F.normalize(ones(2, 3), axis=(-2, 1))], -2),
    "one head": lambda: F.multi_head_attention(ones(1, 2, 3), ones(1, 2, 3), ones(1, 2, 3), 1),
    "as many heads as columns": lambda: F.multi_head_attention(ones(1, 2, 3), ones(1, 2, 3), ones(1, 2, 3), 3),
    "blocks of one pixel": lambda: F.space2depth(ones(1, 2, 3, 3), 1),
    "a transposed convolution to one pixel": lambda: F.deconvolution_nd(ones(1, 1, 1), ones(1, 1, 1), outsize=(1,)),
    "one object": lambda: F.discriminative_margin_based_clustering_loss(
        ones(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 1),
    "indices from -n to n - 1": lambda: F.permutate(ones(2), ints(-2, 1)),
    "indices in descending order": lambda: F.permutate(ones(2), ints(1, -2)),
    "a pyramid whose finest windows are pixels": lambda: F.spatial_pyramid_pooling_2d(ones(1, 1, 2, 2), 2),
    "rmax 1 and dmax 0": lambda: F.batch_renormalization(
        ones(2, 3), ones(3), ones(3), 1, 0, running_mean=ones(3), running_var=ones(3)),
    "windows of pixels, the last at the border": lambda: F.max_pooling_2d(ones(1, 1, 3, 3), 1, 2),
    "windows that see the image's edge": lambda: F.max_pooling_2d(ones(1, 1, 4, 4), 2, 1, 1),
    "such windows along one axis": lambda: F.max_pooling_1d(ones(1, 1, 3), 2, 1, 1),
    "the last element of an array": lambda: F.as_strided(ones(3), (1,), (5,), 2),
    "labels at both ends": lambda: F.softmax_cross_entropy(ones(2, 3), ints(0, 2)),
    "ids at both ends": lambda: F.embed_id(ints(0, 2), ones(3, 2)),
    "words at both ends": lambda: F.black_out(ones(2, 3), ints(0, 3), ones(4, 3), ints(0, 3).reshape(2, 1)),
    "lengths at both ends": lambda: F.connectionist_temporal_classification(
        [ones(2, 3)] * 2, ints(1, 2).reshape(2, 1), 0, ints(1, 2), ints(0, 1)),
}  # fmt: skip

REFUSED = {
    "multi_head_attention: n_heads: expected a divisor of the width of query": [
        lambda: F.multi_head_attention(ones(1, 2, 3), ones(1, 2, 3), ones(1, 2, 3), 0),
        lambda: F.multi_head_attention(ones(1, 2, 3), ones(1, 2, 3), ones(1, 2, 3), 2)],
    "multi_head_attention: query: expected shape (B, length, width)": [
        lambda: F.multi_head_attention(ones(), ones(1, 2, 3), ones(1, 2, 3), 1)],
    "rms_normalization: gamma: expected shape () as the last axis of x": [
        lambda: F.rms_normalization(ones(), ones(1))],
    "broadcast_to: shape: expected a shape to which (1, 2) broadcasts, got (2,)": [
        lambda: F.broadcast_to(ones(1, 2), (2,))],
    "broadcast_to: shape: expected a shape to which (2,) broadcasts, got (3,)": [
        lambda: F.broadcast_to(ones(2), (3,))],
    "broadcast_to: shape: expected a shape to which (1, 2) broadcasts, got (2, 2, 1)": [
        lambda: F.broadcast_to(ones(1, 2), (2, 2, 1))],
    "sum_to: shape: expected a shape that broadcasts to (2,), got (1, 2)": [lambda: F.sum_to(ones(2), (1, 2))],
    "sum_to: shape: expected a shape that broadcasts to (2,), got (3,)": [lambda: F.sum_to(ones(2), (3,))],
    "sum_to: shape: expected a shape that broadcasts to (2, 1), got (2,)": [lambda: F.sum_to(ones(2, 1), (2,))],
    "space2depth: X: expected rows and columns that r = 0 divides": [lambda: F.space2depth(ones(1, 2, 3, 3), 0)],
    "space2depth: X: expected rows and columns that r = 2 divides": [
        lambda: F.space2depth(ones(1, 2, 3, 2), 2), lambda: F.space2depth(ones(1, 2, 2, 3), 2)],
    "deconvolution_nd: outsize: expected sizes whose convolution has the sizes": [
        lambda: F.deconvolution_nd(ones(1, 1, 1), ones(1, 1, 1), outsize=(0,))],
    "convolution_nd: W: expected shape (O, C/groups, windows)": [
        lambda: F.convolution_nd(ones(1, 4, 3), ones(4, 4, 1), groups=0),
        lambda: F.convolution_nd(ones(1, 4, 3), ones(4, 1, 1), groups=3),
        lambda: F.convolution_nd(ones(1, 4, 3), ones(3, 2, 1), groups=2),
        lambda: F.convolution_nd(ones(1, 4, 3), ones(4, 4, 0))],
    "discriminative_margin_based_clustering_loss: norm, max_embedding_dim: expected": [
        lambda: F.discriminative_margin_based_clustering_loss(
            ones(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 0),
        lambda: F.discriminative_margin_based_clustering_loss(
            ones(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 1, norm=3)],
    "permutate: indices: expected places from -2 to 1, got -3 to 1": [lambda: F.permutate(ones(2), ints(-3, 1))],
    "permutate: indices: expected places from -2 to 1, got 0 to 2": [lambda: F.permutate(ones(2), ints(0, 2))],
    "batch_renormalization: rmax, dmax: expected rmax from 1 on, and dmax from 0 on": [
        lambda: F.batch_renormalization(
            ones(2, 3), ones(3), ones(3), 0.9, 0, running_mean=ones(3), running_var=ones(3)),
        lambda: F.batch_renormalization(
            ones(2, 3), ones(3), ones(3), 1, -0.1, running_mean=ones(3), running_var=ones(3))],
    "as_strided: strides: expected elements from 0 to 2": [
        lambda: F.as_strided(ones(3), (1,), (5,), 3), lambda: F.as_strided(ones(3), 2, 3),
        lambda: F.as_strided(ones(3), 2, -1)],
    "as_strided: strides: expected a number for each axis": [lambda: F.as_strided(ones(3), (1, 1), 1)],
    "as_strided: shape: expected lengths from 0 on": [lambda: F.as_strided(ones(3), -1, 1)],
    "softmax_cross_entropy: label_smoothing: expected a number from 0 to 1": [
        lambda: F.softmax_cross_entropy(ones(1, 2), ints(0), label_smoothing=1.01),
        lambda: F.softmax_cross_entropy(ones(1, 2), ints(0), label_smoothing=-0.01)],
    "softmax_cross_entropy: t: expected labels from 0 to 1, or -1 to be ignored": [
        lambda: F.softmax_cross_entropy(ones(1, 2), ints(2)), lambda: F.softmax_cross_entropy(ones(1, 2), ints(-2))],
    "softmax_cross_entropy: class_weight: expected an array of shape (2,)": [
        lambda: F.softmax_cross_entropy(ones(1, 2), ints(0), class_weight=ones(3)),
        lambda: F.softmax_cross_entropy(ones(1, 2), ints(0), class_weight=[1, 1])],
    "softmax_cross_entropy: x: expected shape (N, K, ...)": [lambda: F.softmax_cross_entropy(ones(2), ints(0, 1))],
    "softmax_cross_entropy: t: expected an array or Variable": [lambda: F.softmax_cross_entropy(ones(1, 2), [0])],
    "softmax_cross_entropy: t: expected integer labels of shape (1,), or probabilities of shape (1, 2)": [
        lambda: F.softmax_cross_entropy(ones(1, 2), ones(1)), lambda: F.softmax_cross_entropy(ones(1, 2), ints(0, 0)),
        lambda: F.softmax_cross_entropy(ones(1, 2), np.zeros((1, 2), bool))],
    "softmax_cross_entropy: t: expected integer labels with class_weight": [
        lambda: F.softmax_cross_entropy(ones(1, 2), ones(1, 2), class_weight=ones(2))],
    "hinge: t: expected integer labels of shape": [
        lambda: F.hinge(ones(2, 3), ints(0)), lambda: F.hinge(ones(2, 3), ones(2)),
        lambda: F.hinge(ones(2, 3, 1), ints(0, 1))],
    "embed_id: x: expected ids from 0 to 2": [
        lambda: F.embed_id(ints(3), ones(3, 2)), lambda: F.embed_id(ints(-1), ones(3, 2)),
        lambda: F.embed_id(ints(-2, -1), ones(3, 2), ignore_label=-1)],
    "embed_id: x: expected integers": [lambda: F.embed_id(ones(1), ones(3, 2))],
    "black_out: t: expected words from 0 to 3, or -1": [
        lambda: F.black_out(ones(1, 3), ints(4), ones(4, 3), ints(0).reshape(1, 1)),
        lambda: F.black_out(ones(1, 3), ints(-2), ones(4, 3), ints(0).reshape(1, 1))],
    "black_out: samples: expected integers of shape (1, S)": [
        lambda: F.black_out(ones(1, 3), ints(0), ones(4, 3), ints(0)),
        lambda: F.black_out(ones(1, 3), ints(0), ones(4, 3), ints(0, 1).reshape(2, 1)),
        lambda: F.black_out(ones(1, 3), ints(0), ones(4, 3), ones(1, 1))],
    "connectionist_temporal_classification: input_length: expected 1 integers from 0 to 2": [
        lambda n=n: F.connectionist_temporal_classification([ones(1, 3)] * 2, ints(1).reshape(1, 1), 0, n)
        for n in (ints(3), ints(-1), ints(1, 1), ones(1))],
    "connectionist_temporal_classification: label_length: expected 1 integers from 0 to 1": [
        lambda n=n: F.connectionist_temporal_classification([ones(1, 3)] * 2, ints(1).reshape(1, 1), 0, None, n)
        for n in (ints(2), ints(-1), ints(1, 1), ones(1))],
    "roi_max_pooling_2d: outsize: expected sizes from 1 on": [
        lambda size=size: F.roi_max_pooling_2d(ones(1, 1, 2, 2), np.array([[0, 0, 2, 2.0]], "f"), ints(0), size, 1.0)
        for size in ((0, 1), (1, 0))],
    "max_pooling_2d: ksize, stride, pad, cover_all: expected windows that each see a part of the image": [
        lambda: F.max_pooling_2d(ones(1, 1, 4, 3), 1, 2), lambda: F.max_pooling_2d(ones(1, 1, 3, 4), 1, 2),
        lambda: F.max_pooling_2d(ones(1, 1, 4, 4), (2, 3), 1, 2),
        lambda: F.max_pooling_2d(ones(1, 1, 4, 4), (3, 2), 1, 2)],
    "max_pooling_1d: ksize, stride, pad, cover_all: expected windows that each see a part of x": [
        lambda: F.max_pooling_1d(ones(1, 1, 4), 1, 2), lambda: F.max_pooling_1d(ones(1, 1, 4), 2, 1, 2)],
    "max_pooling_1d: ksize, stride, pad: expected numbers >= 1, and pad >= 0": [
        lambda: F.max_pooling_1d(ones(1, 1, 4), 0), lambda: F.max_pooling_1d(ones(1, 1, 4), 1, 0),
        lambda: F.max_pooling_1d(ones(1, 1, 4), 1, 1, -1)],
    "max_pooling_1d: x: expected shape (N, C, 1 axes)": [lambda: F.max_pooling_1d(ones(1, 1, 4, 4), 1)],
    "max_pooling_nd: x: expected shape (N, C, ...)": [lambda: F.max_pooling_nd(ones(1, 4), 1)],
    "roi_pooling_2d: outsize: expected sizes from 1 on": [
        lambda size=size: F.roi_pooling_2d(ones(1, 1, 2, 2), np.array([[0, 0, 0, 2, 2.0]], "f"), *size, 1.0)
        for size in ((0, 1), (1, 0), (1.5, 1), (1, 1.5))],
    "bilinear: V1, V2, b: expected all three or none, got 1 of them": [
        lambda: F.bilinear(ones(1, 2), ones(1, 2), ones(2, 2, 2), ones(2, 2))],
    "bilinear: W: expected shape (2, 3, K), got": [
        lambda: F.bilinear(ones(1, 2), ones(1, 3), ones(2, 2, 4)),
        lambda: F.bilinear(ones(1, 2), ones(1, 3), ones(3, 3, 4)),
        lambda: F.bilinear(ones(1, 1, 2), ones(1, 3, 1), ones(3, 2, 4))],
}  # fmt: skip


@pytest.mark.parametrize("block", range(4))
@each(words=lambda block: list(REFUSED)[block::4])
def test_refused(block, words):
    for call in REFUSED[words]:
        with pytest.raises((ValueError, TypeError, IndexError), match=f"^{re.escape(words)}"):
            call()


@each(name=["convolution", "deconvolution", "max_pooling", "average_pooling", "unpooling"], ndim=[1, 2, 3])
def test_windows_have_an_integer_for_each_axis(name, ndim):
    function = getattr(F, f"{name}_nd")
    arguments = inspect.signature(function).parameters
    given = {"W": ones(1, 1, *[3] * ndim)} if "W" in arguments else {"ksize": 2}
    for argument in {"ksize", "stride", "pad", "dilate", "outsize"} & set(arguments):
        for wrong in ((1,) * (ndim + 1), (), [1] * (ndim - 1), 1.0, (1.0,) * ndim, "1"):
            words = f"{name}_nd: {argument}: expected an integer or {ndim} of them, got {wrong!r}"
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(words)}"):
                function(ones(1, 1, *[5] * ndim), **{**given, argument: wrong})


@each(
    call=[
        lambda x, s, p: F.convolution_2d(x, x[:1, :, :2, :3], stride=s, pad=p),
        lambda x, s, p: F.deconvolution_2d(x, ones(2, 1, 2, 3), stride=s, pad=p),
        lambda x, s, p: F.max_pooling_2d(x, (2, 3), s, p, cover_all=False),
        lambda x, s, p: F.average_pooling_2d(x, [2, 3], s, p),
        lambda x, s, p: F.unpooling_2d(x, [2, 3], tuple(s), tuple(p), cover_all=False),
        lambda x, s, p: F.im2col(x, (2, 3), s, p),
    ],
    stride=[(2, 1), [2, 1], np.array([2, 1]), (np.int64(2), np.int8(1))], pad=[(1, 0), [1, 0], np.array([1, 0])],
)  # fmt: skip
def test_pairs_may_be_of_any_kind(call, stride, pad):
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype("f")
    np.testing.assert_array_equal(call(x, stride, pad).array, call(x, (2, 1), (1, 0)).array)


@each(of=[np.int64, np.int8, int])
def test_numbers_of_numpy_are_numbers_for_both_axes(of):
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype("f")
    for call in (
        lambda *w: F.convolution_2d(x, x[:1, :, :2, :3], None, *w), lambda *w: F.max_pooling_2d(x, 3, *w),
        lambda *w: F.deconvolution_2d(x, ones(2, 1, 2, 3), None, *w), lambda *w: F.average_pooling_2d(x, of(3), *w),
        lambda *w: F.im2col(x, of(2), *w), lambda *w: F.convolution_nd(x, x[:1, :, :2, :3], None, *w),
        lambda *w: F.unpooling_2d(x, of(3), *w), lambda *w: F.max_pooling_nd(x, of(3), *w),
    ):  # fmt: skip
        np.testing.assert_array_equal(call(of(2), of(1)).array, call((2, 2), (1, 1)).array)
    box = np.array([[0, 0, 4, 4.0]], "f"), ints(0)
    for align in (F.roi_max_align_2d, F.roi_average_align_2d):
        y = align(x, *box, outsize=of(2), spatial_scale=1.0, sampling_ratio=of(2))
        np.testing.assert_array_equal(y.array, align(x, *box, (2, 2), 1.0, (2, 2)).array)


@each(what=TAKEN)
def test_taken(what):
    assert np.isfinite(TAKEN[what]().array).all() if what != "one object" else TAKEN[what]()


def test_shapes_of_one_axis_may_be_numbers():
    x = np.arange(6.0).reshape(2, 3)
    assert F.reshape(x, 6).array.tolist() == F.reshape(x, np.int64(6)).array.tolist() == [0, 1, 2, 3, 4, 5]
    assert (
        F.as_strided(x, 3, 2).array.tolist() == F.as_strided(x, np.int32(3), np.int32(2), 0).array.tolist() == [0, 2, 4]
    )
    assert F.as_strided(x, 2, -1, 1).array.tolist() == [1, 0] and F.as_strided(x, 0, 9).shape == (0,)


@each(axis=[0, 1])
def test_a_permutation_of_indices_below_zero_is_undone(axis):
    x, order = np.arange(6.0).reshape(2, 3), (ints(-1, -2), ints(1, -1, 0))[axis]
    y = F.permutate(x, order, axis)
    np.testing.assert_array_equal(y.array, np.take(x, order, axis))
    np.testing.assert_array_equal(F.permutate(y, order, axis, inv=True).array, x)


def test_elements_taken_twice_have_no_inverse_order():
    x = Variable(np.array([5.0, 6.0, 7.0]))
    y = F.permutate(x, ints(2, 2, 0))
    y.grad = np.array([1.0, 10.0, 100.0])
    y.backward()
    assert y.array.tolist() == [7, 7, 5] and x.grad.tolist() == [100, 0, 11]


def test_a_single_number_is_repeated_along_its_one_axis():
    assert F.repeat(np.array(2.0), 3).array.tolist() == F.repeat(np.array(2.0), [3], 0).array.tolist() == [2, 2, 2]
    assert F.repeat(np.array(2.0), 2, -1).array.tolist() == [2, 2]
    with pytest.raises(ValueError, match="repeat: axis"):
        F.repeat(np.array(2.0), 3, 1)
    assert F.repeat(ones(2), 0).shape == (0,)


# ---- softmax cross entropy: every way to the same number ------------------------------------------------------------


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
        assert F.softmax_cross_entropy(ones(0, 3), np.zeros(0, int), normalize=normalize).array == 0
        assert F.sigmoid_cross_entropy(ones(0), np.zeros(0, int), normalize=normalize).array == 0
    assert F.embed_id(np.zeros((0, 2), int), ones(3, 4)).shape == (0, 2, 4)
    assert F.embed_id(ints(-1, -1), ones(3, 4), ignore_label=-1).array.tolist() == [[0] * 4] * 2
    assert F.embed_id(Variable(ints(1)), ones(3, 4)).shape == (1, 4)


def test_accuracy_of_probabilities_and_labels_of_any_shape():
    y = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], "f")
    assert F.accuracy(y, ints(1, 0, 0)).array == pytest.approx(2 / 3)
    assert F.accuracy(y, ints(1, 0, 0).reshape(3, 1)).array == pytest.approx(2 / 3)
    assert F.accuracy(y, y[::-1]).array == 1
    assert F.accuracy(y, y[[1, 0, 1]]).array == pytest.approx(0)
    assert F.accuracy(y, ints(1, 1, 5), ignore_label=5).array == pytest.approx(1 / 2)
    assert F.accuracy(y, ints(5, 5, 5), ignore_label=5).array == 0
    assert F.accuracy(y[:0], ints()).array == 0
    assert F.accuracy(y.reshape(3, 2, 1), ints(1, 0, 1).reshape(3, 1)).array == 1
    with pytest.raises(ValueError, match=r"accuracy: t: expected integer labels of shape \(3,\)"):
        F.accuracy(y, ints(1, 0))
    with pytest.raises((TypeError, ValueError), match=r"accuracy: t: expected integer labels of shape \(3,\)"):
        F.accuracy(y, ones(3))
    with pytest.raises(ValueError, match=r"accuracy: t: expected scores y of shape \(N, K, ...\)"):
        F.accuracy(ones(3), ints(1, 0, 0))


@each(n=[1, 2, 3], ignored=[None, -1, 1])
def test_fractions_of_every_small_set_of_labels(n, ignored):
    """Counted by hand, for all labels from -1 to 1 and all that may be predicted."""
    for labels in itertools.product([-1, 0, 1] if ignored == -1 else [0, 1], repeat=n):
        for best in itertools.product([0, 1], repeat=n):
            hits = [a == b for a, b in zip(best, labels) if b != ignored]
            y = np.eye(2)[list(best)]
            found = F.accuracy(y, ints(*labels), ignore_label=ignored).array
            assert found == (sum(hits) / len(hits) if hits else 0.0), (labels, best)
            if ignored == -1:
                assert F.binary_accuracy(y[:, 1] - 0.5, ints(*labels)).array == found, (labels, best)


@each(height=[1, 2, 3, 4], rows=range(1, 20), columns=[8, 9, 13])
def test_pyramids_over_images_of_every_size(height, rows, columns):
    """Where each window sees some of the image, as many maxima as there are windows; refused where one sees none."""
    x = np.random.default_rng(0).standard_normal((1, 1, rows, columns)).astype("f")
    expected, is_whole = [], min(rows, columns) >= 2 ** (height - 1)
    for bins in (2**level for level in range(height)):
        size = [-(-n // bins) for n in (rows, columns)]
        shift = [(k * bins - n) // 2 for k, n in zip(size, (rows, columns))]
        for i, j in np.ndindex(bins, bins):
            (top, bottom), (left, right) = (
                (max(at * k - q, 0), max(at * k - q + k, 0)) for at, k, q in zip((i, j), size, shift)
            )
            seen = x[0, 0, top:bottom, left:right]
            is_whole &= seen.size > 0
            expected.append(seen.max(initial=-np.inf))
    if is_whole:
        assert F.spatial_pyramid_pooling_2d(x, height).array.ravel().tolist() == expected
    else:
        with pytest.raises(ValueError, match="spatial_pyramid_pooling_2d: x: expected"):
            F.spatial_pyramid_pooling_2d(x, height)


def test_a_single_piece_is_a_tuple_unless_none_is_asked_for():
    x = np.arange(6.0).reshape(2, 3)
    for sections, is_tuple in ((1, False), ([], False), (2, True), ([1], True), ([0], True)):
        assert isinstance(F.split_axis(x, sections, 0, force_tuple=False), tuple) == is_tuple
        assert isinstance(F.split_axis(x, sections, 0), tuple)
    assert F.split_axis(x, 1, 0, force_tuple=False).array.tolist() == x.tolist()


def test_axes_may_be_any_sequence():
    x = RNG.standard_normal((4, 3, 2))
    expected = F.batch_normalization(x, ones(3, dtype=float), ones(3, dtype=float), axis=(0, 2)).array
    for axis in ([0, 2], (0, 2), range(0, 3, 2)):
        y = F.batch_normalization(x, ones(3, dtype=float), ones(3, dtype=float), axis=axis)
        np.testing.assert_array_equal(y.array, expected)


def test_steps_without_examples_keep_their_state():
    h = ones(1, 0, 3)
    w = [[ones(3, 3)] * 2]
    b = [[ones(3)] * 2]
    hy, ys = F.n_step_rnn(1, 0.0, h, w, b, [])
    assert hy.shape == (1, 0, 3) and len(ys) == 0
    with pytest.raises(ValueError, match="n_step_rnn: xs: expected steps with a falling number of examples"):
        F.n_step_rnn(1, 0.0, ones(1, 2, 3), w, b, [ones(1, 3), ones(2, 3)])


def test_double_backward_of_a_recurrent_net_with_relu():
    x, h = RNG.standard_normal((2, 3)), RNG.standard_normal((1, 2, 3))
    w, b = RNG.standard_normal((2, 3, 3)), RNG.standard_normal((2, 3))

    def last(x, h, w0, w1, b0, b1):
        return F.n_step_rnn(1, 0.0, h, [[w0, w1]], [[b0, b1]], [x], activation="relu")[0] ** 2.0

    xs = (x, h, *w, *b)
    g = RNG.standard_normal((1, 2, 3))
    dbrdist.gradient_check.check_double_backward(last, xs, g, xs, atol=1e-5, rtol=1e-4, dtype=np.float64)
    assert not config.debug


def test_eigenvectors_that_are_not_found_are_not_numbers(monkeypatch):
    from dbrdist.functions import whitening

    def fails(a):
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    monkeypatch.setattr(np.linalg, "eigh", fails)
    values, vectors = whitening._eigen(ones(2, 3, 3))
    assert values.shape == (2, 3) and vectors.shape == (2, 3, 3)
    assert np.isnan(values).all() and np.isnan(vectors).all() and values.dtype == vectors.dtype == np.float32


# ---- chance: what lies at the threshold -----------------------------------------------------------------------------


def with_bits(monkeypatch, *bits):
    from dbrdist.functions import noise

    monkeypatch.setattr(noise, "_bits", lambda *given: np.array(bits, np.uint32))


def test_elements_are_dropped_below_the_threshold(monkeypatch):
    x = np.array([1.0, 2.0, 3.0, 4.0])
    with_bits(monkeypatch, 0, 2**30 - 1, 2**30, 2**32 - 1)
    np.testing.assert_allclose(F.dropout(x, 0.25).array, [0, 0, 4, 16 / 3])
    np.testing.assert_allclose(F.zoneout(-x, x, 0.25).array, [-1, -2, 3, 4])
    assert (
        F.zoneout(-x, x, 1.0).array.tolist() == [-1, -2, -3, -4] and F.zoneout(-x, x, 0.0).array.tolist() == x.tolist()
    )
    y, mask = F.dropout(x, 0.0, return_mask=True)
    assert y.array.tolist() == x.tolist() and mask.tolist() == [1, 1, 1, 1]
    for call in (lambda: F.dropout(x, 1.0), lambda: F.dropout(x, -0.1)):
        with pytest.raises(ValueError, match="dropout: ratio: expected a number from 0 to less than 1"):
            call()
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match="zoneout: ratio: expected a number from 0 to 1"):
            F.zoneout(x, x, ratio)


def test_connections_are_dropped_below_the_threshold(monkeypatch):
    from dbrdist.functions import noise

    x, w = np.array([[1.0, 2.0]]), np.array([[1.0, 10.0]])
    monkeypatch.setattr(noise, "_bits", lambda a, shape, once: np.array([2**30 - 1, 2**30], np.uint32).reshape(shape))
    np.testing.assert_allclose(F.simplified_dropconnect(x, w, ratio=0.25).array, [[20 / 0.75]])
    with pytest.raises(ValueError, match="simplified_dropconnect: ratio: expected a number from 0 to less than 1"):
        F.simplified_dropconnect(x, w, ratio=1.0)
    with pytest.raises(ValueError, match="simplified_dropconnect: x: expected rows of 2 elements"):
        F.simplified_dropconnect(np.ones((1, 3)), w)
    with pytest.raises(ValueError, match=r"simplified_dropconnect: b: expected shape \(1,\)"):
        F.simplified_dropconnect(x, w, np.ones(2))


@each(**{"n, is_ordered": [(127, False), (128, True)]})
def test_sums_of_many_products_are_taken_in_a_good_order(n, is_ordered, monkeypatch):
    found, einsum = [], np.einsum
    monkeypatch.setattr(np, "einsum", lambda *xs, optimize: found.append(optimize) or einsum(*xs, optimize=optimize))
    a, b = np.ones((n, 2)), np.ones((2, 64))
    np.testing.assert_array_equal(F.einsum("ij,jk->ik", a, b).array, np.full((n, 64), 2.0))
    assert found == [is_ordered]
    F.einsum("ij->ji", np.ones((1 << 7, 1 << 7)))  # of one array there is no order
    assert found[1:] == [False]


@each(**{"size, is_joined": [(4095, False), (4096, True)]})
def test_bits_of_many_elements_are_joined(size, is_joined, monkeypatch):
    rng, found = np.random.default_rng(0), []
    fused = arrays.fused
    monkeypatch.setattr(arrays, "fused", lambda *xs: found.append(1) or fused(*xs))
    a, b = rng.standard_normal((2, size), np.float32)
    condition = rng.random(size) < 0.5
    np.testing.assert_array_equal(arrays.chosen(condition, a, b), np.where(condition, a, b))
    assert bool(found) == is_joined


@each(of=["x", "gamma", "beta"], **{"shape, axis": [((5, 3), (0,)), ((4, 3, 2), (0, 2)), ((1, 3), (0,))]})
def test_each_gradient_of_a_normalization_can_be_derived_by_itself(of, shape, axis):
    """Against central differences: what the gradients of the others would have added must not come in."""
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal(shape), "gamma": rng.uniform(0.5, 2, 3), "beta": rng.standard_normal(3)}
    values["gy"] = rng.standard_normal(shape)
    weights = rng.standard_normal(values[of].shape)

    def first(values):
        vs = {name: Variable(a) for name, a in values.items()}
        y = F.batch_normalization(vs["x"], vs["gamma"], vs["beta"], eps=1e-3, axis=axis)
        (g,) = dbrdist.grad([y], [vs[of]], [vs["gy"]], enable_double_backprop=True)
        return vs, F.sum(g * weights)

    vs, total = first(values)
    found = dict(zip(vs, dbrdist.grad([total], list(vs.values()))))
    for name, a in values.items():
        expected = np.zeros(a.shape)
        for i in np.ndindex(a.shape):
            for sign in (1, -1):
                moved = a.copy()
                moved[i] += sign * 1e-5
                expected[i] += sign * float(first({**values, name: moved})[1].array) / 2e-5
        actual = np.zeros(a.shape) if found[name] is None else found[name].array
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7, err_msg=f"{of}, {name}")


@each(dtype=[np.float32, np.float64], smoothing=[0.0, 0.3])
def test_probabilities_as_labels_are_smoothed(dtype, smoothing):
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 3)), rng.dirichlet(np.ones(3), 4)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    expected = -((t * (1 - smoothing) + smoothing / 3) * log_p).sum(1).mean()
    y = F.softmax_cross_entropy(x.astype(dtype), t.astype(dtype), label_smoothing=smoothing)
    np.testing.assert_allclose(y.array, expected, rtol=1e-6)
