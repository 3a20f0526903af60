"""Tests of dbrdist.cli.running.resume."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.configuration import load
from dbrdist.cli.running import resume
from dbrdist.core.files.serializer import read_npz
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import lines, same_runs
from tests.each import each

DIGITS = "model: {name: mlp, units: [6]}\ndata: digits\nbatch: 100\nepochs: 1\nout: result\n"


@each(n=[59, 60, 61])
def test_long_values_are_cut(n):
    quoted = "a" * (n - 2)
    text = load._shown(quoted)
    assert text == (f"'{quoted}'" if n <= 60 else "'" + "a" * 56 + "...")
    plain = "a" * n
    assert resume.shown(plain) == (plain if n <= 60 else "a" * 57 + "...")
    assert load._shown(None) == resume.shown(None) == "nothing"


def contents(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["batch=16"], ["not used: batch 16, the run had 100"]),
        (["iterations=2", "log.every=1 epoch"], ["not used: iterations 2, the run had 3"]),
    ],
)
def test_a_resume_without_a_step_records_nothing(run, words, expected):
    assert run("run.yaml", "log.every=1 iteration")[0] == 0
    before = contents("result")
    code, out, err = run("run.yaml", "log.every=1 iteration", "--resume", *words)
    assert code == 0, err
    assert "snapshot_iter_3 is the end of this run, after 3 steps" in out
    assert all(text in out for text in expected)
    assert contents("result") == before
    assert run("run.yaml", "--resume", "iterations=4", "batch=50")[0] == 0
    assert "batch: 50" in Path("result/config.yaml").read_text()


def test_a_run_that_was_killed_after_its_last_snapshot_is_finished(run):
    run("run.yaml")
    summary = json.loads(Path("result/summary.json").read_text())
    Path("result/summary.json").write_text(json.dumps({**summary, "status": "running"}))
    assert run("run.yaml", "--resume")[0] == 0
    assert json.loads(Path("result/summary.json").read_text())["status"] == "finished"


def contents_of(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["seed=1"], "seed: the run began with 0 and cannot continue with 1"),
        (["dtype=float64"], "dtype: the run began with float32"),
        (["optimizer.name=nesterov_ag"], "optimizer.name: the run began with momentum_sgd"),
        (["loss_scale=4"], "loss_scale: the run began with auto"),
        (["lr_finder={}"], "lr_finder: the run began with nothing and cannot continue with {lowest: 1.0e-06"),
        (["seed=1", "dtype=float64"], "dtype: the run began with float32"),
    ],
)
def test_what_a_snapshot_decides_is_refused_by_name(run, words, key):
    assert run("run.yaml", "iterations=2")[0] == 0
    before = contents_of("result")
    code, _, err = run("run.yaml", "--resume", *words)
    assert code == 2
    assert key in err
    assert err.count("command line") == len(words)
    assert contents_of("result") == before
    assert run("run.yaml", "--resume")[0] == 0  # the folder was given back


def test_changed_hyperparameters_are_applied_and_named(run):
    words = ("run.yaml", "log.every=1 iteration", "optimizer.schedule=constant")
    assert run(*words, "iterations=2")[0] == 0
    changed = ("optimizer.momentum=0.1", "optimizer.lr=0.01")
    code, out, _ = run(*words, "iterations=4", *changed, "--resume")
    assert code == 0
    assert "optimizer.momentum is now 0.1, was 0.9" in out
    assert "optimizer.lr is now 0.01, was 0.05" in out
    assert "iterations is now 4, was 2" in out
    saved = np.load(snapshots.newest("result"))
    assert float(saved["updater/optimizer:main/hyperparam/momentum"]) == 0.1
    assert float(saved["updater/optimizer:main/hyperparam/lr"]) == 0.01
    assert [entry["lr"] for entry in lines("result/log.jsonl")] == [0.05, 0.05, 0.01, 0.01]


def test_an_unchanged_resume_names_nothing(run):
    run("run.yaml", "iterations=2")
    _, out, _ = run("run.yaml", "iterations=2", "--resume")
    assert " is now " not in out


def test_a_damaged_newest_snapshot_costs_no_later_one(run):
    words = ("run.yaml", "snapshot.every=2 iterations", "snapshot.keep=1")
    assert run(*words, "iterations=4", "snapshot.keep=2")[0] == 0
    bad = Path("result/snapshot_iter_4")
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 4
    bad.write_bytes(data)
    code, out, _ = run(*words, "iterations=4", "--resume")
    assert code == 0
    said = "result/snapshot_iter_4 is damaged and was skipped: its bytes are not those that were saved"
    assert said in " ".join(out.split()) and said in Path("result/log.txt").read_text()
    assert "continuing from result/snapshot_iter_2" in out
    assert Path("result/damaged_snapshot_iter_4").read_bytes() == data
    assert snapshots.newest("result") == "result/snapshot_iter_4"
    assert run(*words, "iterations=4", "out=straight")[0] == 0
    same_runs("straight", "result")


EVERY = ["log.every=1 iteration", "snapshot.every=2 iterations", "snapshot.best=validation/main/loss"]


def renamed(path, change):
    """The snapshot with other names of entries; None leaves one out."""
    entries = {change(key): value for key, value in read_npz(path).items()}
    entries.pop(None, None)
    snapshots.write(path, entries)


@pytest.fixture
def cut(run):
    assert run("run.yaml", *EVERY, "iterations=2")[0] == 0
    return Path("result/snapshot_iter_2")


def test_triggers_without_their_numbers_are_refused_by_name(run, cut):
    """Triggers joined by `or` were single ones before, and had no number in their names."""
    renamed(str(cut), lambda key: key.replace("/0/", "/") if key.startswith("extension_triggers/") else key)
    before = cut.read_bytes()
    code, _, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    said = [line for line in err.splitlines() if not line.startswith("dbrdist: ")]
    assert code == 2 and len(said) == 1 and "Traceback" not in err
    assert "snapshot_iter_2" in said[0] and "extension_triggers/" in said[0]
    assert cut.read_bytes() == before


def test_extensions_that_were_not_there_start_anew(run, cut):
    """Without any entry of an extension and its trigger: the version that saved had none."""
    gone = ("extensions/WeightAverage", "extension_triggers/SharedSnapshot", "extensions/LogReport")
    gone = (*gone, "extension_triggers/LogReport", "extension_triggers/best")
    renamed(str(cut), lambda key: None if key.startswith(gone) else key)
    code, out, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    assert code == 0, err
    assert "continuing from" in out and os.path.exists("result/snapshot_iter_4")
    assert int(read_npz("result/snapshot_iter_4")["updater/iteration"]) == 4


def test_what_nobody_takes_is_refused_by_name(run, cut):
    renamed(str(cut), lambda key: key + "_of_old" if key == "updater/iterator:main/epoch" else key)
    code, _, err = run("run.yaml", *EVERY, "iterations=4", "--resume")
    assert code == 2 and "updater/iterator:main/epoch" in err and "Traceback" not in err


def test_a_renamed_snapshot_is_read_as_it_was_written(cut):
    before = read_npz(str(cut))
    renamed(str(cut), lambda key: key)
    after = read_npz(str(cut))
    assert set(before) == set(after)
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_differences_of_configurations():
    old = {"a": 1, "model": {"name": "x", "gone": 2, "none": None, "deep": {"k": [1, 2]}}, "only": 3}
    new = {"a": 2, "model": {"name": "x", "added": 4, "empty": None, "deep": {"k": [1, 3]}}, "later": {"y": 1}}
    found = [tuple(change) for change in resume._differences(old, new, ())]
    assert found == [("a", 1, 2), ("model.gone", 2, None), ("model.added", None, 4), ("model.deep.k", [1, 2], [1, 3])]
    assert list(resume._differences(new, new, ())) == []
    assert [tuple(c) for c in resume._differences({"a": {"b": 1}}, {"a": 2}, ())] == [("a", {"b": 1}, 2)]


COUNTERS = """
from dbrdist.training import Extension


