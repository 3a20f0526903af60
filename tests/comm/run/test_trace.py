"""Traces of all ranks: what a summary says of made-up recordings, and of real ranks of which one is slow."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.comm.run import trace
from dbrdist.comm.run.trace import Clock, Recording
from dbrdist.core.array import spans
from dbrdist.core.array.spans import Meeting, Recorder, Span
from tests.comm import jobs
from tests.comm.training_contract import Net, batches
from tests.each import each


def rank(arrival, leave, data=0.0, step=1):
    """A step of a rank that computes from ``data`` until ``arrival`` and leaves the meeting at ``leave``."""
    found = [
        Span("step", step, 0, 0.0, leave),
        Span("data wait", step, 0, 0.0, data),
        Span("forward", step, 0, data, arrival - 0.5),
        Span("backward", step, 0, arrival - 0.5, arrival),
        Span("exposed wait", step, 0, arrival, leave),
    ]
    return Recording(found, [Meeting(("comm", step, 1, "reduce"), step, 0, arrival, leave)])


def test_the_last_to_come_is_late_and_the_rest_is_communication():
    found = trace.summarize([rank(2.0, 6.0), rank(5.0, 6.0, data=3.0), rank(2.0, 6.0)])
    assert found.late_rank == 1
    assert found.late == pytest.approx((3 + 0 + 3) / 3)
    assert found.exposed == pytest.approx(1.0)
    assert found.data_stall == pytest.approx(1.0)
    assert found.compute == pytest.approx(2.0)
    assert (found.late_cause, found.late_share) == ("data wait", 1.0)
    assert "rank 1" in found.lines()[-1]


def test_a_rank_waits_during_a_replayed_backward_pass_and_after_it():
    ranks = [rank(4.0, 6.0), rank(5.0, 6.0)]
    ranks[0].spans.append(Span("exposed wait", 1, 0, 1.0, 3.0))
    for k, recording in enumerate(ranks):
        recording.meetings.append(Meeting(("comm", 1, 1, "row"), 1, 0, 1.0 + 2.0 * k, 3.0))
    for order in (1, -1):
        found = trace.summarize([Recording(r.spans[::order], r.meetings) for r in ranks])
        assert (found.late_rank, found.late) == (1, pytest.approx((2.0 + 1.0) / 2))


def test_who_waited_for_another_is_not_to_blame():
    """Rank 2 came last to the second meeting, but only because it waited for rank 1 in the first."""
    first, second = ("comm", 1, 1, "row"), ("comm", 2, 1, "reduce")
    times = [((1.0, 1.1), (1.2, 5.3)), ((5.0, 5.05), (5.1, 5.3)), ((1.0, 5.1), (5.2, 5.3))]
    ranks = []
    for (a, b), (c, d) in times:
        steps = [Span("step", 1, 0, 0.0, 5.4), Span("exposed wait", 1, 0, a, d), Span("forward", 1, 0, 0.0, a)]
        ranks.append(Recording(steps, [Meeting(first, 1, 0, a, b), Meeting(second, 1, 0, c, d)]))
    found = trace.summarize(ranks)
    assert found.late_rank == 1
    assert found.late_share > 0.9


def test_one_rank_alone_waits_for_nobody():
    found = trace.summarize([rank(2.0, 2.0)])
    assert (found.late, found.late_rank, found.exposed) == (0.0, None, 0.0)


def test_the_first_step_does_not_count():
    first = rank(90.0, 99.0)
    second = rank(2.0, 3.0, step=2)
    both = Recording(first.spans + second.spans, first.meetings + second.meetings)
    assert trace.summarize([both, both]).step == pytest.approx(3.0)


def test_a_clock_that_runs_away_is_followed():
    clock = Clock((10.0, 5.0), (20.0, 6.0))
    assert clock(10.0) == 15.0
    assert clock(15.0) == pytest.approx(20.5)


def test_chrome_has_each_span_in_microseconds():
    events = trace.chrome([rank(2.0, 3.0), rank(2.5, 3.0)])["traceEvents"]
    (step,) = [e for e in events if e["name"] == "step" and e["pid"] == 1]
    assert (step["ts"], step["dur"], step["args"]) == (0.0, 3e6, {"step": 1})
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"rank 0", "rank 1", "training"}


def test_nothing_is_kept_where_nobody_records():
    recorder = Recorder()
    with spans.span("a"):
        spans.record(recorder)
    with spans.span("b"):
        pass
    spans.record(None)
    with spans.span("c"):
        pass
    assert [s.name for s in recorder.spans] == ["b"]


def test_of_a_long_run_the_last_whole_steps_are_kept(monkeypatch):
    """Meetings are more than spans, and give way earlier: a step without its meetings would seem to wait for nobody."""
    monkeypatch.setattr(spans, "MAX_KEPT", 10)
    tracer = trace.Trace(run_threads(1, lambda comm: comm)[0])
    tracer.start()
    recorder = spans.recording()
    for recorder.step in range(1, 9):
        with spans.span("step"):
            for i in range(3):
                recorder.meet(("comm", 3 * recorder.step + i), 0.0)
    (found,) = tracer.finish()
    assert [s.step for s in found.spans] == [6, 7, 8]
    assert [m.step for m in found.meetings] == [6, 6, 6, 7, 7, 7, 8, 8, 8]


def test_traces_do_not_end_each_other():
    """A second one would take the spans of the first; one that was not begun would say that nothing happened."""
    comm = run_threads(1, lambda comm: comm)[0]
    first, second = trace.Trace(comm), trace.Trace(comm)
    with pytest.raises(RuntimeError, match="start it first"):
        first.finish()
    first.start()
    try:
        for again in (first, second):
            with pytest.raises(RuntimeError, match="expected no other trace to be recording"):
                again.start()
        with pytest.raises(RuntimeError, match="start it first"):
            second.finish()
        with spans.span("step"):
            pass
        (found,) = first.finish()
    finally:
        first.stop()
    assert [s.name for s in found.spans] == ["step"]
    with pytest.raises(RuntimeError, match="finish it once"):
        first.finish()


def test_a_trace_after_a_run_that_failed():
    """It has nothing of that run."""
    tracer = trace.Trace(run_threads(1, lambda comm: comm)[0])
    tracer.start()
    with pytest.raises(KeyError), spans.span("forward"):
        raise KeyError("in the middle")
    tracer.stop()
    tracer.start()
    with spans.span("backward"):
        pass
    (found,) = tracer.finish()
    assert [s.name for s in found.spans] == ["backward"]


def test_clocks_are_compared_over_a_communicator():
    for _, ahead in run_threads(3, trace.ask, timeout_seconds=30):
        assert abs(ahead) < 1.0


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("place", "cause", "num_ranks", "late", "memory"),
    [
        ("data", "data wait", 2, 1, "shared"),
        ("forward", "forward", 3, 0, "messages"),
        ("communication", "communication", 2, 0, "shared"),
    ],
)
def test_the_summary_names_the_slow_rank_and_what_it_did(place, cause, num_ranks, late, memory, tmp_path):
    path = tmp_path / "trace.json"
    outcome = jobs.run(num_ranks, jobs.PROGRAMS / "slowed.py", place, late, path, memory)
    assert outcome.code == 0, outcome.text
    found = json.loads(next(line for line in outcome.text.splitlines() if line.startswith("{")))
    assert (found["late_rank"], found["late_cause"]) == (late, cause), outcome.text
    assert found["late_share"] > 0.5
    names = {e["name"] for e in json.loads(path.read_text())["traceEvents"]}
    assert {"data wait", "forward", "backward", "exposed wait", "update", "reduce"} <= names


def test_clocks_of_ranks_drift_evenly():
    clock = trace.Clock((10.0, 1.0), (20.0, 3.0))
    assert [clock(t) for t in (10.0, 15.0, 20.0, 25.0)] == [11.0, 17.0, 23.0, 29.0]
    assert trace.Clock((10.0, 1.0), (10.0, 3.0))(12.0) == 13.0


@each(late=[0.0, 0.25])
def test_a_summary_blames_where_somebody_was_late(late):
    lines = trace.Summary(4, 2.0, 1.0, 0.5, 0.25, late, 1, 0.75, "forward").lines()
    assert lines[0] == "trace: 4 steps of 2000.00 ms" and lines[1] == "  compute: 1000.00 ms, 50 %"
    assert lines[4] == f"  waiting for a late rank: {250 if late else 0:.2f} ms, {12 if late else 0} %"
    said = "  the others waited for rank 1 in 75 % of that time; it took longer than they did in: forward"
    assert lines[5:] == [said] * (late > 0)
    assert len(trace.Summary(4, 2.0, 1.0, 0.5, 0.25, late, None, 0.0, "").lines()) == 5


@each(**{"rounds, found": [([4.0, 1.0, 3.0], 1), ([1.0, 1.0, 2.0], 0), ([3.0, 2.0, 1.0], 2)]})
def test_the_quickest_question_tells_the_time(monkeypatch, rounds, found):
    """Rank 1 asks; each answer is 500 ahead of the middle of its question, and says which one it was."""
    now, asked = [100.0], []

    def recv(source, tag):
        took = rounds[len(asked)]
        answer = now[0] + took / 2 + 500 + 1000 * len(asked)
        now[0] += took
        asked.append((source, tag))
        return answer

    sent = []
    comm = SimpleNamespace(rank=1, size=3, send_obj=lambda *args: sent.append(args), recv_obj=recv)
    monkeypatch.setattr(trace, "_NUM_QUESTIONS", len(rounds))
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    at, ahead = trace.ask(comm)
    assert at == 100.0 + sum(rounds[:found]) + rounds[found] / 2 and ahead == 500 + 1000 * found
    assert len(asked) == len(sent) == len(rounds) and {a[0] for a in asked} == {0} and {s[1] for s in sent} == {0}


def test_clocks_of_ranks_are_compared_with_that_of_rank_0(monkeypatch):
    """Rank k's clock is 1000 k ahead of the real one."""

    def perf_counter():
        name = threading.current_thread().name
        return time.perf_counter() + 1000 * int(name.rpartition(" ")[2])

    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=perf_counter))
    before = time.perf_counter()
    found = run_threads(3, trace.ask, timeout_seconds=60)
    after = time.perf_counter()
    for rank, (at, ahead) in enumerate(found):
        assert before <= at - 1000 * rank <= after and abs(ahead + 1000 * rank) <= after - before
    assert found[0][1] == 0.0


