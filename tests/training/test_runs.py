"""Tests of dbrdist.training.runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dbrdist.errors import CheckpointError
from dbrdist.links import BatchNormalization, Linear
from dbrdist.models import MLP
from dbrdist.training import runs
from tests.each import each


def test_the_folder_of_a_run_or_of_a_snapshot_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("snapshot", "run/snapshot"):
        (tmp_path / name).write_bytes(b"")
    for given, folder in (("snapshot", "."), ("run/snapshot", "run"), ("run", "run"), ("absent", "absent")):
        assert runs.folder_of(given) == folder
    assert runs.folder_of(tmp_path / "run" / "snapshot") == str(tmp_path / "run")


def test_why_the_folder_of_a_run_cannot_be_read_is_said(tmp_path):
    words = "expected the folder of a run of dbrdist-train, with a model.json in it: "
    with pytest.raises(CheckpointError) as caught:
        runs.read_recipe(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: {words}No such file or directory"
    (tmp_path / "model.json").write_text("{no JSON")
    with pytest.raises(CheckpointError, match=f"{words}Expecting property name"):
        runs.read_recipe(str(tmp_path))


def test_which_snapshot_is_meant(tmp_path, monkeypatch):
    file = tmp_path / "snapshot_iter_3"
    with pytest.raises(CheckpointError) as caught:
        runs.find_snapshot(tmp_path / "absent")
    words = "expected the folder of a run, or a snapshot in one, found nothing there"
    assert str(caught.value) == f"{tmp_path}/absent: {words}"
    with pytest.raises(CheckpointError) as caught:
        runs.find_snapshot(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no complete snapshot in it; the run saved none, or all are damaged"
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError) as caught:
        runs.find_snapshot(file)
    assert str(caught.value) == f"{file}: the snapshot is damaged"
    with open(file, "wb") as out:
        np.savez(out, a=np.arange(3))
    assert runs.find_snapshot(file) == runs.find_snapshot(str(tmp_path)) == str(file)
    path, entries = runs.read_newest(tmp_path)
    assert path == str(file) and list(entries) == ["a"] and entries["a"].tolist() == [0, 1, 2]


@each(num_gone=[0, 1, 99, 100])
def test_a_snapshot_that_is_removed_meanwhile_has_a_newer_one(monkeypatch, num_gone):
    asked = []

    def read(path):
        asked.append(path)
        if len(asked) <= num_gone:
            raise FileNotFoundError(path)
        return {"a": 1}

    monkeypatch.setattr(runs, "find_snapshot", lambda run: f"{run}/{len(asked)}")
    monkeypatch.setattr(runs, "read_npz", read)
    if num_gone < 100:
        assert runs.read_newest("run") == (f"run/{num_gone}", {"a": 1})
    else:
        with pytest.raises(CheckpointError, match=r"^run: its snapshots are removed faster than they can be read$"):
            runs.read_newest("run")


def test_averages_take_the_place_of_weights_with_their_constants():
    link = Linear(2, 3)
    first = {name.strip("/"): p.array for name, p in link.namedparams()}
    key = next(iter(first))
    entries = {f"updater/model:main/{name}": np.full_like(a, 2) for name, a in first.items()}
    entries |= {
        f"extensions/WeightAverage/weights/{key}": np.full(first[key].shape, 3, np.float64),
        "other": np.ones(1),
    }
    weights = runs.trained_weights(entries)
    assert set(weights) == set(first) and weights[key].dtype == first[key].dtype
    assert {name: float(a.ravel()[0]) for name, a in weights.items()} == {name: 2 + (name == key) for name in first}


def test_constants_of_weights_are_saved_and_given_back_by_their_path():
    from dbrdist import Sequential

    link = Sequential(Linear(2, 3), BatchNormalization(3, eps=0.5), Sequential(BatchNormalization(3, eps=0.25)))
    found = runs.constants_of(link)
    assert found == {"1/eps": 0.5, "2/0/eps": 0.25}
    other = Sequential(Linear(2, 3), BatchNormalization(3), Sequential(BatchNormalization(3)))
    before = other[2][0].eps
    runs.set_constants(other, {"1/eps": 0.5, "7/eps": 9.0, "0/eps": 3.0})
    assert (other[1].eps, other[2][0].eps) == (0.5, before) and not hasattr(other[0], "eps")
    runs.set_constants(other, {"p/2/0/eps": 1}, "p/")
    assert other[2][0].eps == 1.0
    runs.set_constants(other[1], {"predictor/eps": 0.125}, "predictor")
    key = runs._CONSTANTS_PATH
    assert runs.saved_constants({key: np.array(json.dumps(found))}) == found
    for entries in ({}, {key: np.array("{")}, {key: np.array("[1]")}, {key: np.array('{"a": "x"}')}):
        assert runs.saved_constants(entries) == {}
    data = {"classes": ["a"], "num_test_examples": 3}
    assert runs.saved_data({runs._DATA_PATH: np.array(json.dumps(data))}) == data
    for text in ("{", "[1]", "3"):
        assert runs.saved_data({runs._DATA_PATH: np.array(text)}) == {}
    assert runs.saved_data({}) == {}


@each(
    case=[
        (None, ["a"], None), (["a"], None, None), (["a", "b"], ("a", "b"), None),
        (["a", "b"], ["b", "a"], "2 classes in another order or with other names: class 0 was 'a', now 'b'; class 1 "
         "was 'b', now 'a'"),
        (["a"], ["a", "b"], "1 classes, and the data has 2: class 1 was missing, now 'b'"),
        (list("abcdef"), list("uvwxyf"), "6 classes in another order or with other names: " + "; ".join(
            f"class {k} was {a!r}, now {b!r}" for k, (a, b) in enumerate(zip("abcde", "uvwxy", strict=True)))),
        (list("abcdefg"), list("uvwxyz"), "7 classes, and the data has 6: " + "; ".join(
            f"class {k} was {a!r}, now {b!r}" for k, (a, b) in enumerate(zip("abcde", "uvwxy", strict=True)))
         + ", and 2 more"),
    ]
)  # fmt: skip
def test_how_classes_differ(case):
    learned, found, words = case
    assert runs.other_classes(learned, found) == (words and f"the network was trained on {words}")


@each(
    recipe=[
        [], {}, {"callable": 3, "args": {}, "dtype": "f"}, {"callable": "a:b", "args": [], "dtype": "f"},
        {"callable": "a:b", "args": {}, "dtype": None},
    ]
)  # fmt: skip
def test_a_recipe_is_whole_or_damaged(tmp_path, recipe):
    (tmp_path / "model.json").write_text(json.dumps(recipe))
    with pytest.raises(CheckpointError) as caught:
        runs.read_recipe(str(tmp_path))
    words = "expected a mapping with callable, args, dtype in model.json, it is damaged"
    assert str(caught.value) == f"{tmp_path}: {words}"
    whole = {"callable": "a:b", "args": {"x": 1}, "dtype": "float32"}
    (tmp_path / "model.json").write_text(json.dumps(whole))
    assert runs.read_recipe(str(tmp_path)) == whole


def test_a_folder_names_a_network_and_runs_no_code():
    made = runs._make("f", {"callable": "dbrdist.models:MLP", "args": {"units": [4], "num_classes": 2}}, None)
    assert isinstance(made, MLP)
    for name in ("own.module:Net", "dbrdist.models:importlib"):
        with pytest.raises(CheckpointError) as caught:
            runs._make("f", {"callable": name, "args": {}}, None)
        assert str(caught.value) == (
            f"f: the network is {name!r}, and no code is run because a folder names it; import it and pass it: "
            f"dbrdist.load('f', model={name.partition(':')[2]})"
        )
    assert runs._make("f", {"callable": "own.module:Net", "args": {"a": 1}}, lambda a: ("made", a)) == ("made", 1)
    with pytest.raises(CheckpointError, match=r"^f: model.json: the network cannot be made: .*unexpected keyword"):
        runs._make("f", {"callable": "own.module:Net", "args": {"a": 1}}, lambda: None)
