"""Tests of dbrdist.core.update.fused_update; whole updates are in tests/optimizers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.core.update.fused_update import Part, are_ours, update_all


def part(**said):
    found = Mock()
    found.configure_mock(places=(), run=SimpleNamespace(data=np.zeros(2)), **said)
    return found


def test_what_is_done_with_each_part():
    gpu, plain, other = (
        part(is_on_gpu=True),
        part(is_on_gpu=False, is_plain=True),
        part(is_on_gpu=False, is_plain=False),
    )
    here, view = Mock(), object()
    other.places = [(here, SimpleNamespace(gradient=view), view), (here, SimpleNamespace(gradient=None), view)]
    update_all([gpu, plain, other])
    assert gpu.mock_calls == [call.collect(), call.begin(None), call.update(True)]
    assert plain.mock_calls == [call.step(plain.run)]
    assert other.mock_calls == [call.begin(None), call.update(True)]
    assert here.mock_calls == [call.collect_gradient()]


@pytest.mark.parametrize(
    ("is_complete", "is_plain", "takes_hooks", "expected"),
    [
        (True, True, True, "step(run)"), (True, True, False, "step(run)"), (True, False, True, "step(joint) narrow"),
        (True, False, False, "show each"), (False, True, True, "show each"),
    ],
)  # fmt: skip
def test_in_which_way_a_part_is_updated(is_complete, is_plain, takes_hooks, expected):
    """By its rule on the whole run, or by those of its parameters, which see the memory."""
    found = part(is_plain=is_plain, takes_hooks=takes_hooks)
    found.run.params, found.rules = ["p", "q"], [found.first, found.second]
    Part.update(found, is_complete, ["hook"])
    assert (
        found.mock_calls
        == {
            "step(run)": [call.step(found.run, ["hook"])],
            "step(joint) narrow": [call.step(found.joint, ["hook"]), call.narrow()],
            "show each": [call.show(), call.first.update("p"), call.second.update("q")],
        }[expected]
    )


def test_a_rule_is_ours_while_all_of_its_functions_are():
    """One that a program has put in the place of one of them may keep the memory."""
    ours = optimizers.MomentumSGD().create_update_rule()
    assert are_ours([]) and are_ours([ours, ours])

    class Own(type(ours)):
        pass

    assert not are_ours([ours, Own()])
    for name in ("step", "step_run", "step_after"):
        changed = optimizers.MomentumSGD().create_update_rule()
        setattr(changed, name, functools.wraps(getattr(changed, name))(lambda *words: None))
        assert not are_ours([changed]) and not are_ours([ours, changed])
    changed = optimizers.MomentumSGD().create_update_rule()
    changed.step_elsewhere = lambda: None  # nobody calls it with memory
    assert are_ours([changed])