X = np.ones((3, 5), "f4")
VERBS = {  # verb: call, bytes, type of elements that are added or gathered, root
    "bcast": (lambda comm: comm.bcast(X, root=1), 60, None, 1),
    "gather": (lambda comm: comm.gather(X, root=1), 60, "float32", 1),
    "allgather": (lambda comm: comm.allgather(X), 60, "float32", -1),
    "scatter": (lambda comm: comm.scatter([X, X] if comm.rank else None, root=1), 60, None, 1),
    "alltoall": (lambda comm: comm.alltoall([X, X]), 120, None, -1),
    "allreduce": (lambda comm: comm.allreduce(X), 60, "float32", -1),
    "barrier": (lambda comm: comm.barrier(), 0, None, -1),
    "split": (lambda comm: comm.split(0, comm.rank), 0, None, -1),
    "bcast_obj": (lambda comm: comm.bcast_obj("abc"), 18, None, 0),
    "gather_obj": (lambda comm: comm.gather_obj("abc"), 18, None, 0),
    "allgather_obj": (lambda comm: comm.allgather_obj("abc"), 18, None, -1),
    "scatter_obj": (lambda comm: comm.scatter_obj(["a", "b"] if not comm.rank else None), 16, None, 0),
}


def test_verbs_note_their_bytes_types_and_roots():
    def body(comm):
        found = {}
        last = comm.gate.record.last
        for verb, (call, *_) in VERBS.items():
            before = len(last)
            call(comm)
            (noted,) = list(last)[before:]
            assert (noted.verb, noted.meets_by, noted.is_collective) == (verb, "row", True) and noted.seconds >= 0
            found[verb] = [noted.num_bytes, noted.kind and noted.kind.name, noted.root]
        comm.allreduce(X[:0])
        assert (last[-1].num_bytes, last[-1].kind) == (0, None)
        comm.send(X, 1, 3) if comm.rank == 0 else comm.recv(0, 3)
        assert (last[-1].num_bytes, last[-1].tag, last[-1].partner) == (60, 3, 1 - comm.rank)
        return found

    expected = {verb: expected for verb, (_, *expected) in VERBS.items()}
    assert run_threads(2, body, timeout_seconds=60) == [expected] * 2


