"""Who failed first, from what is told in which order: the cases that real machines show only now and then."""

import os
import time
from types import SimpleNamespace

import pytest
from dbrdist_launch import codes, limits
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.judgement import report, stalls
from dbrdist_launch.launcher.judgement.judge import Judge
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Beat, Exit
from dbrdist_launch.rank import supervisor
from judges import NOW, Srun, end, judge, lose


def test_lost_host_comes_before_the_exit_that_it_caused():
    made = judge("a", "a", "b", lines=["srun: error: a: tasks 0-1: Killed"])
    end(made, 0, NOW - 0.52, code=14)
    lose(made, 2, NOW - 0.5)
    lose(made, 1, NOW - 0.45)
    lose(made, 0, NOW - 0.45)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.host, failure.code) == ("host_lost", 2, "b", 69)


@pytest.mark.parametrize("kills_step, expected", [(True, ("exit", 0, 2)), (False, ("signal", None, 137))])
def test_rank_that_aborts_before_mpi_comes_before_the_daemon_that_dies_of_it(monkeypatch, kills_step, expected):
    """Slurm's daemon of a host dies of an MPI_Abort without MPI_Init, and leaves its ranks behind."""
    monkeypatch.setattr(Srun, "kills_step", kills_step)
    made = judge("a", "a", "b", lines=["slurmstepd-a: fatal: this is impossible"], ended=False)
    made.take_event(made.ranks[1], {"event": "orphaned"}, NOW - 0.5)
    end(made, 0, NOW - 0.49, code=2)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == expected


def test_rank_that_ended_comes_before_the_step_that_srun_killed():
    made = judge("a", "a", "b", lines=["srun: error: a: tasks 0-1: Killed", "srun: error: b: task 2: Killed"])
    end(made, 1, NOW - 0.52)
    for rank in range(3):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("exit", 1, 9)


def test_out_of_memory_kill_is_named_where_srun_left_no_time_for_the_report():
    made = judge("a", "a", "b", lines=["srun: error: a: tasks 0-1: Killed", "srun: error: b: task 2: Killed"])
    end(made, 1, NOW - 0.52, code=137, signal=9, oom="out-of-memory kill counted in memory.events")
    for rank in range(3):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("oom", 1, 137)


def test_rank_that_lost_its_peer_first_in_a_killed_step_is_not_the_cause():
    made = judge("a", "a", "b", lines=["srun: error: a: tasks 0-1: Killed", "srun: error: b: task 2: Killed"])
    end(made, 2, NOW - 0.521, code=14)
    end(made, 1, NOW - 0.52, code=9)
    for rank in range(3):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("exit", 1, 9)


def test_abort_that_was_printed_names_the_rank():
    made = judge("a", "b", code=7)
    made.ranks[1].take_output(
        "err", b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7)\n"
    )
    for rank in range(2):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("exit", 1, 7)


def test_step_killed_for_no_reason_that_a_rank_knows_is_the_starters():
    lines = ["srun: error: a: task 0: Killed", "srun: error: b: task 1: Killed"]
    made = judge("a", "b", lines=lines, code=3)
    for rank in range(2):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("exit", None, 3)
    assert failure.traceback == "\n".join(lines)


def test_silence_is_no_verdict_and_delays_the_others():
    made = judge("a", "b", ended=False)
    made.ranks[1].heard_at = NOW - 4.0
    made.ranks[0].beat_at = NOW - 100.0  # it waits for the other one
    assert made.verdict(NOW) is None and not made.late
    made.ranks[1].heard_at = NOW - 100.0  # stopped, or on a machine that is very busy: its host still answers
    assert made.verdict(NOW) is None
    assert "its supervisor does not answer, although its host does" in made.warnings[0]
    lose(made, 1, NOW - 0.4)  # the kernel has given it up
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank) == ("host_lost", 1)
    assert failure.message.startswith("host b is lost: ")


def test_exit_waits_while_a_connection_is_broken():
    made = judge("a", "b", ended=False)
    made.ranks[0].exit = Exit(code=14, signal=0, oom=None, ours=False)
    made.ranks[0].ended = NOW
    lose(made, 1, NOW)
    assert made.take_bad_exit(made.ranks[0], NOW) is None
    assert made.undecided()
    made.starter_ended_at, made.starter_lines = NOW + 0.3, ["srun: error: a: task 0: Exited with exit code 14"]
    assert made.verdict(NOW + 0.7).kind in ("host_lost", "exit")


@pytest.mark.parametrize("event", ["exception", "thread", "worker", "leaving"])
def test_what_a_program_tells_ends_nothing_by_itself(event):
    made = judge("a", "a", ended=False)
    made.take_event(made.ranks[1], {"event": event, "message": "E: m", "name": "t", "code": 1, "own": True}, NOW)
    for rank in made.ranks.values():
        rank.heard_at = NOW + 3600.0
    assert made.verdict(NOW + 3600.0) is None
    assert len(made.warnings) == (event != "leaving")


@pytest.mark.parametrize(("event", "kind"), [("thread", "thread"), ("worker", "thread")])
def test_dead_threads_and_workers_end_the_job_on_request(event, kind):
    made = judge("a", "a", ended=False)
    made.end_on = ("thread", "worker")
    made.take_event(made.ranks[1], {"event": event, "message": "E: m", "name": "t"}, NOW)
    failure = made.verdict(NOW + 1.1)
    assert (failure.kind, failure.rank) == (kind, 1)


def test_waiting_in_finalize_with_a_bad_code_ends_the_job():
    made = judge("a", "a", ended=False)
    made.take_event(made.ranks[1], {"event": "finalizing", "code": 3, "own": True}, NOW)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("exit", 1, 3)
    assert "waited for the others in MPI_Finalize" in failure.message


