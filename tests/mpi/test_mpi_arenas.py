"""Gradients in memory that the ranks of a host share, on real processes; see conftest.py for how to run it."""

import copy
import errno
import gc
import os
import weakref

import ml_dtypes
import numpy as np
import pytest

import dbrdist.core.tape.ops as ops
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients import shared_gradients
from dbrdist.comm.gradients.reduction_plan import key_of
from dbrdist.comm.transport import hosts
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(7,), (33, 57), (1,), (129,)]


@pytest.fixture(params=["one host", "two hosts", "hosts of different sizes", "a host each"])
def comm(request, monkeypatch):
    """All ranks with memory shared however small the arrays; hosts are pretended by what "local" means."""
    color = {
        "one host": lambda rank, size: 0,
        "two hosts": lambda rank, size: rank // 2,
        "hosts of different sizes": lambda rank, size: rank == 0,
        "a host each": lambda rank, size: rank,
    }[request.param]
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(int(color(c.rank, c.size)), c.rank))
    made = create_communicator("flat", shared_memory=True)
    yield made
    made.finalize()


def model_of(dtype=np.float32, shapes=SHAPES):
    model = Chain()
    with model.init_scope():
        for i, shape in enumerate(shapes):
            setattr(model, f"p{i}", Parameter(np.zeros(shape, dtype)))
    return model


def gradient(rank, i, shape, dtype, step=0):
    return np.random.default_rng([rank, i, step]).normal(size=shape).astype(dtype)


def fill(comm, model, step=0):
    for i, p in enumerate(model.params()):
        p.grad = gradient(comm.rank, i, p.shape, p.dtype, step)


def plan_of(comm, model):
    return comm.reducer.plans[key_of(list(model.namedparams()))]


def check_means(comm, model, step=0, factors=None, rtol=1e-6):
    factors = [1 / comm.size] * comm.size if factors is None else factors
    for i, p in enumerate(model.params()):
        terms = [f * gradient(r, i, p.shape, p.dtype, step).astype(np.float64) for r, f in enumerate(factors)]
        np.testing.assert_allclose(p.grad.astype(np.float64), sum(terms), rtol=rtol, atol=rtol)


def in_place(comm, model):
    """Whether the gradients were added where they lie."""
    return plan_of(comm, model).shared is not None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
def test_means_of_every_type(comm, dtype):
    model = model_of(dtype)
    for step in range(3):
        model.cleargrads()
        fill(comm, model, step)
        comm.multi_node_mean_grad(model)
        check_means(comm, model, step, rtol={2: 1e-2, 4: 1e-6, 8: 1e-14}[np.dtype(dtype).itemsize])
        assert in_place(comm, model) == (comm.size > 1)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-9])
def test_sums_of_hosts_travel_in_the_configured_type(comm, monkeypatch, dtype, size):
    """And come back in the gradients' own, whatever their size; where there is one host nothing travels."""
    comm.set_config("allreduce_grad_dtype", dtype)
    comm.reducer.lay_cable()  # which measures in the type of the sums
    model, sent, between = model_of(), [], comm.reducer.reduce_between

    def noted(call, x, codec, divisor):
        sent.append(codec.wire_dtype(x.dtype))
        between(call, x, codec, divisor)

    monkeypatch.setattr(comm.reducer, "reduce_between", noted)
    for i, p in enumerate(model.params()):
        p.grad = size * np.abs(gradient(comm.rank, i, p.shape, p.dtype))
    comm.weighted_mean_grad(list(model.namedparams()), True, comm.rank + 1)
    assert set(sent) <= {dtype}
    assert comm.inter_size == 1 or any(comm.allgather_obj(sent))
    for i, p in enumerate(model.params()):
        terms = [size * (r + 1) * np.abs(gradient(r, i, p.shape, np.float64)) for r in range(comm.size)]
        expected = sum(terms) / sum(range(comm.size + 1))
        np.testing.assert_allclose(p.grad, expected, rtol=2 * float(ml_dtypes.finfo(dtype).eps), atol=1e-7 * size)


def test_sums_run_in_the_order_of_ranks_and_are_narrowed_once():
    comm = create_communicator("flat", shared_memory=True)
    for dtype in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16):
        model = model_of(dtype)
        fill(comm, model)
        comm.multi_node_mean_grad(model)
        for i, p in enumerate(model.params()):
            total = gradient(0, i, p.shape, dtype).astype(np.float32)
            for rank in range(1, comm.size):
                total = total + gradient(rank, i, p.shape, dtype).astype(np.float32)
            expected = (total / np.float32(comm.size)).astype(dtype)
            np.testing.assert_array_equal(p.grad.view(np.uint8), expected.view(np.uint8))
    comm.finalize()


def test_ranks_weigh_their_examples(comm):
    model = model_of()
    fill(comm, model)
    counts = [3 * k for k in range(comm.size)] if comm.size > 1 else [2]
    comm.weighted_mean_grad(list(model.namedparams()), True, counts[comm.rank])
    check_means(comm, model, factors=[n / sum(counts) for n in counts])


def test_nothing_is_copied(comm):
    """The gradient that backward writes is the memory that the others read."""
    model = model_of()
    fill(comm, model)
    comm.multi_node_mean_grad(model)
    places = [p.node.view.ctypes.data for p in model.params()]
    fill(comm, model, 1)
    comm.multi_node_mean_grad(model)
    assert [p.grad.ctypes.data for p in model.params()] == places
    if comm.size > 1:
        raw = shared_gradients.segment_for(model.p0.slot.arena, shared_gradients.GRADIENTS).raw
        assert raw.ctypes.data <= places[0] < raw.ctypes.data + raw.nbytes


