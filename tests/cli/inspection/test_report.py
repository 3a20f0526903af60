"""What people see of a run: the table, the page, predictions, weights."""

from __future__ import annotations

import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli.inspection import commands, report
from dbrdist.cli.output.folder import CONFIG, LOG, SUMMARY
from dbrdist.training.extensions.progress_bar import duration
from tests.cli.cli_helpers import lines
from tests.each import each


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
    assert "lr: 0.05" in page and "lr: 0.1" in page and "batch: 100" not in page
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
        (("--export", ".", "x.safetensors"), 2, ".: expected a snapshot in it"),
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


@each(
    case=[
        (None, ""), (True, "True"), (12345, "12,345"), (999.94, "999.9"), (1000.0, "1,000"), (-999.9, "-999.9"),
        (-1234.5, "-1,234"), (0.123456, "0.1235"), ({"a": 1, "b": 2}, "a 1, b 2"), ("x", "x"),
    ]
)  # fmt: skip
def test_cells_of_a_report(case):
    assert report._shown(case[0]) == case[1]


def test_a_record_is_what_lies_in_the_folder(tmp_path):
    (tmp_path / SUMMARY).write_text('{"status": "finished", "seed": 3}')
    one = report.read(str(tmp_path))
    assert one == (str(tmp_path), tmp_path.name, {"status": "finished", "seed": 3}, [], "")
    (tmp_path / CONFIG).write_bytes(b"epochs: 3 # \xff\n")
    (tmp_path / LOG).write_text('{"epoch": 1}\n')
    assert report.read(str(tmp_path))[3:] == ([{"epoch": 1}], "epochs: 3 # \ufffd\n")


def test_pictures_show_the_curves_and_mark_a_single_point(monkeypatch, tmp_path):
    drawn = []
    axes = SimpleNamespace(
        plot=lambda *points, **style: drawn.append((points, style)), set=lambda **words: drawn.append(words),
        legend=lambda: drawn.append("legend"),
    )  # fmt: skip
    plotting = SimpleNamespace(
        is_installed=lambda: True, new_figure=lambda *size: drawn.append(size) or ("figure", ((axes,),)),
        draw_grid=lambda *given: drawn.append(given[1:]), save_figure=lambda *given: drawn.append(given),
    )  # fmt: skip
    monkeypatch.setattr(report, "plotting", plotting)
    log = [{"epoch": 1, "main/loss": 2.0, "lr": 0.5}, {"epoch": 2, "main/loss": 1.0}]
    one = report.RunRecord("run", "run", {}, log, "")
    paths = [str(tmp_path / f"{name}.png") for name in ("loss", "learning_rate")]
    assert report._pictures(one, str(tmp_path)) == paths
    blue = report.colour(0)
    assert drawn == [
        (1, 1, (7, 4)), (((1.0, 2.0), (2.0, 1.0)), {"color": blue, "label": "training", "marker": ""}),
        {"title": "Loss", "xlabel": "epoch"}, (True,), "legend", ("figure", paths[0]),
        (1, 1, (7, 4)), (((1.0,), (0.5,)), {"color": blue, "label": "", "marker": "o"}),
        {"title": "Learning rate", "xlabel": "epoch"}, (True,), ("figure", paths[1]),
    ]  # fmt: skip
    plotting.is_installed = lambda: False
    assert report._pictures(one, str(tmp_path)) == []


def record(name, log, **summary):
    return report.RunRecord(f"runs/{name}", name, {"status": "finished", **summary}, log, f"epochs: 3\nout: {name}\n")


def test_what_stands_at_the_head_of_a_page():
    log = [{"epoch": 1, "validation/main/accuracy": 0.51236, "validation/main/loss": 1.23456, "main/loss": 0.5}]
    first, second = record("<a>", log), record("b", [], status="failed")
    words = ", test accuracy 51.24 %, test loss 1.235, training loss 0.5"
    assert report._headline([first]) == f'<div><b class="finished">finished</b>{words}</div>'
    assert report._headline([first, second]) == (
        f'<div>&lt;a&gt;: <b class="finished">finished</b>{words}</div><div>b: <b class="failed">failed</b></div>'
    )
    assert report._headline([record("b", [], status="<running>")]) == '<div><b class="">&lt;running&gt;</b></div>'


def test_facts_are_shown_where_any_run_has_them():
    first, second = record("<a>", [], seed=0, iterations=1200, epochs=0, commit=""), record("b", [], reason="<stop>")
    assert report._facts([first]) == (
        "<table><tr><th>status</th><td>finished</td></tr><tr><th>steps</th><td>1,200</td></tr>"
        "<tr><th>seed</th><td>0</td></tr></table>"
    )
    assert report._facts([first, second]) == (
        "<table><tr><th></th><th>&lt;a&gt;</th><th>b</th></tr>"
        "<tr><th>status</th><td>finished</td><td>finished</td></tr>"
        "<tr><th>reason</th><td></td><td>&lt;stop&gt;</td></tr><tr><th>steps</th><td>1,200</td><td></td></tr>"
        "<tr><th>seed</th><td>0</td><td></td></tr></table>"
    )


def test_of_several_configurations_the_differences_are_shown():
    first, second = record("a", []), record("<b>", [])
    assert report._configurations([first]) == "<h2>Configuration</h2><pre>epochs: 3\nout: a\n</pre>"
    title = "<h2>What differs in the configuration of"
    assert report._configurations([first, second]) == (
        f"{title} a</h2><pre>out: a</pre>{title} &lt;b&gt;</h2><pre>out: &lt;b&gt;</pre>"
    )
    alike = "<pre>as the others&#x27;</pre>"
    assert report._configurations([first, first._replace(name="c")]) == f"{title} a</h2>{alike}{title} c</h2>{alike}"
    third = first._replace(name="c", config="epochs: 3\n  lr: 1\nout: a\n")
    assert report._configurations([first, second, third]) == (
        f"{title} a</h2><pre>out: a</pre>{title} &lt;b&gt;</h2><pre>out: &lt;b&gt;</pre>"
        f"{title} c</h2><pre>lr: 1\nout: a</pre>"
    )


def test_names_of_runs_are_paths_where_they_would_be_alike():
    found = report._distinct([record("a", []), record("b", []), record("a", [])._replace(path="other/a")])
    assert [run.name for run in found] == ["runs/a", "b", "other/a"]


@each(n=[0, 1, 2, 999, 1000, 1001, 1002, 2000, 2001, 2002, 2999, 3000, 3001])
def test_a_line_has_about_a_thousand_points_with_all_extremes_and_ends_at_its_end(n):
    values = [math.sin(k) + 900 * (k == n // 3) - 700 * (k == n // 2) for k in range(n)]
    log = [{"epoch_detail": float(k), "loss": v} for k, v in enumerate(values)] + [{"epoch": 3}, {"loss": "text"}]
    log += [{"loss": None}, {"loss": math.nan}, {"loss": math.inf}, {"loss": True}]
    points = report._points(log, "loss")
    ends = [(float(k), values[k]) for k in ([0, n - 1] if n else [])]
    assert len(points) <= 1002 and points == sorted(points) and points[:1] + points[-1:] == ends
    assert set(points) <= set(enumerate(values)) and (n > 1000 or len(points) == n)
    assert [f(v for _, v in points) for f in (min, max) if n] == [f(values) for f in (min, max) if n]
