"""Line charts as SVG, drawn without a library: axes with round numbers, a grid, a legend."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 40
COLOURS = ("#1f6fb4", "#d1541b", "#2a8f4a", "#8a4fbf", "#b0812a", "#c2356f", "#4a4a4a", "#1aa0a8")


class Series(NamedTuple):
    """One line: a name for the legend, its points in rising x, a colour, and whether it is dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A tick's number, short."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def chart(title: str, x_name: str, series: Sequence[Series]) -> str:
    """An SVG element; lines without points are left out of it."""
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs, ys = ([p[axis] for s in series for p in s.points] for axis in (0, 1))
    x0, x1 = min(xs), max(xs)
    y0, y1 = _room(min(ys), max(ys))
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<text x="{_LEFT}" y="18" class="title">{html.escape(title)}</text>',
    ]
    for y in ticks(y0, y1):
        _, at = place(x0, y)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(_tick(_LEFT - 6, at + 4, "end", label(y)))
    for x in ticks(x0, x1, 7):
        at, _ = place(x, y0)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" class="tick" text-anchor="middle">{label(x)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" class="tick" text-anchor="end">{html.escape(x_name)}</text>'
    )
    parts += [_line(s, [place(*p) for p in s.points]) for s in series]
    parts += _legend(series)
    return "".join([*parts, "</svg>"])


def _tick(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="tick" text-anchor="{anchor}">{html.escape(words)}</text>'


def _room(low: float, high: float) -> tuple[float, float]:
    """The range of an axis: a little more than the values."""
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    margin = 0.04 * (high - low)
    return (0.0 if 0 <= low < margin * 8 else low - margin), high + margin


def _line(series: Series, points: Sequence[tuple[float, float]]) -> str:
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"/>'
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="line" stroke="{series.colour}"{dash}/>'


def _legend(series: Sequence[Series]) -> list[str]:
    """Names at the right of the title, the last one outermost."""
    if len(series) == 1 and not series[0].name:
        return []
    parts, at = [], float(WIDTH - _RIGHT)
    for s in reversed(series):
        at -= 6.4 * len(s.name)
        parts.append(f'<text x="{at:.1f}" y="18" class="tick">{html.escape(s.name)}</text>')
        dash = ' stroke-dasharray="5 4"' if s.dashed else ""
        parts.append(f'<path d="M{at - 24:.1f} 14h18" class="line" stroke="{s.colour}"{dash}/>')
        at -= 34
    return parts
