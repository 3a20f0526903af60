"""The loop that takes the place of many small tests: it runs every case, and says which failed."""

from __future__ import annotations

import inspect

import pytest

from dbrdist import random
from tests import quick
from tests.each import each


@pytest.fixture(autouse=True)
def all_combinations(monkeypatch):
    """In the inner loop, too."""
    monkeypatch.setattr(quick, "is_on", [False])


def test_every_combination_runs_and_all_failures_are_named():
    seen = []

    @each(a=[1, 2], b=lambda c: [c, c + 1])
    def check(c, a, b):
        seen.append((a, b, c))
        assert a == 1 or b == 7
        if b == 8:
            raise KeyError("eight")

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed: a=1, b=8; a=2, b=8") as e:
        check(c=7)
    assert seen == [(1, 7, 7), (1, 8, 7), (2, 7, 7), (2, 8, 7)]
    assert [type(one) for one in e.value.exceptions] == [KeyError, AssertionError]
    assert e.value.exceptions[1].__notes__ == ["in the case a=2, b=8"]
    assert list(inspect.signature(check).parameters) == ["c"]


def test_axes_with_several_names_and_by_names_that_the_test_does_not_take():
    seen = []

    @each(case=lambda section: [section, section + 1], **{"a, b": [(1, 2), (3, 4)]})
    def check(case, a, b):
        seen.append((case, a, b))

    check(section=5)
    assert seen == [(5, 1, 2), (5, 3, 4), (6, 1, 2), (6, 3, 4)]
    assert list(inspect.signature(check).parameters) == ["section"]


def test_functions_without_a_name_are_named_by_their_number():
    @each(call=[lambda: 1, lambda: 0, lambda: 0])
    def check(call):
        assert call()

    with pytest.raises(ExceptionGroup, match=r"call=<lambda> \(number 1\); call=<lambda> \(number 2\)"):
        check()


def test_each_case_starts_from_the_same_chance():
    states = []

    @each(a=[1, 2])
    def check(a):
        states.append(random.get_state())
        random.next_initializer_generator()

    check()
    assert states[0] == states[1] != random.get_state()


def test_skipped_cases_are_passed_over_unless_all_are():
    @each(a=[1, 2])
    def check(a, least):
        if a < least:
            pytest.skip(f"{a} is less")

    check(least=2)
    with pytest.raises(pytest.skip.Exception, match="1 is less"):
        check(least=3)


def test_what_ends_a_test_names_the_case():
    @each(a=[1, 2])
    def check(a):
        with pytest.raises(ValueError):
            assert a

    with pytest.raises(pytest.fail.Exception) as e:
        check()
    assert e.value.__notes__ == ["in the case a=1"]


def test_mistakes_are_noticed():
    with pytest.raises(AssertionError, match="no cases"):
        each(a=[])(lambda a: None)()
    with pytest.raises(AssertionError, match="an axis is no argument"):
        each(b=[1])(lambda a: None)
