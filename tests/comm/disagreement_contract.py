"""Ranks that disagree all raise the same error, and go on; as functions of a communicator, see contract.py."""

from __future__ import annotations

import functools
import operator

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import RecalibrateStatistics, Reduction, create_multi_node_optimizer
from dbrdist.comm.data.evaluator import GenericMultiNodeEvaluator
from dbrdist.comm.data.iterators import create_multi_node_iterator
from dbrdist.comm.links import MultiNodeBatchNormalization
from dbrdist.comm.run.snapshots import AverageStatistics
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape import ops
from dbrdist.core.update.update_rule import UpdateRule
from dbrdist.errors import CommunicatorError
from dbrdist.iterators import SerialIterator
from dbrdist.link_hooks import SpectralNormalization, TimerHook
from dbrdist.links import BatchNormalization, Convolution2D, GroupNormalization, Maxout, MultiHeadAttention
from tests.comm.contract import array_of, raises, same
from tests.comm.training_contract import Dense, Net, batches, gradients_of


def all_raise(comm, kind, text, function):
    """Every rank raises ``kind`` with the same words, ``text`` among them, and the line of a call; all can go on."""
    try:
        function()
    except kind as e:
        words = str(e)
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}")
    assert text in words, words
    assert set(comm.allgather_obj(words)) == {words}
    assert "_contract.py:" in words, words
    same(comm.allreduce(array_of(comm.rank)), sum(array_of(r) for r in range(comm.size)))


def several(check):
    """For more than one rank."""

    def run(comm):
        if comm.size > 1:
            check(comm)

    run.__name__ = check.__name__
    return run


@several
def check_every_pair_of_verbs(comm):
    x = array_of(comm.rank)
    verbs = {
        "allreduce": lambda: comm.allreduce(x),
        "bcast": lambda: comm.bcast(x),
        "gather": lambda: comm.gather(x, 0),
        "allgather": lambda: comm.allgather(x),
        "scatter": lambda: comm.scatter([x] * comm.size),
        "alltoall": lambda: comm.alltoall([x] * comm.size),
        "barrier": comm.barrier,
        "bcast_obj": lambda: comm.bcast_obj(1),
        "gather_obj": lambda: comm.gather_obj(1),
        "allgather_obj": lambda: comm.allgather_obj(1),
        "scatter_obj": lambda: comm.scatter_obj([1] * comm.size),
        "split": lambda: comm.split(0, 0),
        "finalize": comm.finalize,
        "weighted_mean_grad": lambda: comm.weighted_mean_grad([], False, None),
    }
    odd = comm.rank == comm.size - 1
    for one, other in zip(verbs, [*list(verbs)[1:], "allreduce"]):
        text = f"in different verbs: {one} on rank{'s' if comm.size > 2 else ''} 0"
        all_raise(comm, CommunicatorError, text, verbs[other if odd else one])


@several
def check_roots(comm):
    x, odd = array_of(comm.rank), comm.rank == comm.size - 1
    for verb, arguments in [
        ("bcast", lambda root: comm.bcast(x, root=root)),
        ("gather", lambda root: comm.gather(x, root)),
        ("scatter", lambda root: comm.scatter([x] * comm.size, root)),
        ("bcast_obj", lambda root: comm.bcast_obj(3, root=root)),
        ("gather_obj", lambda root: comm.gather_obj(3, root)),
        ("scatter_obj", lambda root: comm.scatter_obj([3] * comm.size, root)),
    ]:
        text = f"{verb} expected the same root on every rank, got root 0 on rank"
        all_raise(comm, CommunicatorError, text, lambda f=arguments: f(int(odd)))
        text = f"{verb} expected a rank from 0 to {comm.size - 1}, got {comm.size} (on rank {comm.size - 1}"
        all_raise(comm, ValueError, text, lambda f=arguments: f(comm.size if odd else 0))
        all_raise(comm, TypeError, f"{verb} expected a whole number", lambda f=arguments: f("0" if odd else 0))
    assert (x == array_of(comm.rank)).all()


