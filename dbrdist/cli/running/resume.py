"""Configurations that differ from a stored run's, or between ranks: keys are applied, or refused by name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.cli.configuration import document
from dbrdist.cli.configuration.extend import MAX_BYTES
from dbrdist.cli.configuration.load import Origin, dump
from dbrdist.cli.configuration.schema import Config, number_at
from dbrdist.cli.output.refuse import alike
from dbrdist.core.files.regular_file import regular
from dbrdist.core.usage import mistakes
from dbrdist.datasets.loading.contents import Known, known_examples
from dbrdist.errors import ConfigError

if TYPE_CHECKING:
    from dbrdist.cli.builders.build import Data
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.update.optimizer import GradientMethod

# What the snapshot decides: a run cannot continue with another value, and must not say that it did.
_FIXED = {
    r"seed": "order, augmentation and dropout are functions of it",
    r"dtype": "the saved parameters have it",
    r"loss_scale": "the saved optimizer has it",
    r"optimizer\.name": "the saved optimizer state belongs to it",
    r"optimizer\.args(\..*)?": "your own optimizer takes its hyperparameters from the snapshot",
    r"model\.(zero_gamma|uniform_gamma|fan|log_constant_bias)": "it only affects initial values",
    r"batch_norm\.eps": "the saved weights were trained with it",
    r"batch_finder(\..*)?": "it takes the place of a run, from the first step",
    r"lr_finder(\..*)?": "a range test goes through its rates once, from the first step of a run",
}
# What says nothing about the run itself.
_FREE = r"out"
# What each rank may have its own way: where things are on its host, and with what it reads and computes.
_OWN = r"(data|out|device|workers|threads)(\..*)?"


class Change(NamedTuple):
    """A key whose value differs: dotted, with the value that the run had so far and the new one."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} is now {shown(self.new)}, was {shown(self.old)}"


def changes(path: str, config: Config, origin: Origin) -> list[Change]:
    """How a configuration differs from that of a run, stored in a file. Raises ConfigError for what cannot change."""
    found = list(_differences(_stored(path), _plain(dump(config)), ()))
    refused = [(change, why) for change in found if (why := _why_fixed(change.key)) is not None]
    if refused:
        raise ConfigError("\n".join(_sentence(change, why, origin) for change, why in refused))
    return [change for change in found if not re.fullmatch(_FREE, change.key)]


def _plain(text: str) -> Any:
    """What :func:`dump` wrote, as it is read from a run's folder."""
    return document.read(text, "configuration").data


def _stored(path: str) -> dict[str, Any]:
    """The configuration in a run's folder."""
    try:
        with open(path, "rb", opener=regular) as file:
            found = document.read(file.read(MAX_BYTES).decode(), path)
        if isinstance(found.data, dict) and not found.problems:
            return found.data
        words = "it is damaged"
    except UnicodeDecodeError:
        words = "it is not UTF-8 text"
    except FileNotFoundError:
        words = "there is none"
    raise ConfigError(
        f"{path}: expected the configuration that the run had so far, to see what has changed, but {words}; put a copy "
        "of it there, or start another run with out=..., and init_from for its weights"
    )


def only_damaged(folder: str, damaged: dict[str, str]) -> str:
    """What to say where no snapshot of a run is whole: each with what is wrong with it, and what can be done."""
    each = "; ".join(f"{os.path.basename(path)}: {words}" for path, words in damaged.items())
    return (
        f"out: {folder} holds a run, but none of its snapshots is intact ({each}); put a copy of one there, or start "
        "a new run with --overwrite, which moves this one aside"
    )


def unfit(found: list[Change]) -> str:
    """What may be the reason why a snapshot does not fit, as the end of a sentence."""
    return f"; since it was saved, {', and '.join(map(str, found))}" if found else ""


def compare_ranks(config: Config, origin: Origin, comm: CommunicatorBase) -> None:
    """Refuse the run on every rank where one was told something else than rank 0. Collective."""
    own = dump(config)
    first = comm.bcast_obj(own)
    with alike(comm):
        # Equal text needs no reading, which takes longer than all else that the ranks compare.
        told = (_plain(first), _plain(own)) if first != own else ({}, {})
        for key, theirs, mine in _differences(*told, ()):
            if not re.fullmatch(_OWN, key):
                where = origin.where(tuple(key.split(".")))
                raise ConfigError(
                    f"{where}: {key}: expected {shown(theirs)}, as rank 0 has, got {shown(mine)}; start all ranks with "
                    "the same configuration"
                )


def apply(found: list[Change], optimizer: GradientMethod, config: Config) -> None:
    """Give the optimizer the new hyperparameters instead of those from the snapshot.

    A number whose schedule has gone is that of the configuration again, not the schedule's last value.
    """
    own = optimizer.hyperparam.own()
    for name in _no_longer_scheduled(found):
        value = number_at(config, f"optimizer.{name}")
        if name in own and value is not None:
            setattr(optimizer.hyperparam, name, value)
    for change in found:
        section, _, name = change.key.partition(".")
        if section == "optimizer" and name in own:
            setattr(optimizer.hyperparam, name, change.new)
            if f"initial_{name}" in own:  # what others follow in proportion, as in a run that begins with it
                setattr(optimizer.hyperparam, f"initial_{name}", change.new)


