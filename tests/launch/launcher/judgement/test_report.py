"""The report of a failure: its first line, what stands behind it, and what everybody was doing."""

import pytest
from dbrdist_launch import codes
from dbrdist_launch.backends.job import Host, Job
from dbrdist_launch.launcher.judgement import report
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.launcher.judgement.report import Failure, as_text
from dbrdist_launch.launcher.running.plan import LaunchPlan, Outcome
from dbrdist_launch.launcher.streams.output import Piece
from dbrdist_launch.messages import Exit


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


def test_a_starter_that_fails_by_chance_may_be_started_again():
    """Open MPI's folder of the same process id; not where ranks have begun, nor with another code."""
    ranks = {0: Rank(0, "a", channel=None)}
    for code, known, may in ((213, {}, True), (213, ranks, False), (1, {}, False), (1, ranks, False)):
        failure = report.from_starter("mpiexec", code, 0, 2, known, ["x", "dbrdist-launch: rank 3: no such host"])
        assert (failure.kind, failure.may_retry) == ("start", may)
        assert failure.message == (
            f"mpiexec ended with exit code {code} before all ranks had appeared ({len(known)} of 2); 3: no such host"
        )


@pytest.mark.parametrize(
    ("code", "number", "cuts", "rank"),
    [
        (137, 0, [5.0, None, 9.0], 0), (9, 0, [9.0, 5.0, None], 1), (137, 0, [None, None, 5.0], 2),
        (137, 0, [5.25, 5.5, 5.0], 2), (137, 0, [5.125, 5.0, 9.0], None), (137, 9, [5.0, None, 9.0], None),
        (1, 0, [5.0, None, 9.0], None), (137, 0, [None] * 3, None),
    ],
)  # fmt: skip
def test_the_supervisor_that_was_killed_well_before_the_others_is_the_cause(code, number, cuts, rank):
    ranks = {n: Rank(n, f"h{n}", channel=None, cut_at=at) for n, at in enumerate(cuts)}
    failure = report.from_starter("mpiexec", code, number, 3, ranks, [])
    assert (failure.rank, failure.host) == ((rank, f"h{rank}") if rank is not None else (None, None))
    if rank is not None:
        assert (failure.kind, failure.code, failure.signal) == ("signal", 137, "SIGKILL")
        assert failure.message == "its supervisor was killed; mpiexec then ended the others"


def test_which_of_several_aborts_was_the_first():
    first = "Abort(7) on node 2 (rank 2 in comm 0): Fatal error: lost a peer"
    called = "Abort(9) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 9)"
    assert report.find_abort({}, [first, called], 1) == (1, 9) and report.find_abort({}, [first], 1) == (2, 7)
    waits = {n: Rank(n, "a", channel=None, aborting_at=at) for n, at in ((0, 5.0), (3, 4.0), (4, None))}
    assert [report.find_abort(waits, [], code) for code in (0, 1, 2, codes.LOST_PEER)] == [None, (3, 1), (3, 2), None]
    assert report.find_abort({}, [], 1) is None


def test_last_traceback_is_found_among_other_lines():
    lines = [
        "noise",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    g()",
        "KeyError: 'x'",
        "bye",
    ]
    text, last = report.last_traceback(lines)[:2]
    assert last == "KeyError: 'x'"
    assert text.splitlines()[0].startswith("Traceback") and text.splitlines()[-1] == last
    assert report.last_traceback(["nothing"]) is None
    assert report.last_traceback(["Fatal Python error: Aborted", "x"])[1] == "Fatal Python error: Aborted"


def test_aborts_are_read():
    assert report.find_abort({}, ["Abort(7) on node 2 (rank 2 in comm 0): application called MPI_Abort"], 1) == (2, 7)
    text = ["MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD", "  Proc: [[1,1],1]", "with errorcode 9."]
    assert report.find_abort({}, text, 1) == (1, 9)
    assert report.find_abort({}, ["fine"], 1) is None


