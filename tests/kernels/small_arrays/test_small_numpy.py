"""Small steps' kernels: the values of NumPy's formulas, bit for bit, whether C loops or NumPy's calls serve."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.core.array.array_operations import per_row, row_starts
from dbrdist.kernels.small_arrays import small, small_numpy
from tests.each import each


def same(a, b):
    a, b = (np.asarray(v).astype(v.dtype.newbyteorder("=")) for v in (a, b))
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes(), (a, b)


def arrays(rng, shape):
    """Arrays of one shape as loops take them, and as they do not: of another type, order, byte order, subclass."""
    x = rng.standard_normal(shape).astype(np.float32)
    x.flat[0] = 0
    wide = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
    wide[..., ::2] = x
    swapped = x.astype(x.dtype.newbyteorder())
    return [x, x.astype(np.float64), np.asfortranarray(x), wide[..., ::2], swapped, x.view(np.matrix)]


def product(x, W):
    """x W^T without biases."""
    return small.rows_times(x, W, None, slice(None))


@each(shape=[(1, 1), (4, 7), (4, 8), (3, 33), (70, 70)], num_inputs=[1, 2, 8])
def test_biases_are_added_to_each_row_of_a_product(shape, num_inputs):
    rng = np.random.default_rng(0)
    for x, W, b in zip(*(arrays(rng, s)[:-1] for s in ((shape[0], num_inputs), (shape[1], num_inputs), shape[1:]))):
        want = np.array([[p + q for p, q in zip(row, b)] for row in x.dot(W.T)], np.result_type(x, W))
        same(small.rows_times(x, W, b, slice(None)), want)


@each(shape=[(1, 1), (4, 8), (33, 9), (70, 70)])
def test_a_gradient_passes_where_the_output_is_not_zero(shape):
    rng = np.random.default_rng(1)
    for gy in arrays(rng, shape)[:-1]:
        y = np.maximum(rng.standard_normal(shape), 0).astype(gy.dtype)
        gy.flat[::3] = [np.inf, np.nan, -0.0, 2.0][shape[0] % 4]
        before = gy.copy()
        gx = small.masked(y, gy)
        want = [g if m != 0 else 0.0 for g, m in zip(before.ravel(), y.ravel())]
        same(gx.ravel(), np.array(want, gx.dtype))
        same(gy, before)
        y[...] = np.nan  # not zero
        same(np.asarray(small.masked(y, gy)).ravel(), before.ravel().astype(gy.dtype))


def as_images(a, shape):
    n, c, h, w = shape
    return np.ascontiguousarray(a).reshape(n, h, w, c).transpose(0, 3, 1, 2)


@each(shape=[(1, 16, 8, 8), (3, 5, 2, 1), (1, 1, 1, 1), (2, 64, 8, 8)], odd=[0.5, -0.0, np.inf, -np.inf, np.nan])
def test_gradients_of_images_keep_their_layout(shape, odd):
    rng = np.random.default_rng(6)
    gy = rng.standard_normal(np.prod(shape)).astype(np.float32)
    y = np.maximum(rng.standard_normal(np.prod(shape)), 0).astype(np.float32)
    gy[::5] = odd
    with np.errstate(invalid="ignore"):
        products = gy * (y != 0)  # a zero has the sign of the product where all are finite
    want = np.where(y != 0, gy, np.float32(0)) if np.isnan(products).any() else products
    for lay in (as_images, lambda a, shape: a.reshape(shape), lambda a, shape: as_images(a.repeat(2), shape_of(shape))):
        images = lay(gy, shape)
        with np.errstate(invalid="ignore"):
            gx = small.masked_images(lay(y, shape), images)
        assert gx.shape == images.shape
        assert all(a == b for a, b, n in zip(gx.strides, images.strides, gx.shape) if n > 1)
        same(gx, lay(want, shape))


def shape_of(shape):
    """Twice as many channels."""
    return (shape[0], 2 * shape[1], *shape[2:])


@each(dtype=["int64", "int32", "uint8", ">i8"])
def test_labels_from_zero_to_the_number_of_classes_less_one_count(dtype):
    for t, want in (([0, 2, 1], True), ([0, 3, 1], False), ([2, 2, 2], True), ([3], False), ([0], True)):
        assert small.are_classes(np.array(t, dtype), 3) is want
        assert small.are_classes(np.array(t, dtype).repeat(2)[::2], 3) is want
    if np.dtype(dtype).kind == "i":
        assert small.are_classes(np.array([1, -1, 0], dtype), 3) is False


@each(dtype=["<f4", "<f8", ">f4"])
def test_scores_are_taken_from_the_largest_of_their_row(dtype):
    rng = np.random.default_rng(2)
    for num_rows, num_classes in ((1, 1), (4, 2), (8, 8), (5, 17)):
        x = rng.standard_normal((num_rows, num_classes)).astype(dtype)
        x[0] = 0.0, *[-0.0] * (num_classes - 1)
        if num_rows > 4:
            x[1, 1], x[2, ::2], x[3, 0] = np.inf, -np.inf, np.nan
        t = rng.integers(0, num_classes, num_rows)
        for labels in (t, t.astype(np.int32), t.repeat(2)[::2]):
            kept = labels.copy()
            with np.errstate(invalid="ignore"):
                got = small.below_largest(x, labels, row_starts(*x.shape), per_row(*x.shape))
                below = x - x.max(1, keepdims=True)
            assert np.array_equal(got[0], below, equal_nan=True)
            assert np.array_equal(got[0].ravel()[got[1]], got[2], equal_nan=True)
            assert np.array_equal(got[2], below[np.arange(num_rows), t], equal_nan=True)
            assert np.array_equal(labels, kept)


def test_labels_that_changed_after_the_check_are_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        small.below_largest(x, np.array([1, 70]), row_starts(2, 3), per_row(2, 3))


@each(shape=[(1, 1), (4, 7), (5, 8), (3, 17), (2, 128), (2, 129), (1, 137), (2, 300), (1, 2047), (70, 70)])
def test_rows_are_divided_by_their_sums(shape):
    rng = np.random.default_rng(3)
    for p in arrays(rng, shape)[:-1]:
        np.square(p, p)  # probabilities are not negative
        p[-1, -1] = 1.0
        sums = np.array([row.sum() for row in np.ascontiguousarray(p)])
        want = np.array([[v / s for v in row] for row, s in zip(p, sums)], p.dtype)
        exact = [math.fsum(map(float, row)) for row in p]
        total = small.divide_by_sums(p, (slice(None), None))
        np.testing.assert_allclose(total, exact, rtol=1e-6)
        if p.flags.c_contiguous and p.dtype.isnative:  # others NumPy adds up in another order
            same(total, sums)
            same(np.asarray(p), want)


def test_one_row_that_is_not_finite_leaves_the_others():
    p = np.ones((3, 9), np.float32)
    p[1, 4] = np.nan
    total = small.divide_by_sums(p, (slice(None), None))
    assert np.isnan(total[1]) and total[0] == total[2] == 9
    assert np.isnan(p[1]).all() and (p[[0, 2]] == np.float32(1 / 9)).all()


# each product, that of NumPy, its formula, the shapes of its operands, and whether it takes memory for the result
PRODUCTS = [
    (product, lambda a, b: a.dot(b.T), "ik,jk->ij", lambda m, n, k: ((m, k), (n, k)), False),
    (small.times, lambda a, b: a.dot(b), "ik,kj->ij", lambda m, n, k: ((m, k), (k, n)), False),
    (small.turned_times, lambda a, b: a.T.dot(b), "ki,kj->ij", lambda m, n, k: ((k, m), (k, n)), True),
    (small.weighted_rows, lambda a, b: a.dot(b), "k,kj->j", lambda m, n, k: ((k,), (k, n)), True),
]


@each(**{"of_ours, of_numpy, formula, shapes, takes_memory": PRODUCTS}, m=[1, 8, 33], n=[1, 2, 65], k=[1, 2, 8, 65])
def test_products_are_those_of_numpy(of_ours, of_numpy, formula, shapes, takes_memory, m, n, k):
    rng = np.random.default_rng(4)
    for a, b in zip(*(arrays(rng, shape) for shape in shapes(m, n, k))):
        if type(a) is np.matrix and len(shapes(m, n, k)[0]) == 1:
            continue
        exact = np.einsum(formula, *(np.asarray(v).astype("d") for v in (a, b)))
        want = of_numpy(a, b)
        same(of_ours(a, b), want)
        np.testing.assert_allclose(np.asarray(want).astype("d"), exact, rtol=1e-5, atol=1e-4)
        if takes_memory and want.dtype.isnative:
            out = np.full_like(want, np.nan, order="C")
            assert of_ours(a, b, out) is out
            same(out, want)
        a = a.copy("K")  # some arrays are views of others
        a.flat[-1] = np.inf if m == 8 else np.nan
        with np.errstate(invalid="ignore"):
            same(of_ours(a, b), of_numpy(a, b))


def test_a_product_that_is_not_finite_warns_as_numpys_does():
    a, b = np.full((8, 8), 1e30, np.float32), np.zeros((8, 8), np.float32)
    a[0, 0], b[0] = np.inf, 1e30
    for of_ours, of_numpy, *_ in PRODUCTS[:3]:
        for state in ({"invalid": "raise", "over": "ignore"}, {"over": "raise", "invalid": "ignore"}):
            with np.errstate(**state):
                try:
                    want = of_numpy(a, b)
                except FloatingPointError as error:
                    with pytest.raises(FloatingPointError, match=str(error)):
                        of_ours(a, b)
                else:
                    same(of_ours(a, b), want)


@each(size=[1, 2, 3, 16])
def test_products_of_an_array_with_itself_are_those_of_numpy(size):
    a = np.random.default_rng(5).standard_normal((7, size)).astype(np.float32)
    same(product(a, a), a.dot(a.T))
    same(small.turned_times(a, a), a.T.dot(a))


def test_products_refuse_what_numpy_refuses_and_take_memory_that_overlaps():
    a, b = np.ones((4, 8), np.float32), np.ones((4, 7), np.float32)
    for function in (product, small.times):
        with pytest.raises(ValueError, match="align"):
            function(a, b)
    with pytest.raises(ValueError, match="align"):
        small.turned_times(a, b[:3])
    with pytest.raises(ValueError, match="align"):
        small.weighted_rows(a[0], a)
    for out in (np.empty((8, 6), np.float32), np.empty((8, 7)), np.empty((7, 8), np.float32).T):
        with pytest.raises(ValueError, match="output array"):
            small.turned_times(a, b, out)
    both = np.arange(32, dtype=np.float32)
    x, out = both[:16].reshape(4, 4), both[8:24].reshape(4, 4)
    want = x.T.dot(x.copy())
    same(small.turned_times(x, x.copy(), out), want)


@each(dtype=[np.float32, np.float64])
def test_the_gradient_of_cross_entropy_is_that_of_the_formula(dtype):
    rng = np.random.default_rng(4)
    for num_rows, num_classes in ((1, 1), (4, 8), (5, 17)):
        p = rng.uniform(0, 1, (num_rows, num_classes)).astype(dtype)
        kept = p.copy()
        t = rng.integers(0, num_classes, num_rows)
        gy, scale = np.array(1.7, dtype), np.array(1 / num_rows, dtype)
        factor = dtype(gy * scale)
        want = p * factor
        want[np.arange(num_rows), t] -= factor
        at = np.arange(num_rows) * num_classes + t
        same(small.cross_entropy_gradient(p, at, gy, scale), want)
        same(small.cross_entropy_gradient(np.asfortranarray(p), at, gy, scale), want)
        same(p, kept)


@each(size=[1, 16, 33, 5000])
def test_momentum_is_rounded_after_each_operation(size):
    rng = np.random.default_rng(5)
    for dtype in (np.float32, np.float64):
        for lr, momentum in ((0.1, 0.9), (1, 0), (np.float32(0.3), 0.5)):
            p, g, v = (rng.standard_normal(size).astype(dtype) for _ in range(3))
            kept = g.copy()
            want_v = v * dtype(momentum) - g * dtype(lr)
            want_p = p + want_v
            small.momentum_sgd(p, g, v, np.empty_like, lr, momentum)
            same(v, want_v)
            same(p, want_p)
            same(g, kept)


@each(size=[1, 16, 33, 5000], num=[2, 3, 5])
def test_a_sum_is_added_in_order_and_multiplied_once(size, num):
    rng = np.random.default_rng(6)
    for dtype in (np.float32, np.float64):
        terms = [rng.standard_normal(size).astype(dtype) for _ in range(num)]
        terms[1].flat[0], scale = np.inf, backend.number(0.5, np.dtype(dtype))
        kept, want = [term.copy() for term in terms], terms[0].copy()
        for term in terms[1:]:
            want = want + term
        for lay in (np.ascontiguousarray, spread_out):
            out = lay(np.zeros(size, dtype))
            small.scale_sum([lay(term) for term in terms], scale, out)
            same(out, want * dtype(0.5))
        small.scale_sum(terms, scale, terms[0])  # over a term
        same(terms[0], want * dtype(0.5))
        for term, before in zip(terms[1:], kept[1:]):
            same(term, before)


def near_and_far(dtype, shape):
    """Scores below the largest, their shares, the logarithms of sums, and the losses of labels 0, from 3 to 1e-12."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal(shape) - np.linspace(0, 30, shape[0])[:, None]
    x[:, 0] = 0
    x = (x - x.max(1, keepdims=True)).astype(dtype)
    wide = np.exp(x.astype(np.longdouble))
    exact = np.log1p((wide[:, 1:] / wide[:, :1]).sum(1))
    return x, (wide / wide.sum(1, keepdims=True)).astype(dtype), np.log(wide.sum(1)).astype(dtype), exact


