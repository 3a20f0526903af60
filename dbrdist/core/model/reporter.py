"""Reporter: passes observed values from links and functions to the training loop, as numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dbrdist.core.array.backend import to_cpu
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import BlockFunction, BlockMethod, config
from dbrdist.core.array.types import Array, Number
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.core.usage.mistakes import refuse, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from dbrdist.core.array.types import Raised
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.model.link import Link


class _Stack(threading.local):
    def __init__(self) -> None:
        self.reporters: list[Reporter] = []


_stack = _Stack()


_MAX_NAMES = 1000  # of an observer; whoever reports more has names that do not come again


class _Names(dict[str, str]):
    """The names of what an observer reports, behind its own: each made once, since equal ones compare at a glance."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def __missing__(self, key: str) -> str:
        name = self._prefix + key
        if len(self) < _MAX_NAMES:
            self[key] = name
        return name


Reported: TypeAlias = Operand | Number  # what a program reports: numbers, or arrays and Variables of one element


class Reporter:
    """Collects values under the names of their observers.

    Within ``with reporter:``, :func:`report` puts values into ``reporter.observation``: ``'accuracy'`` reported by the
    observer named ``'main'`` becomes ``'main/accuracy'``. Variables are stored as 0-d arrays, so that no graph is kept,
    except where ``config.keep_graph_on_report`` is True.

    Example:
        >>> reporter = dbrdist.Reporter()
        >>> with reporter:
        ...     dbrdist.report({"loss": 0.5})
        >>> reporter.observation
        {'loss': 0.5}
    """

    def __init__(self) -> None:
        self.observation: dict[str, Any] = {}
        self._names: dict[int | None, _Names] = {None: _Names("")}  # by the id of an observer

    def __enter__(self) -> Reporter:
        _stack.reporters.append(self)
        return self

    def __exit__(self, *exc: Raised) -> None:
        _stack.reporters.pop()

    def add_observer(self, name: str, observer: Link) -> None:
        """Report the values of ``observer`` under ``name``."""
        self._names[id(observer)] = _Names(name + "/")

    def add_observers(self, prefix: str, observers: Iterable[tuple[str, Link]]) -> None:
        """Report the values of ``observers``, pairs of a name and an object, under ``prefix`` and their names."""
        for name, observer in observers:
            self._names[id(observer)] = _Names(prefix + name + "/")

    @BlockMethod("reporter.scope({})")
    def scope(self, observation: dict[str, float]) -> Iterator[None]:
        """Collect into the dictionary ``observation`` within the block, with this as the current reporter."""
        old, self.observation = self.observation, observation
        try:
            with self:
                yield
        finally:
            self.observation = old

    def report(self, values: Mapping[str, Reported], observer: Link | None = None) -> None:
        """Store values, under the observer's name where one is given.

        Args:
            values: numbers, arrays of one element or Variables by name.
            observer: the link that reports, whose name is put before theirs; None for none. One that was never
                added is a KeyError.
        """
        names = self._names.get(None if observer is None else id(observer))
        if names is None:
            raise _unknown(observer)
        if config.in_recomputing:  # reported by the first call
            return
        observation = self.observation
        for key, value in values.items():
            if not isinstance(key, str):
                refuse(TypeError(f"report: expected names as keys, got {type(key).__name__} {key!r:.40}"))
                key = str(key)
            if isinstance(value, Variable) and not config.keep_graph_on_report:
                value = Variable(value.array, requires_grad=False) if as_chainer[0] else value.array
            observation[names[key]] = value


def _unknown(observer: Link | None) -> KeyError:
    return KeyError(
        f"expected an observer that was added to the reporter, got {type(observer).__name__}; "
        "add it with add_observer(name, observer), or report from a link of an optimizer's target"
    )


def get_current_reporter() -> Reporter:
    """The innermost reporter of this thread.

    Example:
        >>> reporter = dbrdist.Reporter()
        >>> with reporter:
        ...     dbrdist.get_current_reporter() is reporter
        True
    """
    if not _stack.reporters:
        raise RuntimeError("no reporter is current in this thread; enter one: with dbrdist.Reporter() as reporter")
    return _stack.reporters[-1]


