"""Rows in shared memory: order, reuse of memory, what is enclosed. The ranks take turns in one thread here."""

import numpy as np
import pytest

from dbrdist.comm import mailbox
from dbrdist.comm.gate import ROW_WORDS
from dbrdist.comm.mailbox import Mailbox


class NotThere(Exception):
    """A rank would wait here."""


def boxes(num_ranks):
    def wait(call, test, kind):
        if not test():
            raise NotThere(kind)

    raws = [np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(num_ranks)]
    return [Mailbox(raws, rank, wait) for rank in range(num_ranks)]


def row(value):
    return np.full(ROW_WORDS, value, np.int64)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_rows_of_all_ranks_in_their_order(num_ranks):
    ranks = boxes(num_ranks)
    for step in range(200):
        letters = [box.post(None, row(10 * step + r)) for r, box in enumerate(ranks)]
        for letter in letters:
            assert letter.is_there()
            assert (letter.wait(None) == np.array([row(10 * step + r) for r in range(num_ranks)])).all()
            assert letter.pieces() == []


def test_a_row_is_not_there_until_all_have_shown_theirs():
    one, other = boxes(2)
    letter = one.post(None, row(1))
    assert not letter.is_there()
    with pytest.raises(NotThere):
        letter.wait(None)
    other.post(None, row(2))
    assert letter.is_there()
    assert letter.wait(None)[:, 0].tolist() == [1, 2]


def test_rows_that_are_read_late_are_kept():
    one, other = boxes(2)
    early = [one.post(None, row(k)) for k in range(60)]
    for k in range(60):
        other.post(None, row(100 + k)).wait(None)
    for k in range(60, 150):
        late = one.post(None, row(k))
        other.post(None, row(100 + k)).wait(None)
        late.wait(None)
    for k, letter in enumerate(early):
        assert letter.wait(None)[:, 0].tolist() == [k, 100 + k]


def test_a_row_that_another_rank_has_yet_to_read_is_not_overwritten():
    one, other = boxes(2)
    for k in range(64):
        one.post(None, row(k))
    with pytest.raises(NotThere):
        one.post(None, row(64))
    letters = [other.post(None, row(100 + k)) for k in range(64)]
    assert [letter.wait(None)[0, 0] for letter in letters] == list(range(64))
    letter = one.post(None, row(64))
    other.post(None, row(164))
    assert letter.wait(None)[:, 0].tolist() == [64, 164]


def arrays(rank, step):
    return [np.full(5, 10 * step + rank, np.float32), np.arange(3.0) + 100 * step + rank]


def is_of_step(pieces, step, num_ranks):
    for k, of_ranks in enumerate(pieces):
        for rank, piece in enumerate(of_ranks):
            assert piece.dtype == arrays(rank, step)[k].dtype
            assert (piece == arrays(rank, step)[k]).all()
    assert len(pieces) == 2
    assert {len(of_ranks) for of_ranks in pieces} == {num_ranks}


def test_enclosed_arrays():
    ranks = boxes(3)
    for step in range(9):
        letters = [box.post(None, row(step), arrays(rank, step)) for rank, box in enumerate(ranks)]
        for letter in letters:
            letter.wait(None)
            is_of_step(letter.pieces(), step, 3)


def test_enclosed_arrays_outlive_rows_that_are_read_before_them():
    one, other = boxes(2)
    kept = one.post(None, row(0), arrays(0, 0))
    other.post(None, row(0), arrays(1, 0)).wait(None)
    for step in (1, 2, 3):
        mine = one.post(None, row(step), arrays(0, step))
        other.post(None, row(step), arrays(1, step)).wait(None)
        mine.wait(None)
        is_of_step(mine.pieces(), step, 2)
    kept.wait(None)
    is_of_step(kept.pieces(), 0, 2)


def test_enclosed_arrays_that_another_rank_has_yet_to_add_are_not_overwritten():
    one, other = boxes(2)
    for step in (0, 1):
        mine = one.post(None, row(step), arrays(0, step))
        theirs = other.post(None, row(step), arrays(1, step))
        mine.wait(None)
    theirs.wait(None)  # of step 1, which copies what came with step 0
    with pytest.raises(NotThere):  # the other rank may still add what came with step 1 where it lies
        for step in (2, 3):
            one.post(None, row(step), arrays(0, step))
    is_of_step(theirs.pieces(), 1, 2)


def test_room_for_arrays_once_all_ranks_have_done_with_what_lies_there():
    one, other = boxes(2)
    for step in (0, 1):
        assert one.has_room()
        mine = one.post(None, row(step), arrays(0, step))
    assert not one.has_room()  # the other rank has yet to read
    for step in (0, 1):
        theirs = other.post(None, row(step), arrays(1, step))
    theirs.wait(None)
    mine.wait(None)
    one.post(None, row(2), arrays(0, 2))
    assert not one.has_room()  # it may still add what came second
    other.release()
    assert one.has_room()
