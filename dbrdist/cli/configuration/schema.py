"""The keys of a training run: frozen models, each field with one sentence that names its unit.

A *component* (model, data, transform, loss, optimizer, hook, schedule) is written as its name, or as a mapping with
`name` and its settings. In place of a built-in name, `package.module:callable` names the user's own, whose arguments
stand under `args`; it is imported from the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from dbrdist.cli.configuration import components as parts
from dbrdist.cli.configuration import updates
from dbrdist.cli.configuration.derived import derived, takes
from dbrdist.cli.configuration.finders import BatchFinder, LearningRateFinder
from dbrdist.cli.configuration.periods import Period, Periods, interval
from dbrdist.cli.configuration.settings import (
    BY_TAG,
    Count,
    Custom,
    Fraction,
    NotNegative,
    OwnName,
    Path,
    Positive,
    Settings,
    Tuple,
    component,
    form,
    own,
    refuse,
)
from dbrdist.comm.communicators.create import FOR_TRAINING
from dbrdist.core.names.exclusions import conflicts
from dbrdist.training.extensions.weight_average import WeightAverage
from dbrdist.training.goals import GoalTrigger


def _loss_scale(value: float | str) -> float | str:
    """`auto` or a number above 0."""
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise PydanticCustomError("loss_scale", "expected auto or a number above 0")


_Scale = Annotated[float, Field(gt=0, le=3e38)]
LossScale = Annotated[str | float, BeforeValidator(_loss_scale, json_schema_input_type=Literal["auto"] | _Scale)]


class CustomExtension(Custom):
    """The user's own extension of the training loop."""

    every: Period | None = None
    """Time between two calls: epochs or iterations; what the extension says itself if not given."""


class Snapshot(Settings):
    """When the whole state of the run is saved."""

    every: Periods = "1 epoch"
    """Time between two snapshots: epochs, iterations, seconds, minutes or hours; `1 epoch or 30 minutes` saves at
    both. There is always one at the end of the run."""
    keep: Count = 2
    """Number of newest snapshots that are kept."""
    best: Path | None = None
    """An observed value, such as `validation/main/accuracy`: where it is best, `snapshot_best` is saved too."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which value of `best` is better; `auto` is `max` where its name has `accuracy` in it, else `min`."""
    background: bool = False
    """Whether a thread writes snapshots while the training continues; it takes a copy of the state in memory, which
    rank 0 keeps. Files are complete or not there, as without."""


class Log(Settings):
    """When means are written to log.jsonl and printed."""

    every: Period = "1 epoch"
    """Time between two lines: epochs or iterations."""
    tensorboard: bool = False
    """Whether the lines are written as event files for TensorBoard too, into the run's folder."""
    csv: bool = False
    """Whether the lines are written as a table, `log.csv` in the run's folder, too."""
    wandb: dict[str, Any] | None = None
    """Arguments of `wandb.init`, such as `project`, for Weights & Biases; null sends nothing there."""
    mlflow: dict[str, Any] | None = None
    """`tracking_uri` and arguments of `mlflow.start_run`, such as `run_name`, for MLflow; null sends nothing there."""
    examples: Annotated[int, Field(ge=0, le=1000)] = 12
    """Test images that the report shows with their predictions, and as many of the worst mistakes; 0 for none."""


class VirtualBatch(Settings):
    """A batch that virtual workers share: the same recipe on any number of ranks up to theirs."""

    virtual_workers: Count
    """Number of virtual workers, of which each rank has a part."""
    per_worker: Count
    """Examples per step of each virtual worker."""


class Evaluation(Settings):
    """When the test data is gone through."""

    every: Period = "1 epoch"
    """Time between two evaluations: epochs or iterations; there is always one at the end of the run."""
    batch: Count | None = None
    """Examples per step over all ranks; the training batch if not given."""
    offset: NotNegative = 0.0
    """Periods of `every` are counted from here on, in its unit: `4 epochs` and 1 evaluate after epochs 1, 5, 9, ..."""
    flip: bool = False
    """Whether outputs are means over those of each image and of its mirror image."""


