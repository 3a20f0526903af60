"""Parts of the command line that only whole runs went through: locks, folders, points of a chart, endings."""

import errno
import json
import os
import re
import socket
import sys
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pydantic
import pytest

from dbrdist.cli import build, build_updates, commands, components, console, folder, memory, report, resume, settings
from dbrdist.cli import run as runs
from dbrdist.cli import weights as weights_of
from dbrdist.cli.lock import Lock, holder_of
from dbrdist.cli.refuse import Refused, RefusedHere, alike
from dbrdist.cli.run import Run
from dbrdist.comm import create_communicator
from dbrdist.comm.audit import Verdict
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.links import Linear
from tests.descriptors import open_files
from tests.each import each

# ---- locks and folders ----------------------------------------------------------------------------------------------


def test_a_look_at_a_lock_leaves_nothing_behind(tmp_path):
    path = tmp_path / "run.lock"
    assert holder_of(str(path)) is None
    for text, found in (
        ("{}", None), ("", None), ('{"host": "elsewhere", "pid": 7}', {"host": "elsewhere", "pid": 7}),
        (json.dumps({"host": socket.gethostname(), "pid": 7}), None),
    ):  # fmt: skip
        path.write_text(text)
        before = open_files()
        assert holder_of(str(path)) == found
        assert not open_files() - before
    lock = Lock(str(path))
    before = open_files()
    lock.acquire()
    (held,) = open_files() - before
    assert holder_of(str(path))["pid"] == os.getpid() and open_files() - before == {held}
    path.write_text("")
    assert holder_of(str(path)) == {}
    lock.release()
    lock.release()
    assert not path.exists() and not open_files() - before


def test_a_lock_names_its_holder_alone(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": "gone", "since": "x" * 1000}))
    lock = Lock(str(path))
    lock.acquire()
    found = json.loads(path.read_text())
    assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
    lock.release()


@each(**{"resumed_from, damaged": [(None, [8, 9, 10, 12]), ("elsewhere", [8, 9, 10, 12]), (9, [10, 12]), (12, []),
                                   (8, [9, 10, 12])]})  # fmt: skip
def test_what_is_newer_than_the_snapshot_taken_is_set_apart(tmp_path, resumed_from, damaged):
    place = tmp_path / str(resumed_from)
    place.mkdir()
    for number in (8, 9, 10, 12):
        (place / f"snapshot_iter_{number}").write_text(str(number))
    (place / "snapshot_best").touch()
    one = folder.RunFolder(str(place))
    one.set_apart_damaged(one.file(f"snapshot_iter_{resumed_from}") if resumed_from else None)
    kept = [f"snapshot_iter_{k}" for k in (8, 9, 10, 12) if k not in damaged]
    moved = [f"damaged_snapshot_iter_{k}" for k in damaged]
    assert sorted(os.listdir(place)) == sorted(["snapshot_best", *kept, *moved])
    assert all((place / name).read_text() == name.rpartition("_")[2] for name in (*kept, *moved))


def test_an_ending_that_fits_nowhere_fails(tmp_path, monkeypatch):
    tried = []

    def full(path, data, num_blanks=0):
        tried.append(num_blanks)
        raise OSError(errno.ENOSPC, "No space left on device")

    one, path = folder.RunFolder(str(tmp_path)), tmp_path / "summary.json"
    monkeypatch.setattr(folder, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        one.write_status("running")
    assert tried == [1 << 14, 0]  # the blanks need not be there
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", "reason")
    path.write_text(" " * 60)
    one.summary = {}
    one.write_status("failed", "r", iterations=5, much="x" * 100)  # in brief
    assert json.loads(path.read_text()) == {"status": "failed", "reason": "r"} and len(path.read_text()) == 60
    path.write_text(" " * 20)
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", "reason")
    assert path.read_text() == " " * 20


# ---- memory ---------------------------------------------------------------------------------------------------------


@each(**{"peaks, slope": [((1020, 1040), 10.0), ((1020, 1020), 0.0), ((1021, 1020), 0.0)]})
def test_what_a_step_needs_is_extrapolated_from_two(monkeypatch, peaks, slope):
    """A network of 3 parameters of 4 bytes: twice that for an optimizer's state."""
    monkeypatch.setattr(memory, "Look", lambda *args: None)
    monkeypatch.setattr(memory, "_peak_bytes", lambda look, task, number: {2: peaks[0], 4: peaks[1]}[number])
    made = SimpleNamespace(device=None, data=SimpleNamespace(train=None), convert=None, task=Linear(2, 1))
    need = memory.measure(None, None, made)
    assert need == (peaks[1] - 4 * slope + 24, slope)
    assert need.of(4) == peaks[1] + 24 and need.of(100) == peaks[1] + 24 + 96 * slope and need.of(0) >= 0
    assert memory.Need(-50.0, 10.0).of(3) == 0.0 and memory.Need(-50.0, 10.0).of(7) == 20.0
    made.device = "gpu"
    assert memory.measure(None, None, made) is None


# ---- data, components, weights --------------------------------------------------------------------------------------


@each(**{"labels, num": [([0, 0], 1), ([-1, 0], 1), ([2, -1, 0], 3), ([[0], [1]], None), ([0.0, 1.0], None)]})
def test_classes_are_counted_from_0(labels, num):
    assert build._classes(SimpleNamespace(columns=(None, np.array(labels)))) == num


@each(**{"labels, words": [([-1, -1], "expected labels from 0"), ([], "the training set is empty")]})
def test_labels_that_name_no_class_are_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        build._classes(SimpleNamespace(columns=(None, np.array(labels, int))))


@each(
    value=[
        1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)),
        0, -1, 1.5, True, [], [[0, 0]], [[1, 5]], [[0, 5], [0, 6]], [[0, 5], [3, 6], [2, 7]], [[0, 5, 6]], "x",
    ]
)  # fmt: skip
def test_sizes_over_the_epochs(value):
    good = (1, 7, [[0, 1]], [[0, 128], [10, 224]], ((0, 3), (1, 1)))
    if any(type(value) is type(g) and value == g for g in good):
        assert components._sizes(value) == (value if isinstance(value, int) else tuple(map(tuple, value)))
    else:
        with pytest.raises(Exception, match="expected a size of at least 1, or pairs"):
            components._sizes(value)


