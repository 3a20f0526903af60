"""A job on many ranks, foretold and tried on one machine: `dbrdist-train --rehearse RANKSxPER_HOST`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from dbrdist_launch.launcher.records import scratch

from dbrdist.cli.builders import assemble, memory
from dbrdist.cli.configuration import components as c
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config, VirtualBatch
from dbrdist.cli.inspection import schedule
from dbrdist.cli.output.words import counted
from dbrdist.cli.running import calibration
from dbrdist.core.array.random import generator
from dbrdist.datasets.image.images import encode_jpeg
from dbrdist.errors import ConfigError

_NUM_CLASSES, _NUM_IMAGES = 4, 8  # of the made-up photographs: classes, and images of each at least
_NUM_STEPS = 3
_MAX_TIMED = 4  # examples of the steps whose time is taken, at most
_HIDDEN_FRACTION = 2 / 3  # of a step's computation is backward, behind which reductions hide
_SECONDS_A_BYTE_WITHIN = 1.1e-3 / 2**24 * 2  # to add up a byte within a host: two ranks, 16 MiB, beyond the cache


class TargetJob(NamedTuple):
    """Where the job is going to run."""

    ranks: int
    per_host: int
    gigabits: float = 100.0  # of a host's network, each way
    microseconds: float = 5.0  # of a message between hosts
    examples_per_second: float | None = None  # of one rank, where known; else measured here

    @property
    def hosts(self) -> int:
        return self.ranks // self.per_host


class Trial(NamedTuple):
    """The small run that is tried here."""

    workers: int = 8
    per_worker: int = 2
    pixels: int = 64

    @property
    def batch(self) -> int:
        return self.workers * self.per_worker


def parse_trial(text: str) -> Trial:
    """`8x2@64` as 8 workers of 2 images of 64 pixels."""
    found = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})@([0-9]{1,4})", text)
    if not found or not all(int(part) for part in found.groups()):
        raise ConfigError(
            "dbrdist-train: --trial: expected WORKERSxIMAGES@PIXELS, such as 8x2@64 for 8 workers of 2 images at 64 "
            f"pixels, got {text!r}"
        )
    return Trial(*map(int, found.groups()))


def parse(text: str, gigabits: float, microseconds: float, examples_per_second: float | None) -> TargetJob:
    """`1024x8` as 1,024 ranks of which 8 are on each host."""
    found = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,5})", text)
    if not found or not int(found[1]) or not int(found[2]) or int(found[1]) % int(found[2]):
        raise ConfigError(
            "dbrdist-train: --rehearse: expected RANKSxPER_HOST, such as 1024x8 for 1,024 ranks with 8 on each host "
            f"(the first a multiple of the second), got {text!r}"
        )
    return TargetJob(int(found[1]), int(found[2]), gigabits, microseconds, examples_per_second)


# ---- the trial -------------------------------------------------------------------------------------------------------


def small(config: Config, origin: Origin, folder: str, trial: Trial) -> Config:
    """The same run with made-up photographs, a few virtual workers if it has any, small images, and a few steps."""
    if not isinstance(config.data, c.ImageFolder):
        words = "--rehearse makes up photographs, so the data must be an image_folder"
        raise ConfigError(f"{origin.where(('data',))}: data: {words}")
    data = config.model_dump(mode="python", exclude_unset=False)
    data["batch"] = trial.batch
    if config.virtual_workers is not None:
        data["batch"] = {"virtual_workers": trial.workers, "per_worker": trial.per_worker}
    data["data"] |= {"root": folder, "train": "train", "test": None if config.data.test is None else "test"}
    data["model"] = {**data["model"]}
    if data["model"].get("num_classes", 0) is None:
        data["model"]["num_classes"] = 1000
    for part in ("train", "test"):
        data["transforms"][part] = tuple(_shrunk(t, trial.pixels) for t in data["transforms"][part])
    for key in ("communicator", "zero", "local_steps", "accumulate", "double_buffering", "parameter_audit"):
        data[key] = Config.model_fields[key].get_default()
    data["compression"] = {"name": "none"}
    data["batch_norm"] |= {"group": 1, "batches": 1}
    data["snapshot"] |= {"best": None, "every": "1 epoch"}
    data["evaluation"] |= {"batch": None, "every": "1 epoch", "offset": 0.0}
    data["log"] |= {"every": "1 iteration", "wandb": None, "mlflow": None}  # nobody wants to see this run there
    data |= {"iterations": _NUM_STEPS, "out": os.path.join(folder, "run"), "init_from": None, "extends": None}
    data |= {"stop": None, "lr_finder": None, "batch_finder": None}
    return Config.model_validate(data)


def _shrunk(transform: dict[str, Any], pixels: int) -> dict[str, Any]:
    if "size" not in transform:
        return transform
    return {**transform, "size": pixels * 8 // 7 if transform["name"] == "resize" else pixels}


def make_photographs(folder: str, batch: int = 0) -> None:
    """JPEGs of smooth random colours, in class folders, for training (two batches at least) and for the test."""
    for part in ("train", "test"):
        for label in range(_NUM_CLASSES):
            place = os.path.join(folder, part, f"class{label}")
            os.makedirs(place)
            for i in range(max(_NUM_IMAGES, -(-2 * batch // _NUM_CLASSES) if part == "train" else 0)):
                rng = generator(0, f"rehearsal {part}", label, i)
                coarse = rng.integers(0, 256, (6, 8, 3)).astype(np.uint8)
                with open(os.path.join(place, f"{i}.jpg"), "wb") as file:
                    file.write(encode_jpeg(coarse.repeat(40, 0).repeat(40, 1), 90))


def try_out(config: Config, origin: Origin, trial: Trial, train: Callable[[Config], int]) -> int:
    """Train a few small steps of the recipe through the code of a whole run; the exit code."""
    with scratch.folder("dbrdist-rehearsal-") as folder:
        make_photographs(folder, trial.batch)
        return train(small(config, origin, folder, trial))


# ---- the prediction --------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What was measured here, on the network and images of the recipe."""

    num_parameters: int
    gradient_bytes: int
    seconds_per_example: float  # at the largest size of the images
    memory_bytes: float | None  # of a step of a rank
    update_seconds: float = 0.0  # of the optimizer, where it is not part of the time of the examples
    times: calibration.Times | None = None  # of the steps that were timed here


