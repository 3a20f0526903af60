"""The same accuracy on both sides of every threshold between kernels, measured in units in the last place.

Elementwise rows are compared at arguments from 1e-6 to 100 of either sign, tails included, with references that keep
their relative accuracy there.
"""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import backend
from dbrdist.core.array.elementwise import _AT_ONCE_ELEMENTS, KERNEL_ELEMENTS
from dbrdist.core.tape.elementwise_table import ROWS
from dbrdist.functions import likelihood  # noqa: F401
from tests.each import each

pytest.importorskip("scipy")
ml_dtypes = pytest.importorskip("ml_dtypes")
from tests.functions.references.elementwise import OF_OUTPUT, VALUES  # noqa: E402

pytestmark = pytest.mark.slow  # thousands of arguments, in extended precision
WIDE = np.longdouble
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma", "polygamma", "zeta")
# By the name of a row, what arguments are multiplied by: functions of bounded domain, and those that overflow soon.
SCALES = {
    "arcsin": 0.00999, "arccos": 0.00999, "arctanh": 0.00999, "erfinv": 0.00999, "ndtri": 0.00999, "erfcinv": 0.0199,
    "exp_difference": 0.5, "scaled_exp_difference": 0.4, "bernoulli": 0.3,
}  # fmt: skip
NUMBERS = {"silu": [(2.5,)], "leaky_relu": [(0.01,)], "elu": [(0.5,)], "selu": [(1.0, 1.0)], "softplus": [(3.0,)],
           "huber": [(2.5,)], "focal": [(0.5, 0.25, 0.75)],
           "clipped_relu": [(1.5,)], "pow_number": [(2,), (0.5,)]}  # fmt: skip
CALLS = [(name, v) for name, row in ROWS.items() for v in (tuple(row.numbers.values()), *NUMBERS.get(name, ()))]
SIZES = (1000, KERNEL_ELEMENTS - 1, KERNEL_ELEMENTS, 1 << 15, _AT_ONCE_ELEMENTS + 1)
# In units in the last place, of the value and of what a rounding of the operands makes of it.
OF_VALUE, OF_GRADIENT = 8, 32


def arguments(row, c, dtype):
    rng = np.random.default_rng(0)
    sizes = np.concatenate([np.logspace(-6, 2, 250), rng.uniform(0, 20, 150)])
    both = np.concatenate([sizes, -sizes])
    xs = []
    for k in range(len(row.args)):
        x = (rng.permutation(both) if k else both) * SCALES.get(row.name, 1.0)
        if row.name in POSITIVE or (row.name in ("pow", "ndtri", "erfcinv") and k == 0) or c == (0.5,):
            x = abs(x)
        if row.name == "log1p":
            x = np.where(x > -1, x, -1 / (1 - x))
        if row.name == "pow" and k:
            x /= 20
        if row.name == "polygamma" and not k:
            x = rng.integers(1, 5, x.shape)
        if row.name == "zeta" and not k:
            x = 1.25 + x / 20
        xs.append(x.astype(backend.as_dtype(dtype)))
    return xs


def conditioned(function, xs, numbers):
    """The value, and how much of it a rounding of the operands makes."""
    h = WIDE(2) ** -20
    value, moved = function(*xs, *numbers), 0
    for i in range(len(xs)):
        above, below = ([x * (1 + s * h) if i == k else x for k, x in enumerate(xs)] for s in (1, -1))
        moved = moved + abs(function(*above, *numbers) - function(*below, *numbers)) / (2 * h)
    return value, np.where(np.isfinite(moved), moved, 0)


def results(row, xs, numbers, size):
    """The values and gradients at the first elements of arrays of that size."""
    vs = [Variable(np.resize(x, size)) for x in xs]
    y = row.primitive(*vs, *numbers)
    gradients = dbrdist.grad([y], vs, [np.ones(size, y.dtype)])
    num = len(xs[0])
    return [y.array[:num], *(np.zeros(num) if g is None else g.array[:num] for g in gradients)]


