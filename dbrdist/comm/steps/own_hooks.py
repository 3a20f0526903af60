"""Hooks that are not dbrdist's: one that changes gradients on some ranks only makes the ranks drift apart.

A hook that watches (a log of gradient norms on rank 0) is right on any rank. So it is not the hooks that are compared,
but which of them change something: a few elements of each gradient and parameter are looked at before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_FIRST = 3  # steps that are looked at, then one of
_EVERY = 50
_ELEMENTS = 4  # of each array


def is_ours(hook: Any) -> bool:
    """True for hooks that change gradients alike everywhere; a user's own may watch on one rank only."""
    return type(hook).__module__.startswith("dbrdist.") and hasattr(hook, "__dict__")


class OwnHooks:
    """The user's own hooks of one optimizer and of its rules."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._rules: list[Any] = []  # that have some
        self._names: dict[int, str] = {}
        self.are_there = False
        self.changing: list[str] = []  # names of those that have changed something

    def look(self) -> None:
        """See which there are. Hooks that know of parts see other elements on each rank, and do not count."""
        optimizer = self._optimizer
        self._rules, self._names = [], {}
        self._add(optimizer.hooks, "")
        paths: dict[Any, str] = {}  # the first of each parameter: layers may share some
        for name, p in () if optimizer.target is None else optimizer.target.namedparams():
            paths.setdefault(p, name)
        for p, name in paths.items():
            if p.update_rule is not None and p.update_rule.hooks is not None:
                self._rules += [p.update_rule] if self._add(p.update_rule.hooks, f" of {name}") else []
        self.are_there = bool(self._names)

    def _add(self, hooks: Any, of: str) -> bool:
        found = [
            (id(hook), f"{name!r}{of}")
            for name, hook in [*hooks.pre.items(), *hooks.post.items()]
            if not is_ours(hook) and not getattr(hook, "works_on_shards", False)
        ]
        self._names.update(found)
        return bool(found)

    def update(self) -> None:
        """One update of the optimizer, in which its own hooks are watched now and then."""
        optimizer = self._optimizer
        if optimizer.t >= _FIRST and optimizer.t % _EVERY:
            optimizer.update()
            return
        self._begin()
        try:
            optimizer.update()
        finally:
            self._end()

    def _begin(self) -> None:
        optimizer, call = self._optimizer, type(self._optimizer).call_hook
        optimizer.call_hook = lambda hook: self._watch(hook, optimizer.target.params, lambda: call(optimizer, hook))
        for rule in self._rules:
            rule.call_hooks = partial(self._call_hooks_of_rule, rule)

    def _end(self) -> None:
        vars(self._optimizer).pop("call_hook", None)
        for rule in self._rules:
            vars(rule).pop("call_hooks", None)

    def _call_hooks_of_rule(self, rule: Any, timing: str, param: Any) -> None:
        for hook in getattr(rule.hooks, timing).values():
            self._watch(hook, lambda: [param], lambda hook=hook: hook(rule, param))  # type: ignore[misc]

    def _watch(self, hook: Any, params: Callable[[], Iterable[Any]], call: Callable[[], Any]) -> None:
        name = self._names.get(id(hook))
        is_open = name is not None and name not in self.changing
        before = _sample(params()) if is_open else []
        self._end()  # a hook may copy or pickle the optimizer: as it is otherwise
        try:
            call()
        finally:
            self._begin()
        if name is not None and is_open and _sample(params()) != before:
            self.changing = sorted([*self.changing, name])

    def line(self) -> str:
        """What all ranks must have in common."""
        names = [name for name in self.changing if name in self._names.values()]
        return f"own hooks that change gradients or parameters: {', '.join(names) or 'none'}"


def _sample(params: Iterable[Any]) -> list[Any]:
    """Some elements of each gradient and parameter, as bytes: NaN is equal to itself."""
    found: list[Any] = []
    for p in params:
        for array in (p.array, p.grad) if p.is_initialized else ():
            found.append(None if array is None else _some(array))
    return found


def _some(array: Any) -> bytes:
    """Elements at even distances, whatever the order of memory."""
    if not array.size:
        return b""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.transpose().reshape(-1)
    return bytes(flat[:: max(1, array.size // _ELEMENTS)][: _ELEMENTS + 1].tobytes())
