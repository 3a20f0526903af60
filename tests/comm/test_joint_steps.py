"""Which way a joint step takes, and sums in two levels: each branch by itself, with stand-ins for what is around it."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import (
    create_communicator,
    create_multi_node_optimizer,
    extensions,
    joint_steps,
    leaves,
    two_levels,
    virtual_evaluator,
)
from dbrdist.comm.codec import Codec
from dbrdist.comm.joint_steps import JointSteps
from dbrdist.comm.two_levels import HierarchicalCommunicator, TwoDimensionalCommunicator, TwoLevelCommunicator
from dbrdist.core.backend import as_dtype
from dbrdist.errors import NonFiniteLossError
from tests.comm.training_contract import Net, batches
from tests.each import each

# ---- steps ----------------------------------------------------------------------------------------------------------


def optimizer_of(monkeypatch, *patched, **options):
    """A multi-node optimizer on one rank; methods that are ``patched`` only note that they were called."""
    model = Net()
    model(*next(batches(1)))
    actual = optimizers.SGD(lr=0.5).setup(model)
    found = create_multi_node_optimizer(actual, create_communicator("single"), **options)
    done = []
    for name in patched:
        monkeypatch.setattr(
            JointSteps, name, lambda self, *args, name=name, **named: done.append((name, *args)) or name
        )
    return found, model, done


@each(is_small=[True, False], zero_fill=[True, False], loaded=[None, "state"], gathered=[[], [3]])
def test_gradients_come_with_the_header_where_nothing_else_does(monkeypatch, is_small, zero_fill, loaded, gathered):
    optimizer, _model, _done = optimizer_of(monkeypatch, zero_fill=zero_fill)
    optimizer._steps = SimpleNamespace(is_small=lambda: is_small)
    optimizer._carried = SimpleNamespace(loaded=loaded, gathered=gathered)
    assert optimizer._encloses_gradients() is (is_small and zero_fill and loaded is None and not gathered)


@each(num_samples=[None, 0, 3], has_loss=[True, False])
def test_a_step_at_once(monkeypatch, num_samples, has_loss):
    optimizer, model, done = optimizer_of(monkeypatch, "_reduce_at_once", "_apply")
    times = iter([10.0, 12.5])
    monkeypatch.setattr(joint_steps, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model.l1.b.grad = np.full(9, 7.0)
    x, t = next(batches(1))
    optimizer._update_at_once(model, model if has_loss else None, (x, t), {}, num_samples, ("x.py", 3))
    works = has_loss and num_samples != 0
    assert done == [("_reduce_at_once", num_samples, works, ("x.py", 3)), ("_apply",)]
    assert optimizer.num_samples == num_samples and optimizer.exposed_seconds == 2.5
    if works:
        grad = model.l1.b.grad.copy()
        model.cleargrads()
        model(x, t).backward()
        np.testing.assert_array_equal(grad, model.l1.b.grad)
    else:
        assert (model.l1.b.grad is None) if num_samples == 0 else model.l1.b.grad.tolist() == [7.0] * 9


class Steps:
    """Headers as given; verbs are those of one rank."""

    place, late = ("x.py", 1), ()

    def __init__(self, comm, header, plan="plan"):
        self.comm, self.header, self.found, self.added, self.asked = comm, header, plan, [], []
        self.shown_plan = SimpleNamespace(
            add_up=lambda call, enclosed, *weights: self.added.append((enclosed, weights))
        )

    def exchange(self, call, *args):
        self.asked.append(args)
        call.enclosed = "enclosed"
        return self.header

    def meet(self):
        return self.comm._gate.call("update")

    def wait(self, call):
        return self.header

    poll = lambda self: self.header  # noqa: E731

    def plan(self):
        return self.found


def header_of(is_enclosed=False, same_runs=True, is_placed=True):
    return SimpleNamespace(
        is_enclosed=is_enclosed, same_runs=same_runs, is_placed=is_placed, weights=lambda: ([0.5], 2.0), counts=(3,)
    )


@each(is_enclosed=[True, False], same_runs=[True, False], plan=["plan", None], accumulate=[1, 2])
def test_what_is_reduced_where_ranks_meet_once(monkeypatch, is_enclosed, same_runs, plan, accumulate):
    optimizer, _model, done = optimizer_of(monkeypatch, "_reduce", "_reduce_anew", accumulate=accumulate)
    monkeypatch.setattr(optimizer.communicator, "_release_enclosed", lambda: None, raising=False)
    steps = optimizer._steps = Steps(optimizer.communicator, header_of(is_enclosed, same_runs), plan)
    assert optimizer._reduce_at_once(3, True, ("y.py", 9)) is True
    assert steps.asked == [(3, True, True)] and optimizer.communicator._gate.record.last[-1].where() == "y.py:9"
    names = [name for name, *_ in done]
    if is_enclosed:
        weights = ([0.5], 2.0) if accumulate == 1 else (None, 3.0)
        assert steps.added == [("enclosed", weights)] and names == []
    else:
        assert steps.added == [] and names == (["_reduce"] if plan and same_runs else ["_reduce_anew"])
        assert done[0][-1] == (steps.header if plan and same_runs else 3)


@each(
    same_runs=[True, False],
    plan=["plan", None],
    zero_fill=[True, False],
    has_buffers=[True, False],
    overlap=["none", "placed", "not placed"],
)
def test_what_is_reduced_after_backward(monkeypatch, same_runs, plan, zero_fill, has_buffers, overlap):
    optimizer, _model, done = optimizer_of(monkeypatch, "_reduce", "_reduce_anew", zero_fill=zero_fill)
    optimizer._steps = Steps(optimizer.communicator, header_of(False, same_runs, overlap == "placed"), plan)
    swapped, waited = [], []
    optimizer._carried.buffers = (
        SimpleNamespace(swap=lambda *args: swapped.append(args) or "whole?") if has_buffers else None
    )
    started = None if overlap == "none" else SimpleNamespace(wait=lambda *args: waited.append(args))
    found = optimizer._reduce_all(started, 3)
    names = [name for name, *_ in done]
    if not (plan and same_runs and zero_fill):
        assert names == ["_reduce_anew"] and done[0][1] == 3 and found is True and not swapped and not waited
    elif has_buffers:
        assert swapped == [("plan", [0.5], 2.0, ("x.py", 1))] and found == "whole?" and names == [] and not waited
    else:
        assert waited == ([([0.5], 2.0)] if overlap == "placed" else []) and found is True
        assert names == ([] if overlap == "placed" else ["_reduce"])


@each(**{"header, plan, known": [(None, "plan", False), (header_of(), "plan", True), (header_of(), None, False),
                                 (header_of(is_placed=False), "plan", False)]})  # fmt: skip
def test_weights_are_known_once_all_agree_on_the_place(monkeypatch, header, plan, known):
    optimizer, _model, _done = optimizer_of(monkeypatch)
    optimizer._steps = Steps(optimizer.communicator, header, plan)
    assert optimizer._weights_if_known() == (([0.5], 2.0) if known else None)


@each(way=["compression", "sharding", "moved", "plain"])
def test_who_reduces(monkeypatch, way):
    optimizer, _model, _done = optimizer_of(monkeypatch)
    done = []
    note = lambda name: lambda *args: done.append((name, *args))  # noqa: E731
    compression = SimpleNamespace(reduce=note("compressed")) if way == "compression" else None
    optimizer._way = SimpleNamespace(compression=compression, accumulate=1)
    place = {"sharding": 5, "moved": 4}.get(way)
    optimizer._sharding = None if place is None else SimpleNamespace(place=place, settle=note("divided"))
    plan = SimpleNamespace(
        place=5, params="params", settle=note("settled"), reduce=note("reduced"), reduce_scatter=note("scattered")
    )
    header = SimpleNamespace(weights=lambda: ([0.5], 2.0), places=(5, 5))
    comm = optimizer.communicator
    with comm._gate.call("update") as call:
        optimizer._reduce(call, plan, header)
    assert call.meets_by == "bytes"
    found = {
        "compression": [("compressed", comm, call, plan, [0.5], 2.0)],
        "plain": [("settled", comm, call, (5, 5)), ("reduced", comm, call, "params", [0.5], 2.0)],
        "sharding": [("settled", comm, call, (5, 5)), ("scattered", comm, call, [0.5], 2.0)],
        "moved": [("settled", comm, call, (5, 5)), ("divided", plan), ("scattered", comm, call, [0.5], 2.0)],
    }
    assert done == found[way]


@each(place=[None, 5, 4])
def test_gradients_are_averaged_anew_where_headers_could_not_know(monkeypatch, place):
    optimizer, model, done = optimizer_of(monkeypatch, "_divide_gathered")
    asked = []
    monkeypatch.setattr(optimizer.communicator, "weighted_mean_grad", lambda *args: asked.append(args), raising=False)
    model.l1.b.update_rule.enabled = False
    optimizer._steps = SimpleNamespace(current_plan=lambda: SimpleNamespace(place=5))
    divided = []
    optimizer._sharding = None if place is None else SimpleNamespace(place=place, settle=divided.append)
    optimizer._reduce_anew(3)
    ((named, zero_fill, num_samples),) = asked
    assert {name for name, _ in named} == {name for name, _ in model.namedparams()} - {"/l1/b"}
    assert (zero_fill, num_samples) == (True, 3) and [name for name, *_ in done] == ["_divide_gathered"]
    assert len(divided) == (place == 4)


@each(num_samples=[None, 5])
def test_one_rank_alone_takes_the_first_parameters_of_each_target(monkeypatch, num_samples):
    optimizer, model, _done = optimizer_of(monkeypatch)
    synchronized, synchronize = [], JointSteps._synchronize
    monkeypatch.setattr(JointSteps, "_synchronize", lambda self: synchronized.append(self.target) or synchronize(self))
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


@each(is_small=[True, False], has_plan=[True, False])
def test_short_gradients_go_with_the_header(monkeypatch, is_small, has_plan):
    optimizer, model, _done = optimizer_of(monkeypatch)
    steps = optimizer._steps
    steps.look()
    plan = steps.current_plan()
    model.l1.b.grad = np.full(9, 4.0)
    monkeypatch.setattr(steps, "is_small", lambda: is_small)
    monkeypatch.setattr(steps, "look", lambda: None)
    steps._plan = plan if has_plan else None
    seen = []

    def exchange(row, **named):
        seen.append((row[-1], named["enclosed"]))
        return [bytes(8 * 47)]

    steps.exchange(SimpleNamespace(exchange=exchange), 3, True, True)
    ((encloses, enclosed),) = seen
    assert encloses == (is_small and has_plan) and (enclosed is plan.grads if encloses else enclosed == ())
    if encloses:
        assert (enclosed[0] == 4).sum() == 9


# ---- sums in two levels ---------------------------------------------------------------------------------------------


class Two(TwoLevelCommunicator):
    """Rank 1 of some ranks; what goes to each level."""

    def __init__(self, size, has_one_each, between="between", place=0, num_owners=1, ranks=(0, 1)):
        self._size, self._rank, self.done = size, 1, []
        self._hosts = SimpleNamespace(
            has_one_each=has_one_each, between=between, place=place, num_owners=num_owners, ranks=list(ranks)
        )

    def __del__(self):
        """There is nothing to give back."""

    def _reduce_piece(self, call, codec, x, total, divisor):
        self.done.append(("piece", call, codec, x.size, total.dtype.name, total.tolist(), divisor))


@each(
    **{
        "size, has_one_each, level": [
            (1, True, "plain"),
            (2, True, "between"),
            (2, False, "piece"),
            (3, False, "piece"),
        ]
    },
    factors=[None, [9, 0.5, 9]],
    dtype=["f4", "f2", "bfloat16"],
)
def test_which_level_adds_what(monkeypatch, size, has_one_each, level, factors, dtype):
    comm, codec = Two(size, has_one_each), Codec()
    monkeypatch.setattr(
        TwoLevelCommunicator.__mro__[1], "_reduce_host", lambda self, *args: self.done.append(("plain", *args))
    )
    if level == "between":
        monkeypatch.setattr(comm, "_between_hosts", lambda *args: Two._reduce_piece(comm, *args))
    x = np.arange(5).astype(as_dtype(dtype))
    monkeypatch.setattr(two_levels, "_PIECE_BYTES", 2 * x.itemsize)
    old = x.copy()
    comm._reduce_levels("call", codec, x, factors, 2.0)
    if level == "plain":
        assert comm.done == [("plain", "call", x, factors, 2.0)]
        return
    is_wider = dtype != "f4" and (factors is not None or level == "piece")
    kind = "float32" if is_wider else as_dtype(dtype).name
    weight = 0.5 if factors else 1
    pieces = [(old[i : i + 2].astype("f4") * weight).tolist() for i in (0, 2, 4)]
    assert comm.done == [("piece", "call", codec, len(p), kind, p, 2.0) for p in pieces]


@each(has_between=[True, False], is_own=[True, False])
def test_between_hosts_a_sum_is_sent_or_divided(monkeypatch, has_between, is_own):
    comm, codec = Two(3, False, "between" if has_between else None), Codec()
    asked = []
    monkeypatch.setattr(comm, "_reduce_over", lambda *args: asked.append(args))
    own = np.array([2.0, 4.0], "f4")
    x = own if is_own else np.zeros(2, "f2")
    comm._between_hosts("call", codec, x, own, 2.0)
    if has_between:
        ((way, call, array, *rest),) = asked
        assert (way, call, rest) == ("between", "call", [codec, None, 2.0]) and array is own
    assert x.tolist() == ([2, 4] if has_between else [1, 2])


class Host:
    """The ranks of a host; requests are their words."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *args: self.asked.append((name, *args)) or name


