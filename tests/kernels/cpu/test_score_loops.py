"""Tests of score_loops.h: cross entropies of large batches against float64; what is not finite, against NumPy's way."""

import os
import subprocess
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

SHAPES = [(900, 10), (513, 16), (300, 33), (200, 63), (150, 64), (100, 100), (40, 1000), (4100, 2)]


def scores(shape):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 5).astype("f")
    return x, rng.integers(0, shape[1], shape[0]), rng.dirichlet(np.ones(shape[1]), shape[0]).astype("f")


def step(call, x):
    """The losses of rows, and the gradient of their sum with weights."""
    v = dbrdist.Variable(x)
    y = call(v)
    dbrdist.backward([y], [np.linspace(-1, 2, y.size).astype(y.dtype).reshape(y.shape)])
    return y.array, v.grad


def entropy(x, q):
    """Of rows in float64: the losses and the gradient of each."""
    x, q = x.astype(np.float64), q.astype(np.float64)
    below = x - x.max(1, keepdims=True)
    logs = below - np.log(np.exp(below).sum(1, keepdims=True))
    return -(q * logs).sum(1), np.exp(logs) * q.sum(1, keepdims=True) - q


@compiled
@each(shape=SHAPES, smoothing=[0.0, 0.1])
def test_losses_of_labels_are_near_those_of_float64(shape, smoothing):
    x, t, _ = scores(shape)
    t[::7] = -1
    name = "cross_entropy"
    assert kernels.provider_of("of_rows", name, (x, t.astype("f")), (shape[1],)) == "loops"
    found = step(lambda v: F.softmax_cross_entropy(v, t, reduce="no", label_smoothing=smoothing), x)
    q = np.eye(shape[1])[t] * (1 - smoothing) + smoothing / shape[1]
    losses, slopes = entropy(x, q)
    is_valid = t >= 0
    np.testing.assert_allclose(found[0], np.where(is_valid, losses, 0), rtol=2e-6, atol=2e-6)
    wanted = slopes * np.where(is_valid, np.linspace(-1, 2, shape[0]), 0)[:, None]
    np.testing.assert_allclose(found[1], wanted, rtol=1e-5, atol=5e-7)


@compiled
@each(**{"dtype, num_classes, options, is_by_loop": [
    ("f", 10, {}, True), ("f", 10, {"label_smoothing": 0.1}, True), ("f", 10, {"class_weight": np.ones(10, "f")}, True),
    ("d", 10, {}, False), ("f", 10, {"label_smoothing": 0.1, "class_weight": np.ones(10, "f")}, False),
]})  # fmt: skip
def test_losses_of_float32_take_the_loop(dtype, num_classes, options, is_by_loop, monkeypatch):
    called, of_rows = [], kernels.of_rows

    def watched(name, *arguments):
        made = of_rows(name, *arguments)
        called.append((name, made is not None))
        return made

    x, t, _ = scores((900, num_classes))
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "of_rows", watched)
        step(lambda v: F.softmax_cross_entropy(v, t, reduce="no", **options), x.astype(dtype))
    names = "cross_entropy", "cross_entropy_gradient"
    assert [entry for entry in called if entry[0] in names] == [(name, True) for name in names if is_by_loop]


@compiled
@each(shape=SHAPES)
def test_losses_of_weighted_labels_are_near_those_of_float64(shape):
    x, t, _ = scores(shape)
    weight = np.linspace(0, 2, shape[1]).astype("f")
    found = step(lambda v: F.softmax_cross_entropy(v, t, reduce="no", class_weight=weight), x)
    losses, slopes = entropy(x, np.eye(shape[1])[t] * weight)
    np.testing.assert_allclose(found[0], losses, rtol=2e-6, atol=4e-6)
    np.testing.assert_allclose(found[1], slopes * np.linspace(-1, 2, shape[0])[:, None], rtol=1e-5, atol=1e-6)


@compiled
@each(shape=SHAPES)
def test_losses_of_probabilities_are_near_those_of_float64(shape):
    x, _, q = scores(shape)
    q[::3, 0] = 0
    found = step(lambda v: F.softmax_cross_entropy(v, q, reduce="no"), x)
    losses, slopes = entropy(x, q)
    np.testing.assert_allclose(found[0], losses, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found[1], slopes * np.linspace(-1, 2, shape[0])[:, None], rtol=1e-5, atol=1e-6)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(shape=SHAPES)
