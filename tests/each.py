"""Many small cases in one test: all of them run, and those that fail are reported by name.

pytest spends about 4 ms on a parametrized item, most of it in sending reports between processes: more than most of
our cases take. So items are operations, kernels or rules, and what varies within one is a loop::

    @pytest.mark.parametrize("case", CASES)
    @each(shapes=lambda case: case.shapes, dtype=["float32", "float64"])
    def test_something(case, shapes, dtype): ...
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from dbrdist import random
from tests import quick


def fresh_chance() -> None:
    """Seed 0 with nothing drawn yet."""
    random.set_seed(0)  # of threads that start later too


def each(**axes: Iterable[Any] | Callable[..., Iterable[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that calls the test with every combination of the values of ``axes``, the last axis fastest.

    The values are an iterable, or a function of other arguments of the test, taken by name; a name that the test does
    not take becomes an argument all the same. An axis may have several names, as pytest's: ``**{"a, b": pairs}``. Each
    case starts from seed 0. A case that skips itself is passed over; if all do, the test is skipped. The failures are
    raised together. In the inner loop a few combinations run that have every value (:mod:`tests.quick`).
    """
    names = {name for axis in axes for name in axis.split(", ")}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def together(**arguments: Any) -> None:
            values = [list(v(**_chosen(v, arguments)) if callable(v) else v) for v in axes.values()]
            cases = [_case(axes, chosen) for chosen in itertools.product(*values)]
            assert cases, "no cases"
            failed: dict[str, Exception] = {}
            skipped: dict[int, BaseException] = {}
            numbers: Iterable[int] = range(len(cases))
            if quick.is_on[0]:
                places = itertools.product(*(range(len(axis)) for axis in values))
                numbers = quick.chosen([dict(zip(axes, row)) for row in places], skipped)
            arguments = {name: value for name, value in arguments.items() if name in signature.parameters}
            num_run = 0
            for number in numbers:
                case = cases[number]
                if num_run:
                    fresh_chance()
                num_run += 1
                try:
                    test(**arguments, **case)
                except pytest.skip.Exception as e:
                    skipped[number] = e
                except Exception as e:
                    name = name_of(case)
                    failed[f"{name} (number {number})" if name in failed or "<lambda>" in name else name] = e
                except BaseException as e:
                    e.add_note(f"in the case {name_of(case)}")
                    raise
            if failed:
                for name, e in failed.items():
                    e.add_note(f"in the case {name}")
                words = f"{len(failed)} of {num_run} cases failed: {'; '.join(failed)}"
                raise ExceptionGroup(words, list(failed.values()))
            if len(skipped) == num_run:
                raise skipped[0]

        kept = {name: p for name, p in signature.parameters.items() if name not in names}
        assert len(kept) == len(signature.parameters) - len(names), f"{test.__name__}: an axis is no argument"
        for values in filter(callable, axes.values()):
            kept |= {n: p for n, p in inspect.signature(values).parameters.items() if n not in signature.parameters}
        together.__signature__ = signature.replace(parameters=list(kept.values()))  # type: ignore[attr-defined]
        return together

    return decorate


def _case(axes: Iterable[str], chosen: Iterable[Any]) -> dict[str, Any]:
    """The arguments of one case."""
    case: dict[str, Any] = {}
    for axis, value in zip(axes, chosen):
        joint = axis.split(", ")
        case |= zip(joint, value, strict=True) if len(joint) > 1 else {axis: value}
    return case


def _chosen(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes."""
    return {name: arguments[name] for name in inspect.signature(function).parameters}


def name_of(case: dict[str, Any]) -> str:
    """The values of a case as pytest would name them."""
    return ", ".join(f"{key}={_short(value)}" for key, value in case.items())


def _short(value: Any) -> str:
    """A value in few letters."""
    text = getattr(value, "__name__", None) or str(value)
    return text if len(text) <= 60 else text[:57] + "..."
