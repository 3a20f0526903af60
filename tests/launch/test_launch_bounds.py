"""What lies just within and just outside of the times, counts and words by which the launcher decides."""

import builtins
import io
import os
import signal

import pytest
from dbrdist_launch import codes, cores, limits
from dbrdist_launch.backends import hosts
from dbrdist_launch.backends.job import Host
from dbrdist_launch.doctor import checks
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.judgement import report, stalls
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.records.runs import LaunchFolder
from dbrdist_launch.launcher.restarting import requeue
from dbrdist_launch.launcher.restarting.pool import HostPool
from dbrdist_launch.launcher.restarting.restarts import Policy
from dbrdist_launch.launcher.running.attempt import Outcome
from dbrdist_launch.messages import Exit
from test_launch_doctor import FACTS, said
from test_launch_judgement import NOW, end, judge, lose

HERE = os.uname().nodename
STEP = 2.0**-10  # exact on either side of all times here


def exits(made, rank, code=9, signal=0, ours=False, at=NOW):
    made.ranks[rank].exit = Exit(code=code, signal=signal, oom=None, ours=ours)
    made.ranks[rank].ended = at
    return made.ranks[rank]


# ---- the start ------------------------------------------------------------------------------------------------------


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


# ---- what is told ---------------------------------------------------------------------------------------------------


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


# ---- what is seen ---------------------------------------------------------------------------------------------------


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


# ---- reports --------------------------------------------------------------------------------------------------------


def test_first_lines_break_where_they_are_too_wide():
    def lines(length):
        failure = Failure("exit", 1, "a", 1, "")
        head = len(report.as_text(failure).splitlines()[0])
        failure.message = "m" * (length - head)
        return report.as_text(failure).splitlines()

    assert len(lines(80)[0]) == 80
    first, second, *_ = lines(81)
    assert first == "dbrdist-launch: rank 1 on a failed first (exit):" and second.strip("m") == "    "


@pytest.mark.parametrize("number", [32, 33])
def test_of_many_others_some_are_shown(number):
    failure = Failure("exit", 1, "a", 1, "m")
    failure.others = [{"rank": n, "host": "b", "doing": "waits"} for n in range(number)]
    failure.ranks_lost = [3]
    text = report.as_text(failure)
    assert text.count("waits") == 32 and "ranks lost" not in text
    assert ("and 1 more (see status.json)" in text) == (number > 32)
    failure.ranks_lost = [3, 4]
    assert "  ranks lost with it: 3 4" in report.as_text(failure)


@pytest.mark.parametrize("after", [5, 6])
def test_a_traceback_is_the_last_word_where_little_follows(after):
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "ValueError: v", "", *["w"] * after]
    found = report.last_traceback(lines)
    assert found.message == "ValueError: v" and found.last == (after == 5)
    cut = report.last_traceback(lines[:2])
    assert cut.message == 'File "x.py", line 1, in f'
    group = report.last_traceback([lines[0], "  | x", "  +-", "| y", "+ z", "E: m"])
    assert group.message == "E: m"
    assert report.last_traceback(["nothing"]) is None is report.last_traceback([])


def test_a_traceback_ends_at_the_first_line_that_is_not_indented():
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', " code", "E: m", "later"]
    assert report.last_traceback(lines).text == "\n".join(lines[:4])


TRACE = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nKeyError: 1\n'
FATAL = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n"


def of_exit(code=3, number=0, errors=b"", *events, oom=None):
    rank = Rank(1, "a", channel=None)
    rank.exit = Exit(code=code, signal=number, oom=oom, ours=False)
    rank.take_output("err", errors)
    rank.events = [{"message": "E: m", "name": "t", **event} for event in events]
    return report.from_exit(rank)


@pytest.mark.parametrize(
    ("number", "kind"), [(0, "exception"), (6, "exception"), (15, "exception"), (1, "signal"), (7, "signal"),
                         (9, "signal"), (16, "signal"), (11, "signal")]
)  # fmt: skip
def test_signals_behind_which_an_exception_may_stand(number, kind):
    """MPI_Abort ends its caller by an exit code, by SIGABRT, or lets mpiexec end it by SIGTERM."""
    failure = of_exit(1, number, TRACE)
    assert failure.kind == kind and failure.signal == (codes.signal_name(number) if number else None)
    assert failure.traceback == (TRACE.decode().rstrip() if kind == "exception" else None)
    assert (failure.last_words == []) == (kind == "exception")
    if kind == "signal":
        assert failure.last_words[-1] == "KeyError: 1"


