"""What all differentiable communication shares: the order of backward, delegate variables, gradients that are missing.

A backward pass visits functions by their rank in the graph, which differs between ranks of the job where one computes
more than another. Communication is therefore given a rank above all communication before it (:func:`in_order`), so that
every backward pass goes through it in the reverse order of the calls, on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array, zeros_as
from dbrdist.core.tape.call import variable
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Variable, as_array, as_variable

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.array.types import DType, Shape
    from dbrdist.core.tape.variable import Operand

    # The gradients of the inputs of a communication, and its delegate variable, if it has one.
    SentBack: TypeAlias = tuple[Sequence[Operand | None], Operand | None]

_thread = threading.local()


class Communication(FunctionNode):
    """A function whose forward and backward communicate; all ranks apply it together.

    Its last input is a delegate variable: the user's, which makes backward continue to what it stands for, or an empty
    leaf, which makes backward come here on a rank that has no input of its own.
    """

    has_own_delegate = False
    number = 0  # of the call among all on the communicator
    given: tuple[tuple[Shape, DType], ...] = ()  # shape and type of each output

    def __init__(self, comm: CommunicatorBase) -> None:
        self.comm = comm

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        ys = tuple(self.move(xs[:-1]))
        self.given = tuple([(y.shape, y.dtype) for y in ys])
        return ys

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        """The outputs for this rank's inputs, delegate apart."""
        raise NotImplementedError

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Operand | None, ...]:
        num_inputs = len(self.inputs) - 1
        with going_back_through(self.comm, self.number):
            gxs, delegate = self.send_back(gys)
        return tuple([gxs[i] if i < num_inputs else self._of_delegate(delegate, gys) for i in wanted])

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        """(the gradients of the inputs, the delegate variable of this communication or None)."""
        raise NotImplementedError

    def _of_delegate(self, delegate: Operand | None, gys: tuple[Array, ...]) -> Any:
        """Zeros, which in a higher-order pass stand for the communication that went back."""
        if self.has_own_delegate:
            return None
        node = self.inputs[-1]
        zeros = zeros_as(as_array(next(g for g in gys if g is not None)), node.shape, node.dtype)
        return pseudo_connect(delegate, variable(zeros, True)) if isinstance(delegate, Variable) else zeros

    def filled(self, gys: tuple[Array, ...]) -> list[Array]:
        """The gradients of the outputs, with zeros for those on which no loss depends."""
        like = as_array(next(g for g in gys if g is not None))
        missing: list[Any] = [None if g is not None else zeros_as(like, *self.given[i]) for i, g in enumerate(gys)]
        if self._on_variables:
            missing = [None if z is None else variable(z, False) for z in missing]
        return [z if g is None else g for g, z in zip(gys, missing)]


@contextmanager
def going_back_through(comm: CommunicatorBase, number: int) -> Iterator[None]:
    """Ranks in it that go back through different calls raise an error, even where both use the same verb."""
    gate = comm.gate
    before, gate.backward_of = gate.backward_of, number
    try:
        yield
    finally:
        gate.backward_of = before


def number_of_call(comm: CommunicatorBase) -> int:
    """The number of a new collective call."""
    comm.gate.num_differentiable += 1
    return int(comm.gate.num_differentiable)


def applied(node: Communication, xs: Sequence[Array], delegate: Operand | None = None) -> tuple[Operand, ...]:
    """Apply the communication, in a graph where there is a Variable."""
    if delegate is None and not any(isinstance(x, Variable) for x in xs):
        return node.forward((*xs, no_elements()))
    return recorded(node, xs, delegate)


def recorded(node: Communication, xs: Sequence[Operand], delegate: Any = None) -> tuple[Variable, ...]:
    """Apply the communication, in a graph in any case."""
    if not getattr(delegate, "requires_grad", False):
        delegate, node.has_own_delegate = Variable(no_elements()), True
    ys = node.apply((*xs, delegate))
    in_order(node, ys)
    return ys


def counted(node: Communication, xs: Sequence[Variable], delegate: Variable | None = None) -> tuple[Variable, ...]:
    """A collective call of the user's."""
    ys = recorded(node, xs, delegate)
    node.number = number_of_call(node.comm)  # now that it has passed the gate, on every rank
    return ys


