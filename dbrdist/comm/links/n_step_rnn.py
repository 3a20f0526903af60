"""A recurrent link whose layers continue from, or on, another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.comm.functions import recv, send
from dbrdist.core.model.chain import Chain
from dbrdist.core.tape.checks import expected
from dbrdist.links import n_step_rnn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.variable import Operand

_KINDS = tuple(kind for name, kind in vars(n_step_rnn).items() if name.startswith("NStep") and isinstance(kind, type))


class _MultiNodeNStepRNN(Chain):
    """See :func:`create_multi_node_n_step_rnn`."""

    actual_rnn: Any

    def __init__(self, link: Link, communicator: CommunicatorBase, rank_in: Any, rank_out: Any) -> None:
        super().__init__(actual_rnn=link)
        self.communicator, self.rank_in, self.rank_out = communicator, rank_in, rank_out

    def forward(self, *inputs: Operand | Sequence[Operand] | None) -> tuple[Any, ...]:
        """``(hx, [cx,] xs)`` or ``(xs,)``; gives ``(hy, [cy,] ys, delegate_variable)``."""
        num_cells = self.actual_rnn.n_cells
        if len(inputs) not in (1, num_cells + 1):
            what = f"the sequences, or {num_cells} {'state' if num_cells == 1 else 'states'} and the sequences"
            raise expected("multi-node n-step RNN", "inputs", what, f"{len(inputs)} arguments")
        *states, xs = inputs
        if self.rank_in is None:
            states = states or [None] * num_cells
        else:
            states = self._received(states, num_cells)
        *states, ys = self.actual_rnn(*states, xs)
        delegate = None if self.rank_out is None else send(tuple(states), self.communicator, rank=self.rank_out)
        return (*states, ys, delegate)

    def _received(self, states: list[Any], num_cells: int) -> list[Any]:
        if any(s is not None for s in states):
            what = f"None for the states, which come from rank {self.rank_in}"
            raise expected("multi-node n-step RNN", "inputs", what, "an array")
        found = recv(self.communicator, rank=self.rank_in, force_tuple=True)
        if len(found) != num_cells:
            what = f"{num_cells} states from rank {self.rank_in} for {type(self.actual_rnn).__name__}"
            hint = "both ends need the same kind of link"
            raise expected("multi-node n-step RNN", "rank_in", what, len(found), hint)
        return list(found)


def create_multi_node_n_step_rnn(
    actual_link: Link, communicator: CommunicatorBase, rank_in: int | None = None, rank_out: int | None = None
) -> Link:
    """A recurrent link that starts from the last states of another rank's, or sends its own on.

    Called with sequences, or with states and sequences, it returns what ``actual_link`` returns (the last states, then
    the outputs) and a delegate variable, which is None where nothing is sent. Backward must go from the delegate
    variable or through it (:func:`dbrdist.comm.functions.pseudo_connect`).

    Args:
        actual_link: an n-step LSTM, GRU or plain recurrent link, in one direction or both.
        communicator: the ranks.
        rank_in: the rank whose last states are the first states here; None takes those that are passed, or zeros.
        rank_out: the rank that continues from the last states here; None sends them nowhere.

    Raises:
        ValueError: for any other link.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> rnn = dbrdist.comm.links.create_multi_node_n_step_rnn(L.NStepLSTM(1, 3, 4, 0.0), comm)
    """
    if not isinstance(actual_link, _KINDS):
        what = "an n-step recurrent link such as NStepLSTM"
        raise expected("create_multi_node_n_step_rnn", "actual_link", what, type(actual_link).__name__)
    return _MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)
