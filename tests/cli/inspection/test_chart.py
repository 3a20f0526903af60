"""Tests of dbrdist.cli.inspection.chart."""

from __future__ import annotations

import colorsys
import math
import re

import numpy as np
import pytest

from dbrdist.cli.inspection import chart, report
from dbrdist.cli.inspection.chart import COLOURS, Series
from tests.each import each


def test_ticks_are_round_numbers_within_the_bounds():
    for low, high, expected in (
        (0, 10, [0, 2, 4, 6, 8, 10]), (0, 5, [0, 1, 2, 3, 4, 5]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 25, [0, 5, 10, 15, 20, 25]), (3, 3, [3]), (3, 2, [3]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (0, 6, [0, 2, 4, 6]),
        (1, 49, [10, 20, 30, 40]),
    ):  # fmt: skip
        np.testing.assert_allclose(chart.ticks(low, high), expected, atol=1e-12)
    for value, text in (
        (0, "0"), (0.001, "0.001"), (0.00099, "9.9e-4"), (1e5, "1e5"), (99999, "99,999"), (-0.5, "-0.5"),
        (-2e6, "-2e6"),
    ):  # fmt: skip
        assert chart.label(value) == text
    assert chart.chart("t", "x", []) == "" == chart.chart("t", "x", [chart.Series("a", [], "red")])
    one = chart.chart("t", "x", [chart.Series("a", [(0, 1)], "red"), chart.Series("b", [], "blue", True)])
    assert "red" in one and "blue" not in one and "stroke-dasharray" not in one
    assert "stroke-dasharray" in chart.chart("t", "x", [chart.Series("a", [(0, 1), (1, 2)], "red", dashed=True)])
    for name, count in (("alone", 1), ("", 0)):  # one line without a name needs no legend, one with a name has it
        made = chart.chart("t", "x", [chart.Series(name, [(0, 1), (1, 2)], "red")])
        assert made.count('y="34.0" class="tick"') == count


def test_a_chart_from_end_to_end():
    """560 wide and 300 high, and 17 more for the row of the legend: 484 x 226 for the lines."""
    series = [Series("a<b", [(0, 10.0), (2, 20.0)], "red"), Series("test", [(1, 15.0)], "blue", dashed=True)]
    grid = "".join(
        f'<path d="M62 {y}H546" class="grid"/><text x="56.0" y="{words}" class="tick" text-anchor="end">{tick}</text>'
        for y, words, tick in (
            ("268.6", "272.6", 10), ("164.0", "168.0", 15), ("59.4", "63.4", 20),
        )
    )  # fmt: skip
    below = "".join(
        f'<text x="{x}" y="293.0" class="tick" text-anchor="middle">{tick}</text>'
        for x, tick in (("62.0", "0"), ("304.0", "1"), ("546.0", "2"))
    )
    assert chart.chart('"loss"', "epoch>", series) == (
        '<svg viewBox="0 0 560 317" role="img" aria-label="&quot;loss&quot;">'
        '<text x="62" y="18" class="title">&quot;loss&quot;</text>'
        '<path d="M62.0 30.0h18" class="line" stroke="red"/><text x="86.0" y="34.0" class="tick">a&lt;b</text>'
        '<path d="M121.0 30.0h18" class="line" stroke="blue" stroke-dasharray="5 4"/>'
        f'<text x="145.0" y="34.0" class="tick">test</text>{grid}{below}'
        '<text x="546.0" y="311.0" class="tick" text-anchor="end">epoch&gt;</text>'
        '<path d="M62.0 268.6L546.0 59.4" class="line" stroke="red"><title>a&lt;b</title></path>'
        '<circle cx="304.0" cy="164.0" r="3" fill="blue"><title>test</title></circle></svg>'
    )


@each(
    case=[
        (0.0, 0.0, (-1.0, 1.0)), (-5.0, -5.0, (-5.5, -4.5)), (20.0, 20.0, (18.0, 22.0)), (10.0, 20.0, (9.6, 20.4)),
        (0.0, 10.0, (0.0, 10.4)), (3.0, 13.0, (0.0, 13.4)), (3.2, 13.2, (2.8, 13.6)), (-1.0, 9.0, (-1.4, 9.4)),
    ]
)  # fmt: skip
def test_the_room_of_an_axis(case):
    low, high, expected = case
    np.testing.assert_allclose(chart._room(low, high), expected)


def test_a_single_point_stands_in_the_middle():
    text = chart.chart("t", "x", [Series("", [(4, 1.0)], "red")])
    assert '<circle cx="304.0" cy="147.0" r="3" fill="red"/>' in text  # 62 + 484 / 2, 34 + 226 / 2


def record(name, log, **summary):
    return report.RunRecord(f"runs/{name}", name, {"status": "finished", **summary}, log, f"epochs: 3\nout: {name}\n")


LOG = [{"epoch_detail": 0.5, "main/loss": 2.0, "validation/main/loss": 3.0, "lr": 0.1}, {"epoch": 1, "main/loss": 1.0}]


def test_curves_of_one_run_are_told_apart_by_what_they_show():
    assert list(report.curves([record("a", LOG)])) == [
        ("Loss", "loss", [
            Series("training", [(0.5, 2.0), (1.0, 1.0)], COLOURS[0]), Series("test", [(0.5, 3.0)], COLOURS[1]),
        ]),
        ("Learning rate", "learning_rate", [Series("", [(0.5, 0.1)], COLOURS[0])]),
    ]  # fmt: skip


def test_curves_of_several_runs_have_a_colour_each_and_dashes_for_training():
    runs_ = [record("a", LOG), record("b", LOG[1:])] + [record(f"r{k}", []) for k in range(7)] + [record("z", LOG[1:])]
    assert list(report.curves(runs_)) == [
        ("Loss", "loss", [
            Series("a training", [(0.5, 2.0), (1.0, 1.0)], COLOURS[0], True),
            Series("a test", [(0.5, 3.0)], COLOURS[0]),
            Series("b training", [(1.0, 1.0)], COLOURS[1], True), Series("z training", [(1.0, 1.0)], COLOURS[9], True),
        ]),
        ("Learning rate", "learning_rate", [Series("a", [(0.5, 0.1)], COLOURS[0])]),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 7e-5, None),
        (0, 3e9, None),
    ],
)
def test_ticks_are_round_and_inside(low, high, expected):
    found = chart.ticks(low, high)
    if expected:
        assert found == pytest.approx(expected)
    assert 1 <= len(found) <= 12
    assert all(low - 1e-12 <= t <= high * (1 + 1e-9) for t in found)
    for t in found[1:]:
        mantissa = (t - found[0]) / 10 ** math.floor(math.log10(t - found[0]))
        assert mantissa * 2 == pytest.approx(round(mantissa * 2), abs=1e-6)


