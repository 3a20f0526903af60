"""The right cause: what the report says of a failed job, and whom signals and deadlines reach."""

import os
import signal
import sys
import textwrap
import time

import pytest
from support import PROGRAMS, assert_nothing_left, environment, failure_in, launch, popen, wait_until

pytestmark = pytest.mark.slow

mpiexec = pytest.mark.mpiexec


@mpiexec
@pytest.mark.parametrize("hook", ["lambda *_: None", "lambda *a: print('mine', a[1])"])
def test_an_exception_is_found_behind_a_users_own_hook(tmp_path, hook):
    text = f"import sys\nfrom mpi4py import MPI\nsys.excepthook = {hook}\n"
    text += "if MPI.COMM_WORLD.rank == 1:\n    raise ValueError('boom\\nand more')\nMPI.COMM_WORLD.barrier()\n"
    result = launch("-n", 2, "--log-dir", tmp_path, "python", "-c", text)
    failure = failure_in(tmp_path)
    assert (result.returncode, failure["rank"], failure["kind"]) == (1, 1, "exception"), result.stderr
    assert failure["message"] == "ValueError: boom\nand more"


@mpiexec
@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "import os; os.kill(os.getpid(), 2); input()"])
def test_an_interrupt_that_nobody_catches_ends_a_rank_by_the_signal(tmp_path, how):
    """As without the launcher: Python forgets it where text is evaluated after the interrupt, as named tuples do."""
    result = launch("-n", 1, "--log-dir", tmp_path, "python", "-c", how)
    failure = failure_in(tmp_path)
    assert (result.returncode, failure["kind"], failure["signal"]) == (130, "signal", "SIGINT"), result.stderr


@mpiexec
def test_words_on_stderr_are_shown_under_quiet():
    result = launch(
        "-n", 2, "--quiet", "sh", "-c", 'if [ $RANK = 1 ]; then echo "fatal: no data" >&2; exit 3; fi; sleep 5'
    )
    assert result.returncode == 3
    assert "rank 1 on" in result.stderr and "fatal: no data" in result.stderr


@mpiexec
def test_a_handled_traceback_is_not_the_cause(tmp_path):
    text = """
        import os, traceback
        try:
            raise ConnectionError("retrying")
        except ConnectionError:
            traceback.print_exc()
        os._exit(3)
    """
    launch("-n", 1, "--log-dir", tmp_path, "python", "-c", textwrap.dedent(text))
    failure = failure_in(tmp_path)
    assert (failure["kind"], failure["message"]) == ("exit", "exit code 3")


@mpiexec
def test_a_rank_that_leaves_while_the_others_reduce_is_named(tmp_path):
    text = """
        import os, time
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            os._exit(0)
        time.sleep(14)
    """
    result = launch("-n", 2, "python", "-c", textwrap.dedent(text))
    words = " ".join(result.stderr.split())
    assert f"rank 1 on {os.uname().nodename} failed first (exit): ended with exit code 0 but without" in words


@mpiexec
@pytest.mark.parametrize(
    "wrapper", ["env PMI_SIZE=1 PMI_RANK=0 {}", "sh -c 'unset PMI_FD PMI_PORT PMI_SIZE; {}; true'"]
)
def test_worlds_of_one_are_no_success(tmp_path, wrapper):
    """An MPI library that does not belong to mpiexec starts N jobs of one rank, whatever the wrapper around it."""
    path = tmp_path / "p.py"
    path.write_text("from mpi4py import MPI\nprint('size', MPI.COMM_WORLD.size)\n")
    words = wrapper.format(f"{sys.executable} {path}")
    result = launch("-n", 2, "sh", "-c", f"exec {words}")
    if result.stdout.count("size 1") != 2:
        pytest.skip("this MPI finds its peers by another way")
    assert result.returncode == 71, result.stderr
    assert "each has an MPI world of size 1" in result.stderr


@mpiexec
def test_interrupts_reach_the_ranks_as_such_and_also_those_that_come_late(tmp_path):
    text = """
        import os, sys, time
        try:
            open("up-" + os.environ["RANK"], "w").close()
            time.sleep(100)
        except KeyboardInterrupt:
            open("saved-" + os.environ["RANK"], "w").close()
            sys.exit(75)
    """
    words = [
        "-n",
        2,
        "sh",
        "-c",
        '[ $RANK = 1 ] && sleep 2; exec "$@"',
        "-",
        sys.executable,
        "-c",
        textwrap.dedent(text),
    ]
    process = popen(*words, mark="interrupt", cwd=tmp_path)
    wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert_nothing_left("interrupt")


