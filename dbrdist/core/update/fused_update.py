"""A part of an update: one run of flat memory, with the rules of its parameters.

Every step goes through it, so this file is compiled (pyproject.toml), and the optimizer around it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from dbrdist.core.array.backend import Array, on
from dbrdist.core.array.current_device import number_of
from dbrdist.core.array.declared import DeclaredNumber
from dbrdist.core.model.flat import Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.weight_copies import WeightCopies
from dbrdist.core.update.elementwise_hook import HookOfRun, Spans, is_elementwise, spans_of
from dbrdist.core.update.update_rule import FP32_PARAM, UpdateRule, follow, joint_state

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Any

    from dbrdist.core.update.elementwise_hook import ElementwiseHook


class Part:
    """One run with the rules of its parameters and their joint state in flat memory."""

    def __init__(self, run: Run, rules: list[UpdateRule]) -> None:
        self.run = run
        self.rules = rules
        self.leader = rules[0]
        self.places = [(p, p.node, p.node.view) for p in run.params]
        own = self.leader.hyperparam  # without values of its own, skip it and read the optimizer's
        self.hyperparam = own if own.has_own or own.parent is None else own.parent
        self.state: list[Array] = []
        self.wide: Run | None = None  # the run in float32, where 16-bit parameters are updated there
        if self.leader.runs_flat:
            names = self.leader.state_names
            if self.leader.is_in_fp32(run.params[0]):
                joint = joint_state(run, rules, (*names, FP32_PARAM))
                self.wide = run.widened(joint[FP32_PARAM])
            else:
                joint = joint_state(run, rules, names) if names else {}
            self.state = [joint[name] for name in names]
        self.is_on_gpu = number_of(run.data) is not None
        # Whether elementwise hooks can run within the pass of the update: no rule looks at whole parameters.
        self.takes_hooks = self.leader.runs_flat and self.leader._hooks is None
        self.is_plain = self.takes_hooks and self.wide is None
        self.spans: dict[Hashable, Spans] = {}  # of the parameters that a hook is for
        self.copies: WeightCopies | None = None  # of weights, for kernels of a device
        if self.is_on_gpu and not are_ours(rules):
            run.arena.hand_out()
        if self.is_on_gpu and type(run) is Run and not run.arena.is_handed_out:
            self.copies = WeightCopies(run)

    @property
    def joint(self) -> Run:
        """The run in the type in which it is updated."""
        return self.run if self.wide is None else self.wide

    def begin(self, loss_scale: float | DeclaredNumber | None) -> None:
        """Prepare the gradients: widen them if the update runs in float32, and divide by the loss scale."""
        run, wide = self.run, self.wide
        self._follow_values()
        if wide is not None:
            wide.grad[...] = run.grad
        if loss_scale is not None:
            grad = self.joint.grad
            kind = grad.dtype
            grad *= loss_scale.inverse(kind) if isinstance(loss_scale, DeclaredNumber) else kind.type(1.0 / loss_scale)
            if wide is not None:
                run.grad[...] = wide.grad

    def show(self) -> Array | None:
        """A copy of the 16-bit gradients after bringing them up to date; None unless the update runs in float32."""
        if self.wide is None:
            return None
        self.run.grad[...] = self.wide.grad
        return self.run.grad.copy()

    def adopt(self, shown: Array | None) -> None:
        """Take over changes to the 16-bit values, and to the 16-bit gradients since :meth:`show`."""
        self._follow_values()
        if self.wide is not None and shown is not None:
            follow(self.wide.grad, self.run.grad, shown)

    def _follow_values(self) -> None:
        if self.wide is not None:
            follow(self.wide.data, self.run.data, self.wide.data.astype(self.run.data.dtype))

    def narrow(self) -> None:
        """Bring the 16-bit values up to date."""
        if self.wide is not None:
            self.run.data[...] = self.wide.data

    def collect(self) -> None:
        """Make the gradients in flat memory valid: a parameter that got none counts as gradient zero."""
        for p, node, view in self.places:
            if node.gradient is not view:
                p.collect_gradient()

    @property
    def is_complete(self) -> bool:
        """False once a hook has removed or replaced a gradient."""
        return all(node.gradient is view for _, node, view in self.places)

    def prepared(self, hooks: Iterable[ElementwiseHook]) -> list[HookOfRun]:
        """Elementwise hooks with their numbers for this run."""
        found = []
        for hook in hooks:
            params = hook.params
            spans = None if params is None else self._spans_of(frozenset(params))
            found.append(HookOfRun(hook, hook.numbers(self.leader), spans))
        return found

    def _spans_of(self, params: frozenset[Parameter]) -> Spans:
        found = self.spans.get(params)
        if found is None:
            found = self.spans[params] = spans_of(self.run, params)
        return found

    def update(self, is_complete: bool, hooks: Sequence[HookOfRun] = ()) -> None:
        """Update all parameters; ``is_complete`` says that no hook has removed a gradient."""
        if is_complete and self.is_plain:
            self.step(self.run, hooks)
        elif is_complete and self.takes_hooks:
            self.step(self.joint, hooks)
            self.narrow()
        else:
            self.show()
            for p, rule in zip(self.run.params, self.rules):
                rule.update(p)

    def step(self, run: Run, hooks: Sequence[HookOfRun] = ()) -> None:
        """Apply the rule once to the whole run, after elementwise hooks."""
        leader = self.leader
        t = leader.t + 1
        for rule in self.rules:
            rule.t = t
        values = self.hyperparam
        if values._has_arrays or values._parent is not None:
            values = values.in_numbers()
        if hooks:
            leader.step_after(hooks, values, t, run, self.state)
            if not leader.keeps_zero or [hook for hook in hooks if not hook.hook.keeps_zero]:
                run.clear_gaps(*self.state)
            return
        leader.step_run(values, t, run, self.state)
        if not leader.keeps_zero:
            run.clear_gaps(*self.state)


def update_all(parts: Iterable[Part]) -> None:
    """Update all parameters from the gradients that are there, where no hook of the optimizer looks at them."""
    for part in parts:
        if part.is_on_gpu:
            with on(part.run.data):
                part.collect()
                part.begin(None)
                part.update(True)
            continue
        for p, node, view in part.places:  # as collect, in a call less
            if node.gradient is not view:
                p.collect_gradient()
        if part.is_plain:
            part.step(part.run)
        else:
            part.begin(None)
            part.update(True)


_SHOWN_MEMORY = ("step", "step_run", "step_after", "flat", "piece", "__call__")  # functions of rules and hooks


def are_ours(things: Iterable[object]) -> bool:
    """Whether rules or hooks are of dbrdist's own classes, which keep no reference to flat memory.

    A function that a program has put in the place of one of theirs may keep one.
    """
    for thing in things:
        kind = type(thing)
        if not kind.__module__.startswith("dbrdist."):
            return False
        for name in _SHOWN_MEMORY:
            function = getattr(thing, name, None)
            if callable(function) and not _module_of(function).startswith("dbrdist."):
                return False
    return True


def _module_of(function: object) -> str:
    """Where a function was written; ``functools.wraps`` lets one of a program name the module of the wrapped one."""
    written = getattr(function, "__globals__", None)
    if written is None and not hasattr(function, "__wrapped__"):
        return getattr(function, "__module__", None) or ""
    return str((written or {}).get("__name__"))


def close_copies(parts: Iterable[Part]) -> None:
    """Called before an update."""
    for part in parts:
        if part.copies is not None:
            part.copies.close()
            if not are_ours((part.leader,)):
                part.run.arena.hand_out()


def hand_out(parts: Sequence[Part]) -> Sequence[Part]:
    """Note that a program may hold the memory of runs, and write to the parameters at any time; the parts again."""
    for part in parts:
        part.run.arena.hand_out()
    return parts


def hand_out_to(parts: Sequence[Part], *hooks: object) -> None:
    """The same, unless all hooks are dbrdist's own."""
    if not are_ours(hooks):
        hand_out(parts)


