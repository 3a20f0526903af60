"""Tests of dbrdist.optimizers.optimizers."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest

import dbrdist
from dbrdist import optimizers
from dbrdist.optimizers import LARS, SGD, AdaDelta, AdaGrad, Adam, AdamW, AMSGrad, MomentumSGD, RMSprop, RMSpropGraves
from tests.each import each
from tests.optimizers.optimizer_formulas import CASES
from tests.optimizers.optimizer_helpers import KINDS_OF_NUMBERS, SHAPES, make, steps_of


@pytest.mark.parametrize("name", [n for n in optimizers.__all__ if hasattr(getattr(optimizers, n), "setup")])
def test_every_argument_arrives_as_a_hyperparameter(name):
    cls = getattr(optimizers, name)
    parameters = inspect.signature(cls).parameters
    given = {k: (not p.default if isinstance(p.default, bool) else p.default * 0.5 + 0.03)
             for k, p in parameters.items()}  # fmt: skip
    assert {k: getattr(cls(**given).hyperparam, k) for k in given} == given
    for i, (k, v) in enumerate(given.items()):  # by position, too
        assert getattr(cls(*list(given.values())[: i + 1]).hyperparam, k) == v


def of_numpy(kind, value):
    """A number as one of NumPy's; others stay what they are."""
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


OPTIMIZERS = [
    optimizers.AdaBound, optimizers.AdaDelta, optimizers.AdaGrad, optimizers.Adam, optimizers.AdamW,
    optimizers.AMSBound, optimizers.AMSGrad, optimizers.CorrectedMomentumSGD,
    optimizers.CorrectedNesterovAG, optimizers.LAMB, LARS,
    optimizers.MSVAG, MomentumSGD, optimizers.NesterovAG, optimizers.RMSprop, optimizers.RMSpropGraves, SGD,
    optimizers.SMORMS3,
]  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
@each(number=list(KINDS_OF_NUMBERS), dtype=["float16", "float32", "float64"])
def test_hyperparameters_may_be_numbers_of_numpy(kind, number, dtype):
    made, plain = kind(), kind()
    for name, value in plain.hyperparam.get_dict().items():
        setattr(made, name, of_numpy(KINDS_OF_NUMBERS[number], value))
        setattr(plain, name, of_numpy(lambda x: float(np.float32(x)) if number == "0-d float32" else x, value))
    for a, b in zip(steps_of(made, dtype), steps_of(plain, dtype), strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b)


def gradients(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape) for shape in shapes]


@pytest.mark.slow
@each(**{"optimizer, formula": CASES, "dtype, tolerance": [(np.float64, 1e-13), (np.float32, 1e-5)]})
def test_optimizer_equals_the_formula_over_eight_steps(optimizer, formula, dtype, tolerance):
    link = make(dtype)
    optimizer = optimizer().setup(link)
    expected = [p.array.astype(np.float64) for p in link.params()]
    states = [{} for _ in expected]
    for t in range(1, 9):
        gs = gradients(t)
        for p, g in zip(link.params(), gs):
            p.grad = g.astype(dtype)
        optimizer.update()
        expected = [formula(w, g.astype(dtype).astype(float), s, t) for w, g, s in zip(expected, gs, states)]
        for p, w in zip(link.params(), expected):
            assert p.dtype == dtype
            np.testing.assert_allclose(p.array, w, rtol=tolerance, atol=tolerance)
    assert optimizer.t == 8


@pytest.mark.slow
@each(**{"optimizer, formula": CASES})
def test_large_parameters_are_updated_piece_by_piece_alike(optimizer, formula):
    shapes = ((300, 250), (7,), (40, 1000))
    link = make(shapes=shapes)
    optimizer = optimizer().setup(link)
    expected = [p.array.copy() for p in link.params()]
    states = [{} for _ in expected]
    for t in (1, 2, 3):
        gs = gradients(t, shapes)
        for p, g in zip(link.params(), gs):
            p.grad = g
        optimizer.update()
        expected = [formula(w, g, s, t) for w, g, s in zip(expected, gs, states)]
    for p, w in zip(link.params(), expected):
        np.testing.assert_allclose(p.array, w, rtol=1e-12, atol=1e-13)


