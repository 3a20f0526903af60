"""Tests of dbrdist.comm.links.wiring."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.links import chain_list, wiring
from dbrdist.comm.links.wiring import Component, ComponentSlot, Give, RunComponent, Take
from tests.each import each


@each(num_micro_batches=[1, 2])
def test_components_are_called_in_order_where_batches_are_cut(monkeypatch, num_micro_batches):
    """Of rank 1: the first takes the model's inputs, the second what has come in two slots."""
    called = []
    monkeypatch.setattr(chain_list, "_called_in_order", lambda link, xs: called.append(xs) or link(*xs))
    links = [lambda x: ("first", x.tolist()), lambda a, b: ("second", a, b)]
    model = SimpleNamespace(
        num_micro_batches=num_micro_batches, ends=((None, (1,)), ((0, 0), None)), comm=SimpleNamespace(rank=1)
    )
    found = chain_list._Pass(SimpleNamespace(**vars(model)), (np.arange(4),))
    found.model = type("Model", (), {"__getitem__": lambda self, k: links[k], **vars(model)})()
    found.run_component(0, 0)
    found.arrived = {
        (ComponentSlot(1, 1, 0), 0): "a",
        (ComponentSlot(1, 1, 1), 0): "b",
        (ComponentSlot(1, 1, 0), 1): "c",
    }
    found.run_component(1, 0)
    part = list(range(4 // num_micro_batches))
    assert found.made == {(0, 0): ("first", part)} and found.outputs == [("second", "a", "b")]
    assert list(found.arrived) == [(ComponentSlot(1, 1, 0), 1)] and len(called) == (0 if num_micro_batches == 1 else 2)


def test_two_ranks_work_on_different_parts_at_a_time():
    found = wiring.plan([[Component("a", None, (1,))], [Component("b", (0,), None)]], 2)
    to = ComponentSlot(1, 0, 0)
    assert found[0] == [RunComponent(0, 0), Give(0, 0, 1, to), RunComponent(0, 1), Give(0, 1, 1, to)]
    assert found[1] == [Take(to, 0, 0), RunComponent(0, 0), Take(to, 1, 0), RunComponent(0, 1)]
    assert [type(action) for action in found[1]] == [Take, RunComponent, Take, RunComponent]


def test_components_of_one_rank_hand_on_without_a_message():
    """There and back: a of rank 0 to b of rank 1, whose two outputs go to c and d of rank 0; c feeds d."""
    found = wiring.plan(
        [[Component("a", None, (1,)), Component("c", (1,), (0,)), Component("d", (1, 0), None)],
         [Component("b", (0,), (0, 0))]], 1,
    )  # fmt: skip
    b, c, d0, d1 = ComponentSlot(1, 0, 0), ComponentSlot(0, 1, 0), ComponentSlot(0, 2, 0), ComponentSlot(0, 2, 1)
    there_and_back = [Give(0, 0, 1, b), Take(c, 0, 1), Take(d0, 0, 1), RunComponent(1, 0), Give(1, 0, 0, d1)]
    assert found[0] == [RunComponent(0, 0), *there_and_back, RunComponent(2, 0)]
    assert found[1] == [Take(b, 0, 0), RunComponent(0, 0), Give(0, 0, 0, c), Give(0, 0, 0, d0)]


def test_wirings_that_cannot_be():
    ring = [[Component("a", (1,), (1,))], [Component("b", (0,), (0,)), Component("e", None, None)]]
    words = r"form a cycle, and none can begin: rank 0 \(a, component 0\) waits for rank 1 \(b, component 0\) waits"
    with pytest.raises(ValueError, match=words):
        wiring.plan(ring, 1)
    with pytest.raises(ValueError, match=r"outputs of rank 0 for rank 1: 1 \(a, component 0\), .*: 0 \(no component\)"):
        wiring.plan([[Component("a", None, (1,))], [Component("b", None, None)]], 1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank_out of a on rank 0: expected ranks from 0 to 1, got {rank}"):
            wiring.plan([[Component("a", None, (rank,))], []], 1)
        with pytest.raises(ValueError, match=f"rank_in of b on rank 1: expected ranks from 0 to 1, got {rank}"):
            wiring.plan([[], [Component("b", (rank,), None)]], 1)
