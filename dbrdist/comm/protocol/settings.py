"""The configuration of a communicator."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbrdist.core.array import backend


class Configured:
    """Entries by name. Those that are known beforehand are the same on every rank, which the gate compares."""

    _defaults: dict[str, Any] = {"allreduce_grad_dtype": None, "batched_copy": True}

    def __init__(self) -> None:
        self._configs: dict[str, Any] = dict(self._defaults)
        self._within_config_scope = False

    def _config_changed(self) -> None:
        """Called after a change."""

    def _describe_config(self) -> str:
        return ", ".join(f"{name} {self._configs[name]}" for name in sorted(self._defaults))

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Set one configuration entry of this communicator. False is False."""
        if kwargs:
            raise TypeError(f"set_config({name!r}) expected one value, got also {', '.join(kwargs)}")
        self._check_config_name(name)
        if name == "allreduce_grad_dtype" and value is not None:
            value = backend.as_dtype(value)
            if not backend.is_floating(value):
                raise ValueError(f"allreduce_grad_dtype expected a float type, got {value}")
        self._configs[name] = value
        self._config_changed()

    def get_config(self, name: str | None = None) -> Any:
        """The value of one entry, or without a name a dictionary of all."""
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
        self._within_config_scope = True
        try:
            yield True
        finally:
            self._within_config_scope = False

    @property
    def within_config_scope(self) -> bool:
        """True inside :meth:`config_scope`."""
        return bool(self.__dict__.get("_within_config_scope", False))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_") and self.within_config_scope:
            self._configs[name] = value
