"""The hooks of an optimizer or of a rule: by name, before or after the update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from dbrdist.core.usage.mistakes import given_a_class, warn

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.core.update.update_rule import UpdateRule


RuleHook: TypeAlias = "Callable[[UpdateRule, Parameter], object]"  # called for each parameter
OptimizerHook: TypeAlias = "Callable[..., object]"  # of the optimizer, or of each rule and its parameter


class Hooks:
    """Named hooks in the order of their addition, each before or after the update."""

    def __init__(self) -> None:
        self.pre: dict[str, OptimizerHook] = {}
        self.post: dict[str, OptimizerHook] = {}

    def add(self, hook: object, name: str | None, timing: str) -> None:
        if isinstance(hook, type):
            raise given_a_class("add_hook", hook, "a hook")
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        if timing == "auto":
            timing = getattr(hook, "timing", "pre")
            timing = timing if isinstance(timing, str) else "pre"
        if timing not in ("pre", "post"):
            raise ValueError(f"timing: expected 'pre', 'post' or 'auto', got {timing!r}")
        name = getattr(hook, "name", getattr(hook, "__name__", None)) if name is None else name
        if name is None:
            raise ValueError("hook: it has no name attribute, so give add_hook(hook, name=...)")
        if name in self.pre or name in self.post:
            raise KeyError(f"a hook named {name!r} is already there; remove it first, or give another name")
        is_ours = type(hook).__module__.startswith("dbrdist.")
        is_pre = getattr(type(hook), "timing", None) == "pre" and not getattr(hook, "changes_parameters", False)
        if timing == "post" and is_ours and is_pre:
            warn(f"{name}: it changes gradients, which the update has used before; leave out timing='post'")
        getattr(self, timing)[name] = hook

    def remove(self, name: str) -> None:
        if name not in self.pre and name not in self.post:
            raise KeyError(f"no hook named {name!r}")
        self.pre.pop(name, None)
        self.post.pop(name, None)

    def __iter__(self) -> Iterator[OptimizerHook]:
        """All hooks, those before the update first."""
        yield from self.pre.values()
        yield from self.post.values()


def said_of_call(hook: OptimizerHook, name: str) -> Any:
    """An attribute that says what a hook's ``__call__`` does, or None.

    A subclass with a ``__call__`` of its own does not inherit what its base says of another one.
    """
    kind: type = type(hook)
    is_own = name in getattr(hook, "__dict__", ()) or is_said_of(kind, name, _CALL)
    return getattr(hook, name, None) if is_own else None


_CALL = frozenset(("__call__",))


@functools.lru_cache(maxsize=256)
def is_said_of(kind: type, name: str, formulas: frozenset[str]) -> bool:
    """Whether what a class says under ``name`` is meant for the newest of these formulas, be it a base's or its own."""
    for base in kind.__mro__:
        if name in vars(base):
            return True
        if formulas & vars(base).keys():
            break
    return False


def check_divisible(params: Iterable[Parameter], hooks: Hooks) -> None:
    """Refuse ``params`` whose rule or hooks need whole parameters, where each rank has a part of them."""
    for p in params:
        rule = p.update_rule
        runs_flat = getattr(rule, "runs_flat", False)  # one that is none of ours has only an update(param), maybe
        if not runs_flat or rule._hooks is not None:
            what = "a hook of its rule sees" if runs_flat else f"{type(rule).__name__} updates"
            raise ValueError(
                f"optimizer state divided over ranks (zero=1 or 2): {what} {p.name or 'a parameter'} as a whole; "
                "use rules that define step, and hooks of the optimizer, or zero=0"
            )
    for name, hook in {**hooks.pre, **hooks.post}.items():
        if not said_of_call(hook, "works_on_shards"):
            raise ValueError(
                f"optimizer state divided over ranks (zero=1 or 2): the hook {name!r} may need whole gradients; "
                "give it an attribute works_on_shards = True if it works on optimizer.runs() or flat(run), or take "
                "zero=0"
            )
