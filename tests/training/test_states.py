"""The state of each trigger and extension: all of it is in a snapshot, that of the triggers within included."""

from __future__ import annotations

import hashlib
import io
import json
import types
import zipfile

import numpy as np
from training_helpers import Line, examples, restore, saved

import dbrdist
from dbrdist import iterators, optimizers
from dbrdist.core.reporter import DictSummary
from dbrdist.training import StandardUpdater, Trainer, extensions, plotting, runs, triggers
from dbrdist.training.extensions import snapshots, tensorboard
from tests.each import each


class Counting:
    """A trigger that never fires and counts who asks."""

    def __init__(self, count=0):
        self.count = count

    def __call__(self, trainer):
        self.count += 1
        return False

    def serialize(self, serializer):
        self.count = int(serializer("count", self.count))


def plain(trainer):
    return False


def average(trigger):
    average = extensions.WeightAverage(Line(), 0.5)
    return average.around(extensions.MicroAverage("a", "b", "c", trigger))


# What is made with a trigger, and where that one's state is.
WITHIN = {
    "LogReport": (lambda t: extensions.LogReport(trigger=t), "_trigger"),
    "PrintReport": (lambda t: extensions.PrintReport([], extensions.LogReport(trigger=t)), "_log_report/_trigger"),
    "PlotReport": (lambda t: extensions.PlotReport(["a"], trigger=t), "_trigger"),
    "VariableStatisticsPlot": (lambda t: extensions.VariableStatisticsPlot(Line(), trigger=t), "_trigger"),
    "ParameterStatistics": (lambda t: extensions.ParameterStatistics(Line(), trigger=t), "_trigger"),
    "MicroAverage": (lambda t: extensions.MicroAverage("a", "b", "c", t), "_trigger"),
    "an extension on averages": (average, "_trigger"),
    "BestValueTrigger": (lambda t: triggers.BestValueTrigger("a", max, t), "interval_trigger"),
    "MaxValueTrigger": (lambda t: triggers.MaxValueTrigger("a", t), "interval_trigger"),
    "MinValueTrigger": (lambda t: triggers.MinValueTrigger("a", t), "interval_trigger"),
    "EarlyStoppingTrigger": (lambda t: triggers.EarlyStoppingTrigger(t, max_trigger=plain), "check_trigger"),
    "its end": (lambda t: triggers.EarlyStoppingTrigger(plain, max_trigger=t), "max_trigger"),
    "AnyTrigger": (lambda t: triggers.AnyTrigger(plain, t), "1"),
}  # fmt: skip


@each(kind=list(WITHIN))
def test_the_state_of_a_trigger_within_is_kept(kind, monkeypatch):
    monkeypatch.setattr(plotting, "available", lambda: True)
    make, place = WITHIN[kind]
    first, second = Counting(5), Counting()
    state = saved(make(first))
    assert state[f"{place}/count"] == 5
    restore(state, make(second))
    assert second.count == 5
    without = saved(make(plain))  # a function has no state
    assert sorted(without) == sorted(set(state) - {f"{place}/count"})
    restore(without, make(plain))


def filled(value):
    summary = DictSummary()
    for one in value:
        summary.add({"key": one})
    return summary


def shift():
    return extensions.ExponentialShift("lr", 0.5)


PASSED = {"_passed.iteration": 7, "_passed.epoch_detail": 1.75}
# A thing with some state, how to make another one, and the names of all that is kept.
STATES = {
    "a trigger of intervals": (lambda: triggers.IntervalTrigger(3, "epoch"), PASSED),
    "a trigger of points": (
        lambda: triggers.ManualScheduleTrigger([3], "epoch"), {**PASSED, "finished": True}),
    "a trigger that fires once": (triggers.OnceTrigger, {"_first": False}),
    "a trigger of seconds": (lambda: triggers.TimeTrigger(2.0), {"_next_seconds": 12.5}),
    "a trigger of the best": (
        lambda: triggers.MaxValueTrigger("key"), {"best_value": -2.5, "_summary": filled([1.0, 4.0])}),
    "a trigger of the end": (
        triggers.EarlyStoppingTrigger, {"best": 0.25, "count": 2, "_summary": filled([1.0, 4.0])}),
    "a log": (extensions.LogReport, {"_summary": filled([3.0, 5.0]), "_num_saved": 4}),
    "a plot": (
        lambda: extensions.PlotReport(["a", "b"]),
        {"_summary": filled([3.0, 5.0]), "_points": {"a": [(1, 2.5), (2, 3.5)], "b": []}}),
    "statistics": (lambda: extensions.ParameterStatistics(Line()), {"_summary": filled([3.0, 5.0])}),
    "a ratio of sums": (lambda: extensions.MicroAverage("a", "b", "c"), {"_numerator": 2.5, "_denominator": 3.5}),
    "a shift": (shift, {"_t": 3, "_init": 0.8, "_last_value": 0.1}),
    "a shift that has not begun": (shift, {"_t": 0, "_init": None, "_last_value": None}),
    "a graph": (lambda: extensions.DumpGraph("main/loss"), {"_is_done": True}),
    "averages": (lambda: extensions.WeightAverage(Line(), 0.5), {
        "_num_steps": 6, "_averages": {"w": np.array([3.0]), "b": np.array([4.0])}}),
}  # fmt: skip


