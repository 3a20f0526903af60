"""Parts of kernels by themselves: what is looked at, adapted, planned and warned of before anything is computed."""

from __future__ import annotations

import math
import types
import warnings

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import dbrdist.functions  # noqa: F401 - it makes the rows
from dbrdist import kernels
from dbrdist.core import backend
from dbrdist.core.rows import ROWS
from dbrdist.kernels import (
    PoolGeometry,
    columns,
    dispatch,
    numpy_,
    onednn,
    onednn_blocks,
    onednn_convolution,
    onednn_elementwise,
    onednn_finite,
    onednn_layer_norm,
    onednn_matmul,
    onednn_pooling,
    providers,
    small_numpy,
)
from dbrdist.kernels.keys import update_key
from tests.each import each

needs_onednn = pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed")
F32, BF16 = np.dtype("f"), backend.as_dtype("bfloat16")


# ---- what is finite


@each(dtype=["float32", "bfloat16"], shape=[(40,), (3, 5), (2, 3, 4, 5)])
def test_one_element_that_is_not_finite_is_found_wherever_it_lies(dtype, shape):
    x = np.full(shape, -1e30).astype(backend.as_dtype(dtype))  # its square is infinite
    for a in (x, -x, backend.channels_last(x) if x.ndim == 4 else x, x[:1], np.zeros_like(x)):
        assert onednn_finite.is_finite(a)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, x.size // 2, x.size - 1):
            for a in (x.copy(), backend.channels_last(x.copy()) if x.ndim == 4 else -x):
                a.flat[place] = value
                assert not onednn_finite.is_finite(a)


def test_elements_in_the_order_of_memory():
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    assert onednn_finite.memory_row(x).tolist() == list(range(24))
    images = backend.channels_last(x)
    assert onednn_finite.memory_row(images).tolist() == x.transpose(0, 2, 3, 1).ravel().tolist()
    onednn_finite.memory_row(images)[0] = 7
    assert images[0, 0, 0, 0] == 7


@each(dtype=["e", "f", "d"], size=[0, 1, 5])
def test_nan_is_found_in_arrays_of_every_type_and_size(dtype, size):
    a = np.full(size, -np.inf, dtype)
    assert not small_numpy.has_nan(a)
    for i in range(size):
        a[i] = np.nan
        assert small_numpy.has_nan(a)
        a[i] = 1


# ---- small elementwise kernels of the host


@each(dtype=["e", "f", "d"], shape=[(5,), (2, 3), (2, 3, 2, 2)], is_last=[False, True])
def test_a_small_relu_keeps_type_and_nan(dtype, shape, is_last):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    gy = np.full(shape, np.nan, dtype)
    x.flat[0] = np.nan
    if is_last and x.ndim == 4:
        x = backend.channels_last(x)
    y = kernels.relu_forward(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.where(x < 0, np.zeros_like(x), x))
    y = np.where(np.isnan(y), y.dtype.type(2), y)
    for g in (gy, gy * 0 + 3, backend.channels_last(gy) if x.ndim == 4 else gy):
        with np.errstate(all="ignore"):
            gx = kernels.relu_backward(y, g)
        assert gx.dtype == x.dtype
        np.testing.assert_array_equal(gx, np.where(y == 0, np.zeros_like(g), g))


