"""Rows of elementwise functions that a provider computes: as in float64 by their own formulas, whatever comes in.

The formulas are compared with references that share no code with them in tests/contracts/functions/test_references.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS
from dbrdist.core.tape.elementwise_table import ROWS
from dbrdist.kernels import dispatch
from dbrdist.kernels.cpu import onednn, onednn_elementwise
from tests.each import each
from tests.kernels.provider_helpers import TOLERANCE, laid_out, needs_onednn
from tests.processor import MULTIPLIES_BFLOAT16

# Numbers away from those with which a row is declared.
NUMBERS = {
    "silu": [(2.5,), (-1.5,), (0,)],
    "leaky_relu": [(0.01,), (-0.5,), (2.0,), (1,), (0.0,)],
    "elu": [(0.5,), (2.0,), (-1.0,), (0.0,), (1e-9,)],
    "selu": [(1.0, 1.0), (0.5, 2.0), (1.5, -2.0), (-1.0, 1.0), (0.0, 0.0)],
    "huber": [(1,), (0.0,), (-1.0,), (float("inf"),), (2.5,)],
    "softplus": [(0.25,), (3.0,)],
    "clipped_relu": [(1,), (0.0,), (-1.0,), (float("inf"),)],
    "pow_number": [(2,), (1,), (0,), (0.5,), (3.0,), (4,), (4.0,)],
}
SERVED = sorted({key if isinstance(key, str) else key[0] for key in onednn_elementwise.TABLE})
CALLS = [(name, v) for name in SERVED for v in (tuple(ROWS[name].numbers.values()), *NUMBERS.get(name, ()))]
SPECIAL = [
    np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-20, -1e-20, 3.0, -3.0, 6.0, 20.0, 2.5, 1.0,
    88.0, -88.0, 90.0, -90.0, 104.0, -104.0, 1e5, -1e5,
]  # fmt: skip


@pytest.fixture
def onednn_alone():
    """Without the compiled loops, which come first."""
    with kernels.use("onednn"):
        yield


@pytest.fixture
def quiet():
    with np.errstate(all="ignore"):
        yield


def draw(row, shape, dtype="float32", special=()):
    """Operands from the row's domain and far around it, some of them special."""
    rng, dtype = np.random.default_rng(0), backend.as_dtype(dtype)
    domains = row.domain if isinstance(row.domain[0], tuple) else (row.domain,) * len(row.args)
    xs = [rng.uniform(min(low * 4, low), high * 4, shape).astype(dtype) for low, high in domains]
    for k, x in enumerate(xs):
        places = rng.choice(x.size, 2 * len(special), replace=False)
        x.reshape(-1)[places] = np.repeat(np.array(special, dtype), 2) if k % 2 == 0 else np.tile(special, 2)
    return xs


def value_and_gradients(row, xs, gy, numbers):
    vs = [Variable(x) for x in xs]
    y = row.primitive(*vs, *numbers)
    grads = dbrdist.grad([y], vs, [gy])
    return [y.array, *(np.zeros(gy.shape) if g is None else g.array for g in grads)]


def compare(row, xs, gy, numbers, tolerance):
    found = value_and_gradients(row, xs, gy, numbers)
    wanted = value_and_gradients(row, [x.astype("d") for x in xs], gy.astype("d"), numbers)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == xs[0].dtype
        assert a.shape == b.shape
        a, b = a.astype("d"), b.astype("f").astype("d")  # what float32 cannot hold is infinite there
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found


def needs(row):
    if row.name == "gelu":
        pytest.importorskip("scipy")


@needs_onednn
@pytest.mark.usefixtures("quiet")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nchw", "sliced", "reversed", "fortran"])
@each(**{"name, numbers": CALLS})
def test_values_and_gradients(name, numbers, layout):
    row = ROWS[name]
    needs(row)
    for shape in ((KERNEL_ELEMENTS - 1,), (KERNEL_ELEMENTS,), (3, KERNEL_ELEMENTS + 1), (4, 8, 32, 33)):
        *xs, gy = (
            np.asfortranarray(a) if layout == "fortran" else laid_out(a, layout)
            for a in (*draw(row, shape), np.random.default_rng(1).uniform(-2, 2, shape).astype("f"))
        )
        compare(row, xs, gy, numbers, 4e-6)


@pytest.mark.slow
@needs_onednn
@pytest.mark.usefixtures("quiet")
@each(**{"name, numbers": CALLS})
def test_special_values(name, numbers):
    row, shape = ROWS[name], (2, KERNEL_ELEMENTS)
    needs(row)
    every = [v for v in SPECIAL if not 20 < abs(v) < np.inf] if name == "scaled_exp_difference" else SPECIAL
    for special in ((), (0.0, -0.0, 3.0, -3.0, 6.0, 1.0), every):  # e to the 100 overflows, whatever it is scaled by
        xs = draw(row, shape, "float32", special)
        gy = np.random.default_rng(1).uniform(-2, 2, shape).astype("f")
        compare(row, xs, gy, numbers, 4e-6)
        if special is not every:  # inf times what float32 rounds to 0 is NaN
            gy.reshape(-1)[::7], gy.reshape(-1)[::11] = np.inf, np.nan
            compare(row, xs, gy, numbers, 4e-6)


