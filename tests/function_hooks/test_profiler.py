"""The profiler: what it counts, and that it changes nothing."""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import models, optimizers
from dbrdist.core.array import spans
from dbrdist.core.model.link import Link
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.function_hooks import profiler
from tests.each import each

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"


def train(steps=3):
    """All weights after a few steps of a network with batch normalization and ReLU, and its scores in inference."""
    dbrdist.random.set_seed(0)
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(4, 3, 16, 16)).astype("f"), np.arange(4, dtype="i")
    model = L.Classifier(models.ResNet20(10))
    optimizer = optimizers.MomentumSGD(0.1).setup(model)
    for _ in range(steps):
        model.cleargrads()
        model(x, t).backward()
        optimizer.update()
    with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
        scores = model.predictor(x).array
    return [p.array.copy() for p in model.params()] + [scores]


@pytest.mark.slow
def test_the_same_kernels_run_and_every_bit_is_the_same():
    plain = train()
    with dbrdist.profile() as p:
        profiled = train()
    for a, b in zip(plain, profiled, strict=True):
        np.testing.assert_array_equal(a, b)
    fused = [e for e in p.entries.values() if e.function in ("ReLU", "RectifiedSum")]  # the latter at a block's end
    assert sum(e.calls["forward"] for e in fused) >= 3 * 19  # those of training; at inference convolutions compute them


def test_what_is_counted():
    x = np.ones((5, 3), "f")
    net = dbrdist.Sequential(L.Linear(3, 4), F.relu, L.Linear(4, 2))
    optimizer = optimizers.SGD(0.1).setup(net)
    with dbrdist.profile() as p:
        for _ in range(2):
            net.cleargrads()
            F.sum(net(x)).backward()
            optimizer.update()
    found = {key: (e.calls["forward"], e.calls["backward"], e.calls["update"]) for key, e in p.entries.items()}
    assert found == {
        ("LinearFunction", "/0"): (2, 2, 0), ("LinearFunction", "/1"): (2, 2, 0), ("ReLU", "/"): (2, 2, 0),
        ("Sum", ""): (2, 2, 0), ("SGD", ""): (0, 0, 2),
    }  # fmt: skip
    assert p.entries["LinearFunction", "/0"].bytes == 2 * 5 * 4 * 4
    assert {e.function for e in p.by_function()} == {"LinearFunction", "ReLU", "Sum", "SGD"}
    assert {e.layer for e in p.by_layer()} == {"/0", "/1", "/", ""}
    total = sum(e.total_seconds for e in p.by_function())
    assert 0 < total <= p.seconds and p.python_share == pytest.approx(1 - total / p.seconds)
    seconds = [e.total_seconds for e in p.by_function()]
    assert seconds == sorted(seconds, reverse=True)


def test_views_take_no_memory_and_functions_inside_are_not_counted_twice():
    x = dbrdist.Variable(np.ones((2, 6), "f"))

    class Outer(dbrdist.FunctionNode):
        def forward(self, xs):
            return (F.exp(xs[0]).array,)

    with dbrdist.profile() as p:
        F.reshape(x, (3, 4))
        Outer().apply((x,))
    assert p.entries["Reshape", ""].bytes == 0 and p.entries["exp", ""].bytes == 48
    assert p.entries["Outer", ""].total_seconds + p.entries["exp", ""].total_seconds <= p.seconds


def test_afterwards_every_method_is_what_it_was():
    before = FunctionNode.apply, Link.__call__, F.relu, dict(FunctionNode.__dict__)
    with pytest.raises(ZeroDivisionError), dbrdist.profile():
        assert FunctionNode.apply is not before[0]
        F.exp(np.ones(2, "f"))
        raise ZeroDivisionError
    assert FunctionNode.apply == before[0] and Link.__call__ is before[1]
    assert "apply" not in FunctionNode.__dict__ or before[3]["apply"] is FunctionNode.__dict__["apply"]
    assert all("profiled" not in str(c.__dict__.get("derive")) for c in FunctionNode.__subclasses__())


