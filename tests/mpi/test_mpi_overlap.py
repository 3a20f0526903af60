"""Reductions that begin while backward runs, on real processes; see conftest.py for how to run it."""

import copy
import gc
import itertools
import time
import weakref

import numpy as np
import pytest

import dbrdist.core.tape.ops as ops
from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients import bandwidth, overlap
from dbrdist.comm.gradients.reduction_plan import key_of
from dbrdist.comm.transport import hosts
from dbrdist.core.array.config import force_backprop_mode, no_backprop_mode
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Variable
from tests.comm.training_contract import Dense

WIDTHS = [6, 17, 9, 4]


@pytest.fixture(params=["messages", "one host", "two hosts", "float16"])
def comm(request, monkeypatch):
    """All ranks, with buckets of 256 bytes."""
    monkeypatch.setattr(bandwidth, "bucket_bytes", lambda comm: 256)
    if request.param == "two hosts":
        monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(c.rank // 2, c.rank))
    uses = request.param in ("one host", "two hosts")
    made = create_communicator("flat", shared_memory=uses, overlap=True)
    made.set_config("allreduce_grad_dtype", "float16" if request.param == "float16" else None)
    yield made
    made.finalize()


class Layers(Chain):
    """Dense layers; ``skip`` leaves some out of the graph."""

    def __init__(self, widths=WIDTHS, dtype=np.float64):
        super().__init__()
        with self.init_scope():
            for i, (a, b) in enumerate(itertools.pairwise(widths)):
                layer = Dense(b, dtype, i)
                layer.W.initialize((a, b))
                setattr(self, f"l{i}", layer)
            self.unused = Parameter(np.ones((5, 7), dtype))
            self.tail = Link()  # the first to travel
        with self.tail.init_scope():
            self.tail.w = Parameter(np.full(widths[-1], 0.5, dtype))

    @property
    def extra(self):
        return self.tail.w

    def forward(self, x, t, with_extra=False):
        h = self.l0(x)
        h = self.l2(F.relu(self.l1(F.relu(h))))
        if with_extra:
            h = h * ops.broadcast_to(self.extra, h.shape)
        d = h - t
        return ops.sum(d * d) * (1.0 / len(x))


def data(rank, step, n=5):
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(n, WIDTHS[0])), rng.normal(size=(n, WIDTHS[-1]))


def reference(model, losses, num_steps, lr=0.1):
    """One process with the mean of all ranks' losses: plain gradient descent, parameter by parameter."""
    model = copy.deepcopy(model)
    for step in range(num_steps):
        model.cleargrads()
        total = 0
        for weight, loss in losses(model, step):
            total = loss * weight + total
        total.backward()
        for p in model.params():
            if p.grad is not None and (p.update_rule is None or p.update_rule.enabled):
                p.array = p.array - lr * p.grad
    return model


def train(comm, model, loss, num_steps=4, num_samples=None, setup=None):
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    if setup is not None:
        setup(model)
    started = []

    def forward(step):
        result = loss(model, comm.rank, step)
        while optimizer._steps._plan is not None and optimizer._steps.overlap() and optimizer._steps.poll() is None:
            pass  # until the headers are there: buckets travel as early as they can
        return result

    for step in range(num_steps):
        counted = None if num_samples is None else num_samples(comm.rank, step)
        optimizer.update(forward, step, num_samples=counted)
        plan = optimizer._steps._plan
        if plan is not None and plan.overlap is not None:
            started.append(plan.overlap)
    return started


def equal(comm, model, expected):
    narrow = comm.get_config("allreduce_grad_dtype") is not None
    for (name, p), q in zip(model.namedparams(), expected.params()):
        np.testing.assert_allclose(
            p.array, q.array, rtol=2e-2 if narrow else 1e-9, atol=2e-3 if narrow else 1e-12, err_msg=name
        )


def everyone(comm, loss):
    return lambda model, step: [(1 / comm.size, loss(model, rank, step)) for rank in range(comm.size)]


def plain_loss(model, rank, step):
    return model(*data(rank, step))


