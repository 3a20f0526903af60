"""Mean gradients of all ranks: each branch by itself, with stand-ins for what is around it."""

import _thread
import queue
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT
from dbrdist.comm.steps.policies import all_ranks
from dbrdist.comm.steps.policies.all_ranks import AllRanks
from tests.comm.steps.policies.policy_helpers import Headers, header_of, policy_of, work
from tests.comm.training_contract import batches
from tests.each import each


def noting(monkeypatch, *names, kind=AllRanks):
    """What is called of these methods of the class, which do nothing else."""
    done = []
    for name in names:
        monkeypatch.setattr(kind, name, lambda self, *args, name=name: done.append((name, *args)) or name)
    return done


@each(is_small=[True, False], zero_fill=[True, False], kind_may=[True, False])
def test_gradients_come_with_the_header_where_they_can(monkeypatch, is_small, zero_fill, kind_may):
    monkeypatch.setattr(AllRanks, "may_enclose", kind_may)
    policy = policy_of(AllRanks, zero_fill)
    done = noting(monkeypatch, "backward", "_reduce_with_header", "_reduce")
    policy.headers = Headers(policy.comm, is_small=is_small)
    policy.gradients(work(), False)
    encloses = is_small and zero_fill and kind_may
    assert done == ([("_reduce_with_header", 3, 0)] if encloses else [("_reduce", None, 3)])
    assert policy.headers.posted == ([] if encloses else [(3, 0, zero_fill)])


