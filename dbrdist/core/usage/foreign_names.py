"""Names of PyTorch, and what stands for them here: of modules, of objects, and of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import getattr_static
from typing import Any

from dbrdist.core.usage.foreign_tables import ARGUMENTS, OF_MODULES, OF_OBJECTS
from dbrdist.core.usage.mistakes import warn


def hint(module: str, name: str) -> str:
    """What to write for a name of PyTorch that the module (`.functions`, without its first name) lacks, or nothing."""
    table = OF_MODULES.get(module)
    while table is None and module:
        module = module.rpartition(".")[0]
        table = OF_MODULES.get(module)
    ours = (table or {}).get(name)
    return "" if ours is None else f"{name} is PyTorch's name; write {ours}"


class Foreign:
    """An attribute that a class lacks: reading it says what to write."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: object, owner: type) -> Any:
        words = f"{owner.__name__!r} object has no attribute {self._name!r}; write {self._ours}"
        raise AttributeError(words, name=self._name)


class UnknownSetting(Foreign):
    """A hyperparameter that an optimizer lacks: assigning it would change nothing, and warns."""

    _kind = "hyperparameter"

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is not None and self._name in obj.__dict__:
            return obj.__dict__[self._name]
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}{self._hint(owner)}", name=self._name
        )

    def __set__(self, obj: object, value: object) -> None:
        cls = type(obj)
        if cls.__module__.startswith("dbrdist.") and self._name not in obj.__dict__:  # a user's class may have it
            words = f"{cls.__name__} has no {self._kind} {self._name!r}, so that setting it changes nothing"
            warn(f"{words}{self._hint(cls)}")
        obj.__dict__[self._name] = value

    def __delete__(self, obj: object) -> None:
        del obj.__dict__[self._name]

    def _hint(self, owner: type) -> str:
        known = [name for name in _SETTINGS if not isinstance(getattr_static(owner, name, self), Foreign)]
        meant = next((ours for ours in ARGUMENTS.get(self._name, ()) if ours in known or not ours.isidentifier()), None)
        if meant is not None:
            return f"; did you mean {meant!r}?" if meant in known else f"; write {meant}"
        return f"; it has {', '.join(known)}" if known else ""


class UnknownSwitch(UnknownSetting):
    """A switch of other frameworks' layers: assigning it would change nothing, and warns."""

    _kind = "switch"

    def _hint(self, owner: type) -> str:
        return f"; write {self._ours}"


_SETTINGS = (
    "lr", "alpha", "momentum", "beta1", "beta2", "betas", "eps", "rho", "eta", "gamma", "weight_decay_rate",
    "learning_rate", "weight_decay", "decay", "epsilon", "nesterov", "clip", "amsgrad",
)  # fmt: skip


def warn_of_unknown(optimizer: str, name: str, known: list[str], is_certain: bool) -> None:
    """Warn of a hyperparameter that an optimizer lacks; unless that ``is_certain``, only if it is like one of them."""
    import difflib  # loaded for errors alone

    if is_certain or name in _SETTINGS or difflib.get_close_matches(name, known, 1, 0.8):
        words = f"{optimizer}: hyperparam.{name}: there is no such entry, so that setting it changes nothing"
        warn(f"{words}{_meant(name, known)}")


def add_settings(cls: type) -> None:
    """Let the class of all optimizers warn of hyperparameters that are assigned and that it lacks."""
    for name in _SETTINGS:
        if not hasattr(cls, name):
            _give(cls, name, UnknownSetting(""))


def add_switches(cls: type) -> None:
    """Let the class of all links warn of switches of PyTorch's and Keras's layers."""
    freeze = "disable_update() or enable_update()"
    for name, ours in (("trainable", freeze), ("requires_grad", freeze), ("training", OF_OBJECTS["Link"]["training"])):
        _give(cls, name, UnknownSwitch(ours))


def _give(cls: type, name: str, foreign: Foreign) -> None:
    foreign.__set_name__(cls, name)
    setattr(cls, name, foreign)


def add_hints(cls: type, kind: str) -> None:
    """Let a class explain the names of PyTorch that it and its bases lack; an attribute of an instance goes first."""
    for name, ours in OF_OBJECTS[kind].items():
        if not hasattr(cls, name):
            _give(cls, name, Foreign(ours))


def explained_arguments(
    name: str, function: Callable[..., object], error: TypeError, given: Mapping[str, object], is_direct: bool = False
) -> str | None:
    """Words for a call that failed because the function has no such argument; None for any other error."""
    trace = error.__traceback__
    if not is_direct and (trace is None or trace.tb_next is not None):  # raised within the function
        return None
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    unknown = [key for key in given if key not in parameters]
    if not unknown:
        return None
    return f"{name}() got an unexpected keyword argument {unknown[0]!r}{_meant(unknown[0], list(parameters))}"


class UnknownArgumentError(TypeError, ValueError):
    """A keyword argument that a function does not take; Chainer raises ValueError where it took it once."""


def refuse_unknown(name: str, function: Callable[..., object], unknown: Mapping[str, object]) -> None:
    """Raise for keyword arguments left over in a function that takes any: what its signature has is known."""
    if unknown:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        raise UnknownArgumentError(
            f"{name}() got unknown arguments: {', '.join(unknown)}{_meant(next(iter(unknown)), known)}"
        )


def _meant(argument: str, parameters: list[str]) -> str:
    known = [p for p in parameters if p != "self"]
    for ours in ARGUMENTS.get(argument, ()):
        if ours in known or not ours.isidentifier():
            return f"; did you mean {ours!r}?" if ours in known else f"; write {ours}"
    import difflib  # loaded for errors alone

    close = difflib.get_close_matches(argument.lower(), {p.lower(): p for p in known}, 1)
    if close:
        return f"; did you mean {next(p for p in known if p.lower() == close[0])!r}?"
    return f"; it takes {', '.join(known) or 'no arguments'}"
