"""Steps of a rank by itself: which step averages gradients, and after which the parameters are averaged."""

import pytest

from dbrdist.comm.steps.policies.all_ranks import AllRanks
from dbrdist.comm.steps.policies.local import Local
from tests.comm.steps.policies.policy_helpers import policy_of, work
from tests.each import each


@each(is_first=[True, False])
def test_the_first_step_averages_gradients(monkeypatch, is_first):
    policy, done = policy_of(Local, local_steps=3), []
    monkeypatch.setattr(AllRanks, "gradients", lambda self, *args: done.append("mean") or "whole?")
    monkeypatch.setattr(policy, "work_alone", lambda work: done.append("alone"))
    assert policy.gradients(work(), is_first) == ("whole?" if is_first else True)
    assert done == (["mean"] if is_first else ["alone"])
    posted = []
    policy.headers.post = lambda *words: posted.append(words) or 1 // 0
    policy.headers.current_plan = lambda: None
    with pytest.raises(ZeroDivisionError):
        policy._average_parameters()
    assert posted == [(3, True, policy.zero_fill)]  # of the last step


def test_parameters_are_averaged_every_so_many_steps(monkeypatch):
    policy, averaged = policy_of(Local, local_steps=3), []
    monkeypatch.setattr(policy, "_average_parameters", lambda: averaged.append(step))
    for step in range(8):
        policy.after_update(is_first=step == 0)
    assert averaged == [3, 6] and policy.carried.num_local == 1
