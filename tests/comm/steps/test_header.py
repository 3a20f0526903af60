"""Tests of dbrdist.comm.steps.header."""

import functools
import struct
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.comm.gradients.reduction_plan import EQUAL_WEIGHT, weights
from dbrdist.comm.protocol import gate
from dbrdist.comm.steps.header import Header, Steps
from dbrdist.comm.steps.optimizer_settings import OptimizerValues, in_words
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape import ops
from dbrdist.errors import CommunicatorError, NoSamplesError
from tests.comm.training_contract import Net, batches
from tests.each import each


def header_of(**columns):
    """The header of two ranks: runs, samples, works, stop, place, encloses."""
    values = {"runs": (5, 5), "counts": (3, 3), "works": (1, 1), "stops": (0, 0), "places": (4, 4), "encloses": (1, 1)}
    return Header([struct.pack("6q", *row) for row in zip(*{**values, **columns}.values())])


@each(
    **{
        "columns, same, placed, enclosed": [
            ({}, True, True, True), ({"places": (0, 0)}, True, False, True), ({"places": (1, 1)}, True, True, True),
            ({"places": (4, 5)}, True, False, True), ({"places": (0, 1)}, True, False, True),
            ({"runs": (5, 6)}, False, False, False), ({"encloses": (1, 0)}, True, True, False),
            ({"runs": (0, 0)}, True, True, True),
        ]
    }
)  # fmt: skip
def test_whether_gradients_lie_alike_at_one_place_and_came_along(columns, same, placed, enclosed):
    found = header_of(**columns)
    assert (found.same_runs, found.is_placed, found.is_enclosed) == (same, placed, enclosed)


def test_what_ranks_say_of_themselves():
    found = header_of(works=(0, 1), stops=(0, 15), counts=(1, 3))
    assert found.workers == [1] and found.stops.tolist() == [0, 15] and found.counts == (1, 3)
    assert found.weights() == ([0.25, 0.75], None) and found.weights() is found.weights()
    with pytest.raises(NoSamplesError):
        header_of(counts=(0, 0)).weights()


@each(
    **{
        "counts, found": [
            ((2, 2), (None, 2.0)), ((1, 3), ([0.25, 0.75], None)), ((EQUAL_WEIGHT,) * 3, (None, 3.0)),
            ((0, 1), ([0.0, 1.0], None)), ((1,), (None, 1.0)),
            ((0, 0), "expected a sample on at least one rank"),
            ((EQUAL_WEIGHT, 3), "from every rank or from none, got none, 3 on ranks 0 to 1"),
            ((-1, 3, 3), "of 0 or more, got -1, 3, 3 on ranks 0 to 2"),
            ((-1, EQUAL_WEIGHT), "of 0 or more, got -1, none on ranks 0 to 1"),
        ]
    }
)  # fmt: skip
def test_weights_of_ranks(counts, found):
    if isinstance(found, tuple):
        assert weights(counts) == found
    else:
        with pytest.raises((CommunicatorError, NoSamplesError), match=found):
            weights(counts)


def steps_of_one(settings=""):
    model = Net()
    optimizer = optimizers.MomentumSGD(lr=0.5)
    optimizer.setup(model)
    model(*next(batches(1)))
    return Steps(create_communicator("single"), optimizer, settings), optimizer, model


def test_the_words_of_a_header():
    steps, optimizer, _model = steps_of_one("way 1\n")
    steps._comm.stop.request = 15
    optimizer.t = 7
    steps.look()
    row = steps._row(5, True, False, (), True)
    values = "optimizer MomentumSGD\nloss scale None\nlr 0.5\nmomentum 0.9\nway 1\n"
    shapes = {"b": (9,), "W": (5, 9)}, {"b": (3,), "W": (9, 3)}
    texts = {f"/l{i + 1}/{name} {shape} float64\n" for i, found in enumerate(shapes) for name, shape in found.items()}
    assert set(steps._params_text.splitlines(keepends=True)) == texts
    plan = steps.current_plan()
    same = (7, gate.digest(steps._params_text), gate.digest(values), 0, 0, 0, 0)
    assert row == (*same, 0, plan.runs_digest, 5, 1, 15, 0, 1)
    assert all(type(word) in (int, bool) for word in row)
    plan.place = 3
    row = steps._row(None, 0, True, ["/a", "/b"], False)
    assert row[3:] == (1, gate.digest("/a/b"), 0, 0, 0, plan.runs_digest, EQUAL_WEIGHT, 0, 15, 3, 0)
    which = steps.introduction.in_words()
    assert steps._in_words() == f"step 7\nzero_fill True\n{which}{values}{steps._params_text}new parameters /a, /b\n"
    steps._row(None, False, True, (), False)
    assert steps._in_words() == f"step 7\nzero_fill True\n{which}{values}{steps._params_text}"
    assert OptimizerValues(optimizer).digest == 0 and OptimizerValues(optimizer).text == ""


