"""Optimizer state divided over ranks, as functions of a communicator: run on threads and in tests/mpi."""

from __future__ import annotations

import copy
import operator

import numpy as np

from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.errors import CommunicatorError
from tests.comm.contract import raises
from tests.comm.training_contract import Net, batches, close, weights

KINDS = {
    "momentum": lambda: optimizers.MomentumSGD(lr=0.05, momentum=0.9),
    "adam": lambda: optimizers.Adam(alpha=0.01, amsgrad=True, weight_decay_rate=0.01),
    "lars": lambda: optimizers.LARS(lr=0.5),
    "lamb": lambda: optimizers.LAMB(alpha=0.01),
}
ELEMENTWISE = ("momentum", "adam")


def made(model, kind, hooks=()):
    optimizer = KINDS[kind]()
    optimizer.setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    return optimizer


def net(dtype=np.float64, seed=0, num_hidden=40):
    """Initialised, with more than a cache line for each of four ranks."""
    model = Net(dtype, seed, num_hidden)
    model(*next(batches(1, dtype)))
    return model


def steps(comm, optimizer, model, found):
    for x, t in found:
        begin, end = block_bounds(len(x), comm.rank, comm.size)
        optimizer.update(model, x[begin:end], t[begin:end], num_samples=end - begin)


def train(comm, zero, kind, dtype=np.float64, hooks=(), model=None, found=None, **options):
    model = net(dtype, seed=5 * comm.rank) if model is None else model
    optimizer = create_multi_node_optimizer(made(model, kind, hooks), comm, zero=zero, **options)
    steps(comm, optimizer, model, batches(10, dtype) if found is None else found)
    return model, optimizer


def alone(kind, dtype=np.float64, hooks=()):
    model = net(dtype)
    optimizer = made(model, kind, hooks)
    for x, t in batches(10, dtype):
        optimizer.update(model, x, t)
    return model


def hooks():
    return [optimizers.WeightDecay(1e-3), optimizers.GradientClipping(1.0)]


def check_weights_are_those_of_one_process(comm):
    for zero, kinds in [(1, KINDS), (2, ["lamb"])]:
        for kind in kinds:
            for dtype, tolerance in [(np.float64, 1e-12), (np.float32, 2e-5)]:
                model, _ = train(comm, zero, kind, dtype, hooks())
                close(weights(model), weights(alone(kind, dtype, hooks())), tolerance)


def check_elementwise_rules_give_the_same_bits_as_undivided_state(comm):
    """Where both add in the order of ranks: threads, and processes of one host in shared memory."""
    for zero, kind in [(1, "momentum"), (1, "adam"), (2, "adam")]:
        for dtype in (np.float32, np.float16):
            model, _ = train(comm, zero, kind, dtype)
            plain, _ = train(comm, 0, kind, dtype)
            mine, expected = weights(model), weights(plain)
            if comm.size <= 2 or type(comm).__name__ == "ThreadCommunicator":
                assert all((mine[name] == expected[name]).all() for name in mine), (zero, kind, dtype)
            else:
                close(mine, expected, 1e-5 if dtype == np.float32 else 1e-2)


def check_all_ranks_hold_the_same_bits(comm):
    for zero in (1, 2):
        mine = weights(train(comm, zero, "lamb", np.float32, hooks())[0])
        for theirs in comm.allgather_obj(mine):
            assert all((theirs[name] == mine[name]).all() for name in mine)


def state_bytes(optimizer):
    rules = [p.update_rule for p in optimizer.target.params()]
    return sum(a.nbytes for rule in rules for a in rule.state.values())


def check_each_rank_has_its_part_of_the_state(comm):
    _, optimizer = train(comm, 1, "adam")
    _, plain = train(comm, 0, "adam")
    whole = state_bytes(plain)
    mine = state_bytes(optimizer)
    assert sum(comm.allgather_obj(mine)) == whole
    assert abs(mine - whole / comm.size) <= 3 * 8 * 64 * 2  # three arrays of float64, a cache line at each border


def check_bad_layer_norm_hooks_are_joint(comm):
    """GradientLARS and noise see whole parameters, gradients that a rank lacks, and clipping of every element."""
    found = [optimizers.GradientLARS(weight_decay=1e-2), optimizers.GradientNoise(0.1)]
    found += [optimizers.Lasso(1e-3), optimizers.GradientHardClipping(-0.3, 0.2)]
    model, _ = train(comm, 1, "momentum", hooks=copy.deepcopy(found))
    close(weights(model), weights(alone("momentum", hooks=copy.deepcopy(found))), 1e-12)


def check_saved_state_goes_on_with_any_division(comm):
    """Five steps, save, load into another division, five more steps: as ten steps at once."""
    found = list(batches(10))
    expected = weights(train(comm, 0, "adam", found=found)[0])
    for before, after in [(1, 1), (1, 0), (0, 2), (2, 1)]:
        model, optimizer = train(comm, before, "adam", found=found[:5])
        with optimizer.whole_state():
            saved = save(optimizer) if comm.rank == 0 else None
        saved = comm.bcast_obj(saved)
        assert saved["l1/W/m"].shape == model.l1.W.shape
        fresh = net(seed=9)
        for name, p in fresh.namedparams():
            p.array[...] = weights(model)[name]
        again = create_multi_node_optimizer(made(fresh, "adam"), comm, zero=after)
        NpzDeserializer(saved).load(again)
        steps(comm, again, fresh, found[5:])
        close(weights(fresh), expected, 1e-12)
        steps(comm, optimizer, model, found[5:])  # the block has left the state as it was
        close(weights(model), expected, 1e-12)


def save(optimizer):
    serializer = DictionarySerializer()
    serializer.save(optimizer)
    return serializer.target


