"""What the tests of mistakes share: data, a network, and programs that are made of them."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training

X = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
T = (np.arange(20) % 3).astype(np.int32)
DATA = datasets.TupleDataset(X, T)
IMAGES = np.zeros((2, 3, 8, 8), np.float32)


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(4, 8)
            self.l2 = L.Linear(8, 3)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))


def within(name, value):
    """A chain that assigns a child within init_scope."""
    chain = dbrdist.Chain()
    with chain.init_scope():
        setattr(chain, name, value)
    return chain


def outside(**attributes):
    """A chain with attributes outside of init_scope."""
    chain = dbrdist.Chain()
    for name, value in attributes.items():
        setattr(chain, name, value)
    return chain


def sgd(link):
    return optimizers.SGD(0.1).setup(link)


def trainer(model=None, data=DATA, stop=(2, "epoch"), extend=(), out="unused", optimizer=None, **options):
    model = L.Classifier(Net()) if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    updater = training.StandardUpdater(iterators.SerialIterator(data, 5, shuffle=False), optimizer, **options)
    return training.Trainer(updater, stop, out, extensions=extend)


def step(model, data=DATA, **options):
    """One step of a trainer's updater."""
    return lambda: trainer(model, data, **options).updater.update()


def update(lossfun, *args, net=None):
    return lambda: sgd(Net() if net is None else net).update(lossfun, *args)


def without_graph():
    with dbrdist.no_backprop_mode():
        loss = F.sum(Net()(X))
    loss.backward()


NET = Net()
MAP = L.Convolution2D(3, 3, 1)
