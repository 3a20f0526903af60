"""The network of a run as an ONNX file, with what its images go through in the metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from dbrdist.cli.builders import build
from dbrdist.cli.builders.probe import Look
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.inspection import predict
from dbrdist.core.array.config import global_config, no_backprop_mode, using_config
from dbrdist.core.files import strict_json
from dbrdist.datasets.image.folder import CIFAR10_MEAN, CIFAR10_STD
from dbrdist.errors import ConfigError
from dbrdist.onnx import OperatorError, export
from dbrdist.training.runs import fill_weights, folder_of, read_newest, read_recipe

_OF_IMAGES = ("name", "resize", "decode")  # of `data`; others name places on the machine of the run
SHAPE = re.compile(r"\d+(x\d+)*$")  # of one example, such as 3x224x224


def write(config: Config, origin: Origin, run: str, path: str, shape: str | None) -> Iterator[str]:
    """Write the newest snapshot's network; the result in words.

    ``shape``: that of one example; None takes an example of the run's data. The batch may have any length.
    """
    recipe = read_recipe(folder_of(run))
    found, entries = read_newest(run)
    global_config.dtype = config.dtype
    network = build.model(config, origin, recipe)
    x = _example(config, origin) if shape is None else _zeros(config, shape)
    try:
        _settle(network, x)
        fill_weights(found, entries, network, "predictor/")
        kinds = export(network, x, path, dynamic_batch=True, metadata=_metadata(config, origin, recipe, found))
    except (ImportError, OperatorError) as error:
        raise ConfigError(f"dbrdist-train: {error}") from error
    yield (
        f"{path}: {len(kinds)} kinds of operators from {found}; input x: {x.dtype} (batch, "
        f"{', '.join(map(str, x.shape[1:]))})"
    )


def _settle(network: Any, x: Any) -> None:
    """Give parameters whose shape follows from the input their shape."""
    try:
        with using_config("train", False), no_backprop_mode():
            network(x)
    except (ValueError, TypeError, IndexError) as error:
        shape = "x".join(map(str, x.shape[1:]))
        raise ConfigError(f"dbrdist-train: the network does not take examples of shape {shape}: {error}") from error


def _zeros(config: Config, shape: str) -> Any:
    convert = build.converter(config.dtype)
    sizes = tuple(map(int, shape.split("x")))
    return convert([(np.zeros(sizes, np.float32), np.int32(0))] * 2)[0]


def _example(config: Config, origin: Origin) -> Any:
    """Two examples of the run's data as the network gets them."""
    try:
        data = build.data(config, origin)
        part = "train" if data.test is None else "test"
        look = Look(config, origin, part, getattr(data, part), build.converter_for(config), None)
        arguments = look.arguments(2)
    except ConfigError as error:
        words = "without the data, give the shape of an example: --export RUN FILE.onnx 3x224x224"
        raise ConfigError(f"{error}; {words}") from error
    if arguments is None or not arguments[0]:
        raise ConfigError("dbrdist-train: no readable example; give its shape: --export RUN FILE.onnx 3x224x224")
    return arguments[0][0]


def _transforms(config: Config, origin: Origin) -> list[dict[str, Any]] | None:
    """What an image goes through; None where nobody knows, because training transforms of the user's may be random."""
    try:
        return [transform.model_dump() for transform in predict.of_an_image(config, origin)]
    except ConfigError:
        return None


def _metadata(config: Config, origin: Origin, recipe: dict[str, Any], snapshot: str) -> dict[str, str]:
    """What a program needs besides the graph: classes, and the way from an image file to an input."""
    data = config.data.model_dump()
    steps = _transforms(config, origin)
    found = {
        "source": os.path.basename(snapshot),
        "classes": strict_json.dumps(recipe.get("classes")),
        "data": strict_json.dumps({key: value for key, value in data.items() if key in _OF_IMAGES}),
        "transforms": strict_json.dumps(steps),
        "layout": "NCHW; images are RGB, transforms work on (H, W, C)",
    }
    if config.data.name == "cifar10":
        found["mean"], found["std"] = (
            strict_json.dumps([float(v) for v in values]) for values in (CIFAR10_MEAN, CIFAR10_STD)
        )
    for step in steps or ():
        if step.get("name") == "normalize":
            found["mean"], found["std"] = (strict_json.dumps(step.get(key)) for key in ("mean", "std"))
    return found
