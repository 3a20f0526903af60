"""Tests of dbrdist.training.trainer."""

from __future__ import annotations

import json
import os
from time import monotonic

import numpy as np
import pytest

import dbrdist
from dbrdist import iterators, optimizers
from dbrdist.core.array import random
from dbrdist.core.files.serializer import SUBJECT
from dbrdist.core.model.reporter import report
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.training import PRIORITY_WRITER, Extension, StandardUpdater, Trainer, extensions, make_extension, triggers
from tests.training.training_helpers import Counting, Line, Noisy, examples, full_run, make_trainer, restore, saved


# ---- the loop ------------------------------------------------------------------------------------------------------
def test_order_of_events(tmp_path):
    events = []

    class Noted(Extension):
        def __init__(self, label, priority):
            self.label, self.priority, self.name = label, priority, label

        def initialize(self, trainer):
            events.append(f"{self.label} starts")

        def __call__(self, trainer):
            events.append(f"{self.label} {trainer.updater.iteration}")

        def finalize(self):
            events.append(f"{self.label} ends")

    trainer = make_trainer(tmp_path, (2, "iteration"))
    trainer.extend(Noted("reader", 100))
    trainer.extend(Noted("writer", PRIORITY_WRITER), call_before_training=True)
    trainer.extend(Noted("rare", 50), trigger=(2, "iteration"))
    trainer.run()
    assert events == [
        *("writer starts", "reader starts", "rare starts", "writer 0"),
        *("writer 1", "reader 1", "writer 2", "reader 2", "rare 2"),
        *("writer ends", "reader ends", "rare ends"),
    ]


def test_a_step_that_the_updater_does_not_count_calls_nothing(tmp_path):
    class CountsEverySecond(StandardUpdater):
        def update(self):
            self.num_calls = getattr(self, "num_calls", 0) + 1
            if self.num_calls % 2 == 0:
                super().update()

    line, seen = Line(), []
    updater = CountsEverySecond(SerialIterator(examples(), 5), optimizers.SGD(0.1).setup(line))
    trainer = Trainer(updater, (3, "iteration"), out=tmp_path)
    trainer.extend(lambda t: seen.append((updater.num_calls, updater.iteration)), name="watch")
    trainer.run()
    assert seen == [(2, 1), (4, 2), (6, 3)]


def test_a_snapshot_says_which_extensions_have_seen_the_step(tmp_path):
    trainer, states = make_trainer(tmp_path, (3, "iteration")), []
    trainer.extend(lambda t: None, name="before", priority=3)
    trainer.extend(lambda t: states.append(saved(t)), name="saves", priority=2)
    trainer.extend(lambda t: None, name="after", priority=1)
    trainer.run()
    of = "extension_triggers/{}/previous_iteration".format
    assert [[int(s[of(name)]) for name in ("before", "saves", "after")] for s in states] == [
        [1, 1, 0], [2, 2, 1], [3, 3, 2],
    ]  # fmt: skip


def test_the_loss_is_observed_under_the_optimizers_name(tmp_path):
    trainer, seen = make_trainer(tmp_path, (5, "iteration")), []
    trainer.extend(lambda t: seen.append(float(t.observation["main/loss"])), name="watch")
    trainer.run()
    assert len(seen) == 5
    assert seen[-1] < seen[0]


def test_a_run_equals_the_same_steps_by_hand(tmp_path):
    random.set_seed(0)
    trainer = make_trainer(tmp_path, (7, "iteration"))
    trainer.run()
    random.set_seed(0)
    iterator, model = SerialIterator(examples(), 4), Line()
    w, b, vw, vb = 0.5, 0.0, 0.0, 0.0
    for _ in range(7):
        batch = iterator.next()
        x, t = np.array([e[0][0] for e in batch]), np.array([e[1][0] for e in batch])
        error = w * x + b - t
        vw, vb = 0.9 * vw - 0.1 * (2 * error * x).mean(), 0.9 * vb - 0.1 * (2 * error).mean()
        w, b = w + vw, b + vb
    model = trainer.updater.get_optimizer("main").target
    np.testing.assert_allclose([model.w.array[0], model.b.array[0]], [w, b], rtol=1e-12)


def test_functions_serve_as_extensions(tmp_path):
    calls = []

    @make_extension(trigger=(2, "iteration"), default_name="two", finalizer=lambda: calls.append("end"))
    def every_second(trainer):
        calls.append(trainer.updater.iteration)

    trainer = make_trainer(
        tmp_path,
        (4, "iteration"),
    )
    trainer.extend(every_second)
    assert trainer.get_extension("two")
    trainer.run()
    assert calls == [2, 4, "end"]


