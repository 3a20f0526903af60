"""Tests of dbrdist.comm.protocol.wire_type."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm.gradients import compression
from dbrdist.comm.protocol import wire_type
from dbrdist.comm.protocol.wire_type import Codec, Narrowed, Scaled, codec_for
from dbrdist.core.array.backend import as_dtype
from tests.each import each


@each(**{"dtype, kind": [(None, Codec), ("f2", Scaled), ("bfloat16", Narrowed), ("f4", Narrowed), ("f8", Narrowed)]})
def test_types_of_few_orders_of_magnitude_are_scaled(dtype, kind):
    assert type(codec_for(dtype and as_dtype(dtype))) is kind


@each(**{"codec, dtype": [(Codec(), "f4"), (Narrowed(as_dtype("f8")), "f8"), (Scaled(as_dtype("f2")), "f2")]})
def test_what_is_added_up_is_what_travels(codec, dtype):
    """The array itself, in place, where it has the type in which it travels."""
    codec.scale = 4.0
    for own in ("f4", dtype):
        x = np.array([1.0, 2.5, -3.0], own)
        seen = []

        def add(travelling, x=x, seen=seen):
            seen.append((travelling is x, travelling.dtype, travelling[1]))
            travelling *= 2

        codec.carry(x, add)
        assert seen == [(own == dtype, dtype, 2.5 if own == dtype else 4 * 2.5)]
        assert x.tolist() == [2.0, 5.0, -6.0] and x.dtype == own


SCALES = [
    (0.0, 2.0, 0), (np.inf, 2.0, 0), (np.nan, 2.0, 0), (1.0, 1.0, 14), (1.0, 0.5, 14), (1.0, 4.0, 12), (3.0, 1.0, 13),
    (70000.0, 1.0, -2), (1e-40, 1.0, 120),
]  # fmt: skip


@each(**{"largest, growth, power": SCALES})
def test_the_scale_that_ranks_agree_on(largest, growth, power):
    """The largest result lands between a quarter and half of the largest number of float16, 65504; zeros need none."""
    codec = Scaled(as_dtype("f2"))
    codec.scale = 8.0  # of the step before
    call = SimpleNamespace(agree=lambda word: np.array([word, np.zeros_like(word)]))
    grads = [np.array([largest, -largest / 2]), np.empty(0), np.array([-largest])]
    codec.prepare(call, grads, growth)
    assert codec.scale == 2.0**power


@each(
    **{
        "size, factors, divisor, ranks, found": [
            (4, None, 4.0, (), 1.0), (4, None, 2.0, (), 2.0), (4, None, None, (), 4.0), (4, None, 4.0, (1, 2, 3), 3.0),
            (4, None, 1.0, (1, 2), 4.0), (2, [0.25, 0.5], None, (), 0.75), (2, [2.0, 6.0], 4.0, (), 2.0),
            (2, [2.0, 6.0], 4.0, (1,), 6.0), (3, [1.0, 2.0, 4.0], 14.0, (0, 1), 3.0),
        ]
    }
)  # fmt: skip
def test_how_many_times_its_largest_element_a_sum_can_be(size, factors, divisor, ranks, found):
    result = wire_type.growth(size, factors, divisor, ranks)
    assert result == found and type(result) is float


@each(
    **{"dtype, largest": [("float16", 65504.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0), ("f4", 2.0**128)]}
)
def test_the_largest_number_of_a_type(dtype, largest):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert wire_type.largest_number(kind) == pytest.approx(largest, rel=1e-7)


def test_ranks_meet_before_they_give_each_other_their_largest_elements():
    done = []
    comm = SimpleNamespace(size=1)
    comm.ranks = SimpleNamespace(meet=lambda call: done.append(call))

    def gather(mine, raw, counts, starts):
        raw[:] = mine
        done.append((counts, starts))

    comm.ranks.allgather_bytes = gather
    call, grad = SimpleNamespace(num_bytes=0), np.array([1.0, -3.0, 2.0], "f4")
    compression.TopK(0.5)._reduce(comm, call, 0, None, grad, grad.copy())
    assert done == [call, ([16], [0])] and grad.tolist() == [0, -3, 2] and call.num_bytes == 16


@each(**{"grads, largest": [((), 0.0), ((np.empty(0),), 0.0), ((np.empty(0), np.array([0.25, -0.5])), 1.5)]})
def test_a_rank_without_gradients_asks_for_no_scale(grads, largest):
    shown = []
    call = SimpleNamespace(agree=lambda word: shown.append(word.view(float)[0]) or np.array([word]))
    wire_type.Scaled(np.dtype("f2")).prepare(call, grads, 3.0)
    assert shown == [largest]