def test_what_an_end_says_by_its_errors_and_events():
    own, below = {"event": "exception", "own": True}, {"event": "exception", "own": False}
    hooks = {"event": "hooks", "own": True}
    failure = of_exit(139, 11, FATAL)
    assert failure.message == "SIGSEGV: Fatal Python error: Segmentation fault" and "Current" in failure.traceback
    failure = of_exit(3, 0, FATAL, own)
    assert (failure.kind, failure.message, failure.traceback) == ("exception", "E: m", None)
    failure = of_exit(3, 0, b"", own)
    assert (failure.message, failure.traceback, failure.last_words) == ("E: m", None, [])
    assert of_exit(3, 0, TRACE, own).traceback.endswith("KeyError: 1")
    assert of_exit(3, 0, b"", below).kind == "exit" == of_exit(3, 0, TRACE + b"x\n" * 9, below).kind
    assert of_exit(3, 0, TRACE, below).message == "E: m"
    assert of_exit(3, 0, TRACE, hooks).kind == "exit" == of_exit(3, 0, b"", hooks).kind
    assert of_exit(3, 0, TRACE, {**hooks, "own": False}).message == "KeyError: 1"
    assert of_exit(3, 0, TRACE + b"MPI_ABORT was invoked\n", hooks).message == "KeyError: 1"
    assert of_exit(137, 9, b"", oom="memory").kind == "oom" and of_exit(0).code == 1
    for kind in ("thread", "worker"):
        assert of_exit(3, 0, b"", {"event": kind}).kind == "thread"
    assert of_exit(3, 0, b"\n".join(b"w%d" % n for n in range(9)) + b"\n \n").last_words == [
        "w3", "w4", "w5", "w6", "w7", "w8",
    ]  # fmt: skip


def test_an_abort_has_the_words_before_it_and_its_exception():
    call = b"Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort\nmore\n"

    def of_abort(errors, code=7, **event):
        rank = Rank(1, "a", channel=None)
        rank.take_output("err", errors)
        rank.events = [{"event": "exception", "message": "E: m", **event}] if event else []
        failure = report.from_abort(rank, code)
        return failure.kind, failure.message, failure.traceback, failure.last_words

    assert of_abort(b"why\n" + call) == ("exit", "MPI_Abort(7)", None, ["why"])
    assert of_abort(b"why\n") == ("exit", "MPI_Abort(7)", None, ["why"])
    assert of_abort(TRACE + call) == ("exception", "KeyError: 1", TRACE.decode().rstrip(), [])
    assert of_abort(TRACE + b"x\n" * 9)[:2] == ("exit", "MPI_Abort(7)")
    assert of_abort(b"why\n", own=True) == ("exception", "E: m", None, ["why"])
    assert of_abort(b"why\n", own=False) == ("exit", "MPI_Abort(7)", None, ["why"])
    assert [report.from_abort(Rank(1, "a", channel=None), code).code for code in (0, 256, 257, -1)] == [1, 1, 1, 255]


def test_a_failure_is_completed_by_where_everybody_was():
    ranks = [Rank(number, "a", channel=None) for number in range(3)]
    for rank, step, beat, stacks in zip(ranks, (0, -1, 5), (90.0, None, 80.0), ("one\n", "two\n", None)):
        rank.step, rank.beat_at, rank.stacks, rank.count = step, beat, stacks, int(beat is not None)
    for number, with_stacks, traceback in ((0, True, None), (0, False, "t"), (1, True, None), (2, True, None)):
        failure = Failure("exit", number, "a", 1, "m", traceback=traceback)
        report.complete(failure, ranks, 100.0, 50.0, with_stacks)
        assert failure.seconds == 50.0 and failure.step == (0, None, 5)[number]
        assert failure.last_beat_seconds == (10.0, None, 20.0)[number]
        assert failure.traceback == (traceback or ("one", "two", None)[number])
        others = [n for n in range(3) if n != number]
        assert [other["rank"] for other in failure.others] == others
        assert [other["step"] for other in failure.others] == [(0, None, 5)[n] for n in others]
        assert [other["last_beat_seconds"] for other in failure.others] == [(10.0, None, 20.0)[n] for n in others]
        shown = [n for n in others if with_stacks and n != 2]
        assert [other["rank"] for other in failure.others if "stacks" in other] == shown