def test_abort_under_srun_is_read_from_the_rank_that_waits_before_it():
    ranks = {number: Rank(number, "a", channel=None) for number in range(3)}
    ranks[1].take_output("err", b"[a:4711] Delaying for 1 seconds before aborting\n")
    assert report.find_abort(ranks, [], 7) == (1, 7)
    assert report.find_abort(ranks, [], 14) is None  # it lost a peer: another rank is the cause
    ranks[0].take_output("err", b"[a:4712] Delaying for 1 seconds before aborting\n")  # it lost rank 1 a second later
    assert report.find_abort(ranks, [], 7) == (1, 7)


def test_a_beat_of_a_moment_ago_or_of_a_clock_that_is_ahead():
    ranks = [Rank(number, "a", None) for number in range(3)]
    for rank, beat in zip(ranks, (99.75, 100.0, 100.5)):
        rank.beat_at = beat
    failure = Failure("exit", 0, "a", 1, "m")
    report.complete(failure, ranks, 100.0, 50.0, False)
    assert failure.last_beat_seconds == 0.25
    assert [other["last_beat_seconds"] for other in failure.others] == [0.0, 0.0]


def test_times_in_a_report_are_in_milliseconds():
    ranks = [Rank(number, "a", None) for number in (0, 1)]
    for rank in ranks:
        rank.beat_at, rank.step = 97.12345, 4
    failure = Failure("exit", 1, "a", 1, "m")
    report.complete(failure, ranks, 100.0, 50.00012, False)
    assert (failure.seconds, failure.last_beat_seconds, failure.step) == (50.0, 2.877, 4)


def test_the_end_of_an_interpreter_is_told_with_what_follows_it():
    lines = ["zero", "one", "50%| Fatal Python error: Aborted", "", "Thread 1:", "  File x", ""]
    text = "Fatal Python error: Aborted\n\nThread 1:\n  File x"
    assert report.last_traceback(lines) == (text, "Fatal Python error: Aborted", True, True)


def test_a_report_tells_the_last_beat_and_step_where_they_are_known():
    failure = Failure("stalled", 1, "a", 1, "no beat", step=7, seconds=12.0, last_beat_seconds=3.25)
    assert "12.0 s after the start, exit code 1, step 7, last heartbeat 3.2 s before" in as_text(failure)
    failure.step = failure.last_beat_seconds = None
    assert "12.0 s after the start, exit code 1\n" in as_text(failure) + "\n"


def test_the_innermost_frame_of_each_form_of_stacks():
    trace = '  File "a.py", line 1, in f\n    g()\n  File "b.py", line 2, in g\nKeyError'
    assert report.innermost("Traceback (most recent call last):\n" + trace) == ("b.py", "2", "g")
    stacks = 'Current thread 2:\n  File "c.py", line 3 in h\n  File "d.py", line 4 in i'
    assert report.innermost('Thread 1:\n  File "x.py", line 9 in x\n\n' + stacks) == ("c.py", "3", "h")
    spied = 'Process 1: python\n\nThread 7 (idle): "MainThread"\n    work (sl.py:3)\n    <module> (sl.py:4)\n'
    assert report.innermost(spied) == ("sl.py", "3", "work")
    assert report.innermost("no frames") is report.innermost("") is report.innermost(None) is None


def test_a_traceback_that_was_shown_is_not_repeated():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1'
    failure = report.Failure("exception", 1, "a", 1, "KeyError: 1", traceback=trace)
    assert "    in f at a.py:1; see the traceback above" in report.as_text(failure, seen=True).splitlines()
    assert "Traceback" not in report.as_text(failure, seen=True)
    assert trace.replace("\n", "\n    ") in report.as_text(failure)
    failure.traceback = 'Current thread 2:\n  File "c.py", line 3 in h'  # stacks, which nobody has seen
    assert 'File "c.py", line 3 in h' in report.as_text(failure, seen=True)


TRACE_LINES = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()", "KeyError: 'x'"]


def test_a_traceback_after_a_progress_bar_is_found():
    bar = " 50%|#####     | 5/10 "
    found = report.last_traceback([bar + TRACE_LINES[0], *TRACE_LINES[1:]])
    assert (found.text, found.message, found.last) == ("\n".join(TRACE_LINES), "KeyError: 'x'", True)


