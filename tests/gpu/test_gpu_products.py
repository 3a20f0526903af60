"""Products of 16-bit matrices against float64, by cuBLASLt (``--on whole``) and without it (``--on host-cuda``)."""

from __future__ import annotations

import numpy as np
import pytest
from support import put

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels.gpu import cublaslt
from dbrdist.kernels.unsupported import Unsupported

F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def with_kernels(on):
    if on not in ("host-cuda", "whole"):
        pytest.skip("runs with --on whole and --on host-cuda")
    with kernels.use("cuda", "cudnn"):
        yield


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request):
    return backend.as_dtype(request.param)


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setattr(cublaslt, "is_there", lambda: False)


def near(a, exact, eps):
    """Within some roundings of the largest number."""
    np.testing.assert_allclose(backend.to_cpu(a).astype("d"), exact, atol=eps * max(1.0, abs(exact).max()))


def eps_of(dtype):
    return 2.0**-7 if dtype.name == "bfloat16" else 2.0**-9


def operands(rng, dtype):
    """x, W, b and gy; the layer has 7 inputs and 5 outputs."""
    x, gy = (rng.standard_normal(shape).astype(dtype) for shape in ((33, 7), (33, 5)))
    return x, rng.standard_normal((5, 7)).astype("f"), rng.standard_normal(5).astype("f"), gy


def test_linear_keeps_the_weights_that_it_read(dtype, device, rng):
    x, W, b, _ = operands(rng, dtype)
    for bias in (b, None):
        y, laid = kernels.linear_and_keep(*put(device, x, W), bias if bias is None else put(device, bias), None)
        near(y, x.astype("d") @ W.astype(dtype).astype("d").T + (0 if bias is None else b), eps_of(dtype))
        np.testing.assert_array_equal(backend.to_cpu(laid).astype("f"), W.astype(dtype).astype("f"))
    y, laid = kernels.linear_and_keep(*put(device, *operands(rng, np.dtype("f"))[:2]), None, None) or (None, None)
    assert laid is None  # weights of one type with x are read as they are


@pytest.mark.parametrize("where", ["new", "given", "at odd places"])
def test_gradients_of_weights_and_biases_at_once(where, on, dtype, device, rng):
    x, _, _, gy = operands(rng, dtype)
    flat = put(device, np.zeros(64, "f"))
    shift = where == "at odd places"
    outs = (None, None) if where == "new" else (flat[shift : 35 + shift].reshape(5, 7), flat[40 + shift : 45 + shift])
    gW, gb = kernels.linear_weight_gradients(*put(device, gy, x), (F32, F32), *outs)
    if where != "new":
        assert (gW, gb) == outs or (gW is outs[0] and gb is outs[1])
    near(gW, gy.astype("d").T @ x.astype("d"), 1e-5 if on == "whole" else eps_of(dtype))  # cuBLASLt rounds nothing
    near(gb, gy.astype("d").sum(0), 1e-5)


def test_gradients_without_the_library_are_rounded(dtype, device, rng, without_library):
    x, _, _, gy = operands(rng, dtype)
    gW, gb = kernels.linear_weight_gradients(*put(device, gy, x), (F32, F32), None, None)
    near(gW, gy.astype("d").T @ x.astype("d"), eps_of(dtype))
    near(gb, gy.astype("d").sum(0), 1e-5)


def test_gradients_of_float32_are_made_at_once_too(on, device, rng, monkeypatch):
    """Unless CuPy's products take TF32, or there is no library."""
    x, _, _, gy = operands(rng, np.dtype("f"))
    made = kernels.linear_weight_gradients(*put(device, gy, x), (F32, F32), None, None)
    assert (made is None) == (on == "host-cuda")
    if made is not None:
        near(made[0], gy.astype("d").T @ x.astype("d"), 1e-5)
        near(made[1], gy.astype("d").sum(0), 1e-5)
    monkeypatch.setenv("CUPY_TF32", "1")
    kernels.table.forget()
    assert kernels.linear_weight_gradients(*put(device, gy, x), (F32, F32), None, None) is None
    kernels.table.forget()


def test_other_types_are_left_to_single_calls(device, rng):
    x, _, _, gy = operands(rng, np.dtype("f"))
    half = put(device, gy.astype("e"), x.astype("e"))
    assert kernels.linear_weight_gradients(*half, (np.dtype("e"), F32), None, None) is None


def test_stacks_are_multiplied_as_they_are(on, dtype, device, rng):
    a, b = rng.standard_normal((2, 3, 4, 8)).astype(dtype), rng.standard_normal((2, 3, 8, 5)).astype(dtype)
    y = kernels.stacked_matmul(*put(device, a.reshape(6, 4, 8), b.reshape(6, 8, 5)))
    if on == "host-cuda":  # where there is no library
        assert y is None
        return
    near(y, (a.astype("d") @ b.astype("d")).reshape(6, 4, 5), eps_of(dtype))
    heads = put(device, a.reshape(6, 4, 8)).reshape(2, 3, 4, 8).transpose(0, 2, 1, 3)
    near(
        kernels.stacked_matmul(heads, heads.swapaxes(-1, -2)),
        (w := a.astype("d").transpose(0, 2, 1, 3)) @ w.swapaxes(-1, -2), eps_of(dtype),
    )  # fmt: skip


def test_stacks_for_whose_addresses_there_is_no_algorithm(on, dtype, device, rng, monkeypatch):
    if on == "host-cuda":
        pytest.skip("there is no library")
    flat = put(device, (numbers := rng.standard_normal((2, 2 * 4 * 8 + 1))).astype(dtype))
    kernels.stacked_matmul(flat[0, :-1].reshape(2, 4, 8), flat[1, :-1].reshape(2, 8, 4))

    def refuse(*_):
        raise Unsupported("no algorithm")

    monkeypatch.setattr(cublaslt._Product, "_chosen", refuse)
    y = kernels.stacked_matmul(flat[0, 1:].reshape(2, 4, 8), flat[1, 1:].reshape(2, 8, 4))
    a, b = numbers.astype(dtype).astype("d")[:, 1:].reshape(2, 2, 4, 8)
    near(y, a @ b.reshape(2, 8, 4), eps_of(dtype))


@pytest.mark.parametrize("wide", [False, True])
def test_gradients_of_layer_normalization_land_where_they_belong(wide, dtype, device, rng):
    x, gy = (rng.standard_normal((9, 40)).astype(dtype) for _ in range(2))
    gamma = rng.standard_normal(40).astype("f" if wide else dtype)
    mean, var = x.astype("f").mean(1), x.astype("f").var(1)
    room = put(device, np.zeros((2, 40), gamma.dtype))
    there = put(device, x, gamma, mean, var, gy)
    gx, ggamma, gbeta = kernels.ln_backward_into(*there, 1e-5, room[0], room[1])
    expected = kernels.ln_backward(*there, 1e-5)
    for a, b in zip((gx, ggamma, gbeta), expected, strict=True):
        np.testing.assert_array_equal(backend.to_cpu(a).astype("f"), backend.to_cpu(b).astype("f"))
    np.testing.assert_array_equal(
        backend.to_cpu(room).astype("f"), np.stack([backend.to_cpu(b).astype("f") for b in expected[1:]])
    )
