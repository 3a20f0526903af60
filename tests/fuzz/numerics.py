"""Random programs in one process against NumPy, SciPy and loops in float64.

    python -m tests.fuzz.numerics --cases 1000 --seed 0
    python -m tests.fuzz.numerics --seed 0 --only 137

Record: 20,500 cases of seeds 71000, 81000 and 92000 on 28 November 2026 (12 kinds): none failed.

A case is a function of (seed, number), so that a failure repeats alone. The last line counts cases and failures by
kind; the exit code is 1 where one failed.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, distributions, kernels, link_hooks
from dbrdist.core.tape.elementwise_table import ROWS
from dbrdist.dataset import concat_examples
from dbrdist.optimizers import schedules

sys.path.append(str(Path(__file__).parents[1] / "functions"))
from references.elementwise import OF_OUTPUT, VALUES

from tests.fuzz import numerics_training

TYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", ">f4"]
WIDE = np.longdouble


def batch(rng: Any) -> None:
    """Batches of examples of several types, in any order, padded or not."""
    types = rng.choice(TYPES, rng.integers(1, 5))
    shape = tuple(rng.integers(1, 4, rng.integers(0, 4)))
    examples = [np.asarray(rng.uniform(0, 100, shape)).astype(t) for t in types]
    wanted = np.stack(examples)
    for order in (np.arange(len(types)), rng.permutation(len(types))):
        found = concat_examples([(examples[k], int(k)) for k in order], padding=None if rng.random() < 0.7 else 0)
        assert found[0].dtype.newbyteorder("=") == wanted.dtype.newbyteorder("="), (types, found[0].dtype)
        np.testing.assert_array_equal(found[0], wanted[order])


_OTHERWISE = ("polygamma", "zeta", "erfcx", "pow", "lgamma", "digamma")  # tested elsewhere, at points of their own


def elementwise(rng: Any) -> None:
    """A row, its gradient, and both sides of a threshold."""
    name = str(rng.choice([n for n in VALUES if n in ROWS and n not in _OTHERWISE]))
    row, (function, *derivatives) = ROWS[name], VALUES[name]
    dtype = rng.choice(["f", "d"])
    num = int(rng.choice([7, 100, 1 << 10]))
    x = [rng.choice([-1, 1], num) * 10.0 ** rng.uniform(-4, 1.4, num) for _ in row.args]
    if name in ("log", "log2", "log10", "sqrt", "rsqrt"):
        x = [abs(v) for v in x]
    if name == "log1p":
        x = [np.where(v > -1, v, -1 / (1 - v)) for v in x]
    if name in ("arcsin", "arccos", "arctanh", "erfinv", "ndtri", "erfcinv"):
        x = [v / 26 if name.startswith("arc") or name == "erfinv" else abs(v) / 26 for v in x]
    xs = [v.astype(dtype) for v in x]
    size = int(rng.choice([num, 8191, 8192, 40_000, 300_000], p=[0.4, 0.2, 0.2, 0.1, 0.1]))
    vs = [Variable(np.resize(v, max(size, num))) for v in xs]
    numbers = tuple(row.numbers.values())
    with kernels.use(*(["onednn"] if rng.random() < 0.7 else ["numpy"])):
        y = row.primitive(*vs, *numbers)
        gs = dbrdist.grad([y], vs, [np.ones_like(y.array)])
    wide, h, info = [v.astype(WIDE) for v in xs], WIDE(2) ** -20, np.finfo(dtype)
    exact = tuple(WIDE(v) if isinstance(v, float) else v for v in numbers)
    value = function(*wide, *exact)
    for i, f in enumerate((function, *derivatives)):
        if f is None:  # no gradient goes there
            continue
        wanted, moved = f(*wide, *exact), 0
        for k in range(len(wide)):
            up, down = ([v * (1 + s * h) if j == k else v for j, v in enumerate(wide)] for s in (1, -1))
            moved = moved + abs(f(*up, *exact) - f(*down, *exact)) / (2 * h)
        moved = np.where(np.isfinite(moved), moved, 0)
        more = OF_OUTPUT[name](value) if i and name in OF_OUTPUT else 0
        found = (y if i == 0 else gs[i - 1]).array[:num] if i == 0 or gs[i - 1] is not None else np.zeros(num)
        units = abs(found.astype(WIDE) - wanted) / (info.eps * (abs(wanted) + moved + more) + 256 * info.tiny)
        worst = np.where(abs(wanted) < info.max, np.where(np.isnan(units), np.inf, units), 0).max()
        assert worst < (64 if i else 10), (name, dtype, size, i, float(worst))


def remainders(rng: Any) -> None:
    """Remainders and whole quotients against Python's fractions."""
    dtype = rng.choice(["f", "d", "int32", "int64"])
    if dtype in "fd":
        a, b = (float(np.dtype(dtype).type(rng.normal() * 10.0 ** rng.integers(-8, 9))) for _ in range(2))
    else:
        a, b = int(rng.integers(-(2**31), 2**31)), int(rng.integers(1, 1000))
    if b == 0:
        return
    va, vb = np.array([a], dtype), np.array([b], dtype)
    assert float((Variable(va) % vb).array[0]) == float(np.dtype(dtype).type(float(Fraction(a) % Fraction(b))))
    if dtype in "fd":
        assert float(F.fmod(va, vb).array[0]) == float(np.dtype(dtype).type(math.fmod(a, b)))
    if abs(a / b) < 1e6:
        assert float((Variable(va) // vb).array[0]) == float(Fraction(a) // Fraction(b))


def labels(rng: Any) -> None:
    """Losses refuse labels that are none, wherever they stand."""
    n, k = int(rng.integers(1, 6)), int(rng.integers(2, 7))
    x, t = rng.normal(size=(n, k)).astype("f"), rng.integers(0, k, n)
    losses: list[Callable[[Any], Any]] = [lambda t: F.hinge(x, t), lambda t: F.softmax_cross_entropy(x, t)]
    loss = losses[int(rng.integers(len(losses)))]
    assert np.isfinite(loss(t).array)
    t[int(rng.integers(n))] = int(rng.choice([-5, k, k + 9]))
    try:
        loss(t)
    except ValueError:
        return
    raise AssertionError(f"labels {t} of {k} classes were taken")


def quantiles(rng: Any) -> None:
    """icdf and log_prob against SciPy, with values beyond their ends."""
    from scipy import stats

    loc, scale = float(rng.normal()), float(rng.uniform(0.1, 3))
    ours, theirs = [
        (distributions.Normal(loc, scale), stats.norm(loc, scale)),
        (distributions.Cauchy(loc, scale), stats.cauchy(loc, scale)),
        (distributions.Laplace(loc, scale), stats.laplace(loc, scale)),
        (distributions.Gumbel(loc, scale), stats.gumbel_r(loc, scale)),
        (distributions.Uniform(loc=loc, scale=scale), stats.uniform(loc, scale)),
        (distributions.Exponential(scale), stats.expon(scale=1 / scale)),
        (distributions.Pareto(scale, 2.5), stats.pareto(2.5, scale=scale)),
    ][int(rng.integers(7))]
    p = np.float32(rng.choice([0, 1, -0.1, 1.5, np.nan, rng.random(), 10 ** rng.uniform(-30, 0), 1 - 1e-6]))
    with np.errstate(all="ignore"):
        found, wanted = float(ours.icdf(np.array([p])).array[0]), float(theirs.ppf(float(p)))
        np.testing.assert_allclose(found, np.float32(wanted), rtol=1e-4, atol=1e-5 * scale, err_msg=str((ours, p)))
        x = np.float32(rng.choice([loc - 9 * scale, -1.0, 0.0, loc + rng.normal(), scale + 0.3, 60.0]))
        found, wanted = float(ours.log_prob(np.array([x])).array[0]), float(theirs.logpdf(float(x)))
        edge = {float(np.float32(v)) for v in (loc, loc + scale, scale)}  # rounded, they may lie on either side
        if float(x) not in edge:
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3, err_msg=str((ours, x)))


def pooling(rng: Any) -> None:
    """Maxima, their places and gradients with NaN and minus infinity, against loops."""
    axes = int(rng.integers(1, 4))
    k, s = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    p = int(rng.integers(0, k))
    x = rng.normal(size=(1, 2, *rng.integers(k, k + 4, axes)))
    x[rng.random(x.shape) < 0.6] = rng.choice([np.nan, -np.inf, np.finfo("f").min, 0.0])
    x = x.astype(rng.choice(["f", "d"]))
    v = Variable(x)
    y, at = (F.max_pooling_2d if axes == 2 else F.max_pooling_nd)(v, k, s, p, False, return_indices=True)
    (g,) = dbrdist.grad([y], [v], [np.ones_like(y.array)])
    gx = np.zeros_like(x)
    for place in np.ndindex(*y.shape):
        best = None
        for n, offset in enumerate(np.ndindex(*(k,) * axes)):
            pixel = tuple(i * s + o - p for i, o in zip(place[2:], offset))
            if all(0 <= i < m for i, m in zip(pixel, x.shape[2:])):
                value = x[(*place[:2], *pixel)]
                if best is None or value > best[0] or (value != value and best[0] == best[0]):
                    best = value, n, pixel
        assert best is not None
        assert np.array_equal(y.array[place], best[0], equal_nan=True)
        assert at[place] == best[1]
        gx[(*place[:2], *best[2])] += 1
    np.testing.assert_array_equal(g.array, gx)


UNARY: list[Callable[[Any], Any]] = [F.tanh, F.sigmoid, F.softplus, F.silu, F.mish, lambda a: a * a, F.exp]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a * b, lambda a, b: a + b, lambda a, b: a - b, F.maximum, lambda a, b: F.linear(a, b @ F.transpose(b)),
]  # fmt: skip


