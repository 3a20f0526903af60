"""Tests of dbrdist.core.model.parameter; parameters in flat memory are in test_flat.py."""

from __future__ import annotations

import copy

import numpy as np

from dbrdist import Parameter
from dbrdist.core.model import flat, parameter
from dbrdist.core.tape import node


def new():
    return Parameter(1.0, (3,))


def is_writeable(p):
    return p._array.flags.writeable


def test_what_a_kernel_makes_is_kept_until_somebody_asks_for_the_array():
    p = new()
    kept = p.keep()
    assert kept is not None and kept.made == (None, None) and not is_writeable(p)
    assert p.keep() is kept
    a = p.array
    assert a.flags.writeable and p.keep() is None and is_writeable(p)  # who has it may write at any time
    del a
    again = p.keep()
    assert again is not None and again is not kept


def test_a_write_or_a_loan_ends_what_is_kept():
    for end in (lambda p: p.write(2.0), lambda p: p.lend(), Parameter.release):
        p = new()
        kept = p.keep()
        end(p)
        assert is_writeable(p) and p.keep() is not kept


def test_there_is_no_place_where_others_may_write():
    a = np.arange(3.0)
    shared = Parameter(a)
    assert shared.keep() is None and is_writeable(shared)
    frozen = new()
    frozen.array.flags.writeable = False  # by the program, which may allow writing again
    assert frozen.keep() is None and not is_writeable(frozen)
    moved = new()
    flat.gather([moved])
    assert moved.keep() is None and is_writeable(moved)


def test_only_flat_memory_with_copies_has_them_to_read():
    class Copies:
        def reader_of(self, *words):
            return words

    p = new()
    assert p.copy_for_reading() is None
    flat.gather([p])
    slot = p.slot
    assert p.copy_for_reading() is None
    copies = Copies()
    slot.give_copies(copies)
    assert p.copy_for_reading() == (p, slot)
    p.array = np.arange(4.0)  # no longer there
    assert p.copy_for_reading() is None


def test_a_loan_to_write_counts_as_a_write():
    p = new()
    assert p.lend() is p.lend(to_write=True)  # where nobody counts
    flat.gather([p])
    arena, before = p.slot.arena, p.slot.arena.num_writes
    assert p.lend() is p._array and arena.num_writes == before
    assert p.lend(to_write=True) is p._array and arena.num_writes > before


def test_a_program_that_had_the_array_before_it_moved_has_not_seen_flat_memory():
    p = new()
    assert not p.node.is_handed_out and p.array is not None and p.node.is_handed_out
    flat.gather([p])
    assert not p.node.is_handed_out and p.array is not None and p.node.is_handed_out


def test_new_values_count_as_a_write_to_flat_memory():
    alone, p = new(), new()
    node.note_assignment(alone)
    flat.gather([p])
    before, assigned = p.slot.arena.num_writes, node.assignments[0]
    node.note_assignment(p)
    assert p.slot.arena.num_writes > before
    assert p.node.assigned == node.assignments[0] == assigned + 1 > alone.node.assigned > 0
    assert node.assigned_parameters[p.node]() is p


def test_none_as_an_initializer_is_nan():
    a = np.zeros((2, 3), "f")
    parameter._fill_with_nan(a)
    assert np.isnan(a).all() and parameter._fill_with_nan.dtype is None


def test_who_leaves_shared_memory_shares_it_no_more():
    p = new()
    q, r = copy.copy(p), copy.copy(p)
    assert p.is_shared and q.is_shared and set(p._others()) == {q, r}
    p.array = np.zeros(4)
    assert not p.is_shared and q.is_shared and q._others() == [r]
    q.leave_arena()
    assert not q.is_shared and not r.is_shared and r._others() == [] == q._others()
