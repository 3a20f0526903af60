"""The loggers that a configuration names, on rank 0. One whose package is missing is a warning, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.output.folder import TENSORBOARD
from dbrdist.training import Trainer, extensions


def extend(trainer: Trainer, config: Config, warn: Callable[[str], None]) -> None:
    """Add the loggers of `log` to a trainer."""
    log = config.log
    made: list[Callable[[], Any]] = []
    if log.tensorboard:
        made.append(lambda: extensions.TensorBoard(folder=TENSORBOARD))
    if log.csv:
        made.append(extensions.CSVLogger)
    if log.wandb is not None:
        options = {"config": config.model_dump(mode="json"), **log.wandb}
        made.append(lambda: extensions.WandbLogger(**options))
    if log.mlflow is not None:
        named = log.mlflow
        made.append(lambda: extensions.MLflowLogger(**named))
    for make in made:
        try:
            trainer.extend(make())
        except ImportError as error:
            warn(f"{error}; the run goes on without it")
