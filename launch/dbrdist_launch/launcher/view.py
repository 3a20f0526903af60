"""The live view on a terminal: one row per rank, drawn by rich; the lines of the ranks scroll above it."""

from __future__ import annotations

from .ranks import Rank


class View:
    """Draws what the ranks' beats say; `line` prints above the table."""

    def __init__(self) -> None:
        self.live = None

    def _start(self):  # type: ignore[no-untyped-def]
        """Import rich only now: the ranks are already starting. No thread of its own draws, since we fork."""
        from rich.console import Console
        from rich.live import Live

        if self.live is None:
            options = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
            self.live = Live(console=Console(highlight=False), **options)
            self.live.start()
        return self.live

    def line(self, text: str) -> None:
        """Print a line above the table, as it is."""
        from rich.text import Text

        self._start().console.print(Text(text.encode("utf-8", "replace").decode("utf-8")), soft_wrap=True)

    def update(self, ranks: dict[int, Rank], seconds: float) -> None:
        """Draw the table anew."""
        if ranks or self.live is not None:
            self._start().update(table(ranks, seconds), refresh=True)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


def table(ranks: dict[int, Rank], seconds: float):  # type: ignore[no-untyped-def]
    """The table of all ranks: progress, throughput, what else they tell, last line."""
    import time

    from rich.table import Table

    now = time.monotonic()
    drawn = Table(title=f"{len(ranks)} ranks, {seconds:.0f} s", expand=True, title_justify="left")
    for name in ("rank", "host", "state", "step", "items/s", "beat", "told", "last line"):
        drawn.add_column(name, no_wrap=True, overflow="ellipsis", ratio=4 if name == "last line" else None)
    for number in sorted(ranks)[:32]:
        rank = ranks[number]
        total = rank.fields.get("total")
        step = "" if rank.step < 0 else f"{rank.step}/{total}" if total else str(rank.step)
        speed = rank.fields.get("items_per_second")
        told = " ".join(f"{k}={_short(v)}" for k, v in rank.fields.items() if k not in ("total", "items_per_second"))
        beat = f"{now - rank.beat_at:.1f} s" if rank.beat_at is not None else ""
        speed_text = f"{speed:.1f}" if isinstance(speed, (int, float)) else ""
        state = rank.activity(now).partition(",")[0]
        drawn.add_row(str(number), rank.host, state, step, speed_text, beat, told, rank.last_line)
    return drawn


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def open_view(required: bool) -> View | None:
    """A view, or None where rich is not installed (an error where the user asked for it)."""
    import importlib.util

    if importlib.util.find_spec("rich") is not None:
        return View()
    if required:
        from ..errors import LaunchError

        raise LaunchError("--view needs rich: pip install rich")
    return None
