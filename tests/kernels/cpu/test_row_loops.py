"""Tests of row_loops.h, the loops over rows and columns: the bits of NumPy's formulas, and who serves what."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import sums
from dbrdist.core.array.backend import channels_last, is_channels_last
from dbrdist.kernels.cpu import loops
from tests.each import each
from tests.kernels.cpu.test_loops import compiled
from tests.kernels.provider_helpers import draw

SHAPES = [
    (300, 64),
    (12, 1000),
    (3, 9000),
    (1, 9000),
    (9001, 1),
    (5000, 3),
    (2500, 4),
    (1300, 8),
    (40, 16, 20),
    (5, 7, 300),
    (3, 900, 65),
]
FUNCTIONS = {
    "cumsum": lambda x: F.cumsum(x, -1),
    "cumsum of columns": lambda x: F.cumsum(x, 0),
    "cumsum between": lambda x: F.cumsum(x, 1),
    "cumprod": lambda x: F.cumprod(x, -1),
    "cumprod of columns": lambda x: F.cumprod(x, 0),
    "prod": lambda x: F.prod(x, -1),
    "prod of columns": lambda x: F.prod(x, 0),
    "prod of all": F.prod,
    "max": lambda x: F.max(x, -1),
    "min, kept": lambda x: F.min(x, -1, keepdims=True),
    "max of all": F.max,
    "min of two axes": lambda x: F.min(x, tuple(range(1, x.ndim))),
    "crelu": F.crelu,
    "crelu along the last axis": lambda x: F.crelu(x, x.ndim - 1),
    "relu": F.relu,
    "sum": F.sum,
    "sum of rows": lambda x: F.sum(x, -1),
    "sum of columns": lambda x: F.sum(x, 0),
    "sum between, kept": lambda x: F.sum(x, 1, keepdims=True),
    "square root": lambda x: x**0.5,
}


def mixed(shape, among=()):
    """Numbers around 1 and -1, with some others among them."""
    rng = np.random.default_rng(len(shape))
    x = (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1, 1, 1], shape)).astype("f")
    if among:
        flat = x.reshape(-1)
        flat[::97] = np.resize(np.array(among, "f"), flat[::97].shape)
    return x


def step(call, x):
    """The value and the gradient, NaN of one kind."""
    v = dbrdist.Variable(x.copy())
    y = call(v)
    gy = np.random.default_rng(1).standard_normal(y.shape).astype("f")
    dbrdist.backward([y], [gy])
    return [np.where(np.isnan(a), np.float32(np.nan), a) for a in (y.array, v.grad)]


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(FUNCTIONS), shape=SHAPES)
def test_rows_and_columns_have_the_bits_of_numpys_formula(name, shape):
    """Also where there is NaN, infinity, zeros of both signs, ties, and what is too large or small."""
    for among in ((), (0.0,), (np.nan, np.inf, -np.inf, 0.0, 1.0, 1.0, 1e30, -1e-40, 1e-30)):
        x = mixed(shape, among)
        with np.errstate(all="ignore"):
            ours = step(FUNCTIONS[name], x)
            with kernels.use("columns"):
                theirs = step(FUNCTIONS[name], x)
        for a, b in zip(ours, theirs):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert a.tobytes() == np.ascontiguousarray(b).tobytes(), among


LOOPS = [
    "cumsum_of_rows", "cumsum_of_columns", "cumprod_of_rows", "cumprod_of_columns", "prod_of_rows", "prod_of_columns",
    "max_of_rows", "min_of_rows", "crelu", "sum_of_rows", "sum_of_parts", "sum_of_columns",
]  # fmt: skip


@compiled
@each(name=LOOPS)
def test_the_loop_serves_large_arrays_of_float32_in_c_order(name):
    is_column = name.endswith("columns")
    given = [1000, *([40] if is_column else []), *([1] if name.startswith("cum") else [])]
    given += [40] if is_column and not name.startswith("prod") else []  # columns of a matrix
    x = mixed((1000, 40) if name.endswith("columns") else (40, 1000))
    assert kernels.provider_of("of_rows", name, (x,), tuple(given)) == "loops"
    assert kernels.of_rows(name, (x,), *given) is not None
    for other in (x.astype(np.float64), x[:2], x.T, x[:, ::2], x.astype(np.float16)):
        assert kernels.of_rows(name, (other,), *given) is None
    wrong = x[1:] if name.endswith("columns") else x[:, 1:].copy()
    assert kernels.of_rows(name, (wrong,), *given) is None  # no whole number of rows


@compiled
@each(
    shape=[
        (8192,),
        (65_535,),
        (65_537,),
        (1 << 20,),
        (333, 77),
        (77, 1000),
        (3, 70_000),
        (1, 9000),
        (1, 70_000),
        (20_000, 4),
        (2, 3, 5000),
    ]
)
def test_sums_follow_numpys_order(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype("f")
    for axis in (None, *[tuple(range(i, len(shape))) for i in range(1, len(shape))]):
        assert sums._by_loops(x, axis) is not None
        for keepdims in (False, True):
            found, wanted = sums.wide_sum(x, axis, keepdims), x.sum(axis=axis, keepdims=keepdims)
            assert type(found) is type(wanted) and found.shape == wanted.shape
            assert found.tobytes() == wanted.tobytes()
    assert not np.signbit(sums.wide_sum(np.full(10_000, -0.0, "f"), None, False))


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(shape=[(300, 33), (20, 1000), (9, 3, 1024)])
def test_softmax_is_near_the_exact_value(shape):
    """Within 6 units in the last place of the softmax of the rounded differences; NaN and infinity reach their rows."""
    rng = np.random.default_rng(0)
    x, gy = ((rng.standard_normal(shape) * 5).astype("f") for _ in range(2))
    axis, slope = len(shape) - 1, gy.astype(np.float64)
    assert kernels.provider_of("softmax", x, axis) == "loops"
    y = kernels.softmax(x, axis)
    exact = np.exp((x - x.max(axis, keepdims=True)).astype(np.float64))
    exact /= exact.sum(axis, keepdims=True)
    assert (np.abs(y - exact) / np.spacing(exact.astype("f"))).max() < 6
    wanted = exact * (slope - (exact * slope).sum(axis, keepdims=True))
    np.testing.assert_allclose(kernels.softmax_backward(y, gy, axis), wanted, rtol=1e-5, atol=1e-6)
    for place, value in enumerate([np.nan, np.inf, -np.inf]):
        x[place, ..., 3 + place] = value
    x[-1] = -np.inf
    with kernels.use("columns"):
        wanted = kernels.softmax(x, axis)
    np.testing.assert_allclose(kernels.softmax(x, axis), wanted, rtol=1e-6, atol=1e-9)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(shape=[(300, 33), (9000, 1), (5, 40, 100)])
def test_swish_with_a_row_of_factors(shape):
    rng = np.random.default_rng(0)
    x, beta = (rng.standard_normal(shape) * 4).astype("f"), rng.standard_normal(shape[1:]).astype("f")
    beta.reshape(-1)[0] = 0
    gy = rng.standard_normal(shape).astype("f")

    def made(dtype, *names):
        u, b = dbrdist.Variable(x.astype(dtype)), dbrdist.Variable(beta.astype(dtype))
        with kernels.use(*names) if names else contextlib.nullcontext():
            y = F.swish(u, b)
            dbrdist.backward([y], [gy.astype(dtype)])
        return y.array, u.grad, b.grad

    assert kernels.of_rows("swish_rows", (x, beta), beta.size) is not None
    for found, wanted in zip(made(np.float32), made(np.float64)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-4)
    x.reshape(len(x), -1)[:4, 0] = np.nan, np.inf, -np.inf, -200
    for found, wanted in zip(made(np.float32), made(np.float32, "columns")):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-4)


@compiled
@each(name=["max", "prod", "cumprod", "crelu", "swish", "cumsum"])
def test_second_derivatives_after_a_loop_are_numpys(name):
    call = {"crelu": F.crelu, "max": lambda x: F.max(x, -1), "swish": lambda x: F.swish(x, x[0])}.get(
        name, lambda x: getattr(F, name)(x, -1)
    )
    x = np.abs(mixed((3000, 4)))

    def second():
        v = dbrdist.Variable(x)
        (g,) = dbrdist.grad([F.sum(call(v) ** 2)], [v], enable_double_backprop=True)
        (gg,) = dbrdist.grad([F.sum(g * g)], [v])
        return gg.array

    found = second()
    with kernels.use("columns"):
        wanted = second()
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-3)


@compiled
def test_the_result_of_an_input_that_changed_before_backward_is_that_of_the_call():
    """A maximum's gradient goes where the maximum was, as the retained input says."""
    x = dbrdist.Variable(mixed((300, 64)))
    y = F.max(x, 1)
    assert y.creator.y is not None
    where = x.array == y.array[:, None]
    dbrdist.backward([y], [np.ones(300, "f")])
    np.testing.assert_array_equal(x.grad != 0, where)


