"""Double buffering: what is there to update with is the buffers' to say."""

from types import SimpleNamespace

from dbrdist.comm.steps.policies.delayed import Delayed
from tests.comm.steps.policies.policy_helpers import Headers, header_of, policy_of
from tests.each import each


@each(is_whole=[True, False])
def test_the_buffers_swap_or_hold_gradients(is_whole):
    policy, done = policy_of(Delayed), []
    note = lambda *args: done.append(args) or is_whole  # noqa: E731
    policy.carried.buffers = SimpleNamespace(swap=note, hold=note)
    headers = policy.headers = Headers(policy.comm, header_of())
    headers.current_plan = lambda: "whole plan"
    assert policy.reduce("call", "plan", header_of(), None) is is_whole
    assert policy.is_whole_anew() is is_whole
    assert done == [("plan", [0.5], 2.0, ("x.py", 1)), ("whole plan",)]
    assert policy.listener() is None and not policy.may_enclose and policy.needs_constant_loss_scale
