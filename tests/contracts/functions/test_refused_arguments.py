"""Where functions refuse arguments: each part of a condition is met by itself, and what lies just within is taken.

``tests/functions/test_functions.py`` has more of what some of them refuse.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import dbrdist.functions as F
from tests.each import each


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X, IMAGES, INTS = ones(2, 6), ones(2, 4, 6, 6), np.zeros(2, np.int64)
REFUSED = {
    # ---- shapes and axes
    "moveaxis: destination: expected as many different axes as in source, got [0, 1]": [
        lambda: F.moveaxis(X, 0, [0, 1])],
    "moveaxis: destination: expected as many different axes as in source, got [0, -2]": [
        lambda: F.moveaxis(X, [0, 1], [0, -2])],
    "moveaxis: destination: expected as many": [lambda: F.moveaxis(X, [0, -2], [0, 1])],
    "rollaxis: start: expected from -2 to 2": [lambda: F.rollaxis(X, 0, 3), lambda: F.rollaxis(X, 0, -3)],
    "broadcast: args: expected shapes that broadcast": [lambda: F.broadcast(ones(2), ones(3))],
    "concat: xs: expected at least one array, got none": [lambda: F.concat([])],
    "stack: xs: expected at least one array, got none": [lambda: F.stack([])],
    "split_axis: indices_or_sections: expected indices in ascending order, got [3, 2]": [
        lambda: F.split_axis(X, [3, 2], 1)],
    "select_item: t: expected": [
        lambda: F.select_item(X, np.zeros(3, np.int32)), lambda: F.select_item(X, ones(2))],
    "permutate: indices: expected": [
        lambda: F.permutate(X, np.array([0, -3])), lambda: F.permutate(X, np.array([0, 2]))],
    "diagonal: axis2: expected another axis than axis1 = 1": [lambda: F.diagonal(X, axis1=1, axis2=-1)],
    "repeat: repeats: expected a number from 0 on, got -1": [lambda: F.repeat(X, -1), lambda: F.repeat(X, [-1])],
    "tile: reps: expected numbers from 0 on": [lambda: F.tile(X, -1), lambda: F.tile(X, (1, -1))],
    "pad: mode: expected 'constant' with constant_values, or 'edge', 'reflect', 'symmetric', 'wrap', got 'mean'": [
        lambda: F.pad(X, 1, "mean")],
    "pad: mode: expected 'constant' with": [lambda: F.pad(X, 1, "constant", reflect_type="odd")],
    "pad_sequence: length: expected at least 3, the length of the longest of xs, got 2": [
        lambda: F.pad_sequence([ones(3), ones(1)], 2)],
    "pad_sequence: xs: expected at least one array, got none": [lambda: F.pad_sequence([])],
    # ---- arithmetic
    "add: xs: expected at least one argument, got none": [lambda: F.add()],
    "clip: x_min, x_max: expected at least one bound": [lambda: F.clip(X, None, None)],
    "clip: x_min: expected at most x_max = 1.0": [lambda: F.clip(X, 1.5, 1.0)],
    "matmul: a: expected at least one axis": [lambda: F.matmul(ones(), X)],
    "matmul: b: expected at least one axis": [lambda: F.matmul(X, ones())],
    "sum: axis: expected an int, a tuple of ints or None, got tuple (0, 1.0)": [lambda: F.sum(X, (0, 1.0))],
    "einsum: operands: expected an array for each of the 2 terms, got 1 arrays": [lambda: F.einsum("ij,jk->ik", X)],
    "einsum: operands: expected an array for each of the": [lambda: F.einsum("ij->i"), lambda: F.einsum()],
    "einsum: subscripts: expected letters, ',', '->' and one '...' in a term": [
        lambda: F.einsum("i@->i", X), lambda: F.einsum("i1->i", X), lambda: F.einsum("...i...->i", X)],
    "einsum: subscripts: expected a string first, or a list of ints and Ellipsis behind each array": [
        lambda: F.einsum(X, ["i", 1], [0]), lambda: F.einsum(X, [..., 1, ...], [1]), lambda: F.einsum(X, 1)],
    "einsum: subscripts: expected '...' in the result": [lambda: F.einsum("...i->i", X)],
    "einsum: subscripts: expected letters of the terms in the result, each once": [
        lambda: F.einsum("ij->ii", X), lambda: F.einsum("ij->ik", X)],
    "batch_l2_norm_squared: x: expected an axis of examples": [lambda: F.batch_l2_norm_squared(ones())],
    "fft: x: expected a pair (real, imag)": [lambda: F.fft(X), lambda: F.fft((X,)), lambda: F.fft((X, X, X))],
    "ifft: real: expected at least one element along the last axis": [
        lambda: F.ifft((ones(), ones())), lambda: F.ifft((ones(2, 0), ones(2, 0)))],
    "maxout: pool_size: expected a divisor of the 6 elements along axis 1": [
        lambda: F.maxout(X, 0), lambda: F.maxout(X, 4), lambda: F.maxout(X, -2)],
    "normalize: axis: expected different axes from -2 to 1": [
        lambda: F.normalize(X, axis=2), lambda: F.normalize(X, axis=(1, -1))],
    "local_response_normalization: n: expected a number from 1 on, got 0": [
        lambda: F.local_response_normalization(IMAGES, n=0)],
    "group_normalization: groups: expected a divisor of the 4 channels of x": [
        lambda: F.group_normalization(IMAGES, 0, ones(4), ones(4)),
        lambda: F.group_normalization(IMAGES, 3, ones(4), ones(4)),
        lambda: F.group_normalization(IMAGES, 2.0, ones(4), ones(4))],
    "decorrelated_batch_normalization: groups: expected a divisor of the 6 channels of x": [
        lambda: F.decorrelated_batch_normalization(X, groups=0),
        lambda: F.decorrelated_batch_normalization(X, groups=4),
        lambda: F.decorrelated_batch_normalization(X, groups=2.0)],
    "batch_normalization: running_mean, running_var: expected both or neither, got one of them": [
        lambda: F.batch_normalization(X, ones(6), ones(6), running_mean=ones(6)),
        lambda: F.batch_normalization(X, ones(6), ones(6), running_var=ones(6))],
    # ---- windows and images
    "convolution_2d: stride, pad, dilate, groups: expected numbers >= 1, and pad >= 0": [
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), stride=(1, 0)),
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), stride=(0, 1)),
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), pad=(0, -1)),
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), pad=(-1, 0)),
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), dilate=0),
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3, 3), groups=0)],
    "convolution_2d: W: expected 4 axes, the first a multiple of groups=2": [
        lambda: F.convolution_2d(IMAGES, ones(3, 2, 3, 3), groups=2)],
    "convolution_2d: W: expected 4 axes, the first a multiple of groups=1": [
        lambda: F.convolution_2d(IMAGES, ones(4, 4, 3))],
    "convolution_nd: stride, pad, dilate: expected numbers >= 1, and pad >= 0": [
        lambda: F.convolution_nd(ones(1, 1, 5, 5, 5), ones(1, 1, 3, 3, 3), stride=(1, 0, 1)),
        lambda: F.convolution_nd(ones(1, 1, 5, 5, 5), ones(1, 1, 3, 3, 3), pad=(0, -1, 0)),
        lambda: F.convolution_nd(ones(1, 1, 5, 5, 5), ones(1, 1, 3, 3, 3), dilate=0)],
    "convolution_nd: stride: expected an integer or 3 of them": [
        lambda: F.convolution_nd(ones(1, 1, 5, 5, 5), ones(1, 1, 3, 3, 3), stride=1.5),
        lambda: F.convolution_nd(ones(1, 1, 5, 5, 5), ones(1, 1, 3, 3, 3), stride=(1, 1))],
    "convolution_nd: W: expected shape (O, C/groups, windows) for x": [
        lambda: F.convolution_nd(ones(1, 4, 5, 5, 5), ones(2, 4, 3, 3, 3), groups=0),
        lambda: F.convolution_nd(ones(1, 4, 5, 5, 5), ones(3, 2, 3, 3, 3), groups=2),
        lambda: F.convolution_nd(ones(1, 4, 5, 5, 5), ones(2, 3, 3, 3, 3)),
        lambda: F.convolution_nd(ones(1, 4, 5, 5, 5), ones(2, 4, 3, 0, 3))],
    "max_pooling_2d: ksize, stride, pad: expected numbers >= 1, and pad >= 0": [
        lambda: F.max_pooling_2d(IMAGES, 2, pad=(0, -1)), lambda: F.max_pooling_2d(IMAGES, 2, pad=(-1, 0)),
        lambda: F.max_pooling_2d(IMAGES, (2, 0)), lambda: F.max_pooling_2d(IMAGES, 2, stride=(0, 1))],
    "max_pooling_3d: ksize, stride, pad: expected numbers >= 1, and pad >= 0": [
        lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), 2, pad=(0, -1, 0)),
        lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), (2, 0, 2)),
        lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), 2, stride=(0, 1, 1))],
    "resize_images: x: expected at least one pixel": [
        lambda: F.resize_images(ones(1, 1, 0, 2), (2, 2)), lambda: F.resize_images(ones(1, 1, 2, 0), (2, 2))],
    "max_pooling_1d: ksize, stride, pad, cover_all: expected windows that each see a part of x": [
        lambda: F.max_pooling_1d(ones(1, 1, 3), 2, 4, 2, cover_all=False),  # the first sees none, the last some
        lambda: F.max_pooling_1d(ones(1, 1, 3), 1, 3, 0, cover_all=True)],
    "max_pooling_3d: ksize, stride, pad, cover_all: expected windows that each see a part of x": [
        lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), (2, 2, 2), pad=(0, 2, 0)),
        lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), (1, 2, 1), (1, 6, 1), (0, 0, 1))],
    "unpooling_nd: outsize: expected sizes whose pooling has the sizes (6,) of x": [
        lambda: F.unpooling_nd(ones(1, 1, 6), 2, outsize=(0,)),
        lambda: F.unpooling_nd(ones(1, 1, 6), 2, outsize=(15,))],
    "upsampling_2d: indexes: expected places from 0 to 3 in a window (2, 2)": [
        lambda: F.upsampling_2d(IMAGES, np.full(IMAGES.shape, -1), 2),
        lambda: F.upsampling_2d(IMAGES, np.full(IMAGES.shape, 4), 2)],
    "upsampling_2d: indexes: expected places from 0 to 5 in a window (2, 3)": [
        lambda: F.upsampling_2d(IMAGES, np.full(IMAGES.shape, 6), (2, 3))],
    "upsampling_2d: indexes: expected places from 0 to 5 in a window (3, 2)": [
        lambda: F.upsampling_2d(IMAGES, np.full(IMAGES.shape, 6), (3, 2))],
    "upsampling_2d: indexes: expected integers of shape (2, 4, 6, 6) as x": [
        lambda: F.upsampling_2d(IMAGES, INTS, 2), lambda: F.upsampling_2d(IMAGES, IMAGES, 2)],
    "spatial_pyramid_pooling_2d: pooling: expected 'max', got 'average'": [
        lambda: F.spatial_pyramid_pooling_2d(IMAGES, 1, "average")],
    "spatial_pyramid_pooling_2d: x: expected shape (N, C, H, W) with H and W at least": [
        lambda: F.spatial_pyramid_pooling_2d(IMAGES, 0), lambda: F.spatial_pyramid_pooling_2d(IMAGES, 4),
        lambda: F.spatial_pyramid_pooling_2d(ones(1, 4, 4), 1)],
    "spatial_pyramid_pooling_2d: x: expected rows and columns of which each of 4 windows of 2 x 2 sees some": [
        lambda: F.spatial_pyramid_pooling_2d(ones(1, 1, 5, 5), 3)],
    "depth2space: X: expected a multiple of r r =": [
        lambda: F.depth2space(IMAGES, 0), lambda: F.depth2space(IMAGES, 3)],
    "space2depth: X: expected rows and columns that r =": [
        lambda: F.space2depth(IMAGES, -1), lambda: F.space2depth(ones(1, 1, 6, 5), 2),
        lambda: F.space2depth(ones(1, 1, 5, 6), 2)],
    "im2col: ksize, stride, pad, dilate: expected sizes from 1 on, and pad from 0 on": [
        lambda: F.im2col(IMAGES, 0), lambda: F.im2col(IMAGES, 2, stride=0), lambda: F.im2col(IMAGES, 2, dilate=(1, 0)),
        lambda: F.im2col(IMAGES, 2, pad=(0, -1))],
    "resize_images: output_shape: expected two numbers from 1 on": [
        lambda: F.resize_images(IMAGES, (3,)), lambda: F.resize_images(IMAGES, (3, 3, 3)),
        lambda: F.resize_images(IMAGES, (3, 0))],
    "deformable_convolution_2d_sampler: stride, pad: expected stride from 1 on, and pad from 0 on": [
        lambda: F.deformable_convolution_2d_sampler(IMAGES, ones(2, 18, 4, 4), ones(1, 4, 3, 3), pad=-1),
        lambda: F.deformable_convolution_2d_sampler(IMAGES, ones(2, 18, 4, 4), ones(1, 4, 3, 3), stride=0)],
    "shift: ksize: expected odd numbers": [
        lambda: F.shift(ones(1, 9, 4, 4), -1), lambda: F.shift(ones(1, 9, 4, 4), (3, 2)),
        lambda: F.shift(ones(1, 9, 4, 4), (2, 3))],
    "roi_max_pooling_2d: rois: expected shape (R, 4)": [
        lambda: F.roi_max_pooling_2d(IMAGES, ones(2, 5), INTS, 2, 1.0),
        lambda: F.roi_max_pooling_2d(IMAGES, ones(4), INTS, 2, 1.0)],
    "roi_pooling_2d: rois: expected shape (R, 5)": [
        lambda: F.roi_pooling_2d(IMAGES, ones(5), 2, 2, 1.0), lambda: F.roi_pooling_2d(IMAGES, ones(1, 4), 2, 2, 1.0)],
    "roi_average_align_2d: sampling_ratio: expected None, or numbers from 1 on": [
        lambda: F.roi_average_align_2d(IMAGES, ones(2, 4), INTS, 2, 1.0, 0),
        lambda: F.roi_average_align_2d(IMAGES, ones(2, 4), INTS, 2, 1.0, (2, 1.5))],
    "roi_average_align_2d: sampling_ratio: expected a number, or two for rows and columns": [
        lambda: F.roi_average_align_2d(IMAGES, ones(2, 4), INTS, 2, 1.0, (1, 1, 1))],
    "roi_max_pooling_2d: rois: expected finite numbers, got NaN or infinity in row 4": [
        lambda: F.roi_max_pooling_2d(IMAGES, np.diag([1.0, 1, 1, 1, np.nan])[:, 1:], np.zeros(5, int), 2, 1.0)
    ],
    # ---- chance
    "dropout: mask: expected shape (2, 6) to match x": [lambda: F.dropout(X, 0.5, mask=ones(6))],
    "dropout: ratio: expected a number from 0 to less than 1": [lambda: F.dropout(X, 1.0), lambda: F.dropout(X, -0.1)],
    "zoneout: ratio: expected a number from 0 to 1": [lambda: F.zoneout(X, X, 1.1), lambda: F.zoneout(X, X, -0.1)],
    "simplified_dropconnect: x: expected rows of 6 elements for W": [
        lambda: F.simplified_dropconnect(ones(), ones(3, 6)), lambda: F.simplified_dropconnect(ones(2, 5), ones(3, 6)),
        lambda: F.simplified_dropconnect(X, ones(6))],
    # ---- attention
    "multi_head_attention: n_heads: expected": [
        lambda: F.multi_head_attention(ones(1, 3, 6), ones(1, 3, 6), ones(1, 3, 6), 0),
        lambda: F.multi_head_attention(ones(1, 3, 6), ones(1, 3, 6), ones(1, 3, 6), 4)],
    # ---- losses and evaluation
    "softmax_cross_entropy: x: expected shape (N, K, ...)": [lambda: F.softmax_cross_entropy(ones(3), ones(3))],
    "softmax_cross_entropy: t: expected integer labels with class_weight": [
        lambda: F.softmax_cross_entropy(X, X / 6, class_weight=ones(6))],
    "softmax_cross_entropy: class_weight: expected an array of shape (6,)": [
        lambda: F.softmax_cross_entropy(X, INTS, class_weight=ones(5)),
        lambda: F.softmax_cross_entropy(X, INTS, class_weight=[1.0] * 6)],
    "hinge: t: expected": [lambda: F.hinge(X, ones(2)), lambda: F.hinge(X, np.zeros(3, np.int32))],
    "discriminative_margin_based_clustering_loss: embeddings: expected shape (N, C, H, W)": [
        lambda: F.discriminative_margin_based_clustering_loss(X, INTS, 0.5, 1.5, 2)],
    "discriminative_margin_based_clustering_loss: labels: expected integers of shape (2, 6, 6)": [
        lambda: F.discriminative_margin_based_clustering_loss(IMAGES, ones(2, 6, 6), 0.5, 1.5, 2),
        lambda: F.discriminative_margin_based_clustering_loss(IMAGES, INTS, 0.5, 1.5, 2)],
    "discriminative_margin_based_clustering_loss: max_embedding_dim: expected an integer of 1 or more": [
        lambda: F.discriminative_margin_based_clustering_loss(IMAGES, np.zeros((2, 6, 6), int), 0.5, 1.5, 0)],
    "discriminative_margin_based_clustering_loss: norm: expected 1 or 2": [
        lambda: F.discriminative_margin_based_clustering_loss(IMAGES, np.zeros((2, 6, 6), int), 0.5, 1.5, 2, 3)],
    "connectionist_temporal_classification: t: expected": [
        lambda: F.connectionist_temporal_classification([X, X], ones(2, 1), 0),
        lambda: F.connectionist_temporal_classification([X, X], np.ones(2, np.int32), 0)],
    "negative_sampling: samples: expected integers of shape (2, 3)": [
        lambda: F.negative_sampling(X, INTS, ones(5, 6), None, 2, samples=np.zeros((2, 2), int)),
        lambda: F.negative_sampling(X, INTS, ones(5, 6), None, 2, samples=ones(2, 3))],
    "negative_sampling: t: expected": [
        lambda: F.negative_sampling(X, ones(2), ones(5, 6), None, 1, samples=np.zeros((2, 2), int)),
        lambda: F.negative_sampling(X, INTS - 2, ones(5, 6), None, 1, samples=np.zeros((2, 2), int)),
        lambda: F.negative_sampling(X, INTS + 5, ones(5, 6), None, 1, samples=np.zeros((2, 2), int))],
    "accuracy: t: expected integer labels of shape (2,) for y of shape (2, 6)": [
        lambda: F.accuracy(X, np.zeros(3, int)), lambda: F.accuracy(X, ones(2))],
    "accuracy: t: expected scores y of shape (N, K, ...)": [lambda: F.accuracy(ones(3), np.zeros(3, int))],
    "binary_accuracy: t: expected integers of shape (2, 6) to match y": [
        lambda: F.binary_accuracy(X, INTS), lambda: F.binary_accuracy(X, X)],
    "classification_summary: t: expected integer labels of shape (N, ...) for scores y": [
        lambda: F.classification_summary(ones(2), INTS), lambda: F.classification_summary(X, ones(2)),
        lambda: F.classification_summary(X, np.zeros(3, int))],
    "classification_summary: t: expected labels from 0 to 2, or -1, got 0 to 3": [
        lambda: F.classification_summary(X, np.array([0, 3]), label_num=3)],
    "classification_summary: t: expected labels from 0 to 5, or -1, got -2 to 1": [
        lambda: F.classification_summary(X, np.array([-2, 1]), label_num=6)],
    "r2_score: sample_weight: expected None": [lambda: F.r2_score(X, X, sample_weight=ones(2))],
    "r2_score: multioutput: expected 'uniform_average' or 'raw_values', got 'mean'": [
        lambda: F.r2_score(X, X, multioutput="mean")],
    "r2_score: true: expected shape (2, 6) to match pred": [lambda: F.r2_score(X, ones(2))],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
@each(call=lambda words: REFUSED[words])
def test_what_is_refused(words, call):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


TAKEN = [
    (lambda: F.rollaxis(ones(2, 3, 4), 0, 3), ones(3, 4, 2)), (lambda: F.rollaxis(ones(2, 3, 4), 2, -3), ones(4, 2, 3)),
    (lambda: F.rollaxis(ones(2, 3, 4), 0, -1), ones(3, 2, 4)), (lambda: F.rollaxis(ones(2, 3, 4), 1), ones(3, 2, 4)),
    (lambda: F.repeat(X, 0), ones(0)), (lambda: F.repeat(X, [2], 1), ones(2, 12)),
    (lambda: F.repeat(ones(), 3, 0), ones(3)), (lambda: F.tile(X, 0), ones(2, 0)),
    (lambda: F.split_axis(X, [2, 2], 1)[1], ones(2, 0)), (lambda: F.hstack([ones(2), ones(1)]), ones(3)),
    (lambda: F.permutate(np.arange(3.0), np.array([2, 0, 1]), inv=True), np.array([1.0, 2.0, 0.0])),
    (lambda: F.permutate(np.arange(3.0), np.array([-1, 0, 1])), np.array([2.0, 0.0, 1.0])),
    (lambda: F.permutate(ones(0, 2), np.zeros(0, int)), ones(0, 2)),
    (lambda: F.clip(2 * X, 1.0, 1.0), X), (lambda: F.clip(2 * X, None, 1.0), X), (lambda: F.clip(-X, 1.0, None), X),
    (lambda: F.maxout(X, 6), ones(2, 1)), (lambda: F.maxout(X, 1), X),
    (lambda: F.normalize(X, 0.0, (0, 1)), X / 12**0.5),
    (lambda: F.local_response_normalization(X[..., None, None], 1, 1.0, 1.0), X[..., None, None] / 2**0.75),
    (lambda: F.depth2space(IMAGES, 1), IMAGES), (lambda: F.space2depth(IMAGES, 6), ones(2, 144, 1, 1)),
    (lambda: F.im2col(IMAGES, 1), IMAGES), (lambda: F.resize_images(IMAGES, (1, 1)), ones(2, 4, 1, 1)),
    (lambda: F.spatial_pyramid_pooling_2d(IMAGES, 1), ones(2, 4, 1, 1)),
    (lambda: F.spatial_pyramid_pooling_2d(ones(1, 1, 4, 4), 3, "max"), ones(1, 21, 1, 1)),
    (lambda: F.max_pooling_3d(ones(1, 1, 4, 4, 4), 2, pad=1), ones(1, 1, 3, 3, 3)),
    (lambda: F.unpooling_nd(ones(1, 1, 1), 1, outsize=(1,)), ones(1, 1, 1)),
    (lambda: F.zoneout(X, 2 * X, 0.0), 2 * X), (lambda: F.zoneout(X, 2 * X, 1.0), X),
    (lambda: F.dropout(X, 0.0), X), (lambda: F.dropout(X, 0.5, mask=2 * X), 2 * X),
    (lambda: F.simplified_dropconnect(ones(2, 2, 3), ones(3, 6), ratio=0.0), np.full((2, 3), 6.0)),
    (lambda: F.pad_sequence([ones(3), ones(1)], 3, 1.0), ones(2, 3)),
    (lambda: F.einsum("...i->...", X), np.full(2, 6.0)),
    (lambda: F.einsum(X, [..., 0], [...]), np.full(2, 6.0)), (lambda: F.einsum(X, [0, 1], [1]), np.full(6, 2.0)),
    (lambda: F.matmul(ones(2), ones(2)), np.array(2.0)), (lambda: F.batch_l2_norm_squared(ones(2)), ones(2)),
    (lambda: F.fft((ones(1), 0 * ones(1)))[0], ones(1)),
    (lambda: F.accuracy(X, np.zeros((2, 1), int)), ones()), (lambda: F.accuracy(X, X), ones()),
    (lambda: F.accuracy(ones(0, 6), np.zeros(0, int)), np.zeros(())),
    (lambda: F.binary_accuracy(X, np.ones((2, 6), int)), ones()),
    (lambda: F.classification_summary(X, np.array([0, -1]), 2)[3], np.array([1, 0])),
    (lambda: F.classification_summary(X, np.array([0, 1]), 2)[3], np.array([1, 1])),
    (lambda: F.softmax_cross_entropy(ones(1, 2), np.array([[1.0, 0.0]]), label_smoothing=0.5), np.log(2.0)),
]  # fmt: skip


@each(**{"call, expected": TAKEN})
def test_what_lies_just_within_is_taken(call, expected):
    actual = call().array
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
