"""Update rules: how parameters change, one by one or together in flat memory.

Every parameter has an ``UpdateRule`` with its own state, hyperparameters and hooks, as in Chainer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array import declared
from dbrdist.core.array.backend import (
    Array,
    accumulation_dtype,
    aligned_zeros,
    is_array,
    on,
    to_device,
    zeros,
)
from dbrdist.core.array.elementwise import kernels
from dbrdist.core.model import flat
from dbrdist.core.model.flat import Run
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.model.versions import note_change
from dbrdist.core.update.elementwise_hook import HookOfRun
from dbrdist.core.update.hooks import Hooks as Hooks
from dbrdist.core.update.hooks import is_said_of
from dbrdist.core.update.hyperparameter import Hyperparameter
from dbrdist.core.update.pieces import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from dbrdist.core.update.pieces import FP32_PARAM as FP32_PARAM
from dbrdist.core.update.pieces import SMALL_ELEMENTS
from dbrdist.core.update.pieces import denominator as denominator
from dbrdist.core.update.pieces import follow as follow
from dbrdist.core.update.pieces import in_pieces as in_pieces
from dbrdist.core.update.pieces import pieces as pieces
from dbrdist.core.update.pieces import workspace as workspace

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import AbstractSerializer
    from dbrdist.core.update.hooks import RuleHook

# A rule that has one of these of its own, in its class or as an attribute, is called for each parameter in turn.
_REPLACED = frozenset(("init_state", "update", "update_core", "update_core_cpu", "update_core_gpu"))

_FORMULAS, _STEP = frozenset(("step", "step_run")), frozenset(("step",))


class UpdateRule:
    """How one parameter is updated.

    A subclass names its state arrays in ``state_names`` and gives ``step``; or it overrides Chainer's ``init_state``
    and ``update_core``, and is then called for each parameter in turn.

    Args:
        parent_hyperparam: the hyperparameters of the optimizer, which hold where the rule has none of its own.

    Example:
        >>> model = L.Linear(2, 1)
        >>> optimizer = optimizers.SGD(lr=0.1).setup(model)
        >>> model.b.update_rule.hyperparam.lr = 0.2  # for this parameter alone
        >>> model.W.update_rule.hyperparam.lr, model.b.update_rule.hyperparam.lr
        (0.1, 0.2)
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    state_meaning: ClassVar[str | None] = None  # of the numbers, where those of other rules have the same names
    keeps_zero: ClassVar[bool] = False  # True: where parameter, gradient and state are 0, step leaves them so
    _is_flat: ClassVar[bool] = True
    _runs_in_pieces: ClassVar[bool] = True  # whether each element follows from those at its place alone
    _changed_at: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._is_flat = all(getattr(cls, name) is getattr(UpdateRule, name) for name in _REPLACED)
        kind: type = cls
        if not is_said_of(kind, "keeps_zero", _FORMULAS):
            cls.keeps_zero = False  # a new formula does not inherit the promise of the old one
        if not is_said_of(kind, "kernel", _STEP):
            cls.kernel = UpdateRule.kernel  # type: ignore[method-assign]  # nor its kernel
        cls._runs_in_pieces = cls.step_run is UpdateRule.step_run

    def __init__(self, parent_hyperparam: Hyperparameter | None = None) -> None:
        self._hyperparam = Hyperparameter(parent_hyperparam)
        self.t = 0
        self._state: Any = None
        self.joint: tuple[JointState, int] | None = None  # where the state lies, and from which element of the arena on
        self.piece: flat.Piece | None = None  # the elements of the parameter that the state is for; None is all
        self._enabled = True
        self._in_fp32 = False
        self._hooks: Hooks | None = None

    # ---- to be overridden -------------------------------------------------------------------------------------------

    def step(self, hp: Hyperparameter, t: int, p: Array, g: Array, *state: Array) -> None:
        """Update ``p`` in place from gradient ``g`` and ``state``, all 1-d of one length, in update ``t`` from 1.

        ``hp`` has the hyperparameters. ``g`` is not changed, since users read gradients after an update;
        :func:`workspace` has room for one term.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither step nor update_core")

    def kernel(self, hp: Hyperparameter, t: int, state: list[Array]) -> tuple[str, tuple[float, ...]] | None:
        """The kernel that does what :meth:`step` does in one pass over memory, and its numbers; None if there is none.

        It takes the parameters, the gradients and the state.

        Args:
            hp: the hyperparameters.
            t: the number of this update, from 1.
            state: the state arrays, in the order of ``state_names``.
        """
        return None

    def step_run(self, hp: Hyperparameter, t: int, run: Run, state: list[Array]) -> None:
        """Update one run: in pieces that stay in cache. Rules with norms per layer override it.

        Args:
            hp: the hyperparameters.
            t: the number of this update, from 1.
            run: parameters and gradients that lie one after another in flat memory.
            state: the state arrays of the run, in the order of ``state_names``.
        """
        data = run.memory
        is_on_host = type(data) is np.ndarray
        if is_on_host and data.size <= SMALL_ELEMENTS and data.itemsize != 2:
            self.step(hp, t, data, run.grad, *state)
            return
        if not is_on_host:
            data = run.data  # notes the write: kernels of a device may have copies of it
        if not (is_on_host and data.size <= SMALL_ELEMENTS) and self._run_kernel(hp, t, run, state):
            return
        if not is_on_host:
            declared.refuse_in_capture(f"{type(self).__name__} has no kernel of its own for {data.dtype} on a GPU")
        if data.size <= CHUNK_ELEMENTS and data.itemsize != 2:
            self.step(hp, t, data, run.grad, *state)
        else:
            in_pieces(functools.partial(self.step, hp, t), data, run.grad, state)

    def step_after(self, hooks: Sequence[HookOfRun], hp: Hyperparameter, t: int, run: Run, state: list[Array]) -> None:
        """As :meth:`step_run` after elementwise hooks: in the same pass where the rule and the hooks allow it.

        Without a loop for each hook, the rule's own loop and a pass before it take less time than NumPy's formulas in
        one pass. On a GPU, hooks make passes of their own.

        Args:
            hooks: the hooks, in their order.
            hp, t, run, state: as for :meth:`step_run`.
        """
        data = run.data
        if self._runs_in_pieces and type(data) is np.ndarray:
            if data.size <= SMALL_ELEMENTS and data.itemsize != 2:
                for hook in hooks:
                    hook.change_all(data, run.grad)
                self.step(hp, t, data, run.grad, *state)
                return
            loops = tuple([hook.loop() for hook in hooks])
            has_all = None not in loops
            if has_all and self._run_kernel(hp, t, run, state, loops):
                return
            if has_all or self.kernel(hp, t, state) is None:
                in_pieces(functools.partial(self.step, hp, t), data, run.grad, state, [hook.change for hook in hooks])
                return
        for hook in hooks:
            hook.hook.flat(run)
        self.step_run(hp, t, run, state)

    def _run_kernel(
        self, hp: Hyperparameter, t: int, run: Run, state: list[Array], before: tuple[Any, ...] = ()
    ) -> bool:
        """Update a run by a kernel, after loops of hooks; False if there is none, or none for such arrays."""
        found, update = self.kernel(hp, t, state), kernels.get("update")
        if found is None or update is None:
            return False
        name, numbers = found
        given: tuple[Any, ...] | Array = numbers
        if type(run.data) is not np.ndarray and (block := declared.current()) is not None:
            given = self._declared_numbers(block, state, len(numbers))
        return bool(update(name, (run.data, run.grad, *state), given, before))

    def _declared_numbers(self, block: declared.DeclaredBlock, state: list[Array], count: int) -> Array:
        """The numbers of :meth:`kernel` in a captured step: those of each replay."""
        return block.declare(lambda: self.kernel(self._hyperparam.in_numbers(), self.t, state)[1], count, np.float64)  # type: ignore[index]

    def init_state(self, param: Parameter) -> None:
        """Make the state of ``param``; the default makes zeros for ``state_names``, in float32 for 16 bits."""
        assert self._state is not None
        for name in self.state_names:
            self._state[name] = zeros(param.shape, accumulation_dtype(param.dtype), param.lend())

    def update_core(self, param: Parameter) -> None:
        """Update ``param`` alone; Chainer's ``update_core_cpu`` and ``update_core_gpu`` may be overridden too."""
        array = param.array  # None for a parameter without a shape
        (self.update_core_cpu if array is None or isinstance(array, np.ndarray) else self.update_core_gpu)(param)

    def update_core_cpu(self, param: Parameter) -> None:
        """Update ``param``, an array of NumPy."""
        self._step_alone(param)

    def update_core_gpu(self, param: Parameter) -> None:
        """Update ``param``, an array of CuPy."""
        self._step_alone(param)

    def update_core_chainerx(self, param: Parameter) -> None:
        """A name of Chainer that programs override; never called with a ``param``, as there is no ChainerX here."""
        raise NotImplementedError("there is no ChainerX here; override update_core_cpu and update_core_gpu")

    def _step_alone(self, param: Parameter) -> None:
        if param.grad is None:
            return
        param.collect_gradient()
        assert self._state is not None
        run = Run([param], is_lent=True)
        self.step_run(self.hyperparam.in_numbers(), self.t, run, [self._state[n].reshape(-1) for n in self.state_names])

    def _update_in_fp32(self, param: Parameter) -> None:
        """Update one 16-bit parameter through its float32 copy."""
        assert self._state is not None
        master = self._state[FP32_PARAM]
        follow(master, param.array, master.astype(param.dtype))
        twin = Parameter(master.copy(), name=param.name)
        if param.grad is not None:
            twin.grad = param.grad.astype(master.dtype)
        flat.gather([twin])
        self.update_core(twin)
        master[...] = twin.array
        param.array[...] = master.astype(param.dtype)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def hyperparam(self) -> Hyperparameter:
        """The values of this rule; those it does not set are its optimizer's."""
        return self._hyperparam

    @hyperparam.setter
    def hyperparam(self, value: Hyperparameter) -> None:
        self._hyperparam = value
        note_change(self)

    @property
    def state(self) -> dict[str, Array]:
        """The state arrays by name, or None before the first update."""
        return self._state

    def put_state(self, state: dict[str, Array] | None, piece: flat.Piece | None) -> None:
        """Replace the state by the arrays ``state`` (None: none) of ``piece`` of the parameter (None: all of it)."""
        self._state, self.piece = state, piece

    def follow_chainer(self, saved: dict[str, Any]) -> None:
        """Take over ``saved``, the attributes of a rule that Chainer pickled."""
        self.t, self.enabled = saved["t"], saved["enabled"]
        self.use_fp32_update(saved.get("_use_fp32_update", False))
        for name, value in vars(saved["hyperparam"]).items():
            if name != "_parent":
                setattr(self.hyperparam, name, value)
        hooks = vars(saved["_hookable"]) if "_hookable" in saved else {}
        for timing in ("pre", "post"):
            for name, hook in hooks.get(f"_{timing}_update_hooks", {}).items():
                self.add_hook(hook, name, timing)
        if saved["_state"] is not None:
            self.put_state(self.state_of_chainer(dict(saved["_state"])), None)
            copy = saved.get("_fp32_param")
            if copy is not None and copy.array is not None:
                self._state[FP32_PARAM] = copy.array

    def state_of_chainer(self, state: dict[str, Array]) -> dict[str, Array]:
        """The state arrays, given ``state``, those of Chainer's rule of this name."""
        return state

    @property
    def hooks(self) -> Hooks | None:
        """The hooks of this rule alone; None is none."""
        return self._hooks

    @property
    def enabled(self) -> bool:
        """False freezes the parameter."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if value != self._enabled:
            self._enabled = value
            note_change(self)

    def use_fp32_update(self, flag: bool = True) -> None:
        """Update 16-bit parameters in float32 if ``flag``: the state is kept in float32, and each update rounds once.

        Without it, changes below half a unit in the last place of a 16-bit parameter are lost (Micikevicius et al.
        2018, section 3.1). A float32 or float64 parameter is updated as usual.
        """
        if bool(flag) != self._in_fp32:
            self._in_fp32 = bool(flag)
            if self._state is not None:
                self._state.pop(FP32_PARAM, None)
            note_change(self)

    def is_in_fp32(self, param: Parameter) -> bool:
        """Whether ``param`` is updated through a float32 copy."""
        return self._in_fp32 and accumulation_dtype(param.dtype) != param.dtype

    def add_hook(self, hook: RuleHook, name: str | None = None, timing: str = "auto") -> None:
        """Call ``hook(rule, param)`` before or after each update of this parameter.

        Args:
            hook: a function of the rule and the parameter.
            name: its name; None takes that of the hook.
            timing: ``'pre'`` before the update, ``'post'`` after it, ``'auto'`` (default) for the hook's own wish.
        """
        if self._hooks is None:
            self._hooks = Hooks()
        self._hooks.add(hook, name, timing)
        note_change(self)

    def remove_hook(self, name: str) -> None:
        """Remove the hook called ``name``; a KeyError where there is none."""
        if self._hooks is None:
            raise KeyError(f"no hook named {name!r}")
        self._hooks.remove(name)
        note_change(self)

    @property
    def runs_flat(self) -> bool:
        """True if ``step`` does the work, so that neighbours with equal values may be updated together."""
        return self._is_flat and not _REPLACED & self.__dict__.keys()

    def fit(self, param: Parameter) -> None:
        """Drop a state whose shape is not that of ``param``, which has been initialised again."""
        state = self._state
        shape = param.shape if self.piece is None else (self.piece[1] - self.piece[0],)
        if state is not None and any(state[name].shape != shape for name in self.state_names):
            self._state, self.piece, self.t = None, None, 0

    def ensure_state(self, param: Parameter, piece: flat.Piece | None = None) -> None:
        """Make the state, if there is none, of ``piece`` (None: all) of ``param``, and move it to its device."""
        with on(param):
            self._ensure_state_here(param, piece)

    def _ensure_state_here(self, param: Parameter, piece: flat.Piece | None) -> None:
        in_fp32 = self.is_in_fp32(param)
        if piece != self.piece:
            self._cut(piece)
        if piece is not None:
            param = Parameter(param.lend().reshape(-1)[slice(*piece)])
        if self._state is None:
            self._state = {}
            self.init_state(Parameter(param.lend().astype(np.float32)) if in_fp32 else param)
        else:
            for name, value in self._state.items():
                if is_array(value):
                    self._state[name] = to_device(value, param.device)
        if in_fp32 and FP32_PARAM not in self._state:
            self._state[FP32_PARAM] = param.lend().astype(np.float32)

    def _cut(self, piece: flat.Piece | None) -> None:
        """Keep the state of ``piece`` alone."""
        if self._state is not None:
            if self.piece is not None or piece is None:
                raise RuntimeError(
                    f"an update rule has the state of the elements {self.piece} of its parameter, for its optimizer's "
                    "state is divided over ranks; use it with the multi-node optimizer that divided it"
                )
            self._state = {name: a.reshape(-1)[slice(*piece)].copy() for name, a in self._state.items()}
        self.piece = piece

    def update(self, param: Parameter) -> None:
        """One update of ``param``, with this rule's hooks; without a gradient only ``t`` moves."""
        if not self._enabled:
            return
        if not param.is_initialized:
            self._update_without_array(param)
            return
        assigned = param.node.assigned
        if isinstance(param, Parameter):  # any Variable with a gradient can be updated
            flat.gather([param])
        self.fit(param)
        self.t += 1
        self.ensure_state(param)
        if param.grad is not None and isinstance(param, Parameter):
            param.collect_gradient()
        self.call_hooks("pre", param)
        (self._update_in_fp32 if self.is_in_fp32(param) else self.update_core)(param)
        self.call_hooks("post", param)
        param.node.assigned = assigned  # whatever a rule assigns is an update

    def _update_without_array(self, param: Parameter) -> None:
        """A parameter without a shape: only a user's formula can do something with it, such as initialising it."""
        if self.runs_flat:
            return
        self.t += 1
        twin = param
        if self._in_fp32 and getattr(param.initializer, "dtype", None) == np.float16:
            twin = Parameter(name=param.name)  # without an array and with a type of float32
        self.call_hooks("pre", param)
        self.update_core(twin)
        self.call_hooks("post", param)

    def call_hooks(self, timing: str, param: Parameter) -> None:
        """Call this rule's hooks of one ``timing``, ``"pre"`` or ``"post"``, for ``param``."""
        if self._hooks is not None:
            for hook in getattr(self._hooks, timing).values():
                hook(self, param)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the state by ``serializer``; arrays that are not there yet appear with the saved shapes."""
        is_loading = getattr(serializer, "is_loading", True)  # a function of a program does not say
        if self.piece is not None and not is_loading:
            raise RuntimeError(
                "the optimizer's state is divided over ranks; save it inside `with optimizer.whole_state():`, which "
                "every rank enters"
            )
        self.t = serializer("t", self.t)
        names = self._entry_names() if self._state is None else tuple(n for n in self._state if n != FP32_PARAM)
        state = {} if self._state is None or self.piece is not None else self._state
        for name in names:
            try:
                state[name] = serializer(name, state.get(name))
            except KeyError:  # a frozen parameter had no state when it was saved
                if self._enabled or not is_loading:
                    raise
                state[name] = None
        if self._in_fp32:
            wide = serializer(FP32_PARAM, state.get(FP32_PARAM))
            if wide is not None:  # None for a parameter that has no such copy, or before the first update
                state[FP32_PARAM] = wide
        if is_loading:
            self.piece = None
            if any(state.get(name) is None for name in names):
                self._state = None
            elif state:
                self._state = state
            note_change(self)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "joint": None}  # a copy's state is its own

    def _entry_names(self) -> tuple[str, ...]:
        """The names of the state; a rule with its own ``init_state`` is tried on a small parameter."""
        if type(self).init_state is UpdateRule.init_state and "init_state" not in self.__dict__:
            return self.state_names
        before, self._state = self._state, {}
        small = np.zeros(1, np.float32)
        param = Parameter(small)
        param.grad = small.copy()
        try:
            self.init_state(param)
            return tuple(self._state)
        finally:
            self._state = before


class JointState:
    """State arrays over a stretch of an arena, of which the states of the rules there are views.

    It knows no parameters: these know their rules, and rules it.
    """

    __slots__ = ("arena", "arrays", "start")

    def __init__(self, run: Run, rules: list[UpdateRule], names: tuple[str, ...]) -> None:
        """Bring the states of ``rules``, one for each parameter of ``run``, together."""
        self.arena = run.arena
        self.start = run.start
        self.arrays = {name: _join(run, rules, name) for name in names}
        for (_, where), rule in zip(run.layers(), rules):
            rule.joint = self, run.start + where.start

    def part(self, run: Run) -> dict[str, Array]:
        """The states of a run within the stretch."""
        start = run.start - self.start
        return {name: a[start : start + run.size] for name, a in self.arrays.items()}

    def holds(self, run: Run, rules: list[UpdateRule], names: tuple[str, ...]) -> bool:
        """Whether the states of ``rules`` are here already, as after a neighbour was frozen."""
        if self.arena is not run.arena or tuple(self.arrays) != names:
            return False
        return all(
            rule.joint == (self, run.start + where.start)
            and rule.piece == run.piece(p, where)
            and all(_is_view(rule._state, name, a) for name, a in self.arrays.items())
            for (p, where), rule in zip(run.layers(), rules)
        )


def _join(run: Run, rules: list[UpdateRule], name: str) -> Array:
    joint = aligned_zeros(run.size, accumulation_dtype(run.data.dtype), run.data)
    for (p, where), rule in zip(run.layers(), rules):
        rule.ensure_state(p, run.piece(p, where))
        assert rule._state is not None
        view = joint[where].reshape(p.shape if rule.piece is None else -1)
        view[...] = to_device(rule._state[name], p.device)
        rule._state[name] = view
    return joint


def _is_view(state: dict[str, Array] | None, name: str, whole: Array) -> bool:
    base = None if state is None else state[name].base
    return base is not None and (base is whole or base is whole.base)


def joint_state(run: Run, rules: list[UpdateRule], names: tuple[str, ...]) -> dict[str, Array]:
    """Arrays over the whole run, by name, of which the states of its rules are views; made if need be."""
    joint = None if rules[0].joint is None else rules[0].joint[0]
    if joint is None or not joint.holds(run, rules, names):
        joint = JointState(run, rules, names)
    return joint.part(run)
