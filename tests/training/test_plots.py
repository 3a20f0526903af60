"""Images of curves: what is drawn, the files, resuming, and life without matplotlib."""

from __future__ import annotations

import builtins
import importlib.util
import io
import json

import numpy as np
import pytest
from training_helpers import Clock, Line, make_trainer, restore, saved

import dbrdist
from dbrdist import Variable
from dbrdist.training import extensions, plotting
from dbrdist.training.extensions.variable_statistics_plot import Reservoir, Statistician
from tests.each import each


@pytest.fixture
def figures(monkeypatch):
    """What would be written, as pairs of a figure and a path: writing takes most of the time."""
    kept = []
    monkeypatch.setattr(plotting, "save_figure", lambda figure, path, legends: kept.append((figure, path)))
    return kept


_is_installed = pytest.mark.skipif(not plotting.is_installed(), reason="matplotlib (the extra plot) is missing")


def needs_matplotlib(test):
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


@pytest.mark.slow
@needs_matplotlib
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


@needs_matplotlib
@pytest.mark.parametrize(("x_key", "xs"), [("epoch", [1, 2]), ("time", [3.0, 11.0])])
def test_the_horizontal_axis_is_chosen(tmp_path, figures, x_key, xs):
    seen, clock = Curves(), at(tmp_path, Clock(2))
    extension = extensions.PlotReport("a", x_key, (1, "epoch"), seen)
    for t in (1.0, 5.0, 9.0, 13.0):
        extension(clock.tick(a=0.0, time=t))
    assert [x for x, _ in seen.lines["a"]] == xs
    assert figures[-1][1] == str(tmp_path / "plot.png")


@needs_matplotlib
def test_nothing_observed_draws_nothing(tmp_path):
    extension, clock = extensions.PlotReport(["a"], trigger=(1, "iteration")), at(tmp_path, Clock())
    extension(clock.tick(b=1.0))
    assert list(tmp_path.iterdir()) == []


@needs_matplotlib
def test_an_unknown_horizontal_axis_is_named(tmp_path):
    extension, clock = extensions.PlotReport(["a"], "step", (1, "iteration")), at(tmp_path, Clock())
    with pytest.raises(ValueError, match="x_key: expected 'iteration', 'epoch' or a value that was observed, got 'st"):
        extension(clock.tick(a=1.0))


@needs_matplotlib
def test_numbers_that_are_none_do_not_stop_the_drawing(tmp_path):
    extension, clock = extensions.PlotReport(["a"], trigger=(1, "iteration")), at(tmp_path, Clock())
    for value in (float("nan"), float("inf"), -float("inf"), 1e300):
        extension._add_points(clock.tick(), {"a": value})
    extension(clock.tick(a=1.0))
    assert (tmp_path / "plot.png").stat().st_size > 1000


@needs_matplotlib
def test_curves_go_on_after_a_restart(tmp_path, figures):
    seen, clock = Curves(), at(tmp_path, Clock())
    make = lambda: extensions.PlotReport(["a"], trigger=(2, "iteration"), postprocess=seen)  # noqa: E731
    first = make()
    for value in (1.0, 2.0, 3.0):
        first(clock.tick(a=value))
    second = restore(saved(first), make())
    second(clock.tick(a=7.0))
    assert seen.lines == {"a": [[2, 1.5], [4, 5]]}


@needs_matplotlib
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


# ---- statistics of variables ----------------------------------------------------------------------------------------


def test_a_reservoir_keeps_all_while_there_is_room():
    reservoir = Reservoir(3, (2,))
    for i in range(3):
        reservoir.add(np.array([i, -i]), idx=10 - i)
    indexes, data = reservoir.get_data()
    assert indexes.tolist() == [8, 9, 10] and data.tolist() == [[2, -2], [1, -1], [0, 0]]
    assert data.dtype == np.float32


def test_a_reservoir_is_a_uniform_sample():
    counts = np.zeros(40)
    for seed in range(300):
        dbrdist.random.set_seed(seed)
        reservoir = Reservoir(10, ())
        for i in range(40):
            reservoir.add(float(i))
        indexes, data = reservoir.get_data()
        assert indexes.tolist() == data.tolist() == sorted(set(indexes.tolist())) and len(indexes) == 10
        counts[indexes] += 1
    assert abs(counts - 75).max() < 4 * np.sqrt(300 * 0.25 * 0.75)  # four standard deviations of a binomial


def test_a_statistician_is_numpy():
    x = np.random.default_rng(0).normal(size=(50, 3))
    found = Statistician(percentile_sigmas=(0, 50, 100))(x, axis=0)
    np.testing.assert_allclose(found["mean"], x.sum(0) / 50)
    np.testing.assert_allclose(found["std"], np.sqrt(((x - x.sum(0) / 50) ** 2).sum(0) / 50))
    np.testing.assert_allclose(found["percentile"], [x.min(0), np.median(x, 0), x.max(0)])
    assert list(Statistician(False, True, ())(x)) == ["std"]