def open_copies(parts: Iterable[Part]) -> None:
    """Called after an update: until the next write, kernels may read copies of the parameters."""
    for part in parts:
        if part.copies is not None:
            part.copies.open()


def begin_all(parts: Iterable[Part], loss_scale: float | DeclaredNumber | None) -> None:
    """Prepare the gradients of all parameters."""
    for part in parts:
        if part.is_on_gpu:
            with on(part.run.data):
                part.collect()
                part.begin(loss_scale)
            continue
        for p, node, view in part.places:
            if node.gradient is not view:
                p.collect_gradient()
        if loss_scale is not None or part.wide is not None:
            part.begin(loss_scale)


def update_after_hooks(parts: Iterable[Part], is_complete: bool, hooks: Iterable[list[HookOfRun]]) -> None:
    """Update all parameters after elementwise hooks, which are given for each part."""
    for part, own in zip(parts, hooks):
        if part.is_on_gpu:
            with on(part.run.data):
                part.update(is_complete, own)
        else:
            part.update(is_complete, own)


def hooks_in_pass(parts: Collection[Part], hooks: Collection[Any]) -> list[list[HookOfRun]] | None:
    """Hooks with their numbers for each part, if all of them run within the passes of all parts; else None."""
    for hook in hooks:
        if not is_elementwise(hook):
            return None
    for part in parts:
        if not part.takes_hooks:
            return None
    return [part.prepared(hooks) for part in parts]


def call_flat(hook: ElementwiseHook, parts: Iterable[Part], keeps_zero: bool) -> None:
    """Let a hook work on flat memory; ``keeps_zero`` says that it leaves zeros of values and gradients as they are."""
    for part in parts:
        with on(part.run.data):
            hook.flat(part.joint)
            if not keeps_zero:
                part.joint.clear_gaps()
            part.narrow()


def is_updated_alone(p: Parameter) -> bool:
    """Whether its rule is none of ours, or a user's formula that sees parameters without a shape, too."""
    rule = p.update_rule
    if rule is None or not isinstance(rule, UpdateRule):
        return rule is not None
    return rule.enabled and not p.is_initialized and not rule.runs_flat


def rule_key(p: Parameter) -> Hashable:
    """Parameters with equal keys may be updated together."""
    rule = p.update_rule
    alone = not rule.runs_flat or rule._hooks is not None or rule.hyperparam.has_own
    return id(rule) if alone else (type(rule), rule.t, id(rule.hyperparam.parent), rule.is_in_fp32(p))