@pytest.mark.slow
@needs_onednn
@pytest.mark.usefixtures("quiet")
@each(**{"name, numbers": CALLS})
def test_several_blocks(name, numbers, monkeypatch):
    """What is not finite lies in one block alone: the first, the last, which is shorter, or none."""
    row, shape = ROWS[name], (3, KERNEL_ELEMENTS + 1)
    needs(row)
    monkeypatch.setattr(onednn_elementwise, "_BLOCK", 1 << 12)
    with kernels.use("onednn"):  # with plans of its own
        xs, gy = draw(row, shape), np.random.default_rng(1).uniform(-2, 2, shape).astype("f")
        compare(row, xs, gy, numbers, 4e-6)
        flat = xs[0].reshape(-1)
        for place, special in ((0, np.inf), (0, np.nan), (-1, -np.inf), (-1, np.nan)):
            kept, flat[place] = flat[place], special
            compare(row, xs, gy, numbers, 4e-6)
            flat[place] = kept


@pytest.mark.slow
@needs_onednn
@pytest.mark.usefixtures("quiet")
@each(**{"name, numbers": CALLS})
def test_images_keep_their_layout(name, numbers):
    row, shape = ROWS[name], (2, 8, 24, 25)
    needs(row)
    for of_xs, of_gy in (("channels_last", "channels_last"), ("channels_last", "nchw"), ("nchw", "channels_last")):
        xs = [laid_out(x, of_xs) for x in draw(row, shape)]
        gy = laid_out(np.random.default_rng(1).uniform(-2, 2, shape).astype("f"), of_gy)
        y, *grads = compare(row, xs, gy, numbers, 4e-6)
        assert backend.lies_as_images(y) == (of_xs == "channels_last")
        if of_xs == of_gy:
            assert all(backend.lies_as_images(g) == (of_xs == "channels_last") for g in grads)


@pytest.mark.slow
@needs_onednn
@pytest.mark.usefixtures("quiet")
@each(dtype=["bfloat16", "float16"], **{"name, numbers": CALLS})
def test_narrow_types(name, numbers, dtype):
    row, shape = ROWS[name], (3, KERNEL_ELEMENTS)
    needs(row)
    gy = np.random.default_rng(1).uniform(-2, 2, shape).astype(backend.as_dtype(dtype))
    compare(row, draw(row, shape, dtype), gy, numbers, 2 * TOLERANCE[dtype])


@needs_onednn
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", SERVED)
def test_one_gradient_for_all_elements(name):
    row, shape = ROWS[name], (3, KERNEL_ELEMENTS)
    needs(row)
    xs = draw(row, shape)
    compare(row, xs, np.broadcast_to(np.float32(0.7), shape), tuple(row.numbers.values()), 4e-6)


@needs_onednn
@pytest.mark.usefixtures("quiet")
def test_gradients_of_the_table_are_of_operands_that_their_rows_have():
    for name, operand in (key for key in onednn_elementwise.TABLE if isinstance(key, tuple)):
        assert operand in range(len(ROWS[name].args)), (name, operand)


# operands of exp(a - b) and exp(a - b) c, and who serves
BESIDE = [
    (((128, 64), (128, 1)), "onednn"),
    (((128, 64), (128, 64)), "onednn"),
    (((128, 64), (1, 64)), "numpy"),
    (((128, 64), (64,)), "numpy"),
    (((128, 64), ()), "numpy"),
    (((96, 96), (96, 1)), "onednn"),
    (((96, 96), (1, 96)), "numpy"),
    (((128, 64), (1, 1)), "numpy"),
    (((2, 64, 64), (2, 1, 1)), "numpy"),
    (((2, 64, 64), (64, 1)), "numpy"),
    (((64, 64, 8), (64, 1)), "numpy"),
    (((128, 64), (128, 1), (128, 64)), "onednn"),
    (((128, 64), (128, 1), (128, 1)), "onednn"),
    (((128, 64), (128, 1), (1, 1)), "numpy"),
    (((96, 96), (96, 1), (1, 96)), "numpy"),
]


