"""Losses of sequences and of large vocabularies.

B sequences of up to T steps, V labels; N examples, I features.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import DType, Module
from dbrdist.core.tape import ops
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.checks import expected, one_of
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.repeats import computed_once
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.activation import log_softmax, softplus
from dbrdist.functions.connection import embed_id
from dbrdist.functions.loss import class_numbers
from dbrdist.functions.math import logsumexp
from dbrdist.functions.scores import see_scores


def _never(dtype: DType) -> float:
    """The logarithm of a probability of 0, without the infinities that make NaN of gradients."""
    return -3e4 if dtype == np.float16 else -1e30


def _reduced(losses: Variable, reduce: str) -> Variable:
    if reduce == "mean":
        total = ops.sum(ops.cast(losses, accumulation_dtype(losses.dtype)))  # of 16 bits it may overflow alone
        return ops.cast(ops.div(total, float(max(losses.shape[0], 1))), losses.dtype)
    return ops.sum(losses) if reduce == "sum" else losses


def _steps(function: str, argument: str, xs: Sequence[Any], **others: Any) -> tuple[list[Any], list[Any], Any]:
    """The scores of each step (N_t, V), in falling number, and other operands, in the type of sums; and their own."""
    names = [f"{argument}[{t}]" for t in range(len(xs))]
    found = list(together(function, **others, **dict(zip(names, xs))))
    rest, steps = found[: len(others)], found[len(others) :]
    if not steps:
        raise expected(function, argument, "at least one step", "none")
    for t, x in enumerate(steps):
        if x.ndim != 2 or x.shape[1] != steps[0].shape[1] or (t and len(x) > len(steps[t - 1])):
            what = f"shape (N, {steps[0].shape[-1]}) with N at most {len(steps[max(t - 1, 0)])}, as in the step before"
            raise expected(function, names[t], what, x)
    types = {x.dtype for x in found}
    wide = np.result_type(*map(accumulation_dtype, types))
    dtype = steps[0].dtype if len(types) == 1 else wide
    return [ops.cast(x, wide) for x in steps], [ops.cast(x, wide) for x in rest], dtype


# ---- conditional random fields --------------------------------------------------------------------------------------


def _chain(function: str, cost: Operand, xs: Sequence[Operand]) -> tuple[Any, list[Any], Any]:
    steps, (cost,), dtype = _steps(function, "xs", xs, cost=cost)
    if cost.shape != (steps[0].shape[1],) * 2:
        raise expected(function, "cost", f"shape {(steps[0].shape[1],) * 2} to match xs", cost)
    return cost, steps, dtype


def crf1d(cost: Operand, xs: Sequence[Operand], ys: Sequence[Any], reduce: str = "mean") -> Variable:
    """The negative logarithm of the probability of label sequences in a chain (Lafferty et al. 2001).

    Args:
        cost: transition scores, shape (V, V): ``cost[i, j]`` is the score of label j after label i.
        xs: for each step the scores of the labels, shape (N_t, V); N_t never grows, the longest sequences come first.
        ys: for each step the correct labels, integers of shape (N_t,) from 0 to V - 1.
        reduce: 'mean' over the sequences, or 'no' for one loss per sequence.

    Raises:
        ValueError: xs and ys differ in length or shape, N_t grows, or a label is not from 0 to V - 1.

    Example:
        >>> xs, ys = [np.zeros((1, 2))] * 2, [np.array([0]), np.array([1])]
        >>> F.crf1d(np.zeros((2, 2)), xs, ys).array.round(4)
        np.float64(1.3863)
    """
    one_of("crf1d", "reduce", ("mean", "no"), reduce)
    cost, xs, dtype = _chain("crf1d", cost, xs)
    ys = [as_array(y) for y in ys]
    if len(ys) != len(xs):
        raise expected("crf1d", "ys", f"{len(xs)} steps as in xs", str(len(ys)))
    for t, (x, y) in enumerate(zip(xs, ys)):
        if getattr(y, "shape", None) != x.shape[:1] or y.dtype.kind not in "iu":
            raise expected("crf1d", f"ys[{t}]", f"integers of shape {x.shape[:1]}", y)
        if ((y < 0) | (y >= x.shape[1])).any():
            raise expected("crf1d", f"ys[{t}]", f"labels from 0 to {x.shape[1] - 1}", y)
    alpha, done = xs[0], []
    score, scores = _picked(xs[0], ys[0]), []
    for t in range(1, len(xs)):
        n = len(xs[t])
        if n < alpha.shape[0]:
            rest = slice(n, None)
            done.append(ops.getitem(alpha, rest))
            scores.append(ops.getitem(score, rest))
            alpha, score = ops.getitem(alpha, slice(n)), ops.getitem(score, slice(n))
        alpha = ops.add(logsumexp(ops.add(ops.reshape(alpha, (*alpha.shape, 1)), cost), axis=1), xs[t])
        score = ops.add(ops.add(score, _picked(xs[t], ys[t])), ops.getitem(cost, (ys[t - 1][:n], ys[t])))
    total = ops.concat([alpha, *done[::-1]], axis=0)  # sequences that ended first stand last
    losses = ops.sub(logsumexp(total, axis=1), ops.concat([score, *scores[::-1]], axis=0))
    return ops.cast(_reduced(losses, reduce), dtype)


def _picked(x: Variable, y: Array) -> Variable:
    return ops.getitem(x, (get_array_module(y).arange(len(y)), y))


def argmax_crf1d(cost: Operand, xs: Sequence[Operand]) -> tuple[Any, list[Array]]:
    """The best label sequences of :func:`crf1d` (Viterbi 1967).

    Args:
        cost: transition scores, shape (V, V): ``cost[i, j]`` is the score of label j after label i.
        xs: for each step the scores of the labels, shape (N_t, V); N_t never grows, the longest sequences come first.

    Returns:
        The scores of the best sequences, a Variable of shape (N_0,), and a list of int32 arrays (N_t,), one per step.

    Example:
        >>> score, path = F.argmax_crf1d(np.zeros((2, 2)), [np.array([[1.0, 0.0]]), np.array([[0.0, 2.0]])])
        >>> score.array, [step.tolist() for step in path]
        (array([3.]), [[0], [1]])
    """
    cost, xs, dtype = _chain("argmax_crf1d", cost, xs)
    cost = as_array(cost)
    xp = get_array_module(cost)
    alpha = as_array(xs[0])
    back, done = [], []
    for x in xs[1:]:
        n = len(x)
        done.append(alpha[n:])
        through = alpha[:n, :, None] + cost
        back.append(through.argmax(axis=1))
        alpha = through.max(axis=1) + as_array(x)
    # From the end: sequences that are shorter begin where they end.
    label = alpha.argmax(axis=1)
    path = [label]
    score = [alpha.max(axis=1)]
    for choice, ended in zip(back[::-1], done[::-1]):
        before = xp.take_along_axis(choice, label[:, None], axis=1)[:, 0]
        label = xp.concatenate([before, ended.argmax(axis=1)])
        score.append(ended.max(axis=1))
        path.append(label)
    return as_variable(xp.concatenate(score).astype(dtype)), [y.astype(np.int32) for y in path[::-1]]


# ---- connectionist temporal classification --------------------------------------------------------------------------


def connectionist_temporal_classification(
    x: Sequence[Operand], t: Operand, blank_symbol: int, input_length: Operand | None = None,
    label_length: Operand | None = None, reduce: str = "mean",
) -> Variable:  # fmt: skip
    """The negative logarithm of the probability of labels without alignment (Graves et al. 2006).

    Args:
        x: the scores of each step, before softmax, T arrays (B, V).
        t: labels (B, L), without blanks.
        blank_symbol: the number of the blank label.
        input_length, label_length: for each sequence, how many steps and labels count; None for all.
        reduce: 'mean' over sequences, or 'no'.

    Example:
        >>> xs = [np.zeros((1, 2))] * 2  # two steps, one example, the labels blank and 1
        >>> F.connectionist_temporal_classification(xs, np.array([[1]]), 0).array.round(4)
        np.float64(0.2877)
    """
    name = "connectionist_temporal_classification"
    one_of(name, "reduce", ("mean", "no"), reduce)
    xs, _, narrow = _steps(name, "x", x)
    see_scores(name, xs[0])
    batch, size = xs[0].shape
    if any(len(step) != batch for step in xs):
        raise expected(name, "x", f"the same number of sequences, {batch}, in each step", str([len(s) for s in xs]))
    xp = get_array_module(xs[0])
    t = as_array(t)
    if getattr(t, "ndim", None) != 2 or len(t) != batch or t.dtype.kind not in "iu":
        raise expected(name, "t", f"integers of shape ({batch}, L)", t)
    if not 0 <= blank_symbol < size:
        raise expected(name, "blank_symbol", f"a label from 0 to {size - 1}", blank_symbol)
    steps = _lengths(name, "input_length", input_length, batch, len(xs), xp)
    lengths = _lengths(name, "label_length", label_length, batch, t.shape[1], xp)
    counts = xp.arange(t.shape[1]) < lengths[:, None]
    if ((t < 0) | (t >= size) | (t == blank_symbol))[counts].any():
        raise expected(name, "t", f"labels from 0 to {size - 1} without the blank {blank_symbol}", t)
    # Blanks between the labels and around them; a label may follow another one directly unless they are equal.
    path = xp.full((batch, 2 * t.shape[1] + 1), blank_symbol, np.int64)
    path[:, 1::2] = xp.where(counts, t, blank_symbol)
    losses = AlignmentLosses(path, int(blank_symbol), steps, lengths).apply(tuple(xs))[0]
    return ops.cast(_reduced(losses, reduce), narrow)


class AlignmentLosses(FunctionNode):
    """-ln sum over alignments of the product of softmaxes, of T arrays of scores (B, V): the losses (B,)

    Forward adds up from the first step on (alpha of Graves et al. 2006, in logarithms). A place of the path (B, S) is
    reached from itself, from the one before or past a blank, with weights that sum to 1; the gradient goes back along
    these weights, which is the recursion of beta. Higher orders derive the same sum made of primitives.
    """

    def __init__(self, path: Array, blank: int, steps: Array, lengths: Array) -> None:
        xp = get_array_module(path)
        self.path = path
        self.blank = blank
        self.steps = steps
        # The path ends in the last label or in the blank after it; without labels there is one way: blanks.
        self.ends = xp.stack([2 * lengths, xp.maximum(2 * lengths - 1, 0)])
        self.no_label = xp.stack([lengths < 0, lengths == 0])
        self.may_skip = xp.zeros(path.shape, bool)
        self.may_skip[:, 2:] = (path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2])

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs(tuple(range(len(xs))))
        xp, dtype, never = get_array_module(xs[0]), xs[0].dtype, _never(xs[0].dtype)
        scores = xp.stack(xs)
        # What stands beyond a sequence, NaN included, must not reach its steps.
        xp.copyto(scores, 0, where=(xp.arange(len(xs))[:, None] >= self.steps)[..., None])
        batch, size = self.path.shape
        self.log_p = kernels.log_softmax(scores.reshape(-1, scores.shape[2]), 1).reshape(scores.shape)
        rows = xp.arange(batch)
        emitted = xp.maximum(self.log_p[:, rows, self.path.T], dtype.type(never))
        alpha = xp.full((len(xs) + 1, size + 2, batch), never, dtype)  # two places that nothing reaches stand in front
        alpha[0, 2] = 0
        self.weights = xp.empty((len(xs), 3, size, batch), dtype)
        for k, w in enumerate(self.weights):
            w[0] = xp.where(self.may_skip.T, alpha[k, :size], dtype.type(never))
            w[1], w[2] = alpha[k, 1:-1], alpha[k, 2:]
            xp.add(_normalized(w, xp), emitted[k], out=alpha[k + 1, 2:])
        self.last = xp.where(self.no_label, dtype.type(never), alpha[self.steps, self.ends + 2, rows])
        return (-_normalized(self.last, xp),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        if self._on_variables:
            xs = self.retained_inputs()
            return tuple(grad([self.composed(xs)], [xs[i] for i in wanted], list(gys), enable_double_backprop=True))
        xp, gy = get_array_module(self.last), gys[0]
        shares = self.shares(gy, xp)
        gx = xp.exp(self.log_p)
        gx *= shares.sum(axis=1)[:, :, None]
        gx[:, :, self.blank] -= shares[:, ::2].sum(axis=1)
        rows = xp.arange(len(self.path))
        for place in range(1, self.path.shape[1], 2):  # one label of each sequence: no element twice
            gx[:, rows, self.path[:, place]] -= shares[:, place]
        return tuple([gx[i] for i in wanted])

    def shares(self, gy: Array, xp: Module) -> Array:
        """The part of gy (B,) that goes through each place in each step (T, S, B)."""
        size, batch = self.weights.shape[2:]
        g = xp.zeros((len(self.weights) + 1, size + 2, batch), gy.dtype)
        for end, part in zip(self.ends, self.last * gy):
            g[self.steps, end + 2, xp.arange(batch)] += part
        through = xp.empty_like(self.weights[0])
        for k in range(len(self.weights) - 1, -1, -1):
            xp.multiply(self.weights[k], g[k + 1, 2:], out=through)
            for j in range(3):
                here = g[k, j : j + size]
                here += through[j]
        return g[1:, 2:]

    def composed(self, xs: Sequence[Variable]) -> Variable:
        """The losses in primitives."""
        dtype, shape, xp = xs[0].dtype, self.path.shape, get_array_module(self.path)
        rows, never = xp.arange(shape[0])[:, None], _never(dtype)
        # Before the first step nothing is said yet: the end of a sequence without steps.
        alpha: Any = xp.broadcast_to(xp.where(xp.arange(shape[1]) < 1, 0.0, never).astype(dtype), shape)
        losses = alpha
        for k, scores in enumerate(xs):
            emitted = ops.getitem(log_softmax(scores, axis=1), (rows, self.path))
            alpha = ops.add(_merged(alpha, self.may_skip, dtype, xp), emitted)
            losses = ops.where((k < self.steps)[:, None], alpha, losses)  # the last step that counts
        last = ops.where(
            self.no_label.T, xp.full((shape[0], 2), never, dtype), ops.getitem(losses, (rows, self.ends.T))
        )
        return ops.neg(logsumexp(last, axis=1))


def _normalized(logarithms: Array, xp: Module) -> Array:
    """ln sum exp over the first axis; the summands become their parts of the sum."""
    most = logarithms.max(axis=0)
    logarithms -= most
    xp.exp(logarithms, out=logarithms)
    total = logarithms.sum(axis=0)
    logarithms /= total
    return most + xp.log(total)


def _merged(alpha: Operand, may_skip: Array, dtype: DType, xp: Module) -> Variable:
    """The logarithm of the probability to come from the same place, from one before, or past a blank."""
    never = xp.full((alpha.shape[0], 1), _never(dtype), dtype)
    one = ops.concat([never, ops.getitem(alpha, (slice(None), slice(None, -1)))], axis=1)
    two = ops.concat([never, ops.getitem(one, (slice(None), slice(None, -1)))], axis=1)
    two = ops.where(may_skip, two, xp.full(alpha.shape, _never(dtype), dtype))
    three = ops.concat([ops.reshape(a, (*a.shape, 1)) for a in (alpha, one, two)], axis=2)
    return logsumexp(three, axis=2)


def _lengths(name: str, argument: str, lengths: Any, batch: int, most: int, xp: Module) -> Array:
    if lengths is None:
        return xp.full(batch, most, np.int64)
    lengths = xp.asarray(as_array(lengths))
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu" or ((lengths < 0) | (lengths > most)).any():
        raise expected(name, argument, f"{batch} integers from 0 to {most}", lengths)
    return lengths.astype(np.int64)


# ---- large vocabularies ---------------------------------------------------------------------------------------------


def negative_sampling(
    x: Operand, t: Operand, W: Operand, sampler: Callable[[tuple[int, ...]], Array], sample_size: int,
    reduce: str = "sum", *, samples: Operand | None = None, return_samples: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """-log s(x W_t) - sum over samples log s(-x W_s), with s the sigmoid (Mikolov et al. 2013, arXiv:1310.4546).

    Args:
        x: features (N, I).
        t: words (N,); -1 is ignored.
        W: weights (V, I).
        sampler: gives integers of a shape: noise words, such as ``utils.WalkerAlias(counts).sample``.
        sample_size: how many for each example.
        reduce: 'sum', or 'no' for one loss per example.
        samples: t and the noise words (N, ``sample_size`` + 1), t in the first column, instead of drawn ones.
        return_samples: also return these.

    Example:
        >>> W, x, t = np.zeros((4, 2)), np.ones((1, 2)), np.array([0])
        >>> sampler = lambda shape: np.ones(shape, np.int32)
        >>> F.negative_sampling(x, t, W, sampler, 2).array.round(4)
        np.float64(2.0794)
    """
    one_of("negative_sampling", "reduce", ("sum", "no"), reduce)
    x, W = together("negative_sampling", x=x, W=W)
    t = _words("negative_sampling", x, t, W)
    xp, shape = get_array_module(x), (len(x), operator.index(sample_size))
    if samples is None and as_chainer[0]:  # the first column is drawn, too, and replaced
        samples = xp.array(as_array(computed_once(lambda: sampler((shape[0], shape[1] + 1)))))
        samples[:, 0] = t
    elif samples is None:
        samples = xp.concatenate([t[:, None], xp.asarray(as_array(computed_once(lambda: sampler(shape))))], axis=1)
    words = xp.asarray(as_array(samples))
    if words.shape != (shape[0], shape[1] + 1) or words.dtype.kind not in "iu":
        raise expected("negative_sampling", "samples", f"integers of shape {(shape[0], shape[1] + 1)}", words)
    noise = class_numbers("negative_sampling", "samples", words[:, 1:], len(W))
    first = class_numbers("negative_sampling", "samples", words[:, :1], len(W), -1)
    words = xp.concatenate([first, noise], axis=1) if as_chainer[0] else words
    scores = ops.sum(ops.mul(embed_id(xp.maximum(words, 0), W), ops.reshape(x, (len(x), 1, x.shape[1]))), 2)
    signs = xp.where(xp.arange(words.shape[1]) == 0, -1.0, 1.0).astype(x.dtype)
    losses = ops.sum(softplus(ops.mul(scores, signs)), 1)
    losses = ops.where(t >= 0, losses, xp.zeros(losses.shape, losses.dtype))
    losses = _reduced(losses, reduce)
    return (losses, words) if return_samples else losses


def _words(function: str, x: Variable, t: Operand, W: Variable) -> Array:
    t = as_array(t)
    if x.ndim != 2:
        raise expected(function, "x", "shape (N, I)", x)
    if W.ndim != 2 or W.shape[1] != x.shape[1]:
        raise expected(function, "W", f"shape (V, {x.shape[1]}) to match x", W)
    if getattr(t, "shape", None) != x.shape[:1] or t.dtype.kind not in "iu":
        raise expected(function, "t", f"integers of shape {x.shape[:1]}", t)
    if t.size and (int(t.min()) < -1 or int(t.max()) >= len(W)):
        raise expected(function, "t", f"words from 0 to {len(W) - 1}, or -1", t)
    return t


def black_out(x: Operand, t: Operand, W: Operand, samples: Operand, reduce: str = "mean") -> Variable:
    """-log p_t - sum over samples log(1 - p_s), with p the softmax over t and the samples (Ji et al. 2016,
    arXiv:1511.06909).

    Args:
        x: inputs, shape (N, I).
        t: correct words, integers of shape (N,) from 0 to V - 1.
        W: embedding of all words, shape (V, I).
        samples: noise words, integers of shape (N, S).
        reduce: 'mean' over N, or 'no' for one loss per row.

    Raises:
        ValueError: a shape does not match, or a word is not from 0 to V - 1.

    Example:
        >>> loss = F.black_out(np.zeros((1, 2)), np.array([0]), np.zeros((3, 2)), np.array([[1]]))
        >>> loss.array.round(4)
        np.float64(1.3863)
    """
    one_of("black_out", "reduce", ("mean", "no"), reduce)
    x, W = together("black_out", x=x, W=W)
    t = _words("black_out", x, t, W)
    samples = as_array(samples)
    if getattr(samples, "ndim", None) != 2 or len(samples) != len(x) or samples.dtype.kind not in "iu":
        raise expected("black_out", "samples", f"integers of shape ({len(x)}, S)", samples)
    xp = get_array_module(x)
    t, samples = (class_numbers("black_out", n, a, len(W)) for n, a in (("t", t), ("samples", samples)))
    words = xp.concatenate([t[:, None], samples], axis=1)
    scores = ops.sum(ops.mul(embed_id(words, W), ops.reshape(x, (len(x), 1, x.shape[1]))), 2)
    log_p = log_softmax(scores, axis=1)
    # log(1 - p) = log(sum of the other exponentials) - log(sum of all), without cancellation.
    size = words.shape[1]
    others = ops.reshape(scores, (len(x), 1, size))
    masked = ops.where(xp.eye(size, dtype=bool), xp.full((size, size), _never(x.dtype), x.dtype), others)
    log_rest = ops.sub(logsumexp(masked, axis=2), ops.reshape(logsumexp(scores, axis=1), (len(x), 1)))
    first = ops.getitem(log_p, (slice(None), 0))
    rest = ops.sum(ops.getitem(log_rest, (slice(None), slice(1, None))), 1)
    return _reduced(ops.neg(ops.add(first, rest)), reduce)
