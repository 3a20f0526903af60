"""Places in the graph, plans that differ, parts of a model and of data: what each rank does where others have more."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.comm import (
    VirtualUpdater,
    cable,
    carried,
    codec,
    create,
    create_communicator,
    evaluator,
    extensions,
    functions,
    run_threads,
    scatter_dataset,
    snapshots,
    virtual,
    worker_state,
)
from dbrdist.comm import model as models
from dbrdist.comm.functions import graph
from dbrdist.comm.links import chain_list
from dbrdist.comm.links.wiring import Slot
from dbrdist.core.config import config
from dbrdist.core.node import assignments
from dbrdist.core.parameter import Parameter
from dbrdist.core.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.variable import Variable
from dbrdist.datasets.serial import SerialIterator
from dbrdist.links import Linear
from tests.each import each

# ---- places in the graph --------------------------------------------------------------------------------------------


def in_a_thread(function):
    """What it returns in a thread that has not communicated yet."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@each(**{"least, x_rank, ranks, place": [(0, 0, (1, 2), 3), (1, 0, (2, 3), 4), (5, 0, (6, 7), 8), (-1, 0, (0, 1), 2),
                                         (2, 4, (4, 5), 6), (4, 4, (5, 6), 7), (3, 4, (4, 5), 6)]})  # fmt: skip
def test_what_is_called_later_comes_above_what_was_before(least, x_rank, ranks, place):
    """Two functions in a row, on an input of some rank; those that are above ``least`` already stay."""

    def work():
        x = Variable(np.ones(2))
        for _ in range(x_rank):
            x = F.relu(x)
        assignments[0] += 1
        since = assignments[0]
        y = F.relu(x)
        z = F.exp(y)
        graph.deepen((z, None), least, since)
        assert y.node.rank == y.creator.rank + 1 and z.node.rank == z.creator.rank + 1
        return (y.creator.rank, z.creator.rank), graph.place()

    assert in_a_thread(work) == (ranks, place)


def test_what_has_no_functions_changes_no_place():
    def work():
        graph.go_beyond(4)
        graph.deepen((), 7, assignments[0])
        graph.deepen((Variable(np.ones(2)), 3), 7, assignments[0])
        return graph.place()

    assert in_a_thread(work) == 4


def test_a_delegate_of_ones_own_gets_no_gradient():
    comm = create_communicator("single")
    y = functions.allreduce(comm, Variable(np.ones(2)))
    own = y.creator.inputs[-1]
    assert y.creator.has_own_delegate and own.shape == (0,)
    y.grad = np.ones(2)
    y.backward()
    assert own.gradient is None
    delegate = Variable(np.zeros(3))
    y = functions.pseudo_connect(delegate, Variable(np.ones(2)))
    y.grad = np.ones(2)
    y.backward()
    assert delegate.grad.tolist() == [0] * 3


# ---- plans of models ------------------------------------------------------------------------------------------------


def named_of(num=2):
    params = [Parameter(np.zeros(3)) for _ in range(num)]
    for k, p in enumerate(params):
        p.grad = np.full(3, k + 1.0)
    return [(f"/{k}", p) for k, p in enumerate(params)]


class Call:
    """A verb in which the other rank has a row of its own."""

    def __init__(self, theirs):
        self.theirs, self.rows, self.named = theirs, [], None

    def agree(self, row, **named):
        self.rows.append(list(row))
        self.named = named
        return np.array([row, [mine if other is None else other for mine, other in zip(row, self.theirs)]])