@compiled
def test_loops_over_rows_refuse_other_sizes():
    run, places = loops._found.run, loops._PLACES
    x, y = np.ones(1000, "f"), np.ones(1000, "f")
    for values in ((0,), (3,), (-1,), (2000,)):
        assert not run(places["softmax"], False, (y, x), values)
    assert run(places["softmax"], False, (y, x), (10,))
    assert not run(places["crelu"], False, (y, x), (10,))
    assert run(places["crelu"], False, (np.ones(2000, "f"), x), (10,))
    assert not run(places["swish_rows"], False, (y, x, np.ones(11, "f")), (10,))
    assert not run(places["prod_of_columns"], False, (np.ones(10, "f"), x), (100, 11))
    assert not run(places["prod_of_columns"], False, (np.ones(10, "f"), x), (100, 0))
    assert not run(places["extremum_backward"], False, (y, x, np.ones(100, "f"), np.ones(99, "f")), (10,))
    with pytest.raises(TypeError, match="expected 2 numbers"):
        run(places["cumsum_of_rows"], False, (y, x), (10,))


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(count=[2, 3, 4, 5, 7, 8], dtype=["f", "d"], place=["new", "over the first", "over the second"])
def test_sums_of_several_arrays_are_added_in_order(count, dtype, place):
    """As one addition after another gives them; into an array that is a later term, nothing is written."""
    rng = np.random.default_rng(0)
    terms = tuple((rng.standard_normal(40_001) * 10.0 ** (k % 3)).astype(dtype) for k in range(count))
    terms[0][:4] = np.nan, np.inf, -0.0, 0.0
    terms[1][:4] = 1, -np.inf, -0.0, -0.0
    wanted = terms[0] + terms[1]
    for term in terms[2:]:
        wanted += term
    out = {"new": np.empty_like(wanted), "over the first": terms[0], "over the second": terms[1]}[place]
    before = terms[1].copy()
    assert kernels.sum_of(terms, out) == (place != "over the second")
    if place == "over the second":
        assert terms[1].tobytes() == before.tobytes()
    else:
        np.testing.assert_array_equal(out, wanted)
        assert (np.signbit(out) == np.signbit(wanted))[2:].all()


