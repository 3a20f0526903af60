"""When a job starts again, and on which hosts."""

import json
import signal

import pytest
from dbrdist_launch import codes, limits
from dbrdist_launch.backends.job import Host
from dbrdist_launch.launcher.judgement.report import Failure
from dbrdist_launch.launcher.restarting.pool import HostPool
from dbrdist_launch.launcher.restarting.restarts import Policy
from dbrdist_launch.launcher.running.plan import Outcome
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


STEP = 2.0**-10  # exact on either side of all times here


def failed(kind="exit", message="m", steps=-1, seconds=0.0, code=1, **more):
    return Outcome(code, Failure(kind, 1, "a", code, message, **more), steps=steps, seconds=seconds)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (failed("start"), "a start that was refused would be refused again"),
        (failed("start", host_trouble=True), ""),
        (failed("start", may_retry=True), ""),
        (failed("deadline"), "its time is up"),
        (failed(code=codes.COMMAND_NOT_FOUND), "the command cannot be run"),
        (failed(code=codes.COMMAND_NOT_RUNNABLE), "the command cannot be run"),
        (failed(code=codes.COMMAND_NOT_FOUND + 1), ""),
    ],
)
def test_what_is_not_started_again(outcome, why):
    again, words = Policy(max_restarts=2, start_retries=0).after(outcome)
    assert (again, words) == ((False, f"not restarted: {why}") if why else (True, "restart 1 of 2"))


def loops(*outcomes):
    policy = Policy(max_restarts=99)
    policy.history.extend(outcomes)
    return policy.loops()


def test_crash_loops_are_alike_quick_or_without_a_step():
    n = limits.SAME_FAILURES
    quick = limits.QUICK_SECONDS - STEP
    assert loops(*[failed(seconds=quick)] * n) and not loops(*[failed(seconds=quick)] * (n - 1))
    assert not loops(*[failed(seconds=limits.QUICK_SECONDS)] * n)
    assert not loops(*[failed(seconds=quick)] * (n - 1), failed(message="other"))
    assert loops(*[failed(steps=0, seconds=1e6)] * n)
    assert loops(failed(steps=3), *[failed(steps=2)] * (n - 1)) and loops(*[failed(steps=3)] * n)
    assert not loops(*[failed(steps=3)] * (n - 1), failed(steps=4))
    assert not loops(*[failed(steps=-1, seconds=1e6)] * (n - 1), failed(steps=0))
    assert loops(failed(message="other"), *[failed()] * n)


def outcome(kind="exit", message="m", steps=-1, **more):
    return Outcome(1, Failure(kind, 1, "a", 1, message, **more), steps=steps)


def test_restarts_are_counted_and_crash_loops_stop():
    policy = Policy(max_restarts=5)
    assert [policy.after(outcome(steps=n))[0] for n in (1, 5, 9)] == [True, True, True]
    assert policy.after(outcome(steps=9)) == (True, "restart 4 of 5")
    again, why = policy.after(outcome(steps=9))
    assert not again and "the same failure 3 times in a row" in why


def test_slow_failures_of_a_program_without_beats_are_no_crash_loop():
    policy = Policy(max_restarts=9)
    for _ in range(4):
        slow = outcome()
        slow.seconds = 3600.0
        assert policy.after(slow)[0]
    quick = Policy(max_restarts=9)
    assert [quick.after(outcome())[0] for _ in range(3)] == [True, True, False]


def test_restarts_end_and_finished_jobs_do_not_restart():
    policy = Policy(max_restarts=1)
    assert policy.after(outcome(steps=1))[0]
    assert policy.after(outcome(steps=5)) == (False, "not restarted: all 1 restarts are used up")
    assert Policy(max_restarts=1).after(Outcome(0)) == (False, "")
    asked = outcome()
    asked.asked = 15
    assert Policy(max_restarts=1).after(asked) == (False, "")


def test_hanging_starts_are_retried_without_restarts():
    policy = Policy(max_restarts=0, start_retries=1)
    assert policy.after(outcome("start", may_retry=True))[0]
    assert not policy.after(outcome("start", may_retry=True))[0]