class Counter(Extension):
    trigger = (1, "iteration")

    def __init__(self, step):
        self.step, self.count = step, 0

    def __call__(self, trainer):
        self.count += self.step

    def serialize(self, serializer):
        self.count = int(serializer("count", self.count))

    def finalize(self):
        print("counted", self.step, self.count)
"""


def counters(*steps):
    return "extensions=[" + ", ".join(f"{{name: 'counters:Counter', args: {{step: {n}}}}}" for n in steps) + "]"


def test_two_extensions_of_a_class_do_not_exchange_their_states(run, folder):
    (folder / "counters.py").write_text(COUNTERS)
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", counters(1, 100))[0] == 0
    _, out, _ = run("run.yaml", "--resume", "epochs=2", counters(1, 100))
    assert "counted 1 30\n" in out and "counted 100 3000\n" in out
    _, out, _ = run("run.yaml", "--resume", "epochs=3", counters(100, 1))
    assert "counted 1 45\n" in out and "counted 100 4500\n" in out  # each finds its own, in another order
    _, out, _ = run("run.yaml", "--resume", "epochs=4", counters(7, 1, 100))
    assert "counted 7 105\n" in out and "counted 1 60\n" in out and "counted 100 6000\n" in out
    owners = {key.split("/")[1] for key in read_npz(snapshots.newest("result")) if key.startswith("extensions/Counter")}
    assert owners == {"Counter", "Counter_1", "Counter_2"}  # as of old snapshots, and for keys that have the name


def test_an_extension_with_other_arguments_begins_anew(run, folder):
    (folder / "counters.py").write_text(COUNTERS)
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", counters(1))[0] == 0
    assert "counted 100 1500\n" in run("run.yaml", "--resume", "epochs=2", counters(100))[1]
    assert "counted 100 3000\n" in run("run.yaml", "--resume", "epochs=3", counters(100))[1]


NAMED = """
import numpy as np

