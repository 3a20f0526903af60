"""Tests of dbrdist.kernels.cpu.vector_loops: special functions, remainders and rows, and each set of instructions."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import backend, memory, sums
from dbrdist.functions import noise
from dbrdist.kernels.cpu import loops
from tests.each import each
from tests.kernels.cpu.test_loops import compiled, numbers


def everywhere(low, high):
    """Numbers of float32 between two bounds: evenly, towards the bounds and 0, and near the zeros of lgamma and psi."""
    rng = np.random.default_rng(0)
    small = np.exp(rng.uniform(np.log(1e-38), np.log(3e38), 10_000))
    near = np.concatenate([z + rng.uniform(-1e-5, 1e-5, 1000) for z in (0.5, 1.0, 1.4616321, 2.0)])
    ends = [b + s * small[:5000] for b in (low, high) for s in (-1, 1) if np.isfinite(b)]
    x = np.concatenate([rng.uniform(max(low, -40), min(high, 40), 20_000), small, -small, near, *ends]).astype("f")
    return np.concatenate([x[(x > low) & (x < high)], np.array([np.nan, 0.0, -0.0, 1.0], "f")])


def special_slopes(name, x, y):
    """The derivative of a special function in float64, by SciPy, given x and the function's value in float32."""
    special, root = pytest.importorskip("scipy.special"), np.sqrt(np.pi)
    return {
        "erfinv": lambda: root / 2 * np.exp(y * y),
        "erfcinv": lambda: -root / 2 * np.exp(y * y),
        "ndtri": lambda: np.sqrt(2) * root * np.exp(y * y / 2),
        "erfcx": lambda: None,
        "log_ndtr": lambda: np.sqrt(2 / np.pi) / special.erfcx(-x / np.sqrt(2)),
        "lgamma": lambda: special.digamma(x),
        "digamma": lambda: np.where(x > 0, special.polygamma(1, x), np.nan),
    }[name]()


SPECIAL = {
    "erfinv": (-1, 1), "erfcinv": (0, 2), "ndtri": (0, 1), "erfcx": (-9.3, np.inf), "log_ndtr": (-np.inf, np.inf),
    "lgamma": (-30, np.inf), "digamma": (-30, np.inf),
}  # fmt: skip


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=list(SPECIAL))
def test_special_functions_are_exact_to_a_unit_in_the_last_place(name):
    """Where the loop leaves out numbers, such as negative ones of lgamma, they are SciPy's."""
    special = pytest.importorskip("scipy.special")
    x = everywhere(*SPECIAL[name])
    v = dbrdist.Variable(x)
    assert kernels.provider_of("row", name, ("x",), (x,), ()) == "loops"
    y = getattr(F, name)(v)
    y.grad = np.ones_like(x)
    y.backward()
    wide, out = x.astype(np.float64), y.array.astype(np.float64)
    wanted = getattr(special, {"lgamma": "gammaln"}.get(name, name))(wide), special_slopes(name, wide, out)
    for i, (found, exact) in enumerate(zip((y.array, v.grad), wanted)):
        if exact is None:
            continue
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        same = (found == rounded) | np.isnan(rounded) & (i == 1 or np.isnan(found))
        errors = np.where(same, 0, np.abs(found - exact) / unit)
        assert errors.max() < 0.6, (i, x[errors.argmax()], found[errors.argmax()], exact[errors.argmax()])


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(name=["erfinv", "lgamma", "digamma", "log_ndtr"])
def test_what_a_loop_leaves_out_changes_no_other_element(name):
    x = np.random.default_rng(0).uniform(0.05, 0.95, 20_000).astype("f")
    worse = x.copy()
    worse[::1000] = np.resize(np.array([np.nan, -0.5, -3.0, np.inf, 0.0, -np.inf, 1e-45], "f"), 20)
    found, among = (getattr(F, name)(v).array for v in (x, worse))
    kept = np.arange(len(x)) % 1000 != 0
    assert found[kept].tobytes() == among[kept].tobytes()
    with kernels.use("columns"):
        theirs = getattr(F, name)(worse[::1000]).array
    np.testing.assert_allclose(among[::1000], theirs, rtol=2e-7)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(**{"function, ufunc": [(F.fmod, np.fmod), (lambda a, b: a % b, np.remainder)]})
