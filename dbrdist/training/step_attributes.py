"""What a captured step may not leave in the links of its target, and what an error during a capture says."""

from __future__ import annotations

import linecache
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, TypeAlias

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Variable
from dbrdist.core.update.replayed_update import plain_values
from dbrdist.errors import CaptureError

_LIBRARIES = ("", "dbrdist", "cupy", "cupyx", "cupy_backends", "numpy", "contextlib")

Attribute: TypeAlias = tuple[dict[str, Any], str, Array]  # of which object, its name and value
Loss: TypeAlias = Callable[..., Variable]


class Attributes:
    """The attributes of all links at one time: what a step changes there, and reads again, is state of the host."""

    def __init__(self, target: Link) -> None:
        self._links = list(target.namedlinks())
        self._before = [dict(vars(link)) for _, link in self._links]
        self._held = [{n: copy(v) for n, v in before.items() if type(v) in _CONTAINERS} for before in self._before]
        self._stale: dict[VariableNode, str] = {}

    def why_not(self) -> str | None:
        """Why a step that has just run cannot be captured: it counts, or rebinds arrays."""
        for path, name, old, new in self._changed():
            if type(new) in _CONTAINERS and type(old) is type(new):
                return f"it changes what the attribute {name!r} of the link {path} holds"
            if backend.is_array(new):
                return f"it rebinds the array {name!r} of the link {path}"
            if new is not None and not isinstance(new, Variable):
                return f"it changes the attribute {name!r} of the link {path}, from {old!r:.40} to {new!r:.40}"
        return None

    def _changed(self) -> Iterator[tuple[str, str, Any, Any]]:
        for (path, link), before, held in zip(self._links, self._before, self._held):
            for name, new in vars(link).items():
                old = before.get(name)
                if new is old and name in held and not _holds_the_same(new, held[name]):
                    yield path or "/", name, held[name], new
                if new is old or name == "_changed_at" or isinstance(new, Parameter):
                    continue
                if type(new) is type(old) and plain_values([new]) and new == old:
                    continue
                yield path or "/", name, old, new

    def persistent_arrays(self) -> Iterator[Attribute]:
        """Arrays that are saved with the links: the attributes of which, the name and the array."""
        for (_, link), before in zip(self._links, self._before):
            for name in vars(link).get("_persistent", ()):
                if backend.is_array(before.get(name)):
                    yield vars(link), name, before[name]

    def go_back(self) -> None:
        """Give links their attributes back."""
        links = {path or "/": link for path, link in self._links}
        for path, name, old, _ in list(self._changed()):
            vars(links[path])[name] = old

    def watched(self, loss_func: Loss) -> Loss:
        """A loss function that refuses a graph in which a Variable of the last step takes part."""
        for (path, _), before in zip(self._links, self._before):
            for name, value in before.items():
                if isinstance(value, Variable) and not isinstance(value, Parameter):
                    self._stale[value.node] = f"{name!r} of the link {path or '/'}"

        def call(*args: Array, **kwargs: Array) -> Variable:
            loss = loss_func(*args, **kwargs)
            for node in _nodes_behind(loss):
                if node in self._stale:
                    raise CaptureError(f"it computes with the Variable {self._stale[node]}, from the step before")
            return loss

        return call


_CONTAINERS = (list, dict, set, deque)


def _holds_the_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects, or equal numbers; Variables may be others."""
    if len(one) != len(other) or (isinstance(one, dict) and list(one) != list(other)):
        return False
    pairs = zip(one.values(), other.values()) if isinstance(one, dict) else zip(one, other)
    return all(
        a is b or (isinstance(a, Variable) and isinstance(b, Variable)) or (len(plain_values([a, b])) == 2 and a == b)
        for a, b in pairs
    )


def _nodes_behind(loss: Variable) -> Iterator[VariableNode]:
    seen: set[VariableNode] = set()
    waiting = [loss.node] if isinstance(loss, Variable) else []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            creator = node.living_creator()
            if creator is not None:
                waiting += [n for n in creator.inputs if n is not None]


def words_of(error: Exception) -> str:
    """What an error during a capture says, and the line of the program that led there."""
    said = str(error).strip().split("\n")[0] or type(error).__name__
    frames = list(traceback.walk_tb(error.__traceback__))
    users = [f for f in frames if str(f[0].f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES]
    own = [f for f in frames if str(f[0].f_globals.get("__name__", "")).startswith("dbrdist.")]
    if not users and not own:
        return said
    frame, line = (users or own)[-1]
    file = frame.f_code.co_filename
    code = linecache.getline(file, line, frame.f_globals).strip()
    return f"{said} ({file}, line {line}, in {frame.f_code.co_name}: {code})"
