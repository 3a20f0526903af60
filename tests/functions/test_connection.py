"""Tests of dbrdist.functions.connection."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array.backend import as_dtype
from dbrdist.errors import UsageWarning
from dbrdist.functions import connection, lean_loss
from tests.each import each


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), ("float64", 1e-13), ("bfloat16", 1e-2), ("float16", 2e-3)]
)
@pytest.mark.parametrize("provider", ["numpy", "onednn"])
def test_large_linear_layers_agree_with_float64(dtype, tolerance, provider):
    """Sizes at which the fastest kernel for products is asked, with rows of x and gy that do not lie densely."""
    dtype = as_dtype(dtype)
    rng = np.random.default_rng(0)
    draw = [rng.standard_normal(shape).astype(dtype) for shape in ((96, 300), (200, 150), (200,), (96, 200))]
    x, W, b, gy = (Variable(a) for a in (draw[0][:, ::2], *draw[1:]))
    with kernels.use(provider):
        y = F.linear(x, W, b)
        y.grad = gy.array
        y.backward()
    x64, W64, b64, gy64 = (v.array.astype(np.float64) for v in (x, W, b, gy))
    pairs = [(y.array, x64 @ W64.T + b64), (x.grad, gy64 @ W64), (W.grad, gy64.T @ x64), (b.grad, gy64.sum(0))]
    for got, expected in pairs:
        assert got.dtype == dtype
        assert np.abs(got.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()


# rows, inputs, outputs: on both sides of the gathered bias (256 elements) and of the kernels; empty ones
SIZES = [(8, 8, 8), (1, 1, 1), (16, 3, 16), (17, 3, 16), (0, 3, 2), (3, 0, 2), (3, 2, 0), (70, 90, 90), (20000, 2, 3)]
TOLERANCE = {np.float32: 2e-4, np.float64: 1e-11}


def _gradients(x, W, b, gy):
    vs = [dbrdist.Variable(a) for a in (x, W, b)]
    y = F.linear(*vs)
    y.grad = gy
    y.backward()
    return y.array, *[v.grad for v in vs]


def test_values_of_all_sizes_types_and_layouts():
    rng = np.random.default_rng(0)
    for dtype, tolerance in TOLERANCE.items():
        for n, k, m in SIZES:
            for turn in (np.ascontiguousarray, np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2]):
                x, W, gy = (turn(rng.standard_normal(s).astype(dtype)) for s in ((n, k), (m, k), (n, m)))
                b = rng.standard_normal(m).astype(dtype)
                want = x @ W.T + b, gy @ W, gy.T @ x, gy.sum(0)
                got = _gradients(x, W, b, gy)
                for g, w in zip(got, want):
                    assert g.dtype == dtype and g.shape == w.shape
                    assert np.allclose(g, w, rtol=tolerance, atol=tolerance * max(n, 1)), (dtype, n, k, m)


def test_types_beside_each_other_have_gradients_of_their_own_type():
    rng = np.random.default_rng(1)
    for kinds in (("f4", "f4", "f8"), ("f8", "f8", "f4"), ("f4", "f8", "f4"), ("f4", "f4", "f2"), (">f4", "f4", "f4")):
        arrays = [rng.standard_normal(s).astype(d) for s, d in zip(((4, 3), (5, 3), (5,)), kinds)]
        x, W, b = [a.astype(float) for a in arrays]
        vs = [dbrdist.Variable(a) for a in arrays]
        y = F.linear(*vs)
        assert np.allclose(y.array.astype(float), x @ W.T + b, atol=1e-2)
        F.sum(y * y).backward()
        gy = 2 * (x @ W.T + b)
        for v, w in zip(vs, (gy @ W, gy.T @ x, gy.sum(0))):
            assert v.grad.dtype == v.array.dtype
            assert np.allclose(v.grad.astype(float), w, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(
    ("shapes", "argument"),
    [(((4, 3), (5, 2), (5,)), "x"), (((4, 3), (5,), (5,)), "W"), (((4, 3), (5, 3), (4,)), "b"),
     (((4, 3), (5, 3), (6,)), "b"), (((4, 3), (5, 3), (1,)), "b"), (((4, 3), (5, 3), (4, 5)), "b")],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused_in_words(shapes, argument):
    with pytest.raises(ValueError, match=rf"linear: {argument}: expected"):
        F.linear(*[np.ones(s, np.float32) for s in shapes])


def test_plans_are_bounded_constant_and_found_again():
    for n in range(1, 200):
        F.linear(np.ones((n, 2), np.float32), np.ones((3, 2), np.float32), np.ones(3, np.float32))
        F.softmax_cross_entropy(np.ones((n, 3), np.float32), np.zeros(n, np.int32))
        assert len(connection._single) <= connection._KEPT_PLANS
        assert len(lean_loss._plans) <= lean_loss._KEPT_PLANS
    index, ones, _ = connection._single[(199, 2), (3, 2)]
    starts, rows, scale, weights = lean_loss._plans[(199, 3), np.dtype(np.float32), (199,), np.dtype(np.int32)]
    for a in (ones, starts, scale, weights, *[i for i in (index, rows) if isinstance(i, np.ndarray)]):
        assert not a.flags.writeable


@pytest.mark.parametrize("n, k", [(0, 4), (1, 0)])
def test_any_number_of_outputs_of_nothing_leaves_other_plans_as_they_are(n, k):
    """A plan's key has room for as many outputs as a small product can have."""
    m = connection._LARGE_PRODUCT + 3
    connection._single.clear()
    y = F.linear(np.zeros((n, k), np.float32), np.zeros((m, k), np.float32), np.ones(m, np.float32))
    assert y.shape == (n, m) and (y.array == 1).all() and not connection._single
    x, gy = np.array([[0, 1], [3, 4]], np.float32), np.array([[0, 2, 4], [1, 3, 5]], np.float32)
    W, b = gy.T.copy(), np.array([10, 20, 30], np.float32)
    for rows in (1, 2):
        y, gx, gW, gb = _gradients(x[:rows], W, b, gy[:rows])
        assert np.array_equal(y, x[:rows] @ W.T + b) and np.array_equal(gb, gy[:rows].sum(0))
        assert np.array_equal(gx, gy[:rows] @ W) and np.array_equal(gW, gy[:rows].T @ x[:rows])