def test_a_header_is_shown_and_waited_for():
    steps, optimizer, _model = steps_of_one()
    assert steps.poll() is None
    steps.post(4, True, True)
    found = steps.poll()
    assert found.counts == (4,) and found.workers == [0] and found is steps.poll()
    assert steps._comm.stop.answers is found.stops
    with steps.meet() as call:
        assert steps.wait(call) is found
    steps.post(4, True, True)
    with steps.meet() as call:
        assert steps.wait(call) is found  # it says the same
    assert steps.place[0] == __file__
    steps.post(3, False, True)
    with steps.meet() as call:
        other = steps.wait(call)
    assert other is not found and other.counts == (3,) and other.workers == []
    optimizer.t += 1
    with steps._gate.call("update") as call:
        steps.exchange(call, 3, False, True)
    assert steps._passage is None and steps.poll() is other


def test_a_refused_header_leaves_the_communicator_as_it_is():
    steps, _optimizer, _model = steps_of_one()
    gate_of = steps._gate
    steps.post(4, True, True)
    assert not steps._is_refused
    with pytest.raises(CommunicatorError), steps.meet() as call:
        call._answer = SimpleNamespace(wait=lambda call: [bytes(gate.ROW_BYTES)], pieces=list)
        steps.wait(call)
    assert steps._is_refused
    steps.break_off(ValueError("on purpose"))
    assert gate_of.closed == ""
    steps.post(4, True, True)
    steps.break_off(ValueError("on purpose"))
    assert "cannot be used any more, because update at " in gate_of.closed
    assert gate_of.closed.endswith("ValueError: on purpose")


def test_small_gradients_are_known_until_something_changes(monkeypatch):
    steps, _optimizer, model = steps_of_one()
    asked, answer = [], [True]
    monkeypatch.setattr(steps._comm.reducer, "encloses", lambda grads: asked.append(grads) or answer[0], raising=False)
    assert not steps.is_small() and asked == []  # nothing is known yet
    steps.look()
    steps._gate.describe_config()
    assert [steps.is_small() for _ in range(3)] == [True] * 3 and len(asked) == 1
    assert asked[0] is steps.current_plan().grads
    steps._gate.describe_config()  # the same words
    assert steps.is_small()
    steps._gate.config_changed()
    answer[0] = False
    asked.clear()
    assert not steps.is_small() and not steps.is_small() and len(asked) == 2
    answer[0] = True
    assert steps.is_small() and steps.small_config is None
    with model.init_scope():
        model.more = Parameter()
    assert steps.small_plan is None
    steps._gate.describe_config()
    assert steps.is_small() and steps.small_plan is steps.last_plan  # as far as it knows
    steps.look()
    assert steps.small_plan is None  # so that the next step asks
    assert [name for name, _ in steps.late] == ["/more"] and not steps.is_small()
    early = steps.current_plan()  # of the other parameters: what the header cannot speak of yet
    assert steps.current_plan() is early and len(early.params) == len(list(model.params())) - 1
    assert not steps.is_small() and steps._plan is None
    assert steps._row(None, 0, True, (), False)[8] == early.runs_digest
    model.more.initialize((2,))
    assert steps.current_plan() is not early and steps.is_small()


@pytest.mark.filterwarnings("ignore:MomentumSGD.setup. the target was")
def test_a_plan_holds_until_the_forward_pass_changes_something():
    steps, optimizer, model = steps_of_one()
    assert not (steps.watch and steps.watch.is_current())
    steps.look()
    steps.look()
    plan = steps.plan()
    assert plan is steps.current_plan() is steps.shown_plan() and steps.num_plans == 1
    assert steps.watch.is_current()
    assert set(plan.params) == set(model.params())
    model.l1.b.update_rule.enabled = False
    assert not (steps.watch and steps.watch.is_current())
    assert steps.plan() is None and steps.num_plans == 2  # one that was shown is no more
    assert set(steps.plan().params) == set(model.params()) - {model.l1.b}
    assert "/l1/b (9,) float64 frozen\n" in steps._params_text
    model.l2.W.update_rule.hyperparam.lr = 0.125
    steps.look()
    assert "/l2/W (9, 3) float64 lr 0.125\n" in steps._params_text
    other = Net()
    other(*next(batches(1)))
    optimizer.setup(other)
    steps.look()
    assert set(steps.current_plan().params) == set(other.params())


def test_what_overlaps_needs_a_plan_and_parts_of_its_place():
    steps, _optimizer, model = steps_of_one()
    assert steps.overlap() is None
    steps.look()
    plan = steps.current_plan()
    plan.overlap, plan.place = "overlap", 3
    assert steps.overlap() == "overlap" and plan.division is None
    for place in (2, 3):
        parts = SimpleNamespace(place=place)
        assert steps.overlap(parts) == ("overlap" if place == 3 else None) and plan.division is parts
    with model.init_scope():
        model.more = Parameter()
    steps.look()
    assert steps.overlap() is None and steps._runs_digest == 0
    assert set(steps.current_plan().params) == {p for p in model.params() if p is not model.more}


