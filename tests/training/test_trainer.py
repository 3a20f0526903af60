import io
import json
import os
from time import monotonic

import numpy as np
import pytest
from training_helpers import Line, examples, make_trainer, saved

from dbrdist import optimizers
from dbrdist.core import random
from dbrdist.datasets.serial import SerialIterator
from dbrdist.errors import CheckpointError, NonFiniteLossError
from dbrdist.training import PRIORITY_WRITER, Extension, StandardUpdater, Trainer, extensions, make_extension

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
    with pytest.raises(OSError, match="no power"):
        trainer.run()
    assert seen == [(OSError, True), "end"]
    assert "iteration 2: OSError('no power')" in capsys.readouterr().err


def test_a_trainer_runs_once(tmp_path):
    trainer = make_trainer(tmp_path, (1, "iteration"))
    with pytest.raises(RuntimeError, match="not started"):
        _ = trainer.elapsed_time
    trainer.run()
    assert trainer.elapsed_time > 0
    with pytest.raises(RuntimeError, match="expected a fresh trainer"):
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


def test_log_report(tmp_path):
    trainer, losses = make_trainer(tmp_path, (3, "epoch"), batch=5), []
    trainer.extend(extensions.LogReport())
    trainer.extend(lambda t: losses.append(float(t.observation["main/loss"])), name="watch")
    trainer.run()
    log = lines(tmp_path / "log.jsonl")
    assert [(entry["epoch"], entry["iteration"]) for entry in log] == [(1, 2), (2, 4), (3, 6)]
    np.testing.assert_allclose([e["main/loss"] for e in log], np.reshape(losses, (3, 2)).mean(1), rtol=1e-12)
    assert log[0]["elapsed_time"] < log[-1]["elapsed_time"]


def test_log_report_keys_postprocess_and_filename(tmp_path):
    trainer = make_trainer(tmp_path, (2, "iteration"))
    trainer.extend(lambda t: t.observation.update(a=1.0, b=float("nan")), name="w", priority=PRIORITY_WRITER)
    trainer.extend(
        extensions.LogReport(
            ["b"], (1, "iteration"), lambda entry: entry.update(mark=entry["iteration"] * 10), "x.jsonl"
        )
    )
    trainer.run()
    log = lines(tmp_path / "x.jsonl")
    assert [(entry["b"], entry["mark"]) for entry in log] == [(None, 10), (None, 20)]
    assert "a" not in log[0]


def test_print_report(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "main/loss", "nothing"], out=out))
    trainer.run()
    header, first, second = out.getvalue().splitlines()
    assert header.split() == ["epoch", "iteration", "main/loss", "nothing"]
    assert first.split()[:2] == ["1", "3"]
    assert second.split()[:2] == ["2", "5"]
    assert float(second.split()[2]) == pytest.approx(trainer.get_extension("LogReport").log[1]["main/loss"], rel=1e-5)


def test_print_report_with_a_log_of_its_own(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "iteration"))
    report = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(extensions.PrintReport(["iteration"], report, out))
    trainer.run()
    assert out.getvalue().split() == ["iteration", "1", "2"]


def test_progress_in_plain_lines(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "epoch"), batch=5)
    trainer.extend(extensions.ProgressBar(update_interval=1, out=out))
    trainer.run()
    written = out.getvalue().splitlines()
    assert len(written) == 4
    assert written[-1].startswith("epoch 2.00 of 2, step 4, ")


def test_elapsed_time_adds_up_over_resumes(tmp_path):
    first = full(tmp_path, (3, "iteration"))
    first.run()
    began = monotonic()
    second = full(tmp_path, (4, "iteration"), autoload=True)
    second.run()
    assert 0 < second._earlier_seconds <= first.elapsed_time
    assert 0 < second.elapsed_time - second._earlier_seconds < monotonic() - began
    times = [entry["elapsed_time"] for entry in second.get_extension("LogReport").log]
    assert times == sorted(times)
    assert times[-1] <= second.elapsed_time


def test_progress_on_a_terminal(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (4, "iteration"))
    trainer.extend(extensions.ProgressBar(update_interval=1, out=out, live=True))
    trainer.run()
    assert "step 4 of 4" in out.getvalue()


