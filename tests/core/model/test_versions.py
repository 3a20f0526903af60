"""Tests of dbrdist.core.model.versions."""

from __future__ import annotations

import numpy as np

from dbrdist.core.model import flat, versions
from tests.core.core_helpers import two_parameters
from tests.each import each


@each(what=["data", "gradients"])
def test_an_arena_moves_with_all_that_lies_in_it(what):
    a, b = two_parameters()
    arena = a.slot.arena
    run = flat.Run([a, b])
    before = (run.data if what == "data" else run.grad).copy()
    memory = np.full(len(arena.data), -1.0)
    watches = [versions.Watch([a]), versions.Watch([b])]
    getattr(arena, f"move_{what}")(memory)
    assert not any(watch.is_current() for watch in watches)  # plans that hold the old places are made anew
    np.testing.assert_array_equal(memory[: run.size], before)
    assert (arena.data if what == "data" else arena.grad) is memory
    for p, values, gradients in ((a, [[1, 2, 3]], [[6, 7, 8]]), (b, [4, 5], [9, 10])):
        assert p.array.tolist() == values and p.grad.tolist() == gradients
        assert np.shares_memory(p.array if what == "data" else p.grad, memory)
        assert not np.shares_memory(p.grad if what == "data" else p.array, memory)
    memory[:] = 0.5
    assert (a.array if what == "data" else a.grad).tolist() == [[0.5] * 3]