def measure(config: Config, origin: Origin, job: TargetJob) -> Measured:
    """Make the network and time a step of a few images of the recipe's size, the largest where it changes."""
    with scratch.folder("dbrdist-rehearsal-") as folder:
        make_photographs(folder)
        data = small(config, origin, folder, Trial()).model_dump(mode="python")
        data["transforms"] = config.transforms.model_dump(mode="python")
        for transform in data["transforms"]["train"]:
            if isinstance(transform.get("size"), tuple):
                transform["size"] = max(size for _, size in transform["size"])
        own = Config.model_validate(data)
        made = assemble.parts(own, origin, 0, 1)
        need = memory.measure(own, origin, made)
        together = _examples_at_once(config, job.ranks)
        times, per_example, update = None, 0.0, 0.0
        if job.examples_per_second is None:
            times = calibration.measure(own, origin, made, job.per_host, min(together, _MAX_TIMED))
            parts = _examples_of_busiest(config, job.ranks) / times.num_examples
            per_example = calibration.of_slowest(times.computation, job.ranks, parts) / times.num_examples
            update = calibration.of_slowest(times.update, job.ranks)
        else:
            per_example = 1 / job.examples_per_second
        params = list(made.task.params())
        num_bytes = sum(p.lend().nbytes for p in params)
        needed = None if need is None else need.of(together) + (1 + _num_copies(config, job.ranks)) * num_bytes
        return Measured(sum(p.size for p in params), num_bytes, per_example, needed, update, times)


