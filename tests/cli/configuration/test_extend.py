"""`extends:` in a configuration: what is merged, where each entry stands, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dbrdist.cli.configuration import extend
from dbrdist.cli.configuration.load import load
from dbrdist.errors import ConfigError

BASE = """\
model: {name: mlp, units: [50, 50], dropout: 0.5}
data: digits
batch: 64
epochs: 3
optimizer:
  name: momentum_sgd
  lr: 0.5
  hooks: [{name: weight_decay, rate: 0.25}, {name: lasso, rate: 0.125}]
  schedule: cosine
snapshot: {every: 2 epochs, keep: 3}
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """`files(name=text)` writes configurations."""
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in {"base": BASE, **texts}.items():
            path = Path(f"{name.replace('__', '/')}.yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def refused(name, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(name, overrides)
    return str(caught.value).splitlines()


def test_mappings_are_merged_deeply(files):
    files(own="extends: base.yaml\nmodel: {dropout: 0.25}\noptimizer: {lr: 0.125, hooks: []}\nsnapshot: {keep: 7}\n")
    made, _ = load("own.yaml")
    assert (made.model.name, made.model.units, made.model.dropout) == ("mlp", (50, 50), 0.25)
    assert (made.optimizer.name, made.optimizer.lr, made.optimizer.hooks) == ("momentum_sgd", 0.125, ())
    assert (made.snapshot.every, made.snapshot.keep, made.batch, made.extends) == ("2 epoch", 7, 64, None)
    assert made.optimizer.schedule.name == "cosine"


def test_another_name_replaces_a_component(files):
    files(own="extends: base.yaml\noptimizer: {name: adam, alpha: 0.5}\nmodel: lenet\n")
    made, _ = load("own.yaml")
    assert (made.optimizer.name, made.optimizer.alpha, made.optimizer.hooks) == ("adam", 0.5, ())
    assert made.model.name == "lenet"


def test_a_bare_name_of_the_base_takes_keys(files):
    files(own="extends: base.yaml\noptimizer: {schedule: {warmup_epochs: 1}}\ndata: {roott: 1}\n")
    (found,) = refused("own.yaml")
    assert found.startswith("own.yaml:3:8: data.roott: unknown key")
    files(own="extends: base.yaml\noptimizer: {schedule: {warmup_epochs: 1}}\n")
    schedule = load("own.yaml")[0].optimizer.schedule
    assert (schedule.name, schedule.warmup_epochs) == ("cosine", 1)


def test_paths_are_relative_to_the_file_that_names_them(files):
    files(
        sub__middle="extends: ../base.yaml\nbatch: 32\nseed: 1\n",
        own="extends: sub/middle.yaml\nseed: 2\n",
    )
    made, origin = load("own.yaml", ["epochs=9"])
    assert (made.batch, made.seed, made.epochs) == (32, 2, 9)
    assert origin.files == ("own.yaml", "sub/middle.yaml", "sub/../base.yaml")


def test_mistakes_name_the_file_in_which_they_are(files):
    files(
        wrong=BASE + "seed: -1\nlogg: {}\n",
        own="extends: wrong.yaml\nbatch: 0\noptimizer: {lr: fast}\n",
    )
    assert sorted(line.rpartition(", ")[0] or line for line in refused("own.yaml", "epochs=0")) == [
        "command line 'epochs=0': epochs: must be greater than 0",
        "own.yaml:2:8: batch: must be at least 1",
        "own.yaml:3:17: optimizer.lr: expected a number",
        "wrong.yaml:11:7: seed: must be at least 0",
        "wrong.yaml:12:1: logg: unknown key",
    ]
    files(own="extends: wrong.yaml\nseed: 0\noptimizer: {hooks: [{name: lasso, rate: -1}]}\nlogg: 3\n")
    assert refused("own.yaml") == [
        "own.yaml:3:41: optimizer.hooks.0.rate: must be at least 0, got -1",
        "own.yaml:4:1: logg: unknown key, did you mean 'log'?",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: own.yaml\n", "own.yaml:1:10: extends: own.yaml extends own.yaml: a cycle"),
        ("extends: ./own.yaml\n", "own.yaml:1:10: extends: own.yaml extends ./own.yaml: a cycle"),
        ("extends: nowhere.yaml\n", "own.yaml:1:10: extends: nowhere.yaml cannot be read: No such file or directory"),
        ("extends: .\n", "own.yaml:1:10: extends: . cannot be read: Is a directory"),
        ("extends: 5\n", "own.yaml:1:10: extends: expected the path of a configuration, got 5"),
        ("extends: ''\n", "own.yaml:1:10: extends: expected the path of a configuration, got ''"),
        ('extends: "a\\0b"\n', "own.yaml:1:10: extends: expected the path of a configuration, got 'a\\x00b'"),
        ("extends: [base.yaml]\n", "own.yaml:1:10: extends: expected the path of a configuration, got ['base.yaml']"),
        (
            "extends: circle.yaml\n",
            "circle.yaml:1:10: extends: own.yaml extends circle.yaml extends own.yaml: a cycle",
        ),
        ("extends: list.yaml\n", "list.yaml:1:1: expected `key: value` lines"),
        ("extends: latin.yaml\n", "latin.yaml:1:1: the file is not UTF-8 text: invalid continuation byte"),
        ("extends: twice.yaml\n", "twice.yaml:11:1: duplicate key 'batch', first given at twice.yaml:3:1"),
    ],
)
def test_what_cannot_be_extended(files, text, words):
    files(own=text + BASE, circle="extends: own.yaml\n", list="- 1\n", twice=BASE + "batch: 3\n")
    Path("latin.yaml").write_bytes(b"\xe9t\xe9: 1\n")
    assert refused("own.yaml")[0] == words