def test_one_profile_at_a_time_and_of_its_own_thread():
    with dbrdist.profile() as p:
        with pytest.raises(RuntimeError, match="another profile records already"), dbrdist.profile():
            pass
        other = threading.Thread(target=lambda: F.exp(np.ones(2, "f")))
        other.start()
        other.join()
        F.log(np.ones(2, "f"))
    assert list(p.entries) == [("log", "")]
    with dbrdist.profile() as again:
        F.exp(np.ones(2, "f"))
    assert ("exp", "") in again.entries


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        Clock.now += 1e-6  # each look at it
        return Clock.now


@pytest.mark.slow
def test_with_a_bound_on_the_overhead_steps_of_a_small_network_are_recorded_in_bursts(monkeypatch, tmp_path):
    net = L.Linear(3, 2)
    optimizer = optimizers.SGD(0.1).setup(net)

    def step(seconds):
        net.cleargrads()
        F.sum(net(np.ones((5, 3), "f"))).backward()
        Clock.now += seconds
        optimizer.update()

    clock = SimpleNamespace(perf_counter=Clock(), thread_time=Clock())
    monkeypatch.setattr(profiler, "time", clock)
    before = FunctionNode.apply, Link.__call__
    with dbrdist.profile(most_overhead=0.05) as fast:
        states = []
        for _ in range(2000):
            step(50e-6)
            states.append(FunctionNode.apply is before[0])
    assert fast.num_steps == 2000 and 10 < fast.num_recorded < 500
    assert fast.num_recorded == states.count(False) + 1 or any(states)
    (linear,) = [e for e in fast.entries.values() if e.function == "LinearFunction"]
    assert linear.calls["forward"] == linear.calls["backward"] == fast.num_recorded
    assert fast.entries["SGD", ""].calls["update"] == fast.num_recorded
    assert fast.seconds < 0.5 * 2000 * 50e-6
    fast.write_trace(tmp_path / "t.json")  # Perfetto drops what lies before 0
    assert min(event["ts"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]) >= 0
    assert f"profile: {fast.num_recorded} of 2,000 steps in" in next(fast.lines())
    with dbrdist.profile(most_overhead=0.05) as slow:
        for _ in range(50):
            step(0.1)
    assert slow.num_steps == slow.num_recorded == 50 and "in all" in next(slow.lines())
    assert (FunctionNode.apply, Link.__call__) == before


def bursts(monkeypatch, seconds_of_a_step, steps=3000):
    """The steps that a trace has of a run whose steps take this long, while a bounded profile records."""
    clock = SimpleNamespace(perf_counter=Clock(), thread_time=Clock())
    monkeypatch.setattr(profiler, "time", clock)
    net = L.Linear(3, 2)
    optimizer = optimizers.SGD(0.1).setup(net)
    recorder = spans.Recorder()
    spans.record(recorder)
    try:
        with dbrdist.profile(most_overhead=0.05) as p:
            for number in range(steps):
                with spans.step(number) if spans.recorders else contextlib.nullcontext():
                    net.cleargrads()
                    F.sum(net(np.ones((5, 3), "f"))).backward()
                    Clock.now += seconds_of_a_step
                    optimizer.update()
        assert spans.recording() is recorder
    finally:
        spans.record(None)
    whole = {span.step for span in recorder.spans if span.name == "step"}
    assert {span.step for span in recorder.spans} <= {-1, *whole}
    assert len(whole) == p.num_recorded or not p.is_recording
    return whole


@pytest.mark.slow
def test_a_trace_pauses_with_a_bounded_profile_and_ranks_record_the_same_steps(monkeypatch):
    here, there = bursts(monkeypatch, 50e-6), bursts(monkeypatch, 58e-6)
    assert set(range(10)) <= here and 10 < len(here) < 1000
    assert len(here & there) >= min(len(here), len(there)) / 2
    starts = sorted(s for s in here if s - 1 not in here)
    assert starts[0] == 0 and all(s % 32 == 0 for s in starts)
    assert bursts(monkeypatch, 0.1, 50) == set(range(50))