def on_host(kind, place, num_owners, num_ranks):
    comm = object.__new__(type("Comm", (kind,), {"__del__": lambda self: None}))
    local, waited, between = Host(), [], []
    comm._hosts = SimpleNamespace(local=local, place=place, num_owners=num_owners, ranks=list(range(num_ranks)))
    comm._MPI = SimpleNamespace(IN_PLACE="in place", BYTE="byte", SUM="sum", LOR="or")
    comm._wait = lambda call, request: waited.append(request)
    comm._between_hosts = lambda call, codec, x, own, divisor: between.append((x, own, divisor))
    return comm, local, waited, between


@each(place=[0, 1], dtype=["f4", "?"])
def test_the_first_rank_of_a_host_speaks_for_it(place, dtype):
    comm, local, waited, between = on_host(HierarchicalCommunicator, place, 1, 3)
    x, total = np.zeros(4, dtype), np.zeros(4, dtype)
    HierarchicalCommunicator._reduce_piece(comm, "call", "codec", x, total, 2.0)
    op = "or" if dtype == "?" else "sum"
    first = ("Ireduce", "in place", total, op, 0) if place == 0 else ("Ireduce", total, None, op, 0)
    assert [a is b or a == b for a, b in zip(local.asked[0], first)] == [True] * 5
    name, (raw, byte), root = local.asked[1]
    assert (name, byte, root) == ("Ibcast", "byte", 0) and np.shares_memory(raw, x) and raw.size == x.nbytes
    assert waited == ["Ireduce", "Ibcast"] and len(between) == (place == 0)
    assert place or (between[0][0] is x and between[0][1] is total and between[0][2] == 2.0)


