"""Tests of dbrdist.functions.blockwise_attention: with blocks as without, against the formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, gradient_check
from dbrdist.functions import blockwise_attention
from tests.each import each
from tests.kernels.provider_helpers import memory_of

RNG = np.random.default_rng(0)
SHAPES = (2, 3, 21, 4), (2, 3, 30, 4), (2, 3, 30, 5)
BOOLEANS = RNG.random((2, 1, 21, 30)) < 0.7
BOOLEANS[0, 0, 5] = False  # a query that sees nothing
NUMBERS = np.where(RNG.random((21, 30)) < 0.2, -np.inf, RNG.standard_normal((21, 30)))
MASKS = {"none": None, "booleans": BOOLEANS, "numbers": NUMBERS}


@pytest.fixture
def in_blocks(monkeypatch):
    """Blocks of 8 queries, at any size."""
    monkeypatch.setattr(blockwise_attention, "_LEAST_SCORES", 1)
    monkeypatch.setattr(blockwise_attention, "_BLOCK_QUERIES", 8)


def operands(dtype="d"):
    rng = np.random.default_rng(1)
    return [Variable(rng.standard_normal(shape).astype(dtype)) for shape in SHAPES]


def formula(q, k, v, mask, is_causal, kept):
    """Attention in a few lines of NumPy, all scores at once."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    seen = np.tri(q.shape[2], k.shape[2], dtype=bool) if is_causal else np.ones(scores.shape, bool)
    if mask is not None:
        seen = seen & (mask if mask.dtype == bool else mask > -np.inf)
        scores = scores + (0 if mask.dtype == bool else np.where(mask > -np.inf, mask, 0))
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(3, keepdims=True)
    return (weights / np.where(total, total, 1) * kept) @ v


@each(name=list(MASKS), is_causal=[False, True], dtype=["f", "d"])
def test_blocks_give_what_the_formula_gives(name, is_causal, dtype, in_blocks):
    mask = MASKS[name]
    mask = mask if mask is None or mask.dtype == bool else mask.astype(dtype)
    xs = operands(dtype)
    y = F.scaled_dot_product_attention(*xs, mask, is_causal=is_causal)
    assert isinstance(y.creator_node, blockwise_attention.Attention)
    expected = formula(*[x.array.astype("d") for x in xs], mask, is_causal, 1.0)
    np.testing.assert_allclose(y.array, expected, atol=1e-6 if dtype == "f" else 1e-14)


@each(name=list(MASKS), is_causal=[False, True], ratio=[0.0, 0.4])
def test_gradients_of_both_orders(name, is_causal, ratio, in_blocks):
    """Whose dropped weights are drawn again at each pass."""

    def attention(*xs):
        dbrdist.random.set_seed(2)
        return F.scaled_dot_product_attention(*xs, MASKS[name], ratio, is_causal)

    xs = [x.array for x in operands()]
    rng = np.random.default_rng(3)
    gy, ggs = rng.standard_normal((2, 3, 21, 5)), [rng.standard_normal(x.shape) for x in xs]
    gradient_check.check_backward(attention, xs, gy, dtype="d", rtol=1e-6, atol=1e-7)
    gradient_check.check_double_backward(attention, xs, gy, ggs, dtype="d", rtol=1e-6, atol=1e-7)


def test_dropped_weights_are_those_of_the_rows_of_the_global_batch(in_blocks):
    """Whatever the blocks, and however the batch is divided."""
    xs = operands()

    def drop(first, last):
        dbrdist.random.set_stream(0, 0, 7, row=first)
        return F.scaled_dot_product_attention(*[x.array[first:last] for x in xs], None, 0.5).array

    whole = drop(0, 2)
    np.testing.assert_array_equal(np.concatenate([drop(0, 1), drop(1, 2)]), whole)
    blockwise_attention._LEAST_SCORES = 1 << 60
    np.testing.assert_allclose(drop(0, 2), whole, rtol=0, atol=1e-14)
    lines = blockwise_attention.Lines(63, 30)
    kept = blockwise_attention.Dropped(lines, np.uint32(1 << 31), 2.0).whole_mask((2, 3, 21, 30), np.dtype("d"))
    assert set(np.unique(kept)) == {0.0, 2.0} and abs(kept.mean() - 1) < 0.05
    assert not (kept[0] == kept[1]).all() and not (kept[0, 0] == kept[0, 1]).all()


@each(dtype=["f"], shape=[((2, 1, 21, 4), (2, 3, 30, 4), (2, 3, 30, 5)), ((21, 4), (30, 4), (30, 5))])
def test_heads_that_broadcast_and_single_heads_are_left_alone(dtype, shape, in_blocks):
    q, k, v = (RNG.standard_normal(s).astype(dtype) for s in shape)
    y = F.scaled_dot_product_attention(q, k, v)
    assert not isinstance(y.creator_node, blockwise_attention.Attention)
    scores = q @ k.swapaxes(-1, -2) / 2
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(y.array, weights @ v, atol=1e-5)


@pytest.mark.slow
def test_memory_grows_with_the_length_not_with_its_square():
    """All scores of 2 heads of 2,048 queries are 32 MiB, and backward needs them several times."""
    qkv = np.random.default_rng(0).standard_normal((3, 1, 2048, 8), np.float32)

    def step():
        xs = [Variable(a) for a in qkv]
        y = F.multi_head_attention(*xs, 2, None, 0.1)
        y.grad = qkv[0]
        y.backward()

    _, peak = memory_of(step)
    assert peak < 40 << 20  # 100 and more with all scores at once


def test_a_mask_that_wants_a_gradient_gets_it(in_blocks):
    xs, bias = operands(), Variable(np.zeros((21, 30)))
    y = F.scaled_dot_product_attention(*xs, bias)
    y.grad = np.ones(y.shape)
    y.backward()
    assert np.abs(bias.grad).max() > 0.01