@each(
    **{
        "theirs, zero_fill, lacks, is_anew, places, wanted, weights": [
            ((None,) * 5, False, (), False, [6, 6], (0, 1), (None, 2.0)),
            ((None, 77, None, None, None), False, (), True, [0, 0], (0, 1), (None, 2.0)),
            ((None, None, None, None, 5), False, (), False, [6, 5], (0, 1), (None, 2.0)),
            ((None, None, 9, None, None), False, (), False, [6, 6], (0, 1), ([0.25, 0.75], None)),
            ((None, None, None, 1, None), False, (1,), False, [6, 6], (0, 1), (None, 2.0)),
            ((None,) * 5, False, (1,), False, [6, 6], (0,), (None, 2.0)),
            ((None,) * 5, True, (1,), False, [6, 6], (0, 1), (None, 2.0)),
        ]
    }
)  # fmt: skip
def test_what_ranks_agree_on_before_they_average(
    monkeypatch, theirs, zero_fill, lacks, is_anew, places, wanted, weights
):
    """Parameters, where they lie in memory, examples, which gradients are there, and at which place."""
    named = named_of()
    settled, reduced = [], []
    monkeypatch.setattr(models.Plan, "settle", lambda self, comm, call, found: settled.append((self, found)))
    monkeypatch.setattr(models.Plan, "reduce", lambda self, comm, call, *args: reduced.append((self, *args)))
    comm = SimpleNamespace(_plans={}, allreduce=lambda has: has | True)
    for k in lacks:
        named[k][1].cleargrad()
    plan = models.plan_for(comm, named)
    plan.place = 6
    call = Call(theirs)
    models.mean_grad(comm, call, [*named, ("/late", Parameter())], zero_fill, 3)
    ((row,), has) = call.rows, np.array([zero_fill or k not in lacks for k in range(2)])
    assert row == [plan.digest, plan.runs_digest, 3, models.zlib.crc32(has.tobytes()), 6]
    assert call.named["num_same"] == 1 and call.named["what"] == "the same parameters"
    assert call.named["detail"]() == plan.text
    ((used, found),) = settled
    assert (used is not plan) == is_anew and found == places and comm._plans[used.key] is used
    assert reduced == [(used, [named[k][1] for k in wanted], *weights)]


def test_the_last_plans_are_kept():
    comm = SimpleNamespace(_plans={})
    found = [named_of(1) for _ in range(9)]
    plans = [models.plan_for(comm, named) for named in found]
    assert list(comm._plans.values()) == plans[1:]
    assert models.plan_for(comm, found[1]) is plans[1] and list(comm._plans.values()) == [*plans[2:], plans[1]]
    assert models.plan_for(comm, found[0]) is not plans[0]
    found[2][0][1].leave_arena()
    assert models.plan_for(comm, found[2]) is not plans[2]


def test_late_parameters_take_the_shape_and_later_the_values_of_the_root():
    def body(comm):
        link = Linear(4 if comm.rank == 0 else None, 2)
        if comm.rank == 1:
            link.b.array[...] = 9
        models.bcast_params(comm, link)
        return link.W.array.tolist(), link.b.array.tolist(), link.W.on_initialize

    first, second = run_threads(2, body, timeout_seconds=60)
    assert first == second and first[2] is None and np.shape(first[0]) == (2, 4) and first[1] == [0, 0]


# ---- components and data --------------------------------------------------------------------------------------------


