"""Verdicts that all ranks reach together: the same error everywhere, or none.

A rank that raises alone leaves the others waiting in their next collective. Where a check can fail on one rank only,
the ranks first tell each other whether it did.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from dbrdist.errors import CommunicatorError

T = TypeVar("T")
_MAX_LISTED = 8


class Ranks(Protocol):
    """What this file needs of a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather_obj(self, obj: Any) -> list[Any]: ...

    def _allgather_rows(self, row: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]: ...


def raise_together(comm: Ranks, error: Exception | None) -> None:
    """Return if no rank has an error; otherwise raise the error of the lowest such rank, on every rank.

    The type is kept where it can be made from a text, else it is CommunicatorError. The text names the ranks. On a rank
    that failed itself, its own error is the cause.
    """
    if not comm._allgather_rows(np.array([error is not None], np.int64)).any():
        return
    _raise_one_of(comm, error)


def _raise_one_of(comm: Ranks, error: Exception | None) -> None:
    found = comm.allgather_obj(None if error is None else (_portable_type(error), str(error)))
    failed = [rank for rank, entry in enumerate(found) if entry is not None]
    kind, text = found[failed[0]]
    if len(failed) < comm.size:
        text = f"{text} (on {name_ranks(failed)} of {comm.size})"
    raise _rebuild(kind, text) from error


def _portable_type(error: Exception) -> type[Exception]:
    """The error's class where every rank can import it and make it from a text alone."""
    kind = type(error)
    home = kind.__module__.partition(".")[0]
    if home in ("builtins", "dbrdist") and "<locals>" not in kind.__qualname__:
        return kind
    return CommunicatorError


def _rebuild(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        return CommunicatorError(f"{kind.__name__}: {text}")


@contextmanager
def together(comm: Ranks) -> Iterator[None]:
    """Whatever fails inside the block on any rank is raised after it on every rank.

    The block must not communicate over ``comm``: a rank that failed in it no longer would.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as e:
        error = e
    raise_together(comm, error)


def on_root(comm: Any, function: Callable[[], T], root: int = 0) -> T:
    """What ``function`` returns on ``root``, on every rank; if it raises there, it raises everywhere."""
    result: T | None = None
    with together(comm):
        if comm.rank == root:
            result = function()
    shared: T = comm.bcast_obj(result, root=root)
    return shared


def same_everywhere(comm: Ranks, text: str, expectation: str, error: Exception | None = None) -> None:
    """Raise CommunicatorError on every rank unless all have the same ``text``; it says who has what.

    An ``error`` that a rank already has takes precedence and is raised on every rank.
    """
    rows = comm._allgather_rows(np.array([error is not None, _digest(text)], np.int64))
    if rows[:, 0].any():
        _raise_one_of(comm, error)
    if (rows == rows[0]).all():
        return
    raise CommunicatorError(f"{expectation}, got {_who_has_what(comm.allgather_obj(text))}")


def _digest(text: str) -> int:
    raw = text.encode()
    return zlib.crc32(raw) << 31 ^ zlib.adler32(raw)


def _who_has_what(texts: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in list(groups.items())[:_MAX_LISTED])


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 2, 3``; a long list is cut."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_MAX_LISTED]))}{more}"


def check_model(comm: Ranks, model: Any) -> None:
    """Make sure that every rank has the same parameters: names, shapes, types, in the same order.

    Raises:
        CommunicatorError: on every rank, listing for each rank that differs from rank 0 where it does first.
    """
    lines = describe_params(model)
    text = "\n".join(lines)
    rows = comm._allgather_rows(np.array([_digest(text)], np.int64))
    if (rows == rows[0]).all():
        return
    everyone = comm.allgather_obj(lines)
    differences = [
        f"rank {rank}: {_first_difference(everyone[0], theirs)}"
        for rank, theirs in enumerate(everyone)
        if theirs != everyone[0]
    ]
    more = f"; and {len(differences) - _MAX_LISTED} ranks more" if len(differences) > _MAX_LISTED else ""
    raise CommunicatorError(
        "expected the same parameters on every rank, but these differ from rank 0: "
        + "; ".join(differences[:_MAX_LISTED])
        + more
    )


def describe_params(model: Any) -> list[str]:
    """One line for each parameter of a link: name, shape and type, or that it waits for its first input."""
    return [
        f"{name} {tuple(param.shape)} {param.dtype.name}" if param.array is not None else f"{name} (uninitialised)"
        for name, param in model.namedparams()
    ]


def _first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    for a, b in zip(expected, found):
        if a != b:
            return f"{b} instead of {a}"
    if len(expected) > len(found):
        return f"no {expected[len(found)]}"
    return f"{found[len(expected)]} besides"
