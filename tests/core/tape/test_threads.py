"""Ranks may be threads: what one thread sets, reports, draws or trains is nothing to the others."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import dbrdist
from dbrdist import FunctionHook, Parameter, Reporter, Variable, config, random, report, using_config
from dbrdist.core.tape import ops
from dbrdist.optimizers import Adam, MomentumSGD, WeightDecay

NUM_THREADS = 4


def run_together(work):
    """``work(rank, meet)`` in 4 threads, where ``meet`` waits for the others; results by rank, errors raised."""
    barrier = threading.Barrier(NUM_THREADS, timeout=30)
    results, errors = [None] * NUM_THREADS, []

    def body(rank):
        try:
            results[rank] = work(rank, barrier.wait)
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(NUM_THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


class Net(dbrdist.Chain):
    def __init__(self, rank):
        super().__init__()
        values = np.random.default_rng(rank)
        with self.init_scope():
            self.W = Parameter(values.normal(size=(6, 5)))
            self.b = Parameter(np.zeros(5))
            self.V = Parameter(values.normal(size=(5, 2)))

    def forward(self, x):
        return ops.matmul(ops.tanh(ops.matmul(x, self.W) + self.b), self.V)


def train(rank, meet=None, steps=30):
    """Losses and final weights of a model of this rank, with chance, hooks and a rule of its own."""
    net = Net(rank)
    optimizer = (Adam(alpha=0.01 * (rank + 1)) if rank % 2 else MomentumSGD(lr=0.01 * (rank + 1))).setup(net)
    optimizer.add_hook(WeightDecay(0.001 * rank))
    net.b.update_rule.enabled = rank != 3
    values = np.random.default_rng(100 + rank)
    losses = []
    for step in range(steps):
        x, target = values.normal(size=(4, 6)), values.normal(size=(4, 2))
        random.set_stream(rank, 0, step)
        if meet is not None and step % 10 == 0:
            meet()

        def loss(x=x, target=target):
            mask = random.raw_words(4, 6) % 2 == 0
            d = net(ops.where(mask, Variable(x), 0.0)) - target
            return ops.sum(d * d)

        if step % 3 == 2:
            with dbrdist.no_backprop_mode():
                losses.append(float(loss().array))
        else:
            optimizer.update(loss)
            losses.append(float(np.abs(net.W.grad).sum()))
    return losses, [p.array.copy() for p in net.params()]


@pytest.mark.slow
def test_four_threads_train_to_the_same_numbers_as_alone():
    alone = [train(rank) for rank in range(NUM_THREADS)]
    together = run_together(train)
    for (losses, weights), (expected_losses, expected) in zip(together, alone):
        assert losses == expected_losses
        for w, e in zip(weights, expected):
            np.testing.assert_array_equal(w, e)


def test_differing_config():
    def work(rank, meet):
        seen = []
        with using_config("train", rank % 2 == 0), using_config("enable_backprop", rank < 2):
            config.dtype = ("float16", "float32", "float64", "float32")[rank]
            meet()
            for _ in range(50):
                y = Variable(np.ones(2)) * 2.0
                seen.append((config.train, y.creator is not None, dbrdist.Parameter(0.0, (1,)).dtype.name))
            meet()
        assert config.train and config.enable_backprop
        assert len(set(seen)) == 1
        return seen[0]

    assert run_together(work) == [
        (True, True, "float16"), (False, True, "float32"), (True, False, "float64"), (False, False, "float32"),
    ]  # fmt: skip


def test_user_functions_in_backward_do_not_switch_off_recording_elsewhere():
    """A first-order pass runs a user's backward without recording: in its own thread only."""
    entered, leave = threading.Event(), threading.Event()

    class Slow(dbrdist.FunctionNode):
        def forward(self, xs):
            return (xs[0] * 1.0,)

        def backward(self, indexes, grad_outputs):
            entered.set()
            assert leave.wait(30)
            return grad_outputs

    (y,) = Slow().apply((Variable(np.ones(1)),))
    thread = threading.Thread(target=y.backward)
    thread.start()
    assert entered.wait(30)
    recorded = (Variable(np.ones(1)) * 2.0).creator is not None
    leave.set()
    thread.join()
    assert recorded


class Count(FunctionHook):
    name = "Count"

    def __init__(self):
        self.labels = []

    def forward_postprocess(self, function, in_data):
        self.labels.append(function.label)


def test_function_hooks():
    def work(rank, meet):
        hook = Count()
        x = Variable(np.ones(1))
        meet()
        with hook if rank else contextlib.nullcontext():
            meet()  # all hooks are active at once
            for _ in range(10 * (rank or 2)):
                ops.exp(x)
            meet()
        return hook.labels

    assert [len(labels) for labels in run_together(work)] == [0, 10, 20, 30]


def test_reporters():
    def work(rank, meet):
        with Reporter() as reporter:
            for i in range(20):
                meet()
                report({f"rank{rank}": i})
            meet()
        return reporter.observation

    assert run_together(work) == [{f"rank{rank}": 19} for rank in range(NUM_THREADS)]


def test_random_streams():
    def work(rank, meet):
        random.set_stream(seed=5, epoch=0, iteration=2, row=3 * rank)
        out = []
        for _ in range(10):
            meet()
            out.append(random.raw_words(3, 5))
        return out

    shares = run_together(work)
    random_state = random.get_state()
    random.set_stream(5, 0, 2)
    for draw in range(10):
        whole = random.raw_words(3 * NUM_THREADS, 5)
        np.testing.assert_array_equal(np.concatenate([s[draw] for s in shares]), whole)
    random.set_state(random_state)


def test_one_forward_graph_is_read_by_many_threads():
    """Weights are shared, graphs are not: inference in 4 threads at once."""
    net = Net(0)
    x = np.random.default_rng(9).normal(size=(8, 6))
    expected = net(x).array

    def work(rank, meet):
        meet()
        with dbrdist.no_backprop_mode():
            return [net(x).array for _ in range(20)]

    for outputs in run_together(work):
        for y in outputs:
            np.testing.assert_array_equal(y, expected)
