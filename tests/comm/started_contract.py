"""Reductions in two halves, as functions of a communicator: on thread ranks here, on processes in tests/mpi."""

from __future__ import annotations

import operator

import ml_dtypes
import numpy as np

from dbrdist.comm import Reduction
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import CommunicatorError, NoSamplesError
from tests.comm.contract import array_of, raises, same
from tests.comm.disagreement_contract import several

SHAPES = {"w": (7, 5), "b": (3,)}  # of a small model
SIZES = {"small": 1, "large": 3_000}  # how many times as many elements


class Model(Link):
    """Parameters with gradients that follow from rank, seed and step."""

    def __init__(self, seed=0, times=1, dtype=np.float32, shapes=SHAPES):
        super().__init__()
        self.seed = seed
        with self.init_scope():
            for name, shape in shapes.items():
                setattr(self, name, Parameter(np.zeros((times * shape[0], *shape[1:]), dtype)))

    def fill(self, rank, step=0):
        for i, p in enumerate(self.params()):
            p.grad = self.values(rank, step, i, p)

    def values(self, rank, step, i, p):
        return ((np.arange(p.size).reshape(p.shape) * (rank + 1) + 3 * self.seed + step + i) % 11 - 4).astype(p.dtype)

    def check(self, comm, step=0, counts=None):
        """Gradients are the means, computed here from those of every rank in float64."""
        counts = [1] * comm.size if counts is None else counts
        for i, p in enumerate(self.params()):
            terms = [n * self.values(r, step, i, p).astype(np.float64) for r, n in enumerate(counts)]
            tolerance = 1e-2 if p.dtype.itemsize == 2 else 1e-6
            mean = sum(terms) / sum(counts)
            np.testing.assert_allclose(p.grad.astype(np.float64), mean, atol=tolerance, rtol=tolerance)


def every_size(check):
    def run(comm):
        for times in SIZES.values():
            check(comm, times)

    run.__name__ = check.__name__
    return run


@every_size
def check_means_of_every_type(comm, times):
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        model = Model(1, times, np.dtype(dtype))
        reduction = Reduction(comm, model)
        for step in range(3):
            model.fill(comm.rank, step)
            assert not reduction.is_started
            reduction.start()
            assert reduction.is_started
            reduction.wait()
            model.check(comm, step)


@every_size
def check_means_are_weighted(comm, times):
    model = Model(2, times)
    reduction = Reduction(comm, model)
    counts = [3 * r + 1 for r in range(comm.size)]
    counts[-1] = counts[-1] if comm.size == 1 else 0
    for step in range(3):
        model.fill(comm.rank, step)
        reduction.start(num_samples=np.int64(counts[comm.rank]))
        reduction.wait()
        model.check(comm, step, counts)


def check_parameters_without_a_gradient_count_as_zero(comm):
    for times in SIZES.values():
        model = Model(0, times)
        reduction = Reduction(comm, model)
        for _ in range(2):
            model.cleargrads()
            if comm.rank == 0:
                model.w.grad = np.full(model.w.shape, float(comm.size), np.float32)
            reduction.start()
            reduction.wait()
            assert (model.w.grad == 1).all()
            assert (model.b.grad == 0).all()


def check_several_travel_among_other_verbs(comm):
    """Short and long ones at a time, waited for in another order, with verbs in between."""
    models = [Model(seed, times) for seed, times in enumerate([1, 3_000, 1, 2, 1])]
    reductions = [Reduction(comm, model) for model in models]
    for step in range(4):
        for model, reduction in zip(models, reductions):
            model.fill(comm.rank, step)
            reduction.start()
            same(comm.allreduce(array_of(comm.rank)), sum(array_of(r) for r in range(comm.size)))
        assert comm.bcast_obj(("step", step)) == ("step", step)
        for k in (3, 0, 4, 1, 2):
            reductions[k].wait()
            models[k].check(comm, step)


