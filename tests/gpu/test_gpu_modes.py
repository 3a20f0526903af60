"""On the device as on the host: forward mode, mixed precision, recurrent links, distributions, hooks of functions."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
from support import is_on, put

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, distributions, function_hooks, optimizers
from dbrdist.core.array import random
from dbrdist.core.array.backend import as_dtype, get_device, to_cpu
from tests.each import each
from tests.functions.cases import every_case

HOST = get_device("@numpy")


@every_case
@each(shapes=lambda case: case.shapes)
def test_forward_mode(case, shapes, device):
    """Every operation, in float64."""
    xs = case.inputs(shapes)
    rng = np.random.default_rng(5)
    tangents = [rng.uniform(-1.0, 1.0, x.shape) for x in xs]
    results = [
        dbrdist.jvp(case.function, *[list(map(place.send, a)) for a in (xs, tangents)]) for place in (device, HOST)
    ]
    for there, here in zip(*results, strict=True):
        for a, b in zip(*([v] if isinstance(v, Variable) else list(v) for v in (there, here)), strict=True):
            assert is_on(device, a.array) and a.dtype == b.dtype
            np.testing.assert_allclose(to_cpu(a.array), b.array, rtol=1e-6, atol=1e-8)


# ---- training


def net():
    return dbrdist.Sequential(
        L.Convolution2D(None, 8, 3, pad=1), L.BatchNormalization(8), F.relu, lambda h: F.max_pooling_2d(h, 2),
        L.Linear(None, 16), F.relu, L.Linear(16, 4),
    )  # fmt: skip


def losses(place, dtype, scaling=False):
    """Of ten steps on equal data."""
    random.set_seed(0)
    rng = np.random.default_rng(3)
    narrow = {dbrdist.mixed16: "float16", dbrdist.mixedbf16: "bfloat16"}.get(dtype, "float32")
    x = place.send(rng.standard_normal((8, 3, 8, 8)).astype(as_dtype(narrow)))
    t = place.send(np.arange(8, dtype=np.int32) % 4)
    with dbrdist.using_config("dtype", dtype):
        model = net().to_device(place)
        optimizer = optimizers.MomentumSGD(0.05).setup(model)
        if scaling:
            optimizer.loss_scaling(interval=3)
        found = []
        for _ in range(10):
            loss = F.softmax_cross_entropy(model(x), t)
            model.cleargrads()
            loss.backward(loss_scale=optimizer._loss_scale)
            optimizer.update()
            found.append(float(to_cpu(loss.array)))
    assert all(is_on(place, p.array) and p.array.dtype == np.float32 for p in model.params())
    return found


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("kind", [dbrdist.mixed16, dbrdist.mixedbf16])
def test_mixed_precision(kind, scaling, device):
    """float32 parameters, 16-bit activations, also with a loss scale that adapts itself."""
    found = losses(device, kind, scaling)
    np.testing.assert_allclose(found, losses(HOST, np.float32), rtol=0.05, atol=0.03)
    assert found[-1] < found[0] / 2


# ---- recurrent links

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
SEQUENCES = [X, X[:3], X[1:2]]
STATEFUL = {
    "LSTM": lambda: L.LSTM(4, 3), "StatefulGRU": lambda: L.StatefulGRU(4, 3),
    "StatefulMGU": lambda: L.StatefulMGU(4, 3),
    "StatefulPeepholeLSTM": lambda: L.StatefulPeepholeLSTM(4, 3),
    "StatefulZoneoutLSTM": lambda: L.StatefulZoneoutLSTM(4, 3),
}  # fmt: skip
OF_SEQUENCES = {
    "NStepLSTM": lambda: L.NStepLSTM(2, 4, 3, 0.0), "NStepBiLSTM": lambda: L.NStepBiLSTM(1, 4, 3, 0.3),
    "NStepGRU": lambda: L.NStepGRU(2, 4, 3, 0.2), "NStepBiGRU": lambda: L.NStepBiGRU(1, 4, 3, 0.0),
    "NStepRNNTanh": lambda: L.NStepRNNTanh(1, 4, 3, 0.0), "NStepRNNReLU": lambda: L.NStepRNNReLU(1, 4, 3, 0.0),
}  # fmt: skip


def stepped(link, place):
    """Two steps of a link that remembers: the output and all gradients."""
    random.set_seed(3)
    x = place.send(X)
    link(x)
    return gradients(link, F.sum(link(x * 0.5) ** 2))


def of_sequences(link, place):
    random.set_seed(3)
    states = (None,) * (2 if "LSTM" in type(link).__name__ else 1)
    *hidden, ys = link(*states, [place.send(x) for x in SEQUENCES])
    return gradients(link, sum((F.sum(y * y) for y in (*hidden, *ys)), Variable(place.send(np.zeros((), "f")))))


def gradients(link, loss):
    link.cleargrads()
    loss.backward()
    return [to_cpu(a) for a in (loss.array, *(p.grad for p in link.params()))]


@each(name=(*STATEFUL, *OF_SEQUENCES))
def test_recurrent_links(name, device):
    run = stepped if name in STATEFUL else of_sequences
    link = {**STATEFUL, **OF_SEQUENCES}[name]()
    there = copy.deepcopy(link).to_device(device)
    for a, b in zip(run(there, device), run(link, HOST), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- distributions

D = distributions
LOC, SCALE, P = (np.array(v, np.float32) for v in ([0.3, -1.2, 2.0], [0.7, 1.5, 2.5], [0.2, 0.5, 0.3]))
MATRIX = np.tril(np.arange(9, dtype=np.float32).reshape(3, 3) / 9 + np.eye(3, dtype=np.float32))
MADE = {
    "Normal": (D.Normal, (LOC, SCALE), LOC), "Laplace": (D.Laplace, (LOC, SCALE), LOC),
    "Cauchy": (D.Cauchy, (LOC, SCALE), LOC), "Gumbel": (D.Gumbel, (LOC, SCALE), LOC),
    "LogNormal": (D.LogNormal, (LOC, SCALE), SCALE), "Exponential": (D.Exponential, (SCALE,), SCALE),
    "Gamma": (D.Gamma, (SCALE, SCALE), SCALE), "Beta": (D.Beta, (SCALE, SCALE), P),
    "Pareto": (D.Pareto, (SCALE, SCALE + 2), SCALE + 3), "Bernoulli": (D.Bernoulli, (P,), np.float32([0, 1, 1])),
    "Geometric": (D.Geometric, (P,), np.float32([1, 2, 5])), "Poisson": (D.Poisson, (SCALE,), np.float32([0, 2, 5])),
    "Categorical": (D.Categorical, (P,), np.array([0, 2], np.int32)),
    "Dirichlet": (D.Dirichlet, (SCALE,), P),
    "MultivariateNormal": (lambda m, s: D.MultivariateNormal(loc=m, scale_tril=s), (LOC, MATRIX), LOC),
}  # fmt: skip


@each(name=MADE)
def test_distributions(name, device):
    """Densities, their gradients, moments and entropies are the host's; samples lie on the device."""
    make, parameters, x = MADE[name]
    needs_scipy = {"Gamma", "Beta", "Dirichlet", "Poisson", "MultivariateNormal", "LogNormal", "Normal"}
    if name in needs_scipy:
        pytest.importorskip("scipy")
    found = []
    for place in (device, HOST):
        random.set_seed(1)
        variables = [Variable(place.send(a)) for a in parameters]
        d = make(*variables)
        density = d.log_prob(place.send(x))
        F.sum(density).backward()
        assert is_on(place, d.sample(4).array)
        further = [getattr(d, key) for key in ("entropy", "mean") if name not in ("Cauchy", "Poisson", "Categorical")]
        found.append([to_cpu(a) for a in (density.array, *(v.grad for v in variables), *(v.array for v in further))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- hooks of functions


@pytest.fixture
def cuda_alone(on):
    if on != "cupy":
        pytest.skip("watches CuPy's memory and NVIDIA's ranges")


def test_memory_profile(cuda_alone, device, xp):
    """A function that makes an array of 4 MB takes so much from the pool."""
    x = Variable(xp.ones((1024, 1024), np.float32))
    with function_hooks.CupyMemoryProfileHook() as hook:
        F.sum(F.exp(x)).backward()
    row = hook.summary()["exp"]
    assert row["occurrence"] == 2 and row["used_bytes"] >= 4 << 20
    assert hook.total_used_bytes() >= row["used_bytes"]
    text = io.StringIO()
    hook.print_report(file=text)
    assert "exp" in text.getvalue()


def test_ranges_of_the_profiler(cuda_alone, device, xp):
    x = Variable(xp.ones(3, np.float32))
    with function_hooks.CUDAProfileHook():
        F.sum(F.exp(x)).backward()
    assert x.grad is not None


def test_timer(cuda_alone, device):
    """Events of the device: each function once forward and once backward."""
    x = Variable(put(device, np.ones(3, np.float32)))
    with function_hooks.TimerHook() as hook:
        F.sum(F.exp(x)).backward()
    assert hook.summary()["exp"]["occurrence"] == 2
