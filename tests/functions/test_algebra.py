"""Algebra, sequences, images and noise: what they refuse, in words, and what no row of ``cases.py`` shows."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core import random
from tests.each import each
from tests.functions.references import algebra


def ones(*shape):
    return np.ones(shape, np.float32)


SINGULAR = np.array([[1.0, 2.0], [2.0, 4.0]])

REFUSED = [
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
    (lambda: F.batch_l2_norm_squared(ones()), r"batch_l2_norm_squared: x: expected at least one axis"),
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
    (lambda: F.transpose_sequence([]), r"transpose_sequence: xs: expected at least one array"),
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


@each(**{"call, message": REFUSED})
def test_misfits_are_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_determinant_of_zero_has_a_value_and_no_gradient():
    a = Variable(SINGULAR)
    y = F.det(a)
    assert abs(y.array) < 1e-15
    with pytest.raises(ValueError, match="inv: a: expected matrices that are not singular"):
        F.det(Variable(np.zeros((2, 2)))).backward()


def test_einsum_of_many_terms_over_large_axes():
    """Contracted in a good order, and in each order the gradient is the same."""
    rng = np.random.default_rng(0)
    xs = [Variable(rng.normal(size=(40, 40)).astype("f")) for _ in range(4)]
    y = F.einsum("ij,jk,kl,lm->im", *xs)
    a, b, c, d = (x.array.astype("d") for x in xs)
    np.testing.assert_allclose(y.array, a @ b @ c @ d, rtol=1e-3, atol=1e-2)
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_allclose(xs[1].grad, a.T @ np.ones((40, 40)) @ (c @ d).T, rtol=1e-3, atol=0.1)


def test_long_sums_of_16_bits_run_in_a_wider_type():
    x = np.ones(4096, np.float16)
    assert F.cumsum(x).array[-1] == 4096  # 2048 + 1 is 2048 in 16 bits
    assert F.einsum("i,i", x, x).array == 4096
    assert F.batch_l2_norm_squared(x[None]).array == 4096
    assert F.prod(np.array([300, 300, 0.001], np.float16)).array == np.float16(300 * 300 * float(np.float16(0.001)))
    assert F.fft((x, x * 0))[0].array[0] == 4096


def test_einsum_gives_arrays_of_its_own():
    x = Variable(np.ones((2, 3)))
    y = F.einsum("ij->ji", x)
    x.array[...] = 5.0
    assert (y.array == 1.0).all()


def test_an_infinite_pixel_stays_where_it_is():
    x = np.zeros((1, 1, 5, 5))
    x[0, 0, 2, 2] = np.inf
    y = F.resize_images(x, (5, 5)).array
    np.testing.assert_array_equal(y, x)
    y = F.resize_images(x, (10, 10), mode="nearest").array
    assert np.isinf(y).sum() == 4 and not np.isnan(y).any()


def test_places_that_are_no_numbers_make_no_pixel():
    x, grid = ones(1, 1, 3, 3), np.full((1, 2, 1, 2), np.nan, "f")
    grid[..., 1] = np.inf
    y = F.spatial_transformer_sampler(x, grid)
    assert y.shape == (1, 1, 1, 2)  # NaN or 0, and no index out of bounds


def test_empty_batches_and_classes():
    assert F.precision(ones(0, 3), np.zeros(0, int))[0].shape == (0,)
    p, support = F.precision(ones(0, 3), np.zeros(0, int), 3)
    assert np.isnan(p.array).all() and support.array.tolist() == [0, 0, 0]
    assert F.transpose_sequence([ones(0, 2)]) == ()
    assert F.spatial_transformer_sampler(ones(0, 1, 3, 3), ones(0, 2, 2, 2)).shape == (0, 1, 2, 2)
    assert F.prod(ones(0)).array == 1 and F.prod(ones(0, 3), 0).array.tolist() == [1, 1, 1]
    assert F.det(ones(0, 0)).array == 1
    assert F.spatial_pyramid_pooling_2d(ones(0, 3, 4, 4), 2).shape == (0, 15, 1, 1)
    assert F.bilinear(ones(0, 2, 3), ones(0, 4), ones(6, 4, 5)).shape == (0, 5)


def test_transposing_twice_gives_the_sequences_back():
    xs = [np.arange(n * 2, dtype="f").reshape(n, 2) for n in (4, 2, 1)]
    for x, back in zip(xs, F.transpose_sequence(F.transpose_sequence(xs)), strict=True):
        np.testing.assert_array_equal(back.array, x)


def test_normalized_rows_have_length_one():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype("f")
    np.testing.assert_allclose((F.normalize(x).array ** 2).sum(1), 1, rtol=1e-4)
    assert F.normalize(np.full((1, 4), 300, np.float16)).array.tolist() == [[0.5] * 4]  # the squares would overflow


# ---- chance ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh():
    state = random.get_state()
    random.set_seed(0)
    yield
    random.set_state(state)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8])
def test_zoneout_takes_as_many_as_it_says(ratio):
    h, x = Variable(ones(500, 40)), Variable(ones(500, 40) * 3)
    y = F.zoneout(h, x, ratio)
    assert abs((y.array == 1).mean() - ratio) < 0.02
    y.grad = ones(500, 40)
    y.backward()
    np.testing.assert_array_equal(h.grad, y.array == 1)
    np.testing.assert_array_equal(x.grad, y.array == 3)


def test_zoneout_gives_the_mean_outside_of_training():
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(F.zoneout(ones(2), ones(2) * 3, 0.25).array, [2.5, 2.5])


@pytest.mark.parametrize("shared", [True, False])
def test_dropconnect_keeps_the_mean(shared):
    x, W = ones(200, 30), ones(40, 30)
    y = F.simplified_dropconnect(x, W, ratio=0.3, use_batchwise_mask=not shared).array
    assert abs(y.mean() - 30) < 0.6
    assert np.allclose(y, y[0], rtol=1e-5) == shared  # products add up in another order at the edge of blocks
    np.testing.assert_allclose(F.simplified_dropconnect(x, W, train=False).array, x @ W.T)


def test_masks_do_not_depend_on_the_number_of_ranks():
    x, W = ones(6, 5), ones(4, 5)
    for shared in (True, False):
        parts = []
        for row, rows in ((0, x), (0, x[:2]), (2, x[2:])):
            random.set_stream(7, 1, 3, row)
            parts.append(F.simplified_dropconnect(rows, W, use_batchwise_mask=not shared).array)
        np.testing.assert_array_equal(parts[0], np.concatenate(parts[1:]))


@each(num_channels=[1, 2])
def test_pixels_and_channels_of_any_layout(num_channels):
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((4, 6, 8, 4 * num_channels)).astype(np.float32)
    images = whole.transpose(0, 3, 1, 2)
    repeated = np.broadcast_to(images[:1, :, :1, :1], (3, 4 * num_channels, 2, 1))
    for x in (images, np.ascontiguousarray(images), images[::2, :, ::-1, 1:4].transpose(0, 1, 3, 2), repeated):
        v = Variable(x)
        y = F.depth2space(v, 2)
        gy = rng.standard_normal(y.shape).astype(np.float32)
        dbrdist.backward([y], [gy])
        np.testing.assert_array_equal(y.array, algebra.depth2space(x, 2).astype(np.float32))
        np.testing.assert_array_equal(v.grad, algebra.space2depth(gy, 2).astype(np.float32))
        np.testing.assert_array_equal(F.space2depth(y, 2).array, x)
        assert v.grad.flags.writeable and not np.shares_memory(v.grad, gy)