# ---- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 20])
def test_evaluation_weighs_by_samples(batch):
    model, data = Line(), examples(10)
    result = extensions.Evaluator(SerialIterator(data, batch, repeat=False, shuffle=False), model)()
    x, t = np.array([e[0][0] for e in data]), np.array([e[1][0] for e in data])
    assert result["main/loss"] == pytest.approx(((0.5 * x - t) ** 2).mean(), rel=1e-12)


def test_evaluation_in_a_run(tmp_path):
    trainer = make_trainer(tmp_path, (2, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    modes = []

    def evaluate(x, t):
        import dbrdist

        modes.append((dbrdist.config.train, dbrdist.config.enable_backprop))
        return model(x, t)

    trainer.extend(
        extensions.Evaluator(SerialIterator(examples(5), 2, repeat=False, shuffle=False), model, eval_func=evaluate)
    )
    trainer.extend(extensions.LogReport())
    trainer.run()
    assert modes == [(False, False)] * 6
    log = trainer.get_extension("LogReport").log
    assert [set(entry) >= {"main/loss", "validation/main/loss"} for entry in log] == [True, True]


# ---- numbers that are none -----------------------------------------------------------------------------------------


def test_a_loss_that_is_nan_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path, (100, "epoch"), lr=1e200)
    trainer.extend(extensions.FailOnNonNumber())
    with np.errstate(all="ignore"), pytest.raises(NonFiniteLossError, match=r"iteration \d+ \(epoch .*main:/w \(1,\)"):
        trainer.run(show_loop_exception_msg=False)


def test_a_bad_loss_is_named_without_looking_at_parameters(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.observation = {"main/loss": float("inf"), "main/accuracy": float("nan")}
    words = extensions.FailOnNonNumber().complaint(trainer)
    assert "main/loss is inf" in words
    assert "accuracy" not in words
    trainer.observation = {"main/loss": 1.0}
    assert extensions.FailOnNonNumber().complaint(trainer) is None


def test_observed_values(tmp_path):
    trainer = make_trainer(tmp_path, (1, "epoch"), lr=0.25)
    trainer.extend(extensions.observe_lr())
    trainer.extend(extensions.observe_value("twice", lambda t: 2 * t.updater.iteration))
    trainer.extend(extensions.LogReport())
    trainer.run()
    entry = trainer.get_extension("LogReport").log[0]
    assert (entry["lr"], entry["twice"]) == (0.25, 6)


# ---- snapshots and resume ------------------------------------------------------------------------------------------


def full(out, stop, **snapshot):
    trainer = make_trainer(out, stop, batch=3)
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.ExponentialShift("lr", 0.9), trigger=(2, "iteration"))
    trainer.extend(extensions.snapshot(**snapshot), trigger=(1, "iteration"))
    return trainer


def without_time(entries):
    return [{k: v for k, v in entry.items() if k != "elapsed_time"} for entry in entries]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 7])
def test_a_resumed_run_equals_a_straight_one_exactly(tmp_path, stop):
    random.set_seed(3)
    straight = full(tmp_path / "a", (9, "iteration"))
    straight.run()
    a = saved(straight)  # before the resumed run: the random state is that of the moment
    random.set_seed(3)
    full(tmp_path / "b", (stop, "iteration")).run()
    random.set_seed(99)  # the snapshot must bring its own
    resumed = full(tmp_path / "b", (9, "iteration"), autoload=True)
    resumed.run()
    b = saved(resumed)
    assert set(a) == set(b)
    for key in set(a) - {"_snapshot_elapsed_time"}:
        assert np.array_equal(a[key], b[key]), key
    assert without_time(lines(tmp_path / "a/log.jsonl")) == without_time(lines(tmp_path / "b/log.jsonl"))
    random.set_seed(0)


def test_the_log_is_cut_back_to_the_snapshot(tmp_path):
    trainer = full(tmp_path, (4, "iteration"))
    trainer.run()
    os.remove(tmp_path / "snapshot_iter_4")
    os.remove(tmp_path / "snapshot_iter_3")
    resumed = full(tmp_path, (4, "iteration"), autoload=True)
    resumed.run()
    assert [entry["iteration"] for entry in lines(tmp_path / "log.jsonl")] == [2, 4]