STEP = ["forward", "backward"]
JOINT = [*STEP, "reduce", "exposed wait", "update"]
STEPS = [  # ranks, options: what each of four steps notes
    (1, {}, [[*STEP, "update"]] * 4),
    (1, {"accumulate": 2}, [STEP, [*STEP, "update"]] * 2),
    (2, {}, [JOINT] * 4),
    (2, {"zero": 1}, [[*JOINT, "spread values"]] * 4),
    (2, {"local_steps": 2}, [JOINT, *[[*STEP, "update"]] * 3]),
    (2, {"accumulate": 2}, [STEP, JOINT] * 2),
    (2, {"double_buffering": True}, [[*STEP, "exposed wait"], *[[*STEP, "exposed wait", "update"]] * 3]),
]  # fmt: skip


@each(**{"num_ranks, options, expected": STEPS})
def test_what_steps_note(num_ranks, options, expected):
    """In this order on each rank; outer spans begin before inner ones, and end after them."""
    recorder = Recorder()

    def body(comm):
        model = Net()
        x, t = next(batches(1))
        model(x, t)
        optimizer = create_multi_node_optimizer(optimizers.SGD(lr=1e-3).setup(model), comm, **options)
        found = []
        for _ in range(4):
            recorder.spans.clear()
            comm.barrier()
            comm.rank or spans.record(recorder)
            comm.barrier()
            optimizer.update(model, x, t)
            comm.barrier()
            comm.rank or spans.record(None)
            mine = [span for span in recorder.spans if span.thread == threading.get_ident()]
            found.append([span.name for span in mine])
            assert all(a.ended <= b.ended and a.began <= a.ended for a, b in itertools.pairwise(mine))
            names = {span.name: span for span in mine}
            for first, second in zip(STEP, ["backward", "exposed wait"]):
                assert second not in names or names[first].ended <= names[second].began
            waited = [span.ended - span.began for span in mine if span.name == "exposed wait"]
            optimizer.exposed_seconds, seconds = 0.0, optimizer.exposed_seconds
            assert (0 < seconds <= sum(waited)) if waited else seconds == 0
            comm.barrier()
        return found

    try:
        found = run_threads(num_ranks, body, timeout_seconds=60)
    finally:
        spans.record(None)
    assert found == [expected] * num_ranks


