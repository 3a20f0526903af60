"""Every scheduled number of a run, at every step, without data and without training: `dbrdist-train --schedule`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from dbrdist.cli.builders.build_updates import make_schedule
from dbrdist.cli.configuration import updates as u
from dbrdist.cli.configuration.document import KeyPath
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, number_at
from dbrdist.cli.output.words import counted
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import ConfigError
from dbrdist.training import plotting

ScheduledColumn = Callable[[float], Any]  # of the epochs done
_SLACK = 1e-9
_RATE: KeyPath = ("optimizer", "schedule")


def positions(config: Config, num_examples: int) -> Iterator[float]:
    """The epochs done before each step of the run."""
    check_batch(config, num_examples)
    batch, steps = config.batch_size, config.steps_per_epoch(num_examples)
    iteration = 0
    while config.iterations is None or iteration < config.iterations:
        if config.last_batch == "wrap":
            whole, within = divmod(iteration * batch, num_examples)
        else:
            whole, within = divmod(iteration, int(steps))
            within *= batch
        epoch = whole + within / (steps * batch if config.last_batch == "drop" else num_examples)
        if epoch >= config.epochs - _SLACK:
            return
        yield epoch
        iteration += 1


def check_batch(config: Config, num_examples: int) -> None:
    """Refuse batches that leave out all examples."""
    if not config.steps_per_epoch(num_examples):
        raise ConfigError(
            f"dbrdist-train: --examples: last_batch: drop leaves out all {counted(num_examples, 'example')}, which are "
            f"fewer than the batch of {config.batch_size:,}"
        )


def columns(config: Config, origin: Origin) -> dict[str, ScheduledColumn]:
    """What changes over the run, by name: `lr`, other scheduled numbers by the last part of their key, `size`."""
    settings = config.optimizer
    found: dict[str, ScheduledColumn] = {}
    rate = getattr(settings, "lr", getattr(settings, "alpha", None))
    if isinstance(settings, u.CustomOptimizer):
        rate = settings.args.get("lr")
    if rate is not None and not isinstance(settings.schedule, u.Own):
        found["lr"] = make_schedule(config, origin, settings.schedule, _RATE, float(rate))
    names = [item.of.rpartition(".")[2] for item in config.schedules]
    for i, item in enumerate(config.schedules):
        name = names[i] if names.count(names[i]) == 1 and names[i] not in found else item.of
        value = number_at(config, item.of)
        assert value is not None  # the configuration is checked
        found[name] = make_schedule(config, origin, item.schedule, ("schedules", i, "schedule"), value)
    sizes = {i: t.size for i, t in enumerate(config.transforms.train) if isinstance(getattr(t, "size", None), tuple)}
    for i, pairs in sizes.items():
        found["size" if len(sizes) == 1 else f"transforms.train.{i}.size"] = size_at(pairs)
    return found


def size_at(sizes: tuple[tuple[int, int], ...]) -> ScheduledColumn:
    """The side of images by the epoch, from pairs of an epoch and a side."""
    return lambda epoch: max((e, size) for e, size in sizes if e <= epoch + _SLACK)[1]


def write(config: Config, origin: Origin, path: str, num_examples: int) -> Iterator[str]:
    """Write the table, and a picture beside it where matplotlib is installed; what was written, in words."""
    if not path.endswith(".csv"):
        raise ConfigError(f"dbrdist-train: --schedule: expected the name of a file to write, FILE.csv, got {path!r}")
    if os.path.isdir(path):
        raise ConfigError(f"dbrdist-train: --schedule: {path} is a folder")
    wanted = columns(config, origin)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["iteration", "epoch", *wanted])
    rows: list[list[float]] = []
    for iteration, epoch in enumerate(positions(config, num_examples)):
        rows.append([iteration, epoch, *(column(epoch) for column in wanted.values())])
    table.writerows([repr(value) for value in row] for row in rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    yield f"{path}: {len(rows):,} steps of {config.batch_size:,} examples; iteration, epoch, {', '.join(wanted)}"
    if plotting.is_installed() and wanted:
        picture = f"{path.removesuffix('.csv')}.png"
        _draw(picture, rows, list(wanted))
        yield picture


def _draw(path: str, rows: list[list[float]], names: list[str]) -> None:
    figure, axes = plotting.new_figure(len(names), 1, (8, 2.2 * len(names) + 0.6))
    for i, name in enumerate(names):
        own = axes[i, 0]
        own.plot([row[1] for row in rows], [row[2 + i] for row in rows])
        own.set_ylabel(name)
        plotting.draw_grid(own, True)
    axes[-1, 0].set_xlabel("epoch")
    plotting.save_figure(figure, path)
