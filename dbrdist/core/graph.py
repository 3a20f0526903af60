"""The tape: differentiable functions, which record their calls, and the hooks around them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from dbrdist.core import type_check
from dbrdist.core.backend import Array, elementwise, get_array_module, is_array, is_floating
from dbrdist.core.checks import Operands
from dbrdist.core.config import config, no_backprop_mode
from dbrdist.core.fusion import settle, waiting
from dbrdist.core.variable import Variable, VariableNode, assignments, make_node

_ndarray = np.ndarray
_FIRST = tuple(tuple(range(n)) for n in range(8))  # the indexes of the first n inputs
_new = object.__new__
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package: its own lines tell a user little
_float32 = np.dtype(np.float32)


_has_local_hooks = False  # True once any function got hooks of its own: until then nobody looks for them


def has_local_hooks() -> bool:
    """True if a function may have hooks of its own."""
    return _has_local_hooks


def is_observed() -> bool:
    """True if this thread's hooks or the debug mode look at what functions take and give, so that nothing may wait."""
    switches = config.__dict__
    return bool(switches["_function_hooks"] or switches["debug"] or switches["_captured"] is not None)


@contextmanager
def capturing() -> Iterator[list[Any]]:
    """Within the block this thread records no graph, but collects the Variables that would have taken a gradient."""
    switches = config.__dict__
    before, found = switches["_captured"], []  # type: ignore[var-annotated]
    switches["_captured"] = found
    try:
        with no_backprop_mode():
            yield found
    finally:
        switches["_captured"] = before


class FunctionHook:
    """Called before and after every function's forward and backward, within ``with hook:`` or after ``add_hook``."""

    name: ClassVar[str] = "FunctionHook"

    def __enter__(self) -> FunctionHook:
        hooks = get_function_hooks()
        if self.name in hooks:
            raise KeyError(f"function hook {self.name!r} is already active in this thread")
        hooks[self.name] = self
        self.added(None)
        return self

    def __exit__(self, *exc: object) -> None:
        del get_function_hooks()[self.name]
        self.deleted(None)

    def added(self, function: FunctionNode | None) -> None:
        """Called when the hook is added (``None``: to the thread)."""

    def deleted(self, function: FunctionNode | None) -> None:
        """Called when the hook is removed."""

    def forward_preprocess(self, function: FunctionNode, in_data: tuple[Array, ...]) -> None:
        """Called before forward."""

    def forward_postprocess(self, function: FunctionNode, in_data: tuple[Array, ...]) -> None:
        """Called after forward."""

    def backward_preprocess(self, function: FunctionNode, in_data: Any, out_grad: tuple[Any, ...]) -> None:
        """Called before backward with the gradients of the outputs."""

    def backward_postprocess(self, function: FunctionNode, in_data: Any, out_grad: tuple[Any, ...]) -> None:
        """Called after backward."""


def get_function_hooks() -> dict[str, FunctionHook]:
    """The function hooks of this thread by name."""
    return config.__dict__["_function_hooks"]  # type: ignore[no-any-return]


