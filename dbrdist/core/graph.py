"""The tape: variables, their nodes, and the functions between them.

A graph holds nodes, not arrays. A ``VariableNode`` knows the function that made it and the shape; a ``FunctionNode``
knows the nodes of its inputs and the arrays that its rule retained. References run from outputs to inputs only, so a
graph dies by reference count as soon as nobody holds its end.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dbrdist.core.backend import Array, get_array_module, is_array, is_floating
from dbrdist.core.config import config, no_backprop_mode
from dbrdist.core.fusion import Pending

_ndarray = np.ndarray
_FIRST = tuple(tuple(range(n)) for n in range(8))  # the indexes of the first n inputs
_new = object.__new__
_float32 = np.dtype(np.float32)


class VariableNode:
    """A variable's place in the graph: who made it, its shape, and the gradient that arrived."""

    __slots__ = (
        "__weakref__",
        "assigned",
        "creator_node",
        "dtype",
        "gradient",
        "index",
        "name",
        "rank",
        "requires_grad",
        "shape",
        "view",
    )

    creator_node: FunctionNode | None
    index: int  # which output of the creator
    rank: int
    requires_grad: bool
    shape: tuple[int, ...]
    dtype: Any
    gradient: Any  # an array, or a Variable after a differentiable backward
    view: Array  # where a parameter's gradient lies in flat memory
    name: str | None
    assigned: int  # the count of assignments when a parameter last got new values from outside an update

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def living_creator(self) -> FunctionNode | None:
        """The function that made it, or None for a leaf and where the graph was cut."""
        creator = self.creator_node
        return None if creator is None or creator.inputs is None else creator


def make_node(
    creator_node: FunctionNode | None, index: int, rank: int, requires_grad: bool, shape: Any, dtype: Any
) -> VariableNode:
    """A node; a function, since a class without ``__init__`` takes a quarter of the time to call."""
    node = VariableNode()
    node.creator_node = creator_node
    node.index = index
    node.rank = rank
    node.requires_grad = requires_grad
    node.shape = shape
    node.dtype = dtype
    node.gradient = node.view = node.name = None
    node.assigned = 0
    return node


_num_assignments = 0


def num_assignments() -> int:
    """How often parameters got new values from outside an update, in this process."""
    return _num_assignments


def note_assignment(node: VariableNode) -> None:
    """A parameter gets new values: graphs that retained the old ones must not go backward through it."""
    global _num_assignments
    _num_assignments += 1
    node.assigned = _num_assignments


class BaseVariable:
    """An array with a place in the graph. ``Variable`` adds operators and backward to it."""

    __slots__ = ("__weakref__", "_array", "node")
    __array_ufunc__ = None  # ndarray * Variable asks the Variable

    node: VariableNode
    _array: Any

    @property
    def array(self) -> Array:
        """The array; a pending last pass is run first."""
        a = self._array
        if type(a) is Pending:
            a = self._array = a.force()
        return a


_variable_class: type[BaseVariable] = BaseVariable


def hand_down(variable_class: type[BaseVariable]) -> None:
    """Called by ``core.variable``, which stands above: the class of outputs."""
    global _variable_class
    _variable_class = variable_class


_has_local_hooks = False  # True once any function got hooks of its own: until then nobody looks for them


