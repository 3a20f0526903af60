"""Models cut over ranks, as functions of a communicator: compared with one process that has all components."""

from __future__ import annotations

import copy

import numpy as np

import dbrdist
from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.comm import MultiNodeChainList
from dbrdist.comm import functions as C
from dbrdist.comm.functions.graph import place
from dbrdist.comm.links import wiring
from dbrdist.comm.links.wiring import Component
from dbrdist.core.tape.variable import Variable
from tests.comm.disagreement_contract import several
from tests.comm.gradients_contract import by_name, raises, values

__all__ = ["CHECKS", "by_name"]
WIDTH = 3


def all_raise(comm, text, call):
    """The same error on every rank, and all can go on."""
    try:
        call()
    except ValueError as e:
        words = str(e)
    else:
        raise AssertionError(f"expected ValueError with {text!r}")
    assert text in words, words
    assert comm.allgather_obj(words) == [words] * comm.size


class Part(dbrdist.Chain):
    """Adds what it gets, then a layer and tanh; returns it ``copies`` times. Its weights follow from ``key``."""

    def __init__(self, *key, copies=1):
        super().__init__()
        self.copies = copies
        with self.init_scope(), dbrdist.using_config("dtype", np.float64):
            self.layer = L.Linear(WIDTH, WIDTH, initialW=values((WIDTH, WIDTH), *key), initial_bias=0.1)

    def forward(self, *xs):
        y = F.tanh(self.layer(sum(x if not isinstance(x, tuple) else x[0] * x[1] for x in xs)))
        return y if self.copies == 1 else (y,) * self.copies


def chain_of(comm, components):
    """This rank's part of ``components``: (rank, rank_in, rank_out) of each, in the order of the data."""
    model = MultiNodeChainList(comm)
    for key, (rank, rank_in, rank_out) in enumerate(components):
        if rank == comm.rank:
            model.add_link(Part(key, 41), rank_in, rank_out)
    return model


def straight(size):
    """Through all ranks, and back to rank 0."""
    last = [] if size == 1 else [(0, size - 1, None)]
    first = [(0, None, 1 % size if size > 1 else None)]
    return first + [(r, r - 1, (r + 1) % size) for r in range(1, size)] + last


def two_rounds(size):
    """Every rank twice; with one rank, to itself."""
    path = [*range(size), *range(size)]
    return [(r, path[i - 1] if i else None, path[i + 1] if i + 1 < len(path) else None) for i, r in enumerate(path)]


def on_one_process(components, x, w):
    """Output and gradients of components one after another."""
    parts = [Part(key, 41) for key in range(len(components))]
    h = Variable(x)
    for part in parts:
        h = part(h)
    F.sum(h**2 * w).backward()
    return h.array, [part.layer.W.grad for part in parts]


def check_ranks_of_functions_grow_by_steps(comm):
    """Not by factors: after a hundred passes they would leave the machine's integers."""
    model = chain_of(comm, straight(comm.size)).pipeline(3)
    x, lengths = values((6, WIDTH), 1, 43), []
    for _ in range(100):
        before = place()
        y = model(x) if comm.rank == 0 else model()
        y.unchain_backward() if y is not None else None
        lengths.append(place() - before)
    assert max(lengths[50:]) <= max(lengths[:50]) and place() < 100 * 200


def compare(comm, components, num_micro_batches):
    x, w = values((5, WIDTH), 1, 43) - 1, values((5, WIDTH), 2, 43)
    y, grads = on_one_process(components, x, w)
    model = chain_of(comm, components).pipeline(num_micro_batches)
    where_in = next(rank for rank, rank_in, _ in components if rank_in is None)
    where_out = next(rank for rank, _, rank_out in components if rank_out is None)
    for _ in range(2):
        model.cleargrads()
        found = model(x) if comm.rank == where_in else model()
        if comm.rank == where_out:
            np.testing.assert_allclose(found.array, y, rtol=1e-12)
            found = F.sum(found**2 * w)
        found.backward()
        mine = [g for (rank, _, _), g in zip(components, grads) if rank == comm.rank]
        for part, g in zip(model, mine, strict=True):
            np.testing.assert_allclose(part.layer.W.grad, g, rtol=1e-10)
    with dbrdist.no_backprop_mode():
        found = model(x) if comm.rank == where_in else model()
        if comm.rank == where_out:
            np.testing.assert_allclose(found.array, y, rtol=1e-12)


