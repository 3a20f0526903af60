"""Tests of dbrdist.training.mirrored."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import training
from tests.each import each


@each(order=["C", "F"], as_variable=[False, True])
def test_outputs_are_means_over_images_and_their_mirror_images(order, as_variable):
    net = dbrdist.Sequential(L.Convolution2D(3, 4, 3), F.relu, L.Linear(4 * 3 * 5, 2))
    images = np.asarray(np.random.default_rng(0).standard_normal((6, 3, 5, 7)), np.float32, order=order)
    kept = images.copy()
    found = training.mean_over_mirrored(net, dbrdist.Variable(images) if as_variable else images)
    expected = (net(images).array + net(np.ascontiguousarray(np.flip(images, 3))).array) / 2
    assert found.array == pytest.approx(expected, rel=1e-5, abs=1e-6) and np.array_equal(images, kept)


def test_gradients_pass_through_the_mirror():
    images = dbrdist.Variable(np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4))
    weights = np.array([1, 2, 4, 8], np.float32)
    F.sum(training.mean_over_mirrored(lambda x: x * weights, images)).backward()
    assert images.grad.ravel().tolist() == [4.5, 3, 3, 4.5]


@each(images=[np.zeros((3, 4), np.float32), [1, 2]])
def test_what_is_no_batch_of_images_is_refused(images):
    with pytest.raises(ValueError, match=r"mean_over_mirrored: expected images \(N, C, H, W\)"):
        training.mean_over_mirrored(abs, images)