@each(num_micro_batches=[1, 2])
def test_components_are_called_in_order_where_batches_are_cut(monkeypatch, num_micro_batches):
    """Of rank 1: the first takes the model's inputs, the second what has come in two slots."""
    called = []
    monkeypatch.setattr(chain_list, "_called_in_order", lambda link, xs: called.append(xs) or link(*xs))
    links = [lambda x: ("first", x.tolist()), lambda a, b: ("second", a, b)]
    model = SimpleNamespace(
        num_micro_batches=num_micro_batches, ends=((None, (1,)), ((0, 0), None)), comm=SimpleNamespace(rank=1)
    )
    found = chain_list._Pass(SimpleNamespace(**vars(model)), (np.arange(4),))
    found.model = type("Model", (), {"__getitem__": lambda self, k: links[k], **vars(model)})()
    found.run_component(0, 0)
    found.arrived = {(Slot(1, 1, 0), 0): "a", (Slot(1, 1, 1), 0): "b", (Slot(1, 1, 0), 1): "c"}
    found.run_component(1, 0)
    part = list(range(4 // num_micro_batches))
    assert found.made == {(0, 0): ("first", part)} and found.outputs == [("second", "a", "b")]
    assert list(found.arrived) == [(Slot(1, 1, 0), 1)] and len(called) == (0 if num_micro_batches == 1 else 2)


def test_ranks_that_have_a_dataset_read_their_own():
    def body(comm):
        mine = list(range(10)) if comm.rank < 2 else None
        found = scatter_dataset(mine, comm, root=1)
        return found._dataset is mine, list(found), found.num_padding

    assert run_threads(3, body, timeout_seconds=60) == [
        (True, [0, 1, 2, 3], 1), (True, [3, 4, 5, 6], 1), (False, [6, 7, 8, 9], 0)
    ]  # fmt: skip


def test_threads_are_limited_again_after_the_first_step(monkeypatch):
    """The first step loads libraries; only a reproducible run is limited."""
    limited = []
    monkeypatch.setattr(virtual.thread_pools, "use_one", lambda: limited.append(1))
    data = [(np.ones(2, "f4"), np.ones(1, "f4")) for _ in range(8)]
    for reproducible in (True, False):
        link = Linear(2, 1)
        updater = VirtualUpdater(
            SerialIterator(data, 4, virtual_workers=2, rank=0, size=1), optimizers.SGD().setup(link),
            create_communicator("single"), loss_func=lambda x, t, link=link: F.mean_squared_error(link(x), t),
            reproducible=reproducible,
        )  # fmt: skip
        for _ in range(5):
            updater.update()
        assert len(limited) == 2


@each(auto_new_epoch=[True, False])
def test_epochs_of_virtual_workers_are_counted(monkeypatch, auto_new_epoch):
    data = [(np.ones(2, "f4"), np.ones(1, "f4")) for _ in range(8)]
    link, told = Linear(2, 1), []
    optimizer = optimizers.SGD().setup(link)
    monkeypatch.setattr(optimizer, "new_epoch", lambda auto=False: told.append((optimizer.t, auto)))
    updater = VirtualUpdater(
        SerialIterator(data, 4, virtual_workers=2, rank=0, size=1), optimizer, create_communicator("single"),
        loss_func=lambda x, t: F.mean_squared_error(link(x), t), auto_new_epoch=auto_new_epoch,
    )  # fmt: skip
    for _ in range(5):
        updater.update()
    assert told == ([(2, True), (4, True)] if auto_new_epoch else [])


# ---- copies, states, connections ------------------------------------------------------------------------------------


@each(module=[carried, snapshots])
def test_arrays_of_a_device_are_copied_and_numbers_are_not(monkeypatch, module):
    asked = []
    monkeypatch.setattr(module, "to_cpu", lambda x: asked.append(x) or x)
    x = np.ones(2)
    assert module._on_host(x) is x and module._on_host(3) == 3 and [a is x for a in asked] == [True]


@each(collected=[[], [1.5, 2.0]])
def test_what_an_aggregator_has_collected_is_saved(collected):
    one = extensions.ObservationAggregator(create_communicator("single"), "loss", comm_trigger=(1, "epoch"))
    one._collected = collected
    serializer = DictionarySerializer()
    one.serialize(serializer)
    other = extensions.ObservationAggregator(create_communicator("single"), "loss", comm_trigger=(1, "epoch"))
    other._collected = [7.0]
    other.serialize(NpzDeserializer(serializer.target))
    assert other._collected == collected


@each(**{"left, ends": [(0.5, False), (0.0, True), (-1.0, True)]})
def test_a_door_is_open_until_its_end(monkeypatch, left, ends):
    monkeypatch.setattr(cable, "time", SimpleNamespace(monotonic=lambda: 100.0))
    polled = []
    door = object.__new__(cable._Door)
    door._poll = SimpleNamespace(poll=lambda ms: polled.append(ms) or [])
    door._callers, door._listener = {}, SimpleNamespace(fileno=lambda: 3)
    if ends:
        with pytest.raises(TimeoutError):
            door.wait(100.0 + left)
    else:
        assert door.wait(100.0 + left) == [] and polled == [500.0]


@each(**{"system, options": [("linux", 3), ("linux2", 3), ("darwin", 1)]})
def test_kernels_are_told_when_to_ask_for_the_other_host(monkeypatch, system, options):
    told = []
    monkeypatch.setattr(cable.sys, "platform", system)
    cable._keep_alive(SimpleNamespace(setsockopt=lambda *args: told.append(args)))
    socket = cable.socket
    assert told == [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60),
    ][:options]  # fmt: skip


# ---- what is made, counted and evaluated ----------------------------------------------------------------------------


def test_who_makes_a_communicator_over_mpi_is_guarded(monkeypatch):
    guarded = []
    monkeypatch.setattr(create.abort, "guard_library_use", guarded.append)
    made = create._over_mpi(lambda mpi_comm, settings: (mpi_comm, settings))("ranks", {"a": 1})
    assert made == ("ranks", {"a": 1}) and guarded == [made]


@each(**{"grads, largest": [((), 0.0), ((np.empty(0),), 0.0), ((np.empty(0), np.array([0.25, -0.5])), 1.5)]})
def test_a_rank_without_gradients_asks_for_no_scale(grads, largest):
    shown = []
    call = SimpleNamespace(agree=lambda word: shown.append(word.view(float)[0]) or np.array([word]))
    codec.Scaled(np.dtype("f2")).prepare(call, grads, 3.0)
    assert shown == [largest]


def test_statistics_of_a_network_are_one_vector():
    """Arrays and numbers, each in its own type and shape; what is no number stays as it is."""
    link = Linear(2, 1)
    values = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.array([1, 2]), "c": 3, "d": 0.5, "e": np.int8(4),
              "f": True, "g": "text", "h": np.array([True]), "i": np.array(["x"]), "j": np.float32(2.5)}  # fmt: skip
    for name, value in values.items():
        setattr(link, name, value)
        link.register_persistent(name)
    one = worker_state.Statistics(link)
    one.begin()
    numbers = [*range(6), 1, 2, 3, 0.5, 4, 2.5]
    assert one.read().tolist() == numbers and one.read().dtype == np.float64
    assert one.nothing().tolist() == [0] * len(numbers)
    one.write(np.array(numbers) * 2 + 0.3)
    assert link.a.dtype == "f4" and link.a.shape == (2, 3)
    np.testing.assert_allclose(link.a.reshape(-1), np.arange(6) * 2 + 0.3, rtol=1e-6)
    assert link.b.tolist() == [2, 4] and (link.c, type(link.c)) == (6, int) and (link.d, type(link.d)) == (1.3, float)
    assert (link.e, type(link.e)) == (8, np.int8) and type(link.j) is np.float32 and abs(link.j - 5.3) < 1e-6
    assert (link.f, link.g, link.h.tolist(), link.i.tolist()) == (True, "text", [True], ["x"])
    one.restore()
    assert one.read().tolist() == numbers and (link.c, link.d) == (3, 0.5)