class BatchNorm(Settings):
    """What batch normalizations normalize with."""

    statistics: Literal["running", "last", "recalibrated"] = "running"
    """What evaluations and snapshots use: `running` averages; those of the `last` batch; or those `recalibrated` over
    training batches with the weights of the moment. All are averaged over the ranks."""
    batches: Count = 100
    """For `recalibrated`: training batches that are gone through before each evaluation."""
    group: Count = 1
    """Ranks, neighbours, whose batches are normalized together in training; 1 leaves each to itself."""
    eps: Positive | None = None
    """What is added to the variance; the network's own, 2e-5 for built-in ones, if not given."""


class StopSettings(Settings):
    """What `stop` has besides the settings of the trigger."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": [k], "properties": {k: {"type": "number"}}} for k in ("target", "patience")]
        }
    )

    metric: Path = "validation/main/accuracy"
    """An observed value."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> StopSettings:
        stop: Any = self
        if stop.target is None and stop.patience is None:
            refuse("target", "expected target, patience or both, got neither")
        return self


Stop = derived(
    GoalTrigger,
    title="Stop",
    base=StopSettings,
    is_named=False,
    words="When the run ends before its last epoch.",
)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _init_from(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _exactly_one_of(a: str, b: str) -> Any:
    """For the schema: one of two keys is given, and not null."""
    return [{"required": [k], "properties": {k: {"not": _NULL}, o: _NULL}} for k, o in ((a, b), (b, a))]


_NULL = {"type": "null"}


class EmaSettings(Settings):
    """What `ema` has besides the settings of the average."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _exactly_one_of("decay", "half_life")})

    half_life: Period | None = None
    """The time after which a step's weights count half, in epochs or iterations; it gives the decay."""

    @model_validator(mode="after")
    def _one_of_both(self) -> EmaSettings:
        ema: Any = self
        if (ema.decay is None) == (ema.half_life is None):
            refuse("decay", "expected either decay or half_life, got " + ("none" if ema.decay is None else "both"))
        return self

    def decay_for(self, steps_per_epoch: float) -> float:
        """The fraction of the average that an update of it keeps."""
        ema: Any = self
        if self.half_life is None:
            return float(ema.decay or 0.0)
        length, unit = interval(self.half_life)
        return float(0.5 ** (ema.every / (length * (steps_per_epoch if unit == "epoch" else 1))))


Ema = derived(
    WeightAverage,
    title="Ema",
    base=EmaSettings,
    is_named=False,
    words="A moving average of the weights, which is evaluated and saved.",
    decay=(Fraction | None, None),
)


def _ema(value: Any) -> Any:
    return {"decay": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _kind_of_batch(value: Any) -> str:
    return "<batch of workers>" if isinstance(value, dict | VirtualBatch) else "<batch>"


BY_TAG.update(dict.fromkeys(("<batch of workers>", "<batch>"), VirtualBatch))
BatchSettings = Annotated[
    Annotated[Count, Tag("<batch>")] | Annotated[VirtualBatch, Tag("<batch of workers>")], Discriminator(_kind_of_batch)
]


# ---- the run ----------------------------------------------------------------------------------------------------


class Config(Settings):
    """A training run."""

    extends: Path | None = None
    """Another configuration, relative to this file, whose entries this one changes or adds to."""
    model: component("model", *parts.MODELS)
    """The network: a built-in name or your own callable that returns a Link."""
    data: component("data", parts.Digits, parts.Cifar10, parts.ImageFolder, parts.Npz)
    """The examples: a built-in name or your own callable that returns (train, test), test None for no evaluation."""
    loss: component(
        "loss", parts.CrossEntropy, parts.BinaryCrossEntropy, parts.PlainLoss, default="softmax_cross_entropy"
    ) = parts.CrossEntropy(name="softmax_cross_entropy")
    """What is minimised: a built-in name or your own function of (outputs, labels)."""
    transforms: parts.Transforms = parts.Transforms()
    """What happens to each image."""
    optimizer: component(
        "optimizer",
        *updates.OPTIMIZERS,
        custom=updates.CustomOptimizer,
        default="momentum_sgd",
    ) = updates.MomentumSGD(name="momentum_sgd")
    """The update rule with its hyperparameters, hooks and schedule."""
    schedules: Tuple(updates.Scheduled) = ()
    """How other numbers than the learning rate change over the run."""
    ema: Annotated[Ema | None, BeforeValidator(_ema, json_schema_input_type=Fraction | Ema | None)] = None
    """A moving average of the weights: its decay, or a mapping with `decay` or `half_life`, `every` and `warmup`."""
    updater: Annotated[Custom | None, BeforeValidator(_named, json_schema_input_type=OwnName | Custom | None)] = None
    """What does a step: your own callable that returns a StandardUpdater."""
    init_from: Annotated[
        parts.InitFrom | None, BeforeValidator(_init_from, json_schema_input_type=Path | parts.InitFrom | None)
    ] = None
    """Weights to begin with: a path, or a mapping with `path` and `skip`."""
    metrics: Tuple(component("metric", parts.TopKAccuracy)) = ()
    """What is reported beside the loss: `top_k_accuracy`, or your own functions of (outputs, labels)."""
    extensions: Tuple(own("extension", CustomExtension)) = ()
    """What else happens between steps: your own callables that return an extension."""
    batch: BatchSettings
    """Examples per step over all ranks together, or a mapping of `virtual_workers` and `per_worker`."""
    last_batch: Literal["short", "wrap", "drop"] = "short"
    """The last batch of an epoch: `short` has what is left; `wrap` is filled up from the next epoch; `drop` leaves the
    rest of the epoch out."""
    repeats: Count = 1
    """How often each image comes in an epoch, differently augmented; an epoch then shows so many times fewer images."""
    reproducible: bool = False
    """Whether the results are the same bits on any number of ranks; needs virtual workers."""
    epochs: Annotated[float, Field(gt=0, le=1e9, json_schema_extra={"minimum": 1e-8})]
    """Length of the run in passes over the training data; fractions allowed."""
    iterations: Count | None = None
    """Steps after which the run ends even if `epochs` are not over."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Start of all chance: initial values, order, augmentation, dropout."""
    communicator: Literal[("auto", *FOR_TRAINING)] = "auto"
    """How ranks exchange gradients; `auto` takes what fits."""
    zero: Annotated[int, Field(ge=0, le=2)] = 0
    """What is divided over ranks instead of held by each: 1 the optimizer's state, 2 gradients too, 0 nothing."""
    compression: component("compression", updates.NoCompression, *updates.COMPRESSIONS, custom=None) = (
        updates.NoCompression(name="none")
    )
    """How gradients are sent as fewer bytes; `none` sends them whole."""
    gradient_dtype: Literal["float16", "bfloat16"] | None = None
    """The 16-bit type in which gradients are sent between hosts; with virtual workers each worker's is rounded to it.
    Null sends them as they are."""
    batch_norm: BatchNorm = BatchNorm()
    """What batch normalizations normalize with."""
    stop: Stop | None = None
    """When the run ends before its last epoch: at a target, or without progress."""
    lr_finder: LearningRateFinder | None = None
    """A learning-rate range test instead of the run: its keys, `{}` for all defaults."""
    batch_finder: BatchFinder | None = None
    """Steps with growing batches instead of the run, to find a fast one: its keys, `{}` for all defaults."""
    accumulate: Count = 1
    """Batches whose gradients are added up for one update; only the last one communicates."""
    local_steps: Count = 1
    """Steps that each rank makes by itself before the ranks average their parameters; 1 averages gradients instead."""
    double_buffering: bool = False
    """Whether gradients are sent during the next step, and are applied one step late."""
    parameter_audit: Period | None = None
    """Time between two comparisons of all ranks' parameters and optimizer state: epochs or iterations."""
    dtype: Literal["float32", "float64", "float16", "bfloat16", "mixed16", "mixedbf16"] = "float32"
    """Type of parameters and activations; `mixed16` and `mixedbf16`: parameters in float32, activations in 16 bits."""
    float32_products: Literal["float32", "bf16"] = "float32"
    """How a CPU multiplies float32 in products and convolutions: `bf16` rounds the operands to bfloat16."""
    loss_scale: LossScale = "auto"
    """Factor of the loss in backward; `auto` is a dynamic one for float16 and mixed16, and none for other types."""
    device: form(r"cpu|gpu(:\d+)?", "cpu, gpu or gpu:N") = "cpu"
    """`cpu`, `gpu` (the visible one whose number is the rank's within its host, modulo their number) or `gpu:N`."""
    deterministic: bool = False
    """Whether a GPU computes the same bits each time, which takes it longer; a CPU always does."""
    graph: bool = False
    """Whether a GPU's step is captured as a CUDA graph; where it cannot be, it runs eagerly, and one line says why."""
    fused_convolutions: bool = False
    """Whether residual blocks on a GPU in float16 or `mixed16` read and write less, with variances of fewer digits."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes per rank that load and transform examples; 0 does it in the rank itself."""
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    """Threads per rank that decode and transform images while it computes; 0 does it in the rank itself."""
    audit: bool = False
    """Whether each rank writes which examples it used, for `dbrdist-train --audit`."""
    evaluation: Evaluation = Evaluation()
    """When and how the test data is gone through."""
    snapshot: Snapshot = Snapshot()
    """When the state is saved."""
    log: Log = Log()
    """When means are written."""
    out: Path = "result"
    """The run's folder: resolved configuration, log, snapshots, summary. In every path `~` is the home folder."""

    @property
    def batch_size(self) -> int:
        """Examples per step over all ranks together."""
        batch = self.batch
        return batch.virtual_workers * batch.per_worker if isinstance(batch, VirtualBatch) else batch

    def steps_per_epoch(self, num_examples: int) -> float:
        """Steps of an epoch over so many examples; a fraction where batches wrap around."""
        if self.last_batch == "wrap":
            return num_examples / self.batch_size
        return num_examples // self.batch_size if self.last_batch == "drop" else -(-num_examples // self.batch_size)

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
        yield from self._impossible_schedule("optimizer.schedule", self.optimizer.schedule)
        for i, hook in enumerate(self.optimizer.hooks):
            if not isinstance(hook, Custom) and takes(hook, "initial_lr") and not hasattr(self.optimizer, "lr"):
                words = f"{hook.name} follows the rate lr, which {self.optimizer.name} does not have"
                yield f"optimizer.hooks.{i}", words
        for i, scheduled in enumerate(self.schedules):
            yield from self._impossible_schedule(f"schedules.{i}.schedule", scheduled.schedule)
            words = self._not_scheduled(scheduled.of, [s.of for s in self.schedules[:i]])
            if words:
                yield f"schedules.{i}.of", words
        if self.batch_finder is not None and self.lr_finder is not None:
            yield "batch_finder", "lr_finder takes the place of the run too; leave out one of them"
        if self.batch_finder is not None and self.virtual_workers is not None:
            yield "batch_finder", "virtual workers fix the batch; write batch: N to look for another one"
        if self.updater is not None and self.virtual_workers is not None:
            yield "updater", "virtual workers need their own updater; leave out one of them"
        if self.threads and self.workers:
            yield "threads", "threads and workers do the same: threads for images, workers for transforms in Python"
        if isinstance(self.data, parts.Cifar10) and (self.transforms.train or self.transforms.test):
            yield "transforms", "cifar10 brings its own transforms; use image_folder for others"
        for i, transform in enumerate(self.transforms.test):
            if isinstance(transform, parts.RANDOM | parts.MIXING):
                yield f"transforms.test.{i}", f"{transform.name} is random, and evaluations must not be"
            elif isinstance(getattr(transform, "size", None), tuple):
                yield f"transforms.test.{i}.size", "sizes by epoch are for training; an evaluation has one size"
        yield from self._impossible_training()
        yield from self._impossible_ranks()
        yield from self._impossible_statistics()

    def _impossible_training(self) -> Iterator[tuple[str, str]]:
        sized = [t for t in self.transforms.train if isinstance(getattr(t, "size", None), tuple)]
        if self.last_batch == "wrap" and (sized or self.repeats > 1):
            key = f"transforms.train: the size of {sized[0].name}" if sized else f"repeats: {self.repeats}"
            yield "last_batch", f"wrap mixes two epochs in a batch, which {key} does not allow; take short or drop"
        for i, transform in enumerate(self.transforms.train):
            if getattr(transform, "smallest", 0) > getattr(transform, "largest", 1):
                yield f"transforms.train.{i}.smallest", f"smallest is larger than largest, {transform.largest:g}"
            if isinstance(transform, parts.RandomResizedCrop) and transform.ratio[0] > transform.ratio[1]:
                yield f"transforms.train.{i}.ratio", "expected the smallest ratio, then the largest"
            if isinstance(transform, parts.MIXING) and self.loss.name in ("model", "mean_squared_error"):
                yield f"transforms.train.{i}", f"{transform.name} makes soft labels, which loss {self.loss.name} lacks"

    def _ways(self) -> dict[str, str]:
        """The keys that change how gradients become updates, and what may not go with them, as they are written."""
        is_dynamic = self.loss_scale == "auto" and self.dtype in ("float16", "mixed16")
        written = {
            "zero": f"zero: {self.zero}" if self.zero else "",
            "compression": f"compression: {self.compression.name}" if self.compression.name != "none" else "",
            "local_steps": f"local_steps: {self.local_steps}" if self.local_steps > 1 else "",
            "double_buffering": "double_buffering: true" if self.double_buffering else "",
            "accumulate": f"accumulate: {self.accumulate}" if self.accumulate > 1 else "",
            "virtual_workers": "virtual workers" if self.virtual_workers is not None else "",
            "dynamic_loss_scale": f"the dynamic loss scale of {self.dtype}" if is_dynamic else "",
            "gradient_dtype": f"gradient_dtype: {self.gradient_dtype}" if self.gradient_dtype is not None else "",
            "parameter_audit": "parameter_audit" if self.parameter_audit is not None else "",
        }
        return {key: words for key, words in written.items() if words}

    def _impossible_statistics(self) -> Iterator[tuple[str, str]]:
        period, unit = interval(self.evaluation.every)
        offset = self.evaluation.offset
        if offset >= period:
            every = f"{period:g} {unit}{'s' * (period != 1)}"
            yield "evaluation.offset", f"must be less than the period, {every}, got {offset:g}"
        elif unit == "iteration" and not float(offset).is_integer():
            yield "evaluation.offset", f"expected a whole number of iterations, got {offset:g}"
        if self.batch_norm.group > 1 and self.virtual_workers is not None:
            yield (
                "batch_norm.group",
                "virtual workers normalize their own batches; write `batch: N`",
            )

    def _impossible_ranks(self) -> Iterator[tuple[str, str]]:
        yield from conflicts(self._ways())
        if self.communicator == "pure_nccl" and self.device == "cpu":
            yield "communicator", "pure_nccl adds gradients on GPUs; set device: gpu, or communicator: auto"

    def _impossible_schedule(self, path: str, schedule: Any) -> Iterator[tuple[str, str]]:
        if isinstance(schedule, updates.ScheduleSettings) and schedule.warmup_epochs > self.epochs:
            words = f"a warm-up of {schedule.warmup_epochs:g} epochs is longer than the run of {self.epochs:g}"
            yield f"{path}.warmup_epochs", words
        begin = getattr(schedule, "begin", None)
        if isinstance(begin, float) and begin >= self.epochs:
            yield f"{path}.begin", f"epoch {begin:g} is never reached: the run has {self.epochs:g} epochs"
        if isinstance(schedule, updates.Rising) and schedule.milestones[-1] >= self.epochs:
            words = f"epoch {schedule.milestones[-1]:g} is never reached: the run has {self.epochs:g} epochs"
            yield f"{path}.milestones", words

    def _not_scheduled(self, key: str, earlier: list[str]) -> str | None:
        """Why the number of that key cannot have a schedule; None where it can."""
        if key in earlier:
            return f"{key} has a schedule already"
        rate = "optimizer.lr" if hasattr(self.optimizer, "lr") else "optimizer.alpha"
        if key == rate:
            return f"{key} has its schedule under optimizer.schedule"
        if key == "loss_scale" and isinstance(self.loss_scale, str):
            return "loss_scale is auto; only a number can have a schedule"
        value = number_at(self, key)
        if value is None or key.split(".")[0] not in ("optimizer", "loss", "loss_scale") or ".schedule" in key:
            return (
                f"expected the key of a number of the optimizer, its hooks or the loss, such as optimizer.momentum or "
                f"loss.label_smoothing, got {key!r}"
            )
        return None


def number_at(settings: Any, key: str) -> float | None:
    """The number of a configuration with a dotted key; None where there is none."""
    for part in key.split("."):
        if isinstance(settings, Settings):
            settings = getattr(settings, part, None) if part in type(settings).model_fields else None
        elif isinstance(settings, tuple):
            settings = settings[int(part)] if part.isdecimal() and int(part) < len(settings) else None
        else:
            settings = settings.get(part) if isinstance(settings, dict) else None
    return float(settings) if isinstance(settings, int | float) and not isinstance(settings, bool) else None
