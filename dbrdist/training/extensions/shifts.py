"""Extensions that change a hyperparameter during the run, by a function of :mod:`dbrdist.optimizers.schedules`.

`FollowSchedule` counts the epochs done. The `...Shift` extensions, Chainer's, count their calls: with
`trigger=(1, "epoch")` epochs, by default iterations. Their last value is part of a snapshot, so that a resumed run
continues with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from dbrdist.core.files.serializer import AbstractSerializer, is_about, saved_entry
from dbrdist.core.names.limits import any_number, not_negative, number, positive
from dbrdist.core.usage.mistakes import refuse, warn
from dbrdist.errors import ScheduleError
from dbrdist.optimizers import schedules
from dbrdist.optimizers.schedules import Schedule
from dbrdist.training.extension import Extension
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import GradientMethod, Optimizer
    from dbrdist.training.trainer import Trainer


class FollowSchedule(Extension):
    """Sets a hyperparameter for each step to a function of the epochs done. It has no state of its own.

    Args:
        schedule: a function of the epochs done, such as those of :mod:`dbrdist.optimizers.schedules`.
        target: the name of a hyperparameter of the trainer's main optimizer, or a function that takes the value.
        refuse: `refuse(value)` returns in words what is expected if the value is not allowed, otherwise None.
        label: the schedule's name in messages.

    Raises:
        TypeError: `schedule` cannot be called.
        ScheduleError: during the run, for a value that is no finite number, or that `refuse` refuses.

    Example:
        >>> from dbrdist.optimizers import schedules
        >>> cosine = extensions.FollowSchedule(schedules.cosine(0.1, 30))
        >>> momentum = extensions.FollowSchedule(schedules.polynomial(0.9, 30, end=0.8), "momentum")
    """

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 1  # a snapshot holds the value of the next step

    def __init__(
        self,
        schedule: Schedule,
        target: str | Callable[[float], Any] = "lr",
        refuse: Callable[[float], str | None] | None = None,
        label: str | None = None,
    ):
        if not callable(schedule):
            words = f"expected a function of the epochs done, got {type(schedule).__name__}"
            raise TypeError(f"FollowSchedule: schedule: {words}; write FollowSchedule(schedules.cosine(0.1, 30), 'lr')")
        self._schedule = schedule
        self._target = target
        self._refuse = refuse
        self._label = label or f"the schedule of {target if isinstance(target, str) else 'a hyperparameter'}"
        if schedules.is_constant(schedule):
            self.trigger = None  # set once, when the run starts

    def initialize(self, trainer: Trainer) -> None:
        if isinstance(self._target, str):
            _check_attribute(type(self).__name__, trainer.updater.get_optimizer("main"), self._target)
        self(trainer)

    def __call__(self, trainer: Trainer) -> None:
        value = self._schedule(trainer.updater.epoch_detail)
        expected = _expected(value) if self._refuse is None else _expected(value) or self._refuse(value)
        if expected is not None:
            raise ScheduleError(
                f"{self._label}: expected {expected}, got {value!r:.60} for the step after {trainer.updater.iteration} "
                f"(epoch {trainer.updater.epoch_detail:.6g})"
            )
        if isinstance(self._target, str):
            setattr(trainer.updater.get_optimizer("main"), self._target, value)
        else:
            self._target(value)


def _check_attribute(where: str, optimizer: Optimizer, name: str) -> None:
    """Refuse a hyperparameter that the optimizer does not have: setting it would change nothing."""
    if not hasattr(optimizer, name):
        known = sorted(optimizer.hyperparam.get_dict()) if hasattr(optimizer, "hyperparam") else []
        raise AttributeError(
            f"{where}: {type(optimizer).__name__} has no hyperparameter {name!r}; it has {', '.join(known) or 'none'}"
        )


def _expected(value: Any) -> str | None:
    """What is expected where ``value`` is no finite number."""
    try:
        return None if math.isfinite(value) else "a finite number"
    except (TypeError, OverflowError):
        return "a finite number"


class _Shift(Extension):
    """Sets `attr` of the optimizer (the trainer's main one if not given) to `value(t)` at the t-th call."""

    may_come_later = True  # its first call, than the end of this part of a run

    def __init__(
        self,
        attr: str,
        init: float | None,
        target: float | None,
        optimizer: GradientMethod | None,
        make: Callable[[float], Schedule],
        rising: bool = False,
    ):
        self._attr = attr
        self._init = init
        self._init_is_given = init is not None
        self._target = target
        self._optimizer = optimizer
        self._make = make  # from the value at the start
        self._rising = rising
        self._t = 0
        self._last_value: float | None = None

    def value(self, t: int) -> float:
        """The hyperparameter after ``t`` calls: the schedule's, but not beyond the target."""
        value = self._make(self.init)(t)
        if self._target is None:
            return value
        ratio = value / self._target  # for negative values too
        return self._target if (ratio > 1 if self._rising else ratio < 1) else value

    @property
    def init(self) -> float:
        """The value at the start."""
        if self._init is None:
            raise RuntimeError(
                f"{type(self).__name__} has no start value yet; it takes the optimizer's when training starts"
            )
        return self._init

    def initialize(self, trainer: Trainer) -> None:
        optimizer = self._get_optimizer(trainer)
        _check_attribute(type(self).__name__, optimizer, self._attr)
        if self._init is None:
            self._init = float(getattr(optimizer, self._attr))
        self._set(optimizer, self.value(0) if self._last_value is None else self._last_value)

    def __call__(self, trainer: Trainer) -> None:
        self._t += 1
        self._set(self._get_optimizer(trainer), self.value(self._t))

    def serialize(self, serializer: AbstractSerializer) -> None:
        if not is_about(serializer["_shift"], f"{type(self).__name__} of {self._attr}"):
            return  # another hyperparameter has its own value
        self._t = int(serializer("_t", self._t))
        for name in ("_init", "_last_value"):
            if serializer.is_loading and saved_entry(serializer, name) is None:
                continue  # Chainer does not save where it began
            value = serializer(name, getattr(self, name))
            if name == "_init" and self._init_is_given:
                continue  # of the program, which may have changed since
            setattr(self, name, None if value is None else float(value))

    def _get_optimizer(self, trainer: Trainer) -> GradientMethod:
        return trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer

    def _set(self, optimizer: GradientMethod, value: float) -> None:
        setattr(optimizer, self._attr, value)
        self._last_value = value


class ExponentialShift(_Shift):
    """`init * rate^t`, up to `target`.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        rate: factor at each call.
        init: value at the beginning; None for the current one.
        target: value at which the change ends; None for no end.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.ExponentialShift("lr", 0.1)  # trainer.extend(shift, trigger=(30, "epoch"))
    """

    def __init__(
        self,
        attr: str,
        rate: Annotated[float, not_negative, "factor per call"],
        init: Annotated[float | None, number, "value at the start"] = None,
        target: Annotated[float | None, any_number, "value at the end"] = None,
        optimizer: GradientMethod | None = None,
    ):
        if rate < 0:
            raise ValueError(f"ExponentialShift: rate: expected a factor of at least 0, got {rate}")
        super().__init__(attr, init, target, optimizer, lambda init: schedules.exponential(init, rate), rate > 1)
        self.factor_of_each_call = rate if target is None and attr in ("lr", "alpha") else None


class InverseShift(_Shift):
    """`init * (1 + gamma t)^-power`, down to `target`, or up to it where `power` is negative.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        gamma: coefficient of the number of calls.
        power: exponent.
        init: value at the beginning; None for the current one.
        target: value at which the change ends; None for no end.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.InverseShift("lr", 1e-4, 0.75)
    """

    def __init__(
        self,
        attr: str,
        gamma: Annotated[float, number, "speed"],
        power: Annotated[float, number, "exponent"],
        init: Annotated[float | None, number, "value at the start"] = None,
        target: Annotated[float | None, any_number, "value at the end"] = None,
        optimizer: Any = None,
    ):
        if gamma < 0:
            raise ValueError(f"InverseShift: gamma: expected 0 or more, got {gamma}")
        super().__init__(attr, init, target, optimizer, lambda init: schedules.inverse(init, gamma, power), power < 0)


class LinearShift(_Shift):
    """From `value_range[0]` to `value_range[1]` while t goes through `time_range`; constant before and after.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        value_range: pair: values at the beginning and at the end.
        time_range: pair: calls at which the change begins and ends.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.LinearShift("lr", (0.1, 0.0), (0, 10000))  # steps
    """

    def __init__(
        self, attr: str, value_range: tuple[float, float], time_range: tuple[float, float], optimizer: Any = None
    ):
        for name, pair in (("value_range", value_range), ("time_range", time_range)):
            if not hasattr(pair, "__len__") or len(pair) != 2:
                raise ValueError(f"LinearShift: {name}: expected two numbers, got {pair!r}")
        (start, end), (first, last) = value_range, time_range
        if first > last:
            words = f"LinearShift: time_range: expected the first call and then the last, got {time_range!r}"
            refuse(ValueError(f"{words}; the pairs are value_range and then time_range"))
        line = schedules.polynomial(start, last, end=end, begin=first)
        super().__init__(attr, start, None, optimizer, lambda init: line)


class StepShift(_Shift):
    """`init * gamma^floor(t / step)`, up to `target`.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        gamma: factor of each stage.
        step: calls in a stage.
        init: value at the beginning; None for the current one.
        target: value at which the change ends; None for no end.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.StepShift("lr", 0.1, 30000)
    """

    def __init__(
        self,
        attr: str,
        gamma: Annotated[float, not_negative, "factor"],
        step: Annotated[float, positive, "calls between two changes"],
        init: Annotated[float | None, number, "value at the start"] = None,
        target: Annotated[float | None, any_number, "value at the end"] = None,
        optimizer: Any = None,
    ):
        if 0 < step < 1 <= gamma:
            warn(f"StepShift: gamma is {gamma:g} and step {step:g}; write StepShift(attr, gamma, step), a factor first")
        super().__init__(attr, init, target, optimizer, lambda init: schedules.stairs(init, gamma, step), gamma > 1)


class MultistepShift(_Shift):
    """`init * gamma^k`, k being how many of `step_value` (rising) t has reached.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        gamma: factor of each stage.
        step_value: calls at which stages begin, ascending.
        init: value at the beginning; None for the current one.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.MultistepShift("lr", 0.1, [30000, 60000], 0.1)
    """

    def __init__(
        self,
        attr: str,
        gamma: Annotated[float, not_negative, "factor"],
        step_value: list[int],
        init: Annotated[float, number, "value at the start"],
        optimizer: Any = None,
    ):
        points = list(step_value)
        if points != sorted(points):
            refuse(ValueError(f"MultistepShift: step_value: expected calls in rising order, got {points}"))
        super().__init__(attr, init, None, optimizer, lambda init: schedules.step(init, gamma, points))


class PolynomialShift(_Shift):
    """`init * (1 - t / max_count)^rate`, down to `target`, or to zero; a negative `rate` raises the value instead.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        rate: exponent.
        max_count: number of calls over which the value falls to 0.
        init: value at the beginning; None for the current one.
        target: value at which the change ends; None for no end.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.PolynomialShift("lr", 1.0, 90000)
    """

    def __init__(
        self,
        attr: str,
        rate: Annotated[float, number, "exponent"],
        max_count: Annotated[float, positive, "calls until the end"],
        init: Annotated[float | None, number, "value at the start"] = None,
        target: Annotated[float | None, any_number, "value at the end"] = None,
        optimizer: Any = None,
    ):
        super().__init__(
            attr, init, target, optimizer, lambda init: schedules.polynomial(init, max_count, rate), rate < 0
        )


class WarmupShift(_Shift):
    """From `warmup_start` to `init` in `warmup_iter` calls, then constant.

    Args:
        attr: name of the hyperparameter, such as 'lr'.
        warmup_start: value at the beginning.
        warmup_iter: number of calls until the value is init.
        init: value at the beginning; None for the current one.
        optimizer: the optimizer; None for the trainer's main one.

    Example:
        >>> shift = extensions.WarmupShift("lr", 0.01, 500, 0.1)  # trainer.extend(shift, trigger=(1, "iteration"))
    """

    def __init__(
        self,
        attr: str,
        warmup_start: Annotated[float, number, "value at the start"],
        warmup_iter: Annotated[float, not_negative, "calls until the value is init"],
        init: Annotated[float, number, "value after the warm-up"],
        optimizer: Any = None,
    ):
        def climb(init: float) -> Schedule:
            return schedules.warmup(schedules.constant(init), warmup_iter, warmup_start)

        super().__init__(attr, init, None, optimizer, climb)
