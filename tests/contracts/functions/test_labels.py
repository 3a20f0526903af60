"""Labels that are none: every function that takes labels or words refuses them, and takes those that it documents."""

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from tests.each import each

RNG = np.random.default_rng(0)
N, K = 4, 5
X, ONE, IMAGES = RNG.normal(size=(N, K)).astype("f"), RNG.normal(size=N).astype("f"), np.ones((N, K, 2), "f")
W = RNG.normal(size=(K, 3)).astype("f")
H = RNG.normal(size=(N, 3)).astype("f")
SAMPLES = np.zeros((N, 2), int)


def tree():
    return L.BinaryHierarchicalSoftmax(3, L.BinaryHierarchicalSoftmax.create_huffman_tree(dict.fromkeys(range(K), 1)))


# By name: a function of labels (N,), the labels that it takes, and those next to them that it does not.
TAKERS = {
    "softmax_cross_entropy": (lambda t: F.softmax_cross_entropy(X, t), range(-1, K), (-2, K, 1000)),
    "softmax_cross_entropy, weights": (
        lambda t: F.softmax_cross_entropy(X, t, class_weight=np.ones(K, "f")), range(-1, K), (-2, K),
    ),
    "softmax_cross_entropy, smoothing": (
        lambda t: F.softmax_cross_entropy(X, t, label_smoothing=0.1), range(-1, K), (-2, K),
    ),
    "softmax_cross_entropy, another to ignore": (
        lambda t: F.softmax_cross_entropy(X, t, ignore_label=9, reduce="no"), (*range(K), 9), (-1, K, 8),
    ),
    "softmax_cross_entropy, images": (
        lambda t: F.softmax_cross_entropy(IMAGES, np.stack([t, t], 1)), range(-1, K), (-2, K),
    ),
    "hinge": (lambda t: F.hinge(X, t), range(K), (-1, K, 9)),
    "hinge, L2": (lambda t: F.hinge(X, t, norm="L2", reduce="no"), range(K), (-1, K, 9)),
    "sigmoid_cross_entropy": (lambda t: F.sigmoid_cross_entropy(ONE, t), (-1, 0, 1), (-2, 2, 9)),
    "sigmoid_cross_entropy, no": (lambda t: F.sigmoid_cross_entropy(ONE, t, reduce="no"), (-1, 0, 1), (-2, 2)),
    "sigmoid_focal_loss": (lambda t: F.sigmoid_focal_loss(ONE, t), (-1, 0, 1), (-2, 2)),
    "contrastive": (lambda t: F.contrastive(X, X + 1, t), (0, 1), (-1, 2)),
    "embed_id": (lambda t: F.embed_id(t, W), range(K), (-1, K)),
    "select_item": (lambda t: F.select_item(X, t), range(K), (-K - 1, K)),
    "crf1d": (lambda t: F.crf1d(np.zeros((K, K), "f"), [X], [t]), range(K), (-1, K)),
    "ctc": (
        lambda t: F.connectionist_temporal_classification([X, X, X], t[:, None], 0), range(1, K), (-1, 0, K),
    ),
    "negative_sampling": (
        lambda t: F.negative_sampling(H, t, W, lambda shape: np.zeros(shape, int), 2), range(-1, K), (-2, K),
    ),
    "negative_sampling, samples": (
        lambda t: F.negative_sampling(H, t * 0, W, None, 1, samples=np.stack([t * 0, t], 1)), range(K), (-1, K),
    ),
    "negative_sampling, first of samples": (
        lambda t: F.negative_sampling(H, t * 0, W, None, 1, samples=np.stack([t, t * 0], 1)), range(-1, K), (-2, K),
    ),
    "black_out": (lambda t: F.black_out(H, t, W, SAMPLES), range(K), (-1, K)),
    "black_out, samples": (lambda t: F.black_out(H, t * 0, W, np.stack([t, t], 1)), range(K), (-1, K)),
    "hierarchical softmax": (lambda t: tree()(H, t), range(K), (-1, K)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TAKERS))
@each(dtype=["int32", "int64", "int8", "uint8"])
def test_labels(name, dtype):
    function, taken, refused = TAKERS[name]
    held = [t for t in taken if t >= 0 or np.dtype(dtype).kind == "i"]
    for t in held:
        labels = np.full(N, held[0], dtype)
        labels[-1] = t
        assert np.isfinite(np.asarray(function(labels).array)).all(), t
    for t in refused:
        if np.iinfo(dtype).min <= t <= np.iinfo(dtype).max:
            labels = np.full(N, held[-1], dtype)
            labels[1] = t
            with pytest.raises((ValueError, IndexError), match=r"expected|out of bounds"):
                function(labels)


@each(bad=[[0, 1, 2, 3], np.zeros(N, "f"), np.zeros((N, 1), int), None])
def test_what_is_no_array_of_labels(bad):
    with pytest.raises((ValueError, TypeError), match="hinge: t"):
        F.hinge(X, bad)
