"""Tests of dbrdist.comm.steps.lazy_parameters."""

import numpy as np

from dbrdist.comm import run_threads
from dbrdist.comm.gradients import model as models
from dbrdist.comm.steps import lazy_parameters
from dbrdist.core.model.parameter import Parameter


def test_parameters_that_a_step_left_without_a_shape_take_rank_0s_later():
    named = [("/a", Parameter(np.zeros(2))), ("/b", Parameter())]
    step = lazy_parameters.LateParameters("comm", named, 1)
    found = []
    step.work(lambda after_forward: found.extend(type(p.on_initialize) for _, p in named))
    assert found == [lazy_parameters._Announce] * 2
    waits = named[1][1].on_initialize
    assert type(waits) is models.Broadcast and (waits._comm, waits._name, waits._root) == ("comm", "/b", 0)
    assert (
        lazy_parameters._in_words(None) == "the end"
        and lazy_parameters._in_words(("/a", (2,), "float32")) == "/a with shape (2,) of float32"
    )


def test_a_rank_without_examples_initialises_what_the_leader_announces():
    def body(comm):
        p = Parameter(lambda array: array.fill(comm.rank + 1.0))
        step = lazy_parameters.LateParameters(comm, [("/p", p)], 1)
        if comm.rank == 1:
            step.work(lambda after_forward: (p.initialize((3,)), after_forward()))
        else:
            step.listen()
        return p.array.tolist(), p.on_initialize

    assert run_threads(2, body, timeout_seconds=60) == [([2.0] * 3, None)] * 2
