"""The network that ranks have in common between two averages of local SGD: the mean of theirs.

Each rank's own parameters have gone another way then. An evaluation that adds up what the ranks find, each with its
own, belongs to no network, and a snapshot of rank 0's to another one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from dbrdist.core.array.memory import accumulation_dtype

_lock = threading.Lock()  # ranks may be threads
_apart: weakref.WeakSet[Any] = weakref.WeakSet()  # links whose parameters differ between ranks at times


def goes_apart(link: Any) -> None:
    """From now on the ranks' parameters of this link may differ."""
    with _lock:
        _apart.add(link)


@contextlib.contextmanager
def mean_parameters(comm: Any, links: Iterable[Any]) -> Iterator[None]:
    """Within the block, parameters that may differ between ranks are their means on all. Collective."""
    params = _differing(links) if comm.size > 1 else []
    own = [p.array.copy() for p in params]
    try:
        for p in params:
            p.array[...] = mean_over_ranks(comm, p.array)
        yield
    finally:
        for p, values in zip(params, own):
            p.array[...] = values


def mean_over_ranks(comm: Any, array: Any) -> Any:
    """The mean of an array of all ranks, added and divided in the type in which sums of such arrays run."""
    return comm.allreduce(array.astype(accumulation_dtype(array.dtype))) / comm.size


def may_differ(link: Any) -> bool:
    """Whether parameters of this link may differ between ranks."""
    return bool(_differing([link]))


def _differing(links: Iterable[Any]) -> list[Any]:
    with _lock:
        all_apart = list(_apart)
    apart = {p for link in all_apart for p in link.params()}
    found = dict.fromkeys(p for link in links for p in link.params() if p in apart and p.is_initialized)
    return list(found)