@needs_onednn
@pytest.mark.usefixtures("quiet")
@each(**{"shapes, served": BESIDE})
def test_operands_of_one_number_for_each_row_stand_beside_a_matrix(shapes, served):
    name = "exp_difference" if len(shapes) == 2 else "scaled_exp_difference"
    xs = [np.random.default_rng(i).uniform(-1, 1, shape).astype("f") for i, shape in enumerate(shapes)]
    y = ROWS[name].primitive(*[Variable(x) for x in xs]).array
    a, b, c = [x.astype("d") for x in xs] + [1.0] * (3 - len(xs))
    np.testing.assert_allclose(y, np.exp(a - b) * c, rtol=2e-6)
    assert kernels.provider_of("row", name, ("a", "b", "c")[: len(xs)], tuple(xs), ()) == served


@needs_onednn
@pytest.mark.usefixtures("quiet")
def test_a_matrix_in_another_order_stands_beside_no_column():
    a, b = np.asfortranarray(np.ones((128, 64), "f")), np.ones((128, 1), "f")
    assert kernels.provider_of("row", "exp_difference", ("a", "b"), (a, b), ()) == "numpy"


@needs_onednn
@pytest.mark.usefixtures("quiet", "onednn_alone")
def test_who_serves():
    x = np.ones(KERNEL_ELEMENTS, "f")

    def server(key, numbers, *arrays):
        names = ("x", "x2", "gy")[: len(arrays)] if len(arrays) != 2 else ("x", "gy")
        return kernels.provider_of("row", key, names, arrays, numbers)

    assert server("tanh", (), x) == "onednn"
    assert server(("silu", 0), (1.0,), x, x) == "onednn"
    assert server("silu", (float("inf"),), x) == "numpy"
    assert server("leaky_relu", (0.0,), x) == "numpy"
    assert server("selu", (1.5, 1.0), x) == "onednn"
    assert server("gelu", (), x) == server(("gelu", 0), (), x, x) == "onednn"
    assert server(("clipped_relu", 0), (-1.0,), x, x) == "numpy"
    assert server(("elu", 0), (1.0,), x, x) == "onednn"
    assert server(("elu", 0), (2.0,), x, x) == "onednn"
    assert server(("elu", 0), (-2.0,), x, x) == "numpy"
    assert server("tanh", (), x[: KERNEL_ELEMENTS - 1]) == "numpy"
    assert server("tanh", (), x.astype("d")) == "numpy"
    assert server("tanh", (), np.ones((2, KERNEL_ELEMENTS), "f").T) == "numpy"
    assert server(("tanh", 0), (), x, x.astype("d")) == "numpy"
    assert server(("tanh", 0), (), x, np.ones((1, KERNEL_ELEMENTS), "f")) == "numpy"
    with kernels.use("numpy"):
        assert server("tanh", (), x) == "numpy"


@needs_onednn
@pytest.mark.usefixtures("quiet", "onednn_alone")
def test_selu_is_accurate_near_zero():
    x = -np.logspace(-20, 2, KERNEL_ELEMENTS).astype("f")
    expected = 1.0507009873554805 * 1.6732632423543772 * np.expm1(x.astype("d"))
    np.testing.assert_allclose(F.selu(x).array, expected, rtol=1e-6)


@needs_onednn
@pytest.mark.usefixtures("quiet", "onednn_alone")
@each(slope=[0.0625, 0.1, 0.2, 0.3, 0.7, 0.9, 1])
def test_leaky_relu_passes_gradients_on_unchanged_above_zero(slope):
    x, gy = np.random.default_rng(0).standard_normal((2, 2 * KERNEL_ELEMENTS), np.float32)
    v = Variable(x)
    y = F.leaky_relu(v, slope)
    y.grad = gy
    y.backward()
    np.testing.assert_array_equal(v.grad[x > 0], gy[x > 0])
    np.testing.assert_allclose(v.grad[x < 0], (slope * gy.astype("d"))[x < 0], rtol=2e-7)


@needs_onednn
@pytest.mark.usefixtures("quiet")
def test_a_number_that_changes_with_each_call_fills_no_memory():
    x = Variable(np.ones(KERNEL_ELEMENTS, "f"))
    for i in range(20):
        beta = np.float32(1 + i / 7)
        np.testing.assert_allclose(F.silu(x, beta).array, 1 / (1 + np.exp(-beta)), rtol=1e-6)


@needs_onednn
@pytest.mark.usefixtures("quiet")
def test_second_derivatives_of_large_arrays():
    for name in SERVED:
        row = ROWS[name]
        numbers = tuple(row.numbers.values())
        if name == "gelu":
            continue
        results = []
        for dtype in "fd":
            xs = [Variable(x.astype(dtype)) for x in draw(row, (2, KERNEL_ELEMENTS))]
            y = row.primitive(*xs, *numbers)
            gy = Variable(np.full(y.shape, 0.7, dtype))
            (gx,) = dbrdist.grad([y], xs[:1], [gy], enable_double_backprop=True)
            (ggx,) = dbrdist.grad([gx], xs[:1], [gy])
            results.append(np.zeros(1) if ggx is None else ggx.array)
        np.testing.assert_allclose(*results, rtol=2e-4, atol=2e-5, err_msg=name)


