"""The tape: differentiable functions, which record their calls, and the hooks around them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, is_array, is_floating
from dbrdist.core.array.chainer_mode import as_chainer, labels
from dbrdist.core.array.config import config, no_backprop_mode
from dbrdist.core.array.user_line import warn_user
from dbrdist.core.tape.call import Call, as_outputs, hooked, revive, variable
from dbrdist.core.tape.checks import OperandTypeError
from dbrdist.core.tape.deferred import plain
from dbrdist.core.tape.fusion import settle
from dbrdist.core.tape.node import UNCALLED, assigned_parameters, make_node
from dbrdist.core.tape.variable import Variable
from dbrdist.errors import StaleParametersError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from traceback import StackSummary

    from dbrdist.core.array.types import Raised
    from dbrdist.core.chainer.function import Function
    from dbrdist.core.tape.deferred import Deferred
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.tape.type_check import TypeInfoTuple
    from dbrdist.core.tape.variable import Operand

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def is_observed() -> bool:
    """True if this thread's hooks or the debug mode look at what functions take and give, so that nothing may wait."""
    switches = config.__dict__
    return bool(switches["_function_hooks"] or switches["debug"] or switches["_captured"] is not None)


@contextmanager
def capturing() -> Iterator[list[Variable]]:
    """Within the block this thread records no graph, but collects the Variables that would have taken a gradient."""
    switches = config.__dict__
    found: list[Variable] = []
    before = switches["_captured"]
    switches["_captured"] = found
    try:
        with no_backprop_mode():
            yield found
    finally:
        switches["_captured"] = before


class FunctionHook:
    """Called before and after every function's forward and backward, within ``with hook:`` or after ``add_hook``.

    Example:
        >>> class Names(dbrdist.FunctionHook):
        ...     def forward_preprocess(self, function, in_data):
        ...         print(function.label)
        >>> with Names():
        ...     y = F.sin(np.ones(1))
        sin
    """

    name: ClassVar[str] = "FunctionHook"

    def __enter__(self) -> FunctionHook:
        hooks = get_function_hooks()
        if self.name in hooks:
            raise KeyError(f"function hook {self.name!r} is already active in this thread")
        hooks[self.name] = self
        self.added(None)
        return self

    def __exit__(self, *exc: Raised) -> None:
        del get_function_hooks()[self.name]
        self.deleted(None)

    def added(self, function: FunctionNode | None) -> None:
        """Called when the hook is added to ``function``; None where it is added to the thread."""

    def deleted(self, function: FunctionNode | None) -> None:
        """Called when the hook is removed from ``function``; None where it was added to the thread."""

    def forward_preprocess(self, function: FunctionNode, in_data: tuple[Array, ...]) -> None:
        """Called before forward of ``function`` on the arrays ``in_data``."""

    def forward_postprocess(self, function: FunctionNode, in_data: tuple[Array, ...]) -> None:
        """Called after forward of ``function`` on the arrays ``in_data``."""

    def backward_preprocess(
        self, function: FunctionNode, in_data: tuple[Array | None, ...], out_grad: tuple[Array, ...]
    ) -> None:
        """Called before backward of ``function``: inputs ``in_data`` (None if freed), output gradients ``out_grad``."""

    def backward_postprocess(
        self, function: FunctionNode, in_data: tuple[Array | None, ...], out_grad: tuple[Array, ...]
    ) -> None:
        """Called after backward of ``function``, with ``in_data`` and ``out_grad`` as before it."""


def get_function_hooks() -> dict[str, FunctionHook]:
    """The function hooks of this thread by name.

    Example:
        >>> list(dbrdist.get_function_hooks())
        []
    """
    return config.__dict__["_function_hooks"]