@pytest.mark.slow
def test_behind_a_pause_only_classes_whose_functions_ran_are_changed_and_new_functions_are_seen(monkeypatch):
    clock = SimpleNamespace(perf_counter=Clock(), thread_time=Clock())
    monkeypatch.setattr(profiler, "time", clock)
    net = L.Linear(3, 2)
    optimizer = optimizers.SGD(0.1).setup(net)

    def changed():
        return {
            c for c in all_of(FunctionNode) if "derive" in c.__dict__ and hasattr(c.__dict__["derive"], "__wrapped__")
        }

    with dbrdist.profile(most_overhead=0.05) as p:
        assert len(changed()) > 30  # a graph of before may be the first to run backward
        numbers, later = [], 0
        for _ in range(2000):
            net.cleargrads()
            y = net(np.ones((5, 3), "f"))
            if p.is_recording and p.num_steps > 1000:
                y, later = F.exp(y), later + 1
            F.sum(y).backward()
            Clock.now += 50e-6
            optimizer.update()
            numbers.append(len(changed()) if p.is_recording else -len(changed()))
    behind = numbers[numbers.index(0) :]
    assert 0 < max(behind) <= 4 and min(behind) >= 0
    (exp,) = [e for e in p.entries.values() if e.function == "exp"]
    assert exp.calls["forward"] == exp.calls["backward"] == later > 0
    assert not changed()


def all_of(cls):
    """The subclasses of a class, and theirs."""
    return {found for sub in cls.__subclasses__() for found in {sub, *all_of(sub)}}


def test_own_functions_with_a_rule_of_chainer_are_seen_backward_and_once():
    class Square(FunctionNode):
        def forward(self, inputs):
            self.retain_inputs((0,))
            return (inputs[0] ** 2,)

        def backward(self, indexes, grads):
            return (2 * self.get_retained_inputs()[0] * grads[0],)

    with dbrdist.profile() as p:

        class Later(Square):
            pass

        for function in (Square, Later):
            x = dbrdist.Variable(np.ones(3, "f"))
            (y,) = function().apply((x,))
            F.sum(y).backward()
    for name in ("Square", "Later"):
        assert p.entries[name, ""].calls == {"forward": 1, "backward": 1, "update": 0}


@each(bound=[0, -1, 1.5, float("nan")])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ValueError, match="most_overhead"):
        dbrdist.profile(bound)


def test_an_error_inside_a_function_and_shared_or_unnamed_links():
    shared = L.Linear(3, 3)
    with dbrdist.profile() as p:
        with pytest.raises(ValueError):
            shared(np.ones((2, 5), "f"))
        shared(np.ones((2, 3), "f"))
    assert p.layer == "" and p.entries["LinearFunction", "/"].calls["forward"] == 2


def test_an_empty_block_prints_a_table():
    with dbrdist.profile() as p:
        pass
    out = io.StringIO()
    p.print_report(file=out)
    assert "function  calls" in out.getvalue() and "100.0 %" in out.getvalue()


@pytest.mark.parametrize("most_overhead", [None, 0.05])
def test_the_trace_of_all_ranks_shows_the_calls_too(most_overhead, tmp_path):
    recorder = spans.Recorder()
    spans.record(recorder)
    try:
        with dbrdist.profile(most_overhead) as p:
            L.Linear(3, 2)(np.ones((2, 3), "f"))
    finally:
        spans.record(None)
    assert [s.name for s in recorder.spans] == ["LinearFunction (/)"]
    p.write_trace(tmp_path / "t.json")
    (event,) = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (event["name"], event["cat"], event["args"]["layer"]) == ("LinearFunction", "forward", "/")
    assert event["ts"] >= 0 and event["dur"] >= 0


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    exec(compile(block, "profiling.md", "exec"), {})
    assert "LinearFunction" in capsys.readouterr().out and (tmp_path / "steps.json").exists()
