"""A run's folder, and the trained network in it."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from dbrdist.core.config import using_config
from dbrdist.core.link import Link
from dbrdist.core.regular import regular
from dbrdist.core.serializer import NpzDeserializer, read_npz
from dbrdist.errors import CheckpointError
from dbrdist.training.extensions import snapshots

RECIPE = "model.json"
_MODEL_PATH = "updater/model:main/"
_AVERAGE_PATH = "extensions/WeightAverage/weights/"


def load(
    run_dir: str | os.PathLike[str], device: Any = None, *, model: Link | Callable[..., Link] | None = None
) -> Link:
    """The network of a run of `dbrdist-train`, with the weights of its newest whole snapshot.

    A run that keeps a moving average of its weights (`ema`) gives the averages.

    Args:
        run_dir: the run's folder (`out` in its configuration), or one of the snapshots in it.
        device: where the network goes; None leaves it in host memory.
        model: the network, or what makes it from the arguments in the folder. A run of a network of your own needs it:
            a folder holds data, and no code is run because a folder names it. None makes a network of `dbrdist.models`.

    The network gives the outputs, without the loss:

        net = dbrdist.load("result")
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            scores = net(images)

    Raises:
        CheckpointError: the folder holds no run, or no whole snapshot, or one of another network.
    """
    folder = folder_of(run_dir)
    recipe = read_recipe(folder)
    path = find_snapshot(run_dir)
    with using_config("dtype", recipe["dtype"]):
        made = model if isinstance(model, Link) else _make(folder, recipe, model)
    load_weights(path, made, "predictor/")
    return made if device is None else made.to_device(device)


def folder_of(run: str | os.PathLike[str]) -> str:
    """The folder of a run that is named by its folder, or by a snapshot in it."""
    path = os.fspath(run)
    return os.path.dirname(path) or "." if os.path.isfile(path) else path


def find_snapshot(run: str | os.PathLike[str]) -> str:
    """The snapshot that is meant by a run's folder, the newest whole one, or by a snapshot's own path.

    Raises CheckpointError where there is none, or only damaged ones.
    """
    path = os.fspath(run)
    if os.path.isfile(path):
        if not snapshots.is_whole(path):
            raise CheckpointError(f"{path}: the snapshot is damaged")
        return path
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: expected the folder of a run, or a snapshot in one, found nothing there")
    found = snapshots.newest(path)
    if found is None:
        raise CheckpointError(f"{path}: expected a snapshot in it, found no whole one")
    return found


def trained_weights(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Of a snapshot's entries, those of the trained network, by path (`predictor/conv1/W`).

    Where the run keeps a moving average of its weights, the averages are in place of the last values.
    """
    weights = {k.removeprefix(_MODEL_PATH): v for k, v in entries.items() if k.startswith(_MODEL_PATH)}
    for key, average in entries.items():
        if key.startswith(_AVERAGE_PATH):
            path = key.removeprefix(_AVERAGE_PATH)
            weights[path] = average.astype(weights[path].dtype)
    return weights


def load_weights(path: str, link: Link, part: str = "") -> None:
    """Fill a link with the trained weights of a snapshot, or with those below `part`.

    Raises CheckpointError where they are damaged, or do not fit.
    """
    weights = trained_weights(read_npz(path))
    try:
        NpzDeserializer(weights, part).load(link)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _hint(folder: str) -> str:
    """How to load what a trainer of a script has saved: only the script knows its network."""
    path = snapshots.newest(folder)
    if path is None:
        return ""
    return f"; for the snapshot of a script: load_npz({path!r}, model, path='updater/model:main/')"


def read_recipe(folder: str) -> dict[str, Any]:
    """What the folder says of the run's network. Raises CheckpointError where it holds no run."""
    try:
        with open(os.path.join(folder, RECIPE), encoding="utf-8", opener=regular) as file:
            recipe = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder}: expected the folder of a run of dbrdist-train, with a {RECIPE} in it: {why}{_hint(folder)}"
        ) from error
    kinds = {"callable": str, "args": dict, "dtype": str}
    if not isinstance(recipe, dict) or any(not isinstance(recipe.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{folder}: expected a mapping with {', '.join(kinds)} in {RECIPE}, it is damaged")
    return recipe


def _make(folder: str, recipe: dict[str, Any], maker: Callable[..., Link] | None) -> Link:
    module, _, name = recipe["callable"].partition(":")
    if maker is None and module == "dbrdist.models":
        models = importlib.import_module(module)
        maker = getattr(models, name) if name in models.__all__ else None
    if maker is None:
        own = recipe["callable"]
        raise CheckpointError(
            f"{folder}: the network is {own!r}, and no code is run because a folder names it; import it and pass it: "
            f"dbrdist.load({folder!r}, model={own.rpartition(':')[2]})"
        )
    try:
        return maker(**recipe["args"])
    except TypeError as error:
        raise CheckpointError(f"{folder}: {RECIPE}: the network cannot be made: {error}") from error
