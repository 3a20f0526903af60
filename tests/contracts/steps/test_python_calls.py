"""How many own functions a small step calls: it takes 60 microseconds, of which each call costs 0.1 or more.

The numbers may only fall: lower them here when they have.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm, optimizers
from dbrdist.core.tape import call

HERE = str(Path(dbrdist.__file__).parent)
is_compiled = not str(call.__file__).endswith(".py")


def own_calls(step):
    """How many functions of dbrdist a call of ``step`` enters."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return len(names)


def small_step(make, hooks=()):
    """A step of three layers of 8 units on 8 examples, after the first ones, in which more is looked at."""
    model = dbrdist.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8))
    optimizer = make().setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((8, 8), np.float32), rng.integers(0, 8, 8)

    def step():
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)

    for _ in range(6):
        step()
    return step


def of_one_rank():
    return comm.create_multi_node_optimizer(optimizers.MomentumSGD(0.01), comm.create_communicator("single"))


STEPS = {
    "alone": (lambda: small_step(lambda: optimizers.MomentumSGD(0.01)), 85),
    "one rank": (lambda: small_step(of_one_rank), 92),
    "with weight decay": (lambda: small_step(of_one_rank, [optimizers.WeightDecay(1e-4)]), 107),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_small_step_calls_no_more_functions(name):
    make, most = STEPS[name]
    found = own_calls(make())
    assert found <= most, f"{found} calls; before, it were {most}"
    assert is_compiled or found > most - 5, f"{found} calls are fewer than {most}: lower the number"


def test_calls_are_counted():
    assert own_calls(lambda: None) == 0
    assert own_calls(lambda: F.relu(np.ones(3, "f"))) >= 1