def spread_out(a):
    return np.asfortranarray(a) if a.ndim == 2 else a.repeat(2)[::2]


@each(dtype=[np.float32, np.float64], shape=[(8, 8), (7, 2), (5, 33), (4, 300), (70, 70)], mean=[0.05, 0.3])
def test_small_losses_get_all_their_digits_if_their_mean_is_small_and_others_stay(dtype, shape, mean):
    x, p, logs, exact = near_and_far(dtype, shape)
    first = next(i for i in range(shape[0]) if exact[i:].mean() < mean)
    x, p, logs, exact = x[first:], p[first:], logs[first:], exact[first:]
    weights = np.full(len(x), 1 / len(x), dtype)
    before = logs - x[:, 0]
    has_digits = (exact < 0.125) & (exact.mean() < 0.125)
    for lay in (np.ascontiguousarray, spread_out):
        losses = lay(logs.copy())
        y = small.mean_cross_entropy(losses, lay(x[:, 0]), lay(p), weights)
        assert y.dtype == dtype and y.shape == ()
        np.testing.assert_allclose(y, exact.mean(), rtol=12 * np.finfo(dtype).eps)
        same(losses[~has_digits], before[~has_digits])
        np.testing.assert_allclose(losses[has_digits], exact[has_digits].astype(dtype), rtol=4 * np.finfo(dtype).eps)
        by_numpy = lay(logs.copy())
        same(small_numpy.mean_cross_entropy(by_numpy, lay(x[:, 0]), lay(p), weights), y)
        same(by_numpy, losses)


