"""Derivatives of functions: forward mode (``jvp``) and reverse mode (``vjp``).

For a function y = f(x): ``jvp`` gives J t, the change of y for a change t of x; ``vjp`` gives g J, the gradient of g y.
Both work for everything that is computed with Variables, and their results are Variables that can be differentiated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.config import using_config
from dbrdist.core.tape import backprop, ops
from dbrdist.core.tape.call import variable
from dbrdist.core.tape.elementwise_table import Elementwise
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Variable, as_array, as_variable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any, TypeVar

    from dbrdist.core.tape.variable import Operand

    Outputs = TypeVar("Outputs", bound=Variable | Sequence[Variable])  # of a function of Variables


def jvp(
    func: Callable[..., Variable | Sequence[Variable]], primals: Sequence[Operand], tangents: Sequence[Operand | None]
) -> tuple[Any, Any]:
    """The outputs of ``func`` at ``primals``, and their derivatives along ``tangents`` (forward mode).

    Args:
        func: takes Variables, one for each primal; returns a Variable, or a tuple or list of them.
        primals: arrays or Variables.
        tangents: an array or Variable of the shape of each primal, or None for zero.

    Returns:
        The outputs and their tangents, of the same structure: Variables. An output that does not depend on the primals
        has a tangent of zeros.

    What ``func`` uses besides its arguments is constant, even a Variable that is also a primal. Elementwise functions
    use their partial derivatives and linear ones themselves; any other is transposed twice.

    Example:
        >>> y, dy = dbrdist.jvp(lambda x: x * x, (np.array([3.0]),), (np.array([1.0]),))
        >>> dy.array
        array([6.])
    """
    xs = _arguments("jvp", primals)
    if len(tangents) != len(xs):
        raise ValueError(f"jvp: expected {len(xs)} tangents, one for each primal, got {len(tangents)}")
    moving = []
    for i, (x, t) in enumerate(zip(xs, tangents)):
        if t is not None:
            if t.shape != x.shape:
                raise ValueError(f"jvp: tangents[{i}]: expected shape {x.shape} to match the primal, got {t.shape}")
            moving.append((x.node, ops.cast(as_variable(t), x.dtype)))
    with using_config("enable_backprop", True):
        ys: Any = func(*xs)
        outputs = _listed(ys)
        found = {_place(node): t for node, t in moving}  # now, for func may have cut the graph
        _Forward([y.node for y in outputs], found).run()
    results = [found.get(_place(y.node)) for y in outputs]
    results = [_zeros(y) if t is None else t for y, t in zip(outputs, results)]
    if isinstance(ys, Variable):
        return ys, results[0]
    return ys, type(ys)(*results) if hasattr(ys, "_fields") else type(ys)(results)


def vjp(func: Callable[..., Outputs], *primals: Operand) -> tuple[Outputs, Callable[..., tuple[Variable, ...]]]:
    """The outputs of a function, and a function that maps their gradients to those of the primals.

    The latter takes one array or Variable (or None) for each output and returns a tuple of Variables, zeros for a
    primal
    on which the outputs do not depend.

    Args:
        func: a function of Variables that returns a Variable or a tuple of them; see :func:`jvp`.
        primals: its arguments, arrays or Variables.

    Raises:
        ValueError: when it is called, the number or the shape of gradients does not match the outputs.

    Example:
        >>> y, pull = dbrdist.vjp(lambda x: x * x, np.array([1.0, 2.0]))
        >>> pull(np.ones(2))[0].array
        array([2., 4.])
    """
    xs = _arguments("vjp", primals)
    with using_config("enable_backprop", True):
        ys = func(*xs)
    outputs = _listed(ys)

    def pull(*gys: Operand | None) -> tuple[Variable, ...]:
        if len(gys) != len(outputs):
            raise ValueError(f"vjp: expected {len(outputs)} gradients, one for each output, got {len(gys)}")
        pairs = [(y, as_variable(g)) for y, g in zip(outputs, gys) if g is not None]
        for y, g in pairs:
            if g.shape != y.shape:
                raise ValueError(f"vjp: expected a gradient of shape {y.shape} to match the output, got {g.shape}")
        gxs: list[Variable | None] = [None] * len(xs)
        if pairs:
            ends, seeds = zip(*pairs)
            gxs = backprop.grad(ends, xs, seeds, enable_double_backprop=True)
        return tuple(_zeros(x) if g is None else g for x, g in zip(xs, gxs))

    return ys, pull


class Argument(FunctionNode):
    """y = x: a primal as the function sees it, apart from the same Variable in another place or in a closure."""

    is_linear = True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return xs

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return gys


def _arguments(function: str, primals: Sequence[Operand]) -> list[Variable]:
    """The primals as Variables of their own; what takes no gradient becomes a leaf that does."""
    xs = []
    for i, x in enumerate(primals):
        if not hasattr(x, "dtype"):
            raise TypeError(f"{function}: primals[{i}]: expected an array or Variable, got {type(x).__name__}")
        if isinstance(x, Variable) and x.requires_grad:
            with using_config("enable_backprop", True):
                xs.append(Argument().apply((x,))[0])
        else:
            xs.append(Variable(as_array(x)))
    return xs


def _listed(ys: Any) -> list[Variable]:
    found = list(ys) if isinstance(ys, (tuple, list)) else [ys]
    for y in found:
        if not isinstance(y, Variable):
            raise TypeError(f"expected func to return a Variable or several, got {type(y).__name__}")
    return found


def _zeros(x: Variable) -> Variable:
    return variable(get_array_module(x.array).zeros_like(x.array), False)


def _place(node: VariableNode) -> Hashable:
    """What identifies a value in the graph: its function and index, or the leaf's node."""
    creator = node.living_creator()
    return node if creator is None else (creator, node.index)


