"""The first joint step of networks whose losses come from forward passes before it."""

import warnings

import numpy as np
import pytest

from dbrdist import Variable, optimizers
from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.comm import create_multi_node_optimizer, run_threads

X = np.random.default_rng(3).standard_normal((8, 3)).astype("f")


def values(seed):
    return np.random.default_rng(seed).standard_normal((2, 3)).astype("f")


def train(comm, seed, num_steps=3, late=False):
    """Steps whose forward pass runs before the update: (W after them, the optimizer's count, the warnings)."""
    link = L.Linear(None if late else 3, 2, nobias=True, initialW=values(seed(comm.rank)))
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(link), comm)
    mine = X[comm.rank :: comm.size]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            y = link(Variable(mine))
            optimizer.update(lambda y=y: F.sum(F.tanh(y) * F.tanh(y)) / len(mine))
    return link.W.array.copy(), optimizer.t, [w for w in found if "first update" in str(w.message)]


def reference(num_steps):
    """Gradient descent on the mean over all rows of the sum of tanh(W x) squared, in float64."""
    W = values(0).astype(float)
    for _ in range(num_steps):
        y = np.tanh(X.astype(float) @ W.T)
        W -= 0.1 * (2 * y * (1 - y**2)).T @ X / len(X)
    return W


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("late", [False, True])
def test_equal_values_are_no_new_values(num_ranks, late):
    for W, t, warned in run_threads(num_ranks, train, lambda rank: 0, 3, late):
        assert t == 3 and not warned
        np.testing.assert_allclose(W, reference(3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_other_values_on_a_rank_make_the_first_update_a_broadcast(num_ranks):
    found = run_threads(num_ranks, train, lambda rank: rank)
    for W, t, _ in found:
        assert t == 2
        np.testing.assert_allclose(W, reference(2), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(W, found[0][0])


def test_zeros_of_either_sign_and_nan_are_taken_over():
    def body(comm):
        link = L.Linear(2, 1, initialW=np.array([[0.0, np.nan]], "f") * (1 if comm.rank == 0 else -1))
        comm.bcast_data(link)
        return link.W.array.tobytes()

    first, second = run_threads(2, body)
    assert first == second
