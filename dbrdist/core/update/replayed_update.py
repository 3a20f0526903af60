"""The host's part of an update whose kernels are replayed from a CUDA graph: counters, overflows, and refusals."""

from __future__ import annotations

from typing import Any

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.current_device import number_of
from dbrdist.core.update.optimizer import GradientMethod
from dbrdist.core.update.update_rule import UpdateRule

_PLAIN = (bool, int, float, str, type(None))


def why_not_captured(optimizer: Any) -> str | None:
    """Why updates of an optimizer cannot be captured, or None."""
    name = type(optimizer).__name__
    if as_chainer[0]:
        return "a program of Chainer's time may read and assign parameters at any time"
    if hasattr(optimizer, "actual_optimizer"):
        return "ranks agree on each step through the host, and NCCL's reductions are not captured yet"
    if not isinstance(optimizer, GradientMethod) or type(optimizer).update is not GradientMethod.update:
        return f"{name} has an update of its own"
    params = list(optimizer.target.params())
    if not all(p.is_initialized for p in params):
        return "a parameter has no shape yet"
    if {number_of(p.array) for p in params} == {None}:
        return "the model is in host memory; move it to a GPU"
    if len({number_of(p.array) for p in params}) > 1:
        return "the parameters are on several devices"
    if optimizer._sharding is not None or optimizer._alone:
        return f"{name} updates parameters one by one, or a part of them"
    return _why_not_rules(params) or _why_not_hooks(optimizer)


def _why_not_rules(params: list[Any]) -> str | None:
    for p in params:
        rule = p.update_rule
        if isinstance(rule, UpdateRule) and rule.enabled and (not rule.runs_flat or rule._hooks is not None):
            return f"{type(rule).__name__} updates a parameter by itself, or has hooks of its own"
    return None


def _why_not_hooks(optimizer: Any) -> str | None:
    for name, hook in {**optimizer._hooks.pre, **optimizer._hooks.post}.items():
        if not type(hook).__module__.startswith("dbrdist.") or type(hook).__name__ == "GradientNoise":
            return f"the hook {name} of the optimizer may compute on the host"
        if optimizer.has_dynamic_loss_scale and getattr(hook, "changes_parameters", False):
            return f"the hook {name} changes parameters, also where the loss scale leaves an update out"
    return None


def plain_values(values: Any) -> tuple[Any, ...]:
    """The numbers, words and switches among values."""
    return tuple([v for v in values if type(v) in _PLAIN])


def switches_of(optimizer: Any) -> tuple[Any, ...]:
    """What an update of this optimizer is captured for: with another one, it is captured anew."""
    hooks = {**optimizer._hooks.pre, **optimizer._hooks.post}
    mode = "none" if optimizer.loss_scale is None else "dynamic" if optimizer.has_dynamic_loss_scale else "constant"
    flags = tuple([v for v in optimizer.hyperparam.own().values() if isinstance(v, bool)])
    return mode, flags, *[(name, id(hook), plain_values(vars(hook).values())) for name, hook in hooks.items()]


class ReplayedUpdate:
    """An optimizer at the time of a capture; later, what an update does on the host around a replay."""

    def __init__(self, optimizer: GradientMethod) -> None:
        self._optimizer = optimizer
        self._parts, self._watch = optimizer._plan(), optimizer._watch
        self._counts = optimizer.t, [[rule.t for rule in part.rules] for part in self._parts]

    @property
    def is_current(self) -> bool:
        """False once parameters, their rules or the plan of the update have changed."""
        watch = self._optimizer._watch
        return watch is not None and watch is self._watch and watch.is_current()

    def go_back(self) -> None:
        """Count as before the step that was captured, which did not happen."""
        self._optimizer.t, counts = self._counts
        for part, own in zip(self._parts, counts):
            for rule, t in zip(part.rules, own):
                rule.t = t

    def begin(self) -> None:
        """Count the update of each rule, as numbers that are declared depend on it."""
        for part in self._parts:
            t = part.leader.t + 1
            for rule in part.rules:
                rule.t = t

    def end(self, overflow: Any) -> None:
        """Count the update; with a dynamic loss scale, look whether it was left out and adapt the scale."""
        optimizer = self._optimizer
        for part in self._parts:
            for _, node, view in part.places:
                node.gradient = view
        if overflow is not None:
            optimizer._is_safe = True
            if bool(overflow):
                optimizer.check_nan_in_grads()  # which names the gradients
                optimizer._is_safe = False
                for part in self._parts:
                    for rule in part.rules:
                        rule.t -= 1
        optimizer.t += 1
        if overflow is not None:
            optimizer.update_loss_scale()
