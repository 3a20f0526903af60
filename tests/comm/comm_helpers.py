"""A clock, a rank and calls that several tests of communication share."""

from __future__ import annotations

import threading
import time

import numpy as np

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.core.model.parameter import Parameter


class Clock:
    """A clock that stands still until this thread sleeps; others, as earlier tests may have left, have the real one."""

    def __init__(self, monkeypatch):
        self.now, self.slept, self.thread = 1000.0, [], threading.get_ident()
        self.real_monotonic, self.real_sleep = time.monotonic, time.sleep
        monkeypatch.setattr(time, "monotonic", self.monotonic)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def monotonic(self):
        return self.now if threading.get_ident() == self.thread else self.real_monotonic()

    def sleep(self, seconds):
        if threading.get_ident() != self.thread:
            self.real_sleep(seconds)
            return
        self.slept.append(seconds)
        self.now += seconds


SIZE = 3


def said(body, num_ranks=SIZE):
    """The one error that all ranks raise, after which they still communicate."""

    def run(comm):
        try:
            body(comm)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
        else:
            text = "nothing"
        assert comm.allreduce(np.ones(2)).tolist() == [comm.size] * 2
        return text

    texts = run_threads(num_ranks, run, timeout_seconds=30)
    assert len(set(texts)) == 1, texts
    return texts[0]


def steps(comm, **options):
    """Two steps of a small model."""
    model = L.Linear(6, 4)
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1).setup(model), comm, **options)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(np.full((2, 6), comm.rank + 1, np.float32)) ** 2))
    return model, optimizer


def call(comm, verb, x):
    """The verb with ``x`` from this rank, and what came of it from rank 0."""
    made = [x] * comm.size if verb in ("scatter", "alltoall") else x
    result = getattr(comm, verb)(made)
    return result if verb in ("allreduce", "bcast", "scatter") or result is None else result[0]


# ---- segments -------------------------------------------------------------------------------------------------------
def plan_of(*sizes, dtype="f4"):
    params = [Parameter(np.arange(size, dtype=dtype)) for size in sizes]
    for k, p in enumerate(params):
        p.grad = np.full(p.shape, k + 1, dtype)
    return ReductionPlan([(f"/{k}", p) for k, p in enumerate(params)]), params


# ---- whose part is whose --------------------------------------------------------------------------------------------
class Rank:
    """One of three ranks; the others answer as given."""

    size = 3

    def __init__(self, rank, answers=()):
        self.rank, self.answers = rank, list(answers)
