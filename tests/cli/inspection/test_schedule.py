"""Tests of dbrdist.cli.inspection.schedule: the table of what changes over a run."""

from __future__ import annotations

import pytest

from dbrdist.cli.inspection import schedule
from dbrdist.errors import ConfigError
from tests.cli.config_helpers import configured
from tests.each import each


@each(
    case=[
        ("wrap", 8, 2, None, [0, 0.5, 1, 1.5]), ("wrap", 10, 1, None, [0, 0.4, 0.8]),
        ("wrap", 6, 2, None, [0, 2 / 3, 4 / 3]), ("drop", 10, 2, None, [0, 0.5, 1, 1.5]),
        ("short", 10, 2, None, [0, 0.4, 0.8, 1, 1.4, 1.8]), ("short", 10, 2, 4, [0, 0.4, 0.8, 1]),
        ("wrap", 8, 2, 3, [0, 0.5, 1]), ("wrap", 4, 2, None, [0, 1]), ("short", 3, 2, None, [0, 1]),
        ("wrap", 8, 2, 99, [0, 0.5, 1, 1.5]),
    ]
)  # fmt: skip
def test_the_epoch_before_each_step(case):
    """Batches of 4: what is left over of an epoch begins the next one, is left out, or is a batch of its own."""
    last, num_examples, epochs, iterations, expected = case
    words = [f"last_batch: {last}"] + ([f"iterations: {iterations}"] if iterations else [])
    config, _ = configured(*words, epochs=epochs)
    assert list(schedule.positions(config, num_examples)) == pytest.approx(expected)


def test_batches_that_leave_out_all_examples_are_refused():
    config, _ = configured("last_batch: drop")
    schedule.check_batch(config, 4)
    for number, words in ((3, "3 examples"), (1, "1 example")):
        with pytest.raises(ConfigError) as caught:
            schedule.check_batch(config, number)
        assert str(caught.value) == (
            f"dbrdist-train: --examples: last_batch: drop leaves out all {words}, which are fewer than the batch of 4"
        )
        with pytest.raises(ConfigError):
            list(schedule.positions(config, number))


STEPS = "{name: step, milestones: [1], gamma: 0.5}"
CROP = "{name: random_resized_crop, size: [[0, 8], [1, 16]]}"


@each(
    case=[
        (("optimizer: {name: sgd, lr: 0.25}",), {"lr": (0.25, 0.25)}),
        ((f"optimizer: {{name: sgd, lr: 0.25, schedule: {STEPS}}}",), {"lr": (0.25, 0.125)}),
        ((f"optimizer: {{name: adam, alpha: 0.5, schedule: {STEPS}}}",), {"lr": (0.5, 0.25)}),
        (("optimizer: {name: momentum_sgd, lr: 1.0, momentum: 0.5}",
          f"schedules: [{{of: optimizer.momentum, schedule: {STEPS}}}]"), {"lr": (1.0, 1.0), "momentum": (0.5, 0.25)}),
        (("optimizer: {name: sgd, lr: 1.0, hooks: [{name: weight_decay, rate: 0.5}, {name: lasso, rate: 0.25}]}",
          f"schedules: [{{of: optimizer.hooks.0.rate, schedule: {STEPS}}}, {{of: optimizer.hooks.1.rate, "
          f"schedule: {STEPS}}}]"),
         {"lr": (1.0, 1.0), "optimizer.hooks.0.rate": (0.5, 0.25), "optimizer.hooks.1.rate": (0.25, 0.125)}),
    ]
)  # fmt: skip
def test_each_number_that_has_a_schedule_is_a_column(case):
    words, expected = case
    found = schedule.columns(*configured(*words))
    assert {name: (column(0.0), column(1.0)) for name, column in found.items()} == expected


def test_sizes_of_images_are_columns():
    data = "data: {name: image_folder, root: x}"
    model = "model: {name: resnet20, num_classes: 10}"
    found = schedule.columns(*configured(model, data, f"transforms: {{train: [{CROP}]}}"))
    assert set(found) == {"lr", "size"}
    assert [found["size"](epoch) for epoch in (0.0, 0.5, 1 - 1e-6, 1 - 1e-10, 1.0, 5.0)] == [8, 8, 8, 16, 16, 16]
    two = schedule.columns(*configured(model, data, f"transforms: {{train: [{CROP}, random_flip, {CROP}]}}"))
    assert set(two) == {"lr", "transforms.train.0.size", "transforms.train.2.size"}


def test_the_table_as_it_is_written(tmp_path, monkeypatch):
    config, origin = configured(f"optimizer: {{name: sgd, lr: 0.25, schedule: {STEPS}}}", epochs=2)
    drawn, path = [], str(tmp_path / "s.csv")
    monkeypatch.setattr(schedule, "_draw", lambda *words: drawn.append(words))
    monkeypatch.setattr(schedule.plotting, "is_installed", lambda: True)
    assert list(schedule.write(config, origin, path, 8)) == [
        f"{path}: 4 steps of 4 examples; iteration, epoch, lr", f"{tmp_path}/s.png",
    ]  # fmt: skip
    assert (tmp_path / "s.csv").read_bytes() == (
        b"iteration,epoch,lr\n0,0.0,0.25\n1,0.5,0.25\n2,1.0,0.125\n3,1.5,0.125\n"
    )
    rows = [[0, 0.0, 0.25], [1, 0.5, 0.25], [2, 1.0, 0.125], [3, 1.5, 0.125]]
    assert drawn == [(f"{tmp_path}/s.png", rows, ["lr"])]
    monkeypatch.setattr(schedule.plotting, "is_installed", lambda: False)
    assert len(list(schedule.write(config, origin, path, 8))) == 1 and len(drawn) == 1
    (tmp_path / "f.csv").mkdir()
    for name, words in (
        ("s.txt", "expected the name of a file to write, FILE.csv, got 's.txt'"), (f"{tmp_path}/f.csv", "is a folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"dbrdist-train: --schedule: .*{words}"):
            list(schedule.write(config, origin, name, 8))


def test_each_column_is_drawn_in_a_part_of_its_own(monkeypatch):
    """Against the epochs, which the last one names."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    saved = []
    monkeypatch.setattr(schedule.plotting, "save_figure", lambda figure, path: saved.append((figure, path)))
    schedule._draw("p.png", [[0, 0.0, 1.0, 5.0], [1, 0.5, 2.0, 6.0]], ["lr", "size"])
    ((figure, path),) = saved
    assert path == "p.png" and tuple(figure.get_size_inches()) == pytest.approx((8, 5.0))
    first, second = figure.axes
    assert [axes.get_ylabel() for axes in (first, second)] == ["lr", "size"]
    assert [axes.get_xlabel() for axes in (first, second)] == ["", "epoch"]
    for axes, values in ((first, [1.0, 2.0]), (second, [5.0, 6.0])):
        (line,) = axes.get_lines()
        assert [list(data) for data in line.get_data()] == [[0.0, 0.5], values]