def test_the_words_of_a_starter_that_ended_before_its_ranks():
    def of_starter(code=3, number=0, size=1, lines=("l",), **values):
        ranks = {0: Rank(0, "a", channel=None)}
        for name, value in values.items():
            setattr(ranks[0], name, value)
        return report.from_starter("srun", code, number, size, ranks, list(lines))

    failure = of_starter()
    assert (failure.kind, failure.code, failure.signal) == ("exit", 3, None)
    assert failure.message == "srun ended with exit code 3 before its ranks did" and failure.traceback == "l"
    assert of_starter(0, lines=()).code == 1 and of_starter(0, lines=()).traceback is None
    assert (of_starter(137, 9).kind, of_starter(137, 9).signal) == ("signal", "SIGKILL")
    failure = of_starter(size=2, lines=[str(n) for n in range(30)])
    assert (failure.kind, failure.code) == ("start", codes.NOT_STARTED)
    assert failure.message == "srun ended with exit code 3 before all ranks had appeared (1 of 2)"
    assert failure.traceback.splitlines() == [str(n) for n in range(10, 30)]
    left = {"exit": Exit(code=0, signal=0, ours=False), "events": [{"event": "world", "size": 1}]}
    failure = of_starter(0, size=2, **left)
    assert (failure.rank, failure.code) == (0, 1) and "without MPI_Finalize; srun then ended" in failure.message
    assert of_starter(lines=["Abort(7) on node 0 (rank 0 in comm 0): x"]).message == "MPI_Abort(7)"
    assert of_starter(lines=["Abort(7) on node 4 (rank 4 in comm 0): x"]).message.startswith("srun ended")


def test_which_of_several_aborts_was_the_first():
    first = "Abort(7) on node 2 (rank 2 in comm 0): Fatal error: lost a peer"
    called = "Abort(9) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 9)"
    assert report.find_abort({}, [first, called], 1) == (1, 9) and report.find_abort({}, [first], 1) == (2, 7)
    waits = {n: Rank(n, "a", channel=None, aborting_at=at) for n, at in ((0, 5.0), (3, 4.0), (4, None))}
    assert [report.find_abort(waits, [], code) for code in (0, 1, 2, codes.LOST_PEER)] == [None, (3, 1), (3, 2), None]
    assert report.find_abort({}, [], 1) is None


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


def test_names_of_signals():
    assert codes.signal_name(9) == "SIGKILL" and codes.describe_end(3, 0) == "exit code 3"
    assert codes.signal_name(signal.SIGRTMIN + 2) == "SIGRTMIN+2" and codes.signal_name(signal.SIGRTMIN - 1) == (
        f"signal {signal.SIGRTMIN - 1}"
    )
    assert codes.describe_end(0, 15) == "SIGTERM"


# ---- restarts -------------------------------------------------------------------------------------------------------


def failed(kind="exit", message="m", steps=-1, seconds=0.0, code=1, **more):
    return Outcome(code, Failure(kind, 1, "a", code, message, **more), steps=steps, seconds=seconds)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (failed("start"), "a start that was refused would be refused again"),
        (failed("start", host_trouble=True), ""),
        (failed("start", may_retry=True), ""),
        (failed("deadline"), "its time is up"),
        (failed(code=codes.COMMAND_NOT_FOUND), "the command cannot be run"),
        (failed(code=codes.COMMAND_NOT_RUNNABLE), "the command cannot be run"),
        (failed(code=codes.COMMAND_NOT_FOUND + 1), ""),
    ],
)
def test_what_is_not_started_again(outcome, why):
    again, words = Policy(max_restarts=2, start_retries=0).after(outcome)
    assert (again, words) == ((False, f"not restarted: {why}") if why else (True, "restart 1 of 2"))


def loops(*outcomes):
    policy = Policy(max_restarts=99)
    policy.history.extend(outcomes)
    return policy.loops()