@several
def check_other_arguments(comm):
    odd, x = comm.rank == comm.size - 1, array_of(comm.rank)
    text = "the same max_buf_len"
    all_raise(comm, CommunicatorError, text, lambda: comm.bcast(x, 8 + odd))
    all_raise(comm, CommunicatorError, text, lambda: comm.bcast_obj("x", 8 if odd else None))
    for bad, kind in ((0, ValueError), (-5, ValueError), (2.5, TypeError), ("8", TypeError)):
        all_raise(comm, kind, "max_buf_len", lambda b=bad: comm.bcast(x, b if odd else 8))
    all_raise(comm, TypeError, "split: color", lambda: comm.split("red" if odd else 0, 0))
    all_raise(comm, TypeError, "split: key", lambda: comm.split(0, None if odd else 0))
    all_raise(comm, ValueError, "64 bits", lambda: comm.split(0, 2**70 if odd else 0))
    all_raise(comm, CommunicatorError, "shape (4,)", lambda: comm.allreduce(array_of(0, (4 + odd,))))
    all_raise(comm, CommunicatorError, "float64 on", lambda: comm.allreduce(array_of(0, (4,), "d" if odd else "f")))


@several
def check_configurations(comm):
    odd = comm.rank == comm.size - 1
    part = comm.split(0, comm.rank)
    part.set_config("allreduce_grad_dtype", "float16" if odd else None)
    text = "the same configuration on every rank, got allreduce_grad_dtype None on rank"
    all_raise(comm, CommunicatorError, text, lambda: part.allreduce(array_of(0)))
    all_raise(comm, CommunicatorError, text, lambda: part.multi_node_mean_grad(Net()))
    all_raise(comm, CommunicatorError, text, lambda: part.finalize())
    part.set_config("allreduce_grad_dtype", None)
    part.finalize()


@several
def check_what_cannot_be_sent_raises_on_the_receiver_too(comm):
    for bad, send, recv in (("text", comm.send, comm.recv), (lambda: 0, comm.send_obj, comm.recv_obj)):
        try:
            if comm.rank == 0:
                send(bad, 1, 0)
            elif comm.rank == 1:
                recv(0, 0)
        except TypeError as e:
            assert "send expected an array" in str(e) or "can be pickled" in str(e)
            assert comm.rank == 0 or "on rank 0 of" in str(e)
        else:
            assert comm.rank > 1
    comm.barrier()


class Fragile:
    """Can be pickled everywhere, but not unpickled on one rank."""

    bad_rank = None

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _unpickle, (self.rank,)


def _unpickle(rank):
    import threading

    if getattr(_here, "rank", None) == rank or threading.current_thread().name == f"rank {rank}":
        raise OSError("no such thing on this rank")
    return Fragile(rank)


class _here:
    rank = None


@several
def check_objects_that_fail_to_unpickle_on_one_rank(comm):
    _here.rank = comm.rank if type(comm).__name__ != "ThreadCommunicator" else None
    me = comm.size - 1 if _here.rank is not None else comm.gate.members[-1]
    fragile = Fragile(me)
    text = "OSError: no such thing on this rank (on rank"
    all_raise(comm, TypeError, text, lambda: comm.bcast_obj(fragile))
    all_raise(comm, TypeError, text, lambda: comm.allgather_obj(fragile))
    all_raise(comm, TypeError, text, lambda: comm.scatter_obj([fragile] * comm.size))
    all_raise(comm, TypeError, text, lambda: comm.gather_obj(fragile, comm.size - 1))
    all_raise(comm, TypeError, "can be pickled", lambda: comm.gather_obj((lambda: 0) if comm.rank else 0))


@several
def check_frozen_layers_that_differ(comm):
    """Equal shapes, so that gradients of different layers would be averaged."""
    model = Chain()
    with model.init_scope():
        model.l1, model.l2 = Dense(4, "f", 1), Dense(4, "f", 2)
    for p in model.params():
        if not p.is_initialized:
            p.initialize((4, 4))
        p.grad = np.full(p.shape, comm.rank, p.dtype)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    (model.l1 if comm.rank == 0 else model.l2).disable_update()
    text = "rank 1: /l1/W (4, 4) float32 instead of /l1/W (4, 4) float32 frozen"
    if comm.size > 2:
        text = text.replace("rank 1", "ranks 1, 2" if comm.size == 3 else "ranks 1, 2, 3")
    all_raise(comm, CommunicatorError, text, optimizer.update)
    params = [entry for entry in model.namedparams() if entry[1].update_rule.enabled]
    all_raise(comm, CommunicatorError, "the same parameters", lambda: comm.weighted_mean_grad(params, False, None))


