"""A run's folder, and the trained network in it."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.array.config import using_config
from dbrdist.core.array.types import Array
from dbrdist.core.files import strict_json
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import NpzDeserializer, read_npz
from dbrdist.core.model.link import Link
from dbrdist.errors import CheckpointError
from dbrdist.training.extensions import snapshots

RECIPE = "model.json"
_MODEL_PATH = "updater/model:main/"
_AVERAGE_PATH = "extensions/WeightAverage/weights/"
CONSTANTS = "constants"
_CONSTANTS_PATH = f"extensions/LocalState/{CONSTANTS}"
DATA = "data"
_DATA_PATH = f"extensions/LocalState/{DATA}"


def load(
    run_dir: str | os.PathLike[str],
    device: DeviceSpec | None = None,
    *,
    model: Link | Callable[..., Link] | None = None,
    classes: Sequence[str] | None = None,
) -> Link:
    """The network of a run of `dbrdist-train`, with the weights of its newest whole snapshot.

    A run that keeps a moving average of its weights (`ema`) gives the averages.

    Args:
        run_dir: the run's folder (`out` in its configuration), or one of the snapshots in it.
        device: where the network goes; None leaves it in host memory.
        model: the network, or what makes it from the arguments in the folder. A run of a network of your own needs it:
            a folder holds data, and no code is run because a folder names it. None makes a network of `dbrdist.models`.
        classes: the names of your classes in the order of their labels, such as ``dataset.classes``, to compare with
            those that the network was trained on; None compares nothing.

    The network gives the outputs, without the loss:

        net = dbrdist.load("result")
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            scores = net(images)

    Raises:
        CheckpointError: the folder holds no run, or no whole snapshot, or one of another network or other classes.
    """
    folder = folder_of(run_dir)
    recipe = read_recipe(folder)
    words = None if classes is None else other_classes(recipe.get("classes"), classes)
    if words:
        raise CheckpointError(f"{folder}: {words}")
    path, entries = read_newest(run_dir)
    with using_config("dtype", recipe["dtype"]):
        made = model if isinstance(model, Link) else _make(folder, recipe, model)
    fill_weights(path, entries, made, "predictor/")
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
        raise CheckpointError(f"{path}: no complete snapshot in it; the run saved none, or all are damaged")
    return found


def read_newest(run: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The path of the snapshot that :func:`find_snapshot` finds, and its entries.

    A run that continues removes old snapshots: where one has gone in the meantime there is a newer one.
    """
    for _ in range(_MAX_LOOKS):
        path = find_snapshot(run)
        try:
            return path, read_npz(path)
        except FileNotFoundError:
            continue
    raise CheckpointError(f"{os.fspath(run)}: its snapshots are removed faster than they can be read")


_MAX_LOOKS = 100


def trained_weights(entries: Mapping[str, Array]) -> dict[str, Array]:
    """Of a snapshot's entries, those of the trained network, by path (`predictor/conv1/W`).

    Where the run keeps a moving average of its weights, the averages replace the last values.
    """
    weights = {k.removeprefix(_MODEL_PATH): v for k, v in entries.items() if k.startswith(_MODEL_PATH)}
    for key, average in entries.items():
        if key.startswith(_AVERAGE_PATH):
            path = key.removeprefix(_AVERAGE_PATH)
            weights[path] = average.astype(weights[path].dtype)
    return weights


def load_weights(path: str, link: Link, part: str = "") -> dict[str, Any]:
    """As :func:`fill_weights`, from the snapshot at `path`; returns what it says of the data."""
    entries = read_npz(path)
    fill_weights(path, entries, link, part)
    return saved_data(entries)


def fill_weights(path: str, entries: Mapping[str, Array], link: Link, part: str = "") -> None:
    """Fill a link with the trained weights among a snapshot's entries, or with those below `part`.

    Sets the constants that belong to them. Raises CheckpointError, with `path`, where they do not fit.
    """
    try:
        NpzDeserializer(trained_weights(entries), part).load(link)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    set_constants(link, saved_constants(entries), part)


# ---- constants that belong to weights ----


def constants_of(link: Link) -> dict[str, float]:
    """The `eps` of each normalization in a link, by path (`predictor/bn1/eps`).

    Weights that were trained with one `eps` give other outputs with another one.
    """
    found = {}
    for path, inner in link.namedlinks():
        eps = getattr(inner, "eps", None)
        if isinstance(eps, int | float) and not isinstance(eps, bool):
            found[f"{path}/eps".strip("/")] = float(eps)
    return found


def set_constants(link: Link, constants: Mapping[str, float], part: str = "") -> None:
    """Give a link the constants of :func:`constants_of`, or those below `part`; names that it lacks do nothing."""
    for path, inner in link.namedlinks():
        eps = constants.get(part + f"{path}/eps".strip("/"))
        if eps is not None and hasattr(inner, "eps"):
            inner.eps = float(eps)


def saved_constants(entries: Mapping[str, Array]) -> dict[str, float]:
    """The constants in a snapshot's entries; none in a snapshot of an earlier version, or of a script."""
    try:
        found = json.loads(str(entries[_CONSTANTS_PATH]))
        return {str(name): float(value) for name, value in found.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


# ---- the data that a network has learned ----


def saved_data(entries: Mapping[str, Array]) -> dict[str, Any]:
    """What a snapshot's entries say of the data: `classes` and `num_test_examples`; empty in one of another version."""
    try:
        found = json.loads(str(entries[_DATA_PATH]))
    except (KeyError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def other_classes(learned: Sequence[str] | None, found: Sequence[str] | None) -> str | None:
    """How the classes of some data differ from those a network was trained on, in words; None where they do not.

    The names are in the order of their labels; nothing is compared where one side has no names.
    """
    if not isinstance(learned, list) or found is None or learned == list(found):
        return None
    found = list(found)
    if len(learned) != len(found):
        counts = f"{len(learned)} classes, and the data has {len(found)}"
    else:
        counts = f"{len(learned)} classes in another order or with other names"
    pairs = list(enumerate(itertools.zip_longest(learned, found)))
    moved = [f"class {k} was {_named(a)}, now {_named(b)}" for k, (a, b) in pairs if a != b]
    more = f", and {len(moved) - _MAX_CLASSES} more" if len(moved) > _MAX_CLASSES else ""
    return f"the network was trained on {counts}: {'; '.join(moved[:_MAX_CLASSES])}{more}"


_MAX_CLASSES = 5  # that are named in a message


def _named(name: str) -> str:
    return "missing" if name is None else repr(name)


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
        return maker(**strict_json.restored(recipe["args"]))
    except TypeError as error:
        raise CheckpointError(f"{folder}: {RECIPE}: the network cannot be made: {error}") from error
