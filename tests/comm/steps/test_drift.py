"""When parameters are looked at, and what counts as different."""

import ml_dtypes
import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.steps import drift
from dbrdist.comm.steps.drift import Drift
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError
from dbrdist.links import Linear
from dbrdist.optimizers import SGD
from tests.each import each


def looked_at(found, named, t):
    """The names of parameters whose change is seen after update ``t``."""
    found.look(t)
    before, seen = found.checksum, []
    for name, p in named:
        p.array[...] += 1
        found.look(t)
        if found.checksum != before:
            seen.append(name)
        p.array[...] -= 1
    return seen


def test_all_parameters_after_the_first_updates_and_a_part_after_one_in_eight():
    named = [(f"/{k}", Parameter(np.full((2, 3), k, "f"))) for k in range(3)]
    found = Drift()
    found.plan(named)
    for t in (1, 2, 3, 4):
        assert looked_at(found, named, t) == [name for name, _ in named]
    assert not looked_at(found, named, 5) and not looked_at(found, named, 9)
    assert [looked_at(found, named, t) for t in (8, 16, 24, 32)] == [["/0"], ["/1"], ["/2"], ["/0"]]
    found.plan(named)  # at another time than other ranks do
    assert looked_at(found, named, 16) == ["/1"]
    named = [(f"/{k}", Parameter(np.full((2, 3), k, "f"))) for k in range(34)]
    found.plan(named)
    looks = [looked_at(found, named, 8 * k) for k in range(1, 17)]
    assert looks[:3] == [["/0", "/16", "/32"], ["/1", "/17", "/33"], ["/2", "/18"]]
    assert sorted(name for look in looks for name in look) == sorted(name for name, _ in named)
    assert looked_at(found, named, 8 * 17) == looks[0]


@each(order=["C", "F", "last"], shape=[(), (1,), (3,), (4, 5), (2, 3, 3, 2)], dtype=["f4", "f8", "f2", "c8", "bf16"])
def test_the_same_elements_in_any_order_of_memory(order, shape, dtype):
    dtype = ml_dtypes.bfloat16 if dtype == "bf16" else np.dtype(dtype)
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    stored = values.T.copy().T if order == "F" else values
    if order == "last" and len(shape) == 4:
        stored = values.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    sums = []
    for array in (values, stored):
        found, p = Drift(), Parameter(np.zeros(shape, "f"))
        p.array = array
        found.plan([("/p", p), ("/empty", Parameter(np.zeros((0, 2), "f"))), ("/late", Parameter())])
        found.look(1)
        sums.append(found.checksum)
    assert sums[0] == sums[1] != 1


class OfDevice(np.ndarray):
    """Stands for an array of a device."""


@each(shape=[(), (1,), (3,), (9,), (4, 5), (2, 3, 3, 2)])
def test_each_turn_looks_at_other_elements_on_a_device_too(shape):
    a = np.arange(np.prod(shape, dtype=int), dtype="f").reshape(shape)
    seen = set()
    for turn in range(a.size):
        some = drift._some(a.view(OfDevice), turn)
        assert some.shape == drift._some(a, turn).shape and (some == drift._some(a, turn)).all()
        seen.update(some.tolist())
    assert seen == set(a.reshape(-1).tolist())


@pytest.mark.parametrize(
    ("values", "differ"),
    [
        ([1.0, 1.0], False),
        ([1.0, 1.0 + 1e-6], False),  # rounding of another processor
        ([1.0, 1.01], True),
        ([np.nan, np.nan], False),
        ([1.0, np.nan], True),
        ([np.inf, np.inf], False),
        ([np.inf, 1.0], True),
        ([0.0, 1e-9], True),
    ],
)
def test_what_counts_as_different(values, differ):
    def body(comm):
        p = Parameter(np.full(7, values[comm.rank], np.float64))
        found = Drift()
        found.plan([("/p", p)])
        try:
            found.compare(comm, 5, ["one", "two"][: comm.rank])
        except CommunicatorError as error:
            return str(error)
        return ""

    first, second = run_threads(2, body)
    assert first == second and bool(first) == differ
    if differ:
        assert "after update 5" in first and "/p on rank 1" in first and "own: one (called at" in first