def test_remainders_have_the_bits_of_numpys(function, ufunc):
    rng = np.random.default_rng(0)
    wild = np.exp(rng.uniform(np.log(1e-45), np.log(3e38), (2, 20_000))).astype("f")
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.0, -6.0, 1e-45, 3e38, 2.0**29, 2.0**30], "f")
    pairs = np.stack(np.meshgrid(special, special)).reshape(2, -1)
    signs = rng.choice(np.array([-1, 1], "f"), (2, 20_000))
    a, b = np.concatenate([rng.normal(0, (10, 3), (20_000, 2)).T.astype("f"), wild * signs, pairs], 1)
    assert kernels.provider_of("row", ufunc.__name__, ("a", "b"), (a, b), ()) == "loops"
    for divisor in (b, np.float32(0.7), np.float32(-3)):
        found, wanted = function(dbrdist.Variable(a), divisor).array, ufunc(a, divisor)
        assert (np.isnan(found) == np.isnan(wanted)).all()
        assert found[~np.isnan(found)].tobytes() == wanted[~np.isnan(wanted)].tobytes()


def of_twenty_rows(name, num_numbers, arrays):
    """Numbers and arrays for a loop over 20 rows or columns of 100 elements, over 20 channels of 4 planes of 25, or for
    20 images of 50 pixels, or windows, of 4 elements."""
    is_column = name.removesuffix("_backward").endswith("columns")
    values = ((100, 20) if is_column else (100,)) + (1, 5)
    if "planes" in name or "groups" in name:
        values = 100, 20, 25, 0.5
    kinds = loops._found.ROWS[name]
    if "b" in kinds:
        values = 100, 200, 4, 3, 2, 1
    if "s" in kinds:
        values = 100, 20, 4, 2
    if is_of_vectors := name.startswith("rectified_sum"):  # three of the length of a row
        values = 100, 300
    pixels = (np.arange(2000, dtype=np.int32) % 50).view("f")
    arrays = [pixels if kind in "qj" else a for kind, a in zip(kinds, arrays)]
    sizes = {
        "i": 2000,
        "v": 20,
        "x": 2000,
        "c": 2000,
        "t": 4000,
        "w": 100,
        "r": 20,
        "m": 20,
        "p": 20 * 32,
        "k": 80,
        "g": 300 if is_of_vectors else 20,
        "b": 4000,
        "q": 2000,
        "j": 100,
        "s": 80,
    }
    return values[:num_numbers], tuple(np.resize(a, sizes[kind]) for a, kind in zip(arrays, kinds))


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_set_of_instructions_gives_the_same_bits():
    """Those of this processor: with AVX-512 these are two, which CI's may have not."""
    run, place_of = loops._found.run, loops._PLACES
    before = loops._found.use_level(0)
    arrays = [
        np.abs(numbers(np.float32, seed))[:2000] if seed % 2 else numbers(np.float32, seed)[:2000] for seed in range(8)
    ]
    try:
        for name, place in place_of.items():
            made = []
            for level in range(before + 1):
                loops._found.use_level(level)
                count, num_numbers = loops._found.ARITIES[name]
                values, given = (0.5,) * num_numbers, tuple(a.copy() for a in arrays[:count])
                if name in loops._found.ROWS:
                    values, given = of_twenty_rows(name, num_numbers, arrays)
                assert run(place, False, given, values)
                made.append([np.where(np.isnan(a), np.float32(np.nan), a).tobytes() for a in given])
            assert all(m == made[0] for m in made), name
    finally:
        loops._found.use_level(before)
    with pytest.raises(ValueError, match="expected a level from 0"):
        loops._found.use_level(9)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(shape=[(300, 33), (20, 1000), (9, 3, 1024), (3, 40, 16, 16)])
def test_the_logarithm_of_softmax_row_by_row(shape):
    """Near the value of float64; what is not finite reaches its row, as in NumPy."""
    rng = np.random.default_rng(0)
    lay = backend.channels_last if len(shape) == 4 else np.ascontiguousarray
    axis = 1 if len(shape) == 4 else len(shape) - 1
    x, gy = (lay((rng.standard_normal(shape) * 5).astype("f")) for _ in range(2))
    assert kernels.provider_of("log_softmax", x, axis) == "loops"
    y = kernels.log_softmax(x, axis)
    wide = x.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(axis, keepdims=True))
    np.testing.assert_allclose(y, exact, rtol=3e-7, atol=1e-6)
    assert kernels.provider_of("log_softmax_backward", y, gy, axis) == "loops"
    slope = gy - np.exp(exact) * gy.astype(np.float64).sum(axis, keepdims=True)
    np.testing.assert_allclose(kernels.log_softmax_backward(y, gy, axis), slope, rtol=1e-5, atol=3e-5)
    moved = np.moveaxis(x, axis, -1)
    for place, value in enumerate([np.nan, np.inf, -np.inf]):
        moved[(*[place % n for n in moved.shape[:-1]], 3 + place)] = value
    moved[(-1,) * (moved.ndim - 1)] = -np.inf  # a whole row
    with kernels.use("columns"):
        wanted = kernels.log_softmax(x, axis)
    np.testing.assert_allclose(kernels.log_softmax(x, axis), wanted, rtol=3e-7, atol=1e-6)