@several
def check_two_models_in_another_order(comm):
    """As a GAN has them: equal shapes, reduced in another order on rank 0."""
    models = {}
    for name in ("generator", "discriminator"):
        models[name] = Chain()
        with models[name].init_scope():
            setattr(models[name], name, Parameter(np.zeros(3, "f")))
        getattr(models[name], name).grad = np.full(3, comm.rank, "f")
    first = "generator" if comm.rank == 0 else "discriminator"
    text = "/discriminator (3,) float32 instead of /generator (3,) float32"
    all_raise(comm, CommunicatorError, text, lambda: comm.multi_node_mean_grad(models[first]))
    text = "the same optimizer on every rank, but these differ from rank 0"
    both = {name: create_multi_node_optimizer(optimizers.SGD().setup(model), comm) for name, model in models.items()}
    for optimizer in both.values():
        optimizer._is_synchronized = True
    all_raise(comm, CommunicatorError, text, both[first].update)


def reductions(comm, model, value):
    model.W.grad = np.full(model.W.shape, value, np.float32)
    reduction = Reduction(comm, model)

    def reduce():
        reduction.start()
        reduction.wait()

    return reduce


def generic_evaluators(comm, model, value):
    rows = [(np.ones(1, np.float32), np.int32(0))] * 2
    made = GenericMultiNodeEvaluator(comm, SerialIterator(rows, 2, repeat=False, shuffle=False), model)
    made.calc_local = lambda *args: value
    return made.evaluate


def multi_node_iterators(comm, model, value):
    iterator = create_multi_node_iterator(SerialIterator([value] * 2, 1), comm)
    return lambda: next(iterator)


def averages_of_statistics(comm, model, value):
    average = AverageStatistics(comm, model)
    return lambda: average(None)


def recalibrations(comm, model, value):
    rows = [(np.full(2, value + k, np.float32),) for k in range(2 * comm.size)]
    recalibrate = RecalibrateStatistics(
        comm, model, lambda: SerialIterator(rows, len(rows), rank=comm.rank, size=comm.size, seed=0), 1
    )
    return lambda: recalibrate(None)


@several
def check_what_ranks_use_together_in_another_order(comm):
    """Two things of equal shapes: nothing but their order tells them apart, and sums of both belong to none."""
    for make, text in [
        (reductions, "start number 3 of reduction 2 of the communicator instead of start number 3 of reduction 1"),
        (generic_evaluators, "gather_obj of generic evaluator 1"),
        (multi_node_iterators, "agree of multi-node iterator 1"),
        (averages_of_statistics, "the same average of running statistics on every rank"),
        (recalibrations, "the same recalibration on every rank"),
    ]:
        models = [Chain(), Chain()]
        for model in models:
            with model.init_scope():
                model.W, model.bn = Parameter(np.zeros(3, "f")), BatchNormalization(2)
            model.forward = model.bn.forward
        both = [make(comm, model, value) for value, model in enumerate(models, 1)]
        for use in both * 2:
            use()
        all_raise(comm, CommunicatorError, text, both[comm.rank == comm.size - 1])


