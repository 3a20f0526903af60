"""Gradients that are sent while backward runs: which bucket goes when, told to the parts; on MPI in tests/mpi."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.communicators.threads import ThreadReducer
from dbrdist.comm.gradients import overlap
from dbrdist.comm.gradients import overlap as overlaps
from dbrdist.comm.gradients.communication_thread import PAUSE_SECONDS, Courier
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.core.model.parameter import Parameter
from tests.comm import reduction_ways_contract, started_contract
from tests.comm.training_contract import Net, batches
from tests.each import each

PLACE = ("train.py", 7)


class Comm:
    """The communicator of a courier: what it is asked for, and the order that rank 0 would send."""

    def __init__(self, rank=0, order_of_0=None):
        self.rank, self.order_of_0, self.verbs, self.calls, self.shown = rank, order_of_0, [], [], []
        self.gate = SimpleNamespace(call=self.call)

    @contextlib.contextmanager
    def call(self, verb, place):
        self.verbs.append((verb, place))
        self.calls.append(SimpleNamespace(pause_seconds=0.0))
        yield self.calls[-1]

    def bcast(self, x):
        self.shown.append(x if x is None else x.tolist())
        return x if self.order_of_0 is None else np.array(self.order_of_0, np.int64)


class Jobs:
    """In the place of a courier: what is to be done waits until somebody does."""

    def __init__(self, comm):
        self.comm, self.jobs, self.waits = comm, [], 0

    def put(self, job):
        self.jobs.append(job)

    def work(self):
        while self.jobs:
            self.jobs.pop(0)(self.comm)

    def wait(self):
        self.waits += 1
        self.work()


def four(monkeypatch, comm=None):
    """An overlap of four buckets, with a parameter each: of the last one first."""
    params = [Parameter(np.zeros(64, "f")) for _ in range(4)]
    plan = ReductionPlan([(f"/{i}", p) for i, p in enumerate(params)])
    sent = []
    monkeypatch.setattr(plan, "reduce_part", lambda comm, call, *args: sent.append((call.pause_seconds, *args)))
    found = Overlap(Jobs(comm or Comm()), plan, 64 * 4)
    assert [bucket.params for bucket in found.buckets] == [[p] for p in reversed(params)]
    return found, plan, params, sent


def begins(sent):
    """The parameters that were sent."""
    return [begin // 64 for _, _, begin, _, *_ in sent]


def test_a_bucket_is_sent_once_it_and_those_before_it_are_complete(monkeypatch):
    found, _plan, (a, b, c, d), sent = four(monkeypatch)
    courier = found._courier
    found.open(lambda: ([0.25, 0.75], 2.0), PLACE)
    assert not found.may_have_started
    found.ready(d.node)  # nothing is expected yet
    assert courier.jobs == []
    found.expect({p.node for p in (a, b, c, d)})
    assert found.may_have_started and courier.jobs == []
    found.ready(Parameter(np.zeros(1, "f")).node)
    found.ready(c.node)
    assert courier.jobs == []
    found.ready(d.node)
    assert len(courier.jobs) == 2
    courier.work()
    assert sent == [(PAUSE_SECONDS, 0, 192, 256, [0.25, 0.75], 2.0), (PAUSE_SECONDS, 0, 128, 192, [0.25, 0.75], 2.0)]
    assert courier.comm.verbs == [("reduce", PLACE)] * 2
    found.ready(a.node)
    assert courier.jobs == []
    found.ready(b.node)
    found.wait([0.5, 0.5], 3.0)  # all were sent: these are not looked at
    assert begins(sent) == [3, 2, 1, 0] and {s[4:] == ([0.25, 0.75], 2.0) for s in sent} == {True}


def test_what_backward_does_not_reach_is_zero_and_complete(monkeypatch):
    found, _plan, (a, b, c, d), sent = four(monkeypatch)
    for p in (a, b, c, d):
        p.grad = np.full(64, 7, "f")
    d.cleargrad()
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({a.node, b.node})
    assert d.grad.tolist() == [0] * 64 and len(found._courier.jobs) == 2
    found.wait(None, 5.0)
    assert begins(sent) == [3, 2, 1, 0] and [s[5] for s in sent] == [2.0, 2.0, 5.0, 5.0]


def test_nothing_is_sent_before_the_ranks_have_agreed(monkeypatch):
    found, _plan, params, sent = four(monkeypatch)
    answers, asked = [None, None, (None, 2.0)], []

    def ask():
        asked.append(1)
        return answers.pop(0)

    found.open(ask, PLACE)
    found.expect({p.node for p in params})
    for p in reversed(params):
        found.ready(p.node)
    assert len(asked) == 3 and len(found._courier.jobs) == 4  # what had waited goes with the third
    found.wait(None, 9.0)
    assert [s[5] for s in sent] == [2.0] * 4
    found.open(lambda: None, PLACE)
    found.expect({p.node for p in params})
    for p in params:
        found.ready(p.node)
    assert found._courier.jobs == []
    found.wait([1.0], 9.0)
    assert [s[4:] for s in sent[4:]] == [([1.0], 9.0)] * 4


def test_later_steps_send_in_the_order_in_which_buckets_became_complete(monkeypatch):
    found, _plan, (a, b, c, d), sent = four(monkeypatch)
    courier = found._courier
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({b.node, c.node, d.node})  # a is complete at once
    for p in (c, b, d):
        found.ready(p.node)
    found.wait(None, 2.0)
    assert begins(sent) == [3, 2, 1, 0] and courier.comm.shown == [[3, 1, 2, 0]] and courier.waits == 1
    assert [bucket.begin // 64 for bucket in found.buckets] == [0, 2, 1, 3]
    del sent[:]
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({p.node for p in (a, b, c, d)})
    for p in (a, c, d):
        found.ready(p.node)
    assert len(courier.jobs) == 2
    found.wait(None, 2.0)
    assert begins(sent) == [0, 2, 1, 3] and len(courier.comm.shown) == 1 and courier.waits == 2


def test_other_ranks_take_the_order_of_rank_0(monkeypatch):
    found, _plan, params, sent = four(monkeypatch, Comm(1, [2, 0, 3, 1]))
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({p.node for p in params})
    found.wait(None, 2.0)
    assert found._courier.comm.shown == [None]  # its own is not asked for
    assert [bucket.begin // 64 for bucket in found.buckets] == [1, 3, 0, 2]
    del sent[:]
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({p.node for p in params})
    found.ready(params[1].node)
    found._courier.work()
    assert begins(sent) == [1]


def test_without_a_backward_pass_the_next_step_tries_again(monkeypatch):
    found, _plan, params, sent = four(monkeypatch)
    shown = found._courier.comm.shown
    found.open(lambda: None, PLACE)
    found.wait(None, 2.0)
    assert shown == [[]] and begins(sent) == [3, 2, 1, 0]
    found.open(lambda: (None, 2.0), PLACE)
    found.expect({params[1].node})
    found.wait(None, 2.0)
    assert shown == [[], [3, 1, 0, 2]] and [bucket.begin // 64 for bucket in found.buckets] == [0, 2, 3, 1]


def test_buckets_without_parameters_come_first_and_those_that_were_never_complete_last(monkeypatch):
    found, _plan, _params, _sent = four(monkeypatch)
    assert found._order_of_completion() == []
    found.buckets[1].params.clear()
    found._completed = [3, 0]
    assert found._order_of_completion() == [1, 3, 0, 2]


@each(**{"took, pause": [([1e-4] * 3, PAUSE_SECONDS), ([4e-3, 4e-3, 1.0], 1e-4), ([1.0, 1.0, 1e-9], 2e-4),
                         ([], PAUSE_SECONDS)]})  # fmt: skip
def test_slow_buckets_are_looked_at_less_often_beside_backward(monkeypatch, took, pause):
    """Forty looks while one is sent, within bounds, by the median of the last step; always once backward is over."""
    found, _plan, params, sent = four(monkeypatch)
    found._took = list(took)
    found.open(lambda: (None, 2.0), PLACE)
    assert found._took == []
    found.expect({params[0].node})
    found._courier.work()
    running = found._call = SimpleNamespace(pause_seconds=pause)
    found.wait(None, 2.0)
    assert [s[0] for s in sent] == [pytest.approx(pause)] * 3 + [PAUSE_SECONDS]
    assert running.pause_seconds == PAUSE_SECONDS and len(found._took) == 4


def test_the_time_of_a_bucket_is_noted(monkeypatch):
    found, _plan, _params, _sent = four(monkeypatch)
    times = iter([10.0, 13.0, 20.0, 20.5, 30.0, 30.25, 40.0, 41.0])
    monkeypatch.setattr(overlaps, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    found.open(lambda: None, PLACE)
    found.wait(None, 2.0)
    assert found._took == [3.0, 0.5, 0.25, 1.0] and found._call is None


def test_after_a_step_it_keeps_nothing_of_the_optimizer(monkeypatch):
    found, _plan, _params, _sent = four(monkeypatch)
    models = [Net()]
    seen = weakref.ref(models[0])
    found.open(functools.partial(lambda model: None, models.pop()), PLACE)
    found.wait(None, 2.0)
    gc.collect()
    assert seen() is None


# ---- on ranks that are threads, with couriers -----------------------------------------------------------------------
@pytest.fixture
def couriers(monkeypatch):
    """Thread ranks reduce in the background, in buckets of one cache line; what each courier was given, by rank."""
    made = {}

    def background(reducer):
        comm = reducer.comm
        if comm not in made:
            made[comm] = Courier(comm.split(0, comm.rank))
        return made[comm]

    monkeypatch.setattr(ThreadReducer, "thread", background)
    monkeypatch.setattr(ThreadReducer, "overlap", lambda self, call, plan: Overlap(background(self), plan, 256))
    yield made
    for courier in made.values():
        courier.close()


def trained(comm, num_steps=4, **options):
    model = Net()
    actual = optimizers.MomentumSGD(lr=0.05)
    actual.setup(model)
    optimizer = actual if comm is None else create_multi_node_optimizer(actual, comm, **options)
    for x, t in batches(num_steps):
        if comm is None:
            optimizer.update(model, x, t)
        else:
            part = slice(0, 11) if comm.rank == 0 else slice(11, 16)
            optimizer.update(model, x[part], t[part], num_samples=len(x[part]))
    return {name: p.array.copy() for name, p in model.namedparams()}


@each(options=[{}, {"zero": 1}, {"zero": 2}])
def test_weights_are_those_of_one_process(couriers, options):
    expected = trained(None)
    for found in run_threads(2, trained, timeout_seconds=60, **options):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, err_msg=name)
    assert couriers


@pytest.mark.slow
@each(
    check=[
        started_contract.check_means_are_weighted, started_contract.check_several_travel_among_other_verbs,
        started_contract.check_parameters_may_come_and_move, started_contract.check_gradients_that_change_meanwhile,
        started_contract.check_wrong_arguments, reduction_ways_contract.check_double_buffering_is_one_step_late,
    ]
)  # fmt: skip
def test_reductions_in_the_background(couriers, check):
    run_threads(2, check, timeout_seconds=60)
    assert couriers


class Stretch:
    """A run of parameters of given sizes, one behind the other, of float32."""

    def __init__(self, *sizes):
        self.size = sum(sizes)
        self.data = np.zeros(self.size, "f")
        ends = np.cumsum([0, *sizes])
        self._layers = [(k, slice(int(a), int(b))) for k, (a, b) in enumerate(itertools.pairwise(ends))]

    def layers(self):
        return self._layers


@each(size=[0, 1, 64, 65, 128, 129, 511, 512, 513, 2000], num_bytes=[1, 256, 512, 2048, 10**6])
def test_buckets_cover_a_run_once(size, num_bytes):
    buckets = overlap.cut([Stretch(size), Stretch(7)], num_bytes)
    step = max(num_bytes // 4 // 64, 1) * 64
    of_first = [b for b in buckets if b.run_number == 0]
    assert [b.run_number for b in buckets] == [1] + [0] * len(of_first)
    ends = [(b.begin, b.end) for b in reversed(of_first)]
    assert [i for begin, end in ends for i in range(begin, end)] == list(range(size))
    assert all(begin % 64 == 0 and 0 < end - begin <= step for begin, end in ends)
    if size > step:  # the one that travels last is an eighth
        assert ends[0] == (0, max(step // 8 // 64, 1) * 64)
    elif size:
        assert ends == [(0, size)]


def test_a_bucket_has_the_parameters_that_touch_it():
    run = Stretch(64, 64, 128)
    assert overlap.Bucket(0, run, 64, 128).params == [1] and overlap.Bucket(0, run, 0, 64).params == [0]
    assert overlap.Bucket(0, run, 63, 65).params == [0, 1] and overlap.Bucket(0, run, 100, 256).params == [1, 2]
