"""Optimizers: rules that change parameters, applied to flat memory.

Every parameter has an ``UpdateRule`` with its own state, hyperparameters and hooks, as in Chainer. Parameters whose
rules agree are updated together: the rule's ``step`` sees a contiguous run of flat memory, its gradients and its state.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from dbrdist.core import flat, fusion
from dbrdist.core.backend import Array, accumulation_dtype, empty, get_array_module, is_array, to_device, zeros
from dbrdist.core.flat import Run
from dbrdist.core.link import Link
from dbrdist.core.parameter import Parameter, invalidate_layout, layout_version

# One pass of an update reads and writes several arrays; pieces of this many elements stay in the second-level cache
# between the passes of a formula.
CHUNK_ELEMENTS = 1 << 15


def pieces(a: Array) -> Iterator[slice]:
    """Stretches of a 1-d array that stay in cache between the passes of a formula; on a GPU there is one."""
    step = CHUNK_ELEMENTS if isinstance(a, np.ndarray) else max(a.size, 1)
    for i in range(0, a.size, step):
        yield slice(i, i + step)


def in_pieces(step: Callable[..., None], p: Array, g: Array, state: list[Array]) -> None:
    """Call ``step(p, g, *state)`` piece by piece; 16-bit values are widened for it, and narrowed once."""
    wide = accumulation_dtype(p.dtype)
    for i in pieces(p):
        if wide == p.dtype:
            step(p[i], g[i], *[s[i] for s in state])
        else:
            moved = p[i].astype(wide)
            step(moved, g[i].astype(wide), *[s[i] for s in state])
            p[i] = moved


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[Any, Array] = {}


_scratch = _Scratch()


def workspace(like: Array) -> Array:
    """Uninitialised memory like a 1-d array, valid until this thread asks again; for rules, which leave ``g`` alone."""
    if not isinstance(like, np.ndarray) or like.size > CHUNK_ELEMENTS:
        return empty(like.shape, like.dtype, like)
    buffer = _scratch.buffers.get(like.dtype)
    if buffer is None:
        buffer = _scratch.buffers[like.dtype] = empty((CHUNK_ELEMENTS,), like.dtype)
    return buffer[: like.size]


_MAX_LOSS_SCALE = 65504.0  # the largest float16


class Hyperparameter:
    """Values of an optimizer, such as ``lr``; what a rule does not set itself it reads from its optimizer."""

    def __init__(self, parent: Hyperparameter | None = None) -> None:
        self.__dict__["_parent"] = parent

    @property
    def parent(self) -> Hyperparameter | None:
        """Where values come from that are not set here."""
        return self._parent  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        parent = self.__dict__.get("_parent")
        if parent is None or name.startswith("__"):
            raise AttributeError(f"no hyperparameter named {name!r}; there are {sorted(self.get_dict())}")
        return getattr(parent, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._parent is not None:  # a rule with values of its own no longer runs with its neighbours
            invalidate_layout()
        self.__dict__[name] = value

    def own(self) -> dict[str, Any]:
        """The values set here."""
        return {k: v for k, v in self.__dict__.items() if k != "_parent"}

    def get_dict(self) -> dict[str, Any]:
        """All values, also the parent's."""
        parent = self.__dict__.get("_parent")
        return {**(parent.get_dict() if parent is not None else {}), **self.own()}

    def __repr__(self) -> str:
        return f"Hyperparameter({', '.join(f'{k}={v}' for k, v in sorted(self.get_dict().items()))})"


