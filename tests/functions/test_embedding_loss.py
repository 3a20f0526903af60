"""Tests of dbrdist.functions.embedding_loss."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.utils import WalkerAlias


def ones(*shape):
    return np.ones(shape, np.float32)


PAIR = (ones(2, 3), ones(2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.contrastive(*PAIR, np.ones(2)), r"contrastive: y: expected integers of shape \(2,\)"),
        (lambda: F.contrastive(*PAIR, [0, 1]), r"contrastive: y: expected integers of .*, got \[0, 1\]"),
        (lambda: F.contrastive(*PAIR, np.array([0, 2])), "contrastive: y: expected labels from 0 to 1, got labels fro"),
        (lambda: F.contrastive(*PAIR, np.array([-1, 1])), "contrastive: y: expected labels from 0 to 1, got labels "),
        (lambda: F.sigmoid_focal_loss(ones(2), [0, 1]), r"sigmoid_focal_loss: t: expected integers of .*, got \[0, 1"),
        (
            lambda: F.sigmoid_focal_loss(ones(2), np.array([0, 2])),
            "focal_loss: t: expected labels from -1 to 1, got la",
        ),
        (lambda: F.rrelu(ones(2), r=[0.2, 0.3]), r"rrelu: r: expected shape \(2,\) to match x, got \[0.2, 0.3\]"),
        (lambda: F.contrastive(*PAIR, np.ones(3, int)), r"contrastive: y: expected integers of shape \(2,\)"),
        (lambda: F.contrastive(*PAIR, np.ones(2, int), 0), "contrastive: margin: expected a number above 0, got 0"),
        (lambda: F.contrastive(*PAIR, np.ones(2, int), reduce="sum"), "contrastive: reduce: expected 'mean' or 'no'"),
        (lambda: F.contrastive(ones(2, 3), ones(2, 4), np.ones(2, int)), r"contrastive: x1: expected shape \(2, 3\)"),
        (lambda: F.contrastive(ones(2), ones(2), np.ones(2, int)), r"contrastive: x0: expected shape \(N, K\)"),
        (lambda: F.triplet(*PAIR, ones(2, 3), float("nan")), "triplet: margin: expected a number above 0, got nan"),
        (lambda: F.triplet(*PAIR, ones(3, 3)), r"triplet: negative: expected shape \(2, 3\) to match anchor"),
        (lambda: F.cross_covariance(ones(2, 3), ones(3, 3)), r"cross_covariance: z: expected shape \(2, number of"),
        (lambda: F.cross_covariance(ones(2), ones(2)), r"cross_covariance: y: expected shape \(N, number of"),
        (lambda: F.decov(ones(2, 3, 4)), r"decov: h: expected shape \(N, number of features\)"),
        (lambda: F.decov(ones(2, 3), "mean"), "decov: reduce: expected 'half_squared_sum' or 'no', got 'mean'"),
        (lambda: F.sigmoid_focal_loss(ones(2), ones(2)), r"sigmoid_focal_loss: t: expected integers of shape \(2,\)"),
        (lambda: F.sigmoid_focal_loss(ones(1), np.ones(1, int), 1.5), "sigmoid_focal_loss: alpha: expected a number"),
        (lambda: F.sigmoid_focal_loss(ones(1), np.ones(1, int), gamma=-1), "sigmoid_focal_loss: gamma: expected a num"),
        (lambda: F.laplace_nll(ones(2), ones(2), ones(1)), r"laplace_nll: ln_scale: expected shape \(2,\) to match x"),
    ],
)
def test_losses_refuse_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_margins_may_be_learned():
    """A Variable was taken for its number, and got no gradient."""
    a, b, c = np.random.default_rng(1).standard_normal((3, 6, 4)) / 2
    is_similar = np.array([0, 1, 0, 0, 1, 0])
    squares, others = ((a - b) ** 2).sum(1), ((a - c) ** 2).sum(1)
    lacking = np.maximum(2 - np.sqrt(squares), 0)
    for loss, margin, wanted in [
        (lambda margin: F.triplet(a, b, c, margin), 0.5, (squares - others + 0.5 > 0).mean()),
        (lambda margin: F.contrastive(a, b, is_similar, margin), 2.0, (lacking * (1 - is_similar)).mean()),
    ]:
        learned = Variable(np.array(margin))
        y = loss(learned)
        y.backward()
        np.testing.assert_allclose(y.array, loss(margin).array, rtol=1e-14)
        np.testing.assert_allclose(learned.grad, wanted, rtol=1e-12)
        assert wanted > 0


def test_distances_of_16_bit_types_do_not_overflow():
    a, b = np.full((2, 100), 200.0, np.float16), np.zeros((2, 100), np.float16)
    losses = F.contrastive(a, b, np.array([0, 0]), 1.0, "no")
    assert losses.dtype == np.float16 and losses.array.tolist() == [0, 0]  # of |a - b|^2 = 4e6, above 65504
    assert F.triplet(a, a, b, reduce="no").array.tolist() == [0, 0]


def test_embeddings_of_pixels_along_one_axis():
    rng = np.random.default_rng(0)
    embeddings, labels = rng.standard_normal((2, 3, 6)), np.array([[0, 1, 1, 2, 2, 2], [1, 1, 0, 0, 2, 2]])
    of_lines, of_images = (
        F.discriminative_margin_based_clustering_loss(e, t, 0.1, 1.5, 2)
        for e, t in ((embeddings, labels), (embeddings[..., None], labels[..., None]))
    )
    for a, b in zip(of_lines, of_images, strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def test_objects_that_are_not_there_do_not_push():
    """A single object has nobody to keep away from, and equal pixels are where they should be."""
    e = Variable(np.ones((1, 3, 2, 2), np.float32))
    losses = F.discriminative_margin_based_clustering_loss(e, np.ones((1, 2, 2), int), 0.5, 1.5, 3, norm=2)
    assert [float(v.array) for v in losses[:2]] == [0, 0]
    (losses[0] + losses[1] + losses[2]).backward()
    assert np.isfinite(e.grad).all()


RNG = np.random.default_rng(0)


def test_negative_sampling_draws_from_the_sampler():
    drawn = []

    def sampler(shape):
        drawn.append(shape)
        return WalkerAlias([1, 0, 3]).sample(shape)

    x, W = RNG.standard_normal((5, 4)), RNG.standard_normal((3, 4))
    t = np.array([0, 1, 2, 0, -1])
    loss, samples = F.negative_sampling(x, t, W, sampler, 7, return_samples=True)
    assert drawn == [(5, 7)] and samples.shape == (5, 8) and set(np.unique(samples[:, 1:])) == {0, 2}
    np.testing.assert_array_equal(samples[:, 0], t)
    again = F.negative_sampling(x, t, W, None, 7, samples=samples)
    np.testing.assert_array_equal(loss.array, again.array)
