"""Networks of which each rank has its own at the moment: what one rank evaluates or saves is no other rank's."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from dbrdist.core.tape.node import assignments

_lock = threading.Lock()  # ranks may be threads
# Links, with the rank whose own they are, and the count of assignments to parameters at that time.
_now: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
_common: weakref.WeakSet[Any] = weakref.WeakSet()  # parameters of them that all ranks have been given since
_joined = threading.local()


def go_apart(link: Any, rank: int) -> None:
    """The parameters of ``link`` are those of ``rank`` alone from now on."""
    with _lock:
        _now[link] = rank, assignments[0]
        if _common:
            _common.difference_update(link.params())


def join(link: Any) -> None:
    """All ranks have the same again."""
    with _lock:
        _now.pop(link, None)


def join_params(params: Iterable[Any]) -> None:
    """All ranks have the same values of these parameters again."""
    if _now:
        with _lock:
            _common.update(params)


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Within the block, in this thread, the networks are those that all ranks have in common."""
    before = getattr(_joined, "is_on", False)
    _joined.is_on = True
    try:
        yield
    finally:
        _joined.is_on = before


def owner(links: Iterable[Any]) -> int | None:
    """The rank that alone has parameters of ``links``, or None where all ranks have the same."""
    if not _now or getattr(_joined, "is_on", False):
        return None
    with _lock:
        apart, common = list(_now.items()), set(_common)
    params = {p for link in links if hasattr(link, "params") for p in link.params()} - common
    owners = (rank for link, (rank, since) in apart for p in link.params() if p in params and _is_own(p, since))
    return next(owners, None)


def _is_own(p: Any, since: int) -> bool:
    """Whether nothing has been loaded or assigned since: what a program gives one rank, it gives all of them."""
    return bool(p.node.assigned <= since)
