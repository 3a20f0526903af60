"""Tests of dbrdist.core.model.chain."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Chain


def test_nothing_is_registered_before_a_link_is_made():
    class Early(dbrdist.Chain):
        def __init__(self):
            assert not self.within_init_scope
            self.before = 1
            super().__init__()
            with self.init_scope():
                assert self.within_init_scope
            assert not self.within_init_scope

    assert Early().before == 1


def test_shared_parameters_are_added_and_counted_once():
    one = Chain(a=L.Linear(2, 2))
    one.add_link("b", one.a)
    other = copy.deepcopy(one)
    for p in other.params():
        p.grad = np.ones_like(p.array)
    one.addgrads(other)
    assert one.a.b.grad.tolist() == [1, 1] and one.count_params() == 6
    with pytest.deprecated_call():
        one.zerograds()
    assert one.a.b.grad.tolist() == [0, 0]
    one.cleargrads()
    assert one.a.b.grad is None
