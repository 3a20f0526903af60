"""A model whose components are on different ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import dbrdist.functions as F
from dbrdist.comm.functions import pseudo_connect, send
from dbrdist.comm.functions.graph import deepen, place
from dbrdist.comm.functions.pair import recv_anchored
from dbrdist.comm.links.wiring import Component, ComponentSlot, Give, Instruction, RanksOrAll, RunComponent, Take, plan
from dbrdist.comm.protocol.arguments import whole_number
from dbrdist.core.array.backend import is_array
from dbrdist.core.array.types import Array, PerAxis
from dbrdist.core.model.chain import ChainList
from dbrdist.core.model.link import Link
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.node import assignments
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.tape.variable import Operand

    Outputs: TypeAlias = Variable | tuple[Variable, ...]  # of a component


class MultiNodeChainList(ChainList):
    """A model divided over ranks: each rank adds its own components, and says where their inputs come from and go to.

    ::

        class Front(MultiNodeChainList):  # on rank 0
            def __init__(self, comm):
                super().__init__(comm)
                self.add_link(L.Linear(784, 100), rank_in=None, rank_out=1)

        class Back(MultiNodeChainList):  # on rank 1
            def __init__(self, comm):
                super().__init__(comm)
                self.add_link(L.Linear(100, 10), rank_in=0, rank_out=None)

    All ranks of ``comm`` call their models together. Components with ``rank_in=None`` get the inputs of the model; the
    output of the one with ``rank_out=None`` is that of the model. On a rank that has none, the model returns a delegate
    variable, from which backward goes. At the first call the ranks compare their components: that they fit together,
    and do not wait for each other in a ring; if they do, every rank raises the same ValueError.

    Args:
        comm: the ranks.

    Example:
        >>> model = dbrdist.comm.MultiNodeChainList(dbrdist.comm.create_communicator("single"))
        >>> model.add_link(L.Linear(4, 3))
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self.comm = comm
        self.num_micro_batches = 1
        self._ends: tuple[tuple[RanksOrAll, RanksOrAll], ...] = ()
        self._plan: tuple[int, list[Instruction]] | None = None

    def add_link(self, link: Link, rank_in: PerAxis | None = None, rank_out: int | Sequence[int] | None = None) -> None:
        """Add a component.

        Args:
            link: called with the inputs: those of the model, or what it receives, in the order of ``rank_in``.
            rank_in: the rank or ranks from which its inputs come (this one too); None for the inputs of the model.
            rank_out: the rank or ranks to which its output goes (this one too); None for the output of the model.
        """
        ends = _ranks(rank_in, "rank_in"), _ranks(rank_out, "rank_out")
        if ends[1] is None and any(out is None for _, out in self._ends):
            what = "a rank, since another component gives the model's output already"
            raise expected("MultiNodeChainList.add_link", "rank_out", what, None)
        if not isinstance(link, Link):
            raise TypeError(f"MultiNodeChainList.add_link expected a link, got {type(link).__name__}")
        super().add_link(link)
        self._ends = (*self._ends, ends)
        self._plan = None

    def insert(self, index: int, link: Link) -> None:
        """Refused: it would not say between which ranks.

        Args:
            index, link: not used; call ``add_link(link, rank_in, rank_out)``.
        """
        raise TypeError("MultiNodeChainList has no insert: components run in the order in which add_link adds them")

    def pipeline(self, num_micro_batches: int) -> MultiNodeChainList:
        """Divide batches into micro-batches, so that ranks work on different ones at the same time. Returns the model.

        The same number on every rank. Inputs are cut along their first axis, nearly evenly, and outputs are joined
        again: values and gradients are those of the whole batch, except that batch normalization sees each
        micro-batch alone. All of them are kept until backward (Huang et al. 2019, GPipe).

        Args:
            num_micro_batches: into how many parts a batch is divided, at least 1 and the same on every rank.
        """
        number = whole_number(num_micro_batches, "MultiNodeChainList.pipeline: num_micro_batches")
        if number < 1:
            raise expected("MultiNodeChainList.pipeline", "num_micro_batches", "1 or more", number)
        self.num_micro_batches, self._plan = number, None
        return self

    def forward(self, *inputs: Array) -> Outputs | None:
        """The output of the model, or a delegate variable where it is on another rank.

        Args:
            inputs: what the first link on this rank takes, where it takes no input from another rank.
        """
        return _Pass(self, inputs).run(self._agreed_plan())

    def _agreed_plan(self) -> list[Instruction]:
        """What this rank does; the same error on all ranks where their components do not fit."""
        if self._plan is None or self._plan[0] != len(self._ends):
            names = [type(link).__name__ for link in self]
            mine = [Component(name, *ends) for name, ends in zip(names, self._ends)]
            found = self.comm.allgather_obj((self.num_micro_batches, mine))
            numbers = [number for number, _ in found]
            if len(set(numbers)) > 1:
                raise expected("MultiNodeChainList.pipeline", "num_micro_batches", "the same on every rank", numbers)
            self._plan = len(mine), plan([components for _, components in found], numbers[0])[self.comm.rank]
        return self._plan[1]

    @property
    def ends(self) -> Sequence[tuple[RanksOrAll, RanksOrAll]]:
        """``rank_in`` and ``rank_out`` of each component."""
        return self._ends