class _Hooks:
    """Named hooks in the order of their addition, each before or after the update."""

    def __init__(self) -> None:
        self.pre: dict[str, Any] = {}
        self.post: dict[str, Any] = {}

    def add(self, hook: Any, name: str | None, timing: str) -> None:
        if not callable(hook):
            raise TypeError(f"hook: expected a callable, got {type(hook).__name__}")
        if timing == "auto":
            timing = getattr(hook, "timing", "pre")
        if timing not in ("pre", "post"):
            raise ValueError(f"timing: expected 'pre', 'post' or 'auto', got {timing!r}")
        name = getattr(hook, "name", getattr(hook, "__name__", None)) if name is None else name
        if name is None:
            raise ValueError("hook: it has no name attribute, so give add_hook(hook, name=...)")
        if name in self.pre or name in self.post:
            raise KeyError(f"a hook named {name!r} is already there; remove it first, or give another name")
        getattr(self, timing)[name] = hook

    def remove(self, name: str) -> None:
        if name not in self.pre and name not in self.post:
            raise KeyError(f"no hook named {name!r}")
        self.pre.pop(name, None)
        self.post.pop(name, None)


class UpdateRule:
    """How one parameter is updated.

    A subclass names its state arrays in ``state_names`` and gives ``step``; or it overrides Chainer's ``init_state``
    and ``update_core``, and is then called for one parameter after another.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    _is_flat: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = ("init_state", "update", "update_core", "update_core_cpu", "update_core_gpu")
        cls._is_flat = all(getattr(cls, name) is getattr(UpdateRule, name) for name in own)

    def __init__(self, parent_hyperparam: Hyperparameter | None = None) -> None:
        self.hyperparam = Hyperparameter(parent_hyperparam)
        self.t = 0
        self._state: dict[str, Any] | None = None
        self._enabled = True
        self._hooks: _Hooks | None = None

    # ---- to be overridden -------------------------------------------------------------------------------------------

    def step(self, hp: Any, t: int, p: Array, g: Array, *state: Array) -> None:
        """Update ``p`` in place from the gradient ``g`` and the state, all 1-d of equal length; ``t`` counts from 1.

        ``g`` stays as it is, since users read gradients after an update; :func:`workspace` has room for one term.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither step nor update_core")

    def step_run(self, hp: Any, t: int, run: Run, state: list[Array]) -> None:
        """Update one run: in pieces that stay in cache. Rules with norms per layer override it."""
        data, grad = run.data, run.grad
        if run.size <= CHUNK_ELEMENTS and data.itemsize != 2:
            self.step(hp, t, data, grad, *state)
        else:
            in_pieces(functools.partial(self.step, hp, t), data, grad, state)

    def init_state(self, param: Parameter) -> None:
        """Make the state of one parameter; the default makes zeros for ``state_names``, in float32 for 16 bits."""
        assert self._state is not None
        for name in self.state_names:
            self._state[name] = zeros(param.shape, accumulation_dtype(param.dtype), param.array)

    def update_core(self, param: Parameter) -> None:
        """Update one parameter alone; Chainer's ``update_core_cpu`` and ``update_core_gpu`` may stand in its place."""
        (self.update_core_cpu if isinstance(param.array, np.ndarray) else self.update_core_gpu)(param)

    def update_core_cpu(self, param: Parameter) -> None:
        """Update one parameter that lies in host memory."""
        self._step_alone(param)

    def update_core_gpu(self, param: Parameter) -> None:
        """Update one parameter that lies on a GPU."""
        self._step_alone(param)

    def _step_alone(self, param: Parameter) -> None:
        if param.grad is None:
            return
        param.collect_gradient()
        assert self._state is not None
        run = Run(*_alone(param))
        self.step_run(self.hyperparam, self.t, run, [self._state[n].reshape(-1) for n in self.state_names])

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any] | None:
        """The state arrays by name, or None before the first update."""
        return self._state

    @property
    def enabled(self) -> bool:
        """False freezes the parameter."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self._enabled:
            self._enabled = value
            invalidate_layout()

    def add_hook(self, hook: Any, name: str | None = None, timing: str = "auto") -> None:
        """Call ``hook(rule, param)`` before or after each update of this parameter."""
        if self._hooks is None:
            self._hooks = _Hooks()
        self._hooks.add(hook, name, timing)
        invalidate_layout()

    def remove_hook(self, name: str) -> None:
        """Remove a hook."""
        if self._hooks is None:
            raise KeyError(f"no hook named {name!r}")
        self._hooks.remove(name)
        invalidate_layout()

    @property
    def runs_flat(self) -> bool:
        """True if ``step`` does the work, so that neighbours with equal values may be updated together."""
        return self._is_flat

    def ensure_state(self, param: Parameter) -> None:
        """Make the state if there is none yet, and bring it to where the parameter lies."""
        if self._state is None:
            self._state = {}
            self.init_state(param)
            return
        for name, value in self._state.items():
            if is_array(value):
                self._state[name] = to_device(value, param.device)

    def update(self, param: Parameter) -> None:
        """One update of one parameter, with this rule's hooks; without a gradient only ``t`` moves."""
        if not self._enabled or not param.is_initialized:
            return
        flat.gather([param])
        self.t += 1
        self.ensure_state(param)
        if param.grad is not None:
            param.collect_gradient()
        self.call_hooks("pre", param)
        self.update_core(param)
        self.call_hooks("post", param)

    def call_hooks(self, timing: str, param: Parameter) -> None:
        """Call this rule's hooks."""
        if self._hooks is not None:
            for hook in getattr(self._hooks, timing).values():
                hook(self, param)

    def serialize(self, serializer: Any) -> None:
        """Save or load the state; arrays that are not there yet appear with the saved shapes."""
        self.t = serializer("t", self.t)
        names = self._entry_names() if self._state is None else tuple(self._state)
        state = {} if self._state is None else self._state
        for name in names:
            state[name] = serializer(name, state.get(name))
        if serializer.is_loading:
            if any(state.get(name) is None for name in names):
                self._state = None
            elif names:
                self._state = state
            invalidate_layout()

    def _entry_names(self) -> tuple[str, ...]:
        """The names of the state; a rule with its own ``init_state`` is asked by way of a small parameter."""
        if type(self).init_state is UpdateRule.init_state:
            return self.state_names
        probe = copy.copy(self)
        probe._state = {}
        small = np.zeros(1, np.float32)
        param = Parameter(small)
        param.grad = small.copy()
        probe.init_state(param)
        return tuple(probe._state)


