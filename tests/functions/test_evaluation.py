"""Tests of dbrdist.functions.evaluation."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.errors import UsageWarning
from tests.each import each


def ones(*shape):
    return np.ones(shape, np.float32)


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
    ints = np.array([1, 2, 2], np.uint8), np.array([1, 2, 3], np.uint8)  # whose score was 0
    assert F.r2_score(*ints).array == pytest.approx(0.5) == F.r2_score(*ints[::-1]).array + 1


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


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
        F.accuracy(y, ones_of(3))
    with pytest.raises(ValueError, match=r"accuracy: t: expected scores y of shape \(N, K, ...\)"):
        F.accuracy(ones_of(3), ints(1, 0, 0))


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


def test_the_accuracy_takes_the_greatest_weight():
    y = np.array([[0.1, 0.9, 0], [3, 1, 2], [0, 1, 2], [5, 1, 0]], np.float32)
    t = np.array([[0.4, 0.6, 0], [0.3, 0.3, 0.4], [0, 0, 1], [1, 0, 0]], np.float32)
    assert float(F.accuracy(y, t).array) == 0.75
    pixels, weights = y.reshape(1, 3, 4), np.moveaxis(np.eye(3, dtype=np.float32)[[[0, 1, 2, 1]]], -1, 1)
    hits = (pixels[0].argmax(0) == [0, 1, 2, 1]).mean()
    assert float(F.accuracy(pixels, weights).array) == hits


@each(score=[F.classification_summary, F.precision, F.recall, F.f1_score])
def test_scores_of_classes_warn_of_labels_that_are_none(score):
    y = np.eye(3, dtype="f")
    with pytest.warns(UsageWarning, match="there are labels such as 255 among 3 classes"):
        score(y, np.uint8([0, 1, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t, options in (
            ([0, 1, 2], {}),
            ([0, -1, 1], {}),
            ([0, 7, 1], {"ignore_label": 7}),
            ([3, 0, 1], {"label_num": 4}),
        ):
            score(y, np.array(t), **options)


def test_the_share_of_hits_among_one_example_and_none():
    y = np.array([[0.5, 0.3, 0.2]], np.float32)
    for label, k, share in ((0, 1, 1.0), (1, 1, 0.0), (1, 2, 1.0), (2, 3, 1.0)):
        found = F.top_k_accuracy(y, np.array([label]), k=k)
        assert float(found.array) == share and not found.requires_grad
    assert float(F.top_k_accuracy(y[:0], np.zeros(0, int), k=2).array) == 0.0
