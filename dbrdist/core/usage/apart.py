"""Networks of which each rank has its own at the moment: what one rank evaluates or saves is no other rank's."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

_lock = threading.Lock()  # ranks may be threads
_now: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # links, and the rank whose own they are
_joined = threading.local()


def go_apart(link: Any, rank: int) -> None:
    """The parameters of ``link`` are those of ``rank`` alone from now on."""
    with _lock:
        _now[link] = rank


def join(link: Any) -> None:
    """All ranks have the same again."""
    with _lock:
        _now.pop(link, None)


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
        apart = list(_now.items())
    params = {p for link in links if hasattr(link, "params") for p in link.params()}
    return next((rank for link, rank in apart if not params.isdisjoint(link.params())), None)
