"""Loggers write every line of the log, and none of them ends a run."""

from __future__ import annotations

import csv
import sys
import types
import warnings

import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.errors import StopRequested
from dbrdist.training import extensions


def run(folder, logger, epochs=2, snapshot=None, postprocess=None):
    """Train a line of digits for some epochs with a logger; the log."""
    train, _ = datasets.get_digits()
    model = L.Classifier(L.Linear(64, 10))
    updater = training.StandardUpdater(
        iterators.SerialIterator(train[:60], 20), optimizers.SGD(0.1).setup(model)
    )  # fmt: skip
    trainer = training.Trainer(updater, (epochs, "epoch"), out=str(folder))
    trainer.extend(extensions.LogReport(postprocess=postprocess))
    trainer.extend(logger)
    trainer.extend(extensions.snapshot(filename="snapshot"), trigger=(1, "epoch"))
    if snapshot is not None:
        dbrdist.serializers.load_npz(str(snapshot), trainer)
    trainer.run()
    return trainer.get_extension("LogReport").log


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_has_the_lines_of_the_log_and_continues(tmp_path):
    log = run(tmp_path, extensions.CSVLogger())
    rows = table(tmp_path / "log.csv")
    assert [int(r["iteration"]) for r in rows] == [3, 6] == [e["iteration"] for e in log]
    assert [float(r["main/loss"]) for r in rows] == [e["main/loss"] for e in log]
    more = run(tmp_path, extensions.CSVLogger(), epochs=3, snapshot=tmp_path / "snapshot")
    rows = table(tmp_path / "log.csv")
    assert [float(r["main/loss"]) for r in rows] == [e["main/loss"] for e in more] and len(rows) == 3


def test_a_new_column_rewrites_the_table(tmp_path):
    logger = extensions.CSVLogger()
    logger._path = str(tmp_path / "t.csv")
    logger.log(1, {"a": 1.0})
    logger.log(2, {"a": 2.0, 'b,"c"': 3.0})
    logger.log(3, {"a": 4.0})
    rows = table(tmp_path / "t.csv")
    assert [r["a"] for r in rows] == ["1.0", "2.0", "4.0"] and [r['b,"c"'] for r in rows] == ["", "3.0", ""]


def test_a_log_whose_lines_have_no_iteration_does_not_end_the_run(tmp_path):
    """LogReport's postprocess may remove any key, and the loss may be NaN at that time."""

    def without(entry):
        del entry["iteration"]
        entry["main/loss"] = float("nan")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dbrdist.errors.UsageWarning)
        run(tmp_path, extensions.CSVLogger(), postprocess=without)
    assert [row["iteration"] for row in table(tmp_path / "log.csv")] == ["3", "6"]


class Calls(list):
    """A module, and a run, that notes what is called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return self

        return call


def module(monkeypatch, name, calls):
    made = types.ModuleType(name)
    made.__getattr__ = calls.__getattr__
    monkeypatch.setitem(sys.modules, name, made)


def test_weights_and_biases_gets_every_line(tmp_path, monkeypatch):
    calls = Calls()
    module(monkeypatch, "wandb", calls)
    log = run(tmp_path, extensions.WandbLogger(project="p"))
    names = [name for name, _, _ in calls]
    assert names == ["init", "log", "log", "finish"]
    assert calls[0][2] == {"dir": str(tmp_path), "project": "p"}
    assert calls[2][1][0]["main/loss"] == log[1]["main/loss"] and calls[2][2] == {"step": 6}


def test_mlflow_gets_every_line_under_names_that_it_takes(tmp_path, monkeypatch):
    calls = Calls()
    module(monkeypatch, "mlflow", calls)
    logger = extensions.MLflowLogger(tracking_uri="here", run_name="r")
    log = run(tmp_path, logger)
    assert [name for name, _, _ in calls] == ["set_tracking_uri", "start_run", "log_metrics", "log_metrics", "end_run"]
    assert calls[3][1][0]["main/loss"] == log[1]["main/loss"]
    logger.log(9, {"a<b>": 1.0})
    assert calls[-1][1][0] == {"a_b_": 1.0}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(3), "FAILED"),
        (StopRequested("x"), "KILLED"),
    ],
)
def test_what_ended_a_run_is_said_to_mlflow_and_wandb(tmp_path, monkeypatch, error, status):
    ended = {}
    for name, logger in (("mlflow", extensions.MLflowLogger), ("wandb", extensions.WandbLogger)):
        calls = Calls()
        module(monkeypatch, name, calls)

        class Ending(logger):
            def log(self, iteration, values):
                super().log(iteration, values)
                raise_now()

            def _guarded(self, function, *args):
                function(*args)

        def raise_now():
            raise error

        with pytest.raises(type(error)):
            run(tmp_path, Ending())
        ended[name] = calls[-1]
    assert ended == {"mlflow": ("end_run", (status,), {}), "wandb": ("finish", (), {"exit_code": 1})}


@pytest.mark.parametrize("name, logger", [("wandb", "WandbLogger"), ("mlflow", "MLflowLogger")])
def test_a_package_that_is_missing_is_named(name, logger, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"{logger} needs the package {name}: pip install {name}"):
        getattr(extensions, logger)()


@pytest.mark.parametrize("where", ["begin", "log", "end"])
def test_a_logger_that_fails_warns_once_and_the_run_goes_on(where, tmp_path):
    def fail(*_):
        raise ConnectionError("offline")

    logger = extensions.CSVLogger()
    setattr(logger, where, fail)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        log = run(tmp_path, logger)
    assert len(log) == 2
    assert [str(w.message) for w in seen if "CSVLogger" in str(w.message)] == [
        "CSVLogger stops logging, the run goes on: ConnectionError: offline"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_has_every_line(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("sqlalchemy", reason="MLflow has no database")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log = run(tmp_path, extensions.MLflowLogger(tracking_uri=uri, run_name="first"))
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs(["0"])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")
    history = client.get_metric_history(found.info.run_id, "main/loss")
    assert [(m.step, m.value) for m in history] == [(e["iteration"], e["main/loss"]) for e in log]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_itself_writes_an_offline_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = extensions.WandbLogger(project="p", mode="offline")
    log = run(tmp_path, logger)
    wandb.teardown()  # its service writes the file's end
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert wandb.run is None and b"main/loss" in content and repr(log[-1]["main/loss"]).encode() in content
