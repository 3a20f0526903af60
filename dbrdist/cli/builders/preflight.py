"""A look before the first step: a training and a test batch through transforms, network and loss; labels; the disk.

It draws no random number of the run and changes nothing in the network, so that a run is the same with and without it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.cli.builders.assemble import Parts
from dbrdist.cli.builders.probe import Look
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.core.array.backend import to_cpu
from dbrdist.core.array.types import Array
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import ConfigError

if TYPE_CHECKING:
    from dbrdist.datasets.loading.base import Dataset

_ENTROPIES = ("softmax_cross_entropy", "binary_cross_entropy")  # losses of classes
_NUM_EXAMPLES = 4  # of each part, read and put through the network


def check(config: Config, origin: Origin, made: Parts) -> None:
    """Raise one ConfigError that has a sentence for each mistake found."""
    problems: list[str] = []
    for found in (_parts(config, origin, made), _workers(config, origin, made), _disk(config, origin, made)):
        problems += [sentence for sentence in found if sentence not in problems]
    if problems:
        raise ConfigError("\n".join(problems))


def check_test(config: Config, origin: Origin, made: Parts) -> None:
    """Raise ConfigError where the test data does not fit the network, before an evaluation without training."""
    _look_at(Look(config, origin, "test", made.data.test, made.convert, made.device), made)


# ---- batches ----


def _parts(config: Config, origin: Origin, made: Parts) -> Iterator[str]:
    for part, dataset in (("train", made.data.train), ("test", made.data.test)):
        if dataset is not None:
            try:
                look = Look(config, origin, part, dataset, made.convert, made.device)
                _look_at(look, made)
                if part == "test":
                    for place, key in _wanted(config):
                        _evaluated(look, ".".join(place), key)
            except ConfigError as mistake:
                yield str(mistake)
        elif part == "test" and (config.snapshot.best or "").startswith("validation/"):
            # a run with `stop` goes on to its last epoch, as a recipe without test data shall, and says so
            words = f"there is no test data that {config.snapshot.best} could come from"
            yield f"{origin.where(('snapshot', 'best'))}: snapshot.best: {words}"


def _look_at(look: Look, made: Parts) -> None:
    found = look.arguments(_NUM_EXAMPLES)
    if found is None:
        return
    args, named = found
    if made.task.loss is not None and len(args) == 2 and not named:
        _labels(look, made, *args)
    look.through(made.task, *args, **named)


def _wanted(config: Config) -> Iterator[tuple[tuple[str, str], str]]:
    """Keys of the configuration that name a value of evaluations, and that value."""
    keys = {("snapshot", "best"): config.snapshot.best, ("stop", "metric"): config.stop and config.stop.metric}
    yield from ((place, key) for place, key in keys.items() if key and key.startswith("validation/"))


def _evaluated(look: Look, place: str, key: str) -> None:
    """What an evaluation reports is known now."""
    names = sorted(f"validation/{name}" for name in look.observed)
    if names and key not in names:
        raise look.mistake(place, f"no evaluation reports {key!r}; it reports {', '.join(names)}")


def _labels(look: Look, made: Parts, inputs: Array | None, labels: Array) -> None:
    kind = getattr(labels, "dtype", np.dtype(object)).kind
    if kind not in "iu":
        # weights of the classes: the loss itself compares the shapes
        is_soft = getattr(labels, "ndim", 0) > 1 and kind in "fV"
        if look.config.loss.name in _ENTROPIES and not is_soft:
            words = f"expected integers as labels for {look.config.loss.name}, got {labels.dtype} ({look.words})"
            raise look.mistake("data", words)
        return
    outputs = look.through(made.task.predictor, inputs)
    every = [to_cpu(labels), *_labels_of(look.dataset)]
    smallest, largest = min(int(a.min(initial=0)) for a in every), max(int(a.max(initial=-1)) for a in every)
    if smallest < -1 and look.config.loss.name == "softmax_cross_entropy":
        raise look.mistake(
            "data", f"a {look.words} label is {smallest}; classes are counted from 0, and -1 is a label to be ignored"
        )
    if smallest < 0 and look.config.loss.name == "binary_cross_entropy":
        raise look.mistake("data", f"a {look.words} label is {smallest}; binary_cross_entropy counts classes from 0")
    if getattr(outputs, "ndim", 0) != labels.ndim + 1:
        return
    if largest >= outputs.shape[1]:
        raise look.mistake(
            "model",
            f"the network has {outputs.shape[1]} outputs, but a {look.words} label is {largest}; labels are counted "
            f"from 0, so it needs {largest + 1}",
        )
    if look.config.loss.name == "softmax_cross_entropy" and labels.ndim == 1:
        _ignored(look.words, every[-1], are_all=len(every) > 1)


def _ignored(part: str, labels: Array, are_all: bool) -> None:
    """Warn of labels that softmax_cross_entropy ignores: -1 and 1 for two classes are the usual ones elsewhere."""
    number = int(np.count_nonzero(labels == -1))
    if number:
        warn(
            f"{number:,} of {'' if are_all else 'the first '}{labels.size:,} {part} labels are -1, which "
            "softmax_cross_entropy leaves out of the loss; if -1 is one of your classes, count them from 0"
        )


def _labels_of(dataset: Dataset) -> list[Any]:
    """All labels of a dataset that has them at hand, as one array; none of others."""
    labels = getattr(dataset, "labels", None)
    if labels is None:
        columns = getattr(dataset, "columns", None) or getattr(getattr(dataset, "_dataset", None), "columns", ())
        labels = columns[1] if len(columns) == 2 else None
    is_known = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    return [labels] if is_known else []


# ---- the surroundings ----


def _workers(config: Config, origin: Origin, made: Parts) -> Iterator[str]:
    if not config.workers:
        return
    for words, dataset in (("training", made.data.train), ("test", made.data.test)):
        try:
            pickle.dumps(dataset, protocol=5)
        except Exception as error:  # pickle passes on whatever the object's own methods raise
            yield (
                f"{origin.where(('workers',))}: workers: the {words} data cannot be sent to loader processes: {error}; "
                "use functions and classes of modules, or workers=0"
            )


def _disk(config: Config, origin: Origin, made: Parts) -> Iterator[str]:
    folder = os.path.abspath(config.out)
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    place = f"{origin.where(('out',))}: out"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"{place}: cannot write to {folder}"
        return
    needed = snapshot_bytes(made) * (config.snapshot.keep + 1)
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < needed:
            yield (
                f"{place}: {free:,} bytes are free in {folder}, but {config.snapshot.keep} snapshots and the next one "
                f"need about {needed:,}; use another folder, or a smaller snapshot.keep"
            )


def snapshot_bytes(made: Parts) -> int:
    """About what a snapshot takes: parameters, and as much again for each of the optimizer's states, at most two."""
    return 3 * sum(p.lend().nbytes for p in made.task.params(include_uninit=False))
