"""Tests of dbrdist.link_hooks.timer."""

from __future__ import annotations

import io

import numpy as np
import pytest

from dbrdist import Chain, Variable, link_hooks
from dbrdist import functions as F
from dbrdist import links as L

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype("f")


class Net(Chain):
    def __init__(self):
        super().__init__(a=L.Linear(4, 4), b=L.Linear(4, 3))

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def test_times_of_links():
    net = Net()
    with link_hooks.TimerHook() as hook:
        net(X)
        net(Variable(X))
    assert [name for name, _ in hook.call_history] == ["Linear", "Linear", "Net"] * 2
    summary = hook.summary()
    assert {name: row["occurrence"] for name, row in summary.items()} == {"Linear": 4, "Net": 2}
    assert hook.total_time() == pytest.approx(summary["Net"]["elapsed_time"])
    assert summary["Net"]["elapsed_time"] >= summary["Linear"]["elapsed_time"] > 0
    text = io.StringIO()
    hook.print_report(unit="ms", file=text)
    head, *rows = text.getvalue().splitlines()
    assert head.split() == ["LinkName", "ElapsedTime", "Occurrence"]
    assert [row.split()[0] for row in rows] == ["Net", "Linear"]
    hook.print_report("auto_foreach", io.StringIO())


def test_times_after_an_error():
    net = Net()
    with link_hooks.TimerHook() as hook:
        with pytest.raises(ValueError, match=r"link Net/a .Linear.: linear: x: expected 4 elements"):
            net(X[:, :3])
        assert hook.call_history == []
        net(X)
    assert hook.total_time() == pytest.approx(hook.summary()["Net"]["elapsed_time"])
