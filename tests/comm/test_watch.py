"""Ranks that wait for each other, or for one that has left, end with one error; ranks that compute are left alone."""

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import deadlock, run_threads, watch, world
from dbrdist.comm.deadlock import State, Wait
from dbrdist.comm.judge import Judge
from dbrdist.errors import CommunicatorError
from tests.comm import jobs

STUCK = jobs.PROGRAMS / "stuck.py"
DEEDS = {
    "crossed_sends": "rank 0 has waited .* for rank .* in send with tag 0",
    "crossed_receives": "rank 0 has waited .* for rank .* in recv with tag 0",
    "wrong_tag": "rank 0 has waited .* for rank 1 in recv with tag 5 .*rank 1 has waited .* in send with tag 4",
    "message_and_collective": "rank 0 has waited .* for rank 1 in recv .*rank 1 has waited .* for rank 0 in allreduce",
    "two_communicators": "rank 0 has waited .* for ranks? 1.*; rank 1 has waited .* for rank 0",
    "construction": "rank 0 has waited .* in create_communicator .*rank 1 has waited .* for rank 0 in barrier",
    "finalize_of_one": "rank 0 has waited .* in finalize .*rank 1 has waited .* for rank 0 in barrier",
    "left_out_step": "in (update|reduce)",
    "one_step_more": "left, but rank 0 has waited .* in (allreduce|barrier)",
    "caught_and_left": "rank 1 has left, but rank 0 has waited .* for rank 1 in allgather_obj",
}


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("deed", "num_ranks"), [*((deed, 2) for deed in DEEDS), ("two_communicators", 3), ("wrong_tag", 3)]
)
def test_stuck_ranks_raise_the_same_error(deed, num_ranks):
    outcome = jobs.run(num_ranks, STUCK, deed)
    assert outcome.code != 0, outcome.text
    errors = set(outcome.lines("CommunicatorError: "))
    assert len(errors) == 1, outcome.text
    assert re.search(DEEDS[deed], errors.pop()), outcome.text
    assert "Traceback" not in outcome.text


@pytest.fixture
def impatient(monkeypatch):
    """Ranks that are threads look after a tenth of the time whether the others can still come."""
    monkeypatch.setattr(world, "patience_seconds", 0.1)
    monkeypatch.setattr(world, "_LOOK_SECONDS", 0.025)


