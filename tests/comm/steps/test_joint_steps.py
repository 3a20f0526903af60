"""The loop of joint steps: who has the first parameters, what an update is made of."""

import copy

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
    policy = optimizer._policy = Policy(optimizer, is_whole, has_more_to_do)
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
