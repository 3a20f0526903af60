"""Training over ranks, as functions of a communicator: run on thread ranks here, on processes in tests/mpi."""

from __future__ import annotations

import _thread
import collections
import copy
import functools
import operator
import sys
import warnings

import ml_dtypes
import numpy as np

import dbrdist.core.tape.ops as ops
from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.core.files.serializer import NpzDeserializer, saved_state
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.variable import Variable
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.errors import CommunicatorError
from tests.comm.contract import raises

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Dense(Link):
    """x W + b, with W made at the first input; initial values follow from ``seed``."""

    def __init__(self, num_out, dtype, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)

        def fill(a):
            a[...] = rng.normal(size=a.shape).astype(a.dtype) / np.sqrt(len(a)).astype(a.dtype)

        fill.dtype = np.dtype(dtype)
        with self.init_scope():
            self.W = Parameter(fill)
            self.b = Parameter(np.zeros(num_out, dtype))

    def forward(self, x):
        if not self.W.is_initialized:
            self.W.initialize((x.shape[1], self.b.size))
        y = ops.matmul(x, self.W)
        return y + ops.broadcast_to(self.b, y.shape)


class Net(Chain):
    """Two layers with a ReLU between; called with inputs and targets it gives the mean squared error."""

    def __init__(self, dtype=np.float64, seed=0, num_hidden=9):
        super().__init__()
        with self.init_scope():
            self.l1 = Dense(num_hidden, dtype, seed)
            self.l2 = Dense(3, dtype, seed + 1)

    def forward(self, x, t):
        y = self.l2(F.relu(self.l1(Variable(x))))
        d = y - t
        return ops.sum(d * d) * (1.0 / len(x))


def batches(num_steps=20, dtype=np.float64):
    """Global batches of 16, and each fifth of 7."""
    rng = np.random.default_rng(3)
    for step in range(num_steps):
        n = 7 if step % 5 == 4 else 16
        yield rng.normal(size=(n, 5)).astype(dtype), rng.normal(size=(n, 3)).astype(dtype)


def optimizer_for(model, kind="momentum"):
    made = {
        "momentum": lambda: optimizers.MomentumSGD(lr=0.05, momentum=0.9),
        "adam": lambda: optimizers.Adam(alpha=0.01),
        "lars": lambda: optimizers.LARS(lr=0.5),
    }[kind]()
    made.setup(model)
    made.add_hook(optimizers.WeightDecay(1e-3))
    made.add_hook(optimizers.GradientClipping(5.0))
    return made


def train_alone(dtype, kind="momentum"):
    model = Net(dtype)
    optimizer = optimizer_for(model, kind)
    for x, t in batches(dtype=dtype):
        optimizer.update(model, x, t)
    return weights(model)


def train_together(comm, dtype, kind="momentum", model=None):
    model = Net(dtype, seed=100 * comm.rank) if model is None else model
    optimizer = create_multi_node_optimizer(optimizer_for(model, kind), comm)
    for x, t in batches(dtype=dtype):
        begin, end = block_bounds(len(x), comm.rank, comm.size)
        optimizer.update(model, x[begin:end], t[begin:end], num_samples=end - begin)
    assert optimizer.t == 20
    return weights(model)


def weights(model):
    return {name: p.array.copy() for name, p in model.namedparams()}


def close(mine, expected, tolerance):
    assert mine.keys() == expected.keys()
    for name in mine:
        difference = np.abs(mine[name].astype(np.float64) - expected[name].astype(np.float64)).max()
        assert difference <= tolerance * max(1.0, np.abs(expected[name].astype(np.float64)).max()), (name, difference)


def check_n_ranks_give_the_weights_of_one(comm):
    """With a last batch of 7, initial values that differ by rank until they are broadcast, and lazy parameters."""
    for kind in ("momentum", "adam", "lars"):
        for dtype, tolerance in [(np.float64, 1e-12), (np.float32, 1e-5)]:
            close(train_together(comm, dtype, kind), train_alone(dtype, kind), tolerance)


def check_all_ranks_hold_the_same_bits(comm):
    for dtype in (np.float64, np.float32, np.float16):
        mine = train_together(comm, dtype)
        for theirs in comm.allgather_obj(mine):
            assert all((theirs[name] == mine[name]).all() for name in mine)