@each(num_samples=[None, 0, 3], has_loss=[True, False])
def test_forward_and_backward_of_a_step(monkeypatch, num_samples, has_loss):
    policy = policy_of(AllRanks)
    model = policy.optimizer.target
    done = noting(monkeypatch, "_reduce_with_header")
    times = iter([10.0, 12.5])
    monkeypatch.setattr(all_ranks, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model.l1.b.grad = np.full(9, 7.0)
    x, t = next(batches(1))
    policy.headers = Headers(policy.comm, is_small=True)
    assert policy.gradients(work(model if has_loss else None, x, t, num_samples=num_samples), False)
    works = has_loss and num_samples != 0
    assert done == [("_reduce_with_header", num_samples, works)] and policy.exposed_seconds == 2.5
    if works:
        grad = model.l1.b.grad.copy()
        model.cleargrads()
        model(x, t).backward()
        np.testing.assert_array_equal(grad, model.l1.b.grad)
    else:
        assert model.l1.b.grad.tolist() == [7.0] * 9


def test_a_thread_that_does_but_a_step_is_at_an_unknown_place(monkeypatch):
    policy, done = policy_of(AllRanks), queue.SimpleQueue()
    monkeypatch.setattr(policy.comm, "_release_enclosed", lambda: None, raising=False)
    policy.headers = Headers(policy.comm, header_of(True, True), "plan")
    _thread.start_new_thread(lambda: done.put(policy._reduce_with_header(3, True)), ())
    assert done.get(timeout=10)
    assert policy.comm.gate.record.last[-1].place == ("an unknown place", 0)


def test_a_wait_for_ranks_during_backward_is_exposed(monkeypatch):
    policy = policy_of(AllRanks)
    opened = []
    listener = SimpleNamespace(open=lambda weights, place, agree: opened.append(agree))
    policy.headers = Headers(policy.comm, overlap=listener)
    policy.listener()
    times = iter([10.0, 12.5])
    monkeypatch.setattr(all_ranks, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    opened[0]()
    assert policy.headers.waited and policy.exposed_seconds == 2.5


@each(is_enclosed=[True, False], same_runs=[True, False], plan=["plan", None], accumulate=[1, 2])
def test_what_is_reduced_where_ranks_meet_once(monkeypatch, is_enclosed, same_runs, plan, accumulate):
    policy = policy_of(AllRanks, accumulate=accumulate)
    done = noting(monkeypatch, "reduce", "reduce_anew")
    monkeypatch.setattr(policy.comm, "_release_enclosed", lambda: None, raising=False)
    headers = policy.headers = Headers(policy.comm, header_of(is_enclosed, same_runs), plan)
    assert policy._reduce_with_header(3, True)
    assert headers.asked == [(3, True, True)]
    if is_enclosed:
        weights = ([0.5], 2.0) if accumulate == 1 else (None, 3.0)
        assert headers.added == [("enclosed", weights)] and done == []
    else:
        assert headers.added == [] and [name for name, *_ in done] == (
            ["reduce"] if plan and same_runs else ["reduce_anew"]
        )
        assert done[0][-1] == (None if plan and same_runs else 3)


@each(same_runs=[True, False], plan=["plan", None], zero_fill=[True, False], overlap=["none", "placed", "not placed"])
def test_what_is_reduced_after_backward(monkeypatch, same_runs, plan, zero_fill, overlap):
    policy = policy_of(AllRanks, zero_fill)
    done = noting(monkeypatch, "average", "reduce_anew")
    settled, waited = [], []
    plan = plan and SimpleNamespace(settle=lambda *args: settled.append(args))
    policy.headers = Headers(policy.comm, header_of(False, same_runs, overlap == "placed"), plan)
    started = None if overlap == "none" else SimpleNamespace(wait=lambda *args: waited.append(args[:2]))
    assert policy._reduce(started, 3) is True
    names = [name for name, *_ in done]
    if not (plan and same_runs and zero_fill):
        assert done == [("reduce_anew", 3)] and not waited and not settled
    else:
        assert waited == ([([0.5], 2.0)] if overlap == "placed" else [])
        assert names == ([] if overlap == "placed" else ["average"]) and len(settled) == len(names)
        if names:
            call = done[0][1]
            assert settled == [(policy.comm, call, (5, 5))] and call.meets_by == "bytes"
            assert done[0][2:] == (plan, [0.5], 2.0)


@each(**{"header, plan, known": [(None, "plan", False), (header_of(), "plan", True), (header_of(), None, False),
                                 (header_of(is_placed=False), "plan", False)]})  # fmt: skip
def test_weights_are_known_once_all_agree_on_the_place(header, plan, known):
    policy = policy_of(AllRanks)
    policy.headers = Headers(policy.comm, header, plan)
    assert policy._weights_if_known() == (([0.5], 2.0) if known else None)


@each(**{"counts, accumulate, gathered, found": [
    ((2, 6), 1, [], ([0.25, 0.75], None)), ((2, 6), 3, [5, 5], (None, 8.0)), ((0, 8), 3, [0, 0], (None, 8.0)),
    ((EQUAL_WEIGHT,) * 2, 3, [None, None], (None, 6.0)), ((EQUAL_WEIGHT,) * 2, 1, [], (None, 2.0)),
]})  # fmt: skip
def test_weights_of_a_round(counts, accumulate, gathered, found):
    policy = policy_of(AllRanks, accumulate=accumulate)
    policy.comm = SimpleNamespace(size=2)
    policy.carried.gathered = gathered
    first = object()
    header = SimpleNamespace(counts=counts, weights=lambda: found if accumulate == 1 else first)
    assert policy.weights(header) == found


@each(accumulate=[1, 3], num_samples=[None, 7])
def test_gradients_are_averaged_anew_where_headers_could_not_know(monkeypatch, accumulate, num_samples):
    policy = policy_of(AllRanks, accumulate=accumulate)
    model, asked, divided = policy.optimizer.target, [], []
    monkeypatch.setattr(policy.comm, "weighted_mean_grad", lambda *args: asked.append(args), raising=False)
    monkeypatch.setattr(policy.carried, "divide", lambda *args: divided.append(args))
    model.l1.b.update_rule.enabled = False
    policy.headers = SimpleNamespace(current_plan=lambda: "plan")
    policy.reduce_anew(num_samples)
    ((named, zero_fill, count),) = asked
    assert {name for name, _ in named} == {name for name, _ in model.namedparams()} - {"/l1/b"}
    assert (zero_fill, count) == (True, num_samples)
    assert divided == ([] if accumulate == 1 else [("plan", num_samples)])


@each(has_overlap=[False, True], may_have_started=[False, True], is_first=[False, True])
def test_a_failure_in_backward_breaks_off_what_was_begun(has_overlap, may_have_started, is_first):
    """Where no gradient has left this rank, the ranks can go on; in the first step none is sent during backward."""
    policy, opened = policy_of(AllRanks), []
    given_up: list[bool] = []
    overlap = SimpleNamespace(
        may_have_started=may_have_started,
        open=lambda *args: opened.append(args),
        give_up=lambda: given_up.append(True),
    )
    headers = policy.headers = Headers(policy.comm, overlap=overlap if has_overlap else None)
    error = ValueError("on purpose")

    def fails():
        raise error

    with pytest.raises(ValueError, match="on purpose"):
        policy.gradients(work(fails), is_first)
    opens = has_overlap and not is_first
    assert headers.broken == ([error] if opens and may_have_started else [])
    assert given_up == [True] * len(headers.broken)
    assert headers.posted == ([] if is_first else [(3, True, True)]) and len(opened) == opens


@each(zero_fill=[False, True], has_overlap=[False, True])
def test_who_listens_to_backward(zero_fill, has_overlap):
    policy, opened = policy_of(AllRanks, zero_fill), []
    overlap = SimpleNamespace(open=lambda *args: opened.append(args)) if has_overlap else None
    policy.headers = Headers(policy.comm, overlap=overlap)
    assert policy.listener() is (overlap if zero_fill else None)
    expected = policy._weights_if_known, ("x.py", 1), policy._wait_early
    assert opened == ([expected] if zero_fill and has_overlap else [])


@each(is_small=[True, False], has_plan=[True, False])
def test_short_gradients_go_with_the_header(monkeypatch, is_small, has_plan):
    policy = policy_of(AllRanks)
    headers, model = policy.headers, policy.optimizer.target
    plan = headers.current_plan()
    model.l1.b.grad = np.full(9, 4.0)
    monkeypatch.setattr(headers, "is_small", lambda: is_small)
    monkeypatch.setattr(headers, "look", lambda: None)
    headers._plan = plan if has_plan else None
    seen = []

    def exchange(row, error, **named):
        assert error is None
        seen.append((row[-1], named["enclosed"]))
        return [bytes(8 * 47)]

    headers.exchange(SimpleNamespace(exchange=exchange), 3, True, True)
    ((encloses, enclosed),) = seen
    assert encloses == (is_small and has_plan) and (enclosed is plan.grads if encloses else enclosed == ())
    if encloses:
        assert (enclosed[0] == 4).sum() == 9


@each(is_recorded=[False, True])
def test_a_wait_for_headers_is_counted_and_noted_where_somebody_records(monkeypatch, is_recorded):
    noted, now = [], [10.0]

    def wait():
        now[0] += 2.5

    monkeypatch.setattr(all_ranks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(all_ranks.spans, "recorders", [object()] * is_recorded)
    monkeypatch.setattr(all_ranks.spans, "note", lambda *words: noted.append(words))
    own = SimpleNamespace(headers=SimpleNamespace(wait_early=wait), exposed_seconds=1.0)
    all_ranks.AllRanks._wait_early(own)
    assert own.exposed_seconds == 3.5 and noted == [("exposed wait", 10.0)] * is_recorded
