"""Parts of the training loop by themselves: what is kept, timed, drawn and said of damage."""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import pytest
from training_helpers import Clock, Line, examples, make_trainer, restore, saved

import dbrdist
from dbrdist import iterators, optimizers
from dbrdist.core import spans
from dbrdist.core.reporter import report
from dbrdist.training import ParallelUpdater, StandardUpdater, Trainer, extensions, plotting, triggers
from dbrdist.training import updater as updater_module
from dbrdist.training.extensions import snapshots, tensorboard
from dbrdist.training.extensions.variable_statistics_plot import Reservoir, Statistician
from tests.each import each

needs_matplotlib = pytest.mark.skipif(not plotting.is_installed(), reason="matplotlib (the extra plot) is missing")


# ---- what is kept


@each(is_finished=[False, True])
def test_a_schedule_by_hand_knows_after_a_resume_whether_it_is_finished(is_finished):
    first = triggers.ManualScheduleTrigger([2], "iteration")
    clock = Clock()
    for _ in range(2 + is_finished):
        clock.tick()
        first(clock)
    first.finished = is_finished
    assert restore(saved(first), triggers.ManualScheduleTrigger([2], "iteration")).finished is is_finished


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


# ---- snapshots


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    path = tmp_path / "snapshot"
    never = "it ends early, or was never a snapshot"
    assert snapshots.damage(str(path)) == never
    path.write_bytes(b"")
    assert snapshots.damage(str(path)) == "it is empty"
    path.write_bytes(b"something else")
    assert snapshots.damage(str(path)) == never
    np.savez(tmp_path / "whole.npz", a=np.ones(3))
    assert snapshots.damage(str(tmp_path / "whole.npz")) is None


# ---- the time of a step, and its spans


class Watch:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_step_and_its_wait_for_data_are_timed(is_recorded, monkeypatch):
    watch = Watch()
    monkeypatch.setattr(updater_module.time, "perf_counter", watch)

    class Slow(iterators.SerialIterator):
        def next(self):
            watch.now += 3
            return super().next()

    class Model(Line):
        def forward(self, x, t):
            watch.now += 5
            return super().forward(x, t)

    steps = []

    class Recorder(spans.Recorder):
        @contextlib.contextmanager
        def span(self, name):
            steps.append((name, self.step))
            yield

    recorder = Recorder()
    if is_recorded:
        monkeypatch.setattr(spans, "recorders", [recorder])
    updater = StandardUpdater(Slow(examples(), 2), optimizers.SGD(0.1).setup(Model()))
    assert updater.step_seconds == updater.data_seconds == 0
    for _ in range(2):
        before = updater.get_optimizer("main").target.w.array.copy()
        updater.update()
        assert updater.get_optimizer("main").target.w.array != before
    assert updater.iteration == 2 and updater.data_seconds == 6 and updater.step_seconds == 16
    assert [s for s in steps if s[0] == "step"] == [("step", 0), ("step", 1)] * is_recorded
    waits = [("data wait", 0, 100.0, 103.0), ("data wait", 1, 108.0, 111.0)]
    assert [(s.name, s.step, s.began, s.ended) for s in recorder.spans] == waits * is_recorded


# ---- reports of copies on other devices


class Inner(dbrdist.Chain):
    def forward(self, loss):
        report({"twice": loss * 2}, self)
        return loss


class Outer(Line):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner = Inner()

    def forward(self, x, t):
        return self.inner(super().forward(x, t))


def test_copies_of_a_model_and_their_parts_report_under_their_names(tmp_path):
    optimizer = optimizers.SGD(0.0).setup(Outer())
    iterator = iterators.SerialIterator(examples(4), 4, shuffle=False)
    updater = ParallelUpdater(iterator, optimizer, devices={"main": "@numpy", "other": "@numpy"})
    trainer = Trainer(updater, (1, "iteration"), out=str(tmp_path))
    seen = {}
    trainer.extend(lambda t: seen.update(t.observation), name="see", trigger=(1, "iteration"))
    trainer.run()
    x, y = (np.concatenate([e[k] for e in examples(4)]) for k in (0, 1))
    for name, part in (("main", slice(2)), ("other", slice(2, None))):
        loss = float(np.mean((0.5 * x[part] - y[part]) ** 2))
        assert {key: round(float(seen[f"{name}/{key}"]), 9) for key in ("loss", "inner/twice")} == {
            "loss": round(loss, 9), "inner/twice": round(2 * loss, 9)
        }  # fmt: skip


def test_observed_values_keep_their_graphs_until_the_run_ends(tmp_path):
    trainer = make_trainer(str(tmp_path), (1, "epoch"))
    trainer.extend(extensions.DumpGraph("main/loss"), trigger=(100, "iteration"))
    kept = []
    trainer.extend(lambda t: kept.append(dbrdist.config.keep_graph_on_report), name="see", trigger=(1, "iteration"))
    assert not dbrdist.config.keep_graph_on_report
    trainer.run()
    assert kept and all(kept) and not dbrdist.config.keep_graph_on_report


# ---- what is shown


def test_a_bar_is_drawn_where_there_is_a_terminal(tmp_path):
    pytest.importorskip("rich")
    for is_terminal in (False, True):
        out = io.StringIO()
        out.isatty = lambda is_terminal=is_terminal: is_terminal
        trainer = make_trainer(str(tmp_path), (2, "epoch"))
        bar = extensions.ProgressBar(update_interval=1, out=out)
        trainer.extend(bar)
        seen = []
        trainer.extend(
            lambda t, bar=bar, seen=seen: seen.append(bar._bar is not None), name="see", trigger=(1, "epoch")
        )
        trainer.run()
        assert seen == [is_terminal] * 2
        assert ("\u2501" in out.getvalue() or "\u2588" in out.getvalue() or "\r" in out.getvalue()) == is_terminal


def test_a_report_that_a_notebook_brings_along_is_called(tmp_path, monkeypatch):
    from dbrdist.training.extensions import print_report_notebook as notebook

    shown = []
    display = type(
        "module", (), {"HTML": staticmethod(lambda text: text), "display": lambda table, display_id: Handle()}
    )
    Handle = type("Handle", (), {"update": lambda self, table: shown.append(table)})
    monkeypatch.setattr(notebook, "_is_notebook", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "IPython", display)
    monkeypatch.setitem(__import__("sys").modules, "IPython.display", display)
    trainer = make_trainer(str(tmp_path), (2, "epoch"))
    trainer.extend(extensions.PrintReportNotebook(["epoch"], extensions.LogReport()))
    trainer.run()
    cells = "<tr><th>epoch</th></tr>", "<tr><td>1</td></tr>", "<tr><td>2</td></tr>"
    assert shown == [f"<table>{''.join(cells[:2])}</table>", f"<table>{''.join(cells)}</table>"]


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


# ---- protocol buffers


@each(
    **{"n, expected": [
        (0, "00"), (1, "01"), (127, "7f"), (128, "80 01"), (300, "ac 02"), (16383, "ff 7f"), (16384, "80 80 01"),
        (-1, "ff " * 9 + "01"), (2**64 - 1, "ff " * 9 + "01"),
    ]}
)  # fmt: skip
def test_whole_numbers_as_protocol_buffers_have_them(n, expected):
    assert tensorboard._varint(n) == bytes.fromhex(expected)
