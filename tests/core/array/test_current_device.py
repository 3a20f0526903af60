"""Tests of dbrdist.core.array.current_device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from dbrdist.core.array import current_device
from dbrdist.core.array.current_device import On, Visitor, elsewhere, elsewhere_in, number_of, on, several
from dbrdist.functions.rectified import MaskedGradient


class OnGpu:
    """An array of a GPU, by its number."""

    def __init__(self, number):
        self.data = SimpleNamespace(device_id=number)


@pytest.fixture
def used(monkeypatch):
    """The devices that were made current, on a machine of several GPUs."""
    log = [0]

    def device(number):
        return SimpleNamespace(use=lambda: log.append(number))

    runtime = SimpleNamespace(getDevice=lambda: log[-1])
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device), ndarray=OnGpu)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return log


def test_arrays_of_the_host_have_no_number():
    nothing = None, 3, "text", np.ones(2), np.float32(1), np.zeros(()), np.ones(2, [("a", "f")])
    assert [number_of(x) for x in nothing] == [None] * len(nothing)
    assert elsewhere(nothing) is None and on(*nothing) is current_device.HERE and several(nothing) == []
    with on(np.ones(2)):
        pass


def test_the_number_of_what_holds_an_array():
    a = OnGpu(2)
    variable, deferred = SimpleNamespace(_array=a), SimpleNamespace(part=a)
    assert (number_of(a), number_of(variable), number_of(deferred)) == (2, 2, 2)


def test_a_deferred_gradient_of_bfloat16_is_on_the_host():
    """Python refuses to show the data of such an array, so that nobody may ask for it."""
    gy = np.ones((2, 3), bfloat16)
    deferred = MaskedGradient(gy, np.negative, False)
    assert number_of(deferred) is None and elsewhere([deferred]) is None


def test_the_first_array_decides(used):
    host, a, b = np.ones(2), OnGpu(0), OnGpu(1)
    assert elsewhere([host, b, a]) == 1 and elsewhere([host, a, b]) is None
    assert elsewhere_in([host, {"x": (None, [b])}]) == 1 and elsewhere_in([[a], b]) is None
    assert several([host, b, a, b]) == [0, 1] and several([b, b, host]) == []


def test_a_context_comes_back(used):
    with on(np.ones(2), OnGpu(1)):
        assert used == [0, 1]
        with on(OnGpu(1)):
            assert used == [0, 1]
        with pytest.raises(ValueError), On(3):
            raise ValueError
        assert used == [0, 1, 3, 1]
    assert used == [0, 1, 3, 1, 0]


def test_a_visitor_comes_back_to_where_it_began(used):
    visitor = Visitor()
    for number in (0, 2, 2, 1):
        visitor.visit((None, OnGpu(number)))
    assert used == [0, 2, 1] and visitor.home == 0
    visitor.go_home()
    visitor.go_home()
    assert used == [0, 2, 1, 0] and visitor.home is None
