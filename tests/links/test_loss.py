"""Losses with parameters: against the plain formulas, samples as likely as they are said to be, trees by hand."""

from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, optimizers, serializers
from dbrdist import links as L
from tests.each import each
from tests.functions import references as R

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 3)).astype("f")
XS = [RNG.standard_normal((n, 4)).astype("f") for n in (3, 3, 1)]
YS = [RNG.integers(0, 4, n) for n in (3, 3, 1)]
COUNTS = [8, 0, 1, 4]


def reloaded(link, copy):
    file = io.BytesIO()
    serializers.save_npz(file, link)
    file.seek(0)
    serializers.load_npz(file, copy)
    return copy


def test_label_sequences():
    link = L.CRF1d(4)
    assert [(name, p.shape) for name, p in link.namedparams()] == [("/cost", (4, 4))] and not link.cost.array.any()
    link = L.CRF1d(4, initial_cost=RNG.standard_normal((4, 4)).astype("f"))
    wide = [link.cost.array.astype(float), [x.astype(float) for x in XS]]
    np.testing.assert_allclose(link(XS, YS).array, R.crf1d(*wide, YS), rtol=1e-5)
    np.testing.assert_allclose(link(XS, YS, "no").array, R.crf1d(*wide, YS, "no"), rtol=1e-5)
    score, paths = link.argmax(XS)
    expected_score, expected_paths = R.argmax_crf1d(*wide)
    np.testing.assert_allclose(score.array, expected_score, rtol=1e-5)
    for path, expected in zip(paths, expected_paths, strict=True):
        np.testing.assert_array_equal(path, expected)
    np.testing.assert_array_equal(reloaded(link, L.CRF1d(4)).cost.array, link.cost.array)
    with pytest.raises(ValueError, match=r"link CRF1d: crf1d: cost: expected shape \(4, 4\) to match xs"):
        L.CRF1d(5)(XS, YS)


def test_negative_sampling():
    t = np.array([0, 3, -1, 2, 0, 1])
    link = L.NegativeSampling(3, COUNTS, 2)
    assert link.W.shape == (4, 3) and not link.W.array.any()
    np.testing.assert_allclose(link(X, t).array, 5 * 3 * np.log(2), rtol=1e-6)  # without -1; 1 + 2 terms each
    link.W.array[...] = RNG.standard_normal((4, 3))
    losses, samples = link(X, t, reduce="no", return_samples=True)
    noise = samples[:, -2:]
    wide = X.astype(float), t, link.W.array.astype(float), None, 2
    np.testing.assert_allclose(losses.array, R.negative_sampling(*wide, "no", samples=samples), rtol=1e-5)
    assert not (noise == 1).any()  # it never occurs
    assert np.array_equal(reloaded(link, L.NegativeSampling(3, COUNTS, 2)).W.array, link.W.array)
    assert L.NegativeSampling(3, COUNTS, 2, dtype=np.float64).W.dtype == np.float64


@each(power=[0.75, 2.0])
def test_noise_words_are_drawn_by_their_counts(power):
    found = np.bincount(L.NegativeSampling(3, np.array(COUNTS), 2, power).sampler.sample(20000), minlength=4) / 20000
    np.testing.assert_allclose(found, np.power(COUNTS, power) / np.power(COUNTS, power).sum(), atol=0.02)


def test_black_out():
    t = np.array([0, 3, 1, 2, 0, 1])
    link = L.BlackOut(3, COUNTS, 2)
    assert link.W.shape == (4, 3) and np.isfinite(link.W.array).all() and link.W.array.std() > 0
    dbrdist.random.set_seed(5)
    samples = link.sampler.sample((6, 2))
    dbrdist.random.set_seed(5)
    expected = R.black_out(X.astype(float), t, link.W.array.astype(float), samples)
    np.testing.assert_allclose(link(X, t).array, expected, rtol=1e-5)
    np.testing.assert_allclose(
        np.bincount(link.sampler.sample(20000), minlength=4) / 20000, np.array(COUNTS) / 13, atol=0.02
    )


# ---- hierarchical softmax -------------------------------------------------------------------------------------------
TREE = ((3, (0, 2)), 5)
# by hand: rows of W from the root, the left side first; 1 goes left
PATHS = {3: [(0, 1), (1, 1)], 0: [(0, 1), (1, -1), (2, 1)], 2: [(0, 1), (1, -1), (2, -1)], 5: [(0, -1)]}


def probability(W, x, word):
    p = 1.0
    for node, side in PATHS[word]:
        p /= 1 + np.exp(-side * float(W[node].astype(float) @ x))
    return p


