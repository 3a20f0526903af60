"""When a job starts again, and on which hosts."""

import json
import signal

import pytest
from dbrdist_launch.backends.job import Host
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.restarting.pool import HostPool
from dbrdist_launch.launcher.restarting.restarts import Policy
from dbrdist_launch.launcher.running.attempt import Outcome
from support import popen

PAIR = (Host("a", 1), Host("b", 1))


def test_the_wait_before_a_restart_doubles_up_to_a_limit():
    policy, waits = Policy(10, 0, backoff_seconds=2.0, most_backoff_seconds=9.0), []
    for number in range(5):
        assert policy.after(Outcome(1, Failure("exit", 0, "a", 1, str(number)), steps=number))[0]
        waits.append(policy.wait_seconds())
    assert waits == [2.0, 4.0, 8.0, 9.0, 9.0] and Policy(3).wait_seconds() == 0.0


def test_a_host_is_set_aside_for_longer_each_time():
    now, lost = [0.0], {"a": "no route"}
    pool = HostPool(PAIR, lambda names: {n: lost[n] for n in names if n in lost}, 30.0, clock=lambda: now[0])
    for number in range(3):
        assert pool.after_failure() == (["a"], []) and pool.cooldown_of("a") == 30.0 * 2**number
        assert pool.available() == PAIR[1:]
        now[0] += 30.0 * 2**number - 1.0
        assert pool.after_failure() == ([], [])
        now[0] += 1.0
    lost.clear()
    assert pool.after_failure() == ([], ["a"]) and pool.available() == PAIR


@pytest.mark.parametrize(("most", "left"), [(None, PAIR), (3, PAIR), (2, PAIR[1:])])
def test_a_host_where_failures_begin_again_and_again_is_given_up(most, left):
    pool = HostPool(PAIR, lambda names: {}, 30.0, most_failures=most)
    for host in ("a", "b", "a", None, "elsewhere"):
        pool.note_failure(host, "exit: x")
    assert pool.available() == left and pool.history == {"a": ["exit: x"] * 2, "b": ["exit: x"]}


@pytest.mark.programs
@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGXCPU, "SIGXCPU"), (signal.SIGRTMIN + 3, "SIGRTMIN+3")]
)
def test_a_request_to_stop_ends_the_wait_for_a_restart(tmp_path, number, name):
    process = popen("-n", 1, "--max-restarts", 3, "--backoff", 500, "--record", tmp_path / "r", "sh", "-c", "exit 3")
    lines = []
    while "waiting 300 s before the restart" not in "".join(lines[-1:]):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    process.send_signal(number)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 128 + number and f"{name}: not restarted" in err
    assert json.loads((tmp_path / "r").read_text())["state"] == "failed"
