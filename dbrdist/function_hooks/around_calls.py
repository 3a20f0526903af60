"""The methods through which every call goes, with a profile around them while it records.

These are ``FunctionNode.apply``, each class's ``derive``, ``Link.__call__`` and the optimizers' ``update``. In a pause
of the profile all but ``update``, which counts the steps, are the classes' own again. Python looks up methods anew
after a class has changed: so a pause changes only the classes whose functions ran.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dbrdist.core.model.link import Link
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.update.optimizer import GradientMethod, Optimizer

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array
    from dbrdist.core.tape.variable import Operand, Variable
    from dbrdist.function_hooks.profiler import Profile

_recording: list[Profile] = []  # none or one
_calls: list[tuple[type, str, Any]] = []  # the methods as they were: those that a pause gives back
_updates: list[tuple[type, str, Any]] = []  # and those of optimizers
_seen: set[type] = set()  # functions that ran since the profile began
_deriving: set[type] = set()  # the classes that have their ``derive``
_wrapped: set[type] = set()  # those of all classes whose ``derive`` has the profile around it now
_lock = threading.Lock()


def start(profile: Profile) -> None:
    """Stand around the methods of all classes: the first call can be the backward pass of a graph made before."""
    with _lock:
        if _recording:
            raise RuntimeError("dbrdist.profile: another profile records already; only one can at a time")
        _recording.append(profile)
        _stand_around((FunctionNode, *_subclasses(FunctionNode)))  # own rules are called by FunctionNode's derive
        for cls in _subclasses(Optimizer):
            _replace(_updates, cls, "update", _around_update)


def stop() -> None:
    """Give all methods back."""
    with _lock:
        _recording.clear()
        _give_back(_calls)
        _give_back(_updates)
        for classes in (_seen, _deriving, _wrapped):
            classes.clear()


def pause() -> None:
    """Give the methods back that functions and links are called through."""
    _give_back(_calls)
    _wrapped.clear()


def resume() -> None:
    """Stand around them again: around those of functions that ran before, and of others as soon as they run."""
    _stand_around(_deriving)


def here() -> Profile | None:
    """The profile that records this thread, if there is one."""
    return _recording[0] if _recording and _recording[0].is_here() else None


# ---- classes --------------------------------------------------------------------------------------------------------


def _stand_around(classes: Iterable[type]) -> None:
    _replace(_calls, FunctionNode, "apply", _around_apply)
    _replace(_calls, Link, "__call__", _around_link)
    for cls in classes:
        _stand_around_derive(cls)


def _stand_around_derive(cls: type) -> None:
    _wrapped.add(cls)
    _replace(_calls, cls, "derive", _around_derive)


def _see(cls: type) -> None:
    """A function runs for the first time in this profile."""
    _seen.add(cls)
    owner = next(c for c in cls.__mro__ if "derive" in c.__dict__)
    _deriving.add(owner)
    if owner not in _wrapped:
        _stand_around_derive(owner)


def _subclasses(cls: type) -> Iterator[type]:
    seen = {cls}
    waiting = [cls]
    while waiting:
        for found in waiting.pop().__subclasses__():
            if found not in seen:
                seen.add(found)
                waiting.append(found)
                yield found


def _replace(originals: list[tuple[type, str, Any]], cls: type, name: str, around: Callable[[Any], Any]) -> None:
    """Put a function around a method that the class has itself; a root class may inherit it."""
    own = cls.__dict__.get(name)
    if own is None and cls not in (FunctionNode, Link):
        return
    originals.append((cls, name, own))
    setattr(cls, name, around(getattr(cls, name)))


def _give_back(originals: list[tuple[type, str, Any]]) -> None:
    for cls, name, original in reversed(originals):
        if original is None:
            delattr(cls, name)
        else:
            setattr(cls, name, original)
    originals.clear()


# ---- calls ----------------------------------------------------------------------------------------------------------


def _around_apply(apply: Any) -> Any:
    @functools.wraps(apply)
    def profiled(self: FunctionNode, inputs: tuple[Any, ...]) -> Any:
        profile = here()
        if profile is None:
            return apply(self, inputs)
        if type(self) not in _seen:
            _see(type(self))
        layer = profile.layer
        self.__dict__["_profiled_layer"] = layer
        outputs: tuple[Any, ...] = ()
        began = profile.begin(self, layer, "forward")
        try:
            outputs = apply(self, inputs)
        finally:
            entry = profile.finish(self.label, layer, "forward", began)
        for y in outputs:
            entry.bytes += _new_bytes(y._array, inputs)
        return outputs

    return profiled


def _new_bytes(array: Any, inputs: tuple[Any, ...]) -> int:
    """The bytes of an output; 0 for a view of an input, and for one that is not written yet."""
    if array is None:
        return 0
    root = _root(array)
    for x in inputs:
        if _root(getattr(x, "_array", x)) is root:
            return 0
    return int(array.nbytes)


def _root(array: Array) -> Any:
    """The array that owns the memory of a view."""
    base = getattr(array, "base", None)
    while base is not None and hasattr(base, "shape"):
        array, base = base, getattr(base, "base", None)
    return array


def _around_derive(derive: Any) -> Any:
    @functools.wraps(derive)
    def profiled(self: FunctionNode, *args: Any) -> Any:
        profile = here()
        if profile is None:
            return derive(self, *args)
        layer = self.__dict__.get("_profiled_layer", "")
        began = profile.begin(self, layer, "backward")
        try:
            return derive(self, *args)
        finally:
            profile.finish(self.label, layer, "backward", began)

    return profiled


def _around_link(call: Any) -> Any:
    @functools.wraps(call)
    def profiled(self: Link, *args: Operand, **kwargs: Any) -> Variable:
        profile = here()
        if profile is None:
            return call(self, *args, **kwargs)
        return profile.within(self, lambda: call(self, *args, **kwargs))

    return profiled


def _around_update(update: Any) -> Any:
    @functools.wraps(update)
    def profiled(self: GradientMethod, *args: Any, **kwargs: Any) -> Any:
        profile = here()
        if profile is None:
            return update(self, *args, **kwargs)
        is_inner, profile.is_updating = profile.is_updating, True  # of a multi-node optimizer's
        try:
            if not profile.is_recording:  # each step of a pause comes here
                return update(self, *args, **kwargs)
            began = profile.begin(self, "", "update")
            try:
                return update(self, *args, **kwargs)
            finally:
                profile.finish(type(self).__name__, "", "update", began)
        finally:
            profile.is_updating = is_inner
            if not is_inner:
                profile.end_step()

    return profiled
