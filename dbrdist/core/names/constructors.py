"""Constructors say what is wrong with their arguments: names that they do not have, and values outside their limits.

This costs microseconds where an object is made, and nothing afterwards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from dbrdist.core.names.limits import check, limits_of, make_plain
from dbrdist.core.usage.foreign_names import UnknownArgumentError, explained_arguments


def explain_constructors(namespace: Mapping[str, Any]) -> None:
    """Let all classes of ours in a module's namespace explain errors of their arguments."""
    for value in list(namespace.values()):
        for cls in value.__mro__[:-1] if isinstance(value, type) else ():
            init = cls.__dict__.get("__init__")
            is_ours = cls.__module__.startswith("dbrdist.") and not cls.__module__.startswith("dbrdist.core.")
            if is_ours and isinstance(init, FunctionType) and not hasattr(init, "__wrapped__"):
                type.__setattr__(cls, "__init__", _explaining(init))


def _explaining(original: FunctionType) -> Any:
    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        declared, given = limits_of(original), [self, *args]
        check(declared, type(self).__name__, given, kwargs)
        make_plain(declared, given, kwargs)
        try:
            original(*given, **kwargs)
        except TypeError as error:
            words = explained_arguments(type(self).__name__, original, error, kwargs)
            if words is None:
                inner = error.__traceback__ and error.__traceback__.tb_next
                if inner is None and str(error).startswith(
                    f"{original.__qualname__}()"
                ):  # of too few arguments, or more
                    known = ", ".join([*inspect.signature(original).parameters][1:])
                    rest = str(error).partition("()")[2]
                    raise TypeError(f"{type(self).__name__}(){rest}; it takes {known}") from None
                raise
        else:
            return
        raise UnknownArgumentError(words)

    return __init__
