"""Chainer's old-style functions: ``backward`` takes and returns arrays, so their gradients have no gradient."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import force_backprop_mode, no_backprop_mode
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.core.tape.node import VariableNode
from dbrdist.core.tape.variable import Operand, Variable

if TYPE_CHECKING:
    from traceback import StackSummary

    from dbrdist.core.tape.type_check import TypeInfoTuple

__all__ = ["Function", "FunctionAdapter", "force_backprop_mode", "no_backprop_mode"]


class FunctionAdapter(FunctionNode):
    """The node of an old-style :class:`Function` in the graph.

    Args:
        function: the function whose ``forward`` and ``backward`` are called.

    Example:
        >>> class Twice(dbrdist.Function):
        ...     def forward(self, xs):
        ...         return (2 * xs[0],)
        >>> Twice()(np.array([1.0])).array
        array([2.])
    """

    def __init__(self, function: Function) -> None:
        self._function = function

    @property
    def function(self) -> Function:
        """The old-style function."""
        return self._function

    as_called = function

    @property
    def label(self) -> str:
        return self.function.label

    def check_type_forward(self, in_types: TypeInfoTuple) -> None:
        self.function.check_type_forward(in_types)

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs(tuple(range(len(xs))))  # unless the function says otherwise
        self._num_inputs = len(xs)
        return self.function.forward(xs)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._on_variables:
            return self._gradients(wanted, gys)
        arrays = tuple([None if g is None else g.array for g in gys])
        gxs = self._gradients(wanted, arrays)
        there = tuple([gx for gx in gxs if gx is not None])
        sources = [x for x in (*gys, *self.get_retained_inputs()) if x is not None]
        results = iter(_OldStyleGradient(self.label, there).apply(tuple(sources)) if there else ())
        return tuple([None if gx is None else next(results) for gx in gxs])

    def _gradients(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Array | None, ...]:
        """What the function's own backward gives, of arrays."""
        xs: list[Array | None] = [None] * self._num_inputs
        for i, a in zip(self._keep_inputs or (), self._kept_xs or ()):
            xs[i] = a
        gxs = self.function.backward(tuple(xs), self._with_those_set(gys) if as_chainer[0] else gys)
        if not isinstance(gxs, (tuple, list)):
            raise TypeError(
                f"{self.label}.backward: expected a tuple with a gradient (or None) for each input, got "
                f"{type(gxs).__name__}; write `return gx,`"
            )
        if len(gxs) != self._num_inputs:
            raise ValueError(
                f"{self.label}.backward: expected {self._num_inputs} gradients, one for each input, got {len(gxs)}"
            )
        for i in wanted if as_chainer[0] else ():
            if gxs[i] is not None and gxs[i].dtype != self.inputs[i].dtype:
                raise TypeError(
                    f"{self.label}.backward: expected a gradient of type {self.inputs[i].dtype} for input {i}, got "
                    f"{gxs[i].dtype}"
                )
        return tuple([gxs[i] for i in wanted])

    def _with_those_set(self, gys: tuple[Array, ...]) -> tuple[Any, ...]:
        """The gradients of the outputs; where backward brought none, what the program set, as in Chainer."""
        nodes = [output() for output in self.function.outputs]
        if len(nodes) != len(gys):
            return gys
        return tuple([node.gradient if gy is None and node is not None else gy for gy, node in zip(gys, nodes)])


class _OldStyleGradient(FunctionNode):
    """The gradient of a :class:`Function` as a node, which cannot be differentiated any further."""

    def __init__(self, source: str, gxs: tuple[Array, ...]) -> None:
        self.source = source
        self.gxs = gxs

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return self.gxs

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        raise RuntimeError(
            f"{self.source} is a chainer.Function of the old style, which has no gradient of second order; write it "
            "as a FunctionNode, whose backward computes with Variables"
        )


