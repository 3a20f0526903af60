"""Tests of dbrdist.core.model.device_resident."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist.core.model.device_resident import DeviceResidentsVisitor


class Table(dbrdist.DeviceResident):
    """Values that a link owns beside its parameters."""

    def __init__(self):
        self.values = np.arange(3)

    def device_resident_accept(self, visitor):
        super().device_resident_accept(visitor)
        self.values = visitor.visit_array(self.values)


class WithTable(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        self.table = Table()
        with self.init_scope():
            self.inner = dbrdist.Link(W=(2, 2))
            self.many = dbrdist.ChainList(dbrdist.Link(b=3))
        self.inner.add_persistent("count", np.zeros(1))
        self.inner.add_persistent("name_of", "words")

    def device_resident_accept(self, visitor):
        super().device_resident_accept(visitor)
        self.table.device_resident_accept(visitor)


class Noting(DeviceResidentsVisitor):
    def __init__(self):
        self.objects, self.params, self.arrays = [], [], []

    def visit_device_resident(self, device_resident):
        self.objects.append(type(device_resident).__name__)

    def visit_variable(self, param):
        self.params.append(param.name)

    def visit_array(self, arr):
        self.arrays.append(arr)
        return arr + 1


def test_a_visitor_sees_all_that_a_chain_owns():
    model, visitor = WithTable(), Noting()
    model.device_resident_accept(visitor)
    assert visitor.objects == ["WithTable", "Link", "ChainList", "Link", "Table"]
    assert visitor.params == ["W", "b"] and [a.tolist() for a in visitor.arrays] == [[0], [0, 1, 2]]
    assert model.inner.count.tolist() == [1] and model.table.values.tolist() == [1, 2, 3]


def test_everything_moves_with_the_link(monkeypatch):
    """To a place that stands for a GPU: what matters is that all of it is asked to move, the table too."""
    moved = []
    monkeypatch.setattr("dbrdist.core.model.device_resident.to_device", lambda a, device: moved.append(a.size) or a)
    model = WithTable()
    assert model.to_device("@numpy") is model and moved == [1, 3]
    with pytest.deprecated_call():
        assert model.to_cpu() is model and isinstance(model, dbrdist.DeviceResident)
    assert model.device == model.inner.device == model.table.device == dbrdist.get_device("@numpy")
    assert model.xp is np


def test_a_visitor_says_what_to_define():
    for name in ("visit_device_resident", "visit_variable", "visit_array"):
        with pytest.raises(NotImplementedError, match=f"DeviceResidentsVisitor must define {name}"):
            getattr(DeviceResidentsVisitor(), name)(None)
