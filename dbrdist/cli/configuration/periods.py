"""Periods of a run and of time, as configurations write them: `1 epoch`, `200 iterations`, `30 minutes`."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


def _period(value: int | str) -> str:
    """`1 epoch`, `0.5 epochs` or `200 iterations` as (period, unit)."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(epoch|iteration)s?\s*", value)
        if found:
            period = float(found[1])
            if period > 0 and (found[2] == "epoch" or period.is_integer()):
                return f"{found[1]} {found[2]}"
    raise PydanticCustomError("period", "expected a period such as '1 epoch', '0.5 epochs' or '200 iterations'")


_NUMBER = r"(?=[0-9.]*[1-9])[0-9]*\.?[0-9]+"
_PERIOD = rf"\s*({_NUMBER}\s*epoch|(?=[0-9.]*[1-9])([0-9]+|[0-9]*\.0+)\s*iteration)s?\s*"


def _written(pattern: str) -> Any:
    """Text of a pattern, for editors."""
    return Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^({pattern})$", "format": "period"})]


Period = Annotated[str, BeforeValidator(_period, json_schema_input_type=_written(_PERIOD))]

SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


def _periods(value: str) -> str:
    """Periods of a run, or of time, joined by `or`: `1 epoch or 30 minutes`."""
    if not isinstance(value, str):
        raise PydanticCustomError("period", _PERIODS_WANTED)
    return " or ".join(_time(part) or _one_period(part) for part in re.split(r"\bor\b", value))


def _time(text: str) -> str | None:
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(second|minute|hour)s?\s*", text)
    return f"{found[1]} {found[2]}" if found and float(found[1]) > 0 else None


def _one_period(text: str) -> str:
    try:
        return str(_period(text))
    except PydanticCustomError:
        raise PydanticCustomError("period", _PERIODS_WANTED) from None


_PERIODS_WANTED: Any = "expected a period such as '1 epoch', '200 iterations', '30 minutes' or '1 epoch or 2 hours'"
_ONE_OF_ALL = rf"({_PERIOD}|\s*{_NUMBER}\s*(second|minute|hour)s?\s*)"
_ALL = rf"{_ONE_OF_ALL}(\bor\b{_ONE_OF_ALL})*"
Periods = Annotated[str, BeforeValidator(_periods, json_schema_input_type=_written(_ALL))]


def interval(period: str) -> tuple[float, str]:
    """`"0.5 epoch"` as `(0.5, "epoch")`, and whole numbers as int: what a trigger takes."""
    number, unit = period.split()
    return (float(number) if unit == "epoch" and not float(number).is_integer() else int(float(number))), unit
