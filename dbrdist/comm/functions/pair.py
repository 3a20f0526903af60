"""Messages between two ranks through which gradients flow: the gradient of a message is sent the other way.

A gradient says to which message it belongs. A rank whose loss does not depend on a message, and which has not tied it
to the loss (:func:`pseudo_connect`), is found by the next gradient between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.functions.graph import Communication, applied, no_elements, recorded
from dbrdist.core.array.backend import Array, is_floating
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import as_variable
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.comm.functions.graph import SentBack
    from dbrdist.core.tape.variable import Operand, Variable


class _Message(Communication):
    """A message of one or several arrays, or the gradient of one: then ``of`` is the number of that message."""

    def __init__(self, comm: CommunicatorBase, peer_rank: int, peer_tag: int, of: int = 0) -> None:
        super().__init__(comm)
        self.peer_rank, self.peer_tag, self.of = peer_rank, peer_tag, of
        self.count: int  # of this message among those between the two ranks with this tag, once it was sent

    def note(self, verb: str) -> None:
        gate = self.comm.gate
        self.count = gate.record.counted(gate.name, verb, gate.members[self.peer_rank], self.peer_tag)


class Send(_Message):
    """Sends the inputs; the output is a delegate variable."""

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        mark = (np.array([self.of], np.int64),) if self.of else ()
        data = (*mark, *xs)
        self.comm.send(data[0] if len(data) == 1 else data, self.peer_rank, self.peer_tag)
        self.note("send")
        return (no_elements(),)

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        """Despite its name it receives: the gradients of the inputs."""
        nodes = self.inputs[:-1]
        if not any(is_floating(node.dtype) for node in nodes):
            return [None] * len(nodes), None
        node = Recv(self.comm, self.peer_rank, self.peer_tag, self.count)
        found = iter(applied(node, (), gys[0] if self._on_variables else None))
        return [next(found) if is_floating(node.dtype) else None for node in nodes], None


class Recv(_Message):
    """Receives the outputs; there is no input but a delegate variable. Where it is anchored, a last output of no
    elements reaches it even where no loss depends on the others."""

    is_anchored = False

    def move(self, xs: tuple[Array, ...]) -> Sequence[Array]:
        found = self.comm.recv(self.peer_rank, self.peer_tag)
        self.note("recv")
        each = found if isinstance(found, tuple) else (found,)
        each = self._checked(each) if self.of else each
        return (*each, no_elements()) if self.is_anchored else each

    def _checked(self, each: tuple[Array, ...]) -> tuple[Array, ...]:
        """What belongs to the message of which this is the gradient."""
        number = int(each[0][0]) if each[0].shape == (1,) and each[0].dtype == np.int64 else 0
        if number != self.of:
            got = f"that of message {number}" if number else "another message"
            raise CommunicatorError(
                f"backward on rank {self.comm.rank}: expected from rank {self.peer_rank} with tag {self.peer_tag} the "
                f"gradient of message {self.of}, got {got}; both ranks must run backward through the same messages: "
                "use pseudo_connect to tie those that the loss does not depend on to the loss"
            )
        return each[1:]

    def send_back(self, gys: tuple[Array, ...]) -> SentBack:
        """The gradients of the outputs, to where these came from."""
        pairs = list(zip(self.filled(gys), self.given))[: -1 if self.is_anchored else None]
        grads = [g for g, (_, dtype) in pairs if is_floating(dtype)]
        if not grads:  # integers alone
            return (), None
        node = Send(self.comm, self.peer_rank, self.peer_tag, self.count)
        return (), applied(node, grads)[0]


def _see_that_it_is_another(name: str, communicator: CommunicatorBase, rank: int) -> None:
    if rank == communicator.rank:
        raise expected(name, "rank", f"another rank than this one, {rank}", rank, "the variable is here already")


def send(x: Operand | Sequence[Operand], communicator: CommunicatorBase, rank: int, tag: int = 0) -> Variable:
    """Send a Variable, or a tuple or list of them, to another rank, which calls :func:`recv`.

    Args:
        x: one or more Variables or arrays.
        communicator: the ranks.
        rank: the rank that receives.
        tag: a number that tells messages apart; both sides use the same.

    Returns:
        A delegate variable, of no elements: backward must go from it (``delegate.backward()``) or through it
        (:func:`pseudo_connect`), because the gradients of ``x`` are received there.

    Raises:
        ValueError: the rank is this one or outside of the communicator, or there is nothing to send.

    Example:
        >>> delegate = dbrdist.comm.functions.send(h, comm, rank=1)  # doctest: +SKIP
        >>> delegate.backward()  # doctest: +SKIP
    """
    _see_that_it_is_another("send", communicator, rank)
    xs = x if isinstance(x, (tuple, list)) else (x,)
    if not len(xs):
        raise expected("send", "x", "one or more Variables", "none")
    return recorded(Send(communicator, rank, tag), [as_variable(v) for v in xs])[0]


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """The Variable that ``rank`` sent with ``tag``, or the tuple of them.

    Args:
        communicator: the ranks.
        rank: who sends.
        delegate_variable: a Variable to which backward continues after the gradients were sent, such as what
            :func:`send` returned; it is used for its place in the graph only. A second-order gradient needs one.
        tag: the sender's.
        force_tuple: return a tuple for one Variable too.

    Example:
        >>> h = dbrdist.comm.functions.recv(comm, rank=0)  # doctest: +SKIP
    """
    _see_that_it_is_another("recv", communicator, rank)
    ys = recorded(Recv(communicator, rank, tag), (), delegate_variable)
    return ys[0] if len(ys) == 1 and not force_tuple else ys


def recv_anchored(communicator: CommunicatorBase, rank: int) -> tuple[Variable | tuple[Variable, ...], Variable]:
    """(what :func:`recv` returns, a delegate variable from which backward reaches it in any case)."""
    node = Recv(communicator, rank, 0)
    node.is_anchored = True
    *ys, anchor = recorded(node, ())
    return (ys[0] if len(ys) == 1 else tuple(ys)), anchor
