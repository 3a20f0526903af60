"""Optimizers: update rules applied to flat memory.

Parameters whose rules agree are updated together: the rule's ``step`` sees a contiguous run of flat memory, its
gradients and its state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dbrdist.core.array import declared
from dbrdist.core.array.backend import Array, on, zeros
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.model import flat, pickles_of_chainer
from dbrdist.core.model.flat import Run
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.versions import Watch
from dbrdist.core.tape.node import VariableNode, assignments
from dbrdist.core.update import targets
from dbrdist.core.update.elementwise_hook import last_elementwise
from dbrdist.core.update.first_updates import FirstUpdates
from dbrdist.core.update.fused_update import (
    Part,
    begin_all,
    call_flat,
    close_copies,
    hand_out,
    hand_out_to,
    hooks_in_pass,
    is_updated_alone,
    open_copies,
    rule_key,
    update_after_hooks,
    update_all,
)
from dbrdist.core.update.hooks import Hooks, check_divisible, said_of_call
from dbrdist.core.update.hyperparameter import (
    Hyperparameter,
    check_assigned,
    owners,
    read_quickly,
    refuse_state_of_another,
)
from dbrdist.core.update.hyperparameter import HyperparameterProxy as HyperparameterProxy
from dbrdist.core.update.loss_scaling import LossScaling, is_finite
from dbrdist.core.update.update_rule import UpdateRule
from dbrdist.core.usage.foreign_names import add_hints, add_settings, warn_of_unknown
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.tape.variable import Operand, Variable
    from dbrdist.core.update.elementwise_hook import ElementwiseHook
    from dbrdist.core.update.hooks import OptimizerHook


class Sharding(Protocol):
    """How ranks divide an update among themselves."""

    def shard(self, run: Run) -> Run:
        """The part of a run that this rank updates."""

    def total(self, values: Sequence[float | np.generic]) -> list[float]:
        """The sums of these numbers over the ranks."""


@read_quickly("hooks")
class Optimizer(LossScaling):
    """The base of all optimizers: a target link, the number of updates ``t``, and hooks.

    Example:
        >>> isinstance(optimizers.SGD(), dbrdist.Optimizer)
        True
    """

    use_auto_new_epoch = False  # whether updaters count the epochs, by ``new_epoch(auto=True)``

    def __init__(self) -> None:
        self.target: Any = None
        self.t = 0
        self.epoch = 0
        self._hooks = Hooks()
        super().__init__()

    def setup(self, link: Link) -> Optimizer:
        """Take ``link`` as the target."""
        targets.check_target(type(self).__name__, link)
        self.target = link
        self.t = 0
        self.epoch = 0
        self._hooks = Hooks()
        return self

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Operand, **kwds: Operand) -> None:
        """Update the target's parameters, after ``lossfun(*args, **kwds)`` and its backward where one is given."""
        raise NotImplementedError

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch: by hand, or with ``auto`` by an updater, where ``use_auto_new_epoch`` is set."""
        if auto != self.use_auto_new_epoch and as_chainer[0]:
            raise RuntimeError(
                f"{type(self).__name__}.new_epoch: use_auto_new_epoch is {self.use_auto_new_epoch}, so that "
                + ("an updater counts the epochs" if not auto else "the program counts the epochs: new_epoch()")
            )
        self.epoch += 1

    def add_hook(self, hook: OptimizerHook, name: str | None = None, timing: str = "auto") -> None:
        """Call a hook before or after each update.

        Args:
            hook: a function of the optimizer; with the attribute ``call_for_each_param`` one of (rule, parameter).
            name: its name; None takes that of the hook.
            timing: ``'pre'`` before the update, ``'post'`` after it, ``'auto'`` for the hook's own wish.
        """
        self._require_target()
        self._hooks.add(hook, name, timing)
        self.forget_plan()

    def forget_plan(self) -> None:
        """Plan the next update again."""

    def remove_hook(self, name: str) -> None:
        """Remove a hook.

        Args:
            name: the name under which the hook was added.
        """
        self._hooks.remove(name)

    def call_hooks(self, timing: str = "pre") -> None:
        """Call the hooks of one ``timing``: ``"pre"`` (default) or ``"post"``."""
        for hook in getattr(self._hooks, timing).values():
            self.call_hook(hook)

    def call_hook(self, hook: OptimizerHook) -> None:
        """Call one ``hook``, for the optimizer or for each parameter."""
        if not getattr(hook, "call_for_each_param", False):
            hook(self)
            return
        for p in self.target.params():
            with on(p):
                hook(p.update_rule, p)

    @property
    def hooks(self) -> Hooks:
        """The hooks of the whole optimizer."""
        return self._hooks

    def _require_target(self) -> None:
        if self.target is None:
            raise RuntimeError(f"{type(self).__name__}: it has no target yet; call optimizer.setup(link) first")

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` the counters, and every rule under its parameter's path."""
        self.t = serializer("t", self.t)
        self.epoch = serializer("epoch", self.epoch)
        if self._loss_scale_growth is not None:  # a dynamic scale is state, a constant one is configuration
            self._loss_scale = serializer("loss_scale", self._loss_scale)
            self._was_unsafe = serializer("was_unsafe", self._was_unsafe)
        if self.target is None:
            what = "loaded into" if getattr(serializer, "is_loading", True) else "saved of"
            warn(f"{type(self).__name__}: it has no target yet, so only counters are {what} it; call setup(link) first")
            return
        for name, p in self.target.namedparams():
            if p.update_rule is not None:
                p.update_rule.serialize(targets.saved_state(serializer, self.target, name))


