"""Tests of dbrdist.training.extensions.log_report."""

from __future__ import annotations

import io
import json
import types

import numpy as np
import pytest

from dbrdist.errors import UsageWarning
from dbrdist.training import PRIORITY_WRITER, extensions
from dbrdist.training.extensions.log_report import read_log
from tests.training.training_helpers import made, make_trainer


def test_a_log_keeps_chosen_values(tmp_path):
    trainer = made(tmp_path)
    seen = []
    trainer.extend(
        extensions.LogReport(["main/loss", "nothing"], (1, "iteration"), postprocess=seen.append),
        call_before_training=True,
    )
    trainer.extend(lambda trainer: {"other": 3.0}, name="other", trigger=(1, "iteration"), priority=400)
    with pytest.warns(UsageWarning, match="LogReport: nobody has reported 'nothing' so far"):
        trainer.run()
    log = trainer.get_extension("LogReport").log
    assert [set(entry) for entry in log] == [{"epoch", "iteration", "elapsed_time"}] + [
        {"epoch", "iteration", "elapsed_time", "main/loss"}
    ] * 2
    assert seen == log and [entry["iteration"] for entry in log] == [0, 1, 2]


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


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_report(tmp_path):
    trainer, losses = make_trainer(tmp_path, (3, "epoch"), batch=5), []
    trainer.extend(extensions.LogReport())
    trainer.extend(lambda t: losses.append(float(t.observation["main/loss"])), name="watch")
    trainer.run()
    log = lines(tmp_path / "log.jsonl")
    assert [(entry["epoch"], entry["iteration"]) for entry in log] == [(1, 2), (2, 4), (3, 6)]
    np.testing.assert_allclose([e["main/loss"] for e in log], np.reshape(losses, (3, 2)).mean(1), rtol=1e-12)
    assert log[0]["elapsed_time"] < log[-1]["elapsed_time"]


def test_log_report_keys_postprocess_and_filename(tmp_path):
    trainer = make_trainer(tmp_path, (2, "iteration"))
    trainer.extend(lambda t: t.observation.update(a=1.0, b=float("nan")), name="w", priority=PRIORITY_WRITER)
    trainer.extend(
        extensions.LogReport(
            ["b"], (1, "iteration"), lambda entry: entry.update(mark=entry["iteration"] * 10), "x.jsonl"
        )
    )
    trainer.run()
    log = lines(tmp_path / "x.jsonl")
    assert [(entry["b"], entry["mark"]) for entry in log] == [(None, 10), (None, 20)]
    assert "a" not in log[0]


def test_print_report(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "main/loss", "nothing"], out=out))
    with pytest.warns(UsageWarning, match="PrintReport: nobody has reported 'nothing' so far; .*main/loss"):
        trainer.run()
    header, first, second = out.getvalue().splitlines()
    assert header.split() == ["epoch", "iteration", "main/loss", "nothing"]
    assert first.split()[:2] == ["1", "3"]
    assert second.split()[:2] == ["2", "5"]
    assert float(second.split()[2]) == pytest.approx(trainer.get_extension("LogReport").log[1]["main/loss"], rel=1e-5)


def test_print_report_with_a_log_of_its_own(tmp_path):
    out = io.StringIO()
    trainer = make_trainer(tmp_path, (2, "iteration"))
    report = extensions.LogReport(trigger=(1, "iteration"))
    trainer.extend(extensions.PrintReport(["iteration"], report, out))
    trainer.run()
    assert out.getvalue().split() == ["iteration", "1", "2"]


def test_each_row_of_a_table_goes_out_at_once(tmp_path):
    """A program's own stream may have no flush."""
    done = []
    streams = (
        types.SimpleNamespace(write=done.append, flush=lambda: done.append("flush")),
        types.SimpleNamespace(write=done.append),
    )
    for out in streams:
        trainer = make_trainer(tmp_path, stop=(1, "epoch"))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch"], out=out))
        trainer.run()
    assert done == ["epoch\n", "flush", "1\n", "flush", "epoch\n", "1\n"]


def test_a_log_is_read_up_to_what_is_no_entry(tmp_path):
    for last in ("3", "[]", '{"a": 3', ""):
        (tmp_path / "log.jsonl").write_text('{"a": 1}\n{"a": 2}\n' + last)
        assert read_log(tmp_path / "log.jsonl") == [{"a": 1}, {"a": 2}]
    assert read_log(tmp_path / "none.jsonl") == []
