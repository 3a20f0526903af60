"""The call of a function: check the operands, run forward, and record the call for backward.

``call.pxd`` has the C types of what is written here as Python.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array.backend import Array, is_array, is_floating
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config
from dbrdist.core.array.current_device import On, current_number, elsewhere, gpu_arrays, is_of_gpu, on
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.gpu.mixed_devices import MIXED, are_here, common_device, mixed_devices
from dbrdist.core.tape import type_check
from dbrdist.core.tape.checks import Operands
from dbrdist.core.tape.fusion import settle_for, waiting
from dbrdist.core.tape.node import Record, Value, VariableNode, assignments, make_node
from dbrdist.core.tape.variable import Variable
from dbrdist.core.usage.mistakes import warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dbrdist.core.array.types import Number
    from dbrdist.core.tape.function_node import FunctionNode
    from dbrdist.core.tape.variable import Operand

_ndarray = np.ndarray
_FIRST = tuple(tuple(range(n)) for n in range(8))  # the indexes of the first n inputs
_COUNTS = {first: len(first) for first in _FIRST}
_OTHERS = 1 << 30  # for indexes that are not those of the first inputs: more than there are inputs
_ON_ONE_DEVICE = ("dbrdist.core.", "dbrdist.functions.")  # where functions take operands of one device only
_new = Value.__new__
_array_of, _node_of = attrgetter("_array"), attrgetter("node")
_takes_gradient, _rank_of = attrgetter("requires_grad"), attrgetter("rank")
_float32 = np.dtype(np.float32)

hooked: list[bool] = [False]  # whether any function got hooks of its own: until then nobody looks for them


class Call(Record):
    """The three steps of a call; ``FunctionNode`` has what a function is besides."""

    is_arithmetic: ClassVar[bool] = False  # in a program of Chainer, arrays take the type of Variables only here
    operands: Operands | None = None
    _checks_types: bool = False
    # Which input is weights that forward reads by a copy on a device (core.model.weight_copies), if there is one in
    # ``copy``. Forward and the rule give no input to anybody, nor views of one.
    reads_copy_of: ClassVar[int | None] = None
    written: ClassVar[tuple[Any, ...]] = ()  # that forward
    copy: Any = None

    def apply(self: Any, inputs: tuple[Operand, ...]) -> tuple[Variable, ...]:
        """Run forward on ``inputs``, Variables or arrays, record it if a gradient may be needed; returns Variables."""
        if waiting:
            settle_for(self)
        if self.inputs and not as_chainer[0]:
            raise RuntimeError(f"{self.label}: a FunctionNode records one call; make a new one for each apply")
        xs: list[Array] = []
        nodes: list[VariableNode] = []
        rank = num_constant = 0
        operands, has_arrays = self.operands, False
        a: Array | None = None
        for x in inputs:
            if isinstance(x, Value):
                value = x
                a = value._array
                if a is None:
                    raise self._missing(len(xs))
                node = value.node
                if node.requires_grad:
                    if node.rank > rank:
                        rank = node.rank
                else:
                    num_constant += 1
                    if operands is not None and a.dtype is not _float32:
                        operands.check(len(xs), a)
            else:
                num_constant += 1
                if operands is not None:
                    if type(x) is not _ndarray or x.dtype is not _float32:
                        operands.check(len(xs), x)
                    has_arrays = True
                a, node = x, constant_node(x)
            xs.append(a)
            nodes.append(node)
        if has_arrays and len(xs) > 1 and (self.is_arithmetic or not as_chainer[0]):
            for node in nodes:
                if node.dtype is not _float32:
                    _follow_variables(inputs, xs, nodes)
                    break
        data = tuple(xs)
        if self._checks_types and config.type_check:
            self._check_types(data)
        switches = config.__dict__  # one look at this thread's values for all of them
        if type(a) is not _ndarray or type(data[0]) is not _ndarray:  # an array of a GPU, perhaps of another one
            ys = self._forward_there(data, inputs)
        elif hooked[0] or switches["_function_hooks"] or switches["debug"]:
            ys = self._forward_with_hooks(data)
        else:
            ys = self.forward(data)
        if type(ys) is not tuple:
            ys = as_outputs(self, ys)
        if num_constant == len(xs) or not switches["enable_backprop"]:
            if num_constant < len(xs) and switches["_captured"] is not None:
                switches["_captured"].extend([x for x in inputs if isinstance(x, Value) and x.node.requires_grad])
            return _unrecorded(self, rank, data, ys, nodes) if as_chainer[0] else tuple([_leaf(self, y) for y in ys])
        self.inputs = tuple(nodes)
        if not num_constant and len(xs) < 8:
            self.wanted = _FIRST[len(xs)]
        else:
            self.wanted = tuple([i for i, node in enumerate(nodes) if node.requires_grad])
        return _recorded(self, rank, data, ys)

    def apply_here(self: Any, inputs: tuple[Variable, ...], data: tuple[Array, ...]) -> tuple[Variable, ...]:
        """:meth:`apply`, sooner, of a new function that reads its weights by a copy; no hook or check looks on.

        Args:
            inputs: up to 7 Variables.
            data: their arrays, on the current GPU.
        """
        nodes = tuple(map(_node_of, inputs))
        if waiting or not all(map(_takes_gradient, nodes)) or type(self).forward is not self.written[0]:
            return self.apply(inputs)
        self.copy = inputs[self.reads_copy_of].copy_for_reading()
        ys = self.forward(data)
        self.inputs, self.wanted = nodes, _FIRST[len(nodes)]
        return _recorded(self, max(map(_rank_of, nodes)), data, ys)

    def _forward_there(self: Any, data: tuple[Array, ...], inputs: tuple[Operand, ...]) -> tuple[Array, ...]:
        """Forward on the device of the operands."""
        number = None if are_here(data, self.__dict__.values()) else self._device_of(data)
        switches = config.__dict__
        is_looked_at = hooked[0] or switches["_function_hooks"] or switches["debug"]
        forward = self._forward_with_hooks if is_looked_at else self.forward
        copied = None if is_looked_at else self.reads_copy_of
        if copied is not None and (type(self).forward is not self.written[0] or "forward" in self.__dict__):
            copied = None  # a function of the program is in its place, which may keep what it is shown
        if copied is None:
            for x in inputs:
                if isinstance(x, Value):
                    x.node.is_handed_out = True
        else:
            weights = inputs[copied]
            self.copy = weights.copy_for_reading() if isinstance(weights, Variable) else None
        if number is None:
            return forward(data)
        with On(number):
            return forward(data)

    def _device_of(self: Any, data: tuple[Array, ...]) -> int | None:
        """The number of the GPU of the operands; None where that is the current one, or where there is none."""
        others = () if gpu_arrays.issuperset(map(type, data)) else [a for a in data if not is_of_gpu(type(a))]
        if others and any(isinstance(a, np.ma.MaskedArray) for a in others):
            warn(
                f"{self.label} takes a masked array: some functions leave masked elements out and others compute with "
                "what is stored there; give a.filled(value), and leave examples out by their weights or labels"
            )
        if not type(self).__module__.startswith(_ON_ONE_DEVICE):
            return elsewhere(data)
        number = common_device(data, self.__dict__.values())
        if number == MIXED:
            raise mixed_devices(self, data)
        return None if number is not None and (number < 0 or number == current_number()) else number

    def _check_types(self: Any, data: tuple[Array, ...]) -> None:
        """A user's checks; their error begins with the function, as in Chainer."""
        try:
            self.check_type_forward(type_check.get_types(data, "in_types", accept_none=True))
        except type_check.InvalidType as e:
            e.within_function(self.label)
            raise

    def unchain(self) -> None:
        """Cut this function out of the graph and release what it retained; its outputs become leaves."""
        self.inputs = self.wanted = ()
        self._kept_xs = self._kept_ys = ()
        self._for_rule = None


