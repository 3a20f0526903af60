"""Tests of dbrdist.kernels.small_arrays.small."""

from __future__ import annotations

from dbrdist.kernels.small_arrays import small, small_numpy


def test_each_name_stands_for_numpys_calls_too():
    names = [name for name in vars(small) if not name.startswith("_")]
    assert len(names) > 5
    assert [name for name in names if not callable(getattr(small_numpy, name, None))] == []
