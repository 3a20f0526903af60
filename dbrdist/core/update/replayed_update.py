"""The host's part of an update whose kernels are replayed from a CUDA graph: counters, overflows, and refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.current_device import number_of
from dbrdist.core.array.types import Array
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.update.fused_update import close_copies, open_copies
from dbrdist.core.update.optimizer import GradientMethod, Optimizer
from dbrdist.core.update.update_rule import UpdateRule

if TYPE_CHECKING:
    from collections.abc import Hashable

_PLAIN = (bool, int, float, str, type(None))


def why_not_captured(optimizer: Optimizer) -> str | None:
    """Why updates of an optimizer cannot be captured, or None."""
    name = type(optimizer).__name__
    if as_chainer[0]:
        return "a program of Chainer's time may read and assign parameters at any time"
    if not isinstance(optimizer, GradientMethod) or type(optimizer).update is not GradientMethod.update:
        return f"{name} has an update of its own"
    params = list(optimizer.target.params())
    if not all(p.is_initialized for p in params):
        return "a parameter has no shape yet"
    if {number_of(p) for p in params} == {None}:
        return "the model is in host memory; move it to a GPU"
    if len({number_of(p) for p in params}) > 1:
        return "the parameters are on several devices"
    return _why_not_rules(params) or _why_not_hooks(optimizer)


def _why_not_rules(params: Iterable[Parameter]) -> str | None:
    for p in params:
        rule = p.update_rule
        if rule is not None and not (isinstance(rule, UpdateRule) and (not rule.enabled or _is_joint(rule))):
            return f"{type(rule).__name__} updates a parameter by itself, or has hooks of its own"
    return None


def _is_joint(rule: UpdateRule) -> bool:
    """Whether an update treats its parameter together with its neighbours."""
    return rule.runs_flat and rule.hooks is None


def _why_not_hooks(optimizer: GradientMethod) -> str | None:
    for name, hook in {**optimizer.hooks.pre, **optimizer.hooks.post}.items():
        if not type(hook).__module__.startswith("dbrdist.") or type(hook).__name__ == "GradientNoise":
            return f"the hook {name} of the optimizer may compute on the host"
        if optimizer.has_dynamic_loss_scale and getattr(hook, "changes_parameters", False):
            return f"the hook {name} changes parameters, also where the loss scale leaves an update out"
    return None


def plain_values(values: Iterable[object]) -> tuple[Hashable, ...]:
    """The numbers, words and switches among values, NumPy's numbers and types among them."""
    return tuple([v for v in values if type(v) in _PLAIN or isinstance(v, (np.generic, np.dtype))])


def switches_of(optimizer: GradientMethod) -> tuple[Hashable, ...]:
    """What an update of this optimizer is captured for: with another one, it is captured anew."""
    hooks = {**optimizer.hooks.pre, **optimizer.hooks.post}
    mode = "none" if optimizer.loss_scale is None else "dynamic" if optimizer.has_dynamic_loss_scale else "constant"
    flags = tuple([v for v in optimizer.hyperparam.own().values() if isinstance(v, (bool, np.bool_))])
    return mode, flags, *[(name, id(hook), plain_values(vars(hook).values())) for name, hook in hooks.items()]


class ReplayedUpdate:
    """An optimizer at the time of a capture; later, what an update does on the host around a replay."""

    def __init__(self, optimizer: GradientMethod) -> None:
        self._optimizer = optimizer
        self._parts, self._watch = optimizer.planned()
        self._counts = optimizer.t, [[rule.t for rule in part.rules] for part in self._parts]

    @property
    def is_current(self) -> bool:
        """False once parameters, their rules or the plan of the update have changed."""
        return self._optimizer.planned()[1] is self._watch

    def go_back(self) -> None:
        """Count as before the step that was captured, which did not happen."""
        self._optimizer.t, counts = self._counts
        for part, own in zip(self._parts, counts):
            for rule, t in zip(part.rules, own):
                rule.t = t

    def begin(self) -> None:
        """Count the update of each rule, as numbers that are declared depend on it."""
        close_copies(self._parts)
        for part in self._parts:
            t = part.leader.t + 1
            for rule in part.rules:
                rule.t = t

    def end(self, overflow: Array | None) -> None:
        """Count the update; with a dynamic loss scale, look whether it was left out and adapt the scale."""
        for part in self._parts:
            for _, node, view in part.places:
                node.gradient = view
        open_copies(self._parts)
        if overflow is not None:
            is_there = bool(overflow)
            self._optimizer.follow_overflow(is_there)
            for rule in [rule for part in self._parts for rule in part.rules if is_there]:
                rule.t -= 1
        self._optimizer.t += 1
