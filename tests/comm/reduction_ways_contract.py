"""Ways to send less or later, against plain NumPy: functions of a communicator, run on threads and in tests/mpi."""

from __future__ import annotations

import operator

import numpy as np

import dbrdist.core.tape.ops as ops
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.core.array import random
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.errors import CommunicatorError
from tests.comm.contract import raises
from tests.comm.sharding_contract import net
from tests.comm.training_contract import batches, close, weights

LR = 0.1


class Given(Link):
    """Its loss has the gradients that it is called with."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.W = Parameter(np.zeros((20, 15)))
            self.b = Parameter(np.zeros(7))

    def forward(self, W, b):
        return ops.sum(self.W * W) + ops.sum(self.b * b)


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(20, 15)), rng.normal(size=7)


def means(comm, step):
    found = [gradients(rank, step) for rank in range(comm.size)]
    return [sum(g[i] for g in found) / comm.size for i in (0, 1)]


def sgd(comm, **options):
    model = Given()
    return model, create_multi_node_optimizer(optimizers.SGD(lr=LR).setup(model), comm, **options)


WAYS = [
    dict,
    lambda: {"zero": 1},
    lambda: {"zero": 2},
    lambda: {"compression": PowerSGD(1)},
    lambda: {"compression": TopK(0.1)},
    lambda: {"double_buffering": True},
    lambda: {"accumulate": 2},
    lambda: {"local_steps": 2},
]


def check_power_sgd_is_that_of_the_paper(comm):
    """Algorithm 1 with algorithm 2's error feedback, written out for each rank."""
    if comm.size == 1:
        return
    model, optimizer = sgd(comm, compression=PowerSGD(rank=2))
    Q = random.generator(0, "PowerSGD", sample=0, part=0).standard_normal((15, 2))
    errors = [np.zeros((20, 15)) for _ in range(comm.size)]
    W, b = np.zeros((20, 15)), np.zeros(7)
    for step in range(5):
        optimizer.update(model, *gradients(comm.rank, step))
        Ms = [gradients(rank, step)[0] + errors[rank] for rank in range(comm.size)]
        P = np.linalg.qr(sum(M @ Q for M in Ms) / comm.size)[0]
        Q = sum(M.T @ P for M in Ms) / comm.size
        errors = [M - P @ Q.T for M in Ms]
        W -= LR * (P @ Q.T)
        b -= LR * means(comm, step)[1]
    np.testing.assert_allclose(model.W.array, W, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model.b.array, b, rtol=1e-9, atol=1e-12)


def check_error_feedback_accounts_for_every_gradient(comm):
    """What was applied and what the ranks still keep are together the sum of all mean gradients."""
    if comm.size == 1:
        return
    for compression in (PowerSGD(1), PowerSGD(3), TopK(0.05), TopK(1.0)):
        model, optimizer = sgd(comm, compression=compression)
        for step in range(8):
            optimizer.update(model, *gradients(comm.rank, step))
        kept = comm.allreduce(compression.kept[model.W]).reshape(20, 15) / comm.size
        total = sum(means(comm, step)[0] for step in range(8))
        np.testing.assert_allclose(-model.W.array / LR + kept, total, rtol=1e-9, atol=1e-10)


def check_top_k_sends_the_largest(comm):
    if comm.size == 1:
        return
    compression = TopK(0.1)
    model, optimizer = sgd(comm, compression=compression)
    optimizer.update(model, *gradients(comm.rank, 0))
    size = model.W.slot.arena.grad.size
    count = int(np.ceil(0.1 * size))
    assert compression.num_bytes == count * (4 + 8)
    expected = np.zeros(307)
    for rank in range(comm.size):
        g = np.concatenate([a.reshape(-1) for a in gradients(rank, 0)])
        largest = np.argsort(-np.abs(g))[:count]
        expected[largest] += g[largest] / comm.size
    mine = np.concatenate([model.W.array.reshape(-1), model.b.array])
    np.testing.assert_allclose(mine, -LR * expected, atol=1e-12)


def check_what_is_kept_has_the_weight_of_its_step(comm):
    """A rank that has few examples in one step, none in another: no gradient is lost, or counted with other weights."""
    if comm.size == 1:
        return
    for compression, accumulate in [(PowerSGD(1), 1), (TopK(0.05), 1), (TopK(0.05), 2)]:
        model, optimizer = sgd(comm, compression=compression, accumulate=accumulate)
        total = 0
        for step in range(0, 8, accumulate):
            calls = range(step, step + accumulate)
            table = np.array([[(3 * rank + call) % 4 for rank in range(comm.size)] for call in calls])
            for call, counts in zip(calls, table):
                optimizer.update(model, *gradients(comm.rank, call), num_samples=int(counts[comm.rank]))
                total = total + sum(n * gradients(k, call)[0] for k, n in enumerate(counts)) / table.sum()
        kept = comm.allreduce(compression.kept[model.W]).reshape(20, 15) / comm.size
        np.testing.assert_allclose(-model.W.array / LR + kept, total, rtol=1e-9, atol=1e-10)


