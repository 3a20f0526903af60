"""How many own functions a small step calls: it takes 60 microseconds, of which each call costs 0.1 or more.

The numbers may only fall: lower them here when they have. They rose by two once, when products became functions that
compiled steps make in six sevenths of their time, and interpreted ones in the same.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import comm, optimizers
from dbrdist.core.tape import call
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.kernels.small_arrays import small

HERE = str(Path(dbrdist.__file__).parent)
# Also where the loops alone are, as in the copies of the tree that mutations are judged in.
is_compiled = not str(call.__file__).endswith(".py") or not small.rows_times.__module__.endswith("small_numpy")


def own_calls(step, within=""):
    """How many functions of dbrdist a call of ``step`` enters, in files whose path matches ``within``."""
    names = []

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(HERE) and re.search(within, path.replace(os.sep, "/")):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return len(names)


def small_step(make, hooks=(), num_first=6):
    """A step of three layers of 8 units on 8 examples, after the first ones, in which more is looked at."""
    model = dbrdist.Sequential(L.Linear(8, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 8))
    optimizer = make().setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((8, 8), np.float32), rng.integers(0, 8, 8)

    def step():
        optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)

    watching_backward.clear()  # optimizers of other tests that were set up and made no step yet
    for _ in range(num_first):
        step()
    return step


def of_one_rank():
    return comm.create_multi_node_optimizer(optimizers.MomentumSGD(0.01), comm.create_communicator("single"))


STEPS = {
    "alone": (lambda: small_step(lambda: optimizers.MomentumSGD(0.01)), 88),
    "one rank": (lambda: small_step(of_one_rank), 94),
    "with weight decay": (lambda: small_step(of_one_rank, [optimizers.WeightDecay(1e-4)]), 110),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_small_step_calls_no_more_functions(name):
    make, most = STEPS[name]
    found = own_calls(make())
    assert found <= most, f"{found} calls; before, it were {most}"
    assert is_compiled or found > most - 5, f"{found} calls are fewer than {most}: lower the number"


ABOVE_THE_TRANSPORT = "comm/(steps|gradients|protocol)/"
MOST_OF_TWO_RANKS = 63


def test_the_ranks_part_of_a_step_calls_no_more_functions():
    """Of two ranks: the loop, the header with the gradients, the gate; how ranks wait for each other is not counted."""

    def body(ranks):
        def make():
            return comm.create_multi_node_optimizer(optimizers.MomentumSGD(0.01), ranks)

        return own_calls(small_step(make, num_first=9), ABOVE_THE_TRANSPORT)

    found = max(comm.run_threads(2, body))
    assert 10 < found <= MOST_OF_TWO_RANKS, f"{found} calls; before, it were {MOST_OF_TWO_RANKS}"
    assert found > MOST_OF_TWO_RANKS - 5, f"{found} calls are fewer than {MOST_OF_TWO_RANKS}: lower the number"


def test_calls_are_counted():
    assert own_calls(lambda: None) == 0
    assert own_calls(lambda: F.relu(np.ones(3, "f"))) >= 1