def _recorded(call: FunctionNode, rank: int, xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Variable, ...]:
    """The outputs as Variables, after keeping what the rule needs."""
    call.rank = rank
    call.recorded_at = assignments[0]
    keep = call._keep_inputs
    if keep:
        n = _COUNTS.get(keep, _OTHERS)
        call._kept_xs = xs[:n] if n <= len(xs) else _of(call, "retain_inputs", keep, xs)
    keep = call._keep_outputs
    if len(ys) == 1:
        y = ys[0]
        if type(y) is _ndarray or type(y) in gpu_arrays:  # nearly always, so without the calls of _output
            call.num_outputs = 1
            if keep:
                call._kept_ys = ys if keep == _FIRST[1] else _of(call, "retain_outputs", keep, ys)
            node = VariableNode()
            node.creator_node = call
            node.index = 0
            node.rank = rank + 1
            node.shape = y.shape
            node.dtype = dtype = y.dtype
            node.requires_grad = dtype is _float32 or dtype.kind in "fcV"
            node.gradient = node.view = node.name = None
            node.assigned = 0
            node.is_handed_out = False
            value = _new(Variable)
            value._array = y
            value.node = node
            return (value,)
    call.num_outputs = len(ys)
    outputs = [_output(call, i, _as_array(call, y), rank + 1) for i, y in enumerate(ys)]
    if keep:
        call._kept_ys = _of(call, "retain_outputs", keep, [v._array for v in outputs])  # v.array settles what waits
    return tuple(outputs)