# What an observed value is measured by, beside the weights.
_NUM_TEST = "number of test examples"
_MEASURES = {
    "loss": r"loss(\..*)?",
    "metrics": r"metrics",
    "test": rf"(transforms\.test|evaluation\.flip)(\..*)?|data\.(name|test)|{_NUM_TEST}",
}


def data_facts(data: Data) -> dict[str, Any]:
    """What a snapshot says of the data, as plain values."""
    num_test = None if data.test is None else len(data.test)
    some = {part: _some(getattr(data, part)) for part in ("train", "test")}
    return {"classes": data.classes, "num_test_examples": num_test, "some_examples": some}


def _some(dataset: Any) -> list[str | float]:
    """A few examples, each number of which stands for an array, as far as they are known without being read."""
    known: list[Known] = []
    with contextlib.suppress(Exception):  # what a program's own dataset raises here: nothing is known of it
        if dataset is not None and not getattr(dataset, "is_one_ranks", False):  # others have other examples
            known = known_examples(dataset)
    return [one if isinstance(one, str) else float(np.nan_to_num(one.mean() if one.size else 0)) for one in known]


def _are_same(before: list[str | float], now: list[str | float]) -> bool:
    """Whether these are the same examples, but for rounding."""
    return len(before) == len(now) and all(
        one == other if isinstance(one, str) or isinstance(other, str) else bool(np.isclose(one, other, 1e-3, 1e-6))
        for one, other in zip(before, now)
    )


def data_changes(saved: dict[str, Any], now: dict[str, Any], told: list[Change]) -> list[Change]:
    """How the data differs from that of a snapshot, where the configuration need not say so.

    Other examples, or the same in another order, are warned of, unless the changes `told` are why: where the data
    draws them anew at each start, the run has learned some that are for testing now.
    """
    is_told = any(re.fullmatch(r"data(\..*)?", change.key) for change in told)
    for part, examples in saved.get("some_examples", {}).items():
        if not is_told and not _are_same(examples, now["some_examples"][part]):
            mistakes.warn(
                f"{'training' if part == 'train' else 'test'} examples are others, or in another order, than when the "
                "snapshot was saved; where the data is shuffled or split at random, give that a fixed seed"
            )
    before, after = saved.get("num_test_examples"), now["num_test_examples"]
    return [] if before in (None, after) else [Change(_NUM_TEST, before, after)]


def forget_best(found: list[Change], config: Config, best: Any, goal: Any) -> Iterator[str]:
    """Let the best value so far be forgotten where it was measured otherwise; what to say of it.

    ``best`` is the trigger of `snapshot.best`, ``goal`` that of the run's end.
    """
    stop = config.stop
    for name, key, trigger in (("snapshot.best", config.snapshot.best, best), ("stop", stop and stop.metric, goal)):
        changed = _measured_otherwise(found, key) if key else None
        if changed is not None and hasattr(trigger, "forget"):
            trigger.forget()
            yield f"{name}: the best {key} so far was measured with another {changed}, and begins anew"


def _measured_otherwise(found: list[Change], key: str) -> str | None:
    """The changed key because of which values of an observed quantity cannot be compared with earlier ones, if any."""
    name = key.rpartition("/")[2]
    kinds = {"loss" if name == "loss" else "metrics"} if name != "accuracy" else set()
    kinds |= {"test"} if key.startswith("validation/") else set()
    patterns = [_MEASURES[kind] for kind in kinds]
    return next((c.key for c in found if any(re.fullmatch(pattern, c.key) for pattern in patterns)), None)


def _no_longer_scheduled(found: list[Change]) -> set[str]:
    """The hyperparameters that had a schedule of their own before, and have none now."""
    before, after = (
        {str(item.get("of")) for change in found if change.key == "schedules" for item in getattr(change, side) or ()}
        for side in ("old", "new")
    )
    return {key.removeprefix("optimizer.") for key in before - after if key.startswith("optimizer.")}


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old if path else ():
            if key not in new and old[key] is not None:
                yield Change(".".join((*path, key)), old[key], None)
        for key, value in new.items():
            if key in old:  # a key of a later version has its default
                yield from _differences(old[key], value, (*path, key))
            elif path and value is not None:
                yield Change(".".join((*path, key)), None, value)
    elif old != new:
        yield Change(".".join(path), old, new)


def _why_fixed(key: str) -> str | None:
    return next((why for pattern, why in _FIXED.items() if re.fullmatch(pattern, key)), None)


def _sentence(change: Change, why: str, origin: Origin) -> str:
    where = origin.where(tuple(change.key.split(".")))
    return (
        f"{where}: {change.key}: the run began with {shown(change.old)} and cannot continue with {shown(change.new)}: "
        f"{why}; start another run with out=..., and init_from for its weights"
    )


def shown(value: object) -> str:
    if value is None:
        return "nothing"
    words = document.write(value, default_flow_style=True, width=10**6).replace("\n...", "").strip()
    return words if len(words) <= 60 else words[:57] + "..."
