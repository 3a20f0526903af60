"""Rows in shared memory: order, reuse of memory, what is enclosed. The ranks take turns in one thread here."""

import numpy as np
import pytest

from dbrdist.comm.communicators import mailbox
from dbrdist.comm.communicators.mailbox import Mailbox
from dbrdist.comm.protocol.gate import ROW_BYTES
from dbrdist.comm.transport.call_log import Call, CallLog
from tests.each import each

CALL = Call(CallLog(), "test", "test", (0,))


class NotThere(Exception):
    """A rank would wait here."""


def boxes(num_ranks):
    def wait(call, test, kind):
        if not test():
            raise NotThere(kind)

    raws = [np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(num_ranks)]
    return [Mailbox(raws, rank, wait) for rank in range(num_ranks)]


def row(value):
    return value.to_bytes(8, "little") * (ROW_BYTES // 8)


def values(rows):
    """What the rows are full of."""
    for row in rows:
        assert row == row[:8] * (ROW_BYTES // 8)
    return [int.from_bytes(row[:8], "little") for row in rows]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_rows_of_all_ranks_in_their_order(num_ranks):
    ranks = boxes(num_ranks)
    for step in range(200):
        letters = [box.post(CALL, row(10 * step + r)) for r, box in enumerate(ranks)]
        for letter in letters:
            assert letter.is_there()
            assert values(letter.wait(CALL)) == [10 * step + r for r in range(num_ranks)]
            assert letter.pieces() == []


def test_a_row_is_not_there_until_all_have_shown_theirs():
    one, other = boxes(2)
    letter = one.post(CALL, row(1))
    assert not letter.is_there()
    with pytest.raises(NotThere):
        letter.wait(CALL)
    other.post(CALL, row(2))
    assert letter.is_there()
    assert values(letter.wait(CALL)) == [1, 2]


def test_rows_that_are_read_late_are_kept():
    one, other = boxes(2)
    early = [one.post(CALL, row(k)) for k in range(60)]
    for k in range(60):
        other.post(CALL, row(100 + k)).wait(CALL)
    for k in range(60, 150):
        late = one.post(CALL, row(k))
        other.post(CALL, row(100 + k)).wait(CALL)
        late.wait(CALL)
    for k, letter in enumerate(early):
        assert values(letter.wait(CALL)) == [k, 100 + k]


def test_a_row_that_another_rank_has_yet_to_read_is_not_overwritten():
    one, other = boxes(2)
    for k in range(64):
        one.post(CALL, row(k))
    with pytest.raises(NotThere):
        one.post(CALL, row(64))
    letters = [other.post(CALL, row(100 + k)) for k in range(64)]
    assert [values(letter.wait(CALL))[0] for letter in letters] == list(range(64))
    letter = one.post(CALL, row(64))
    other.post(CALL, row(164))
    assert values(letter.wait(CALL)) == [64, 164]


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
        letters = [box.post(CALL, row(step), arrays(rank, step)) for rank, box in enumerate(ranks)]
        for letter in letters:
            letter.wait(CALL)
            is_of_step(letter.pieces(), step, 3)


def test_enclosed_arrays_outlive_rows_that_are_read_before_them():
    one, other = boxes(2)
    kept = one.post(CALL, row(0), arrays(0, 0))
    other.post(CALL, row(0), arrays(1, 0)).wait(CALL)
    for step in (1, 2, 3):
        mine = one.post(CALL, row(step), arrays(0, step))
        other.post(CALL, row(step), arrays(1, step)).wait(CALL)
        mine.wait(CALL)
        is_of_step(mine.pieces(), step, 2)
    kept.wait(CALL)
    is_of_step(kept.pieces(), 0, 2)


def test_enclosed_arrays_that_another_rank_has_yet_to_add_are_not_overwritten():
    one, other = boxes(2)
    for step in (0, 1):
        mine = one.post(CALL, row(step), arrays(0, step))
        theirs = other.post(CALL, row(step), arrays(1, step))
        mine.wait(CALL)
    theirs.wait(CALL)  # of step 1, which copies what came with step 0
    with pytest.raises(NotThere):  # the other rank may still add what came with step 1 where it lies
        for step in (2, 3):
            one.post(CALL, row(step), arrays(0, step))
    is_of_step(theirs.pieces(), 1, 2)


def test_room_for_arrays_once_all_ranks_have_done_with_what_lies_there():
    one, other = boxes(2)
    for step in (0, 1):
        assert one.has_room()
        mine = one.post(CALL, row(step), arrays(0, step))
    assert not one.has_room()  # the other rank has yet to read
    for step in (0, 1):
        theirs = other.post(CALL, row(step), arrays(1, step))
    theirs.wait(CALL)
    mine.wait(CALL)
    one.post(CALL, row(2), arrays(0, 2))
    assert not one.has_room()  # it may still add what came second
    other.release()
    assert one.has_room()


def test_a_rank_that_only_reads_lets_others_write():
    one, other = boxes(2)
    for k in range(200):  # more than there are places
        mine = one.post(CALL, row(k))
        values(other.post(CALL, row(100 + k)).wait(CALL))
        if k % 63 == 62:
            values(mine.wait(CALL))


def test_a_rank_that_has_read_says_so_with_its_next_row():
    one, other = boxes(2)
    for k in range(64):
        theirs = other.post(CALL, row(100 + k))
        values_of_one = one.post(CALL, row(k)).wait(CALL)
        values(theirs.wait(CALL))
        assert values(values_of_one) == [k, 100 + k]
    late = other.post(CALL, row(164))  # in whose place the first was
    assert values(one.post(CALL, row(64)).wait(CALL)) == [64, 164]
    assert values(late.wait(CALL)) == [64, 164]


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_same_arrays_enclosed_again(kind):
    ranks = boxes(2)
    mine = [kind(arrays(rank, 0)) for rank in range(2)]
    for step in range(5):
        for rank, own in enumerate(mine):
            for x, y in zip(own, arrays(rank, step)):
                x[...] = y
        letters = [box.post(CALL, row(step), own) for box, own in zip(ranks, mine)]
        for letter in letters:
            letter.wait(CALL)
            is_of_step(letter.pieces(), step, 2)


def test_arrays_of_many_models_in_turn():
    ranks = boxes(2)
    models = [[tuple(arrays(rank, step)) for rank in range(2)] for step in range(20)]
    for _ in range(2):
        for step, own in enumerate(models):
            letters = [box.post(CALL, row(step), x) for box, x in zip(ranks, own)]
            for letter in letters:
                letter.wait(CALL)
                is_of_step(letter.pieces(), step, 2)


@pytest.mark.parametrize(
    ("dtype", "count", "takes"), [(np.float32, 1 << 14, True), (np.float32, (1 << 14) + 1, False), (">f4", 4, False)]
)
def test_which_arrays_a_row_takes(dtype, count, takes):
    assert boxes(2)[0].takes((np.zeros(count, dtype),)) is takes


class Ready:
    """Another rank that shows its row as soon as somebody waits for it."""

    def __init__(self, box):
        self.box = box
        self.rows = []

    def wait(self, call, test, kind):
        self.box.post(CALL, *self.rows.pop(0)).wait(CALL)
        assert test()


def test_showing_and_waiting_in_one():
    raws = [np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(2)]
    other = Ready(Mailbox(raws, 1, None))
    one = Mailbox(raws, 0, other.wait)
    for step in range(200):
        enclosed = arrays(0, step) if step % 3 else ()
        other.rows.append((row(10 * step + 1), arrays(1, step) if step % 3 else ()))
        rows, pieces = one.exchange(CALL, row(10 * step), enclosed)
        assert values(rows) == [10 * step, 10 * step + 1]
        if step % 3:
            is_of_step(pieces, step, 2)
        else:
            assert pieces == []
        one.release()


def test_showing_and_waiting_in_one_after_a_row_that_nobody_has_read_yet():
    raws = [np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(2)]
    other = Ready(Mailbox(raws, 1, None))
    one = Mailbox(raws, 0, other.wait)
    early = one.post(CALL, row(1), arrays(0, 1))
    other.box.post(CALL, row(2), arrays(1, 1)).wait(CALL)
    for step in (2, 3, 4):
        other.rows.append((row(step), arrays(1, step)))
        rows, pieces = one.exchange(CALL, row(step), arrays(0, step))
        assert values(rows) == [step, step]
        is_of_step(pieces, step, 2)
    assert values(early.wait(CALL)) == [1, 2]
    is_of_step(early.pieces(), 1, 2)


def test_models_that_take_turns_keep_their_places():
    models = [tuple(arrays(0, k)) for k in range(11)]  # more than are kept
    ranks = boxes(2)
    for turn in range(3):
        for model in models:
            letters = [box.post(CALL, row(turn), model) for box in ranks]
            for letter in letters:
                letter.wait(CALL)
                for mine, of_ranks in zip(model, letter.pieces()):
                    assert all((piece == mine).all() for piece in of_ranks)
                letter._box.release()


def test_showing_and_waiting_in_one_while_an_earlier_row_is_not_there_yet():
    raws = [np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(2)]
    other = Mailbox(raws, 1, None)

    def wait(call, test, kind):
        for step in (1, 2):
            other.post(CALL, row(10 + step), arrays(1, step))
        assert test()

    one = Mailbox(raws, 0, wait)
    early = one.post(CALL, row(1), arrays(0, 1))
    rows, pieces = one.exchange(CALL, row(2), arrays(0, 2))
    assert values(rows) == [2, 12]
    is_of_step(pieces, 2, 2)
    assert values(early.wait(CALL)) == [1, 11]
    is_of_step(early.pieces(), 1, 2)
    one.release()
    assert raws[0][64:72].view(np.int64)[0] == 2  # the last row that it has read, as the other rank sees it


class Posted:
    """The number of another rank's last row, which comes at a given look."""

    def __init__(self, at):
        self.at, self.looks = at, 0

    def __getitem__(self, index):
        self.looks += 1
        return int(self.looks >= self.at)


@each(**{"at, pause, waits": [(1, 0.0, 0), (2, 0.0, 0), (300, 0.0, 0), (301, 0.0, 1), (302, 0.0, 1), (1, 0.1, 1)]})
def test_a_row_is_looked_for_300_times_before_a_longer_wait(at, pause, waits):
    asked = []
    box = Mailbox([np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(2)], 0, lambda *args: asked.append(args[2]))
    box._posted_by_others = [posted] = [Posted(at)]
    with Call(CallLog(), "test", "test", (0,)) as call:
        call.pause_seconds = pause
        box._wait_for(call, 1)
    assert asked == ["row"] * waits and posted.looks == at


def test_tuples_of_arrays_are_known_again():
    box = Mailbox([np.zeros(mailbox.NUM_BYTES, np.uint8)], 0, None)
    tuples = [(np.full(3, k, "f"), np.arange(2.0)) for k in range(3)]
    assert box.takes(tuples[0]) and not box.takes((np.zeros(mailbox.ENCLOSED_BYTES + 1, np.uint8),))
    assert box.takes((np.zeros(mailbox.ENCLOSED_BYTES, np.uint8),)) and not box.takes((np.zeros(2, ">f4"),))
    made = [box._enclosure(one) for one in tuples]
    assert [box._enclosure(one) for one in reversed(tuples)] == made[::-1] and box._last_enclosure is made[0]
    a_list = list(tuples[0])
    assert box._enclosure(a_list) is not box._enclosure(a_list)
    big = (np.zeros(mailbox.ENCLOSED_BYTES, np.uint8),)
    for one in (big, *((np.zeros(k),) for k in range(12))):
        box._enclosure(one)
        assert box.takes(one) and len(box._enclosures) <= 8