def seen(thing, path):
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing.make_statistics() if isinstance(thing, DictSummary) else thing


@each(kind=list(STATES))
def test_all_of_a_state_is_kept(kind, monkeypatch):
    monkeypatch.setattr(plotting, "available", lambda: True)
    make, values = STATES[kind]
    first = make()
    for path, value in values.items():
        *owners, name = path.split(".")
        setattr(seen(first, ".".join(owners)) if owners else first, name, value)
    second = restore(saved(first), make())
    for path in values:
        found, expected = seen(second, path), seen(first, path)
        assert type(found) is type(expected)
        np.testing.assert_equal(found, expected)
    assert saved(second).keys() == saved(first).keys()


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
    assert set(state) - set(without) == {"stop_trigger/count", "extension_triggers/ratio/count"}


# ---- checksums


@each(num_bytes=[0, 1, 63, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 20) + 2])
def test_the_checksum_of_a_file_is_that_of_all_its_bytes(num_bytes):
    data = np.random.default_rng(1).bytes(num_bytes)
    expected = hashlib.blake2b(data, digest_size=32).hexdigest().encode()
    assert snapshots._checksum(io.BytesIO(data), num_bytes) == expected
    assert snapshots._checksum(io.BytesIO(data + b"behind"), num_bytes) == expected


def test_the_table_of_remainders_is_that_of_the_polynomial():
    """Castagnoli's of RFC 3720, a bit at a time."""
    polynomial = int(f"{0x1EDC6F41:032b}"[::-1], 2)
    for byte, found in enumerate(tensorboard._table()):
        for _ in range(8):
            is_odd = byte % 2
            byte //= 2
            byte ^= polynomial * is_odd
        assert found == byte


def test_a_seal_of_no_bytes_holds():
    seal = snapshots._SEAL + hashlib.blake2b(b"", digest_size=32).hexdigest().encode()
    assert snapshots._seal_holds(io.BytesIO(seal)) is True
    assert snapshots._seal_holds(io.BytesIO(seal[1:])) is None
    assert snapshots._seal_holds(io.BytesIO(b"x" + seal)) is False
    assert snapshots._seal_holds(io.BytesIO(b"x" * 200)) is None


# ---- what is there before a run begins


def test_a_table_is_printed_from_its_first_line_on():
    out = io.StringIO()
    report = extensions.PrintReport(["a", "long heading"], "log", out)
    log = extensions.LogReport()
    trainer = types.SimpleNamespace(get_extension={"log": log}.__getitem__)
    log.log.extend([{"a": 1, "long heading": 0.5}, {"a": 2}])
    report(trainer)
    log.log.append({"long heading": 1 / 3})
    report(trainer)
    report(trainer)
    assert out.getvalue().splitlines() == ["1" + " " * 11 + "0.5", "2", " " * 12 + "0.333333"]


def test_lines_of_the_run_before_are_not_printed_again(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    log, out = extensions.LogReport(), io.StringIO()
    log._num_saved = 2
    trainer = types.SimpleNamespace(out=str(tmp_path), get_extension={"log": log}.__getitem__)
    report = extensions.PrintReport(["a"], "log", out)
    report.initialize(trainer)
    log.log.append({"a": 3})
    report(trainer)
    assert out.getvalue().splitlines() == ["a", "3"]


def test_the_folder_of_a_run_or_of_a_snapshot_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("snapshot", "run/snapshot"):
        (tmp_path / name).write_bytes(b"")
    for given, folder in (("snapshot", "."), ("run/snapshot", "run"), ("run", "run"), ("absent", "absent")):
        assert runs.folder_of(given) == folder
    assert runs.folder_of(tmp_path / "run" / "snapshot") == str(tmp_path / "run")


def test_the_seal_is_the_comment_of_the_archive(tmp_path):
    path = tmp_path / "snapshot"
    snapshots.write(str(path), Line())
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.comment == snapshots._SEAL + hashlib.blake2b(data[:-80], digest_size=32).hexdigest().encode()
        assert len(archive.comment) == 80 and archive.testzip() is None
    assert data[-82:-80] == (80).to_bytes(2, "little") and snapshots.damage(str(path)) is None
