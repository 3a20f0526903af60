"""Memory against time: a part of a network whose values are computed again for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dbrdist.core.array import random
from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config, using_config
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.differentiate import Argument
from dbrdist.core.tape.function_node import FunctionNode, capturing
from dbrdist.core.tape.repeats import Assignments, repeating
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import warn


class Forget(FunctionNode):
    """y = func(x) as one function: backward runs ``func`` again, with a graph, and asks that for the gradients

    Its inputs are the arguments and, after them, what ``func`` uses besides: parameters, Variables of its surroundings.
    Its outputs are those of ``func`` and, after them, the Variables that ``func`` leaves in links, such as the states
    of recurrent ones.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.switches = {name: getattr(config, name) for name in ("train", "dtype")}
        self.random_state = random.get_state()

    def called(self, *xs: Variable) -> tuple[Variable, ...]:
        """What forward will return, and the inputs that it has to be given."""
        self.kept: list[Any] = []  # what is computed once, of each call within func
        self.assigned = Assignments()
        with capturing() as found, repeating(None, (self.kept,), (self.assigned,)):
            ys = self.func(*(Variable(x.array, requires_grad=False) for x in xs))
        self.is_one = not isinstance(ys, (tuple, list))
        outputs = list(_checked(ys))
        self.num_returned = len(outputs)
        self.states = self.assigned.variables()
        outputs += self.states
        self.values = tuple(y.array for y in outputs)
        self.samples = [_sample(y) for y in self.values]
        found += [y for y in outputs if y.requires_grad]  # of the surroundings, handed on as they are
        by_node: dict[int, list[Variable]] = {}
        for v in {id(v): v for v in found}.values():
            by_node.setdefault(id(v.node), []).append(v)
        self.captured = list(by_node.values())  # the Variables of one node together
        return (*xs, *(vs[0] for vs in self.captured))

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs(tuple(range(len(xs))))
        ys, self.values = self.values, ()
        return ys

    def connect(self, ys: tuple[Variable, ...]) -> None:
        """Let the Variables that ``func`` left in links stand for the outputs of this function."""
        for state, y in zip(self.states, ys[self.num_returned :]):
            if not state.requires_grad:
                state.node = y.node
        self.states = []

    def unchain(self) -> None:
        """Release what the repeated call would need, too: it has the states before, which know their own functions."""
        super().unchain()
        for name in ("func", "assigned", "captured", "kept", "samples"):
            self.__dict__.pop(name, None)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array | None, ...]:
        higher = self._on_variables
        inputs = [self.stand_in(i, x) for i, x in enumerate(self.retained_inputs())]
        ys = self.again(inputs)
        pairs = [(y, g if higher else Variable(np.asarray(g) if np.isscalar(g) else g, requires_grad=False))
                 for y, g in zip(ys, gys) if g is not None and y.requires_grad]  # fmt: skip
        if not pairs:
            return (None,) * len(wanted)
        ends, seeds = zip(*pairs)
        gxs = grad(ends, [inputs[i] for i in wanted], seeds, enable_double_backprop=higher)
        return tuple(gxs) if higher else tuple([None if g is None else g.array for g in gxs])

    def stand_in(self, i: int, x: Any) -> Variable:
        """An input as the repeated call sees it: gradients end there, or continue to the input in a higher order."""
        if not self._on_variables:
            return Variable(x, requires_grad=self.inputs[i].requires_grad)
        with using_config("enable_backprop", True):
            return Argument().apply((x,))[0]  # type: ignore[no-any-return]

    def again(self, inputs: list[Variable]) -> list[Variable]:
        """The outputs with their graph: the same random numbers, and nothing that counts calls counts this one."""
        state = random.get_state()
        num = len(inputs) - len(self.captured)
        try:
            random.set_state(self.random_state)
            own = {id(vs[0].node): stand_in for vs, stand_in in zip(self.captured, inputs[num:])}
            with (
                self.assigned.undone(), _exchanged(self.captured, inputs[num:]),
                _switched({**self.switches, **_REPEATED}), repeating(self.kept),
            ):  # fmt: skip
                ys = self.func(*inputs[:num])
                outputs = [*([ys] if self.is_one else ys), *self.assigned.variables()]
                own |= {id(stand_in.node): stand_in for stand_in in inputs[num:]}
                self.compare(outputs)
                return [own.get(id(y.node), y) for y in outputs]
        finally:
            random.set_state(state)

    def compare(self, ys: list[Any]) -> None:
        """Warn where the repeated call gives other values, whose gradients are not those of the first call."""
        for before, y in zip(self.samples, ys):
            now = _sample(y.array)
            if before is not None and now is not None and not _are_close(before, now):
                warn(
                    "forget: func gave other values when it was called again for backward, so that its gradients are "
                    "wrong: it must not draw from numpy.random or random, depend on earlier calls, or use what changes "
                    "in between, such as a loop's variable (write lambda x, i=i: ...); dbrdist.functions and "
                    "dbrdist.random repeat their numbers"
                )
                return