def report(values: Mapping[str, Reported], observer: Link | None = None) -> None:
    """Report values to the current reporter; without one, nothing happens.

    Args:
        values: numbers or 0-d arrays and Variables by name.
        observer: the link that reports; its name in the reporter comes before the names of the values.

    Raises:
        TypeError: ``values`` is no dictionary.

    Example:
        >>> reporter = dbrdist.Reporter()
        >>> with reporter.scope({}):
        ...     dbrdist.report({"loss": 0.5})
        ...     reporter.observation
        {'loss': 0.5}
    """
    if type(values) is not dict and not hasattr(values, "items"):
        raise TypeError(
            f"report: expected a dictionary, got {type(values).__name__}; write report({{'name': value}}, self)"
        )
    if _stack.reporters:
        _stack.reporters[-1].report(values, observer)


@partial(BlockFunction, written="dbrdist.report_scope({})")
@contextmanager
def report_scope(observation: dict[str, Any]) -> Iterator[None]:
    """Collect what is reported within the block.

    Args:
        observation: the dictionary that receives the values.

    Example:
        >>> observation = {}
        >>> with dbrdist.Reporter(), dbrdist.report_scope(observation):
        ...     dbrdist.report({"loss": 0.5})
        >>> observation
        {'loss': 0.5}
    """
    current = get_current_reporter()
    old, current.observation = current.observation, observation
    try:
        yield
    finally:
        current.observation = old


_NO_NUMBERS = frozenset("cSUmMO")  # kinds of types of NumPy of which there are no means


def is_number(value: object) -> bool:
    """Whether a reported value has a mean: a number, or an array or a Variable without axes."""
    if type(value) is float:
        return True
    if getattr(value, "ndim", 0) or not hasattr(value, "__float__"):
        return False
    return getattr(getattr(value, "dtype", None), "kind", "") not in _NO_NUMBERS


def as_number(value: Any) -> float:
    """A number, or an array or a Variable of one element, as a Python float."""
    if type(value) is float:
        return value
    if type(value) is np.ndarray:
        return float(value.item())
    if isinstance(value, Variable):
        value = value.array
    return float(to_cpu(value).item()) if hasattr(value, "dtype") else float(value)


class Summary:
    """Weighted mean and standard deviation of values that come one by one, in float64 (West 1979).

    The mean of values of which some are infinite, all with one sign, is that infinity.

    Example:
        >>> summary = dbrdist.reporter.Summary()
        >>> summary.add(1.0)
        >>> summary.add(3.0)
        >>> float(summary.compute_mean())
        2.0
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._square = 0.0  # sum of weighted squared deviations
        self._weight = 0.0

    @property
    def weight(self) -> float:
        """Of all values together."""
        return self._weight

    def add(self, value: Array | Number, weight: float = 1) -> None:
        """Add one ``value``, a number or an array of one element, that counts ``weight`` times (default 1)."""
        x, w = as_number(value), float(weight)
        if w == 0:  # a rank without examples reports NaN, which must not count
            return
        self._weight += w
        mean, delta = self._mean, x - self._mean
        self._mean += delta * w / self._weight
        self._square += w * delta * (x - self._mean)
        if not isfinite(self._mean):
            self._mean = _mean_beyond(mean, x, w / self._weight)

    def add_each(self, values: Sequence[float]) -> None:
        """Add the floats ``values`` one after another."""
        mean, square, weight = self._mean, self._square, self._weight
        for x in values:
            weight += 1.0
            delta = x - mean
            mean += delta / weight
            square += delta * (x - mean)
        if not isfinite(mean):
            mean, count = self._mean, self._weight
            for x in values:
                count += 1.0
                mean = _mean_beyond(mean, x, 1 / count)
        self._mean, self._square, self._weight = mean, square, weight

    def compute_mean(self) -> float:
        """The mean so far."""
        return self._mean if self._weight else float("nan")

    def make_statistics(self) -> tuple[float, float]:
        """Mean and (population) standard deviation so far."""
        if not self._weight:
            return float("nan"), float("nan")
        return self._mean, float(np.sqrt(max(self._square / self._weight, 0.0)))

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the sums by ``serializer``, also those of Chainer: of the values and of their squares."""
        try:
            self._mean = float(serializer("_mean", self._mean))
        except KeyError:
            total, squares, weight = (float(serializer(name, 0.0)) for name in ("_x", "_x2", "_n"))
            self._weight, self._mean = weight, total / weight if weight else 0.0
            self._square = max(squares - total * self._mean, 0.0)
            return
        self._square = float(serializer("_square", self._square))
        self._weight = float(serializer("_weight", self._weight))


