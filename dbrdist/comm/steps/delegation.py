"""What an optimizer that wraps another hands on to it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dbrdist.core.update.hyperparameter import Hyperparameter, HyperparameterProxy

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.update.hooks import OptimizerHook
    from dbrdist.core.update.optimizer import GradientMethod


class HandsOn:
    """Counters, hyperparameters, hooks and loss scale are those of ``actual_optimizer``; other names are refused."""

    __slots__ = ("actual_optimizer",)

    def __init__(self, actual_optimizer: GradientMethod) -> None:
        self.actual_optimizer = actual_optimizer

    @property
    def target(self) -> Link:
        """The link that is updated."""
        return self.actual_optimizer.target

    @property
    def t(self) -> int:
        """The number of updates so far."""
        return int(self.actual_optimizer.t)

    @t.setter
    def t(self, value: int) -> None:
        self.actual_optimizer.t = value

    @property
    def epoch(self) -> int:
        """The number of epochs counted by :meth:`new_epoch`."""
        return int(self.actual_optimizer.epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.actual_optimizer.epoch = value

    @property
    def hyperparam(self) -> Hyperparameter:
        """The hyperparameters of the wrapped optimizer."""
        return self.actual_optimizer.hyperparam

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch."""
        self.actual_optimizer.new_epoch(auto)

    def add_hook(self, hook: OptimizerHook, name: str | None = None, timing: str = "auto") -> None:
        """Call a hook before or after each update; before means with the averaged gradients."""
        self.actual_optimizer.add_hook(hook, name, timing)

    def remove_hook(self, name: str) -> None:
        """Remove a hook."""
        self.actual_optimizer.remove_hook(name)

    def call_hooks(self, timing: str = "pre") -> None:
        """Call all hooks of one timing."""
        self.actual_optimizer.call_hooks(timing)

    def set_loss_scale(self, loss_scale: float | None) -> None:
        """Multiply the loss in backward and divide the gradients by it before the update."""
        self.actual_optimizer.set_loss_scale(loss_scale)

    def loss_scaling(self, interval: int = 1000, scale: float | None = None) -> None:
        """Scale the loss by a constant, or by a number that follows overflows; all ranks see the same of them."""
        self.actual_optimizer.loss_scaling(interval, scale)

    def is_safe_to_update(self) -> bool:
        """True if no gradient holds NaN or infinity."""
        return bool(self.actual_optimizer.is_safe_to_update())


@functools.cache
def class_for(wrapper: type, kind: type) -> type:
    """A ``wrapper`` with a property for each hyperparameter that ``kind`` has as an attribute."""
    members: dict[str, Any] = {"__slots__": ()}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, HyperparameterProxy):
                members[name] = _handed_on(name)
    return type(f"MultiNode{kind.__name__}", (wrapper,), members)


def _handed_on(name: str) -> property:
    def read(self: HandsOn) -> Any:
        return getattr(self.actual_optimizer, name)

    def write(self: HandsOn, value: float) -> None:
        setattr(self.actual_optimizer, name, value)

    return property(read, write, doc=f"``{name}`` of the wrapped optimizer.")