_SAMPLED = 32  # elements of each output that are compared


def _sample(y: Any) -> Any:
    """Some elements of an array on the host, with the roundings that are allowed them."""
    if type(y) is not np.ndarray or y.dtype.kind not in "fV" or not y.size:  # V: bfloat16
        return None
    return y.flat[:: -(-y.size // _SAMPLED)].astype(np.float64), (1e-1, 3e-2) if y.dtype.kind == "V" else (1e-2, 1e-3)


def _are_close(before: Any, now: Any) -> bool:
    """Up to roundings: another thread count may add in another order."""
    (before, (relative, absolute)), (now, _) = before, now
    if before.shape == now.shape and (before == now).all():  # nearly always, at a tenth of the cost of the comparison
        return True
    finite = before[np.isfinite(before)]
    size = float(abs(finite).max()) if finite.size else 0.0
    return before.shape == now.shape and np.allclose(before, now, rtol=relative, atol=absolute * size, equal_nan=True)


_REPEATED = {"enable_backprop": True, "in_recomputing": True}


@contextmanager
def _switched(values: dict[str, Any]) -> Iterator[None]:
    """Configuration entries of this thread, within the block."""
    if not values:
        yield
        return
    (name, value), *rest = values.items()
    with using_config(name, value), _switched(dict(rest)):
        yield


@contextmanager
def _exchanged(captured: list[list[Variable]], stand_ins: list[Variable]) -> Iterator[None]:
    """Within the block the captured Variables have the nodes of their stand-ins, where their gradients end."""
    nodes = [vs[0].node for vs in captured]
    try:
        for vs, stand_in in zip(captured, stand_ins):
            for v in vs:
                v.node = stand_in.node
        yield
    finally:
        for vs, stand_in, node in zip(captured, stand_ins, nodes):
            node.is_handed_out |= stand_in.node.is_handed_out
            for v in vs:
                v.node = node


def _checked(ys: Any) -> tuple[Variable, ...]:
    """The outputs of the user's function; Chainer's error (RuntimeError) where they are no Variables."""
    if isinstance(ys, Variable):
        return (ys,)
    if not isinstance(ys, (tuple, list)):
        raise RuntimeError(f"forget: a tuple of Variables or a Variable are expected, but {type(ys)} is returned.")
    for n, y in enumerate(ys, 1):
        if not isinstance(y, Variable):
            raise RuntimeError(f"forget: {_ordinal(n)} element of a returned tuple is not Variable, but is {type(y)}")
    return tuple(ys)


def _ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..."""
    suffix = "th" if 10 < n % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def forget(func: Callable[..., Any], *xs: Operand) -> Variable | tuple[Variable, ...]:
    """func(*xs), without keeping intermediate results: backward runs ``func`` again (Chen et al. 2016).

    Args:
        func: takes as many Variables as there are ``xs``; returns a Variable or a tuple of them.
        xs: arrays or Variables.

    Between forward and backward only the inputs and outputs of ``func`` stay in memory, at the cost of a second forward
    pass through it. ``func`` must compute the same both times: dbrdist's random numbers repeat, recurrent links and
    others that keep a state begin with that of the first call, and links that count or average what they see do so
    once, since ``config.in_recomputing`` is then set. Where the values differ all the same, as with numpy.random, it
    warns. Parameters and other Variables that ``func`` uses get their gradients, through states of earlier calls too,
    and derivatives of any order work.

    Example:
        >>> F.forget(lambda x: F.exp(F.sin(x)), np.zeros(1)).array
        array([1.])
    """
    if not callable(func):
        raise TypeError(f"forget: func must be callable, got {type(func).__name__}")
    variables = tuple(as_variable(x) for x in xs)
    function = Forget(func)
    ys = function.apply(function.called(*variables))
    function.connect(ys)
    ys = ys[: function.num_returned]
    is_one = function.is_one or (as_chainer[0] and len(ys) == 1)
    return ys[0] if is_one else ys
