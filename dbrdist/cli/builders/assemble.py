"""What a run needs before its first step: data, network and iterators, checked on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dbrdist.cli.builders import batch_norm, build, weights
from dbrdist.cli.builders.probe import Look, initialize
from dbrdist.cli.builders.task import Task
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.output.words import counted
from dbrdist.comm import create_multi_node_evaluator
from dbrdist.core.array import random
from dbrdist.core.array.backend import bus_id_of_device, get_device, num_gpus
from dbrdist.core.array.config import global_config
from dbrdist.datasets import open_images
from dbrdist.datasets.loading.prefetch import MultiprocessIterator, MultithreadIterator
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import ConfigError
from dbrdist.training import extensions

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.datasets.loading.base import Dataset


class Parts(NamedTuple):
    """What a configuration names."""

    data: build.Data
    recipe: dict[str, Any]
    task: Task
    convert: Any
    device: Any


def parts(config: Config, origin: Origin, intra_rank: int, size: int, find: build.FindImages = open_images) -> Parts:
    """Make data and network; the network has all its shapes. ``find`` gives the index of a folder of images."""
    global_config.dtype = config.dtype
    global_config.cudnn_deterministic = config.deterministic
    global_config.float32_products = config.float32_products
    global_config.fused_convolutions = config.fused_convolutions
    random.set_seed(config.seed)
    device = _device(config, origin, intra_rank)
    data = build.data(config, origin, find)
    check_sizes(config, origin, len(data.train), size)
    if data.test is not None and not len(data.test):
        raise ConfigError(
            f"{origin.where(('data',))}: data: the test set is empty; leave it out (test: null, or None from your own "
            "data) for a run without evaluation"
        )
    recipe = build.model_recipe(config, origin, data.num_classes)
    network = build.model(config, origin, recipe)
    task = Task(network, build.loss(config, origin), build.metrics(config, origin), config.evaluation.flip)
    batch_norm.prepare(task, config.batch_norm)
    if device is not None:
        task.to_device(device)
    convert = build.converter_for(config)
    initialize(Look(config, origin, "train", data.train, convert, device), task)
    if config.init_from is not None:
        weights.begin_with(config.init_from, task.predictor, origin, {**recipe, "classes": data.classes})
    return Parts(data, recipe, task, convert, device)


def _device(config: Config, origin: Origin, intra_rank: int) -> Any:
    if config.device == "cpu":
        return None
    _, _, number = config.device.partition(":")
    try:
        device = get_device(("@cupy", int(number) if number else intra_rank % max(num_gpus(), 1)))
        device.use()  # from now on: CuPy puts what it computes on the current device
        return device
    except Exception as error:
        raise ConfigError(f"{origin.where(('device',))}: device: {config.device} cannot be used: {error}") from error


def share_gpus(config: Config, origin: Origin, comm: CommunicatorBase) -> str:
    """Compare the GPUs of the ranks. Collective: the same error on all where one could have been had alone.

    Returns a sentence where ranks share GPUs because there are fewer, else an empty text.
    """
    if config.device == "cpu" or comm.size == 1:
        return ""
    mine = comm.inter_rank, bus_id_of_device(), num_gpus()
    return sharing_of_gpus(config, origin, comm.allgather_obj(mine))


def sharing_of_gpus(config: Config, origin: Origin, places: list[tuple[int, str, int]]) -> str:
    """As :func:`share_gpus`; for each rank its host, the bus id of its GPU, and how many GPUs it sees."""
    users: dict[tuple[int, str], list[int]] = {}
    seen: dict[int, int] = {}
    for rank, (host, bus, num_visible) in enumerate(places):
        users.setdefault((host, bus), []).append(rank)
        seen[host] = max(seen.get(host, 0), num_visible)
    shared = {place: ranks for place, ranks in users.items() if len(ranks) > 1}
    if not shared:
        return ""
    for (host, bus), ranks in shared.items():
        num_used = sum(place[0] == host for place in users)
        names = " and ".join(map(str, ranks))
        if config.communicator == "pure_nccl":
            raise ConfigError(
                f"{origin.where(('device',))}: device: {config.device}: ranks {names} would share the GPU {bus}, which "
                f"NCCL refuses; start at most {counted(seen[host], 'rank')} on a host, or take communicator: auto"
            )
        if num_used < seen[host]:
            raise ConfigError(
                f"{origin.where(('device',))}: device: {config.device}: ranks {names} would share the GPU {bus}, "
                f"though {counted(seen[host] - num_used, 'GPU')} of their host would stay idle; write device: gpu, and "
                "let each rank see all GPUs of its host or one of its own (CUDA_VISIBLE_DEVICES)"
            )
    most = max(map(len, shared.values()))
    return f"GPUs are shared: up to {most} ranks on one, since there are fewer GPUs than ranks"


def check_sizes(config: Config, origin: Origin, num_examples: int, size: int) -> None:
    """Every rank needs an example, or a virtual worker and each of these an example."""
    num_workers = config.virtual_workers
    if num_workers is not None and num_workers < size:
        raise ConfigError(
            f"{origin.where(('batch', 'virtual_workers'))}: batch.virtual_workers: {num_workers} for {size} ranks: "
            f"every rank needs one; use at most {counted(num_workers, 'rank')}"
        )
    batches = {("batch",): config.batch_size}
    if config.evaluation.batch is not None:
        batches["evaluation", "batch"] = config.evaluation.batch
    for path, batch in batches.items():
        shared_by = f"{size} ranks: every rank" if num_workers is None else f"{num_workers} virtual workers: every one"
        if batch < (num_workers or size):
            raise ConfigError(
                f"{origin.where(path)}: {'.'.join(path)}: {counted(batch, 'example')} for {shared_by} "
                f"needs one; use a larger batch or fewer {'ranks' if num_workers is None else 'virtual workers'}"
            )
    if num_examples == 0:
        raise ConfigError(f"{origin.where(('data',))}: data: the training set is empty")
    if config.last_batch == "drop" and num_examples < config.batch_size:
        raise ConfigError(
            f"{origin.where(('last_batch',))}: last_batch: drop leaves out all "
            f"{counted(num_examples, 'training example')}, which are fewer than the batch of {config.batch_size:,}; "
            "use a smaller batch, or short"
        )
    if num_examples < size and num_workers is None:
        raise ConfigError(
            f"{origin.where(('data',))}: data: {counted(num_examples, 'training example')} for {size} ranks: every "
            "rank needs one; use fewer ranks"
        )


def iterator(config: Config, dataset: Dataset, comm: CommunicatorBase, train: bool) -> Any:
    """Batches over all ranks, of which this one takes its block."""
    batch = config.batch_size if train else config.evaluation.batch or config.batch_size
    options: dict[str, Any] = {"repeat": train, "shuffle": train, "seed": config.seed}
    options["last"] = config.last_batch if train else "short"
    options |= {"rank": comm.rank, "size": comm.size, "virtual_workers": config.virtual_workers}
    if config.workers:
        return MultiprocessIterator(dataset, batch, n_processes=config.workers, **options)
    if config.threads:
        return MultithreadIterator(dataset, batch, n_threads=config.threads, **options)
    return SerialIterator(dataset, batch, **options)


def evaluator(config: Config, made: Parts, comm: CommunicatorBase, begin: Callable[[Any], None] | None = None) -> Any:
    """Means over the whole test data, the same on every rank; `begin` is called before the first batch."""
    batches = iterator(config, made.data.test, comm, train=False)
    own = extensions.Evaluator(batches, made.task, made.convert, device=made.device, eval_hook=begin)
    return create_multi_node_evaluator(own, comm)
