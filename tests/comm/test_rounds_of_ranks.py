"""What goes from one step to the next, and reductions that are started and waited for: part by part, on few ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import (
    background,
    buffering,
    carried,
    create_communicator,
    create_multi_node_optimizer,
    run_threads,
)
from dbrdist.comm.background import Reduction
from dbrdist.comm.carried import Carried, Loaded
from dbrdist.comm.compression import TopK
from dbrdist.comm.courier import Courier
from dbrdist.comm.gate import Passage
from dbrdist.comm.reduction import EQUAL_WEIGHT, Plan
from dbrdist.comm.threads import ThreadCommunicator
from dbrdist.comm.way import Way
from dbrdist.core.parameter import Parameter
from dbrdist.core.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.errors import CheckpointError
from tests.comm.started_contract import Model
from tests.comm.training_contract import Net, batches
from tests.each import each

# ---- what a rank carries --------------------------------------------------------------------------------------------


def carried_by(size=2, rank=0, **options):
    return Carried(SimpleNamespace(size=size, rank=rank), Way(**options))


def model_of():
    model = Net()
    model(*next(batches(1)))
    return model, optimizers.MomentumSGD().setup(model)


@each(**{"options, size, has_values": [({}, 2, False), ({"local_steps": 2}, 2, True), ({"local_steps": 2}, 1, False),
                                       ({"local_steps": 1, "accumulate": 2}, 2, False)]})  # fmt: skip
def test_parameters_are_carried_where_ranks_have_their_own(options, size, has_values):
    model, _optimizer = model_of()
    model.l1.b.update_rule._state = {"v": np.ones(3), "t": 4}
    own = carried_by(size, **options)._own(model)
    names = {name for name, _ in model.namedparams()}
    assert {key for key in own if key.startswith("value")} == (
        {f"value{name}" for name in names} if has_values else set()
    )
    if has_values:
        np.testing.assert_array_equal(own["value/l1/W"], model.l1.W.array)
        assert own["state/l1/b/v"].tolist() == [1, 1, 1] and own["state/l1/b/t"] == 4
    with model.init_scope():
        model.late = Parameter()
    assert "value/late" not in carried_by(size, **options)._own(model)


@each(gathered=[[], [3, None]], has_gradient=[True, False])
def test_gradients_are_carried_within_a_round(gathered, has_gradient):
    model, _optimizer = model_of()
    model.cleargrads()
    if has_gradient:
        model.l2.b.grad = np.full(3, 5.0)
    one = carried_by(accumulate=4)
    one.gathered = gathered
    own = one._own(model)
    assert ("gradient/l2/b" in own) == bool(gathered and has_gradient) and "gradient/l1/b" not in own
    assert own.get("counts", np.empty(0)).tolist() == [-1 if n is None else n for n in gathered]


def test_what_a_compression_keeps_and_what_arrives_is_carried():
    model, _optimizer = model_of()
    one = carried_by(compression=TopK())
    one._way.compression.kept[model.l1.b] = np.arange(9.0)
    one._way.compression.right[model.l1.W] = np.ones(2)
    one._way.compression.right[Parameter(np.ones(1))] = np.ones(2)  # of a link that is no more
    assert one._own(model)["kept/l1/b"].tolist() == list(range(9)) and list(one._own(model)) == ["kept/l1/b"]
    one.num_local = 3
    assert {k: v.tolist() for k, v in one._common(model).items()} == {"num_local": 3, "right/l1/W": [1, 1]}
    late = carried_by(double_buffering=True)
    late.buffers.resume({model.l1.b: np.ones(9)})
    assert late._common(model)["arriving/l1/b"].tolist() == [1] * 9
    assert carried_by(1, double_buffering=True).buffers is None
    one.loaded = Loaded({"num_local": 7}, {"own": 8})
    assert one._own(model) == {"own": 8} and one._common(model) == {"num_local": 7}


def test_numbers_of_examples_of_a_round():
    one = carried_by(accumulate=4)
    assert one.samples(5) == 5 and one.samples(None) is None
    one.gathered = [3, None, 0]
    assert one.samples(5) == 8 and one.samples(None) is None
    model, _optimizer = model_of()
    plan = Plan(list(model.namedparams()))
    for num_samples, divisor in ((5, 8.0), (None, 4.0)):
        model.l1.b.grad = np.full(9, 16.0)
        one.divide(plan, num_samples)
        assert model.l1.b.grad.tolist() == [16.0 / divisor] * 9
    one.gathered = [0]
    model.l1.b.grad = np.full(9, 16.0)
    one.divide(plan, 0)
    assert model.l1.b.grad.tolist() == [16.0] * 9
    one.num_local = 2
    one.forget()
    assert one.gathered == [] and one.num_local == 0


def state_of(one, model):
    serializer = DictionarySerializer()
    one.serialize(serializer, model)
    return serializer.target


def test_a_state_without_what_is_carried_starts_over():
    """One that was loaded before and not taken up yet is forgotten."""
    model, _optimizer = model_of()
    one = carried_by(accumulate=3)
    one.gathered = [4, 6]
    state = state_of(one, model)
    other = carried_by(accumulate=3)
    other.serialize(NpzDeserializer(state), model)
    assert other.loaded.own["counts"].tolist() == [4, 6] and other.loaded.common["num_local"] == 0
    other.gathered, other.num_local = [1], 2
    other.serialize(NpzDeserializer({}), model)
    assert other.loaded is None and other.gathered == [] and other.num_local == 0
    plain = carried_by()
    assert state_of(plain, model) == {}
    plain.serialize(NpzDeserializer(state), model)
    assert plain.loaded is None
    with pytest.raises(CheckpointError, match="carried/about: cannot be read"):
        other.serialize(NpzDeserializer({**state, "carried/about": np.array("{")}), model)


@each(
    **{
        "kind, counts, rank, num_ranks, found": [
            ("gradient/a", True, 0, 3, 12.0), ("gradient/a", True, 1, 3, None), ("gradient/a", False, 0, 3, 18.0),
            ("gradient/a", False, 0, 1, 6.0), ("kept/a", True, 1, 3, 6.0), ("value/a", True, 2, 3, 6.0),
        ]
    }
)  # fmt: skip
def test_what_other_numbers_of_ranks_go_on_with(kind, counts, rank, num_ranks, found):
    """Two ranks had 4 and 8."""
    numbers = [np.array([3, 5]), np.array([2, 0])] if counts else [np.array([-1, -1])] * 2
    parts = {k: {kind: np.array([value]), "counts": numbers[k]} for k, value in enumerate((4.0, 8.0))}
    result = carried._merged(parts, 2, rank, num_ranks)
    assert (result[kind].tolist() if kind in result else None) == (None if found is None else [found])
    assert result["counts"].tolist() == (([5, 5] if rank == 0 else [0, 0]) if counts else [-1, -1])


def test_what_one_rank_alone_had_is_the_mean_of_those_who_had_it():
    parts = {0: {"value/a": np.array([4.0]), "kept/a": np.array([4.0])}, 1: {}}
    found = carried._merged(parts, 2, 0, 3)
    assert found["value/a"].tolist() == [4.0] and found["kept/a"].tolist() == [2.0]


def test_states_are_taken_where_they_fit():
    model, _optimizer = model_of()
    p = model.l1.b
    p.update_rule._state = {"v": np.zeros(9), "t": 3}
    carried._set_state(p, "v", np.arange(9.0))
    carried._set_state(p, "t", np.array(5.0))
    carried._set_state(p, "none", np.array(5.0))
    carried._set_state(None, "v", np.array(5.0))
    assert p.update_rule.state["v"].tolist() == list(range(9))
    assert p.update_rule.state["t"] == 5 and type(p.update_rule.state["t"]) is int


# ---- gradients that are one step late -------------------------------------------------------------------------------


class OwnRecord:
    """One rank whose sums are doubled, with or without a thread that reduces."""

    def __init__(self, has_courier):
        self.jobs, self.waits, self.asked, self.calls = [], 0, 0, []
        self.courier = SimpleNamespace(put=self.jobs.append, wait=self.wait) if has_courier else None
        self.comm = create_communicator("single")
        self._gate = self.comm._gate

    def wait(self):
        self.waits += 1
        while self.jobs:
            self.jobs.pop(0)(self)

    def _background(self):
        self.asked += 1
        return self.courier


@each(has_courier=[True, False])
def test_means_of_the_step_before_take_the_place_of_gradients(monkeypatch, has_courier):
    seen = []

    def reduce(comm, call, grads, factors, divisor):
        seen.append((call.verb, call.place, call.pause_seconds, call.meets_by, factors, divisor))
        for grad in grads:
            grad *= 2

    monkeypatch.setattr(buffering, "reduce_gradients", reduce)
    p = Parameter(np.zeros(3))
    p.grad = np.ones(3)
    plan = Plan([("/p", p)])
    comm = OwnRecord(has_courier)
    buffers = buffering.Buffers(comm)
    assert buffers.arriving() == []
    assert buffers.swap(plan, [1.0], 2.0, ("x.py", 3)) is False
    assert len(comm.jobs) == has_courier and p.grad.tolist() == [1] * 3
    p.grad[...] = 10
    assert buffers.swap(plan, None, 4.0, ("x.py", 4)) is True
    assert p.grad.tolist() == [2] * 3  # of the first step
    assert [(q is p, mean.tolist()) for q, mean in buffers.arriving()] == [(True, [20] * 3)]
    how = buffering.PAUSE_SECONDS, "bytes"
    assert seen == [("reduce", ("x.py", 3), *how, [1.0], 2.0), ("reduce", ("x.py", 4), *how, None, 4.0)]
    assert comm.asked == (1 if has_courier else 2) and (comm.waits > 1) == has_courier
    buffers.forget()
    assert buffers.arriving() == [] and buffers.swap(plan, None, 4.0, ("x.py", 5)) is False
    buffers.resume({p: np.full(3, 7.0)})
    buffers._key = None
    assert [mean.tolist() for _, mean in buffers.arriving()] == [[7] * 3]
    assert buffers.swap(plan, None, 4.0, ("x.py", 6)) is True and p.grad.tolist() == [7] * 3
    other = Parameter(np.zeros(2))
    buffers.resume({p: np.ones(3)})
    assert buffers.swap(Plan([("/p", p), ("/o", other)]), None, 4.0, ("x.py", 7)) is False  # one has none


# ---- reductions in two halves ---------------------------------------------------------------------------------------


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
        assert row == [plan.digest, number + 1, plan.runs_digest, count, number, 0] and error is None
        assert named["num_same"] == 2 and named["detail"] == f"start number {number + 1}\n{plan.text}"
    assert number == 1


@each(has_courier=[True, False])
def test_the_way_is_chosen_anew_for_other_parameters(monkeypatch, has_courier):
    comm, is_small = create_communicator("single"), [True]
    monkeypatch.setattr(comm, "_background", lambda: SimpleNamespace() if has_courier else None, raising=False)
    monkeypatch.setattr(comm, "_encloses", lambda grads: is_small[0], raising=False)
    model = Model()
    model.fill(0)
    reduction = Reduction(comm, model)
    assert reduction._way is background._Enclosed and not reduction.is_started
    plain = background._ByThread if has_courier else background._Started
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

    def in_background(comm):
        if comm not in made:
            made[comm] = Courier(comm.split(0, comm.rank))
        return made[comm]

    monkeypatch.setattr(ThreadCommunicator, "_background", in_background)
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
    plan = Plan([("/p", p)])
    comm = SimpleNamespace(rank=0, size=2, _gate=SimpleNamespace(again=lambda call: call))
    one = background._Enclosed(comm, plan, 4, 6, None)
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
        assert row == [plan.digest, 4, plan.runs_digest, 6, plan.place, NOW] and sent.tolist() == [1] * 3
    if is_done:
        assert p.grad.tolist() == [0.75 * 1 + 0.25 * 5] * 3
        error = one.change_of_values()
        assert (error is not None) == is_written
        assert error is None or "at x.py:1, but they were written since" in str(error)


@each(**{"encloses, has_room, shown": [(False, True, NEVER), (True, True, NOW), (True, False, LATER)]})
def test_gradients_are_shown_at_the_start_where_there_is_room(encloses, has_room, shown):
    p = Parameter(np.zeros(3))
    p.grad = np.ones(3)
    comm = SimpleNamespace(rank=0, size=2, _encloses=lambda grads: encloses, _has_room=lambda: has_room)
    one = background._Enclosed(comm, Plan([("/p", p)]), 1, None, None)
    one.call = Row([], [])
    one.set_out(None)
    ((row, enclosed),) = one.call.posts
    assert row[-1] == shown and row[3] == EQUAL_WEIGHT
    assert [a is b for a, b in zip(enclosed, one.grads)] == ([True] if shown == NOW else [])
    if shown == LATER:
        assert one._then[0].tolist() == [1] * 3 and not np.shares_memory(one._then[0], p.grad)
    else:
        assert one._then == ()


# ---- rounds of an optimizer -----------------------------------------------------------------------------------------


@each(**{"counts, accumulate, gathered, found": [
    ((2, 6), 1, [], ([0.25, 0.75], None)), ((2, 6), 3, [5, 5], (None, 8.0)), ((0, 8), 3, [0, 0], (None, 8.0)),
    ((EQUAL_WEIGHT,) * 2, 3, [None, None], (None, 6.0)), ((EQUAL_WEIGHT,) * 2, 1, [], (None, 2.0)),
]})  # fmt: skip
def test_weights_of_a_round(counts, accumulate, gathered, found):
    optimizer = create_multi_node_optimizer(optimizers.SGD(), create_communicator("single"), accumulate=accumulate)
    optimizer.communicator = SimpleNamespace(size=2)
    optimizer._carried.gathered = gathered
    first = object()
    header = SimpleNamespace(counts=counts, weights=lambda: found if accumulate == 1 else first)
    assert optimizer._weights(header) == found


def test_new_parameters_are_taken_from_rank_0():
    """A parameter that comes later has rank 0's values before the next step; one that all have stays as it is."""

    def body(comm):
        model = Net(seed=comm.rank)
        optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.0).setup(model), comm)
        x, t = next(batches(1))
        optimizer.update(model, x, t)
        assert optimizer._target is model and optimizer._known == set(model.params())
        model.l1.b.array[...] = comm.rank  # their own again: nobody looks
        with model.init_scope():
            model.more = Parameter(np.full(2, float(comm.rank + 5)))
        optimizer.actual_optimizer.setup(model)
        model.cleargrads()
        optimizer.update(model, x, t)
        assert model.more in optimizer._known
        return model.more.array.tolist(), model.l1.b.array.tolist(), model.l1.W.array.tobytes()

    first, second = run_threads(2, body, timeout_seconds=60)
    assert first[0] == second[0] == [5.0, 5.0] and first[2] == second[2]
    assert (first[1], second[1]) == ([0.0] * 9, [1.0] * 9)
