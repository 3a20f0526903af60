"""Which step is captured, and what is said of others: on the host, with steps that only note what they are asked."""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.errors import UsageWarning
from dbrdist.kernels.gpu import cublaslt
from dbrdist.training import captured_step
from dbrdist.training.captured_step import CapturedSteps, _kinds, _why_not_inputs
from dbrdist.training.graph_of_step import NotCaptured

EAGER = "the step is not captured as a CUDA graph and runs eagerly: "


class OnGpu:
    """Stands for an array that is not the host's."""

    def __init__(self, shape=(2,)):
        self.shape, self.strides, self.dtype = shape, (4,), np.dtype("f4")


class Optimizer:
    """Notes its eager steps."""

    def __init__(self):
        self.eager = []

    def update(self, loss_func, *args, **options):
        self.eager.append((loss_func, args, options))


class Step:
    """A kind of step that notes what it runs; a loss function called "no" cannot be captured."""

    def __init__(self, stream, loss_func):
        self.loss_func, self.reason, self.is_stale, self.graphs = loss_func, None, False, []
        self.stream = stream
        self.runs, self.given_back = [], 0
        made.append(self)

    def run(self, optimizer, loss_func, args, named, told):
        if loss_func == "no":
            raise NotCaptured("it counts")
        self.runs.append((optimizer, args, named, told))
        self.graphs = [1]

    def give_back_memory(self):
        self.given_back += 1


made = []


