"""What a trained network says of image files: the likeliest classes by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dbrdist.cli.builders import build
from dbrdist.cli.configuration import components as c
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.configuration.settings import Custom
from dbrdist.core.array.config import global_config, no_backprop_mode, using_config
from dbrdist.core.array.types import Array
from dbrdist.datasets.image import transforms as T
from dbrdist.datasets.image.folder import CIFAR10_MEAN, CIFAR10_STD, read_image
from dbrdist.errors import ConfigError, CorruptExampleError
from dbrdist.training.mirrored import mean_over_mirrored
from dbrdist.training.runs import fill_weights, folder_of, read_newest, read_recipe

_NUM_SHOWN = 3


def predict(config: Config, origin: Origin, run_dir: str, paths: Sequence[str]) -> Iterator[str]:
    """A line for each image file: its name, and the likeliest classes with their probabilities.

    Raises ConfigError behind the others for those that cannot be read, or do not fit the network.
    """
    recipe = read_recipe(folder_of(run_dir))
    classes = recipe.get("classes")
    if not isinstance(classes, list) or not isinstance(config.data, c.Cifar10 | c.ImageFolder):
        raise ConfigError(f"{run_dir}: this run has no named classes; --predict needs a run on folders of images")
    path, entries = read_newest(run_dir)
    global_config.dtype = config.dtype
    global_config.float32_products = config.float32_products
    network = build.model(config, origin, recipe)
    fill_weights(path, entries, network, "predictor/")
    transform, convert = _transform(config, origin), build.converter(config.dtype)
    problems = []
    for name in paths:
        try:
            image = transform(read_image(name, fast=getattr(config.data, "decode", "exact") == "fast"))
            with using_config("train", False), no_backprop_mode():
                images = convert([image])
                scores = mean_over_mirrored(network, images) if config.evaluation.flip else network(images)
        except CorruptExampleError as error:
            problems.append(f"dbrdist-train: {error}")
        except ValueError as error:
            problems.append(f"dbrdist-train: {name}: {error}")
        else:
            found = np.asarray(scores.array[0], np.float64)
            if np.isfinite(found).all():
                yield f"{name}: {_likeliest(found, classes)}"
            else:
                problems.append(f"dbrdist-train: {name}: the network gives scores that are not finite: {path}")
    if problems:
        raise ConfigError("\n".join(problems))


def _transform(config: Config, origin: Origin) -> Any:
    """What a test image of the run goes through."""
    if isinstance(config.data, c.Cifar10):
        return T.Compose([T.Normalize(CIFAR10_MEAN, CIFAR10_STD), T.ToCHW()])
    assert isinstance(config.data, c.ImageFolder)
    first = [] if config.data.resize is None else [T.Resize(config.data.resize)]
    return T.Compose([*first, *build.transforms(of_an_image(config, origin), "test", origin)])


def of_an_image(config: Config, origin: Origin) -> tuple[Any, ...]:
    """The transforms of an image that the network is to judge: the test ones, or without any those of training.

    Raises ConfigError where nobody knows whether these are random.
    """
    is_untested = getattr(config.data, "test", config) is None and not config.transforms.test
    return _without_chance(config, origin) if is_untested else tuple(config.transforms.test)


def _without_chance(config: Config, origin: Origin) -> tuple[Any, ...]:
    """The training transforms of a run without evaluation, each random one as its mean, or left out.

    Raises ConfigError for the user's own, of which nobody knows whether they are random.
    """
    return tuple(
        certain
        for i, settings in enumerate(config.transforms.train)
        if (certain := _certain(settings, ("transforms", "train", i), origin)) is not None
    )


def _certain(settings: Any, path: tuple[str | int, ...], origin: Origin) -> Any:
    if isinstance(settings, Custom):
        raise ConfigError(
            f"{origin.where(path)}: {'.'.join(map(str, path))}: this run has no test transforms, and {settings.name} "
            "may be random; say what images to predict go through: --predict RUN IMAGE... transforms.test='[...]'"
        )
    if isinstance(settings, c.RandomResizedCrop):
        return c.CenterResizedCropSettings(
            name="center_resized_crop", size=_last_size(settings.size), ratio=1.0, method=settings.method
        )
    if isinstance(settings, c.RandomCropSettings):
        return c.CenterCropSettings(name="center_crop", size=_last_size(settings.size))
    if isinstance(settings, c.ResizeSettings):
        return settings.model_copy(update={"size": _last_size(settings.size)})
    return None if isinstance(settings, c.RANDOM | c.MIXING) else settings


def _last_size(size: Any) -> int:
    """Of sizes by epoch, that with which the training ends."""
    return int(size if isinstance(size, int) else size[-1][1])


def _likeliest(scores: Array, classes: Sequence[str]) -> str:
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")[:_NUM_SHOWN]
    return ", ".join(f"{classes[k] if k < len(classes) else k} {100 * shares[k]:.1f} %" for k in order)