def test_buckets_are_measured_on_hosts_of_different_sizes(monkeypatch, tmp_path):
    """A rank that takes no part between hosts has no times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(int(c.rank == c.size - 1 > 0), c.rank))
    comm = create_communicator("flat")
    sizes = comm.allgather_obj(bandwidth.bucket_bytes(comm))
    assert sizes == sizes[:1] * comm.size and 1 << 18 <= sizes[0] <= 1 << 25
    comm.finalize()


def test_training_equals_one_process(comm):
    model = Layers()
    expected = reference(model, everyone(comm, plain_loss), 4)
    used = train(comm, model, plain_loss)
    equal(comm, model, expected)
    assert len(used) == (4 if comm.size > 1 else 0)
    assert not used or len(used[0].buckets) > 5


def started_at_each_gradient(monkeypatch):
    """A list to which each complete gradient adds how many buckets have started by then."""
    seen = []
    ready = overlap.Overlap.ready

    def watch(self, node):
        ready(self, node)
        seen.append(self._num_started)

    monkeypatch.setattr(overlap.Overlap, "ready", watch)
    return seen


def test_buckets_travel_before_backward_ends(comm, monkeypatch):
    """When the first layer's gradients are complete, those of the last are under way, once the headers are there."""
    seen = started_at_each_gradient(monkeypatch)
    model = Layers()

    def loss(model, rank, step):
        y = plain_loss(model, rank, step)
        while comm.size > 1 and step and optimizer._steps.poll() is None:  # the others' headers come in their time
            pass
        return y

    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    for step in range(3):
        optimizer.update(lambda s=step: loss(model, comm.rank, s))
    if comm.size > 1:
        per_step = len(seen) // 2
        assert per_step == 6  # weights and biases of three layers; not those that nobody uses
        assert 0 < seen[-2] < len(optimizer._steps._plan.overlap.buckets)


def test_unused_parameters(comm):
    model = Layers()
    model.unused.grad = np.full((5, 7), 9.0)  # of an earlier pass: the step clears it
    train(comm, model, plain_loss)
    assert (model.unused.array == 1).all()


def test_a_parameter_that_is_used_twice(comm):
    def loss(model, rank, step):
        x, t = data(rank, step)
        return model(x, t) + model(x * 0.5, t)

    model = Layers()
    expected = reference(model, everyone(comm, loss), 4)
    train(comm, model, loss)
    equal(comm, model, expected)


def test_parameters_of_one_array(comm):
    def loss(model, rank, step):
        return plain_loss(model, rank, step) + ops.sum(model.twin * model.twin) * (rank + 1.0)

    model, alone = Layers(), Layers()
    for m in (model, alone):
        with m.init_scope():
            m.twin = copy.copy(m.l1.W)
    train(comm, model, loss, 1)
    alone.cleargrads()
    total = sum(loss(alone, rank, 0) * (1 / comm.size) for rank in range(comm.size))
    total.backward()
    change = 0.1 * (alone.l1.W.grad + alone.twin.grad)
    narrow = comm.get_config("allreduce_grad_dtype") is not None
    np.testing.assert_allclose(model.l1.W.array, alone.l1.W.array - change, rtol=2e-2 if narrow else 1e-9, atol=2e-3)


def test_frozen_parameters(comm):
    def freeze(model):
        model.l1.disable_update()

    model = Layers()
    before = model.l1.W.array.copy()
    frozen = copy.deepcopy(model)
    train(comm, model, plain_loss, setup=freeze)
    optimizers.SGD().setup(frozen)
    frozen.l1.disable_update()
    equal(comm, model, reference(frozen, everyone(comm, plain_loss), 4))
    np.testing.assert_array_equal(model.l1.W.array, before)


def test_freezing_between_steps(comm):
    model = Layers()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    for step in range(4):
        if step == 2:
            model.l2.disable_update()
            before = model.l2.W.array.copy()
        optimizer.update(lambda s=step: plain_loss(model, comm.rank, s))
    np.testing.assert_array_equal(model.l2.W.array, before)


def test_late_parameters(comm):
    model, shaped = Chain(), Chain()
    for chain in (model, shaped):
        with chain.init_scope():
            chain.l1, chain.l2 = Dense(9, np.float64, 1), Dense(4, np.float64, 2)

    def loss(model, rank, step):
        x, t = data(rank, step)
        d = model.l2(F.relu(model.l1(ops.reshape(x, x.shape)))) - t
        return ops.sum(d * d) * (1 / len(x))

    loss(shaped, 0, 0)
    expected = reference(shaped, everyone(comm, loss), 4)
    used = train(comm, model, loss)
    equal(comm, model, expected)
    assert len(used) == (3 if comm.size > 1 else 0)


def test_graphs_that_differ_between_ranks_and_steps(comm):
    def loss(model, rank, step):
        x, t = data(rank, step)
        return model(x, t, with_extra=(rank + step) % 2 == 0)

    model = Layers()
    expected = reference(model, everyone(comm, loss), 5)
    train(comm, model, loss, 5)
    equal(comm, model, expected)


def test_a_branch_that_gets_no_gradient(comm):
    """A function gives one of its inputs no gradient: nobody hears of the leaves behind it."""

    class Blocks(FunctionNode):
        def forward(self, inputs):
            return (inputs[0] + inputs[1],)

        def backward(self, indexes, grad_outputs):
            return grad_outputs[0], None

    def loss(model, rank, step):
        x, t = data(rank, step)
        blocked = Blocks().apply((model.l2.b, model.extra * 2.0))[0]
        return model(x, t) + ops.sum(blocked * blocked)

    model = Layers()
    expected = reference(model, everyone(comm, loss), 3)
    train(comm, model, loss, 3)
    equal(comm, model, expected)


