"""Tests of dbrdist.comm.steps.step_state."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.comm.gradients.compression import TopK
from dbrdist.comm.steps import step_state
from dbrdist.comm.steps.step_options import StepOptions
from dbrdist.comm.steps.step_state import Loaded, StepState
from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CheckpointError
from dbrdist.links import Linear
from tests.comm.training_contract import Net, batches
from tests.each import each


def test_states_are_set_where_they_are():
    link = Linear(2, 1)
    optimizers.Adam().setup(link)
    step_state._set_state(None, "m", np.ones(2))
    step_state._set_state(link.W, "m", np.ones((1, 2)))  # no state yet
    for p in link.params():
        p.grad = np.ones_like(p.array)
    link.W.update_rule.update(link.W)
    state = link.W.update_rule.state
    step_state._set_state(link.W, "m", np.full((1, 2), 5.0, "f"))
    step_state._set_state(link.W, "nothing", np.ones(2))
    assert state["m"].tolist() == [[5, 5]] and "nothing" not in state
    state["count"] = 3
    step_state._set_state(link.W, "count", np.array(7.0))
    assert state["count"] == 7 and type(state["count"]) is int


def carried_by(size=2, rank=0, **options):
    return StepState(SimpleNamespace(size=size, rank=rank), StepOptions(**options))


def model_of():
    model = Net()
    model(*next(batches(1)))
    return model, optimizers.MomentumSGD().setup(model)


@each(**{"options, size, has_values": [({}, 2, False), ({"local_steps": 2}, 2, True), ({"local_steps": 2}, 1, False),
                                       ({"local_steps": 1, "accumulate": 2}, 2, False)]})  # fmt: skip
def test_parameters_are_carried_where_ranks_have_their_own(options, size, has_values):
    model, _optimizer = model_of()
    model.l1.b.update_rule._state = {"v": np.ones(3), "t": 4}
    own = carried_by(size, **options)._own(model)
    names = {name for name, _ in model.namedparams()}
    assert {key for key in own if key.startswith("value")} == (
        {f"value{name}" for name in names} if has_values else set()
    )
    if has_values:
        np.testing.assert_array_equal(own["value/l1/W"], model.l1.W.array)
        assert own["state/l1/b/v"].tolist() == [1, 1, 1] and own["state/l1/b/t"] == 4
    with model.init_scope():
        model.late = Parameter()
    assert "value/late" not in carried_by(size, **options)._own(model)


@each(gathered=[[], [3, None]], has_gradient=[True, False])
def test_gradients_are_carried_within_a_round(gathered, has_gradient):
    model, _optimizer = model_of()
    model.cleargrads()
    if has_gradient:
        model.l2.b.grad = np.full(3, 5.0)
    one = carried_by(accumulate=4)
    one.gathered = gathered
    own = one._own(model)
    assert ("gradient/l2/b" in own) == bool(gathered and has_gradient) and "gradient/l1/b" not in own
    assert own.get("counts", np.empty(0)).tolist() == [-1 if n is None else n for n in gathered]


def test_what_a_compression_keeps_and_what_arrives_is_carried():
    model, _optimizer = model_of()
    one = carried_by(compression=TopK())
    one._way.compression.kept[model.l1.b] = np.arange(9.0)
    one._way.compression.right[model.l1.W] = np.ones(2)
    one._way.compression.right[Parameter(np.ones(1))] = np.ones(2)  # of a link that is no more
    assert one._own(model)["kept/l1/b"].tolist() == list(range(9)) and list(one._own(model)) == ["kept/l1/b"]
    one.num_local = 3
    assert {k: v.tolist() for k, v in one._common(model).items()} == {"num_local": 3, "right/l1/W": [1, 1]}
    late = carried_by(double_buffering=True)
    late.buffers.resume({model.l1.b: np.ones(9)})
    assert late._common(model)["arriving/l1/b"].tolist() == [1] * 9
    assert carried_by(1, double_buffering=True).buffers is None
    one.loaded = Loaded({"num_local": 7}, {"own": 8})
    assert one._own(model) == {"own": 8} and one._common(model) == {"num_local": 7}


def state_of(one, model):
    serializer = DictionarySerializer()
    one.serialize(serializer, model)
    return serializer.target


def test_a_state_without_what_is_carried_starts_over():
    """One that was loaded before and not taken up yet is forgotten."""
    model, _optimizer = model_of()
    one = carried_by(accumulate=3)
    one.gathered = [4, 6]
    state = state_of(one, model)
    other = carried_by(accumulate=3)
    other.serialize(NpzDeserializer(state), model)
    assert other.loaded.own["counts"].tolist() == [4, 6] and other.loaded.common["num_local"] == 0
    other.gathered, other.num_local = [1], 2
    other.serialize(NpzDeserializer({}), model)
    assert other.loaded is None and other.gathered == [] and other.num_local == 0
    plain = carried_by()
    assert state_of(plain, model) == {}
    plain.serialize(NpzDeserializer(state), model)
    assert plain.loaded is None
    with pytest.raises(CheckpointError, match="carried/about: cannot be read"):
        other.serialize(NpzDeserializer({**state, "carried/about": np.array("{")}), model)


@each(
    **{
        "kind, counts, rank, num_ranks, found": [
            ("gradient/a", True, 0, 3, 12.0), ("gradient/a", True, 1, 3, None), ("gradient/a", False, 0, 3, 18.0),
            ("gradient/a", False, 0, 1, 6.0), ("kept/a", True, 1, 3, 6.0), ("value/a", True, 2, 3, 6.0),
        ]
    }
)  # fmt: skip
def test_what_other_numbers_of_ranks_go_on_with(kind, counts, rank, num_ranks, found):
    """Two ranks had 4 and 8."""
    numbers = [np.array([3, 5]), np.array([2, 0])] if counts else [np.array([-1, -1])] * 2
    parts = {k: {kind: np.array([value]), "counts": numbers[k]} for k, value in enumerate((4.0, 8.0))}
    result = step_state._merged(parts, 2, rank, num_ranks)
    assert (result[kind].tolist() if kind in result else None) == (None if found is None else [found])
    assert result["counts"].tolist() == (([5, 5] if rank == 0 else [0, 0]) if counts else [-1, -1])


def test_what_one_rank_alone_had_is_the_mean_of_those_who_had_it():
    parts = {0: {"value/a": np.array([4.0]), "kept/a": np.array([4.0])}, 1: {}}
    found = step_state._merged(parts, 2, 0, 3)
    assert found["value/a"].tolist() == [4.0] and found["kept/a"].tolist() == [2.0]


def test_states_are_taken_where_they_fit():
    model, _optimizer = model_of()
    p = model.l1.b
    p.update_rule._state = {"v": np.zeros(9), "t": 3}
    step_state._set_state(p, "v", np.arange(9.0))
    step_state._set_state(p, "t", np.array(5.0))
    step_state._set_state(p, "none", np.array(5.0))
    step_state._set_state(None, "v", np.array(5.0))
    assert p.update_rule.state["v"].tolist() == list(range(9))
    assert p.update_rule.state["t"] == 5 and type(p.update_rule.state["t"]) is int