@pytest.fixture
def steps(monkeypatch):
    """Captured steps on a machine where everything can be captured."""
    made.clear()
    streams = []
    cuda = types.SimpleNamespace(Stream=lambda **options: streams.append(options) or (len(streams), options))
    is_array = backend.is_array
    monkeypatch.setattr(backend, "is_array", lambda v: isinstance(v, OnGpu) or is_array(v))
    monkeypatch.setattr(backend, "import_cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(captured_step, "why_not_captured", lambda optimizer: getattr(optimizer, "reason", None))
    monkeypatch.setattr(captured_step, "switches_of", lambda optimizer: ())
    monkeypatch.setattr(cublaslt, "why_not", lambda: None)
    monkeypatch.setattr(captured_step, "GraphOfStep", Step)
    monkeypatch.setattr(captured_step, "GraphOfJointStep", type("JointStep", (Step,), {}))
    return CapturedSteps()


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(w.category is UsageWarning for w in caught)
    return [str(w.message) for w in caught]


def test_the_first_step_is_eager_and_each_kind_of_inputs_has_a_step_of_its_own(steps):
    optimizer, x = Optimizer(), OnGpu()
    steps.update(optimizer, "f", (x, 3), {"t": x}, {"num_samples": 5})
    assert optimizer.eager == [("f", (x, 3), {"t": x, "num_samples": 5})] and not made
    for _ in range(2):
        steps.update(optimizer, "f", (x, 3), {"t": x}, {"num_samples": 5})
    (step,) = made
    assert step.runs == 2 * [(optimizer, (x, 3), {"t": x}, {"num_samples": 5})]
    assert (made[0].loss_func, len(optimizer.eager), steps.num_graphs) == ("f", 1, 1)
    for args, named in (((x, 4), {"t": x}), ((x, 3), {"u": x}), ((x, 3), {"t": OnGpu((3,))})):
        steps.update(optimizer, "f", args, named, {})
    steps.update(optimizer, ["not hashable"], (x, 3), {"t": x}, {})
    assert [len(step.runs) for step in made] == [2, 1, 1, 1, 1] and steps.num_graphs == 5
    made[0].is_stale = True  # as after parameters were frozen: captured anew, and forgotten
    steps.update(optimizer, "f", (x, 3), {"t": x}, {})
    assert [len(step.runs) for step in made] == [2, 1, 1, 1, 1, 1] and steps.num_graphs == 5


def test_eight_graphs_are_enough(steps):
    optimizer = Optimizer()
    words = said(lambda: [steps.update(optimizer, "f", (OnGpu((n,)),), {}, {}) for n in (1, *range(1, 11))])
    assert len(made) == 8 and len(optimizer.eager) == 3  # the first one, and those of 9 and 10 examples
    assert words == [EAGER + "there are 8 graphs already, for other shapes of inputs or values of hooks"]
    assert [step.stream for step in made] == 8 * [(1, {"non_blocking": True})]  # one for all
    made[0].is_stale = made[1].is_stale = True
    for n in (9, 10, 11):
        steps.update(optimizer, "f", (OnGpu((n,)),), {}, {})
    assert len(made) == 10 and len(optimizer.eager) == 4


def test_what_cannot_be_captured_runs_eagerly_and_is_said_once(steps):
    optimizer, x = Optimizer(), OnGpu()
    steps.update(optimizer, "no", (x,), {}, {})
    assert said(lambda: [steps.update(optimizer, "no", (x,), {}, {}) for _ in range(3)]) == [EAGER + "it counts"]
    assert len(optimizer.eager) == 4 and (made[0].given_back, steps.num_graphs) == (1, 0)
    host = "an input of the step is in host memory; name a device for the updater"
    assert said(lambda: steps.update(optimizer, "f", (np.ones(2),), {}, {})) == [EAGER + host]
    assert said(lambda: steps.update(optimizer, "f", (), {"t": np.ones(2)}, {})) == []
    optimizer.reason = "it is in double precision"
    assert said(lambda: steps.update(optimizer, "f", (x,), {}, {})) == [EAGER + "it is in double precision"]
    assert len(optimizer.eager) == 7 and len(made) == 1


def test_a_missing_library_is_said(steps, monkeypatch):
    monkeypatch.setattr(cublaslt, "why_not", lambda: "there is no cuBLASLt")
    optimizer = Optimizer()
    words = said(lambda: [steps.update(optimizer, "f", (OnGpu(),), {}, {}) for _ in range(2)])
    assert words == [EAGER + "there is no cuBLASLt"] and len(optimizer.eager) == 2


def test_an_optimizer_of_one_rank_steps_in_the_place_of_that_of_several(steps):
    alone = Optimizer()
    several = types.SimpleNamespace(optimizer_of_one_rank=alone, update=lambda *args, **named: None)
    for _ in range(2):
        steps.update(several, "f", (OnGpu(),), {}, {"num_samples": 5})
    assert made[0].runs[0][0] is alone and made[0].runs[0][3] == {} and several.num_samples == 5


@pytest.mark.parametrize(
    "rank, of_all, is_said", [(0, "local steps", True), (1, "local steps", False), (1, None, False)]
)
def test_ranks_step_together_and_rank_0_says_why_not(steps, rank, of_all, is_said):
    joint = Optimizer()
    joint.actual_optimizer, joint.why_not_captured = Optimizer(), lambda: of_all
    joint.communicator, joint.update_in_passes = types.SimpleNamespace(rank=rank), True
    steps.update(joint, "f", (OnGpu(),), {}, {})
    words = said(lambda: steps.update(joint, "f", (OnGpu(),), {}, {}))
    assert words == [f"{EAGER}{of_all}"] * is_said
    assert len(joint.eager) == (1 if of_all is None else 2)
    assert [(type(step).__name__, step.runs[0][0] is joint) for step in made] == [("JointStep", True)] * (
        of_all is None
    )


def test_an_updater_that_never_asks_is_named_once(steps):
    words = (
        "the step is not captured as a CUDA graph and runs eagerly: update_core of Mine is the program's own; give "
        "StandardUpdater a loss function instead"
    )
    mine = type("Mine", (), {})
    assert said(lambda: steps.look(mine)) == [words]
    assert said(lambda: steps.look(mine)) == []
    other = CapturedSteps()
    other.update(Optimizer(), "f", (), {}, {})
    assert said(lambda: other.look(mine)) == []


def test_kinds_of_inputs():
    x = np.zeros((2, 3), "f4").T
    assert _kinds([x, 3, None, "a"]) == (((3, 2), (4, 12), np.dtype("f4")), 3, None, "a")
    assert _why_not_inputs((1, 2.0, True, None, "a")) is None
    assert _why_not_inputs((1, [2])) == "an input of the step is a list, expected arrays on the GPU"