def _alone(param: Parameter) -> tuple[Any, list[Parameter]]:
    assert param.slot is not None
    return param.slot.arena, [param]


class _Part:
    """One run with the rules of its parameters and their joint state in flat memory."""

    def __init__(self, run: Run, rules: list[UpdateRule]) -> None:
        self.run = run
        self.rules = rules
        self.leader = rules[0]
        self.state: list[Array] = []
        if self.leader.runs_flat:
            for name in self.leader.state_names:
                self.state.append(self._join(name))

    def _join(self, name: str) -> Array:
        """One array for the whole run, of which the rules' states become views."""
        joint = zeros((self.run.size,), accumulation_dtype(self.run.data.dtype), self.run.data)
        for (p, where), rule in zip(self.run.layers(), self.rules):
            rule.ensure_state(p)
            assert rule._state is not None
            view = joint[where].reshape(p.shape)
            view[...] = to_device(rule._state[name], p.device)
            rule._state[name] = view
        return joint

    def update(self, is_complete: bool) -> None:
        """Update all parameters; ``is_complete`` says that no hook took a gradient away."""
        leader = self.leader
        if is_complete and leader.runs_flat and leader._hooks is None:
            for rule in self.rules:
                rule.t += 1
            hp = leader.hyperparam
            if len(hp.__dict__) == 1 and hp.parent is not None:  # no values of its own: spare the way through it
                hp = hp.parent
            leader.step_run(hp, leader.t, self.run, self.state)
        else:
            for p, rule in zip(self.run.params, self.rules):
                rule.update(p)


