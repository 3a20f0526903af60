"""What an optimizer sees at its first updates: graphs that grow from step to step."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.errors import UsageWarning
from tests.each import each

X = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
T = (np.arange(20) % 3).astype(np.int32)


class Cell(dbrdist.Chain):
    """A network with a state of its own, which is a plain Variable."""

    def __init__(self):
        super().__init__()
        self.h = None
        with self.init_scope():
            self.up, self.across = L.Linear(4, 5), L.Linear(5, 5)

    def forward(self, x):
        self.h = F.tanh(self.up(x) if self.h is None else self.up(x) + self.across(self.h))
        return self.h


def network(first):
    return dbrdist.Sequential(first, L.Linear(5, 3))


def updates(model, num, end=lambda model, loss: None, total=False):
    """Updates by hand; ``total``: the losses of all steps are added up."""
    optimizer, loss = optimizers.Adam().setup(model), 0
    for _ in range(num):
        model.cleargrads()
        loss = (loss if total else 0) + F.softmax_cross_entropy(model(X), T)
        loss.backward()
        end(model, loss)
        optimizer.update()


def by_function(model, num):
    optimizer = optimizers.SGD(0.1).setup(model)
    for _ in range(num):
        optimizer.update(lambda: F.softmax_cross_entropy(model(X), T))


def with_another_loss():
    """Each step ends with a backward pass through another network."""
    other = L.Linear(4, 3)
    updates(network(L.LSTM(4, 5)), 8, lambda model, loss: F.sum(other(X)).backward())


GROWING = {
    "with another loss": with_another_loss,
    "LSTM": lambda: updates(network(L.LSTM(4, 5)), 8),
    "GRU": lambda: updates(network(L.StatefulGRU(4, 5)), 8),
    "own state": lambda: updates(network(Cell()), 8),
    "update with a loss function": lambda: by_function(network(L.LSTM(4, 5)), 8),
    "sum of all losses": lambda: updates(network(L.Linear(4, 5)), 8, total=True),
}


@each(name=list(GROWING))
def test_a_graph_that_grows_with_each_step_is_warned_of_once(name):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        GROWING[name]()
    found = [w for w in given if issubclass(w.category, UsageWarning)]
    assert len(found) == 1 and found[0].filename == __file__
    assert "call loss.unchain_backward() after each backward pass, or reset_state()" in str(found[0].message)


def reset(model, loss):
    model[0].reset_state()


def growing_sequences():
    """Sequences that become longer, each from its own start, while the losses are kept."""
    model, kept = network(L.LSTM(4, 5)), []
    optimizer = optimizers.SGD(0.1).setup(model)
    for length in range(1, 9):
        model[0].reset_state()
        model.cleargrads()
        loss = sum((F.softmax_cross_entropy(model(X), T) for _ in range(length)), 0)
        loss.backward()
        kept.append(loss)
        optimizer.update()


def shared_start():
    """A part of the graph that all steps share, as where inputs are prepared once."""
    model = network(L.Linear(4, 5))
    prepared = F.tanh(dbrdist.Variable(X) * 2)
    optimizer = optimizers.SGD(0.1).setup(model)
    for _ in range(8):
        model.cleargrads()
        F.softmax_cross_entropy(model(prepared), T).backward()
        optimizer.update()


@each(program=[
    lambda: updates(network(L.LSTM(4, 5)), 8, lambda model, loss: loss.unchain_backward()),
    lambda: updates(network(L.LSTM(4, 5)), 8, reset),
    lambda: updates(network(L.Linear(4, 5)), 8),
    growing_sequences, shared_start,
])  # fmt: skip
def test_graphs_of_one_step_are_right(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program()


def test_a_program_that_makes_one_update_alone_is_not_looked_at_forever():
    model = network(L.Linear(4, 5))
    optimizer, kept = optimizers.SGD(0.1).setup(model), []
    optimizer.update(lambda: F.softmax_cross_entropy(model(X), T))
    for _ in range(40):
        kept.append(F.softmax_cross_entropy(model(X), T))
        kept[-1].backward()
    assert len(watching_backward[-1]._first) == 16 * 3


def test_a_backward_pass_from_nothing_says_so_while_graphs_are_watched():
    model = network(L.Linear(4, 5))
    optimizer = optimizers.SGD(0.1).setup(model)
    optimizer.update(lambda: F.softmax_cross_entropy(model(X), T))
    with pytest.raises(RuntimeError, match=r"^backward: the output has no graph"):
        dbrdist.backward([])


def test_graphs_are_watched_as_long_as_they_grow_and_no_longer():
    updates(network(L.LSTM(4, 5)), 2)
    gc.collect()
    assert not watching_backward  # with its optimizer, the watch is gone
    model = network(L.LSTM(4, 5))
    optimizer = optimizers.SGD(0.1).setup(model)
    for _ in range(4):
        optimizer.update(lambda: F.softmax_cross_entropy(model(X), T))
    assert len(watching_backward) == 1
    with pytest.warns(UsageWarning, match="calls of earlier steps"):
        optimizer.update(lambda: F.softmax_cross_entropy(model(X), T))
    assert not watching_backward