def test_waiting_in_finalize_after_saving_on_request_is_no_failure():
    """The others may take longer to save: where a machine is busy, longer than the supervisor waits."""
    made = judge("a", "a", ended=False)
    made.take_event(made.ranks[1], {"event": "finalizing", "code": 75, "own": True}, NOW)
    assert made.verdict(NOW) is None


def test_waiting_in_finalize_with_the_code_of_the_request_is_no_failure():
    """After a Ctrl-C ranks that have saved end with 130: one that saves more slowly must not be killed for it."""
    made = judge("a", "a", ended=False)
    made.stop_asked, made.answers = True, (*made.answers, 130)
    made.take_event(made.ranks[1], {"event": "finalizing", "code": 130, "own": True}, NOW)
    assert made.verdict(NOW) is None
    made.take_event(made.ranks[1], {"event": "finalizing", "code": 143, "own": True}, NOW)
    assert made.verdict(NOW).code == 143


def test_a_launcher_that_was_stopped_forgives():
    made = judge("a", "b", ended=False)
    for rank in made.ranks.values():
        rank.heard_at = rank.beat_at = NOW - 100.0
    made.pending.append((NOW + 1.0, 1, {"event": "exit"}))
    made.forgive(99.0)
    assert made.verdict(NOW) is None and not made.late
    assert [due for due, _, _ in made.pending] == [NOW + 100.0]


def test_no_beat_is_expected_of_anybody_while_one_is_in_a_debugger():
    made = judge("a", "a", ended=False)
    for rank in made.ranks.values():
        rank.beat_at = NOW - 100.0
    made.ranks[0].take_beat(Beat(state="t", traced=True, beats=1, paused=False, step=3, age=100.0, fields={}), NOW)
    assert made.verdict(NOW) is None and not made.late
    assert made.verdict(NOW) is None and len(made.warnings) == 1
    made.ranks[0].traced = False
    assert made.verdict(NOW) is None and made.late == [0, 1]
    made.stacks_until = NOW + 1.0
    made.ranks[0].stacks = 'Current thread 0x1:\n  File "/usr/lib/python3/pdb.py", line 3 in interaction\n'
    made.ranks[1].stacks = 'Current thread 0x1:\n  File "t.py", line 3 in allreduce\n'
    assert made.verdict(NOW) is None and not made.late
    assert "in a debugger" in made.warnings[-1]


def test_worlds_of_one_are_refused_when_every_rank_has_one():
    made = judge("a", "a", ended=False)
    made.take_event(made.ranks[0], {"event": "world", "size": 1, "own": True}, NOW)
    made.take_event(made.ranks[1], {"event": "world", "size": 1, "own": False}, NOW)
    assert made.verdict(NOW) is None  # a helper may well run MPI by itself
    assert made.at_end().code == 71
    made.take_event(made.ranks[1], {"event": "world", "size": 1, "own": True}, NOW)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.code) == ("start", 71)
    assert "each has an MPI world of size 1" in failure.message


def test_a_start_that_may_wait_in_a_queue_has_no_limit():
    made = judge("a", "a", ended=False)
    del made.ranks[1]
    made.start_seconds, made.progress_at, made.starter_lines = None, NOW - 1e6, ["srun: job 7 queued"]
    assert made.verdict(NOW) is None
    assert made.warnings == ["waiting for srun to start ranks 1 of 2; its last output: srun: job 7 queued"]


def test_a_rank_that_left_without_mpi_finalize_is_named():
    made = judge("a", "a", ended=False)
    made.take_event(made.ranks[1], {"event": "world", "size": 2, "own": True}, NOW)
    made.ranks[1].exit = Exit(code=0, signal=0, oom=None, ours=False)
    made.ranks[1].left_at = NOW
    assert made.verdict(NOW + 60.0) is None
    assert any("ended with code 0 but without MPI_Finalize" in text for text in made.warnings)


def test_missing_ranks_are_named_after_the_start_time():
    made = judge("a", "a", "b", ended=False)
    del made.ranks[2]
    made.progress_at = NOW - 9.0
    assert made.verdict(NOW) is None
    failure = made.verdict(NOW + 1.5)
    assert (failure.kind, failure.code, failure.may_retry) == ("start", 71, True)
    assert "1 of 3 ranks did not appear within 10 s (missing: 2); srun hangs" in failure.message


def test_exit_after_a_lost_host_is_not_the_first_cause_under_mpiexec():
    made = judge("a", "a", "b", ended=False)
    made.starter.name = "mpiexec"
    end(made, 0, NOW - 0.4, code=14)
    made.ranks[0].exit = Exit(code=14, signal=0, oom=None, ours=False)
    made.pending.append((NOW - 0.1, 0, {"event": "exit"}))
    lose(made, 2, NOW - 0.39)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank) == ("host_lost", 2)


def test_exit_for_a_lost_peer_comes_after_the_exit_of_that_peer():
    """Open MPI on two hosts: the end of the peer may be reported after the end that it caused."""
    made = judge("a", "a", "b", ended=False)
    for rank, code, at in ((2, 14, NOW - 0.2), (1, 9, NOW - 0.19)):
        end(made, rank, at, code=code)
        made.ranks[rank].exit = Exit(code=code, signal=0, oom=None, ours=False)
        assert made.take_bad_exit(made.ranks[rank], at) is None
    failure = made.verdict(NOW + 0.1)
    assert (failure.rank, failure.code) == (1, 9)


@pytest.mark.parametrize("other", [None, Exit(code=0, signal=0), Exit(code=9, signal=0, ours=True)])
def test_exit_with_the_code_of_a_lost_peer_counts_where_no_other_failed(other):
    made = judge("a", "a", "b", ended=False)
    made.ranks[1].exit = other
    end(made, 2, NOW, code=14)
    made.ranks[2].exit = Exit(code=14, signal=0, oom=None, ours=False)
    assert made.take_bad_exit(made.ranks[2], NOW) is None
    failure = made.verdict(NOW + 0.3)
    assert (failure.rank, failure.code) == (2, 14)


