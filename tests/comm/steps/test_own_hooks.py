"""Which hooks of the user's own change something, by a few elements of each array."""

import copy

import numpy as np

from dbrdist import optimizers
from dbrdist.comm.steps import own_hooks
from dbrdist.comm.steps.own_hooks import OwnHooks
from tests.comm.training_contract import Net, batches
from tests.each import each


def of_net(*hooks):
    """The hooks of an optimizer whose net has gradients."""
    model = Net()
    model(*next(batches(1))).backward()
    optimizer = optimizers.SGD(lr=0.5).setup(model)
    for name, hook in hooks:
        optimizer.add_hook(hook, name)
    found = OwnHooks(optimizer)
    found.look()
    return found, optimizer


def watch(optimizer):
    assert optimizer.target.l1.W.grad is not None


def spoil(optimizer):
    optimizer.target.l1.W.grad[...] = np.nan


def test_only_those_that_change_something_are_named():
    found, optimizer = of_net(("watch", watch), ("spoil", spoil), ("decay", optimizers.WeightDecay(0.5)))
    assert found.are_there and found.line().endswith(": none")
    found.update()
    assert found.changing == ["'spoil'"] and found.line().endswith(": 'spoil'") and optimizer.t == 1
    assert np.isnan(optimizer.target.l1.W.array).all() and "call_hook" not in vars(optimizer)
    optimizer.remove_hook("spoil")
    found.look()
    assert found.line().endswith(": none")


@each(steps=[0, 1, 2, 3, 49, 50, 99, 100])
def test_the_first_steps_and_one_in_fifty_are_looked_at(steps):
    found, optimizer = of_net(("spoil", spoil))
    optimizer.t = steps
    found.update()
    assert bool(found.changing) == (steps < 3 or steps % 50 == 0) and optimizer.t == steps + 1


def test_a_rule_of_a_layer_that_is_there_twice_is_watched_once():
    found, optimizer = of_net()
    model, seen = optimizer.target, []
    with model.init_scope():
        model.again = model.l1
    model.l1.W.update_rule.add_hook(lambda rule, p: seen.append(p), "see")
    model.l1.b.update_rule.add_hook(lambda rule, p: p.grad.fill(0.0), "spoil")
    found.look()
    for steps in (1, 2):
        found.update()
        assert seen == [model.l1.W] * steps and found.line().endswith(": 'spoil' of /l1/b")
    assert "call_hooks" not in vars(model.l1.W.update_rule)


def test_a_hook_may_copy_what_is_updated():
    """As it is without those who watch, so that the copy updates and can be pickled like any other."""
    found, optimizer = of_net()
    copies = []
    optimizer.target.l1.W.update_rule.add_hook(lambda rule, p: copies.append(copy.deepcopy(optimizer)), "rule")
    optimizer.add_hook(lambda inner: copies.append(copy.deepcopy(inner)), "whole")
    optimizer.add_hook(lambda inner: [spoil(inner), copies.append(copy.deepcopy(inner))], "spoil and copy")
    found.look()
    for _ in range(2):
        found.update()
    assert len(copies) == 6 and found.changing == ["'spoil and copy'"]
    for one in (*copies, optimizer):
        assert "call_hook" not in vars(one) and "call_hooks" not in vars(one.target.l1.W.update_rule)


def test_ours_and_those_that_know_of_parts_are_not_looked_at():
    def parts(optimizer):
        spoil(optimizer)

    parts.works_on_shards = True
    found, _ = of_net(("parts", parts), ("decay", optimizers.WeightDecay(0.5)))
    assert not found.are_there


@each(order=["C", "F"], shape=[(), (1,), (3,), (4, 5), (0, 2), (2, 3, 3, 2)])
def test_the_same_elements_give_the_same_sample_and_nan_is_equal_to_itself(order, shape):
    array = np.full(shape, np.nan, order=order)
    sample = own_hooks._some(array)
    assert sample == own_hooks._some(array.copy("K"))
    array[...] = 1.0
    assert (own_hooks._some(array) != sample) == bool(array.size)
