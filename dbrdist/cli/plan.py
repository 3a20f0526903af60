"""What a run is going to do, in a few lines for people."""

from __future__ import annotations

import math

from dbrdist.cli.assemble import Parts
from dbrdist.cli.config import Config, VirtualBatch
from dbrdist.cli.words import counted
from dbrdist.core.config import get_dtype


def _types(config: Config) -> str:
    if get_dtype(config.dtype) == get_dtype(config.dtype, map_mixed16="float32"):
        return str(config.dtype)
    return f"float32, activations of {get_dtype(config.dtype)}"


def _shares(config: Config, size: int) -> str:
    if not isinstance(config.batch, VirtualBatch):
        return f"{config.batch / size:g} per rank"
    words = f"{counted(config.batch.virtual_workers, 'virtual worker')} of {config.batch.per_worker}"
    return f"{words}, reproducible with 1 thread per rank" if config.reproducible else words


def describe(config: Config, made: Parts, size: int) -> list[str]:
    """The plan in a few lines."""
    num_train, params = len(made.data.train), list(made.task.params(include_uninit=False))
    num_bytes = sum(p.array.nbytes for p in params)
    test = f", {counted(len(made.data.test), 'test example')}" if made.data.test is not None else ", no evaluation"
    steps = -(-num_train // config.batch_size)
    num_steps = math.ceil(config.epochs * steps - 1e-9)
    num_steps = num_steps if config.iterations is None else min(num_steps, config.iterations)
    return [
        f"model: {config.model.name}, {sum(p.size for p in params):,} parameters of {_types(config)}",
        f"data: {config.data.name}, {counted(num_train, 'training example')}{test}",
        f"ranks: {size}; batch: {config.batch_size}, that is {_shares(config, size)}",
        f"steps: {steps} per epoch, about {num_steps} in all; {num_bytes:,} bytes per allreduce",
        f"seed: {config.seed}; out: {config.out}",
    ]