def check_parameters_may_come_and_move(comm):
    for times in SIZES.values():
        model = Model(4, times)
        reduction = Reduction(comm, model)
        for step in range(6):
            if step == 2:
                with model.init_scope():
                    model.c = Parameter(np.zeros(times * 9, np.float32))
            if step == 4 and comm.rank == 0:
                model.w.array = np.zeros(model.w.shape, np.float32)
                model.w.leave_arena()
            model.fill(comm.rank, step)
            reduction.start()
            reduction.wait()
            model.check(comm, step)


@every_size
def check_start_and_wait_take_turns(comm, times):
    model = Model(5, times)
    reduction = Reduction(comm, model)
    raises(RuntimeError, "wait: expected start() before it", reduction.wait)
    model.fill(comm.rank)
    reduction.start()
    raises(RuntimeError, "one reduction of a model at a time, but the one started at", reduction.start)
    reduction.wait()
    model.check(comm)
    raises(RuntimeError, "no reduction of this model is on its way", reduction.wait)


def all_raise(comm, kind, text, function):
    """As ``raises``, and every rank with the same words; all can go on."""
    try:
        function()
    except kind as e:
        words = str(e)
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}")
    assert text in words, words
    assert set(comm.allgather_obj(words)) == {words}


@every_size
def check_gradients_that_change_meanwhile(comm, times):
    model = Model(6, times)
    reduction = Reduction(comm, model)
    odd = comm.rank == comm.size - 1

    for step in range(3):
        model.fill(comm.rank, step)
        reduction.start()
        if odd and step == 2:
            model.b.grad_var = Variable(model.b.grad.copy())  # as a backward that can be differentiated leaves it
        elif odd:
            model.b.cleargrad()
        text = "but that of /b was cleared or replaced since"
        all_raise(comm, RuntimeError, text, reduction.wait)
    if comm.reducer.encloses([p.array for p in model.params()]):
        model.fill(comm.rank)
        reduction.start()
        if odd:
            model.w.grad[0, 0] += 1
        all_raise(comm, RuntimeError, "but they were written since", reduction.wait)
    model.fill(comm.rank)
    reduction.start()
    reduction.wait()
    model.check(comm)


def check_wrong_arguments(comm):
    odd = comm.rank == comm.size - 1
    raises(TypeError, "Reduction: expected a communicator, got str", lambda: Reduction("flat", Model()))
    for times in SIZES.values():
        model = Model(7, times)
        reduction = Reduction(comm, model)
        for bad, kind in ((-1, ValueError), (2.5, TypeError), ("3", TypeError), (True, TypeError)):
            model.fill(comm.rank)
            reduction.start(bad if odd else 4)
            all_raise(comm, kind, "num_samples", reduction.wait)
        model.fill(comm.rank)
        reduction.start(0)
        all_raise(comm, NoSamplesError, "at least one rank", reduction.wait)
        if comm.size > 1:
            reduction.start(4 if odd else None)
            all_raise(comm, CommunicatorError, "from every rank or from none", reduction.wait)
        model.fill(comm.rank)
        reduction.start(2)
        reduction.wait()
        model.check(comm)


def check_parameters_without_a_shape(comm):
    odd = comm.rank == comm.size - 1
    late = Model(8)
    if odd:
        with late.init_scope():
            late.c = Parameter()
    text = "expected parameters with shapes, but /c waits for its first input"
    all_raise(comm, ValueError, text, lambda: Reduction(comm, late))
    for times in SIZES.values():
        model = Model(8, times)
        reduction = Reduction(comm, model)
        model.fill(comm.rank)
        reduction.start()
        reduction.wait()
        if odd:
            with model.init_scope():
                model.c = Parameter()
        reduction.start()
        all_raise(comm, ValueError, text, reduction.wait)


