"""What the graphs before the first update show: pixels that were not scaled, and errors of each with each."""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.core.tape.backprop import watching_backward
from dbrdist.core.update import first_graphs
from dbrdist.errors import UsageWarning

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 3, 9, 9)).astype(np.float32)
T = (np.arange(6) % 3).astype(np.int32)
Y = np.linspace(-1, 1, 6, dtype=np.float32)


def network(*first):
    return L.Classifier(dbrdist.Sequential(*first, L.Convolution2D(3, 2, 3), F.relu, L.Linear(None, 3)))


def trained(model, x, t=T, lossfun=None):
    """Three updates with a loss function."""
    optimizer = optimizers.SGD(1e-9).setup(model)
    for _ in range(3):
        optimizer.update(lossfun or model, x, t)


def trained_by_hand(model, x, t=T):
    optimizer = optimizers.SGD(1e-9).setup(model)
    for _ in range(3):
        model.cleargrads()
        model(x, t).backward()
        optimizer.update()


def trained_by_a_trainer(model, x):
    optimizer = optimizers.SGD(1e-9).setup(model)
    iterator = iterators.SerialIterator(datasets.TupleDataset(x, T), 3)
    training.Trainer(training.StandardUpdater(iterator, optimizer), (2, "epoch"), "unused").run()


def regression(error):
    model = L.Linear(4, 1)
    x = RNG.normal(size=(6, 4)).astype(np.float32)
    trained(model, x, Y, lambda x, t: F.mean(F.square(error(model(x), t))))