@needs_onednn
@each(key=list(onednn_elementwise.TABLE))
def test_rows_of_finite_numbers_have_a_result(key):
    row = ROWS[key if isinstance(key, str) else key[0]]
    names = row.args if isinstance(key, str) else (*row.kept_names, "gy")
    numbers = tuple(row.numbers.values()) if row.name != "pow_number" else (3,)
    rows = [np.full((1 << 13) + 1, 0.5, np.float32)] * len(names)
    with kernels.use("onednn"), np.errstate(all="ignore"):
        y = dispatch.row(key, names, tuple(rows), numbers)
        assert np.isfinite(y).all()
        if row.name.endswith("exp_difference"):
            rows[1:] = [np.full((3, 1), 0.5, np.float32)] * (len(names) - 1)
            rows[0] = np.full((3, 1 << 13), 0.5, np.float32)
            assert np.isfinite(dispatch.row(key, names, tuple(rows), numbers)).all()
            rows[0][2, 5] = np.nan
            assert dispatch.row(key, names, tuple(rows), numbers) is None


BF16 = backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


NUMBERS_OF_ROWS = {  # of a row: those that it takes, and those that it does not
    "leaky_relu": ([0.5, -0.25, 1.0, 2.0], [0.0]),
    ("leaky_relu", 0): ([0.0, 0.5, 1.5, -0.25], []),
    ("elu", 0): ([0.0, 0.5, 1.0, 1.5], [-0.25]),
    "huber": ([0.0, 0.5, 2.0], [-0.25]),
    ("huber", 0): ([0.0, 0.5, 2.0], [-0.25]),
    ("clipped_relu", 0): ([0.0, 0.5, 20.0], [-0.25]),
    "pow_number": ([3], [2, 4, 2.5]),
    ("pow_number", 0): ([2, 3], [1, 4, 2.5]),
}


@needs_onednn
@each(key=list(NUMBERS_OF_ROWS))
def test_rows_take_numbers_for_which_they_are_right(key):
    taken, refused = NUMBERS_OF_ROWS[key]
    row = ROWS[key if isinstance(key, str) else key[0]]
    rng, names = np.random.default_rng(0), row.args if isinstance(key, str) else (*row.kept_names, "gy")
    arrays = tuple(rng.standard_normal(1 << 13).astype("f") for _ in names)
    for number in refused:
        refuses(onednn_elementwise._plan_row, key, names, arrays, (number,))
    for number in taken:
        y = onednn_elementwise._plan_row(key, names, arrays, (number,))(key, names, arrays, (number,))
        wide = [a.astype("d") for a in arrays]
        if isinstance(key, str):
            expected = row.formula(*wide, number)
        else:
            values = {**dict(zip(row.kept_names, wide)), **dict(zip(row.numbers, (number,)))}
            expected = row.partials[key[1]].pull(wide[-1], values)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@needs_onednn
def test_rows_of_other_sizes_layouts_and_numbers_are_left_to_the_formula():
    x = np.ones(1 << 13, "f")
    pixels = backend.channels_last(np.ones((8, 4, 16, 16), "f"))
    for taken in (x, x.reshape(2, -1), pixels, *[x.astype(BF16)] * MULTIPLIES_BFLOAT16):
        onednn_elementwise._plan_row("leaky_relu", ("x",), (taken,), (0.5,))
    refused = x[1:], np.ones(1 << 14, "f")[::2], x.reshape(2, -1).T, pixels[:, :, ::-1], x.astype("d")
    for other in refused:
        refuses(onednn_elementwise._plan_row, "leaky_relu", ("x",), (other,), (0.5,))
    for number in (np.inf, -np.inf, np.nan, True, np.float32(0.5), None):
        refuses(onednn_elementwise._plan_row, "leaky_relu", ("x",), (x,), (number,))
    refuses(onednn_elementwise._plan_row, "no such row", ("x",), (x,), ())
    refuses(onednn_elementwise._plan_row, ("leaky_relu", 1), ("x",), (x,), (0.5,))


def test_ones_are_kept_and_zeros_become_another_number():
    clip, linear = onednn_elementwise.CLIP, onednn_elementwise.LINEAR
    for low, step in (
        (0.0, (clip, 0.0, 1.0)), (0.25, (clip, 0.25, 1.0)), (1.0, (clip, 1.0, 1.0)), (1.5, (linear, -0.5, 1.5)),
        (-0.5, (linear, 1.5, -0.5)),
    ):  # fmt: skip
        assert onednn_elementwise._one_or(low) == step
