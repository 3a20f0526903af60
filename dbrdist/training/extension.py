"""What a trainer calls between steps, and the order in which it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from dbrdist.core.usage.foreign_names import refuse_unknown

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.training.trainer import Trainer
    from dbrdist.training.triggers import TriggerLike

PRIORITY_WRITER = 300  # writes into the observation
PRIORITY_EDITOR = 200  # changes what was observed
PRIORITY_READER = 100  # only reads it


class _NameOfClass:
    """The name of an object's class, as an attribute that can be set."""

    def __get__(self, extension: Callable[[Trainer], object], owner: type) -> str:
        return owner.__name__


class Extension:
    """Base of extensions; any callable that takes the trainer works as well.

    `trigger` says when it is called, `priority` in which order (highest first), `name` under which name the trainer
    keeps it. An extension that owns state lists it in `serialize`, so that a snapshot holds it.

    `subject` says what that state is about; None stands for the class. A trainer whose extension has another subject
    than the saved one of the same name does not load its state.

    Example:
        >>> class Hello(training.Extension):
        ...     trigger = (1, "epoch")
        ...     def __call__(self, trainer):
        ...         print("epoch", trainer.updater.epoch)
    """

    trigger: TriggerLike = (1, "iteration")
    priority: int = PRIORITY_READER
    name: str | None = None
    subject: str | None = None

    default_name: Any = _NameOfClass()  # the name where none is given; a class or an object may have its own

    def __call__(self, trainer: Any) -> Any:
        """Do the work; called whenever the trigger fires."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, trainer)")

    def resume(self, trainer: Trainer) -> None:
        """Called when the run of ``trainer`` starts, before any `initialize`: the place to load a snapshot."""

    def initialize(self, trainer: Trainer) -> None:
        """Called once with the ``trainer`` when the run starts, after a snapshot was loaded."""

    def finalize(self) -> None:
        """Called once when the run ends, also by an exception."""

    def on_error(self, trainer: Trainer, exc: BaseException, tb: Any) -> None:
        """Called before `finalize` if the loop of ``trainer`` ends by ``exc``, with its traceback ``tb``."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        """List the state for ``serializer``, which saves or loads it."""


def subject_of(extension: Extension) -> str:
    """What an extension's state is about."""
    return str(extension.subject or class_of(extension))


def class_of(extension: Extension) -> str:
    """The name of an extension's class, or of the function that it was made of."""
    inner = what_is_called(extension)
    return str(getattr(inner, "__name__", type(inner).__name__))


class _FunctionExtension(Extension):
    """A function made into an extension."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.default_name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, trainer: Trainer) -> Any:
        return self.function(trainer)


def what_is_called(extension: Extension) -> Callable[[Any], Any]:
    """What a call of an extension comes down to: the function that it was made of, or the extension itself."""
    return extension.function if type(extension) is _FunctionExtension else extension


def make_extension(
    trigger: TriggerLike = None,
    default_name: str | None = None,
    priority: int | None = None,
    finalizer: Callable[[], None] | None = None,
    initializer: Callable[[Trainer], None] | None = None,
    on_error: Callable[[Any, BaseException, Any], None] | None = None,
    **kwargs: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that marks a function as an extension, with the given attributes.

    The function stays a plain function; the trainer reads the attributes from it.

    Args:
        trigger: when the extension is called: a pair such as (1, 'epoch'), or a trigger; None for each step.
        default_name: name in the trainer; None for the function's own.
        priority: extensions with a higher one are called first; None for the default.
        finalizer: function without arguments, called at the end of the training; None for none.
        initializer: function of the trainer, called before the first step; None for none.
        on_error: function of the trainer, the error and its traceback, called when the training fails; None for none.
        kwargs: none; a name that is unknown raises a TypeError with a hint.

    Example:
        >>> @training.make_extension(trigger=(1, "epoch"))
        ... def hello(trainer):
        ...     print("epoch", trainer.updater.epoch)
        >>> hello.trigger
        (1, 'epoch')
    """
    refuse_unknown("make_extension", make_extension, kwargs)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.trigger = (1, "iteration") if trigger is None else trigger  # type: ignore[attr-defined]
        function.default_name = function.__name__ if default_name is None else default_name  # type: ignore[attr-defined]
        function.priority = PRIORITY_READER if priority is None else priority  # type: ignore[attr-defined]
        function.initialize = initializer  # type: ignore[attr-defined]
        function.finalize = finalizer  # type: ignore[attr-defined]
        function.on_error = on_error  # type: ignore[attr-defined]
        return function

    return mark


def _refuse_what_makes_one(part: Any) -> None:
    """Functions of ours make extensions, and triggers say when one is called: neither is one."""
    if isinstance(part, FunctionType) and not hasattr(part, "trigger"):
        if "<" not in part.__qualname__:
            words = f"expected an extension, got the function {part.__name__}; write {part.__name__}(...)"
            raise TypeError(words)
    elif type(part).__name__.endswith("Trigger"):
        words = "pass it as trigger= of extend, or as the stop trigger of the Trainer"
        raise TypeError(f"expected an extension, got a trigger, {type(part).__name__}; {words}")


def see_function_of_trainer(where: str, function: Callable[..., object]) -> None:
    """Refuse a function that cannot be called with the trainer alone, before the training begins."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(None)
    except TypeError as e:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{where}: expected a function of the trainer, such as lambda trainer: ..., got {name}{signature}: {e}"
        ) from None


def as_extension(extension: Callable[[Trainer], object]) -> Extension:
    """The extension with everything that the trainer reads from it, for one that may be a bare function."""
    if isinstance(extension, Extension):
        see_function_of_trainer("extend", extension)
        return extension
    if isinstance(extension, type):
        raise TypeError(f"expected an extension, got the class {extension.__name__}; write {extension.__name__}()")
    if not callable(extension):
        raise TypeError(f"expected an extension or a function of the trainer, got {type(extension).__name__}")
    if str(getattr(extension, "__module__", "")).startswith("dbrdist.training."):
        _refuse_what_makes_one(extension)
    see_function_of_trainer("extend", extension)
    wrapped = _FunctionExtension(extension)
    for attribute in ("trigger", "priority", "name", "initialize", "finalize", "on_error", "serialize"):
        value = getattr(extension, attribute, None)
        if value is not None:
            setattr(wrapped, attribute, value)
    if wrapped.name is None:
        name = getattr(extension, "default_name", None) or getattr(extension, "__name__", type(extension).__name__)
        wrapped.name = name
    return wrapped
