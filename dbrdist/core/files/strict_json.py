"""JSON as every reader takes it: Python's own writer puts ``NaN`` and ``Infinity`` into it, which JSON lacks."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.core.array.types import JSON

_NAME = "__float__"  # of a number that JSON lacks, where it must come back


def dumps(data: JSON, indent: int | None = None) -> str:
    """Strict JSON, with null instead of NaN and infinities."""
    return json.dumps(_mapped(data, lambda number: None), indent=indent, allow_nan=False)


def kept(data: JSON) -> JSON:
    """Data with ``{"__float__": "inf"}`` instead of numbers that JSON lacks; :func:`restored` is the inverse."""
    return _mapped(data, lambda number: {_NAME: repr(number)})


def restored(data: JSON) -> JSON:
    """Data as it was given to :func:`kept`."""
    if isinstance(data, dict):
        if set(data) == {_NAME}:
            return float(data[_NAME])
        return {key: restored(value) for key, value in data.items()}
    return [restored(item) for item in data] if isinstance(data, list) else data


def _mapped(data: JSON, replace: Callable[[float], JSON]) -> JSON:
    if isinstance(data, float):
        return data if math.isfinite(data) else replace(data)
    if isinstance(data, dict):
        return {key: _mapped(value, replace) for key, value in data.items()}
    return [_mapped(item, replace) for item in data] if isinstance(data, list | tuple) else data