@each(place=[0, 1, 2])
def test_owners_of_a_host_have_a_part_each(place):
    """Two owners among three ranks: five elements are two and three, and none for the third."""
    comm, local, waited, between = on_host(TwoDimensionalCommunicator, place, 2, 3)
    x, total = np.zeros(5, "f4"), np.zeros(5, "f4")
    TwoDimensionalCommunicator._reduce_piece(comm, "call", "codec", x, total, 2.0)
    (scatter, sent, own, counts, op), (gather, how, (raw, (sizes, starts), byte)) = local.asked
    assert (scatter, gather, op, how, byte) == ("Ireduce_scatter", "Iallgatherv", "sum", "in place", "byte")
    assert sent is total and counts.tolist() == [2, 3, 0] and own.size == counts[place] and own.dtype == "f4"
    assert sizes.tolist() == [8, 12, 0] and starts.tolist() == [0, 8, 20] and np.shares_memory(raw, x)
    assert waited == ["Ireduce_scatter", "Iallgatherv"] and len(between) == (place < 2)
    if place < 2:
        part, summed, divisor = between[0]
        assert summed is own and divisor == 2.0 and part.size == own.size
        assert part.ctypes.data - x.ctypes.data == [0, 8][place]


# ---- virtual workers, observations ----------------------------------------------------------------------------------


