"""Line charts as SVG, drawn without a library: axes with round numbers, a grid, a legend."""

from __future__ import annotations

import colorsys
import html
import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 40
_LABEL = 9  # characters of a number beside an axis
_ROW, _KEY = 17, 24  # of a legend: the height of a row, and the width of the line beside a name
# Each is readable on a white page and on a dark one.
COLOURS = (
    *("#1f77c4", "#e0651a", "#2a9a4a", "#cf3b3b", "#8d5bd6", "#9a6a3a"),
    *("#d64fa5", "#7d7d7d", "#a0980f", "#12a3b4", "#5560c9", "#63a81c"),
)


def colour(number: int) -> str:
    """The colour of a line by its number; none comes twice in a chart that one can still read."""
    if number < len(COLOURS):
        return COLOURS[number]
    hue = number * 0.618034 % 1  # the golden angle: far from the ones before it
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, 0.35 + 0.1 * (number % 3), 0.6))


class Key(NamedTuple):
    """An entry of a legend: a name, a colour (None: that of the text), and whether its line is dashed."""

    name: str
    colour: str | None
    dashed: bool = False


class Series(NamedTuple):
    """One line: a name for the legend, its points in rising x, a colour, and whether it is dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def ticks(low: float, high: float, about: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten, which is at least `least`."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9)), least)
    first = math.ceil(low / step - 1e-9)
    return sorted({k * step for k in range(first, math.floor(high / step + 1e-9) + 1)})  # a step may be less than a bit


def label(value: float, power: int = 0, digits: int = 2) -> str:
    """A tick's number times ten to a power, short; `digits` behind the point of its mantissa."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3 or power:
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent) + power}"
    return f"{value:,.{digits + 2}f}".rstrip("0").rstrip(".")


def _labels(values: Sequence[float], power: int, room: int) -> tuple[list[str], str]:
    """The numbers of an axis, with as many digits as tell them apart, and what is to be added to them ('' for nothing).

    Where so many digits have no room, they are counted from the first number.
    """
    for digits in range(2, 17):
        words = [label(value, power, digits) for value in values]
        if len(set(words)) == len(words) and max(map(len, words)) <= room:
            return words, ""
    words = [label(value - values[0], power) for value in values]
    return words, label(values[0], power, 16)


_HUGE, _POWER = 1e290, 300  # beyond it, and below its inverse, differences would be infinite or 0


def _power(values: Sequence[float]) -> int:
    """The power of ten that the values of an axis are divided by, 0 for all but very large and very small ones."""
    most = max(map(abs, values))
    return _POWER if most > _HUGE else -_POWER if 0 < most < 1 / _HUGE else 0


def chart(title: str, x_name: str, series: Sequence[Series], keys: Sequence[Key] | None = None) -> str:
    """An SVG element; lines without points are left out of it.

    `keys` are the entries of the legend; None makes one of each line that has a name.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    if keys is None:
        keys = [Key(s.name, s.colour, s.dashed) for s in series if s.name]
    legend, rows = _legend(keys)
    top, height = _TOP + rows * _ROW, HEIGHT + rows * _ROW
    powers = [_power([p[axis] for s in series for p in s.points]) for axis in (0, 1)]
    lines = [[(x / 10.0 ** powers[0], y / 10.0 ** powers[1]) for x, y in s.points] for s in series]
    xs, ys = ([p[axis] for points in lines for p in points] for axis in (0, 1))
    x0, x1 = min(xs), max(xs)
    y0, y1 = _room(min(ys), max(ys))
    if x0 == x1:
        margin = max(0.5, abs(x0) * 1e-3)  # half of one is nothing beside a very large number
        x0, x1 = x0 - margin, x1 + margin

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), height - _BOTTOM - up * (height - top - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">',
        f'<text x="{_LEFT}" y="18" class="title">{html.escape(title)}</text>',
        *legend,
    ]
    at_left, at_bottom = ticks(y0, y1), ticks(x0, x1, 7, 1.0 if x1 - x0 >= 2 and not powers[0] else 0.0)
    words, added = _labels(at_left, powers[1], _LABEL)
    for y, text in zip(at_left, words):
        _, at = place(x0, y)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" class="grid"/>')
        parts.append(_tick(_LEFT - 6, at + 4, "end", text))
    if added:
        parts.append(_tick(4, height - 6, "start", f"{added} + ..."))
    words, added = _labels(at_bottom, powers[0], _LABEL)
    for x, text in zip(at_bottom, words):
        parts.append(_tick(place(x, y0)[0], height - _BOTTOM + 16, "middle", text))
    parts.append(_tick(WIDTH - _RIGHT, height - 6, "end", f"{x_name} {added} + ..." if added else x_name))
    parts += [_line(s, [place(*p) for p in points]) for s, points in zip(series, lines)]
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
    end = [
        f"><title>{html.escape(series.name)}</title></{kind}>" if series.name else "/>" for kind in ("circle", "path")
    ]
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"{end[0]}'
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="line" stroke="{series.colour}"{dash}{end[1]}'


def _legend(keys: Sequence[Key]) -> tuple[list[str], int]:
    """The entries below the title, in as many rows as they need within the picture, and the number of rows."""
    parts, at, row = [], float(_LEFT), 0
    for key in keys:
        name = _shortened(key.name)
        wide = _KEY + _width(name)
        if at > _LEFT and at + wide > WIDTH - _RIGHT:
            at, row = float(_LEFT), row + 1
        y = _TOP + row * _ROW
        dash = ' stroke-dasharray="5 4"' if key.dashed else ""
        colour = f' stroke="{key.colour}"' if key.colour else ' style="stroke:var(--soft)"'
        parts.append(f'<path d="M{at:.1f} {y - 4:.1f}h18" class="line"{colour}{dash}/>')
        whole = "" if name == key.name else f"<title>{html.escape(key.name)}</title>"
        parts.append(f'<text x="{at + 24:.1f}" y="{y:.1f}" class="tick">{whole}{html.escape(name)}</text>')
        at += wide + 14
    return parts, row + 1 if keys else 0


def _width(words: str) -> float:
    """About the width of a text in pixels, in the font of a chart; no less."""
    return sum(13.0 if unicodedata.east_asian_width(c) in "WF" else 7.0 for c in words)


def _shortened(name: str) -> str:
    """A name that fits into a row; one that is longer without its middle, for runs differ at their ends."""
    room = WIDTH - _LEFT - _RIGHT - _KEY
    if _width(name) <= room:
        return name
    kept = len(name)
    while _width(name[: kept // 2] + "…" + name[-(kept // 2) :]) > room:
        kept -= 1
    return f"{name[: kept // 2]}…{name[-(kept // 2) :]}"
