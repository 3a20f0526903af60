"""The mean of the ranks' networks takes the place of each rank's own for a while."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.gradients.mean_network import goes_apart, mean_parameters
from dbrdist.errors import CommunicatorError
from dbrdist.links import Linear


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
