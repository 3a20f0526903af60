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
