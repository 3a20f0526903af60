"""Tests of dbrdist.comm.steps.reduction_handle."""

from types import SimpleNamespace

import numpy as np

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.communicators.threads import ThreadCommunicator, ThreadReducer
from dbrdist.comm.gradients.communication_thread import Courier
from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT, ReductionPlan
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.steps import reduction_handle
from dbrdist.comm.steps.reduction_handle import Reduction
from dbrdist.core.model.parameter import Parameter
from tests.comm.started_contract import Model
from tests.each import each


def test_what_the_starts_of_a_reduction_show(monkeypatch):
    comm, posted = create_communicator("single"), []
    post = Passage.post
    monkeypatch.setattr(Passage, "post", lambda *args, **named: posted.append((args, named)) or post(*args, **named))
    model = Model()
    model.fill(0)
    reduction = Reduction(comm, model)
    for count in (None, 4):
        reduction.start(count)
        reduction.wait()
    plan = reduction._plan
    for number, ((_, row, error), named) in enumerate(p for p in posted if p[1].get("what") == "the same reduction"):
        count = [EQUAL_WEIGHT, 4][number]
        assert row == [plan.digest, (1 << 32) + number + 1, plan.runs_digest, count, number, 0] and error is None
        assert named["num_same"] == 2 and named["detail"] == (
            f"start number {number + 1} of reduction 1 of the communicator\n{plan.text}"
        )
    assert number == 1


@each(has_courier=[True, False])
def test_the_way_is_chosen_anew_for_other_parameters(monkeypatch, has_courier):
    comm, is_small = create_communicator("single"), [True]
    monkeypatch.setattr(comm.reducer, "thread", lambda: SimpleNamespace() if has_courier else None)
    monkeypatch.setattr(comm.reducer, "encloses", lambda grads: is_small[0])
    model = Model()
    model.fill(0)
    reduction = Reduction(comm, model)
    assert reduction._way is reduction_handle._Enclosed and not reduction.is_started
    plain = reduction_handle._ByThread if has_courier else reduction_handle._Started
    is_small[0] = False
    reduction._agree_on(reduction._plan)
    assert reduction._way is plain
    started = SimpleNamespace(finish=lambda: None, plan=reduction._plan)
    asked = []
    monkeypatch.setattr(reduction, "_agree_on", asked.append)
    reduction._started = started
    reduction.wait()
    assert asked == []  # they are the same
    started.plan = SimpleNamespace(digest=reduction._plan.digest + 1, named=reduction._plan.named)
    reduction._started = started
    reduction.wait()
    assert asked == [reduction._plan]


def test_what_a_thread_has_reduced_is_not_reduced_again(monkeypatch):
    made, anew = {}, []

    def in_background(reducer):
        comm = reducer.comm
        if comm not in made:
            made[comm] = Courier(comm.split(0, comm.rank))
        return made[comm]

    monkeypatch.setattr(ThreadReducer, "thread", in_background)
    mean_grad = ThreadCommunicator.weighted_mean_grad
    monkeypatch.setattr(
        ThreadCommunicator, "weighted_mean_grad", lambda comm, *args: anew.append(comm.rank) or mean_grad(comm, *args)
    )

    def body(comm):
        model = Model(3, 2)
        reduction = Reduction(comm, model)
        for step in range(3):
            model.fill(comm.rank, step)
            reduction.start()
            reduction.wait()
            model.check(comm, step)

    run_threads(2, body, timeout_seconds=60)
    assert sorted(anew) == [0, 1]  # the first time, when gradients have yet to come to their places
    for courier in made.values():
        courier.close()


class Row:
    """A call whose rows are given; ``later`` are those of a second exchange."""

    def __init__(self, rows, enclosed, later=None):
        self.rows, self.enclosed, self.later, self.posts = [np.array(rows)], enclosed, later, []
        self.num_bytes, self.kind = 0, None
        self.where = lambda: "x.py:1"

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def wait(self):
        return self.rows.pop(0) if self.rows else None

    def post(self, row, error, **named):
        self.posts.append((row, named["enclosed"]))
        self.enclosed = self.later


NEVER, LATER, NOW = 0, 1, 2


@each(
    **{
        "shown, runs, is_done": [
            ((NOW, NOW), (5, 5), True), ((NOW, NEVER), (5, 5), False), ((NOW, NOW), (5, 6), False),
            ((LATER, NOW), (5, 5), True), ((NOW, LATER), (5, 5), True), ((LATER, NEVER), (5, 5), False),
        ]
    },
    is_written=[True, False],
)  # fmt: skip
def test_gradients_that_come_with_a_row(shown, runs, is_done, is_written):
    """Rank 0 of two, as the rows say; a rank that had no room shows them in the wait, and all do so again."""
    p = Parameter(np.zeros(3))
    p.grad = np.ones(3)
    plan = ReductionPlan([("/p", p)])
    comm = SimpleNamespace(rank=0, size=2, gate=SimpleNamespace(again=lambda call: call))
    one = reduction_handle._Enclosed(comm, plan, (1, 4), 6, None)
    pieces = [[p.grad.copy(), np.full(3, 5.0)]]
    is_second = LATER in shown
    rows = [[plan.digest, 4, run, count, 0, how] for run, count, how in zip(runs, (6, 2), shown)]
    one.call = Row(rows, [] if shown[0] == LATER else pieces, pieces)
    one._then = [p.grad.copy()] if shown[0] == LATER else ()
    if is_written:
        p.grad[1] = 3
    assert one.arrive() is is_done
    assert len(one.call.posts) == (is_second and is_done)
    if is_second and is_done:
        ((row, (sent,)),) = one.call.posts
        assert row == [plan.digest, (1 << 32) + 4, plan.runs_digest, 6, plan.place, NOW] and sent.tolist() == [1] * 3
    if is_done:
        assert p.grad.tolist() == [0.75 * 1 + 0.25 * 5] * 3
        error = one.change_of_values()
        assert (error is not None) == is_written
        assert error is None or "at x.py:1, but they were written since" in str(error)


@each(**{"encloses, has_room, shown": [(False, True, NEVER), (True, True, NOW), (True, False, LATER)]})
def test_gradients_are_shown_at_the_start_where_there_is_room(encloses, has_room, shown):
    p = Parameter(np.zeros(3))
    p.grad = np.ones(3)
    reducer = SimpleNamespace(encloses=lambda grads: encloses)
    comm = SimpleNamespace(rank=0, size=2, reducer=reducer, ranks=SimpleNamespace(has_room=lambda: has_room))
    one = reduction_handle._Enclosed(comm, ReductionPlan([("/p", p)]), (1, 1), None, None)
    one.call = Row([], [])
    one.set_out(None)
    ((row, enclosed),) = one.call.posts
    assert row[-1] == shown and row[3] == EQUAL_WEIGHT
    assert [a is b for a, b in zip(enclosed, one.grads)] == ([True] if shown == NOW else [])
    if shown == LATER:
        assert one._then[0].tolist() == [1] * 3 and not np.shares_memory(one._then[0], p.grad)
    else:
        assert one._then == ()
