"""The live view on a terminal: a few lines below the output, drawn at a fixed rate."""

from __future__ import annotations

import shutil
import time

from .ranks import Rank

_MOST_RANKS = 32
_COLUMNS = ("rank", "host", "state", "step", "items/s", "beat", "fields", "last line")


def table(ranks: dict[int, Rank], seconds: float, width: int | None = None) -> list[str]:
    """The lines of the view: progress, throughput, the other fields of their heartbeats, their last line."""
    width = width or shutil.get_terminal_size().columns
    now = time.monotonic()
    rows = [_COLUMNS, *(_row(ranks[number], now) for number in sorted(ranks)[:_MOST_RANKS])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    fixed = sum(widths[:6]) + 2 * 7
    widths[6] = min(widths[6], max(6, (width - fixed) // 3))
    widths[7] = max(9, width - fixed - widths[6] - 1)
    more = [f"and {len(ranks) - _MOST_RANKS} more"] if len(ranks) > _MOST_RANKS else []
    lines = [f"--- {len(ranks)} ranks, {seconds:.0f} s", *(_line(row, widths) for row in rows), *more]
    return [line[: width - 1] for line in lines]


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
    cut = (text if len(text) <= w else text[: w - 1] + "~" for text, w in zip(row, widths))
    return "  ".join(text.ljust(w) for text, w in zip(cut, widths)).rstrip()


def _plain(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