@each(**{"elements, everywhere": [(4096, True), (4097, False), (1, True)]})
def test_short_sums_of_leaves_are_added_by_all(monkeypatch, elements, everywhere):
    """Four subtrees of 16 KiB each are 64 KiB."""
    done = []
    for name in ("_add_everywhere", "_add_by_owners"):
        monkeypatch.setattr(
            leaves, name, lambda comm, nodes, mine, name=name: done.append((name, [a.size for a in mine]))
        )
    nodes = [[leaves.Node(0, 0), leaves.Node(1, 0)], [leaves.Node(2, 0), leaves.Node(3, 0)]]
    mine = [np.zeros(elements, "f4") for _ in range(2)]
    call = SimpleNamespace(num_bytes=0, kind=None)
    assert leaves._added("comm", call, nodes, mine) is mine[0]
    assert done == [("_add_everywhere" if everywhere else "_add_by_owners", [elements] * 2)]
    assert call.num_bytes == 4 * elements and call.kind == np.float32


@each(has_hook=[True, False])
def test_virtual_workers_evaluate_in_the_order_of_batches_and_workers(has_hook):
    hooked = []
    evaluator = SimpleNamespace(
        eval_hook=hooked.append if has_hook else None,
        get_iterator=lambda name: SimpleNamespace(workers=[4, 2]),
        _one_pass=lambda: [[[1, 2], [3]], [[], [5, 6, 7]]],
        observe=lambda batch: {"m": np.float64(sum(batch)), "array": np.ones(2), "n": 3},
    )
    entries = list(virtual_evaluator._entries(evaluator))
    assert hooked == [evaluator] * has_hook
    assert entries == [
        (0, 4, 2, {"m": 3.0, "n": 3.0}),
        (0, 2, 1, {"m": 3.0, "n": 3.0}),
        (1, 2, 3, {"m": 18.0, "n": 3.0}),
    ]
    assert [virtual_evaluator._place(e) for e in sorted(entries, key=virtual_evaluator._place)] == [
        (0, 2),
        (0, 4),
        (1, 2),
    ]
    found = virtual_evaluator.means(create_communicator("single"), evaluator)
    assert found == {"m": (2 * 3.0 + 3.0 + 3 * 18.0) / 6, "n": 3.0}


