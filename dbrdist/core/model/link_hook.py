"""Hooks that are called before and after a link's forward."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from dbrdist.core.array.types import Raised
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.variable import Variable


class ForwardPreprocessArgs(NamedTuple):
    """What a hook receives before forward."""

    link: Link
    forward_name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


class ForwardPostprocessArgs(NamedTuple):
    """What a hook receives after forward."""

    link: Link
    forward_name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: Any


class LinkHook:
    """Active for all links of this thread within ``with hook:``, or for one link after ``link.add_hook(hook)``.

    Example:
        >>> class Names(dbrdist.LinkHook):
        ...     def forward_preprocess(self, args):
        ...         print(args.link.name or type(args.link).__name__)
        >>> with Names():
        ...     y = L.Linear(2, 1)(np.ones((1, 2), np.float32))
        Linear
    """

    name: ClassVar[str] = "LinkHook"

    def __enter__(self) -> LinkHook:
        if self.name in thread.hooks:
            raise KeyError(f"link hook {self.name!r} is already active in this thread")
        thread.hooks[self.name] = self
        seen.add(self.name)
        self.added(None)
        return self

    def __exit__(self, *exc: Raised) -> None:
        del thread.hooks[self.name]
        self.deleted(None)

    def added(self, link: Link | None) -> None:
        """Called when the hook is added to ``link``; None where it is added to the thread."""

    def deleted(self, link: Link | None) -> None:
        """Called when the hook is removed from ``link``; None where it was added to the thread."""

    def forward_preprocess(self, args: ForwardPreprocessArgs) -> None:
        """Called before forward; ``args`` has link, forward_name, args and kwargs."""

    def stand_ins(self, args: ForwardPreprocessArgs, link: Link) -> dict[str, Variable]:
        """Attributes that this one call of forward sees instead of the link's own, such as another weight.

        ``link`` has those of the hooks before; ``args.link`` keeps its own attributes throughout.
        """
        return {}

    def forward_postprocess(self, args: ForwardPostprocessArgs) -> None:
        """Called after forward; ``args`` has link, forward_name, args, kwargs and out."""

    def forward_failed(self, args: ForwardPreprocessArgs) -> None:
        """Called instead of ``forward_postprocess`` if forward raised; ``args`` as for ``forward_preprocess``."""


class _ThreadHooks(threading.local):
    def __init__(self) -> None:
        self.hooks: dict[str, LinkHook] = {}


thread = _ThreadHooks()
seen: set[str] = set()  # names of all hooks any thread ever had; while it is empty, calls skip the search


def with_attributes(link: Link, replaced: dict[str, Variable]) -> Link:
    """A copy of a link for one call, which shares all but some attributes: other threads see their own."""
    new = object.__new__(type(link))
    new.__dict__.update(link.__dict__, **replaced, _stand_ins={*link.__dict__.get("_stand_ins", ()), *replaced})
    own_forward = link.__dict__.get("forward")
    if own_forward is not None and getattr(own_forward, "__self__", None) is link:
        new.__dict__["forward"] = own_forward.__func__.__get__(new)
        new.__dict__["_stand_ins"].add("forward")
    return new