@several
def check_steps_that_differ(comm):
    """As after a snapshot that only one rank has loaded."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    optimizer.update()
    optimizer.t = 70 if comm.rank == 0 else 1
    all_raise(comm, CommunicatorError, "expected the same step on every rank", optimizer.update)
    optimizer.t = 1
    optimizer.update()
    assert optimizer.t == 2


@several
def check_hyperparameters_that_differ(comm):
    odd = comm.rank == comm.size - 1
    for change, text in [
        (lambda o: setattr(o, "lr", 0.2 if odd else 0.1), "lr 0.2 instead of lr 0.1"),
        (lambda o: setattr(o, "momentum", np.float32(0.5) if odd else 0.9), "momentum 0.5 instead of momentum 0.9"),
        (lambda o: o.set_loss_scale(8.0 if odd else None), "loss scale 8.0 instead of loss scale None"),
        (lambda o: o.add_hook(optimizers.WeightDecay(0.5 if odd else 0.25)), "WeightDecay"),
        (lambda o: o.add_hook(optimizers.GradientClipping(1.0)) if odd else None, "hook GradientClipping"),
        (lambda o: setattr(o.target.l1.W.update_rule.hyperparam, "lr", 3 if odd else 2), "lr 3.0 instead of"),
    ]:
        model = gradients_of(comm, np.float64)
        actual = optimizers.MomentumSGD(lr=0.1, momentum=0.9).setup(model)
        optimizer = create_multi_node_optimizer(actual, comm)
        optimizer.update()
        before = [p.array.copy() for p in model.params()]
        change(actual)
        all_raise(comm, CommunicatorError, text, optimizer.update)
        for p, old in zip(model.params(), before):
            same(p.array, old)
    kinds = optimizers.SGD if odd else optimizers.Adam
    optimizer = create_multi_node_optimizer(kinds().setup(gradients_of(comm, np.float64)), comm)
    all_raise(comm, CommunicatorError, "optimizer SGD instead of optimizer Adam", optimizer.update)


@several
def check_equal_numbers_of_other_types_do_not_differ(comm):
    """One rank may have said 1 and another 1.0, or at another time."""
    batch, model = next(batches()), Net()
    optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=1).setup(model), comm)
    for number in (1, 1.0, np.float32(1), np.int8(1), np.array(1.0)):
        if comm.rank == 0:
            optimizer.hyperparam.lr = number
            model.l1.b.update_rule.hyperparam.lr = number
        else:
            optimizer.hyperparam.lr = model.l1.b.update_rule.hyperparam.lr = 1
        optimizer.update(model, *batch)


@several
def check_numbers_in_arrays_are_compared(comm):
    """Also where the array stays and its element changes."""
    batch = next(batches())
    for text, change in [
        ("rate 0.5", lambda hook, lr: setattr(hook, "rate", np.array(0.5))),
        ("rate 0.75", lambda hook, lr: hook.rate.__setitem__((), 0.75)),
        ("lr 0.5", lambda hook, lr: lr.__setitem__(0, 0.5)),
    ]:
        model, hook = Net(), optimizers.WeightDecay(np.array(0.25))
        optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(lr=np.array([0.01])).setup(model), comm)
        optimizer.add_hook(hook)
        for _ in range(2):
            optimizer.update(model, *batch)
        if comm.rank == comm.size - 1:
            change(hook, optimizer.lr)
        raises(CommunicatorError, text, functools.partial(optimizer.update, model, *batch))


class Watching:
    """A hook of the user's own."""

    def __call__(self, optimizer):
        pass


@several
def check_a_hook_in_the_memory_of_another_is_another(comm):
    """Python gives the address of what is gone to what comes."""
    batch, model = next(batches()), Net()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.01).setup(model), comm)
    optimizer.add_hook(Watching(), name="watch")
    optimizer.update(model, *batch)
    if comm.rank == comm.size - 1:
        hooks = optimizer.actual_optimizer._hooks.pre
        place = id(hooks.pop("watch"))
        made = [optimizers.GradientClipping(0.1)]
        while id(made[-1]) != place and len(made) < 1000:
            made.append(optimizers.GradientClipping(0.1))
        hooks["watch"] = made[-1]
    raises(CommunicatorError, "hook GradientClipping", functools.partial(optimizer.update, model, *batch))


@several
def check_zero_fill_and_hooks_of_the_users_own(comm):
    odd = comm.rank == comm.size - 1
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm, zero_fill=odd)
    all_raise(comm, CommunicatorError, "zero_fill", optimizer.update)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    seen = []
    if odd:  # watching on one rank is nobody's business
        optimizer.add_hook(lambda inner: seen.append(inner.t), name="watch")
    optimizer.update()
    assert seen == ([0] if odd else [])


def _halve(optimizer):
    for p in optimizer.target.params():
        p.grad *= 0.5


class _HalveEach:
    name, call_for_each_param = "each", True

    def __call__(self, rule, param):
        param.array[...] *= 0.5


