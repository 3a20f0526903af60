"""What an optimizer does with gradients, in words that all ranks must have in common: hyperparameters and hooks."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.protocol.gate import digest
from dbrdist.core.array import random
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.update.update_rule import Hooks

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.update.optimizer import GradientMethod


class OptimizerValues:
    """The settings of one optimizer: learning rate, hooks and their like. Most steps change none of them."""

    def __init__(self, optimizer: GradientMethod) -> None:
        self._optimizer = optimizer
        self._hooks: Hooks | None = None
        self._seen_hooks: list[Any] = []
        self._seen: list[tuple[Any, dict[str, Any]]] = []  # objects, with copies of their attributes
        self._hyperparam: Any = None
        self._scale: float | None = None
        self._seed: int | None = None  # of the random numbers, where a hook draws some
        self.own_hooks: list[str] = []  # names of hooks that are not ours, which may differ between ranks
        self.text = ""
        self.digest = 0

    def are_as_before(self) -> bool:
        """Whether :meth:`look` would find the same, unless an update rule has got or lost a hook."""
        actual = self._optimizer
        hooks: Hooks = actual.hooks
        if hooks is not self._hooks or actual.loss_scale != self._scale:
            return False
        if (hooks.pre or hooks.post or self._seen_hooks) and not _are_same(list(hooks), self._seen_hooks):
            return False
        if self._seed is not None and self._seed != random.get_seed():
            return False
        try:
            for thing, attributes in self._seen:
                if thing.__dict__ != attributes:
                    return False
        except ValueError:  # an array among them
            return False
        return self._hyperparam is getattr(actual, "hyperparam", None)

    def look(self, settings: str) -> None:
        """Describe them again, with ``settings`` behind them."""
        actual = self._optimizer
        hyperparam = self._hyperparam = getattr(actual, "hyperparam", None)
        hooks = list(actual.hooks)
        named = dict(_named_params(actual.target))
        of_rules = [(f" of {name}", hook, timing) for name, p in named.items() for hook, timing in _hooks_of_rule(p)]
        every = [("", hook, timing) for hook, timing in _timed(actual.hooks)] + of_rules
        ours = [entry for entry in every if _is_ours(entry[1])]
        self.own_hooks = [f"{_name(hook)}{of}" for of, hook, _ in every if not _is_ours(hook)]
        things = [hook for _, hook, _ in ours]
        if hyperparam is not None:
            things.append(hyperparam)
        self._hooks, self._seen_hooks = actual.hooks, hooks  # kept, so that no other gets the id of one
        self._seen, self._scale = [(thing, _fixed(vars(thing))) for thing in things], actual.loss_scale
        self._seed = random.get_seed() if any(getattr(h, "needs_equal_seeds", False) for _, h, _ in ours) else None
        lines = [f"optimizer {type(actual).__name__}", f"loss scale {actual.loss_scale}"]
        if hyperparam is not None:
            lines += described(hyperparam.own())
        paths = {p: name for name, p in named.items()}
        for of, hook, timing in ours:
            words = [f"hook {type(hook).__name__}{of}{'' if timing == 'pre' else ' after the update'}"]
            lines.append(" ".join([*words, *described(vars(hook), paths)]))
        if self._seed is not None:
            lines.append(f"seed {self._seed} of the random numbers that a hook draws (dbrdist.random.set_seed)")
        self.text = "".join(f"{line}\n" for line in lines) + settings
        self.digest = digest(self.text)


def _is_ours(hook: object) -> bool:
    """True for hooks that change gradients alike everywhere; a user's own may watch on one rank only."""
    return type(hook).__module__.startswith("dbrdist.") and hasattr(hook, "__dict__")


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__).replace("<locals>.", "")


def described(attributes: Mapping[str, float | None], paths: Mapping[Parameter, str] | None = None) -> list[str]:
    """``name value`` for each attribute that is a setting, in alphabetical order."""
    found = [(name, in_words(value, paths or {})) for name, value in sorted(attributes.items())]
    return [f"{name} {words}" for name, words in found if words is not None]


def in_words(value: object, paths: Mapping[Parameter, str]) -> str | None:
    """A setting in words that are equal for equal settings: 1, 1.0, True and NumPy's are one. None for other objects.

    Functions are their names, parameters their paths, sets are sorted, and long arrays are checksums.
    """
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        value = value.item()
    if value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Number):
        return str(float(value) + 0.0 if isinstance(value, numbers.Real) else value)
    if isinstance(value, Parameter):
        return paths.get(value, f"a parameter of shape {value.shape}")
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else f"array {value.shape} {digest(repr(value.tolist()))}"
    if isinstance(value, (list, tuple)):
        return _joined([in_words(entry, paths) for entry in value])
    if isinstance(value, (set, frozenset)):
        return _joined(sorted(str(in_words(entry, paths)) for entry in value))
    if isinstance(value, functools.partial):
        return _joined([in_words(entry, paths) for entry in (value.func, value.args, *sorted(value.keywords.items()))])
    return getattr(value, "__qualname__", None) if callable(value) else None


def _joined(entries: Iterable[str | None]) -> str:
    return f"({', '.join(map(str, entries))})"


def _named_params(target: Link) -> Iterator[tuple[str, Parameter]]:
    yield from () if target is None else target.namedparams()


def _timed(hooks: Hooks | None) -> Iterator[tuple[object, str]]:
    """Hooks with when they are called."""
    if hooks is not None:
        yield from ((hook, "pre") for hook in hooks.pre.values())
        yield from ((hook, "post") for hook in hooks.post.values())


def _hooks_of_rule(p: Parameter) -> Iterator[tuple[object, str]]:
    return _timed(getattr(p.update_rule, "hooks", None))


def _are_same(one: list[object], other: list[object]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _fixed(attributes: dict[str, object]) -> dict[str, object]:
    """A copy that keeps its values where arrays among them are written to."""
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
