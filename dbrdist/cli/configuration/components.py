"""What a run is put together from: models, data, transforms, losses; ``updates.py`` has the optimizers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from dbrdist import datasets, models
from dbrdist import functions as F
from dbrdist.cli.configuration.derived import derived
from dbrdist.cli.configuration.settings import (
    Count,
    Path,
    Positive,
    Probability,
    Settings,
    Tuple,
    component,
    refuse,
)
from dbrdist.datasets.image import transforms as T
from dbrdist.datasets.image.crops import Method

# ---- models -----------------------------------------------------------------------------------------------------


# The data says how many classes there are, where the configuration does not.
MODELS = tuple(
    derived(getattr(models, name), name.lower(), num_classes=(Count | None, None))
    for name in models.__all__
    if name not in ("ResNet", "ResNetCIFAR")  # the general ones
)


# ---- data -------------------------------------------------------------------------------------------------------


class Digits(Settings):
    """The UCI optical digits that ship with the package: 1,797 grey images of 8x8 pixels, 10 classes."""

    name: Literal["digits"]
    """`digits`."""


class Cifar10(Settings):
    """CIFAR-10 as images in `train/CLASS/` and `test/CLASS/`, normalised."""

    name: Literal["cifar10"]
    """`cifar10`."""
    root: Path
    """The folder that holds `train` and `test`."""
    augment: bool = True
    """Whether training images are cropped at random from 4 pixels of padding and mirrored."""
    corrupt: Literal["fail", "skip"] = "fail"
    """What a file that cannot be decoded does: end the run, or be left out and counted in the summary."""


class ImageFolder(Settings):
    """JPEG or PNG images in one folder per class, or in tar shards that `dbrdist-data` has indexed."""

    name: Literal["image_folder"]
    """`image_folder`."""
    root: Path
    """The folder that holds the training and the test folder."""
    train: Path = "train"
    """The training folder's name below `root`: of class folders or of shards; or the file of an index."""
    test: Path | None = "test"
    """The test folder's name below `root`; null for no evaluation."""
    resize: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """Height and width in pixels to which each image is brought when it is read; null leaves it."""
    cache: bool = False
    """Whether decoded images stay in memory; all must be of one size."""
    corrupt: Literal["fail", "skip"] = "fail"
    """What a file that cannot be decoded does: end the run, or be left out and counted in the summary."""
    decode: Literal["exact", "fast"] = "exact"
    """How JPEGs are decoded: `fast` takes a tenth of the decoder's time less and changes pixels a little."""


class Npz(Settings):
    """Arrays in .npz files."""

    name: Literal["npz"]
    """`npz`."""
    train: Path
    """The training file, as `numpy.savez(path, x=..., y=...)` writes it: inputs, examples first, and int labels."""
    test: Path | None = None
    """The test file with the same keys; null for no evaluation."""


# ---- transforms -------------------------------------------------------------------------------------------------


def _sizes(value: Any) -> Any:
    """A size of at least 1, or pairs of an epoch and the size from it on: the first from 0, then rising."""
    if _is_whole(value) and 1 <= value <= _MAX_SIZE:
        return value
    if isinstance(value, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in value):
        epochs, sizes = [p[0] for p in value], [p[1] for p in value]
        is_rising = all(map(_is_whole, epochs)) and epochs[:1] == [0] and epochs == sorted(set(epochs))
        if is_rising and all(_is_whole(s) and 1 <= s <= _MAX_SIZE for s in sizes):
            return tuple(zip(epochs, sizes))
    words = "expected a size of at least 1, or pairs [epoch, size] from epoch 0 on, such as [[0, 128], [10, 224]]"
    raise PydanticCustomError("form", words)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_MAX_SIZE = 65535
_OneSize = Annotated[int, Field(ge=1, le=_MAX_SIZE)]
_Pair = Annotated[tuple[Annotated[int, Field(ge=0)], _OneSize], Field(strict=False)]
Sizes = Annotated[
    int | tuple[tuple[int, int], ...],
    BeforeValidator(_sizes, json_schema_input_type=_OneSize | Tuple(_Pair, min_length=1)),
]


def _fill(value: Any) -> Any:
    """A byte, or a byte for each channel."""
    if _is_whole(value) and 0 <= value <= 255:
        return value
    if isinstance(value, list | tuple) and value and all(_is_whole(v) and 0 <= v <= 255 for v in value):
        return tuple(value)
    raise PydanticCustomError("form", "expected an integer from 0 to 255, or a list with one for each channel")


_Byte = Annotated[int, Field(ge=0, le=255)]
Fill = Annotated[
    int | tuple[int, ...], BeforeValidator(_fill, json_schema_input_type=_Byte | Tuple(_Byte, min_length=1))
]
NumberOrNoise = Literal["noise"] | _Byte


_KIND, _WORDS = get_args(Method)
_METHOD = Annotated[_KIND, Field(description=_WORDS)]