@mpiexec
def test_an_interrupt_at_the_very_start_is_heard():
    """Also by ranks that have not connected yet: the job once lasted for the whole time of grace."""
    for delay in (0.3, 0.5, 0.7, 0.9):
        process = popen("-n", 4, "--grace", "1000", "sleep", "1000", mark="early")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        too_early = "KeyboardInterrupt" in err and "dbrdist-launch" not in err  # Python itself was still starting
        assert process.returncode in (130, -2) or too_early, err
    assert_nothing_left("early")


@mpiexec
def test_what_an_outer_launch_left_does_not_count():
    env = {"PMI_RANK": "7", "PMI_SIZE": "9", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "RANK": "5"}
    env |= {"DBRDIST_LAUNCH_TOKEN": "stale", "DBRDIST_LAUNCH_CHANNEL": "127.0.0.1:1", "DBRDIST_HEARTBEAT": "/nowhere"}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    text = f"import os; print(*(os.environ[n] for n in {names}))"
    result = launch("-n", 2, "python", "-c", text, env=env)
    assert result.returncode == 0, result.stderr
    assert sorted(line.split("] ")[1] for line in result.stdout.splitlines()) == [
        "0 0 2 2 127.0.0.1 1",
        "1 1 2 2 127.0.0.1 1",
    ]


@mpiexec
def test_deadlines_of_the_user(tmp_path):
    result = launch("-n", 2, "--timeout", 2, "--log-dir", tmp_path, "sleep", 100)
    assert result.returncode == 124 and "did not end within 2 s (--timeout)" in result.stderr
    assert failure_in(tmp_path)["kind"] == "deadline"
    text = "import os, time; time.sleep(0 if os.environ['RANK'] == '1' else 100)"
    result = launch("-n", 2, "--exit-timeout", 2, "python", "-c", text)
    assert result.returncode == 124 and "(--exit-timeout)" in result.stderr, result.stderr


@mpiexec
def test_ps_stacks_and_stop_find_a_running_job(tmp_path):
    from support import run_subcommand

    env = {"TEST_FOLDER": str(tmp_path), "TEST_STEPS": "100000", "XDG_RUNTIME_DIR": str(tmp_path)}
    process = popen("-n", 2, "--name", "mine", "python", PROGRAMS / "counting.py", mark="looked", env=env)
    until = time.monotonic() + 40
    found = None  # a job that beats, and has something to save
    while found is None or "100000" not in found.stdout or not (tmp_path / "checkpoint.json").exists():
        assert time.monotonic() < until, found
        time.sleep(0.05)
        found = run_subcommand("ps", env=env)
    assert "mine" in found.stdout, found
    found = run_subcommand("stacks", str(process.pid), env=env)
    assert found.stdout.count("counting.py") >= 2, found
    process.send_signal(signal.SIGQUIT)
    assert "no job 'nobody' is running" in run_subcommand("stop", "nobody", env=env).stderr
    assert "asked to save and stop" in run_subcommand("stop", str(process.pid), env=env).stdout
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert f"pid {process.pid} " not in run_subcommand("ps", env=env).stdout  # jobs of other logins are shown too
    assert_nothing_left("looked")


@mpiexec
def test_options_are_read_from_the_environment():
    result = launch(
        "python", "-c", "print('well')", env={"DBRDIST_LAUNCH_RANKS": "2", "DBRDIST_LAUNCH_TIMESTAMPS": "1"}
    )
    assert result.stdout.count("well") == 2, result.stderr
    assert environment("x")["OMP_NUM_THREADS"] == "1" and os.environ


@mpiexec
def test_a_report_knows_the_others_last_beats(tmp_path):
    """They were as old as the last question, up to a second: a job that fails at once had made no step."""
    text = """
        import os, time
        from dbrdist_launch import heartbeat
        if os.environ["RANK"] == "0":
            while True:
                heartbeat.beat(7)
                if not os.path.exists("there"):
                    open("there", "w").close()
                time.sleep(0.01)
        while not os.path.exists("there"):
            time.sleep(0.01)
        heartbeat.beat(3)
        os._exit(5)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(text))
    result = launch("-n", 2, "--log-dir", tmp_path / "logs", "python", "program.py", cwd=tmp_path)
    failure = failure_in(tmp_path / "logs")
    assert (failure["step"], failure["others"][0]["step"]) == (3, 7), result.stderr
    ages = failure["last_beat_seconds"], failure["others"][0]["last_beat_seconds"]
    assert all(0 <= age < result.seconds for age in ages)
