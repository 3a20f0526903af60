"""Who failed first, from what is told in which order: the cases that real machines show only now and then."""

import pytest
from dbrdist_launch.launcher.judgement.judge import Judge
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Beat, Exit

NOW = 1000.0


class Srun:
    """A starter that has ended with a code."""

    name = "srun"
    kills_step = True

    def __init__(self, code=1):
        self.code = code

    def result(self):
        return self.code, 0


def judge(*hosts, lines=(), ended=True, code=1):
    """Ranks 0, 1, ... on hosts; the starter has ended and has said these lines."""
    made = Judge(len(hosts), 10.0, 60.0, 6.0, starter=Srun(code), starter_lines=list(lines))
    made.starter_ended_at = NOW - 0.1 if ended else None
    for number, host in enumerate(hosts):
        made.ranks[number] = Rank(number, host, channel=None, heard_at=NOW)
    return made


def lose(made, rank, at):
    made.ranks[rank].connected, made.ranks[rank].lost_at = False, at


def end(made, rank, at, code=9, signal=0, oom=None):
    made.ranks[rank].ended = at
    made.ranks[rank].early_exit = Exit(code=code, signal=signal, oom=oom, ours=False)


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
    made.forgive(99.0)
    assert made.verdict(NOW) is None and not made.late


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
