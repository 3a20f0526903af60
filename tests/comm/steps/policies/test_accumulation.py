"""Which call of update ends a step."""

import pytest

from dbrdist.comm.steps.policies.accumulation import Accumulation
from dbrdist.comm.steps.policies.one_rank import OneRank
from tests.comm.steps.policies.policy_helpers import policy_of, work
from tests.each import each


@each(counts=[(None,) * 6, (3, 0, 2, 1, 0, 0)])
def test_the_last_of_three_calls_ends_a_step(monkeypatch, counts):
    policy, alone = policy_of(OneRank, accumulate=3), []
    monkeypatch.setattr(policy, "work_alone", lambda work: alone.append(work[-1]))
    accumulation = Accumulation(3, policy, policy.carried)
    ends = []
    for count in counts:
        ends.append(accumulation.ends_step(work(print, num_samples=count)))
        if ends[-1]:
            assert policy.carried.gathered == alone[-2:]
            accumulation.begin_anew()
            assert policy.carried.gathered == []
    assert ends == [False, False, True] * 2 and alone == [*counts[:2], *counts[3:5]]


def test_calls_that_do_not_go_together():
    policy = policy_of(OneRank, accumulate=3)
    accumulation = Accumulation(3, policy, policy.carried)
    with pytest.raises(ValueError, match="expected a lossfun in update, got none"):
        accumulation.ends_step(work())
    policy.carried.gathered = [None]
    with pytest.raises(ValueError, match="num_samples in all calls of update or in none"):
        accumulation.ends_step(work(print))