def check_chains(comm):
    for components in (straight(comm.size), two_rounds(comm.size)):
        for num_micro_batches in (1, 2, 5, 7):
            compare(comm, components, num_micro_batches)


@several
def check_branches_that_meet_again(comm):
    """Rank 0 gives to every rank, itself too, and adds what they return; all at once, lists on both sides."""
    ranks = list(range(comm.size))
    x = values((4, WIDTH), 3, 44)
    first, last = Part(0, 45), Part(9, 45)
    middle = [Part(r + 1, 45) for r in ranks]
    h = first(x)
    y = last(*(part(h) for part in middle))
    F.sum(y**2).backward()
    for num_micro_batches in (1, 2):
        model = MultiNodeChainList(comm).pipeline(num_micro_batches)
        if comm.rank == 0:
            model.add_link(Part(0, 45), rank_in=None, rank_out=ranks)
        model.add_link(Part(comm.rank + 1, 45), rank_in=[0], rank_out=[0])
        if comm.rank == 0:
            model.add_link(Part(9, 45), rank_in=tuple(ranks), rank_out=None)
        found = model(x) if comm.rank == 0 else model()
        if comm.rank == 0:
            np.testing.assert_allclose(found.array, y.array, rtol=1e-12)
            found = F.sum(found**2)
        found.backward()
        own = [first, middle[0], last] if comm.rank == 0 else [middle[comm.rank]]
        for part, expected in zip(model, own, strict=True):
            np.testing.assert_allclose(part.layer.W.grad, expected.layer.W.grad, rtol=1e-10)


@several
def check_large_messages_that_cross(comm):
    """Ranks 0 and 1 send to each other at the same time, more than a message that is not waited for."""
    if comm.rank > 1:
        MultiNodeChainList(comm)()
        return
    model, other = MultiNodeChainList(comm), 1 - comm.rank
    model.add_link(L.Scale(2, (5000,)), rank_in=None, rank_out=other)
    model.add_link(L.Scale(2, (5000,)), rank_in=other, rank_out=None)
    x = np.full((50, 2, 5000), comm.rank + 1.0, np.float32)
    y = model(x)
    np.testing.assert_array_equal(y.array, np.full_like(x, other + 1.0))
    F.sum(y).backward()
    np.testing.assert_allclose(model[0].W.grad, x.sum((0, 1)), rtol=1e-4)


@several
def check_tuples_and_inputs_that_are_not_used(comm):
    """A component's tuple arrives as one; an input without influence has gradient zero, and nobody waits."""
    x = values((2, WIDTH), 4, 46)
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(Part(0, 46, copies=2), None, 1)
        model.add_link(Part(1, 46), None, 1)
        delegate = model(x)
        delegate.backward()
        h = Variable(x)
        one, two = Part(0, 46), Part(2, 46)
        y = one(h)
        F.sum(two(y * y)).backward()
        np.testing.assert_allclose(model[0].layer.W.grad, one.layer.W.grad, rtol=1e-10)
        np.testing.assert_array_equal(model[1].layer.W.grad, np.zeros((WIDTH, WIDTH)))
    elif comm.rank == 1:

        class First(Part):
            def forward(self, pair, unused):
                assert type(pair) is tuple and len(pair) == 2
                return super().forward(pair)

        model.add_link(First(2, 46), [0, 0], None)
        F.sum(model()).backward()
    else:
        assert model() is None


def check_several_inputs_are_cut_alike(comm):
    class Both(L.Linear):
        def forward(self, x, mask):
            assert len(x) == len(mask)
            return super().forward(x) * np.array(mask, np.float32)[:, None]

    last = comm.size - 1
    model = MultiNodeChainList(comm).pipeline(3)
    if comm.rank == 0:
        model.add_link(Both(2, 2), None, last if last else None)
    if comm.rank == last and last:
        model.add_link(L.Linear(2, 2), 0, None)
    y = model(np.ones((7, 2), np.float32), [1.0] * 7) if comm.rank == 0 else model()
    if comm.rank == last:
        assert y.shape == (7, 2)


@several
def check_copies_are_models_of_their_own(comm):
    model = chain_of(comm, straight(comm.size))
    x = values((2, WIDTH), 1, 43)
    for other in (copy.deepcopy(model), model.copy("init"), model.copy()):
        y = other(x) if comm.rank == 0 else other()
        (F.sum(y) if comm.rank == 0 else y).backward()
        assert other[0].layer.W.grad is not None and model[0].layer.W.grad is None