def test_hierarchical_softmax():
    link = L.BinaryHierarchicalSoftmax(3, TREE)
    W = link.W.array
    assert W.shape == (3, 3) and W.min() >= -1 and W.max() < 1 and link.tree == TREE
    t = np.array([3, 0, 2, 5, 0, 3], np.int32)
    loss = link(X, t)
    assert loss.shape == ()
    np.testing.assert_allclose(loss.array, -sum(np.log(probability(W, x, k)) for x, k in zip(X, t)), rtol=1e-5)
    for x in X:  # probabilities of all words
        total = sum(np.exp(-link(x[None], np.array([word])).array) for word in PATHS)
        np.testing.assert_allclose(total, 1, rtol=1e-5)
    assert link(X[:0], t[:0]).array == 0
    np.testing.assert_array_equal(reloaded(link, L.BinaryHierarchicalSoftmax(3, TREE)).W.array, W)
    assert L.BinaryHierarchicalSoftmax(3, TREE, np.float64)(X.astype("d"), t).dtype == np.float64


def test_gradients_of_hierarchical_softmax():
    link = L.BinaryHierarchicalSoftmax(3, TREE, np.float64)
    t = np.array([3, 0, 2, 5, 0, 3])
    x = Variable(X.astype("d"))
    link(x, t).backward()
    for a, g in ((x.array, x.grad), (link.W.array, link.W.grad)):
        for i in itertools.islice(np.ndindex(a.shape), 9):
            old, values = a[i], []
            for step in (1e-6, -1e-6):
                a[i] = old + step
                values.append(float(link(x.array, t).array))
            a[i] = old
            np.testing.assert_allclose(g[i], (values[0] - values[1]) / 2e-6, atol=1e-7)


def test_words_sampled_from_a_tree():
    link = L.BinaryHierarchicalSoftmax(3, TREE)
    x = np.tile(X[:1], (20000, 1))
    words = link.sample(Variable(x))
    assert words.dtype == np.int32 and words.shape == (20000,)
    found = {word: (words == word).mean() for word in PATHS}
    for word, share in found.items():
        assert abs(share - probability(link.W.array, X[0], word)) < 0.02
    assert not np.array_equal(words, link.sample(x))


def test_trees_by_frequency():
    make = L.BinaryHierarchicalSoftmax.create_huffman_tree
    assert make({0: 8, 1: 5, 2: 6, 3: 4}) == ((3, 1), (2, 0))
    counts = {word: float(n) for word, n in enumerate(RNG.integers(1, 50, 12))}

    def cost(tree, depth=0):
        return counts[tree] * depth if isinstance(tree, int) else cost(tree[0], depth + 1) + cost(tree[1], depth + 1)

    assert cost(make(counts)) == pytest.approx(least_cost(list(counts.values())))
    assert make({7: 1}) == 7
    assert L.BinaryHierarchicalSoftmax(3, 7)(X, np.full(6, 7)).array == 0
    assert (L.BinaryHierarchicalSoftmax(3, 7).sample(X) == 7).all()


def least_cost(counts):
    """The sum of all merged counts (Huffman 1952)."""
    total = 0.0
    while len(counts) > 1:
        counts = sorted(counts)
        total += counts[0] + counts[1]
        counts = [counts[0] + counts[1], *counts[2:]]
    return total


@pytest.mark.slow
def test_a_tree_deeper_than_pythons_stack():
    tree = 0
    for word in range(1, 1200):
        tree = (tree, word)
    link = L.BinaryHierarchicalSoftmax(2, tree)
    link.W.array[...] = 0
    loss = link(np.ones((2, 2), "f"), np.array([0, 1199]))
    np.testing.assert_allclose(loss.array, 1200 * np.log(2), rtol=1e-4)


def test_words_are_learned():
    link = L.BinaryHierarchicalSoftmax(3, TREE)
    optimizer = optimizers.SGD(0.5).setup(link)
    t = np.array([3, 0, 2, 5, 0, 3])
    first = float(link(X, t).array)
    for _ in range(20):
        optimizer.update(link, X, t)
    assert float(link(X, t).array) < first


