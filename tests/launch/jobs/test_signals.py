"""Requests to stop reach the ranks once, whatever the signal and the MPI; a second Ctrl-C does not wait."""

import signal
import sys
import time
import uuid

import pytest
from setups import openmpi_python
from support import PROGRAMS, assert_nothing_left, popen

pytestmark = pytest.mark.mpiexec


def start(tmp_path, python, *arguments, program="counting.py", steps=100000):
    mark = uuid.uuid4().hex
    env = {"TEST_FOLDER": str(tmp_path), "TEST_STEPS": str(steps)}
    process = popen("-n", 2, *arguments, "python", PROGRAMS / program, mark=mark, python=python, env=env)
    until = time.monotonic() + 20
    while not (tmp_path / "checkpoint.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return process, mark


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=pytest.mark.launch_system)])
def python(request):
    found = sys.executable if request.param == "mpich" else openmpi_python()
    if found is None:
        pytest.skip("no environment with Open MPI: run .ci/launch, or set TEST_OPENMPI_PYTHON")
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_stop_request_saves_and_ends_with_75(tmp_path, python, number):
    process, mark = start(tmp_path, python)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert out.count("asked 1 times") == 2  # one request, to each rank
    assert f"{signal.Signals(number).name}: asking all ranks to save and stop" in err
    assert "failed first" not in err
    assert_nothing_left(mark)


def test_second_interrupt_stops_at_once(tmp_path):
    process, mark = start(tmp_path, sys.executable, "--grace", "1000", program="deaf.py")
    process.send_signal(signal.SIGINT)
    assert any("asking all ranks to save and stop" in line for line in iter(process.stderr.readline, ""))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted again, stopping now" in err
    assert_nothing_left(mark)


def test_ranks_that_do_not_listen_are_ended_after_the_grace_period(tmp_path):
    process, mark = start(tmp_path, sys.executable, "--grace", "1", program="deaf.py")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "the grace period is over" in err
    assert_nothing_left(mark)


def test_program_without_handlers_ends_by_the_signal(tmp_path):
    process, mark = start(tmp_path, sys.executable, program="hello_long.py")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert_nothing_left(mark)


def test_ranks_that_are_ended_for_another_hear_of_it_first(tmp_path):
    process, mark = start(tmp_path, sys.executable, program="hears.py")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3, err
    assert (tmp_path / "heard").read_text() == "SIGTERM"
    assert_nothing_left(mark)


COUNTS = """
import os, pathlib, sys, time
import dbrdist_launch.heartbeat as heartbeat
mark = pathlib.Path(sys.argv[1] + os.environ["PMI_RANK"])
for step in range(2000):
    mark.write_text(str(step))
    time.sleep(0.01)
    if pathlib.Path(sys.argv[1] + "end").exists():
        break
"""


def test_ctrl_z_suspends_the_ranks_and_a_continued_launcher_continues_them(tmp_path):
    from dbrdist_launch import linux

    def until(true):
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end
            time.sleep(0.02)

    (tmp_path / "counts.py").write_text(COUNTS)
    process = popen(
        "-n", 2, "--heartbeat-timeout", 2, "python", tmp_path / "counts.py", tmp_path / "step", mark=uuid.uuid4().hex
    )
    steps = [tmp_path / f"step{rank}" for rank in range(2)]
    until(lambda: all(step.exists() for step in steps))
    process.send_signal(signal.SIGTSTP)
    until(lambda: linux.state(process.pid) == "T")
    until(lambda: sum(linux.state(pid) == "T" for pid in linux.descendants(process.pid)) >= 2)
    before = [step.read_text() for step in steps]
    for _ in range(50):  # nothing to wait for: nothing happens
        assert [step.read_text() for step in steps] == before
    process.send_signal(signal.SIGCONT)
    until(lambda: all(step.read_text() not in ("", text) for step, text in zip(steps, before)))
    (tmp_path / "stepend").write_text("")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "suspended with all its ranks" in err, err