@each(dtype=[np.float32, np.float64], bad=[np.nan, np.inf])
def test_a_mean_with_a_loss_that_is_not_finite_is_not_finite(dtype, bad):
    x, p, logs, _ = near_and_far(dtype, (6, 4))
    logs[2], p[2] = bad, np.nan
    y = small.mean_cross_entropy(logs, x[:, 0].copy(), p, np.full(6, 1 / 6, dtype))
    same(y, np.array(bad, dtype))


def test_memory_that_is_read_only_stays():
    y = np.zeros((2, 3), np.float32)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        small.divide_by_sums(y, (slice(None), None))
    with pytest.raises(ValueError, match="read-only"):
        small.momentum_sgd(*[y.ravel()[:3] if i else y[0] for i in range(3)], np.empty_like, 0.1, 0.9)
    with pytest.raises(ValueError, match="read-only"):
        small.scale_sum([np.ones(3, np.float32)] * 2, backend.number(0.5, y.dtype), y[0])


def test_vectors_of_another_length_are_refused_as_numpy_does():
    y = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="broadcast"):
        small.rows_times(y, y, np.ones(3, np.float32), slice(None))
    with pytest.raises(ValueError, match="broadcast"):
        small.mean_cross_entropy(np.ones(2, np.float32), np.ones(3, np.float32), y, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="broadcast"):
        small.momentum_sgd(y[0], y[0, :2], y[1], np.empty_like, 0.1, 0.9)
    for terms in ([y[0], y[0, :2]], [y[0, :2], y[0]]):
        with pytest.raises(ValueError, match="broadcast"):
            small.scale_sum(terms, backend.number(0.5, y.dtype), np.zeros(3, np.float32))


@each(dtype=["e", "f", "d"], size=[0, 1, 5])
def test_nan_is_found_in_arrays_of_every_type_and_size(dtype, size):
    a = np.full(size, -np.inf, dtype)
    assert not small_numpy.has_nan(a)
    for i in range(size):
        a[i] = np.nan
        assert small_numpy.has_nan(a)
        a[i] = 1


@each(dtype=["e", "f", "d"], shape=[(5,), (2, 3), (2, 3, 2, 2)], is_last=[False, True])
def test_a_small_relu_keeps_type_and_nan(dtype, shape, is_last):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    gy = np.full(shape, np.nan, dtype)
    x.flat[0] = np.nan
    if is_last and x.ndim == 4:
        x = backend.channels_last(x)
    y = kernels.relu_forward(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.where(x < 0, np.zeros_like(x), x))
    y = np.where(np.isnan(y), y.dtype.type(2), y)
    for g in (gy, gy * 0 + 3, backend.channels_last(gy) if x.ndim == 4 else gy):
        with np.errstate(all="ignore"):
            gx = kernels.relu_backward(y, g)
        assert gx.dtype == x.dtype
        np.testing.assert_array_equal(gx, np.where(y == 0, np.zeros_like(g), g))
