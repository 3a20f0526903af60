"""Memory against time: a part of a network whose values are computed again for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dbrdist.core import random
from dbrdist.core.backend import Array
from dbrdist.core.backprop import grad
from dbrdist.core.config import config, using_config
from dbrdist.core.differentiate import Argument
from dbrdist.core.graph import FunctionNode, capturing
from dbrdist.core.variable import Variable, as_variable


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
        with capturing() as found:
            ys = self.func(*(Variable(x.array, requires_grad=False) for x in xs))
        self.is_one = not isinstance(ys, (tuple, list))
        self.values = tuple(_checked(y).array for y in ([ys] if self.is_one else ys))
        self.captured = list({id(v.node): v for v in found}.values())
        return (*xs, *self.captured)

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
            with _exchanged(self.captured, inputs[num:]), _switched({**self.switches, **_REPEATED}):
                ys = self.func(*inputs[:num])
        finally:
            random.set_state(state)
        return [ys] if self.is_one else list(ys)


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
def _exchanged(captured: list[Variable], stand_ins: list[Variable]) -> Iterator[None]:
    """Within the block the captured Variables have the nodes of their stand-ins, where their gradients end."""
    nodes = [v.node for v in captured]
    try:
        for v, stand_in in zip(captured, stand_ins):
            v.node = stand_in.node
        yield
    finally:
        for v, node in zip(captured, nodes):
            v.node = node


def _checked(y: Any) -> Variable:
    if not isinstance(y, Variable):
        raise TypeError(f"forget: expected func to return a Variable or several, got {type(y).__name__}")
    return y


def forget(func: Callable[..., Any], *xs: Any) -> Any:
    """func(*xs), without keeping intermediate results: backward runs ``func`` again (Chen et al. 2016).

    Args:
        func: takes as many Variables as there are ``xs``; returns a Variable or a tuple of them.
        xs: arrays or Variables.

    Between forward and backward only the inputs and outputs of ``func`` stay in memory, at the cost of a second forward
    pass through it. ``func`` must compute the same both times: random numbers repeat, and links that count or
    average what they see do so once, since ``config.in_recomputing`` is then set. Parameters and other Variables that
    ``func`` uses get their gradients, and derivatives of any order work.
    """
    variables = tuple(as_variable(x) for x in xs)
    function = Forget(func)
    ys = function.apply(function.called(*variables))
    return ys[0] if function.is_one else ys