def test_crash_loops_are_alike_quick_or_without_a_step():
    n = limits.SAME_FAILURES
    quick = limits.QUICK_SECONDS - STEP
    assert loops(*[failed(seconds=quick)] * n) and not loops(*[failed(seconds=quick)] * (n - 1))
    assert not loops(*[failed(seconds=limits.QUICK_SECONDS)] * n)
    assert not loops(*[failed(seconds=quick)] * (n - 1), failed(message="other"))
    assert loops(*[failed(steps=0, seconds=1e6)] * n)
    assert loops(failed(steps=3), *[failed(steps=2)] * (n - 1)) and loops(*[failed(steps=3)] * n)
    assert not loops(*[failed(steps=3)] * (n - 1), failed(steps=4))
    assert not loops(*[failed(steps=-1, seconds=1e6)] * (n - 1), failed(steps=0))
    assert loops(failed(message="other"), *[failed()] * n)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:01", 1), ("1-02:03:04", 93784), ("00:01:00", 60), ("UNLIMITED", None), ("", None), ("1:00", None)],
)
def test_times_of_slurm(text, seconds):
    assert requeue._seconds(text) == seconds


def test_jobs_that_were_cancelled_before_their_time():
    def cancelled(state, ran="00:59:59", limit="01:00:00"):
        return requeue._was_cancelled({"JobState": state, "RunTime": ran, "TimeLimit": limit})

    assert cancelled("CANCELLED") and not cancelled("RUNNING") and cancelled("COMPLETING")
    assert not cancelled("COMPLETING", "01:00:00") and not cancelled("COMPLETING", "")
    assert cancelled("COMPLETING", "99:00:00", "UNLIMITED")
    assert not requeue._was_cancelled({})


def test_hosts_come_back_when_their_time_is_over():
    now = [100.0]
    answers = [{"b": "no route"}, {}, {}]
    asked = []

    def probe(names):
        asked.append(list(names))
        return answers.pop(0)

    pool = HostPool((Host("a", 1), Host("b", 1)), cooldown_seconds=8.0, probe=probe, clock=lambda: now[0])
    assert pool.after_failure() == (["b"], []) and [h.name for h in pool.available()] == ["a"]
    now[0] = 108.0 - STEP
    assert pool.after_failure() == ([], [])
    now[0] = 108.0
    assert pool.after_failure() == ([], ["b"]) and [h.name for h in pool.available()] == ["a", "b"]
    assert asked == [["a", "b"], ["a"], ["a", "b"]]


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a\n", "latest"])
def test_names_of_jobs_are_plain_words(name):
    with pytest.raises(LaunchError, match="expected a name that a folder can have"):
        LaunchFolder(name, [], None, None)


def test_runs_have_folders_of_their_own(tmp_path):
    runs = [LaunchFolder("late", [], str(tmp_path / "logs"), None) for _ in range(3)]
    assert [run.name for run in runs] == ["late", "late-2", "late-3"]
    assert os.readlink(tmp_path / "logs" / "latest") == "late-3"
    assert LaunchFolder("x", [], None, None).folder is None
    assert LaunchFolder("x", [], None, str(tmp_path / "r.json")).paths == [str(tmp_path / "r.json")]
    with pytest.raises(LaunchError, match=r"--record .*: the folder .* does not exist"):
        LaunchFolder("x", [], None, str(tmp_path / "nowhere" / "r.json"))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"--log-dir .* cannot be written"):
        LaunchFolder("x", [], str(tmp_path / "file" / "logs"), None)


# ---- hosts ----------------------------------------------------------------------------------------------------------


