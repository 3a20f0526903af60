"""Tests of dbrdist.training.extensions.computational_graph."""

from __future__ import annotations

import os
import re
import stat
import sys

import pytest

import dbrdist
from dbrdist.core.array.config import config
from dbrdist.training import extensions
from dbrdist.training.extensions import computational_graph
from tests.training.training_helpers import make_trainer


@pytest.fixture
def no_graphviz(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))


def test_the_first_step_alone_is_dumped(tmp_path, no_graphviz):
    kept, times = [], []
    trainer = make_trainer(tmp_path)
    trainer.extend(extensions.DumpGraph("main/loss", function_style={"shape": "box"}))

    def watch(trainer):
        kept.append(isinstance(trainer.observation["main/loss"], dbrdist.Variable))
        times.append((tmp_path / "cg.dot").stat().st_mtime_ns)

    trainer.extend(watch, priority=-10)
    trainer.run()
    assert kept[0] and not any(kept[1:]) and len(set(times)) == 1 and not config.keep_graph_on_report
    text = (tmp_path / "cg.dot").read_text()
    assert text.startswith("digraph graphname{rankdir=TB;\n") and text.endswith("\n}")
    nodes = dict(re.findall(r'^(\d+) \[.*label="([^"]*)"\];$', text, re.M))
    assert {"w: (1), float64", "b: (1), float64", "float64"} <= set(nodes.values())
    assert len(re.findall(r'shape="box"', text)) == len([name for name in nodes.values() if "float" not in name])
    edges = re.findall(r"^(\d+) -> (\d+);$", text, re.M)
    assert {name for pair in edges for name in pair} == set(nodes)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".png"] == []


def test_two_graphs_of_one_run(tmp_path, no_graphviz):
    trainer = make_trainer(tmp_path, stop=(2, "iteration"))
    for name in ("a.dot", "b.dot"):
        trainer.extend(extensions.DumpGraph("main/loss", name))
    trainer.run()
    texts = [re.sub(r"\d{6,}", "id", (tmp_path / name).read_text()) for name in ("a.dot", "b.dot")]
    assert texts[0] == texts[1]
    assert not config.keep_graph_on_report and "keep_graph_on_report" not in config._record.own


def test_a_snapshot_knows_that_the_graph_is_dumped(tmp_path, no_graphviz):
    first = make_trainer(tmp_path, stop=(1, "epoch"))
    first.extend(extensions.dump_graph("main/loss", "a.dot"))
    first.extend(extensions.snapshot())
    first.run()
    (tmp_path / "a.dot").unlink()
    second = make_trainer(tmp_path, stop=(2, "epoch"))
    second.extend(extensions.dump_graph("main/loss", out_name="a.dot"))
    second.extend(extensions.snapshot(autoload=True))
    second.run()
    assert not (tmp_path / "a.dot").exists() and not config.keep_graph_on_report


@pytest.mark.parametrize(
    ("root", "error", "words"),
    [
        ("main/lost", ValueError, "expected a value that was observed (main/loss, ten), got 'main/lost'"),
        ("ten", TypeError, "DumpGraph: expected a Variable as 'ten', got int"),
    ],
)
def test_a_root_that_is_no_variable_is_refused(tmp_path, capsys, root, error, words):
    trainer = make_trainer(tmp_path)
    trainer.extend(lambda trainer: trainer.observation.update(ten=10), name="ten", priority=300)
    trainer.extend(extensions.DumpGraph(root))
    with pytest.raises(error, match=re.escape(words)):
        trainer.run()
    assert not config.keep_graph_on_report


def test_a_run_that_fails_before_the_dump_leaves_the_switch_as_it_was(tmp_path, capsys):
    trainer = make_trainer(tmp_path, converter=lambda batch, device: 1 / 0)
    trainer.extend(extensions.DumpGraph("main/loss"))
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert not config.keep_graph_on_report and "keep_graph_on_report" not in config._record.own


def fake_dot(folder, monkeypatch, body):
    """A program `dot` of ours first in the path."""
    program = folder / "bin" / "dot"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_graphviz_draws_a_picture(tmp_path, monkeypatch):
    body = "if sys.argv[1] != '-V': open(sys.argv[4], 'w').write(' '.join(sys.argv[1:4]))"
    fake_dot(tmp_path, monkeypatch, body)
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))
    trainer.extend(extensions.DumpGraph("main/loss", "graph.dot"))
    trainer.run()
    assert (tmp_path / "graph.png").read_text() == f"-Tpng {tmp_path / 'graph.dot'} -o"


def test_a_broken_graphviz_is_as_none(tmp_path, monkeypatch):
    fake_dot(tmp_path, monkeypatch, "sys.exit(3)")
    assert not computational_graph.is_graphviz_available()
    assert computational_graph.is_return_code_zero([sys.executable, "-c", ""])
    assert not computational_graph.is_return_code_zero([str(tmp_path / "no-such-program")])


@pytest.mark.filterwarnings("ignore:.* is never called in this run")
def test_observed_values_keep_their_graphs_until_the_run_ends(tmp_path):
    trainer = make_trainer(str(tmp_path), (1, "epoch"))
    trainer.extend(extensions.DumpGraph("main/loss"), trigger=(100, "iteration"))
    kept = []
    trainer.extend(lambda t: kept.append(dbrdist.config.keep_graph_on_report), name="see", trigger=(1, "iteration"))
    assert not dbrdist.config.keep_graph_on_report
    trainer.run()
    assert kept and all(kept) and not dbrdist.config.keep_graph_on_report