@several
def check_a_hook_of_the_users_own_that_changes_something_on_one_rank(comm):
    """The ranks would drift apart; a hook that all ranks have, or that only watches, is right."""
    odd = comm.rank == comm.size - 1
    for add, text in [
        (lambda o: o.add_hook(_halve, "half"), "hooks of the program's own: _halve (called"),
        (lambda o: o.add_hook(_HalveEach()), "own: _HalveEach ("),
        (lambda o: o.add_hook(_HalveEach(), timing="post"), "/l1/W on rank"),
        (lambda o: o.target.l1.W.update_rule.add_hook(lambda rule, p: p.grad.fill(0), "rule"), "> of /l1/W ("),
    ]:  # fmt: skip
        for everywhere in (True, False):
            model = gradients_of(comm, np.float64)
            optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
            if odd or everywhere:
                add(optimizer)
            optimizer.update()
            if everywhere:
                for _ in range(4):
                    optimizer.update()
            else:
                all_raise(comm, CommunicatorError, text, optimizer.update)


@several
def check_hooks_with_another_name_on_each_rank(comm):
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(gradients_of(comm, np.float64)), comm)
    optimizer.add_hook(_halve, f"half of {comm.rank}")
    for _ in range(4):
        optimizer.update()


@several
def check_what_makes_ranks_drift_apart(comm):
    """Each changes parameters on one rank, or by another amount on each."""
    rng = np.random.default_rng(comm.rank)

    class Decay(optimizers.WeightDecay):
        def __call__(self, rule, p):
            p.grad[...] += comm.rank

    class Rule(UpdateRule):
        def update_core(self, p):
            p.array[...] -= (1 + comm.rank) * p.grad

    def noise(optimizer):
        for p in optimizer.target.params():
            p.grad[...] += rng.standard_normal(p.shape)

    def in_the_sixth_step(optimizer):
        if optimizer.t == 5 and comm.rank == 1:
            _halve(optimizer)

    def own_rule(optimizer):
        optimizer.target.l1.W.update_rule = Rule()

    for change in (
        lambda o: o.add_hook(noise), lambda o: o.add_hook(in_the_sixth_step), lambda o: o.add_hook(Decay(0.5)),
        own_rule,
        lambda o: o.target.l1.W.update_rule.state["v"].fill(comm.rank),
        lambda o: o.target.l1.b.array.fill(comm.rank),
    ):  # fmt: skip
        model = gradients_of(comm, np.float64)
        optimizer = create_multi_node_optimizer(optimizers.MomentumSGD().setup(model), comm)
        optimizer.update()
        change(optimizer)
        text = "expected the same parameters on every rank after update "
        all_raise(comm, CommunicatorError, text, lambda o=optimizer: [o.update() for _ in range(9)])


@several
def check_a_parameter_that_some_ranks_do_not_update(comm):
    """Whether it is frozen there, or has lost its rule."""
    for change in (lambda p: setattr(p, "update_rule", None), lambda p: setattr(p.update_rule, "enabled", False)):
        model = gradients_of(comm, np.float64)
        optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
        if comm.rank == comm.size - 1:
            change(model.l1.W)
        all_raise(comm, CommunicatorError, "the same step on every rank", optimizer.update)


