"""The inner loop, ``make test-quick``: what it leaves to the other suites, declared here once.

It leaves out tests with the mark `slow`. Of a test with several axes, by :func:`tests.each.each` or by pytest's marks,
it runs as few combinations as have every value of every axis: each row of a table runs, but not with each type and each
layout. A test that takes more than ``LIMIT_SECONDS`` should have the mark; the loop ends with those that have none.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

LIMIT_SECONDS = 0.05  # of the processor, on a quiet machine, for what a test does itself
_MOST_NAMED = 10
is_on = [False]


def covering(rows: Sequence[Mapping[str, object]], covered: Iterable[Mapping[str, object]] = ()) -> list[int]:
    """The positions of a few rows that together have every value of every axis, in their order.

    Args:
        rows: of each combination what tells its value on each axis from others.
        covered: combinations whose values need no other one.
    """
    seen = {pair for row in covered for pair in row.items()}
    chosen: set[int] = set()
    for least in range(max(map(len, rows), default=0), 0, -1):  # rows that bring most come first
        for k, row in enumerate(rows):
            if sum(pair not in seen for pair in row.items()) >= least:
                seen.update(row.items())
                chosen.add(k)
    return sorted(chosen)


def chosen(rows: Sequence[Mapping[str, object]], skipped: Container[int]) -> Iterator[int]:
    """As :func:`covering`, and further positions for the values of combinations that are ``skipped`` when they run."""
    left = list(range(len(rows)))
    done: list[int] = []
    while more := [left[i] for i in covering([rows[k] for k in left], [rows[k] for k in done])]:
        yield from more
        left = [k for k in left if k not in more]
        done += [k for k in more if k not in skipped]


def divided(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that run in the inner loop, and the combinations that are left to the other suites."""
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for group in of_test.values():
        rows = [_row(item) for item in group]
        kept |= {group[k] for k in covering(rows)} if all(rows) else set(group)
    return [item for item in items if item in kept], [item for item in items if item not in kept]


def _row(item: pytest.Item) -> dict[str, object]:
    """The identity of what each axis gives an item; an axis is a mark `parametrize` or a fixture with parameters."""
    params = dict(getattr(getattr(item, "callspec", None), "params", {}))
    row: dict[str, object] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        joint = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        row[str(names)] = tuple(id(params.pop(name)) for name in joint if name in params)
    return row | {name: id(value) for name, value in params.items()}


class Limit:
    """A plugin that names the tests beyond the limit at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began = time.process_time()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.process_time() - began

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        over = sorted(((s, name) for name, s in self._seconds.items() if s > LIMIT_SECONDS), reverse=True)
        if over:
            terminalreporter.write_line(
                f"{len(over)} tests took more than {LIMIT_SECONDS} s of the processor; the longest:"
            )
        for seconds, name in over[:_MOST_NAMED]:
            terminalreporter.write_line(f"  {seconds:.2f} s: {name}")