class Optimizer:
    """The base of all optimizers: a target link, the number of updates ``t``, and hooks."""

    def __init__(self) -> None:
        self.target: Any = None
        self.t = 0
        self.epoch = 0
        self._hooks = _Hooks()
        self._loss_scale: float | None = None
        self._loss_scale_growth: float | None = None  # per update, where the scale is dynamic
        self._was_unsafe = False
        self._is_safe = True

    def setup(self, link: Link) -> Optimizer:
        """Take a link as the target."""
        if not isinstance(link, Link):
            raise TypeError(f"optimizer.setup: expected a Link, got {type(link).__name__}")
        self.target = link
        self.t = 0
        self.epoch = 0
        self._hooks = _Hooks()
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Update the target's parameters."""
        raise NotImplementedError

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch."""
        self.epoch += 1

    def add_hook(self, hook: Any, name: str | None = None, timing: str = "auto") -> None:
        """Call ``hook(optimizer)``, or for every parameter ``hook(rule, param)``, before or after each update."""
        self._require_target()
        self._hooks.add(hook, name, timing)

    def remove_hook(self, name: str) -> None:
        """Remove a hook."""
        self._hooks.remove(name)

    def call_hooks(self, timing: str = "pre") -> None:
        """Call all hooks of one timing."""
        for hook in getattr(self._hooks, timing).values():
            self.call_hook(hook)

    def call_hook(self, hook: Any) -> None:
        """Call one hook."""
        hook(self)

    def set_loss_scale(self, loss_scale: float | None) -> None:
        """Multiply the loss by a constant in backward and divide the gradients by it before the update."""
        if loss_scale is not None and not loss_scale > 0:
            raise ValueError(f"loss_scale: expected a number above 0 or None, got {loss_scale}")
        self._loss_scale, self._loss_scale_growth = loss_scale, None

    def loss_scaling(self, interval: int = 1000, scale: float | None = None) -> None:
        """Scale the loss by ``scale``; or by a number that doubles in ``interval`` updates and halves at an overflow.

        The dynamic scale starts at 1 and doubles at every update until the first overflow, up to 65504. An update whose
        gradients hold NaN or infinity is left out.
        """
        if interval < 1:
            raise ValueError(f"interval: expected 1 or more updates, got {interval}")
        self.set_loss_scale(1.0 if scale is None else scale)
        self._loss_scale_growth = 2.0 ** (1.0 / interval) if scale is None else None
        self._was_unsafe = False

    def update_loss_scale(self) -> None:
        """Adapt a dynamic loss scale to the verdict of :meth:`check_nan_in_grads`."""
        if self._loss_scale_growth is None or self._loss_scale is None:
            return
        if not self._is_safe:
            factor, self._was_unsafe = 0.5, True
        else:
            factor = self._loss_scale_growth if self._was_unsafe else 2.0
        self._loss_scale = max(1.0, min(_MAX_LOSS_SCALE, self._loss_scale * factor))

    def check_nan_in_grads(self) -> None:
        """Where the loss scale is dynamic, find out whether gradients hold NaN or infinity; say which."""
        self._is_safe = True
        if self._loss_scale_growth is None:
            return
        for name, p in self.target.namedparams():
            g = p.grad
            if g is not None and not bool(get_array_module(g).isfinite(g).all()):
                self._is_safe = False
                warnings.warn(
                    f"NaN or infinity in the gradient of {name} at loss scale {self._loss_scale}: "
                    f"update {self.t + 1} is left out and the scale halved",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def is_safe_to_update(self) -> bool:
        """False if :meth:`check_nan_in_grads` found NaN or infinity."""
        return self._is_safe

    def _require_target(self) -> None:
        if self.target is None:
            raise RuntimeError(f"{type(self).__name__}: it has no target yet; call optimizer.setup(link) first")

    def serialize(self, serializer: Any) -> None:
        """Save or load the counters, and every rule under its parameter's path."""
        self.t = serializer("t", self.t)
        self.epoch = serializer("epoch", self.epoch)
        if self.target is not None:
            for name, p in self.target.namedparams():
                if p.update_rule is not None:
                    p.update_rule.serialize(serializer[name])