EXTREMES = (0.0, 5e-324, 1e-310, -3e-300, 1.0, 1 + 2**-52, 1e6, 1e6 + 1, -1e299, 1e305, 1.7e308, -1.7e308)


def test_all_numbers_stay_in_the_picture_and_its_axes_tell_them_apart():
    """Differences that are infinite, or less than any number that can be divided, ended the report."""
    for low in EXTREMES:
        for high in EXTREMES:
            for axis in (0, 1):
                pair = [(low, 1.0), (high, 2.0)] if axis == 0 else [(1.0, low), (2.0, high)]
                made = chart.chart("t", "x", [Series("a", sorted(pair), "red")])
                x, y = np.array(re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", made.partition("h18")[2]), float)[-2:].T
                assert (x >= 62).all() and (x <= 546).all() and (y >= 51).all() and (y <= 277).all(), (low, high)
                if low != high and (axis == 1 or max(abs(low), abs(high)) > 1e-323):
                    assert x[0] < x[1] and (y[0] != y[1]), (low, high)
                for side in ("end", "middle"):
                    words = re.findall(rf'text-anchor="{side}">([^<]*)<', made)
                    assert len(set(words)) == len(words) and all(len(text) <= 9 or "x" in text for text in words), words


@each(x=[0.0, 7.0, -4.6e17, 1e290, 1.7e308, 5e-324])
def test_one_place_on_an_axis_stands_in_its_middle(x):
    """Half of one to both sides is nothing beside a large number."""
    made = chart.chart("t", "x", [Series("a", [(x, 1.0), (x, 2.0)], "red")])
    at = re.findall(r"[ML](-?[\d.]+) -?[\d.]+", made.partition("h18")[2])[-2:]
    assert [float(place) for place in at] == pytest.approx([304.0, 304.0], abs=0.1)


def test_numbers_of_an_axis_are_counted_from_the_first_where_they_have_no_room():
    made = chart.chart("t", "epoch", [Series("a", [(150000, 1e6), (150004, 1e6 + 1)], "red")])
    for words in (">150,001<", ">0.5<", ">1e6 + ...<"):
        assert words.replace("150,001", "1.50001e5") in made, made
    assert chart._labels([1e5, 1.5e5], 0, 9) == (["1e5", "1.5e5"], "")
    assert chart._labels([1.0, 1.00001], 0, 9) == (["1", "1.00001"], "")
    assert chart._labels([2.0, 2.0 + 2**-50], 300, 9) == (["0", "8.88e284"], "2e300")


def test_colours_of_many_lines_are_a_golden_angle_apart():
    """The hues are 150, 12, 235 and 97 degrees, the lightness goes through three shades."""
    assert [chart.colour(k) for k in range(12)] == list(COLOURS) and len(set(COLOURS)) == 12
    assert len({chart.colour(k) for k in range(100)}) == 100
    for number in range(12, 100):
        red, green, blue = (int(chart.colour(number)[k : k + 2], 16) / 255 for k in (1, 3, 5))
        hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
        assert (lightness, saturation) == pytest.approx(((0.35, 0.45, 0.55)[number % 3], 0.6), abs=0.01)
        assert math.cos(2 * math.pi * hue - number * math.pi * (5**0.5 - 1)) == pytest.approx(1, abs=1e-3)


def legend_of(*names):
    made = chart.chart("t", "x", [Series(name, [(0, 1), (1, 2)], "red") for name in names])
    line = r'<path d="M([\d.]+) ([\d.]+)h18" class="line" stroke="red"/>'
    places = re.findall(line + r'<text x="([\d.]+)" y="([\d.]+)"', made)
    return [tuple(map(float, place)) for place in places], int(re.match(r'<svg viewBox="0 0 560 (\d+)"', made)[1])


def test_a_legend_has_as_many_rows_as_it_needs():
    """A letter has 7 pixels, a wide one 13, a line 24 before its name, and a gap 14; a row ends at 546."""
    row = (62.0, 30.0, 86.0, 34.0)
    assert legend_of("a") == ([row], 317)
    assert legend_of("a" * 30, "b" * 30) == ([row, (310.0, 30.0, 334.0, 34.0)], 317)
    assert legend_of("a" * 26, "b" * 25 + "字" * 5)[0] == [row, (282.0, 30.0, 306.0, 34.0)]  # ends at 546
    assert legend_of("a" * 31, "b" * 31, "c") == (
        [row, (62.0, 47.0, 86.0, 51.0), (317.0, 47.0, 341.0, 51.0)], 334,
    )  # fmt: skip
    assert legend_of("a" * 300, "b", "c" * 300)[0] == [row, (62.0, 47.0, 86.0, 51.0), (62.0, 64.0, 86.0, 68.0)]


@each(
    **{
        "name, shown": [
            ("a" * 65, None), ("a" * 66, "a" * 32 + "…" + "a" * 32), ("ab" * 99, "ab" * 16 + "…" + "ab" * 16),
            ("字" * 35, None), ("字" * 36, "字" * 17 + "…" + "字" * 17), ("", None),
        ]
    }
)  # fmt: skip
def test_a_long_name_is_shown_without_its_middle(name, shown):
    """460 pixels are 65 letters, or 35 wide ones; all of it is in the title."""
    assert chart._shortened(name) == (name if shown is None else shown)
    made = chart.chart("t", "x", [Series("", [(0, 1)], "red")], [chart.Key(name, None, True)])
    style = 'class="line" style="stroke:var(--soft)" stroke-dasharray="5 4"/>'
    title = "" if shown is None else f"<title>{name}</title>"
    assert f'<path d="M62.0 30.0h18" {style}<text x="86.0" y="34.0" class="tick">{title}{shown or name}</text>' in made


@each(
    **{
        "values, power": [
            ([1e290, 0], 0),
            ([-1e290], 0),
            ([math.nextafter(1e290, 2e290)], 300),
            ([1.0, -2e290], 300),
            ([1 / 1e290], 0),
            ([math.nextafter(1 / 1e290, 0)], -300),
            ([1e-300, -1e-295], -300),
            ([0.0, 0.0], 0),
            ([1e-300, 1.0], 0),
        ]
    }
)
def test_axes_of_very_large_and_very_small_numbers_are_divided(values, power):
    assert chart._power(values) == power