class Plain(settings.Settings):
    name: Literal["plain"] = "plain"


@each(
    **{
        "kind, classes, custom, words": [
            ("model", (Plain,), settings.Custom, "a model: plain, or your own package.module:callable"),
            ("optimizer", (Plain,), None, "an optimizer: plain"),
            ("updater", (), settings.Custom, "an updater: package.module:callable"),
        ]
    }
)
def test_an_unknown_name_is_told_those_that_are_known(monkeypatch, kind, classes, custom, words):
    monkeypatch.setattr(settings, "BY_TAG", {})
    adapter = pydantic.TypeAdapter(settings.component(kind, *classes, custom=custom))
    with pytest.raises(pydantic.ValidationError, match=f"expected the name of {re.escape(words)} "):
        adapter.validate_python("nothing")
    if classes:
        assert type(adapter.validate_python("PLAIN")) is Plain
    if custom:
        assert adapter.validate_python("own:part").name == "own:part"


@each(**{"wrong, more": [(1, ""), (4, ""), (5, ", and 1 more"), (6, ", and 2 more")]})
def test_weights_that_do_not_fit_are_named_up_to_five(monkeypatch, wrong, more):
    """Besides those that are missing one of another shape; what fits is filled in, what is skipped is left alone."""
    filled = []
    targets = [(f"l{k}.W", (lambda: np.zeros(2), filled.append)) for k in range(wrong)]
    targets += [("shape", (lambda: np.zeros((2, 1)), filled.append)), ("good", (lambda: np.zeros(2), filled.append))]
    targets += [("fc.W", (lambda: np.zeros(2), filled.append)), ("fcx", (lambda: np.zeros(2), filled.append))]
    found = {"shape": np.zeros(2), "good": np.ones(2), "fcx": np.ones(2)}
    monkeypatch.setattr(weights_of, "_targets", lambda network: targets)
    monkeypatch.setattr(weights_of, "_read", lambda path: found)
    origin = SimpleNamespace(where=lambda key: "run.yaml:3")
    with pytest.raises(ConfigError) as caught:
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=("fc",)), None, origin)
    problems = [f"l{k}.W is not in the file" for k in range(wrong)] + [
        "shape has shape (2,) in the file, expected (2, 1)"
    ]
    text = str(caught.value)
    assert text.startswith(f"run.yaml:3: init_from: w.npz: {'; '.join(problems[:5])}{more}; names in init_from.skip")
    assert len(filled) == 2
    found["shape"] = np.zeros((2, 1))
    if wrong == 1:
        found["l0.W"] = np.zeros(2)
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=("fc.",)), None, origin)
    monkeypatch.setattr(weights_of, "_read", lambda path: (_ for _ in ()).throw(CheckpointError("torn")))
    with pytest.raises(ConfigError, match=r"run\.yaml:3: init_from: torn"):
        weights_of.begin_with(SimpleNamespace(path="w.npz", skip=()), None, origin)


