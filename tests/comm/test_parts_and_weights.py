"""Which parts of gradients go where, how large sums can be, and what compression sends: told to each part by itself."""

import contextlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import (
    codec,
    compression,
    create_communicator,
    evaluator,
    extensions,
    functions,
    late,
    reduction,
    run_threads,
)
from dbrdist.comm import model as models
from dbrdist.comm.datasets import Shard
from dbrdist.comm.primitives import Provider
from dbrdist.comm.reduction import Plan
from dbrdist.core.parameter import Parameter
from dbrdist.core.variable import Variable
from dbrdist.datasets.serial import SerialIterator
from tests.each import each

# ---- the plan of a reduction ----------------------------------------------------------------------------------------


class Verb:
    """A verb that notes whether all move bytes."""

    def __init__(self):
        self.num_bytes, self.kind, self.met, self.is_moving = 0, None, 0, False

    def meet_without_row(self):
        self.met += 1

    @contextlib.contextmanager
    def moving(self):
        self.is_moving = True
        yield
        self.is_moving = False


class Division:
    """Three ranks that have thirds of what they are asked for."""

    def __init__(self, releases):
        self.releases, self.released = releases, []

    def borders(self, number, begin, end):
        return [(end - begin) * k // 3 for k in range(4)]

    def release(self, run, begin, end, borders):
        self.released.append((run, begin, end, borders))


def plan_of(*sizes):
    params = [Parameter(np.zeros(size, dtype)) for size, dtype in sizes]
    for k, p in enumerate(params):
        p.grad = np.full(p.shape, k + 1, p.dtype)
    return Plan([(f"/{k}", p) for k, p in enumerate(params)]), params


@pytest.fixture
def reduced(monkeypatch):
    """What ``reduce_gradients`` was called with: sizes, first elements, and the rest."""
    found = []
    monkeypatch.setattr(
        reduction, "reduce_gradients",
        lambda comm, call, grads, *args: found.append(([g.size for g in grads], [g.ravel()[0] for g in grads], *args)),
    )  # fmt: skip
    return found


@each(is_shared=[True, False], is_only_one=[True, False], releases=[True, False], rank=[0, 2], whole=[True, False])
def test_each_rank_gets_its_part(reduced, is_shared, is_only_one, releases, rank, whole):
    """Of two runs, of 64 and 30 elements, or of a part of the second."""
    reduced.clear()
    plan, _params = plan_of((64, "f4"), (30, "f8"))
    division = plan.division = Division(releases)
    asked, call = [], Verb()
    if is_shared:
        plan.shared = SimpleNamespace(reduce_scatter=lambda *args: asked.append((call.is_moving, *args[2:])))
    comm = SimpleNamespace(rank=rank, _hosts=SimpleNamespace(is_only_one=is_only_one))
    sizes = [run.size for run in plan.runs]
    if whole:
        plan.reduce_scatter(comm, call, [0.5], 2.0)
        parts = [(0, 0, sizes[0]), (1, 0, sizes[1])]
    else:
        plan.reduce_part(comm, call, 1, 6, 27, [0.5], 2.0)
        parts = [(1, 6, 27)]
    borders = [division.borders(*part) for part in parts]
    if is_shared and is_only_one:
        own = [(n, begin + b[rank], begin + b[rank + 1]) for (n, begin, _), b in zip(parts, borders)]
        assert asked == [(True, [0.5], 2.0, own)] and reduced == []
    else:
        firsts = [plan.runs[n].grad[begin] for n, begin, _ in parts]
        assert reduced == [([end - begin for _, begin, end in parts], firsts, [0.5], 2.0, borders)] and asked == []
    expected = [(plan.runs[n], begin, end, b) for (n, begin, end), b in zip(parts, borders)]
    assert division.released == (expected if releases else [])
    assert call.met == (not whole) and not call.is_moving


@each(is_shared=[True, False])
def test_a_part_of_a_run_is_averaged_on_all_ranks(reduced, is_shared):
    reduced.clear()
    plan, _params = plan_of((64, "f4"), (30, "f8"))
    asked, call = [], Verb()
    plan.shared = SimpleNamespace(reduce=lambda *args: asked.append((call.is_moving, *args[2:]))) if is_shared else None
    plan.reduce_part("comm", call, 1, 6, 27, None, 2.0)
    assert asked == ([(True, None, 2.0, [(1, 6, 27)])] if is_shared else []) and call.met == 1
    assert reduced == ([] if is_shared else [([21], [2.0], None, 2.0)])


@each(is_shared=[True, False], one_by_one=[True, False], is_all=[True, False])
def test_gradients_are_averaged_where_they_lie_or_one_by_one(reduced, is_shared, one_by_one, is_all):
    reduced.clear()
    plan, params = plan_of((64, "f4"), (5, "f4"), (30, "f8"))
    asked, call = [], Verb()
    plan.shared = SimpleNamespace(reduce=lambda *args: asked.append((call.is_moving, *args[2:]))) if is_shared else None
    comm = SimpleNamespace(_reduces_one_by_one=one_by_one)
    plan.reduce(comm, call, params if is_all else params[1:], [0.5], 2.0)
    if is_all and is_shared:
        assert asked == [(True, [0.5], 2.0)] and reduced == []
    else:
        wanted = params if is_all else params[1:]
        sizes = [p.size for p in wanted] if one_by_one else [69, 30] if is_all else [5, 30]
        firsts = ([1, 2, 3] if one_by_one else [1, 3]) if is_all else [2, 3]
        assert reduced == [(sizes, firsts, [0.5], 2.0)] and asked == []
    assert plan.num_bytes == 4 * 69 + 8 * 30


@each(**{"places, is_settled": [((3, 3), True), ((0, 0), False), ((3, 4), False), ((3, 0), False), ((0, 3), False)]})
def test_gradients_are_brought_to_their_places_once(places, is_settled):
    plan, _params = plan_of((8, "f4"))
    plan.place = 7
    comm = SimpleNamespace(
        _share_gradients=lambda call, plan: "shared", _overlap=lambda call, plan: "overlap", _next_place=lambda: 9
    )
    plan.settle(comm, "call", places)
    assert (plan.shared, plan.overlap, plan.place) == ((None, None, 7) if is_settled else ("shared", "overlap", 9))


@each(size=[1, 2], leaves=[True, False], borders=[None, [[0, 1, 3], None]])
def test_every_gradient_goes_through_the_codec(monkeypatch, size, leaves, borders):
    done, call = [], Verb()
    one = SimpleNamespace(
        prepare=lambda *args: done.append(("prepare", *args[2:])),
        reduce=lambda comm, which, grad, *args: done.append((grad, call.is_moving, which is call, *args)),
    )
    monkeypatch.setattr(reduction, "codec_for", lambda dtype: done.append(dtype) or one)
    comm = SimpleNamespace(size=size, _leaves_gradients=leaves, _added_first=(0, 1), get_config=lambda name: name)
    reduction.reduce_gradients(comm, call, ["a", "b"], None, 2.0, borders)
    parts = borders or [None, None]
    expected = ["allreduce_grad_dtype", ("prepare", 2.0)]
    expected += [(grad, True, True, None, 2.0, own) for grad, own in zip("ab", parts)]
    assert done == ([] if size == 1 or leaves else expected)


# ---- how large sums can be, what compression sends ------------------------------------------------------------------


@each(
    **{
        "size, factors, divisor, ranks, found": [
            (4, None, 4.0, (), 1.0), (4, None, 2.0, (), 2.0), (4, None, None, (), 4.0), (4, None, 4.0, (1, 2, 3), 3.0),
            (4, None, 1.0, (1, 2), 4.0), (2, [0.25, 0.5], None, (), 0.75), (2, [2.0, 6.0], 4.0, (), 2.0),
            (2, [2.0, 6.0], 4.0, (1,), 6.0), (3, [1.0, 2.0, 4.0], 14.0, (0, 1), 3.0),
        ]
    }
)  # fmt: skip
def test_how_many_times_its_largest_element_a_sum_can_be(size, factors, divisor, ranks, found):
    result = codec.growth(size, factors, divisor, ranks)
    assert result == found and type(result) is float


@each(
    **{"dtype, largest": [("float16", 65504.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0), ("f4", 2.0**128)]}
)
def test_the_largest_number_of_a_type(dtype, largest):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert codec._largest(kind) == pytest.approx(largest, rel=1e-7)


def test_what_thin_matrices_send_is_counted():
    """Of 8 by 6 elements two matrices with a column each; what would not be less goes as it is."""
    sizes = []
    comm = SimpleNamespace(size=2, _reduce=lambda call, x, factors, divisor: sizes.append((x.size, factors, divisor)))
    one = compression.PowerSGD(1)
    matrix, vector = Parameter(np.zeros((8, 6), "f4")), Parameter(np.zeros(5, "f4"))
    layers = [(matrix, slice(0, 48)), (vector, slice(64, 69))]
    grad = np.random.default_rng(1).normal(size=69).astype("f4")
    error = grad.copy()
    one._reduce(comm, None, 0, layers, grad, error)
    assert sizes == [(8 + 5, None, 2.0), (6, None, 2.0)] and one.num_bytes == 4 * 19
    assert not error[64:].any() and one.right[matrix].shape == (6, 1)
    assert np.linalg.matrix_rank(grad[:48].reshape(8, 6)) == 1
    one._reduce(comm, None, 0, layers, grad, error)
    assert one.num_bytes == 2 * 4 * 19
    assert compression.PowerSGD().rank == 2 and compression.PowerSGD().words() == "PowerSGD rank 2"
    assert compression.TopK().words() == "TopK fraction 0.01"
    assert one._mean(comm, None, [], np.float32) == [] and len(sizes) == 4


def test_ranks_meet_before_they_give_each_other_their_largest_elements():
    done = []
    comm = SimpleNamespace(size=1, _meet=lambda call: done.append(call))

    def gather(mine, raw, counts, starts):
        raw[:] = mine
        done.append((counts, starts))

    comm._allgather_bytes = gather
    call, grad = SimpleNamespace(num_bytes=0), np.array([1.0, -3.0, 2.0], "f4")
    compression.TopK(0.5)._reduce(comm, call, 0, None, grad, grad.copy())
    assert done == [call, ([16], [0])] and grad.tolist() == [0, -3, 2] and call.num_bytes == 16


THIN = [
    ((8, 6), 3, True), ((8, 6), 4, False), ((2, 2), 1, False), ((3, 2), 1, True), ((5,), 1, False), ((), 1, False),
    ((2, 3, 4), 1, True), ((1, 9), 1, False),
]  # fmt: skip


@each(**{"shape, rank, is_thin": THIN})
def test_which_gradients_are_sent_as_thin_matrices(shape, rank, is_thin):
    p = Parameter(np.zeros(shape, "f4"))
    sizes = []
    comm = SimpleNamespace(size=1, _reduce=lambda call, x, factors, divisor: sizes.append(x.size))
    grad = np.arange(1.0, p.size + 1, dtype="f4")
    one = compression.PowerSGD(rank)
    one._reduce(comm, None, 0, [(p, slice(0, p.size))], grad, grad.copy())
    rows = shape[0] if shape else 1
    assert (p in one.right) is is_thin
    assert sizes == ([rows * rank, p.size // rows * rank] if is_thin else [p.size])


# ---- bytes for some ranks, late parameters, padding -----------------------------------------------------------------


def test_bytes_from_some_ranks_alone():
    found = []
    comm = SimpleNamespace(size=4, _exchange_bytes=lambda *args: found.append(args))
    raw = np.zeros(12, np.uint8)
    Provider._exchange(comm, None, "sent", [1, 2, 3, 4], [5, 6, 7, 8], raw, [3, 1])
    Provider._exchange(comm, None, "sent", [], [], raw, [2], [7], [4])
    Provider._exchange(comm, None, "sent", [1, 0, 0, 0], [2, 0, 0, 0], raw[:0], [])
    assert [args[:3] + args[4:] for args in found] == [
        ("sent", [1, 2, 3, 4], [5, 6, 7, 8], [0, 6, 0, 6], [0, 6, 0, 0]),
        ("sent", [0] * 4, [0] * 4, [0, 0, 7, 0], [0, 0, 4, 0]),
        ("sent", [1, 0, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4),
    ]
    assert all(args[3].base is raw or args[3] is raw for args in found)
    found.clear()
    own, call = np.zeros(3, np.uint8), SimpleNamespace(root=2)
    Provider._gather_bytes(comm, call, own, raw, [], [])
    Provider._gather_bytes(comm, call, own, raw, [1, 2, 3, 4], [5, 6, 7, 8])
    assert [(args[1:3], args[4:]) for args in found] == [
        (([0, 0, 3, 0], [0] * 4), ([0] * 4, [0] * 4)), (([0, 0, 3, 0], [0] * 4), ([1, 2, 3, 4], [5, 6, 7, 8]))
    ]  # fmt: skip


@each(**{"size, piece, lengths": [(10, 4, [4, 4, 2]), (10, 0, [10]), (0, 0, []), (0, 3, []), (4, 4, [4])]})
def test_a_long_object_is_sent_some_bytes_at_a_time(size, piece, lengths):
    sent = []
    comm = SimpleNamespace(_bcast_bytes=lambda raw, root: sent.append((raw.tolist(), root)))
    raw = np.arange(size, dtype=np.uint8)
    Provider._bcast_in_pieces(comm, SimpleNamespace(root=2), raw, piece)
    assert [len(x) for x, _ in sent] == lengths and [byte for x, _ in sent for byte in x] == raw.tolist()
    assert {root for _, root in sent} <= {2}


def test_parameters_that_a_step_left_without_a_shape_take_rank_0s_later():
    named = [("/a", Parameter(np.zeros(2))), ("/b", Parameter())]
    step = late.LateParameters("comm", named, 1)
    found = []
    step.work(lambda after_forward: found.extend(type(p.on_initialize) for _, p in named))
    assert found == [late._Announce] * 2
    waits = named[1][1].on_initialize
    assert type(waits) is models.Broadcast and (waits._comm, waits._name, waits._root) == ("comm", "/b", 0)
    assert (
        late._in_words(None) == "the end" and late._in_words(("/a", (2,), "float32")) == "/a with shape (2,) of float32"
    )


def test_a_rank_without_examples_initialises_what_the_leader_announces():
    def body(comm):
        p = Parameter(lambda array: array.fill(comm.rank + 1.0))
        step = late.LateParameters(comm, [("/p", p)], 1)
        if comm.rank == 1:
            step.work(lambda after_forward: (p.initialize((3,)), after_forward()))
        else:
            step.listen()
        return p.array.tolist(), p.on_initialize

    assert run_threads(2, body, timeout_seconds=60) == [([2.0] * 3, None)] * 2


@each(**{"num_padding, batches": [(0, [[3, 4], [5, 6]]), (1, [[3, 4], [5]])]})
def test_evaluations_leave_padding_out_and_keep_the_order(num_padding, batches):
    part = Shard(list(range(10)), 3, 7, None, num_padding)
    iterator = SerialIterator(part, 2, repeat=False, shuffle=False)
    own = SimpleNamespace(get_iterator=lambda name: iterator, _one_pass=lambda: iter(iterator))
    assert [list(batch) for batch in evaluator._without_padding(own)] == batches
    longer = Shard(list(range(40)), 0, 31, None, 1)
    iterator = SerialIterator(longer, 30, repeat=False, shuffle=False)
    assert list(evaluator._without_padding(own)) == [list(range(30))]
    iterator = SerialIterator(Shard([1], 0, 1, None, 1), 2, repeat=False, shuffle=False)
    assert list(evaluator._without_padding(own)) == []


# ---- what an output shares, what a loss must be ---------------------------------------------------------------------


def test_what_the_root_broadcasts_is_another_variable():
    comm = create_communicator("single")
    x = Variable(np.ones(3))
    y = functions.bcast(comm, x)
    assert y is not x and y.array is not x.array and y.array.tolist() == [1] * 3
    gathered = functions.gather(comm, x)
    assert type(gathered) is tuple and gathered[0].array.tolist() == [1] * 3


@each(**{"key, value, is_good": [("loss", np.zeros(2), False), ("x", np.zeros(2), True), ("x", np.nan, True),
                                 ("main/loss", np.inf, False), ("loss", 1.0, True)]})  # fmt: skip
def test_a_loss_is_a_finite_number(key, value, is_good):
    comm = SimpleNamespace(size=2, rank=0)
    one = extensions.StepAgreement(comm, SimpleNamespace(num_read=1))
    errors = []
    one._observations = SimpleNamespace(average=lambda numbers, num_samples, error: errors.append(error) or {})
    one._failure = SimpleNamespace(complaint=lambda trainer: "not finite")
    one(SimpleNamespace(observation={key: value}))
    (error,) = errors
    assert (error is None) == is_good and (is_good or str(error) == "not finite")
