"""Ranks that wait for each other, or for one that has left, end with one error; ranks that compute are left alone."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.communicators import world
from dbrdist.comm.failure import deadlock, judge
from dbrdist.comm.failure.deadlock import Wait, WaitState
from dbrdist.comm.failure.judge import DeadlockJudge
from dbrdist.errors import CommunicatorError
from tests.comm import jobs
from tests.each import each

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
    "thread_and_left": "rank 1 has left, but rank 0 has waited .* for rank 1 in recv with tag 0",
    "steps_given_up": "rank 1 has left, but rank 0 has waited .* for rank 1 in update",
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
    return WaitState(rank, False, False, list(waits), counts or {})


def meeting(number, members, comm="c", kind="row"):
    return Wait(1, comm, "verb", number, kind, list(members), 0, "here", 3.0)


def message(kind, other, number=1, tag=0):
    return Wait(1, "c", kind, number, kind, [other], tag, "here", 3.0)


def stuck(*states):
    return deadlock.stuck({state.rank: state for state in states})


def test_who_waits_for_one_that_computes_is_not_stuck():
    both = [waiting(0, meeting(5, (0, 1)), counts={("c",): 5}), WaitState(1, True, counts={("c",): 4})]
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
    b = waiting(1, meeting(5, (0, 1), kind="bytes"), counts={("c",): 5, ("c", "bytes"): 5})
    assert stuck(a, b) == {0: {1}, 1: {0}}


def test_a_third_who_waits_for_stuck_ranks_is_stuck_and_a_fourth_who_computes_saves_nobody_else():
    a = waiting(0, message("send", 1), counts={("c", "send", 1, 0): 1})
    b = waiting(1, message("send", 0), counts={("c", "send", 0, 0): 1})
    c = waiting(2, message("recv", 0), counts={})
    d = WaitState(3, True)
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
    c = WaitState(2, True, counts={("d",): 1})
    assert stuck(a, b, c) == {}


def test_a_rank_that_has_left():
    a = waiting(0, meeting(5, (0, 1)), counts={("c",): 5})
    assert stuck(a, WaitState(1, False, True, counts={("c",): 4})) == {0: {1}}
    assert stuck(a, WaitState(1, False, True, counts={("c",): 5})) == {}


def test_a_thread_that_waits_for_a_rank_that_has_left_is_stuck_whatever_other_threads_do():
    left = WaitState(1, False, True, counts={("c",): 4})
    lost, alive = meeting(5, (0, 1)), meeting(2, (0, 2), "d")
    counts = {("c",): 5, ("d",): 2}
    for state in (WaitState(0, True, waits=[lost], counts=counts), waiting(0, lost, alive, counts=counts)):
        states = deadlock.without_hope({0: state, 1: left, 2: WaitState(2, True)})
        assert deadlock.stuck(states) == {0: {1}} and states[0].waits == [lost]
    for other in (WaitState(1, False, True, counts={("c",): 5}), WaitState(1, True, counts={("c",): 4})):
        states = {0: WaitState(0, True, waits=[lost], counts=counts), 1: other}
        assert deadlock.without_hope(states) == states
    both = {0: waiting(0, lost, message("recv", 1), counts=counts), 1: left}
    assert deadlock.without_hope(both) == both
    third = waiting(2, message("recv", 0), counts={})
    whole = {0: waiting(0, lost, message("recv", 2), counts=counts), 1: left, 2: third}
    assert set(deadlock.stuck(whole)) == {0, 2} and deadlock.without_hope(whole) == whole  # all of its waits count


def test_threads_that_wait_for_a_rank_that_has_left_are_stuck(impatient):
    def body(comm):
        raised = []

        def receive():
            with pytest.raises(CommunicatorError) as error:
                comm.recv(1, 0)
            raised.append(str(error.value))

        if comm.rank == 0:
            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            thread.join(20)
        return raised

    (text,), _ = run_threads(2, body, timeout_seconds=60)
    assert "rank 1 has left, but rank 0 has waited" in text


def test_who_waits_for_a_stuck_rank_is_told_too():
    left = WaitState(0, False, True, counts={("c",): 4})
    states = {0: left}
    for rank, kind in ((1, "core"), (2, "row"), (3, "busy"), (4, "row")):
        state = waiting(rank, meeting(5, (0, 1, 2)), counts={("c",): 5})
        states[rank] = WaitState(rank, True, counts={("c",): 4}) if kind == "busy" else state
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

    def tell_each(self, ranks, words):
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
    judge = DeadlockJudge(Deaf())
    left = WaitState(2, False, True, counts={("c",): 4})
    early = [waiting(rank, meeting(5, (0, 1, 2, 3)), counts={("c",): 5}) for rank in (0, 1, 3)]
    text, told = verdict_on(judge, left, *early[:2])
    assert "rank 2 has left, but rank 0 has waited" in text
    assert set(told) == {0, 1}
    assert verdict_on(judge, early[2]) == (text, {3: early[2].wait_ids()})
    later, told = verdict_on(judge, waiting(3, meeting(6, (0, 1, 2, 3)), counts={("c",): 6}))
    assert "rank 2 has left, but rank 3 has waited" in later
    assert set(told) == {3}


def test_a_verdict_on_one_thread_leaves_the_others():
    judge = DeadlockJudge(Deaf())
    left = WaitState(2, False, True, counts={("c",): 4})
    lost, alive = meeting(5, (0, 2)), meeting(2, (0, 1), "d")
    alive.wait_id = 2
    mine = waiting(0, lost, alive, counts={("c",): 5, ("d",): 2})
    text, told = verdict_on(judge, left, mine)
    assert "rank 2 has left, but rank 0 has waited 3 s for rank 2 in verb" in text
    assert told == {0: {1}}
    other = waiting(1, message("recv", 0), counts={("d",): 1})
    judge.hear(other, is_answer=False)
    assert judge.look() is None
    for state in (other, waiting(0, alive, counts={("c",): 5, ("d",): 2})):
        judge.hear(state, is_answer=True)
    judge._asked_at = 0.0
    text, told = judge.look()
    assert "rank 0 has waited 3 s for rank 1" in text and told == {0: {2}, 1: {1}}


def test_the_verdict_waits_for_answers_that_a_busy_machine_delays(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dbrdist.comm.failure.judge.time", SimpleNamespace(monotonic=lambda: now[0]))
    judge = DeadlockJudge(Deaf())
    ranks = [waiting(rank, meeting(5, (0, 1, 2, 3)), counts={("c",): 5}) for rank in (0, 1, 3)]
    for state in (WaitState(2, False, True, counts={("c",): 4}), *ranks[:2]):
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
    assert WaitState.decode(state.encode()) == state


def wait(kind="row", number=1, members=(0, 1), tag=0, name="w", **more):
    return deadlock.Wait(1, "world", name, number, kind, list(members), tag, "x.py:1", 3.0, **more)


def state(rank, *waits, counts=None, **more):
    return deadlock.WaitState(rank, False, waits=list(waits), counts=counts or {}, **more)


def test_ranks_that_wait_for_each_other():
    row, mail = ("world",), ("world", "send", 0, 0)
    both = {0: state(0, wait("recv", members=[1])), 1: state(1, wait("recv", members=[0]))}
    assert deadlock.stuck(both) == {0: {1}, 1: {0}}
    assert deadlock.stuck({**both, 1: state(1, wait("recv", members=[0]), counts={mail: 1})}) == {}
    assert deadlock.stuck({**both, 1: deadlock.WaitState(1, True, waits=[wait("recv", members=[0])])}) == {}
    assert deadlock.stuck({0: both[0], 1: state(1)}) == {}
    assert deadlock.stuck({0: both[0]}) == {}
    left = {0: both[0], 1: state(1, has_left=True)}
    assert deadlock.stuck(left) == {0: {1}}
    assert deadlock.describe(left, deadlock.stuck(left)) == (
        "rank 1 has left, but rank 0 has waited 3 s for rank 1 in w with tag 0 (x.py:1)"
    )
    for theirs, is_missing in ((0, True), (1, False), (2, False)):
        states = {0: state(0, wait(number=1), counts={row: 1}), 1: state(1, counts={row: theirs})}
        assert deadlock._is_missing(states, 0, wait(number=1), 1) == is_missing
    for kind, is_missing in (("bytes", True), ("row", False), ("recv", False)):
        states = {0: state(0), 1: state(1, wait(kind, 1), counts={row: 1})}
        assert deadlock._is_missing(states, 0, wait("row", 1), 1) == is_missing
    moved = ("world", "bytes")
    for theirs, is_missing in ((1, True), (2, False), (5, False)):  # rows that it showed later and gave up bring none
        states = {0: state(0), 1: state(1, counts={row: 7, moved: theirs})}
        assert deadlock._is_missing(states, 0, wait("bytes", 2), 1) == is_missing
    states = {1: state(1, counts={("other", i): 1 for i in range(5000)})}
    assert deadlock._is_missing(states, 0, wait("send", 1), 1)


def test_a_core_grows_by_those_that_wait_for_it():
    states = {
        0: state(0, wait("recv", members=[1])), 1: state(1, wait("recv", members=[0])),
        2: state(2, wait("send", members=[1], tag=4)), 3: state(3),
    }  # fmt: skip
    core = deadlock.stuck({rank: states[rank] for rank in (0, 1)})
    assert deadlock.grow(states, core) == {0: {1}, 1: {0}, 2: {1}}
    assert deadlock.WaitState.decode(states[2].encode()) == states[2] and states[2].wait_ids() == {1}


@each(n=[1, 8, 9])
def test_verdicts_name_some_ranks(n):
    states = {rank: state(rank, wait(members=range(n + 1))) for rank in range(n + 1)}
    text = deadlock.describe(states, {rank: {n} for rank in range(n)})
    assert text.startswith("the ranks wait for each other, and none can continue: rank 0 has waited 3 s for rank ")
    assert text.count("has waited") == min(n, 8) and text.endswith("; and 1 more") == (" more" in text) == (n == 9)
    states[n].has_left = states[0].has_left = True
    text = deadlock.describe(states, {1: {0, n}} if n > 1 else {0: {1}})
    assert text.startswith("ranks 0, " if n > 1 else "rank 1 has left, but rank 0") and (" have left" in text) == (
        n > 1
    )


def waiting_since(rank, number=5):
    return WaitState(
        rank, False, False, [Wait(rank + 1, "c", "v", number, "row", [0, 1, 2], 0, "here", 3.0)], {("c",): number}
    )


@each(**{"seconds, has_all, is_judged": [(0.999, False, False), (1.0, False, True), (0.0, True, True)]})
def test_the_verdict_waits_a_second_for_those_who_need_not_answer(monkeypatch, seconds, has_all, is_judged):
    now, told = [50.0], []
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: now[0]))
    channel = SimpleNamespace(
        members=(0, 1, 2),
        judge=0,
        tell=lambda *args: told.append(args),
        tell_each=lambda ranks, words: told.extend((rank, words) for rank in ranks),
    )
    one = judge.DeadlockJudge(channel)
    left = WaitState(2, False, True, counts={("c",): 4})
    stuck = waiting_since(0)
    for state in (left, stuck):
        one.hear(state, is_answer=False)
    assert one.look() is None and told == [(rank, {"what": "ask"}) for rank in (0, 1)]  # not the one that has left
    now[0] += seconds
    assert one.look() is None  # the one that is stuck has to answer
    one.hear(stuck, is_answer=True)
    if has_all:
        one.hear(WaitState(1, True, counts={("c",): 4}), is_answer=True)
    found = one.look()
    assert (found is not None) == is_judged
    if found:
        assert found[1] == {0: {1}} and one._states == {2: left}
        one.hear(stuck, is_answer=True)  # nobody was asked
        assert one.look() is None and one._answers.keys() <= {0, 1}


def test_who_has_gone_on_is_asked_again_later():
    told = []
    one = judge.DeadlockJudge(
        SimpleNamespace(
            members=(0, 1, 2),
            judge=0,
            tell=lambda *args: told.append(args),
            tell_each=lambda ranks, words: told.extend((rank, words) for rank in ranks),
        )
    )
    left = WaitState(2, False, True, counts={("c",): 4})
    for state in (left, waiting_since(0)):
        one.hear(state, is_answer=False)
    one.hear(WaitState(2, True), is_answer=False)  # who has left stays so
    assert one._states[2] is left
    assert one.look() is None
    one._asked_at -= 10
    one.hear(WaitState(0, True), is_answer=True)
    assert one.look() is None and one._states == {2: left} and one._asked == {}
    assert one.look() is None and len(told) == 2


@each(num=[1, 8, 9, 20])
def test_a_verdict_names_eight_ranks_and_how_many_more(num):
    states = {rank: waiting(rank, message("recv", num)) for rank in range(num)}
    states[num] = WaitState(num, False, True)
    text = deadlock.describe(states, {rank: {num} for rank in range(num)})
    one = "rank {} has waited 3 s for rank {} in recv with tag 0 (here)"
    named = "; ".join(one.format(rank, num) for rank in range(min(num, 8)))
    assert text == f"rank {num} has left, but {named}" + (f"; and {num - 8} more" if num > 8 else "")
    states[num] = WaitState(num, False)
    others = {rank: {(rank + 1) % num} for rank in range(num)}
    begin = "the ranks wait for each other, and none can continue: rank 0 has waited 3 s for rank "
    assert deadlock.describe(states, others).startswith(begin)
