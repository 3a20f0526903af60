"""What a trained network says of image files: the likeliest classes by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dbrdist.cli import build
from dbrdist.cli import components as c
from dbrdist.cli.config import Config
from dbrdist.cli.load import Origin
from dbrdist.core.config import global_config, no_backprop_mode, using_config
from dbrdist.datasets import transforms as T
from dbrdist.datasets.folder import CIFAR10_MEAN, CIFAR10_STD, read_image
from dbrdist.errors import ConfigError, CorruptExampleError
from dbrdist.training.runs import find_snapshot, folder_of, load_weights, read_recipe

_NUM_SHOWN = 3


def predict(config: Config, origin: Origin, run_dir: str, paths: Sequence[str]) -> Iterator[str]:
    """A line for each image file: its name, and the likeliest classes with their probabilities.

    Raises ConfigError behind the others for those that cannot be read, or do not fit the network.
    """
    recipe = read_recipe(folder_of(run_dir))
    classes = recipe.get("classes")
    if not isinstance(classes, list):
        raise ConfigError(f"{run_dir}: this run has no named classes; --predict needs a run on folders of images")
    path = find_snapshot(run_dir)
    global_config.dtype = config.dtype
    network = build.model(config, origin, recipe)
    load_weights(path, network, "predictor/")
    transform, convert = _transform(config, origin), build.converter(config.dtype)
    problems = []
    for name in paths:
        try:
            image = transform(read_image(name))
            with using_config("train", False), no_backprop_mode():
                scores = network(convert([image]))
        except CorruptExampleError as error:
            problems.append(f"dbrdist-train: {error}")
        except ValueError as error:
            problems.append(f"dbrdist-train: {name}: {error}")
        else:
            yield f"{name}: {_likeliest(np.asarray(scores.array[0], np.float64), classes)}"
    if problems:
        raise ConfigError("\n".join(problems))


def _transform(config: Config, origin: Origin) -> Any:
    """What a test image of the run goes through."""
    if isinstance(config.data, c.Cifar10):
        return T.Compose([T.Normalize(CIFAR10_MEAN, CIFAR10_STD), T.ToCHW()])
    assert isinstance(config.data, c.ImageFolder)
    first = [] if config.data.resize is None else [T.Resize(config.data.resize)]
    return T.Compose([*first, *build.transforms(config.transforms.test, "test", origin)])


def _likeliest(scores: Any, classes: Sequence[str]) -> str:
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")[:_NUM_SHOWN]
    return ", ".join(f"{classes[k] if k < len(classes) else k} {shares[k]:.1%}" for k in order)