def test_only_the_newest_snapshots_stay(tmp_path):
    full(tmp_path / "run.v1.5", (11, "iteration"), n_retains=3).run()
    assert sorted(os.listdir(tmp_path / "run.v1.5")) == [
        "log.jsonl",
        "snapshot_iter_10",
        "snapshot_iter_11",
        "snapshot_iter_9",
    ]


def test_a_run_whose_name_has_a_dot_resumes(tmp_path):
    name = "run.v1.5_{.updater.iteration}.npz"
    full(tmp_path / "a.b", (4, "iteration"), filename=name).run()
    resumed = full(tmp_path / "a.b", (5, "iteration"), filename=name, autoload=True)
    resumed.run()
    assert (tmp_path / "a.b" / "run.v1.5_5.npz").exists()
    assert len(resumed.get_extension("LogReport").log) == 2


def test_a_damaged_snapshot_is_passed_over(tmp_path):
    full(tmp_path, (3, "iteration")).run()
    newest = tmp_path / "snapshot_iter_3"
    content = newest.read_bytes()
    numbers = np.load(newest)["updater/model:main/w"].tobytes()
    assert numbers in content
    newest.write_bytes(content.replace(numbers, bytes(8)))
    resumed = full(tmp_path, (3, "iteration"), autoload=True)
    with pytest.warns(UserWarning, match="snapshot_iter_3 is damaged"):
        resumed.run()
    assert resumed.updater.iteration == 3


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_snapshot_that_was_cut_off_is_passed_over(tmp_path, cut):
    full(tmp_path, (2, "iteration")).run()
    newest = tmp_path / "snapshot_iter_2"
    newest.write_bytes(newest.read_bytes()[: -cut or None] if cut else b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert extensions.snapshots.newest(str(tmp_path)) == str(tmp_path / "snapshot_iter_1")


def test_a_full_disk_leaves_no_half_of_a_snapshot(tmp_path):
    def save(path, target):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    trainer = full(tmp_path, (2, "iteration"))
    trainer.run()
    before = sorted(os.listdir(tmp_path))
    resumed = full(tmp_path, (3, "iteration"), autoload=True, savefun=save)
    with pytest.raises(CheckpointError, match=r"snapshot_iter_3: .*No space left on device; earlier snapshots"):
        resumed.run(show_loop_exception_msg=False)
    assert sorted(os.listdir(tmp_path)) == before
    assert extensions.snapshots.is_whole(str(tmp_path / "snapshot_iter_2"))


def test_a_snapshot_of_another_architecture_is_refused(tmp_path):
    class Parabola(Line):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                import dbrdist

                self.c = dbrdist.Parameter(np.zeros(1))

    make_trainer(tmp_path, (1, "iteration"))
    for first, second in ((Line, Parabola), (Parabola, Line)):
        trainer = make_trainer(tmp_path, (1, "iteration"), model=first())
        trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
        trainer.run()
        other = make_trainer(tmp_path, (1, "iteration"), model=second())
        with pytest.raises(CheckpointError, match="model:main/c"):
            extensions.snapshots.load_newest(str(tmp_path), other)


def test_a_link_alone(tmp_path):
    trainer = make_trainer(tmp_path, (2, "iteration"))
    model = trainer.updater.get_optimizer("main").target
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}"), trigger=(2, "iteration"))
    trainer.run()
    fresh = Line()
    extensions.snapshots.load(str(tmp_path / "model_2"), fresh)
    assert fresh.w.array == model.w.array


def test_snapshot_on_error_and_condition(tmp_path):
    trainer = make_trainer(tmp_path, (5, "iteration"))
    trainer.extend(extensions.snapshot(snapshot_on_error=True), trigger=(100, "iteration"))
    trainer.extend(extensions.snapshot(condition=lambda: False, filename="never"), trigger=(1, "iteration"))

    def fail(trainer):
        if trainer.updater.iteration == 2:
            raise ValueError("stop")

    trainer.extend(fail)
    with pytest.raises(ValueError, match="stop"):
        trainer.run(show_loop_exception_msg=False)
    assert os.listdir(tmp_path) == ["snapshot_iter_2"]