class GradientMethod(Optimizer):
    """An optimizer that updates from gradients. ``lr`` and its like are attributes and may change at any time."""

    rule_class: ClassVar[type[UpdateRule]]

    def __init__(self, **hyperparams: Any) -> None:
        super().__init__()
        self.hyperparam = Hyperparameter()
        for name, value in hyperparams.items():
            setattr(self.hyperparam, name, value)
        self._parts: list[_Part] = []
        self._version = -1

    def create_update_rule(self) -> UpdateRule:
        """A rule for one parameter, which reads its hyperparameters here."""
        return self.rule_class(self.hyperparam)

    def setup(self, link: Link) -> GradientMethod:
        """Take a link as the target, and give each parameter a rule."""
        super().setup(link)
        for p in link.params():
            p.update_rule = self.create_update_rule()
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """One step: with ``lossfun`` the gradients of ``lossfun(*args, **kwds)``, else those already there."""
        self._require_target()
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            self.target.cleargrads()
            loss.backward(loss_scale=self._loss_scale)
            del loss
        self.apply_gradients()

    def apply_gradients(self) -> None:
        """Update from the gradients that are there; where none arrived it counts as zero."""
        fusion.flush()
        self._require_target()
        parts = self._plan()
        for part in parts:
            flat.collect_gradients(part.run.params)
        if self._loss_scale is not None:
            for part in parts:
                part.run.grad[...] *= part.run.data.dtype.type(1.0 / self._loss_scale)
        self.check_nan_in_grads()
        is_complete = True
        if self._hooks.pre:
            self.call_hooks("pre")
            parts = self._plan()
            is_complete = all(p.node.gradient is p.node.view for part in parts for p in part.run.params)
        self.t += 1
        if self._is_safe:
            for part in parts:
                part.update(is_complete)
        if self._hooks.post:
            self.call_hooks("post")
        self.update_loss_scale()

    def _plan(self) -> list[_Part]:
        """The runs of the target and their rules; planned anew where flat memory or a rule changed."""
        if self._version != layout_version():
            params = [p for p in self.target.params() if p.is_initialized and p.update_rule is not None]
            params = [p for p in params if p.update_rule.enabled]
            self._parts = [_Part(run, [p.update_rule for p in run.params]) for run in flat.runs(params, _rule_key)]
            self._version = layout_version()
        return self._parts

    def runs(self) -> Iterator[Run]:
        """The runs that an update covers, with gradients complete; for hooks that work on flat memory."""
        for part in self._plan():
            yield part.run

    def call_hook(self, hook: Any) -> None:
        """Call one hook: on flat memory where it can (``hook.flat(run)``), else on each parameter or the optimizer."""
        if not getattr(hook, "call_for_each_param", False):
            hook(self)
        elif hasattr(hook, "flat"):
            for run in self.runs():
                hook.flat(run)
        else:
            for p in self.target.params():
                if p.is_initialized and p.update_rule is not None:
                    hook(p.update_rule, p)

    def use_cleargrads(self, use: bool = True) -> None:
        """Kept for Chainer's callers: gradients are always cleared, never filled."""
        if not use:
            raise ValueError("use_cleargrads: gradients are always cleared before backward; False is not supported")

    def reallocate_cleared_grads(self) -> None:
        """Fill gradients that did not arrive with zeros."""
        flat.collect_gradients(flat.gather(self.target.params()))

    def serialize(self, serializer: Any) -> None:
        """Save or load counters, hyperparameters and rules."""
        own = serializer["hyperparam"]
        for name, value in list(self.hyperparam.own().items()):
            setattr(self.hyperparam, name, own(name, value))
        super().serialize(serializer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": [], "_version": -1}  # a plan's arrays would not be the parameters' any more


def _rule_key(p: Parameter) -> Any:
    """Parameters with equal keys may be updated together."""
    rule = p.update_rule
    alone = not rule.runs_flat or rule._hooks is not None or bool(rule.hyperparam.own())
    return id(rule) if alone else (type(rule), rule.t, id(rule.hyperparam.parent))


class HyperparameterProxy:
    """An optimizer's attribute that lives in its hyperparameters: ``lr = HyperparameterProxy('lr')``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else getattr(obj.hyperparam, self.name)

    def __set__(self, obj: Any, value: Any) -> None:
        setattr(obj.hyperparam, self.name, value)
