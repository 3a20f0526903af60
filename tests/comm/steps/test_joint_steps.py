"""The loop of joint steps: who has the first parameters, what an update is made of."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.steps.joint_steps import JointSteps
from tests.comm.training_contract import Net, batches
from tests.each import each


def made(**options):
    """A multi-node optimizer on one rank, of a net whose parameters have their shapes."""
    model = Net()
    model(*next(batches(1)))
    actual = optimizers.SGD(lr=0.5).setup(model)
    return create_multi_node_optimizer(actual, create_communicator("single"), **options), model


@each(num_samples=[None, 5])
def test_one_rank_alone_takes_the_first_parameters_of_each_target(monkeypatch, num_samples):
    optimizer, model = made()
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


class Policy:
    """Does nothing but note what it is asked."""

    needs_constant_loss_scale = False

    def __init__(self, optimizer, is_whole, has_more_to_do):
        self.optimizer, self.is_whole, self.has_more_to_do, self.done = optimizer, is_whole, has_more_to_do, []

    def gradients(self, work, is_first):
        self.done.append(("gradients", work, is_first, self.optimizer.t))
        return self.is_whole

    def after_update(self, is_first):
        self.done.append(("after", is_first, self.optimizer.t))


@each(is_whole=[True, False], has_more_to_do=[True, False])
def test_a_step_is_its_policy_and_an_update(is_whole, has_more_to_do):
    optimizer, model = made()
    model(*next(batches(1))).backward()
    policy = Policy(optimizer, is_whole, has_more_to_do)
    optimizer._carry(optimizer._carried, True, lambda *parts: policy)
    for step, is_first in enumerate([True, False]):
        policy.done.clear()
        optimizer.update(len, 1, num_samples=2, a=3)
        t = step if is_whole else 0
        after = [("after", is_first, t + 1)] if is_whole and has_more_to_do else []
        assert policy.done == [("gradients", (len, (1,), {"a": 3}, 2), is_first, t), *after]
    assert optimizer.t == (2 if is_whole else 0)


def test_a_copy_counts_its_own_seconds():
    optimizer, _ = made(accumulate=2)
    optimizer.exposed_seconds = 2.0
    other = copy.copy(optimizer)
    other.exposed_seconds += 1
    assert (optimizer.exposed_seconds, other.exposed_seconds) == (2.0, 3.0)
    assert JointSteps.takes_num_samples


class Passes:
    """Runs the passes of steps, and notes it."""

    def __init__(self):
        self.done = []

    def backward(self, run, listener):
        self.done.append(listener)
        run(self.lossfun, self.args, {}, listener)

    def update(self, run):
        self.done.append("update")
        run()


def test_passes_run_the_later_steps():
    """With the loss and the arguments that they choose."""
    (optimizer, model), (usual, other) = made(), made()
    x, t = next(batches(1))
    passes = Passes()
    passes.lossfun, passes.args = lambda *args: model(*args) * 2.0, (x, t)
    for step in range(3):
        optimizer.update_in_passes(passes, model, x, t, num_samples=3)
        assert passes.done == [None, "update"] * step  # the first step is run as always
        usual.update(lambda *args, by=1.0 + (step > 0): other(*args) * by, x, t, num_samples=3)
    optimizer.update(model, x, t)
    usual.update(other, x, t)
    assert len(passes.done) == 4
    for a, b in zip(model.params(), other.params(), strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def test_no_passes_are_left_after_an_error():
    optimizer, model = made()
    x, t = next(batches(1))
    optimizer.update(model, x, t)
    passes = Passes()
    passes.lossfun, passes.args = (lambda *args: 1 / 0), ()
    with pytest.raises(ZeroDivisionError):
        optimizer.update_in_passes(passes, model, x, t)
    optimizer.update(model, x, t)
    assert passes.done == [None]


@each(size=[1, 2], staged=["through the host", None], options=[{}, {"accumulate": 2}, {"zero_fill": False}])
def test_which_steps_can_be_captured(size, staged, options):
    optimizer, _ = made(**options)
    reducer = SimpleNamespace(why_staged=lambda plan: staged if plan is optimizer._steps.last_plan else "another plan")
    optimizer.communicator = SimpleNamespace(size=size, reducer=reducer)
    reason = optimizer.why_not_captured()
    if "accumulate" in options:
        assert reason == "steps with accumulate=2 are not captured yet"
    elif size > 1 and staged:
        assert reason == staged
    else:
        assert (reason is None) == (not options) and "zero_fill=False" in (reason or "zero_fill=False")
    optimizer._policy = Policy(optimizer, True, False)
    if not options:
        assert optimizer.why_not_captured() == "steps with Policy are not captured yet"


def test_one_rank_alone_steps_by_the_wrapped_optimizer_where_nothing_is_carried_over():
    optimizer, model = made()
    assert optimizer.optimizer_of_one_rank is None  # the first step has the ranks agree
    optimizer.update(model, *next(batches(1)))
    assert optimizer.optimizer_of_one_rank is optimizer.actual_optimizer
    optimizer._carried.loaded = object()
    assert optimizer.optimizer_of_one_rank is None
    optimizer._carried.loaded = None
    optimizer.setup(Net())
    assert optimizer.optimizer_of_one_rank is None
    for options in ({"accumulate": 2}, {"double_buffering": True}):
        optimizer, model = made(**options)
        for _ in range(2):
            optimizer.update(model, *next(batches(1)))
        assert optimizer.optimizer_of_one_rank is None
