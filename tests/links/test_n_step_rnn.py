"""Tests of dbrdist.links.n_step_rnn."""

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable

N, I, U = 3, 4, 2
RNG = np.random.default_rng(0)
X = [RNG.standard_normal((N, I)).astype(np.float32) for _ in range(3)]


def close(got, wanted, **more):
    np.testing.assert_allclose(getattr(got, "array", got), wanted, rtol=2e-5, atol=1e-6, **more)


N_STEP = {
    "NStepLSTM": (8, 1, True), "NStepBiLSTM": (8, 2, True), "NStepGRU": (6, 1, False), "NStepBiGRU": (6, 2, False),
    "NStepRNNTanh": (2, 1, False), "NStepBiRNNTanh": (2, 2, False), "NStepRNNReLU": (2, 1, False),
    "NStepBiRNNReLU": (2, 2, False),
}  # fmt: skip


@pytest.mark.parametrize("name", N_STEP)
def test_sequences_in_any_order_are_each_as_if_alone(name):
    num_weights, directions, has_cell = N_STEP[name]
    link = getattr(L, name)(2, I, U, 0.0)
    assert len(link) == 2 * directions and len(link.ws[0]) == len(link.bs[0]) == num_weights
    assert {"/0/w0", f"/{2 * directions - 1}/b{num_weights - 1}"} <= {name for name, _ in link.namedparams()}
    assert link[directions].w0.shape == (U, U * directions) and (link[0].b0.array == 0).all()
    assert link[0].w0.array.any()
    lengths = [2, 0, 4, 1, 4]
    xs = [RNG.standard_normal((n, I)).astype(np.float32) for n in lengths]
    states = [RNG.standard_normal((2 * directions, 5, U)).astype(np.float32) for _ in range(2 if has_cell else 1)]
    *lasts, ys = link(*states, xs)
    for k, x in enumerate(xs):
        assert ys[k].shape == (lengths[k], U * directions)
        alone = link(*[a[:, k : k + 1] for a in states], [x])
        close(ys[k], alone[-1][0].array)
        for last, single, before in zip(lasts, alone, states):
            close(last[:, k], single.array[:, 0])
            if not lengths[k]:
                close(last[:, k], before[:, k])
    zeros = link(*[None] * len(states), xs)
    given = link(*[a * 0 for a in states], xs)
    for a, b in zip(zeros[-1], given[-1]):
        close(a, b.array)


def test_n_step_gradients_reach_all_weights():
    link = L.NStepBiLSTM(2, I, U, 0.0)
    xs = [Variable(RNG.standard_normal((n, I)).astype(np.float32)) for n in (1, 3)]
    _, _, ys = link(None, None, xs)
    F.sum(F.concat(ys, axis=0)).backward()
    assert all(p.grad is not None and p.grad.any() for p in link.params()) and all(x.grad.any() for x in xs)


@pytest.mark.parametrize("call, message", [
    (lambda link: link(None, None, X[0]), r"NStepLSTM: xs: expected a list or tuple of sequences"),
    (lambda link: link(None, None, []), r"NStepLSTM: xs: expected at least one sequence, got none"),
    (lambda link: link(None, None, [X[0], X[0][0]]), r"NStepLSTM: xs\[1\]: expected a sequence, shape \(L, I\), got"),
    (lambda link: link(np.zeros((1, 2, U), "f"), None, X), r"n_step_lstm: hx: expected"),
    (lambda link: link(None, None, [np.ones((2, 9), "f")]), r"n_step_lstm: ws\[0\]\[0\]: expected shape \(2, 9\)"),
])  # fmt: skip
def test_wrong_sequences_are_named(call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call(L.NStepLSTM(1, I, U, 0.0))
    with pytest.raises(TypeError, match="NStepLSTM: unexpected argument 'use_cudnn'"):
        L.NStepLSTM(1, I, U, 0.0, use_cudnn=True)
