"""What functions and classes say about themselves: experimental, nondeterministic, final."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from dbrdist.core.array.config import config

_F = TypeVar("_F", bound=Callable[..., Any])


def experimental(api_name: str) -> None:
    """Warn (FutureWarning) that a function or class may still change, where it is used.

    A program that sets ``disable_experimental_feature_warning`` of the root module is not warned.

    Args:
        api_name: the name to show.

    Example:
        >>> dbrdist.utils.experimental("mypackage.function")  # doctest: +SKIP
        FutureWarning: mypackage.function is experimental and may change
    """
    roots = [vars(sys.modules[name]) for name in ("dbrdist", "chainer") if name in sys.modules]
    if any(root.get("disable_experimental_feature_warning") for root in roots):
        return
    warnings.warn(f"{api_name} is experimental and may change", FutureWarning, stacklevel=3)


def nondeterministic(f_name: str) -> None:
    """Warn that a function gives other numbers in each run, in the debug mode.

    Args:
        f_name: the name of the function.

    Example:
        >>> dbrdist.utils.nondeterministic("scatter")  # a warning in debug mode alone
    """
    if config.debug:
        warnings.warn(f"{f_name} may give slightly other numbers each time", stacklevel=3)


def final(*args: Any, **kwargs: Any) -> Any:
    """Mark a method that no subclass may override: ``@final`` or ``@final(action=DeprecationWarning)``.

    It works in classes whose metaclass is :func:`enable_final`'s. With ``action`` an override warns, else it raises.

    Args:
        args: the method, if the decorator is used without brackets.
        kwargs: ``action``, an exception or warning class.

    Raises:
        TypeError: when a subclass is defined that overrides the method.

    Example:
        >>> class A(dbrdist.utils.enable_final()):
        ...     @dbrdist.utils.final
        ...     def f(self):
        ...         return 1
        >>> A().f()
        1
    """

    def mark(method: _F) -> _F:
        method.__final = kwargs.get("action", TypeError)  # type: ignore[attr-defined]
        return method

    return mark(*args) if args else mark


class _EnableFinal(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        for key in namespace:
            for base in bases:
                action = getattr(getattr(base, key, None), "__final", None)
                if action is None:
                    continue
                message = f"{name}.{key} overrides {base.__name__}.{key}, which is final"
                if not issubclass(action, Warning):
                    raise action(message)
                warnings.warn(message, action, stacklevel=2)
        return super().__new__(mcs, name, bases, namespace)


def enable_final(base: tuple[type, ...] = (), meta_base: tuple[type, ...] = ()) -> Any:
    """A base class under which :func:`final` is heeded.

    Args:
        base: further base classes.
        meta_base: further metaclasses.

    Example:
        >>> class A(dbrdist.utils.enable_final()):
        ...     @dbrdist.utils.final
        ...     def f(self):
        ...         return 1
        >>> A().f()
        1
    """
    meta = type("EnableFinal", (_EnableFinal, *meta_base), {})
    return meta("base", tuple(base), {})
