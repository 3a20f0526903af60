"""Batch normalization over the batches of all ranks: its arguments. What it computes is in the contracts of links."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.functions.normalization import multi_node_batch_normalization


def test_one_running_statistic_without_the_other_is_refused():
    x, one = np.ones((4, 3), np.float32), np.ones(3, np.float32)
    comm = create_communicator("single")
    for name in ("running_mean", "running_var"):
        with pytest.raises(ValueError, match="running_mean, running_var: expected both"):
            multi_node_batch_normalization(comm, x, one, one, **{name: one.copy()})
