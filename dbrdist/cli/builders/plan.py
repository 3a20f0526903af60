"""What a run is going to do, in a few lines for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dbrdist.cli.builders.assemble import Parts
from dbrdist.cli.builders.build_updates import group_of
from dbrdist.cli.configuration.schema import Config, VirtualBatch
from dbrdist.cli.output.words import counted
from dbrdist.core.array.config import get_dtype
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.gpu import cudnn

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Parameter


def _types(config: Config) -> str:
    if get_dtype(config.dtype) == get_dtype(config.dtype, map_mixed16="float32"):
        return str(config.dtype)
    return f"float32, activations of {get_dtype(config.dtype)}"


def _shares(config: Config, size: int) -> str:
    if not isinstance(config.batch, VirtualBatch):
        return f"{config.batch / size:g} per rank"
    words = f"{counted(config.batch.virtual_workers, 'virtual worker')} of {config.batch.per_worker}"
    return f"{words}, reproducible with 1 thread per rank" if config.reproducible else words


def _batch(config: Config, size: int) -> str:
    """How a batch is divided; one rank has all of it."""
    if size == 1 and config.virtual_workers is None:
        return f"batch: {config.batch_size:,}"
    return f"ranks: {size}; batch: {config.batch_size:,}, that is {_shares(config, size)}"


def left_over(config: Config, num_steps: int) -> str:
    """What is said of the last batches where they are too few for an update."""
    number = counted(num_steps % config.accumulate, "batch", "batches")
    return f"accumulate: {number} left over at step {num_steps:,}, without the update that takes {config.accumulate}"


def describe(config: Config, made: Parts, size: int) -> list[str]:
    """The plan in a few lines."""
    num_train, params = len(made.data.train), list(made.task.params(include_uninit=False))
    num_bytes, several = sum(p.lend().nbytes for p in params), size > 1 or config.virtual_workers is not None
    test = f", {counted(len(made.data.test), 'test example')}" if made.data.test is not None else ", no evaluation"
    steps = config.steps_per_epoch(num_train)
    num_steps = math.ceil(config.epochs * steps - 1e-9)
    num_steps = num_steps if config.iterations is None else min(num_steps, config.iterations)
    sent = f"; {num_bytes:,} bytes per allreduce" if several else ""
    return [
        f"model: {config.model.name}, {sum(p.size for p in params):,} parameters of {_types(config)}",
        f"data: {config.data.name}, {counted(num_train, 'training example')}{test}",
        _batch(config, size),
        *decay_groups(config, made),
        f"steps: {steps:,.9g} per epoch, about {num_steps:,} in all{sent}",
        *([left_over(config, num_steps)] if num_steps % config.accumulate else []),
        f"seed: {config.seed}; out: {config.out}",
        *without_cudnn(made),
    ]


NO_CUDNN = (
    "convolutions are computed as matrix products, several times as slowly; install dbrdist[cudnn13x] for CUDA 13, or "
    "dbrdist[cudnn12x] for CUDA 12"
)


def without_cudnn(made: Parts) -> list[str]:
    """A line where a network with convolutions is on a GPU, and there is no cuDNN."""
    if made.device is None or not any(p.ndim == 4 for p in made.task.params(include_uninit=False)):
        return []
    try:
        cudnn.library()
    except onednn.Unavailable as error:
        return [f"cuDNN is missing ({error}): {NO_CUDNN}"]
    return []


_MAX_NAMES = 8


def decay_groups(config: Config, made: Parts) -> list[str]:
    """A line for each group of parameters that has a decay of its own; none where all decay alike."""
    groups = [(h, group_of(h, made.task)) for h in config.optimizer.hooks if hasattr(h, "rate")]
    skips_vectors = getattr(config.optimizer, "skip_vectors", False)
    if all(group is None for _, group in groups) and not skips_vectors:
        return []
    everything = {path.removeprefix("/predictor"): p for path, p in made.task.namedparams()}
    lines, reached = [], set()
    if skips_vectors:
        rate = getattr(config.optimizer, "weight_decay", None) or getattr(config.optimizer, "weight_decay_rate", 0.0)
        matrices = {path: p for path, p in everything.items() if p.ndim > 1}
        groups.insert(0, (_Decay("weight_decay", rate), matrices))
    for settings, group in groups:
        members = everything if group is None else group
        reached |= members.keys()
        lines.append(f"{settings.name} {settings.rate:g}: {_listed(members)}")
    left = {path: p for path, p in everything.items() if path not in reached}
    return [*lines, *([f"no decay: {_listed(left)}"] if left else [])]


class _Decay(NamedTuple):
    name: str
    rate: float


def _listed(members: dict[str, Parameter]) -> str:
    names = [*members][:_MAX_NAMES] + ([f"and {len(members) - _MAX_NAMES} more"] if len(members) > _MAX_NAMES else [])
    size = counted(sum(p.size for p in members.values()), "number")
    return f"{counted(len(members), 'parameter')}, {size}: {', '.join(names)}"
