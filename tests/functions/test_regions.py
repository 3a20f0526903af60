"""Regions of interest and relatives of convolution: what they refuse, ties, regions that share images."""

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype("f")
BOX, FIRST = np.array([[1.0, 1.0, 4.0, 4.0]], np.float32), np.zeros(1, np.int32)
POOLS = [F.roi_average_pooling_2d, F.roi_max_pooling_2d, F.roi_average_align_2d, F.roi_max_align_2d]
WRONG = [
    ({"x": X[0]}, "x: expected images"),
    ({"x": X[:, :, :0]}, "x: expected at least one pixel"),
    ({"x": X.astype(int)}, "x: expected a floating type"),
    ({"rois": BOX[0]}, r"rois: expected shape \(R, 4\)"),
    ({"rois": BOX.astype(int)}, "rois: expected a floating type"),
    ({"rois": BOX * np.nan}, "rois: expected finite numbers, got NaN or infinity in row 0"),
    ({"roi_indices": FIRST[:0]}, r"roi_indices: expected integers of shape \(1,\)"),
    ({"roi_indices": FIRST * 1.0}, r"roi_indices: expected integers of shape \(1,\)"),
    ({"roi_indices": FIRST + 2}, "roi_indices: expected indices from 0 to 1 .* got indices from 2 to 2"),
    ({"roi_indices": FIRST - 1}, "roi_indices: expected indices from 0 to 1"),
    ({"outsize": (0, 2)}, "outsize: expected sizes from 1 on"),
    ({"spatial_scale": 0.0}, "spatial_scale: expected a number above 0"),
]


@pytest.mark.parametrize("pool", POOLS)
@each(change=WRONG)
def test_wrong_regions_are_refused(pool, change):
    given = {"x": X, "rois": BOX, "roi_indices": FIRST, "outsize": 2, "spatial_scale": 1.0, **change[0]}
    with pytest.raises((ValueError, TypeError), match=f"{pool.__name__}: {change[1]}"):
        pool(**given)


def test_wrong_arguments_of_one_function():
    with pytest.raises(ValueError, match="sampling_ratio: expected None, or numbers from 1 on, got 0"):
        F.roi_average_align_2d(X, BOX, FIRST, 2, 1.0, 0)
    with pytest.raises(ValueError, match="sampling_ratio: expected a number, or two"):
        F.roi_max_align_2d(X, BOX, FIRST, 2, 1.0, (1, 1, 1))
    with pytest.raises(ValueError, match=r"roi_pooling_2d: rois: expected shape \(R, 5\)"):
        F.roi_pooling_2d(X, BOX, 2, 2, 1.0)
    for kind in (int, bool, object):
        with pytest.raises(TypeError, match="roi_pooling_2d: rois: expected a floating type"):
            F.roi_pooling_2d(X, np.zeros((1, 5), kind), 2, 2, 1.0)
    with pytest.raises(ValueError, match=r"rois: expected indices from 0 to 1 .* got indices from 7"):
        F.roi_pooling_2d(X, np.array([[7.0, 0, 0, 1, 1]], "f"), 2, 2, 1.0)


@each(pool=POOLS, order=[(0, 1, 2), (2, 0, 1), (1, 1, 1)])
def test_regions_of_any_order_are_those_of_one_after_another(pool, order):
    rois = np.array([[0.0, 0, 3, 3], [1, 1, 5, 5], [0, 2, 2, 6]], "f")[list(order)]
    image = np.array([1, 0, 1], np.int64)[list(order)]
    together = pool(X, rois, image, 2, 1.0).array
    for k in range(3):
        np.testing.assert_allclose(together[k : k + 1], pool(X, rois[k : k + 1], image[k : k + 1], 2, 1.0).array, 1e-6)


