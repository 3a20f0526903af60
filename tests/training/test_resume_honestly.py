"""A resumed run against one that went straight through, whose state is taken before the second run begins.

The global random state, the triggers and whatever else lives outside of the trainer would otherwise be compared with
itself. With dropout, and with triggers that have a state of their own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

import numpy as np
import pytest
from training_helpers import examples, restore, saved

import dbrdist
from dbrdist import functions as F
from dbrdist import optimizers
from dbrdist.core import random
from dbrdist.core.reporter import report
from dbrdist.core.serializer import save_npz
from dbrdist.datasets.serial import SerialIterator
from dbrdist.training import StandardUpdater, Trainer, extensions, triggers
from dbrdist.training.extensions import snapshots

# What a snapshot of `make` below must hold: an entry that nobody lists is lost at a resume.
KEYS = {
    "updater/iterator:main/num_examples", "updater/iterator:main/seed", "updater/iterator:main/epoch",
    "updater/iterator:main/current_position", "updater/iterator:main/is_new_epoch",
    "updater/iterator:main/previous_epoch", "updater/iterator:main/previous_position",
    "updater/model:main/w", "updater/model:main/b",
    "updater/optimizer:main/hyperparam/lr", "updater/optimizer:main/hyperparam/momentum",
    "updater/optimizer:main/t", "updater/optimizer:main/epoch",
    "updater/optimizer:main/w/t", "updater/optimizer:main/w/v", "updater/optimizer:main/b/t",
    "updater/optimizer:main/b/v", "updater/iteration",
    "stop_trigger/check_trigger/previous_iteration", "stop_trigger/check_trigger/previous_epoch_detail",
    "stop_trigger/max_trigger/previous_iteration", "stop_trigger/max_trigger/previous_epoch_detail",
    "stop_trigger/count", "stop_trigger/best",
    "extension_triggers/best/best_value", "extension_triggers/once/first",
    "extensions/LogReport/_trigger/best_value",
    "observation", "random_state", "_snapshot_elapsed_time",
}  # fmt: skip


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


def make(out, stop=12, events=None, **snapshot):
    """A run over batches of 3 of 10 examples: neither period nor batch divides the other."""
    optimizer = optimizers.MomentumSGD(lr=0.1).setup(Noisy())
    patient = triggers.EarlyStoppingTrigger((2, "iteration"), patience=100, max_trigger=(stop, "iteration"))
    trainer = Trainer(StandardUpdater(SerialIterator(examples(10), 3), optimizer), patient, out=out)
    trainer.extend(extensions.LogReport(trigger=triggers.MinValueTrigger("main/loss", (2, "iteration"))))

    def note(name):
        return lambda t: None if events is None else events.append((name, t.updater.iteration))

    trainer.extend(note("best"), name="best", trigger=triggers.MaxValueTrigger("main/loss", (3, "iteration")))
    trainer.extend(note("once"), name="once", trigger=triggers.OnceTrigger())
    trainer.extend(note("points"), name="points", trigger=triggers.ManualScheduleTrigger([2, 7], "iteration"))
    trainer.extend(note("often"), name="often", trigger=(5, "iteration"))
    trainer.extend(extensions.snapshot(**snapshot), trigger=(1, "iteration"))
    return trainer


@pytest.fixture(autouse=True)
def seeds():
    state = random.get_state()
    yield
    random.set_state(state)


@pytest.mark.parametrize("stop", [1, 4, 5, 8])
def test_a_resumed_run_has_the_state_of_a_straight_one(tmp_path, stop):
    events, cut = [], []
    random.set_seed(3)
    straight = make(tmp_path / "a", events=events)
    straight.run()
    expected = {key: np.array(value) for key, value in saved(straight).items()}  # before anything else happens
    random.set_seed(3)
    make(tmp_path / "b", stop, events=cut).run()
    random.set_seed(99)
    resumed = make(tmp_path / "b", events=cut, autoload=True)
    resumed.run()
    state = saved(resumed)
    assert set(expected) == set(state) >= KEYS
    for key in set(expected) - {"_snapshot_elapsed_time", "extensions/LogReport/_log"}:  # these hold seconds
        assert np.array_equal(expected[key], state[key]), key
    assert events == cut
    assert [e for e in events if e[0] in ("once", "points", "often")] == [
        ("once", 1), ("points", 2), ("often", 5), ("points", 7), ("often", 10)
    ]  # fmt: skip


def test_everything_that_is_listed_is_loaded():
    """A fresh trainer that loads a state in which each entry was changed has the changed entries."""
    trainer = make("unused")
    state = saved(trainer)
    assert set(state) >= KEYS
    changed = {}
    for key, value in state.items():
        a = np.asarray(value)
        free = a.dtype.kind in "fiu" and "num_examples" not in key and "previous_epoch" not in key
        changed[key] = a + 1 if free else value
    changed["stop_trigger/best"] = np.array(0.25)
    changed["extension_triggers/best/best_value"] = np.array(0.5)
    fresh = saved(restore(changed, make("unused")))
    for key in KEYS:
        assert np.array_equal(fresh[key], changed[key]), key


def test_an_early_stop_counts_over_a_resume(tmp_path):
    def patient(stop):
        def loss(x, t):
            model = trainer.updater.get_optimizer("main").target
            y = model(x, t)
            report({"loss": np.float64([5, 4, 9, 6, 7, 3, 2, 1][trainer.updater.iteration])}, model)
            return y

        optimizer = optimizers.SGD(lr=0.0).setup(Noisy())
        trigger = triggers.EarlyStoppingTrigger((1, "iteration"), patience=3, max_trigger=(stop, "iteration"))
        updater = StandardUpdater(SerialIterator(examples(10), 3), optimizer, loss_func=loss)
        trainer = Trainer(updater, trigger, out=tmp_path)
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        trainer.run()
        return trainer.updater.iteration

    assert patient(4) == 4  # best 4, two worse since
    assert patient(100) == 5


# ---- epochs, ends, disks --------------------------------------------------------------------------------------------


class Iterator(SerialIterator):
    finalized = 0

    def finalize(self):
        self.finalized += 1
        super().finalize()


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


@pytest.mark.parametrize("fails", [False, True])
def test_every_iterator_is_ended_with_the_run(tmp_path, fails):
    iterators = {"main": Iterator(examples(10), 5), "other": Iterator(examples(10), 5)}
    trainer = Trainer(StandardUpdater(iterators, optimizers.SGD(lr=0.1).setup(Noisy())), (3, "iteration"), out=tmp_path)
    if fails:
        trainer.extend(lambda t: 1 / 0, name="fails")
        with pytest.raises(ZeroDivisionError):
            trainer.run(show_loop_exception_msg=False)
    else:
        trainer.run()
    assert [i.finalized for i in iterators.values()] == [1, 1]


@pytest.fixture
def disk(monkeypatch):
    """What goes to disk, in order: ("flush", name, bytes of a file) and ("rename", from, to)."""
    events, replace = [], os.replace

    def flush(descriptor):
        found = os.fstat(descriptor)
        size = None if stat.S_ISDIR(found.st_mode) else found.st_size
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), size))

    monkeypatch.setattr(os, "fsync", flush)

    def rename(source, target, **options):
        events.append(("rename", os.path.basename(source), os.path.basename(target)))
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", rename)
    return events


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads the names of open files below /proc")
@pytest.mark.parametrize("savefun", [None, lambda path, target: save_npz(path, target, compression=False)])
def test_a_snapshot_is_on_disk_before_it_has_its_name(tmp_path, disk, savefun):
    """Flushed, renamed, and the folder flushed: a power cut leaves the old file or the new one."""
    snapshots.write(str(tmp_path / "state"), Noisy(), savefun)
    last = max(i for i, event in enumerate(disk) if event[0] == "rename")
    assert disk[last][2] == "state"
    assert ("flush", disk[last][1], (tmp_path / "state").stat().st_size) in disk[:last]  # all of it
    assert disk[last + 1 :] == [("flush", tmp_path.name, None)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads the names of open files below /proc")
def test_save_npz_flushes_before_it_renames(tmp_path, disk):
    save_npz(tmp_path / "model.npz", Noisy())
    first, rename, last = disk
    assert rename[::2] == ("rename", "model.npz")
    assert first == ("flush", rename[1], (tmp_path / "model.npz").stat().st_size)
    assert last == ("flush", tmp_path.name, None)


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_flush_that_fails_costs_the_new_file_alone(tmp_path, monkeypatch, of_folder):
    """A disk may turn out to be full or broken when it is flushed; some file systems cannot flush a folder."""
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def flush(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folder:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", flush)
    with contextlib.nullcontext() if of_folder else pytest.raises(OSError, match="Input/output error"):
        save_npz(path, Noisy())
    assert os.listdir(tmp_path) == ["state"]
    assert (path.read_bytes() == b"old") == (not of_folder)