def _see_that_they_follow(function: FunctionNode, wanted: tuple[int, ...], gxs: tuple[Variable | None, ...]) -> None:
    """Raise if a rule computed gradients with bare arrays: these do not tell how they follow those of the outputs."""
    for i, g in zip(wanted, gxs):
        if g is not None and g.node.creator_node is None and bool(g.array.any()):
            raise RuntimeError(
                f"jvp: {function.label}.backward: the gradient of input {i} has no history; compute it with the "
                "Variables in grad_outputs and get_retained_inputs(), not with their arrays"
            )


class _Forward:
    """A walk from the leaves to the outputs, with a tangent for each value that moves."""

    def __init__(self, ends: list[VariableNode], found: dict[Hashable, Variable]) -> None:
        self.found = found
        self.values: dict[FunctionNode, dict[int, VariableNode]] = {}  # the outputs of each function that are used
        stack = list(ends)
        while stack:
            node = stack.pop()
            function = node.living_creator()
            if function is not None:
                if function not in self.values:
                    self.values[function] = {}
                    stack.extend(function.inputs)
                self.values[function][node.index] = node

    def run(self) -> None:
        """Push the tangents through all functions, each after those that it needs."""
        for function in sorted(self.values, key=lambda f: f.rank):
            tangents = [self.found.get(_place(node)) for node in function.inputs]
            if any(t is not None for t in tangents):
                for i, t in enumerate(self.pushed(function, tangents)):
                    if t is not None:
                        self.found[function, i] = t

    def pushed(self, function: FunctionNode, tangents: list[Variable | None]) -> Sequence[Variable | None]:
        """The tangents of a function's outputs."""
        if isinstance(function, Elementwise) and type(function).derive is Elementwise.derive:
            return (self.along_partials(function, tangents),)
        return self.of_tangents(function, tangents) if function.is_linear else self.transposed_twice(function, tangents)

    def along_partials(self, function: Elementwise, tangents: list[Variable | None]) -> Variable:
        """The sum of each tangent times its partial derivative."""
        node = self.values[function][0]
        before, function._on_variables = function._on_variables, True
        try:
            parts = [
                function.pulled(i, ops.broadcast_to(t, node.shape)) for i, t in enumerate(tangents) if t is not None
            ]
        finally:
            function._on_variables = before
        total = parts[0]
        for part in parts[1:]:
            total = ops.add(total, part)
        return ops.cast(total, node.dtype)

    def of_tangents(self, function: FunctionNode, tangents: list[Variable | None]) -> Sequence[Variable]:
        """A linear function of the tangents."""
        like = next(t for t in tangents if t is not None)
        xp = get_array_module(like.array)
        pairs = zip(tangents, function.inputs)
        full = [variable(xp.zeros(node.shape, node.dtype), False) if t is None else t for t, node in pairs]
        return function.twin().apply(tuple(full))

    def transposed_twice(self, function: FunctionNode, tangents: list[Any]) -> Sequence[Variable | None]:
        """J t from the rule g -> g J alone: that is linear in g, and the gradient of <g J, t> by g is J t."""
        wanted = tuple(i for i, t in enumerate(tangents) if t is not None and function.inputs[i].requires_grad)
        like = next(t for t in tangents if t is not None)
        xp, used = get_array_module(like.array), self.values[function]
        seeds = {i: Variable(xp.ones(node.shape, node.dtype)) for i, node in used.items()}
        gys = tuple(seeds.get(i) for i in range(function.num_outputs))
        gxs = function.derive_variables(wanted, gys) if wanted else ()
        _see_that_they_follow(function, wanted, gxs)
        pairs = [
            (g, ops.cast(tangents[i], g.dtype)) for i, g in zip(wanted, gxs) if g is not None and g.node.creator_node
        ]
        if not pairs:
            return ()
        ends, along = zip(*pairs)
        moved = dict(zip(seeds, backprop.grad(ends, list(seeds.values()), along, enable_double_backprop=True)))
        return [moved.get(i) for i in range(function.num_outputs)]