def test_a_rule_that_goes_backward_itself(comm):
    """It computes its inner graph anew, as checkpoints do; the walk does not see which parameters that uses."""

    class Again(FunctionNode):
        def __init__(self, function):
            self.function = function

        def forward(self, inputs):
            self.retain_inputs((0,))
            with no_backprop_mode():
                return (self.function(Variable(inputs[0])).array,)

        def backward(self, indexes, grad_outputs):
            time.sleep(0.02 * (comm.size > 1))  # what travels too early arrives
            x = Variable(self.get_retained_inputs()[0].array)
            with force_backprop_mode():
                y = self.function(x)
            y.grad = np.asarray(grad_outputs[0].array)
            y.backward()
            return (Variable(x.grad),)

    def loss(model, rank, step):
        inner = Again(lambda v: ops.sum(v * model.w2) * (step + 1.0))
        return inner.apply((model.w0 * (rank + 1.0),))[0] + ops.sum(model.w1)

    model = Link()
    with model.init_scope():
        model.w0, model.w1, model.w2 = (Parameter(np.linspace(-1, i, 128)) for i in range(3))
    expected = reference(model, everyone(comm, loss), 3)
    train(comm, model, loss, 3)
    equal(comm, model, expected)


def test_ranks_weigh_their_examples_and_some_have_none(comm):
    def count(rank, step):
        return (rank + step) % 3 if comm.size > 2 else 1 + (rank + step) % 2

    def losses(model, step):
        counts = [count(rank, step) for rank in range(comm.size)]
        return [(n / sum(counts), model(*data(rank, step, n))) for rank, n in enumerate(counts) if n]

    model = Layers()
    expected = reference(model, losses, 5)
    train(comm, model, lambda m, rank, step: m(*data(rank, step, count(rank, step))), 5, count)
    equal(comm, model, expected)


def test_a_model_dies_with_its_last_reference(comm):
    gc.collect()
    gc.disable()
    try:
        model = Layers()
        train(comm, model, plain_loss, 3)
        kept = weakref.ref(model.extra)
        del model
        comm.reducer.plans.clear()
        assert kept() is None
    finally:
        gc.enable()


def test_models_take_turns(comm):
    one, two = Layers(), Layers([6, 5, 8, 4])
    expected = [reference(m, everyone(comm, plain_loss), 3) for m in (one, two)]
    updates = [create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(m) for m in (one, two)]
    for step in range(3):
        for optimizer, model in zip(updates, (one, two)):
            optimizer.update(lambda s=step, m=model: plain_loss(m, comm.rank, s))
    equal(comm, one, expected[0])
    equal(comm, two, expected[1])


def test_verbs_between_steps_and_within_forward(comm):
    def loss(model, rank, step):
        comm.allreduce(np.ones(3))
        return plain_loss(model, rank, step)

    model = Layers()
    expected = reference(model, everyone(comm, plain_loss), 3)
    train(comm, model, loss, 3)
    comm.barrier()
    equal(comm, model, expected)


def test_hooks_see_the_means(comm):
    model = Layers()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    optimizer.add_hook(optimizers.GradientClipping(0.01))
    for step in range(3):
        optimizer.update(lambda s=step: plain_loss(model, comm.rank, s))
        norm = np.sqrt(sum((p.grad**2).sum() for p in model.params()))
        assert norm < 0.0101
    same = comm.allgather(np.concatenate([p.array.ravel() for p in model.params()]))
    assert all((theirs == same[0]).all() for theirs in same)


def test_an_error_in_backward_is_raised(comm):
    if comm.size > 1:
        return  # it ends the job: tests/comm/test_arenas.py
    with pytest.raises(ZeroDivisionError):
        train(comm, Layers(), lambda *_: 1 / 0)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("num_bytes", [1, 256, 1 << 20])