def _num_copies(config: Config, ranks: int) -> int:
    """How often a rank keeps as much as the parameters beside them, their gradients and the optimizer's state."""
    copies = 0 if config.ema is None else 1
    if config.virtual_workers is not None:  # sums of subtrees over the workers of a rank
        copies += max((-(-config.virtual_workers // ranks) - 1).bit_length(), 1)
    return copies


def _examples_at_once(config: Config, ranks: int) -> int:
    """Of a rank's forward pass."""
    return config.batch.per_worker if isinstance(config.batch, VirtualBatch) else -(-config.batch // ranks)


def _examples_of_busiest(config: Config, ranks: int) -> int:
    """Of a step of the rank that has most of them."""
    if config.virtual_workers is not None:
        return -(-config.virtual_workers // ranks) * config.batch_size // config.virtual_workers
    return -(-config.batch_size // ranks)


class Prediction(NamedTuple):
    """Of a step, in seconds."""

    computation: float
    communication: float
    step: float

    @property
    def efficiency(self) -> float:
        """Of the time of ranks that compute."""
        return self.computation / self.step


def ring_bytes(ranks: int, num_bytes: float) -> float:
    """What a rank sends in a reduction: 2 (p - 1) / p of the gradients."""
    return 2 * (ranks - 1) / ranks * num_bytes


def predict(config: Config, job: TargetJob, measured: Measured, work: float = 1.0) -> Prediction:
    """The time of a step: computation of the busiest rank, then what communication does not hide behind it.

    ``work`` is that of an example relative to one of the largest size.

    Within a host its ranks add up their gradients in shared memory; between hosts the sums go round in a ring, of one
    stream for each host. With virtual workers nothing is hidden: gradients are added when all of them are there. Where
    sums are reproducible each rank exchanges with each other one, so that all ranks of a host send.
    """
    computation = (
        _examples_of_busiest(config, job.ranks) * measured.seconds_per_example * work + measured.update_seconds
    )
    sent = wire_bytes(config, measured)
    within = measured.gradient_bytes * _SECONDS_A_BYTE_WITHIN if job.per_host > 1 else 0.0
    between = 0.0
    if job.hosts > 1:
        senders, partners = (job.per_host, job.ranks) if config.reproducible else (1, job.hosts)
        num_bytes = senders * ring_bytes(job.hosts, sent)
        between = num_bytes * 8 / (job.gigabits * 1e9) + 2 * (partners - 1) * job.microseconds * 1e-6
    communication = within + between
    hidden = 0.0 if config.virtual_workers is not None else _HIDDEN_FRACTION * (computation - measured.update_seconds)
    return Prediction(computation, communication, computation + max(communication - hidden, 0.0))


def whole_seconds(config: Config, job: TargetJob, measured: Measured, num_examples: int) -> tuple[int, float]:
    """The number of steps of the run, and their time; images that are smaller at first take less."""
    sizes = next((t.size for t in config.transforms.train if isinstance(getattr(t, "size", None), tuple)), None)
    if sizes is None:
        steps = sum(1 for _ in schedule.positions(config, num_examples))
        return steps, steps * predict(config, job, measured).step
    size_at, largest = schedule.size_at(sizes), max(size for _, size in sizes)
    counts = Counter(size_at(epoch) for epoch in schedule.positions(config, num_examples))
    times = {size: predict(config, job, measured, (size / largest) ** 2).step for size in counts}
    return sum(counts.values()), sum(count * times[size] for size, count in counts.items())


def wire_bytes(config: Config, measured: Measured) -> float:
    """Of one rank's gradients as they are sent; those that virtual workers have rounded are added in their own type."""
    narrow = config.gradient_dtype is not None and config.virtual_workers is None
    return measured.num_parameters * 2 if narrow else measured.gradient_bytes


def describe(config: Config, origin: Origin, job: TargetJob, num_examples: int) -> Iterator[str]:
    """What the job is going to do, line by line."""
    workers = config.virtual_workers
    if job.ranks > (config.batch_size if workers is None else workers):
        limit = f"the {workers} virtual workers" if workers is not None else f"a batch of {config.batch_size}"
        raise ConfigError(f"dbrdist-train: --rehearse: {job.ranks} ranks are more than {limit}; every rank needs one")
    measured = measure(config, origin, job)
    prediction = predict(config, job, measured)
    steps, seconds = whole_seconds(config, job, measured, num_examples)
    yield f"ranks: {job.ranks:,} on {counted(job.hosts, 'host')}, {job.per_host} on each"
    yield f"batch: {config.batch_size:,}, that is {config.batch_size / job.ranks:g} examples per rank" + (
        "" if workers is None else f"; {workers:,} virtual workers of {config.batch_size // workers}"
    )
    yield f"data: {num_examples:,} examples; {steps:,} steps, {config.steps_per_epoch(num_examples):,.9g} per epoch"
    epochs = list(schedule.positions(config, num_examples))
    for name, column in schedule.columns(config, origin).items():
        yield f"{name}: {_over_the_run(column, epochs)}"
    sent, whole = wire_bytes(config, measured), measured.num_parameters * 2
    yield (
        f"reduction: {measured.num_parameters:,} parameters, {sent / 1e6:.1f} MB; a ring over all ranks sends "
        f"{ring_bytes(job.ranks, sent) / 1e6:.2f} MB per rank and step, "
        f"{ring_bytes(job.ranks, whole) / 1e6:.2f} in 16 bits"
    )
    if measured.memory_bytes is not None:
        need = f"about {measured.memory_bytes / 1e9:.2f} GB per rank beside the process"
        yield f"memory: {need}, {job.per_host} on each host"
    rate = 1 / measured.seconds_per_example
    source = "given" if measured.times is None else _source(measured.times, job)
    yield f"computation: {prediction.computation:.4g} s per step, at {rate:,.4g} examples/s per rank ({source})"
    yield (
        f"communication: {prediction.communication:.4g} s per step, at {job.gigabits:g} Gbit/s and "
        f"{job.microseconds:g} us between hosts"
    )
    grows = any(isinstance(getattr(t, "size", None), tuple) for t in config.transforms.train)
    at, limit = " with the largest images" if grows else "", " at most" if config.stop is not None else " in all"
    yield (
        f"step: {prediction.step:.4g} s{at}{_range(config, job, measured)}, "
        f"{config.batch_size / prediction.step:,.0f} examples/s, efficiency {100 * prediction.efficiency:.0f} %; "
        f"{_duration(seconds)}{limit}, without evaluations"
    )


def _range(config: Config, job: TargetJob, measured: Measured) -> str:
    """From the step in which all ranks are as fast as the fastest step measured here to that of the slowest one."""
    if measured.times is None:
        return ""
    number, every = measured.times.num_examples, (measured.times.computation, measured.times.update)
    least, most = (
        predict(config, job, measured._replace(seconds_per_example=pick(a) / number, update_seconds=pick(b))).step
        for pick, (a, b) in ((min, every), (max, every))
    )
    return f" ({least:.4g} to {most:.4g} with the fastest and the slowest step measured here)"


def _source(times: calibration.Times, job: TargetJob) -> str:
    """How the speed was measured, and how much the steps differ."""
    alone = "by one process with all of its threads"
    if times.num_processes > 1:
        alone = f"by {times.num_processes} processes at the same time, {counted(times.num_threads, 'thread')} each"
    fewer = "" if times.num_processes in (1, job.per_host) else f", as this machine has no cores for {job.per_host}"
    least, most = (times.num_examples / pick(times.computation) for pick in (max, min))
    steps = f"{len(times.computation)} steps of {counted(times.num_examples, 'image')}"
    return f"measured here {alone}{fewer}, in {steps}: {least:,.4g} to {most:,.4g}, the slowest rank's counts"


def _over_the_run(column: Callable[[float], Any], epochs: list[float]) -> str:
    """The values of the first step, of the first one with the highest, and of the last step."""
    values = [column(epoch) for epoch in epochs]
    top = max(range(len(values)), key=values.__getitem__)
    most = f"{values[top]:.6g} at most (epoch {epochs[top]:.4g})"
    return f"{values[0]:.6g} at the start, {most}, {values[-1]:.6g} at the end"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"
