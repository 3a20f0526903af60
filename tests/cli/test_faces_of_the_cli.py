"""Charts, pages, sentences and small helpers of the command line, each beside values worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.cli import beats, chart, memory, meter, provenance, report, train
from dbrdist.cli import run as runs
from dbrdist.cli.chart import COLOURS, Series
from dbrdist.cli.document import read
from dbrdist.cli.folder import KILLED, LOCK, SUMMARY, RunFolder, earlier_starts, read_json, write_json
from dbrdist.comm import create_communicator
from dbrdist.training.triggers import TimeTrigger
from tests.each import each

# ---- charts ---------------------------------------------------------------------------------------------------------


def test_a_chart_from_end_to_end():
    """560 x 300 with 62 px at the left, 14 at the right, 34 above and 40 below: 484 x 226 for the lines."""
    series = [Series("a<b", [(0, 10.0), (2, 20.0)], "red"), Series("test", [(1, 15.0)], "blue", dashed=True)]
    grid = "".join(
        f'<path d="M62 {y}H546" class="grid"/><text x="56.0" y="{words}" class="tick" text-anchor="end">{tick}</text>'
        for y, words, tick in (
            ("251.6", "255.6", 10), ("147.0", "151.0", 15), ("42.4", "46.4", 20),
        )
    )  # fmt: skip
    below = "".join(
        f'<text x="{x}" y="276" class="tick" text-anchor="middle">{tick}</text>'
        for x, tick in (("62.0", "0"), ("183.0", "0.5"), ("304.0", "1"), ("425.0", "1.5"), ("546.0", "2"))
    )
    assert chart.chart('"loss"', "epoch>", series) == (
        '<svg viewBox="0 0 560 300" role="img" aria-label="&quot;loss&quot;">'
        f'<text x="62" y="18" class="title">&quot;loss&quot;</text>{grid}{below}'
        '<text x="546" y="294" class="tick" text-anchor="end">epoch&gt;</text>'
        '<path d="M62.0 251.6L546.0 42.4" class="line" stroke="red"/>'
        '<circle cx="304.0" cy="147.0" r="3" fill="blue"/>'
        '<text x="520.4" y="18" class="tick">test</text>'
        '<path d="M496.4 14h18" class="line" stroke="blue" stroke-dasharray="5 4"/>'
        '<text x="467.2" y="18" class="tick">a&lt;b</text>'
        '<path d="M443.2 14h18" class="line" stroke="red"/></svg>'
    )


@each(
    case=[
        (0.0, 0.0, (-1.0, 1.0)), (-5.0, -5.0, (-5.5, -4.5)), (20.0, 20.0, (18.0, 22.0)), (10.0, 20.0, (9.6, 20.4)),
        (0.0, 10.0, (0.0, 10.4)), (3.0, 13.0, (0.0, 13.4)), (3.2, 13.2, (2.8, 13.6)), (-1.0, 9.0, (-1.4, 9.4)),
    ]
)  # fmt: skip
def test_the_room_of_an_axis(case):
    low, high, expected = case
    np.testing.assert_allclose(chart._room(low, high), expected)


def test_a_single_point_stands_in_the_middle():
    text = chart.chart("t", "x", [Series("", [(4, 1.0)], "red")])
    assert '<circle cx="304.0" cy="147.0" r="3" fill="red"/>' in text  # 62 + 484 / 2, 34 + 226 / 2


# ---- pages ----------------------------------------------------------------------------------------------------------


def record(name, log, **summary):
    return report.RunRecord(f"runs/{name}", name, {"status": "finished", **summary}, log, f"epochs: 3\nout: {name}\n")


LOG = [{"epoch_detail": 0.5, "main/loss": 2.0, "validation/main/loss": 3.0, "lr": 0.1}, {"epoch": 1, "main/loss": 1.0}]


def test_curves_of_one_run_are_told_apart_by_what_they_show():
    assert list(report.curves([record("a", LOG)])) == [
        ("Loss", "loss", [
            Series("training", [(0.5, 2.0), (1.0, 1.0)], COLOURS[0]), Series("test", [(0.5, 3.0)], COLOURS[1]),
        ]),
        ("Learning rate", "learning_rate", [Series("", [(0.5, 0.1)], COLOURS[0])]),
    ]  # fmt: skip


def test_curves_of_several_runs_have_a_colour_each_and_dashes_for_training():
    runs_ = [record("a", LOG), record("b", LOG[1:])] + [record(f"r{k}", []) for k in range(7)] + [record("z", LOG[1:])]
    assert list(report.curves(runs_)) == [
        ("Loss", "loss", [
            Series("a training", [(0.5, 2.0), (1.0, 1.0)], COLOURS[0], True),
            Series("a test", [(0.5, 3.0)], COLOURS[0]),
            Series("b training", [(1.0, 1.0)], COLOURS[1], True), Series("z training", [(1.0, 1.0)], COLOURS[1], True),
        ]),
        ("Learning rate", "learning_rate", [Series("a", [(0.5, 0.1)], COLOURS[0])]),
    ]  # fmt: skip


def test_what_stands_at_the_head_of_a_page():
    log = [{"epoch": 1, "validation/main/accuracy": 0.51236, "validation/main/loss": 1.23456, "main/loss": 0.5}]
    first, second = record("<a>", log), record("b", [], status="failed")
    words = ", test accuracy 51.24%, test loss 1.235, training loss 0.5"
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


# ---- sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: @n", "found character '@' that cannot start any token (while scanning for the next token); put the text "
                  "in quotes"),
        ("a: `n", "found character '`' that cannot start any token (while scanning for the next token); put the text "
                  "in quotes"),
        ("a: \tb\n\tc: 1", "found character '\\t' that cannot start any token (while scanning for the next token); "
                  "indent with spaces, not with tabs"),
        ("a: *n", "found undefined alias 'n'"),
        ("a: %n", "found character '%' that cannot start any token (while scanning for the next token)"),
    ],
    ids=["at", "backtick", "tab", "alias", "percent"],
)  # fmt: skip
def test_mistakes_of_yaml_have_their_context_and_what_to_do(text, sentence):
    (problem,) = read(text, "f").problems
    assert problem.partition(": ")[2] == sentence


@each(case=[(1, 0, []), (1, 1, [5.0]), (2, 0, [0.3]), (2, 1, [5.0, 0.3])])
def test_a_refusal_waits_for_rank_0_and_for_its_words_to_arrive(case):
    size, rank, expected = case
    happened = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.environment, "launched", lambda: (size, rank, ""))
        patch.setattr(train.time, "sleep", happened.append)
        patch.setattr(train, "_complain", happened.append)
        assert train._refuse_before_mpi("wrong", 2) == 2
    assert happened == [*(seconds for seconds in expected if seconds > 1), "wrong", *(s for s in expected if s < 1)]


def test_what_was_printed_goes_out_before_a_complaint(monkeypatch):
    happened = []
    monkeypatch.setattr(train.sys, "stdout", SimpleNamespace(flush=lambda: happened.append("flush")))
    monkeypatch.setattr(train.os, "write", lambda descriptor, data: happened.append((descriptor, data)))
    train._complain("wrong \udcff")
    monkeypatch.undo()
    assert happened == ["flush", (2, b"wrong \\udcff\n")]


# ---- of a run -------------------------------------------------------------------------------------------------------


def test_snapshots_by_time_come_after_seconds_minutes_and_hours():
    agreement = SimpleNamespace(elapsed_time=lambda trainer: 0.0)
    for text, seconds in (("2.5 second", 2.5), ("3 minute", 180.0), ("0.5 hour", 1800.0)):
        made = runs.trigger_of(text, agreement)
        assert isinstance(made, TimeTrigger) and made.period == seconds
        assert runs.uses_time(f"1 epoch or {text}")
    assert not runs.uses_time("1 epoch or 20 iteration")


def test_a_run_that_is_taken_up_again_is_told_how_it_stood(tmp_path):
    for before, after in (
        ({"status": "running", "reason": None, "iterations": 7},
         {"status": "failed", "reason": KILLED, "iterations": 7}),
        ({"status": "stopped", "reason": "asked"}, {"status": "stopped", "reason": "asked"}),
        ({"status": "finished"}, {"status": "finished"}), ({}, {}),
    ):  # fmt: skip
        write_json(str(tmp_path / SUMMARY), before)
        folder = RunFolder(str(tmp_path))
        folder.open("resume")
        folder.close()
        assert folder.summary == after and not (tmp_path / LOCK).exists()


def test_earlier_starts_keep_what_tells_them_apart():
    start = {"status": "stopped", "reason": "asked", "began": "1", "ended": "2", "iterations": 3, "command": "c",
             "hosts": {"a": 1}, "version": "v", "commit": "d"}  # fmt: skip
    assert earlier_starts({}) == [] == earlier_starts({"earlier_starts": [1]})
    assert earlier_starts({**start, "seed": 1}) == [start]
    assert earlier_starts({"status": "failed", "earlier_starts": [start]}) == [start, {"status": "failed"}]


def test_a_summary_is_no_longer_than_it_may_be(tmp_path):
    """While a run goes on, 16 KiB of blanks follow its summary; the end is written over them where the disk is full."""
    folder = RunFolder(str(tmp_path))
    folder.write_status("running", began="now")
    path = tmp_path / SUMMARY
    text = '{\n  "status": "running",\n  "reason": null,\n  "began": "now"\n}\n'
    assert path.read_text() == text + " " * 16384
    folder.write_status("failed", "why")
    assert path.read_text() == text.replace("running", "failed").replace("null", '"why"')
    assert read_json(str(path)) == {"status": "failed", "reason": "why", "began": "now"}


def test_an_evaluation_ends_what_it_began(monkeypatch, capsys):
    happened = []

    class Evaluation:
        def __call__(self, trainer):
            happened.append((self.name, trainer))
            return {"validation/main/loss": np.float32(0.5)}

        def finalize(self):
            happened.append("finalized")

    made = SimpleNamespace(data=SimpleNamespace(test=[1]), task="task")
    monkeypatch.setattr(runs.build, "find_images", lambda *arguments: None)
    monkeypatch.setattr(runs, "parts", lambda *arguments: made)
    monkeypatch.setattr(runs, "find_snapshot", lambda folder: f"{folder}/snapshot")
    monkeypatch.setattr(runs, "load_weights", lambda *arguments: happened.append(arguments))
    monkeypatch.setattr(runs, "evaluator", lambda *arguments: Evaluation())
    runs.evaluate(None, None, create_communicator("naive"), "run")
    assert happened == [("run/snapshot", "task"), ("validation", None), "finalized"]
    assert capsys.readouterr().out == '{"snapshot": "run/snapshot", "validation/main/loss": 0.5}\n'


def test_the_commit_is_told_with_its_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def git(*words):
        return subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout

    assert provenance.commit(str(tmp_path)) is None
    git("init", "-q")
    assert provenance.commit(str(tmp_path)) is None
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD").strip()
    assert len(head) == 40 and provenance.commit(str(tmp_path)) == head
    (tmp_path / "file").write_text("bc")
    assert provenance.commit(str(tmp_path)) == f"{head}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit(str(tmp_path)) is None


def test_the_facts_of_a_start(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["/bin/dbrdist-train", "a b.yaml", "seed=1"])
    monkeypatch.setattr(provenance.socket, "gethostname", lambda: "here")
    monkeypatch.chdir(tmp_path)
    found = provenance.facts(create_communicator("naive"))
    assert found.pop("versions") == {"python": ".".join(map(str, sys.version_info[:3])), "numpy": np.__version__}
    assert found.pop("version") and found.pop("commit") == provenance.commit(str(tmp_path))
    assert found == {
        "command": "dbrdist-train 'a b.yaml' seed=1", "directory": str(tmp_path), "pid": os.getpid(),
        "hosts": {"here": 1}, "communicator": "naive", "num_ranks": 1,
    }  # fmt: skip


def test_memory_that_a_step_gives_back_counts():
    class Task:
        num_cleared = 0

        def cleargrads(self):
            self.num_cleared += 1

        def __call__(self, inputs, scale):
            assert tracemalloc.is_tracing() and inputs.shape == (3,) and scale == 2
            return self

        def backward(self):
            np.ones(1 << 20)

    look = SimpleNamespace(arguments=lambda number: ((np.ones(number),), {"scale": 2}))
    task = Task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "reporter", lambda task: memory.contextlib.nullcontext())
        peak = memory._peak_bytes(look, task, 3)
    assert 8 << 20 <= peak < 9 << 20 and task.num_cleared == 1 and not tracemalloc.is_tracing()


def test_the_speed_between_two_looks():
    assert meter._speed((1.0, 10.0, 0.5, 0.25), (3.0, 50.0, 1.0, 0.5)) == (20.0, 0.25, 0.125)
    assert meter._speed((1.0, 10.0, 0.5, 0.25), (3.0, 50.0, 9.0, 9.0)) == (20.0, 1.0, 1.0)
    for after in ((1.0, 50.0, 9.0, 9.0), (0.5, 50.0, 9.0, 9.0)):
        assert meter._speed((1.0, 10.0, 0.5, 0.25), after) == (None, 0.0, 0.0)


@pytest.mark.parametrize("is_active", [False, True])
def test_a_run_under_the_launcher_beats_and_ends_its_pauses(run, monkeypatch, is_active):
    from dbrdist_launch import heartbeat

    said = []
    writer = SimpleNamespace(
        beat=lambda step, fields: said.append((step, sorted(fields))), pause=lambda: said.append("pause")
    )
    monkeypatch.setattr(heartbeat, "_writer", writer if is_active else None)
    assert beats.expected() == is_active
    code, out, _ = run("run.yaml", "model=mlp", "iterations=2")
    summary = read_json(f"result/{SUMMARY}")
    assert code == 0 and "\nmemory: about " in out and 0 < summary["seconds"] < 1e6
    wanted = [said for step in (1, 2) for said in ((step, ["epoch", "loss"]), "pause", (step, []))]
    assert said == (wanted if is_active else [])