def _listed(text: str) -> list[str]:
    """Names as JSON, or on a line each, as earlier versions saved them."""
    import json

    try:
        found = json.loads(text) if text.startswith("[") else None
    except ValueError:
        found = None
    return found if isinstance(found, list) else text.split("\n") if text else []


def _mean_beyond(mean: float, x: float, share: float) -> float:
    """The mean with one more value that weighs `share`, where `x - mean` is too large or no number."""
    if share == 1:
        return x
    if not (isfinite(mean) and isfinite(x)):
        return mean + x
    return mean * (1 - share) + x * share


_MAX_WAITING = 64


def warn_of_no_numbers(observation: Mapping[str, Reported]) -> None:
    """Warn of reported values without a mean, which a log leaves out."""
    for key, value in observation.items():
        if type(value) is float:
            continue
        value = value[0] if isinstance(value, tuple) and value else value
        if not is_number(value):
            shape = getattr(value, "shape", ())
            what = f"an array of shape {shape}" if shape else f"of type {type(value).__name__}"
            warn(f"report: {key!r} is {what} and has no mean, so logs leave it out; report a number, such as its mean")


class DictSummary:
    """A :class:`Summary` per key; a value may be a number, or a pair of value and weight.

    Example:
        >>> summary = triggers.DictSummary()
        >>> summary.add({"loss": 1.0})
        >>> summary.add({"loss": 3.0})
        >>> summary.compute_mean()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._summaries: dict[str, Summary] = {}
        self._names: tuple[str, ...] = ()
        self._waiting: list[tuple[float, ...]] = []  # under these names: added together, in less time

    def add(self, d: Mapping[str, Any]) -> None:
        """Add the values of ``d``, numbers or pairs of number and weight, by name; others are left out."""
        names, values = tuple(d), tuple(d.values())
        for value in values:
            if type(value) is not float:
                self._add_any(d)
                return
        if names != self._names:
            self.summaries()
            self._names = names
        waiting = self._waiting
        waiting.append(values)
        if len(waiting) == _MAX_WAITING:
            self.summaries()

    def _add_any(self, d: Mapping[str, Any]) -> None:
        summaries = self.summaries()
        for key, value in d.items():
            weight: Any = 1.0
            if isinstance(value, tuple):
                value, weight = value
                if getattr(weight, "ndim", 0):
                    raise ValueError(f"{key}: expected a number as the weight, got an array of shape {weight.shape}")
            if isinstance(value, Variable):
                value = value.array
            if is_number(value):
                summaries.setdefault(key, Summary()).add(value, as_number(weight))

    def summaries(self) -> dict[str, Summary]:
        """The summaries by key, of all that was added."""
        if self._waiting:
            for key, values in zip(self._names, zip(*self._waiting)):
                self._summaries.setdefault(key, Summary()).add_each(values)
            self._waiting = []
        return self._summaries

    def compute_mean(self) -> dict[str, float]:
        """The means by key."""
        return {key: s.compute_mean() for key, s in self.summaries().items()}

    def make_statistics(self) -> dict[str, float]:
        """The means by key, and the standard deviations under ``key + '.std'``."""
        out = {}
        for key, s in self.summaries().items():
            out[key], out[key + ".std"] = s.make_statistics()
        return out

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load all summaries by ``serializer``."""
        import json

        summaries = self.summaries()
        try:
            names = _listed(str(serializer("_names", json.dumps(list(summaries)))))
        except KeyError:
            names = []
            warn("DictSummary: the saved state has no names of statistics, as in files of Chainer 4; means start anew")
        if getattr(serializer, "is_loading", False):
            summaries.clear()
        for i, name in enumerate(names):
            summaries.setdefault(name, Summary()).serialize(serializer["_summaries"][str(i)])