@pytest.mark.parametrize(
    ("hosts", "code", "signal", "is_in_doubt"),
    [("aa", 14, 0, False), ("ab", 14, 0, True), ("aa", 137, 9, False), ("ab", 137, 9, False)],
)
def test_a_plain_exit_is_in_doubt_only_where_a_peer_on_another_host_may_be_its_cause(hosts, code, signal, is_in_doubt):
    made = judge(*hosts, ended=False)
    end(made, 0, NOW, code=code, signal=signal)
    made.ranks[0].exit = Exit(code=code, signal=signal, oom=None, ours=False)
    failure = made.take_bad_exit(made.ranks[0], NOW) or made.verdict(NOW + 0.1)
    assert (failure is None) == is_in_doubt
    failure = failure or made.verdict(NOW + 0.3)
    assert (failure.rank, failure.code) == (0, code)


def tell(made, rank, at, event="leaving", **more):
    made.take_event(made.ranks[rank], {"event": event, "own": True, **more}, at)


@pytest.mark.parametrize("signal", [0, 9])
def test_rank_that_told_its_code_comes_before_the_step_that_srun_killed(signal, monkeypatch):
    """srun can kill supervisors before they report an end, and be killed itself: what the program told counts."""
    monkeypatch.setattr(Srun, "result", lambda self: (137, signal))
    made = judge("a", "a", "b", lines=["srun: error: a: tasks 0-1: Killed", "srun: error: b: task 2: Killed"])
    tell(made, 0, NOW - 0.51, code=14)  # of the loss of a peer
    tell(made, 2, NOW - 0.52, code=2)
    tell(made, 1, NOW - 0.53, code=2)
    for rank in range(3):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code, failure.message) == ("exit", 1, 2, "exit code 2")


def test_exception_of_a_rank_in_a_killed_step():
    made = judge("a", "a", code=137)
    tell(made, 1, NOW - 0.6, "exception", message="KeyError: 3")
    tell(made, 1, NOW - 0.6, code=1)
    tell(made, 0, NOW - 0.5, code=0)
    for rank in range(2):
        lose(made, rank, NOW - 0.5)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code, failure.message) == ("exception", 1, 1, "KeyError: 3")


@pytest.mark.parametrize("signal, expected", [(0, ("exit", 0, 2)), (9, ("signal", None, 137))])
def test_rank_killed_with_srun_is_not_the_cause(signal, expected, monkeypatch):
    """Slurm ends what a killed srun has left behind; a rank that left by itself is the cause all the same."""
    monkeypatch.setattr(Srun, "result", lambda self: (137, 9))
    made = judge("a", "b")
    end(made, 0, NOW - 0.6, code=137 if signal else 2, signal=signal)
    for rank in range(2):
        made.take_event(made.ranks[rank], {"event": "orphaned"}, NOW - 0.55)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == expected


def test_what_ranks_tell_under_mpiexec_is_not_the_cause_of_its_end(monkeypatch):
    monkeypatch.setattr(Srun, "kills_step", False)
    monkeypatch.setattr(Srun, "result", lambda self: (137, 9))
    made = judge("a", "a")
    tell(made, 0, NOW - 0.6, code=2)
    made.starter_ended_at = NOW - 60
    assert made.verdict(NOW).rank is None


HERE = os.uname().nodename


STEP = 2.0**-10  # exact on either side of all times here


def exits(made, rank, code=9, signal=0, ours=False, at=NOW):
    made.ranks[rank].exit = Exit(code=code, signal=signal, oom=None, ours=ours)
    made.ranks[rank].ended = at
    return made.ranks[rank]


def starting(missing=1, waited=0.0, **more):
    made = judge(*["a"] * 3, ended=False, **more)
    for number in range(3 - missing, 3):
        del made.ranks[number]
    made.progress_at, made.start_seconds = NOW - waited, 64.0
    return made


@pytest.mark.parametrize("waited", [limits.WAITING_SECONDS, limits.WAITING_SECONDS + STEP])
def test_ranks_that_wait_are_named_once(waited):
    made = starting(2, waited, lines=["busy", "queue"])
    assert made.verdict(NOW) is None and made.verdict(NOW) is None
    words = "waiting for srun to start ranks 1 2 of 3; its last output: queue"
    assert made.warnings == ([words] if waited > limits.WAITING_SECONDS else [])
    silent = starting(1, 20.0)
    silent.verdict(NOW)
    assert silent.warnings == ["waiting for srun to start ranks 2 of 3"]
    silent.starter, silent.waiting_said = None, False
    silent.verdict(NOW)
    assert silent.warnings[1] == "waiting for the starter to start ranks 2 of 3"


def test_a_start_hangs_beyond_its_time_alone():
    assert starting(1, 64.0).verdict(NOW) is None
    failure = starting(1, 64.0 + STEP, lines=["one", "two"]).verdict(NOW)
    assert (failure.kind, failure.code, failure.may_retry) == ("start", codes.NOT_STARTED, True)
    assert failure.message == "1 of 3 ranks did not appear within 64 s (missing: 2); srun hangs"
    assert failure.traceback == "one\ntwo"
    assert starting(1, 65.0).verdict(NOW).traceback is None
    assert starting(0, 65.0).verdict(NOW) is None


def test_many_ranks_are_named_in_short():
    made = judge(*["a"] * 18, ended=False)
    made.ranks.clear()
    made.progress_at, made.start_seconds = NOW - 65.0, 64.0
    numbers = " ".join(map(str, range(16)))
    for made.size in (17, 18):
        assert f"(missing: {numbers} ...)" in made.verdict(NOW).message
    made.size = 16
    assert f"(missing: {numbers})" in made.verdict(NOW).message