def test_what_was_noted_moves_to_the_clock_of_rank_0():
    clock = Clock((0.0, 10.0), (10.0, 20.0))
    moved = trace._moved(Span("a", 3, 77, 1.0, 2.0), clock, 77)
    assert moved == Span("a", 3, 0, 12.0, 14.0)
    assert trace._moved(Meeting(("k",), 3, 78, 1.0, 2.0), clock, 77) == Meeting(("k",), 3, 1, 12.0, 14.0)


def test_a_trace_compares_clocks_at_its_start_and_at_its_end(monkeypatch):
    said = iter([(0.0, 10.0), (10.0, 20.0)])
    monkeypatch.setattr(trace, "ask", lambda comm: next(said))
    one = trace.Trace(create_communicator("single"))
    one.start()
    spans.recording().spans.append(Span("a", 3, threading.get_ident(), 1.0, 2.0))
    ((found,),) = [recording.spans for recording in one.finish()]
    assert found == Span("a", 3, 0, 12.0, 14.0)


def test_a_trace_begins_at_0_with_what_contains_the_rest_first():
    first = Recording(
        [Span("inner", 2, 0, 5.0, 5.5), Span("outer", 2, 0, 5.0, 6.0)], [Meeting(("k",), 2, 1, 5.25, 5.5)]
    )
    second = Recording([Span("late", 3, 0, 5.00000154, 5.00000258)], [])
    found = trace.chrome([first, second])
    drawn = [
        (e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in found["traceEvents"] if e["ph"] == "X"
    ]
    assert drawn == [
        ("outer", 0, 0, 0.0, 1e6, {"step": 2}), ("inner", 0, 0, 0.0, 5e5, {"step": 2}),
        ("wait for ranks", 0, 1, 25e4, 25e4, {"step": 2}), ("late", 1, 0, 1.5, 1.0, {"step": 3}),
    ]  # fmt: skip
    names = [(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in found["traceEvents"] if e["ph"] == "M"]
    assert names == [
        (kind, pid, tid, name)
        for pid in (0, 1)
        for kind, tid, name in (
            ("process_name", None, f"rank {pid}"), ("thread_name", 0, "training"), ("thread_name", 1, "reduction"),
        )
    ]  # fmt: skip
    assert found["displayTimeUnit"] == "ms" and trace.chrome([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


def recording(waits=(), began=0.0, **seconds):
    """One step: spans of these lengths, and meetings (verb, from, to)."""
    return Recording(
        [Span(name.replace("_", " "), 1, 0, began, began + length) for name, length in seconds.items()],
        [Meeting(("comm", number, 1, verb), 1, 0, a, b) for number, (verb, a, b) in enumerate(waits)],
    )


def test_time_in_reductions_is_without_the_waits():
    one = recording([("reduce", 1.0, 1.5), ("row", 2.0, 4.0)], reduce=2.0, forward=9.0, reduce_bucket_1=1.0)
    assert trace._working(one, 1) == 2.5 and trace._working(one, 2) == 1.25


@each(
    **{
        "late, others, cause": [
            ({"data_wait": 3.0}, {"data_wait": 1.0, "forward": 9.0}, "data wait"),
            ({"forward": 5.0, "backward": 4.0}, {"forward": 4.5, "backward": 2.0}, "backward"),
            ({"update": 3.0, "reduce": 2.0}, {"update": 2.5, "reduce": 1.0}, "communication"),
            ({"update": 3.0}, {}, "update"), ({"forward": 2.0}, {"forward": 1.0}, "forward"),
        ]
    },
    rank=[0, 2],
)  # fmt: skip
def test_what_the_late_rank_did_longer_than_the_median(late, others, cause, rank):
    ranks = [recording(**others) for _ in range(3)]
    ranks[rank] = recording(**late)
    ranks.append(recording(data_wait=50.0, forward=50.0, backward=50.0, update=50.0, reduce=50.0))  # one beyond all
    assert trace._cause(ranks, rank, 2) == cause


def test_who_waits_for_whom_and_until_when():
    a = Meeting(("k", 1), 4, 0, 1.0, 6.0)
    b = Meeting(("k", 1), 4, 0, 5.0, 6.0)
    early = Meeting(("k", 1), 4, 0, 2.0, 3.0)  # left before the last one came
    c, d = Meeting(("k", 0), 4, 0, 0.5, 0.75), Meeting(("k", 0), 4, 0, 0.0, 0.75)
    alone = Meeting(("k", 9), 4, 0, 1.0, 2.0)
    found = trace._meetings([Recording([], [a, c, alone]), Recording([], [b, d]), Recording([], [])])
    assert found == [[], [], []]  # one rank was at none of them
    wait = trace._Wait
    found = trace._meetings([Recording([], [a, c, alone]), Recording([], [b, d])])
    assert found == [[wait(4, 1.0, 5.0, 1)], [wait(4, 0.0, 0.5, 0)]]
    found = trace._meetings([Recording([], [m]) for m in (a, early, b)])
    assert found == [[wait(4, 1.0, 5.0, 2)], [wait(4, 2.0, 3.0, 2)], []]


def test_blame_is_passed_on_for_as_long_as_the_blamed_waited():
    wait = trace._Wait
    waits = [[], [wait(1, 2.0, 3.0, 2), wait(1, 6.0, 9.0, 0)], [wait(1, 2.5, 2.75, 0)]]

    def blamed(last, begin, end, depth):
        mine = {0: 0.0, 1: 0.0, 2: 0.0}
        trace._blame(waits, mine, last, begin, end, depth)
        return list(mine.values())

    assert blamed(1, 0.0, 7.0, 3) == [1.25, 5.0, 0.75] and blamed(1, 0.0, 7.0, 1) == [1.0, 5.0, 1.0]
    assert blamed(1, 0.0, 7.0, 0) == [0, 7.0, 0] and blamed(0, 1.0, 2.0, 3) == [1.0, 0, 0]
    assert blamed(1, 2.0, 2.0, 3) == [0, 0, 0] and blamed(1, 3.0, 6.0, 3) == [0, 3.0, 0]


def test_waits_count_within_exposed_time_alone():
    meeting = [("reduce", 1.0, 5.0)], [("reduce", 4.0, 5.0)]
    exposed = Span("exposed wait", 1, 0, 2.0, 3.5)
    first, second = (Recording([], recording(found).meetings) for found in meeting)
    assert trace._waits([first, second]) == [{}, {}]
    assert trace._waits([Recording([exposed], first.meetings), second]) == [{1: 1.5}, {}]


def test_a_summary_in_words():
    found = trace.Summary(3, 0.5, 0.25, 0.0625, 0.125, 0.0625, 2, 0.75, "forward")
    assert found.lines() == [
        "trace: 3 steps of 500.00 ms", "  compute: 250.00 ms, 50 %", "  waiting for data: 62.50 ms, 12 %",
        "  exposed communication: 125.00 ms, 25 %", "  waiting for a late rank: 62.50 ms, 12 %",
        "  the others waited for rank 2 in 75 % of that time; it took longer than they did in: forward",
    ]  # fmt: skip
    assert len(found._replace(late=0.0).lines()) == len(found._replace(late_rank=None).lines()) == 5
    assert found._replace(step=0.0, compute=0.0).lines()[1] == "  compute: 0.00 ms, 0 %"


@each(num_steps=[2, 3, 5])
def test_a_summary_is_the_mean_of_steps_and_ranks(num_steps):
    def ranks_of(arrival):
        every = [rank(arrival, 6.0, data=1.0, step=k) for k in range(num_steps)]
        return Recording([s for one in every for s in one.spans], [m for one in every for m in one.meetings])

    found = trace.summarize([ranks_of(2.0), ranks_of(5.0)])
    assert (found.num_steps, found.step, found.data_stall) == (num_steps - 1, 6.0, 1.0)
    assert found.compute == (1.0 + 4.0) / 2 and (found.late, found.late_rank, found.late_share) == (1.5, 1, 1.0)
    assert found.exposed == (4.0 + 1.0) / 2 - 1.5


def test_a_trace_is_written_as_a_whole(tmp_path, monkeypatch):
    path, ranks = tmp_path / "trace.json", [rank(2.0, 3.0), rank(2.5, 3.0)]
    trace.write(str(path), ranks)
    assert json.loads(path.read_bytes()) == trace.chrome(ranks)
    before = path.read_bytes()
    monkeypatch.setattr(trace.json, "dumps", lambda value: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        trace.write(str(path), ranks)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_shares_of_no_step_and_of_a_short_one():
    parts = {"compute": 5e-10, "data_stall": 0.0, "exposed": 1e-9, "late": 2e-9}
    summary = trace.Summary(num_steps=0, step=0.0, **parts, late_rank=None, late_share=0.0, late_cause="")
    assert summary.lines() == [
        "trace: 0 steps of 0.00 ms",
        "  compute: 0.00 ms, 50 %",
        "  waiting for data: 0.00 ms, 0 %",
        "  exposed communication: 0.00 ms, 100 %",
        "  waiting for a late rank: 0.00 ms, 200 %",
    ]