THREADS = """
import hashlib, os, sys, threading
import numpy as np
from dbrdist import kernels
from dbrdist.kernels.cpu import loops
rng = np.random.default_rng(0)
n = 320
x = rng.uniform(0.5, 1.5, n * n).astype("f")
sizes = {"x": n * n, "e": n * n, "i": n * n, "v": n, "c": n * n, "t": 2 * n * n, "w": n, "r": n, "m": n, "p": n * 32}
sizes |= {"k": n * 20, "b": 2 * n * n, "q": n * n, "j": n, "s": 4 * n}
pixels = (np.arange(n * n, dtype=np.int32) % (n // 2)).view("f")
def everything():
    said = {}
    for name, place in loops._PLACES.items():
        count, num_numbers = loops._found.ARITIES[name]
        kinds = loops._found.ROWS.get(name, "e" * count)
        of = sizes | {"g": 3 * n if "rectified_sum" in name else n}
        arrays = tuple(np.resize(np.roll(x, 7 * k), of[kind]) for k, kind in enumerate(kinds))
        numbers = ((n, n) if kinds[-1] in "cm" else (n,)) + (1, n) if name in loops._found.ROWS else (0.5,) * 8
        numbers = (n, n, 16, 0.5) if "planes" in name or "groups" in name else numbers
        numbers = (n, 2 * n, 4, 3, 2, 1) if "b" in kinds else (n, n, 4, 2) if "s" in kinds else numbers
        numbers = (n, 3 * n) if "rectified_sum" in name else numbers
        arrays = (*arrays[:-1], pixels) if "q" in kinds else arrays
        arrays = tuple(pixels[:n] if kind == "j" else a for kind, a in zip(kinds, arrays))
        assert loops._found.run(place, False, arrays, numbers[:num_numbers]), name
        said[name] = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
    return said
first = everything()
assert len(first) == len(loops._PLACES)
several = []
threads = [threading.Thread(target=lambda: several.append(everything())) for _ in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
assert several == [first] * 3
try:
    loops._found.run(loops._PLACES["root"], False, (x.copy(), x.copy()), (1, 2, 3))
except TypeError:
    pass
assert everything() == first
child = os.fork()
if not child:
    os._exit(everything() != first)
assert os.waitpid(child, 0)[1] == 0
print(hashlib.sha256(repr(sorted(first.items())).encode()).hexdigest())
"""


