"""Parameters that get their shape at their first input, in a step of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.gradients import model as models
from dbrdist.comm.protocol import agree
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dbrdist.core.array.types import Shape

    Announced: TypeAlias = tuple[str, Shape, str]  # a parameter's name, its shape and its type


class LateParameters:
    """A step in which the forward pass may initialise parameters, which take the leading rank's values.

    The lowest rank that has samples leads: it announces each parameter at its initialisation. Ranks with samples meet
    it there, in their own forward pass; a rank without samples listens and initialises the same.

    Args:
        comm: the ranks.
        late: names and parameters that wait for their first input, the same on every rank.
        leader: the rank that announces.
    """

    def __init__(self, comm: CommunicatorBase, late: list[tuple[str, Parameter]], leader: int) -> None:
        self._comm = comm
        self._late = late
        self._leader = leader

    def work(self, backward: Callable[[Callable[[], None]], None]) -> None:
        """On a rank with samples: call ``backward(after_forward)``."""
        for name, p in self._late:
            p.on_initialize = _Announce(self, name)
        try:
            backward(lambda: self.announce(None))
        finally:
            for name, p in self._late:
                if not p.is_initialized:
                    p.on_initialize = models.Broadcast(self._comm, name, 0)

    def listen(self) -> None:
        """On a rank without samples: initialise what the leader announces."""
        late = dict(self._late)
        while (announced := self._meet(None, is_listening=True)) is not None:
            name, shape, _ = announced
            p = late[name]
            p.on_initialize = None
            p.initialize(shape)
            p.array = self._comm.bcast(None, root=self._leader)

    def announce(self, mine: Announced | None) -> None:
        """Meet the other ranks at ``mine`` = (name, shape, type); None is the end of the forward pass."""
        self._meet(mine, is_listening=False)

    def take_values(self, p: Parameter) -> None:
        """Take the leader's."""
        p.array = self._comm.bcast(p.lend(), root=self._leader)

    def _meet(self, mine: Announced | None, is_listening: bool) -> Announced | None:
        theirs: Announced | None = self._comm.bcast_obj(mine, root=self._leader)
        with agree.together(self._comm):
            if not is_listening and theirs != mine:
                raise CommunicatorError(
                    "expected every rank to initialise the same parameters in the same order, but in the forward pass "
                    f"rank {self._leader} came to {_in_words(theirs)}, rank {self._comm.rank} to {_in_words(mine)}"
                )
        return theirs


class _Announce:
    """What a late parameter does at its initialisation within a step."""

    def __init__(self, step: LateParameters, name: str) -> None:
        self._step = step
        self._name = name

    def __call__(self, p: Parameter) -> None:
        p.on_initialize = None
        self._step.announce((self._name, p.shape, p.dtype.name))
        self._step.take_values(p)


def _in_words(announced: Announced | None) -> str:
    return "the end" if announced is None else f"{announced[0]} with shape {announced[1]} of {announced[2]}"
