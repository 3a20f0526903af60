"""Extensions that change a hyperparameter as the run goes on: each is a function of how often it was called.

With `trigger=(1, "epoch")` they count epochs, by default iterations. The last value is part of a snapshot, so that a
resumed run goes on with it.
"""

from __future__ import annotations

from typing import Any

from dbrdist.training.extension import Extension


class _Shift(Extension):
    """Sets `attr` of the optimizer (the trainer's main one if not given) to `value(t)` at the t-th call."""

    def __init__(self, attr: str, init: float | None = None, target: float | None = None, optimizer: Any = None):
        self._attr = attr
        self._init = init
        self._target = target
        self._optimizer = optimizer
        self._t = 0
        self._last_value: float | None = None

    def value(self, t: int) -> float:
        """The hyperparameter after `t` calls."""
        raise NotImplementedError

    @property
    def init(self) -> float:
        """The value at the start."""
        if self._init is None:
            raise RuntimeError(
                f"{type(self).__name__} has no start value yet; it takes the optimizer's when training starts"
            )
        return self._init

    def initialize(self, trainer: Any) -> None:
        optimizer = self._get_optimizer(trainer)
        if self._init is None:
            self._init = float(getattr(optimizer, self._attr))
        self._set(optimizer, self.value(0) if self._last_value is None else self._last_value)

    def __call__(self, trainer: Any) -> None:
        self._t += 1
        self._set(self._get_optimizer(trainer), self.value(self._t))

    def serialize(self, serializer: Any) -> None:
        self._t = int(serializer("_t", self._t))
        for name in ("_init", "_last_value"):
            value = serializer(name, getattr(self, name))
            setattr(self, name, None if value is None else float(value))

    def _get_optimizer(self, trainer: Any) -> Any:
        return trainer.updater.get_optimizer("main") if self._optimizer is None else self._optimizer

    def _set(self, optimizer: Any, value: float) -> None:
        setattr(optimizer, self._attr, value)
        self._last_value = value

    def _limited(self, value: float, rising: bool) -> float:
        """`value`, but not beyond the target; the quotient serves negative values too."""
        if self._target is None:
            return value
        beyond = value / self._target > 1 if rising else value / self._target < 1
        return self._target if beyond else value


class ExponentialShift(_Shift):
    """`init * rate^t`, up to `target`."""

    def __init__(
        self, attr: str, rate: float, init: float | None = None, target: float | None = None, optimizer: Any = None
    ):
        if rate < 0:
            raise ValueError(f"expected a rate of 0 or more, got {rate}")
        super().__init__(attr, init, target, optimizer)
        self._rate = rate

    def value(self, t: int) -> float:
        return self._limited(self.init * self._rate**t, self._rate > 1)


class InverseShift(_Shift):
    """`init * (1 + gamma t)^-power`, down to `target`."""

    def __init__(
        self,
        attr: str,
        gamma: float,
        power: float,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ):
        super().__init__(attr, init, target, optimizer)
        self._gamma = gamma
        self._power = power

    def value(self, t: int) -> float:
        return self._limited(self.init * (1 + self._gamma * t) ** -self._power, False)


class LinearShift(_Shift):
    """From `value_range[0]` to `value_range[1]` while t goes through `time_range`; constant before and after."""

    def __init__(
        self, attr: str, value_range: tuple[float, float], time_range: tuple[float, float], optimizer: Any = None
    ):
        super().__init__(attr, value_range[0], None, optimizer)
        self._value_range = value_range
        self._time_range = time_range

    def value(self, t: int) -> float:
        (start, end), (first, last) = self._value_range, self._time_range
        if t <= first:
            return start
        return end if t >= last else start + (end - start) * (t - first) / (last - first)


class StepShift(_Shift):
    """`init * gamma^floor(t / step)`, up to `target`."""

    def __init__(
        self,
        attr: str,
        gamma: float,
        step: int,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ):
        super().__init__(attr, init, target, optimizer)
        self._gamma = gamma
        self._step = step

    def value(self, t: int) -> float:
        return self._limited(self.init * self._gamma ** (t // self._step), self._gamma > 1)


class MultistepShift(_Shift):
    """`init * gamma^k`, k being how many of `step_value` (rising) t has reached."""

    def __init__(self, attr: str, gamma: float, step_value: list[int], init: float, optimizer: Any = None):
        super().__init__(attr, init, None, optimizer)
        self._gamma = gamma
        self._step_value = list(step_value)

    def value(self, t: int) -> float:
        return self.init * self._gamma ** sum(t >= step for step in self._step_value)


class PolynomialShift(_Shift):
    """`init * (1 - t / max_count)^rate`, down to `target`, or to zero."""

    def __init__(
        self,
        attr: str,
        rate: float,
        max_count: float,
        init: float | None = None,
        target: float | None = None,
        optimizer: Any = None,
    ):
        super().__init__(attr, init, target, optimizer)
        self._rate = rate
        self._max_count = max_count

    def value(self, t: int) -> float:
        return self._limited(self.init * max(1 - t / self._max_count, 0.0) ** self._rate, False)


class WarmupShift(_Shift):
    """From `warmup_start` to `init` in `warmup_iter` calls, then constant."""

    def __init__(self, attr: str, warmup_start: float, warmup_iter: int, init: float, optimizer: Any = None):
        super().__init__(attr, init, None, optimizer)
        self._warmup_start = warmup_start
        self._warmup_iter = warmup_iter

    def value(self, t: int) -> float:
        if t >= self._warmup_iter:
            return self.init
        return self._warmup_start + (self.init - self._warmup_start) * t / self._warmup_iter