def check_the_first_update_updates(comm):
    model = Net(seed=comm.rank)
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1).setup(model), comm)
    x, t = next(batches())
    model(x, t)
    before = comm.bcast_obj(weights(model))
    optimizer.update(model, x, t)
    assert optimizer.t == 1
    alone = Net()
    alone(x, t)
    for name, p in alone.namedparams():
        p.array[...] = before[name]
    optimizers.SGD(lr=0.1).setup(alone).update(alone, x, t)
    close(weights(model), weights(alone), 1e-14)
    assert not np.allclose(weights(model)["/l1/W"], before["/l1/W"])


def check_the_first_update_after_a_resume_updates(comm):
    """It has rank 0's parameters on all ranks, and applies its gradients too."""
    found = list(batches(4))
    states = []
    for cut in (False, True):
        model = Net(seed=comm.rank)
        optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1).setup(model), comm)
        for step, batch in enumerate(found):
            if cut and step == 3:
                saved = comm.bcast_obj((saved_state(model), saved_state(optimizer)))
                model = Net(seed=9 + comm.rank)
                optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1).setup(model), comm)
                for entries, obj in zip(saved, (model, optimizer)):
                    NpzDeserializer(entries).load(obj)
            optimizer.update(model, *batch)
        states.append(weights(model))
        assert optimizer.t == 4
    close(states[1], states[0], 0)


def check_late_parameters_on_ranks_without_samples(comm):
    """Only the last rank has samples in the first step; the others learn shapes and values from it."""
    model = Net(seed=7 * comm.rank)
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1).setup(model), comm)
    x, t = next(batches())
    leads = comm.rank == comm.size - 1
    optimizer.update(model, x, t, num_samples=len(x) if leads else 0)
    alone = Net(seed=7 * (comm.size - 1))
    alone.l1.b.array[...] = 0
    optimizers.SGD(lr=0.1).setup(alone).update(alone, x, t)
    close(weights(model), weights(alone), 1e-14)


def check_late_parameters_outside_an_update(comm):
    model = Net(seed=comm.rank)
    comm.bcast_data(model)
    x, t = next(batches())
    model(x, t)
    expected = Net(seed=0)
    expected(x, t)
    close(weights(model), weights(expected), 0)


def check_bcast_data(comm):
    model = Net(np.float32, seed=comm.rank)
    x, t = next(batches(dtype=np.float32))
    if comm.rank == 0:
        model(x, t)  # the others do not know their shapes yet
    model.l1.add_persistent("mean", np.full(3, comm.rank, BFLOAT16))
    model.l1.add_persistent("count", comm.rank)
    comm.broadcast_data(model)
    expected = Net(np.float32, seed=0)
    expected(x, t)
    close(weights(model), weights(expected), 0)
    assert (model.l1.mean == 0).all()
    assert model.l1.count == 0


def gradients_of(comm, dtype, names=("/l1/b", "/l1/W", "/l2/W", "/l2/b")):
    """A model whose gradients are whole numbers that depend on rank and entry; None for those not in ``names``."""
    model = Net(dtype)
    model(*(a.astype(dtype) for a in next(batches())))
    for i, (name, p) in enumerate(model.namedparams()):
        p.cleargrad()
        if name in names:
            p.grad = ((np.arange(p.size).reshape(p.shape) + comm.rank + i) % 7).astype(dtype)
    return model


def expected_mean(comm, model, name, ranks=None):
    names = [n for n, _ in model.namedparams()]
    p = dict(model.namedparams())[name]
    i = names.index(name)
    total = sum(
        (np.arange(p.size).reshape(p.shape) + r + i) % 7 for r in (range(comm.size) if ranks is None else ranks)
    )
    return total / comm.size


def check_multi_node_mean_grad(comm):
    for dtype in (np.float64, np.float32, np.float16, BFLOAT16):
        model = gradients_of(comm, dtype)
        comm.multi_node_mean_grad(model)
        for name, p in model.namedparams():
            assert p.grad.dtype == dtype
            expected = expected_mean(comm, model, name)
            if np.dtype(dtype).itemsize == 2:
                assert (p.grad == expected.astype(np.float32).astype(dtype)).all()
            else:
                np.testing.assert_allclose(p.grad, expected, rtol=1e-6)


