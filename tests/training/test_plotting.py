"""Tests of dbrdist.training.plotting."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist.training import extensions, plotting
from tests.each import each
from tests.training.training_helpers import Clock

needs_matplotlib = pytest.mark.skipif(not plotting.is_installed(), reason="matplotlib (the extra plot) is missing")


@pytest.mark.slow
@needs_matplotlib
@each(has_mean=[False, True], has_std=[False, True], sigmas=[(), (10, 50, 90)])
def test_statistics_are_drawn_as_they_are(has_mean, has_std, sigmas):
    if not (has_mean or has_std or sigmas):
        return
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plotting, "save_figure", lambda figure, path, legends: figures.append((figure, path)))
        clock, v = Clock(), dbrdist.Parameter(np.arange(5.0, dtype=np.float32))
        clock.out = "here"
        plot = extensions.VariableStatisticsPlot(
            v, report_grad=False, plot_mean=has_mean, plot_std=has_std, percentile_sigmas=sigmas, filename="p.png",
            trigger=(2, "iteration"),
        )  # fmt: skip
        for scale in (1, 3):
            v.array[...] = scale * np.arange(5)
            plot(clock.tick())
    ((figure, path),) = figures
    axes = figure.axes
    assert path == "here/p.png" and len(axes) == (has_mean or has_std) + bool(sigmas)
    assert axes[-1].get_xlabel() == "iteration" and axes[0].get_title() == "values"
    lines = {line.get_label(): line.get_xydata().tolist() for ax in axes for line in ax.get_lines()}
    bands = {band.get_label(): band.get_paths()[0].vertices for ax in axes for band in ax.collections}
    mean, std = np.array([2.0, 6.0]), np.sqrt(2) * np.array([1, 3])
    if has_mean:
        assert lines["mean"] == [[1, 2], [2, 6]]
    assert ("mean" in lines) == has_mean
    assert ("standard deviation" in lines) == (has_std and not has_mean)
    if has_std and not has_mean:
        np.testing.assert_allclose(lines["standard deviation"], np.stack([[1, 2], std], 1), rtol=1e-6)
    band = "mean ± standard deviation"
    assert (band in bands) == (has_mean and has_std)
    if has_mean and has_std:
        assert bands[band][:, 0].min() == 1 and bands[band][:, 0].max() == 2
        np.testing.assert_allclose([bands[band][:, 1].min(), bands[band][:, 1].max()],
                                   [(mean - std).min(), (mean + std).max()], rtol=1e-6)  # fmt: skip
    if sigmas:
        np.testing.assert_allclose(lines["50 %"], [[1, 2], [2, 6]])
        np.testing.assert_allclose([bands["10 to 90 %"][:, 1].min(), bands["10 to 90 %"][:, 1].max()], [0.4, 10.8])


@each(
    **{"sigmas, bands": [
        ((5, 95), [("5 to 95 %", 0.15)]),
        ((1, 50, 99), [("1 to 99 %", 0.15)]),
        ((1, 20, 80, 99), [("1 to 99 %", 0.15), ("20 to 80 %", 0.5)]),
        ((0, 1, 20, 50, 80, 99, 100), [("0 to 100 %", 0.15), ("1 to 99 %", 0.325), ("20 to 80 %", 0.5)]),
        ((50,), []),
    ]}
)  # fmt: skip
def test_the_inner_bands_are_darker(sigmas, bands):
    v, drawn = dbrdist.Parameter(np.arange(5.0)), []

    class Axes:
        def fill_between(self, steps, low, high, alpha, color, linewidth, label):
            drawn.append((label, pytest.approx(alpha)))
            assert (high >= low).all() and (color, linewidth) == ("C0", 0)

        def plot(self, steps, values, color, marker, label):
            assert label == "50 %" and color == "black" and values.tolist() == [sigmas.index(50)] * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plotting, "available", lambda: True)
        plot = extensions.VariableStatisticsPlot(v, plot_mean=False, plot_std=False, percentile_sigmas=sigmas)
    plot._draw_percentiles(Axes(), [1, 2], np.array([range(len(sigmas))] * 2))
    assert drawn == bands


_is_installed = pytest.mark.skipif(not plotting.is_installed(), reason="matplotlib (the extra plot) is missing")


def draws_slowly(test):
    """It takes half a second to load in each worker."""
    return pytest.mark.slow(_is_installed(test))


@draws_slowly
def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")

    class Broken:
        def findobj(self, kind):
            return []

        def savefig(self, file, **options):
            file.write(b"half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        plotting.save_figure(Broken(), str(path))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@needs_matplotlib
@each(values=[[1.7e308, -1.7e308, 0.0], [1.7e308] * 2, [5e-324, 0.0], [float("nan"), 1e308, float("-inf")], [3.0]])
def test_any_numbers_can_be_drawn(tmp_path, values):
    """matplotlib raises where a sum or a difference is beyond the numbers: the picture ended the run."""
    for swapped in (False, True):
        figure, ((axes,),) = plotting.new_figure(1, 1)
        points = [(k, value) for k, value in enumerate(values)]
        plotting.draw_line(axes, [(y, x) for x, y in points] if swapped else points, marker="o", label="a")
        plotting.save_figure(figure, str(tmp_path / "p.png"))
        drawn = axes.get_lines()[0].get_xydata()[:, 0 if swapped else 1]
        near = [
            value if abs(value) < 1e306 or not np.isfinite(value) else np.copysign(1e306, value) for value in values
        ]
        np.testing.assert_array_equal(drawn, near)


@pytest.mark.slow
@needs_matplotlib
def test_text_that_is_no_unicode_is_drawn_as_an_escape(tmp_path):
    figure, axes = plotting.new_figure(1, 1)
    axes[0, 0].set_title("a\ud800b")
    plotting.save_figure(figure, str(tmp_path / "p.png"))
    assert axes[0, 0].get_title() == r"a\ud800b" and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@each(**{"name, format": [("a.png", "png"), ("a", "png"), ("a.SVG", "svg"), ("a.b.pdf", "pdf")]})
def test_how_a_figure_is_written(tmp_path, name, format):
    pytest.importorskip("matplotlib")
    saved = []

    class Figure:
        def findobj(self, kind):
            return []

        def savefig(self, file, **words):
            saved.append(words)
            file.write(b"drawn")

    plotting.save_figure(Figure(), str(tmp_path / name), ("legend",))
    assert saved == [{"format": format, "dpi": 120, "bbox_extra_artists": ["legend"], "bbox_inches": "tight"}]
    assert (tmp_path / name).read_bytes() == b"drawn"
