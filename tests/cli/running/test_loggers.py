"""Tests of dbrdist.cli.running.loggers."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path

import pytest


class Notes:
    """A package whose calls are noted."""

    def __init__(self, monkeypatch, name):
        self.calls = []
        made = types.ModuleType(name)
        made.__getattr__ = self._called
        monkeypatch.setitem(sys.modules, name, made)

    def _called(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: self.calls.append((name, args, named)) or self

    def __getattr__(self, name):
        return self._called(name)

    def names(self):
        return [name for name, _, _ in self.calls]


@pytest.mark.slow
def test_the_log_goes_to_the_loggers_that_are_named(run, monkeypatch):
    wandb, mlflow = Notes(monkeypatch, "wandb"), Notes(monkeypatch, "mlflow")
    words = ("run.yaml", "model=mlp", "transforms.train=[]", "log.every=1 iteration")
    code, _, err = run(*words, "log.csv=true", "log.wandb={project: p}", "log.mlflow={tracking_uri: here, run_name: r}")
    assert code == 0, err
    log = [json.loads(line) for line in Path("result/log.jsonl").read_text().splitlines()]
    with open("result/log.csv", newline="") as file:
        assert [float(row["main/loss"]) for row in csv.DictReader(file)] == [entry["main/loss"] for entry in log]
    assert wandb.names() == ["init", "log", "log", "log", "finish"] and wandb.calls[-1][2] == {}
    assert wandb.calls[0][2]["project"] == "p" and wandb.calls[0][2]["config"]["batch"] == 100
    assert mlflow.names() == ["set_tracking_uri", "start_run", *["log_metrics"] * 3, "end_run"]
    assert mlflow.calls[1][2] == {"run_name": "r"} and mlflow.calls[-1][1] == ("FINISHED",)


@pytest.mark.slow
def test_a_run_that_fails_is_a_failed_run_there_too(run, monkeypatch):
    wandb, mlflow = Notes(monkeypatch, "wandb"), Notes(monkeypatch, "mlflow")
    with pytest.raises(RuntimeError, match="my own mistake"):
        run("run.yaml", "model={name: 'usernet:Broken'}", "log.wandb={}", "log.mlflow={}")
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 1})
    assert mlflow.calls[-1] == ("end_run", ("FAILED",), {})


@pytest.mark.slow
def test_a_package_that_is_missing_is_a_warning_and_the_run_goes_on(run, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run("run.yaml", "model=mlp", "transforms.train=[]", "log.wandb={}", "log.mlflow={}")
    assert code == 0 and "finished" in out
    for logger, name in (("WandbLogger", "wandb"), ("MLflowLogger", "mlflow")):
        assert (
            " ".join(err.split()).count(f"{logger} needs the package {name}: pip install {name}; the run goes on") == 1
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_arguments_that_a_logger_does_not_take_are_one_warning(run, monkeypatch):
    def start_run(**options):
        raise TypeError(f"unexpected keyword argument {next(iter(options))!r}")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(start_run=start_run))
    code, out, err = run("run.yaml", "model=mlp", "transforms.train=[]", "log.mlflow={x: 1}")
    assert code == 0 and "finished" in out
    assert (
        " ".join(err.split()).count("MLflowLogger stops logging, the run goes on: TypeError: unexpected keyword") == 1
    )