@compiled
@pytest.mark.programs
def test_the_number_of_threads_changes_no_bit():
    """Of no loop: with one to three threads, in three Python threads at once, after an error, and after a fork."""
    said = []
    for threads in (1, 2, 3):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        ran = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, timeout=60)
        said.append((ran.stdout, ran.stderr[-500:], ran.returncode))
    assert said[0][2] == 0 and len(said[0][0]) == 65, said[0]
    assert said == [said[0]] * 3


@pytest.fixture
def names(monkeypatch):
    """The names of the loops that sums run, in their order."""
    found, of_rows = [], sums.kernels["of_rows"]
    monkeypatch.setitem(sums.kernels, "of_rows", lambda name, *args: found.append(name) or of_rows(name, *args))
    return found


@compiled
@each(dtype=["f", "d"], **{"axis, loop": [
    ((-1,), "sum_of_rows"), ((1, 2, 3), "sum_of_rows"), ((-1, -2), "sum_of_rows"),
    ((0,), "sum_of_columns"), ((-4,), "sum_of_columns"), ((1, 2), "sum_of_columns"), ((-3, -4), "sum_of_columns"),
    ((0, 2), None), ((-2, 0), None),
]})  # fmt: skip
def test_axes_that_follow_each_other_are_summed_by_one_loop(names, dtype, axis, loop):
    """Axes with others between them are left to NumPy."""
    x = np.random.default_rng(0).uniform(0, 1, (8, 9, 10, 16)).astype(dtype)
    del names[:]
    found = sums.wide_sum(x, axis, False)
    exact = x.astype(np.longdouble).sum(axis)
    assert found.shape == exact.shape and names == [loop] * (loop is not None)
    np.testing.assert_allclose(found, exact.astype(dtype), rtol=32 * np.finfo(dtype).eps)