def test_events_of_a_rank_are_kept_up_to_a_number_and_faults_are_said_once():
    made = judge("a", "b", ended=False)
    rank = made.ranks[0]
    for n in range(203):
        made.take_event(rank, {"event": "world", "size": 2, "n": n}, NOW)
    assert len(rank.events) == 200 and rank.events[-1]["n"] == 199 and rank.events[0]["at"] == NOW
    for _ in range(2):
        made.take_event(rank, {"event": "fault", "message": "m"}, NOW)
    assert made.warnings == ["warning: rank 0 on a: internal error, the job continues: m"]
    other = made.ranks[1]
    for own in (False, None, True, False):
        made.take_event(other, {"event": "leaving", "own": own}, NOW)
        assert other.leaving is bool(own) or own is False
    assert other.leaving
    made.take_event(other, {"event": "cut"}, NOW)
    assert other.cut and not rank.cut


@pytest.mark.parametrize(("kind", "wait"), [("thread", limits.TOLD_SECONDS), ("worker", 0.0)])
def test_dead_threads_count_after_a_time_where_the_user_asked(kind, wait):
    made = judge("a", "a", ended=False)
    event = {"event": kind, "message": "m", "name": "t"}
    made.take_event(made.ranks[1], event, NOW)
    words = "thread t died of m" if kind == "thread" else "m"
    assert made.warnings == [f"warning: rank 1 on a: {words}; the job continues (--end-on {kind} would end it)"]
    assert made.verdict(NOW + 9) is None
    made.end_on = (kind,)
    made.take_event(made.ranks[1], event, NOW)
    assert wait == 0 or made.verdict(NOW + wait - STEP) is None
    assert made.verdict(NOW + wait).rank == 1


def test_doubts_about_an_end():
    def doubt(change=lambda made: None, hosts=("a", "a"), code=9):
        made = judge(*hosts, ended=False)
        rank = exits(made, 0, code)
        change(made)
        return made._seconds_of_doubt(rank, NOW)

    def of(number, **values):
        return lambda made: [setattr(made.ranks[number], k, v) for k, v in values.items()]

    two = ("a", "b")
    assert doubt() == 0 and doubt(hosts=two) == 0.2
    assert doubt(lambda made: made.ranks.pop(1)) == limits.STARTER_SECONDS
    assert doubt(of(1, cut=True)) == limits.STARTER_SECONDS == doubt(of(0, cut=True))
    silent = NOW - limits.DOUBT_SECONDS
    assert doubt(of(1, heard_at=silent - STEP), two) == 6.0
    assert doubt(of(1, heard_at=silent), two) == 0.2
    assert doubt(of(1, heard_at=silent - STEP)) == 0
    assert doubt(of(1, heard_at=silent - STEP, connected=False), two) == 0.2
    assert doubt(of(1, lost_at=NOW)) == 2 * limits.LOST_SECONDS
    assert doubt(of(1, ended=NOW - STEP)) == 2 * limits.LOST_SECONDS
    assert doubt(of(1, ended=NOW)) == 0 == doubt(of(1, ended=NOW + STEP))
    assert doubt(of(1, ended=NOW - STEP, exit=Exit(code=0, signal=0, oom=None, ours=False))) == 0


def test_only_ends_of_ours_leave_a_job_undecided():
    made = judge("a", "a", ended=False)
    assert not made.undecided()
    exits(made, 0, 143, ours=True)
    assert made.undecided()
    made.stop_asked = True
    assert not made.undecided()
    made.ranks[0].exit, made.stop_asked = Exit(143, 0), False
    assert not made.undecided()
    made.pending.append((NOW, 1, {"event": "finalizing"}))
    assert not made.undecided()


def test_odd_things_are_said_after_their_time():
    made = judge("a", "a", ended=False)
    rank = made.ranks[0]
    for change, back, words in (
        ({"stopped_since": NOW - 60.0 - STEP}, {"stopped_since": NOW - 60.0}, "has been stopped (SIGSTOP) for 60 s"),
        (
            {"heard_at": NOW - limits.SILENT_SECONDS - STEP},
            {"heard_at": NOW - limits.SILENT_SECONDS},
            "does not answer",
        ),
        ({"traced": True, "beat_at": NOW}, {"traced": True, "beat_at": None}, "a debugger is attached"),
        (
            {"events": [{"event": "exception", "own": True, "message": "E", "at": NOW - limits.EARLY_SECONDS - STEP}]},
            {"events": [{"event": "exception", "own": True, "message": "E", "at": NOW - limits.EARLY_SECONDS}]},
            "it ended with E, but its process does not exit",
        ),
        (
            {"events": [{"event": "exception", "own": True, "message": "E", "at": NOW - 99.0}]},
            {"events": [{"event": "exception", "own": False, "message": "E", "at": NOW - 99.0}]},
            "it ended with E",
        ),
    ):
        for values, is_said in ((back, False), (change, True)):
            made = judge("a", "a", ended=False)
            rank = made.ranks[0]
            for name, value in values.items():
                setattr(rank, name, value)
            made._look_around(NOW)
            assert len(made.warnings) == is_said and (not is_said or words in made.warnings[0])
    beating = judge("a", "a", ended=False)
    beating.ranks[0].stopped_since, beating.ranks[0].beat_at = NOW - 99.0, NOW
    beating._look_around(NOW)
    assert beating.warnings == []


def test_a_rank_that_left_early_is_said_while_others_run():
    def left(at, other_runs=True, kinds=("world",)):
        made = judge("a", "a", ended=False)
        rank = exits(made, 0, 0)
        rank.left_at = at
        rank.events = [{"event": kind, "at": at} for kind in kinds]
        made.ranks[1].connected = other_runs
        made._look_around(NOW)
        return len(made.warnings)

    assert left(NOW - limits.EARLY_SECONDS - STEP) == 1
    assert left(NOW - limits.EARLY_SECONDS) == 0 == left(None)
    assert left(NOW - 99.0, other_runs=False) == 0
    assert left(NOW - 99.0, kinds=()) == 0 == left(NOW - 99.0, kinds=("world", "leaving"))