def check_what_is_kept_stays_with_its_parameter(comm):
    """One compression for two models in turns; parameters that are frozen for a while."""
    if comm.size == 1:
        return
    for compression in (PowerSGD(1), TopK(0.05)):
        model, optimizer = sgd(comm, compression=compression)
        other, theirs = sgd(comm, compression=compression)
        optimizer.update(model, *gradients(comm.rank, 0))
        theirs.update(other, np.zeros((20, 15)), np.zeros(7))
        assert not other.W.array.any()
        kept = compression.kept[model.W].copy()
        model.W.update_rule.enabled = False
        optimizer.update(model, *gradients(comm.rank, 1))
        assert (compression.kept[model.W] == kept).all()


def check_parameters_of_every_size_travel(comm):
    class Sizes(Link):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                for i, shape in enumerate([(), (0,), (0, 5), (5, 0), (1, 1), (3, 0, 2), (6, 5)]):
                    setattr(self, f"p{i}", Parameter(np.zeros(shape)))

        def forward(self):
            return sum((ops.sum(p) for p in self.params()), start=ops.sum(self.p0)) * (1.0 + comm.rank)

    for options in WAYS:
        model = Sizes()
        optimizer = create_multi_node_optimizer(optimizers.SGD(LR).setup(model), comm, **options())
        for _ in range(3):
            optimizer.update(model)
        mean = LR * (1 + comm.size) / 2
        if "compression" not in options():
            np.testing.assert_allclose(model.p6.array, -mean * optimizer.t)


def check_another_target_begins_anew(comm):
    """Set up by either optimizer: it gets rank 0's values, the means of its own gradients and none of the old one's."""
    for options in WAYS:
        for by_actual in (False, True):
            old, optimizer = sgd(comm, **options())
            for step in range(4):
                optimizer.update(old, *gradients(comm.rank, step))
            model = Given()
            model.b.array[...] = comm.rank
            (optimizer.actual_optimizer if by_actual else optimizer).setup(model)
            last = old.b.array.copy()
            for _ in range(3):
                optimizer.update(model, np.zeros((20, 15)), np.full(7, float(comm.rank)))
            if "compression" not in options():
                mean = (comm.size - 1) / 2
                np.testing.assert_allclose(model.b.array, -LR * mean * optimizer.t, atol=1e-12)
            assert not model.W.array.any()
            assert (old.b.array == last).all()


def check_parameters_that_come_late_take_rank_0s_values(comm):
    for options in WAYS:
        model, optimizer = sgd(comm, **options())
        for step in range(4):
            optimizer.update(model, *gradients(comm.rank, step))
        with model.init_scope():
            model.c = Parameter(np.full(9, float(comm.rank)))
        model.c.update_rule = optimizer.actual_optimizer.create_update_rule()
        for step in range(4):
            optimizer.update(model, *gradients(comm.rank, step))
        assert not model.c.array.any()
    if comm.size > 1:
        model, optimizer = sgd(comm)
        optimizer.update(model, *gradients(comm.rank, 0))
        if comm.rank == 1:
            with model.init_scope():
                model.c = Parameter(np.zeros(9))
        raises(
            CommunicatorError,
            "/c (9,) float64 without an update rule besides",
            lambda: optimizer.update(model, *gradients(comm.rank, 1)),
        )
        for options in WAYS:
            model, optimizer = sgd(comm, **options())
            for step in range(4):
                optimizer.update(model, *gradients(comm.rank, step))
            if comm.rank == 1:
                del model.b
                with model.init_scope():
                    model.b = Parameter(np.zeros(7))
                model.b.update_rule = optimizer.actual_optimizer.create_update_rule()
            text = "step 4 instead of step 5" if "local_steps" in options() else "new parameters /b besides"
            raises(CommunicatorError, text, lambda m=model, o=optimizer: [o.update(m, *gradients(0, 1)) for _ in "12"])


def check_compressed_ranks_stay_equal(comm):
    for compression in (PowerSGD(1), TopK(0.2)):
        model = net(np.float32, seed=comm.rank)
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.05).setup(model), comm, compression=compression)
        for x, t in batches(6, np.float32):
            begin, end = block_bounds(len(x), comm.rank, comm.size)
            optimizer.update(model, x[begin:end], t[begin:end], num_samples=end - begin)
        mine = weights(model)
        for theirs in comm.allgather_obj(mine):
            assert all((theirs[name] == mine[name]).all() for name in mine)


