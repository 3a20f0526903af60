"""What ranks may get wrong together, or each in its own way: the same error on all of them, and then they go on."""

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads, scatter_dataset, scatter_index
from dbrdist.comm.compression import PowerSGD, TopK
from dbrdist.comm.links import MultiNodeChainList
from dbrdist.comm.parameter_audit import compare
from tests.each import each

SIZE = 3
VERBS = ("allreduce", "bcast", "gather", "allgather", "scatter", "alltoall")


def said(body, num_ranks=SIZE):
    """The one error that all ranks raise, after which they still communicate."""

    def run(comm):
        try:
            body(comm)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
        else:
            text = "nothing"
        assert comm.allreduce(np.ones(2)).tolist() == [comm.size] * 2
        return text

    texts = run_threads(num_ranks, run, timeout_seconds=30)
    assert len(set(texts)) == 1, texts
    return texts[0]


def steps(comm, **options):
    """Two steps of a small model."""
    model = L.Linear(6, 4)
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(model), comm, **options)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(np.full((2, 6), comm.rank + 1, np.float32)) ** 2))
    return model, optimizer


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        ([{"compression": PowerSGD(2)}, {"compression": PowerSGD(1)}], "PowerSGD rank 1 instead of PowerSGD rank 2"),
        ([{"compression": TopK(0.5)}, {"compression": PowerSGD(1)}], "PowerSGD rank 1 instead of TopK fraction 0.5"),
        ([{"compression": TopK(0.5)}, {}], "none instead of TopK fraction 0.5"),
        ([{"compression": TopK(0.5)}, {"compression": TopK(0.25)}], "TopK fraction 0.25 instead of TopK fraction 0.5"),
        ([{"accumulate": 1}, {"accumulate": 2}], "accumulate 2 instead of accumulate 1"),
        ([{"local_steps": 3}, {"local_steps": 2}], "local_steps 2 instead of local_steps 3"),
        ([{}, {"double_buffering": True}], "double_buffering True instead of double_buffering False"),
        ([{"zero": 1}, {"zero": 2}], "zero 2 instead of zero 1"),
        ([{"compression": PowerSGD}] * 2, "expected PowerSGD(...) or TopK(...), got type"),
        ([{"accumulate": True}] * 2, "accumulate: expected an integer of 1 or more, got True"),
        ([{"local_steps": float("nan")}] * 2, "local_steps: expected an integer of 1 or more, got nan"),
    ],
)
def test_ways_to_reduce(of_ranks, words):
    assert words in said(lambda comm: steps(comm, **of_ranks[comm.rank % 2]))


def test_one_compressor_for_ranks_that_are_threads():
    shared = PowerSGD(1)
    first, *others = run_threads(SIZE, lambda comm: steps(comm, compression=shared)[0].W.array, timeout_seconds=30)
    alone = run_threads(SIZE, lambda comm: steps(comm, compression=PowerSGD(1))[0].W.array, timeout_seconds=30)
    assert all(np.array_equal(first, x) for x in [*others, *alone])


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (lambda rank: [(rank - 1 if rank == 1 else None, None)], "outputs of rank 0 for rank 1: 0"),
        (lambda rank: [(None, 7 if rank == 1 else None)], "expected ranks from 0 to 2, got 7"),
        (lambda rank: [((rank - 1) % SIZE, (rank + 1) % SIZE)], "the components form a cycle"),
        (lambda rank: [(None, [])], "expected None, a rank, or a list of ranks, got []"),
        (lambda rank: [(1.0, None)], "rank_in expected a whole number, got float"),
        (lambda rank: [(None, True)], "rank_out expected a whole number, got True"),
        (lambda rank: [(None, None), (None, None)], "another component gives the model's output already"),
        (lambda rank: [(None, 1)] if rank == 0 else [], "outputs of rank 0 for rank 1: 1"),
    ],
)
def test_chains(ends, words):
    def body(comm):
        model = MultiNodeChainList(comm)
        for rank_in, rank_out in ends(comm.rank):
            model.add_link(L.Linear(3, 3), rank_in=rank_in, rank_out=rank_out)
        model(np.ones((2, 3), np.float32))

    assert words in said(body)


def test_chains_of_something_else():
    assert "add_link expected a link, got int" in said(lambda comm: MultiNodeChainList(comm).add_link(3))


DATA = list(range(10))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: scatter_dataset(DATA, comm, root=comm.rank), "expected the same root on every rank"),
        (lambda comm: scatter_dataset(DATA, comm, root=None if comm.rank else 0), "expected a whole number, got None"),
        (lambda comm: scatter_dataset(DATA[: 5 + comm.rank], comm), "expected 5 examples as rank 0 has, got 6"),
        (lambda comm: scatter_dataset(iter(DATA), comm), "expected a dataset, but list_iterator has no len()"),
        (lambda comm: scatter_dataset(7 if comm.rank == 1 else DATA, comm), "expected a dataset, but int has no len()"),
        (lambda comm: scatter_dataset(DATA, comm, shuffle=True, seed="a"), "seed expected a whole number, got str"),
        (
            lambda comm: scatter_dataset(DATA, comm, seed=1.5 if comm.rank else 1),
            "seed expected a whole number, got fl",
        ),
        (lambda comm: scatter_index(-1, comm), "expected at least 1 sample to divide over 3 ranks, got -1"),
        (lambda comm: scatter_index("10", comm), "n_total_samples expected a whole number, got str"),
        (lambda comm: scatter_index(10.5, comm), "n_total_samples expected a whole number, got float"),
    ],
)
def test_parts_of_datasets(call, words):
    assert words in said(call)