@each(is_done=[True, False], shares_time=[True, False], loss=[1.0, np.nan], rank=[0, 1])
def test_what_ranks_tell_each_other_of_a_step(monkeypatch, is_done, shares_time, loss, rank):
    asked = []

    def average(numbers, num_samples, error):
        asked.append((dict(numbers), num_samples))
        if error is not None:
            raise error
        return {key: value + 1 for key, value in numbers.items()}

    comm = SimpleNamespace(size=2, rank=rank)
    iterator = SimpleNamespace(num_read=4, virtual_workers=3 if is_done else None)
    one = extensions.StepAgreement(comm, iterator, shares_time)
    one._observations = SimpleNamespace(average=average)
    one._failure = SimpleNamespace(complaint=lambda trainer: "it is not finite")
    trainer = SimpleNamespace(observation={"loss": loss, "x": np.array(2.0)}, elapsed_time=50.0)
    is_finite = np.isfinite(loss)
    with contextlib.nullcontext() if is_finite else pytest.raises(NonFiniteLossError, match="it is not finite"):
        one(trainer)
    is_told = shares_time or not is_done
    numbers = {} if is_done else {"loss": loss, "x": 2.0}
    clock = {extensions._SECONDS: 50.0} if shares_time and rank == 0 else {}
    assert len(asked) == is_told
    if is_told:
        assert asked[0][0].keys() == {*numbers, *clock} and asked[0][1] == 4 and asked[0][0].items() >= clock.items()
    if is_finite:
        assert trainer.observation == ({"loss": 1.0, "x": 2.0} if is_done else {"loss": 2.0, "x": 3.0})
        assert one.elapsed_time(trainer) == (51.0 if clock else 0.0)


@each(**{"answers, size, is_asked": [(None, 2, True), ([0, 15], 2, False), ([15], 1, True)]})
def test_signals_are_asked_for_where_no_header_told_them(answers, size, is_asked):
    asked = []
    comm = SimpleNamespace(
        size=size,
        _stop_answers=answers,
        _allgather_rows=lambda row: asked.append(row.tolist()) or np.array([[3, 9], [0, 9]]),
    )
    one = extensions.StopOnRequest(comm)
    one._received = 3
    found = one._numbers()
    assert comm._stop_answers is None and asked == ([[3]] if is_asked else [])
    assert list(found) == ([3, 0] if is_asked else [0, 15])
