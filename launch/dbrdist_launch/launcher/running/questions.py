"""What people ask of a running job: its stacks, by SIGQUIT or `dbrdist-launch stacks`, and what its ranks do."""

from __future__ import annotations

import time
from collections.abc import Callable

from ... import limits
from ...channel import Channel
from ...messages import Answer, AskStacks
from ..judgement.ranks import Rank
from ..streams.view import table

_NONE = "no stacks: not Python, or Python without hooks (--no-inject, python -I) and without py-spy"


class Questions:
    """Asks the ranks, and answers when they have, or when their time is over."""

    def __init__(self, ranks: dict[int, Rank], say: Callable[[str], None], stop: Callable[[], None]) -> None:
        self.ranks, self.say, self.stop = ranks, say, stop
        self.curious: list[Channel] = []  # who waits for stacks
        self.shown_at: float | None = None

    def hear(self, channel: Channel, what: str, seconds: float) -> None:
        """`dbrdist-launch ps`, `stacks` and `stop` ask through the control socket."""
        if what == "stacks":
            self.curious.append(channel)
            self.show_stacks()
        elif what == "stop":
            _answer(channel, "asked to save and stop")
            self.stop()
        else:
            _answer(channel, "\n".join(table(self.ranks, seconds, 200, 1000)))

    def ask_for_stacks(self) -> None:
        """They come as messages of the ranks."""
        for rank in self.ranks.values():
            if rank.running:
                rank.stacks = None
                rank.channel.send(AskStacks())

    def have_stacks(self) -> bool:
        return all(rank.stacks is not None for rank in self.ranks.values() if rank.running)

    def show_stacks(self) -> None:
        """Print them, or send them to those who asked, once they are there."""
        self.shown_at = time.monotonic() + limits.STACKS_SECONDS
        self.ask_for_stacks()

    def look(self, now: float) -> None:
        if self.shown_at is None or (now < self.shown_at and not self.have_stacks()):
            return
        self.shown_at = None
        parts = []
        for number in sorted(self.ranks):
            rank = self.ranks[number]
            text = (rank.stacks or "").rstrip() or _NONE
            parts.append(f"rank {number} on {rank.host}, {rank.activity(now)}:\n{text}")
            rank.stacks = None
        if not self.curious:
            self.say("\n".join(parts))
        while self.curious:
            _answer(self.curious.pop(), "\n".join(parts))


def _answer(channel: Channel, text: str) -> None:
    channel.socket.setblocking(True)
    channel.socket.settimeout(1.0)
    channel.send(Answer(text.encode("utf-8", "replace")[-limits.MESSAGE_BYTES :]))
    channel.close()
