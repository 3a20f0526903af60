"""Weights of a run as safetensors, and weights of a file or a run to begin with."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist import links
from dbrdist.cli.configuration.components import InitFrom
from dbrdist.cli.configuration.load import Origin
from dbrdist.cli.output.folder import read_json
from dbrdist.cli.output.words import said
from dbrdist.core.array.backend import get_array_module, is_array
from dbrdist.core.array.types import Array
from dbrdist.core.files import safetensors, strict_json
from dbrdist.core.files.serializer import read_npz
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.training import runs

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


def export(run: str, path: str, names: str = "dbrdist") -> str:
    """Write the network of a run's newest whole snapshot, or of one snapshot, as safetensors; the result in words.

    Names are those of the network's links with dots between them: `conv1.W`, `bn1.avg_mean`; with ``names="torch"``
    those of PyTorch, `conv1.weight` and `bn1.running_mean`, and torchvision's for residual networks.
    """
    found, saved = runs.read_newest(run)
    entries, constants = _of_the_network(runs.trained_weights(saved)), _of_the_network(runs.saved_constants(saved))
    arrays = {
        key: value for key, value in entries.items() if value is not None and value.dtype.name in safetensors.TYPE_NAMES
    }
    if names == "torch":
        arrays = to_torch(arrays)
    facts = {"source": os.path.basename(found), "format": "pt" if names == "torch" else "dbrdist"}
    if constants:
        facts[runs.CONSTANTS] = strict_json.dumps(constants)
    recipe = read_json(os.path.join(runs.folder_of(run), runs.RECIPE))
    if recipe:
        told = {key: recipe[key] for key in _OF_RECIPE if key in recipe}
        if not str(told.get("callable")).startswith(_OWN_MODELS):  # nobody compares them, and they may name paths
            told.pop("args", None)
        facts[_RECIPE] = strict_json.dumps(told)
    safetensors.save(path, arrays, facts)
    num = sum(a.size for a in arrays.values())
    return f"{path}: {len(arrays)} arrays with {num:,} numbers from {found}{_in_words(constants)}"


def _in_words(constants: Mapping[str, float]) -> str:
    """What whoever builds the network elsewhere must know beside its arrays."""
    values = sorted(set(constants.values()))
    if not values:
        return ""
    return f"; its normalizations have eps {' and '.join(f'{value:g}' for value in values)}, see the file's metadata"


def _of_the_network(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a run without those of a loss, by names with dots."""
    inner = {key.removeprefix("predictor/"): value for key, value in weights.items() if key.startswith("predictor/")}
    return {key.replace("/", "."): value for key, value in inner.items()}


# ---- weights to begin with ------------------------------------------------------------------------------------------


class Initial(NamedTuple):
    """What a file or a run gives to begin with: arrays by dotted names, and what belongs to them."""

    arrays: Mapping[str, Array]
    constants: dict[str, float] = {}
    recipe: dict[str, Any] = {}  # how the network was made, and its classes


def begin_with(settings: InitFrom, network: Link, origin: Origin, recipe: Mapping[str, Any] | None = None) -> None:
    """Give a network the weights of a file or a run. Raises ConfigError with what does not fit.

    ``recipe`` is that of the network, with its classes. What makes the weights give other outputs here is warned of.
    """
    where = f"{origin.where(('init_from',))}: init_from"
    try:
        found, constants, made_by = _read(settings.path)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{where}: {said(error)}") from error
    wanted = dict(_targets(network))
    is_torchvision = any(_BLOCK.match(name) for name in found)
    if is_torchvision or (found and not found.keys() & wanted.keys()):
        found = from_torchvision(found) if is_torchvision else {_from_torch(n, wanted): a for n, a in found.items()}
        # a file that says nothing of itself is PyTorch's own
        constants = constants or dict.fromkeys(_normalizations(network), _TORCH_EPS)
        if is_torchvision and not made_by:
            made_by = {"callable": (recipe or {}).get("callable"), "args": _OF_TORCHVISION}
    problems = []
    for name, (get, fill) in wanted.items():
        if _is_skipped(name, settings):
            constants.pop(f"{name.rpartition('.')[0]}.eps", None)
            continue
        if name not in found:
            problems.append(f"{name} is not in the file")
        elif np.shape(get()) != found[name].shape:
            problems.append(f"{name} has shape {found[name].shape} in the file, expected {np.shape(get())}")
        else:
            fill(found[name])
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"{where}: {settings.path}: {'; '.join(problems[:5])}{more}; names in init_from.skip keep their initial "
            "values"
        )
    if constants:
        runs.set_constants(network, {name.replace(".", "/"): value for name, value in constants.items()})
    for words in _other_outputs(made_by, recipe or {}, has_skipped=any(_is_skipped(name, settings) for name in wanted)):
        warn(f"init_from: {settings.path}: {words}")


