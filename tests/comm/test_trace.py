"""Traces of all ranks: what a summary says of made-up recordings, and of real ranks of which one is slow."""

import json

import pytest

from dbrdist.comm import run_threads, trace
from dbrdist.comm.trace import Clock, Recording
from dbrdist.core import spans
from dbrdist.core.spans import Meeting, Recorder, Span
from tests.comm import jobs


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