def test_broken_connections_count_after_a_moment():
    made = judge(HERE, "b", "b", ended=False)
    made.starter.kills_step = False
    lose(made, 1, NOW - limits.LOST_SECONDS - STEP)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.signal) == ("signal", 1, "SIGKILL")  # of two there, one is left
    lose(made, 2, NOW - limits.LOST_SECONDS)
    assert made._connections(NOW).kind == "signal"
    lose(made, 2, NOW - limits.LOST_SECONDS - STEP)
    failure = made.verdict(NOW)
    assert (failure.kind, failure.rank, failure.ranks_lost) == ("host_lost", 1, [1, 2])
    assert failure.message == "host b is lost: its connections broke, or it was silent for 6 s"
    own = judge(HERE, "b", ended=False)
    own.starter.kills_step = False
    lose(own, 0, NOW - 1.0)
    failure = own.verdict(NOW)
    assert (failure.kind, failure.rank, failure.code) == ("signal", 0, 137)
    early = judge("a", "b", ended=False)
    lose(early, 1, NOW - limits.LOST_SECONDS)
    assert early._connections(NOW) is None


def test_the_starter_has_time_for_its_words():
    made = judge("a", "b", ended=False)
    for rank in range(2):
        lose(made, rank, NOW - limits.STARTER_SECONDS + STEP)
    assert made._of_killed_step(NOW) is None
    for rank in range(2):
        lose(made, rank, NOW - limits.STARTER_SECONDS)
    assert made._of_killed_step(NOW) is not None


@pytest.mark.parametrize(("apart", "kind"), [(limits.SAME_MOMENT_SECONDS * 2, "host_lost"), (0.0, "exit")])
def test_connections_that_break_one_by_one_name_the_first_host(apart, kind):
    made = judge("a", "b")
    lose(made, 0, NOW - 1.0 + apart)
    lose(made, 1, NOW - 1.0)
    failure = made._of_killed_step(NOW)
    assert (failure.kind, failure.host) == (kind, "b" if kind == "host_lost" else None)


def test_an_ended_starter_waits_for_the_reports():
    def ended(at, change=lambda made: None):
        made = judge("a", "a", code=3)
        made.starter_ended_at = at
        change(made)
        return made._ended_starter(NOW)

    last = NOW - limits.LAST_WORDS_SECONDS
    assert ended(None) is None is ended(last + STEP)
    assert ended(last).code == 3
    assert ended(last, lambda made: setattr(made, "stop_asked", True)) is None
    both = lambda ours: lambda made: [exits(made, n, 0, ours=ours) for n in (0, 1)]  # noqa: E731
    assert ended(last, both(False)) is None
    assert ended(NOW, both(True)).code == 3
    assert ended(last + STEP, lambda made: made.ranks.pop(1)) is None
    assert ended(last, lambda made: made.ranks.pop(1)).kind == "start"


def test_causes_among_ends():
    for code, number, ours, is_cause in (
        (0, 0, False, False), (1, 0, False, True), (codes.PREEMPTED, 0, False, False),
        (codes.LOST_PEER, 0, False, False), (codes.LOST_PEER, 9, False, True), (1, 0, True, False),
    ):  # fmt: skip
        made = judge("a", "a", "a", ended=False)
        first = exits(made, 0, codes.LOST_PEER)
        exits(made, 1, code, number, ours)
        end(made, 2, NOW + 5, code=3)
        assert made._first_of_exits(first).rank == (1 if is_cause else 2)
        assert made._first_of_exits(made.ranks[2]).rank == 2


def test_a_step_that_srun_killed_after_an_exit():
    """The starter's own code says an abort only once it has ended; until then a rank that waits before it does."""
    made = judge("a", "b", lines=["srun: error: a: task 0: Killed", "srun: error: b: task 1: Killed"])
    end(made, 1, NOW - 3.0, code=9)
    for rank in range(2):
        lose(made, rank, NOW - 3.0)
    made.ranks[0].aborting_at = NOW - 3.0
    for ended_at, code, number in ((NOW - 0.1, 7, 0), (NOW - 0.1, codes.LOST_PEER, 1), (None, 7, 1)):
        made.starter_ended_at, made.starter.code = ended_at, code
        assert made._of_killed_step(NOW).rank == number
    reported = judge("a", "b", lines=["srun: error: a: task 0: Killed"])
    for rank in range(2):
        lose(reported, rank, NOW - 3.0)
    exits(reported, 1, 0)  # its report came: its host is not one that broke
    assert reported._of_killed_step(NOW).kind == "exit"
    assert reported._result() == (1, 0)
    reported.starter_ended_at = None
    reported.starter.code = 5
    assert reported._result() == (1, 0)
    reported.starter, reported.starter_ended_at = None, NOW
    assert reported._result() == (1, 0)


def test_an_abort_counts_where_mpiexec_had_begun_to_end_its_ranks():
    said = "Abort(7) on node {0} (rank {0} in comm 0): application called MPI_Abort"
    for cut, lines, blamed in (
        (True, [said.format(1)], (1, "MPI_Abort(7)")),
        (False, [said.format(1)], (0, "exit code 3")),
        (True, [], (0, "exit code 3")),
        (True, [said.format(9)], (0, "exit code 3")),
    ):
        made = judge("a", "a", ended=False, lines=lines)
        made.ranks[1].cut = cut
        failure = made._of_exit(exits(made, 0, 3))
        assert (failure.rank, failure.message) == blamed


