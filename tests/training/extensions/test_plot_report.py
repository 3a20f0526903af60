"""Tests of dbrdist.training.extensions.plot_report."""

from __future__ import annotations

import builtins
import importlib.util
import json

import numpy as np
import pytest

from dbrdist import Variable
from dbrdist.training import extensions, plotting
from tests.training.training_helpers import Clock, Line, make_trainer, restore, saved


@pytest.fixture
def figures(monkeypatch):
    """What would be written, as pairs of a figure and a path: writing takes most of the time."""
    kept = []
    monkeypatch.setattr(plotting, "save_figure", lambda figure, path, legends: kept.append((figure, path)))
    return kept


_is_installed = pytest.mark.skipif(not plotting.is_installed(), reason="matplotlib (the extra plot) is missing")


def draws_slowly(test):
    """It takes half a second to load in each worker."""
    return pytest.mark.slow(_is_installed(test))


@pytest.fixture
def no_matplotlib(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))


class Curves:
    """A `postprocess` that keeps what is drawn."""

    def __call__(self, figure, axes, summary):
        self.axes = axes
        self.summary = summary
        self.lines = {line.get_label(): np.array(line.get_data()).T.tolist() for line in axes.get_lines()}


def at(tmp_path, clock):
    clock.out, clock.is_before_training = str(tmp_path), False
    return clock


@pytest.mark.filterwarnings("ignore:PlotReport:dbrdist.errors.UsageWarning")
@pytest.mark.slow
@draws_slowly
def test_curves_are_means_over_intervals(tmp_path):
    seen = Curves()
    extension = extensions.PlotReport(["a", "b", "never"], "iteration", (2, "iteration"), seen, "my.png", grid=False)
    clock = at(tmp_path, Clock())
    for a, b in ((1.0, 5.0), (3.0, None), (np.float32(4), None), (Variable(np.array(8.0)), None)):
        extension(clock.tick(**{"a": a} if b is None else {"a": a, "b": b}))
    assert seen.lines == {"a": [[2, 2], [4, 6]], "b": [[2, 5]]}
    assert seen.summary.compute_mean() == {"a": 6}
    assert seen.axes.get_xlabel() == "iteration"
    assert (tmp_path / "my.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@draws_slowly
@pytest.mark.parametrize(("x_key", "xs"), [("epoch", [1, 2]), ("time", [3.0, 11.0])])
def test_the_horizontal_axis_is_chosen(tmp_path, figures, x_key, xs):
    seen, clock = Curves(), at(tmp_path, Clock(2))
    extension = extensions.PlotReport("a", x_key, (1, "epoch"), seen)
    for t in (1.0, 5.0, 9.0, 13.0):
        extension(clock.tick(a=0.0, time=t))
    assert [x for x, _ in seen.lines["a"]] == xs
    assert figures[-1][1] == str(tmp_path / "plot.png")


@draws_slowly
@pytest.mark.parametrize("x_key", ["epoch", "iteration"])
def test_numbers_that_count_are_marked_where_they_are_whole(tmp_path, figures, x_key):
    seen, clock = Curves(), at(tmp_path, Clock(1))
    extension = extensions.PlotReport("a", x_key, (1, "iteration"), seen)
    for _ in range(2):
        extension(clock.tick(a=0.0))
    marks = seen.axes.get_xticks()
    assert len(marks) and marks.tolist() == np.round(marks).tolist()


@draws_slowly
def test_nothing_observed_draws_nothing(tmp_path):
    extension, clock = extensions.PlotReport(["a"], trigger=(1, "iteration")), at(tmp_path, Clock())
    extension(clock.tick(b=1.0))
    assert list(tmp_path.iterdir()) == []


@draws_slowly
def test_an_unknown_horizontal_axis_is_named(tmp_path):
    extension, clock = extensions.PlotReport(["a"], "step", (1, "iteration")), at(tmp_path, Clock())
    with pytest.raises(ValueError, match="x_key: expected 'iteration', 'epoch' or a value that was observed, got 'st"):
        extension(clock.tick(a=1.0))


@draws_slowly
def test_numbers_that_are_none_do_not_stop_the_drawing(tmp_path):
    extension, clock = extensions.PlotReport(["a"], trigger=(1, "iteration")), at(tmp_path, Clock())
    for value in (float("nan"), float("inf"), -float("inf"), 1e300):
        extension._add_points(clock.tick(), {"a": value})
    extension(clock.tick(a=1.0))
    assert (tmp_path / "plot.png").stat().st_size > 1000


@draws_slowly
def test_curves_go_on_after_a_restart(tmp_path, figures):
    seen, clock = Curves(), at(tmp_path, Clock())
    make = lambda: extensions.PlotReport(["a"], trigger=(2, "iteration"), postprocess=seen)  # noqa: E731
    first = make()
    for value in (1.0, 2.0, 3.0):
        first(clock.tick(a=value))
    second = restore(saved(first), make())
    second(clock.tick(a=7.0))
    assert seen.lines == {"a": [[2, 1.5], [4, 5]]}


@draws_slowly
def test_a_run_draws_its_loss_and_a_snapshot_keeps_the_points(tmp_path):
    seen = [Curves(), Curves()]
    for stop, curves in zip((2, 4), seen):
        trainer = make_trainer(tmp_path, stop=(stop, "epoch"))
        trainer.extend(extensions.PlotReport(["main/loss"], "epoch", postprocess=curves, file_name="loss.svg"))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.snapshot(autoload=True))
        trainer.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    drawn = seen[1].lines["main/loss"]
    assert drawn == [[entry["epoch"], pytest.approx(entry["main/loss"])] for entry in log]
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()