def _unrecorded(
    call: FunctionNode, rank: int, xs: tuple[Array, ...], ys: tuple[Array, ...], nodes: list[VariableNode]
) -> tuple[Variable, ...]:
    """The outputs of a call whose inputs take no gradient; in a program of Chainer they have a creator all the same."""
    if not config.enable_backprop:
        return tuple([_leaf(call, y) for y in ys])
    call.inputs, call.wanted = tuple(nodes), ()
    outputs = _recorded(call, rank, xs, ys)
    for y in outputs:
        y.node.requires_grad = False
    return outputs


def _of(call: FunctionNode, verb: str, keep: tuple[int, ...], values: Sequence[Array]) -> tuple[Array, ...]:
    try:
        return tuple([values[i] for i in keep])
    except (IndexError, TypeError):
        raise IndexError(f"{call.label}.{verb}: expected places from 0 to {len(values) - 1}, got {keep}") from None


def _output(call: FunctionNode, i: int, y: Array | None, rank: int) -> Variable:
    if y is None:
        return _nothing(call, i, rank)
    dtype = y.dtype
    return revive(make_node(call, i, rank, dtype.kind in "fcV", y.shape, dtype), y)


def _follow_variables(inputs: tuple[Operand, ...], xs: list[Array], nodes: list[VariableNode]) -> None:
    """An array beside floating Variables takes the type of the first, as in Chainer."""
    for x in inputs:
        if isinstance(x, Variable) and is_floating(x.node.dtype):
            dtype = x.node.dtype
            break
    else:
        return
    for i, x in enumerate(inputs):
        if not isinstance(x, Variable) and x.dtype != dtype and is_floating(x.dtype):
            with on(x):
                xs[i] = elementwise(lambda v: v.astype(dtype), x)
            nodes[i] = constant_node(xs[i])


def as_outputs(call: FunctionNode, ys: object) -> tuple[Array, ...]:
    """What forward returned, as a tuple of arrays."""
    if isinstance(ys, list):
        return tuple(ys)
    if isinstance(ys, np.generic):  # NumPy's reductions give scalars; the tuple is what is missing
        ys = np.asarray(ys)
    what = f"an array of shape {ys.shape}; write `return y,`" if is_array(ys) else type(ys).__name__
    raise TypeError(f"{call.label}: forward output must be a tuple of ndarrays, got {what}")


def _as_array(call: FunctionNode, y: Array | Number | None) -> Array | None:
    """One output of forward: an array, a pending one, or a scalar of a reduction."""
    if type(y) is _ndarray or is_array(y):
        return y
    if isinstance(y, (np.generic, int, float)):
        return np.asarray(y)
    if y is None and as_chainer[0]:
        return None
    raise TypeError(f"{call.label}: forward output must be a tuple of ndarrays, got {type(y).__name__} in it")


def revive(node: VariableNode, array: Array | None) -> Variable:
    """A Variable for an existing node: gradients reach whoever shares the node."""
    value = _new(Variable)
    value._array = array
    value.node = node
    return value


def variable(array: Array, requires_grad: bool) -> Variable:
    """A leaf."""
    return revive(make_node(None, 0, 0, requires_grad, array.shape, array.dtype), array)


def _leaf(call: FunctionNode, y: Array | Number | None) -> Variable:
    """A Variable without a history."""
    if type(y) is not _ndarray and not is_array(y):
        y = _as_array(call, y)
        if y is None:
            return _nothing(None, 0, 0)
    return variable(y, False)


def _nothing(call: FunctionNode | None, i: int, rank: int) -> Variable:
    """The Variable of an output that is None."""
    return revive(make_node(call, i, rank, False, (), None), None)


def constant_node(x: Array | Number | None) -> VariableNode:
    """The node of an array, a number or None among a function's inputs: it takes no gradient."""
    return make_node(None, 0, 0, False, getattr(x, "shape", ()), getattr(x, "dtype", None))