@several
def check_a_single_element_that_has_drifted(comm):
    """Each look is at other elements: within as many as a sixteenth of them, all have been seen."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    for _ in range(6):
        optimizer.update()
    num_steps = 8 * (model.l1.W.size // 16 + 2) * 2  # of two parameters in turn
    for k in (1, model.l1.W.size // 2, model.l1.W.size - 1):
        value = model.l1.W.array.flat[k]
        model.l1.W.array.flat[k] += comm.rank
        text = "expected the same parameters on every rank after update "
        all_raise(comm, CommunicatorError, text, lambda: [optimizer.update() for _ in range(num_steps)])
        model.l1.W.array.flat[k] = value
        comm.bcast_data(model)


class TwoNormalizations(Chain):
    """Two batch normalizations of one size."""

    def __init__(self, comm):
        super().__init__()
        with self.init_scope():
            self.one = MultiNodeBatchNormalization(3, comm)
            self.other = MultiNodeBatchNormalization(3, comm)


@several
def check_batch_normalizations_that_differ(comm):
    """One row of statistics looks like another: they say whose they are, and what becomes of them."""
    odd = comm.rank == comm.size - 1
    x = np.arange(12, dtype=np.float32).reshape(4, 3) + comm.rank
    words = "the same batch normalization"
    for options in ({"eps": 1e-3}, {"decay": 0.5}):
        link = MultiNodeBatchNormalization(3, comm, **(options if odd else {}))
        all_raise(comm, CommunicatorError, words, functools.partial(link, x))
    link = MultiNodeBatchNormalization(3, comm)
    all_raise(comm, CommunicatorError, words, lambda: link(x, finetune=odd))
    all_raise(comm, CommunicatorError, words, lambda: link(x.astype(np.float64) if odd else x))
    both = TwoNormalizations(comm)
    names = ("other", "one") if odd else ("one", "other")
    all_raise(comm, CommunicatorError, words, lambda: [both[name](x) for name in names])
    for name in ("one", "other"):
        both[name](x)
    alone = [MultiNodeBatchNormalization(3, comm) for _ in range(2)]
    all_raise(comm, CommunicatorError, words, lambda: [link(x) for link in (alone[::-1] if odd else alone)])


def hooked(link, is_odd):
    if is_odd:
        link.add_hook(SpectralNormalization(use_gamma=False))
    return link


@several
def check_constants_of_links_that_differ(comm):
    """Their mean gradient is that of no network. What all ranks change later is right, whenever each looks again."""
    odd = comm.rank == comm.size - 1
    x = np.arange(32, dtype=np.float32).reshape(1, 8, 2, 2) / 7
    for make, text in [
        (lambda: BatchNormalization(8, eps=1e-3 if odd else 1e-5), "/eps 0.001 instead of /eps 1e-05"),
        (lambda: BatchNormalization(8, decay=0.5 if odd else 0.9), "/decay 0.5 instead of /decay 0.9"),
        (lambda: MultiHeadAttention(8, 4 if odd else 2), "/n_heads 4 instead of /n_heads 2"),
        (lambda: Maxout(32, *((2, 4) if odd else (4, 2))), "/pool_size 4 instead of /pool_size 2"),
        (lambda: GroupNormalization(4 if odd else 2, 8), "/groups 4 instead of /groups 2"),
        (lambda: Convolution2D(8, 2, 1, 2 if odd else 1), "/stride (2, 2) instead of /stride (1, 1)"),
        (lambda: hooked(Convolution2D(8, 2, 1), odd), "hook SpectralNormalization"),
    ]:
        link = make()
        data = x.reshape(1, 4, 8) if isinstance(link, MultiHeadAttention) else x
        optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(link), comm)
        all_raise(comm, CommunicatorError, text, lambda: optimizer.update(lambda: ops.sum(link(data))))  # noqa: B023
    link = BatchNormalization(8)
    if odd:
        link.add_hook(TimerHook())  # which changes nothing
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(link), comm)
    for step in range(3):
        optimizer.update(lambda: ops.sum(link(x) * x))
        link.eps, link.decay = 1e-4 * step, 0.5
        if odd:
            link.add_persistent(f"count{step}", step)


@several
def check_parameters_that_came_back_together(comm):
    """What one rank changes, and then gives to all, is right."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    optimizer.update()
    model.l1.W.array[...] += comm.rank
    optimizer.update()
    comm.bcast_data(model)
    for _ in range(9):
        optimizer.update()


@several
def check_parameters_of_each_rank_that_nothing_updates(comm):
    for freeze in (lambda p: setattr(p, "update_rule", None), lambda p: setattr(p.update_rule, "enabled", False)):
        model = gradients_of(comm, np.float64)
        optimizer = create_multi_node_optimizer(optimizers.SGD(1e-3).setup(model), comm)
        freeze(model.l1.W)
        optimizer.update()
        model.l1.W.array[...] = comm.rank
        for _ in range(9):
            optimizer.update()


