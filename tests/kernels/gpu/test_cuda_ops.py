"""Tests of dbrdist.kernels.gpu.cuda_ops."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.kernels.gpu import cuda_ops, cuda_source
from tests.each import each


@pytest.fixture(autouse=True)
def nothing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_source, "require", lambda *arrays: None)
    for name in ("images", "plain"):
        monkeypatch.setattr(cuda_source, name, lambda shape, dtype: None)


@each(**{"dtype, blocks": [("f", 1024), ("e", 512), ("d", 2048)]})
def test_a_thread_of_a_sum_reads_sixteen_bytes_at_once(monkeypatch, dtype, blocks):
    noted = []
    monkeypatch.setattr(cuda_ops, "require", lambda *arrays: None)
    monkeypatch.setattr(cuda_source, "kernel", lambda *name: lambda *launched: noted.append((name, *launched)))
    x = np.zeros(1 << 20, dtype)
    run, _ = cuda_ops._map("add", x, x)
    run(x, x, "room")
    ((name, grid, block, arguments),) = noted
    assert name == ("elementwise", "add", x.dtype) and (grid, block) == ((blocks,), (256,))
    assert arguments[0] is x and arguments[2:] == ("room", 1 << 20)