# Of a network's arguments those that its weights, once they are loaded, do not depend on.
_OF_TRAINING = {"num_classes", "dropout", "stochastic_depth", "zero_gamma", "log_constant_bias", "fan", "uniform_gamma"}
_OF_TORCHVISION = {"stride_in_3x3": True, "variant": "plain", "blur_pooling": "none"}
_OWN_MODELS = "dbrdist.models:"
_RECIPE = "model"  # among the facts of a .safetensors file
_OF_RECIPE = ("callable", "args", "classes")


def warn_of_other_network(run_dir: str, recipe: Mapping[str, Any], words: str) -> None:
    """Warn where a run's network gives other outputs than the one of a recipe, though its weights fit."""
    theirs = read_json(os.path.join(runs.folder_of(run_dir), runs.RECIPE))
    for reason in _other_outputs(theirs, recipe, has_skipped=True):
        warn(f"{words}: {reason}")


def _other_outputs(theirs: Mapping[str, Any], ours: Mapping[str, Any], has_skipped: bool) -> Iterator[str]:
    """Why weights give other outputs in this network than in the one that they are of, though all shapes fit."""
    args, own = theirs.get("args"), ours.get("args")
    is_same = theirs.get("callable") == ours.get("callable")
    is_known = str(ours.get("callable")).startswith(_OWN_MODELS)  # of others, nobody knows what arguments do
    if is_same and is_known and isinstance(args, dict) and isinstance(own, dict):
        for key in sorted(args.keys() & own.keys() - _OF_TRAINING):
            if strict_json.kept(args[key]) != strict_json.kept(own[key]):
                words = f"{key} {args[key]}, and this one has {own[key]}"
                yield f"the weights are of a network with {words}: it gives other outputs"
    words = None if has_skipped else runs.other_classes(theirs.get("classes"), ours.get("classes"))
    if words:
        yield f"{words}; to train a new last layer, name it in init_from.skip"


def _is_skipped(name: str, settings: InitFrom) -> bool:
    return any(name == part or name.startswith(part.rstrip(".") + ".") for part in settings.skip)


def _read(path: str) -> Initial:
    if path.endswith(".safetensors") and not os.path.isdir(path):
        arrays = safetensors.load(path)  # first: says what is wrong with the file
        facts = safetensors.facts(path)
        return Initial(arrays, _constants(facts), _recipe(facts))
    saved = runs.read_newest(path)[1] if os.path.isdir(path) else read_npz(path)
    entries = {key: value for key, value in saved.items() if value is not None}
    of_a_run = _of_the_network(runs.trained_weights(entries))
    if of_a_run:
        recipe = read_json(os.path.join(runs.folder_of(path), runs.RECIPE))
        return Initial(of_a_run, _of_the_network(runs.saved_constants(entries)), recipe)
    return Initial({key.strip("/").replace("/", "."): value for key, value in entries.items()})


def _recipe(facts: Mapping[str, str]) -> dict[str, Any]:
    """That of a file that :func:`export` wrote."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(facts.get(_RECIPE, "{}"))
        return found if isinstance(found, dict) else {}
    return {}


def _constants(facts: Mapping[str, str]) -> dict[str, float]:
    """Those of a file that :func:`export` wrote."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return {name: float(value) for name, value in json.loads(facts.get(runs.CONSTANTS, "{}")).items()}
    return {}


