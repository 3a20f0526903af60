"""Tests of the elementwise loops: losses of several operands, gradients of all at once, broadcast ones, short rows."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.kernels.cpu import loops
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

SHAPE = (100, 200)
LABELS = np.random.default_rng(5).integers(-1, 2, SHAPE)
# By row: the function of its operands, how many there are, and the loop of the gradients.
LOSSES = {
    "linear_interpolate": (F.linear_interpolate, 3, "each"),
    "normal_loss": (lambda x, m, s: F.gaussian_nll(x, m, s, "no"), 3, "each"),
    "laplace_loss": (lambda x, m, s: F.laplace_nll(x, m, s, "no"), 3, "each"),
    "focal": (lambda x: F.sigmoid_focal_loss(x, LABELS, reduce="no"), 1, 0),
}
GRADIENTS = {
    "dense": np.random.default_rng(6).standard_normal(SHAPE),
    "one value": np.broadcast_to(np.float64(0.5), SHAPE),
    "a value for each row": np.broadcast_to(np.arange(100.0)[:, None], SHAPE),
    "a value for each column": np.broadcast_to(np.arange(200.0), SHAPE),
}


def operands(count, dtype):
    rng = np.random.default_rng(4)
    return [rng.uniform(-3, 3, SHAPE).astype(dtype) for _ in range(count)]


def stepped(name, gy, dtype, xs=None):
    """Outputs and gradients, and which loops ran."""
    call, count, _ = LOSSES[name]
    xs = [dbrdist.Variable(x) for x in xs or operands(count, dtype)]
    y = call(*xs)
    y.grad = gy.astype(dtype) if gy.strides[-1] == 8 and gy.strides[0] else np.broadcast_to(_core(gy, dtype), SHAPE)
    y.backward()
    return [y.array, *[x.grad for x in xs]]


def _core(a, dtype):
    """What a broadcast view repeats."""
    return a[tuple(slice(None) if s else slice(1) for s in a.strides)].astype(dtype)


@compiled
@each(name=list(LOSSES), gradient=list(GRADIENTS), dtype=[np.float32, np.float64])
def test_losses_are_near_numpys_in_float64_whichever_way_the_gradient_lies(name, gradient, dtype):
    gy = GRADIENTS[gradient]
    found = stepped(name, gy, dtype)
    with kernels.use("columns"):
        exact = stepped(name, gy, np.float64)
    for a, b in zip(found, exact):
        np.testing.assert_allclose(a, b, rtol=1e-12 if dtype == np.float64 else 2e-6, atol=1e-5 * abs(b).max())
    with kernels.use("columns"):
        plain = stepped(name, gy, dtype)
    if name == "linear_interpolate":
        assert [a.tobytes() for a in found] == [a.tobytes() for a in plain]


@compiled
@each(name=list(LOSSES), gradient=list(GRADIENTS))
def test_gradients_of_all_operands_come_from_one_loop(name, gradient, monkeypatch):
    _, _, place = LOSSES[name]
    ran = []
    run = loops._found.run
    names = {v: k for k, v in loops._PLACES.items()}

    class Recorder:
        ROWS = loops._found.ROWS

        @staticmethod
        def run(number, *rest):
            done = run(number, *rest)
            ran.append((names[number], done))
            return done

    monkeypatch.setattr(loops, "_found", Recorder)
    kernels.table.forget()
    stepped(name, GRADIENTS[gradient], np.float32)
    kernels.table.forget()
    assert (loops.TABLE[name].name, True) in ran
    assert (loops.TABLE[name, place].name, True) in ran


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(LOSSES))
def test_what_is_not_finite_goes_through_losses_as_through_numpy(name):
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 90.0, -90.0, 3e38, -3e38], "f")
    count = LOSSES[name][1]
    xs = [np.resize(np.roll(np.repeat(special, k * 3 + 1), k), SHAPE) for k in range(count)]
    found = stepped(name, GRADIENTS["one value"], np.float32, xs)
    with kernels.use("columns"):
        theirs = stepped(name, GRADIENTS["one value"], np.float32, xs)
    for a, b in zip(found, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-37)


@compiled
@each(name=["linear_interpolate", "normal_loss", "focal"])
def test_second_derivatives_do_not_depend_on_loops(name):
    def second():
        call, count, _ = LOSSES[name]
        xs = [dbrdist.Variable(x) for x in operands(count, np.float32)]
        firsts = dbrdist.grad([F.sum(call(*xs))], xs, enable_double_backprop=True)
        F.sum(sum(F.sum(g * g) for g in firsts)).backward()
        return [x.grad for x in xs]

    ours = second()
    with kernels.use("columns"):
        theirs = second()
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@compiled
def test_operands_that_lie_in_no_row_of_values_are_left_to_numpy():
    """Every second row, rows backwards, and a window: neither dense nor a broadcast row."""
    x = np.random.default_rng(0).standard_normal((200, 400)).astype("f")
    place = loops._PLACES["hard_sigmoid_gradient"]
    dense, out = np.ones((100, 200), "f"), np.empty((100, 200), "f")
    for view in (x[::2, ::2], x[:100, 199::-1], x[5:105, 7:207]):
        assert not loops._found.run(place, False, (out, dense, view), ())
    rows = np.broadcast_to(x[0, 400:0:-2][:199], (100, 199))
    assert not loops._found.run(place, False, (out[:, :199].copy(), dense[:, :199].copy(), rows), ())
    assert not loops._found.run(place, False, (np.broadcast_to(out[:1], (100, 200)), dense, dense), ())
    assert not loops._found.run(place, False, (out, out, dense), ())
    assert loops._found.run(place, False, (out, dense, dense), ())


@compiled
@each(each_=[1, 3, 1000, 1024, 5000], count=[1, 7, 2000])
def test_broadcast_operands_of_all_lengths(each_, count):
    """Values that end within a piece, with it, and beyond it; and repeated as a whole."""
    values = np.random.default_rng(0).standard_normal(count).astype("f")
    view = np.broadcast_to(values[:, None], (3, count, each_))
    x = np.linspace(-4, 4, view.size, dtype="f").reshape(view.shape)
    out, wanted = np.empty_like(x), np.empty_like(x)
    place = loops._PLACES["hard_sigmoid_gradient"]
    assert loops._found.run(place, False, (out, x, view), ())
    assert loops._found.run(place, False, (wanted, x, np.ascontiguousarray(view)), ())
    assert out.tobytes() == wanted.tobytes()


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(n=[1, 2, 3, 10, 16, 31, 32, 63, 64, 65])
def test_softmax_of_short_rows(n):
    """Near the value of float64, whatever rows are beside one; what is not finite stays in its row."""
    rng = np.random.default_rng(n)
    rows = (1 << 13) // n + 37
    x, gy = ((rng.standard_normal((rows, n)) * 5).astype("f") for _ in range(2))
    x[5, 0], x[6, n // 2], x[7], gy[8, n - 1] = np.nan, np.inf, -np.inf, np.nan
    for log in ("", "log_"):
        y = getattr(kernels, log + "softmax")(x, 1)
        gx = getattr(kernels, log + "softmax_backward")(y, gy, 1)
        assert kernels.provider_of(log + "softmax", x, 1) == "loops"
        with kernels.use("numpy"):
            exact = getattr(kernels, log + "softmax")(x.astype("d"), 1)
            slope = getattr(kernels, log + "softmax_backward")(exact, gy.astype("d"), 1)
        np.testing.assert_allclose(y, exact, rtol=4e-7, atol=5e-6 if log else 1e-7)
        np.testing.assert_allclose(gx, slope, rtol=1e-5, atol=1e-5)
        part = getattr(kernels, log + "softmax")(np.ascontiguousarray(x[3 : rows - 2]), 1)
        assert part.tobytes() == y[3 : rows - 2].tobytes()