def check_double_buffering_is_one_step_late(comm):
    if comm.size == 1:
        return
    model, optimizer = sgd(comm, double_buffering=True)
    for step in range(5):
        optimizer.update(model, *gradients(comm.rank, step))
        assert optimizer.t == step
    expected = -LR * sum(means(comm, step)[0] for step in range(4))  # the last one is on its way
    np.testing.assert_allclose(model.W.array, expected, rtol=1e-9, atol=1e-12)


def check_accumulated_steps_are_those_of_the_whole_batch(comm):
    for counted in (True, False):
        model = net(seed=comm.rank)
        optimizer = create_multi_node_optimizer(optimizers.Adam().setup(model), comm, accumulate=3)
        alone = net()
        plain = optimizers.Adam().setup(alone)
        for x, t in batches(5):
            x, t = x[: len(x) // (3 * comm.size) * 3 * comm.size], t[: len(t) // (3 * comm.size) * 3 * comm.size]
            if not len(x):
                continue
            begin, end = block_bounds(len(x), comm.rank, comm.size)
            mine = [np.arange(begin, end)[k::3] for k in range(3)]
            for k in range(3):
                counts = {"num_samples": len(mine[k])} if counted else {}
                optimizer.update(model, x[mine[k]], t[mine[k]], **counts)
            plain.update(alone, x, t)
            assert optimizer.t == plain.t
        close(weights(model), weights(alone), 1e-12)


def check_accumulation_weighs_unequal_parts_and_empty_ones(comm):
    model, alone = net(seed=comm.rank), net()
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(0.1).setup(model), comm, accumulate=2)
    plain = optimizers.MomentumSGD(0.1).setup(alone)
    for x, t in batches(5):
        begin, end = block_bounds(len(x), comm.rank, comm.size)
        first = begin + (end - begin) // 3
        for a, b in [(begin, first), (first, end)]:
            optimizer.update(model, x[a:b], t[a:b], num_samples=b - a)
        plain.update(alone, x, t)
    close(weights(model), weights(alone), 1e-12)


def check_local_steps_average_parameters(comm):
    """The first step is joint; then three of each rank alone, and the mean of what they made."""
    if comm.size == 1:
        return
    model, optimizer = sgd(comm, local_steps=3)
    for step in range(7):
        optimizer.update(model, *gradients(comm.rank, step))
    expected = -LR * sum(means(comm, step)[0] for step in range(7))  # linear: the mean of paths is the path of means
    np.testing.assert_allclose(model.W.array, expected, rtol=1e-9, atol=1e-12)
    optimizer.update(model, *gradients(comm.rank, 7))
    np.testing.assert_allclose(model.W.array, expected - LR * gradients(comm.rank, 7)[0], rtol=1e-9, atol=1e-12)


def check_bad_settings_raise_on_every_rank(comm):
    for options, text in [
        ({"compression": PowerSGD(2), "zero": 1}, "cannot be combined"),
        ({"double_buffering": True, "local_steps": 4}, "cannot be combined"),
        ({"accumulate": 2, "local_steps": 4}, "cannot be combined"),
        ({"double_buffering": True, "zero_fill": False}, "zero_fill=False does not work"),
        ({"accumulate": 0}, "accumulate: expected an integer of 1 or more, got 0"),
        ({"local_steps": 1.5}, "local_steps: expected an integer"),
    ]:
        raises(ValueError, text, lambda options=options: sgd(comm, **options))
    for bad in (0, -1, 1.5, "2"):
        raises(ValueError, "PowerSGD: rank", lambda bad=bad: PowerSGD(bad))
    for bad in (0, 1.1, -1, "1", float("nan")):
        raises(ValueError, "TopK: fraction", lambda bad=bad: TopK(bad))
    raises(TypeError, "compression: expected", lambda: sgd(comm, compression="topk"))
    if comm.size > 1:
        model, optimizer = sgd(comm, compression=PowerSGD(1 + (comm.rank == 0)))
        raises(CommunicatorError, "PowerSGD rank", lambda: optimizer.update(model, *gradients(comm.rank, 0)))
        model, optimizer = sgd(comm, double_buffering=True)
        optimizer.loss_scaling()
        raises(ValueError, "dynamic loss scale", lambda: optimizer.update(model, *gradients(comm.rank, 0)))
        model, optimizer = sgd(comm, local_steps=2)
        optimizer.loss_scaling()
        raises(ValueError, "dynamic loss scale", lambda: optimizer.update(model, *gradients(comm.rank, 0)))


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
