"""Beats for `dbrdist-launch`: each rank tells its supervisor that it makes progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist_launch import heartbeat

from dbrdist.core.model.reporter import as_number, is_number
from dbrdist.training import Extension
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


def expected() -> bool:
    """Whether a launcher waits for beats."""
    return heartbeat.active()


class ProgressBeat(Extension):
    """One beat per step, with the loss and the speed for the live view; not under the launcher it does nothing.

    Between a step and the next one, where evaluation and snapshots may take their time, no beat is expected:
    `comm`'s own watch looks after collective calls there.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 1000  # before all that may take long; `Resume` comes after it

    def __call__(self, trainer: Trainer) -> None:
        if heartbeat.active():
            updater = trainer.updater
            loss = trainer.observation.get("main/loss")
            told = {"loss": as_number(loss)} if is_number(loss) else {}
            heartbeat.beat(updater.iteration, epoch=round(updater.epoch_detail, 2), **told)
            heartbeat.pause()


class Resume(Extension):
    """The long part of the step's extensions is over: from now on the next beat is awaited."""

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT - 1000

    def __call__(self, trainer: Trainer) -> None:
        if heartbeat.active():
            heartbeat.beat(trainer.updater.iteration)
