"""Hosts that are set aside, and come back."""

from dbrdist_launch.backends import hosts
from dbrdist_launch.backends.job import Host
from dbrdist_launch.launcher.restarting.pool import HostPool

STEP = 2.0**-10  # exact on either side of all times here


def test_hosts_come_back_when_their_time_is_over():
    now = [100.0]
    answers = [{"b": "no route"}, {}, {}]
    asked = []

    def probe(names):
        asked.append(list(names))
        return answers.pop(0)

    pool = HostPool((Host("a", 1), Host("b", 1)), cooldown_seconds=8.0, probe=probe, clock=lambda: now[0])
    assert pool.after_failure() == (["b"], []) and [h.name for h in pool.available()] == ["a"]
    now[0] = 108.0 - STEP
    assert pool.after_failure() == ([], [])
    now[0] = 108.0
    assert pool.after_failure() == ([], ["b"]) and [h.name for h in pool.available()] == ["a", "b"]
    assert asked == [["a", "b"], ["a"], ["a", "b"]]


def test_lost_hosts_cool_down_and_come_back():
    now, dead = [0.0], {"b": "no answer"}
    pool = HostPool(
        hosts.parse_list("a:1,b:1"), lambda names: {n: dead[n] for n in names if n in dead}, 30.0, clock=lambda: now[0]
    )
    assert pool.after_failure() == (["b"], [])
    assert [host.name for host in pool.available()] == ["a"]
    dead.clear()
    now[0] = 10.0
    assert pool.after_failure() == ([], [])  # it answers again, but cools down
    now[0] = 31.0
    assert pool.after_failure() == ([], ["b"])
    assert [host.name for host in pool.available()] == ["a", "b"]
