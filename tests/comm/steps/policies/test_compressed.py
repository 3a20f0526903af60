"""Compressed gradients travel after backward, and never with the header."""

from types import SimpleNamespace

from dbrdist.comm.steps.policies.compressed import Compressed
from tests.comm.steps.policies.policy_helpers import header_of, policy_of


def test_the_compression_reduces():
    policy, done = policy_of(Compressed), []
    policy.way = SimpleNamespace(compression=SimpleNamespace(reduce=lambda *args: done.append(args)))
    with policy.comm.gate.call("update") as call:
        assert policy.reduce(call, "plan", header_of(), None)
    assert done == [(policy.comm, call, "plan", [0.5], 2.0)] and call.meets_by == "bytes"
    assert policy.listener() is None and not policy.may_enclose and policy.needs_constant_loss_scale
