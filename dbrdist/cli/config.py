"""What a training run can be told: frozen models, each field with one sentence that names its unit.

A *component* (model, data, transform, loss, optimizer, hook, schedule) is written as its name, or as a mapping with
`name` and its settings. In place of a built-in name, `package.module:callable` names the user's own, whose arguments
stand under `args`; it is imported from the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

CALLABLE = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def Tuple(item: Any, **limits: Any) -> Any:
    """A tuple of any length, which YAML writes as a list; everywhere else types are taken strictly."""
    return Annotated[tuple[item, ...], Field(strict=False, **limits)]


class Settings(BaseModel):
    """The base of all models here: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def form(pattern: str, words: str) -> Any:
    """Text that matches the whole of `pattern`; `words` say it for people."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("form", "expected {words}", {"words": words})
        return text

    return Annotated[str, AfterValidator(check), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})]


class Custom(Settings):
    """The user's own callable, imported from the working directory."""

    name: form(CALLABLE, "package.module:callable")
    """Where it lives: `package.module:callable`."""
    args: dict[str, Any] = {}
    """Its keyword arguments."""


# tag of a component's class -> the class; the tag tells errors which of the alternatives was meant
BY_TAG: dict[str, type[Settings]] = {}


def component(kind: str, *classes: type[Settings], custom: bool = True) -> Any:
    """The type of a field that holds one of `classes`, told apart by `name`; a bare word is the name alone."""
    by_name = {name: cls for cls in classes for name in get_args(cls.model_fields["name"].annotation)}
    members = {f"<{kind} {cls.__name__}>": cls for cls in (*classes, *([Custom] if custom else []))}
    BY_TAG.update(members)
    tags = {cls: tag for tag, cls in members.items()}

    def named(value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def tag_of(value: Any) -> str | None:
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        if isinstance(name, str) and custom and ":" in name:
            return tags[Custom]
        return tags[by_name[name]] if isinstance(name, str) and name in by_name else None

    union: Any = Union[tuple(Annotated[cls, Tag(tag)] for tag, cls in members.items())]  # noqa: UP007 - made at run time
    known = ", ".join(by_name) + (", or your own package.module:callable" if custom else "")
    article = "an" if kind[0] in "aeiou" else "a"
    discriminator = Discriminator(
        tag_of,
        custom_error_type="unknown_name",
        custom_error_message="expected the name of {kind}: {known}",
        custom_error_context={
            "kind": f"{article} {kind}",
            "known": known,
            "names": list(by_name),
        },
    )
    written = Union[(str, *members.values())]
    return Annotated[union, discriminator, BeforeValidator(named, json_schema_input_type=written)]


def refuse(where: str, words: str) -> NoReturn:
    """Refuse a combination; `where` is the dotted path, from the model that refuses, of the entry to point at."""
    raise PydanticCustomError("refused", "{words}", {"words": words, "at": where})


# ---- models -----------------------------------------------------------------------------------------------------


class Mlp(Settings):
    """Fully connected layers with ReLU between them."""

    name: Literal["mlp"]
    """`mlp`."""
    units: Tuple(Count) = (100, 100)
    """Units of each hidden layer."""
    dropout: Fraction = 0.0
    """Fraction of each hidden layer's units that a training step drops."""
    num_classes: Count | None = None
    """Number of outputs; the data's number of classes if not given."""


class ConvNet(Settings):
    """Built-in networks for images."""

    name: Literal["lenet", "resnet20", "resnet56", "resnet50"]
    """The network: LeNet-style, ResNet for 32x32 images, or ResNet for 224x224 images."""
    num_classes: Count | None = None
    """Number of outputs; the data's number of classes if not given."""


# ---- data -------------------------------------------------------------------------------------------------------


class Digits(Settings):
    """The UCI optical digits that ship with the package: 1,797 grey images of 8x8 pixels, 10 classes."""

    name: Literal["digits"]
    """`digits`."""


class Folders(Settings):
    """JPEG or PNG images in one folder per class."""

    name: Literal["image_folder", "cifar10"]
    """`image_folder`: images of any size; `cifar10`: 32x32 images in `train/CLASS/` and `test/CLASS/`."""
    root: str
    """The folder that holds the training and the test folder."""
    train: str = "train"
    """The training folder's name below `root`; its own folders are the classes."""
    test: str | None = "test"
    """The test folder's name below `root`; null for no evaluation."""
    corrupt: Literal["fail", "skip"] = "fail"
    """What a file that cannot be decoded does: end the run, or be replaced and counted in the summary."""


class Npz(Settings):
    """Arrays in .npz files."""

    name: Literal["npz"]
    """`npz`."""
    train: str
    """The training file; it holds `x` (examples first) and `y` (int labels)."""
    test: str | None = None
    """The test file with the same keys; null for no evaluation."""


# ---- transforms -------------------------------------------------------------------------------------------------


class RandomCrop(Settings):
    """Cut a square at a random place."""

    name: Literal["random_crop"]
    """`random_crop`."""
    size: Count
    """Side of the square in pixels."""
    padding: Annotated[int, Field(ge=0)] = 0
    """Zeros added to each side before cutting, in pixels."""


class RandomFlip(Settings):
    """Mirror left and right with probability one half."""

    name: Literal["random_flip"]
    """`random_flip`."""


class Normalize(Settings):
    """Subtract a mean and divide by a deviation, per channel."""

    name: Literal["normalize"]
    """`normalize`."""
    mean: Tuple(float, min_length=1)
    """The mean of each channel, in the units of the pixels."""
    std: Tuple(Positive, min_length=1)
    """The standard deviation of each channel, in the units of the pixels."""


class Transforms(Settings):
    """What happens to each image between decoding and batching, in this order."""

    train: Tuple(component("transform", RandomCrop, RandomFlip, Normalize)) = ()
    """For training; chance is a function of (seed, epoch, sample)."""
    test: Tuple(component("transform", RandomCrop, RandomFlip, Normalize)) = ()
    """For evaluation."""


# ---- loss -------------------------------------------------------------------------------------------------------


class CrossEntropy(Settings):
    """Softmax cross entropy of the model's outputs against int labels; accuracy is reported too."""

    name: Literal["softmax_cross_entropy"]
    """`softmax_cross_entropy`."""
    label_smoothing: Fraction = 0.0
    """Fraction of each label's weight that is spread over all classes."""


class PlainLoss(Settings):
    """A loss without settings."""

    name: Literal["mean_squared_error", "model"]
    """`mean_squared_error`, or `model` where the model itself returns its loss when called with a batch."""


# ---- optimizer --------------------------------------------------------------------------------------------------


class WeightDecay(Settings):
    """Add `rate` times the parameter to its gradient."""

    name: Literal["weight_decay"]
    """`weight_decay`."""
    rate: NotNegative
    """Decay per step, relative to the parameter."""


class GradientClipping(Settings):
    """Scale all gradients down to a total norm."""

    name: Literal["gradient_clipping"]
    """`gradient_clipping`."""
    threshold: Positive
    """The largest allowed L2 norm of all gradients together."""


class Schedule(Settings):
    """What every schedule can do: climb to the learning rate first."""

    warmup_epochs: NotNegative = 0.0
    """Epochs, fractions allowed, in which the rate climbs linearly from `warmup_start`."""
    warmup_start: NotNegative = 0.0
    """The learning rate at which the climb starts."""


class Constant(Schedule):
    """The optimizer's learning rate all along."""

    name: Literal["constant"]
    """`constant`."""


class Step(Schedule):
    """Multiply the rate at given epochs."""

    name: Literal["step"]
    """`step`."""
    milestones: Tuple(Positive, min_length=1)
    """Epochs, rising, fractions allowed, at which the rate is multiplied by `gamma`."""
    gamma: Positive = 0.1
    """The factor."""

    @model_validator(mode="after")
    def _rising(self) -> Step:
        if list(self.milestones) != sorted(set(self.milestones)):
            refuse("milestones", f"the epochs must rise, got {list(self.milestones)}")
        return self


class Exponential(Schedule):
    """Multiply the rate every epoch."""

    name: Literal["exponential"]
    """`exponential`."""
    gamma: Positive
    """The factor per epoch; each step gets its fraction of it."""


class Polynomial(Schedule):
    """Fall as (1 - done)^power until the end of training."""

    name: Literal["polynomial"]
    """`polynomial`."""
    power: Positive = 1.0
    """The exponent; 1 is a straight line."""
    end: NotNegative = 0.0
    """The learning rate at the end."""


class Cosine(Schedule):
    """Fall along half a cosine until the end of training."""

    name: Literal["cosine"]
    """`cosine`."""
    end: NotNegative = 0.0
    """The learning rate at the end."""


class OptimizerSettings(Settings):
    """What every optimizer takes."""

    hooks: Tuple(component("hook", WeightDecay, GradientClipping)) = ()
    """What happens to the gradients before each update, in this order."""
    schedule: component("schedule", Constant, Step, Exponential, Polynomial, Cosine, custom=False) = Constant(
        name="constant"
    )
    """How the learning rate changes over the run."""


class Sgd(OptimizerSettings):
    """Gradient descent."""

    name: Literal["sgd"]
    """`sgd`."""
    lr: Positive = 0.01
    """Learning rate per step."""


class MomentumSgd(OptimizerSettings):
    """Gradient descent with momentum."""

    name: Literal["momentum_sgd"]
    """`momentum_sgd`."""
    lr: Positive = 0.01
    """Learning rate per step."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""


class Adam(OptimizerSettings):
    """Adam (Kingma and Ba 2014)."""

    name: Literal["adam", "adamw"]
    """`adam`, or `adamw` for weight decay apart from the gradient."""
    alpha: Positive = 0.001
    """Learning rate per step."""
    beta1: Fraction = 0.9
    """Decay per step of the gradient's mean."""
    beta2: Fraction = 0.999
    """Decay per step of the squared gradient's mean."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay_rate: NotNegative = 0.0
    """Decay of the parameters per step, times the learning rate."""


class Lars(OptimizerSettings):
    """LARS (You, Gitman and Ginsburg 2017): a rate per layer from the norms of weights and gradients."""

    name: Literal["lars"]
    """`lars`."""
    lr: Positive = 0.1
    """Learning rate per step."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""
    weight_decay: NotNegative = 1e-4
    """Decay per step, relative to the parameter; part of the norm that sets the layer's rate."""
    trust_coefficient: Positive = 0.001
    """The layer's rate relative to the ratio of its norms."""
    eps: NotNegative = 0.0
    """Added to the norm in the denominator."""
    skip_vectors: bool = True
    """Whether biases and scales do without weight decay and the layer's own rate."""


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


class Evaluation(Settings):
    """When the test data is gone through."""

    every: Period = "1 epoch"
    """Time between two evaluations: epochs or iterations."""
    batch: Count | None = None
    """Examples per step over all ranks; the training batch if not given."""


# ---- the run ----------------------------------------------------------------------------------------------------


class Config(Settings):
    """A training run."""

    model: component("model", Mlp, ConvNet)
    """The network: a built-in name or your own callable that returns a Link."""
    data: component("data", Digits, Folders, Npz)
    """The examples: a built-in name or your own callable that returns (train, test), test None for no evaluation."""
    loss: component("loss", CrossEntropy, PlainLoss) = CrossEntropy(name="softmax_cross_entropy")
    """What is minimised: a built-in name or your own function of (outputs, labels)."""
    transforms: Transforms = Transforms()
    """What happens to each image."""
    optimizer: component("optimizer", Sgd, MomentumSgd, Adam, Lars) = MomentumSgd(name="momentum_sgd")
    """The update rule with its hyperparameters, hooks and schedule."""
    batch: Count
    """Examples per step over all ranks together."""
    epochs: Positive
    """Length of the run in passes over the training data; fractions allowed."""
    iterations: Count | None = None
    """Steps after which the run ends even if `epochs` are not over."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Start of all chance: initial values, order, augmentation, dropout."""
    communicator: Literal["auto", "naive", "flat"] = "auto"
    """How ranks exchange gradients; `auto` takes what fits."""
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    """Type of parameters and activations."""
    device: form(r"cpu|gpu(:\d+)?", "cpu, gpu or gpu:N") = "cpu"
    """`cpu`, `gpu` (the one of this rank within its host) or `gpu:N`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes per rank that load and transform examples; 0 does it in the rank itself."""
    evaluation: Evaluation = Evaluation()
    """When and how the test data is gone through."""
    snapshot: Snapshot = Snapshot()
    """When the state is saved."""
    log: Log = Log()
    """When means are written."""
    out: Annotated[str, Field(min_length=1)] = "result"
    """The run's folder: resolved configuration, log, snapshots, summary."""

    @model_validator(mode="after")
    def _possible(self) -> Config:
        for path, words in self._impossible():
            refuse(path, words)
        return self

    def _impossible(self) -> Iterator[tuple[str, str]]:
        schedule = getattr(self.optimizer, "schedule", None)
        if isinstance(schedule, Schedule) and schedule.warmup_epochs > self.epochs:
            yield (
                "optimizer.schedule.warmup_epochs",
                f"a warm-up of {schedule.warmup_epochs:g} epochs is longer than the run of {self.epochs:g}",
            )
        if isinstance(schedule, Step) and schedule.milestones[-1] >= self.epochs:
            yield (
                "optimizer.schedule.milestones",
                f"epoch {schedule.milestones[-1]:g} is never reached: the run has {self.epochs:g} epochs",
            )
        for i, transform in enumerate(self.transforms.test):
            if isinstance(transform, RandomCrop | RandomFlip):
                yield f"transforms.test.{i}", f"{transform.name} is chance, which has no place in an evaluation"
