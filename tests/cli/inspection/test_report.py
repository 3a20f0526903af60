"""What people see of a run: the table, the page, predictions, weights."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.inspection import commands, report
from dbrdist.cli.inspection.chart import colour
from dbrdist.cli.inspection.records import RunRecord
from dbrdist.training.extensions.progress_bar import duration
from tests.cli.cli_helpers import lines


# ---- while it runs ----
@pytest.mark.slow
def test_the_table_fits_80_columns(run):
    _, out, _ = run("run.yaml", "model=mlp", "log.every=1 iteration", "iterations=3")
    rows = [line for line in out.splitlines() if re.match(r" *(epoch +step|\d+ +\d+ )", line)]
    assert len(rows) == 4
    assert rows[0].split() == ["epoch", "step", "loss", "accuracy", "test", "loss", "test", "acc", "examples/s", "time"]
    assert all(len(row) <= 80 for row in rows)
    last = lines("result/log.jsonl")[-1]
    assert rows[-1].split()[:3] == ["0", "3", f"{last['main/loss']:.4f}"]


@pytest.mark.slow
def test_each_line_of_the_log_tells_speed_waiting_memory_and_time(run):
    run("run.yaml", "log.every=1 iteration")
    for entry in lines("result/log.jsonl"):
        assert entry["examples_per_second"] > 0
        assert 0 <= entry["data_wait_fraction"] <= 1
        assert entry["memory_bytes"] > 1 << 20 and "communication_fraction" not in entry
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", entry["time"])
    assert [round(e["epoch_detail"], 6) for e in lines("result/log.jsonl")] == [
        round(k * 100 / 1442, 6) for k in (1, 2, 3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03")])
def test_durations(seconds, words):
    assert duration(seconds) == words


def svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]


@pytest.mark.slow
def test_a_run_leaves_its_page(run):
    run("run.yaml", "model=mlp", "log.every=1 iteration", "iterations=6", "out=<here & there>")
    page = Path("<here & there>/report/index.html").read_text()
    drawn = svgs(page)
    assert [svg.get("aria-label") for svg in drawn][:4] == ["Loss", "Accuracy", "Learning rate", "Examples per second"]
    path = next(p for p in drawn[0] if p.get("class") == "line" and "L" in p.get("d"))
    points = [tuple(map(float, point.split())) for point in path.get("d")[1:].split("L")]
    losses = [entry["main/loss"] for entry in lines("<here & there>/log.jsonl")]
    assert len(points) == 6
    assert np.corrcoef([y for _, y in points], losses)[0, 1] == pytest.approx(-1, abs=1e-4)  # up on paper is less
    assert np.diff([x for x, _ in points]) == pytest.approx(np.full(5, (points[-1][0] - points[0][0]) / 5), abs=0.2)
    assert "&lt;here &amp; there&gt;" in page and "<here" not in page
    assert "finished" in page and "momentum_sgd" in page and "test accuracy" in page
    assert not re.search(r'(src|href)="?(http|//)', page)  # nothing is fetched


@pytest.mark.slow
@pytest.mark.slow
def test_a_report_is_made_again_for_one_or_several(run):
    for out, lr in (("a", 0.05), ("b", 0.1)):
        run("run.yaml", "model=mlp", "log.every=1 iteration", f"out={out}", f"optimizer.lr={lr}")
    before = Path("a/report/index.html").read_text()
    os.remove("a/report/index.html")
    code, out, _ = run("--report", "a")
    assert code == 0 and out.splitlines()[0] == "a/report/index.html"
    assert Path("a/report/index.html").read_text() == before
    code, out, _ = run("--report", "a", "b")
    assert out.splitlines()[0] == "a/report/compare.html"
    page = Path("a/report/compare.html").read_text()
    assert "<th>optimizer.lr</th><td>0.05</td><td>0.1</td>" in page and "<th>batch</th>" not in page
    assert "a training" in page and "b test" in page


@pytest.mark.slow
def test_pictures_are_drawn_where_matplotlib_is(run):
    run("run.yaml", "log.every=1 iteration")
    code, out, _ = run("--report", "result")
    assert code == 0
    names = [Path(line).name for line in out.splitlines()[1:]]
    if "no PNG" in out:
        pytest.skip("matplotlib is not installed; the report says so")
    assert {"loss.png", "learning_rate.png"} <= set(names)
    assert Path("result/report/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "log",
    ["", "{", '{"main/loss": null}\n', '[1]\n{"main/loss": 2}\n', '{"main/loss": "x", "epoch": 1}\n{"main/loss": 3}\n'],
)
def test_a_page_of_any_log(tmp_path, log):
    (tmp_path / "log.jsonl").write_text(log)
    (tmp_path / "summary.json").write_text('{"status": "running", "hosts": [1], "seconds_over_all_starts": NaN}')
    (path,) = report.write([str(tmp_path)])
    assert "failed" in Path(path).read_text()  # it says that it runs, but nobody holds the folder


@pytest.mark.slow
def test_nothing_to_report(run):
    code, _, err = run("--report", "nowhere")
    assert code == 2 and "nowhere: expected the folder of a run" in err


@pytest.mark.slow
def test_runs_and_files_that_are_not_there_are_a_sentence(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    for words, code, expected in [
        (("--predict", "nowhere", "x.png"), 2, "nowhere: expected the folder of a run, or a snapshot in one"),
        (("--predict", "run.yaml", "x.png"), 2, "run.yaml: the snapshot is damaged"),
        (("--export", "nowhere", "x.safetensors"), 2, "nowhere: expected the folder of a run, or a snapshot in one"),
        (("--export", ".", "x.safetensors"), 2, ".: no complete snapshot in it"),
        (("--export", "result", "nowhere/x.safetensors"), 2, "nowhere/x.safetensors: No such file or directory"),
        (("--export", "result", "result"), 2, "expected one file to write"),
        (("--report", "nowhere"), 2, "nowhere: expected the folder of a run"),
        (("--audit", "nowhere"), 2, "nowhere/audit: expected the files of an audit"),
        (("--evaluate", "nowhere"), 2, "nowhere/config.yaml: the configuration cannot be read"),
    ]:
        got, _, err = run(*words)
        assert (got, expected in err, "Traceback" in err) == (code, True, False), (words, got, err)


@pytest.mark.slow
def test_a_full_disk_is_said_with_the_file(run, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    run("run.yaml", "model=mlp", "transforms.train=[]")
    monkeypatch.setattr(commands.weights, "export", full)
    monkeypatch.setattr(commands.report, "write", full)
    for words in (("--export", "result", "x.safetensors"), ("--report", "result")):
        code, _, err = run(*words)
        assert (code, err) == (2, f"dbrdist-train: {words[-1]}: No space left on device\n")


@pytest.mark.slow
def test_names_of_values_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    log = [{"epoch": 1, "main/$\\frac$": 2.0}, {"epoch": 2, "main/$\\frac$": 1.0}]
    (path,) = report._pictures(RunRecord("run", "run", {}, log, ""), str(tmp_path))
    assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_pictures_show_the_curves_and_mark_a_single_point(monkeypatch, tmp_path):
    drawn = []
    axes = SimpleNamespace(
        set=lambda **words: drawn.append(words),
        legend=lambda: drawn.append("legend"),
    )
    plotting = SimpleNamespace(
        is_installed=lambda: True, new_figure=lambda *size: drawn.append(size) or ("figure", ((axes,),)),
        draw_grid=lambda *given: drawn.append(given[1:]), save_figure=lambda *given: drawn.append(given),
        draw_line=lambda to, points, **style: drawn.append((to is axes, points, style)),
    )  # fmt: skip
    monkeypatch.setattr(report, "plotting", plotting)
    log = [{"epoch": 1, "main/loss": 2.0, "lr": 0.5}, {"epoch": 2, "main/loss": 1.0}]
    one = RunRecord("run", "run", {}, log, "")
    paths = [str(tmp_path / f"{name}.png") for name in ("loss", "learning_rate")]
    assert report._pictures(one, str(tmp_path)) == paths
    blue = colour(0)
    assert drawn == [
        (1, 1, (7, 4)), (True, [(1.0, 2.0), (2.0, 1.0)], {"color": blue, "label": "training", "marker": ""}),
        {"title": "Loss", "xlabel": "epoch"}, (True,), "legend", ("figure", paths[0]),
        (1, 1, (7, 4)), (True, [(1.0, 0.5)], {"color": blue, "label": "", "marker": "o"}),
        {"title": "Learning rate", "xlabel": "epoch"}, (True,), ("figure", paths[1]),
    ]  # fmt: skip
    plotting.is_installed = lambda: False
    assert report._pictures(one, str(tmp_path)) == []


def test_long_names_of_metrics_fit_into_names_of_files():
    names = ["m" * 250 + end for end in "ab"] + ["é" * 150]
    assert report._short("loss") == "loss"
    cut = [report._short(name) for name in names]
    assert len(set(cut)) == 3 and all(len(name.encode()) < 220 for name in cut)
