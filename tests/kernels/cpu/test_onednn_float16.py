"""Tests of dbrdist.kernels.cpu.onednn_float16."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.errors import UsageWarning
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn, onednn_float16
from tests.kernels.provider_helpers import needs_onednn

F32 = np.dtype("f")
F16 = np.dtype("e")
BF16 = backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


def test_float16_is_served_as_float32(monkeypatch):
    seen = []

    def planner(*arguments):
        seen.append(arguments)
        return lambda *arguments: seen.append(arguments) or np.full(3, 1.5, "f")

    x, other = np.ones(3, "e"), np.ones(2, BF16)
    plan = onednn_float16.also_float16(planner)(x, 7, F16, other, None)
    planned = seen.pop()
    assert [getattr(a, "dtype", a) for a in planned] == [F32, 7, F32, BF16, None]
    y = plan(x, 7, F16, other, None)
    assert y.dtype == F16 and y.tolist() == [1.5] * 3
    assert [getattr(a, "dtype", a) for a in seen.pop()] == [F32, 7, F32, BF16, None]
    assert onednn_float16.also_float16(planner)(x, F32)(x, F32).dtype == F32
    seen.clear()
    onednn_float16.also_float16(planner)(x, BF16, np.dtype("d"), "float16")
    assert seen.pop()[1:] == (BF16, np.dtype("d"), "float16")
    monkeypatch.setattr(onednn, "has_bfloat16", lambda: True)
    for first in (np.ones(3, "f"), other, [1.0]):
        onednn_float16.also_float16(planner)(first, x)
        assert seen.pop() == (first, x)  # as they are


def test_memory_of_float16_is_not_written_to_in_float32():
    plan = onednn_float16.also_float16(lambda *arguments: lambda *arguments: arguments[1], out=1)
    x, narrow, wide = np.ones(3, "e"), np.zeros(3, "e"), np.zeros(3, "f")
    refuses(plan, x, narrow)
    assert plan(x, wide)(x, wide) is wide
    assert plan(x)(x, wide).dtype == F16
    assert plan(x, None)(x, wide).dtype == F16


@pytest.fixture
def without_instructions(monkeypatch):
    """A processor with AVX-512, and without instructions for bfloat16."""
    monkeypatch.setattr(onednn, "has_bfloat16", lambda: False)
    monkeypatch.setattr(onednn, "has_avx512", lambda: True)
    monkeypatch.setattr(onednn_float16, "narrow", lambda a: a.astype(BF16))


def test_bfloat16_is_served_as_float32_where_the_processor_does_not_multiply_it(without_instructions):
    def planner(x, *rest):
        assert x.dtype == F32
        return lambda x, *rest: np.full(3, 1.5, x.dtype)

    x = np.ones(3, BF16)
    assert onednn_float16.also_float16(planner)(x, BF16)(x, BF16).dtype == BF16
    assert onednn_float16.also_float16(planner)(x, F32)(x, F32).dtype == F32
    refuses(onednn_float16.also_float16(planner, out=1), x, x)


def test_a_processor_without_avx512_is_said_to_be_slow(without_instructions, monkeypatch):
    monkeypatch.setattr(onednn, "has_avx512", lambda: False)
    onednn_float16._say_that_it_takes_longer.cache_clear()
    x, plan = np.ones(3, BF16), onednn_float16.also_float16(lambda *a: lambda *a: a[0])
    with pytest.warns(UsageWarning, match="bfloat16 takes longer than float32"):
        assert plan(x)(x).dtype == BF16
    assert plan(x)(x).dtype == BF16  # said once
    onednn_float16._say_that_it_takes_longer.cache_clear()


@needs_onednn
def test_convolutions_and_products_of_bfloat16_without_instructions(without_instructions):
    rng = np.random.default_rng(0)
    x, W, geometry = rng.standard_normal((2, 16, 8, 8)), rng.standard_normal((32, 16, 3, 3)), ConvGeometry(1, 1, 1, 1)
    x, W = backend.channels_last(x.astype(BF16)), W.astype(np.float32)
    kernels.table.forget()
    with kernels.use("onednn"):
        y = kernels.conv_forward(x, W, None, geometry)
        gx, gW = (
            kernels.conv_backward_data(y, W, x.shape, geometry),
            kernels.conv_backward_weight(x, y, W.shape, geometry, W.dtype),
        )
        of_wide = kernels.conv_forward(x.astype("f"), W, None, geometry)
        product = kernels.matmul(x.reshape(128, 16), W.reshape(-1, 16)[:288].T.astype(BF16))
    kernels.table.forget()
    assert y.dtype == gx.dtype == product.dtype == BF16 and gW.dtype == F32
    np.testing.assert_array_equal(y.astype("f"), of_wide.astype(BF16).astype("f"))
