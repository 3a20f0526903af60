"""Tests of dbrdist.training.updater."""

from __future__ import annotations

import contextlib
import unittest.mock

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import iterators, optimizers, training
from dbrdist.core.array import spans
from dbrdist.core.files.serializer import DictionarySerializer
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import UsageWarning
from dbrdist.training import StandardUpdater, Trainer
from dbrdist.training import updater as updater_module
from tests.each import each
from tests.training.training_helpers import Line, Noisy, OwnIterator, examples, made


@each(name=["get_optimizer", "get_all_optimizers", "update", "serialize"])
def test_an_updater_defines_all_of_its_members(name):
    member = getattr(training.Updater(), name)
    with pytest.raises(NotImplementedError):
        member(*["main"] * (name in ("get_optimizer", "serialize")))


def test_parts_of_an_updater_by_name():
    trainer = made(device="@numpy", loss_scale=4.0)
    updater = trainer.updater
    optimizer = updater.get_optimizer("main")
    assert str(updater.device) == "@numpy" == str(updater.input_device)
    assert updater.loss_scale == optimizer._loss_scale == 4.0
    assert updater.get_all_optimizers() == {"main": optimizer} and not updater.is_new_epoch
    updater.update()
    updater.update()
    assert updater.is_new_epoch and updater.epoch == 1 and updater.previous_epoch_detail == 0.5
    assert updater.get_iterator("main").epoch_detail == updater.epoch_detail == 1.0
    both = training.StandardUpdater({"main": updater.get_iterator("main")}, {"main": optimizer})
    assert both.device is None is both.input_device and both.get_optimizer("main") is optimizer


class Watch:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_step_and_its_wait_for_data_are_timed(is_recorded, monkeypatch):
    watch = Watch()
    monkeypatch.setattr(updater_module.time, "perf_counter", watch)

    class Slow(iterators.SerialIterator):
        def next(self):
            watch.now += 3
            return super().next()

    class Model(Line):
        def forward(self, x, t):
            watch.now += 5
            return super().forward(x, t)

    steps = []

    class Recorder(spans.Recorder):
        @contextlib.contextmanager
        def span(self, name):
            steps.append((name, self.step))
            yield

    recorder = Recorder()
    if is_recorded:
        monkeypatch.setattr(spans, "recorders", [recorder])
    updater = StandardUpdater(Slow(examples(), 2), optimizers.SGD(0.1).setup(Model()))
    assert updater.step_seconds == updater.data_seconds == 0
    for _ in range(2):
        before = updater.get_optimizer("main").target.w.array.copy()
        updater.update()
        assert updater.get_optimizer("main").target.w.array != before
    assert updater.iteration == 2 and updater.data_seconds == 6 and updater.step_seconds == 16
    assert [s for s in steps if s[0] == "step"] == [("step", 0), ("step", 1)] * is_recorded
    waits = [("data wait", 0, 100.0, 103.0), ("data wait", 1, 108.0, 111.0)]
    assert [(s.name, s.step, s.began, s.ended) for s in recorder.spans] == waits * is_recorded


@pytest.mark.parametrize("auto", [True, False])
def test_the_optimizer_counts_epochs_where_it_is_to(tmp_path, auto):
    told = []

    class Counting(optimizers.SGD):
        def new_epoch(self, auto=False):
            told.append(auto)
            super().new_epoch(auto)

    optimizer = Counting(lr=0.1).setup(Noisy())
    updater = StandardUpdater(SerialIterator(examples(10), 5), optimizer, auto_new_epoch=auto)
    Trainer(updater, (7, "iteration"), out=tmp_path).run()
    assert optimizer.epoch == (3 if auto else 0)
    assert told == [True] * (3 if auto else 0)


def test_an_iterator_may_call_other_things_by_our_names():
    """A program's own has `size` and `row` of another kind; its optimizer has any attribute, as a mock has."""

    class Own:
        epoch, is_new_epoch = None, False

        def size(self):
            return 2

        def row(self):
            return "first"

        def next(self):
            return [(np.ones(2, np.float32), np.int32(0))] * 2

    optimizer = unittest.mock.MagicMock()
    optimizer.target = L.Classifier(L.Linear(2, 2))
    updater = StandardUpdater(Own(), optimizer)
    updater.update()
    assert updater.iteration == 1 and optimizer.update.call_count == 1
    assert "num_samples" not in optimizer.update.call_args.kwargs


@each(is_own=[False, True])
def test_a_first_step_without_examples_is_not_taken_for_a_step_of_the_programs_own(is_own):
    """A rank may have no share of a short batch."""

    class Nothing:
        epoch, is_new_epoch = 0, False

        def next(self):
            return []

    class Own(StandardUpdater):
        def update_core(self):
            pass

    optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(2, 2)))
    updater = (Own if is_own else StandardUpdater)(Nothing(), optimizer, capture=True)
    with pytest.warns(UsageWarning, match="of Own is the program's own") if is_own else contextlib.nullcontext():
        updater.update()


def test_a_serializer_may_give_nothing_back():
    updater = StandardUpdater(SerialIterator(examples(), 2), optimizers.SGD(0.1).setup(L.Classifier(L.Linear(2, 2))))

    class Saves:
        is_loading = False

        def __getitem__(self, key):
            return DictionarySerializer()

        def __call__(self, key, value):
            self.seen = key, value

    updater.serialize(serializer := Saves())
    assert serializer.seen == ("iteration", 0) and updater.iteration == 0


def test_chance_of_a_step_without_an_epoch_or_a_row(monkeypatch):
    """A program's own iterator may count neither: the first of each."""
    streams = []
    monkeypatch.setattr(updater_module.random, "set_stream", lambda *words: streams.append(words))

    own = OwnIterator()
    updater = training.StandardUpdater(own, optimizers.SGD(0.1).setup(Line()))
    updater.update()
    own.epoch, own.row = 3, 5
    updater.update()
    own.epoch, own.row = lambda: 7, None  # something else by these names
    updater.update()
    seed = updater_module.random.get_seed()
    assert streams == [(seed, 0, 0, 0), (seed, 3, 1, 5), (seed, 0, 2, 0)]


def test_a_rank_without_a_share_takes_part_in_the_reduction():
    """An optimizer of several ranks is told how many examples there are; one of a single rank makes no step."""
    seen = []

    class Empty:
        is_new_epoch = False

        def next(self):
            return []

    for takes in (True, False):
        optimizer = optimizers.SGD(0.1).setup(Line())
        optimizer.takes_num_samples = takes
        optimizer.update = lambda loss_func, *args, **named: seen.append((args, named))
        training.StandardUpdater(Empty(), optimizer).update()
    assert seen == [((), {"num_samples": 0})]


@each(is_told=[False, True], names=[(), ("x", "t")])
def test_what_a_captured_step_is_given(is_told, names):
    updater = made().updater
    optimizer = updater.get_optimizer("main")
    steps = updater._captured = unittest.mock.Mock()
    updater.converter = (lambda batch, device: {"x": 1, "t": 2}) if names else lambda batch, device: (1, 2)
    updater.loss_func = loss = lambda *args: None
    if is_told:
        optimizer.takes_num_samples = True
    updater.update_core()
    size = updater.get_iterator("main").batch_size
    args, named = ((), {"x": 1, "t": 2}) if names else ((1, 2), {})
    steps.update.assert_called_once_with(optimizer, loss, args, named, {"num_samples": size} if is_told else {})