@compiled
@each(**{"shape, axis, is_by_loop": [
    ((4, 100), (1,), True), ((4, 100), (-1,), True), ((3, 4, 50), (2,), True), ((3, 4, 50), (-1,), True),
    ((4, 100), (0,), False), ((3, 4, 50), (1,), False), ((3, 4, 50), (1, 2), False), ((4, 100), None, False),
    ((100,), (0,), False), ((4, 0), (1,), False), ((), (), False), ((2, (1 << 16) - 1), (1,), True),
    ((2, 1 << 16), (1,), False),
]})  # fmt: skip
def test_sums_of_products_along_the_last_axis_are_one_loop(names, shape, axis, is_by_loop):
    """Rows of 65,536 elements and more are summed by several threads."""
    a, b = np.random.default_rng(0).uniform(0, 1, (2, *shape)).astype("f")
    del names[:]
    found = sums.product_sum(a, b, axis, True)
    assert ("dot_of_rows" in names) is is_by_loop
    exact = (a.astype("d") * b).sum(axis, keepdims=True)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@compiled
@each(shape=[(300, 100), (3, 50, 200), (9000, 1), (40, 1023)])
def test_sums_of_products_have_the_bits_of_sums_over_products(names, shape):
    a, b = np.random.default_rng(0).standard_normal((2, *shape)).astype("f")
    a[2], b[1, 0] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        del names[:]
        found = [sums.product_sum(a, b, (len(shape) - 1,), keep) for keep in (False, True)]
        assert names == ["dot_of_rows"] * 2
        wanted = [sums.sum_over(a * b, (-1,), keep) for keep in (False, True)]
    assert kernels.provider_of("of_rows", "dot_of_rows", (a, b), (shape[-1],)) == "loops"
    for y, exact in zip(found, wanted):
        assert y.shape == exact.shape
        assert np.where(np.isnan(y), 0, y).tobytes() == np.where(np.isnan(exact), 0, exact).tobytes()


@compiled
@each(outer=[1, 3], width=[1, 5, 700], count=[1, 5000], dtype=["f", "d"])
def test_rows_by_number(outer, width, count, dtype):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 30, count)
    rows = rng.standard_normal((outer, 30, width)).astype(dtype)
    picked = np.empty((outer, count, width), dtype)
    assert kernels.pick_rows(rows, numbers, picked, False)
    assert picked.tobytes() == np.take(rows, numbers, 1).tobytes()
    expected = rows.copy()
    np.add.at(expected, (slice(None), numbers), picked)
    assert kernels.pick_rows(rows, numbers, picked, True)
    assert rows.tobytes() == expected.tobytes()


@compiled
def test_rows_that_there_are_not_are_left_to_numpy():
    rows, picked = np.zeros((1, 4, 3), "f"), np.ones((1, 2, 3), "f")
    for numbers in (np.array([0, 4]), np.array([-1, 0])):
        assert not kernels.pick_rows(rows, numbers, picked, True)
        assert not rows.any()
    assert not kernels.pick_rows(rows, np.array([0, 1], "i4"), picked, True)
    assert not kernels.pick_rows(rows[..., ::2], np.array([0, 1]), picked[..., ::2], True)
    rows.flags.writeable = False
    assert not kernels.pick_rows(rows, np.array([0, 1]), picked, True)
    assert kernels.pick_rows(rows, np.array([0, 1]), picked, False)
    assert not picked.any()


