"""What travels to the writers of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SPAWNED = -1  # instead of a rank: processes that a program has started by MPI_Comm_spawn


@dataclass(eq=False, repr=False)
class Piece:
    """What a rank wrote at one time."""

    rank: int
    host: str
    stream: str  # out or err
    data: bytes
    urgent: bool = False  # its rank might soon have to wait
    left: int = 0  # places where it has not arrived yet


class Shown(NamedTuple):
    """The text that was made of a piece, for --tee."""

    text: bytes
    piece: Piece | None


class Folder(NamedTuple):
    """From here on the logs go into another folder."""

    path: str


class Echo(NamedTuple):
    """What was typed for rank 0: the terminal has shown it below the view."""

    data: bytes


Item = Piece | str | Shown | Folder | Echo
