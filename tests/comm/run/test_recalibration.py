"""Tests of dbrdist.comm.run.recalibration; values are in tests/comm/disagreement_contract.py and tests/cli."""

import sys

import numpy as np
import pytest

from dbrdist.comm import RecalibrateStatistics, create_communicator, run_threads
from dbrdist.core.array import random
from dbrdist.errors import CommunicatorError
from dbrdist.iterators import SerialIterator
from dbrdist.links import BatchNormalization


def test_ranks_that_use_two_in_another_order_are_told_where_each_was_made():
    def body(comm):
        def batches():
            return SerialIterator([(np.ones(2, "f"),)] * 4, 2)

        line = sys._getframe().f_lineno
        first = RecalibrateStatistics(comm, BatchNormalization(2), batches, 1)
        second = RecalibrateStatistics(comm, BatchNormalization(2), batches, 1)
        with pytest.raises(CommunicatorError, match="the same recalibration on every rank") as caught:
            (first, second)[comm.rank]()
        for k in (0, 1):
            made = f"number {k + 1} (made at test_recalibration.py:{line + 1 + k}, number 1 there) on rank {k}"
            assert made in str(caught.value)

    run_threads(2, body, timeout_seconds=60)


def test_decays_and_random_numbers_are_as_before_and_statistics_those_of_the_batches():
    link = BatchNormalization(2, decay=0.75)
    comm, x = create_communicator("single"), np.array([[0, 1], [2, 5], [4, 1], [6, 5]], "f")
    state = random.get_state()
    RecalibrateStatistics(comm, link, lambda: SerialIterator([(row,) for row in x], 4, shuffle=False), 1)()
    assert link.decay == 0.75 and random.get_state() == state
    np.testing.assert_allclose(link.avg_mean, [3, 3])
    np.testing.assert_allclose(link.avg_var, [20 / 3, 16 / 3], rtol=1e-5)  # unbiased
