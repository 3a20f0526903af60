"""Tests of dbrdist.cli.inspection.commands."""

from __future__ import annotations

import pytest

from dbrdist.cli.inspection import commands
from dbrdist.cli.output.refuse import Refused
from dbrdist.comm.data.audit import Verdict
from dbrdist.errors import ConfigError
from tests.each import each


@pytest.fixture
def happened(monkeypatch):
    """What a command has looked for, loaded and refused, in its order; nothing of it is done."""
    happened = []
    monkeypatch.setattr(commands, "find_snapshot", lambda run: happened.append(("found", run)))
    monkeypatch.setattr(commands, "folder_of", lambda run: f"{run}/folder")
    monkeypatch.setattr(commands.load, "load", lambda *given: happened.append(given) or ("settings", "origin"))
    for name in ("search_beside", "refuse_code_of_a_folder"):
        monkeypatch.setattr(commands.resolve, name, lambda *given, name=name: happened.append((name, *given)))
    return happened


def test_images_are_named_as_the_runs_own_configuration_says_or_another(monkeypatch, happened):
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


@each(
    case=[
        (("m.onnx",), ("run/folder/config.yaml", ()), None), (("m.onnx", "3x4x4"),
        ("run/folder/config.yaml", ()), "3x4x4"),
        (("own.yml", "3x4x4", "m.onnx"), ("own.yml", ()), "3x4x4"), (("m.onnx", "own.yaml"), ("own.yaml", ()), None),
    ]
)  # fmt: skip
def test_a_network_is_exported_as_the_runs_own_configuration_says_or_another(monkeypatch, happened, case):
    words, loaded, shape = case
    happened.clear()
    monkeypatch.setattr(commands.onnx_export, "write", lambda *given: iter([given]))
    assert list(commands.export("run", words)) == [("settings", "origin", "run", "m.onnx", shape)]
    is_own = loaded[0].startswith("own")
    last = ("search_beside", loaded[0]) if is_own else (
        "refuse_code_of_a_folder", "settings", "origin", "--export RUN m.onnx",
    )  # fmt: skip
    assert happened == [("found", "run"), loaded, last]


@each(words=[("a.onnx", "b.onnx"), ("a.onnx", "a.yaml", "b.yaml"), ("a.onnx", "3x4x4", "3x5x5"), ("a.onnx", "x")])
def test_what_is_exported_as_onnx_is_one_file_with_one_shape(words):
    with pytest.raises(ConfigError) as caught:
        list(commands.export("run", words))
    assert str(caught.value) == (
        "dbrdist-train: expected one file to write, and perhaps the shape of an example: --export RUN model.onnx "
        f"3x224x224, got {' '.join(words)}"
    )


@each(
    case=[
        (("w.safetensors",), "dbrdist"), (("w.safetensors", "names=torch"), "torch"),
        (("names=dbrdist", "own.yaml", "w.safetensors"), "dbrdist"),
    ]
)  # fmt: skip
def test_weights_are_written_under_the_names_that_were_asked_for(monkeypatch, case):
    words, names = case
    monkeypatch.setattr(commands.weights, "export", lambda *given: given)
    assert list(commands.export("run", words)) == [("run", "w.safetensors", names)]
    for odd in (("names=other",), ("names=torch", "names=torch")):
        with pytest.raises(ConfigError) as caught:
            list(commands.export("run", ("w.safetensors", *odd)))
        assert str(caught.value) == f"dbrdist-train: expected names=torch or names=dbrdist, got {' '.join(odd)}"
    with pytest.raises(ConfigError) as caught:
        list(commands.export("run", ("a.txt", "b.txt")))
    assert str(caught.value) == (
        "dbrdist-train: expected one file to write: --export RUN weights.safetensors, or model.onnx, got a.txt b.txt"
    )


@each(case=[(["a"], True, 0), (["a"], False, 1), (["a", "b"], False, 0)])
def test_a_report_says_how_to_get_pictures(monkeypatch, case):
    runs, is_installed, num_said = case
    asked = []
    monkeypatch.setattr(commands.report, "write", lambda runs, pictures: asked.append((runs, pictures)) or ["file"])
    monkeypatch.setattr(commands.plotting, "is_installed", lambda: is_installed)
    said = ["no PNG: install matplotlib for these, pip install dbrdist[plot]"]
    assert list(commands.write_report(runs)) == ["file", *said * num_said] and asked == [(runs, True)]


@each(name=[None, "elsewhere"])
def test_what_could_not_be_written_is_named(name):
    with pytest.raises(OSError) as caught, commands._writing("here"):
        raise OSError(28, "No space left on device", name)
    assert caught.value.filename == (name or "here")


def test_a_configuration_is_found_where_it_was_installed(tmp_path, monkeypatch):
    places = (tmp_path / "wheel" / "{}.yaml", tmp_path / "checkout" / "{}" / "config.yaml")
    monkeypatch.setattr(commands, "_PLACES", places)
    with pytest.raises(ConfigError, match=r"^dbrdist-train: the configuration digits was not installed with dbrdist$"):
        commands.configuration("digits")
    for name, text in (("checkout/digits/config", "second: é\n\n"), ("wheel/digits", "first: é\n")):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        assert commands.configuration("digits") == text.rstrip()
    with pytest.raises(ConfigError) as caught:
        commands.configuration("digit")
    assert str(caught.value) == (
        "dbrdist-train: expected the name of a configuration (digits, cifar10, imagenet), got 'digit'"
    )
