"""What ranks note of their verbs and steps, and what a trace makes of it: bytes, types, spans and blame."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, judge, leaves, run_threads, trace
from dbrdist.comm.deadlock import State, Wait
from dbrdist.comm.trace import Clock, Recording
from dbrdist.core import spans
from dbrdist.core.spans import Meeting, Recorder, Span
from dbrdist.datasets.base import block_bounds
from tests.comm.training_contract import Net, batches
from tests.each import each

# ---- verbs ----------------------------------------------------------------------------------------------------------

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
        last = comm._gate.record.last
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


@each(size=[10, 40_000])
def test_sums_in_a_tree_note_what_each_rank_gets(size):
    def body(comm):
        mine = leaves.TreeSum()
        for leaf in range(*block_bounds(4, comm.rank, comm.size)):
            mine.add(leaf, [np.ones(size, "f4"), np.ones(3, "f8")], 1.0)
        with comm._gate.call("add") as call:
            call.agree()
            leaves.add_over_ranks(comm, call, 4, mine)
        return call.num_bytes, call.kind

    assert run_threads(2, body, timeout_seconds=60) == [(4 * size + 24, np.float64)] * 2


# ---- steps ----------------------------------------------------------------------------------------------------------

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


# ---- traces ---------------------------------------------------------------------------------------------------------


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
        "trace: 3 steps of 500.00 ms", "  compute: 250.00 ms, 50%", "  waiting for data: 62.50 ms, 12%",
        "  exposed communication: 125.00 ms, 25%", "  waiting for a late rank: 62.50 ms, 12%",
        "  the others waited for rank 2 in 75% of that time; it took longer than they did in: forward",
    ]  # fmt: skip
    assert len(found._replace(late=0.0).lines()) == len(found._replace(late_rank=None).lines()) == 5
    assert found._replace(step=0.0, compute=0.0).lines()[1] == "  compute: 0.00 ms, 0%"


# ---- the judge ------------------------------------------------------------------------------------------------------


def waiting(rank, number=5):
    return State(
        rank, False, False, [Wait(rank + 1, "c", "v", number, "row", [0, 1, 2], 0, "here", 3.0)], {("c",): number}
    )


@each(**{"seconds, has_all, is_judged": [(0.999, False, False), (1.0, False, True), (0.0, True, True)]})
def test_the_verdict_waits_a_second_for_those_who_need_not_answer(monkeypatch, seconds, has_all, is_judged):
    now, told = [50.0], []
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: now[0]))
    channel = SimpleNamespace(members=(0, 1, 2), judge=0, tell=lambda *args: told.append(args))
    one = judge.Judge(channel)
    left = State(2, False, True, counts={("c",): 4})
    stuck = waiting(0)
    for state in (left, stuck):
        one.hear(state, is_answer=False)
    assert one.look() is None and told == [(rank, {"what": "ask"}) for rank in (0, 1)]  # not the one that has left
    now[0] += seconds
    assert one.look() is None  # the one that is stuck has to answer
    one.hear(stuck, is_answer=True)
    if has_all:
        one.hear(State(1, True, counts={("c",): 4}), is_answer=True)
    found = one.look()
    assert (found is not None) == is_judged
    if found:
        assert found[1] == {0: {1}} and one._states == {2: left}
        one.hear(stuck, is_answer=True)  # nobody was asked
        assert one.look() is None and one._answers.keys() <= {0, 1}


def test_who_has_gone_on_is_asked_again_later():
    told = []
    one = judge.Judge(SimpleNamespace(members=(0, 1, 2), judge=0, tell=lambda *args: told.append(args)))
    left = State(2, False, True, counts={("c",): 4})
    for state in (left, waiting(0)):
        one.hear(state, is_answer=False)
    one.hear(State(2, True), is_answer=False)  # who has left stays so
    assert one._states[2] is left
    assert one.look() is None
    one._asked_at -= 10
    one.hear(State(0, True), is_answer=True)
    assert one.look() is None and one._states == {2: left} and one._asked == {}
    assert one.look() is None and len(told) == 2
