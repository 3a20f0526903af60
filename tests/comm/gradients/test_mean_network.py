"""The mean of the ranks' networks takes the place of each rank's own for a while."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import mean_network
from dbrdist.comm.gradients.mean_network import goes_apart, mean_parameters, one_network
from dbrdist.errors import CommunicatorError
from dbrdist.links import BatchNormalization, Linear
from tests.each import each


def test_a_failure_half_way_leaves_each_rank_its_own_parameters():
    link = Linear(3, 2)
    goes_apart(link)
    own = {name: p.array.copy() for name, p in link.namedparams()}
    sums = iter([np.zeros((2, 3), np.float32)])

    def allreduce(array):
        for total in sums:
            return total if total.shape == array.shape else np.zeros_like(array)
        raise CommunicatorError("a rank has ended")

    with pytest.raises(CommunicatorError), mean_parameters(SimpleNamespace(size=2, allreduce=allreduce), [link]):
        pass
    for name, p in link.namedparams():
        np.testing.assert_array_equal(p.array, own[name])


def test_ranks_of_one_network_look_for_no_difference(monkeypatch):
    """They compare two checksums; the parameters themselves only where these differ."""
    looked = []
    monkeypatch.setattr(mean_network, "_difference", lambda comm, of_params: looked.append(comm.rank) or "words")

    def body(comm, differing):
        link = Linear(2, 3, initialW=np.full((3, 2), comm.rank * differing))
        with one_network(comm, [link]) as difference:
            return difference

    assert run_threads(2, lambda comm: body(comm, 0)) == ["", ""] and not looked
    assert run_threads(2, lambda comm: body(comm, 1)) == ["words", "words"] and sorted(looked) == [0, 1]


@each(case=["other", "one", "other network", "other names"])
def test_running_statistics_are_means_where_the_networks_are_one(monkeypatch, case):
    averaged, looked = [], []
    plain = mean_network.mean_over_ranks
    monkeypatch.setattr(mean_network, "_difference", lambda comm, params: looked.append(comm.rank) or "differs")
    monkeypatch.setattr(mean_network, "mean_over_ranks", lambda *words: averaged.append(1) or plain(*words))

    def body(comm):
        link = BatchNormalization(2)
        link.avg_mean[...] = comm.rank * (case != "one")
        if case == "other network":
            link.gamma.array[...] = comm.rank
        if case == "other names" and comm.rank:
            link.add_persistent("more", np.zeros(3, np.float32))
        with one_network(comm, [link]) as difference:
            seen = link.avg_mean.tolist()
        return bool(difference), seen, link.avg_mean.tolist()

    found = run_threads(2, body)
    means = case == "other"
    for rank, (difference, seen, after) in enumerate(found):
        own = [float(rank * (case != "one"))] * 2
        assert difference == (case == "other network") and after == own and seen == ([0.5, 0.5] if means else own)
    assert len(averaged) == (4 if means else 0)  # of two arrays on two ranks
    assert sorted(looked) == ([0, 1] if case == "other network" else [])  # one of statistics is none of the network