from dbrdist.datasets import TupleDataset


def blobs(names="abc", num_test=6, lowest=0):
    t = (np.arange(24) % 3 + lowest).astype(np.int32)
    train = TupleDataset(np.eye(3, dtype=np.float32)[t - lowest], t)
    train.num_classes, train.classes = 3, list(names)
    return train, TupleDataset(np.eye(3, dtype=np.float32)[t[:num_test] - lowest], t[:num_test])


def nothing(outputs, labels):
    return float("nan")
"""
BLOBS = "model: {name: mlp, units: [4]}\ndata: {name: 'named:blobs'}\nbatch: 8\nepochs: 1\nout: result\n"


@pytest.fixture
def named(folder):
    (folder / "named.py").write_text(NAMED)
    (folder / "run.yaml").write_text(BLOBS)
    yield
    sys.modules.pop("named", None)


@pytest.mark.parametrize("of_recipe", [None, "{", "{}"])
def test_classes_are_those_of_the_snapshot_where_the_recipe_has_none(run, named, of_recipe):
    assert run("run.yaml")[0] == 0
    recipe = Path("result/model.json")
    recipe.unlink() if of_recipe is None else recipe.write_text(of_recipe)
    for words in (["--resume", "epochs=2"], ["--evaluate", "result"]):
        code, _, err = run("run.yaml", *words, "data.args.names=bac")
        assert code == 2 and "class 0 was 'a', now 'b'; class 1 was 'b', now 'a'" in err
    assert run("run.yaml", "--evaluate", "result")[0] == 0
    assert run("run.yaml", "--resume", "epochs=2")[0] == 0


@pytest.mark.parametrize("words", ["data.args.num_test=5", "data.args.num_test=7"])
def test_a_best_value_on_other_test_data_is_forgotten(run, named, words):
    best = "snapshot.best=validation/main/loss"
    assert run("run.yaml", best)[0] == 0
    _, out, _ = run("run.yaml", best, "--resume", "epochs=2", words)
    assert "the best validation/main/loss so far was measured with another number of test examples" in out
    _, out, _ = run("run.yaml", best, "--resume", "epochs=3", words)
    assert "begins anew" not in out


def test_the_end_says_that_the_best_value_was_nan(run, named):
    _, out, _ = run("run.yaml", "metrics=['named:nothing']", "snapshot.best=validation/main/nothing")
    assert "no snapshot_best was saved, because 'validation/main/nothing' was NaN each time" in out


@pytest.mark.filterwarnings("default::dbrdist.errors.UsageWarning")
def test_ignored_labels_are_counted(run, named):
    words = " ".join("".join(run("run.yaml", "data.args.lowest=-1")[1:]).split())
    assert "8 of 24 training labels are -1, which softmax_cross_entropy leaves out of the loss" in words
    assert "click" not in words  # which calls the command: the user has no line there
    assert "labels are -1" not in "".join(run("run.yaml", "out=other")[1:])


def test_seconds_do_not_depend_on_the_clock(run, named, monkeypatch):
    clock = itertools.count(2e9, -50)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    code, out, _ = run("run.yaml")
    assert code == 0 and re.search(r"finished: 1 epoch, 3 steps in \d", out)
    assert json.loads(Path("result/summary.json").read_text())["seconds"] >= 0


@each(rule=["adabound", "amsbound"])
def test_what_follows_the_rate_in_proportion_is_that_of_the_new_rate(run, folder, rule):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", f"optimizer={{name: {rule}, alpha: 0.001}}", f"out={rule}")[0] == 0
    assert run("run.yaml", f"optimizer={{name: {rule}, alpha: 0.01}}", f"out={rule}", "--resume", "epochs=2")[0] == 0
    assert run("run.yaml", f"optimizer={{name: {rule}, alpha: 0.01}}", f"out=new-{rule}")[0] == 0
    resumed, fresh = (np.load(path) for path in (f"{rule}/snapshot_iter_30", f"new-{rule}/snapshot_iter_15"))
    for name in ("alpha", "initial_alpha", "final_lr"):
        key = f"updater/optimizer:main/hyperparam/{name}"
        assert resumed[key] == fresh[key], name


@pytest.mark.filterwarnings("always::dbrdist.errors.UsageWarning")
@each(option=["accumulate=2", "accumulate=4", "compression=power_sgd", "compression=top_k", "double_buffering=true"])
def test_a_run_goes_on_without_what_it_carried_from_step_to_step(run, folder, option):
    (folder / "run.yaml").write_text(DIGITS)
    assert run("run.yaml", option, f"out={option.replace(chr(61), chr(45))}")[0] == 0
    code, out, err = run("run.yaml", "--resume", "epochs=2", f"out={option.replace(chr(61), chr(45))}")
    assert code == 0 and "30 steps" in out, err
    waits = "gradients of batches that wait for their update by accumulate; they are not applied" in err
    assert waits == option.startswith("accumulate")  # 15 steps are no whole number of updates


def test_normalizations_keep_the_eps_of_the_snapshot(run, cut):
    """Another version may make them with another one."""
    entries, key = read_npz(str(cut)), "extensions/LocalState/constants"
    assert json.loads(str(entries[key])) == {"predictor/bn/eps": 2e-5}
    entries[key] = np.array(json.dumps({"predictor/bn/eps": 0.5, "predictor/gone/eps": 1.0}))
    snapshots.write(str(cut), entries)
    assert run("run.yaml", *EVERY, "iterations=4", "--resume")[0] == 0
    assert json.loads(str(read_npz("result/snapshot_iter_4")[key])) == {"predictor/bn/eps": 0.5}


class Unknown:
    """Of which nothing is known; it has examples of this rank alone, or raises."""

    is_one_ranks = True

    def __len__(self):
        raise RuntimeError("not here")


ROWS = [(np.full((2, 2), k / 7, np.float32), k, f"folder/{k}.png") for k in range(5)]


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (ROWS, ROWS[:3], []), ([(x * np.float32(1 + 1e-6), k, f"other/{name}") for x, k, name in ROWS], ROWS[:3], []),
        (ROWS[::-1], ROWS[:3], ["training"]), (ROWS, ROWS[2::-1], ["test"]), (ROWS[:4], None, ["training", "test"]),
        ([(x, k, name.upper()) for x, k, name in ROWS], ROWS[:3], ["training"]),
        ([(k, k, name) for x, k, name in ROWS], ROWS[:3], ["training"]),
        ([(x.astype(np.float64), k, name) for x, k, name in ROWS], ROWS[:3], ["training"]),
    ],
)  # fmt: skip
def test_other_examples_than_those_of_a_snapshot_are_warned_of(train, test, said):
    def facts(train, test):
        return resume.data_facts(SimpleNamespace(classes=None, train=train, test=test))

    saved = json.loads(json.dumps(facts(ROWS, ROWS[:3])))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        other = [resume.Change("batch", 1, 2)]
        changed = resume.data_changes(saved, facts(train, test), other)
        assert [(c.old, c.new) for c in changed] == [(3, None)] * (test is None)
        assert resume.data_changes({}, facts(train, test), []) == []  # of an earlier version
        resume.data_changes(saved, facts(train, test), [*other, resume.Change("data.args.seed", 1, 2)])
    assert [str(w.message).partition(" examples are others")[0] for w in heard] == said
    strange = facts([(np.array([np.nan, np.inf]), np.zeros(0))], None)["some_examples"]["train"]
    assert all(isinstance(one, str) or np.isfinite(one) for one in strange) and len(strange) == 4
    assert resume._some(Unknown()) == []