@compiled
@each(width=[1, 31, 32, 33, 64, 250], counts=[(1, 3, 2), (0, 1, 3)])
def test_rows_of_bytes_are_filtered(width, counts):
    rng = np.random.default_rng(width)
    pixels, counts = rng.integers(0, 256, (9, width)).astype("B"), np.array(counts)
    first, weights, out = np.array([0, 2, 6]), np.zeros((3, 3), "f"), np.zeros((3, width), "B")
    expected = np.zeros((3, width), int)
    for r, count in enumerate(counts):
        whole = rng.integers(0, (1 << 16) // max(count, 1), count)
        weights[r, :count] = whole / 2.0**16
        exact = sum((w * pixels[first[r] + k].astype(int) for k, w in enumerate(whole)), np.zeros(width, int))
        expected[r] = np.rint(exact / 2.0**16 + 2.0**-16)
    if kernels.filter_rows(pixels, first, counts, weights, out):  # False where the processor lacks AVX2
        np.testing.assert_array_equal(out, expected)


@compiled
def test_rows_of_bytes_that_there_are_not_are_left_to_numpy():
    pixels, weights, out = np.ones((4, 40), "B"), np.ones((2, 2), "f"), np.zeros((2, 40), "B")
    two = np.array([2, 2])
    for first in (np.array([0, 3]), np.array([-1, 0])):
        assert not kernels.filter_rows(pixels, first, two, weights, out)
    zero = np.array([0, 0])
    assert not kernels.filter_rows(pixels, zero, np.array([2, 3]), weights, out)
    assert not kernels.filter_rows(pixels, zero, two, weights, pixels[:2])
    assert not kernels.filter_rows(pixels[:, ::2], zero, two, weights, out[:, ::2])
    assert not kernels.filter_rows(pixels, zero, two, weights.astype("d"), out)
    assert not out.any()


@compiled
@each(channels=[1, 3, 4, 16, 17], size=[(1, 1), (3, 5), (8, 8)])
def test_bytes_are_looked_up_in_a_table_of_their_channel(channels, size):
    rng = np.random.default_rng(channels)
    x = rng.integers(0, 256, (2, *size, channels)).astype("B")
    table = rng.standard_normal((256, channels)).astype("f")
    table[0], table[255] = np.nan, np.inf
    found = kernels.by_table(x, table)
    if channels > 16:
        assert found is None
    elif found is not None:  # None where the processor lacks AVX2
        assert found.shape == (2, channels, *size) and found.dtype == np.float32
        np.testing.assert_array_equal(found, table[x, np.arange(channels)].transpose(0, 3, 1, 2))


@compiled
def test_what_a_table_does_not_serve_is_left_to_others():
    x, table = np.ones((2, 4, 5, 3), "B"), np.ones((256, 3), "f")
    assert kernels.by_table(x[:, :, ::2], table) is None
    assert kernels.by_table(x, table[:255]) is None
    assert kernels.by_table(x, np.ones((256, 1), "f")) is None
    assert kernels.by_table(x, np.ones((256, 6), "f")[:, ::2]) is None
    assert kernels.by_table(x[:0], table) is None
    assert kernels.by_table(x, table.astype("e")) is None


@each(shape=[(2, 16, 4, 4), (4, 16, 64, 64), (3, 32, 50, 41)], level=[None, 1])
def test_marks_are_those_of_the_sum(shape, level):
    a, b, gy, other = (channels_last(draw(seed, shape)) for seed in range(4))
    a[0, 0, 0, :3], b[0, 0, 0, :3], a[0, 1, 0, 0] = (np.nan, np.inf, -0.0), (1, 1, 0.0), -b[0, 1, 0, 0]
    gy[1, 2, 0, 2], a[1, 2, 0, :3] = -0.0, -9
    with kernels.use(*([] if level is None else ["loops"])):
        y = channels_last(a.copy())
        marks = kernels.relu_of_sum_marked(y, b)
        assert marks.nbytes == y.size // 8
        np.testing.assert_array_equal(y, np.maximum(a + b, 0))
        assert not np.signbit(y[y == 0]).any()
        for is_ours, of_two in ((False, False), (True, False), (False, True), (True, True)):
            g = channels_last(gy.copy())
            total = gy + other if of_two else gy
            made = kernels.relu_backward_marked(marks, g, other if of_two else None, is_ours)
            expected = np.where(y != 0, total, np.copysign(np.float32(0), total))
            assert channels_last(made).tobytes() == channels_last(expected).tobytes()
            assert is_channels_last(made)
        gy[1, 2, 0, :2] = np.nan, np.inf
        with np.errstate(invalid="ignore"):
            made = kernels.relu_backward_marked(marks, gy, other, False)
        np.testing.assert_array_equal(made, np.where(y != 0, gy + other, 0))
