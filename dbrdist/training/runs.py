"""A run's folder, and the trained network in it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from dbrdist.core.config import using_config
from dbrdist.core.link import Link
from dbrdist.core.serializer import load_npz
from dbrdist.errors import CheckpointError
from dbrdist.training.extensions import snapshots

RECIPE = "model.json"
MODEL_PATH = "updater/model:main/predictor/"


def load(run_dir: str | os.PathLike[str], device: Any = None) -> Link:
    """The network of a run of `dbrdist-train`, with the weights of its newest whole snapshot.

    Args:
        run_dir: the run's folder (`out` in its configuration).
        device: where the network goes; None leaves it in host memory.

    A network of the user's own is made by the same `package.module:callable`, imported from where the run was started
    if it cannot be found otherwise. It gives the outputs, without the loss:

        net = dbrdist.load("result")
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            scores = net(images)

    Raises:
        CheckpointError: the folder holds no run, or no whole snapshot, or one of another network.
    """
    folder = os.fspath(run_dir)
    try:
        with open(os.path.join(folder, RECIPE), encoding="utf-8") as file:
            recipe = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: expected the folder of a run of dbrdist-train, with a {RECIPE} in it: {error}{_hint(folder)}"
        ) from error
    path = snapshots.newest(folder)
    if path is None:
        raise CheckpointError(f"{folder}: expected a snapshot in it, found no whole one")
    with using_config("dtype", recipe["dtype"]), _also_from(recipe["directory"]):
        model = _make(recipe)
    load_npz(path, model, path=MODEL_PATH)
    return model if device is None else model.to_device(device)


def _hint(folder: str) -> str:
    """How to load what a trainer of a script has saved: only the script knows its network."""
    path = snapshots.newest(folder)
    if path is None:
        return ""
    return f"; for the snapshot of a script: load_npz({path!r}, model, path='updater/model:main/')"


def _make(recipe: dict[str, Any]) -> Link:
    module, _, attributes = recipe["callable"].partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    made: Link = found(**recipe["args"])
    return made


@contextlib.contextmanager
def _also_from(directory: str) -> Iterator[None]:
    """Import from `directory` too, after everything else."""
    sys.path.append(directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