def test_the_root_decides_how_a_dataset_is_divided():
    def body(comm):
        mine = comm.rank == 1  # the root
        parts = scatter_dataset(DATA, comm, 1, shuffle=mine, seed=comm.rank, force_equal_length=mine)
        exact = scatter_dataset(DATA, comm, 1, force_equal_length=not mine)
        return list(parts[:]), parts.num_padding, list(exact[:]), scatter_index(10, comm, 1, force_equal_length=mine)

    found = run_threads(SIZE, body, timeout_seconds=30)
    assert [len(shuffled) for shuffled, *_ in found] == [4, 4, 4]
    assert [num_padding for _, num_padding, *_ in found] == [1, 1, 0]
    own = [x for shuffled, num_padding, *_ in found for x in shuffled[: 4 - num_padding]]
    assert sorted(own) == DATA != own
    assert [x for *_, exact, _ in found for x in exact] == DATA
    assert [bounds for *_, bounds in found] == [(0, 4), (3, 7), (6, 10)]


class Sub(np.ndarray):
    """A user's own kind of array."""


class OnlyFloats(np.ndarray):
    """One that refuses to be seen as bytes, as numpy.char.chararray does."""

    def __array_finalize__(self, made_of):
        if self.dtype.kind != "f":
            raise ValueError(f"expected floats, got {self.dtype}")


def call(comm, verb, x):
    """The verb with ``x`` from this rank, and what came of it from rank 0."""
    made = [x] * comm.size if verb in ("scatter", "alltoall") else x
    result = getattr(comm, verb)(made)
    return result if verb in ("allreduce", "bcast", "scatter") or result is None else result[0]


TRAVELLING = {
    "no elements": np.zeros((0, 3), np.float32),
    "no axes": np.array(3.0),
    "backwards": np.arange(10.0)[::-2],
    "one element in all places": np.broadcast_to(np.float32(2), (3, 4)),
    "Fortran's order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "long double": np.ones(3, np.longdouble),
    "complex long double": np.full(3, 1 - 2j, np.clongdouble),
    "foreign byte order": np.arange(4, dtype=">f4"),
    "matrix": np.array([[1.0, 2.0, 3.0]]).view(np.matrix),
    "matrix on its side": np.array([[1.0, 2.0, 3.0]]).view(np.matrix).T,
    "subclass": np.ones(3).view(Sub),
    "subclass with its own mind": np.ones(3).view(OnlyFloats),
    "scalar": np.float32(2),
    "not a number": np.array([np.nan, -0.0]),
    "32 axes": np.ones((1,) * 32, np.float32),
}


@each(verb=VERBS, name=list(TRAVELLING))
def test_arrays_of_any_kind_travel(verb, name):
    x = TRAVELLING[name]
    times = SIZE if verb == "allreduce" else 1
    for rank, found in enumerate(run_threads(SIZE, lambda comm: call(comm, verb, x), timeout_seconds=30)):
        if rank and verb == "gather":
            assert found is None
            continue
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x) * np.asarray(x).dtype.type(times))
        assert (found.shape, found.dtype.newbyteorder("=")) == (np.shape(x), np.asarray(x).dtype.newbyteorder("="))


REFUSED = {
    "a plain array, got a masked one": np.ma.masked_array([1.0, 2.0], [0, 1]),
    "an array of numbers, got dtype object": np.array([None]),
    "an array of numbers, got dtype [('a', '<f4')]": np.zeros(2, [("a", "f4")]),
    "an array of numbers, got dtype |V3": np.zeros(2, "V3"),
    "an array, got memoryview": memoryview(b"abc"),
    "an array, got float": 3.0,
    "at most 32 dimensions, got 33": np.ones((1,) * 33, np.float32),
}


@each(verb=VERBS, words=list(REFUSED))
def test_other_things_are_refused_on_every_rank(verb, words):
    assert f"{verb} expected {words}" in said(lambda comm: call(comm, verb, REFUSED[words]), 2)
    alone = said(lambda comm: call(comm, verb, REFUSED[words] if comm.rank == 0 else np.ones(2)), 2)
    assert f"{verb} expected {words}" in alone


def test_an_audit_among_errors():
    """Ranks whose models differ in shape, in type or in one bit of a NaN; equal NaNs are equal."""

    def audited(change):
        def body(comm):
            model, optimizer = steps(comm)
            comm.barrier()
            if comm.rank == 1:
                change(model)
            compare(comm, optimizer, "step 2")

        return said(body)

    def bits(number):
        def change(model):
            model.b.array.view(np.uint32)[0] = number

        return change

    assert audited(lambda model: None) == "nothing"
    assert "/b differs (step 2)" in audited(bits(0x7FC00001))
    assert "/W differs" in audited(lambda model: setattr(model.W, "array", np.ones((4, 7), np.float32)))
    assert "/W differs" in audited(lambda model: setattr(model.W, "array", model.W.array.astype(np.float64)))

    def nan_everywhere(comm):
        model, optimizer = steps(comm)
        model.W.array[...] = np.nan
        compare(comm, optimizer, "step 2")

    assert said(nan_everywhere) == "nothing"
