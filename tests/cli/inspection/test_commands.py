"""Tests of dbrdist.cli.inspection.commands."""

from __future__ import annotations

import pytest

from dbrdist.cli.inspection import commands
from dbrdist.cli.output.refuse import Refused
from dbrdist.comm.data.audit import Verdict
from dbrdist.errors import ConfigError
from tests.each import each


def test_images_are_named_as_the_runs_own_configuration_says_or_another(monkeypatch):
    happened = []
    monkeypatch.setattr(commands, "find_snapshot", lambda run: happened.append(("found", run)))
    monkeypatch.setattr(commands, "folder_of", lambda run: f"{run}/folder")
    monkeypatch.setattr(commands.load, "load", lambda *given: happened.append(given) or ("settings", "origin"))
    for name in ("search_beside", "refuse_code_of_a_folder"):
        monkeypatch.setattr(commands.resolve, name, lambda *given, name=name: happened.append((name, *given)))
    monkeypatch.setattr(commands.predict, "predict", lambda *given: iter([given]))

    def named(*words):
        happened.clear()
        return list(commands.predict_images("run", words))

    assert named("a.png", "b.png") == [("settings", "origin", "run", ["a.png", "b.png"])]
    assert happened == [
        ("found", "run"), ("run/folder/config.yaml", []),
        ("refuse_code_of_a_folder", "settings", "origin", "--predict RUN IMAGE.jpg"),
    ]  # fmt: skip
    for name in ("own.yaml", "own.yml"):
        assert named(name, "lr=1", "a.png") == [("settings", "origin", "run", ["a.png"])]
        assert happened == [("found", "run"), (name, ["lr=1"]), ("search_beside", name)]
    for words in ((), ("own.yaml",), ("lr=1",), ("a.yaml", "b.yaml", "a.png")):
        with pytest.raises(ConfigError, match=r"expected image files: --predict RUN image.jpg"):
            named(*words)
        assert happened == []


@pytest.mark.parametrize("words", [(), ("a.txt",), ("a.safetensors", "b.safetensors")])
def test_weights_are_written_to_one_file(words):
    with pytest.raises(ConfigError, match=r"expected one file to write: --export RUN weights.safetensors"):
        list(commands.export("run", words))


@each(problems=[[], ["one", "two"]])
def test_an_audit_fails_where_something_is_wrong(monkeypatch, problems):
    asked = []

    def check(run, steps, is_running):
        asked.append((run, steps, is_running))
        return Verdict(["a", "b"], problems)

    monkeypatch.setattr(commands.audit, "check", check)
    monkeypatch.setattr(commands, "read_json", lambda path: {"iterations": 7} if path == "r/summary.json" else {})
    said = commands.audit_run("r", [])
    assert [next(said), next(said)] == ["a", "b"] and asked == [("r", 7, False)]
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
