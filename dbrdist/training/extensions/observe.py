"""Extensions that report a value, that watch for values that are none, and that let graphs go."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import is_array, on
from dbrdist.core.model.reporter import as_number, is_number
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import NonFiniteLossError
from dbrdist.training.extension import PRIORITY_WRITER, Extension, make_extension, see_function_of_trainer

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


def observe_value(observation_key: str, target_func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An extension that reports `target_func(trainer)` as `observation_key`, once per epoch.

    Args:
        observation_key: name under which the value is reported.
        target_func: function of the trainer that gives the value.

    Example:
        >>> observe = extensions.observe_value("lr", lambda trainer: trainer.updater.get_optimizer("main").lr)
    """
    if not callable(target_func):
        raise TypeError(
            f"observe_value: target_func: expected a function of the trainer, got {type(target_func).__name__}"
        )
    see_function_of_trainer("observe_value", target_func)

    @make_extension(trigger=(1, "epoch"), priority=PRIORITY_WRITER)
    def observe_value(trainer: Trainer) -> None:
        trainer.observation[observation_key] = target_func(trainer)

    return observe_value


def observe_lr(optimizer_name: str = "main", observation_key: str = "lr") -> Callable[[Any], Any]:
    """An extension that reports the learning rate of an optimizer, once per epoch.

    Args:
        optimizer_name: name of the optimizer in the updater; default 'main'.
        observation_key: name under which its learning rate is reported; default 'lr'.

    Example:
        >>> observe = extensions.observe_lr()
    """
    return observe_value(observation_key, lambda trainer: trainer.updater.get_optimizer(optimizer_name).lr)


class unchain_variables(Extension):
    """Frees the graphs of reported Variables, after all other extensions.

    ``report`` stores values without their graphs; only what code of your own puts into ``trainer.observation`` has one.

    Example:
        >>> extension = extensions.unchain_variables()
    """

    priority = -1

    def __call__(self, trainer: Trainer) -> None:
        for value in trainer.observation.values():
            if isinstance(value, Variable):
                value.unchain_backward()


class FailOnNonNumber(Extension):
    """Ends the run when a loss or a parameter is no longer a finite number.

    Raises:
        NonFiniteLossError: naming the step, the loss and the first parameter concerned.

    Example:
        >>> check = extensions.FailOnNonNumber()
    """

    def __call__(self, trainer: Trainer) -> None:
        words = self.complaint(trainer, check_parameters=True)
        if words is not None:
            raise NonFiniteLossError(words)

    def complaint(self, trainer: Trainer, check_parameters: bool = False) -> str | None:
        """What is wrong after this step, or None; parameters are looked through only if asked or if a loss is bad.

        Args:
            trainer: the trainer, after a step.
            check_parameters: whether parameters are looked through even if no loss is bad; default False.
        """
        bad = []
        for key, value in trainer.observation.items():
            if is_loss(key) and (words := _not_finite(value)):
                bad.append(f"{key} is {words}")
        if not bad and not check_parameters:
            return None
        parameter = _first_bad_parameter(trainer)
        if not bad and parameter is None:
            return None
        words = "; ".join(bad + ([parameter] if parameter else []))
        return (
            f"iteration {trainer.updater.iteration} (epoch {trainer.updater.epoch_detail:.2f}): {words}; "
            "a lower learning rate, a warm-up or gradient clipping may help, and so may a look at the data"
        )


def is_loss(key: str) -> bool:
    """Whether a value is observed as somebody's loss."""
    return key == "loss" or key.endswith("/loss")


def _not_finite(value: object) -> str:
    """What a reported value is instead of finite numbers, in words; nothing for what is of another kind."""
    if is_number(value):
        number = as_number(value)
        return "" if math.isfinite(number) else str(number)
    array = value.array if isinstance(value, Variable) else value
    if not is_array(array) or array.dtype.kind not in "fV":
        return ""
    with on(array):
        return "" if bool(np.isfinite(array).all()) else f"an array of shape {array.shape} with nan or inf in it"


def _first_bad_parameter(trainer: Trainer) -> str | None:
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        for path, parameter in optimizer.target.namedparams():
            for what, array in (("gradient", parameter.grad), ("value", parameter.lend())):
                if array is None:
                    continue
                with on(array):
                    is_finite = bool(np.isfinite(array).all())
                if not is_finite:
                    return f"the first parameter with a {what} that is not finite is {name}:{path} {parameter.shape}"
    return None
