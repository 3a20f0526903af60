"""What a run is put together from: models, data, transforms, losses; :mod:`dbrdist.cli.updates` has the optimizers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dbrdist.cli.settings import (
    Count,
    Fraction,
    Path,
    Positive,
    Settings,
    Tuple,
    component,
)

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


class LeNet(Settings):
    """Two convolutions and two linear layers, for small images."""

    name: Literal["lenet"]
    """`lenet`."""
    channels: Annotated[tuple[Count, Count], Field(strict=False)] = (32, 64)
    """Channels of the two convolutions."""
    units: Count = 128
    """Units of the hidden linear layer."""
    dropout: Fraction = 0.0
    """Fraction of the hidden units that a training step drops."""
    num_classes: Count | None = None
    """Number of outputs; the data's number of classes if not given."""


class CifarResNet(Settings):
    """Residual networks for 32x32 images."""

    name: Literal["resnet20", "resnet56"]
    """`resnet20` or `resnet56`: the number of layers."""
    zero_gamma: bool = False
    """Whether each block's last batch normalization starts with scale 0."""
    num_classes: Count | None = None
    """Number of outputs; the data's number of classes if not given."""


class ResNet50(Settings):
    """ResNet-50 for images of about 224x224."""

    name: Literal["resnet50"]
    """`resnet50`."""
    stride_in_3x3: bool = True
    """Where blocks halve the size: in the 3x3 convolution (v1.5) or in the first 1x1 (v1)."""
    zero_gamma: bool = False
    """Whether each block's last batch normalization starts with scale 0."""
    num_classes: Count | None = None
    """Number of outputs; the data's number of classes if not given."""


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


class Npz(Settings):
    """Arrays in .npz files."""

    name: Literal["npz"]
    """`npz`."""
    train: Path
    """The training file; it holds `x` (examples first) and `y` (int labels)."""
    test: Path | None = None
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


class RandomResizedCrop(Settings):
    """Cut a part of random size and shape, and resize it to a square."""

    name: Literal["random_resized_crop"]
    """`random_resized_crop`."""
    size: Count
    """Side of the square in pixels."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.08
    """The smallest part, as a fraction of the image's area."""


class RandomFlip(Settings):
    """Mirror left and right with probability one half."""

    name: Literal["random_flip"]
    """`random_flip`."""


class CenterCrop(Settings):
    """Cut the square in the middle."""

    name: Literal["center_crop"]
    """`center_crop`."""
    size: Count
    """Side of the square in pixels."""


class Resize(Settings):
    """Bring the shorter side to a length."""

    name: Literal["resize"]
    """`resize`."""
    size: Count
    """The shorter side's new length in pixels."""


class Normalize(Settings):
    """(x / scale - mean) / std for each channel."""

    name: Literal["normalize"]
    """`normalize`."""
    mean: Tuple(float, min_length=1)
    """The mean of each channel, for pixels from 0 to 1."""
    std: Tuple(Positive, min_length=1)
    """The standard deviation of each channel, for pixels from 0 to 1."""
    scale: Positive = 255.0
    """The largest value of a pixel."""


_TRANSFORM = component("transform", RandomCrop, RandomResizedCrop, RandomFlip, CenterCrop, Resize, Normalize)


class Transforms(Settings):
    """What happens to each image between decoding and batching, in this order."""

    train: Tuple(_TRANSFORM) = ()
    """For training; chance is a function of (seed, epoch, sample)."""
    test: Tuple(_TRANSFORM) = ()
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


# ---- the rest of a run ------------------------------------------------------------------------------------------


class InitFrom(Settings):
    """Weights to begin with."""

    path: Path
    """A run's folder, a snapshot or other .npz file, or a .safetensors file (of ResNets in torchvision's names too)."""
    skip: Tuple(str) = ()
    """Beginnings of names that keep their initial values, `fc` for another number of classes."""