@compiled
def test_normal_numbers_of_random_bits_are_those_of_the_formula():
    """The ends of both, and the largest errors of float32 between."""
    rng = np.random.default_rng(0)
    ends = np.array([0, 1, 2**31 - 1, 2**31, 2**30, 3 * 2**30, 2**32 - 1], np.uint32)
    a, b = (np.concatenate([v.ravel(), rng.integers(0, 2**32, 20_000, np.uint32)]) for v in np.meshgrid(ends, ends))
    found = noise._normal_numbers(a, b, np.dtype(np.float32))
    radius = np.sqrt(-2 * np.log((a + 0.5) * 2.0**-32))
    exact = radius * np.cos((b.view("i4") + 0.5) * (2.0**-31 * np.pi))
    np.testing.assert_allclose(found, exact, rtol=2e-7, atol=1e-8)
    assert (found != noise._normal(a, b, np.dtype(np.float32))).any()  # the loop's


@compiled
@each(dtype=[np.float32, np.float64])
def test_the_slope_of_a_reciprocal_has_the_bits_of_numpys_formula(dtype):
    def step(exponent=-1):
        x = dbrdist.Variable(numbers(dtype, 0))
        y = x**exponent
        y.grad = numbers(dtype, 2)
        y.backward()
        return x.grad.tobytes()

    with np.errstate(all="ignore"):
        assert kernels.provider_of("row", ("pow_number", 0), ("x", "gy"), (numbers(dtype, 0),) * 2, (-1,)) == "loops"
        assert kernels.provider_of("row", ("pow_number", 0), ("x", "gy"), (numbers(dtype, 0),) * 2, (3,)) != "loops"
        squares = dbrdist.Variable(numbers(dtype, 0)) ** 2
        assert squares.array.tobytes() == np.square(numbers(dtype, 0)).tobytes()
        ours = step(), step(2)
        with kernels.use("columns"):
            assert (step(), step(2)) == ours


@compiled
@each(exponent=[-1, 0.5, 2, 0.625, 1.5, 3], dtype=[np.float32, np.float64])
def test_powers_by_loops_and_by_others_are_near_those_of_float64(exponent, dtype):
    x, gy = np.random.default_rng(0).uniform(0.1, 4, (2, 20_000)).astype(dtype)
    found = kernels.provider_of("row", "pow_number", ("x",), (x,), (exponent,))
    assert (found == "loops") == (exponent in (0.5, 2))
    found = kernels.provider_of("row", ("pow_number", 0), ("x", "gy"), (x, gy), (exponent,))
    assert (found == "loops") == (exponent in (-1, 0.5) or (exponent == 2 and dtype == np.float32))
    v = dbrdist.Variable(x)
    y = v**exponent
    y.grad = gy
    y.backward()
    rtol = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(y.array, x.astype("d") ** exponent, rtol)
    np.testing.assert_allclose(v.grad, exponent * x.astype("d") ** (exponent - 1) * gy, rtol)


@compiled
@each(shape=[(1000, 300), (2, 40, 75, 50)], dtype=[np.float32, np.float64])
def test_values_are_repeated_to_large_memory(shape, dtype):
    """One value, from whatever holds it, or one for each row, over C order and over images."""
    one, rows = np.array(-0.0, dtype), np.arange(float(shape[0])).astype(dtype).reshape(-1, *(1,) * (len(shape) - 1))
    repeated = np.broadcast_to(rows, shape)
    for value in (3, 0.0, -0.0, 0.1, np.nan, one, np.broadcast_to(one, shape), repeated, repeated[::-1]):
        a = backend.empty(shape, dtype)
        a[...] = 7
        memory.fill(a, value)
        assert a.tobytes() == np.broadcast_to(np.asarray(value, dtype), shape).tobytes()
    found = kernels.provider_of("repeat", a, repeated)
    assert (found == "loops") == (dtype == np.float32 and len(shape) == 2)


@compiled
@each(shape=[(90, 100), (301, 7, 300)], dtype=[np.float32, np.float64])
def test_sums_over_all_axes_by_their_numbers_have_the_bits_of_numpys(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    for axis in (None, tuple(range(x.ndim)), tuple(range(-1, -1 - x.ndim, -1))):
        for keepdims in (False, True):
            found = sums.sum_over(x, axis, keepdims)
            assert found.tobytes() == x.sum(axis=axis, keepdims=keepdims).tobytes()
            assert found.shape == (1,) * len(shape) * keepdims
