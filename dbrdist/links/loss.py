"""Losses with parameters: CRF1d, NegativeSampling, BlackOut, BinaryHierarchicalSoftmax."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist import functions as F
from dbrdist.core.array import random
from dbrdist.core.array.backend import Array, get_array_module, is_array, to_cpu
from dbrdist.core.array.config import get_dtype
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, as_array
from dbrdist.links.initializers import Constant, InitialValue, Uniform, get_initializer
from dbrdist.utils.walker_alias import WalkerAlias


class CRF1d(Link):
    """A chain of labels with the scores ``cost`` (n_label, n_label) of a label after another; see
    :func:`dbrdist.functions.crf1d`.

    ``initial_cost``: initializer, array or number; default 0.

    Args:
        n_label: number of labels.
        initial_cost: initializer of the transition costs; None for zeros.

    Example:
        >>> crf = L.CRF1d(2)
        >>> crf([np.zeros((1, 2), np.float32)] * 2, [np.array([0]), np.array([1])]).array.round(4)
        np.float32(1.3863)
    """

    def __init__(self, n_label: int, initial_cost: InitialValue = None) -> None:
        super().__init__()
        with self.init_scope():
            self.cost = Parameter(get_initializer(initial_cost, Constant(0)), (n_label, n_label))

    def forward(self, xs: Sequence[Any], ys: Sequence[Any], reduce: str = "mean", transpose: bool = False) -> Any:
        """For each step the scores xs[t] (N_t, n_label) and labels ys[t] (N_t,): the loss, as ``reduce`` says.

        With ``transpose`` there is one entry per sequence instead of one per step: scores (length, n_label) and labels
        (length,), in any order of lengths. ``reduce="no"`` gives the losses from the longest sequence to the shortest.

        Args:
            xs: the scores, one array for each step.
            ys: the labels, one array of integers for each step.
            reduce: ``"mean"`` (default) or ``"no"``.
            transpose: whether there is one entry per sequence; default False.
        """
        if transpose:
            order = _from_longest(xs)
            xs, ys = (F.transpose_sequence([sequences[i] for i in order]) for sequences in (xs, ys))
        return F.crf1d(self.cost, xs, ys, reduce)

    def argmax(self, xs: Sequence[Operand], transpose: bool = False) -> tuple[Any, list[Array]]:
        """The best label sequences: their scores (N,), and for each step the labels (N_t,).

        With ``transpose`` scores and labels come as one entry per sequence, as in :meth:`forward`; the sequences' total
        scores (N,) go from the longest to the shortest.

        Args:
            xs: the scores, as for :meth:`forward`.
            transpose: whether there is one entry per sequence; default False.
        """
        if not transpose:
            return F.argmax_crf1d(self.cost, xs)
        order = _from_longest(xs)
        scores, steps = F.argmax_crf1d(self.cost, F.transpose_sequence([xs[i] for i in order]))
        path: list[Any] = [None] * len(order)
        for i, labels in zip(order, F.transpose_sequence(steps)):
            path[i] = labels.array
        return scores, path


def _from_longest(sequences: Sequence[Array]) -> list[int]:
    """The indices of sequences from the longest to the shortest; those of equal length keep their order."""
    return sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))


class _Sampled(Link):
    """Weights W (words, in_size) and a sampler of noise words, which follows the link to its device."""

    def __init__(self, in_size: int, weights: Array | Sequence[int], sample_size: int, initialW: InitialValue) -> None:
        super().__init__()
        self.sample_size = sample_size
        self.sampler = WalkerAlias(weights)
        with self.init_scope():
            self.W = Parameter(initialW, (len(weights), in_size))

    def _draw(self, shape: tuple[int, ...]) -> Array:
        if self.sampler.device != self.device:
            self.sampler.to_device(self.device)
        return self.sampler.sample(shape)


class NegativeSampling(_Sampled):
    """The loss of :func:`dbrdist.functions.negative_sampling` with its weights W (words, in_size), initially 0.

    Args:
        in_size: features per example.
        counts: how often each word occurs.
        sample_size: noise words for each example.
        power: noise words are drawn with probabilities in proportion to ``counts ** power``.
        dtype: type of W; None for the configured one.

    Example:
        >>> loss = L.NegativeSampling(4, [3, 2, 1], sample_size=2)(np.zeros((2, 4), np.float32), np.array([0, 2]))
        >>> loss.shape
        ()
    """

    def __init__(
        self, in_size: int, counts: Any, sample_size: int, power: float = 0.75, dtype: DTypeLike | None = None
    ) -> None:  # fmt: skip
        weights = np.asarray(to_cpu(counts) if is_array(counts) else counts, np.float64) ** power
        super().__init__(in_size, weights, sample_size, Constant(0, get_dtype(dtype, map_mixed16=np.float32)))

    def forward(self, x: Operand, t: Operand, reduce: str = "sum", *, return_samples: bool = False) -> Any:
        """Features x (N, in_size) and words t (N,), of which -1 is ignored: the loss, and on request the samples.

        Args:
            x: the features.
            t: the words, integers.
            reduce: ``"sum"`` (default), or ``"no"`` for a loss (N,) for each row.
            return_samples: whether the words drawn, int32 (N, sample_size + 1), come as well; default False.
        """
        return F.negative_sampling(
            x, t, self.W, self._draw, self.sample_size, reduce, return_samples=return_samples
        )  # fmt: skip


class BlackOut(_Sampled):
    """The loss of :func:`dbrdist.functions.black_out` with its weights W (words, in_size), initially LeCunNormal.

    Args:
        in_size: features per example.
        counts: how often each word occurs; noise words are drawn in proportion to it.
        sample_size: noise words for each example.

    Example:
        >>> loss = L.BlackOut(4, [3, 2, 1], sample_size=2)(np.zeros((2, 4), np.float32), np.array([0, 2]))
        >>> loss.shape
        ()
    """

    sample_data: Any = None  # a program may set the noise words: (N, sample_size)

    def __init__(self, in_size: int, counts: Sequence[int], sample_size: int) -> None:
        super().__init__(in_size, counts, sample_size, get_initializer(None))

    def forward(self, x: Operand, t: Operand) -> Any:
        """Features ``x`` (N, in_size) and words ``t`` (N,): the mean loss."""
        words = self._draw((len(x), self.sample_size)) if self.sample_data is None else self.sample_data
        return F.black_out(x, t, self.W, words)


class BinaryHierarchicalSoftmax(Link):
    """-log of the probability of a word at a leaf of a binary tree, in time that grows with the path to it.

    At each node the way goes left with probability sigmoid(W_node x) (Morin and Bengio 2005). The rows of W
    (nodes, in_size), initially from -1 to 1, are numbered from the root, a node's left side before its right one.

    Args:
        in_size: features per example.
        tree: pairs of pairs or words, the words being integers from 0: ``((1, 2), 0)``.
        dtype: type of W; None for the configured one.

    Example:
        >>> tree = L.BinaryHierarchicalSoftmax.create_huffman_tree({0: 3, 1: 2, 2: 1})
        >>> loss = L.BinaryHierarchicalSoftmax(4, tree)(np.zeros((2, 4), np.float32), np.array([0, 2]))
        >>> loss.shape
        ()
    """

    def __init__(self, in_size: int, tree: Any, dtype: DTypeLike | None = None) -> None:
        super().__init__()
        self.tree = tree
        self._tables = _tables(tree)
        with self.init_scope():
            W = Uniform(1, dtype=get_dtype(dtype, map_mixed16=np.float32))
            self.W = Parameter(W, (len(self._tables["children"]), in_size))

    @staticmethod
    def create_huffman_tree(word_counts: Mapping[int, float]) -> Any:
        """The tree with the shortest paths on average for words that occur as often as ``word_counts`` says."""
        if not word_counts:
            raise expected("create_huffman_tree", "word_counts", "at least one word", "none")
        # A number of its own for each entry decides between equal counts: trees cannot be compared.
        heap = [(count, number, word) for number, (word, count) in enumerate(word_counts.items())]
        heapq.heapify(heap)
        while len(heap) > 1:
            left = heapq.heappop(heap)
            right = heap[0]
            heapq.heapreplace(heap, (left[0] + right[0], min(left[1], right[1]), (left[2], right[2])))
        return heap[0][2]

    def _table(self, name: str) -> Array:
        """One of the tables, on the link's device."""
        a = self._tables[name] = self.device.send(self._tables[name])
        return a

    def forward(self, x: Any, t: Operand | Sequence[int]) -> Any:
        """Features ``x`` (N, in_size) and words ``t`` (N,): the sum of the losses."""
        if x.ndim != 2 or x.shape[1] != self.W.shape[1]:
            raise expected("BinaryHierarchicalSoftmax", "x", f"shape (N, {self.W.shape[1]})", x)
        t = as_array(t)
        if getattr(t, "shape", None) != x.shape[:1] or t.dtype.kind not in "iu":
            raise expected("BinaryHierarchicalSoftmax", "t", f"integers of shape {x.shape[:1]}", t)
        begins, lengths = self._table("begins"), self._table("lengths")
        if ((t < 0) | (t >= len(lengths))).any() or (lengths[t] < 0).any():
            raise expected("BinaryHierarchicalSoftmax", "t", "words of the tree", "others")
        xp = get_array_module(t)
        steps = xp.arange(int(lengths[t].max()) if len(t) else 0)
        on_path = steps < lengths[t][:, None]
        places = begins[t][:, None] + steps * on_path
        W = F.embed_id(self._table("path")[places], self.W)
        scores = F.sum(W * F.reshape(x, (len(x), 1, x.shape[1])), axis=2)
        sides = self._table("sides")[places].astype(scores.dtype)
        return F.sum(F.softplus(-sides * scores) * on_path.astype(scores.dtype))

    def sample(self, x: Operand) -> Array:
        """A word for each row of ``x`` (N, in_size), drawn by walking down the tree: int32 (N,)."""
        x, W, children = as_array(x), self.W.array, self._table("children")
        xp = get_array_module(x)
        depth = max(int(self._table("lengths").max()), 1)
        draws = self.device.send((random.raw_words(len(x), depth) >> np.uint64(11)) * 2.0**-53)
        node = xp.full(len(x), 0 if len(children) else ~int(self.tree), np.int64)
        for step in range(depth if len(children) else 0):
            inner = xp.maximum(node, 0)
            goes_right = draws[:, step] >= as_array(F.sigmoid((W[inner] * x).sum(axis=1)))
            node = xp.where(node >= 0, children[inner, goes_right.astype(np.int64)], node)
        return (~node).astype(np.int32)


