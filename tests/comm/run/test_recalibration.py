"""Tests of dbrdist.comm.run.recalibration; values are in tests/comm/disagreement_contract.py and tests/cli."""

import sys

import numpy as np
import pytest

from dbrdist.comm import RecalibrateStatistics, run_threads
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