def test_equal_names_are_numbered(tmp_path):
    trainer = make_trainer(tmp_path)
    for _ in range(3):
        trainer.extend(extensions.LogReport())
    assert [trainer.get_extension(f"LogReport{s}").name for s in ("", "_1", "_2")] == [
        "LogReport",
        "LogReport_1",
        "LogReport_2",
    ]
    with pytest.raises(ValueError, match=r"expected the name of an extension .*LogReport_2.*, got 'other'"):
        trainer.get_extension("other")


def test_an_error_reaches_the_extensions_and_the_caller(tmp_path, capsys):
    seen = []

    class Watch(Extension):
        def on_error(self, trainer, exc, tb):
            seen.append((type(exc), tb is not None))

        def __call__(self, trainer):
            if trainer.updater.iteration == 2:
                raise OSError("no power")

        def finalize(self):
            seen.append("end")

    trainer = make_trainer(tmp_path)
    trainer.extend(Watch())
    with pytest.raises(OSError, match="no power") as caught:
        trainer.run()
    assert seen == [(OSError, True), "end"]
    assert caught.value.__notes__ == ["in the training loop at iteration 2"]
    assert not capsys.readouterr().err  # the message once, with the traceback


def test_an_extension_that_fails_at_an_error_is_named_beside_it(tmp_path):
    told = []

    class Fails(Extension):
        def __call__(self, trainer):
            pass

        def on_error(self, trainer, exc, tb):
            raise KeyError("mine")

    class Last(Extension):
        def __call__(self, trainer):
            raise OSError("no power")

        def on_error(self, trainer, exc, tb):
            told.append(exc)

    trainer = make_trainer(tmp_path)
    trainer.extend(Fails(), name="fails", priority=300)
    trainer.extend(Last())
    with pytest.raises(OSError, match="no power") as caught:
        trainer.run()
    assert told == [caught.value]
    assert "on_error of the extension fails failed: KeyError: 'mine'" in caught.value.__notes__


def test_a_trainer_runs_once(tmp_path):
    trainer = make_trainer(tmp_path, (1, "iteration"))
    with pytest.raises(RuntimeError, match="not started"):
        _ = trainer.elapsed_time
    trainer.run()
    assert trainer.elapsed_time > 0
    with pytest.raises(RuntimeError, match="a Trainer can run only once"):
        trainer.run()


def test_what_is_no_extension_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(TypeError, match=r"the class LogReport; write LogReport\(\)"):
        trainer.extend(extensions.LogReport)
    with pytest.raises(TypeError, match="got int"):
        trainer.extend(3)


def test_an_optimizer_without_a_target_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"call optimizer.setup\(model\)"):
        StandardUpdater(SerialIterator(examples(), 4), optimizers.SGD())


# ---- the updater ---------------------------------------------------------------------------------------------------
def test_the_random_stream_is_set_for_each_step(tmp_path):
    seen = []

    def loss(x, t):
        seen.append(random.get_state()[:5])
        return trainer.updater.get_optimizer("main").target(x, t)

    random.set_seed(7)
    trainer = make_trainer(tmp_path, (4, "iteration"), batch=5, loss_func=loss)
    trainer.run()
    assert seen == [(7, 0, 0, 0, 0), (7, 0, 1, 0, 0), (7, 1, 2, 0, 0), (7, 1, 3, 0, 0)]
    random.set_seed(0)


def test_the_multi_node_optimizer_is_told_the_number_of_samples(tmp_path):
    told = []

    class Counting(optimizers.SGD):
        takes_num_samples = True

        def update(self, lossfun=None, *args, num_samples=None, **kwds):
            told.append(num_samples)
            super().update(lossfun, *args, **kwds)

    updater = StandardUpdater(SerialIterator(examples(10), 4, repeat=False), Counting().setup(Line()))
    for _ in range(3):
        updater.update()
    assert told == [4, 4, 2]


def test_loss_scale_does_not_change_the_update(tmp_path):
    first, second = make_trainer(tmp_path, (3, "iteration")), make_trainer(tmp_path, (3, "iteration"), loss_scale=64.0)
    first.run()
    second.run()
    a, b = (t.updater.get_optimizer("main").target for t in (first, second))
    np.testing.assert_allclose(a.w.array, b.w.array, rtol=1e-12)