@several
def check_parameters_that_each_rank_perturbs_within_a_step(comm):
    """Noise of each rank's own is right that a hook takes away before the update, but for rounding."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD(1e-3).setup(model), comm)
    rng, noise = np.random.default_rng(comm.rank), {}

    def loss():
        for p in model.params():
            noise[p] = rng.standard_normal(p.shape)
            p.array[...] += noise[p]
        return ops.sum(model.l1.W * model.l1.W)

    def restore(inner):
        for p in model.params():
            p.array[...] -= noise[p]

    optimizer.add_hook(restore)
    for _ in range(9):
        optimizer.update(loss)


@several
def check_own_hooks_where_gradients_are_those_of_each_rank(comm):
    """With local steps a hook may have something to do on one rank only, such as to clip."""
    model = gradients_of(comm, np.float64)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm, local_steps=2)
    optimizer.add_hook(_halve if comm.rank else lambda inner: None, "half")
    for _ in range(6):
        optimizer.update()


@several
def check_persistent_values_that_differ(comm):
    odd = comm.rank == comm.size - 1
    model = gradients_of(comm, np.float64)
    if odd:
        model.l1.add_persistent("extra", 3)
    all_raise(comm, CommunicatorError, "the same persistent values", lambda: comm.bcast_data(model))
    model = gradients_of(comm, np.float64)
    model.l1.add_persistent("mean", np.zeros(3 + odd))
    text = "persistent value /l1/mean as an array of shape (3,) and float64, as on rank 0, got an array of shape (4,)"
    all_raise(comm, ValueError, text, lambda: comm.bcast_data(model))
    model = gradients_of(comm, np.float64)
    model.l1.add_persistent("mean", np.full(3, comm.rank) if comm.rank == 0 else None)
    comm.bcast_data(model)
    same(model.l1.mean, np.zeros(3, np.int64))


class Branches(Chain):
    """Initialises its layers in the order that it is told."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        with self.init_scope():
            self.l1, self.l2 = Dense(3, np.float64, 1), Dense(3, np.float64, 2)

    def forward(self, x, t):
        import dbrdist.core.tape.ops as ops
        from dbrdist.core.tape.variable import Variable

        for name in self.order:
            x = self[name](Variable(x) if isinstance(x, np.ndarray) else x)
        return ops.sum(x * x)


@several
def check_late_parameters_in_another_order(comm):
    order = ["l2", "l1"] if comm.rank == 1 else ["l1", "l2"]
    model = Branches(order)
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    all_raise(
        comm,
        CommunicatorError,
        "rank 0 came to /l1/W with shape (5, 3) of float64, rank 1 to /l2/W with shape (5, 3)",
        lambda: optimizer.update(model, *next(batches())),
    )


def check_a_byte_order_is_no_type(comm):
    for dtype in (">f4", "<f4", ">i8", ">f2"):
        kind = dtype if comm.rank % 2 else dtype.replace(">", "<")
        total = sum(array_of(r, (5,), np.float64) for r in range(comm.size))
        result = comm.allreduce(array_of(comm.rank, (5,), kind))
        assert result.dtype == np.dtype(dtype).newbyteorder("=")
        assert (result == total).all()
        large = np.full(40_000, comm.rank + 1, kind)
        assert (comm.allreduce(large) == comm.size * (comm.size + 1) // 2).all()
        for r, x in enumerate(comm.allgather(array_of(comm.rank, (5,), kind))):
            assert (x == array_of(r, (5,))).all()


def check_narrow_gradients_keep_large_and_small_numbers(comm):
    part = comm.split(0, comm.rank)
    part.set_config("allreduce_grad_dtype", "float16")
    for value in (70000.0, 1e-8, 3e30, 1e-30, 0.1):
        model = gradients_of(comm, np.float32)
        for p in model.params():
            p.grad[...] = value * (1 + comm.rank)
        part.multi_node_mean_grad(model)
        expected = value * (1 + comm.size) / 2
        for p in model.params():
            np.testing.assert_allclose(p.grad, expected, rtol=1e-3)
    model.l1.W.grad[...] = np.nan
    part.multi_node_mean_grad(model)
    assert np.isnan(model.l1.W.grad).all()
    part.finalize()


def check_nothing_runs_after_finalize(comm):
    part = comm.split(0, comm.rank)
    part.allreduce(array_of(0))
    part.finalize()
    part.finalize()
    for verb in (part.barrier, lambda: part.allreduce(array_of(0)), lambda: part.send(array_of(0), part.rank, 0)):
        try:
            verb()
        except CommunicatorError as e:
            assert "this communicator was finalized at" in str(e)
            assert "disagreement_contract.py:" in str(e)
        else:
            raise AssertionError("expected CommunicatorError")


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
