"""Statistics of parameters and their gradients, reported as observed values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array.backend import get_array_module, is_array, on
from dbrdist.core.array.types import Array
from dbrdist.core.model.link import Link
from dbrdist.core.model.reporter import DictSummary, report
from dbrdist.training.extension import PRIORITY_WRITER, Extension
from dbrdist.training.triggers import get_trigger

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.training.trainer import Trainer

PERCENTILES = (0.13, 2.28, 15.87, 50, 84.13, 97.72, 99.87)  # -3 to 3 standard deviations of a normal distribution


def _statistic(name: str) -> Callable[[Any], Any]:
    return lambda x: getattr(get_array_module(x), name)(x)


def _count_zeros(x: Array) -> np.generic:
    return (x == 0).sum()


def _percentile(x: Array) -> Array:
    return get_array_module(x).percentile(x, PERCENTILES)


class ParameterStatistics(Extension):
    """Computes statistics of each parameter of some links at every step, and reports their means when `trigger` fires.

    The keys are `{prefix}/{name of the link}{path of the parameter}/{data or grad}/{statistic}`, such as
    `None/l1/W/grad/std` for a model without a name; a statistic of several numbers gets `/0`, `/1`, ... behind it. A
    parameter that is not initialised, or has no gradient, is left out.

    Args:
        links: a link or several.
        statistics: functions by name, each from a 1-d array to a number or an array; 'default' for mean, std, min,
            max, zeros (their count) and percentile (at 0, 1, 2 and 3 standard deviations), None for none.
        report_params: compute them of the values.
        report_grads: compute them of the gradients.
        prefix: first part of the keys.
        trigger: when the means since the last time are reported.
        skip_nan_params: report NaN for a parameter that holds NaN, without calling the functions.

    Example:
        >>> statistics = extensions.ParameterStatistics(L.Linear(2, 1))
    """

    priority = PRIORITY_WRITER
    default_name = "parameter_statistics"
    report_key_template = "{prefix}{link_name}{param_name}/{attr_name}/{function_name}"
    default_statistics: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "mean": _statistic("mean"),
        "std": _statistic("std"),
        "min": _statistic("min"),
        "max": _statistic("max"),
        "zeros": _count_zeros,
        "percentile": _percentile,
    }

    def __init__(
        self,
        links: Link | Sequence[Link],
        statistics: Any = "default",
        report_params: bool = True,
        report_grads: bool = True,
        prefix: str | None = None,
        trigger: Any = (1, "epoch"),
        skip_nan_params: bool = False,
    ):
        self._links = tuple(links) if isinstance(links, list | tuple) else (links,)
        for link in self._links:
            if not isinstance(link, Link):
                raise TypeError(f"ParameterStatistics: links: expected a link or several, got {type(link).__name__}")
        if isinstance(statistics, str):
            if statistics != "default":
                raise ValueError(
                    f"ParameterStatistics: statistics: expected 'default' or functions, got {statistics!r}"
                )
            statistics = self.default_statistics
        self._statistics = dict(statistics or {})
        self._attributes = ("data",) * report_params + ("grad",) * report_grads
        self._prefix = prefix
        self._trigger = get_trigger(trigger)
        self._summary = DictSummary()
        self._skip_nan_params = skip_nan_params

    def register_statistics(self, name: str, function: Callable[[Any], Any]) -> None:
        """Add the statistic ``name``: ``function`` takes a 1-d array and returns a number or an array."""
        self._statistics[name] = function

    def __call__(self, trainer: Trainer) -> None:
        self._summary.add(dict(self._observe()))
        if self._trigger(trainer):
            report(self._summary.compute_mean())
            self._summary = DictSummary()

    def _observe(self) -> Iterator[tuple[str, Any]]:
        for link_name, path, attribute, array in self._arrays():
            xp = get_array_module(array)
            with on(array):
                is_skipped = self._skip_nan_params and bool(xp.isnan(array).any())
            for name, function in self._statistics.items():
                with on(array):
                    value = float("nan") if is_skipped else function(array)
                key = self.report_key_template.format(
                    prefix=f"{self._prefix}/" if self._prefix else "",
                    link_name=link_name,
                    param_name=path,
                    attr_name=attribute,
                    function_name=name,
                )
                yield from _numbers(key, value)

    def _arrays(self) -> Iterator[tuple[Any, str, str, Any]]:
        for link in self._links:
            for path, param in link.namedparams(include_uninit=False):
                for attribute in self._attributes:
                    array = getattr(param, attribute)
                    if array is not None and array.size:
                        with on(array):
                            flat = array.ravel()
                        yield getattr(link, "name", None), path, attribute, flat

    def serialize(self, serializer: AbstractSerializer) -> None:
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
        self._summary.serialize(serializer["_summary"])


def _numbers(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A statistic's number, or its numbers with their indexes in the keys."""
    if is_array(value) and value.size != 1:
        yield from ((f"{key}/{i}", v) for i, v in enumerate(value.ravel()))
    else:
        yield key, value.reshape(()) if is_array(value) else value
