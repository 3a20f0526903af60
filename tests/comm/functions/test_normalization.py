"""Batch normalization over the batches of all ranks: its arguments. What it computes is in the contracts of links."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.functions import normalization
from dbrdist.comm.functions.normalization import multi_node_batch_normalization


def test_what_is_added_to_the_variance_and_how_fast_statistics_move():
    """By default 2e-5 is added, and a tenth of the difference is gone."""
    x, gamma, beta = np.array([[0.0], [0.01]]), np.array([2.0]), np.array([3.0])
    mean, var = np.array([1.0]), np.array([1.0])
    y = multi_node_batch_normalization(
        create_communicator("single"), x, gamma, beta, running_mean=mean, running_var=var
    )  # the mean is 0.005, the variance 2.5e-5
    np.testing.assert_allclose(y.array.ravel(), 3 + 2 * np.array([-0.005, 0.005]) / np.sqrt(4.5e-5), rtol=1e-6)
    np.testing.assert_allclose([mean[0], var[0]], [0.9 + 0.1 * 0.005, 0.9 + 0.1 * 5e-5], rtol=1e-6)


def test_one_running_statistic_without_the_other_is_refused():
    x, one = np.ones((4, 3), np.float32), np.ones(3, np.float32)
    comm = create_communicator("single")
    for name in ("running_mean", "running_var"):
        with pytest.raises(ValueError, match="running_mean, running_var: expected both"):
            multi_node_batch_normalization(comm, x, one, one, **{name: one.copy()})


def test_ranks_with_the_same_settings_compare_nothing_more(monkeypatch):
    """Two numbers of the sums that they exchange anyway say that these are the same."""
    settled = []
    monkeypatch.setattr(normalization.agree, "same_everywhere", lambda *words: settled.append(words))
    kind = normalization.MultiNodeBatchNormalization
    monkeypatch.setattr(kind, "_settle_name", lambda self, settings: settled.append(settings))

    def body(comm):
        node = kind(comm, 1e-3 if comm.size == 2 else 1e-3 * (comm.rank + 1), (0,))
        x = np.arange(6, dtype=np.float32).reshape(3, 2) + comm.rank
        return node.forward((x, np.ones(2, np.float32), np.zeros(2, np.float32)))[0]

    run_threads(2, body)
    assert settled == []
    run_threads(3, body)
    assert len(settled) == 6  # of three ranks that differ