@each(has_hook=[True, False], root=[0, 1])
def test_results_are_gathered_by_turns(has_hook, root):
    """The first batch of each rank in their order, then the second; ranks may have fewer."""

    def body(comm):
        hooked, shown = [], []
        data = [(np.full(1, float(10 * comm.rank + k)),) for k in range(3 - comm.rank)]

        class Own(evaluator.GenericMultiNodeEvaluator):
            def calc_local(self, x):
                assert not config.train
                return {"x": Variable(x.reshape(-1)[:1])}

        one = Own(
            comm, SerialIterator(data, 1, repeat=False, shuffle=False), Linear(1, 1), root=root,
            eval_hook=hooked.append if has_hook else None, progress_hook=shown.append,
        )  # fmt: skip
        found = one()
        assert hooked == [one] * has_hook and len(shown) == 3 - comm.rank
        return found and [result["x"].tolist() for result in found]

    found = run_threads(2, body, timeout_seconds=60)
    assert found[root] == [[0], [10], [1], [11], [2]] and found[1 - root] is None


def test_means_of_all_ranks_are_weighted():
    mine = [{"a": (1.0, 2.0), "b": (5.0, 0.0)}, {"b": (3.0, 1.0), "a": (4.0, 1.0)}]
    comm = SimpleNamespace(allgather_obj=lambda means: mine)
    found = evaluator._merged(comm, mine[0])
    assert found == {"a": 2.0, "b": 3.0} and list(found) == ["a", "b"]
