"""Decorators that run a test method several times."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any

Test = Callable[..., Any]


def repeat_with_success_at_least(times: int, min_success: int) -> Callable[[Test], Test]:
    """Run a test method up to ``times`` times; it passes as soon as ``min_success`` of the runs have passed.

    Each run has an instance of its own, with setUp and tearDown around it. A failure shows the first run that failed.
    """
    if not 0 < min_success <= times:
        raise ValueError(f"min_success: expected 1 to times={times}, got {min_success}")

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def several(self: unittest.TestCase, *args: Any, **kwargs: Any) -> None:
            failed: list[str] = []
            for number in range(times):
                _look_at(_run_once(test, self, args, kwargs), self, failed)
                if number + 1 - len(failed) >= min_success:
                    return
                if len(failed) > times - min_success:
                    break
            self.fail(
                f"expected {min_success} of {times} runs to pass, but {len(failed)} of {number + 1} failed; "
                f"the first failure:\n{failed[0]}"
            )

        return several

    return decorate


def _run_once(test: Test, case: unittest.TestCase, args: Any, kwargs: Any) -> unittest.TestResult:
    fresh = type(case)(case._testMethodName)
    once = unittest.FunctionTestCase(lambda: test(fresh, *args, **kwargs), fresh.setUp, fresh.tearDown)
    result = unittest.TestResult()
    once.run(result)
    fresh.doCleanups()
    return result


def _look_at(result: unittest.TestResult, case: unittest.TestCase, failed: list[str]) -> None:
    if result.skipped:
        case.skipTest(result.skipped[0][1])
    if not result.wasSuccessful():
        failed.append((result.failures + result.errors)[0][1])


def repeat(times: int) -> Callable[[Test], Test]:
    """Run a test method ``times`` times; it passes if all runs pass."""
    return repeat_with_success_at_least(times, times)


def retry(times: int) -> Callable[[Test], Test]:
    """Run a test method up to ``times`` times; it passes with the first run that passes."""
    return repeat_with_success_at_least(times, 1)
