"""The inner loop looks at every file, and leaves out nothing that no other suite runs."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import quick, suites
from tests.conftest import STARTING, pytest_collection_modifyitems
from tests.each import each
from tests.rules.test_marks import MARKS
from tests.rules.test_mirror import TESTS, mirrored

ONLY_SLOW = 0.035  # the share of files whose tests are all slow, of those below folders that mirror


@each(sizes=[(1,), (4,), (2, 3), (3, 3), (4, 2, 3), (2, 2, 2, 5)])
def test_each_value_of_each_axis_is_covered_by_as_few_rows_as_can_be(sizes):
    rows = [dict(enumerate(row)) for row in itertools.product(*map(range, sizes))]
    chosen = quick.covering(rows)
    assert chosen == sorted(set(chosen)) and len(chosen) == max(sizes)
    for axis, size in enumerate(sizes):
        assert {rows[k][axis] for k in chosen} == set(range(size))


def test_rows_of_a_table_with_holes_are_covered():
    rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 3}]
    assert quick.covering(rows) == [0, 1, 3]
    assert quick.covering([]) == []


class Item(SimpleNamespace):
    """An item of pytest's, as far as it is asked."""

    __hash__ = object.__hash__

    def iter_markers(self, name):
        return [SimpleNamespace(args=(names,), kwargs={}) for names in self.marks]

    def get_closest_marker(self, name):
        return None


def items(name, marks, rows):
    made = [Item(nodeid=f"{name}[{k}]", marks=marks, fixturenames=list(row), callspec=SimpleNamespace(params=row))
            for k, row in enumerate(rows)]  # fmt: skip
    return made


def test_combinations_are_left_out_and_rows_of_one_table_are_not():
    x, y, z = object(), object(), object()
    crossed = items("t.py::f", ["a", "b"], [{"a": a, "b": b} for a in (x, y) for b in (x, y, z)])
    joint = items("t.py::g", ["a, b"], [{"a": a, "b": b} for a in (x, y) for b in (x, y, z)])
    fixture = items("t.py::h", [("a",)], [{"a": a, "world": w} for w in (x, y) for a in (x, y)])
    plain = [Item(nodeid="t.py::k", marks=[])]
    kept, left_out = quick.divided([*crossed, *joint, *fixture, *plain])
    assert kept == [crossed[0], crossed[2], crossed[4], *joint, fixture[0], fixture[3], *plain]
    assert left_out == [crossed[1], crossed[3], crossed[5], fixture[1], fixture[2]]


@each(is_quick=[True, False])
def test_what_m_and_k_leave_out_covers_nothing(is_quick):
    x, y = object(), object()
    collected = items("t.py::f", ["a", "b"], [{"a": a, "b": b} for a in (x, y) for b in (x, y)])
    others = collected[1:]
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(option=SimpleNamespace(quick=is_quick), hook=hook)
    selection = pytest_collection_modifyitems(config, collected)
    next(selection)
    del collected[0]  # as pytest does where the first combination is slow
    with pytest.raises(StopIteration):
        next(selection)
    assert (collected, left_out) == ((others[:2], others[2:]) if is_quick else (others, []))


def test_a_loop_of_cases_has_each_value_once(monkeypatch):
    seen = []

    @each(a=[1, 2], b=(k for k in "xyz"))
    def check(a, b):
        seen.append((a, b))

    monkeypatch.setattr(quick, "is_on", [True])
    check()
    assert seen == [(1, "x"), (1, "z"), (2, "y")]


def test_a_loop_has_the_values_of_cases_that_skip_themselves_in_others(monkeypatch):
    seen, skipped = [], []

    @each(a=[1, 2], b="xyz")
    def check(a, b, most):
        if (a, b) == (2, "y") or a > most:
            skipped.append((a, b))
            pytest.skip(f"{a} with {b}")
        seen.append((a, b))

    monkeypatch.setattr(quick, "is_on", [True])
    check(most=2)
    assert seen == [(1, "x"), (1, "z"), (1, "y"), (2, "x")] and skipped == [(2, "y")]
    seen.clear()
    check(most=1)
    assert seen == [(1, "x"), (1, "z"), (1, "y")]
    skipped.clear()
    with pytest.raises(pytest.skip.Exception, match="1 with x"):
        check(most=0)
    assert len(skipped) == 6


def quick_tests(tree: ast.Module) -> list[str]:
    """The tests of a file that the inner loop runs."""
    if any("pytestmark =" in (text := ast.unparse(x)) and any(m in text for m in MARKS) for x in tree.body):
        return []
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")]
    return [
        f.name
        for f in functions
        if not any(m in ast.unparse(d) for d in f.decorator_list for m in MARKS)
        and {a.arg for a in f.args.args}.isdisjoint(STARTING | {"run"})
    ]


@pytest.mark.slow
def test_nearly_each_file_has_a_quick_test():
    files = mirrored()
    found = [str(p) for p in files if not quick_tests(ast.parse((TESTS / p).read_text()))]
    assert len(found) <= ONLY_SLOW * len(files), f"{len(found)} of {len(files)} files: {', '.join(found)}"


def test_the_other_suites_run_all():
    text = Path(suites.__file__).read_text()
    assert "--quick" not in text and '"-m", "not programs"' in text