def test_what_is_not_finite_gives_what_numpys_way_gives(shape):
    """In its row alone: at a label and beside it, a whole row of it, and where nothing is expected."""
    x, t, q = scores(shape)
    for row, value in enumerate([np.nan, np.inf, -np.inf, 3e38, -3e38]):
        x[row, t[row]] = value
        x[row + 5, t[row + 5] - 1] = value
        x[row + 10 :: 100] = value if shape[0] > 100 else x[row + 10 :: 100]
    x[-1] = -np.inf
    x[-2, 0], q[-2, 0] = -np.inf, 0
    ways = {
        "labels": lambda v: F.softmax_cross_entropy(v, t, reduce="no"),
        "smoothed": lambda v: F.softmax_cross_entropy(v, t, reduce="no", label_smoothing=0.1),
        "probabilities": lambda v: F.softmax_cross_entropy(v, q, reduce="no"),
    }
    for name, call in ways.items():
        found = step(call, x)
        with kernels.use("columns"):
            wanted = step(call, x)
        for a, b in zip(found, wanted):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=name)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6, err_msg=name)


@compiled
@each(shape=SHAPES, gap=[12.0, 20.0, 60.0])
def test_losses_near_0_keep_their_digits(shape, gap):
    x, t = np.zeros(shape, "f"), np.zeros(shape[0], "i")
    x[:, 1:] = -np.linspace(gap, gap + 1, shape[1] - 1)
    wanted = np.log1p(np.exp(x[0, 1:].astype("d")).sum())
    for targets in (t, np.eye(shape[1], dtype="f")[t]):
        found = F.softmax_cross_entropy(x, targets, reduce="no").array
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


@compiled
def test_a_label_that_is_no_class_reads_and_writes_nothing():
    x, t, _ = scores((900, 10))
    bad = t.astype("f")
    bad[:4] = -1, 10, np.nan, 3e9
    _, _, at, _ = kernels.of_rows("cross_entropy", (x, bad), 10)
    assert np.isnan(at[:4]).all() and np.isfinite(at[4:]).all()
    row = np.ones(900, "f")
    (gx,) = kernels.of_rows("cross_entropy_gradient", (x, row, row, row, bad, row), 10)
    np.testing.assert_allclose(gx[:40], np.exp(x[:4].ravel() - 1) - 1, rtol=1e-6, atol=1e-6)


@compiled
def test_second_derivatives_are_those_without_a_loop():
    x, t, q = scores((300, 33))
    for call in (lambda v: F.softmax_cross_entropy(v, t), lambda v: F.softmax_cross_entropy(v, q)):
        made = []
        for names in (None, ("columns",)):
            with kernels.use(*names) if names else kernels.use("loops", "columns", "onednn"):
                v = dbrdist.Variable(x)
                (g,) = dbrdist.grad([call(v)], [v], enable_double_backprop=True)
                made.append(dbrdist.grad([F.sum(g * g)], [v])[0].array)
        np.testing.assert_allclose(made[0], made[1], rtol=2e-4, atol=1e-9)


THREADS = """
import numpy as np, dbrdist, dbrdist.functions as F
rng = np.random.default_rng(0)
t, u = rng.integers(0, 10, 40_001), rng.integers(0, 1000, 401)
for shape, labels in (((40_001, 10), t), ((401, 1000), u)):
    x = rng.standard_normal(shape).astype("f")
    q = rng.dirichlet(np.ones(shape[1]), shape[0]).astype("f")
    for call in (
        lambda v: F.softmax_cross_entropy(v, labels, label_smoothing=0.1), lambda v: F.softmax_cross_entropy(v, q),
        lambda v: F.sum(F.cast(v, "float16")), lambda v: F.sum(F.cumsum(F.reshape(v, (-1, 10 * shape[1])), 0) ** 2),
    ):
        v = dbrdist.Variable(x[: len(x) // 10 * 10])
        labels, q = labels[: len(v)], q[: len(v)]
        y = call(v)
        y.backward()
        print(y.array.tobytes().hex(), __import__("hashlib").md5(v.grad.tobytes()).hexdigest())
"""


@compiled
@pytest.mark.programs
def test_the_number_of_threads_changes_no_bit():
    found = set()
    for count in "1234":
        env = {**os.environ, "OMP_NUM_THREADS": count}
        found.add(subprocess.run([sys.executable, "-c", THREADS], env=env, check=True, capture_output=True).stdout)
    assert len(found) == 1