@each(
    case=[
        (
            lambda: L.BinaryHierarchicalSoftmax(3, (0, 1, 2)),
            "BinaryHierarchicalSoftmax: tree: expected pairs, got 3",
        ),
        (lambda: L.BinaryHierarchicalSoftmax(3, (0, (1, 0))), "tree: expected integers from 0, each once, got 0"),
        (lambda: L.BinaryHierarchicalSoftmax(3, (0, "a")), "tree: expected integers from 0, each once, got 'a'"),
        (lambda: L.BinaryHierarchicalSoftmax(3, TREE)(X[:, :2], np.zeros(6, int)), r"x: expected shape \(N, 3\), got"),
        (
            lambda: L.BinaryHierarchicalSoftmax(3, TREE)(X, np.zeros(5, int)),
            r"t: expected integers of shape \(6,\)",
        ),
        (lambda: L.BinaryHierarchicalSoftmax(3, TREE)(X, np.full(6, 1)), "t: expected words of the tree, got others"),
        (lambda: L.BinaryHierarchicalSoftmax(3, TREE)(X, np.full(6, 6)), "t: expected words of the tree, got others"),
        (lambda: L.BinaryHierarchicalSoftmax(3, TREE)(X, np.full(6, -1)), "t: expected words of the tree, got others"),
        (lambda: L.BinaryHierarchicalSoftmax.create_huffman_tree({}), "word_counts: expected at least one word, got"),
        (
            lambda: L.NegativeSampling(3, COUNTS, 2)(X[:, :2], np.zeros(6, int)),
            "link NegativeSampling: negative_",
        ),
        (lambda: L.BlackOut(3, COUNTS, 2)(X, np.full(6, 4)), "link BlackOut: black_out: t: expected words from 0 to 3"),
        (lambda: L.BlackOut(3, [], 2), "WalkerAlias: probs: expected an array of one axis, not empty"),
    ]
)
def test_wrong_arguments_are_named(case):
    call, words = case
    with pytest.raises(ValueError, match=words):
        call()


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


def test_words_of_a_tree():
    tree = L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 8, 1: 4, 2: 2, 3: 1})
    link = L.BinaryHierarchicalSoftmax(2, tree)
    x = ones(2, 2)
    assert link(x, ints(0, 3)).shape == ()
    assert link(x, Variable(ints(0, 3))).array == link(x, ints(0, 3)).array
    for words, call in {
        "x: expected shape (N, 2)": [lambda: link(ones(2, 3), ints(0, 1)), lambda: link(ones(2, 2, 1), ints(0, 1))],
        "t: expected integers of shape (2,)": [
            lambda: link(x, ints(0)), lambda: link(x, ones(2)), lambda: link(x, [0, 1])],
        "t: expected words of the tree": [lambda: link(x, ints(0, 4)), lambda: link(x, ints(-1, 0))],
    }.items():  # fmt: skip
        for one in call:
            with pytest.raises((ValueError, TypeError), match=f"BinaryHierarchicalSoftmax: {re.escape(words)}"):
                one()


def test_double_words_count_twice_in_losses():
    dbrdist.random.set_seed(0)
    link = L.NegativeSampling(2, [5, 3, 1], 4)
    x = ones(2, 2)
    y = link(x, ints(0, 1), reduce="no")
    assert y.shape == (2,) and link(x, ints(0, 2)).shape == ()
    assert F.sum(y).array > 0


# ---- CRF1d of whole sequences: the sum over all paths, written down, for each sequence by itself ----


SEQUENCE_RNG = np.random.default_rng(0)
LENGTHS = (2, 4, 1, 4, 3)
SEQUENCES = [SEQUENCE_RNG.standard_normal((n, 3)).astype("f") for n in LENGTHS]
LABELS = [SEQUENCE_RNG.integers(0, 3, n).astype("i") for n in LENGTHS]
COST = SEQUENCE_RNG.standard_normal((3, 3)).astype("f")


def score(x, path):
    steps = sum(float(x[t, label]) for t, label in enumerate(path))
    return steps + sum(float(COST[a, b]) for a, b in itertools.pairwise(path))


def paths(x):
    return list(itertools.product(range(3), repeat=len(x)))


def test_sequences_in_any_order_of_lengths():
    link = L.CRF1d(3, initial_cost=COST)
    losses = [np.log(sum(np.exp(score(x, p)) for p in paths(x))) - score(x, y) for x, y in zip(SEQUENCES, LABELS)]
    assert float(link(SEQUENCES, LABELS, transpose=True).array) == pytest.approx(np.mean(losses), rel=1e-5)
    from_longest = [losses[i] for i in (1, 3, 4, 0, 2)]
    np.testing.assert_allclose(link(SEQUENCES, LABELS, "no", transpose=True).array, from_longest, rtol=1e-4)
    scores, found = link.argmax(SEQUENCES, transpose=True)
    best = [max(paths(x), key=lambda p, x=x: score(x, p)) for x in SEQUENCES]
    assert [tuple(labels) for labels in found] == best
    expected = [score(SEQUENCES[i], best[i]) for i in (1, 3, 4, 0, 2)]
    np.testing.assert_allclose(getattr(scores, "array", scores), expected, rtol=1e-5)


def test_noise_words_that_a_program_set():
    link = L.BlackOut(3, [2, 1, 1], 4)
    x, t = np.ones((2, 3), "f"), np.array([0, 2])
    link.sample_data = np.array([[0, 1, 2, 1], [1, 1, 0, 0]])
    expected = F.black_out(x, t, link.W, link.sample_data).array
    assert link(x, t).array == expected == link(x, t).array
