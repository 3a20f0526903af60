"""Links that a forward pass makes anew at each call: their parameters never last long enough to be trained."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

# By the link whose forward makes links: the last one that was made, by line.
_made: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Any]] = weakref.WeakKeyDictionary()
_warned = object()  # instead of a link: this line has been warned of
_CALLS = ("forward", "__call__")


def note_maker(link: Link, kind: type) -> None:
    """Note a link's first parameter; warn where the forward of another one makes it, and made one before that is gone.

    A container made there of links that last is none of these: it has no parameters of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    line: tuple[str, int] | None = None  # the innermost line of the program
    while frame is not None:
        name, owner = frame.f_code.co_name, None
        is_ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] == "dbrdist"
        if not is_ours and line is None:
            line = frame.f_code.co_filename, frame.f_lineno
        if not is_ours and name in _CALLS:
            owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))  # which nearly all call self
        if owner is link:  # which is there already, and waited for its first input
            return
        if line is not None and isinstance(owner, kind):
            try:
                lines = _made.setdefault(owner, {})
            except TypeError:  # a class with an __eq__ of its own and no hash
                return
            before = lines.get(line)
            if before is _warned:
                return
            if before is not None and before() is None:
                warn(
                    f"{type(owner).__name__}.{name} makes a new {type(link).__name__} at each call, whose parameters "
                    "are not trained; make it once, in __init__ within init_scope()"
                )
                lines[line] = _warned
            else:
                lines[line] = weakref.ref(link)
            return
        frame = frame.f_back
