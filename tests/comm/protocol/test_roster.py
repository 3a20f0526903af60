"""Whether ranks make things of a kind in one order, by what each says of each of them."""

from __future__ import annotations

import threading

import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.protocol import roster
from dbrdist.comm.protocol.roster import CommonOrder
from dbrdist.errors import CommunicatorError
from tests.each import each


def order(*rows):
    made = CommonOrder(len(rows[0]))
    for row in rows:
        made.add(row)
    return made


@each(
    case=[
        ([(1, 1), (2, 2)], None), ([(1, 2), (2, 1)], (1, [0, 1])), ([(1, 2), (2, 3)], None),  # other examples
        ([(1, 1), (1, 1)], None), ([(1, 2), (2, 3), (3, 1)], (1, [0, 1, 2])), ([(1, 2), (2, 1), (3, 3)], None),
        ([(0, 0), (1, 2), (2, 1)], (1, [1, 2])), ([(1, 1, 2), (2, 2, 1)], (2, [0, 1])),
        ([(1, 1, 3), (2, 2, 4)], None), ([(1, 2), (2, 1), (4, 5), (5, 4)], (1, [2, 3])),
    ]
)  # fmt: skip
def test_a_ring_of_things_that_a_rank_has_in_another_order(case):
    """The last thing is among them; those before were looked at when they were the last."""
    rows, found = case
    assert order(*rows).exchanged() == found


def test_things_that_another_list_knows_to_be_the_same_are_not_exchanged():
    one, same, other = order((1, 2), (2, 1)), order((5, 5), (6, 6)), order((5, 5), (6, 7))
    alike = order((5, 5), (5, 5))  # which cannot tell them apart
    assert one.exchanged([same]) is None and one.exchanged([other]) == one.exchanged([alike]) == (1, [0, 1])
    assert one.exchanged([other, same]) is None
    assert same.are_same(1, [0, 1]) and not other.are_same(1, [0, 1]) and other.are_same(1, [0])


@each(has_lines=[True, False])
def test_where_the_last_of_exchanged_calls_are(has_lines, monkeypatch):
    places = {0: ["a.py:3", "main.py:9"], 1: ["b.py:5"]} if has_lines else {0: [], 1: []}
    turns = {0: [1, 2], 1: [2, 1]}
    local = threading.local()
    monkeypatch.setattr(roster, "lines_of", lambda frame: places[local.rank])
    monkeypatch.setattr(roster, "digest", lambda text: local.now)

    def body(comm):
        local.rank = comm.rank
        for local.now in turns[comm.rank]:
            roster.check_order(comm, "make", "things", None)

    first, second = ("a.py:3", "b.py:5") if has_lines else ("an unknown place",) * 2
    words = f"1, 2 are for each other's things, the last at {first} on rank 0 and {second} on rank 1; make the calls"
    with pytest.raises(CommunicatorError, match=f"make: rank 1 gives its things .*{words}"):
        run_threads(2, body)
