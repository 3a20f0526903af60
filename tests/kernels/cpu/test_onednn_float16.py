"""Tests of dbrdist.kernels.cpu.onednn_float16."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn, onednn_float16

F32 = np.dtype("f")
F16 = np.dtype("e")
BF16 = backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


def test_float16_is_served_as_float32():
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
