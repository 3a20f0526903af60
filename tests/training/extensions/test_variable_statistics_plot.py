"""Tests of dbrdist.training.extensions.variable_statistics_plot."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, random
from dbrdist.training import extensions, plotting
from dbrdist.training.extensions import variable_statistics_plot
from dbrdist.training.extensions.variable_statistics_plot import Reservoir, Statistician
from tests.each import each
from tests.training.training_helpers import Clock, Line, make_trainer, restore, saved


def test_a_reservoir_of_one():
    kept = variable_statistics_plot.Reservoir(1, (2,))
    assert kept.get_data()[0].tolist() == []
    for n in range(5):
        kept.add(np.full(2, n), idx=10 + n)
    places, data = kept.get_data()
    assert data.shape == (1, 2) and places[0] == 10 + data[0, 0]
    other = variable_statistics_plot.Reservoir(3, ())
    for n in (4, 2, 3):
        other.add(n, idx=n)
    assert [a.tolist() for a in other.get_data()] == [[2, 3, 4], [2, 3, 4]]
    plain = variable_statistics_plot.Reservoir(2, ())
    plain.add(7)
    plain.add(8)
    assert plain.get_data()[0].tolist() == [0, 1]


def test_a_sample_of_arrays_is_kept():
    first = Reservoir(3, (2,))
    for i in range(5):
        first.add(np.array([i, -i]))
    second = restore(saved(first), Reservoir(3, (2,)))
    for one, other in zip(first.get_data(), second.get_data()):
        np.testing.assert_array_equal(one, other)
    assert second.get_data()[1].any()


def test_percentiles_are_those_of_whole_standard_deviations():
    wanted = [100 * (1 + math.erf(k / math.sqrt(2))) / 2 for k in (-math.inf, -3, -2, -1, 0, 1, 2, 3, math.inf)]
    found = Statistician().percentile_sigmas
    np.testing.assert_allclose(found, wanted, atol=0.006)
    for percentile, exact in zip(found, wanted):
        assert abs(percentile - exact) < 0.006


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


def at(tmp_path, clock):
    clock.out, clock.is_before_training = str(tmp_path), False
    return clock


def test_a_reservoir_keeps_all_while_there_is_room():
    reservoir = Reservoir(3, (2,))
    for i in range(3):
        reservoir.add(np.array([i, -i]), idx=10 - i)
    indexes, data = reservoir.get_data()
    assert indexes.tolist() == [8, 9, 10] and data.tolist() == [[2, -2], [1, -1], [0, 0]]
    assert data.dtype == np.float32


@pytest.mark.slow
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
@draws_slowly
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


@draws_slowly
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


def drawn(ax):
    """Lines and bands as (label, points or edges, alpha, marker)."""
    from matplotlib.colors import to_hex

    found = []
    for line in ax.get_lines():
        found.append((line.get_label(), line.get_xydata().tolist(), line.get_marker(), to_hex(line.get_color())))
    for band in ax.collections:
        (path,) = band.get_paths()
        edges = {}
        for x, y in path.vertices.tolist():
            edges.setdefault(x, set()).add(round(y, 5))
        found.append((band.get_label(), {x: sorted(ys) for x, ys in edges.items()}, round(band.get_alpha(), 5)))
    return found


@draws_slowly
def test_the_whole_figure(tmp_path, figures):
    """Of 0, 1, 2, 3, 4 and of twice these: means 2 and 4, standard deviations of the root of 2 and twice that."""
    clock, x = at(tmp_path, Clock()), Variable(np.arange(5, dtype=np.float32))
    plot = extensions.VariableStatisticsPlot(
        x, percentile_sigmas=(0, 25, 50, 75, 100), trigger=(2, "iteration"), marker="x"
    )
    plot(clock.tick())
    x.array *= 2
    x.grad = np.full(5, 3, np.float32)
    plot(clock.tick())
    ((figure, path),) = figures
    values, gradients, below, _ = figure.axes
    assert path == str(tmp_path / "statistics.png")
    assert figure.get_size_inches().tolist() == pytest.approx([12.8, 7.2])
    assert [ax.get_title() for ax in figure.axes] == ["values", "gradients", "", ""]
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "", "iteration", "iteration"]
    root = 2**0.5
    assert drawn(values) == [
        ("mean", [[1, 2], [2, 4]], "x", "#1f77b4"),
        ("mean ± standard deviation", {1: [round(2 - root, 5), round(2 + root, 5)],
                                       2: [round(4 - 2 * root, 5), round(4 + 2 * root, 5)]}, 0.3),
    ]  # fmt: skip
    assert drawn(below) == [
        ("50 %", [[1, 2], [2, 4]], "x", "#000000"),
        ("0 to 100 %", {1: [0, 4], 2: [0, 8]}, 0.15),
        ("25 to 75 %", {1: [1, 3], 2: [2, 6]}, 0.5),
    ]
    (line,) = gradients.get_lines()
    assert np.isnan(line.get_ydata()[0]) and line.get_ydata()[1] == 3
    assert [ax.get_legend() is not None for ax in figure.axes] == [False, True, False, True]
    for ax in figure.axes:
        assert ax.get_xgridlines()[0].get_visible() and ax.get_xgridlines()[0].get_alpha() == 0.4


@draws_slowly
def test_a_figure_of_some_statistics(tmp_path, figures):
    """The standard deviation alone is a line; two bands of three differ in how dark they are; no grid."""
    clock, x = at(tmp_path, Clock()), Variable(np.arange(5, dtype=np.float32))
    sigmas = (0, 10, 25, 75, 90, 100)
    options = {"report_grad": False, "plot_mean": False, "grid": False, "trigger": (1, "iteration")}
    extensions.VariableStatisticsPlot(x, percentile_sigmas=sigmas, **options)(clock.tick())
    figure = figures.pop()[0]
    above, below = figure.axes
    assert drawn(above) == [("standard deviation", [[1, pytest.approx(2**0.5)]], "None", "#1f77b4")]
    assert drawn(below) == [
        ("0 to 100 %", {1: [0, 4]}, 0.15), ("10 to 90 %", {1: [0.4, 3.6]}, 0.325), ("25 to 75 %", {1: [1, 3]}, 0.5),
    ]  # fmt: skip
    assert not above.get_xgridlines()[0].get_visible()
    assert figure.get_size_inches().tolist() == pytest.approx([6.4, 7.2])
    options |= {"plot_std": False, "report_data": False, "report_grad": True}
    x.grad = np.arange(5, dtype=np.float32)
    plot = extensions.VariableStatisticsPlot(x, percentile_sigmas=50, figsize=(4, 2), **options)
    plot(clock.tick())
    figure = figures.pop()[0]
    (only,) = figure.axes
    assert drawn(only) == [("50 %", [[2, 2]], "None", "#000000")] and only.get_title() == "gradients"
    assert figure.get_size_inches().tolist() == [4, 2]


def test_defaults_of_statistics():
    """A thousand steps are kept; the statistics are over the first axis."""
    plot = extensions.VariableStatisticsPlot(Variable(np.zeros(2, np.float32)))
    assert plot._samples._data.shape == (1000, 2, 11)
    x = np.arange(6.0).reshape(2, 3)
    found = Statistician(percentile_sigmas=50)(x)
    assert found["mean"].tolist() == found["percentile"][0].tolist() == [1.5, 2.5, 3.5]
    with pytest.raises(ValueError, match="Reservoir: size: expected at least 1, got 0"):
        Reservoir(0, ())


def test_the_places_of_a_sample_follow_from_the_seed():
    """The array number n, counted from 0, takes one of n + 1 places, of which those of the sample count."""
    taken, reservoir = list(range(32)), Reservoir(32, ())
    for n in range(200):
        reservoir.add(np.float32(n), 1000 + n)
        place = n if n < 32 else random.generator(random.get_seed(), "reservoir", sample=n).integers(n + 1)
        if place < 32:
            taken[place] = n
    indexes, values = reservoir.get_data()
    assert values.tolist() == sorted(taken) and indexes.tolist() == [1000 + n for n in sorted(taken)]