@each(**{"size, is_written_over": [((1 << 18) - 8, False), (1 << 18, True)]})
def test_large_gradients_of_a_relu_are_written_over(size, is_written_over):
    y, gy = (backend.channels_last(np.ones((1, 8, size // 8, 1), np.float32)) for _ in range(2))
    assert (kernels.relu_backward_over(y, gy) is gy) == is_written_over
    gy.flags.writeable = False
    assert kernels.relu_backward_over(y, gy) is not gy


def test_a_rule_over_memory_of_the_host_is_left_to_its_formula():
    p, g = np.ones(3, "f"), np.ones(3, "f")
    assert kernels.update("sgd", (p, g), (0.1,)) is False
    assert p.tolist() == [1, 1, 1]


# ---- products


def strided(shape, strides):
    """Of float32, with strides in elements."""
    memory = np.arange(400, dtype=np.float32)
    return as_strided(memory[200:], shape, [4 * s for s in strides])


@each(
    **{"strides, serves": [
        ((3, 1), True), ((5, 1), True), ((2, 1), False), ((0, 1), False), ((-3, 1), False), ((6, 2), False),
        ((1, 4), True), ((1, 7), True), ((1, 3), False), ((1, 0), False), ((1, -4), False), ((2, 8), False),
    ]}
)  # fmt: skip
def test_matrices_whose_rows_or_columns_lie_densely_and_apart_serve_as_they_are(strides, serves):
    a = strided((4, 3), strides)
    assert (onednn_matmul._matrix(a) is a) == serves
    np.testing.assert_array_equal(onednn_matmul._matrix(a), a)
    adapted = onednn_matmul._adapter(a, F32)(a)
    assert (adapted is a) == serves and onednn_matmul._matrix(adapted) is adapted
    np.testing.assert_array_equal(adapted, a)


@needs_onednn
@each(strides=[(3, 1), (5, 1), (1, 4), (1, 7), (0, 1), (-3, 1), (6, 2)])
def test_casts_of_matrices_lie_as_they_do(strides):
    a = strided((4, 3), strides)
    made = onednn_matmul._adapter(a, BF16)(a)
    np.testing.assert_array_equal(made, a.astype(BF16))
    assert made.flags.f_contiguous if strides[0] == 1 else made.flags.c_contiguous, made.strides


@needs_onednn
@each(is_often=[False, True])
def test_weights_are_packed_for_many_calls_alone(is_often, monkeypatch):
    asked = []
    for name in ("build", "build_packed"):
        function = getattr(onednn_matmul, name)
        monkeypatch.setattr(
            onednn_matmul, name, lambda *a, name=name, f=function, **k: (asked.append(name), f(*a, **k))[1]
        )
    b = np.random.default_rng(0).standard_normal((64, 48), np.float32)
    onednn_matmul._plan_packed(b, 600, is_often)
    assert asked == ["build_packed" if is_often else "build"]


# ---- pooling


@each(size=[2, 5, 6], kernel=[1, 2, 3], stride=[1, 2, 4, 5], pad=[0, 1], axis=[0, 1])
def test_windows_that_lie_in_the_padding_are_seen(size, kernel, stride, pad, axis):
    hw = (size, 4) if axis == 0 else (4, size)
    windows = [(kernel, stride, pad), (2, 2, 0)][:: 1 if axis == 0 else -1]
    (kh, sh, ph), (kw, sw, pw) = windows
    g = PoolGeometry("max", kh, kw, sh, sw, ph, pw, True)
    last = [(n - 1) * s - p for n, s, p in zip(g.out_hw(*hw), (sh, sw), (ph, pw))]
    expected = all(start < n for start, n in zip(last, hw))
    assert onednn_pooling._windows_touch_image(np.empty((1, 1, *hw)), g) == expected


@needs_onednn
@each(kind=["max", "average"], shape=[(2, 3, 7, 6), (1, 17, 40, 40)], size=[3, 17])
def test_a_child_takes_the_gradient_of_its_parents_pooling(kind, shape, size):
    size = min(size, *shape[2:])
    rng, g = np.random.default_rng(0), PoolGeometry(kind, size, size, 2, 2, 1, 1)
    x = backend.channels_last(rng.standard_normal(shape, np.float32))
    with kernels.use("onednn"):
        y, (_, saved) = kernels.pool_forward(x, g)
    assert (saved is None) == (kind == "average") and (saved is None or saved.ndim == 1)
    gy = backend.channels_last(rng.standard_normal(y.shape, np.float32))
    expected = numpy_.pool_backward(gy, shape, numpy_.pool_forward(x, g)[1], g)
    np.testing.assert_allclose(onednn_pooling._backward_of_parent(gy, shape, saved, g), expected, atol=1e-6)


@needs_onednn
def test_a_maximum_over_nan_is_numpys_with_its_positions():
    g = PoolGeometry("max", 2, 2, 2, 2)
    x = backend.channels_last(np.arange(32.0, dtype=np.float32).reshape(1, 2, 4, 4))
    x[0, 1, 0, 1] = np.nan
    with kernels.use("onednn"):
        y, saved = kernels.pool_forward(x, g)
        positions = kernels.pool_indices(saved, y.shape, g)
    expected = np.full((1, 2, 2, 2), 3)
    expected[0, 1, 0, 0] = 1
    np.testing.assert_array_equal(positions, expected)
    assert np.isnan(y[0, 1, 0, 0]) and np.isfinite(y).sum() == 7


# ---- convolutions


def test_images_of_channels_in_pairs_are_looked_at_for_what_is_not_finite():
    served = lambda x, *arguments: "served"  # noqa: E731
    plan = onednn_convolution.in_pairs(lambda x: served, lambda x: "reference", lambda x: x.shape[1])
    x = np.ones((1, 3, 2, 2), np.float32)
    assert plan(x) is served and plan(x[:, :2].astype(BF16)) is served
    odd = x.astype(BF16)
    convolution = plan(odd)
    assert convolution is not served
    odd[0, 2, 1, 1] = np.nan
    for layout in (np.ascontiguousarray, backend.channels_last):
        assert convolution(layout(x.astype(BF16))) == "served"
        assert convolution(layout(odd)) == "reference"


def test_places_of_columns_are_kept_and_cannot_be_changed():
    g = kernels.ConvGeometry(1, 1, 1, 1)
    index, is_padded = columns._gather((1, 2, 3, 3), (2, 2), (4, 4), g)
    assert is_padded and not index.flags.writeable
    assert columns._gather((1, 2, 3, 3), (2, 2), (4, 4), g)[0] is index
    assert not columns._scatter((1, 2, 3, 3), (2, 2), (4, 4), g).flags.writeable
    assert not columns._gather((1, 2, 3, 3), (2, 2), (2, 2), kernels.ConvGeometry())[1]


POINT = kernels.ConvGeometry()
IMAGE, WEIGHTS = backend.channels_last(np.ones((1, 8, 4, 4), "f")), np.ones((6, 8, 3, 3), "f")


def serves(x=IMAGE, W=WEIGHTS, g=POINT, gy_dtype="f"):
    """Who takes the three directions."""
    y_shape = (x.shape[0], W.shape[0], *g.out_hw(*x.shape[2:], *W.shape[2:]))
    gy = backend.channels_last(np.ones(y_shape, gy_dtype))
    return [
        kernels.provider_of("conv_forward", x, W, None, g),
        kernels.provider_of("conv_backward_data", gy, W, x.shape, g),
        kernels.provider_of("conv_backward_weight", x, gy, W.shape, g, W.dtype, None),
    ]


def test_small_convolutions_of_one_type_are_columns():
    with kernels.use("columns"):
        assert serves() == ["columns"] * 3
        assert serves(g=kernels.ConvGeometry(1, 1, 1, 1)) == ["columns"] * 3
        assert serves(IMAGE.astype("d"), WEIGHTS.astype("d"), gy_dtype="d") == ["columns"] * 3
        assert serves(IMAGE.astype("e"), WEIGHTS.astype("e"), gy_dtype="e") == ["numpy"] * 3
        assert serves(W=WEIGHTS.astype("d")) == ["numpy"] * 3
        assert serves(gy_dtype="d") == ["columns", "numpy", "numpy"]
        assert serves(W=WEIGHTS[:, :4], g=POINT._replace(groups=2)) == ["numpy"] * 3
        for num_pixels, name in ((768, "columns"), (769, "numpy")):  # columns of 3 << 11 elements at most
            x = backend.channels_last(np.ones((1, 8, num_pixels, 1), "f"))
            assert serves(x, np.ones((2, 8, 1, 1), "f")) == [name] * 3


def test_gradients_of_weights_are_columns_only_where_they_are_written_in_their_type():
    gy = np.ones((1, 6, 2, 2), "f")
    with kernels.use("columns"):
        for target, name in (("f", "columns"), ("d", "numpy")):
            out = np.empty(WEIGHTS.shape, target)
            assert kernels.provider_of("conv_backward_weight", IMAGE, gy, WEIGHTS.shape, POINT, F32, out) == name
            dtype = np.dtype(target)
            assert kernels.provider_of("conv_backward_weight", IMAGE, gy, WEIGHTS.shape, POINT, dtype, None) == name


# ---- plans and their keys


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


def test_updates_of_nothing_have_plans_of_their_own():
    some, none = np.ones(3, "f"), np.ones(0, "f")
    found = {update_key("sgd", arrays, ()) for arrays in ((some, some), (none, some), (some, None), (some, some[:1]))}
    assert len(found) == 3


# ---- memory and descriptors of the library


@each(num_bytes=[1, 64, 1000])
def test_scratch_lies_on_a_cache_line_within_its_memory(num_bytes):
    for _ in range(20):
        a = onednn._on_a_cache_line(num_bytes)
        assert a.nbytes == num_bytes and a.ctypes.data % 64 == 0
        low, high = np.lib.array_utils.byte_bounds(a.base)
        assert low <= a.ctypes.data and a.ctypes.data + num_bytes <= high


@needs_onednn
def test_descriptors_without_strides_lie_in_c_order():
    with onednn.Builder() as b:
        for shape in ((5,), (2, 3), (4, 2, 3), (2, 3, 4, 5), (3, 1, 2, 2, 4)):
            dense = [s // 4 for s in np.empty(shape, "f").strides]
            assert b.equal(b.memory(shape, onednn.F32), b.memory(shape, onednn.F32, dense))
            assert b.size(b.memory(shape, onednn.F32)) == 4 * math.prod(shape)


def test_libraries_that_do_not_serve_are_named_with_the_reason(monkeypatch):
    old = types.SimpleNamespace(dnnl_version=lambda: [2, 7, 1])
    found = {"a": OSError("no such file"), "b": old, "c": types.SimpleNamespace()}

    def load(path):
        if isinstance(found[path], Exception):
            raise found[path]
        return found[path]

    old.dnnl_version = type("Function", (), {"restype": None, "__call__": lambda self: [2, 7, 1]})()
    monkeypatch.setattr(onednn, "_candidates", lambda: list(found))
    monkeypatch.setattr(onednn.ctypes, "CDLL", load)
    words = r"^no such file; b is oneDNN 2\.7, expected version 3; .*dnnl_version"
    with pytest.raises(onednn.Unavailable, match=words):
        onednn._open()


# ---- who serves


def refuse(*arguments):
    raise onednn.Unavailable("it is gone")


@each(
    **{"system, machine, name, warns": [
        ("Linux", "x86_64", "onednn", True), ("Linux", "aarch64", "onednn", False),
        ("Darwin", "x86_64", "onednn", False),
        ("Linux", "x86_64", "cudnn", True), ("Linux", "aarch64", "cudnn", True), ("Windows", "AMD64", "cudnn", False),
    ]}
)  # fmt: skip
def test_a_missing_library_is_warned_of_once_where_it_could_be_installed(system, machine, name, warns, monkeypatch):
    kernel = "conv_forward"
    monkeypatch.setattr(providers.platform, "system", lambda: system)
    monkeypatch.setattr(providers.platform, "machine", lambda: machine)
    monkeypatch.setattr(providers, "_warned", set())
    monkeypatch.setattr(providers, "_forced", None)
    rows = {kernel: refuse, "add": refuse}
    monkeypatch.setattr(providers, "PROVIDERS", {name: rows, "numpy": dict.fromkeys(rows, lambda *a: "plan")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert providers.choose("add", ()) == ("numpy", "plan")  # NumPy's own is not much slower
        assert not caught
        for _ in range(2):
            assert providers.choose(kernel, ()) == ("numpy", "plan")
    said = {"onednn": "oneDNN is not available (it is gone)", "cudnn": "cuDNN is not available (it is gone)"}[name]
    assert [str(w.message).startswith(said) for w in caught] == [True] * warns


# ---- two steps, block by block


@needs_onednn
def test_what_is_not_finite_in_one_block_is_masked_there_and_stays_there():
    block = onednn_blocks._BLOCK
    shape = (1, 8, (2 * block + 24) // 8, 1)
    rng = np.random.default_rng(0)
    y, a, b = (backend.channels_last(rng.standard_normal(shape, np.float32)) for _ in range(3))
    y = np.maximum(y, 0)
    for bad in ([2 * block - 1], [2 * block + 23], [0, block, 2 * block], []):
        onednn_finite.memory_row(a)[bad] = np.inf
        with kernels.use("onednn"), np.errstate(invalid="ignore"):
            assert kernels.provider_of("relu_backward_of_sum", y, a, b, None) == "onednn"
            gx = kernels.relu_backward_of_sum(y, a, b)
        np.testing.assert_array_equal(gx, np.where(y > 0, a + b, np.float32(0)))
        onednn_finite.memory_row(a)[bad] = 1


@needs_onednn
def test_a_gradient_that_is_not_finite_in_one_block_is_written_over_there_alone():
    block = onednn_blocks._BLOCK
    shape = (1, 8, (4 * block + 24) // 8, 1)
    rng = np.random.default_rng(0)
    y, gy = (backend.channels_last(rng.standard_normal(shape, np.float32)) for _ in range(2))
    y = np.maximum(y, 0)
    row = onednn_finite.memory_row(gy)
    row[[3, 2 * block - 1, 4 * block + 23]] = np.inf, np.nan, -np.inf
    for places in ((3, 0), (2 * block - 1, 0), (4 * block + 23, 0), (4 * block + 22, 1)):
        onednn_finite.memory_row(y)[places[0]] = places[1]
    expected = np.where(y > 0, gy, np.float32(0))
    with kernels.use("onednn"), np.errstate(invalid="ignore"):
        assert kernels.provider_of("relu_backward_over", y, gy) == "onednn"
        assert kernels.relu_backward_over(y, gy) is gy
    np.testing.assert_array_equal(gy, expected)


@needs_onednn
def test_layer_normalization_backward_takes_statistics_of_float32_alone():
    x, row, statistics = np.ones((4, 5), "f"), np.ones(5, "f"), np.ones(4, "f")
    plan = onednn_layer_norm._plan_backward
    assert callable(plan(x, row, statistics, statistics, x, 1e-5))
    for mean, var in ((statistics.astype("d"), statistics), (statistics, statistics.astype("d"))):
        with pytest.raises(onednn.Unsupported, match="statistics of"):
            plan(x, row, mean, var, x, 1e-5)