@each(**{"optimizer, formula": CASES})
def test_gradients_are_left_as_they_were(optimizer, formula):
    link = make()
    optimizer = optimizer().setup(link)
    seen = []
    optimizer.add_hook(lambda o: seen.append(o.target.p0.grad.copy()), name="post", timing="post")
    for p, g in zip(link.params(), gradients(1)):
        p.grad = g
    optimizer.update()
    for p, g in zip(link.params(), gradients(1)):
        np.testing.assert_array_equal(p.grad, g)
    np.testing.assert_array_equal(seen[0], gradients(1)[0])


@pytest.mark.slow
@each(optimizer=[case[0] for case in CASES], dtype=["float16", "bfloat16"])
def test_16_bit_parameters_follow_float64_within_their_precision(optimizer, dtype):
    dtype = dbrdist.get_dtype(dtype)
    narrow, wide = make(dtype), make(np.float64)
    pair = [(link, optimizer().setup(link)) for link in (narrow, wide)]
    for p, q in zip(narrow.params(), wide.params()):
        q.array[...] = p.array
    for t in range(3):
        for link, o in pair:
            for p, g in zip(link.params(), gradients(t)):
                p.grad = g.astype(dtype).astype(p.dtype)
            o.update()
    eps = 2.0**-10 if dtype == np.float16 else 2.0**-7
    for p, q in zip(narrow.params(), wide.params()):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.array.astype(np.float64), q.array, rtol=12 * eps, atol=12 * eps)


def _torch():
    try:
        import torch
    except ImportError:
        if os.environ.get("DBRDIST_REQUIRE_TORCH"):
            raise
        pytest.skip("PyTorch is not installed; set DBRDIST_REQUIRE_TORCH=1 to make this fail")
    return torch


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["SGD", "MomentumSGD", "AdamW", "Adam", "AMSGrad", "AdaGrad", "AdaDelta", "RMSprop", "RMSpropGraves"]
)
def test_optimizer_equals_torch(name):
    torch = _torch()
    ours, theirs = {
        "SGD": (SGD(lr=0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
        "MomentumSGD": (MomentumSGD(0.1, 0.9), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
        "Adam": (Adam(alpha=0.01, eps=0.0), lambda ps: torch.optim.Adam(ps, lr=0.01, eps=0.0)),
        "AMSGrad": (
            AMSGrad(alpha=0.01, beta2=0.6, eps=0.0),
            lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.9, 0.6), eps=0.0, amsgrad=True),
        ),
        "AdaGrad": (AdaGrad(lr=0.1, eps=0.01), lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=0.01)),
        "AdaDelta": (AdaDelta(0.8, 1e-3), lambda ps: torch.optim.Adadelta(ps, lr=1.0, rho=0.8, eps=1e-3)),
        "RMSprop": (RMSprop(0.02, 0.8, 0.1), lambda ps: torch.optim.RMSprop(ps, lr=0.02, alpha=0.8, eps=0.1)),
        "RMSpropGraves": (  # torch adds eps to the root
            RMSpropGraves(0.01, 0.8, 0.5, 0.0),
            lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=0.8, eps=0.0, momentum=0.5, centered=True),
        ),
        "AdamW": (  # torch multiplies the decay by the learning rate, eta does not reach alpha's part alone
            AdamW(alpha=0.01, eps=0.0, weight_decay_rate=0.01 * 0.1),
            lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=0.0, weight_decay=0.1),
        ),
    }[name]
    link = make()
    ours.setup(link)
    params = [torch.nn.Parameter(torch.tensor(p.array.copy())) for p in link.params()]
    optimizer = theirs(params)
    for t in range(5):
        for p, q, g in zip(link.params(), params, gradients(t)):
            p.grad, q.grad = g.copy(), torch.tensor(g)
        ours.update()
        optimizer.step()
    for p, q in zip(link.params(), params):
        np.testing.assert_allclose(p.array, q.detach().numpy(), rtol=1e-12, atol=1e-14)