@several
def check_cycles_are_refused_on_every_rank(comm):
    model = MultiNodeChainList(comm)
    model.add_link(L.Linear(2), (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size)
    all_raise(comm, "form a cycle, and none can begin: rank 0 (Linear, component 0) waits for rank", model)


@several
def check_ranks_that_do_not_fit_are_refused_on_every_rank(comm):
    def chain(ends):
        model = MultiNodeChainList(comm)
        for rank_in, rank_out in ends:
            model.add_link(L.Linear(2), rank_in, rank_out)
        return model

    zero = comm.rank == 0
    all_raise(
        comm,
        "outputs of rank 0 for rank 1: 1 (Linear, component 0), inputs of rank 1 from rank 0: 0 (no component)",
        chain([(None, 1)] if zero else [(None, None)]),
    )
    all_raise(comm, "rank_out of Linear on rank 0: expected ranks from 0", chain([(None, 99)]))
    ends = [(None, 1)] if zero else [(0, None)] if comm.rank == 1 else []
    model = chain(ends).pipeline(2 + zero)
    all_raise(comm, "the same on every rank", model)


def check_wrong_arguments(comm):
    model = MultiNodeChainList(comm)
    raises(TypeError, "rank_in expected a whole number", lambda: model.add_link(L.Linear(2), rank_in=1.5))
    raises(ValueError, "a list of ranks", lambda: model.add_link(L.Linear(2), rank_out=[]))
    model.add_link(L.Linear(2))
    raises(ValueError, "another component gives the model's output", lambda: model.add_link(L.Linear(2), rank_in=0))
    assert len(model) == 1
    raises(TypeError, "add_link", lambda: model.insert(0, L.Linear(2)))
    other = model.copy()
    assert other.ends == model.ends == ((None, None),)
    raises(ValueError, "1 or more", lambda: model.pipeline(0))
    raises(TypeError, "whole number", lambda: model.pipeline("two"))


def check_messages_in_the_order_of_a_pipeline(comm):
    """While a rank works on a micro-batch, the rank before it works on the next."""
    plans = wiring.plan([[Component("A", None, (1,))], [Component("B", (0,), None)]], 3)
    assert [type(action).__name__ for action in plans[0]] == ["RunComponent", "Give"] * 3
    assert [type(action).__name__ for action in plans[1]] == [
        "Take",
        "RunComponent",
        "Take",
        "RunComponent",
        "Take",
        "RunComponent",
    ]
    plans = wiring.plan([[Component("A", None, (1,)), Component("C", (1,), None)], [Component("B", (0,), (0,))]], 3)
    runs = [(action.component, action.part) for action in plans[0] if isinstance(action, wiring.RunComponent)]
    assert runs == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]  # rank 1 never waits for the next


def check_backward_is_a_pipeline_too(comm):
    """The first rank goes backward through a micro-batch before it asks for the gradient of the one before."""
    if comm.size == 1:
        return
    events = []

    class Watched(L.Linear):
        def forward(self, x):
            return Noted(events).apply((super().forward(x),))[0]

    model = MultiNodeChainList(comm).pipeline(3)
    if comm.rank == 0:
        model.add_link(Watched(2, 2), None, 1)
        send = comm.recv
        comm.recv = lambda *args: (events.append("gradient"), send(*args))[1]
        try:
            model(np.ones((6, 2), np.float32)).backward()
        finally:
            del comm.recv
        assert events == ["gradient", "backward"] * 3
    elif comm.rank == 1:
        model.add_link(L.Linear(2, 2), 0, None)
        F.sum(model()).backward()
    else:
        model()


class Noted(dbrdist.FunctionNode):
    def __init__(self, events):
        self.events = events

    def forward(self, xs):
        return (xs[0] + 0,)

    def backward(self, indexes, gys):
        self.events.append("backward")
        return gys


def check_with_what_the_model_has_besides(comm):
    """Parameters of the components are the model's, under the numbers of the components."""
    model = chain_of(comm, two_rounds(comm.size))
    assert [name for name, _ in model.namedparams()] == ["/0/layer/W", "/0/layer/b", "/1/layer/W", "/1/layer/b"]
    assert C.pseudo_connect(None, Variable(np.ones(2))).shape == (2,)


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
