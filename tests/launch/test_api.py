"""Jobs that Python starts, as words of the command line."""

import os
import re
import signal
import subprocess
import sys
import threading

import dbrdist_launch
import pytest
from dbrdist_launch import api
from support import assert_nothing_left, environment, wait_until


def test_options_become_the_words_of_the_command_line():
    words = api.arguments({
        "ranks": 4, "env": ["A=1", "B"], "quiet": True, "only_env": False, "inject": False, "view": None, "show": "0-1",
        "max_restarts": 3, "port": 0,
    })  # fmt: skip
    assert words == [
        "--ranks", "4", "--env", "A=1", "--env", "B", "--quiet", "--no-inject", "--show-ranks", "0-1",
        "--max-restarts", "3", "--port", "0",
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"run\(\) has no option 'rank'; expected one of backend, .*ranks"):
        api.arguments({"rank": 1})
    assert not hasattr(dbrdist_launch, "nothing") and dbrdist_launch.run is api.run


def test_variables_may_be_a_mapping():
    assert api.arguments({"env": {"A": "1 2", "B": 3}}) == ["--env", "A=1 2", "--env", "B=3"]
    assert api.arguments({"env": {"A": None, "B": ""}}) == ["--env", "A", "--env", "B="]  # as it is here; empty


mpiexec = pytest.mark.mpiexec


@mpiexec
@pytest.mark.slow
def test_captured_output_is_what_was_written_wherever_it_runs(tmp_path, monkeypatch):
    """Also in a folder whose files have names of the standard library, and from a thread."""
    for name in ("queue", "socket", "selectors", "json", "dbrdist_launch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    program = "import sys; sys.stdout.buffer.write(b'1 of 2\\r2 of 2\\r\\nend\\xff\\xc3\\xa9\\n')"
    results = []
    words = [sys.executable, "-I", "-c", program]
    thread = threading.Thread(target=lambda: results.append(api.run(words, ranks=1, capture=True)))
    thread.start()
    thread.join(60)
    ((code, text),) = [(result.code, re.sub(r"\[0 \S+\] ", "", result.stdout)) for result in results]
    assert (code, text) == (0, "1 of 2\r2 of 2\r\nend\udcffé\n")


SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(1.0)  # longer than subprocess.run would wait
    open(os.environ["SAVED"] + os.environ["RANK"], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
open(os.environ["UP"] + os.environ["RANK"], "w").close()
while True:
    signal.pause()
"""
RUNS = """
import sys, dbrdist_launch
try:
    dbrdist_launch.run([sys.executable, "-c", sys.argv[1]], ranks=2, env={"SAVED": sys.argv[2], "UP": sys.argv[3]})
except KeyboardInterrupt:
    print("interrupted")
"""


@mpiexec
@pytest.mark.slow
@pytest.mark.parametrize("reaches_all", [False, True])
def test_an_interrupt_lets_the_ranks_save(tmp_path, reaches_all):
    """Of this process alone, as in a notebook, or of its whole group, as from a terminal."""
    words = [sys.executable, "-c", RUNS, SAVES, str(tmp_path / "saved-"), str(tmp_path / "up-")]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=environment("api"), start_new_session=True, **pipe)
    wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    (os.killpg if reaches_all else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "interrupted" in out and process.returncode == 0, err
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2)), err
    assert_nothing_left("api")