@pytest.mark.slow
@needs_matplotlib
def test_statistics_of_a_model_are_drawn(tmp_path, figures):
    trainer = make_trainer(tmp_path, stop=(3, "iteration"))
    model, seen = trainer.updater.get_optimizer("main").target, []
    trainer.extend(lambda trainer: seen.append((model.w.array[0], model.b.array[0])), name="watch")
    plot = extensions.VariableStatisticsPlot(model, percentile_sigmas=(0, 50, 100), trigger=(3, "iteration"))
    trainer.extend(plot)
    trainer.run()
    ((figure, path),) = figures
    assert path == str(tmp_path / "statistics.png")
    axes = np.reshape(figure.axes, (2, 2))
    (mean,) = axes[0, 0].get_lines()
    np.testing.assert_allclose(mean.get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(mean.get_ydata(), np.mean(seen, 1), rtol=1e-6)
    (median,) = axes[1, 0].get_lines()
    np.testing.assert_allclose(median.get_ydata(), np.mean(seen, 1), rtol=1e-6)  # the median of two
    assert [ax.get_title() for ax in axes[0]] == ["values", "gradients"]


@needs_matplotlib
@each(
    options=[
        {},
        {"report_grad": False},
        {"plot_mean": False},
        {"plot_mean": False, "plot_std": False, "percentile_sigmas": 50},
        {"percentile_sigmas": None, "marker": "o", "figsize": (3, 3), "grid": False},
    ],
)
def test_a_variable_without_a_gradient_is_drawn_too(tmp_path, figures, options):
    clock = at(tmp_path, Clock())
    x = Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
    plot = extensions.VariableStatisticsPlot([x, [x]], trigger=(2, "iteration"), filename="x.png", **options)
    for _ in range(4):
        plot(clock.tick())
    rows = ("plot_mean" not in options or "plot_std" not in options) + (options.get("percentile_sigmas", 1) is not None)
    assert len(figures[-1][0].axes) == rows * (1 if "report_grad" in options else 2)
    assert all(ax.has_data() for ax in figures[-1][0].axes)
    second = restore(saved(plot), extensions.VariableStatisticsPlot([x, [x]], **options))
    assert second._samples.get_data()[0].tolist() == [1, 2, 3, 4]


def test_statistics_of_nothing_are_refused():
    with pytest.raises(ValueError, match="targets: expected at least one variable, got none"):
        extensions.VariableStatisticsPlot([])
    with pytest.raises(ValueError, match="expected something to draw"):
        extensions.VariableStatisticsPlot(Line(), plot_mean=False, plot_std=False, percentile_sigmas=())
    with pytest.raises(TypeError, match="expected a link, a Variable or several, got str"):
        extensions.VariableStatisticsPlot(["w"])


@needs_matplotlib
def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")

    class Broken:
        def savefig(self, file, **options):
            file.write(b"half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        plotting.save_figure(Broken(), str(path))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_notebook_shows_one_table_that_grows(tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, table):
            shown.append(table)

    def display(table, display_id):
        shown.append(table)
        return Handle()

    shells = [None, object()]
    functions = {"display": display, "HTML": lambda text: text, "get_ipython": shells.pop}
    module = type("module", (), {name: staticmethod(function) for name, function in functions.items()})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: module if name == "IPython" else find(name, *a))
    monkeypatch.setitem(__import__("sys").modules, "IPython", module)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", module)
    trainer = make_trainer(tmp_path, stop=(2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReportNotebook(["epoch", "main/loss", "a<b"]))
    trainer.run()
    assert [table.count("<tr>") for table in shown] == [1, 2, 3]
    assert shown[0] == "<table><tr><th>epoch</th><th>main/loss</th><th>a&lt;b</th></tr></table>"
    loss = trainer.get_extension("LogReport").log[1]["main/loss"]
    assert shown[2].endswith(f"<tr><td>2</td><td>{loss:.6g}</td><td></td></tr></table>")
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))  # IPython is there, but this is no notebook
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    trainer.run()
    assert out.getvalue() == "epoch\n1\n" and len(shown) == 3


def test_without_ipython_the_table_is_text(tmp_path, monkeypatch):
    find, out = importlib.util.find_spec, io.StringIO()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "IPython" else find(name, *a))
    monkeypatch.setattr("sys.stdout", out)
    trainer = make_trainer(tmp_path, stop=(1, "epoch"))
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    with pytest.warns(UserWarning, match="IPython is not installed"):
        trainer.run()
    assert out.getvalue() == "epoch\n1\n"
