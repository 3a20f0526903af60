"""Hooks that change each element from that element alone: an update runs them within its own pass over memory."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dbrdist.core.array import declared
from dbrdist.core.array.backend import Array
from dbrdist.core.array.elementwise import kernels
from dbrdist.core.model.flat import Run
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.tape.variable import Variable
from dbrdist.core.update.hooks import is_said_of
from dbrdist.core.update.pieces import pieces

if TYPE_CHECKING:
    from typing import TypeGuard

    from dbrdist.core.array.types import DType
    from dbrdist.core.update.hooks import OptimizerHook
    from dbrdist.core.update.update_rule import UpdateRule

_FORMULAS = frozenset(("piece", "flat", "__call__"))
_PIECE = frozenset(("piece",))
Spans = list[tuple[int, int]]  # the first and last + 1 element of stretches, in order


class ElementwiseHook:
    """A hook that changes each element of gradients or parameters by a formula of that element.

    A subclass gives ``piece(p, g, *numbers)``, which changes 1-d stretches of parameters and gradients in place, and
    ``numbers(rule)``, what the formula takes besides, once per update and run of flat memory. Hooks of this kind that
    come last before the update run within its pass over memory, so that a gradient is read once for all of them. Other
    hooks, and those whose ``flat`` or ``__call__`` a subclass replaces, make a pass each.

    Args:
        params: the parameters that the hook is for; None for all of the optimizer.

    Raises:
        TypeError: ``params`` is a link or a parameter, or holds something else than parameters.
    """

    works_on_shards = True
    call_for_each_param = True
    keeps_zero: bool = False
    timing = "pre"
    loop: ClassVar[str | None] = None  # the compiled loop over p and g that does what piece does, with the same bits

    params: frozenset[Parameter] | None = None  # hooks that Chainer pickled have none

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind: type = cls
        for name, value in (("keeps_zero", False), ("loop", None)):
            if not is_said_of(kind, name, _PIECE):  # a new formula has neither the promise of the old one nor its loop
                setattr(cls, name, value)

    def __init__(self, params: Iterable[Parameter] | None = None) -> None:
        self.params = None if params is None else _parameters(type(self).__name__, params)

    def numbers(self, rule: UpdateRule) -> tuple[float, ...]:
        """What the formula takes besides parameters and gradients, for parameters with this ``rule``."""
        return ()

    def piece(self, p: Array, g: Array, *numbers: float) -> None:
        """Change 1-d stretches ``p`` or ``g`` in place, each element by itself, given the ``numbers`` of the rule."""
        raise NotImplementedError(f"{type(self).__name__} does not define piece(p, g, *numbers)")

    def __call__(self, rule: UpdateRule, param: Parameter) -> None:
        if self.params is not None and param not in self.params:
            return
        if param.array is not None and param.grad is not None:
            self.piece(param.array, param.grad, *self.numbers(rule))

    def flat(self, run: Run) -> None:
        """The same for a whole ``run`` of parameters in flat memory."""
        rule, data, grad = run.params[0].update_rule, run.data, run.grad
        numbers: tuple[Any, ...] = self.numbers(rule)
        if type(data) is not np.ndarray and (block := declared.current()) is not None:
            numbers = self._declared(block, rule, data.dtype, numbers)
        has_loop = self.loop is not None and "piece" not in vars(self) and _are_plain(numbers)
        if self.params is None and has_loop and isinstance(data, np.ndarray):
            update = kernels.get("update")
            if update is not None and update(self.loop, (data, grad), numbers):
                return
        for where in _stretches(run, self.params):
            self.piece(data[where], grad[where], *numbers)

    def _declared(
        self, block: declared.DeclaredBlock, rule: UpdateRule, dtype: DType, numbers: tuple[float, ...]
    ) -> tuple[Array, ...]:
        """The numbers in a captured step: those of each replay, since they may follow the learning rate."""
        types = [getattr(number, "dtype", dtype) for number in numbers]  # NumPy's numbers have their own
        values = [functools.partial(self._number, rule, k) for k in range(len(numbers))]
        return tuple([block.number(value).as_type(t) for value, t in zip(values, types)])

    def _number(self, rule: UpdateRule, k: int) -> float:
        return self.numbers(rule)[k]


def _parameters(hook: str, params: Iterable[Parameter]) -> frozenset[Parameter]:
    """These parameters; anything else would be left out in silence, and iterating over one gives its rows."""
    given = [] if isinstance(params, (Link, Variable, str)) else list(params)
    wrong = [p for p in given if not isinstance(p, Parameter)]
    if wrong or isinstance(params, (Link, Variable, str)):
        what = type([*wrong, params][0]).__name__
        raise TypeError(f"{hook}: params: expected an iterable of parameters, such as link.params(), got {what}")
    return frozenset(given)


class HookOfRun:
    """An elementwise hook with its numbers for one run, during one update."""

    __slots__ = ("hook", "numbers", "spans")

    def __init__(self, hook: ElementwiseHook, numbers: tuple[float, ...], spans: Spans | None) -> None:
        self.hook = hook
        self.numbers = numbers
        self.spans = spans  # the elements that the hook is for; None is all

    def change_all(self, p: Array, g: Array) -> None:
        """Apply the hook to all of its elements."""
        for where in self.spans or ():
            self.hook.piece(p[slice(*where)], g[slice(*where)], *self.numbers)
        if self.spans is None:
            self.hook.piece(p, g, *self.numbers)

    def change(self, p: Array, g: Array, start: int, stop: int) -> None:
        """Apply the hook to the elements from ``start`` to ``stop``."""
        spans = self.spans
        if spans is None:
            self.hook.piece(p[start:stop], g[start:stop], *self.numbers)
            return
        k = bisect_right(spans, start, key=lambda span: span[1])  # the first that reaches beyond start
        while k < len(spans) and spans[k][0] < stop:
            where = slice(max(spans[k][0], start), min(spans[k][1], stop))
            self.hook.piece(p[where], g[where], *self.numbers)
            k += 1

    def loop(self) -> tuple[str, tuple[float, ...], Spans | None] | None:
        """The compiled loop that does the same, by its name, with its numbers and elements; None if there is none."""
        name = self.hook.loop
        return (name, self.numbers, self.spans) if name is not None and _are_plain(self.numbers) else None


def last_elementwise(hooks: Iterable[OptimizerHook]) -> list[ElementwiseHook]:
    """The elementwise ones at the end of hooks that are called in this order."""
    found: list[ElementwiseHook] = []
    for hook in hooks:
        if is_elementwise(hook):
            found.append(hook)
        else:
            found.clear()
    return found


def is_elementwise(hook: Any) -> TypeGuard[ElementwiseHook]:
    """Whether a hook can run within the pass of an update: nothing but its ``piece`` says what it does."""
    cls: Any = type(hook)
    return _is_elementwise(cls) and hook.call_for_each_param and _FORMULAS.isdisjoint(hook.__dict__)


@functools.cache
def _is_elementwise(cls: type) -> bool:
    """Whether ``piece`` is the newest formula of a class of hooks."""
    if not issubclass(cls, ElementwiseHook):
        return False
    return next(own for c in cls.__mro__ if (own := _FORMULAS & c.__dict__.keys())) == {"piece"}


def spans_of(run: Run, params: Collection[Parameter]) -> Spans:
    """The elements of the parameters ``params`` in a run; neighbours without a gap between them are one stretch."""
    spans: Spans = []
    for p, where in run.layers():
        if p not in params or where.start >= where.stop:
            continue
        if spans and spans[-1][1] == where.start:
            spans[-1] = spans[-1][0], where.stop
        else:
            spans.append((where.start, where.stop))
    return spans


def _stretches(run: Run, params: Collection[Parameter] | None) -> Iterator[slice]:
    """The elements of a run that a hook is for, in pieces that stay in cache."""
    if params is None:
        yield from pieces(run.data)
        return
    for start, stop in spans_of(run, params):
        for piece in pieces(run.data[start:stop]):
            yield slice(start + piece.start, min(start + piece.stop, stop))


def _are_plain(numbers: tuple[float, ...]) -> bool:
    """Whether NumPy takes them in the type of the arrays, as loops do: arrays and numbers of NumPy have their own."""
    return all(type(number) in (int, float) for number in numbers)
