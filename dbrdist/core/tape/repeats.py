"""Calls that are repeated for backward: what they compute once, and what they assign to links."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from dbrdist.core.array.backend import is_array
from dbrdist.core.array.config import config
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dbrdist.core.model.link import Link

T = TypeVar("T")

_MISSING: Any = object()
_LEVELS = 4  # of lists and dicts in each other that are looked through


class Assignments:
    """The state that calls assign to attributes of links: Variables, arrays, numbers, and lists and dicts of them."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Link, str, object]] = {}
        self._made: dict[int, Link] = {}  # links that the calls themselves make: they stay

    def note(self, owner: Link, name: str, value: object) -> None:
        """Keep what the attribute is before its first assignment; of a link that is being made, the first value."""
        if "_params" not in owner.__dict__:
            self._made[id(owner)] = owner
        key = (id(owner), name)
        if key in self._before or _is_parameter(owner, name) or not _is_state(value):
            return
        self._before[key] = owner, name, value if id(owner) in self._made else owner.__dict__.get(name, _MISSING)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within the block the attributes have the values of before; after it, those that they have now."""
        now = [(owner, name, owner.__dict__.get(name, _MISSING)) for owner, name, _ in self._before.values()]
        _assign(self._before.values())
        try:
            yield
        finally:
            _assign(now)

    def variables(self) -> list[Variable]:
        """The Variables that the attributes hold, in the order of assignment."""
        return [v for owner, name, _ in self._before.values() for v in _variables_in(owner.__dict__.get(name))]


def _assign(values: Iterable[tuple[Link, str, object]]) -> None:
    for owner, name, value in values:
        if value is _MISSING:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = value


def _is_parameter(owner: Link, name: str) -> bool:
    """Is, or becomes, the attribute a parameter of its link?"""
    return bool(owner.__dict__.get("_within_init_scope")) or name in owner.__dict__.get("_params", ())


def _parts(value: object, levels: int) -> Collection[object] | None:
    """What a container holds, None for other values and where containers are nested deeper, as in themselves."""
    if not levels or not isinstance(value, (list, tuple, dict)):
        return None
    return value.values() if isinstance(value, dict) else value


def _is_state(value: object, levels: int = _LEVELS) -> bool:
    parts = _parts(value, levels)
    if parts is not None:
        return all(_is_state(part, levels - 1) for part in parts)
    return value is None or isinstance(value, (Variable, int, float, np.generic)) or is_array(value)


def _variables_in(value: object, levels: int = _LEVELS) -> list[Variable]:
    parts = _parts(value, levels)
    if parts is not None:
        return [v for part in parts for v in _variables_in(part, levels - 1)]
    return [value] if isinstance(value, Variable) else []


are_used: list[bool] = [False]  # whether anything was ever repeated: until then nobody looks


class Repeats(NamedTuple):
    """What is computed once, though the calls that need it are repeated: see :func:`computed_once`."""

    kept: Iterator[object] | None  # by the first calls, in their order; None where these are the first
    records: tuple[list[object], ...]  # that keep it for later repetitions
    assignments: tuple[Assignments, ...] = ()  # that note what is assigned


@contextmanager
def repeating(
    kept: Sequence[object] | None, records: tuple[list[object], ...] = (), assignments: tuple[Assignments, ...] = ()
) -> Iterator[None]:
    """Within the block, this thread repeats calls that kept these values, or records them where that is None."""
    are_used[0] = True
    switches = config.__dict__
    before: Repeats | None = switches["_repeats"]
    if kept is None and before is not None:
        switches["_repeats"] = Repeats(
            before.kept, (*before.records, *records), (*before.assignments, *assignments)
        )  # fmt: skip
    else:
        switches["_repeats"] = Repeats(None if kept is None else iter(kept), records, assignments)
    try:
        yield
    finally:
        switches["_repeats"] = before


def computed_once(compute: Callable[[], T]) -> Any:
    """``compute()``, or where this call is repeated, what that was the first time: state that moves with each call."""
    repeats: Repeats | None = config.__dict__["_repeats"]
    if repeats is None:
        return compute()
    value = compute() if repeats.kept is None else next(repeats.kept)
    for record in repeats.records:
        record.append(value)
    return value


def note_state(owner: Link, name: str, value: object) -> None:
    """Called before an object assigns ``value`` to its attribute, within calls that will be repeated."""
    repeats: Repeats = config.__dict__["_repeats"]
    for assignments in repeats.assignments:
        assignments.note(owner, name, value)
