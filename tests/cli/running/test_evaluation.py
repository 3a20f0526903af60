"""Evaluations of a finished run: what is compared before, whose weights are read, and what is printed."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from dbrdist.cli.running import evaluation
from dbrdist.errors import ConfigError
from tests.cli.config_helpers import configured
from tests.each import each

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.fixture(autouse=True)
def own_errors(monkeypatch):
    """Errors of this rank as they are, not as all ranks tell them."""
    monkeypatch.setattr(evaluation, "alike", lambda comm: contextlib.nullcontext())


def single(rank=0, others=()):
    return SimpleNamespace(rank=rank, size=1 + len(others), intra_rank=3, bcast_obj=lambda x: x,
                           allgather_obj=lambda x: [x, *others])  # fmt: skip


@each(rank=[0, 1], has_test=[True, False])
def test_what_an_evaluation_does_in_order(monkeypatch, capsys, rank, has_test):
    happened = []
    data = SimpleNamespace(test="test" if has_test else None, classes=["a"])
    made = SimpleNamespace(data=data, recipe="recipe", task="task")

    def note(name, result=None):
        return lambda *words: happened.append((name, *words)) or result

    class Evaluator:
        def __call__(self, trainer):
            happened.append(("evaluated", trainer, self.name))
            return {"validation/main/loss": 0.5, "other": 1}

        def finalize(self):
            happened.append("finalized")

    config, origin = configured("init_from: w.npz")
    monkeypatch.setattr(evaluation.build, "find_images", lambda config, origin, comm: "find")
    monkeypatch.setattr(evaluation, "parts", lambda config, *words: happened.append((config.init_from, *words)) or made)
    monkeypatch.setattr(evaluation, "folder_of", lambda run: f"{run}/folder")
    monkeypatch.setattr(evaluation, "check_classes", note("recipe"))
    monkeypatch.setattr(evaluation.preflight, "check_test", lambda config, origin, made: happened.append("test"))
    monkeypatch.setattr(evaluation.weights, "warn_of_other_network", note("network"))
    monkeypatch.setattr(evaluation, "_load_newest", note("load", ("snapshot", {"classes": ["b"]})))
    monkeypatch.setattr(evaluation, "compare_classes", note("classes"))
    monkeypatch.setattr(evaluation, "evaluator", lambda config, made, comm: Evaluator())
    comm = single(rank)
    if not has_test:
        with pytest.raises(ConfigError, match="data: there is no test data to evaluate on"):
            evaluation.evaluate(config, origin, comm, "run")
        return
    evaluation.evaluate(config, origin, comm, "run")
    assert happened == [
        (None, origin, 3, 1, "find"), ("recipe", "run/folder/model.json", ["a"], origin), "test",
        ("network", "run", "recipe", "--evaluate run"), ("load", "run", "task", comm),
        ("classes", ["b"], ["a"], origin), ("evaluated", None, "validation"), "finalized",
    ]  # fmt: skip
    line = {"snapshot": "snapshot", "validation/main/loss": 0.5, "other": 1.0}
    assert capsys.readouterr().out == (json.dumps(line) + "\n" if rank == 0 else "")


@each(num_gone=[0, 2])
def test_a_snapshot_that_the_run_has_removed_has_a_newer_one(monkeypatch, num_gone):
    found = []

    def load(path, task):
        if len(found) <= num_gone:
            raise FileNotFoundError(path)
        return {"classes": [path]}

    monkeypatch.setattr(evaluation, "find_snapshot", lambda run: found.append(run) or f"{run}/{len(found)}")
    monkeypatch.setattr(evaluation, "load_weights", load)
    last = f"run/{num_gone + 1}"
    assert evaluation._load_newest("run", "task", single()) == (last, {"classes": [last]})
    assert found == ["run"] * (num_gone + 1)


def test_a_snapshot_that_was_named_itself_is_missing_for_good(monkeypatch):
    monkeypatch.setattr(evaluation, "find_snapshot", lambda run: run)

    def load(path, task):
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(evaluation, "load_weights", load)
    with pytest.raises(FileNotFoundError):
        evaluation._load_newest("run/snapshot", "task", single())


@each(learned=[["a", "b"], None])
def test_classes_of_a_recipe_are_compared_with_those_of_the_data(tmp_path, learned):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({} if learned is None else {"classes": learned}))
    evaluation.check_classes(str(path), ["a", "b"], ORIGIN)
    if learned is None:
        evaluation.check_classes(str(path), ["c"], ORIGIN)
        return
    with pytest.raises(ConfigError) as caught:
        evaluation.check_classes(str(path), ["b", "a"], ORIGIN)
    assert str(caught.value) == (
        "run.yaml:data: data: the network was trained on 2 classes in another order or with other names: class 0 was "
        "'a', now 'b'; class 1 was 'b', now 'a'; give the network the data with its own classes, or train another one "
        "with out=..."
    )
