"""What a run needs before its first step: data, network and iterators, checked on all ranks alike."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dbrdist.cli import build, weights
from dbrdist.cli.config import Config
from dbrdist.cli.load import Origin
from dbrdist.cli.look import Look, initialize
from dbrdist.cli.task import Task
from dbrdist.comm import create_multi_node_evaluator
from dbrdist.core import random
from dbrdist.core.backend import get_device
from dbrdist.core.config import get_dtype, global_config
from dbrdist.datasets.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.serial import SerialIterator
from dbrdist.errors import ConfigError
from dbrdist.training import extensions


class Parts(NamedTuple):
    """What a configuration names."""

    data: build.Data
    recipe: dict[str, Any]
    task: Task
    convert: Any
    device: Any


def parts(config: Config, origin: Origin, intra_rank: int, size: int) -> Parts:
    """Make data and network; the network has all its shapes."""
    global_config.dtype = config.dtype
    random.set_seed(config.seed)
    device = _device(config, origin, intra_rank)
    data = build.data(config, origin)
    check_sizes(config, origin, len(data.train), size)
    recipe = build.model_recipe(config, origin, data.num_classes)
    task = Task(build.model(config, origin, recipe), build.loss(config, origin), build.metrics(config, origin))
    if device is not None:
        task.to_device(device)
    convert = build.converter(config.dtype)
    initialize(Look(config, origin, "train", data.train, convert, device), task)
    if config.init_from is not None:
        weights.begin_with(config.init_from, task.predictor, origin)
    return Parts(data, recipe, task, convert, device)


def _device(config: Config, origin: Origin, intra_rank: int) -> Any:
    if config.device == "cpu":
        return None
    _, _, number = config.device.partition(":")
    try:
        device = get_device(("@cupy", int(number) if number else intra_rank))
        device.use()  # from now on: CuPy puts what it computes on the current device
        return device
    except Exception as error:
        raise ConfigError(f"{origin.where(('device',))}: device: {config.device} cannot be used: {error}") from error


def check_sizes(config: Config, origin: Origin, num_examples: int, size: int) -> None:
    """Every rank needs an example."""
    batches = {("batch",): config.batch}
    if config.evaluation.batch is not None:
        batches["evaluation", "batch"] = config.evaluation.batch
    for path, batch in batches.items():
        if batch < size:
            raise ConfigError(
                f"{origin.where(path)}: {'.'.join(path)}: {counted(batch, 'example')} for {size} ranks: every rank "
                "needs one; use a larger batch or fewer ranks"
            )
    if num_examples == 0:
        raise ConfigError(f"{origin.where(('data',))}: data: the training set is empty")
    if num_examples < size:
        raise ConfigError(
            f"{origin.where(('data',))}: data: {counted(num_examples, 'training example')} for {size} ranks: every "
            "rank needs one; use fewer ranks"
        )


def counted(n: int | str, noun: str) -> str:
    """For example "1 example", "2 examples"."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"


def iterator(config: Config, dataset: Any, comm: Any, train: bool) -> Any:
    """Batches over all ranks, of which this one takes its block."""
    batch = config.batch if train else config.evaluation.batch or config.batch
    options: dict[str, Any] = {"repeat": train, "shuffle": train, "seed": config.seed, "last": "short"}
    options |= {"rank": comm.rank, "size": comm.size}
    if config.workers:
        return MultiprocessIterator(dataset, batch, n_processes=config.workers, **options)
    if config.threads:
        return MultithreadIterator(dataset, batch, n_threads=config.threads, **options)
    return SerialIterator(dataset, batch, **options)


def evaluator(config: Config, made: Parts, comm: Any) -> Any:
    """Means over the whole test data, the same on every rank."""
    own = extensions.Evaluator(
        iterator(config, made.data.test, comm, train=False), made.task, made.convert, device=made.device
    )
    return create_multi_node_evaluator(own, comm)


def _types(config: Config) -> str:
    if get_dtype(config.dtype) == get_dtype(config.dtype, map_mixed16="float32"):
        return str(config.dtype)
    return f"float32, activations of {get_dtype(config.dtype)}"


def describe(config: Config, made: Parts, size: int) -> list[str]:
    """The plan in a few lines."""
    num_train, params = len(made.data.train), list(made.task.params(include_uninit=False))
    num_bytes = sum(p.array.nbytes for p in params)
    test = f", {counted(len(made.data.test), 'test example')}" if made.data.test is not None else ", no evaluation"
    steps = -(-num_train // config.batch)
    num_steps = math.ceil(config.epochs * steps - 1e-9)
    num_steps = num_steps if config.iterations is None else min(num_steps, config.iterations)
    return [
        f"model: {config.model.name}, {sum(p.size for p in params):,} parameters of {_types(config)}",
        f"data: {config.data.name}, {counted(num_train, 'training example')}{test}",
        f"ranks: {size}; batch: {config.batch}, that is {config.batch / size:g} per rank",
        f"steps: {steps} per epoch, about {num_steps} in all; {num_bytes:,} bytes per allreduce",
        f"seed: {config.seed}; out: {config.out}",
    ]