def has_local_hooks() -> bool:
    """True if a function may have hooks of its own."""
    return _has_local_hooks


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

    - ``derive(wanted, gys, out)``, which works on arrays in a first-order pass and on Variables in a higher-order one,
      with ``retained_inputs()`` and ``retained_outputs()`` of the same kind. It returns one gradient per index in
      ``wanted``. ``out``, where it is not None, holds per wanted index None or the array to write the result into; or
    - Chainer's ``backward(target_input_indexes, grad_outputs)``, which always gets Variables.
    """

    inputs: tuple[VariableNode, ...] | None = None
    rank: int = 0
    num_outputs: int = 1
    wanted: tuple[int, ...] = ()
    recorded_at: int = 0  # the number of assignments to parameters before the call

    _xs: tuple[Array, ...] = ()
    _ys: tuple[Array, ...] = ()
    _keep_inputs: tuple[int, ...] = ()
    _keep_outputs: tuple[int, ...] = ()
    _on_variables: bool = False
    _hooks: dict[str, FunctionHook] | None = None

    # ---- to be overridden -------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name shown in messages and graphs."""
        return type(self).__name__

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

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """The gradients of the wanted inputs; see the class."""
        if type(self).backward is FunctionNode.backward:
            raise NotImplementedError(f"{self.label} has no gradient: it defines neither derive nor backward")
        grads = tuple(g if g is None or isinstance(g, BaseVariable) else variable(g, True) for g in gys)
        if self._on_variables:
            gxs = _as_tuple(self.backward(wanted, grads))
            self._check_gradients(wanted, gxs)
            return gxs
        with no_backprop_mode():
            gxs = _as_tuple(self.backward(wanted, grads))
        self._check_gradients(wanted, gxs)
        return tuple(g.array if isinstance(g, BaseVariable) else g for g in gxs)

    def _check_gradients(self, wanted: tuple[int, ...], gxs: tuple[Any, ...]) -> None:
        """A user's rule must not be broadcast into a gradient of another shape without a word."""
        nodes = self.inputs or ()
        for i, g in zip(wanted, gxs):
            if g is not None and g.shape != nodes[i].shape:
                raise ValueError(
                    f"{self.label}.backward: expected a gradient of shape {nodes[i].shape} for input {i}, "
                    f"got shape {g.shape}"
                )

    def backward(self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Chainer's form of the rule: Variables in, Variables out."""
        before, self._on_variables = self._on_variables, True
        try:
            return self.derive(tuple(target_input_indexes), grad_outputs, None)
        finally:
            self._on_variables = before

    def backward_accumulate(
        self, target_input_indexes: tuple[int, ...], grad_outputs: tuple[Any, ...], grad_inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """``backward`` with its results added to ``grad_inputs``, where those are not None."""
        gxs = self.backward(tuple(target_input_indexes), tuple(grad_outputs))
        return tuple(g if old is None else old if g is None else old + g for g, old in zip(gxs, grad_inputs))

    def check_type_forward(self, in_types: Any) -> None:
        """Chainer's hook for type checks; our operations check in their public functions."""

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
        assert nodes is not None
        return tuple(_revive(nodes[i], a) for i, a in zip(self._keep_inputs, self._xs))

    def get_retained_outputs(self) -> tuple[Any, ...]:
        """The retained outputs as Variables in the graph."""
        return tuple(
            _revive(make_node(self, i, self.rank + 1, True, a.shape, a.dtype), a)
            for i, a in zip(self._keep_outputs, self._ys)
        )

    @property
    def output_data(self) -> tuple[Array, ...]:
        """One entry per output: its array where it was retained, else None."""
        kept = dict(zip(self._keep_outputs, self._ys))
        return tuple(kept.get(i) for i in range(self.num_outputs))

    # ---- the three steps: check, forward, record --------------------------------------------------------------------

    def apply(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run forward on Variables or arrays, record it if a gradient may be asked for, and return Variables."""
        if self.inputs is not None:
            raise RuntimeError(f"{self.label}: a FunctionNode records one call; make a new one for each apply")
        xs: list[Array] = []
        nodes: list[Any] = []
        rank = num_wanted = 0
        for x in inputs:
            if isinstance(x, BaseVariable):
                a = x._array
                if type(a) is not _ndarray and (a is None or type(a) is Pending):
                    a = self._read(x, len(xs))
                node = x.node
                if node.requires_grad:
                    num_wanted += 1
                    if node.rank > rank:
                        rank = node.rank
            else:
                a, node = x, _constant_node(x)
            xs.append(a)
            nodes.append(node)
        data = tuple(xs)
        switches = config.__dict__  # one look at this thread's values for all of them
        if _has_local_hooks or switches["_function_hooks"] or switches["debug"]:
            ys = self._forward_with_hooks(data)
        else:
            ys = self.forward(data)
        if type(ys) is not tuple:
            ys = tuple(ys)
        if not num_wanted or not switches["enable_backprop"]:
            return tuple([_leaf(y) for y in ys])
        self.inputs = tuple(nodes)
        if num_wanted == len(nodes) < len(_FIRST):
            self.wanted = _FIRST[num_wanted]
        else:
            self.wanted = tuple([i for i, node in enumerate(nodes) if node.requires_grad])
        return self._record(rank, data, ys)

    def _read(self, x: BaseVariable, i: int) -> Array:
        """The array of a Variable that is pending, or not initialised."""
        a = x.array
        if a is None:
            raise ValueError(f"{self.label}: argument {i} is a Variable without an array; initialise it first")
        return a

    def adopt(self, inputs: tuple[BaseVariable, ...], ys: tuple[Array, ...]) -> tuple[Any, ...]:
        """As :meth:`apply` for outputs that were computed together with an earlier function's last pass."""
        wanted = tuple(i for i, x in enumerate(inputs) if x.node.requires_grad)
        if not wanted or not config.enable_backprop:
            return tuple(_leaf(y) for y in ys)
        self.inputs = tuple(x.node for x in inputs)
        self.wanted = wanted
        return self._record(max(x.node.rank for x in inputs), (), ys)

    def _record(self, rank: int, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Any, ...]:
        self.rank = rank
        self.recorded_at = _num_assignments
        keep = self._keep_inputs
        if keep:
            n = len(keep)
            self._xs = xs[:n] if n < len(_FIRST) and keep == _FIRST[n] else tuple([xs[i] for i in keep])
        y = ys[0] if len(ys) == 1 else None
        if type(y) is _ndarray:  # nearly always, so without the calls of _output
            if self._keep_outputs:
                self._ys = ys
            v = _new(_variable_class)
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
        outputs = []
        for i, y in enumerate(ys):
            if type(y) is not _ndarray and type(y) is not Pending and not is_array(y):
                y = np.asarray(y)  # NumPy's reductions give scalars
            outputs.append(self._output(i, y, rank + 1))
        if self._keep_outputs:
            self._ys = tuple([outputs[i].array for i in self._keep_outputs])
        return tuple(outputs)

    def _output(self, i: int, y: Any, rank: int) -> BaseVariable:
        v = _new(_variable_class)
        v._array = y
        dtype = y.dtype
        v.node = make_node(self, i, rank, dtype.kind in "fcV", y.shape, dtype)
        return v

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
        for hook in hooks:
            hook.forward_preprocess(self, xs)
        ys = self.forward(xs)
        for hook in hooks:
            hook.forward_postprocess(self, xs)
        if config.debug:
            for i, y in enumerate(ys):
                if has_nan(y):
                    raise RuntimeError(f"NaN in output {i} of the forward computation of {self.label}")
        return ys

    # ---- the graph --------------------------------------------------------------------------------------------------

    def refuse_new_values(self) -> None:
        """Raise if an input that the rule needs was assigned new values after the call."""
        nodes = self.inputs or ()
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
        self.inputs = None
        self.wanted = ()
        self._xs = self._ys = ()


def _as_tuple(gxs: Any) -> tuple[Any, ...]:
    return tuple(gxs) if isinstance(gxs, (tuple, list)) else (gxs,)


def has_nan(a: Any) -> bool:
    """True if an array (a pending one is computed) holds NaN."""
    a = a.force() if type(a) is Pending else a
    return a is not None and is_floating(a.dtype) and bool(get_array_module(a).isnan(a).any())


def _revive(node: VariableNode, array: Array) -> BaseVariable:
    """A Variable for an existing node: gradients reach whoever shares the node."""
    v = _new(_variable_class)
    v._array = array
    v.node = node
    return v


def variable(array: Array, requires_grad: bool) -> BaseVariable:
    """A leaf."""
    return _revive(make_node(None, 0, 0, requires_grad, array.shape, array.dtype), array)


def _leaf(y: Any) -> BaseVariable:
    """A Variable without a history."""
    if type(y) is not _ndarray and type(y) is not Pending and not is_array(y):
        y = np.asarray(y)
    return variable(y, False)


def _constant_node(x: Any) -> VariableNode:
    """The node of an array, a number or None among a function's inputs: it takes no gradient."""
    return make_node(None, 0, 0, False, getattr(x, "shape", ()), getattr(x, "dtype", None))


def call(function: FunctionNode, *xs: Any) -> Any:
    """Arrays in, array out; any Variable in, Variable out. For functions with one output, within rules."""
    for x in xs:
        if isinstance(x, BaseVariable):
            return function.apply(xs)[0]
    return function.forward(xs)[0]
