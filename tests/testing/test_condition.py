"""Tests of dbrdist.testing.condition."""

import unittest

import numpy as np
import pytest

from dbrdist import testing
from dbrdist.testing import condition
from tests.testing.testing_helpers import run


def texts(result):
    return [text for _, text in result.failures + result.errors]


@pytest.mark.parametrize(
    ("decorator", "passes", "num_runs"),
    [
        (condition.retry(3), "no, no, yes", 3),
        (condition.retry(3), "yes", 1),
        (condition.retry(2), "no, no", None),
        (condition.repeat(3), "yes, yes, yes", 3),
        (condition.repeat(3), "yes, no", None),
        (condition.repeat_with_success_at_least(4, 2), "no, yes, no, yes", 4),
        (condition.repeat_with_success_at_least(4, 2), "no, yes, no, no", None),
    ],
)
def test_conditions(decorator, passes, num_runs):
    plan, set_ups = iter(passes.split(", ")), []

    class Case(unittest.TestCase):
        def setUp(self):
            set_ups.append(self)

        @decorator
        def test_it(self):
            if next(plan) == "no":
                raise KeyError("the reason")

    result = run(Case)
    assert result.wasSuccessful() == (num_runs is not None)
    assert list(plan) == []
    if num_runs is None:
        assert "runs to pass, but" in texts(result)[0] and "KeyError: 'the reason'" in texts(result)[0]
    else:
        assert len({id(s) for s in set_ups}) == num_runs + 1  # and that of the runner


def test_a_condition_passes_a_skip_on():
    class Case(unittest.TestCase):
        @condition.retry(3)
        def test_it(self):
            self.skipTest("not here")

    assert run(Case).skipped[0][1] == "not here"
    with pytest.raises(ValueError, match="expected 1 to times=2, got 3"):
        condition.repeat_with_success_at_least(2, 3)


def test_retries_under_fix_random_draw_other_numbers():
    seen = []

    @testing.fix_random()
    class Case(unittest.TestCase):
        @condition.repeat(3)
        def test_it(self):
            seen.append(np.random.rand())

    assert run(Case).wasSuccessful() and len(set(seen)) == 3