class FunctionNode:
    """A differentiable operation, and its record in the graph.

    A subclass gives ``forward(xs)``, which takes and returns tuples of arrays and says what it retains, and one rule:

    - ``derive(wanted, gys)``, which works on arrays in a first-order pass and on Variables in a higher-order one, with
      ``retained_inputs()`` and ``retained_outputs()`` of the same kind. It returns one gradient per index in
      ``wanted``, of the shape of that input; the walk brings it to the input's type. Where ``writes`` is True it takes
      a third argument: None, or per wanted index None or the array to write the result into; or
    - Chainer's ``backward(target_input_indexes, grad_outputs)``, which always gets and returns Variables.

    ``operands`` names the inputs and the kinds of type that they may have. Forward mode takes the tangent of a linear
    function (``is_linear``) to be the function of the tangents, and derives any other from the rule.
    """

    inputs: tuple[VariableNode, ...] = ()  # empty before the call, and where the graph was cut
    rank: int = 0
    num_outputs: int = 1
    wanted: tuple[int, ...] = ()
    takes_over: ClassVar[bool] = False  # whether forward looks itself for an output that waits (core.fusion)
    recorded_at: int = 0  # the number of assignments to parameters before the call

    operands: Operands | None = None
    writes: bool = False
    is_linear: bool = False
    takes_sums: ClassVar[bool] = False  # whether the rule takes a SummedGradient (core.fusion) of large images
    gives_new: bool = False  # each gradient of a first-order pass is a new array

    stack: Any = None  # where it was called, in debug mode

    _xs: tuple[Array, ...] = ()
    _ys: tuple[Array, ...] = ()
    _keep_inputs: tuple[int, ...] = ()
    _keep_outputs: tuple[int, ...] = ()
    _on_variables: bool = False
    _checks_types: bool = False
    _hooks: dict[str, FunctionHook] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._checks_types = cls.check_type_forward is not FunctionNode.check_type_forward

    # ---- to be overridden -------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name shown in messages and graphs."""
        return type(self).__name__

    @property
    def as_called(self) -> Any:
        """What the program called: this node itself, or the function of the old style that it stands for."""
        return self

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """The outputs for the input arrays. Chainer's ``forward_cpu`` and ``forward_gpu`` may stand in its place."""
        forward = self.forward_cpu if get_array_module(*xs) is np else self.forward_gpu
        return forward(xs)

    def forward_cpu(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Forward for NumPy arrays, where ``forward`` is not overridden."""
        raise NotImplementedError(f"{self.label} defines neither forward(xs) nor forward_cpu(xs)")

    def forward_gpu(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Forward for CuPy arrays, where ``forward`` is not overridden."""
        raise NotImplementedError(f"{self.label} defines neither forward(xs) nor forward_gpu(xs)")

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        """The gradients of the wanted inputs; see the class."""
        if type(self).backward is FunctionNode.backward:
            raise NotImplementedError(f"{self.label} has no gradient: it defines neither derive nor backward")
        grads = tuple([g if g is None or isinstance(g, Variable) else variable(g, True) for g in gys])
        if self._on_variables:
            return self._checked_gradients(wanted, self.backward(wanted, grads))
        with no_backprop_mode():
            gxs = self._checked_gradients(wanted, self.backward(wanted, grads))
        return tuple([None if g is None else g.array for g in gxs])

    def _checked_gradients(self, wanted: tuple[int, ...], gxs: Any) -> tuple[Any, ...]:
        """What a user's rule returned, as a tuple of Variables; anything else is refused in words."""
        grads: tuple[Any, ...] = tuple(gxs) if isinstance(gxs, (tuple, list)) else (gxs,)
        for i, g in zip(wanted, grads):
            if g is not None and not isinstance(g, Variable):
                raise TypeError(
                    f"{self.label}.backward: expected a Variable (or None) as the gradient of input {i}, got "
                    f"{type(g).__name__}; compute with the Variables in grad_outputs and get_retained_inputs()"
                )
        return grads

    def backward(self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Chainer's form of the rule: Variables in, Variables out."""
        before, self._on_variables = self._on_variables, True
        try:
            wanted = tuple(target_input_indexes)
            rule: Any = self.derive
            return tuple(rule(wanted, grad_outputs, None) if self.writes else rule(wanted, grad_outputs))
        finally:
            self._on_variables = before

    def backward_accumulate(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...], grad_inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """``backward`` with its results added to ``grad_inputs``, where those are not None."""
        gxs = self.backward(tuple(target_input_indexes), tuple(grad_outputs))
        return tuple(g if old is None else old if g is None else old + g for g, old in zip(gxs, grad_inputs))

    def check_type_forward(self, in_types: Any) -> None:
        """Check types and shapes before forward (:mod:`dbrdist.utils.type_check`); ours declare ``operands``."""

    def check_layout_forward(self, inputs: tuple[Array, ...]) -> None:
        """Nothing to check: layouts are in the strides. Never called."""

    # ---- what forward may call --------------------------------------------------------------------------------------

    def retain_inputs(self, indexes: tuple[int, ...]) -> None:
        """Keep these inputs for the rule."""
        self._keep_inputs = tuple(indexes)

    def retain_outputs(self, indexes: tuple[int, ...]) -> None:
        """Keep these outputs for the rule."""
        self._keep_outputs = tuple(indexes)

    # ---- what the rule may call -------------------------------------------------------------------------------------

    def retained_inputs(self) -> tuple[Any, ...]:
        """The retained inputs, as arrays in a first-order pass and as Variables in a higher-order one."""
        return self.get_retained_inputs() if self._on_variables else self._xs

    def retained_outputs(self) -> tuple[Any, ...]:
        """The retained outputs, of the same kind as :meth:`retained_inputs`."""
        return self.get_retained_outputs() if self._on_variables else self._ys

    def get_retained_inputs(self) -> tuple[Any, ...]:
        """The retained inputs as Variables in the graph."""
        nodes = self.inputs
        if not self._keep_inputs:
            raise self._nothing_retained("input")
        return tuple([_revive(nodes[i], a) for i, a in zip(self._keep_inputs, self._xs)])

    def get_retained_outputs(self) -> tuple[Any, ...]:
        """The retained outputs as Variables in the graph."""
        if not self._keep_outputs:
            raise self._nothing_retained("output")
        return tuple(
            [
                _revive(make_node(self, i, self.rank + 1, True, a.shape, a.dtype), a)
                for i, a in zip(self._keep_outputs, self._ys)
            ]
        )

    def _nothing_retained(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.label}: its rule asks for retained {what}s, but forward retained none; call "
            f"self.retain_{what}s((0, ...)) in forward with the index of each {what} that the rule needs"
        )

    @property
    def input_data(self) -> tuple[Array, ...]:
        """One entry per input: its array where it was retained, else None."""
        kept = dict(zip(self._keep_inputs, self._xs))
        return tuple(kept.get(i) for i in range(len(self.inputs)))

    @property
    def output_data(self) -> tuple[Array, ...]:
        """One entry per output: its array where it was retained, else None."""
        kept = dict(zip(self._keep_outputs, self._ys))
        return tuple(kept.get(i) for i in range(self.num_outputs))

    @property
    def input_layouts(self) -> tuple[None, ...]:
        """None for each input: layouts are in the strides."""
        return (None,) * len(self.inputs)

    @property
    def output_layouts(self) -> tuple[None, ...]:
        """None for each output."""
        return (None,) * self.num_outputs

    # ---- the three steps: check, forward, record --------------------------------------------------------------------

    def apply(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run forward on Variables or arrays, record it if a gradient may be asked for, and return Variables."""
        if waiting and not self.takes_over:
            settle()
        if self.inputs:
            raise RuntimeError(f"{self.label}: a FunctionNode records one call; make a new one for each apply")
        xs: list[Array] = []
        nodes: list[Any] = []
        rank = num_wanted = 0
        operands, has_arrays = self.operands, False
        for x in inputs:
            if isinstance(x, Variable):
                a = x._array
                if a is None:
                    raise self._missing(len(xs))
                node = x.node
                if node.requires_grad:
                    num_wanted += 1
                    if node.rank > rank:
                        rank = node.rank
                elif operands is not None and a.dtype is not _float32:
                    operands.check(len(xs), a)
            else:
                if operands is not None:
                    if type(x) is not _ndarray or x.dtype is not _float32:
                        operands.check(len(xs), x)
                    has_arrays = True
                a, node = x, _constant_node(x)
            xs.append(a)
            nodes.append(node)
        if has_arrays and len(xs) > 1:
            for node in nodes:
                if node.dtype is not _float32:
                    self._follow_variables(inputs, xs, nodes)
                    break
        data = tuple(xs)
        if self._checks_types and config.type_check:
            self.check_type_forward(type_check.get_types(data, "in_types"))
        switches = config.__dict__  # one look at this thread's values for all of them
        if _has_local_hooks or switches["_function_hooks"] or switches["debug"]:
            ys = self._forward_with_hooks(data)
        else:
            ys = self.forward(data)
        if type(ys) is not tuple:
            ys = self._as_outputs(ys)
        if not num_wanted or not switches["enable_backprop"]:
            if num_wanted and switches["_captured"] is not None:
                switches["_captured"].extend(x for x in inputs if isinstance(x, Variable) and x.node.requires_grad)
            return tuple([_leaf(y) for y in ys])
        self.inputs = tuple(nodes)
        if num_wanted == len(nodes) < len(_FIRST):
            self.wanted = _FIRST[num_wanted]
        else:
            self.wanted = tuple([i for i, node in enumerate(nodes) if node.requires_grad])
        return self._record(rank, data, ys)

    def _follow_variables(self, inputs: tuple[Any, ...], xs: list[Array], nodes: list[Any]) -> None:
        """An array beside floating Variables takes the type of the first, as in Chainer."""
        for x in inputs:
            if isinstance(x, Variable) and is_floating(x.node.dtype):
                dtype = x.node.dtype
                break
        else:
            return
        for i, x in enumerate(inputs):
            if not isinstance(x, Variable) and x.dtype != dtype and is_floating(x.dtype):
                xs[i] = elementwise(lambda v: v.astype(dtype), x)
                nodes[i] = _constant_node(xs[i])

    def _missing(self, i: int) -> ValueError:
        return ValueError(f"{self.label}: argument {i} is a Variable without an array; initialise it first")

    def _as_outputs(self, ys: Any) -> tuple[Array, ...]:
        """What forward returned, as a tuple of arrays."""
        if isinstance(ys, list):
            return tuple(ys)
        if isinstance(ys, np.generic):  # NumPy's reductions give scalars; the tuple is what is missing
            ys = np.asarray(ys)
        what = f"an array of shape {ys.shape}; write `return y,`" if is_array(ys) else type(ys).__name__
        raise TypeError(f"{self.label}.forward: expected a tuple of arrays, got {what}")

    def _record(self, rank: int, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Any, ...]:
        self.rank = rank
        self.recorded_at = assignments[0]
        keep = self._keep_inputs
        if keep:
            n = len(keep)
            are_first = n < len(_FIRST) and n <= len(xs) and keep == _FIRST[n]
            self._xs = xs[:n] if are_first else self._of("retain_inputs", keep, xs)
        y = ys[0] if len(ys) == 1 else None
        if type(y) is _ndarray:  # nearly always, so without the calls of _output
            if self._keep_outputs:
                self._ys = ys if self._keep_outputs == (0,) else self._of("retain_outputs", self._keep_outputs, ys)
            v = _new(Variable)
            v._array = y
            node = v.node = VariableNode()
            node.creator_node = self
            node.index = 0
            node.rank = rank + 1
            node.shape = y.shape
            node.dtype = dtype = y.dtype
            node.requires_grad = dtype is _float32 or dtype.kind in "fcV"
            node.gradient = node.view = node.name = None
            node.assigned = 0
            return (v,)
        self.num_outputs = len(ys)
        outputs = [self._output(i, _as_array(self, y), rank + 1) for i, y in enumerate(ys)]
        if self._keep_outputs:
            self._ys = self._of("retain_outputs", self._keep_outputs, [v.array for v in outputs])
        return tuple(outputs)

    def _of(self, verb: str, keep: tuple[int, ...], values: Any) -> tuple[Any, ...]:
        try:
            return tuple([values[i] for i in keep])
        except (IndexError, TypeError):
            raise IndexError(f"{self.label}.{verb}: expected places from 0 to {len(values) - 1}, got {keep}") from None

    def _output(self, i: int, y: Any, rank: int) -> Variable:
        v = _new(Variable)
        v._array = y
        dtype = y.dtype
        v.node = make_node(self, i, rank, dtype.kind in "fcV", y.shape, dtype)
        return v

    def twin(self) -> FunctionNode:
        """The same operation without the record of its call, to be applied to other inputs."""
        other = _new(type(self))
        for name, value in self.__dict__.items():
            if name not in _RECORD:
                setattr(other, name, value)
        return other

    # ---- hooks ------------------------------------------------------------------------------------------------------

    @property
    def local_function_hooks(self) -> dict[str, FunctionHook]:
        """The hooks of this function alone."""
        global _has_local_hooks
        if self._hooks is None:
            self._hooks = {}
            _has_local_hooks = True
        return self._hooks

    def add_hook(self, hook: FunctionHook, name: str | None = None) -> None:
        """Add a hook to this function alone."""
        name = hook.name if name is None else name
        if name in self.local_function_hooks:
            raise KeyError(f"{self.label} already has a hook named {name!r}")
        self.local_function_hooks[name] = hook
        hook.added(self)

    def delete_hook(self, name: str) -> None:
        """Remove a hook of this function."""
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
            ys = self._as_outputs(ys)
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
                whence = f"it comes from input {' and '.join(bad)}" if bad else "no input has any"
                raise RuntimeError(
                    f"NaN in output {i} of the forward computation of {self.label}; {whence}{self.called_at()}"
                )

    def called_at(self) -> str:
        """Words for where the program called the function, in debug mode."""
        frames = [frame for frame in self.stack or () if not frame.filename.startswith(_HERE)]
        return f"; called at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""

    # ---- the graph --------------------------------------------------------------------------------------------------

    def refuse_new_values(self) -> None:
        """Raise if an input that the rule needs was assigned new values after the call."""
        nodes = self.inputs
        for i in self._keep_inputs:
            node = nodes[i]
            if node.assigned > self.recorded_at:
                raise RuntimeError(
                    f"{self.label}: parameter {node.name or 'without a name'} of shape {node.shape} (input {i}) was "
                    "assigned new values after forward, and backward needs the old ones; call backward first, or run "
                    "forward again"
                )

    def unchain(self) -> None:
        """Cut this function out of the graph and let go of what it retained; its outputs become leaves."""
        self.inputs = ()
        self.wanted = ()
        self._xs = self._ys = ()


# What a call leaves in a function; all else was there before it.
_RECORD = frozenset(
    ("inputs", "rank", "num_outputs", "wanted", "recorded_at", "_xs", "_ys", "_keep_inputs", "_keep_outputs",
     "_on_variables", "_hooks", "stack")
)  # fmt: skip


def _as_array(function: FunctionNode, y: Any) -> Any:
    """One output of forward: an array, a pending one, or a scalar of a reduction."""
    if type(y) is _ndarray or is_array(y):
        return y
    if isinstance(y, (np.generic, int, float)):
        return np.asarray(y)
    raise TypeError(f"{function.label}.forward: expected a tuple of arrays, got {type(y).__name__} in it")


def has_nan(a: Any) -> bool:
    """True if an array holds NaN."""
    return a is not None and is_floating(a.dtype) and bool(get_array_module(a).isnan(a).any())


def _revive(node: VariableNode, array: Array) -> Variable:
    """A Variable for an existing node: gradients reach whoever shares the node."""
    v = _new(Variable)
    v._array = array
    v.node = node
    return v


def variable(array: Array, requires_grad: bool) -> Variable:
    """A leaf."""
    return _revive(make_node(None, 0, 0, requires_grad, array.shape, array.dtype), array)


def _leaf(y: Any) -> Variable:
    """A Variable without a history."""
    if type(y) is not _ndarray and not is_array(y):
        y = np.asarray(y)
    return variable(y, False)


def _constant_node(x: Any) -> VariableNode:
    """The node of an array, a number or None among a function's inputs: it takes no gradient."""
    return make_node(None, 0, 0, False, getattr(x, "shape", ()), getattr(x, "dtype", None))


def call(function: FunctionNode, *xs: Any) -> Any:
    """Arrays in, arrays out; any Variable in, Variables out: one, or a tuple where there are several. For rules."""
    for x in xs:
        if isinstance(x, Variable):
            ys = function.apply(xs)
            break
    else:
        ys = function.forward(xs)
    return ys[0] if len(ys) == 1 else ys