def test_a_wider_bias_is_summed_in_its_own_type():
    gy = np.array([[1.0], [1e-8]], np.float32)  # one in float32
    x, W = np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)
    assert _gradients(x, W, np.zeros(1), gy)[3] == pytest.approx(1 + 1e-8, abs=1e-12)


def test_a_gradient_of_another_type_reaches_flat_memory():
    link = dbrdist.links.Linear(3, 2)
    dbrdist.optimizers.SGD().setup(link)
    x, gy = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(8.0).reshape(4, 2)
    dbrdist.backward([link(x)], [gy])
    assert np.allclose(link.W.grad, gy.T @ x) and np.allclose(link.b.grad, gy.sum(0))
    assert link.W.grad.dtype == link.b.grad.dtype == np.float32


@each(
    **{
        "rows, inputs, outputs, is_small": [
            (1, 1, 1, True),
            (1, connection._LARGE_PRODUCT - 1, 1, True),
            (1, connection._LARGE_PRODUCT, 1, False),
            (1, 1, connection._LARGE_PRODUCT, False),
            (connection._KEPT_ROWS, 1, 1, True),
            (connection._KEPT_ROWS + 1, 1, 1, False),
            (0, 1, 1, False),
            (1, 0, 1, False),
            (1, 1, 0, False),
        ]
    }
)
def test_products_of_few_numbers_have_a_plan(rows, inputs, outputs, is_small):
    x, W = dbrdist.Variable(np.ones((rows, inputs))), np.ones((outputs, inputs))
    plan = F.linear(x, W).creator._for_rule
    assert (plan is not None) == is_small
    if is_small:
        assert plan[1].tolist() == [1] * rows and plan[2] == (outputs,)


def test_onehot_rows_are_no_ids():
    W = np.ones((5, 2), "f")
    onehot = np.eye(5, dtype="i")[[3, 1, 1]]
    for ids in (onehot, onehot.astype("u1"), onehot.reshape(3, 1, 5)):
        with pytest.warns(UsageWarning, match=r"embed_id: x: these look like one-hot rows.*write x\.argmax"):
            F.embed_id(ids, W)
    sequences = np.array([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]])
    for ids in (sequences, onehot[0], onehot[:1], onehot[:, :4], onehot * 4, onehot.argmax(1)):  # warnings are errors
        F.embed_id(ids, W)
    F.embed_id(np.eye(3, dtype="i"), np.ones((3, 2), "f"))  # of so few ids they may be sequences
    F.embed_id(onehot[:0], W)
    F.embed_id(np.eye(5, dtype="i")[[0, 0, 0]], W)  # sequences of one id, and padding