def test_pending_events_of_ranks_that_have_ended_or_lost_each_other():
    for event, counts in (("finalizing", False), ("thread", True), ("exit", True)):
        made = judge("a", "a", ended=False)
        exits(made, 0, 3)
        made.pending = [(NOW, 0, {"event": event, "message": "m", "name": "t", "code": 3})]
        assert (made._told(NOW) is not None) == counts and made._told(NOW - STEP) is None
        made.ranks[1].lost_at = NOW
        assert (made._told(NOW) is not None) == (event == "thread")  # `_connections` weighs the end
        exits(made, 1, 0)
        assert (made._told(NOW) is not None) == counts


def test_beats_begin_anew_after_a_debugger():
    made = judge("a", "a", "a", ended=False)
    made.late, made.stacks_until = [0], NOW
    made.ranks[0].stacks = '  File "/usr/lib/python3/pdb.py", line 3 in x'
    made.ranks[0].beat_at, made.ranks[1].beat_at = NOW - 99.0, NOW - 98.0
    assert made._stall(NOW) is None
    assert [rank.beat_at for rank in made.ranks.values()] == [NOW, NOW, None]


def test_worlds_at_the_end_of_scripts():
    def at_end(*events, size=2):
        made = judge(*["a"] * size)
        for rank, of_rank in zip(made.ranks.values(), events):
            rank.events = [{"event": "world", "size": n, "at": NOW} for n in of_rank]
        return made.at_end()

    assert at_end([1], [1]).kind == "start" == at_end([1, 1], [1]).kind
    for events in (([1], [2]), ([1], []), ([], []), ([1, 2], [1])):
        assert at_end(*events) is None
    assert at_end([1], size=1) is None


def test_stacks_are_waited_for_and_no_stall_is_seen_in_doubt():
    def stalled(change=lambda made: None, hosts=("a", "a")):
        made = judge(*hosts, ended=False)
        for number, rank in made.ranks.items():
            rank.beat_at, rank.step = NOW - 61.0 - number, number
        made.late, made.stacks_until = [0, 1], NOW
        change(made)
        return made._stall(NOW)

    def each(**values):
        return lambda made: [setattr(rank, k, v) for rank in made.ranks.values() for k, v in values.items()]

    assert stalled().rank == 0
    assert stalled(lambda made: setattr(made, "stop_asked", True)) is None
    assert stalled(lambda made: setattr(made, "stacks_until", NOW + STEP)) is None
    assert stalled(lambda made: (setattr(made, "stacks_until", NOW + 1), each(stacks="x")(made))).rank == 0
    assert stalled(lambda made: setattr(made, "stacks_until", None)) is None
    assert stalled(lambda made: setattr(made.ranks[1], "lost_at", NOW)) is None
    silent = NOW - limits.DOUBT_SECONDS
    assert stalled(each(heard_at=silent - STEP), ("a", "b")) is None
    assert stalled(each(heard_at=silent + STEP), ("a", "b")).rank == 0
    assert stalled(each(heard_at=silent - STEP)) is None  # who is silent itself cannot tell of beats
    again = judge("a", "a", ended=False)
    again.late, again.stacks_until = [0], NOW
    for rank in again.ranks.values():
        rank.beat_at, rank.stacks = NOW - 60.0, "x"
    assert again._stall(NOW) is None and again.late == [] and again.stacks_until is None
    assert [rank.stacks for rank in again.ranks.values()] == [None, None]
    assert stalls.late_ranks(list(again.ranks.values()), NOW + STEP, 60.0) == [0, 1]


IN_CALL, IN_LOAD, IN_DUMP = (
    f'Current thread 0x1:\n  File "t.py", line 3 in {name}\n' for name in ("bcast", "load", "dump")
)


def blamed(*each, late=None, **of_first):
    """Ranks as (step, seconds since the beat, stacks); the failure of those that are late, all by default."""
    ranks = []
    for number, (step, age, stacks) in enumerate(each):
        beat = None if age is None else NOW - age
        ranks.append(Rank(number, "a", channel=None, step=step, beat_at=beat, stacks=stacks, state="S"))
    for name, value in of_first.items():
        setattr(ranks[0], name, value)
    return stalls.blame(ranks, list(range(len(ranks))) if late is None else late, NOW)


@pytest.mark.parametrize(
    ("each", "options", "rank", "words"),
    [
        ([(7, 9, IN_CALL), (7, 9, IN_LOAD)], {}, 1, "the others wait in a communication call"),
        ([(7, 9, IN_LOAD), (7, 8, IN_LOAD)], {}, 0, "its last heartbeat is the oldest"),  # all are busy
        ([(7, 8, IN_CALL), (7, 9, IN_CALL)], {}, 1, "its last heartbeat is the oldest"),
        ([(7, 8, None), (7, 9, None)], {}, 1, "its last heartbeat is the oldest"),
        ([(7, None, None), (7, 9, None)], {}, 0, "its last heartbeat is the oldest"),
        ([(7, 8, IN_LOAD), (7, 9, IN_LOAD), (7, 9, IN_DUMP)], {}, 2, "it is in a different place from the others"),
        ([(7, 9, IN_LOAD), (7, 8, IN_DUMP)], {}, 0, "its last heartbeat is the oldest"),  # nobody is the odd one
        (
            [(7, 8, IN_LOAD), (7, 8, IN_LOAD), (7, 8, IN_DUMP), (7, 9, IN_DUMP)],
            {},
            3,
            "its last heartbeat is the oldest",
        ),
        ([(7, 9, IN_LOAD), (6, 8, IN_DUMP)], {}, 1, "it is the furthest behind"),
        # ranks whose stacks cannot be read: nobody saw them wait, nor work
        ([(7, 8, IN_LOAD), (7, 9, None)], {}, 1, "its last heartbeat is the oldest; the stacks give no further clue"),
        ([(7, 9, IN_LOAD), (6, 8, None)], {}, 1, "it is the furthest behind"),
        ([(7, 9, IN_CALL), (7, 9, None), (7, 8, None)], {}, 1, "and the other stacks show ranks that wait"),
        ([(7, 9, IN_CALL), (7, 8, IN_LOAD), (7, 9, None)], {}, 1, "the others whose stacks could be read wait"),
        ([(7, 8, IN_LOAD), (7, 8, IN_DUMP), (7, 9, None)], {}, 2, "its last heartbeat is the oldest"),
        ([(7, 8, "no frame"), (7, 9, "nor here")], {}, 1, "no stack could be read"),
        ([(7, 9, None), (7, 9, IN_LOAD)], {"leaving": True}, 0, "the others wait for a rank that has left"),
        ([(7, 9, IN_LOAD), (7, 9, IN_LOAD)], {"state": "T"}, 0, "a stopped process makes no progress"),
        (
            [(5, 9, IN_LOAD), (7, 9, IN_LOAD)],
            {"state": "T", "connected": False, "late": [1]},
            1,
            "no other rank's heartbeat is overdue",
        ),
        ([(7, 9, IN_CALL)], {}, 0, "no other rank's heartbeat is overdue"),
    ],
)
def test_the_rank_that_holds_the_others_up_is_blamed_by_the_first_sign(each, options, rank, words):
    failure = blamed(*each, **options)
    assert failure.rank == rank and words in failure.message


