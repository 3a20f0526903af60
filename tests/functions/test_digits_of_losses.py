"""Losses near 0, and slopes near 0, have as many digits as others: against sums in extended precision."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from tests.each import each


def dominated(n, k, gap, dtype):
    """Scores whose first is ``gap`` above the others, which differ; and -ln softmax of the first, in extended type."""
    x = np.zeros((n, k), dtype)
    x[:, 1:] = -np.linspace(gap, gap + 1, k - 1)
    others = np.exp(x[0, 1:].astype(np.longdouble)).sum()
    return x, np.log1p(others)


@pytest.mark.parametrize("provider", ["onednn", "numpy", "loops"])
@pytest.mark.parametrize("size", [(1, 2), (3, 10), (300, 10), (700, 100), (5, 3000)])
@pytest.mark.parametrize("gap", [3.0, 12.0, 20.0, 60.0])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_losses_near_0_keep_their_digits(provider, size, gap, dtype):
    x, wanted = dominated(*size, gap, dtype)
    t = np.zeros(len(x), "i")
    with kernels.use(*([] if provider == "numpy" else [provider])):
        found = {
            "log_softmax": -F.log_softmax(x).array[:, 0],
            "log_softmax of images": -F.log_softmax(x[:, :, None, None]).array[:, 0, 0, 0],
            "log_softmax, last axis": -F.log_softmax(x[None], axis=2).array[0, :, 0],
            "mean loss": F.softmax_cross_entropy(x, t).array,
            "losses": F.softmax_cross_entropy(x, t, reduce="no").array,
            "weighted": F.softmax_cross_entropy(x, t, class_weight=np.ones(x.shape[1], dtype)).array,
            "probabilities": F.softmax_cross_entropy(x, np.eye(x.shape[1], dtype=dtype)[t]).array,
            "logsumexp": F.logsumexp(x, axis=1).array,
            "logsumexp of all": F.logsumexp(x[0]).array,
        }
    for name, values in found.items():
        units = np.abs(values - wanted) / (np.finfo(dtype).eps * wanted)
        assert np.max(units) < 12, (name, float(np.max(units)))


def test_a_row_without_a_dominant_score_is_beside_one_with():
    x = np.float32([[20, 0, 0], [1, 2, 3], [np.nan, 0, 0], [-np.inf, -np.inf, 0], [0, 20, 0]])
    wide = x.astype(np.longdouble)
    with np.errstate(invalid="ignore"):
        below = wide - wide.max(axis=1, keepdims=True)
    others = np.where(below == 0, 0, np.exp(below)).sum(axis=1)
    wanted = np.log1p(others) - below[:, 0]
    for of_rows in (
        lambda x: -F.log_softmax(x).array[:, 0],
        lambda x: F.softmax_cross_entropy(x, np.zeros(len(x), "i"), reduce="no").array,
    ):
        np.testing.assert_allclose(of_rows(x), wanted.astype("d"), rtol=1e-6)
        np.testing.assert_allclose(of_rows(np.repeat(x, 300, 0)), np.repeat(wanted.astype("d"), 300), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("count", [4, 20_000])
def test_slopes_of_binary_cross_entropy_keep_their_digits(dtype, count):
    x = np.resize(np.array([-80, -30, -12, -1, -0.0, 0, 1e-3, 1, 12, 30, 80], dtype), count)
    wide = x.astype(np.longdouble)
    for t in (np.zeros(count, "i"), np.ones(count, "i")):
        wanted = np.where(t == 1, -1 / (1 + np.exp(wide)), 1 / (1 + np.exp(-wide)))
        for loss in (
            lambda v: F.sigmoid_cross_entropy(v, t, reduce="no"),  # noqa: B023
            lambda v: F.bernoulli_nll(t.astype(dtype), v, "no"),  # noqa: B023
        ):
            v = Variable(x)
            F.sum(loss(v)).backward()
            assert np.max(np.abs(v.grad - wanted) / (np.finfo(dtype).eps * np.abs(wanted))) < 8
    v, p = Variable(x), Variable(np.full(count, 0.3, dtype))
    (slope,) = dbrdist.grad([F.bernoulli_nll(p, v, "sum")], [v], enable_double_backprop=True)
    np.testing.assert_allclose(slope.array, 1 / (1 + np.exp(-x)) - 0.3, atol=1e-6)
    F.sum(slope).backward()
    np.testing.assert_allclose(v.grad, np.exp(-abs(x)) / (1 + np.exp(-abs(x))) ** 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(p.grad, -1, rtol=1e-6)


@each(**{"dtype, smoothing, is_weighted, is_by_loop": [
    ("f", 0.0, False, True), ("f", 0.25, False, True), ("f", 0.0, True, True), ("f", 0.25, True, False),
    ("d", 0.0, False, False), ("d", 0.25, True, False),
]})  # fmt: skip
def test_losses_of_labels_are_one_loop_where_it_knows_their_weights(
    monkeypatch, dtype, smoothing, is_weighted, is_by_loop
):
    """Weights of classes with smoothed labels are a sum over all classes."""
    names, of_rows = [], kernels.of_rows
    monkeypatch.setattr(kernels, "of_rows", lambda name, *given: names.append(name) or of_rows(name, *given))
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((64, 10, 5)).astype(dtype), rng.integers(0, 10, (64, 5))
    weight = rng.uniform(0.5, 2, 10).astype(dtype) if is_weighted else None
    loss = F.softmax_cross_entropy(x, t, class_weight=weight, label_smoothing=smoothing, reduce="no", normalize=False)
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    target = np.full(x.shape, smoothing / 10)
    np.put_along_axis(target, t[:, None], 1 - smoothing + smoothing / 10, 1)
    expected = -(target * logs * (1 if weight is None else weight[:, None])).sum(1)
    np.testing.assert_allclose(loss.array, expected, rtol=1e-5 if dtype == "f" else 1e-12)
    assert ("cross_entropy" in names) is is_by_loop
