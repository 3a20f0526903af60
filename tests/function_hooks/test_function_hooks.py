"""The hooks of dbrdist.function_hooks: what they count and what they print."""

import io

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, function_hooks


def step(x):
    v = Variable(x)
    F.sum(F.tanh(v) * v).backward()


def test_timer_counts_forward_and_backward():
    with function_hooks.TimerHook() as hook:
        for _ in range(3):
            step(np.ones(4))
    summary = hook.summary()
    assert {name: row["occurrence"] for name, row in summary.items()} == {"tanh": 6, "mul": 6, "Sum": 6}
    assert len(hook.call_history) == 18 and all(seconds > 0 for _, seconds in hook.call_history)
    assert hook.total_time() == pytest.approx(sum(row["elapsed_time"] for row in summary.values()))


def test_timer_prints_the_slowest_first():
    hook = function_hooks.TimerHook()
    hook.call_history = [("quick", 1e-6), ("slow", 2.5e-3), ("slow", 2.5e-3), ("middle", 40e-6)]
    text = io.StringIO()
    hook.print_report(file=text)
    assert text.getvalue().splitlines() == [
        "FunctionName  ElapsedTime  Occurrence",
        "        slow       5.00ms           2",
        "      middle      40.00us           1",
        "       quick       1.00us           1",
    ]
    text = io.StringIO()
    hook.print_report("ms", text)
    assert text.getvalue().splitlines()[2].split() == ["middle", "0.04ms", "1"]
    with pytest.raises(ValueError, match="unit: expected auto, sec, ms, us or ns, got 'hours'"):
        hook.print_report("hours")


def test_print_hook_shows_values_and_gradients():
    text = io.StringIO()
    with function_hooks.PrintHook(file=text):
        y = F.sum(Variable(np.ones(2)))
        assert text.getvalue() == "function\tSum\ninput data\n<variable of shape (2,), float64>\n[1. 1.]\n"
        y.backward()
    assert text.getvalue().endswith(
        "function\tSum\ninput data\n(removed)\noutput gradient\n<variable of shape (), float64>\n1.0\n"
    )


def test_hooks_leave_the_numbers_alone():
    x = Variable(np.linspace(-1, 1, 5))
    F.sum(F.tanh(x) * x).backward()
    with function_hooks.TimerHook(), function_hooks.PrintHook(file=io.StringIO()):
        again = Variable(x.array)
        F.sum(F.tanh(again) * again).backward()
    np.testing.assert_array_equal(x.grad, again.grad)
