"""Loss scaling: the loss is multiplied in backward, and gradients are divided before the update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array import declared
from dbrdist.core.array.backend import Array, get_array_module, on
from dbrdist.core.model.flat import Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.update.hyperparameter import read_quickly
from dbrdist.errors import CaptureError

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

_MAX_LOSS_SCALE = 65504.0  # the largest float16


@read_quickly("loss_scale")
class LossScaling:
    """What an optimizer knows of its loss scale, which is constant or follows overflows."""

    t: int
    target: Link

    def __init__(self) -> None:
        self._loss_scale: float | None = None
        self._loss_scale_growth: float | None = None  # per update, where the scale is dynamic
        self._was_unsafe = False
        self._is_safe = True

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in backward; None is 1."""
        return self._loss_scale

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self._loss_scale_growth is not None

    def set_loss_scale(self, loss_scale: float | None) -> None:
        """Multiply the loss by ``loss_scale`` (above 0; None: 1) in backward, and divide gradients before updates."""
        if isinstance(loss_scale, str):
            raise TypeError(f"loss_scale: expected a number above 0 or None, got {loss_scale!r}")
        if loss_scale is not None and not loss_scale > 0:
            raise ValueError(f"loss_scale: expected a number above 0 or None, got {loss_scale}")
        self._loss_scale, self._loss_scale_growth, self._is_safe = loss_scale, None, True

    def loss_scaling(self, interval: int = 1000, scale: float | None = None) -> None:
        """Scale the loss by ``scale``; or by a number that doubles in ``interval`` updates and halves at an overflow.

        The dynamic scale starts at 1 and doubles at every update until the first overflow, up to 65504. An update whose
        gradients hold NaN or infinity is skipped.
        """
        if not isinstance(interval, (int, float, np.number)) or not interval >= 1:
            kind = ValueError if isinstance(interval, (int, float, np.number)) else TypeError
            raise kind(
                f"loss_scaling: interval: expected 1 or more updates, got {interval!r}; loss_scaling() is dynamic, "
                "loss_scaling(scale=128) constant"
            )
        self.set_loss_scale(1.0 if scale is None else scale)
        self._loss_scale_growth = 2.0 ** (1.0 / interval) if scale is None else None
        self._was_unsafe = False

    def update_loss_scale(self) -> None:
        """Adapt a dynamic loss scale to what :meth:`check_nan_in_grads` found."""
        if self._loss_scale_growth is None or self._loss_scale is None:
            return
        if not self._is_safe:
            factor, self._was_unsafe = 0.5, True
        else:
            factor = self._loss_scale_growth if self._was_unsafe else 2.0
        self._loss_scale = max(1.0, min(_MAX_LOSS_SCALE, self._loss_scale * factor))

    def follow_overflow(self, is_there: bool) -> None:
        """Adapt a dynamic loss scale to what a replayed update found, and left out; the gradients are named.

        Args:
            is_there: whether gradients hold NaN or infinity.
        """
        self._is_safe = True
        if is_there:
            self.check_nan_in_grads()
            self._is_safe = False
        self.update_loss_scale()

    def check_nan_in_grads(self) -> None:
        """If the loss scale is dynamic, look for NaN and infinity in the gradients, and warn of them by name."""
        self._is_safe = True
        if self._loss_scale_growth is None:
            return
        if (block := declared.current()) is not None:
            self._declare_overflow(block)
            return
        names: dict[Parameter, str] = {}
        for name, p in self.target.namedparams():
            if getattr(p.update_rule, "enabled", True):  # gradients of frozen parameters are no rank's but this one's
                names.setdefault(p, name)
        for p, g in () if self._are_finite(names) else self._gradients(names):
            if not is_finite(g):
                self._is_safe = False
                warnings.warn(
                    f"NaN or infinity in the gradient of {names[p]} at loss scale {self._loss_scale}: "
                    f"update {self.t + 1} is left out and the scale halved",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._agree_on_safety()

    def _declare_overflow(self, block: declared.DeclaredBlock) -> None:
        """Set the overflow flag of a captured step on the device, where kernels of the update read it."""
        flag = block.declare_overflow()
        for run in self.joint_runs():
            xp = get_array_module(run.grad)
            xp.logical_or(flag, xp.logical_not(xp.isfinite(run.grad).all()), out=flag)

    def joint_runs(self) -> Iterable[Run]:
        """The runs of flat memory that an update covers; gradients elsewhere have no overflow flag on a device."""
        raise CaptureError(f"{type(self).__name__} looks for overflows on the host")

    def scale_of_step(self) -> float | declared.DeclaredNumber | None:
        """The loss scale; in a captured step what that declares, so that each replay has its own."""
        block = None if self._loss_scale is None else declared.current()
        return self._loss_scale if block is None else block.number(lambda: float(self._loss_scale or 1.0))

    def _are_finite(self, params: Iterable[Parameter]) -> bool:
        """True where one look tells that all gradients are finite; False where each has to be looked at."""
        return False

    def _gradients(self, params: Iterable[Parameter]) -> Iterator[tuple[Parameter, Array]]:
        """The gradients that are there."""
        return ((p, p.grad) for p in params if p.grad is not None)

    def _agree_on_safety(self) -> None:
        """Take over what other ranks found, where each looked at a part."""

    def is_safe_to_update(self) -> bool:
        """False if :meth:`check_nan_in_grads` found NaN or infinity."""
        return self._is_safe


def is_finite(g: Array) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    with on(g):
        return bool(get_array_module(g).isfinite(g).all())