def test_a_schedule_sets_the_number_of_the_hook_that_it_names():
    first, second = SimpleNamespace(rate=1.0), SimpleNamespace(rate=2.0, threshold=3.0)
    hooks = SimpleNamespace(pre={"0: WeightDecay": first}, post={"1: Lasso": second, "11: Other": None})
    made = SimpleNamespace(_hooks=hooks, hyperparam=SimpleNamespace(own=lambda: {"lr": 0.1}), set_loss_scale="scale")
    build_updates._target("optimizer.hooks.1.rate", made, None)(0.5)
    build_updates._target("optimizer.hooks.0.rate", made, None)(0.25)
    assert (first.rate, second.rate) == (0.25, 0.5)
    assert build_updates._target("optimizer.hooks.0.threshold", made, None) is None
    assert build_updates._target("optimizer.hooks.2.rate", made, None) is None
    build_updates._target("optimizer.lr", made, None)(0.75)
    assert made.hyperparam.lr == 0.75 and build_updates._target("optimizer.momentum", made, None) is None
    assert build_updates._target("loss_scale", made, None) == "scale"
    arguments = {"smoothing": 0.0}
    task = SimpleNamespace(loss=SimpleNamespace(keywords=arguments))
    build_updates._target("loss.smoothing", made, task)(0.5)
    assert arguments == {"smoothing": 0.5} and build_updates._target("loss.other", made, task) is None
    assert build_updates._target("loss.smoothing", made, SimpleNamespace(loss=print)) is None


@each(
    **{
        "path, values, words": [
            ("rate", [0.5, 0.0], None),
            ("rate", [0.5, -0.25], "expected a rate of 0 or more from own:f(2.0), got -0.25"),
            ("other", [0.5, -0.25], None), ("other", [np.inf], "expected a finite number from own:f(0.0), got inf"),
            ("rate", [10**400], "expected a finite number from own:f(0.0), got an integer too large for a float"),
            ("rate", ["fast"], "expected a finite number from own:f(0.0), got 'fast'"),
        ]
    }
)  # fmt: skip
def test_an_own_schedule_is_looked_at_over_the_whole_run(monkeypatch, path, values, words):
    """The last of the values is that of the last epoch."""
    path = build_updates._RATE if path == "rate" else ("loss_scale",)
    monkeypatch.setattr(build_updates.resolve, "find", lambda settings, path, origin: lambda epochs: 7 * epochs)
    monkeypatch.setattr(
        build_updates.resolve, "call", lambda s, p, o, epoch: values[-1] if epoch == 2.0 or len(values) == 1 else 0.5
    )
    config, own = SimpleNamespace(epochs=2), SimpleNamespace(name="own:f", args={})
    origin = SimpleNamespace(where=lambda key: "run.yaml:3")
    if words is None:
        assert build_updates._own_schedule(config, own, path, origin)(1.5) == 10.5
    else:
        with pytest.raises(ConfigError, match=re.escape(words)):
            build_updates._own_schedule(config, own, path, origin)


# ---- reports and audits ---------------------------------------------------------------------------------------------


