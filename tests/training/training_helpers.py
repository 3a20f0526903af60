"""A model, data and a clock that the tests of the training loop share."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import functions as F
from dbrdist import iterators, optimizers, training
from dbrdist.core.model.reporter import report
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.training import StandardUpdater, Trainer, extensions


class Line(dbrdist.Chain):
    """y = w x + b with its squared error as loss; the model of all tests here."""

    def __init__(self, dtype=np.float64):
        super().__init__()
        with self.init_scope():
            self.w = dbrdist.Parameter(np.array([0.5], dtype))
            self.b = dbrdist.Parameter(np.array([0.0], dtype))

    def forward(self, x, t):
        difference = self.w * x + self.b - t
        loss = (difference * difference).mean()
        report({"loss": loss}, self)
        return loss


def examples(n=10):
    x = np.linspace(-1, 1, n)
    return [(np.array([v]), np.array([2 * v + 1])) for v in x]


class OwnIterator:
    """A program's own, which says neither in which epoch it is nor which rows it read."""

    is_new_epoch = False

    def next(self):
        return examples(2)


class Clock:
    """Stands for a trainer where only its position matters: `n` steps an epoch."""

    def __init__(self, steps_per_epoch=4.0):
        self.steps_per_epoch = steps_per_epoch
        self.updater = self
        self.observation = {}
        self.elapsed_time = 0.0
        self.iteration = 0
        self.previous_epoch_detail = 0.0

    @property
    def epoch_detail(self):
        return self.iteration / self.steps_per_epoch

    @property
    def epoch(self):
        return int(self.epoch_detail)

    def tick(self, **observation):
        self.previous_epoch_detail = self.epoch_detail
        self.iteration += 1
        self.observation = observation
        return self


def saved(obj):
    """The state of an object as a dictionary."""
    serializer = dbrdist.serializers.DictionarySerializer()
    serializer.save(obj)
    return serializer.target


def restore(state, obj):
    dbrdist.serializers.NpzDeserializer(state).load(obj)
    return obj


def make_trainer(out, stop=(3, "epoch"), model=None, n=10, batch=4, lr=0.1, **updater):
    optimizer = optimizers.MomentumSGD(lr=lr).setup(model or Line())
    return Trainer(StandardUpdater(SerialIterator(examples(n), batch, seed=0), optimizer, **updater), stop, out=out)


def made(out=".", stop=(1, "epoch"), n=4, **options):
    model = Line()
    optimizer = optimizers.SGD(0.1).setup(model)
    iterator = iterators.SerialIterator(examples(n), 2, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer, **options)
    return training.Trainer(updater, stop, out=str(out))


class Noisy(dbrdist.Chain):
    """A line whose inputs are dropped at random, and whose loss goes up and down."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = dbrdist.Parameter(np.array([0.5]))
            self.b = dbrdist.Parameter(np.array([0.0]))

    def forward(self, x, t):
        d = self.w * F.dropout(x, 0.5) + self.b - t
        loss = (d * d).mean()
        report({"loss": loss}, self)
        return loss


class Counting:
    """A trigger that never fires and counts who asks."""

    def __init__(self, count=0):
        self.count = count

    def __call__(self, trainer):
        self.count += 1
        return False

    def serialize(self, serializer):
        self.count = int(serializer("count", self.count))


# ---- snapshots and resume ------------------------------------------------------------------------------------------
def full_run(out, stop, **snapshot):
    trainer = make_trainer(out, stop, batch=3)
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.ExponentialShift("lr", 0.9), trigger=(2, "iteration"))
    trainer.extend(extensions.snapshot(**snapshot), trigger=(1, "iteration"))
    return trainer
