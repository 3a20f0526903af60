"""Workers of a data loader that died."""

import signal

import pytest
from dbrdist_launch import limits, linux
from dbrdist_launch.rank import workers


class Family:
    """Children of a rank, as /proc would show them."""

    def __init__(self, monkeypatch):
        self.now, self.states, self.programs, self.statuses = 100.0, {}, {1: "/python"}, {}
        monkeypatch.setattr(workers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(linux, "children", lambda pid: list(self.states) if pid == 1 else [])
        monkeypatch.setattr(linux, "state", self.states.get)
        monkeypatch.setattr(linux, "stat", lambda pid: ["Z", "1", str(self.statuses.get(pid, 0))])
        monkeypatch.setattr(workers.os, "readlink", self._program)
        self.watch = workers.WorkerWatch(1)

    def _program(self, path):
        found = self.programs.get(int(path.split("/")[2]))
        if found is None:
            raise OSError
        return found


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (9, "killed by SIGKILL"),
        (3 << 8, "ended with exit code 3"),
        (0, None),
        (signal.SIGTERM, None),
        (signal.SIGINT, None),
        (signal.SIGHUP, None),
        (143 << 8, "ended with exit code 143"),
    ],
)
def test_a_worker_that_died_is_told_once_after_a_time(monkeypatch, status, how):
    family = Family(monkeypatch)
    family.states.update({5: "S", 6: "S", 7: "S"})
    family.programs.update({5: "/python", 6: "/bin/sh"})
    assert family.watch.look() is None
    family.states.update(dict.fromkeys((5, 6, 7, 8), "Z"))  # 8 came and went between two looks
    family.programs.clear()
    family.statuses = dict.fromkeys((5, 6, 7, 8), status)
    assert family.watch.look() is None
    family.now += limits.WORKER_SECONDS - 2.0**-10
    assert family.watch.look() is None
    family.now = 100.0 + limits.WORKER_SECONDS
    assert family.watch.look() == ((5, how) if how else None)
    assert family.watch.look() is None


def test_odd_stats_are_no_bad_end(monkeypatch):
    for fields, how in ((None, None), ([], None), (["Z", "x"], None), (["Z", "256"], "ended with exit code 1")):
        monkeypatch.setattr(linux, "stat", lambda pid, fields=fields: fields)
        assert workers._bad_end(5) == how