def test_a_traceback_with_much_after_it_is_not_the_last_word():
    assert not report.last_traceback([*TRACE_LINES, *(f"line {n}" for n in range(20))]).last
    assert report.last_traceback([*TRACE_LINES, "bye"]).last


def ended(code=3, signal_number=0, errors=b"", events=()):
    """A rank that has ended, with what it wrote and told."""
    rank = Rank(1, "a", channel=None, pid=7)
    rank.exit = Exit(code=code, signal=signal_number, oom=None, ours=False)
    rank.take_output("err", errors)
    rank.events = [{"own": True, **event} for event in events]
    return report.from_exit(rank)


HOOKS = {"event": "hooks"}


BELOW = {"event": "exception", "message": "E: 1", "own": False}


ABORT = b"Abort(1) on node 1 (rank 1 in comm 0)\n"


TEXT = "\n".join(TRACE_LINES).encode() + b"\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"errors": TEXT, "events": [HOOKS]}, "exit", "exit code 3"),  # a handled one, printed; then os._exit(3)
        ({"errors": TEXT, "events": [HOOKS, {"event": "exception", "message": "E: 1"}]}, "exception", "E: 1"),
        ({"events": [HOOKS, {"event": "exception", "message": "E: 1\nand 2"}]}, "exception", "E: 1\nand 2"),
        ({"errors": TEXT}, "exception", "KeyError: 'x'"),  # without hooks there is only the text
        ({"errors": TEXT + b"x\n" * 20}, "exit", "exit code 3"),
        (
            {"errors": TEXT, "events": [{"event": "exception", "message": "E: 1", "own": False}, HOOKS]},
            "exception",
            "E: 1",
        ),
        ({"events": [BELOW, HOOKS]}, "exit", "exit code 3"),
        (
            {"errors": TEXT + ABORT, "events": [HOOKS]},
            "exception",
            "KeyError: 'x'",
        ),
        ({"events": [{"event": "thread", "name": "t", "message": "E: 1"}]}, "thread", "thread t: E: 1"),
        ({"signal_number": 11, "events": [{"event": "exception", "message": "E: 1"}]}, "signal", "SIGSEGV"),
    ],
)
def test_the_programs_own_word_comes_before_text(arguments, kind, message):
    failure = ended(**arguments)
    assert (failure.kind, failure.message) == (kind, message)


def test_last_words_stand_in_the_report():
    failure = ended(errors=b"one\n\nfatal: no data\n")
    assert failure.last_words == ["one", "fatal: no data"]
    assert "its last lines on stderr:\n    one\n    fatal: no data" in report.as_text(failure)


def test_long_reasons_fit_narrow_terminals():
    failure = report.Failure(
        "stalled", 1, "a", 124, "no heartbeat for 5 s; the others wait", traceback="  File x\n" * 9
    )
    assert report.as_text(failure).startswith(
        "dbrdist-launch: rank 1 on a failed first (stalled): no heartbeat for 5 s;\n    the others wait\n  0.0 s after"
    )
    failure = report.Failure("exception", 1, "a", 1, "ValueError: a; b\nand c")
    assert "ValueError: a; b\n    and c\n" in report.as_text(failure)


def test_no_first_line_is_wider_than_a_narrow_terminal():
    text = "ended with exit code 0 but without MPI_Finalize; mpiexec then ended the others"
    lines = report.as_text(report.Failure("exit", 12, "node-with-a-name", 9, text)).splitlines()
    assert lines[0] == "dbrdist-launch: rank 12 on node-with-a-name failed first (exit):"
    assert lines[1:3] == ["    ended with exit code 0 but without MPI_Finalize;", "    mpiexec then ended the others"]


def test_what_mpich_says_after_an_abort_is_not_its_cause():
    """After MPI_Abort a rank of MPICH complains of its broken connections, at length."""
    said = "no such file\nAbort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(7)\n"
    rank = Rank(1, "a", channel=None)
    rank.take_output("err", (said + "Abort(8) on node 1 (rank 1 in comm 0): Fatal\n" * 9).encode())
    failure = report.from_abort(rank, 7)
    assert failure.last_words == ["no such file"]