def test_without_matplotlib_a_run_warns_and_goes_on(tmp_path, no_matplotlib, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        assert not name.startswith("matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    trainer = make_trainer(tmp_path)
    model = trainer.updater.get_optimizer("main").target
    with pytest.warns(UserWarning, match="matplotlib is not installed, so nothing is plotted; pip install"):
        trainer.extend(extensions.PlotReport(["main/loss"]))
    with pytest.warns(UserWarning, match="matplotlib is not installed") as warned:
        trainer.extend(extensions.VariableStatisticsPlot(model))
        assert not extensions.PlotReport.available()
    assert {w.filename for w in warned} <= {__file__, extensions.variable_statistics_plot.__file__}
    trainer.run()
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("name", ["PlotReport", "VariableStatisticsPlot", "DumpGraph"])
def test_unknown_keywords_are_refused(name):
    target = Line() if name == "VariableStatisticsPlot" else "loss"
    with pytest.raises(TypeError, match=f"{name}\\(\\) got unknown arguments: colour"):
        getattr(extensions, name)(target, colour="red")


@draws_slowly
def test_the_whole_figure(tmp_path, figures):
    seen, clock = Curves(), at(tmp_path, Clock(2))
    extension = extensions.PlotReport(["a", "b"], "iteration", (1, "iteration"), seen)
    for a in (3.0, 5.0):
        extension(clock.tick(a=a, b=-a))
    figure, path = figures[-1]
    (axes,) = figure.axes
    assert path == str(tmp_path / "plot.png") and axes is seen.axes and len(figures) == 2
    assert [(line.get_label(), line.get_marker(), line.get_xydata().tolist()) for line in axes.get_lines()] == [
        ("a", "x", [[1, 3], [2, 5]]), ("b", "x", [[1, -3], [2, -5]]),
    ]  # fmt: skip
    assert (axes.get_xlabel(), axes.get_legend() is not None) == ("iteration", True)
    assert axes.get_xgridlines()[0].get_visible() and axes.get_xgridlines()[0].get_alpha() == 0.4
    plain = extensions.PlotReport("a", "a", (1, "iteration"), seen, marker=None, grid=False)
    plain(clock.tick(a=0.25))
    (axes,) = figures[-1][0].axes
    assert not axes.get_xgridlines()[0].get_visible() and axes.get_lines()[0].get_marker() == "None"
    assert any(mark != round(mark) for mark in axes.get_xticks())  # a quantity that does not count


@draws_slowly
def test_before_the_first_step_and_at_each_epoch(tmp_path, figures):
    """Defaults: x_key iteration, each epoch; one before training where it is asked for."""
    seen, clock = Curves(), at(tmp_path, Clock(2))
    extension = extensions.PlotReport(["a"], postprocess=seen)
    clock.is_before_training, clock.observation = True, {"a": 7.0}
    extension(clock)
    clock.is_before_training = False
    for a in (1.0, 3.0, 5.0, 9.0):
        extension(clock.tick(a=a))
    assert seen.lines == {"a": [[0, 7], [2, 2], [4, 7]]} and len(figures) == 3


@draws_slowly
def test_a_key_that_nobody_reports_is_said_after_an_epoch(tmp_path, figures):
    clock = at(tmp_path, Clock(2))
    extension = extensions.PlotReport(["a", "b"], trigger=(1, "iteration"))
    extension(clock.tick(a=1.0))
    with pytest.warns(UserWarning, match="PlotReport: nobody has reported 'b' so far; reported are a$") as caught:
        extension(clock.tick(a=1.0))
        extension(clock.tick(a=1.0))
    assert len(caught) == 1


@draws_slowly
def test_a_figure_is_written_whole(tmp_path):
    """Words may have halves of letters; numbers near the largest are drawn below it."""
    figure, ((axes,),) = plotting.new_figure(1, 1, (2, 1))
    plotting.draw_line(axes, [(0, 1e308), (1, -1e308), (2, float("inf")), (3, 2.0)], label="a\ud800")
    assert axes.get_lines()[0].get_ydata().tolist() == [1e306, -1e306, float("inf"), 2.0]
    axes.set_title("half \ud800")
    legend = axes.legend(**plotting.BESIDE)
    plotting.save_figure(figure, str(tmp_path / "a.PNG"), [legend])
    assert axes.get_title() == "half \\ud800"
    header = (tmp_path / "a.PNG").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(header[16:20]) > 240  # 2 inches, and the legend
    plotting.save_figure(figure, str(tmp_path / "none"))
    plotting.save_figure(figure, str(tmp_path / "a.svg"))
    assert (tmp_path / "none").read_bytes()[:4] == b"\x89PNG" and b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert plotting.BESIDE == {"bbox_to_anchor": (1.03, 1), "loc": "upper left", "borderaxespad": 0.0}
