"""The graph of the first step as a file, and statistics of parameters."""

from __future__ import annotations

import os
import re
import stat
import sys

import numpy as np
import pytest
from training_helpers import Clock, Line, make_trainer, restore, saved

import dbrdist
from dbrdist import Reporter, report_scope
from dbrdist.core.config import config
from dbrdist.training import extensions
from dbrdist.training.extensions import computational_graph


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


# ---- statistics of parameters ---------------------------------------------------------------------------------------


def observed(extension, clock):
    """What the extension reports at one step."""
    observation = {}
    with Reporter(), report_scope(observation):
        extension(clock.tick())
    return observation


def test_statistics_are_numpys():
    link = dbrdist.Link(W=(3, 4))
    x, g = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    x[0] = 0
    link.W.array[...] = x
    link.W.grad = g
    link.name = "net"
    found = observed(extensions.ParameterStatistics(link, prefix="p", trigger=(1, "iteration")), Clock())
    for attribute, a in (("data", x), ("grad", g)):
        flat = a.ravel().astype(np.float64)
        percentiles = np.percentile(flat, [0.13, 2.28, 15.87, 50, 84.13, 97.72, 99.87])
        expected = {"mean": flat.mean(), "std": flat.std(), "min": flat.min(), "max": flat.max()}
        expected |= {"zeros": 4 if attribute == "data" else 0}
        expected |= {f"percentile/{i}": v for i, v in enumerate(percentiles)}
        for name, value in expected.items():
            assert found.pop(f"p/net/W/{attribute}/{name}") == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert found == {}


def test_means_over_an_interval_are_reported():
    functions = {"first": lambda x: x[0], "both": lambda x: np.array([x[0], 1.0])}
    options = {"report_grads": False, "trigger": (2, "iteration")}
    model, clock = Line(), Clock()
    extension = extensions.ParameterStatistics([model], functions, **options)
    extension.register_statistics("size", lambda x: x.size)
    model.w.array[...] = 1
    assert observed(extension, clock) == {}
    resumed = restore(saved(extension), extensions.ParameterStatistics(model, functions, **options))
    model.w.array[...] = 4
    found = observed(extension, clock)
    assert found["None/w/data/first"] == 2.5 and found["None/w/data/size"] == 1
    assert (found["None/w/data/both/0"], found["None/w/data/both/1"]) == (2.5, 1)
    observation = {}
    with Reporter(), report_scope(observation):
        resumed(clock)
    assert observation["None/w/data/first"] == 2.5
    model.w.array[...] = 9
    observed(extension, clock)
    assert observed(extension, clock)["None/w/data/first"] == 9  # begun anew


def test_parameters_without_values_or_gradients_are_left_out():
    link = dbrdist.Link()
    link.add_param("late")
    link.add_param("empty", (0, 3))
    link.add_param("there", (2,), initializer=1)
    found = observed(extensions.ParameterStatistics(link, {"sum": np.sum}, trigger=(1, "iteration")), Clock())
    assert found == {"None/there/data/sum": 2}


def test_functions_need_not_see_nan():
    link = dbrdist.Link(W=(2,))  # NaN until something is assigned
    options = {"report_grads": False, "trigger": (1, "iteration")}
    found = observed(
        extensions.ParameterStatistics(link, {"f": lambda x: 1 / 0}, skip_nan_params=True, **options), Clock()
    )
    assert np.isnan(found["None/W/data/f"])
    assert observed(extensions.ParameterStatistics(link, None, **options), Clock()) == {}
    with pytest.raises(ValueError, match="statistics: expected 'default' or functions, got 'mean'"):
        extensions.ParameterStatistics(link, "mean")


def test_statistics_are_there_for_the_log(tmp_path):
    trainer = make_trainer(tmp_path, stop=(2, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.ParameterStatistics(model))
    trainer.run()
    assert "parameter_statistics" in trainer._extensions
    entry = trainer.get_extension("LogReport").log[1]
    assert entry["None/w/data/max"] >= entry["None/w/data/mean"] == entry["None/w/data/min"]
