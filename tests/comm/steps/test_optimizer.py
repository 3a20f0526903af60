"""Training over ranks that are threads, and what the multi-node optimizer hands on."""

import copy

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.core.model.parameter import Parameter
from tests.comm import training_contract
from tests.comm.training_contract import Net, batches


@pytest.mark.slow
@pytest.mark.parametrize("check", training_contract.CHECKS, ids=training_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.filterwarnings(training_contract.OVERFLOWS_ARE_MEANT)
def test_training_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


def make(actual=None):
    actual = optimizers.MomentumSGD(lr=0.5) if actual is None else actual
    return create_multi_node_optimizer(actual, create_communicator("single"))


def test_hyperparameters_are_those_of_the_wrapped_optimizer():
    optimizer = make()
    assert (optimizer.lr, optimizer.momentum) == (0.5, 0.9)
    optimizer.lr = 0.25
    assert optimizer.actual_optimizer.lr == 0.25
    assert optimizer.hyperparam is optimizer.actual_optimizer.hyperparam
    assert make(optimizers.Adam()).alpha == optimizers.Adam().alpha


def test_an_unknown_attribute_is_refused():
    with pytest.raises(AttributeError):
        make().learning_rate = 1.0
    with pytest.raises(AttributeError):
        make().alpha  # noqa: B018 - reading is the test


def test_a_copy_counts_on_from_the_seconds_of_the_original():
    optimizer = make().setup(training_contract.Net())
    optimizer.exposed_seconds = 1.5
    for twin in (copy.copy(optimizer), copy.deepcopy(optimizer)):
        assert twin.exposed_seconds == 1.5
        twin.exposed_seconds += 1.0
    assert optimizer.exposed_seconds == 1.5


def test_counters_hooks_and_loss_scale_are_handed_on():
    optimizer = make()
    model = training_contract.Net()
    assert optimizer.setup(model) is optimizer
    assert optimizer.target is model
    seen = []
    optimizer.add_hook(lambda inner: seen.append(inner), name="see")
    optimizer.set_loss_scale(128.0)
    x, t = next(training_contract.batches())
    optimizer.update(model, x, t, num_samples=len(x))
    assert seen == [optimizer.actual_optimizer]
    alone = training_contract.Net()
    optimizers.MomentumSGD(lr=0.5).setup(alone).update(alone, x, t)
    np.testing.assert_allclose(model.l1.W.array, alone.l1.W.array, rtol=1e-12)
    optimizer.remove_hook("see")
    optimizer.new_epoch()
    assert (optimizer.t, optimizer.epoch) == (1, 1)


def test_bad_arguments():
    comm = create_communicator("single")
    with pytest.raises(TypeError, match="expected an optimizer, got int"):
        create_multi_node_optimizer(3, comm)
    with pytest.raises(TypeError, match="expected a communicator, got str"):
        create_multi_node_optimizer(optimizers.SGD(), "flat")
    with pytest.raises(TypeError, match=r"the class SGD; write SGD\("):
        create_multi_node_optimizer(optimizers.SGD, comm)
    with pytest.raises(TypeError, match="got MultiNodeSGD; it is a multi-node optimizer already"):
        create_multi_node_optimizer(create_multi_node_optimizer(optimizers.SGD(), comm), comm)
    with pytest.raises(TypeError, match=r"write create_multi_node_optimizer\(optimizer, comm\)"):
        create_multi_node_optimizer(comm, optimizers.SGD())
    with pytest.raises(TypeError, match="double_buffering: expected True or False, got the text 'no'"):
        create_multi_node_optimizer(optimizers.SGD(), comm, double_buffering="no")
    with pytest.raises(RuntimeError, match="no target yet"):
        make().update()


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
