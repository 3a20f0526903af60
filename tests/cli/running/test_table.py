"""Tests of dbrdist.cli.running.table."""

from __future__ import annotations

import math

from dbrdist.cli.running import table
from tests.each import each


def test_numbers_of_a_table():
    assert [table.short(x) for x in (0.7, 2 / 3, 0.0, 12345.6, 1e-5, math.inf, 3)] == [
        "0.7000", "0.6667", "0.0000", "1.23e+04", "1.00e-05", "inf", "3"
    ]  # fmt: skip
    assert [table.percent(value) for value in (0.5, 1e305, -1e4)] == ["50.00 %", "1.00e+307 %", "-1.00e+06 %"]
    assert [table.whole(n, 7) for n in (7, 1442, 999_999, 1_000_000)] == ["7", "1,442", "999,999", "1000000"]


@each(**{"width, num": [(None, 8), (80, 8), (60, 6), (12, 1), (3, 0)]})
def test_a_narrow_terminal_leaves_out_what_is_wanted_least(monkeypatch, width, num):
    monkeypatch.setattr(table, "columns_of", lambda stream: width)
    found = table.columns(is_evaluated=True, are_classes=True)
    assert len(found) == num and sum(column.width + 2 for column in found) - 2 <= (width or 80)


def test_what_is_not_there_has_no_column():
    keys = [column.key for column in table.columns(is_evaluated=False, are_classes=False)]
    assert keys == ["epoch", "iteration", "main/loss", "examples_per_second", "elapsed_time"]


ROW = {
    "epoch": 12345, "iteration": 123456, "main/loss": 0.123456, "main/accuracy": 0.98765, "validation/main/loss": 1e-5,
    "validation/main/accuracy": 1.0, "examples_per_second": 12345.6, "elapsed_time": 3723.4,
}  # fmt: skip


def printed(entry, is_evaluated=True, are_classes=True):
    columns = table.columns(is_evaluated, are_classes)
    heading = "  ".join(f"{column.heading:{column.align}{column.width}}" for column in columns)
    return [heading, "  ".join(column.cell(entry.get(column.key)) for column in columns)]


def test_the_whole_table(monkeypatch):
    monkeypatch.setattr(table, "columns_of", lambda stream: None)
    assert printed(ROW) == [
        "epoch     step       loss   accuracy  test loss   test acc  examples/s      time",
        "12345  123,456     0.1235    98.77 %   1.00e-05   100.00 %      12,346   1:02:03",
    ]
    large = {"epoch": 1234, "iteration": 1234567, "main/loss": 10000.0, "main/accuracy": 0.0, "elapsed_time": 59.6}
    assert printed(large, False) == [
        "epoch     step       loss   accuracy  examples/s      time",
        "1,234  1234567   1.00e+04     0.00 %                  1:00",
    ]
    small = {"epoch": 999, "iteration": 12345678, "main/loss": 0.001, "elapsed_time": 36000}
    assert printed(small, False, False) == [
        "epoch     step       loss  examples/s      time",
        "  999  12345678     0.0010              10:00:00",
    ]


def test_numbers_of_a_loss():
    values = (0.0, 1.0, 0.001, 0.0009996, -9999.0, 9999.99996, 10000.0, -1e10, float("nan"), float("-inf"), 3)
    assert [table.short(value) for value in values] == [
        "0.0000", "1.0000", "0.0010", "1.00e-03", "-1.00e+04", "1.00e+04", "1.00e+04", "-1.00e+10", "nan", "-inf",
        "3",
    ]  # fmt: skip


def test_what_a_narrow_terminal_leaves_out(monkeypatch):
    every = ["epoch", "iteration", "main/loss", "main/accuracy", "validation/main/loss", "validation/main/accuracy"]
    left = [*every, "examples_per_second", "elapsed_time"]
    steps = [
        (80, None), (79, "examples_per_second"), (68, None), (67, "iteration"), (59, None), (58, "main/accuracy"),
        (48, None), (47, "validation/main/loss"), (37, None), (36, "elapsed_time"), (27, None), (26, "main/loss"),
        (16, None), (15, "validation/main/accuracy"), (5, None), (4, "epoch"),
    ]  # fmt: skip
    for width, gone in steps:
        monkeypatch.setattr(table, "columns_of", lambda stream, width=width: width)
        left = [key for key in left if key != gone]
        assert [column.key for column in table.columns(True, True)] == left, width