def test_what_a_blamed_rank_is_doing():
    failure = blamed((7, 9.0, IN_LOAD))
    assert failure.message.startswith("no heartbeat for 9.0 s; in load at t.py:3; ")
    assert (failure.kind, failure.signal, failure.code) == ("stalled", None, codes.STALLED)
    assert blamed((7, None, None)).message.startswith("no heartbeat; ")
    stopped = blamed((7, 9.0, IN_LOAD), state="T")
    assert stopped.message == "the process is stopped (SIGSTOP); a stopped process makes no progress"
    assert (stopped.kind, stopped.signal) == ("stopped", "SIGSTOP")
    gone = blamed((7, 9.0, None), (7, 9.0, IN_CALL), exit=Exit(code=3, signal=0))
    assert gone.message.startswith(
        "ended with exit code 3 while the others are still running; the others wait for a rank"
    )
    told = blamed((7, 9.0, None), events=[{"event": "thread", "message": "E: m"}, {"event": "world", "message": "w"}])
    assert told.message.endswith("; before that it reported: E: m")


TRACE = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n'


def test_events_that_are_failures():
    def of_event(errors=b"", end=None, **event):
        rank = Rank(1, "a", channel=None, exit=end)
        rank.take_output("err", errors)
        failure = report.from_event(rank, {"message": "E: m", **event})
        return failure.kind, failure.code, failure.message, failure.traceback

    trace = TRACE.decode().rstrip()
    assert of_event(TRACE, event="thread", name="t") == ("thread", 1, "thread t: E: m", trace)
    assert of_event(TRACE, event="worker") == ("thread", 1, "E: m", None)
    assert of_event(event="worker", oom=True)[0] == "oom" and of_event(event="worker", oom=False)[0] == "thread"
    assert of_event(TRACE, event="finalizing", code=3) == ("exception", 3, "KeyError: 1", trace)
    kind, code, words, text = of_event(b"x\n", event="finalizing", code=3)
    assert (kind, code, text) == ("exit", 3, None) and words.startswith("exit code 3; the process then waited")
    assert of_event(event="thread", name="t", end=Exit(code=5, signal=0))[1] == 5
    assert of_event(event="thread", name="t", end=Exit(code=0, signal=0), code=4)[1] == 4