def test_a_parameter_that_left_its_arena_on_one_rank(comm):
    model = model_of()
    for step in range(3):
        fill(comm, model, step)
        if step == 1 and comm.rank == comm.size - 1:
            model.p1.leave_arena()
        comm.multi_node_mean_grad(model)
        check_means(comm, model, step)
        assert in_place(comm, model) == (comm.size > 1)


def test_models_take_turns_and_communicators_share_a_model(comm):
    one, two, half = model_of(), model_of(np.float64, [(5, 5)]), comm.split(comm.rank % 2, comm.rank)
    for step in range(3):
        fill(comm, one, step)
        fill(comm, two, step)
        comm.multi_node_mean_grad(two)
        comm.multi_node_mean_grad(one)
        check_means(comm, one, step)
        check_means(comm, two, step, rtol=1e-14)
        fill(comm, one, step)
        half.multi_node_mean_grad(one)
        mine = [float(r % 2 == comm.rank % 2) / half.size for r in range(comm.size)]
        check_means(comm, one, step, mine)
    half.finalize()


def test_gradients_that_are_missing(comm):
    model = model_of()
    fill(comm, model)
    if comm.rank == 0:
        model.p1.cleargrad()
    model.p3.cleargrad()
    comm.multi_node_mean_grad(model)
    assert model.p3.grad is None
    expected = sum(gradient(r, 1, (33, 57), np.float64) for r in range(1, comm.size)) / comm.size
    if comm.size > 1:
        np.testing.assert_allclose(model.p1.grad, np.broadcast_to(expected, (33, 57)), rtol=1e-5, atol=1e-6)


def test_parameters_of_one_array(comm):
    model = model_of()
    with model.init_scope():
        model.twin = copy.copy(model.p1)
    fill(comm, model)
    comm.multi_node_mean_grad(model)
    check_means(comm, model)


def test_a_copy_has_its_own_gradients(comm):
    model = model_of()
    fill(comm, model)
    comm.multi_node_mean_grad(model)
    copied = copy.deepcopy(model)
    for p in copied.params():
        p.grad = np.full(p.shape, 5, p.dtype)
    check_means(comm, model)
    comm.multi_node_mean_grad(copied)
    assert all((p.grad == 5).all() for p in copied.params())
    check_means(comm, model)


def test_training_equals_one_process(comm):
    """Momentum with weights decayed, the gaps of the arena included."""
    model, alone = model_of(np.float64), model_of(np.float64)
    shared = create_multi_node_optimizer(optimizers.MomentumSGD(lr=0.1), comm).setup(model)
    single = optimizers.MomentumSGD(lr=0.1).setup(alone)
    for optimizer in (shared, single):
        optimizer.add_hook(optimizers.WeightDecay(0.01))

    def loss(model, scale):
        return sum(ops.sum((p - scale) * (p - scale)) for p in model.params())

    for step in range(4):
        shared.update(loss, model, comm.rank + step)
        single.update(loss, alone, (comm.size - 1) / 2 + step)
    for p, q in zip(model.params(), alone.params()):
        np.testing.assert_allclose(p.array, q.array, rtol=1e-12)
    assert model.p0.slot.arena.grad[7] == 0  # the gap behind seven elements


@pytest.mark.parametrize("where", ["no memory", "no way to another's"])
def test_a_rank_that_cannot_share_makes_all_send_messages(monkeypatch, capfd, where):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "no room on purpose")

    comm = create_communicator("flat", shared_memory=True)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shared_gradients, "Segment" if where == "no memory" else "attach", refuse)
    model = model_of()
    for step in range(2):
        fill(comm, model, step)
        comm.multi_node_mean_grad(model)
        check_means(comm, model, step)
    text = capfd.readouterr().err
    expected = f"because on rank {comm.size - 1}: [Errno 12] no room on purpose"
    assert text.count(expected) == (comm.rank == 0 and comm.size > 1)
    assert in_place(comm, model) is False
    comm.finalize()


def test_small_models_send_messages():
    comm = create_communicator("flat")
    small, large = model_of(), model_of(shapes=[(1 << 14,)])
    for model in (small, large):
        fill(comm, model)
        comm.multi_node_mean_grad(model)
        check_means(comm, model)
    assert not in_place(comm, small)
    assert in_place(comm, large) == (comm.size > 1)
    comm.finalize()


def test_a_finalized_communicator_keeps_no_model():
    comm = create_communicator("flat", shared_memory=True)
    model = model_of()
    fill(comm, model)
    comm.multi_node_mean_grad(model)
    kept = weakref.ref(model.p0)
    comm.finalize()
    del model
    assert kept() is None


def test_memory_goes_with_the_model():
    comm = create_communicator("flat", shared_memory=True)

    def num_maps():
        with open("/proc/self/maps") as lines:
            return sum("memfd:dbrdist" in line for line in lines)

    gc.collect()  # what other tests have left
    before, files = num_maps(), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        model = model_of()
        fill(comm, model, step)
        comm.multi_node_mean_grad(model)
        del model
    comm.reducer.plans.clear()
    comm.barrier()
    assert num_maps() == before
    assert len(os.listdir("/proc/self/fd")) == files
    comm.finalize()
