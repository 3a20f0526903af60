"""The configuration of a communicator."""

from __future__ import annotations

import difflib
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array import backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, TypeAlias

    from numpy.typing import DTypeLike

    ConfigValue: TypeAlias = float | DTypeLike | None  # a switch, a number, or a type and its name

_SWITCHES = ("shared_memory", "overlap", "sockets")  # None lets the communicator choose


class Configured:
    """Entries by name. Those that are known beforehand are the same on every rank, which the gate compares.

    Args:
        defaults: these, with their values at first.
        others: all entries of a communicator that this one is a part of.
    """

    within_config_scope = False  # True inside :meth:`config_scope`

    def __init__(self, defaults: Mapping[str, ConfigValue], others: Mapping[str, ConfigValue] | None = None) -> None:
        self._defaults = tuple(sorted(defaults))
        self._configs = {**defaults, **(others or {})}

    def _config_changed(self) -> None:
        """Called after a change."""

    def _describe_config(self) -> str:
        """What all ranks must have in common, in words."""
        return ", ".join(f"{name} {self._configs[name]}" for name in self._defaults)

    def set_config(self, name: str, value: Any = True, **kwargs: ConfigValue) -> None:
        """Set one configuration entry of this communicator. False is False.

        Args:
            name: an entry that :meth:`get_config` lists.
            value: its new value; default True.
            kwargs: refused; takes the place of Chainer's, of which none is used.
        """
        if kwargs:
            raise TypeError(f"set_config({name!r}) expected one value, got also {', '.join(kwargs)}")
        self._check_config_name(name)
        if name == "allreduce_grad_dtype" and value is not None:
            value = backend.as_dtype(value)
            if not backend.is_floating(value):
                raise ValueError(f"allreduce_grad_dtype expected a float type, got {value}")
        if name in _SWITCHES and not _is_switch(value):
            raise ValueError(f"{name} expected True, False or None, got {value!r}")
        self._configs[name] = value
        self._config_changed()

    def get_config(self, name: str | None = None) -> Any:
        """The value of the entry ``name``, or without a name a dictionary of all; an unknown name is a ValueError."""
        if name is None:
            return dict(self._configs)
        self._check_config_name(name)
        return self._configs[name]

    def _check_config_name(self, name: str) -> None:
        if name not in self._configs:
            known = sorted(self._configs)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown configuration {name!r} of a communicator, known are {', '.join(known)}{hint}")

    @contextmanager
    def config_scope(self) -> Iterator[bool]:
        """Within the block, attributes set on this communicator are configuration entries too (for subclasses)."""
        kind: type = type(self)
        self.__class__ = _within_scope(kind)
        try:
            yield True
        finally:
            self.__class__ = kind


@functools.cache
def _within_scope(kind: type) -> type[Configured]:
    """A class of the same name whose objects keep what is assigned to them as configuration: no other pays for it."""

    def keep(self: Configured, name: str, value: ConfigValue) -> None:
        object.__setattr__(self, name, value)
        if not name.startswith("_"):
            self._configs[name] = value

    members = {"within_config_scope": True, "__setattr__": keep, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def _is_switch(value: object) -> bool:
    if value is None or isinstance(value, np.bool_):
        return True
    return isinstance(value, int) and value in (0, 1)
