"""The live view on a terminal: a few lines below the output, drawn at a fixed rate."""

from __future__ import annotations

import os
import shutil
import time
import unicodedata
from collections.abc import Mapping

from ..judgement.ranks import Rank

_MOST_RANKS = 32
_OTHER_LINES = 4  # title, names of columns, "and 5 more", and the line of output above
_COLUMNS = ("rank", "host", "state", "step", "items/s", "beat", "fields", "last line")


def table(ranks: dict[int, Rank], seconds: float, width: int | None = None, height: int | None = None) -> list[str]:
    """The lines of the view: progress, throughput, the other fields of their heartbeats, their last line."""
    terminal = shutil.get_terminal_size()
    width = width or terminal.columns
    most = max(1, min(_MOST_RANKS, (height or terminal.lines) - _OTHER_LINES))
    now = time.monotonic()
    rows = [_COLUMNS, *(_row(ranks[number], now) for number in sorted(ranks)[:most])]
    widths = [max(columns(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    fixed = sum(widths[:6]) + 2 * 7
    widths[6] = min(widths[6], max(6, (width - fixed) // 3))
    widths[7] = max(9, width - fixed - widths[6] - 1)
    more = [f"and {len(ranks) - most} more"] if len(ranks) > most else []
    lines = [
        f"--- {len(ranks)} rank{'' if len(ranks) == 1 else 's'}, {seconds:.0f} s",
        *(_line(row, widths) for row in rows),
        *more,
    ]
    return [_cut(line, width - 1, "") for line in lines][: (height or terminal.lines) - 1]


def is_able(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal moves its cursor when told to."""
    return environment.get("TERM", "") not in ("", "dumb", "unknown")


def columns(text: str) -> int:
    """How wide a terminal shows a text: wide letters take two columns, accents of their own none."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _cut(text: str, width: int, mark: str) -> str:
    """At most so many columns of a text; a cut one ends with the mark."""
    if columns(text) <= width:
        return text
    room, kept = width - len(mark), []
    for letter in text:
        room -= _columns_of(letter)
        if room < 0:
            break
        kept.append(letter)
    return "".join(kept) + mark


def _row(rank: Rank, now: float) -> tuple[str, ...]:
    total, speed = rank.fields.get("total"), rank.fields.get("items_per_second")
    told = (f"{k}={_short(v)}" for k, v in rank.fields.items() if k not in ("total", "items_per_second"))
    return (
        str(rank.rank),
        rank.host,
        rank.activity(now).partition(",")[0],
        "" if rank.step < 0 else f"{rank.step}/{total}" if total else str(rank.step),
        f"{speed:.1f}" if isinstance(speed, (int, float)) else "",
        f"{now - rank.beat_at:.1f} s" if rank.beat_at is not None else "",
        _plain(" ".join(told)),
        _plain(rank.last_line()),
    )


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cut = [_cut(text, w, "~") for text, w in zip(row, widths)]
    return "  ".join(text + " " * (w - columns(text)) for text, w in zip(cut, widths)).rstrip()


def _plain(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