def check_gradients_that_some_or_all_ranks_lack(comm):
    for zero_fill in (False, True):
        mine = ("/l1/W",) if comm.rank else ("/l1/W", "/l2/W")
        model = gradients_of(comm, np.float64, mine)
        comm.multi_node_mean_grad(model, zero_fill)
        params = dict(model.namedparams())
        np.testing.assert_allclose(params["/l1/W"].grad, expected_mean(comm, model, "/l1/W"))
        np.testing.assert_allclose(params["/l2/W"].grad, expected_mean(comm, model, "/l2/W", [0]))
        for name in ("/l1/b", "/l2/b"):
            assert params[name].grad is None if not zero_fill else (params[name].grad == 0).all()
    for verb in (comm.multi_node_mean_grad, comm.allreduce_grad):
        model = gradients_of(comm, np.float64, ("/l1/W",))
        verb(model)
        assert model.l2.b.grad is None


def check_gradients_travel_in_the_configured_type(comm):
    comm.set_config("allreduce_grad_dtype", "float16")
    model = gradients_of(comm, np.float32)
    model.l1.W.grad[...] = 0.1
    comm.multi_node_mean_grad(model)
    assert model.l1.W.grad.dtype == np.float32
    travels = comm.size > 1 and not shares_memory(comm)
    expected = np.float16(0.1) if travels else np.float32(0.1)
    np.testing.assert_allclose(model.l1.W.grad, expected, rtol=0 if travels else 1e-6)
    comm.set_config("allreduce_grad_dtype", None)


def shares_memory(comm):
    """True where gradients do not travel: ranks of one host add them in place."""
    return comm.size == comm.intra_size and comm.get_config().get("shared_memory", False) is True


def check_places_in_flat_memory_may_differ(comm):
    """On rank 0 one parameter left its arena; on the last, arenas were made of parts."""
    model = gradients_of(comm, np.float64)
    comm.multi_node_mean_grad(model)
    model = gradients_of(comm, np.float64)
    if comm.rank == 0:
        model.l2.W.leave_arena()
    if comm.rank == comm.size - 1:
        from dbrdist.core.model import flat

        flat.gather(model.l2.params())
        flat.gather(model.l1.params())
    comm.multi_node_mean_grad(model)
    for name, p in model.namedparams():
        np.testing.assert_allclose(p.grad, expected_mean(comm, model, name))


def check_types_may_be_mixed(comm):
    """Two arenas: their order must not depend on addresses."""
    model = Chain()
    with model.init_scope():
        model.l1 = Dense(9, np.float32, 1)
        model.l2 = Dense(3, np.float64, 2)
        model.l3 = Dense(3, np.float32, 3)
    kept = []
    for i, p in enumerate(model.params()):
        if not p.is_initialized:
            p.initialize((4 + i, 3))
        kept.append(np.ones(1000 * (comm.rank + 1)))
        p.grad = np.full(p.shape, comm.rank + i, p.dtype)
    comm.multi_node_mean_grad(model)
    for i, p in enumerate(model.params()):
        np.testing.assert_allclose(p.grad, np.full(p.shape, (comm.size - 1) / 2 + i), rtol=1e-6)


def check_equal_weights_and_gradients_already_there(comm):
    model = gradients_of(comm, np.float64)
    before = weights(model)
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=1.0).setup(model), comm)
    optimizer.update()
    for name, p in model.namedparams():
        np.testing.assert_allclose(p.array, before[name] - expected_mean(comm, model, name), atol=1e-14)


def check_an_overflow_on_one_rank_leaves_out_the_update_on_all(comm):
    model = gradients_of(comm, np.float32)
    before = weights(model)
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=1.0).setup(model), comm)
    optimizer.loss_scaling()
    optimizer.update()
    assert (weights(model)["/l1/b"] != before["/l1/b"]).any()
    before = weights(model)
    if comm.rank == comm.size - 1:
        model.l2.b.grad = np.full(3, np.inf, np.float32)
    optimizer.update()
    assert not optimizer.is_safe_to_update()
    for name, value in weights(model).items():
        np.testing.assert_array_equal(value, before[name])
    scales = comm.allgather_obj(optimizer.actual_optimizer._loss_scale)
    assert scales == [1.0] * comm.size


def check_frozen_parameters_stay(comm):
    model = Net(seed=0)
    model(*next(batches()))
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=1.0).setup(model), comm)
    model.l1.disable_update()
    before = weights(model)
    optimizer.update(model, *next(batches()))
    after = weights(model)
    assert (after["/l1/W"] == before["/l1/W"]).all()
    assert (after["/l2/W"] != before["/l2/W"]).any()