def in_order(node: FunctionNode, ys: Sequence[Variable]) -> None:
    """Make backward come to ``node`` before all communication that this thread has done so far."""
    if node.inputs:
        go_beyond(max(node.rank, place() + 1))
        node.rank = place()
        for y in ys:
            y.node.rank = node.rank + 1
            if y.size == 0:  # a delegate variable: backward may start from it
                y.node.gradient = y.array


def place() -> int:
    """The highest rank in the graph of this thread's communication so far."""
    return getattr(_thread, "place", 0)


def go_beyond(rank: int) -> None:
    """Give later communication a higher rank."""
    _thread.place = max(place(), rank)


def deepen(ys: Sequence[Operand], least: int, since: int) -> None:
    """Give all functions behind ``ys`` that were recorded ``since`` then a rank above ``least``, and later
    communication one above theirs: a backward pass does not begin with others before it has come through these."""
    functions = _recorded_since([y for y in ys if isinstance(y, Variable)], since)
    if functions and min(f.rank for f in functions) <= least:
        # As low as the order allows: what is added at each call would double the ranks from step to step.
        before = [node.living_creator() for f in functions for node in f.inputs]
        base = max([least, *(f.rank for f in before if f is not None and f not in functions)]) + 1
        places = {rank: base + i for i, rank in enumerate(sorted({f.rank for f in functions}))}
        for function in functions:
            function.rank = places[function.rank]
        for node in {node for f in functions for node in f.inputs} | {y.node for y in ys if isinstance(y, Variable)}:
            creator = node.living_creator()
            if creator in functions:
                node.rank = creator.rank + 1
    go_beyond(max((y.node.rank for y in ys if isinstance(y, Variable)), default=0))


def _recorded_since(ys: Sequence[Variable], since: int) -> set[FunctionNode]:
    stack = [y.node.living_creator() for y in ys]
    found: set[FunctionNode] = set()
    while stack:
        function = stack.pop()
        if function is not None and function not in found and function.recorded_at >= since:
            found.add(function)
            stack.extend(node.living_creator() for node in function.inputs)
    return found


def no_elements() -> Array:
    """The array of a delegate variable."""
    return np.empty(0, np.float32)


def as_variables(xs: Sequence[Operand]) -> list[Variable] | None:
    """Arrays, NumPy's scalars (the rows of a vector) and Variables as Variables; None if one of them is something else,
    or has no array yet."""
    try:
        found = [as_variable(np.asarray(x) if isinstance(x, np.generic) else x) for x in xs]
    except TypeError:
        return None
    return found if all(x.is_initialized and is_plain(x.array) for x in found) else None


def is_plain(x: Array) -> bool:
    """Whether it is an array."""
    return hasattr(x, "dtype") and hasattr(x, "shape")


class PseudoConnect(FunctionNode):
    """The actual variables as they are; backward continues to the delegate variable too, with a gradient of zero"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.delegate_shape, self.delegate_dtype = xs[0].shape, xs[0].dtype
        return tuple([x[...] for x in xs[1:]])

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Operand, ...]:
        return tuple([gys[i - 1] if i else self._zeros(gys) for i in wanted])

    def _zeros(self, gys: tuple[Array, ...]) -> Operand:
        like = as_array(next(g for g in gys if g is not None))
        zeros = zeros_as(like, self.delegate_shape, self.delegate_dtype)
        return variable(zeros, False) if self._on_variables else zeros


def pseudo_connect(delegate_variable: Variable, *actual_variables: Variable) -> Variable | tuple[Variable, ...]:
    """The actual variables unchanged, but tied to a delegate variable: backward through one of them reaches both.

    Args:
        delegate_variable: what :func:`send` or, except on the root, :func:`gather` returned, or any other Variable;
            None ties to nothing.
        actual_variables: arrays of a floating type; a Variable is returned for one, a tuple for several.

    Example:
        >>> joined = dbrdist.comm.functions.pseudo_connect(delegate, x)  # doctest: +SKIP
    """
    if not actual_variables:
        raise expected("pseudo_connect", "actual_variables", "one or more Variables after the delegate", "none")
    if delegate_variable is None:
        ys: tuple[Variable, ...] = tuple([as_variable(x) for x in actual_variables])
    else:
        ys = PseudoConnect().apply((delegate_variable, *actual_variables))
    for y in ys:
        if y.size == 0 and y.node.living_creator() is not None:
            y.node.gradient = y.array
    return ys[0] if len(ys) == 1 else ys