@each(n=[0, 1, 2, 999, 1000, 1001, 1002, 2000, 2001, 2002, 2999, 3000, 3001])
def test_a_line_has_at_most_a_thousand_points_and_ends_at_its_end(n):
    log = [{"epoch_detail": float(k), "loss": 2.0 * k} for k in range(n)] + [{"epoch": 3}, {"loss": "text"}]
    points = report._points(log, "loss")
    every = max(1, -(-n // 1000))
    expected = [k for k in range(n) if k % every == 0 or k == n - 1]
    assert points == [(float(k), 2.0 * k) for k in expected] and len(points) <= 1001


@each(problems=[[], ["one", "two"]])
def test_an_audit_fails_where_something_is_wrong(monkeypatch, problems):
    asked = []

    def check(run, steps):
        asked.append((run, steps))
        return Verdict(["a", "b"], problems)

    monkeypatch.setattr(commands.audit, "check", check)
    monkeypatch.setattr(commands, "read_json", lambda path: {"iterations": 7} if path == "r/summary.json" else {})
    said = commands.audit_run("r", [])
    assert [next(said), next(said)] == ["a", "b"] and asked == [("r", 7)]
    if problems:
        with pytest.raises(Refused, match=r"^r: one\nr: two$"):
            next(said)
    else:
        assert list(said) == ["r: no example was used twice in an epoch, and none was left out of a finished one"]
    with pytest.raises(ConfigError, match="takes no further arguments"):
        next(commands.audit_run("r", ["x"]))
    monkeypatch.setattr(commands.audit, "check", lambda *args: (_ for _ in ()).throw(ValueError("torn")))
    with pytest.raises(ConfigError, match="dbrdist-train: torn"):
        next(commands.audit_run("r", []))


def test_differences_of_configurations():
    old = {"a": 1, "model": {"name": "x", "gone": 2, "none": None, "deep": {"k": [1, 2]}}, "only": 3}
    new = {"a": 2, "model": {"name": "x", "added": 4, "empty": None, "deep": {"k": [1, 3]}}, "later": {"y": 1}}
    found = [tuple(change) for change in resume._differences(old, new, ())]
    assert found == [("a", 1, 2), ("model.gone", 2, None), ("model.added", None, 4), ("model.deep.k", [1, 2], [1, 3])]
    assert list(resume._differences(new, new, ())) == []
    assert [tuple(c) for c in resume._differences({"a": {"b": 1}}, {"a": 2}, ())] == [("a", {"b": 1}, 2)]


# ---- endings --------------------------------------------------------------------------------------------------------


def test_how_a_run_ends_for_each_error():
    one = object.__new__(Run)
    one.folder = folder.RunFolder("out")
    for error, kind, words in (
        (OSError(errno.ENOSPC, "No space left on device", "out/log.jsonl"), RefusedHere, "^out: .*are unharmed$"),
        (IsADirectoryError(21, "Is a directory", "out/log.jsonl"), RefusedHere, "out/log.jsonl: Is a directory"),
        (IsADirectoryError(21, "Is a directory", "elsewhere"), IsADirectoryError, "elsewhere"),
        (OSError("words"), OSError, "words"),
        (CheckpointError("torn"), Refused, "torn"), (ConfigError("wrong"), RefusedHere, "wrong"),
        (SystemExit(0), SystemExit, "before the run was over"), (SystemExit(3), SystemExit, "3"),
        (KeyError(5), KeyError, "5"),
    ):  # fmt: skip
        ending = one._as_ending(error)
        assert type(ending) is kind and re.search(words, str(ending)), error
        assert (ending is error) == (kind is type(error) and "before" not in words)
    own = KeyError(5)
    own.filename = "out/log.jsonl"
    assert one._as_ending(own) is own
    assert runs._FULL[0] == errno.ENOSPC


class Stream:
    """A standard output that fails with an error at a write or at a flush."""

    def __init__(self, at="", error=None):
        self.at, self.error, self.done = at, error, []

    def write(self, text):
        self.done.append(text)
        if self.at == "write":
            raise self.error

    def flush(self):
        self.done.append("flush")
        if self.at == "flush":
            raise self.error

    def fileno(self):
        raise ValueError("closed")


@each(**{"at, error": [("", None), ("write", BrokenPipeError()), ("flush", OSError()), ("write", ValueError())]})
def test_what_is_said_goes_out_at_once_and_a_reader_that_is_gone_ends_nothing(monkeypatch, at, error):
    stream = Stream(at, error)
    monkeypatch.setattr(sys, "stdout", stream)
    console._to_standard_output("words")
    assert stream.done == ["words", "flush"][: 1 if at == "write" else 2]


@each(**{"error, kind": [(ValueError("v"), Refused), (OSError("o"), Refused), (ConfigError("c"), Refused),
                         (KeyError(5), KeyError), (None, None)]})  # fmt: skip
def test_what_a_user_can_mend_is_said_in_a_sentence(error, kind):
    comm = create_communicator("single")
    if error is None:
        with alike(comm):
            pass
        return
    with pytest.raises(kind) as caught, alike(comm):
        raise error
    assert type(caught.value) is kind and (caught.value is error) == (kind is KeyError)
    if kind is Refused:
        assert str(error) in str(caught.value) and caught.value.__cause__ is error