def worst(found, wanted, conditions, dtype, more=0.0):
    is_narrow = backend.as_dtype(dtype).itemsize == 2
    info = ml_dtypes.finfo(dtype) if is_narrow else np.finfo(dtype)
    # Libraries flush what is subnormal, also within a formula; 16 bits are computed in 32.
    least = info.smallest_subnormal if is_narrow else 256 * info.tiny
    regular = abs(wanted) < info.max
    with np.errstate(all="ignore"):
        allowed = WIDE(info.eps) * (abs(wanted) + conditions + more) + WIDE(least)
        units = abs(found.astype(WIDE) - wanted) / allowed
    units = np.where(regular, np.where(np.isnan(units), np.inf, units), 0)
    return float(units.max()), int(units.argmax())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@each(**{"name, numbers": CALLS})
def test_rows_keep_their_accuracy_on_both_sides(name, numbers, dtype):
    if dtype == "float64" and np.finfo(WIDE).eps == np.finfo("d").eps:
        pytest.skip("no floating type of more than 64 bits on this processor")
    row = ROWS[name]
    references = VALUES[name]
    with np.errstate(all="ignore"):
        xs = arguments(row, numbers, dtype)
        wide = [x.astype(WIDE) for x in xs]
        exact = tuple(WIDE(v) if isinstance(v, float) else v for v in numbers)
        wanted = [None if f is None else conditioned(f, wide, exact) for f in references]
        for size in SIZES:
            for i, found in enumerate(results(row, xs, numbers, size)):
                if wanted[i] is None:
                    continue
                more = OF_OUTPUT[name](wanted[0][0]) if i and name in OF_OUTPUT else 0.0
                units, place = worst(found, *wanted[i], dtype, more)
                limit = OF_GRADIENT if i else OF_VALUE
                at = [x[place] for x in xs]
                assert units <= limit, (size, f"gradient {i - 1}" if i else "value", units, at, found[place])


@each(name=["sigmoid", "silu", "mish", "elu", "selu", "softplus", "gelu_by_tanh"])
def test_tails_next_to_the_smallest_numbers(name):
    """Down to the smallest normal number, where libraries' exponential functions give 0 sooner."""
    row, tiny = ROWS[name], np.finfo("f").tiny
    xs = [np.concatenate([np.linspace(-88.5, -80, 500), np.linspace(-10, -8, 100), [3, 90]]).astype("f")]
    numbers = tuple(row.numbers.values())
    with np.errstate(all="ignore"):
        wanted = [conditioned(f, [x.astype(WIDE) for x in xs], tuple(map(WIDE, numbers))) for f in VALUES[name]]
        for size in (len(xs[0]), KERNEL_ELEMENTS, 1 << 15):
            for i, found in enumerate(results(row, xs, numbers, size)):
                units = abs(found - wanted[i][0]) / (np.finfo("f").eps * (abs(wanted[i][0]) + wanted[i][1]))
                units = np.where(abs(wanted[i][0]) >= tiny, units, 0)
                assert units.max() <= (OF_GRADIENT if i else OF_VALUE), (size, i, xs[0][units.argmax()])


def test_every_row_has_a_reference():
    assert set(VALUES) == set(ROWS)


# ---- along an axis