class Function:
    """An old-style function: override ``forward`` and ``backward``, or their ``_cpu`` and ``_gpu`` forms.

    Calling it applies it to Variables or arrays and returns a Variable, or a tuple of them. All inputs are kept for
    ``backward`` unless ``retain_inputs`` names those that it needs; the others are then None there.

    Example:
        >>> class Twice(dbrdist.Function):
        ...     def forward(self, xs):
        ...         return (2 * xs[0],)
        ...     def backward(self, xs, gys):
        ...         return (2 * gys[0],)
        >>> Twice()(np.array([1.0])).array
        array([2.])
    """

    # A function holds its node until the call, when the graph takes it over: a reference back would be a cycle.
    _held: FunctionAdapter | None = None
    _called: weakref.ref[FunctionAdapter] | None = None
    _outputs: tuple[weakref.ref[VariableNode], ...] = ()

    def __call__(self, *inputs: Operand) -> Variable | tuple[Variable, ...]:
        node = FunctionAdapter(self) if self._held is None else self._held
        self._called, self._held = weakref.ref(node), None
        outputs = node.apply(inputs)
        self._outputs = tuple([weakref.ref(y.node) for y in outputs])
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def node(self) -> FunctionAdapter:
        """The node of the last call, where the graph still has it; else that of the next one."""
        called = None if self._called is None else self._called()
        if called is not None:
            return called
        if self._held is None:
            self._held = FunctionAdapter(self)
        return self._held

    def apply(self, inputs: tuple[Operand, ...]) -> tuple[Variable, ...]:
        """As a call, always with a tuple as the result.

        Args:
            inputs: arrays or Variables.
        """
        outputs = self(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @property
    def label(self) -> str:
        """The name shown in messages and graphs."""
        return type(self).__name__

    @property
    def inputs(self) -> tuple[VariableNode, ...]:
        """The nodes of the inputs."""
        return self.node.inputs

    @property
    def outputs(self) -> tuple[weakref.ref[VariableNode], ...]:
        """Weak references to the nodes of the last call's outputs."""
        return self._outputs

    @property
    def rank(self) -> int:
        """The depth in the graph."""
        return self.node.rank

    @property
    def stack(self) -> StackSummary | None:
        """Where the last call was, as `traceback.extract_stack` gives it; None without debug mode."""
        return self.node.stack

    @property
    def output_data(self) -> tuple[Array | None, ...]:
        """The retained outputs; None for the others."""
        return self.node.output_data

    def check_type_forward(self, in_types: TypeInfoTuple) -> None:
        """Check types and shapes before forward; see :mod:`dbrdist.utils.type_check`.

        Args:
            in_types: the type and shape of each input, for :func:`dbrdist.utils.type_check.expect`.
        """

    def forward(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """The outputs for the input arrays.

        Args:
            inputs: the input arrays, all on one device.
        """
        return self.forward_cpu(inputs) if get_array_module(*inputs).__name__ == "numpy" else self.forward_gpu(inputs)

    def forward_cpu(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """``forward`` for NumPy arrays.

        Args:
            inputs: as for ``forward``.
        """
        raise NotImplementedError(f"{self.label} defines neither forward(inputs) nor forward_cpu(inputs)")

    def forward_gpu(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """``forward`` for CuPy arrays.

        Args:
            inputs: as for ``forward``.
        """
        raise NotImplementedError(f"{self.label} defines neither forward(inputs) nor forward_gpu(inputs)")

    def backward(self, inputs: tuple[Array | None, ...], grad_outputs: tuple[Array, ...]) -> tuple[Any, ...]:
        """The gradient of each input, as arrays; None where there is none.

        Args:
            inputs: the arrays that ``forward`` took; None for those that were not retained.
            grad_outputs: the gradient of each output, or None for outputs that do not count.
        """
        given = [a for a in (*inputs, *grad_outputs) if a is not None]
        on_host = get_array_module(*given).__name__ == "numpy"
        return self.backward_cpu(inputs, grad_outputs) if on_host else self.backward_gpu(inputs, grad_outputs)

    def backward_cpu(
        self, inputs: tuple[Array | None, ...], grad_outputs: tuple[Array, ...]
    ) -> tuple[Array | None, ...]:
        """``backward`` for NumPy arrays.

        Args:
            inputs, grad_outputs: as for ``backward``.
        """
        return tuple(None for _ in inputs)

    def backward_gpu(
        self, inputs: tuple[Array | None, ...], grad_outputs: tuple[Array, ...]
    ) -> tuple[Array | None, ...]:
        """``backward`` for CuPy arrays.

        Args:
            inputs, grad_outputs: as for ``backward``.
        """
        return tuple(None for _ in inputs)

    def retain_inputs(self, indexes: tuple[int, ...]) -> None:
        """Keep only the inputs ``indexes`` (a tuple of integers) for ``backward``; all are kept by default."""
        self.node.retain_inputs(indexes)

    def retain_outputs(self, indexes: tuple[int, ...], retain_after_backward: bool = False) -> None:
        """Keep these outputs; ``output_data`` has them.

        Args:
            indexes: which outputs, as a tuple of integers; none by default.
            retain_after_backward: accepted for Chainer's programs; has no effect.
        """
        self.node.retain_outputs(indexes)

    @property
    def local_function_hooks(self) -> dict[str, FunctionHook]:
        """The hooks of this function only."""
        return self.node.local_function_hooks

    def add_hook(self, hook: FunctionHook, name: str | None = None) -> None:
        """Add a hook to this function only.

        Args:
            hook: a FunctionHook.
            name: its name; None takes that of the hook. A name in use is a KeyError.
        """
        self.node.add_hook(hook, name)

    def delete_hook(self, name: str) -> None:
        """Remove the hook called ``name`` from this function."""
        self.node.delete_hook(name)

    def unchain(self) -> None:
        """Cut the function out of the graph."""
        self.node.unchain()
