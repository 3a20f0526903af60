"""Results that an object keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dbrdist.core.array.config import config


class cached_property:
    """A read-only property that is computed once with a graph and once without.

    What was computed in ``no_backprop_mode`` has no gradient and cannot stand for a result that needs one.

    Args:
        func: the method that computes the value.

    Example:
        >>> class Layer:
        ...     @dbrdist.utils.cached_property
        ...     def scale(self):
        ...         print("computed")
        ...         return 2.0
        >>> layer = Layer()
        >>> layer.scale + layer.scale
        computed
        4.0
    """

    def __init__(self, func: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, func)  # type: ignore[arg-type]  # its names and words alone
        self.func = func

    def __get__(self, obj: Any, cls: type | None = None) -> Any:
        if obj is None:
            return self
        kept = obj.__dict__.setdefault(self.func.__name__, {})
        with_graph = config.enable_backprop
        if with_graph not in kept:
            kept[with_graph] = self.func(obj)
        return kept[with_graph]

    def __set__(self, obj: Any, value: Any) -> None:
        raise AttributeError(f"attribute {self.func.__name__!r} of {type(obj).__name__} is readonly")