@each(
    pool=POOLS,
    box=[[-40.0, -40.0, 44.0, 47.0], [-61.0, 2.0, 3.0, 33.5], [1e13, 0.0, 2e13, 3.0], [0.0, -1e30, 1e13, 1e30]],
)
def test_regions_far_larger_than_the_image(pool, box):
    x, rois = X.astype(np.float64), np.array([box])
    y = pool(x, rois, FIRST, 3, 1.0).array
    if max(np.abs(box)) > 1e10:  # too many samples for the reference; beyond the image they are zeros
        assert np.isfinite(y).all() and (np.abs(y) <= np.abs(x[0]).max()).all()
    else:
        np.testing.assert_allclose(y, getattr(R, pool.__name__)(x, rois, FIRST, 3, 1.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", [F.roi_max_pooling_2d, F.roi_max_align_2d])
def test_the_first_of_equal_maxima_takes_the_gradient(pool):
    x = Variable(np.zeros((1, 1, 4, 4), np.float32))
    pool(x, np.array([[0.0, 0, 4, 4]], "f"), FIRST, 1, 1.0).backward()
    assert x.grad.sum() == 1
    assert x.grad[0, 0, 0, 0] > 0


def test_nan_is_found_wherever_it_lies():
    x = X.copy()
    x[0, 1, 2, 3] = np.nan
    for pool in (F.roi_max_pooling_2d, F.roi_max_align_2d):
        assert np.isnan(pool(x, np.array([[0.0, 0, 5, 6]], "f"), FIRST, 1, 1.0).array).any(axis=(0, 2, 3)).tolist() == [
            False, True, False,
        ]  # fmt: skip


@pytest.mark.parametrize("pool", [F.roi_max_pooling_2d, F.roi_max_align_2d])
def test_what_is_not_a_number_changes_its_own_bins_alone(pool):
    """The others have their maxima and gradients as ever; of several NaN in one, the first takes the gradient."""
    clean, rois = Variable(X.astype("d")), np.array([[0.0, 0, 5, 6]])
    spoilt = Variable(clean.array.copy())
    spoilt.array[0, 1, 0, 0] = spoilt.array[0, 1, 0, 1] = np.nan
    ys = [pool(v, rois, FIRST, 2, 1.0) for v in (clean, spoilt)]
    is_nan = np.isnan(ys[1].array)
    assert is_nan.any() and not is_nan[0, [0, 2]].any() and not is_nan[0, 1, 1, 1]
    np.testing.assert_array_equal(ys[1].array[~is_nan], ys[0].array[~is_nan])
    for y in ys:
        y.grad = np.where(is_nan, 0.0, 1.0)
        y.backward()
    np.testing.assert_array_equal(spoilt.grad, clean.grad)
    spoilt.cleargrad()
    ys[1].grad = np.where(is_nan, 1.0, 0.0)
    ys[1].backward()
    if pool is F.roi_max_pooling_2d:
        assert spoilt.grad[0, 1, 0, 0] == 1 and spoilt.grad[0, 1, 0, 1] == 0


FILTERS = np.ones((2, 3, 3, 3), np.float32)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: F.local_convolution_2d(X, np.ones((2, 3, 3, 3, 3, 3), "f")),
            r"W: expected shape \(O, 3, 4, 3, kh, kw\)",
        ),
        (lambda: F.local_convolution_2d(X, FILTERS), "W: expected 6 axes"),
        (lambda: F.local_convolution_2d(X[0], np.ones((2, 3, 4, 3, 3, 3), "f")), "x: expected images"),
        (lambda: F.local_convolution_2d(X, np.ones((2, 3, 4, 3, 3, 3), "f"), np.ones(2, "f")), "b: expected shape"),
        (
            lambda: F.local_convolution_2d(X, np.ones((2, 3, 4, 3, 3, 3), "f"), stride=0),
            "stride: expected sizes from 1",
        ),
        (lambda: F.deformable_convolution_2d_sampler(X, X, FILTERS), r"offset: expected shape \(2, 18, 3, 4\)"),
        (lambda: F.deformable_convolution_2d_sampler(X, X, FILTERS[:, :2]), r"W: expected shape \(O, 3, kh, kw\)"),
        (lambda: F.deformable_convolution_2d_sampler(X, X, FILTERS[0]), "W: expected 4 axes"),
        (lambda: F.deformable_convolution_2d_sampler(X[:, :, :2], X, FILTERS), "x: expected images that windows"),
        (lambda: F.deformable_convolution_2d_sampler(X, X, FILTERS, stride=0), "stride, pad: expected"),
        (lambda: F.shift(X), "x: expected images with at least 9 channels"),
        (lambda: F.shift(X, (1, 2)), "ksize: expected odd numbers"),
        (lambda: F.as_strided(X, (2, 2), (1,)), "strides: expected a number for each axis"),
        (lambda: F.as_strided(X, (-1,), (1,)), "shape: expected lengths from 0 on"),
        (lambda: F.as_strided(X, (4,), (60,)), "strides: expected elements from 0 to 179 .* got elements 0 to 180"),
        (lambda: F.as_strided(X, (2,), (-1,)), "strides: expected elements from 0 to 179 .* got elements -1 to 0"),
        (lambda: F.gumbel_softmax(X, 0.0), "tau: expected a number above 0"),
        (
            lambda: F.discriminative_margin_based_clustering_loss(X, np.ones((2, 5, 5), int), 1, 1, 3),
            r"labels: expected integers of shape \(2, 5, 6\)",
        ),
        (
            lambda: F.discriminative_margin_based_clustering_loss(X, np.ones((2, 5, 6), int), 1, 1, 3, 3),
            "norm: expected 1 or 2",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@each(name=["roi_max_align_2d", "roi_max_pooling_2d", "roi_average_align_2d", "roi_average_pooling_2d"])
@each(numbers=["none", "some"])
def test_what_is_not_a_number_stays_none(name, numbers):
    x = np.full((1, 2, 4, 4), np.nan, np.float32)
    if numbers == "some":
        x[0, 1] = 1.0
    y = getattr(F, name)(x, np.array([[0, 0, 3, 3.0]], "f"), np.zeros(1, "i"), 2, 1.0).array
    assert y.shape == (1, 2, 2, 2) and np.isnan(y[0, 0]).all()
    assert np.isnan(y[0, 1]).all() if numbers == "none" else (y[0, 1] == 1).all()