class RandomResizedCrop(Settings):
    """Cut a part of random size and shape, and resize it to a square."""

    name: Literal["random_resized_crop"]
    """`random_resized_crop`."""
    size: Sizes
    """Side of the square in pixels."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.08
    """The smallest part, as a fraction of the image's area."""
    largest: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest part, as a fraction of the image's area."""
    ratio: Annotated[tuple[Positive, Positive], Field(strict=False)] = (0.75, 1.3333333333333333)
    """The least and the greatest ratio of the part's width to its height."""
    method: _METHOD = "linear"


class RandomErasing(Settings):
    """Replace a random rectangle."""

    name: Literal["random_erasing"]
    """`random_erasing`."""
    p: Probability = 0.5
    """The probability that an image is changed."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.02
    """The smallest rectangle, as a fraction of the image's area."""
    largest: Annotated[float, Field(gt=0, le=1)] = 0.3333333333333333
    """The largest rectangle, as a fraction of the image's area."""
    value: NumberOrNoise = 0
    """What stands there: an integer from 0 to 255, or `noise`."""


class _WithinMagnitude(Settings):
    """The magnitude of timm's operations is at most 10."""

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.increasing and self.magnitude > 10:
            refuse("magnitude", f"must be at most 10 with increasing: true, got {self.magnitude:g}")
        return self


_PER_BATCH = Annotated[
    bool,
    Field(description="Whether all images of a batch (of each virtual worker's) are mixed in one and the same way."),
]
# A size may change with the epoch where the batches of an epoch are of one size.
RandomCropSettings = derived(T.RandomCrop, size=(Sizes, ...))
RandomFlip = derived(T.RandomHorizontalFlip, "random_flip", "RandomFlip")
CenterCropSettings = derived(T.CenterCrop, size=(Count, ...))
CenterResizedCropSettings = derived(T.CenterResizedCrop, size=(Count, ...))
ResizeSettings = derived(T.Resize, size=(Sizes, ...))
ColorJitterSettings = derived(datasets.ColorJitter)
PcaLighting = derived(datasets.PCALighting, "pca_lighting", "PcaLighting")
RandAugmentSettings = derived(datasets.RandAugment, base=_WithinMagnitude, fill=(Fill, 0))
TrivialAugmentSettings = derived(datasets.TrivialAugment, fill=(Fill, 0))
MixupSettings = derived(datasets.Mixup, per_batch=(_PER_BATCH, False))
CutMixSettings = derived(datasets.CutMix, "cutmix", per_batch=(_PER_BATCH, False))
NormalizeSettings = derived(
    T.Normalize, mean=(Tuple(float, min_length=1), ...), std=(Tuple(Positive, min_length=1), ...)
)

_TRANSFORM = component(
    "transform",
    RandomCropSettings,
    RandomResizedCrop,
    RandomFlip,
    CenterCropSettings,
    CenterResizedCropSettings,
    ResizeSettings,
    NormalizeSettings,
    ColorJitterSettings,
    PcaLighting,
    RandomErasing,
    RandAugmentSettings,
    TrivialAugmentSettings,
    MixupSettings,
    CutMixSettings,
)
# those that draw
RANDOM = (
    RandomCropSettings
    | RandomResizedCrop
    | RandomFlip
    | ColorJitterSettings
    | PcaLighting
    | RandomErasing
    | RandAugmentSettings
    | TrivialAugmentSettings
)
MIXING = MixupSettings | CutMixSettings


class Transforms(Settings):
    """What happens to each image between decoding and batching, in this order."""

    train: Tuple(_TRANSFORM) = ()
    """What happens to each training image, in this order; chance is a function of (seed, epoch, sample). `mixup` and
    `cutmix` come after the others, wherever they stand."""
    test: Tuple(_TRANSFORM) = ()
    """The same for test images; nothing random."""


# ---- loss -------------------------------------------------------------------------------------------------------


CrossEntropy = derived(
    F.softmax_cross_entropy,
    title="CrossEntropy",
    words="Softmax cross entropy of the model's outputs against int labels; accuracy is reported too.",
)
BinaryCrossEntropy = derived(
    F.binary_cross_entropy,
    title="BinaryCrossEntropy",
    words="Binary cross entropy of each class against int labels or soft ones; accuracy is reported too.",
)
TopKAccuracy = derived(
    F.top_k_accuracy,
    title="TopKAccuracy",
    words="How often the label is among the most likely classes; reported as `top5_accuracy` for k = 5.",
)


class PlainLoss(Settings):
    """A loss without settings."""

    name: Literal["mean_squared_error", "model"]
    """`mean_squared_error`, or `model` where the model itself returns its loss when called with a batch."""


# ---- the rest of a run ------------------------------------------------------------------------------------------


class InitFrom(Settings):
    """Weights to begin with."""

    path: Path
    """A run's folder, a snapshot or other .npz file, or a .safetensors file (of ResNets in torchvision's names too)."""
    skip: Tuple(str) = ()
    """Beginnings of names that keep their initial values, `fc` for another number of classes."""
