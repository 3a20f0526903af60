"""The network that ranks have in common where theirs differ: the mean.

Between two averages of local SGD each rank has its own parameters, and running statistics are each rank's own until
they are averaged. An evaluation that adds up what the ranks find, each with its own, belongs to no network, and a
snapshot of rank 0's to another one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.protocol import samples
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import is_array
from dbrdist.core.array.memory import accumulation_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.model.apart import joined

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.link import Link
    from dbrdist.core.model.parameter import Parameter

_lock = threading.Lock()  # ranks may be threads
_apart: weakref.WeakSet[Link] = weakref.WeakSet()  # links whose parameters differ between ranks at times


def goes_apart(link: Link) -> None:
    """From now on the ranks' parameters of this link may differ."""
    with _lock:
        _apart.add(link)


@contextlib.contextmanager
def mean_parameters(comm: CommunicatorBase, links: Iterable[Link]) -> Iterator[None]:
    """Within the block, parameters that may differ between ranks are their means on all. Collective."""
    params = _differing(links) if comm.size > 1 else []
    own = [p.lend().copy() for p in params]
    try:
        for p in params:
            p.write(mean_over_ranks(comm, p.lend()))
        with joined():
            yield
    finally:
        for p, values in zip(params, own):
            p.write(values)


@contextlib.contextmanager
def one_network(comm: CommunicatorBase, links: Iterable[Link]) -> Iterator[str]:
    """As :func:`mean_parameters`, and the running statistics of equal parameters are means too. Collective.

    Yields how the ranks' parameters differ all the same, which is right where each rank has a part of a model; an
    empty text where they do not.
    """
    links = [link for link in links if hasattr(link, "namedparams")] if comm.size > 1 else []
    with mean_parameters(comm, links):
        if not links:
            yield ""
            return
        named = [(f"{k}{name}", p.lend()) for k, link in enumerate(links) for name, p in link.namedparams()]
        of_params = [(name, a) for name, a in named if a is not None]
        statistics = [(link, *entry) for link in links for entry in persistent_arrays(link) if _is_writable(entry[1])]
        words = [_checksum(of_params), _checksum([(path, value) for _, path, value in statistics])]
        rows = comm.gate.allgather_rows(np.array(words, np.int64))
        difference = "" if (rows[:, 0] == rows[0, 0]).all() else _difference(comm, of_params)
        if difference or (rows[:, 1] == rows[0, 1]).all() or not _have_same_names(comm, statistics):
            yield difference
            return
        with _mean_statistics(comm, [value for *_, value in statistics]):
            yield difference


@contextlib.contextmanager
def _mean_statistics(comm: CommunicatorBase, values: Sequence[Array]) -> Iterator[None]:
    """Within the block these arrays are their means over the ranks. What the block writes into them stays."""
    own = [value.copy() for value in values]
    for value in values:
        value[...] = mean_over_ranks(comm, value)
    means = [value.copy() for value in values]
    try:
        yield
    finally:
        for value, before, mean in zip(values, own, means):
            if ((value == mean) | (mean != mean)).all():
                value[...] = before


def persistent_arrays(link: Link) -> Iterator[tuple[str, Array]]:
    """(path, array) of the floats that a link saves but does not train, such as running statistics."""
    for path, part in link.namedlinks():
        for name in part.persistent_names:
            value = getattr(part, name)
            if is_array(value) and value.dtype.kind == "f":
                yield f"{path.rstrip('/')}/{name}", value


def _is_writable(value: Array) -> bool:
    return not isinstance(value, np.ndarray) or value.flags.writeable


def _checksum(named: Iterable[tuple[str, Array]]) -> int:
    found = 0
    for name, array in named:
        found = zlib.crc32(f"{name} {array.shape} {array.dtype}".encode(), found)
        found = zlib.crc32(samples.some(array).tobytes(), found)
    return found


def _difference(comm: CommunicatorBase, named: list[tuple[str, Array]]) -> str:
    """Where the ranks' arrays differ by more than rounding, in words; an empty text if they do not. Collective."""
    mine = {name: (array.shape, samples.some(array)) for name, array in named}
    everyone = comm.allgather_obj(mine)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        others = [
            rank for rank, theirs in enumerate(everyone) if _are_different(everyone[0].get(name), theirs.get(name))
        ]
        if others:
            return f"{name[1:]} on {name_ranks(others)} of {comm.size} differs from that of rank 0"
    return ""


def _are_different(one: Any, other: Any) -> bool:
    """Of the shapes and samples of two arrays, None where a rank has none."""
    if one is None or other is None:
        return one is not other
    return one[0] != other[0] or samples.differ(one[1], other[1])


def _have_same_names(comm: CommunicatorBase, statistics: list[tuple[Link, str, Array]]) -> bool:
    found = comm.allgather_obj([(path, value.shape, str(value.dtype)) for _, path, value in statistics])
    return all(theirs == found[0] for theirs in found)


def mean_over_ranks(comm: CommunicatorBase, array: Array) -> Array:
    """The mean of an array of all ranks, added and divided in the type in which sums of such arrays run."""
    return comm.allreduce(array.astype(accumulation_dtype(array.dtype))) / comm.size


def may_differ(link: Link) -> bool:
    """Whether parameters of this link may differ between ranks."""
    return bool(_differing([link]))


def _differing(links: Iterable[Link]) -> list[Parameter]:
    with _lock:
        all_apart = list(_apart)
    apart = {p for link in all_apart for p in link.params()}
    found = dict.fromkeys(p for link in links for p in link.params() if p in apart and p.is_initialized)
    return list(found)