def check_divided_state_is_not_saved_by_one_rank(comm):
    _, optimizer = train(comm, 1, "adam", found=list(batches(1)))
    if comm.size > 1:
        raises(RuntimeError, "whole_state", lambda: save(optimizer))


def check_freezing_and_thawing_moves_the_state(comm):
    """The parts are cut anew, and what belongs to other elements then comes from their old owners."""
    results = []
    for zero in (0, 1, 2):
        model = net()
        optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=zero)
        found = list(batches(9))
        steps(comm, optimizer, model, found[:3])
        model.l2.disable_update()
        steps(comm, optimizer, model, found[3:6])
        model.l2.enable_update()
        model.l1.b.update_rule.enabled = False
        steps(comm, optimizer, model, found[6:])
        results.append(weights(model))
    close(results[1], results[0], 1e-12)
    close(results[2], results[0], 1e-12)


def check_rates_of_their_own_cut_the_update_anew(comm):
    results = []
    for zero in (0, 1):
        model = net()
        optimizer = create_multi_node_optimizer(made(model, "momentum"), comm, zero=zero)
        found = list(batches(6))
        steps(comm, optimizer, model, found[:3])
        model.l1.W.update_rule.hyperparam.lr = 0.01
        steps(comm, optimizer, model, found[3:])
        results.append(weights(model))
    close(results[1], results[0], 1e-12)


def check_lazy_parameters_and_ranks_without_samples(comm):
    results = []
    for zero in (0, 1, 2):
        model = Net(seed=7 * comm.rank)
        optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=zero)
        for x, t in batches(4):
            mine = (x, t) if comm.rank == comm.size - 1 else (x[:0], t[:0])
            optimizer.update(model, *mine, num_samples=len(mine[0]))
        results.append(weights(model))
    close(results[1], results[0], 1e-12)
    close(results[2], results[0], 1e-12)


def check_gradients_that_no_rank_has(comm):
    class Half(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.inner = net()
                self.unused = Parameter(np.ones((30, 7)))

        def forward(self, x, t):
            return self.inner(x, t)

    results = []
    for zero, zero_fill in [(0, True), (1, True), (1, False), (2, True)]:
        model = Half()
        optimizer = create_multi_node_optimizer(made(model, "adam", hooks()), comm, zero=zero, zero_fill=zero_fill)
        steps(comm, optimizer, model, batches(4))
        results.append(weights(model))
    for other in results[1:]:
        close(other, results[0], 1e-12)


def check_sixteen_bit_parameters_with_float32_copies(comm):
    results = []
    for zero in (0, 1):
        model = net(np.float16)
        optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=zero)
        optimizer.actual_optimizer.use_fp32_update()
        steps(comm, optimizer, model, batches(6, np.float16))
        with optimizer.whole_state():
            if comm.rank == 0:
                assert model.l1.W.update_rule.state["fp32_param"].dtype == np.float32
        results.append(weights(model))
    close(results[1], results[0], 1e-3)


def check_an_overflow_on_one_rank_leaves_out_the_update_on_all(comm):
    model = net(np.float32)
    optimizer = create_multi_node_optimizer(made(model, "momentum"), comm, zero=1)
    optimizer.loss_scaling()
    steps(comm, optimizer, model, batches(1, np.float32))
    before = weights(model)
    for p in model.params():
        p.grad = np.ones(p.shape, np.float32)
    if comm.rank == comm.size - 1:
        model.l2.b.grad[...] = np.inf
    optimizer.update()
    assert not optimizer.is_safe_to_update()
    close(weights(model), before, 0)


def check_hooks_that_see_whole_gradients_are_refused(comm):
    def peek(optimizer):
        """Norms of whole gradients, say."""

    if comm.size > 1:
        raises(ValueError, "works_on_shards", lambda: train(comm, 1, "momentum", hooks=[Named(peek)]))
        model = net()
        actual = made(model, "momentum")
        model.l1.W.update_rule.add_hook(lambda rule, p: None, name="look")
        optimizer = create_multi_node_optimizer(actual, comm, zero=1)
        raises(ValueError, "a hook of its rule", lambda: optimizer.update(model, *next(batches())))


class Named:
    name = "peek"

    def __init__(self, function):
        self.function = function

    def __call__(self, optimizer):
        self.function(optimizer)


def check_two_owners_of_one_array_are_refused(comm):
    class Tied(Link):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.a = Parameter(np.ones((4, 3)))
                self.b = Parameter(np.ones((4, 3)))
            self.b.array = self.a.array

        def forward(self, x, t):
            return F.sum(self.a * self.b)

    model = Tied()
    if comm.size > 1 and model.a.is_shared:
        optimizer = create_multi_node_optimizer(made(model, "momentum"), comm, zero=1)
        raises(ValueError, "two parameters share one array", lambda: optimizer.update(model, None, None))


def check_ranks_that_divide_differently_raise_on_all(comm):
    if comm.size > 1:
        zero = 1 if comm.rank == 0 else 2
        raises(CommunicatorError, "zero", lambda: train(comm, zero, "momentum"))


def check_bad_stages(comm):
    for bad in (3, -1, True, "1", None, 1.5):
        raises(ValueError, "zero: expected 0", lambda bad=bad: train(comm, bad, "momentum"))


def check_gradients_travel_in_the_configured_type(comm):
    comm.set_config("allreduce_grad_dtype", "float16")
    try:
        model, _ = train(comm, 1, "momentum", np.float32)
    finally:
        comm.set_config("allreduce_grad_dtype", None)
    close(weights(model), weights(alone("momentum", np.float32)), 5e-3)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
OVERFLOWS_ARE_MEANT = "ignore:NaN or infinity in the gradient:RuntimeWarning"
by_name = operator.attrgetter("__name__")