def _targets(network: Link) -> Iterator[tuple[str, Any]]:
    """Each parameter and running statistic by its dotted name, with functions that read and fill it."""
    for path, link in network.namedlinks():
        prefix = path.strip("/").replace("/", ".")
        for name in (*link._params, *link._persistent):
            entry = getattr(link, name)
            array = getattr(entry, "array", entry)
            if is_array(array) and array.ndim:
                yield ".".join(filter(None, (prefix, name))), (lambda a=array: a, functools.partial(_fill, array))


def _normalizations(network: Link) -> Iterator[str]:
    """The dotted names of the `eps` of what PyTorch normalizes with one and the same."""
    for path, link in network.namedlinks():
        if isinstance(link, _WITH_TORCH_EPS):
            yield f"{path}/eps".strip("/").replace("/", ".")


def _fill(array: Array, value: Array) -> None:
    array[...] = get_array_module(array).asarray(value, array.dtype)


_TORCH_EPS = 1e-5  # of these of PyTorch's normalizations, which its files do not name
_WITH_TORCH_EPS = (links.BatchNormalization, links.LayerNormalization, links.GroupNormalization)
_LAST = {"weight": "W", "bias": "b", "running_mean": "avg_mean", "running_var": "avg_var"}
_OF_BN = {"weight": "gamma", "bias": "beta"}
_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.(.*)")


def from_torchvision(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays in torchvision's names of residual networks (`layer2.0.bn1.weight`) in ours (`blocks.3.bn1.gamma`)."""
    places = {(int(m[1]), int(m[2])) for m in map(_BLOCK.match, arrays) if m}
    number = {place: k for k, place in enumerate(sorted(places))}
    return {_our_name(name, number): value for name, value in arrays.items()}


def _our_name(name: str, number: Mapping[tuple[int, int], int]) -> str:
    block = _BLOCK.match(name)
    inner = block[3] if block else name
    inner = inner.replace("downsample.0.", "shortcut.conv.").replace("downsample.1.", "shortcut.bn.")
    if not block:
        inner = re.sub(r"^(conv|bn)1\.", r"\1.", inner)
    *path, last = inner.split(".")
    ours = _OF_BN.get(last) if path and path[-1].startswith("bn") else None
    inner = ".".join([*path, ours or _LAST.get(last, last)])
    return f"blocks.{number[int(block[1]), int(block[2])]}.{inner}" if block else inner


# ---- PyTorch's names ------------------------------------------------------------------------------------------------

_TO_TORCH = {
    "W": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "avg_mean": "running_mean", "avg_var": "running_var",
}  # fmt: skip
_OUR_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")


def to_torch(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays under PyTorch's names; those of our residual networks for ImageNet get torchvision's."""
    numbers = sorted({int(m[1]) for m in map(_OUR_BLOCK.match, arrays) if m})
    is_resnet = bool(numbers) and {"conv.W", "bn.gamma", "fc.W"} <= arrays.keys()
    places: dict[int, tuple[int, int]] = {}
    for k in numbers:  # a stage begins with a block that has a shortcut of its own
        stage, place = places.get(k - 1, (0, 0))
        starts = not places or (f"blocks.{k}.shortcut.conv.W" in arrays)
        places[k] = (stage + 1, 0) if starts else (stage, place + 1)
    return {_torch_name(name, places if is_resnet else {}): value for name, value in arrays.items()}


def _torch_name(name: str, places: Mapping[int, tuple[int, int]]) -> str:
    *path, last = name.split(".")
    renamed = ".".join([*path, _TO_TORCH.get(last, last)])
    block = _OUR_BLOCK.match(renamed)
    if block and places:
        stage, place = places[int(block[1])]
        inner = block[2].replace("shortcut.conv.", "downsample.0.").replace("shortcut.bn.", "downsample.1.")
        return f"layer{stage}.{place}.{inner}"
    return re.sub(r"^(conv|bn)\.", r"\g<1>1.", renamed) if places else renamed


def _from_torch(name: str, wanted: Mapping[str, Array]) -> str:
    """Our name of an array in PyTorch's names: the one of this network that is written so."""
    head, _, last = name.rpartition(".")
    for ours, theirs in _TO_TORCH.items():
        candidate = f"{head}.{ours}" if head else ours
        if theirs == last and candidate in wanted:
            return candidate
    return name