@read_quickly("target")
class GradientMethod(Optimizer):
    """An optimizer that uses gradients.

    Args:
        hyperparams: the hyperparameters by name, such as ``lr``; they are attributes and may change at any time.

    Raises:
        ValueError: a value is outside of the range that the subclass declares.

    Example:
        >>> optimizer = optimizers.SGD(lr=0.1)
        >>> optimizer.lr = 0.01
        >>> optimizer.lr
        0.01
    """

    rule_class: ClassVar[type[UpdateRule]]
    _parts: list[Part]  # the plan: runs of flat memory with their rules,
    _alone: list[Parameter]  # the parameters that their rules update outside of flat memory,
    _nodes: list[VariableNode]  # the nodes of all parameters,
    _watch: Watch | None  # and what tells whether it still holds
    # Defaults of the class: what early versions pickled has none of these, and a subclass may restore its state itself.
    _copying: Sequence[Part] = ()  # those of which kernels of a device may read copies
    _params_at_setup: weakref.WeakSet[Parameter] | None = None
    _first_updates: FirstUpdates | None = None  # what looks at the first updates since setup; None after them

    def __init__(self, **hyperparams: float) -> None:
        super().__init__()
        self.hyperparam = Hyperparameter()
        for name, value in hyperparams.items():
            setattr(self.hyperparam, name, value)  # within the limits of the signature: checked by the constructor
        self._in_fp32 = False
        self._sharding: Sharding | None = None

    @property
    def target(self) -> Link:
        """The link that is updated."""
        return self._target

    @target.setter
    def target(self, link: Link) -> None:
        self._target = link
        self._parts, self._alone, self._nodes, self._watch = [], [], [], None

    def create_update_rule(self) -> UpdateRule:
        """A rule for one parameter, which reads its hyperparameters here."""
        return self.rule_class(self.hyperparam)

    def setup(self, link: Link) -> GradientMethod:
        """Take ``link`` as the target, give each parameter a rule, and build flat memory if all have their shapes."""
        before = None if self._target is None or self.t else weakref.ref(self._target)
        super().setup(link)
        if before is not None and (old := before()) is not None:  # it is still in use
            targets.warn_of_another_target(type(self).__name__, old, link)
        params = targets.parameters_of(f"{type(self).__name__}.setup", link)
        targets.check_parameters(type(self).__name__, link, params)
        targets.warn_of_lost_states(type(self).__name__, params)
        self._first_updates = FirstUpdates(type(self).__name__, link)
        self._params_at_setup = weakref.WeakSet(params)
        for p in params:
            was_frozen = p.is_frozen or not getattr(p.update_rule, "enabled", True)
            p.update_rule = self.create_update_rule()
            if isinstance(p.update_rule, UpdateRule):  # whatever has an update(param) works, too
                p.update_rule.use_fp32_update(self._in_fp32)
                p.update_rule.enabled = not was_frozen
        owners[self.hyperparam] = weakref.ref(self)
        if all(p.is_initialized for p in params):
            flat.gather(params)
        return self

    def check_hyperparameter(self, values: Hyperparameter, name: str, value: Any) -> None:
        """Warn where ``values.name = value`` would change nothing: our rules read no such hyperparameter."""
        if name in values.get_dict():
            check_assigned(self, name, value)
        elif type(self).__module__.startswith("dbrdist.") and not targets.has_foreign_parts(self):
            warn_of_unknown(type(self).__name__, name, list(values.get_dict()), values.parent is None)

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Any, **kwds: Any) -> None:
        """One step of all parameters that are not frozen.

        Args:
            lossfun: a function that returns the loss, whose gradients are computed first; None uses those that are
                there.
            args, kwds: the arguments of ``lossfun``.
        """
        if self._target is None:
            self._require_target()
        if lossfun is not None:
            loss: Any = targets.loss_of(type(self).__name__, self._target, lossfun, args, kwds)
            self._target.cleargrads()
            try:
                loss.backward(loss_scale=None if self._loss_scale is None else self.scale_of_step())
            except RuntimeError as error:
                targets.explain_no_graph(type(self).__name__, error, lossfun, loss)
                raise
            del loss
        if self._first_updates is not None and self._first_updates.begin(self.target, lossfun is not None):
            self._first_updates = None
        if self._copying:
            close_copies(self._copying)
        if self._hooks.pre or self._hooks.post or self._loss_scale is not None:
            self._update_with_hooks()
        else:
            watch = self._watch
            update_all(self._parts if watch is not None and watch.is_current() else self._plan())
            self.t += 1
            for p in self._alone:
                with on(p):
                    p.update_rule.update(p)
        if self._copying:
            open_copies(self._copying)
        if self._first_updates is not None:
            self._first_updates.watch(list(self.target.params()))

    def _update_with_hooks(self) -> None:
        """Update from the gradients that are there, with hooks and a loss scale."""
        parts = self._plan()
        if self._copying:
            hand_out_to(self._copying, *self._hooks.pre.values(), *self._hooks.post.values())
        begin_all(parts, self.scale_of_step())
        is_usual = not (self._alone or self._hooks.post or self._loss_scale_growth is not None)
        prepared = hooks_in_pass(parts, self._hooks.pre.values()) if is_usual and self._calls_as_usual() else None
        if prepared is not None:  # as nearly always; nothing is assigned
            self.t += 1
            update_after_hooks(parts, True, prepared)
            return
        nodes, num_assigned = self._nodes, assignments[0]
        assigned = [node.assigned for node in nodes]
        for p in self._alone:
            if p.is_initialized and p.grad is None:
                p.grad = zeros(p.shape, p.dtype, p.array)
        self._is_safe = True
        is_dynamic = self._loss_scale_growth is not None
        if is_dynamic:
            self.check_nan_in_grads()
        is_complete, last = self._call_first_hooks()
        prepared = [part.prepared(last) for part in self._parts]
        self.t += 1
        if self._is_safe:
            update_after_hooks(self._parts, is_complete, prepared)
            for p in self._alone:
                with on(p):
                    p.update_rule.update(p)
        if self._hooks.post:
            self.call_hooks("post")
        if is_dynamic and declared.current() is None:
            self.update_loss_scale()
        if assignments[0] != num_assigned:
            for node, count in zip(nodes, assigned):
                node.assigned = count  # whatever a hook assigns belongs to the update

    def _calls_as_usual(self) -> bool:
        cls, own = type(self), self.__dict__  # otherwise a program's own class or wrapper calls hooks
        return (cls.call_hook, cls.call_hooks) == _CALLS and not ("call_hook" in own or "call_hooks" in own)

    def _call_first_hooks(self) -> tuple[bool, list[ElementwiseHook]]:
        """Call hooks before an update, but for the last ones if they can run within its pass, which are returned.

        The first value is False if a hook has removed or replaced a gradient.
        """
        pre = self._hooks.pre
        if not pre:
            return True, []
        if not self._calls_as_usual():
            self.call_hooks("pre")  # whatever a program does there
            return self._are_complete(), []
        hooks = list(pre.values())
        last = last_elementwise(hooks)
        first = hooks[: len(hooks) - len(last)]
        for hook in first:
            self.call_hook(hook)
        is_complete = not first or self._are_complete()
        on_wholes = [part for part in self._parts if not part.takes_hooks]
        if is_complete and self._is_safe and not self._alone and not on_wholes:
            return True, last
        for hook in last:
            self.call_hook(hook)
        return self._are_complete(), []

    def _are_complete(self) -> bool:
        """Whether the gradients in flat memory are those of the parameters after a hook; plans again if need be."""
        before = self._parts
        if self._plan() is not before:  # a hook changed a rule or a parameter
            for part in self._parts:
                with on(part.run.data):
                    part.begin(None)
        return all(part.is_complete for part in self._parts)

    def _plan(self) -> list[Part]:
        """The runs of the target and their rules; planned again if one of its parameters, links or rules changed."""
        if self._watch is None or not self._watch.is_current():
            everything = targets.parameters_of(f"{type(self).__name__}.update", self.target)
            if self._params_at_setup is not None:
                targets.warn_of_what_is_not_updated(self, everything, self._params_at_setup)
            ruled = [p for p in everything if isinstance(p.update_rule, UpdateRule)]
            updated = [p for p in ruled if p.is_initialized and p.update_rule.enabled]
            self._alone = [p for p in everything if is_updated_alone(p)]
            for p in updated:
                p.update_rule.fit(p)
            runs = flat.runs(updated, rule_key, is_lent=True)
            if self._sharding is not None:
                self.check_divisible([*updated, *self._alone])
                runs = [self._sharding.shard(run) for run in runs]
            self._parts = []
            for run in runs:
                with on(run.data):
                    self._parts.append(Part(run, [p.update_rule for p in run.params]))
            self._copying = [part for part in self._parts if part.is_on_gpu]
            rules = [p.update_rule for p in ruled]
            self._nodes = [p.node for p in everything]
            self._watch = Watch([*self.target.links(), *everything, *rules, *(r.hyperparam for r in rules)])
        return self._parts

    def planned(self) -> tuple[list[Part], Watch | None]:
        """The plan of updates, and what tells whether it still holds: another object after the plan has changed."""
        return self._plan(), self._watch

    @property
    def updates_jointly(self) -> bool:
        """Whether whole runs of flat memory are all that an update changes, and first updates have been looked at."""
        return not self._alone and self._sharding is None and self._first_updates is None

    def divide(self, sharding: Sharding | None) -> None:
        """Update only parts of the parameters from now on, as ``sharding`` says; other ranks update the rest."""
        self._sharding = sharding
        self.forget_plan()

    def check_divisible(self, params: Iterable[Parameter]) -> None:
        """Refuse ``params`` whose rule or hooks need whole parameters, where each rank has a part of them."""
        check_divisible(params, self._hooks)

    def _are_finite(self, params: Iterable[Parameter]) -> bool:
        parts = self._plan()
        updated = {p for part in parts for p in part.run.params}
        if updated != set(params) or not all(part.is_complete for part in parts):
            return False
        return all(is_finite(part.run.grad) for part in parts)

    def _gradients(self, params: Iterable[Parameter]) -> Iterator[tuple[Parameter, Array]]:
        if self._sharding is None:
            yield from super()._gradients(params)
            return
        for part in self._plan():
            for p, where in part.run.layers():
                yield p, part.run.grad[where]

    def _agree_on_safety(self) -> None:
        if self._sharding is not None:
            self._is_safe = not any(self._sharding.total([float(not self._is_safe)]))  # on all ranks

    def forget_plan(self) -> None:
        """Plan the next update again, after a change of what the states hold."""
        self._watch = None

    def runs(self) -> Iterator[Run]:
        """The runs that an update covers, with gradients complete; for hooks that work on flat memory."""
        yield from (part.joint for part in hand_out(self._plan()))

    def joint_runs(self) -> Iterator[Run]:
        """As :meth:`runs`, for code that keeps none of them."""
        return (part.joint for part in self._plan())

    def call_hook(self, hook: Any) -> None:
        """Call one hook: on flat memory where it can (``hook.flat(run)``), else on each parameter or the optimizer.

        A hook whose attribute ``keeps_zero`` is true leaves zeros of both values and gradients as they are. One that
        ``changes_parameters`` is part of the update, so that it is left out with an update that is not safe.
        """
        if not self._is_safe and getattr(hook, "changes_parameters", False):
            return
        parts = self._plan()
        hand_out_to(self._copying, hook)
        for_each = getattr(hook, "call_for_each_param", False)
        keeps_zero = said_of_call(hook, "keeps_zero")
        if for_each and said_of_call(hook, "flat") is not None:
            call_flat(hook, parts, keeps_zero)
            for p in self._alone:
                if p.is_initialized:  # with a rule that is no class of ours
                    with on(p):
                        hook(p.update_rule, p)
            return
        shown = []
        for part in parts:
            with on(part.run.data):
                shown.append(part.show())
        if for_each:
            for p in flat.unique(self.target.params()):
                if p.is_initialized and p.update_rule is not None:
                    with on(p):
                        hook(p.update_rule, p)
        else:
            with on(*[part.run.data for part in parts]):
                hook(self)
        for part, gradients in zip(parts, shown):
            with on(part.run.data):
                if not keeps_zero:
                    part.joint.clear_gaps()
                part.adopt(gradients)
                if as_chainer[0]:
                    part.collect()  # a gradient that the hook removed is zero for the next hook and the update

    def use_fp32_update(self, flag: bool = True) -> None:
        """Update 16-bit parameters in float32 if ``flag``; see :meth:`UpdateRule.use_fp32_update`."""
        self._in_fp32 = bool(flag)
        if self.target is not None:
            for p in self.target.params():
                if p.update_rule is not None:
                    p.update_rule.use_fp32_update(flag)

    def use_cleargrads(self, use: bool = True) -> None:
        """Accepted for Chainer's programs (``use`` has no effect): gradients are always cleared, never filled."""
        if not use:
            raise ValueError("use_cleargrads: gradients are always cleared before backward; False is not supported")

    def reallocate_cleared_grads(self) -> None:
        """Fill missing gradients with zeros."""
        flat.collect_gradients(flat.gather(self.target.params()))

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load counters, hyperparameters (not in Chainer's files) and rules by ``serializer``."""
        own = serializer["hyperparam"]
        for i, (name, value) in enumerate(list(self.hyperparam.own().items())):
            try:
                self.hyperparam.put(name, own(name, value))
            except CheckpointError:
                if i or not serializer.is_loading:
                    raise  # some are there, so that this file is damaged
                refuse_state_of_another(self, own)
                break
        targets.check_meaning(serializer, type(self).__name__, getattr(self.rule_class, "state_meaning", None))
        super().serialize(serializer)

    def __getstate__(self) -> dict[str, object]:
        own: dict[str, Any] = {"_parts": [], "_copying": [], "_alone": [], "_nodes": []}
        none = dict.fromkeys(("_watch", "_sharding", "_first_updates", "_params_at_setup"))
        return {**self.__dict__, **own, **none}  # a plan's arrays are not those of a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_hookable" in state:  # Chainer pickled it
            pickles_of_chainer.set_up(self, state)
        else:
            self.__dict__.update(state)


_CALLS = GradientMethod.call_hook, Optimizer.call_hooks


add_hints(Optimizer, "Optimizer")
add_settings(Optimizer)
