"""Divided states: who divides, and when."""

from types import SimpleNamespace

from dbrdist.comm.steps.policies.sharded import Sharded
from tests.comm.steps.policies.policy_helpers import policy_of
from tests.each import each


def sharded(place):
    policy, done = policy_of(Sharded, zero=1), []
    policy.sharding = SimpleNamespace(
        place=place,
        settle=lambda plan: done.append(("divided", plan)),
        share_values=lambda call, plan: done.append(("spread", plan)),
    )
    return policy, done


@each(place=[5, 4])
def test_each_rank_gets_its_part_of_the_means(place):
    policy, done = sharded(place)
    plan = SimpleNamespace(place=5, reduce_scatter=lambda *args: done.append(("scattered", *args)))
    policy.average("call", plan, [0.5], 2.0)
    scattered = ("scattered", policy.comm, "call", [0.5], 2.0)
    assert done == ([scattered] if place == 5 else [("divided", plan), scattered])


@each(place=[5, 4])
def test_runs_are_divided_after_gradients_were_averaged_anew(monkeypatch, place):
    policy, done = sharded(place)
    plan = SimpleNamespace(place=5)
    monkeypatch.setattr(policy.comm, "weighted_mean_grad", lambda *args: done.append("averaged"), raising=False)
    policy.headers = SimpleNamespace(current_plan=lambda: plan)
    policy.reduce_anew(3)
    assert done == ["averaged", *([("divided", plan)] if place == 4 else [])]


@each(is_safe=[True, False])
def test_values_are_spread_after_an_update(monkeypatch, is_safe):
    policy, done = sharded(5)
    monkeypatch.setattr(policy.optimizer, "is_safe_to_update", lambda: is_safe)
    comm = policy.comm
    policy.headers = SimpleNamespace(current_plan=lambda: "plan", meet=lambda: comm.gate.call("update"))
    assert policy.has_more_to_do and not policy.may_enclose
    policy.after_update(False)
    assert done == ([("spread", "plan")] if is_safe else [])