def softmax_of(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def below(x):
    return x - x.max(1, keepdims=True)


def log_softmax_of(x):
    return below(x) - np.log(np.exp(below(x)).sum(1, keepdims=True))


# By name: the value, what a rounding of the scores makes of it, and the gradient likewise for gy.
ALONG = {
    "softmax": (
        lambda x: softmax_of(x),
        lambda x: softmax_of(x) * (1 + abs(below(x))),
        lambda p, gy: p * (gy - (p * gy).sum(1, keepdims=True)),
        lambda p, gy: p * (abs(gy) + (p * abs(gy)).sum(1, keepdims=True)),
    ),
    "log_softmax": (
        lambda x: log_softmax_of(x),
        lambda x: 1 + abs(below(x)) + abs(log_softmax_of(x)),
        lambda p, gy: gy - p * gy.sum(1, keepdims=True),
        lambda p, gy: abs(gy) + p * abs(gy).sum(1, keepdims=True),
    ),
}


@pytest.mark.parametrize("name", sorted(ALONG))
@each(dtype=["float32", "float64"], columns=[2, 16, 100], rows=[1, 5, 32, 33, 129, 1024, 20000])
def test_functions_along_an_axis_keep_their_accuracy(name, dtype, columns, rows):
    if dtype == "float64" and np.finfo(WIDE).eps == np.finfo("d").eps:
        pytest.skip("no floating type of more than 64 bits on this processor")
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(size=(8, columns)) * s for s in (1, 5, 20, 40)])
    x = np.resize(scores, (rows, columns)).astype(dtype)
    gy = rng.normal(size=x.shape).astype(dtype)
    v = Variable(x)
    y = getattr(F, name)(v)
    (g,) = dbrdist.grad([y], [v], [gy])
    value, condition, gradient, condition_of_gradient = ALONG[name]
    wide, p = x.astype(WIDE), softmax_of(x.astype(WIDE))
    units, place = worst(y.array, value(wide), condition(wide), dtype)
    assert units <= OF_VALUE, (units, y.array.flat[place])
    # p itself is rounded, by as much as the scores differ.
    units, place = worst(g.array, gradient(p, gy), condition_of_gradient(p * (1 + abs(below(wide))), abs(gy)), dtype)
    assert units <= OF_VALUE, (units, g.array.flat[place])


@each(dtype=["float32", "float64"], rows=[1, 20, 21, 100, 3000], columns=[100])
def test_cross_entropies_keep_their_accuracy(dtype, rows, columns):
    """Up to 2,048 scores take another path than more of them, and weights and labels to be ignored a third."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(rows, columns)) * rng.choice([1, 5, 40], (rows, 1))).astype(dtype)
    t = rng.integers(0, columns, rows)
    logs = log_softmax_of(x.astype(WIDE))
    wanted = -logs[np.arange(rows), t]
    onehot = np.eye(columns)[t]
    p = np.exp(logs)
    condition = 1 + abs(below(x.astype(WIDE))).max(1)
    for options in ({}, {"class_weight": np.ones(columns, dtype)}, {"ignore_label": columns + 1}):
        v = Variable(x)
        loss = F.softmax_cross_entropy(v, t, **options)
        units, _ = worst(loss.array, wanted.mean(), condition.mean(), dtype)
        assert units <= OF_VALUE, (options, units)
        (g,) = dbrdist.grad([loss], [v])
        units, _ = worst(g.array * rows, p - onehot, onehot + p * condition[:, None], dtype)
        assert units <= OF_VALUE, (options, units)
        single = F.softmax_cross_entropy(x, t, reduce="no", **options)
        units, _ = worst(single.array, wanted, condition, dtype)
        assert units <= OF_VALUE, (options, units)


@each(dtype=["float32", "float64", "float16"], size=[100, 1023, 1025, 5000, (1 << 16) + 3, 1 << 19])
def test_sums_keep_their_accuracy(dtype, size):
    """Of many equal numbers, of which a running sum loses one digit after another."""
    x = np.full(size, 0.1, dtype)
    exact = float(x[0])
    info = np.finfo(dtype)
    for name, wanted in (("mean", exact), ("average", exact), ("logsumexp", exact + np.log(size))):
        found = float(getattr(F, name)(x).array)
        assert abs(found - wanted) <= 4 * info.eps * (1 + abs(wanted)), (name, found, wanted)
    if exact * size < info.max:
        assert abs(float(F.sum(x).array) / (exact * size) - 1) <= 16 * info.eps
    # BLAS adds the squares of up to 65,536 elements to a few running sums.
    assert abs(float(F.mean_squared_error(x, np.zeros_like(x)).array) / exact**2 - 1) <= 256 * info.eps