def _tables(tree: Any) -> dict[str, Array]:
    """The tree as arrays: ``children`` (nodes, 2), a leaf being ~word; and for each word where its ``path`` begins, how
    long it is (-1: no such word), and at each node of it the side: 1 left, -1 right."""
    children: list[list[int]] = []
    paths: dict[int, tuple[list[int], list[float]]] = {}
    todo: list[tuple[Any, list[int], list[float]]] = [(tree, [], [])]
    while todo:  # not by recursion: a tree may be as deep as it has words
        node, path, sides = todo.pop()
        if isinstance(node, tuple):
            if len(node) != 2:
                raise expected("BinaryHierarchicalSoftmax", "tree", "pairs", f"{len(node)} of them: {node!r:.40}")
            number = len(children)
            children.append([0, 0])
            todo += [(node[1], [*path, number], [*sides, -1.0]), (node[0], [*path, number], [*sides, 1.0])]
        else:
            if not isinstance(node, (int, np.integer)) or node < 0 or node in paths:
                raise expected("BinaryHierarchicalSoftmax", "tree", "integers from 0, each once", repr(node))
            number = ~int(node)
            paths[int(node)] = path, sides
        if path:
            children[path[-1]][0 if sides[-1] > 0 else 1] = number
    lengths = np.full(max(paths) + 1, -1, np.int64)
    for word, (path, _) in paths.items():
        lengths[word] = len(path)
    steps = np.maximum(lengths, 0)
    words = sorted(paths)
    return {
        "children": np.array(children, np.int64).reshape(-1, 2),
        "begins": np.cumsum(steps) - steps,
        "lengths": lengths,
        "path": np.array([node for word in words for node in paths[word][0]], np.int64),
        "sides": np.array([side for word in words for side in paths[word][1]], np.float32),
    }


explain_constructors(globals())
