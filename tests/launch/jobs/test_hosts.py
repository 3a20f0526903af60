"""Two fake hosts with sshd: environment, restarts on the hosts that are left, and starts that go wrong."""

import hashlib
import json
import os
import subprocess
import sys
import time
import uuid

import pytest
from support import PROGRAMS, assert_nothing_left, attempts_in, environment, failure_in

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


def start(cluster, *arguments, mark, hosts="node0:2,node1:2", ssh=None, env=None, stdin=subprocess.DEVNULL):
    words = [sys.executable, "-m", "dbrdist_launch", "--ssh", ssh or cluster.ssh]
    words += ["--hosts", hosts] if hosts else []
    return subprocess.Popen(
        cluster.inside(*words, *arguments),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(mark, **(env or {})),
    )


def launch(cluster, *arguments, timeout=60, **options):
    mark = uuid.uuid4().hex
    process = start(cluster, *arguments, mark=mark, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert_nothing_left(mark)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def test_ranks_fill_the_hosts_in_order(cluster):
    result = launch(cluster, "python", PROGRAMS / "hello.py")
    assert result.returncode == 0, result.stderr
    assert sorted(line.split("]")[0] for line in result.stdout.splitlines()) == [
        "[0 node0",
        "[1 node0",
        "[2 node1",
        "[3 node1",
    ]


def test_a_long_input_reaches_rank_0_on_another_host(cluster, tmp_path):
    data = os.urandom(1 << 16) * 80
    (tmp_path / "input").write_bytes(data)
    text = "import hashlib, os, sys\nif os.environ['RANK'] == '0': "
    text += "print(os.uname().nodename, hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    with open(tmp_path / "input", "rb") as file:
        result = launch(cluster, "-n", 2, "python", "-c", text, hosts="node1:1,node0:1", stdin=file)
    assert result.returncode == 0, result.stderr
    assert f"[0 node1] node1 {hashlib.sha256(data).hexdigest()}\n" == result.stdout


def test_values_travel_unchanged_and_secrets_stay(cluster):
    value = "a b'c\"d;e\n$(touch /nowhere)\\"
    program = "import os, sys; print(ascii([os.environ.get(n) for n in ('V', 'MY_API_TOKEN', 'OMP_PROC_BIND')]))"
    env = {"MY_API_TOKEN": "secret", "OMP_PROC_BIND": "false"}
    result = launch(cluster, "-n", 3, "--env", f"V={value}", "python", "-c", program, env=env)
    assert result.returncode == 0, result.stderr
    remote = [line for line in result.stdout.splitlines() if "node1]" in line]
    assert remote == [f"[2 node1] {[value, None, 'false']!a}"]


@pytest.mark.parametrize("name", ["-oProxyCommand=touch", "a;b", "a b", "a\nb", "$(x)", "n'"])
def test_names_that_are_no_hosts_are_refused(cluster, name):
    result = launch(cluster, "python", "x.py", hosts=f"{name}:2")
    assert result.returncode == 2
    assert "is not a host name" in result.stderr


def test_unknown_host_is_refused(cluster):
    result = launch(cluster, "python", PROGRAMS / "hello.py", hosts="node0:1,nowhere:1")
    assert result.returncode == 2
    assert "unknown host 'nowhere'" in result.stderr


def test_too_few_slots_are_refused(cluster):
    result = launch(cluster, "-n", 5, "python", PROGRAMS / "hello.py")
    assert result.returncode == 2
    assert "5 ranks do not fit into 4 slots (node0:2, node1:2)" in result.stderr


def test_unreachable_host_is_named(cluster, tmp_path):
    cluster.cable(1, "down")
    try:
        result = launch(
            cluster,
            "-n",
            3,
            "--start-timeout",
            "3",
            "--start-retries",
            0,
            "--ssh-option",
            "ConnectTimeout=2",
            "--log-dir",
            tmp_path,
            "python",
            PROGRAMS / "hello.py",
        )
    finally:
        cluster.cable(1, "up")
    assert result.returncode == 71
    failure = failure_in(tmp_path)
    assert (failure["kind"], failure["host"]) == ("start", "node1")
    assert "host node1 cannot be reached" in failure["message"]


def test_start_that_hangs_is_noticed_ended_tried_again_and_named(cluster, tmp_path):
    """An ssh that hangs on its first call, as a start over Open MPI's ssh may."""
    hanging = tmp_path / "ssh"
    hanging.write_text(
        f'#!/bin/sh\nif mkdir {tmp_path}/once 2>/dev/null; then sleep 1000; fi\nexec {cluster.ssh} "$@"\n'
    )
    hanging.chmod(0o755)
    arguments = ("--start-timeout", "3", "--verbose", "-n", 3, "python", PROGRAMS / "hello.py")
    result = launch(cluster, *arguments, ssh=hanging)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("hello") == 3
    assert "ranks did not appear within 3 s" in result.stderr
    assert "trying the start again (1 of 2)" in result.stderr


def counting(tmp_path, steps, **extra):
    return {"TEST_FOLDER": str(tmp_path), "TEST_STEPS": str(steps), **extra}


def settings(values):
    return [word for name, value in values.items() for word in ("--env", f"{name}={value}")]


def test_lost_host_is_set_aside_and_used_again_when_it_comes_back(cluster, tmp_path):
    mark = uuid.uuid4().hex
    env = settings(counting(tmp_path, 450))
    process = start(
        cluster,
        "-n",
        4,
        "--max-restarts",
        5,
        "--cooldown",
        0,
        "--log-dir",
        tmp_path,
        *env,
        "python",
        PROGRAMS / "counting.py",
        mark=mark,
    )
    wait_for_step(tmp_path, 100)
    cluster.kill_node(1)
    wait_for_attempt(tmp_path, 1)
    wait_for_step(tmp_path, 250)
    cluster.restart_node(1)
    kill_rank(tmp_path, mark)
    out, err = process.communicate(timeout=90)
    assert_nothing_left(mark)
    assert process.returncode == 0, err
    attempts = attempts_in(tmp_path)
    assert [attempt["ranks"] for attempt in attempts] == [4, 2, 4]
    assert [attempt["restart"] for attempt in attempts] == [0, 1, 2]
    assert attempts[0]["failure"]["kind"] == "host_lost"
    assert attempts[1]["failure"]["kind"] == "signal"
    assert "back again: node1" in err
    assert "done with 4" in out
    assert out.count("restart 2 of 4") == 4


def test_pulled_cable_restarts_on_the_other_host(cluster, tmp_path):
    mark = uuid.uuid4().hex
    env = settings(counting(tmp_path, 300))
    process = start(
        cluster,
        "-n",
        2,
        "--per-host",
        1,
        "--max-restarts",
        2,
        "--host-timeout",
        3,
        "--log-dir",
        tmp_path,
        *env,
        "python",
        PROGRAMS / "counting.py",
        mark=mark,
    )
    wait_for_step(tmp_path, 50)
    cluster.cable(1, "down")
    try:
        out, err = process.communicate(timeout=60)
        assert_nothing_left(mark, 10.0)  # the cut-off ranks hear of nobody and end themselves
    finally:
        cluster.cable(1, "up")
    assert process.returncode == 0, err
    assert "host node1 is not used for" in err
    assert "done with 1" in out


def test_too_few_hosts_end_the_job(cluster, tmp_path):
    mark = uuid.uuid4().hex
    env = settings(counting(tmp_path, 5000))
    process = start(cluster, "--max-restarts", 3, "--min-hosts", 2, *env, "python", PROGRAMS / "counting.py", mark=mark)
    wait_for_step(tmp_path, 50)
    cluster.kill_node(1)
    _, err = process.communicate(timeout=60)
    cluster.restart_node(1)
    assert process.returncode == 69
    assert "too few hosts are left: 1, with --min-hosts 2" in err


def test_discovery_script_names_the_hosts(cluster, tmp_path):
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho node1:2\n")
    script.chmod(0o755)
    result = launch(cluster, "--host-discovery", script, "python", PROGRAMS / "hello.py", hosts=None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("of 2 on node1") == 2


def wait_for_step(tmp_path, step, seconds=40):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if json.loads((tmp_path / "checkpoint.json").read_text())["step"] >= step:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {seconds} s")


def wait_for_attempt(tmp_path, number, seconds=40):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (tmp_path / "latest" / "status.json").exists() and len(attempts_in(tmp_path)) >= number:
            return
        time.sleep(0.05)
    raise AssertionError(f"no attempt {number} within {seconds} s")


def kill_rank(tmp_path, mark):
    from support import marked

    victims = [
        line
        for line in marked(mark)
        if "counting.py" in line and "rank/main.py" not in line and "-m dbrdist" not in line
    ]
    os.kill(int(victims[-1].split()[0]), 9)
