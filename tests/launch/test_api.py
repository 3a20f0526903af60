"""Jobs that Python starts, as words of the command line."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from typing import ClassVar

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


class Launcher:
    """In the place of the launcher's process: it keeps how it was started, and leaves a record."""

    started: ClassVar = []
    code, record, said = 0, None, (None, None)

    def __init__(self, words, **options):
        self.words, self.options, self.returncode = words, options, self.code
        self.started.append(self)
        if self.record is not None:
            pathlib.Path(words[words.index("--record") + 1]).write_text(json.dumps(self.record))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_over = True

    def communicate(self):
        return self.said


DONE = {"state": "done", "failure": None, "attempts": [{"ranks": 2}], "more": 1}


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """Puts another process in the launcher's place; those that were started."""

    @contextlib.contextmanager
    def folder(prefix):
        assert prefix == "dbrdist-launch-run-"
        yield str(tmp_path)

    def make(**values):
        monkeypatch.setattr(api.scratch, "folder", folder)
        made = type("Made", (Launcher,), {"started": [], **values})
        monkeypatch.setattr(api.subprocess, "Popen", made)
        return made.started

    return make


def test_a_job_is_run_by_a_launcher_of_its_own(launcher, tmp_path):
    started = launcher(record=DONE)
    result = api.run(["python", tmp_path], ranks=2, quiet=True)
    assert result == api.Result(0, "done", None, [{"ranks": 2}], None, None)
    (one,) = started
    assert one.words[:2] == [sys.executable, "-c"] and one.words[3:7] == ["--ranks", "2", "--quiet", "--record"]
    assert one.words[8:] == ["--", "python", str(tmp_path)] and one.is_over
    assert f"die_with_parent({os.getpid()}, signal.SIGTERM)" in one.words[2]
    assert one.words[7] == str(tmp_path / "status.json")
    assert one.options == {"env": dict(os.environ), "stdout": None, "stderr": None}
    own = str(tmp_path / "own.json")
    api.run("lone", record=own, environment={"A": "1"})
    assert started[1].words[3:] == ["--record", own, "--", "lone"] and os.path.exists(own)
    assert started[1].options["env"] == {"A": "1"}


def test_output_that_is_captured_keeps_every_byte(launcher):
    started = launcher(record=DONE, said=(b"a\r\n\xff", b"b\xc3\xa9"))
    result = api.run("x", capture=True)
    assert (result.stdout, result.stderr) == ("a\r\n\udcff", "bé")
    assert started[0].options["stdout"] == started[0].options["stderr"] == subprocess.PIPE


@pytest.mark.parametrize(
    ("code", "record", "words"),
    [
        (2, None, "the job ended with exit code 2 (refused)"),
        (-9, None, "the job ended with exit code 137 (refused)"),
        (75, {**DONE, "state": "stopped"}, "the job ended with exit code 75 (stopped)"),
        (3, {**DONE, "state": "failed", "failure": {"rank": 0, "host": "a", "kind": "exit", "message": "exit code 3"}},
         "rank 0 on a failed first (exit): exit code 3"),
        (71, {**DONE, "state": "failed", "failure": {"rank": None, "host": None, "kind": "start", "message": "m"}},
         "the job failed first (start): m"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_end_well_is_an_error_where_that_is_asked(launcher, code, record, words):
    launcher(code=code, record=record)
    result = api.run("x")
    assert (result.code, result.state) == (abs(code) if code > -9 else 137, record["state"] if record else "refused")
    assert (result.failure, result.attempts) == ((record["failure"], record["attempts"]) if record else (None, []))
    with pytest.raises(api.JobError) as caught:
        api.run("x", check=True)
    assert str(caught.value) == words and caught.value.result == result


def test_an_exception_asks_the_job_to_stop_and_an_interrupt_more_stops_it(launcher):
    happened = []
    answers = [KeyboardInterrupt, KeyboardInterrupt, None, None]

    def communicate(self):
        answer = answers.pop(0)
        happened.append("waits")
        if answer is not None:
            raise answer
        self.ended = not answers
        return None, None

    launcher(
        communicate=communicate, send_signal=lambda self, number: happened.append(int(number)),
        poll=lambda self: 75 if self.ended else None, ended=False,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        api.run("x")
    assert happened == ["waits", signal.SIGTERM, "waits", signal.SIGINT, "waits", "waits"]


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