def program(rng: Any) -> Callable[..., Any]:
    """A random expression of x, and of Variables from outside, which it may hand on as they are."""
    steps = [(int(rng.integers(len(UNARY) + len(BINARY))), int(rng.integers(99)), int(rng.integers(99)))
             for _ in range(rng.integers(1, 7))]  # fmt: skip
    picks = [int(rng.integers(99)) for _ in range(rng.integers(1, 4))]

    def run(x: Any, outside: list[Any]) -> Any:
        known = [x, *outside]
        for kind, i, j in steps:
            a, b = known[i % len(known)], known[j % len(known)]
            y = UNARY[kind](a) if kind < len(UNARY) else BINARY[kind - len(UNARY)](a, b)
            known.append(F.tanh(y))
        return tuple(known[p % len(known)] for p in picks)

    return run


def forgotten(rng: Any) -> None:
    """Programs within F.forget give what they give without, and gradients those of differences."""
    run, shape = program(rng), (3, 3)
    arrays = [rng.normal(size=shape) for _ in range(3)]
    found = []
    for way in (lambda f, x: f(x), F.forget, lambda f, x: F.forget(lambda a: F.forget(f, a), x)):
        x, *outside = map(Variable, arrays)
        ys = way(lambda a, o=outside: run(a, o), x)
        total: Any = sum(F.sum(y * y * (i + 1.0)) for i, y in enumerate(ys))
        total.backward()
        found.append((total.array, *(np.zeros(shape) if v.grad is None else v.grad for v in (x, *outside))))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            np.testing.assert_allclose(b, a, rtol=1e-8, atol=1e-10)

    def value(x: Any) -> float:
        ys = run(Variable(x), list(map(Variable, arrays[1:])))
        return float(sum(float((y.array**2).sum()) * (i + 1.0) for i, y in enumerate(ys)))

    direction = rng.normal(size=shape)
    slope = (value(arrays[0] + 1e-6 * direction) - value(arrays[0] - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose((found[0][1] * direction).sum(), slope, rtol=1e-4, atol=1e-4)


def periods(rng: Any) -> None:
    """Schedules at parts of an epoch against exact fractions."""
    n, b = int(rng.integers(1, 1000)), int(rng.integers(1, 50))
    every = str(rng.choice(["0.1", "0.2", "0.3", "0.7", "1", "2.5"]))
    schedule = schedules.stairs(1.0, 0.5, float(every))
    for step in rng.integers(0, 200, 20).tolist():
        samples = step * b
        exact = Fraction(samples, n) // Fraction(every)
        if exact < 1000:
            assert schedule(samples // n + samples % n / n) == 0.5**exact, (n, b, every, step)


def threads(rng: Any) -> None:
    """Calls of a link with a hook in several threads: each is that of one thread, and the parameter stays."""
    link = L.Linear(4, 3)
    link.add_hook(link_hooks.SpectralNormalization() if rng.random() < 0.5 else link_hooks.WeightStandardization())
    W, xs = link.W, [rng.normal(size=(2, 4)).astype("f") for _ in range(3)]
    with dbrdist.using_config("train", False):
        wanted = [link(x).array for x in xs]
    found: list[Any] = [None] * 3

    def call(k: int) -> None:
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            for _ in range(20):
                found[k] = link(xs[k]).array

    workers = [threading.Thread(target=call, args=(k,)) for k in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    assert link.W is W
    for a, b in zip(wanted, found):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def _log_softmax(x: Any) -> Any:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def losses(rng: Any) -> None:
    """Losses with labels, weights and labels to be ignored, against their formulas in float64."""
    n, k = int(rng.integers(1, 7)), int(rng.integers(2, 9))
    more = tuple(rng.integers(1, 4, rng.integers(0, 3)))
    dtype = rng.choice(["f", "d"])
    x = (rng.normal(size=(n, k, *more)) * 10.0 ** rng.uniform(-2, 2)).astype(dtype)
    ignored = int(rng.choice([-1, 255, 0]))
    t = np.where(rng.random((n, *more)) < 0.3, ignored, rng.integers(0, k, (n, *more))).astype(rng.choice(["i", "l"]))
    weight = None if rng.random() < 0.5 else rng.uniform(0.1, 2, k).astype(dtype)
    smoothing = float(rng.choice([0, 0.1]))
    reduce = str(rng.choice(["mean", "no"]))
    y = F.softmax_cross_entropy(
        x, t, class_weight=weight, ignore_label=ignored, reduce=reduce, label_smoothing=smoothing
    ).array
    logs = _log_softmax(x.astype("d"))
    q = np.moveaxis(np.eye(k)[np.where(t == ignored, 0, t)], -1, 1) * (1 - smoothing) + smoothing / k
    if weight is not None:
        q = q * weight.reshape(-1, *(1,) * len(more))
    each = np.where(t == ignored, 0, -(q * logs).sum(axis=1))
    wanted = each if reduce == "no" else each.sum() / max((t != ignored).sum(), 1)
    most = 2 * np.finfo(dtype).eps  # of logarithms of what is nearly 1, with weights up to 2
    np.testing.assert_allclose(y, wanted, rtol=2e-5 if dtype == "f" else 1e-12, atol=most)
    two = rng.integers(-1, 2, x.shape)
    found = F.sigmoid_cross_entropy(x, two, reduce="no").array
    wide = x.astype("d")
    wanted = np.where(two == -1, 0, np.maximum(wide, 0) - wide * two + np.log1p(np.exp(-abs(wide))))
    np.testing.assert_allclose(found, wanted, rtol=2e-5 if dtype == "f" else 1e-12, atol=np.finfo(dtype).eps)


def sums(rng: Any) -> None:
    """Sums and means of many numbers against exact ones, in the units in the last place of their type."""
    dtype = rng.choice(["e", "f", "d"])
    shape = [(int(rng.integers(1, 200_000)),), (int(rng.integers(1, 400)), int(rng.integers(1, 400)))][rng.integers(2)]
    x = (rng.normal(size=shape) * 0.1 + rng.choice([0, 0.5])).astype(dtype)
    axis = None if len(shape) == 1 else [None, 0, 1][rng.integers(3)]
    wide = x.astype(WIDE)
    eps = float(np.finfo(dtype).eps)
    for found, wanted, size in (
        (F.sum(x, axis=axis).array, wide.sum(axis=axis), abs(wide).sum(axis=axis)),
        (F.mean(x, axis=axis).array, wide.mean(axis=axis), abs(wide).mean(axis=axis)),
    ):
        if (abs(wanted) < float(np.finfo(dtype).max)).all():
            error = abs(found.astype(WIDE) - wanted) / (eps * size + np.finfo(dtype).tiny)
            assert error.max() < 16, (dtype, shape, axis, float(error.max()))


def _links(rng: Any) -> list[tuple[Any, Any]]:
    images = rng.normal(size=(2, 4, 6, 6)).astype("f")
    rows = rng.normal(size=(3, 4)).astype("f")
    return [
        (L.Linear(4, 3), rows), (L.Linear(None, 3), rows), (L.Convolution2D(4, 3, 3), images), (L.PReLU(), rows),
        (L.Convolution2D(None, 3, 3), images), (L.Deconvolution2D(4, 2, 3), images), (L.Highway(4), rows),
        (L.LayerNormalization(4), rows), (L.GroupNormalization(2), images), (L.Maxout(4, 3, 2), rows),
        (L.Scale(1, (4,)), rows), (L.MLPConvolution2D(4, (3, 2), 1), images), (L.Bias(1, (4,)), rows),
        (L.BatchNormalization(4), images), (L.DepthwiseConvolution2D(4, 2, 3), images),
    ]  # fmt: skip


def stored(rng: Any) -> None:
    """A call stores nothing in its link: attributes stay, and a second call gives the same."""
    links = _links(rng)
    link, x = links[int(rng.integers(len(links)))]
    with dbrdist.using_config("train", bool(rng.random() < 0.5 and not isinstance(link, L.BatchNormalization))):
        first = link(x).array.copy()  # which gives shapes to lazy parameters
        before = {name: id(value) for part in link.links() for name, value in part.__dict__.items()}
        size = len(x) if rng.random() < 0.5 else 1
        np.testing.assert_allclose(link(x[:size]).array, first[:size], rtol=1e-4, atol=1e-5)
        after = {name: id(value) for part in link.links() for name, value in part.__dict__.items()}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"_cleared", "_changed_at"}, (type(link).__name__, changed)


KINDS: tuple[Callable[[Any], None], ...] = (
    batch, elementwise, remainders, labels, quantiles, pooling, forgotten, periods, threads, losses, sums, stored,
    *numerics_training.KINDS,
)  # fmt: skip


def run_case(seed: int, number: int) -> str:
    """Run one case; the name of its kind."""
    kind = KINDS[number % len(KINDS)]
    with np.errstate(all="ignore"):
        kind(np.random.default_rng((seed, number)))
    return kind.__name__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the whole run (default 0)")
    parser.add_argument("--only", type=int, help="the number of the one case to run")
    options = parser.parse_args(arguments)
    failed: Counter[str] = Counter()
    numbers = range(options.cases) if options.only is None else [options.only]
    for number in numbers:
        try:
            run_case(options.seed, number)
        except Exception:
            kind = KINDS[number % len(KINDS)].__name__
            failed[kind] += 1
            print(f"case {number} ({kind}), seed {options.seed}:\n{traceback.format_exc(limit=-2)}", flush=True)
    print(f"{len(numbers)} cases, {failed.total()} failed: {dict(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
