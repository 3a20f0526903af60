"""Tests of dbrdist.comm.gradients.compression."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import compression
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.comm.steps import step_options
from dbrdist.core.model.parameter import Parameter
from tests.comm.comm_helpers import SIZE, said, steps
from tests.each import each


@each(
    **{
        "options, carries": [
            ({}, False), ({"accumulate": 2}, True), ({"local_steps": 2}, True), ({"double_buffering": True}, True),
            ({"compression": TopK()}, True), ({"zero": 2}, False),
        ]
    }
)  # fmt: skip
def test_what_goes_from_one_step_into_the_next(options, carries):
    assert step_options.StepOptions(**options).carries is carries
    text = "double_buffering False\nzero 0\ncompression None\naccumulate 1\nlocal_steps 1\nnone\n"
    assert step_options.StepOptions().words() == text
    assert (step_options.StepOptions(**options).words() == text) == (not options)


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


def test_what_thin_matrices_send_is_counted():
    """Of 8 by 6 elements two matrices with a column each; what would not be less goes as it is."""
    sizes = []
    reducer = SimpleNamespace(reduce=lambda call, x, factors, divisor: sizes.append((x.size, factors, divisor)))
    comm = SimpleNamespace(size=2, reducer=reducer)
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


THIN = [
    ((8, 6), 3, True), ((8, 6), 4, False), ((2, 2), 1, False), ((3, 2), 1, True), ((5,), 1, False), ((), 1, False),
    ((2, 3, 4), 1, True), ((1, 9), 1, False),
]  # fmt: skip


@each(**{"shape, rank, is_thin": THIN})
def test_which_gradients_are_sent_as_thin_matrices(shape, rank, is_thin):
    p = Parameter(np.zeros(shape, "f4"))
    sizes = []
    reducer = SimpleNamespace(reduce=lambda call, x, factors, divisor: sizes.append(x.size))
    comm = SimpleNamespace(size=1, reducer=reducer)
    grad = np.arange(1.0, p.size + 1, dtype="f4")
    one = compression.PowerSGD(rank)
    one._reduce(comm, None, 0, [(p, slice(0, p.size))], grad, grad.copy())
    rows = shape[0] if shape else 1
    assert (p in one.right) is is_thin
    assert sizes == ([rows * rank, p.size // rows * rank] if is_thin else [p.size])


class OneRank:
    size = 1
    ranks = property(lambda self: self)

    def meet(self, call):
        """Nobody else comes."""

    def allgather_bytes(self, mine, raw, counts, starts):
        assert (counts, starts) == ([mine.nbytes], [0])
        raw[:] = mine


def test_the_largest_elements_travel_and_are_counted():
    assert compression.TopK().fraction == 0.01
    one, call = compression.TopK(0.2), SimpleNamespace(num_bytes=5)
    grad = np.array([1.0, -8.0, 3.0, 0.5, 7.0, -2.0, 0.0, 1.5, -1.0, 2.5], "f")
    error = grad.copy()
    one._reduce(OneRank(), call, 0, None, grad, error)
    assert grad.tolist() == [0, -8, 0, 0, 7, 0, 0, 0, 0, 0]
    assert error.tolist() == [1, 0, 3, 0.5, 0, -2, 0, 1.5, -1, 2.5]
    assert (one.num_bytes, call.num_bytes) == (16, 21)  # two indices and two values of four bytes