# ---- reports -------------------------------------------------------------------------------------------------------
def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_elapsed_time_adds_up_over_resumes(tmp_path):
    first = full_run(tmp_path, (3, "iteration"))
    first.run()
    began = monotonic()
    second = full_run(tmp_path, (4, "iteration"), autoload=True)
    second.run()
    assert 0 < second._earlier_seconds <= first.elapsed_time
    assert 0 < second.elapsed_time - second._earlier_seconds < monotonic() - began
    times = [entry["elapsed_time"] for entry in second.get_extension("LogReport").log]
    assert times == sorted(times)
    assert times[-1] <= second.elapsed_time


def without_time(entries):
    return [{k: v for k, v in entry.items() if k != "elapsed_time"} for entry in entries]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 7])
def test_a_resumed_run_equals_a_straight_one_exactly(tmp_path, stop):
    random.set_seed(3)
    straight = full_run(tmp_path / "a", (9, "iteration"))
    straight.run()
    a = saved(straight)  # before the resumed run: the random state is that of the moment
    random.set_seed(3)
    full_run(tmp_path / "b", (stop, "iteration")).run()
    random.set_seed(99)  # the snapshot must bring its own
    resumed = full_run(tmp_path / "b", (9, "iteration"), autoload=True)
    resumed.run()
    b = saved(resumed)
    assert set(a) == set(b)
    for key in set(a) - {"_snapshot_elapsed_time"}:
        assert np.array_equal(a[key], b[key]), key
    assert without_time(lines(tmp_path / "a/log.jsonl")) == without_time(lines(tmp_path / "b/log.jsonl"))
    random.set_seed(0)


def test_the_log_is_cut_back_to_the_snapshot(tmp_path):
    trainer = full_run(tmp_path, (4, "iteration"))
    trainer.run()
    os.remove(tmp_path / "snapshot_iter_4")
    os.remove(tmp_path / "snapshot_iter_3")
    resumed = full_run(tmp_path, (4, "iteration"), autoload=True)
    resumed.run()
    assert [entry["iteration"] for entry in lines(tmp_path / "log.jsonl")] == [2, 4]


def test_a_run_whose_name_has_a_dot_resumes(tmp_path):
    name = "run.v1.5_{.updater.iteration}.npz"
    full_run(tmp_path / "a.b", (4, "iteration"), filename=name).run()
    resumed = full_run(tmp_path / "a.b", (5, "iteration"), filename=name, autoload=True)
    resumed.run()
    assert (tmp_path / "a.b" / "run.v1.5_5.npz").exists()
    assert len(resumed.get_extension("LogReport").log) == 2


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


@pytest.mark.slow
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


class Iterator(SerialIterator):
    finalized = 0

    def finalize(self):
        self.finalized += 1
        super().finalize()


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


def plain(trainer):
    return False


def trainer_of(out, trigger, extension_trigger):
    updater = StandardUpdater(
        iterators.SerialIterator(examples(), 4, seed=0), optimizers.SGD(0.1).setup(Line()), auto_new_epoch=False
    )
    made = Trainer(updater, trigger, out=str(out))
    made.extend(extensions.MicroAverage("a", "b", "c", plain), name="ratio", trigger=extension_trigger)
    return made


def test_the_state_of_a_run_has_all_its_parts(tmp_path):
    first = trainer_of(tmp_path, Counting(2), Counting(3))
    first.updater.iteration = 4
    first.get_extension("ratio")._numerator = 2.5
    first.observation = {"loss": np.float32(0.5), "scalar": np.array(2.0), "many": np.ones(3), "one": 1}
    # no numbers, which logs leave out with a warning: a snapshot must not end the run for them
    first.observation |= {"word": "on", "none": None, "pair": (1.0, 2), "day": np.datetime64("2026-11-30"), "z": 1j}
    state = saved(first)
    assert json.loads(str(state["observation"])) == {"loss": 0.5, "scalar": 2.0, "one": 1.0}
    stop, own = Counting(), Counting()
    second = trainer_of(tmp_path, stop, own)
    state["_snapshot_elapsed_time"] = np.array(17.5)
    dbrdist.random.set_seed(4)
    restore(state, second)
    assert (stop.count, own.count, second.updater.iteration) == (2, 3, 4)
    assert second.get_extension("ratio")._numerator == 2.5
    assert second.observation == {"loss": 0.5, "scalar": 2.0, "one": 1.0}
    assert saved(second)["_snapshot_elapsed_time"] == 17.5
    assert saved(second)["random_state"].tolist() == state["random_state"].tolist()
    without = saved(trainer_of(tmp_path, plain, plain))
    own = {key for key in set(state) - set(without) if not key.endswith(SUBJECT)}
    assert own == {"stop_trigger/count", "extension_triggers/ratio/count"}
