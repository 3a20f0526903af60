"""Which way a joint step takes, and sums in two levels: each branch by itself, with stand-ins for what is around it."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.steps import joint_steps
from dbrdist.comm.steps.joint_steps import JointSteps
from tests.comm.training_contract import Net, batches
from tests.each import each


# ---- steps ----------------------------------------------------------------------------------------------------------
def optimizer_of(monkeypatch, *patched, **options):
    """A multi-node optimizer on one rank; methods that are ``patched`` only note that they were called."""
    model = Net()
    model(*next(batches(1)))
    actual = optimizers.SGD(lr=0.5).setup(model)
    found = create_multi_node_optimizer(actual, create_communicator("single"), **options)
    done = []
    for name in patched:
        monkeypatch.setattr(
            JointSteps, name, lambda self, *args, name=name, **named: done.append((name, *args)) or name
        )
    return found, model, done


@each(is_small=[True, False], zero_fill=[True, False], loaded=[None, "state"], gathered=[[], [3]])
def test_gradients_come_with_the_header_where_nothing_else_does(monkeypatch, is_small, zero_fill, loaded, gathered):
    optimizer, _model, _done = optimizer_of(monkeypatch, zero_fill=zero_fill)
    optimizer._steps = SimpleNamespace(is_small=lambda: is_small)
    optimizer._carried = SimpleNamespace(loaded=loaded, gathered=gathered)
    assert optimizer._encloses_gradients() is (is_small and zero_fill and loaded is None and not gathered)


@each(num_samples=[None, 0, 3], has_loss=[True, False])
def test_a_step_at_once(monkeypatch, num_samples, has_loss):
    optimizer, model, done = optimizer_of(monkeypatch, "_reduce_at_once", "_apply")
    times = iter([10.0, 12.5])
    monkeypatch.setattr(joint_steps, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model.l1.b.grad = np.full(9, 7.0)
    x, t = next(batches(1))
    optimizer._update_at_once(model, model if has_loss else None, (x, t), {}, num_samples, ("x.py", 3))
    works = has_loss and num_samples != 0
    assert done == [("_reduce_at_once", num_samples, works, ("x.py", 3)), ("_apply",)]
    assert optimizer.num_samples == num_samples and optimizer.exposed_seconds == 2.5
    if works:
        grad = model.l1.b.grad.copy()
        model.cleargrads()
        model(x, t).backward()
        np.testing.assert_array_equal(grad, model.l1.b.grad)
    else:
        assert (model.l1.b.grad is None) if num_samples == 0 else model.l1.b.grad.tolist() == [7.0] * 9


class Steps:
    """Headers as given; verbs are those of one rank."""

    place, late = ("x.py", 1), ()

    def __init__(self, comm, header, plan="plan"):
        self.comm, self.header, self.found, self.added, self.asked = comm, header, plan, [], []
        self.shown_plan = SimpleNamespace(
            add_up=lambda call, enclosed, *weights: self.added.append((enclosed, weights))
        )

    def exchange(self, call, *args):
        self.asked.append(args)
        call.enclosed = "enclosed"
        return self.header

    def meet(self):
        return self.comm.gate.call("update")

    def wait(self, call):
        return self.header

    poll = lambda self: self.header  # noqa: E731

    def plan(self):
        return self.found


def header_of(is_enclosed=False, same_runs=True, is_placed=True):
    return SimpleNamespace(
        is_enclosed=is_enclosed,
        same_runs=same_runs,
        is_placed=is_placed,
        weights=lambda: ([0.5], 2.0),
        counts=(3,),
        stale=[],
    )


@each(is_enclosed=[True, False], same_runs=[True, False], plan=["plan", None], accumulate=[1, 2])
def test_what_is_reduced_where_ranks_meet_once(monkeypatch, is_enclosed, same_runs, plan, accumulate):
    optimizer, _model, done = optimizer_of(monkeypatch, "_reduce", "_reduce_anew", accumulate=accumulate)
    monkeypatch.setattr(optimizer.communicator, "_release_enclosed", lambda: None, raising=False)
    steps = optimizer._steps = Steps(optimizer.communicator, header_of(is_enclosed, same_runs), plan)
    assert optimizer._reduce_at_once(3, True, ("y.py", 9)) is True
    assert steps.asked == [(3, True, True)] and optimizer.communicator.gate.record.last[-1].where() == "y.py:9"
    names = [name for name, *_ in done]
    if is_enclosed:
        weights = ([0.5], 2.0) if accumulate == 1 else (None, 3.0)
        assert steps.added == [("enclosed", weights)] and names == []
    else:
        assert steps.added == [] and names == (["_reduce"] if plan and same_runs else ["_reduce_anew"])
        assert done[0][-1] == (steps.header if plan and same_runs else 3)


@each(
    same_runs=[True, False],
    plan=["plan", None],
    zero_fill=[True, False],
    has_buffers=[True, False],
    overlap=["none", "placed", "not placed"],
)
def test_what_is_reduced_after_backward(monkeypatch, same_runs, plan, zero_fill, has_buffers, overlap):
    optimizer, _model, done = optimizer_of(monkeypatch, "_reduce", "_reduce_anew", zero_fill=zero_fill)
    optimizer._steps = Steps(optimizer.communicator, header_of(False, same_runs, overlap == "placed"), plan)
    swapped, waited = [], []
    optimizer._carried.buffers = (
        SimpleNamespace(swap=lambda *args: swapped.append(args) or "whole?") if has_buffers else None
    )
    started = None if overlap == "none" else SimpleNamespace(wait=lambda *args: waited.append(args))
    found = optimizer._reduce_all(started, 3)
    names = [name for name, *_ in done]
    if not (plan and same_runs and zero_fill):
        assert names == ["_reduce_anew"] and done[0][1] == 3 and found is True and not swapped and not waited
    elif has_buffers:
        assert swapped == [("plan", [0.5], 2.0, ("x.py", 1))] and found == "whole?" and names == [] and not waited
    else:
        assert waited == ([([0.5], 2.0)] if overlap == "placed" else []) and found is True
        assert names == ([] if overlap == "placed" else ["_reduce"])


@each(**{"header, plan, known": [(None, "plan", False), (header_of(), "plan", True), (header_of(), None, False),
                                 (header_of(is_placed=False), "plan", False)]})  # fmt: skip
def test_weights_are_known_once_all_agree_on_the_place(monkeypatch, header, plan, known):
    optimizer, _model, _done = optimizer_of(monkeypatch)
    optimizer._steps = Steps(optimizer.communicator, header, plan)
    assert optimizer._weights_if_known() == (([0.5], 2.0) if known else None)


@each(way=["compression", "sharding", "moved", "plain"])
def test_who_reduces(monkeypatch, way):
    optimizer, _model, _done = optimizer_of(monkeypatch)
    done = []
    note = lambda name: lambda *args: done.append((name, *args))  # noqa: E731
    compression = SimpleNamespace(reduce=note("compressed")) if way == "compression" else None
    optimizer._way = SimpleNamespace(compression=compression, accumulate=1)
    place = {"sharding": 5, "moved": 4}.get(way)
    optimizer._sharding = None if place is None else SimpleNamespace(place=place, settle=note("divided"))
    plan = SimpleNamespace(
        place=5, params="params", settle=note("settled"), reduce=note("reduced"), reduce_scatter=note("scattered")
    )
    header = SimpleNamespace(weights=lambda: ([0.5], 2.0), places=(5, 5))
    comm = optimizer.communicator
    with comm.gate.call("update") as call:
        optimizer._reduce(call, plan, header)
    assert call.meets_by == "bytes"
    found = {
        "compression": [("compressed", comm, call, plan, [0.5], 2.0)],
        "plain": [("settled", comm, call, (5, 5)), ("reduced", comm, call, "params", [0.5], 2.0)],
        "sharding": [("settled", comm, call, (5, 5)), ("scattered", comm, call, [0.5], 2.0)],
        "moved": [("settled", comm, call, (5, 5)), ("divided", plan), ("scattered", comm, call, [0.5], 2.0)],
    }
    assert done == found[way]


@each(place=[None, 5, 4])
def test_gradients_are_averaged_anew_where_headers_could_not_know(monkeypatch, place):
    optimizer, model, done = optimizer_of(monkeypatch, "_divide_gathered")
    asked = []
    monkeypatch.setattr(optimizer.communicator, "weighted_mean_grad", lambda *args: asked.append(args), raising=False)
    model.l1.b.update_rule.enabled = False
    optimizer._steps = SimpleNamespace(current_plan=lambda: SimpleNamespace(place=5))
    divided = []
    optimizer._sharding = None if place is None else SimpleNamespace(place=place, settle=divided.append)
    optimizer._reduce_anew(3)
    ((named, zero_fill, num_samples),) = asked
    assert {name for name, _ in named} == {name for name, _ in model.namedparams()} - {"/l1/b"}
    assert (zero_fill, num_samples) == (True, 3) and [name for name, *_ in done] == ["_divide_gathered"]
    assert len(divided) == (place == 4)


@each(num_samples=[None, 5])
def test_one_rank_alone_takes_the_first_parameters_of_each_target(monkeypatch, num_samples):
    optimizer, model, _done = optimizer_of(monkeypatch)
    synchronized, synchronize = [], JointSteps._synchronize
    monkeypatch.setattr(
        JointSteps, "_synchronize", lambda self, *a: synchronized.append(self.target) or synchronize(self, *a)
    )
    other = Net()
    x, t = next(batches(1))
    other(x, t)
    for target in (model, model, other, other, model):
        if optimizer.target is not target:
            optimizer.actual_optimizer.setup(target)
        before = target.l1.b.array.copy()
        optimizer.num_samples = 0
        optimizer.update(target, x, t, num_samples=num_samples)
        assert optimizer.num_samples == num_samples and (target.l1.b.array != before).any()
    assert synchronized == [model, other, model]
    optimizer.setup(model)
    optimizer.update(model, x, t)
    assert len(synchronized) == 4


@each(is_small=[True, False], has_plan=[True, False])
def test_short_gradients_go_with_the_header(monkeypatch, is_small, has_plan):
    optimizer, model, _done = optimizer_of(monkeypatch)
    steps = optimizer._steps
    steps.look()
    plan = steps.current_plan()
    model.l1.b.grad = np.full(9, 4.0)
    monkeypatch.setattr(steps, "is_small", lambda: is_small)
    monkeypatch.setattr(steps, "look", lambda: None)
    steps._plan = plan if has_plan else None
    seen = []

    def exchange(row, error, **named):
        assert error is None
        seen.append((row[-1], named["enclosed"]))
        return [bytes(8 * 47)]

    steps.exchange(SimpleNamespace(exchange=exchange), 3, True, True)
    ((encloses, enclosed),) = seen
    assert encloses == (is_small and has_plan) and (enclosed is plan.grads if encloses else enclosed == ())
    if encloses:
        assert (enclosed[0] == 4).sum() == 9


class FakeSteps:
    """Headers that say nothing, of parameters that are all there."""

    late = ()
    place = ("x.py", 1)

    def __init__(self, overlap):
        self.found, self.broken, self.asked = overlap, [], []

    def is_small(self):
        return False

    def post(self, *args):
        self.asked.append(args)

    def overlap(self, division):
        return self.found

    def break_off(self, error):
        self.broken.append(error)


@each(has_overlap=[False, True], may_have_started=[False, True])
def test_a_failure_in_backward_breaks_off_what_was_begun(has_overlap, may_have_started):
    """Where no gradient has left this rank, the ranks can go on."""
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(Net()), create_communicator("single"))
    opened = []
    overlap = SimpleNamespace(may_have_started=may_have_started, open=lambda *args: opened.append(args))
    steps = optimizer._steps = FakeSteps(overlap if has_overlap else None)
    error = ValueError("on purpose")

    def fails():
        raise error

    with pytest.raises(ValueError, match="on purpose"):
        optimizer._update_together(fails, (), {}, 3)
    assert steps.broken == ([error] if has_overlap and may_have_started else [])
    assert steps.asked == [(3, True, True)] and len(opened) == has_overlap
    assert joint_steps.JointSteps.takes_num_samples
