"""When parameters are looked at, and what counts as different."""

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.steps import drift
from dbrdist.comm.steps.drift import Drift
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError
from tests.each import each


def looked_at(found, named, t):
    """The names of parameters whose change is seen after update ``t``."""
    found.look(t)
    before, turn, seen = found.checksum, found._turn, []
    for name, p in named:
        p.array[...] += 1
        found._turn = max(turn - drift._NUM_PARAMS, 0) if t > drift._FIRST else 0
        found.look(t)
        if found.checksum != before:
            seen.append(name)
        p.array[...] -= 1
    found._turn = turn
    return seen


def test_all_parameters_after_the_first_updates_and_some_after_one_in_eight():
    named = [(f"/{k}", Parameter(np.full((2, 3), k, "f"))) for k in range(10)]
    found = Drift()
    found.plan(named)
    for t in (1, 2, 3, 4):
        assert looked_at(found, named, t) == [name for name, _ in named]
    assert not looked_at(found, named, 5) and not looked_at(found, named, 9)
    assert [looked_at(found, named, t) for t in (8, 16, 24)] == [
        ["/0", "/1", "/2", "/3"],
        ["/4", "/5", "/6", "/7"],
        ["/8", "/9"],
    ]


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