def test_buckets_cover_a_run_once(size, num_bytes):
    class Stretch:
        data = np.zeros(size, np.float32)

        @staticmethod
        def layers():
            return []

    Stretch.size = size
    buckets = overlap.cut([Stretch], num_bytes)
    covered = np.zeros(size, int)
    for bucket in buckets:
        covered[bucket.begin : bucket.end] += 1
        assert bucket.begin < bucket.end
    assert (covered == 1).all()
    assert [b.end for b in buckets] == sorted((b.end for b in buckets), reverse=True)
    if len(buckets) > 1:  # what travels last is complete only when backward ends
        assert buckets[-1].end <= max(num_bytes // 4 // 8, 64)


def test_the_size_of_buckets_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    comm = create_communicator("flat")
    first = bandwidth.bucket_bytes(comm)
    assert 1 << 18 <= first <= 1 << 25
    assert len(set(comm.allgather_obj(first))) == 1
    monkeypatch.setattr(bandwidth, "fit", lambda *_: 1 / 0)
    comm.barrier()
    if comm.rank == 0:
        (file,) = (tmp_path / "dbrdist").iterdir()
        assert file.name.startswith("reduction-")
    assert bandwidth.bucket_bytes(comm) == first
    comm.finalize()


def test_overlap_is_off_within_one_host():
    comm = create_communicator("flat", shared_memory=True)
    model = Layers()
    train(comm, model, plain_loss, 2)
    plan = comm.reducer.plans[key_of(list(model.namedparams()))] if comm.size > 1 else None
    assert plan is None or plan.overlap is None
    comm.finalize()


class InReverse(Chain):
    """A chain of products whose parameters are registered in the order ``registered``, used as p0, p1, ..."""

    def __init__(self, registered, size=200):
        super().__init__()
        self.used = [f"p{i}" for i in range(len(registered))]
        rng = np.random.default_rng(3)
        values = {name: rng.uniform(0.9, 1.1, size) for name in self.used}
        with self.init_scope():
            for i in registered:
                setattr(self, f"p{i}", Parameter(values[f"p{i}"]))

    def forward(self, x, leave_out=(), twice=()):
        y = x
        for name in self.used:
            if name not in leave_out:
                y = ops.tanh(y * getattr(self, name))
        for name in twice:
            y = y * getattr(self, name)
        return ops.sum(y)


REGISTERED = {"reverse": [5, 4, 3, 2, 1, 0], "shuffled": [2, 0, 5, 3, 1, 4], "in order": [0, 1, 2, 3, 4, 5]}
USES = {
    "all": lambda rank, step: {},
    "unused": lambda rank, step: {"leave_out": ("p2",)},
    "used twice": lambda rank, step: {"twice": ("p5",)},
    "differs between ranks": lambda rank, step: {"leave_out": (f"p{(rank + step) % 6}",), "twice": (f"p{rank}",)},
}


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("registered", REGISTERED)
def test_the_order_of_registration_changes_no_result(comm, registered, uses):
    def loss(model, rank, step):
        x = np.random.default_rng([rank, step]).uniform(-1, 1, 200)
        return model(x, **USES[uses](rank, step))

    model = InReverse(REGISTERED[registered])
    expected = reference(model, everyone(comm, loss), 4)
    used = train(comm, model, loss)
    equal(comm, model, expected)
    if used:
        names = {p: name for name, p in model.namedparams()}
        order = [[names[p] for p in bucket.params] for bucket in used[0].buckets]
        assert comm.allgather_obj(order) == [order] * comm.size
        if uses == "all":  # a bucket may have two parameters: it waits for the one that is used first
            first = [min(int(name[2:]) for name in inside) for inside in order if inside]
            assert first == sorted(first, reverse=True)


@pytest.mark.parametrize("registered", REGISTERED)
def test_the_first_bucket_starts_before_the_end_of_any_backward(comm, monkeypatch, registered):
    """From the third step on, whatever the order of registration, when the last layer alone has its gradient."""
    seen = started_at_each_gradient(monkeypatch)
    model = InReverse(REGISTERED[registered])
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)

    def loss(step):
        y = model(np.full(200, 0.5 + comm.rank))
        while comm.size > 1 and step and optimizer._steps.poll() is None:  # the others' headers come in their time
            pass
        return y

    for step in range(4):
        del seen[:]
        optimizer.update(loss, step)
        if comm.size > 1 and step >= 2:
            assert len(seen) == 6 and 0 < seen[1] < seen[-2] < seen[-1]


def test_a_frozen_parameter_and_an_order_of_buckets(comm):
    model = InReverse(REGISTERED["reverse"])
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    expected = InReverse(REGISTERED["reverse"])
    optimizers.SGD().setup(expected)
    for m in (model, expected):
        m.p3.update_rule.enabled = False

    def loss(model, rank, step):
        return model(np.random.default_rng([rank, step]).uniform(-1, 1, 200))

    for step in range(4):
        optimizer.update(lambda s=step: loss(model, comm.rank, s))
    equal(comm, model, reference(expected, everyone(comm, loss), 4))


def test_rank_0_without_examples_gives_the_order_later(comm):
    model = InReverse(REGISTERED["reverse"])
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1), comm).setup(model)
    if comm.size == 1:
        return
    known = []
    for step in range(5):
        has = comm.rank > 0 or step >= 3
        optimizer.update(lambda: model(np.ones(200)), num_samples=int(has))
        known.append(step > 0 and optimizer._steps._plan.overlap._is_ordered)
    assert known == [False, False, False, True, True]
    same = comm.allgather(np.concatenate([p.array.ravel() for p in model.params()]))
    assert all((theirs == same[0]).all() for theirs in same)
