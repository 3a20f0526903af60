"""Small products and losses on the host, which keep what their sizes need: values, bad input, kept constants."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist.core import arrays
from dbrdist.functions import connection, lean_loss
from dbrdist.utils import CooMatrix
from tests.each import each

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


def test_a_loss_goes_backward_twice_and_to_the_second_order():
    rng = np.random.default_rng(2)
    x, t = rng.standard_normal((5, 4)), np.array([0, 3, 1, 1, 2])
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    want = (p - np.eye(4)[t]) / 5
    v = dbrdist.Variable(x.copy())
    loss = F.softmax_cross_entropy(v, t)
    for times in (1, 2):
        loss.backward()
        assert np.allclose(v.grad, times * want, atol=1e-12)
    v.cleargrad()
    loss.grad = np.array(3.0)
    loss.backward()
    assert np.allclose(v.grad, 3 * want, atol=1e-12)
    (g,) = dbrdist.grad([loss], [v], enable_double_backprop=True)
    F.sum(g * g).backward()  # v.grad was 3 want
    H = [(np.diag(q) - np.outer(q, q)) / 5 for q in p]
    assert np.allclose(v.grad - 3 * want, [2 * h @ w for h, w in zip(H, want)], atol=1e-12)
    assert loss.array == pytest.approx(-np.log(p[np.arange(5), t]).mean(), abs=1e-12)


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


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_scores_of_the_other_byte_order(dtype):
    x, t = np.log([[1, 3], [4, 1], [1, 1]]).astype(dtype), np.array([0, 0, 1])
    v = dbrdist.Variable(x)
    loss = F.softmax_cross_entropy(v, t)
    loss.backward()
    assert float(loss.array) == pytest.approx(-np.log([1 / 4, 4 / 5, 1 / 2]).mean(), abs=1e-6)
    assert np.allclose(v.grad, np.array([[-3 / 4, 3 / 4], [-1 / 5, 1 / 5], [1 / 2, -1 / 2]]) / 3, atol=1e-6)


def test_what_is_changed_after_the_call_does_not_change_the_loss_or_its_gradient():
    rng = np.random.default_rng(3)
    x, t = rng.standard_normal((5, 4)).astype(np.float32), np.array([0, 3, 1, 1, 2])
    plain, changed = dbrdist.Variable(x.copy()), dbrdist.Variable(x.copy())
    labels = t.copy()
    losses = F.softmax_cross_entropy(plain, t), F.softmax_cross_entropy(changed, labels)
    changed.array[...] = 7
    labels[...] = 0
    for loss in losses:
        loss.backward()
    assert np.array_equal(plain.grad, changed.grad)


def test_a_cut_function_lets_go_of_its_probabilities():
    loss = F.softmax_cross_entropy(dbrdist.Variable(np.ones((2, 3), np.float32)), np.array([0, 1]))
    function = loss.creator
    loss.unchain_backward()
    assert function._for_rule is None


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


@pytest.mark.parametrize(
    "shape, is_lean", [((32, 64), True), ((1, 2048), True), ((1, 2049), False), ((683, 3), False), ((0, 3), False)]
)
def test_losses_of_few_scores_take_the_lean_path(shape, is_lean):
    y = F.softmax_cross_entropy(dbrdist.Variable(np.zeros(shape)), np.zeros(shape[0], int))
    assert isinstance(y.creator_node, lean_loss.MeanCrossEntropy) == is_lean
    assert y.array == pytest.approx(np.log(shape[1]) if shape[0] else 0)


@each(**{"columns, is_by_row": [(2047, False), (2048, True)]}, num_rows=[1, 3])
def test_sparse_rows_with_many_products_are_taken_one_by_one(columns, is_by_row, num_rows, monkeypatch):
    found, scattered = [], arrays.scattered
    monkeypatch.setattr(arrays, "scattered", lambda *xs: found.append(1) or scattered(*xs))
    dense = np.random.default_rng(0).standard_normal((num_rows, columns))
    diagonal = CooMatrix(np.arange(1.0, num_rows + 1), np.arange(num_rows), np.arange(num_rows), (num_rows, num_rows))
    expected = dense * np.arange(1.0, num_rows + 1)[:, None]
    np.testing.assert_array_equal(F.sparse_matmul(diagonal, dense).array, expected)
    assert bool(found) != is_by_row


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