PIXEL_WORDS = "the first convolution of the network gets pixels from 0 to 255.* / 255"
SQUARE = r"has shape \(6, 6\), each with each; .*for example with"
WARNED = {
    "pixels": (lambda: trained(network(), PIXELS), PIXEL_WORDS),
    "pixels in a loop of one's own": (lambda: trained_by_hand(network(), PIXELS), PIXEL_WORDS),
    "pixels to a trainer": (lambda: trained_by_a_trainer(network(), PIXELS), PIXEL_WORDS),
    "grey pixels": (
        lambda: trained(L.Classifier(dbrdist.Sequential(L.Convolution2D(1, 2, 3), L.Linear(None, 3))), PIXELS[:, :1]),
        PIXEL_WORDS,
    ),
    "flattened pixels": (
        lambda: trained(L.Classifier(L.Linear(243, 3)), PIXELS.reshape(6, -1)),
        "the first Linear of the network gets pixels",
    ),
    "pixels after functions without parameters": (lambda: trained(network(F.identity), PIXELS), PIXEL_WORDS),
    "outputs less targets": (lambda: regression(lambda y, t: y - t), SQUARE + r" targets\[:, None\]"),
    "targets less outputs": (lambda: regression(lambda y, t: t - y), SQUARE + r" targets\[:, None\]"),
    "targets in a column": (
        lambda: regression(lambda y, t: F.squeeze(y, 1) - t[:, None]),
        SQUARE + r" targets\[:, 0\]",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_mistake_is_warned_of_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, words = WARNED[name]
    with pytest.warns(UsageWarning, match=words) as given:
        program()
    assert len(given) == 1 and given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UsageWarning)  # which turns them off
        program()


def normalized_later(*between, by=lambda: L.BatchNormalization(2)):
    layers = L.Convolution2D(3, 2, 3), *between, by(), L.Linear(None, 3)
    trained(L.Classifier(dbrdist.Sequential(*layers)), PIXELS)


def counts_of_a_few_words():
    counts = RNG.poisson(0.5, (6, 243)).astype(np.float32)
    counts[0, 7] = 140
    return counts


def with_scaling():
    class Scaled(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.net = network()

        def forward(self, x, t):
            return self.net(x / 255, t)

    trained(Scaled(), PIXELS)


def normalized(*layers):
    trained(L.Classifier(dbrdist.Sequential(*layers, F.relu, L.Linear(None, 3))), PIXELS)


def with_frozen_layers():
    """As those of a network that others trained with such pixels."""
    model = network()
    model(PIXELS, T)
    model.predictor[0].disable_update()
    trained(model, PIXELS)


def counts_of_words():
    x = RNG.integers(0, 9, (40, 100)).astype(np.float32)
    x[0, 0] = 180
    trained(L.Classifier(L.Linear(100, 3)), x, (np.arange(40) % 3).astype(np.int32))


def distances_to_as_many_centers():
    """As many centers as there are examples, by chance: the layer behind them takes each with each."""

    class Radial(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.place, self.out = L.Linear(4, 1), L.Linear(6, 3)

        def forward(self, x, t):
            return F.softmax_cross_entropy(self.out(F.exp(-((self.place(x) - Y) ** 2))), t)

    trained(Radial(), RNG.normal(size=(6, 4)).astype(np.float32))


class LinearFunction(dbrdist.FunctionNode):
    """A program's own, which retains nothing."""

    def forward(self, inputs):
        self.inputs_ = inputs
        return (inputs[0] @ inputs[1].T,)

    def backward(self, indexes, gys):
        x, W = self.inputs_
        return F.matmul(gys[0], W), F.matmul(F.transpose(gys[0]), x)


class sub(dbrdist.FunctionNode):
    """Another one, of three operands."""

    def forward(self, inputs):
        return (inputs[0] - inputs[1] - inputs[2],)

    def backward(self, indexes, gys):
        return gys[0], -gys[0], -gys[0]


def functions_of_ones_own():
    model = L.Linear(64, 2)

    def loss(x, t):
        y = LinearFunction().apply((x, model.W))[0]
        return F.sum(sub().apply((y, y, y))[0])

    trained(model, np.ones((2, 64), np.float32), None, loss)


NOT_WARNED = {
    "normalized behind the first convolution": lambda: normalized(L.Convolution2D(3, 4, 3), L.BatchNormalization(4)),
    "normalized behind what keeps the scale": lambda: normalized(
        L.Convolution2D(3, 4, 3), F.relu, lambda x: F.max_pooling_2d(x, 2), F.dropout, L.BatchNormalization(4)
    ),
    "normalized in groups": lambda: normalized(L.Convolution2D(3, 4, 3, nobias=True), L.GroupNormalization(2)),
    "normalized behind the first Linear": lambda: normalized(L.Linear(243, 4), L.LayerNormalization(4)),
    "frozen layers": with_frozen_layers,
    "counts of words": counts_of_words,
    "distances": distances_to_as_many_centers,
    "functions of one's own": functions_of_ones_own,
    "scaled pixels": lambda: trained(network(), PIXELS / 255),
    "pixels around 0": lambda: trained(network(), PIXELS - 128),
    "scaled in the network": with_scaling,
    "normalized first": lambda: trained(network(L.BatchNormalization(3)), PIXELS),
    "normalized after the first layer": normalized_later,
    "normalized in groups after the first layer": lambda: normalized_later(by=lambda: L.GroupNormalization(1)),
    "normalized after a rectifier": lambda: normalized_later(F.relu),
    "counts of a few words": lambda: trained(L.Classifier(L.Linear(243, 3)), counts_of_a_few_words()),
    "ids": lambda: trained(
        L.Classifier(dbrdist.Sequential(L.EmbedID(256, 4), L.Linear(None, 3))), PIXELS.reshape(6, -1).astype(int)
    ),
    "a few measurements": lambda: trained(L.Classifier(L.Linear(9, 3)), PIXELS.reshape(6, -1)[:, :9]),
    "fractions": lambda: trained(network(), PIXELS + np.float32(0.25)),
    "counts": lambda: trained(L.Classifier(L.Linear(243, 3)), PIXELS.reshape(6, -1) // 16),
    "more channels": lambda: trained(
        L.Classifier(dbrdist.Sequential(L.Convolution2D(6, 2, 3), L.Linear(None, 3))), np.concatenate([PIXELS] * 2, 1)
    ),
    "one column from another": lambda: regression(lambda y, t: y - t[:, None]),
    "differences of outputs with each other": lambda: regression(lambda y, t: y - F.squeeze(y, 1)),
    "no examples": lambda: trained(L.Classifier(L.Linear(64, 3)), np.zeros((0, 64), "f"), T[:0]),
}


@pytest.mark.parametrize("name", NOT_WARNED)
def test_what_is_right_is_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NOT_WARNED[name]()


def test_graphs_after_the_first_update_are_not_looked_at():
    model = network()
    optimizer = optimizers.SGD(1e-9).setup(model)
    assert len(watching_backward) == 1
    for _ in range(3):
        optimizer.update(model, PIXELS / 255, T)
    assert not watching_backward
    model.cleargrads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(PIXELS, T).backward()


def test_an_optimizer_that_is_never_used_stops_looking():
    optimizer = optimizers.SGD().setup(L.Linear(2, 2))
    assert len(watching_backward) == 1
    del optimizer
    assert not watching_backward
    optimizer = optimizers.SGD().setup(L.Linear(2, 2))
    y = F.sum(L.Linear(2, 2)(np.ones((1, 2), "f")))
    for _ in range(17):
        y.backward()
    assert not watching_backward
    del optimizer


@pytest.mark.parametrize("case", ["made", "gone", "frozen", "own", "of another"])
def test_whose_weights_learn_from_pixels(case):
    """Frozen ones were made for such an input; what is computed, as by spectral normalization, is taken to learn."""
    model, other = L.Linear(2, 3), L.Linear(2, 3)
    weights = (F.exp(model.W) if case == "made" else (other if case == "of another" else model).W).node
    if case == "frozen":
        model.disable_update()
    own = types.SimpleNamespace(_target=lambda: None if case == "gone" else model)
    assert first_graphs.FirstGraphs._learns(own, weights) is (case in ("made", "gone", "own"))
