"""What a training run can be told: frozen models, each field with one sentence that names its unit.

A *component* (model, data, transform, loss, optimizer, hook, schedule) is written as its name, or as a mapping with
`name` and its settings. In place of a built-in name, `package.module:callable` names the user's own, whose arguments
stand under `args`; it is imported from the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dbrdist.cli import components as parts
from dbrdist.cli import updates
from dbrdist.cli.settings import BY_TAG, Count, Custom, Path, Positive, Settings, Tuple, component, form, own, refuse

# ---- when -------------------------------------------------------------------------------------------------------


def _period(value: Any) -> Any:
    """`1 epoch`, `0.5 epochs` or `200 iterations` as (period, unit)."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(epoch|iteration)s?\s*", value)
        if found:
            period = float(found[1])
            if period > 0 and (found[2] == "epoch" or period.is_integer()):
                return f"{found[1]} {found[2]}"
    raise PydanticCustomError("period", "expected a period such as '1 epoch', '0.5 epochs' or '200 iterations'")


Period = Annotated[str, BeforeValidator(_period, json_schema_input_type=str)]


def interval(period: str) -> tuple[float, str]:
    """`"0.5 epoch"` as `(0.5, "epoch")`, and whole numbers as int: what a trigger takes."""
    number, unit = period.split()
    return (float(number) if unit == "epoch" and not float(number).is_integer() else int(float(number))), unit


def _loss_scale(value: Any) -> Any:
    """`auto` or a number above 0."""
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise PydanticCustomError("loss_scale", "expected auto or a number above 0")


LossScale = Annotated[str | float, BeforeValidator(_loss_scale, json_schema_input_type=Literal["auto"] | Positive)]


class CustomExtension(Custom):
    """The user's own extension of the training loop."""

    every: Period | None = None
    """Time between two calls: epochs or iterations; what the extension says itself if not given."""


class Snapshot(Settings):
    """When the whole state of the run is saved."""

    every: Period = "1 epoch"
    """Time between two snapshots: epochs or iterations."""
    keep: Count = 2
    """Number of newest snapshots that are kept."""


class Log(Settings):
    """When means are written to log.jsonl and printed."""

    every: Period = "1 epoch"
    """Time between two lines: epochs or iterations."""


class VirtualBatch(Settings):
    """A batch that virtual workers share: the same recipe on any number of ranks up to theirs."""

    virtual_workers: Count
    """Number of virtual workers, of which each rank has a part."""
    per_worker: Count
    """Examples per step of each virtual worker."""


class Evaluation(Settings):
    """When the test data is gone through."""

    every: Period = "1 epoch"
    """Time between two evaluations: epochs or iterations."""
    batch: Count | None = None
    """Examples per step over all ranks; the training batch if not given."""