def check_models_that_differ_raise_on_every_rank(comm):
    if comm.size == 1:
        return
    odd = comm.size - 1
    model = Net(num_hidden=9 + (comm.rank == odd))
    text = f"rank {odd}: /l1/b (10,) float64 instead of /l1/b (9,) float64"
    raises(CommunicatorError, text, lambda: comm.bcast_data(model))
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    raises(CommunicatorError, text, lambda: optimizer.update(model, *next(batches())))
    model(*next(batches()))
    raises(CommunicatorError, f"rank {odd}: ", lambda: comm.multi_node_mean_grad(model))
    other = Net(np.float32 if comm.rank == odd else np.float64)
    raises(CommunicatorError, "/l1/b (9,) float32 instead of", lambda: comm.bcast_data(other))


def _set_another_hyperparam(optimizer):
    other = copy.copy(optimizer.hyperparam)
    other.lr = 0.08
    optimizer.actual_optimizer.hyperparam = other


def _swap_hook(optimizer):
    optimizer.remove_hook("WeightDecay")
    optimizer.add_hook(optimizers.WeightDecay(0.5))


CHANGES = {  # between two steps; what the error then names
    "lr 0.07": lambda optimizer: setattr(optimizer, "lr", 0.07),
    "lr 0.08": _set_another_hyperparam,
    "rate 0.25": lambda optimizer: setattr(optimizer.actual_optimizer._hooks.pre["WeightDecay"], "rate", 0.25),
    "instead of hook WeightDecay": _swap_hook,
    "hook GradientClipping": lambda optimizer: optimizer.remove_hook("GradientClipping"),
    "loss scale 2.0": lambda optimizer: optimizer.set_loss_scale(2.0),
    "zero_fill False": lambda optimizer: setattr(optimizer, "zero_fill", False),
    "step 7": lambda optimizer: setattr(optimizer, "t", 7),
    "frozen": lambda optimizer: optimizer.target.l1.disable_update(),
}


def check_what_one_rank_changes_between_steps_is_named_on_all(comm):
    batch = next(batches(dtype=np.float32))
    for text, change in CHANGES.items():
        model = Net(np.float32)
        optimizer = create_multi_node_optimizer(optimizer_for(model), comm)
        for _ in range(3):
            optimizer.update(model, *batch)
        if comm.rank == comm.size - 1:
            change(optimizer)
        step = functools.partial(optimizer.update, model, *batch)
        if comm.size == 1:
            step()
        else:
            raises(CommunicatorError, text, step)


def check_parameters_that_a_forward_pass_adds_are_those_of_rank_0(comm):
    batch, model = next(batches()), Net()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.01).setup(model), comm)

    def loss(x, t):
        y = model(x, t)
        if optimizer.t == 2 and not hasattr(model, "shift"):
            with model.init_scope():
                model.shift = Parameter(np.full(3, 1.0 + comm.rank))
        return y + ops.sum(model.shift * model.shift) if hasattr(model, "shift") else y

    with warnings.catch_warnings():  # one says that nobody trains it
        warnings.filterwarnings("ignore", "SGD.update: /shift came to the target after setup")
        for _ in range(4):
            optimizer.update(loss, *batch)
        comm.barrier()  # filters are those of all threads
    np.testing.assert_array_equal(model.shift.array, np.ones(3))


def check_counts_and_switches_of_numpy(comm):
    found = []
    for kind in (int, np.int64, np.uint8):
        model = Net(np.float32)
        optimizer = create_multi_node_optimizer(optimizer_for(model), comm)
        optimizer.zero_fill = kind(1) == 1
        for x, t in batches(3, np.float32):
            optimizer.update(model, x, t, num_samples=kind(len(x) + comm.rank))
        found.append(weights(model))
    for name, value in found[0].items():
        assert (value == found[1][name]).all()
        assert (value == found[2][name]).all()


def check_counts_that_make_no_sense_raise_on_every_rank(comm):
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    raises(CommunicatorError, "at least one rank", lambda: optimizer.update(num_samples=0))
    if comm.size > 1:
        count = None if comm.rank == 0 else 4
        raises(CommunicatorError, "from every rank or from none", lambda: optimizer.update(num_samples=count))
        count = -1 if comm.rank == 0 else None
        raises(CommunicatorError, "of 0 or more, got -1, none", lambda: optimizer.update(num_samples=count))
    for count in (-1, -7):  # on all of them too
        raises(CommunicatorError, f"of 0 or more, got {count}", lambda n=count: optimizer.update(num_samples=n))
    assert optimizer.t == 0


