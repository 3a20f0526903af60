"""Tests of dbrdist.comm.protocol.gate."""

import contextlib
import threading

import numpy as np
import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.protocol import gate
from dbrdist.comm.transport import message
from dbrdist.core.array import backend
from dbrdist.errors import CaptureError, CommunicatorError
from tests.each import each


def test_a_thread_waits_for_no_thread_to_enter_a_verb_again():
    """Neither a new verb nor the second half of one."""
    comm, found = create_communicator("single"), []
    with comm.gate.call("update") as call:
        call.post(())

    def other():
        for enter in (lambda: comm.gate.again(call), lambda: comm.gate.call("update")):
            with pytest.raises(CommunicatorError, match="update: expected one thread at a time, but another"):
                enter()
            found.append(1)

    with comm.gate.call("bcast"):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(20)
        assert found == [1, 1]


def test_integers_in_a_row_are_found_by_their_place():
    raw = np.arange(gate.ROW_WORDS, dtype=np.int64).tobytes()
    assert len(raw) == gate.ROW_BYTES and gate.ROW_WORDS == 5 + gate.PAYLOAD_WORDS
    for begin, count in ((0, 1), (1, 2), (gate.PAYLOAD_WORDS - 1, 1), (0, gate.PAYLOAD_WORDS), (2, 0)):
        words = gate.words_of(raw[gate.payload_bytes(begin, count)])
        assert words == tuple(range(5 + begin, 5 + begin + count))


def test_what_came_with_a_row_is_let_go(monkeypatch):
    """The record keeps the last verbs, and with them whatever these hold."""
    comm, released = create_communicator("single"), []
    monkeypatch.setattr(comm.ranks, "release_enclosed", lambda: released.append(1), raising=False)
    with comm.gate.call("update") as call:
        call.agree()
    assert released == [] and not call.enclosed
    with comm.gate.call("update") as call:
        call.enclosed = [[np.ones(3)]]
    assert released == [1] and call.enclosed == ()
    with comm.gate.call("update") as call:
        call.post((1, 2), detail="long", enclosed=())
        assert call._row and call._detail and call._answer is not None and call.is_answered()
        assert call.wait()[:, :2].tolist() == [[1, 2]]
    assert (call._answer, call._detail, call._row) == (None, "", b"") and not call.is_answered()


def test_another_thread_in_a_verb_is_named():
    comm, found = create_communicator("single"), []

    def other():
        try:
            comm.barrier()
        except CommunicatorError as e:
            found.append(str(e))

    other_comm = comm.split(0, 0)
    with other_comm.gate.call("bcast"), comm.gate.call("scatter") as call:
        with comm.gate.call("gather") as inner:
            pass
        assert inner.seconds >= 0
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    (text,) = found
    assert text.startswith("barrier: expected one thread at a time, but another thread is in a verb of this communi")
    assert f"(scatter at {call.where()})" in text
    comm.barrier()


@each(**{"moving, error, told": [(True, "", True), (True, "told to end", False), (False, "", False)]})
def test_a_failure_is_told_where_others_wait_for_bytes(monkeypatch, moving, error, told):
    comm, found = create_communicator("single"), []
    monkeypatch.setattr(comm.ranks, "failed_half_way", lambda *args: found.append(args), raising=False)
    with contextlib.suppress(ValueError), comm.gate.call("bcast") as call:
        call.error = error
        with call.moving() if moving else contextlib.nullcontext():
            raise ValueError("on purpose")
    assert found == ([(call, "ValueError: on purpose")] if told else [])
    assert bool(comm.gate.closed) == moving
    if moving:
        where = f"because bcast at {call.where()} ended with ValueError: on purpose"
        assert comm.gate.closed == f"this communicator cannot be used any more, {where}"
        call.break_off(KeyError())
        assert "on purpose" in comm.gate.closed  # the first reason stays


def fail():
    raise ZeroDivisionError("division by zero")


def test_a_wait_that_fails_closes_the_communicator(monkeypatch):
    for half in ("exchange", "post"):
        comm = create_communicator("single")
        monkeypatch.setattr(comm.ranks, "exchange_row", lambda *args: fail(), raising=False)
        with pytest.raises(ZeroDivisionError), comm.gate.call("bcast") as call:
            getattr(call, half)((1,))
            fail()
        assert "because bcast at " in comm.gate.closed and "ZeroDivisionError: division by zero" in comm.gate.closed
        with pytest.raises(CommunicatorError, match="barrier: this communicator cannot be used any more"):
            comm.barrier()
    comm = create_communicator("single")
    with pytest.raises(ZeroDivisionError), comm.gate.call("bcast") as call:
        call.agree()
        fail()
    assert comm.gate.closed == ""  # the meeting is over


def test_rows_have_one_length_and_room_for_42_words():
    assert gate.PAYLOAD_WORDS == 42 and gate.ROW_BYTES == 8 * 47
    comm = create_communicator("single")
    with comm.gate.call("agree") as call:
        rows = call.agree(list(range(42)))
    assert rows.tolist() == [list(range(42))]
    assert message.HEADER_WORDS <= gate.PAYLOAD_WORDS


def test_what_ranks_show_may_differ_unless_they_say_so():
    def body(comm):
        with comm.gate.call("agree") as call:
            rows = call.exchange([comm.rank, 5])
            assert [gate.words_of(row[gate.payload_bytes(0, 2)]) for row in rows] == [(0, 5), (1, 5)]
            call.post([comm.rank])
            assert call.wait()[:, 0].tolist() == call.agree([comm.rank])[:, 0].tolist() == [0, 1]
        assert not comm.ranks.has_room() and not comm.reducer.encloses([np.ones(1)])

    run_threads(2, body, timeout_seconds=60)


def test_a_digest_is_that_of_two_sums():
    assert gate.digest("") == 1 and gate.digest("abc") == 0x352441C2 << 31 ^ 0x024D0127


def test_a_verb_of_a_closed_communicator_is_not_entered_again():
    comm = create_communicator("single")
    with comm.gate.call("update") as call:
        call.post(())
    with contextlib.suppress(ZeroDivisionError), comm.gate.call("bcast") as failed, failed.moving():
        fail()
    with pytest.raises(CommunicatorError, match=r"update: this communicator cannot be used any more, because bcast"):
        comm.gate.again(call)


@each(verb=["bcast", "send"])
def test_no_verb_is_entered_while_a_step_is_captured(verb, monkeypatch):
    """Other ranks would see what has not happened: the capture ends, and the rank does it again."""
    comm = create_communicator("single")
    monkeypatch.setattr(backend.capturing, "is_on", True)
    with pytest.raises(CaptureError, match=f"it calls {verb} of a communicator"):
        comm.gate.call(verb) if verb == "bcast" else comm.gate.message(verb, 0, 0)
    monkeypatch.setattr(backend.capturing, "is_on", False)
    with comm.gate.call(verb) as call:
        assert call.number == 0


def test_meetings_are_counted_together_and_their_bytes_by_the_last():
    """By which a look at who waits for whom tells whether another rank has come as far."""
    comm = create_communicator("single")
    record, name = comm.gate.record, comm.gate.name
    before = record.counted(name)
    for k in range(1, 4):
        with comm.gate.call("update") as call:
            call.agree()
            assert (call.meets_by, record.counted(name)) == ("row", before + 2 * k - 1)
            call.meet_without_row()
            assert (call.meets_by, call.number) == ("bytes", before + 2 * k)
        assert record.counted(name) == record.counted(name, "bytes") == before + 2 * k
    with comm.gate.call("update") as call:
        call.agree()
    assert record.counted(name, "bytes") == record.counted(name) - 1 == before + 6