@several
def check_models_that_differ(comm):
    odd = comm.rank == comm.size - 1
    for shapes in ({"w": (7, 5), "c": (3,)}, {"w": (7, 6), "b": (3,)}, {"w": (7, 5)}):
        model = Model(9, shapes=shapes if odd else SHAPES)
        all_raise(comm, CommunicatorError, "the same parameters", lambda m=model: Reduction(comm, m))
    model = Model(9, dtype=np.float64 if odd else np.float32)
    all_raise(comm, CommunicatorError, "float64", lambda: Reduction(comm, model))
    for times in SIZES.values():
        model = Model(9, times)
        reduction = Reduction(comm, model)
        if odd:
            with model.init_scope():
                model.c = Parameter(np.zeros(4, np.float32))
        model.fill(comm.rank)
        reduction.start()
        all_raise(comm, CommunicatorError, "/c (4,) float32 besides", reduction.wait)


@several
def check_reductions_in_another_order(comm):
    """Models of equal shapes and other names are not averaged with each other."""
    odd = comm.rank == comm.size - 1
    for times in SIZES.values():
        models = [Model(10, times, shapes={name: (4, 5)}) for name in ("generator", "critic")]
        reductions = [Reduction(comm, model) for model in models]
        for model in models:
            model.fill(comm.rank)
        for reduction in reductions[:: -1 if odd else 1]:
            reduction.start()
        for reduction in reductions[:: -1 if odd else 1]:
            all_raise(comm, CommunicatorError, "the same reduction on every rank", reduction.wait)
        for model, reduction in zip(models, reductions):
            model.fill(comm.rank)
            reduction.start()
            reduction.wait()
            model.check(comm)


@several
def check_starts_wait_for_no_rank(comm):
    """Rank 0 starts all before rank 1 starts the first; every other time, after two that were waited for."""
    models = [Model(seed) for seed in range(5)]
    reductions = [Reduction(comm, model) for model in models]
    for step in range(4):
        for model in models:
            model.fill(comm.rank, step)
        early = 2 * (step % 2)
        for reduction in reductions[:early]:
            reduction.start()
        for reduction in reductions[:early]:
            reduction.wait()
        if comm.rank == 1:
            assert comm.recv_obj(0, 5) == step
        for reduction in reductions[early:]:
            reduction.start()
        if comm.rank == 0:
            comm.send_obj(step, 1, 5)
        for k in (3, 2, 4):
            reductions[k].wait()
        for reduction in reductions[early:2]:
            reduction.wait()
        for model in models:
            model.check(comm, step)


@several
def check_gradients_that_change_while_others_have_yet_to_start(comm):
    models = [Model(seed) for seed in range(4)]
    reductions = [Reduction(comm, model) for model in models]
    if not comm.reducer.encloses([p.array for p in models[0].params()]):
        return
    for model, reduction in zip(models, reductions):
        model.fill(comm.rank)
        reduction.start()
    models[3].w.grad[0, 0] += comm.rank == 0
    for reduction in reductions[:3]:
        reduction.wait()
    all_raise(comm, RuntimeError, "but they were written since", reductions[3].wait)


@several
def check_a_model_that_another_rank_has_of_another_size(comm):
    """A rank whose gradients are short, or long, by now meets the others where they still are."""
    odd = comm.rank == comm.size - 1
    for times, more in ((1, 30_000), (3_000, 0)):
        model = Model(11, times)
        reduction = Reduction(comm, model)
        for step in range(2):
            model.fill(comm.rank, step)
            reduction.start()
            reduction.wait()
        if odd and more:
            with model.init_scope():
                model.c = Parameter(np.zeros(more, np.float32))
        elif odd:
            del model.w
        for _ in range(2):
            model.fill(comm.rank)
            reduction.start()
            all_raise(comm, CommunicatorError, "the same reduction on every rank", reduction.wait)
        if not odd and more:
            with model.init_scope():
                model.c = Parameter(np.zeros(more, np.float32))
        elif not odd:
            del model.w
        for step in range(3):
            model.fill(comm.rank, step)
            reduction.start()
            reduction.wait()
            model.check(comm, step)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