def test_too_deep(files):
    files(**{f"f{i}": f"extends: f{i + 1}.yaml\n" for i in range(12)}, f12=BASE)
    assert "f9.yaml:1:10: extends: expected at most 10 files that extend one another" in refused("f0.yaml")
    assert load("f3.yaml")[0].batch == 64


def test_the_command_line_extends_nothing(files):
    files()
    expected = "command line 'extends=x.yaml': extends belongs in the file, not on the command line"
    assert refused("base.yaml", "extends=x.yaml") == [expected]


def test_a_run_records_what_it_was_made_from(run, folder):
    Path("own.yaml").write_text("extends: run.yaml\nout: made\niterations: 1\n")
    code, _, err = run("own.yaml")
    assert code == 0, err
    text = Path("made/config.yaml").read_text()
    assert text.startswith("# own.yaml extends run.yaml\n")
    assert "extends" not in yaml.safe_load(text)
    assert load("made/config.yaml")[0] == load("own.yaml")[0]
    assert json.loads(Path("made/summary.json").read_text())["configurations"] == ["own.yaml", "run.yaml"]
    assert run("own.yaml", "--resume", "iterations=2")[0] == 0


@pytest.mark.parametrize("length", [10, 11])
def test_a_configuration_has_a_largest_size(monkeypatch, tmp_path, length):
    assert extend.MAX_BYTES == 10_000_000
    monkeypatch.setattr(extend, "MAX_BYTES", 10)
    (tmp_path / "run.yaml").write_bytes(b"#" * length)
    if length == 10:
        assert extend.read_file(str(tmp_path / "run.yaml")) == b"#" * 10
    else:
        with pytest.raises(
            ConfigError, match=r"run.yaml: expected a configuration of at most 10 bytes, this is larger"
        ):
            extend.read_file(str(tmp_path / "run.yaml"))


def test_a_base_that_is_missing_is_the_one_mistake(run, folder):
    (folder / "own.yaml").write_text("extends: nowhere.yaml\nbatch: 3\n")
    code, _, err = run("own.yaml")
    expected = "own.yaml:1:10: extends: nowhere.yaml cannot be read: No such file or directory\n"
    assert (code, err) == (2, expected)