class FunctionNode(Call):
    """A differentiable operation, and its record in the graph.

    A subclass gives ``forward(xs)``, which takes and returns tuples of arrays and says what it retains, and one rule:

    - ``derive(wanted, gys)``, which works on arrays in a first-order pass and on Variables in a higher-order one, with
      ``retained_inputs()`` and ``retained_outputs()`` of the same kind. It returns one gradient per index in
      ``wanted``, of the shape of that input; the walk brings it to the input's type. Where ``writes`` is True it takes
      a third argument: None, or per wanted index None or the array to write the result into; or
    - Chainer's ``backward(target_input_indexes, grad_outputs)``, which always gets and returns Variables. It also takes
      the place of a ``derive`` that the class inherits, and reaches that as ``super().backward``.

    ``operands`` names the inputs and the kinds of type that they may have. Forward mode takes the tangent of a linear
    function (``is_linear``) to be the function of the tangents, and derives any other from the rule.

    Example:
        >>> class Twice(dbrdist.FunctionNode):
        ...     def forward(self, xs):
        ...         return (2 * xs[0],)
        ...     def backward(self, indexes, gys):
        ...         return (2 * gys[0],)
        >>> Twice().apply((np.array([1.0]),))[0].array
        array([2.])
    """

    writes: bool = False
    is_linear: bool = False
    gives_new: bool = False  # each gradient of a first-order pass is a new array
    hands_on: bool = False  # each that is none is the very gradient of the only output
    # (a, b, whether nobody else has b) to a sum of gradients of the output that the rule completes, or None to add them
    defer_sum: ClassVar[Callable[[Array, Array, bool], Array | Deferred | None] | None] = None

    stack: StackSummary | None = None  # where it was called, in debug mode

    _hooks: dict[str, FunctionHook] | None = None
    # the rule that a backward replaces, and whether it writes
    _inherited: ClassVar[tuple[Callable[..., tuple[Any, ...]], bool] | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.reads_copy_of = cls.__dict__.get("reads_copy_of")  # what a class does is not known of those below it
        if cls.reads_copy_of is not None:
            cls.written = (cls.forward,)
            cls.retained_inputs = FunctionNode._handed_out_inputs  # type: ignore[method-assign]
        cls._checks_types = cls.check_type_forward is not FunctionNode.check_type_forward
        if cls.derive is not FunctionNode.derive and _comes_first("backward", "derive", cls):
            cls._inherited = cls.derive, cls.writes
            cls.derive = FunctionNode.derive  # type: ignore[method-assign]
            cls.writes = cls.is_linear = cls.gives_new = cls.hands_on = False
            cls.defer_sum = None

    # ---- to be overridden -------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name shown in messages and graphs."""
        return labels.get(type(self)) or type(self).__name__

    @property
    def as_called(self) -> FunctionNode | Function:
        """What the program called: this node itself, or the function of the old style that it stands for."""
        return self

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """The outputs for the input arrays ``xs``; ``forward_cpu`` and ``forward_gpu`` may be defined instead."""
        forward = self.forward_cpu if get_array_module(*xs) is np else self.forward_gpu
        return forward(xs)

    def forward_cpu(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Forward for NumPy arrays ``xs``, where ``forward`` is not overridden."""
        raise NotImplementedError(f"{self.label} defines neither forward(xs) nor forward_cpu(xs)")

    def forward_gpu(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Forward for CuPy arrays ``xs``, where ``forward`` is not overridden."""
        raise NotImplementedError(f"{self.label} defines neither forward(xs) nor forward_gpu(xs)")

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Operand | None, ...]:
        """The gradients of the inputs ``wanted`` (indexes), given ``gys``, those of the outputs; see the class."""
        if type(self).backward is FunctionNode.backward and "backward" not in self.__dict__:
            raise NotImplementedError(f"{self.label} has no gradient: it defines neither derive nor backward")
        if self._inherited is not None:
            self.gives_new = False  # which forward may have said of the inherited rule
        gys = tuple([plain(g) for g in gys])
        grads = tuple([g if g is None or isinstance(g, Variable) else variable(g, True) for g in gys])
        if self._on_variables:
            return self._checked_gradients(wanted, self.backward(wanted, grads))
        with no_backprop_mode():
            gxs = self._checked_gradients(wanted, self.backward(wanted, grads))
        return tuple([None if g is None else g.array for g in gxs])

    def _checked_gradients(
        self, wanted: tuple[int, ...], gxs: Sequence[Operand | None] | Operand | None
    ) -> tuple[Variable | None, ...]:
        """What a user's rule returned, as a tuple of Variables; anything else is refused in words."""
        grads: tuple[Any, ...] = tuple(gxs) if isinstance(gxs, (tuple, list)) else (gxs,)
        if len(grads) != len(wanted) and len(grads) == len(self.inputs):  # one for each input, which Chainer takes, too
            grads = tuple([grads[i] for i in wanted])
        for i, g in zip(wanted, grads):
            if g is not None and not isinstance(g, Variable):
                raise OperandTypeError(
                    f"{self.label}: type of gradients returned from backward is incorrect: expected a Variable (or "
                    f"None) for input {i}, got {type(g).__name__}; compute with the Variables in grad_outputs and "
                    "get_retained_inputs()"
                )
            if g is not None and config.debug and g.dtype != self.inputs[i].dtype:
                raise ValueError(
                    f"{self.label}: dtype of gradients returned from backward is incorrect: expected "
                    f"{self.inputs[i].dtype} for input {i}, got {g.dtype}"
                )
        return grads

    def backward(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        """Chainer's form of the rule: Variables in, Variables out.

        Args:
            target_input_indexes: the inputs whose gradients are asked for, in ascending order.
            grad_outputs: the gradient of each output as a Variable, or None.
        """
        rule, writes = self._inherited or (type(self).derive, self.writes)
        return self._of_variables(rule, writes, tuple(target_input_indexes), grad_outputs)

    def derive_variables(
        self, wanted: tuple[int, ...], gys: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        """:meth:`derive` on Variables (``wanted``, ``gys``), whoever wrote the rule: for passes of higher order."""
        return self._of_variables(type(self).derive, self.writes, wanted, gys)

    def _of_variables(
        self,
        rule: Callable[..., tuple[Any, ...]],
        writes: bool,
        wanted: tuple[int, ...],
        gys: tuple[Variable | None, ...],
    ) -> tuple[Variable | None, ...]:
        before, self._on_variables = self._on_variables, True
        try:
            return tuple(rule(self, wanted, gys, None) if writes else rule(self, wanted, gys))
        finally:
            self._on_variables = before

    def backward_accumulate(
        self,
        target_input_indexes: tuple[int, ...],
        grad_outputs: tuple[Variable | None, ...],
        grad_inputs: tuple[Variable | None, ...],
    ) -> tuple[Variable | None, ...]:
        """``backward`` with its results added to ``grad_inputs``, where those are not None.

        Args:
            target_input_indexes, grad_outputs: as for ``backward``.
            grad_inputs: for each of those inputs what has been added up so far, or None.
        """
        gxs = self.backward(tuple(target_input_indexes), tuple(grad_outputs))
        return tuple(g if old is None else old if g is None else old + g for g, old in zip(gxs, grad_inputs))

    def check_type_forward(self, in_types: TypeInfoTuple) -> None:
        """Check the ``in_types`` before forward (:mod:`dbrdist.utils.type_check`); ours declare ``operands``."""

    def check_layout_forward(self, inputs: tuple[Array, ...]) -> None:
        """Nothing to check of ``inputs``: layouts are in the strides. Never called."""

    def _missing(self, i: int) -> ValueError:
        return ValueError(f"{self.label}: argument {i} is a Variable without an array; initialise it first")

    # ---- what forward may call --------------------------------------------------------------------------------------

    def retain_inputs(self, indexes: tuple[int, ...]) -> None:
        """Keep the inputs with these ``indexes`` (a tuple of integers) for the rule."""
        self._keep_inputs = tuple(indexes)

    def retain_outputs(self, indexes: tuple[int, ...]) -> None:
        """Keep the outputs with these ``indexes`` (a tuple of integers) for the rule."""
        self._keep_outputs = tuple(indexes)

    # ---- what the rule may call -------------------------------------------------------------------------------------

    def retained_inputs(self) -> tuple[Any, ...]:
        """The retained inputs, as arrays in a first-order pass and as Variables in a higher-order one."""
        return self.get_retained_inputs() if self._on_variables else self._kept_xs or ()

    def _handed_out_inputs(self) -> tuple[Any, ...]:
        """As :meth:`retained_inputs`, of a function that gives its inputs to nobody else: whoever asks has them."""
        self._hand_out_inputs()
        return FunctionNode.retained_inputs(self)

    def retained_outputs(self) -> tuple[Any, ...]:
        """The retained outputs, of the same kind as :meth:`retained_inputs`."""
        return self.get_retained_outputs() if self._on_variables else self._kept_ys or ()

    def get_retained_inputs(self) -> tuple[Variable, ...]:
        """The retained inputs as Variables in the graph."""
        nodes = self.inputs
        if self._keep_inputs is None and not as_chainer[0]:
            raise self._nothing_retained("input")
        self._hand_out_inputs()
        kept = zip(self._keep_inputs or (), self._kept_xs or ())
        return tuple([None if a is None else revive(nodes[i], a) for i, a in kept])

    def _hand_out_inputs(self) -> None:
        """Note that whoever asks may write to what was retained."""
        for i in self._keep_inputs or ():
            self.inputs[i].is_handed_out = True

    def get_retained_outputs(self) -> tuple[Variable, ...]:
        """The retained outputs as Variables in the graph."""
        if self._keep_outputs is None and not as_chainer[0]:
            raise self._nothing_retained("output")
        return tuple(
            [
                None if a is None else revive(make_node(self, i, self.rank + 1, True, a.shape, a.dtype), a)
                for i, a in zip(self._keep_outputs or (), self._kept_ys or ())
            ]
        )

    def _nothing_retained(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.label}: its rule asks for retained {what}s, but forward retained none; call "
            f"self.retain_{what}s((0, ...)) in forward with the index of each {what} that the rule needs"
        )

    @property
    def input_data(self) -> tuple[Array | None, ...]:
        """One entry per input: its array where it was retained, else None."""
        if self.inputs:
            self._hand_out_inputs()
        kept = dict(zip(self._keep_inputs or (), self._kept_xs or ()))
        return tuple(kept.get(i) for i in range(len(self.inputs or ())))

    @property
    def output_data(self) -> tuple[Array | None, ...]:
        """One entry per output: its array where it was retained, else None."""
        kept = dict(zip(self._keep_outputs or (), self._kept_ys or ()))
        return tuple(kept.get(i) for i in range(self.num_outputs))

    @property
    def input_layouts(self) -> tuple[None, ...]:
        """None for each input: layouts are in the strides."""
        return (None,) * len(self.inputs or ())

    @property
    def output_layouts(self) -> tuple[None, ...]:
        """None for each output."""
        return (None,) * self.num_outputs

    # ---- copies ------------------------------------------------------------------------------------------------------

    def twin(self) -> FunctionNode:
        """The same operation without the record of its call, to be applied to other inputs."""
        other: FunctionNode = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            if name not in _LEFT_BY_CALL:
                setattr(other, name, value)
        return other

    def __getstate__(self) -> dict[str, Any]:
        if self.inputs:
            self._hand_out_inputs()
        return {**self.__dict__, **{name: getattr(self, name) for name in UNCALLED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    @property
    def local_function_hooks(self) -> dict[str, FunctionHook]:
        """The hooks of this function only."""
        if self._hooks is None:
            self._hooks = {}
            hooked[0] = True
        return self._hooks

    def add_hook(self, hook: FunctionHook, name: str | None = None) -> None:
        """Add ``hook`` to this function only, as ``name`` or by its own; a name in use is a KeyError."""
        name = hook.name if name is None else name
        if name in self.local_function_hooks:
            raise KeyError(f"{self.label} already has a hook named {name!r}")
        self.local_function_hooks[name] = hook
        hook.added(self)

    def delete_hook(self, name: str) -> None:
        """Remove the hook called ``name`` from this function."""
        self.local_function_hooks.pop(name).deleted(self)

    def active_hooks(self) -> list[FunctionHook]:
        """The hooks of this thread, then those of this function."""
        return [*get_function_hooks().values(), *(self._hooks or {}).values()]

    def _forward_with_hooks(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        hooks = self.active_hooks()
        if hooks:
            settle()
        for hook in hooks:
            hook.forward_preprocess(self, xs)
        ys = self.forward(xs)
        if type(ys) is not tuple:
            ys = as_outputs(self, ys)
        for hook in hooks:
            hook.forward_postprocess(self, xs)
        if config.debug:
            self._look_for_nan(xs, ys)
        return ys

    def _look_for_nan(self, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> None:
        import traceback  # loaded in debug mode alone

        self.stack = traceback.extract_stack()
        for i, y in enumerate(ys):
            if has_nan(y):
                bad = [str(j) for j, x in enumerate(xs) if is_array(x) and has_nan(x)]
                origin = f"it comes from input {' and '.join(bad)}" if bad else "no input has any"
                raise RuntimeError(
                    f"NaN in output {i} of the forward computation of {self.label}; {origin}{self.called_at()}"
                )

    def called_at(self) -> str:
        """Words for where the program called the function, in debug mode."""
        frames = [frame for frame in self.stack or () if not frame.filename.startswith(_HERE)]
        return f"; called at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""

    # ---- the graph --------------------------------------------------------------------------------------------------

    def heed_new_values(self) -> None:
        """Follow ``config.stale_parameters`` where an input that the rule needs was assigned after the call.

        With "refuse" it is a StaleParametersError; with "warn" the rule uses the new values, as in Chainer.
        """
        nodes = self.inputs
        for place, i in enumerate(self._keep_inputs or ()):
            node = nodes[i]
            if node.assigned <= self.recorded_at:
                continue
            words = (
                f"{self.label}: parameter {node.name or 'without a name'} of shape {node.shape} (input {i}) was "
                "assigned new values after forward, and backward needs the old ones"
            )
            if config.stale_parameters == "refuse":
                raise StaleParametersError(f"{words}; call backward first, or run forward again")
            self._take_new_value(place, node)
            warn_user(f"{words}; as in Chainer, it computes with the new ones", RuntimeWarning)

    def _take_new_value(self, place: int, node: VariableNode) -> None:
        """Let the rule have the present array of a parameter instead of the one that it retained."""
        reference = assigned_parameters.get(node)
        parameter = None if reference is None else reference()
        kept = list(self._kept_xs)
        if parameter is not None and parameter.array is not None and parameter.array.shape == kept[place].shape:
            kept[place] = parameter.array
            self._kept_xs = tuple(kept)
            self._drop_copies()

    def _drop_copies(self) -> None:
        """Drop what forward made of retained inputs for the rule, one of which was assigned new values since."""


def _comes_first(name: str, other: str, cls: type) -> bool:
    """Whether ``cls`` inherits ``name`` from a nearer class than ``other``."""
    return next(name in c.__dict__ and other not in c.__dict__ for c in cls.__mro__ if {name, other} & {*c.__dict__})


# What a call leaves in a function; all else was there before it.
_LEFT_BY_CALL = frozenset((*UNCALLED, "_hooks", "stack"))


def has_nan(a: Array | None) -> bool:
    """True if an array holds NaN."""
    return a is not None and is_floating(a.dtype) and bool(get_array_module(a).isnan(a).any())


def call(function: FunctionNode, *xs: Any) -> Any:
    """Arrays in, arrays out; any Variable in, Variables out: one, or a tuple where there are several. For rules."""
    ys: tuple[Operand, ...]
    for x in xs:
        if isinstance(x, Variable):
            ys = function.apply(xs)
            break
    else:
        ys = function.forward(xs)
    return ys[0] if len(ys) == 1 else ys
