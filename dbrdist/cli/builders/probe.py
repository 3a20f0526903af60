"""A look at some examples of the data on their way through transforms, network and loss; mistakes become sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.cli.builders.task import Task
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.resolve import last_line
from dbrdist.cli.configuration.schema import Config
from dbrdist.core.array import random
from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.array.config import no_backprop_mode, using_config
from dbrdist.core.model.reporter import Reporter
from dbrdist.datasets.loading.base import get_batch
from dbrdist.errors import ConfigError, CorruptExampleError
from dbrdist.training.updater import as_arguments

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

_MAX_TRIED = 100  # examples that are looked at where corrupt ones are to be skipped
_NUM_IN_STEP = 5  # of the random state: the place in a step; the rest counts initial values, which stay drawn
_WORDS = {"train": "training", "test": "test"}


class Look:
    """What it takes to look at the examples of one part of the data, `train` or `test`."""

    def __init__(
        self, config: Config, origin: Origin, part: str, dataset: Any, convert: Any, device: DeviceSpec | None,
    ):  # fmt: skip
        self.config = config
        self.origin = origin
        self.part = part
        self.words = _WORDS[part]
        self.dataset = dataset
        self.convert = convert
        self.device = device
        self.observed: set[str] = set()  # what was reported on the way

    def mistake(self, key: str, words: str) -> ConfigError:
        """The error that points at a key of the configuration."""
        return ConfigError(f"{self.origin.where(tuple(key.split('.')))}: {key}: {words}")

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A batch of `number` examples as they look in the first epoch, as arguments; None if all are corrupt."""
        batch = self._read(number)
        if not len(batch):
            return None
        try:
            return as_arguments(self.convert(batch, self.device))
        except MemoryError:
            raise
        except Exception as error:
            words = f"{self.words} examples cannot be made into a batch: {last_line(error)}"
            raise self.mistake("data", words) from error

    def _read(self, number: int) -> Any:
        n = len(self.dataset)
        try:
            for start in range(0, min(n, _MAX_TRIED), number):
                indices = np.arange(start, min(start + number, n))
                batch = get_batch(self.dataset, indices, self.config.seed, 0, [])
                if len(batch):
                    return batch
        except MemoryError:
            raise
        except CorruptExampleError:  # the run says so when it comes to it; `corrupt` decides what happens then
            pass
        except Exception as error:
            key = f"transforms.{self.part}" if getattr(self.config.transforms, self.part) else "data"
            raise self.mistake(key, f"reading a {self.words} example failed: {last_line(error)}") from error
        return []

    def through(self, link: Link, *args: Any, **named: Any) -> Any:
        """What the network or the whole task makes of a batch; nothing else has changed afterwards."""
        state = random.get_state()
        try:
            with using_config("train", False), no_backprop_mode(), reporter(link) as seen:
                result = link(*args, **named)
                self.observed |= seen.observation.keys()
                return result
        except (ValueError, TypeError, IndexError) as error:
            shapes = " and ".join(f"{a.dtype} {tuple(a.shape)}" for a in args if hasattr(a, "shape"))
            words = f"computing a {self.words} batch of {shapes or 'this data'} failed: {last_line(error)}"
            raise self.mistake("model", words) from error
        finally:
            random.set_state((*state[:_NUM_IN_STEP], *random.get_state()[_NUM_IN_STEP:]))


@contextlib.contextmanager
def reporter(link: Link) -> Iterator[Reporter]:
    """A reporter as a trainer has it."""
    reporter = Reporter()
    reporter.add_observer("main", link)
    reporter.add_observers("main", link.namedlinks(skipself=True))
    with reporter:
        yield reporter


def initialize(look: Look, task: Task) -> None:
    """Give every parameter its shape by one look at the first example, which changes nothing else."""
    found = look.arguments(1)
    if found is not None:
        args, named = found
        look.through(task, *args, **named)