class _Pass:
    """One forward pass on this rank."""

    def __init__(self, model: MultiNodeChainList, inputs: tuple[Array, ...]) -> None:
        self.model = model
        self.parts = _cut(inputs, model.num_micro_batches)
        self.arrived: dict[tuple[ComponentSlot, int], Any] = {}
        self.made: dict[tuple[int, int], Outputs] = {}
        self.outputs: list[Outputs] = []
        self.delegates: list[Variable] = []

    def run(self, actions: Sequence[Instruction]) -> Outputs | None:
        for action in actions:
            if isinstance(action, RunComponent):
                self.run_component(*action)
            elif isinstance(action, Give):
                self.give(action)
            else:
                self.take(action)
        if not self.outputs:
            return _tied(self.delegates[:-1], self.delegates[-1]) if self.delegates else None
        return _tied(self.delegates, _joined(self.outputs))

    def run_component(self, number: int, part: int) -> None:
        model = self.model
        rank_in, rank_out = model.ends[number]
        if rank_in is None:
            xs = self.parts[part]
        else:
            xs = tuple(self.arrived.pop((ComponentSlot(model.comm.rank, number, i), part)) for i in range(len(rank_in)))
        y: Outputs = model[number](*xs) if model.num_micro_batches == 1 else _called_in_order(model[number], xs)
        if rank_out is None:
            self.outputs.append(y)
        else:
            self.made[number, part] = y

    def give(self, action: Give) -> None:
        y = self.made[action.component, action.part]
        if action.rank == self.model.comm.rank:
            self.arrived[action.to, action.part] = y
        else:
            self.delegates.append(send(y, self.model.comm, rank=action.rank))

    def take(self, action: Take) -> None:
        found, anchor = recv_anchored(self.model.comm, action.rank)
        self.arrived[action.to, action.part] = found
        self.delegates.append(anchor)


def _called_in_order(link: Link, xs: Sequence[Operand]) -> Outputs:
    """The link's output; backward comes through it after what follows it, and before what went before it."""
    assignments[0] += 1  # so that the functions of this call can be told from older ones
    since, least = assignments[0], place()
    y: Outputs = link(*xs)
    deepen(y if isinstance(y, tuple) else (y,), least, since)
    return y


def _ranks(value: int | Sequence[int] | None, what: str) -> RanksOrAll:
    if value is None:
        return None
    each = value if isinstance(value, (list, tuple)) else [value]
    if not each:
        raise expected("MultiNodeChainList.add_link", what, "None, a rank, or a list of ranks", value)
    return tuple(whole_number(rank, f"MultiNodeChainList.add_link: {what}") for rank in each)


def _tied(delegates: Sequence[Variable], y: Outputs) -> Outputs:
    """The output, from which backward reaches all that was sent."""
    for delegate in delegates:
        y = pseudo_connect(delegate, *y) if isinstance(y, tuple) else pseudo_connect(delegate, y)
    return y


def _cut(inputs: tuple[Operand, ...], num_parts: int) -> list[tuple[Operand, ...]]:
    """The inputs of each micro-batch."""
    if num_parts == 1 or not inputs:
        return [inputs] * num_parts
    has_length = [bool(x.shape) if hasattr(x, "shape") else hasattr(x, "__len__") for x in inputs]
    lengths = [len(x) if has else -1 for x, has in zip(inputs, has_length)]
    if not all(has_length) or len(set(lengths)) > 1:
        found = ", ".join("none" if n < 0 else str(n) for n in lengths)
        what = "arrays, or lists, of one length, to be cut into micro-batches"
        raise expected("MultiNodeChainList", "inputs", what, f"lengths {found}")
    n = lengths[0]
    bounds = [n * k // num_parts for k in range(num_parts + 1)]
    return [tuple(x[begin:end] for x in inputs) for begin, end in itertools.pairwise(bounds)]


def _joined(ys: list[Any]) -> Any:
    """The outputs of the micro-batches as one."""
    if len(ys) == 1:
        return ys[0]
    if isinstance(ys[0], tuple):
        return tuple(_joined(list(each)) for each in zip(*ys))
    if not all((isinstance(y, Variable) or is_array(y)) and len(y.shape) for y in ys):
        what = "an output with an axis of examples, to be joined over micro-batches"
        raise expected("MultiNodeChainList", "output", what, ys[0], "compute the loss of the joined output instead")
    return F.concat(ys, axis=0)