def test_a_rank_that_looks_less_often_has_not_drifted():
    """As one whose parameters are on a device: the last look was at other elements."""

    def body(comm):
        p = Parameter(np.arange(90, dtype=np.float32))
        found = Drift()
        found.plan([("/p", p)])
        for t in (4, 8)[: 1 + comm.rank]:
            found.look(t)
        found.compare(comm, 9, [])
        p.array[...] += comm.rank
        with pytest.raises(CommunicatorError, match="/p on rank 1"):
            found.compare(comm, 10, [])

    run_threads(2, body)


def test_processors_that_round_differently_compare_once_in_a_while(monkeypatch):
    """Their checksums always differ: a comparison in each step would cost more than the step."""
    compared = []
    compare = Drift.compare
    monkeypatch.setattr(Drift, "compare", lambda self, comm, *rest: compared.append(comm) or compare(self, comm, *rest))

    def body(comm):
        def another_processor(optimizer):
            for p in optimizer.target.params():
                p.array[...] *= 1 + comm.rank * 1e-7

        model = Linear(3, 2, initialW=1.0)
        optimizer = create_multi_node_optimizer(SGD(0.001).setup(model), comm)
        optimizer.add_hook(another_processor)
        for _ in range(2 * drift._PAUSE * drift.EVERY):
            optimizer.update(lambda: F.sum(model(np.ones((1, 3), "f"))))
        compared_before = len(compared)
        model.W.array[...] *= 1 + comm.rank
        with pytest.raises(CommunicatorError, match="/W on rank 1"):
            for _ in range(2 * drift._PAUSE * drift.EVERY):
                optimizer.update(lambda: F.sum(model(np.ones((1, 3), "f"))))
        return compared_before

    assert max(run_threads(2, body)) <= 2 * 3


def test_an_element_that_passes_zero_keeps_its_rounding():
    def body(comm):
        p = Parameter(np.zeros(1, np.float32))
        found = Drift()
        found.plan([("/b", p)])
        for value in (1.0, 0.5, 0.0):
            p.array[...] = value + comm.rank * 1e-6
            found.compare(comm, 5, [])
        p.array[...] = comm.rank * 1e-2
        with pytest.raises(CommunicatorError, match=r"is 0\.01 instead of 0"):
            found.compare(comm, 6, [])

    run_threads(2, body)


def test_the_message_names_an_element_that_differs():
    def body(comm):
        p = Parameter(np.ones(3, np.float32))
        found = Drift()
        found.plan([("/b", p)])
        p.array[2] += comm.rank
        with pytest.raises(CommunicatorError, match="one of its elements is 2 instead of 1"):
            found.compare(comm, 5, [])

    run_threads(2, body)


def test_elements_that_a_hook_takes_away():
    p, q = Parameter(np.zeros((3, 2), "f")), Parameter(np.zeros(2, "f"))
    found = Drift()
    found.plan([("/p", p), ("/q", q)])
    p.array, q.array = p.array[:1].copy(), q.array[:0].copy()
    found.look(1)
    assert found.checksum


def test_calls_that_were_added_up_are_over_where_ranks_had_drifted_apart():
    def body(comm):
        model = Linear(3, 2, initialW=1.0)
        optimizer = create_multi_node_optimizer(SGD(0.1).setup(model), comm, accumulate=2)

        def step():
            for _ in range(2):
                optimizer.update(lambda: F.sum(model(np.ones((1, 3), "f"))))

        step()
        model.W.array[...] += comm.rank
        with pytest.raises(CommunicatorError, match="/W on rank 1"):
            for _ in range(2):
                step()
        comm.bcast_data(model)
        before = optimizer.t
        optimizer.update(lambda: F.sum(model(np.ones((1, 3), "f"))))  # the first of two calls
        return optimizer.t - before

    assert run_threads(2, body) == [0, 0]