HOSTS = (Host("a", 2), Host("b", 1))


ALONE, SPREAD = Job(("x",), 3), Job(("x",), 3, HOSTS, ("PATH", "A"))


def test_a_report_from_end_to_end():
    failure = Failure("exit", 1, "b", 3, "exit code 3; see its log", step=7, seconds=12.34, last_beat_seconds=0.26)
    failure.last_words, failure.ranks_lost = ["last", "words"], [1, 3]
    failure.others = [
        {"rank": 0, "host": "a", "doing": "running", "stacks": "Thread 1\n  File x"},
        {"rank": 2, "host": "a", "doing": "stopped"},
    ]
    assert as_text(failure).splitlines() == [
        "dbrdist-launch: rank 1 on b failed first (exit): exit code 3;",
        "    see its log",
        "  12.3 s after the start, exit code 3, step 7, last heartbeat 0.3 s before",
        "  ranks lost with it: 1 3",
        "  its last lines on stderr:",
        "    last",
        "    words",
        "  the other ranks at that time:",
        "    rank 0 on a: running",
        "      Thread 1",
        "        File x",
        "    rank 2 on a: stopped",
    ]


@pytest.mark.parametrize(("host", "who"), [("b", "b"), (None, "the job")])
def test_a_report_of_no_single_rank(host, who):
    assert as_text(Failure("start", None, host, 71, "late")).splitlines() == [
        f"dbrdist-launch: {who} failed first (start): late", "  0.0 s after the start, exit code 71",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, 32, 33, 40])
def test_others_are_shown_up_to_32(number):
    failure = Failure("exit", 1, "a", 1, "m")
    failure.others = [{"rank": n, "host": "b", "doing": "waits"} for n in range(number)]
    lines = as_text(failure).splitlines()[2:]
    shown = [f"    rank {n} on b: waits" for n in range(min(number, 32))]
    more = [f"    and {number - 32} more (see status.json)"] if number > 32 else []
    assert lines == [*(["  the other ranks at that time:"] if number else []), *shown, *more]


def test_what_is_not_known_yet():
    assert vars(Outcome(3)) == {
        "code": 3, "failure": None, "asked": 0, "steps": -1, "seconds": 0.0, "first_rank_seconds": None,
        "started_at": 0.0,
    }  # fmt: skip
    assert vars(Failure("exit", 1, "a", 3, "m")) == {
        "kind": "exit", "rank": 1, "host": "a", "code": 3, "message": "m", "signal": None, "step": None, "seconds": 0.0,
        "traceback": None, "last_words": [], "last_beat_seconds": None, "ranks_lost": [], "others": [],
        "may_retry": False, "host_trouble": False,
    }  # fmt: skip
    known = vars(Rank(1, "a", None))
    assert known.pop("heard_at") > 0 and known.pop("channel") is None
    assert known == {
        "rank": 1, "host": "a", "local_rank": 0, "pid": 0, "pinged": False, "state": "", "traced": False,
        "stopped_since": None, "count": 0, "step": -1, "beat_at": None, "paused": False, "fields": {},
        "tails": {"out": b"", "err": b""}, "owed": 0, "spoke_last": "out", "events": [], "connected": True,
        "ended": None, "early_exit": None, "aborting_at": None, "lost_at": None, "cut": False, "leaving": False,
        "left_at": None, "exit": None, "stacks": None, "warned": set(), "written": 0, "sources": {}, "broken": None,
        "orphaned": None, "cut_at": None, "welcomed": False,
    }  # fmt: skip
    piece = Piece(0, "a", "out", b"x")
    assert (piece.urgent, piece.left) == (False, 0) and piece != Piece(0, "a", "out", b"x")
    plan = LaunchPlan(ALONE, ["/m"], {}, {}, None, None, "t")
    assert (plan.control, plan.addresses, plan.deadline) == (None, (), None)