def check_update_as_all_that_a_thread_does(comm):
    """Nobody has written a line of that call: no frame lies below it."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    for _ in range(3):
        over = _thread.allocate_lock()
        over.acquire()
        steps = map(operator.call, [optimizer.update, over.release])
        _thread.start_new_thread(collections.deque, (steps,))
        assert over.acquire(timeout=30)
    assert optimizer.t == 3


def check_state_is_that_of_the_wrapped_optimizer(comm):
    from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer

    model = Net()
    optimizer = create_multi_node_optimizer(optimizer_for(model), comm)
    for x, t in batches(3):
        optimizer.update(model, x, t)
    saved = DictionarySerializer()
    saved.save(optimizer)
    alone = optimizers.MomentumSGD()
    fresh = Net()
    fresh(*next(batches()))
    alone.setup(fresh)
    NpzDeserializer(saved.target).load(alone)
    assert alone.t == 3
    np.testing.assert_array_equal(fresh.l1.W.update_rule.state["v"], model.l1.W.update_rule.state["v"])


OVERFLOWS_ARE_MEANT = "ignore:NaN or infinity in the gradient of /l2/b:RuntimeWarning"


def _by_hand(optimizer, model, x, t, num_samples):
    """Gradients that are there before the update."""
    model.cleargrads()
    if num_samples:
        model(x, t).backward(loss_scale=optimizer.actual_optimizer._loss_scale)
    optimizer.update(num_samples=num_samples)


def _without_zeros(optimizer, model, x, t, num_samples):
    optimizer.zero_fill = False
    optimizer.update(model, x, t, num_samples=num_samples)
    optimizer.zero_fill = True


WAYS = {
    "as usual": lambda o, m, x, t, n: o.update(m, x, t, num_samples=n),
    "gradients by hand": _by_hand,
    "zero_fill": _without_zeros,
    "config": lambda o, m, x, t, n: (
        o.communicator.set_config("allreduce_grad_dtype", None), o.update(m, x, t, num_samples=n)
    ),
    "loss scale": lambda o, m, x, t, n: (o.set_loss_scale(8.0), o.update(m, x, t, num_samples=n)),
    "loss scaling": lambda o, m, x, t, n: (o.loss_scaling(), o.update(m, x, t, num_samples=n)),
    "no loss scale": lambda o, m, x, t, n: (o.set_loss_scale(None), o.update(m, x, t, num_samples=n)),
    "frozen": lambda o, m, x, t, n: (m.l1.disable_update(), o.update(m, x, t, num_samples=n)),
    "not frozen": lambda o, m, x, t, n: (m.l1.enable_update(), o.update(m, x, t, num_samples=n)),
}  # fmt: skip


def check_steps_whose_way_changes_are_those_of_one_process(comm):
    """Also where a rank has no examples."""
    model, alone = Net(), Net()
    optimizer = create_multi_node_optimizer(optimizer_for(model), comm)
    reference = optimizer_for(alone)
    everything = list(batches())
    for k, way in enumerate([*WAYS, *reversed(WAYS), "as usual", "as usual"]):
        x, t = everything[k]
        num_idle = comm.size > 1 and k % 3 == 0
        begin, end = (0, 0)
        if comm.rank < comm.size - num_idle:
            begin, end = block_bounds(len(x), comm.rank, comm.size - num_idle)
        WAYS[way](optimizer, model, x[begin:end], t[begin:end], end - begin)
        if "frozen" in way:
            (alone.l1.disable_update if way == "frozen" else alone.l1.enable_update)()
        reference.update(alone, x, t)
        close(weights(model), weights(alone), 1e-12)


def check_the_record_has_the_line_of_each_step(comm):
    batch, model = next(batches()), Net()
    optimizer = create_multi_node_optimizer(optimizer_for(model), comm)
    for _ in range(4):
        frame = sys._getframe()
        optimizer.update(model, *batch), optimizer.update(model, *batch)
        first = frame.f_lineno - 1
        optimizer.update(model, *batch)
        second = frame.f_lineno - 1
    if comm.size > 1:
        steps = [call for call in comm.gate.record.last if call.verb == "update"][-6:]
        assert [call.place for call in steps] == 2 * [(__file__, first), (__file__, first), (__file__, second)]
        assert all(call.seconds >= 0 for call in steps)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
