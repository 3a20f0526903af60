"""Weights of a run as safetensors, and weights of a file or a run to begin with."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dbrdist.cli.components import InitFrom
from dbrdist.cli.load import Origin
from dbrdist.cli.words import said
from dbrdist.core import safetensors
from dbrdist.core.backend import get_array_module, is_array
from dbrdist.core.serializer import read_npz
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.training import runs


def export(run: str, path: str) -> str:
    """Write the network of a run's newest whole snapshot, or of one snapshot, as safetensors; the result in words.

    Names are those of the network's links with dots between them: `conv1.W`, `bn1.avg_mean`.
    """
    found = runs.find_snapshot(run)
    entries = _of_the_network(runs.trained_weights(read_npz(found)))
    arrays = {
        key: value for key, value in entries.items() if value is not None and value.dtype.name in safetensors.TYPE_NAMES
    }
    safetensors.save(path, arrays, {"source": os.path.basename(found), "format": "dbrdist"})
    num = sum(a.size for a in arrays.values())
    return f"{path}: {len(arrays)} arrays with {num:,} numbers from {found}"


def _of_the_network(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a run without those of a loss, by names with dots."""
    inner = {key.removeprefix("predictor/"): value for key, value in weights.items() if key.startswith("predictor/")}
    return {key.replace("/", "."): value for key, value in inner.items()}


# ---- weights to begin with ------------------------------------------------------------------------------------------


def begin_with(settings: InitFrom, network: Any, origin: Origin) -> None:
    """Give a network the weights of a file or a run. Raises ConfigError with what does not fit."""
    where = f"{origin.where(('init_from',))}: init_from"
    try:
        found = _read(settings.path)
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{where}: {said(error)}") from error
    wanted = dict(_targets(network))
    if "fc.weight" in found:
        found = from_torchvision(found)
    problems = []
    for name, (get, fill) in wanted.items():
        if any(name == part or name.startswith(part.rstrip(".") + ".") for part in settings.skip):
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


def _read(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        path = runs.find_snapshot(path)
    if path.endswith(".safetensors"):
        return safetensors.load(path)
    entries = {key: value for key, value in read_npz(path).items() if value is not None}
    of_a_run = _of_the_network(runs.trained_weights(entries))
    return of_a_run or {key.strip("/").replace("/", "."): value for key, value in entries.items()}


def _targets(network: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter and running statistic by its dotted name, with functions that read and fill it."""
    for path, link in network.namedlinks():
        prefix = path.strip("/").replace("/", ".")
        for name in (*link._params, *link._persistent):
            entry = getattr(link, name)
            array = getattr(entry, "array", entry)
            if is_array(array) and array.ndim:
                yield ".".join(filter(None, (prefix, name))), (lambda a=array: a, functools.partial(_fill, array))


def _fill(array: Any, value: Any) -> None:
    array[...] = get_array_module(array).asarray(value, array.dtype)


_LAST = {"weight": "W", "bias": "b", "running_mean": "avg_mean", "running_var": "avg_var"}
_OF_BN = {"weight": "gamma", "bias": "beta"}
_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.(.*)")


def from_torchvision(arrays: Mapping[str, Any]) -> dict[str, Any]:
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