def test_most_steps_change_no_value():
    model = Net()
    optimizer = optimizers.MomentumSGD(lr=0.5).setup(model)
    values = OptimizerValues(optimizer)
    assert not values.are_as_before()

    def is_seen(text):
        """What has changed is noticed, and stands in the words."""
        assert not values.are_as_before()
        values.look("end\n")
        assert values.are_as_before() and values.digest == gate.digest(values.text)
        assert values.text == f"optimizer MomentumSGD\nloss scale {scale}\nlr {lr}\nmomentum 0.9\n{text}end\n"

    scale, lr = None, 0.5
    is_seen("")
    optimizer.lr = lr = 0.25
    is_seen("")
    scale = 8.0
    optimizer.set_loss_scale(8.0)
    is_seen("")
    decay = optimizers.WeightDecay(0.125)
    optimizer.add_hook(decay, "a")
    is_seen("hook WeightDecay params None rate 0.125\n")
    decay.rate = 1
    is_seen("hook WeightDecay params None rate 1.0\n")
    optimizer.add_hook(lambda inner: None, "own")  # a user's own is not compared
    is_seen("hook WeightDecay params None rate 1.0\n")
    optimizer.remove_hook("a")
    is_seen("")
    optimizer.remove_hook("own")
    is_seen("")
    optimizer.hyperparam.put("rates", np.array([1.0, 2.0]))
    assert not values.are_as_before()
    values.look("")
    assert not values.are_as_before()  # arrays are compared anew each time
    del optimizer.hyperparam.rates
    is_seen("")


@each(
    **{
        "value, words": [
            (1, "1.0"), (True, "1.0"), (np.float32(0.5), "0.5"), (np.array([[2]]), "2.0"), ("text", "text"),
            (None, "None"), (-0.0, "0.0"), (1j, "1j"), ([1, (2,)], "(1.0, (2.0))"), ((), "()"),
            ({"b", "a"}, "(a, b)"), (gate.digest, "digest"), (object(), None), (np.array([None, 1]), None),
            (functools.partial(gate.digest, "a", b=2), "(digest, (a), (b, 2.0))"),
            (np.zeros(2), in_words(np.zeros(2, "f"), {})), (Parameter(np.zeros(3)), "a parameter of shape (3,)"),
        ]
    }
)  # fmt: skip
def test_equal_numbers_have_equal_words(value, words):
    assert in_words(value, {}) == words
    assert in_words(np.array([1.0, 2.0]), {}) != in_words(np.array([2.0, 1.0]), {})


class Halved:
    """No rule of ours, of which an optimizer asks only for `update`."""

    def update(self, param):
        param.array = param.array - 0.5 * param.grad


class Other(Halved):
    """Another one."""


@each(options=[{}, {"zero_fill": False}, {"accumulate": 2}, {"local_steps": 2}, {"double_buffering": True}])
def test_ranks_step_with_rules_that_are_none_of_ours(options):
    def run(comm):
        link = L.Linear(2, 1, nobias=True, initialW=1.0)
        optimizer = optimizers.SGD(1.0).setup(link)
        link.W.update_rule = Halved()
        optimizer = create_multi_node_optimizer(optimizer, comm, **options)
        x = np.full((1, 2), comm.rank + 1, np.float32)  # which is the gradient
        for _ in range(3):
            optimizer.update(lambda: ops.sum(link(x)))
        return link.W.array.tolist()

    num_updates = 1 if "accumulate" in options else 2 if "double_buffering" in options else 3
    assert run_threads(2, run) == [[[1.0 - num_updates * 0.5 * 1.5] * 2]] * 2


@each(zero=[1, 2])
def test_a_divided_state_is_refused_to_rules_that_are_none_of_ours(zero):
    def run(comm):
        link = L.Linear(2, 1)
        optimizer = optimizers.SGD(1.0).setup(link)
        link.b.update_rule = Halved()
        with pytest.raises(ValueError, match="Halved updates b as a whole"):
            create_multi_node_optimizer(optimizer, comm, zero=zero).update(lambda: ops.sum(link(np.ones((1, 2), "f"))))

    run_threads(2, run)


def test_ranks_whose_rules_are_of_different_classes_do_not_step():
    def run(comm):
        link = L.Linear(2, 1, nobias=True)
        optimizer = optimizers.SGD(1.0).setup(link)
        link.W.update_rule = [Halved, Other][comm.rank]()
        with pytest.raises(
            CommunicatorError, match=r"rank 1: /W .* updated by Other .*instead of .* updated by Halved"
        ):
            create_multi_node_optimizer(optimizer, comm).update(lambda: ops.sum(link(np.ones((1, 2), np.float32))))

    run_threads(2, run)