def test_a_fault_in_a_supervisor_is_told_and_costs_nothing(monkeypatch):
    one, told = supervisor.Supervisor(0, "hydra", "-", Inherited()), []
    one.channel = SimpleNamespace(send=told.append)
    monkeypatch.setattr(one, "_seconds_to_wait", lambda: 1 // 0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    one._turn()
    one.loop.close()
    (event,) = told
    assert event.event == "fault" and "ZeroDivisionError" in event.fields["message"]
    judge = Judge(1, 10.0, 60.0, 6.0)
    judge.take_event(Rank(0, "a", channel=None), {"event": "fault", **event.fields}, 0.0)
    assert judge.warnings[0].startswith("warning: rank 0 on a: internal error, the job continues: ZeroDivisionError")


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_srun_killed_for_an_abort_is_not_its_cause(known):
    """Its supervisor may live long enough to report the SIGKILL before the others' connections break."""
    made = judge("a", "a", "a", ended=False)
    if known:
        words = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1\n"
        made.ranks[1].take_output("err", words)
    failure = made.take_bad_exit(exits(made, 0, code=137, signal=9), NOW)
    assert (failure.rank, failure.code) == ((1, 7) if known else (0, 137))
    assert made.take_bad_exit(exits(made, 2, code=3), NOW).code == 3  # it ended by itself


@pytest.mark.parametrize("oom", [None, "out-of-memory kill counted in memory.events"])
@pytest.mark.parametrize("called", [True, False])
def test_a_rank_killed_in_a_step_comes_before_what_its_peers_said_of_it(oom, called):
    """MPICH ends a rank that has lost a peer with words like those of an abort; and the kernel's kill is no srun's."""
    made = judge("a", "a", "a", ended=False)
    lost = b"Fatal error in internal_Allreduce: Other MPI error, error stack: connection failure"
    words = b"application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1" if called else lost
    made.ranks[1].take_output("err", b"Abort(7) on node 1 (rank 1 in comm 0): " + words + b"\n")
    killed = exits(made, 0, code=137, signal=9)
    killed.exit = killed.exit._replace(oom=oom)
    failure = made.take_bad_exit(killed, NOW)
    expected = ("exit", 1, 7) if called and not oom else ("oom" if oom else "signal", 0, 137)
    assert (failure.kind, failure.rank, failure.code) == expected


def test_a_broken_connection_counts_as_a_loss_only_after_a_moment(monkeypatch):
    monkeypatch.setattr(limits, "LOST_SECONDS", 0.25)
    for at, is_lost in ((NOW - 0.25, False), (NOW - 0.25 - 2**-10, True)):
        made = judge("a", "a", ended=False)
        lose(made, 0, at)
        failure = made.verdict(NOW)
        assert (failure is not None and failure.rank == 0) is is_lost


@pytest.mark.parametrize("kind", ["left", "unseen"])
def test_what_a_rank_tells_of_others_is_said_once(kind):
    made = judge("a", "b", ended=False)
    for number in (1, 1, 0):
        made.take_event(made.ranks[number], {"event": kind, "message": "words"}, NOW)
    assert made.warnings == ["warning: rank 1 on b: words", "warning: rank 0 on a: words"]


@pytest.mark.parametrize(
    ("beats", "late_since", "at"),
    [
        ([NOW - 30.0], NOW - 10.0, NOW + 30.0 + limits.TICK_SECONDS), ([NOW - 1.0], NOW - 10.0, NOW + 50.0),
        ([NOW - 30.0, NOW - 40.0], NOW - 1.0, NOW + 20.0 + limits.TICK_SECONDS), ([NOW], None, NOW + 60.0),
        ([NOW - 1.0], NOW - 60.0, None), ([NOW - 1.0], NOW - 60.0 + STEP, NOW + STEP),
    ],
)  # fmt: skip
def test_a_rank_that_still_beats_is_looked_at_again_when_its_next_beat_is_due(beats, late_since, at):
    """Rank 0 is late and waits for the others, which have beaten since; an interval later one is blamed."""
    made = judge("a", *["a"] * len(beats), ended=False)
    made.late, made.stacks_until, made.late_since = [0], NOW, late_since
    for number, beat in enumerate([NOW - 61.0, *beats]):
        made.ranks[number].beat_at, made.ranks[number].stacks = beat, IN_LOAD if number else IN_CALL
        made.ranks[number].sources = {"t.py:3": "comm.bcast(x)"} if not number else {}
    failure = made._stall(NOW)
    assert (failure is not None) == (at is None) and made.look_again_at == at
    if failure is not None:
        assert failure.rank == 1 and "this rank does not" in failure.message
        return
    assert made.late == [] and made.stacks_until is None and made.late_since == late_since
    for rank in made.ranks.values():
        rank.heard_at = at
    assert made._stall(at - STEP) is None and made.late == [] and made.look_again_at == at
    assert made._stall(at) is None and 0 in made.late and made.look_again_at is None


def test_a_late_rank_that_beats_again_is_forgotten():
    made = judge("a", "a", ended=False)
    made.ranks[0].beat_at = NOW - 61.0
    assert made._stall(NOW) is None and (made.late, made.late_since) == ([0], NOW)
    for rank in made.ranks.values():
        rank.heard_at = NOW + 1.0
    made.stacks_until, made.late = None, []
    assert made._stall(NOW + 1.0) is None and (made.late, made.late_since) == ([0], NOW)
    made.ranks[0].beat_at, made.look_again_at, made.late = NOW + 1.0, NOW + 9.0, []
    assert made._stall(NOW + 1.0) is None and (made.late, made.late_since, made.look_again_at) == ([], None, None)


def test_the_last_twenty_lines_of_the_starter_go_with_its_failure():
    lines = [f"line {number}" for number in range(30)]
    for count in (0, 19, 20, 30):
        said = judge("a", lines=lines[:count])._said()
        assert said == ("\n".join(lines[max(0, count - 20) : count]) or None)


@pytest.mark.parametrize(
    ("ends", "lasting", "first"),
    [
        ([(0, 0), (3, 0)], 1, 0), ([(3, 0), (0, 0)], 1, 1), ([(137, 9), (143, 15)], 1, None), ([(3, 0)], 1, None),
        ([(0, 0), (0, 0)], 1, 1), ([(0, 0), (0, 0)], 0, None), ([(0, 9)], 1, None),
    ],
)  # fmt: skip
def test_the_last_rank_that_ended_well_made_mpiexec_end_the_others(ends, lasting, first):
    ranks = {number: Rank(number, "a", channel=None) for number in range(len(ends) + lasting)}
    for number, (code, signal) in enumerate(ends):
        ranks[number].exit, ranks[number].left_at = Exit(code=code, signal=signal), NOW + number
    found = report._first_to_go(ranks, len(ranks))
    assert (found and found.rank) == first
    if first is not None:
        ranks[first].events = [{"event": "hooks"}]  # it would have said that it used MPI
        rest = report._first_to_go(ranks, len(ranks))
        assert rest is None or rest.rank != first
        ranks[first].events.append({"event": "world"})
        assert report._first_to_go(ranks, len(ranks)).rank == first


def test_a_signal_that_ended_a_rank_is_no_cause_where_srun_itself_was_killed():
    made = judge("a", "b")
    end(made, 0, NOW - 2.0, code=137, signal=9)
    end(made, 1, NOW - 1.0, code=3)
    assert made._cause_in_step().rank == made._cause_in_step(False).rank == 0
    assert made._cause_in_step(is_killed=True).rank == 1
    made.ranks[1].early_exit = None
    assert made._cause_in_step(is_killed=True) is None and made._cause_in_step().rank == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_first_of_several_supervisors_that_failed_is_named(has_begun):
    made = judge("a", "b", "c", ended=False)
    for number in (2, 1):
        lose(made, number, NOW - limits.LOST_SECONDS - STEP)
        made.ranks[number].broken, made.ranks[number].pid = f"why {number}", 7 if has_begun else 0
    failure = made._connections(NOW)
    kind = "exit" if has_begun else "start"
    assert (failure.kind, failure.rank, failure.host, failure.code) == (kind, 1, "b", codes.NOT_STARTED)
    assert failure.message == "its supervisor failed: why 1"
    assert made._connections(NOW - STEP) is None  # a moment later its report may have come
