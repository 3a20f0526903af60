"""Tests of dbrdist.functions.functions."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each


def ones(*shape):
    return np.ones(shape, np.float32)


SINGULAR = np.array([[1.0, 2.0], [2.0, 4.0]])
MISFITS = [
    (lambda: F.einsum(), r"einsum: operands: expected an array for each of the 0 terms, got 0 arrays"),
    (lambda: F.einsum("ij,jk", ones(2, 3)), r"einsum: operands: expected an array for each of the 2 terms, got 1 "),
    (lambda: F.einsum("ij", ones(2, 3), ones(2)), r"expected an array for each of the 1 terms, got 2 arrays"),
    (lambda: F.einsum("ij,jk", ones(2, 3), ones(4, 2)), r"operand 1: expected length 3 of 'j' as before, got shape"),
    (lambda: F.einsum("ij,jk", ones(2, 3), ones(1, 2)), r"operand 1: expected length 3 of 'j' as before"),
    (lambda: F.einsum("ii", ones(2, 3)), r"operand 0: expected length 2 of 'i' as before"),
    (lambda: F.einsum("ijk", ones(2, 3)), r"operand 0: expected the 3 axes of 'ijk', got 2 axes"),
    (lambda: F.einsum("i", ones(2, 3)), r"operand 0: expected the 1 axes of 'i', got 2 axes"),
    (lambda: F.einsum("ij...k", ones(2, 3)), r"operand 0: expected the 4 axes of 'ij...k', got 2"),
    (lambda: F.einsum("ij->ii", ones(2, 3)), r"letters of the terms in the result, each once"),
    (lambda: F.einsum("ij->ik", ones(2, 3)), r"letters of the terms in the result, each once"),
    (lambda: F.einsum("ij->i->j", ones(2, 3)), r"subscripts: expected letters, ',', '->' and one '...' in a term"),
    (lambda: F.einsum("i1", ones(2, 3)), r"expected letters, ',', '->'"),
    (lambda: F.einsum("i..", ones(2, 3)), r"expected letters, ',', '->'"),
    (lambda: F.einsum("@i", ones(2, 3)), r"expected letters, ',', '->'"),
    (lambda: F.einsum("......i", ones(2, 3)), r"expected letters, ',', '->'"),
    (lambda: F.einsum("...i->i", ones(2, 3)), r"'...' in the result, since axes of '...' are not summed"),
    (lambda: F.einsum("...i,...i->...", ones(2, 3), ones(4, 3)), r"operand 1: expected length 2 of '...' as before"),
    (lambda: F.einsum(ones(2, 3), ["i", "j"]), r"subscripts: expected a string first, or a list of ints"),
    (lambda: F.einsum(ones(2, 3), ones(2, 3)), r"subscripts: expected a string first, or a list of ints"),
    (lambda: F.einsum("ij", np.ones((2, 3), int)), r"einsum: operand 0: expected a floating type"),
    (lambda: F.det(ones(2, 3)), r"det: a: expected a square matrix, got shape \(2, 3\)"),
    (lambda: F.det(ones(2, 2, 2)), r"det: a: expected a square matrix"),
    (lambda: F.batch_det(ones(2, 2)), r"batch_det: a: expected square matrices, shape \(N, K, K\)"),
    (lambda: F.inv(SINGULAR), r"inv: a: expected matrices that are not singular, got shape \(2, 2\)"),
    (lambda: F.batch_inv(SINGULAR[None]), r"inv: a: expected matrices that are not singular"),
    (lambda: F.cholesky(-np.eye(2)), r"cholesky: a: expected a positive definite matrix"),
    (lambda: F.fft(ones(2)), r"fft: x: expected a pair \(real, imag\), got shape"),
    (lambda: F.fft((ones(2), ones(3))), r"fft: imag: expected shape \(2,\) to match real"),
    (lambda: F.ifft((ones(2, 0), ones(2, 0))), r"ifft: real: expected at least one element along the last axis"),
    (lambda: F.batch_l2_norm_squared(ones()), r"batch_l2_norm_squared: x: expected an axis of examples"),
    (lambda: F.cumsum(ones(2), 1), r"cumsum: axis: expected from -1 to 0"),
    (lambda: F.cumprod(ones(2).astype(int)), r"cumprod: x: expected a floating type"),
    (lambda: F.prod(ones(2, 3), (0, 0)), r"prod: axis: expected each axis once"),
    (lambda: F.diagonal(ones(2)), r"diagonal: x: expected at least 2 axes"),
    (lambda: F.diagonal(ones(2, 2), 0, 1, -1), r"diagonal: axis2: expected another axis than axis1 = 1"),
    (lambda: F.diagonal(ones(2, 2), 0, 2), r"diagonal: axis1: expected from -2 to 1"),
    (lambda: F.pad_sequence([]), r"pad_sequence: xs: expected at least one array, got none"),
    (lambda: F.pad_sequence([ones(2, 3), ones(2, 4)]), r"pad_sequence: xs\[1\]: expected shape \(L, ...\) and type"),
    (lambda: F.pad_sequence([ones()]), r"pad_sequence: xs\[0\]: expected shape"),
    (lambda: F.pad_sequence([ones(2), ones(4)], 3), r"length: expected at least 4, the length of the longest of xs"),
    (lambda: F.pad_sequence([np.ones(2, np.uint8)], padding=-1), r"padding: expected a number of type uint8, got -1"),
    (lambda: F.transpose_sequence([ones(2), ones(4)]), r"sequences in descending order of length, got \[2, 4\]"),
    (lambda: F.depth2space(ones(1, 6, 2, 2), 2), r"depth2space: X: expected a multiple of r r = 4 channels"),
    (lambda: F.depth2space(ones(6, 2, 2), 2), r"depth2space: X: expected images"),
    (lambda: F.depth2space(ones(1, 4, 2, 2), 0), r"depth2space: X: expected a multiple"),
    (lambda: F.space2depth(ones(1, 2, 4, 5), 2), r"space2depth: X: expected rows and columns that r = 2 divides"),
    (lambda: F.im2col(ones(1, 2, 3, 3), 4), r"im2col: x: expected images that windows of \(4, 4\) fit into"),
    (lambda: F.im2col(ones(1, 2, 3, 3), 2, 0), r"im2col: ksize, stride, pad, dilate: expected sizes from 1 on"),
    (lambda: F.im2col(ones(1, 2, 3, 3), 2, pad=-1), r"im2col: ksize, stride, pad, dilate: expected sizes from 1 on"),
    (lambda: F.resize_images(ones(1, 2, 3, 3), (2, 0)), r"output_shape: expected two numbers from 1 on, got \(2, 0\)"),
    (lambda: F.resize_images(ones(1, 2, 3, 3), (2, 2), mode="cubic"), r"mode: expected 'bilinear' or 'nearest'"),
    (lambda: F.resize_images(ones(1, 2, 0, 3), (2, 2)), r"resize_images: x: expected at least one pixel"),
    (lambda: F.spatial_transformer_grid(ones(2, 3), (2, 2)), r"theta: expected shape \(N, 2, 3\)"),
    (lambda: F.spatial_transformer_sampler(ones(2, 1, 3, 3), ones(1, 2, 3, 3)), r"grid: expected shape \(2, 2, H, W\)"),
    (lambda: F.spatial_transformer_sampler(ones(2, 3, 3), ones(2, 2, 3, 3)), r"x: expected images"),
    (lambda: F.precision(ones(3), np.array([0])), r"t: expected integer labels of shape \(N, ...\)"),
    (lambda: F.recall(ones(2, 3), ones(2)), r"t: expected integer labels"),
    (lambda: F.f1_score(ones(2, 3), np.array([0, 2]), 2), r"t: expected labels from 0 to 1, or -1, got 0 to 2"),
    (lambda: F.f1_score(ones(2, 3), np.array([0, -2])), r"t: expected labels from 0 to 0, or -1, got -2 to 0"),
    (lambda: F.zoneout(ones(2), ones(3)), r"zoneout: x: expected shape \(2,\) to match h"),
    (lambda: F.zoneout(ones(2), ones(2), 1.5), r"zoneout: ratio: expected a number from 0 to 1, got 1.5"),
    (lambda: F.simplified_dropconnect(ones(2, 3), ones(4, 2)), r"x: expected rows of 2 elements for W of shape"),
    (lambda: F.simplified_dropconnect(ones(2, 3), ones(4, 3), ratio=1.0), r"ratio: expected a number from 0 to less"),
    (lambda: F.simplified_dropconnect(ones(2, 3), ones(4, 3), mask=ones(4, 3)), r"mask: expected shape \(2, 4, 3\)"),
    (lambda: F.simplified_dropconnect(ones(2, 3), ones(4, 3), ones(3)), r"b: expected shape \(4,\), got shape \(3,\)"),
    (lambda: F.normalize(ones(3)), r"normalize: axis: expected different axes from -1 to 0, got 1"),
    (lambda: F.normalize(ones(3, 2), axis=(1, -1)), r"normalize: axis: expected different axes"),
    (lambda: F.local_response_normalization(ones(3)), r"x: expected at least 2 axes"),
    (lambda: F.local_response_normalization(ones(3, 2), 0), r"n: expected a number from 1 on"),
]  # fmt: skip


@each(**{"call, message": MISFITS})
def test_misfits_are_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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


@pytest.mark.parametrize("message", BAD)
def test_errors_say_what_was_expected(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


@each(name=sorted(n for n in dir(F) if callable(getattr(F, n)) and not n.startswith("_")))
def test_functions_can_be_pickled(name):
    function = getattr(F, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_chain_of_links_and_functions_can_be_pickled():
    model = dbrdist.Sequential(dbrdist.links.Linear(3, 2), F.leaky_relu)
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model))(x).array, model(x).array)


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


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


TAKEN = {
    "one array": lambda: F.concat([ones_of(3)], 0),
    "axes from -n to n - 1": lambda: F.concat([F.normalize(ones_of(2, 3), axis=(-2, 1))], -2),
    "one head": lambda: F.multi_head_attention(ones_of(1, 2, 3), ones_of(1, 2, 3), ones_of(1, 2, 3), 1),
    "as many heads as columns": lambda: F.multi_head_attention(ones_of(1, 2, 3), ones_of(1, 2, 3), ones_of(1, 2, 3), 3),
    "blocks of one pixel": lambda: F.space2depth(ones_of(1, 2, 3, 3), 1),
    "a transposed convolution to one pixel": lambda: F.deconvolution_nd(
        ones_of(1, 1, 1), ones_of(1, 1, 1), outsize=(1,)),
    "one object": lambda: F.discriminative_margin_based_clustering_loss(
        ones_of(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 1),
    "indices from -n to n - 1": lambda: F.permutate(ones_of(2), ints(-2, 1)),
    "indices in descending order": lambda: F.permutate(ones_of(2), ints(1, -2)),
    "a pyramid whose finest windows are pixels": lambda: F.spatial_pyramid_pooling_2d(ones_of(1, 1, 2, 2), 2),
    "rmax 1 and dmax 0": lambda: F.batch_renormalization(
        ones_of(2, 3), ones_of(3), ones_of(3), 1, 0, running_mean=ones_of(3), running_var=ones_of(3)),
    "windows of pixels, the last at the border": lambda: F.max_pooling_2d(ones_of(1, 1, 3, 3), 1, 2),
    "windows that see the image's edge": lambda: F.max_pooling_2d(ones_of(1, 1, 4, 4), 2, 1, 1),
    "such windows along one axis": lambda: F.max_pooling_1d(ones_of(1, 1, 3), 2, 1, 1),
    "the last element of an array": lambda: F.as_strided(ones_of(3), (1,), (5,), 2),
    "labels at both ends": lambda: F.softmax_cross_entropy(ones_of(2, 3), ints(0, 2)),
    "ids at both ends": lambda: F.embed_id(ints(0, 2), ones_of(3, 2)),
    "words at both ends": lambda: F.black_out(ones_of(2, 3), ints(0, 3), ones_of(4, 3), ints(0, 3).reshape(2, 1)),
    "lengths at both ends": lambda: F.connectionist_temporal_classification(
        [ones_of(2, 3)] * 2, ints(1, 2).reshape(2, 1), 0, ints(1, 2), ints(0, 1)),
}  # fmt: skip
REFUSED = {
    "multi_head_attention: n_heads: expected a divisor of the width of query": [
        lambda: F.multi_head_attention(ones_of(1, 2, 3), ones_of(1, 2, 3), ones_of(1, 2, 3), 0),
        lambda: F.multi_head_attention(ones_of(1, 2, 3), ones_of(1, 2, 3), ones_of(1, 2, 3), 2)],
    "multi_head_attention: query: expected shape (B, length, width)": [
        lambda: F.multi_head_attention(ones_of(), ones_of(1, 2, 3), ones_of(1, 2, 3), 1)],
    "rms_normalization: gamma: expected shape () as the last axis of x": [
        lambda: F.rms_normalization(ones_of(), ones_of(1))],
    "broadcast_to: shape: expected a shape to which (1, 2) broadcasts, got (2,)": [
        lambda: F.broadcast_to(ones_of(1, 2), (2,))],
    "broadcast_to: shape: expected a shape to which (2,) broadcasts, got (3,)": [
        lambda: F.broadcast_to(ones_of(2), (3,))],
    "broadcast_to: shape: expected a shape to which (1, 2) broadcasts, got (2, 2, 1)": [
        lambda: F.broadcast_to(ones_of(1, 2), (2, 2, 1))],
    "sum_to: shape: expected a shape that broadcasts to (2,), got (1, 2)": [lambda: F.sum_to(ones_of(2), (1, 2))],
    "sum_to: shape: expected a shape that broadcasts to (2,), got (3,)": [lambda: F.sum_to(ones_of(2), (3,))],
    "sum_to: shape: expected a shape that broadcasts to (2, 1), got (2,)": [lambda: F.sum_to(ones_of(2, 1), (2,))],
    "space2depth: X: expected rows and columns that r = 0 divides": [lambda: F.space2depth(ones_of(1, 2, 3, 3), 0)],
    "space2depth: X: expected rows and columns that r = 2 divides": [
        lambda: F.space2depth(ones_of(1, 2, 3, 2), 2), lambda: F.space2depth(ones_of(1, 2, 2, 3), 2)],
    "deconvolution_nd: outsize: expected sizes whose convolution has the sizes": [
        lambda: F.deconvolution_nd(ones_of(1, 1, 1), ones_of(1, 1, 1), outsize=(0,))],
    "convolution_nd: W: expected shape (O, C/groups, windows)": [
        lambda: F.convolution_nd(ones_of(1, 4, 3), ones_of(4, 4, 1), groups=0),
        lambda: F.convolution_nd(ones_of(1, 4, 3), ones_of(4, 1, 1), groups=3),
        lambda: F.convolution_nd(ones_of(1, 4, 3), ones_of(3, 2, 1), groups=2),
        lambda: F.convolution_nd(ones_of(1, 4, 3), ones_of(4, 4, 0))],
    "discriminative_margin_based_clustering_loss: max_embedding_dim: expected an integer of 1 or more": [
        lambda: F.discriminative_margin_based_clustering_loss(
            ones_of(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 0)],
    "discriminative_margin_based_clustering_loss: norm: expected 1 or 2": [
        lambda: F.discriminative_margin_based_clustering_loss(
            ones_of(1, 2, 2, 2), np.ones((1, 2, 2), np.int32), 0.5, 1.5, 1, norm=3)],
    "permutate: indices: expected places from -2 to 1, got -3 to 1": [lambda: F.permutate(ones_of(2), ints(-3, 1))],
    "permutate: indices: expected places from -2 to 1, got 0 to 2": [lambda: F.permutate(ones_of(2), ints(0, 2))],
    "batch_renormalization: rmax, dmax: expected rmax from 1 on, and dmax from 0 on": [
        lambda: F.batch_renormalization(
            ones_of(2, 3), ones_of(3), ones_of(3), 0.9, 0, running_mean=ones_of(3), running_var=ones_of(3)),
        lambda: F.batch_renormalization(
            ones_of(2, 3), ones_of(3), ones_of(3), 1, -0.1, running_mean=ones_of(3), running_var=ones_of(3))],
    "as_strided: strides: expected elements from 0 to 2": [
        lambda: F.as_strided(ones_of(3), (1,), (5,), 3), lambda: F.as_strided(ones_of(3), 2, 3),
        lambda: F.as_strided(ones_of(3), 2, -1)],
    "as_strided: strides: expected a number for each axis": [lambda: F.as_strided(ones_of(3), (1, 1), 1)],
    "as_strided: shape: expected lengths from 0 on": [lambda: F.as_strided(ones_of(3), -1, 1)],
    "softmax_cross_entropy: label_smoothing: expected a number from 0 to 1": [
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(0), label_smoothing=1.01),
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(0), label_smoothing=-0.01)],
    "softmax_cross_entropy: t: expected labels from 0 to 1, or -1 to be ignored": [
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(2)),
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(-2))],
    "softmax_cross_entropy: class_weight: expected an array of shape (2,)": [
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(0), class_weight=ones_of(3)),
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(0), class_weight=[1, 1])],
    "softmax_cross_entropy: x: expected shape (N, K, ...)": [lambda: F.softmax_cross_entropy(ones_of(2), ints(0, 1))],
    "softmax_cross_entropy: t: expected an array or Variable": [lambda: F.softmax_cross_entropy(ones_of(1, 2), [0])],
    "softmax_cross_entropy: t: expected integer labels of shape (1,), or probabilities of shape (1, 2)": [
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ones_of(1)),
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ints(0, 0)),
        lambda: F.softmax_cross_entropy(ones_of(1, 2), np.zeros((1, 2), bool))],
    "softmax_cross_entropy: t: expected integer labels with class_weight": [
        lambda: F.softmax_cross_entropy(ones_of(1, 2), ones_of(1, 2), class_weight=ones_of(2))],
    "hinge: t: expected integer labels of shape": [
        lambda: F.hinge(ones_of(2, 3), ints(0)), lambda: F.hinge(ones_of(2, 3), ones_of(2)),
        lambda: F.hinge(ones_of(2, 3, 1), ints(0, 1))],
    "embed_id: x: expected ids from 0 to 2": [
        lambda: F.embed_id(ints(3), ones_of(3, 2)), lambda: F.embed_id(ints(-1), ones_of(3, 2)),
        lambda: F.embed_id(ints(-2, -1), ones_of(3, 2), ignore_label=-1)],
    "embed_id: x: expected integers": [lambda: F.embed_id(ones_of(1), ones_of(3, 2))],
    "black_out: t: expected words from 0 to 3, or -1": [
        lambda: F.black_out(ones_of(1, 3), ints(4), ones_of(4, 3), ints(0).reshape(1, 1)),
        lambda: F.black_out(ones_of(1, 3), ints(-2), ones_of(4, 3), ints(0).reshape(1, 1))],
    "black_out: samples: expected integers of shape (1, S)": [
        lambda: F.black_out(ones_of(1, 3), ints(0), ones_of(4, 3), ints(0)),
        lambda: F.black_out(ones_of(1, 3), ints(0), ones_of(4, 3), ints(0, 1).reshape(2, 1)),
        lambda: F.black_out(ones_of(1, 3), ints(0), ones_of(4, 3), ones_of(1, 1))],
    "connectionist_temporal_classification: input_length: expected 1 integers from 0 to 2": [
        lambda n=n: F.connectionist_temporal_classification([ones_of(1, 3)] * 2, ints(1).reshape(1, 1), 0, n)
        for n in (ints(3), ints(-1), ints(1, 1), ones_of(1))],
    "connectionist_temporal_classification: label_length: expected 1 integers from 0 to 1": [
        lambda n=n: F.connectionist_temporal_classification([ones_of(1, 3)] * 2, ints(1).reshape(1, 1), 0, None, n)
        for n in (ints(2), ints(-1), ints(1, 1), ones_of(1))],
    "roi_max_pooling_2d: outsize: expected sizes from 1 on": [
        lambda size=size: F.roi_max_pooling_2d(ones_of(1, 1, 2, 2), np.array([[0, 0, 2, 2.0]], "f"), ints(0), size, 1.0)
        for size in ((0, 1), (1, 0))],
    "max_pooling_2d: ksize, stride, pad, cover_all: expected windows that each see a part of the image": [
        lambda: F.max_pooling_2d(ones_of(1, 1, 4, 3), 1, 2), lambda: F.max_pooling_2d(ones_of(1, 1, 3, 4), 1, 2),
        lambda: F.max_pooling_2d(ones_of(1, 1, 4, 4), (2, 3), 1, 2),
        lambda: F.max_pooling_2d(ones_of(1, 1, 4, 4), (3, 2), 1, 2)],
    "max_pooling_1d: ksize, stride, pad, cover_all: expected windows that each see a part of x": [
        lambda: F.max_pooling_1d(ones_of(1, 1, 4), 1, 2), lambda: F.max_pooling_1d(ones_of(1, 1, 4), 2, 1, 2)],
    "max_pooling_1d: ksize, stride, pad: expected numbers >= 1, and pad >= 0": [
        lambda: F.max_pooling_1d(ones_of(1, 1, 4), 0), lambda: F.max_pooling_1d(ones_of(1, 1, 4), 1, 0),
        lambda: F.max_pooling_1d(ones_of(1, 1, 4), 1, 1, -1)],
    "max_pooling_1d: x: expected shape (N, C, 1 axes)": [lambda: F.max_pooling_1d(ones_of(1, 1, 4, 4), 1)],
    "max_pooling_nd: x: expected shape (N, C, ...)": [lambda: F.max_pooling_nd(ones_of(1, 4), 1)],
    "roi_pooling_2d: outsize: expected sizes from 1 on": [
        lambda size=size: F.roi_pooling_2d(ones_of(1, 1, 2, 2), np.array([[0, 0, 0, 2, 2.0]], "f"), *size, 1.0)
        for size in ((0, 1), (1, 0), (1.5, 1), (1, 1.5))],
    "bilinear: V1, V2, b: expected all three or none, got 1 of them": [
        lambda: F.bilinear(ones_of(1, 2), ones_of(1, 2), ones_of(2, 2, 2), ones_of(2, 2))],
    "bilinear: W: expected shape (2, 3, K), got": [
        lambda: F.bilinear(ones_of(1, 2), ones_of(1, 3), ones_of(2, 2, 4)),
        lambda: F.bilinear(ones_of(1, 2), ones_of(1, 3), ones_of(3, 3, 4)),
        lambda: F.bilinear(ones_of(1, 1, 2), ones_of(1, 3, 1), ones_of(3, 2, 4))],
}  # fmt: skip


@pytest.mark.parametrize("block", range(4))
@each(words=lambda block: list(REFUSED)[block::4])
def test_refused(block, words):
    for call in REFUSED[words]:
        with pytest.raises((ValueError, TypeError, IndexError), match=f"^{re.escape(words)}"):
            call()


@each(what=TAKEN)
def test_taken(what):
    assert np.isfinite(TAKEN[what]().array).all() if what != "one object" else TAKEN[what]()