def test_hosts_that_cannot_be_are_refused(tmp_path):
    assert hosts.checked("a-b.c_1", "2") == Host("a-b.c_1", 2) == hosts.checked("a-b.c_1", 2)
    for name in ("-a", "", "a b", "a;b"):
        with pytest.raises(LaunchError, match="is not a host name"):
            hosts.checked(name, 1)
    for slots in ("0", 0, "x", "-1", ""):
        with pytest.raises(LaunchError, match="expected a number of slots of at least 1 after the colon"):
            hosts.checked("a", slots)
    for text in ("", "# nothing\n\n"):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(LaunchError, match="names no host"):
            hosts.parse_file(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("a:2 # one\na slots=3 max_slots=4\nb 5\nc\n")
    assert hosts.parse_file(str(tmp_path / "hosts")) == (Host("a", 5), Host("b", 5), Host("c", 1))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.parse_file(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", *hosts._OPERATOR_FILES])
def test_host_files_of_batch_systems_are_read_where_they_are(tmp_path, name):
    (tmp_path / "hosts").write_text("a:2\n")
    assert hosts.of_environment({name: str(tmp_path / "hosts")}) == (Host("a", 2),)
    for path in ("", str(tmp_path / "nowhere")):
        assert hosts.of_environment({name: path}) == ()
    assert hosts.of_environment({"LSB_MCPU_HOSTS": "a 2 b 3"}) == (Host("a", 2), Host("b", 3))


def test_names_of_slurm_in_their_short_form():
    assert hosts.expand("n[1-3,07],login") == ["n1", "n2", "n3", "n07", "login"]
    assert hosts.expand("n[09-10]x") == ["n09x", "n10x"] and hosts.expand("n[5]") == ["n5"]
    assert hosts.expand("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"] and hosts.expand("n[3-2]") == []
    assert hosts.expand("n[900000-900001]") == ["n900000", "n900001"]
    for text in ("n[a]", "n[1-b]", "n[]", "n[-1]", f"n[1-{(1 << 20) + 2}]"):
        with pytest.raises(LaunchError, match=": expected a form such as"):
            hosts.expand(text)


def test_ranks_fit_into_slots():
    pair = (Host("a", 2), Host("b", 3))
    assert hosts.place(pair, 5, None) == (pair, 5) == hosts.place(pair, None, None)
    assert hosts.place(pair, 2, None) == ((Host("a", 2),), 2)
    assert hosts.place(pair, 3, None) == ((Host("a", 2), Host("b", 1)), 3)
    assert hosts.place(pair, None, 4) == ((Host("a", 4), Host("b", 4)), 8)
    with pytest.raises(LaunchError, match=r"6 ranks do not fit into 5 slots \(a:2, b:3\); .* --hosts a:3,\.\.\.,"):
        hosts.place(pair, 6, None)


# ---- this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "200000 100000"}, 2.0),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "300000 100000",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000",
                "/sys/fs/cgroup/cpu.max": "400000 100000",
            },
            1.5,
        ),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "x"}, None),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "0 100000"}, None),
        (
            {
                "/proc/self/cgroup": "3:memory:/m\n2:cpu,cpuacct:/a\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
                "/sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "1",
                "/sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "50000",
            },
            2.0,
        ),
        (
            {
                "/proc/self/cgroup": "2:cpu:/a\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_quotas_of_control_groups(monkeypatch, files, quota):
    def open_(path, *args, **kwargs):
        if str(path).startswith(("/proc/self/cgroup", "/sys/fs/cgroup")):
            if os.path.normpath(path) not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[os.path.normpath(path)])
        return real(path, *args, **kwargs)

    real = builtins.open
    monkeypatch.setattr(builtins, "open", open_)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert cores._quota() == quota
    assert cores.available_cores() == (4 if quota is None else max(1, int(quota)))


@pytest.mark.parametrize(
    ("changes", "level", "title"),
    [
        ({"shm_free_bytes": checks._SHM_FAIL}, "ok", "shared memory"),
        ({"shm_free_bytes": checks._SHM_FAIL - 1}, "FAIL", "shared memory"),
        ({"shm_bytes": checks._SHM_WARN}, "ok", "shared memory"),
        ({"shm_bytes": checks._SHM_WARN - 1}, "warn", "shared memory"),
        ({"files": checks._FILES_WARN}, "ok", "open files"),
        ({"files": checks._FILES_WARN - 1}, "warn", "open files"),
        ({"files": -1}, "ok", "open files"),
        ({"gpus": 8}, "ok", "GPUs"),
        ({"gpus": 7}, "warn", "GPUs"),
        ({"cores": 7}, "warn", "cores"),
    ],
)
def test_bounds_of_the_doctors_findings(changes, level, title):
    assert (level, title) in said(checks.memory_and_limits, {**FACTS, **changes}, 8)[0]
    levels, _ = said(checks.memory_and_limits, {**FACTS, "infiniband": ["x"], "fork_safe": "1"}, 8)
    assert levels == [("ok", "shared memory"), ("ok", "open files")]


def test_clocks_and_hosts_at_their_bounds():
    warn = checks._CLOCK_WARN_SECONDS
    assert said(checks.clock, "b", -warn - 0.25, 0.25)[0] == [("ok", "clock")]
    assert said(checks.clock, "b", -warn - 0.26, 0.25)[0] == [("warn", "clock")]
    other = {**FACTS, "host": "b", "system": "Linux 7"}
    assert said(checks.alike, FACTS, other)[0] == [("warn", "alike")]
    assert said(checks.alike, FACTS, {**FACTS, "packages": {"numpy": "2.5"}})[0] == [("warn", "alike")]
    assert said(checks.alike, FACTS, {**FACTS, "executable": "/w"})[0] == [("FAIL", "alike"), ("ok", "alike")]
