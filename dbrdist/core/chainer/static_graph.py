"""Chainer's marks of static graphs. They are accepted and change nothing: each step records its own graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


_OPTIONS = ("verbosity_level", "enable_double_backprop", "minimize_cache_size", "force_test_define_by_run")


def static_graph(*args: Callable[..., R], **kwargs: int) -> Any:
    """Decorator of a chain's ``forward``, with or without Chainer's options; the method stays as it is.

    Args:
        args: the method, if the decorator is used without brackets.
        kwargs: Chainer's options, which have no effect.

    Raises:
        TypeError: an option that Chainer does not have.

    Example:
        >>> class Net(dbrdist.Chain):
        ...     @dbrdist.static_graph
        ...     def forward(self, x):
        ...         return x
        >>> Net()(1)
        1
    """
    unknown = [name for name in kwargs if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"static_graph() got unknown arguments: {', '.join(unknown)}")
    return _unchanged("static_graph", args)


def static_code(*dec_args: Callable[..., R], **dec_kwargs: int) -> Any:
    """Decorator of a function with side effects within a static graph; the function stays as it is.

    Args:
        dec_args: the function, if the decorator is used without brackets.
        dec_kwargs: Chainer's options, which have no effect.

    Example:
        >>> @dbrdist.static_code
        ... def note(x):
        ...     return x
        >>> note(1)
        1
    """
    return _unchanged("static_code", dec_args)


def _unchanged(name: str, args: tuple[Callable[..., R], ...]) -> Any:
    """What ``@name`` (with the function) or ``@name(...)`` (without) stands for."""
    if not args:
        return _itself
    if len(args) > 1 or not callable(args[0]):
        raise TypeError(f"{name}: expected a function to decorate, got {args!r}")
    return args[0]


def _itself(function: R) -> R:
    return function
