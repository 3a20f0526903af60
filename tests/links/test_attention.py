"""Attention, RMSNorm and the Transformer block: their formulas, what they refuse, chance, and PyTorch's layer."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, serializers
from tests.each import each
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((3, 5, 8)).astype("f")
MEMORY = np.random.default_rng(1).standard_normal((3, 4, 8)).astype("f")
MASK = (np.arange(15) * 7 % 5 > 1).reshape(3, 1, 5) | np.eye(5, dtype=bool)


def wide(a):
    return np.asarray(getattr(a, "array", a), np.float64)


def mapped(link, x):
    return wide(x) @ wide(link.W).T + (0 if link.b is None else wide(link.b))


def attended(link, q, k, v, **options):
    heads = R.multi_head_attention(
        mapped(link.query, q), mapped(link.key, k), mapped(link.value, v), link.n_heads, **options
    )
    return mapped(link.out, heads)


def close(y, expected):
    np.testing.assert_allclose(y.array, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_attention_by_its_formula():
    link = L.MultiHeadAttention(8, 2, initial_bias=0.3)
    close(link(X), attended(link, X, X, X))
    close(link(X, mask=MASK, is_causal=True), attended(link, X, X, X, mask=MASK, is_causal=True))
    close(link(X, MEMORY), attended(link, X, MEMORY, MEMORY))
    close(link(X, MEMORY, 2 * MEMORY), attended(link, X, MEMORY, 2 * MEMORY))
    link = L.MultiHeadAttention(8, 4, nobias=True, initialW=0.1)
    assert link.out.b is None
    close(link(X), attended(link, X, X, X))


def test_rms_norm_by_its_formula():
    for link in (L.RMSNormalization(8, 0.5, np.arange(1.0, 9)), L.RMSNormalization(initial_gamma=2)):
        close(
            link(X),
            R.rms_normalization(wide(X), wide(link.gamma) if link.gamma.is_initialized else 2 * np.ones(8), link.eps),
        )
    assert link.gamma.shape == (8,)


@each(norm_first=[True, False], options=[{}, {"n_hidden": 6, "activation": F.gelu, "eps": 0.1, "nobias": True}])
def test_the_block_by_its_formula(norm_first, options):
    block = L.TransformerBlock(8, 2, norm_first=norm_first, dropout=0.0, **options)
    activation = R.gelu if "activation" in options else R.relu
    assert block.linear1.W.shape == (options.get("n_hidden", 32), 8)

    def norm(link, h):
        rows = h.reshape(-1, 8)
        return R.layer_normalization(rows, wide(link.gamma), wide(link.beta), options.get("eps", 1e-5)).reshape(h.shape)

    def part1(h):
        return attended(block.attention, h, h, h, mask=MASK, is_causal=True)

    def part2(h):
        return mapped(block.linear2, np.asarray(activation(mapped(block.linear1, h))))

    h = wide(X)
    for link, part in ((block.norm1, part1), (block.norm2, part2)):
        h = h + part(norm(link, h)) if norm_first else norm(link, h + part(h))
    close(block(X, MASK, is_causal=True), h)


def test_a_causal_block_does_not_see_what_comes():
    block = L.TransformerBlock(8, 2, dropout=0.0, norm_first=True)
    y = block(X, is_causal=True).array
    later = X.copy()
    later[:, 3:] += 1
    np.testing.assert_allclose(block(later, is_causal=True).array[:, :3], y[:, :3], rtol=1e-5, atol=1e-6)


def test_dropout_is_of_training_alone():
    block = L.TransformerBlock(8, 2, dropout=0.5)
    assert (block(X).array != block(X).array).any()
    with dbrdist.using_config("train", False):
        np.testing.assert_array_equal(block(X).array, block(X).array)
    q = np.ones((1, 400, 2), np.float32)
    y = F.scaled_dot_product_attention(q, q, np.ones((1, 400, 1), np.float32), dropout_ratio=0.25).array
    assert y.std() > 0
    np.testing.assert_allclose(y.mean(), 1, atol=0.02)
    y = F.multi_head_attention(q, q, q, 2, dropout_ratio=0.25).array
    assert y.std() > 0


def test_a_block_drops_elements_of_both_parts_and_between_the_layers_of_the_second():
    block = L.TransformerBlock(8, 2, 8, dropout=0.5, norm_first=True)
    for link, W, b in ((block.attention.out, 0, 1), (block.linear1, 0, 1), (block.linear2, np.eye(8), 0)):
        link.W.array[...], link.b.array[...] = W, b
    x = np.ones((30, 40, 8), np.float32)
    added = np.round(block(x).array - x, 4)
    values, counts = np.unique(added, return_counts=True)  # 0 or 2, and 0 or 4 where neither of two drops it
    assert values.tolist() == [0, 2, 4, 6]
    np.testing.assert_allclose(counts / added.size, [0.375, 0.375, 0.125, 0.125], atol=0.02)


def test_blocks_see_later_elements_unless_they_are_causal():
    block = L.TransformerBlock(8, 2, dropout=0.0)
    np.testing.assert_array_equal(block(X).array, block(X, None, False).array)
    assert abs(block(X).array - block(X, is_causal=True).array).max() > 0.01


def test_blocks_forget_and_are_saved(tmp_path):
    block = L.TransformerBlock(8, 2, dropout=0.3, norm_first=True)
    found = []
    for call in (block, lambda v: F.forget(block, v)):
        dbrdist.random.set_seed(1)
        x = Variable(X)
        block.cleargrads()
        F.sum(call(x) ** 2).backward()
        found.append([x.grad, *(p.grad for p in block.params())])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    serializers.save_npz(tmp_path / "block.npz", block)
    other = L.TransformerBlock(8, 2, norm_first=True)
    serializers.load_npz(tmp_path / "block.npz", other)
    with dbrdist.using_config("train", False):
        np.testing.assert_array_equal(other(X).array, block(X).array)


WRONG = [
    (lambda: L.MultiHeadAttention(8, 3), "n_heads: expected a divisor of n_units=8, got 3"),
    (lambda: L.TransformerBlock(8, 2)(X[0]), r"x: expected shape \(B, L, E\)"),
    (lambda: F.multi_head_attention(X, X, X, 3), "n_heads: expected a divisor of the width of query"),
    (lambda: F.multi_head_attention(X, X[:2], X, 2), r"key: expected shape \(3, length, width\)"),
    (lambda: F.multi_head_attention(X, X, X, 2, np.ones((2, 5, 5), bool)), "mask: expected a shape that broadcasts"),
    (lambda: F.scaled_dot_product_attention(X, X[..., :4], X), "key: expected rows of 8 numbers"),
    (lambda: F.scaled_dot_product_attention(X, X, MEMORY), "value: expected 5 rows"),
    (lambda: F.scaled_dot_product_attention(X[0, 0], X, X), "query: expected at least 2 axes"),
    (lambda: F.scaled_dot_product_attention(X.astype(int), X, X), "query: expected a floating type"),
    (lambda: F.scaled_dot_product_attention(X, X, X, 3), "mask: expected a shape that broadcasts"),
    (
        lambda: F.scaled_dot_product_attention(X, X, X, dropout_ratio=1.5),
        "ratio: expected a number from 0 to less than 1",
    ),
    (lambda: F.rms_normalization(X, np.ones(3, "f")), r"gamma: expected shape \(8,\)"),
]


@pytest.mark.parametrize("call, message", WRONG)
def test_wrong_arguments_are_refused_in_words(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.torch
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.filterwarnings("ignore:oneDNN is not available", "ignore:enable_nested_tensor is True")
def test_the_block_is_pytorchs_encoder_layer(norm_first, activation):
    """Copied weights; values, and the gradients of x and of all weights, to 1e-9 in float64."""
    torch = pytest.importorskip("torch")
    peer = torch.nn.TransformerEncoderLayer(
        8, 2, 20, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    with dbrdist.using_config("dtype", "float64"):
        block = L.TransformerBlock(8, 2, 20, 0.0, getattr(F, activation), norm_first)
    pairs = [
        *zip((block.attention.query, block.attention.key, block.attention.value), range(3)),
        (block.attention.out, peer.self_attn.out_proj), (block.linear1, peer.linear1), (block.linear2, peer.linear2),
    ]  # fmt: skip
    together = peer.self_attn.in_proj_weight, peer.self_attn.in_proj_bias
    for a in (*together, peer.self_attn.out_proj.bias):
        torch.nn.init.normal_(a)
    for link, theirs in pairs:
        W, b = (
            (t[8 * theirs : 8 * theirs + 8] for t in together)
            if isinstance(theirs, int)
            else (theirs.weight, theirs.bias)
        )
        link.W.array[...], link.b.array[...] = W.detach().numpy(), b.detach().numpy()
    x, t = Variable(X.astype("d")), torch.tensor(X.astype("d"), requires_grad=True)
    gy = np.random.default_rng(2).standard_normal(X.shape)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    y, z = block(x, is_causal=True), peer(t, src_mask=causal)
    np.testing.assert_allclose(y.array, z.detach().numpy(), rtol=1e-9, atol=1e-9)
    y.grad = gy
    y.backward()
    z.backward(torch.from_numpy(gy))
    np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=1e-9, atol=1e-9)
    for link, theirs in pairs:
        gW, gb = (
            (a.grad[8 * theirs : 8 * theirs + 8] for a in together)
            if isinstance(theirs, int)
            else (theirs.weight.grad, theirs.bias.grad)
        )
        np.testing.assert_allclose(link.W.grad, gW.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(link.b.grad, gb.numpy(), rtol=1e-9, atol=1e-9)
    for ours, theirs in ((block.norm1, peer.norm1), (block.norm2, peer.norm2)):
        np.testing.assert_allclose(ours.gamma.grad, theirs.weight.grad.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(ours.beta.grad, theirs.bias.grad.numpy(), rtol=1e-9, atol=1e-9)
