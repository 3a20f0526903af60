"""Outputs that are not written yet, since the function that comes next may take them over.

Two functions that follow each other may be one pass over memory, but the user calls them one after the other. So the
first may leave its output unwritten, with a way to write it, and the second may take what the first has made for it.
Whoever else comes first, any function or any read of any Variable's array in any thread, has the output written before
it goes on. An output that dies unread is never written. So each thread has at most one unwritten output, and every
value is that of the call.

Beside them, outputs wait that are written, with a way to make them again: until somebody could have changed them, by
the same signs but for the calls of functions that are known to show and to change no operand.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.current_device import MakerStream

if TYPE_CHECKING:
    from dbrdist.core.tape.function_node import FunctionNode


class Pending:
    """An output that a function of the class ``taker`` may take over, and how to write it otherwise."""

    __slots__ = ("origin", "output", "taken", "taker", "write")
    is_offer: ClassVar[bool] = False  # whether the output is written, and may be made again

    def __init__(self, output: Array, taker: type, write: Callable[[Array], None] | None) -> None:
        self.output = weakref.ref(output, _forget)
        self.taker = taker
        self.write = write  # None where the output has been written
        self.taken = False
        self.origin = None if type(output) is np.ndarray else MakerStream.of(output)

    def finish(self) -> None:
        """Write the output, unless nobody can read it any more."""
        output, write = self.output(), self.write
        if output is not None and write is not None:
            if self.origin is None:
                write(output)
            else:
                self.origin.run(partial(write, output))
            self.write = None

    def left(self) -> None:
        """Called where another function or a reader came first."""


waiting: dict[Hashable, Pending] = {}  # by thread, and offers by the identity of the output; empty nearly always
discreet: dict[type, Callable[..., Any]] = {}  # functions that show and change no operand, and their forward
_lock = threading.RLock()
_OFFER = "offer"


def wait(pending: Pending) -> None:
    """Let an output be taken over by a function that comes next in this thread."""
    waiting[get_ident()] = pending


def settle(keeps_offers: bool = False) -> None:
    """Write what is unwritten; called where ``waiting`` is not empty, before anybody can look."""
    with _lock:
        for thread, pending in list(waiting.items()):
            if keeps_offers and pending.is_offer:
                continue
            pending.finish()
            if not pending.taken:
                pending.left()
            if waiting.get(thread) is pending:
                del waiting[thread]


def settle_for(function: FunctionNode) -> None:
    """As :func:`settle`, unless ``function`` may take over what waits in this thread, which then looks itself."""
    pending = waiting.get(get_ident())
    is_discreet = _is_discreet(function)
    if pending is None or not is_discreet or type(function) is not pending.taker:
        settle(is_discreet)


def _is_discreet(function: FunctionNode) -> bool:
    """Whether our own forward runs: a program may have put another in its place, which looks at what it gets."""
    kind = type(function)
    return kind in discreet and kind.forward is discreet[kind] and "forward" not in function.__dict__


def offer(pending: Pending) -> None:
    """Let a written output be made again by whoever takes the offer."""
    waiting[_OFFER, id(pending.output())] = pending


def offered(x: Array) -> Pending | None:
    """The offer for the output ``x``, if it stands."""
    pending = waiting.get((_OFFER, id(x)))
    return pending if pending is not None and pending.output() is x else None


def pending_of(x: Array) -> Pending | None:
    """What waits in this thread, if it is for the output ``x``; else None, and all is written."""
    pending = waiting.get(get_ident())
    if pending is None or pending.output() is not x:
        settle(keeps_offers=True)
        return None
    return pending


def _forget(output: weakref.ref[Any]) -> None:
    """An output died: nobody needs it written."""
    for thread, pending in list(waiting.items()):
        if pending.output is output and waiting.get(thread) is pending:
            del waiting[thread]


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it at the fork


os.register_at_fork(before=lambda: settle() if waiting else None, after_in_child=_renew_lock)
