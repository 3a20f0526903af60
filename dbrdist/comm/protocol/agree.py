"""Verdicts that all ranks reach together: the same error everywhere, or none.

A rank that raises alone leaves the others waiting in their next collective. Where a check can fail on one rank only,
the ranks first tell each other whether it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dbrdist.comm.protocol.gate import digest

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.parameter import Parameter

T = TypeVar("T")


def raise_together(comm: CommunicatorBase, error: Exception | None) -> None:
    """Return if no rank has an error; otherwise raise the error of the lowest such rank, on every rank.

    The type is kept where it can be made from a text, else it is CommunicatorError. The text names the ranks. On a rank
    that failed itself, its own error is the cause.
    """
    with comm.gate.call("agree") as call:
        call.agree((), error)


@contextmanager
def together(comm: CommunicatorBase) -> Iterator[None]:
    """Whatever fails inside the block on any rank is raised after it on every rank.

    The block must not communicate over ``comm``: a rank that failed in it no longer would.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        error = e
    raise_together(comm, error)


def on_root(comm: CommunicatorBase, function: Callable[[], T], root: int = 0) -> T:
    """What ``function`` returns on ``root``, on every rank; if it raises there, it raises everywhere."""
    result: T | None = None
    with together(comm):
        if comm.rank == root:
            result = function()
    shared: T = comm.bcast_obj(result, root=root)
    return shared


def same_everywhere(comm: CommunicatorBase, text: str, what: str) -> None:
    """Raise CommunicatorError on every rank unless all have the same ``text``; it says who has what.

    A text of lines, each with a line break at its end, is compared line by line.
    """
    with comm.gate.call("agree") as call:
        call.agree([digest(text)], num_same=1, what=what, detail=text)


def are_equal(comm: CommunicatorBase, number: int) -> bool:
    """Whether all ranks have the same number. Collective."""
    numbers = comm.gate.allgather_rows(np.array([number], np.int64))
    return bool((numbers == number).all())


def check_params(comm: CommunicatorBase, named: Sequence[tuple[str, Parameter]]) -> None:
    """Make sure that every rank has the same parameters: names, shapes, types, in the same order.

    Raises:
        CommunicatorError: on every rank, listing for each rank that differs from rank 0 where it does first.
    """
    same_everywhere(comm, as_lines(describe_params(named)), "the same parameters")


def describe_params(named: Sequence[tuple[str, Parameter]]) -> list[str]:
    """One line for each parameter: name, shape and type, or that it waits for its first input."""
    return [
        f"{name} {tuple(p.shape)} {p.dtype.name}" if p.shape is not None else f"{name} (uninitialised)"
        for name, p in named
    ]


def as_lines(lines: Sequence[str]) -> str:
    """One text of several lines."""
    return "".join(f"{line}\n" for line in lines)
