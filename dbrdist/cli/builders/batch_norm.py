"""What a run's batch normalizations normalize with: the key `batch_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import BatchNorm, Config
from dbrdist.comm.links import create_mnbn_model
from dbrdist.comm.run.recalibration import RecalibrateStatistics
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import ConfigError
from dbrdist.links.normalization import BatchNormalization, use_last_batch

if TYPE_CHECKING:
    from dbrdist.cli.builders.assemble import Parts
    from dbrdist.cli.builders.task import Task
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.link import Link


def prepare(task: Link, settings: BatchNorm) -> None:
    """Let the network keep the statistics, and use the eps, that are asked for."""
    if settings.statistics == "last":
        use_last_batch(task)
    if settings.eps is not None:
        for link in task.links():
            if isinstance(link, BatchNormalization):
                link.eps = settings.eps


def share(config: Config, origin: Origin, task: Task, comm: CommunicatorBase) -> None:
    """Normalize the batches of neighbouring ranks together, if asked for. Collective."""
    group = config.batch_norm.group
    if group == 1 or comm.size == 1:
        return
    if comm.size % group:
        words = f"expected a divisor of the number of ranks, {comm.size}, got {group}"
        raise ConfigError(f"{origin.where(('batch_norm', 'group'))}: batch_norm.group: {words}")
    if not any(isinstance(link, BatchNormalization) for link in task.links()):
        return
    neighbours = comm.split(comm.rank // group, comm.rank)
    task.predictor = create_mnbn_model(task.predictor, neighbours)


def recalibration(config: Config, made: Parts, comm: CommunicatorBase) -> RecalibrateStatistics:
    """Measures the statistics before an evaluation, over the same training batches each time."""

    def batches() -> SerialIterator:
        return SerialIterator(
            made.data.train, config.batch_size, repeat=True, shuffle=True, seed=config.seed, last="short",
            rank=comm.rank, size=comm.size, virtual_workers=config.virtual_workers,
        )  # fmt: skip

    return RecalibrateStatistics(comm, made.task, batches, config.batch_norm.batches, made.convert, made.device)