@pytest.mark.parametrize("deed", ["crossed_sends", "message_and_collective", "two_communicators", "one_step_more"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_stuck_threads_raise_the_same_error(deed, num_ranks, impatient):
    def body(comm):
        x = np.ones(100_000)
        if deed == "crossed_sends":
            comm.send(x, (comm.rank + 1) % comm.size, 0)
        elif deed == "message_and_collective":
            comm.recv(1, 0) if comm.rank == 0 else comm.allreduce(x)
        elif deed == "two_communicators":
            other = comm.split(0, comm.rank)
            (comm if comm.rank == 0 else other).barrier()
        elif comm.rank == 0:
            comm.barrier()

    with pytest.raises(CommunicatorError, match=DEEDS[deed]):
        run_threads(num_ranks, body, timeout_seconds=60)


def test_a_thread_that_computes_is_left_alone(impatient):
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.3)
        return int(comm.allreduce(np.array(1)))

    assert run_threads(3, body, timeout_seconds=60) == [3, 3, 3]


# ---- the proof ----


def waiting(rank, *waits, counts=None):
    return State(rank, False, False, list(waits), counts or {})


def meeting(number, members, comm="c", kind="row"):
    return Wait(1, comm, "verb", number, kind, list(members), 0, "here", 3.0)


def message(kind, other, number=1, tag=0):
    return Wait(1, "c", kind, number, kind, [other], tag, "here", 3.0)


def stuck(*states):
    return deadlock.stuck({state.rank: state for state in states})


def test_who_waits_for_one_that_computes_is_not_stuck():
    both = [waiting(0, meeting(5, (0, 1)), counts={("c",): 5}), State(1, True, counts={("c",): 4})]
    assert stuck(*both) == {}
    assert stuck(both[0]) == {}  # the other has said nothing


def test_a_meeting_to_which_all_have_come_is_not_stuck():
    assert stuck(*[waiting(r, meeting(5, (0, 1)), counts={("c",): 5}) for r in (0, 1)]) == {}


def test_meetings_of_two_communicators():
    a = waiting(0, meeting(5, (0, 1), "c"), counts={("c",): 5, ("d",): 1})
    b = waiting(1, meeting(2, (0, 1), "d"), counts={("c",): 4, ("d",): 2})
    assert stuck(a, b) == {0: {1}, 1: {0}}


def test_a_row_and_bytes_do_not_meet():
    a = waiting(0, meeting(5, (0, 1), kind="row"), counts={("c",): 5})
    b = waiting(1, meeting(5, (0, 1), kind="bytes"), counts={("c",): 5})
    assert stuck(a, b) == {0: {1}, 1: {0}}


def test_a_third_who_waits_for_stuck_ranks_is_stuck_and_a_fourth_who_computes_saves_nobody_else():
    a = waiting(0, message("send", 1), counts={("c", "send", 1, 0): 1})
    b = waiting(1, message("send", 0), counts={("c", "send", 0, 0): 1})
    c = waiting(2, message("recv", 0), counts={})
    d = State(3, True)
    e = waiting(4, message("recv", 3), counts={})
    assert stuck(a, b, c, d, e) == {0: {1}, 1: {0}, 2: {0}}


def test_a_message_that_was_sent_or_is_being_received_arrives():
    a = waiting(0, message("recv", 1), counts={("c", "recv", 1, 0): 1})
    b = waiting(1, message("recv", 0), counts={("c", "send", 0, 0): 1, ("c", "recv", 0, 0): 1})
    assert stuck(a, b) == {}
    assert stuck(a, waiting(1, message("recv", 0), counts={("c", "send", 0, 7): 1})) == {0: {1}, 1: {0}}


def test_one_thread_of_several_that_can_go_on_saves_the_rank():
    a = waiting(0, meeting(5, (0, 1)), counts={("c",): 5})
    b = waiting(1, meeting(1, (1, 2), "d"), message("recv", 2), counts={("c",): 4, ("d",): 1})
    c = State(2, True, counts={("d",): 1})
    assert stuck(a, b, c) == {}


def test_a_rank_that_has_left():
    a = waiting(0, meeting(5, (0, 1)), counts={("c",): 5})
    assert stuck(a, State(1, False, True, counts={("c",): 4})) == {0: {1}}
    assert stuck(a, State(1, False, True, counts={("c",): 5})) == {}


def test_who_waits_for_a_stuck_rank_is_told_too():
    left = State(0, False, True, counts={("c",): 4})
    states = {0: left}
    for rank, kind in ((1, "core"), (2, "row"), (3, "busy"), (4, "row")):
        state = waiting(rank, meeting(5, (0, 1, 2)), counts={("c",): 5})
        states[rank] = State(rank, True, counts={("c",): 4}) if kind == "busy" else state
    states[4] = waiting(4, message("recv", 3), counts={})
    core = deadlock.stuck({0: left, 1: states[1]})
    assert core == {1: {0}}
    assert deadlock.grow(states, core) == {1: {0}, 2: {0}}


def test_who_came_later_is_named_among_those_for_whom_a_rank_waits():
    first = meeting(5, (0, 1, 2), "c")
    states = {0: waiting(0, first, counts={("c",): 5, ("d",): 1})}
    for rank in (1, 2):
        states[rank] = waiting(rank, meeting(2, (0, 1, 2), "d"), counts={("c",): 4, ("d",): 2})
    core = deadlock.stuck({0: states[0], 2: states[2]})
    assert core == {0: {2}, 2: {0}}
    assert deadlock.grow(states, core) == {0: {1, 2}, 1: {0}, 2: {0}}


class Deaf:
    """A channel to ranks 0 to 3 on which nobody hears."""

    members, judge = (0, 1, 2, 3), 0

    def tell(self, rank, words):
        pass


def verdict_on(judge, *states):
    for state in states:
        judge.hear(state, is_answer=False)
    assert judge.look() is None
    for state in states:
        if not state.has_left:
            judge.hear(state, is_answer=True)
    judge._asked_at = 0.0  # the others have had their time to answer
    return judge.look()


def test_who_comes_late_to_a_meeting_hears_the_same_verdict():
    judge = Judge(Deaf())
    left = State(2, False, True, counts={("c",): 4})
    early = [waiting(rank, meeting(5, (0, 1, 2, 3)), counts={("c",): 5}) for rank in (0, 1, 3)]
    text, told = verdict_on(judge, left, *early[:2])
    assert "rank 2 has left, but rank 0 has waited" in text
    assert set(told) == {0, 1}
    assert verdict_on(judge, early[2]) == (text, {3: early[2].wait_ids()})
    later, told = verdict_on(judge, waiting(3, meeting(6, (0, 1, 2, 3)), counts={("c",): 6}))
    assert "rank 2 has left, but rank 3 has waited" in later
    assert set(told) == {3}


def test_the_verdict_waits_for_answers_that_a_busy_machine_delays(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dbrdist.comm.judge.time", SimpleNamespace(monotonic=lambda: now[0]))
    judge = Judge(Deaf())
    ranks = [waiting(rank, meeting(5, (0, 1, 2, 3)), counts={("c",): 5}) for rank in (0, 1, 3)]
    for state in (State(2, False, True, counts={("c",): 4}), *ranks[:2]):
        judge.hear(state, is_answer=False)
    assert judge.look() is None
    now[0] += 0.8
    for state in ranks[:2]:
        judge.hear(state, is_answer=True)
    assert judge.look() is None
    judge.hear(ranks[2], is_answer=True)
    text, told = judge.look()
    assert set(told) == {0, 1, 3}
    assert "rank 3 has waited" in text


def test_a_state_travels():
    state = waiting(3, meeting(5, (0, 3)), counts={("c",): 5, ("c", "send", 1, 2): 7})
    assert State.decode(state.encode()) == state


def test_the_listener_is_asked_to_end_before_it_is_waited_for(monkeypatch):
    state = watch._Watch()
    state.listener = threading.Thread(target=state.stop.wait, daemon=True)
    state.listener.start()
    monkeypatch.setattr(watch, "_watch", state)
    watch._stop_listening()
    assert not state.listener.is_alive()
