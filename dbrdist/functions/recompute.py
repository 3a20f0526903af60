"""Memory against time: a part of a network whose values are computed again for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dbrdist.core.array import random
from dbrdist.core.array.backend import Array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config, using_config
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.differentiate import Argument
from dbrdist.core.tape.function_node import FunctionNode, capturing, repeating
from dbrdist.core.tape.variable import Variable, as_variable


class Forget(FunctionNode):
    """y = func(x) as one function: backward runs ``func`` again, with a graph, and asks that for the gradients

    Its inputs are the arguments and, after them, what ``func`` uses besides: parameters, Variables of its surroundings.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.switches = {name: getattr(config, name) for name in ("train", "dtype")}
        self.random_state = random.get_state()

    def called(self, *xs: Variable) -> tuple[Any, ...]:
        """What forward will return, and the inputs that it has to be given."""
        self.kept: list[Any] = []  # what is computed once, of each call within func
        with capturing() as found, repeating(None, self.kept):
            ys = self.func(*(Variable(x.array, requires_grad=False) for x in xs))
        self.is_one = not isinstance(ys, (tuple, list))
        outputs = list(_checked(ys))
        self.values = tuple(y.array for y in outputs)
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

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        higher = self._on_variables
        inputs = [self.stand_in(i, x) for i, x in enumerate(self.retained_inputs())]
        ys = self.again(inputs)
        pairs = [(y, as_variable(g)) for y, g in zip(ys, gys) if g is not None and y.requires_grad]
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

    def again(self, inputs: list[Variable]) -> list[Any]:
        """The outputs with their graph: the same random numbers, and nothing that counts calls counts this one."""
        state = random.get_state()
        num = len(inputs) - len(self.captured)
        try:
            random.set_state(self.random_state)
            own = {id(vs[0].node): stand_in for vs, stand_in in zip(self.captured, inputs[num:])}
            with (
                _exchanged(self.captured, inputs[num:]), _switched({**self.switches, **_REPEATED}),
                repeating(self.kept),
            ):  # fmt: skip
                ys = self.func(*inputs[:num])
                own |= {id(stand_in.node): stand_in for stand_in in inputs[num:]}
                return [own.get(id(y.node), y) for y in ([ys] if self.is_one else ys)]
        finally:
            random.set_state(state)


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
        for vs, node in zip(captured, nodes):
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


def forget(func: Callable[..., Any], *xs: Any) -> Any:
    """func(*xs), without keeping intermediate results: backward runs ``func`` again (Chen et al. 2016).

    Args:
        func: takes as many Variables as there are ``xs``; returns a Variable or a tuple of them.
        xs: arrays or Variables.

    Between forward and backward only the inputs and outputs of ``func`` stay in memory, at the cost of a second forward
    pass through it. ``func`` must compute the same both times: random numbers repeat, and links that count or
    average what they see do so once, since ``config.in_recomputing`` is then set. Parameters and other Variables that
    ``func`` uses get their gradients, and derivatives of any order work.

    Example:
        >>> F.forget(lambda x: F.exp(F.sin(x)), np.zeros(1)).array
        array([1.])
    """
    if not callable(func):
        raise TypeError(f"forget: func must be callable, got {type(func).__name__}")
    variables = tuple(as_variable(x) for x in xs)
    function = Forget(func)
    ys = function.apply(function.called(*variables))
    is_one = function.is_one or (as_chainer[0] and len(ys) == 1)
    return ys[0] if is_one else ys