def _init_from(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _kind_of_batch(value: Any) -> str:
    return "<batch of workers>" if isinstance(value, dict | VirtualBatch) else "<batch>"


BY_TAG.update(dict.fromkeys(("<batch of workers>", "<batch>"), VirtualBatch))
Batch = Annotated[
    Annotated[Count, Tag("<batch>")] | Annotated[VirtualBatch, Tag("<batch of workers>")], Discriminator(_kind_of_batch)
]


# ---- the run ----------------------------------------------------------------------------------------------------


class Config(Settings):
    """A training run."""

    model: component("model", parts.Mlp, parts.LeNet, parts.CifarResNet, parts.ResNet50)
    """The network: a built-in name or your own callable that returns a Link."""
    data: component("data", parts.Digits, parts.Cifar10, parts.ImageFolder, parts.Npz)
    """The examples: a built-in name or your own callable that returns (train, test), test None for no evaluation."""
    loss: component("loss", parts.CrossEntropy, parts.PlainLoss, default="softmax_cross_entropy") = parts.CrossEntropy(
        name="softmax_cross_entropy"
    )
    """What is minimised: a built-in name or your own function of (outputs, labels)."""
    transforms: parts.Transforms = parts.Transforms()
    """What happens to each image."""
    optimizer: component(
        "optimizer",
        *updates.OPTIMIZERS,
        custom=updates.CustomOptimizer,
        default="momentum_sgd",
    ) = updates.MomentumSgd(name="momentum_sgd")
    """The update rule with its hyperparameters, hooks and schedule."""
    init_from: Annotated[parts.InitFrom | None, BeforeValidator(_init_from)] = None
    """Weights to begin with: a path, or a mapping with `path` and `skip`."""
    metrics: Tuple(own("metric")) = ()
    """What is reported beside the loss: your own functions of (outputs, labels)."""
    extensions: Tuple(own("extension", CustomExtension)) = ()
    """What else happens between steps: your own callables that return an extension."""
    batch: Batch
    """Examples per step over all ranks together, or a mapping of `virtual_workers` and `per_worker`."""
    reproducible: bool = False
    """Whether the results are the same bits on any number of ranks; needs virtual workers."""
    epochs: Annotated[float, Field(gt=0, le=1e9)]
    """Length of the run in passes over the training data; fractions allowed."""
    iterations: Count | None = None
    """Steps after which the run ends even if `epochs` are not over."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Start of all chance: initial values, order, augmentation, dropout."""
    communicator: Literal["auto", "naive", "flat"] = "auto"
    """How ranks exchange gradients; `auto` takes what fits."""
    dtype: Literal["float32", "float64", "float16", "bfloat16", "mixed16", "mixedbf16"] = "float32"
    """Type of parameters and activations; `mixed16` and `mixedbf16`: parameters in float32, activations in 16 bits."""
    loss_scale: LossScale = "auto"
    """Factor of the loss in backward; `auto` is a dynamic one for float16 and mixed16, and none for other types."""
    device: form(r"cpu|gpu(:\d+)?", "cpu, gpu or gpu:N") = "cpu"
    """`cpu`, `gpu` (the one of this rank within its host) or `gpu:N`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes per rank that load and transform examples; 0 does it in the rank itself."""
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads per rank that decode and transform images while it computes; 0 does it in the rank itself."""
    evaluation: Evaluation = Evaluation()
    """When and how the test data is gone through."""
    snapshot: Snapshot = Snapshot()
    """When the state is saved."""
    log: Log = Log()
    """When means are written."""
    out: Path = "result"
    """The run's folder: resolved configuration, log, snapshots, summary."""

    @property
    def batch_size(self) -> int:
        """Examples per step over all ranks together."""
        batch = self.batch
        return batch.virtual_workers * batch.per_worker if isinstance(batch, VirtualBatch) else batch

    @property
    def virtual_workers(self) -> int | None:
        """How many virtual workers share a batch; None where the ranks themselves do."""
        return self.batch.virtual_workers if isinstance(self.batch, VirtualBatch) else None

    @model_validator(mode="after")
    def _possible(self) -> Config:
        for path, words in self._impossible():
            refuse(path, words)
        return self

    def _impossible(self) -> Iterator[tuple[str, str]]:
        if self.epochs < 1e-8:
            yield "epochs", f"{self.epochs:g} epochs are less than one step"
        if self.batch_size > 2**31 - 1:
            yield "batch", f"{self.batch_size:,} examples per step are more than {2**31 - 1:,}"
        if self.reproducible and self.virtual_workers is None:
            yield (
                "reproducible",
                "sums over ranks depend on how many there are; write `batch: {virtual_workers: V, per_worker: b}`, "
                "and any number of ranks up to V gives the same bits",
            )
        if self.reproducible and self.device != "cpu":
            yield "reproducible", f"expected device: cpu, where sums have a fixed order, got {self.device}"
        largest = 65504 if self.dtype in ("float16", "mixed16") else 3e38
        if not isinstance(self.loss_scale, str) and self.loss_scale > largest:
            yield "loss_scale", f"{self.dtype} takes at most {largest:g}, got {self.loss_scale:g}"
        schedule = self.optimizer.schedule
        if isinstance(schedule, updates.Schedule) and schedule.warmup_epochs > self.epochs:
            yield (
                "optimizer.schedule.warmup_epochs",
                f"a warm-up of {schedule.warmup_epochs:g} epochs is longer than the run of {self.epochs:g}",
            )
        if isinstance(schedule, updates.Step) and schedule.milestones[-1] >= self.epochs:
            yield (
                "optimizer.schedule.milestones",
                f"epoch {schedule.milestones[-1]:g} is never reached: the run has {self.epochs:g} epochs",
            )
        if self.threads and self.workers:
            yield "threads", "threads and workers do the same: threads for images, workers for transforms in Python"
        if isinstance(self.data, parts.Cifar10) and (self.transforms.train or self.transforms.test):
            yield "transforms", "cifar10 brings its own transforms; use image_folder for others"
        for i, transform in enumerate(self.transforms.test):
            if isinstance(transform, parts.RandomCrop | parts.RandomResizedCrop | parts.RandomFlip):
                yield f"transforms.test.{i}", f"{transform.name} is chance, which has no place in an evaluation"
