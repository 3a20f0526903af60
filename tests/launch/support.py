"""Runs the launcher as a user would, and looks for what it left behind."""

import json
import os
import pathlib
import subprocess
import sys
import time
import uuid

from dbrdist_launch import messages

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "launch" / "programs"
MARK = "DBRDIST_TEST_MARK"


def marked(mark, exclude=()):
    """The processes, not zombies, that carry a mark in their environment: `pid command line`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in exclude:
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:
                        found.append(f"{entry.name} {command}")
            except OSError:
                continue
    return found


def environment(mark, **extra):
    """This process's environment with the package to be tested, a mark, and no MPI of an outer launch."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PMIX_", "MPI_LOCAL", "DBRDIST_"))}
    return {**kept, "PYTHONPATH": str(ROOT / "launch"), "OMP_NUM_THREADS": "1", MARK: mark, **extra}


def popen(*arguments, mark="", python=sys.executable, env=None, **options):
    """Start `dbrdist-launch` with arguments."""
    words = [python, "-m", "dbrdist_launch", *map(str, arguments)]
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        **options,
    }
    return subprocess.Popen(words, env=environment(mark, **(env or {})), **options)


def launch(*arguments, timeout=40.0, python=sys.executable, env=None, **options):
    """Run the launcher to its end; fails when it left a process. The result has `seconds` added."""
    mark = uuid.uuid4().hex
    started = time.monotonic()
    process = popen(*arguments, mark=mark, python=python, env=env, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"dbrdist-launch hung for {timeout} s; output:\n{out}\n{err}") from None
    result = subprocess.CompletedProcess(arguments, process.returncode, out, err)
    result.seconds = time.monotonic() - started
    assert_nothing_left(mark)
    return result


def wait_until(condition, seconds=40.0):
    """Wait for an event that `condition()` sees."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"nothing of the kind within {seconds} s"
        time.sleep(0.02)


def failure_in(log_dir):
    """The failure of the last job in a folder of logs."""
    return json.loads((log_dir / "latest" / "status.json").read_text())["failure"]


def attempts_in(log_dir):
    """The attempts of the last job in a folder of logs."""
    return json.loads((log_dir / "latest" / "status.json").read_text())["attempts"]


def assert_nothing_left(mark, seconds=3.0):
    """No process of a launch may outlive it (a moment is allowed for the kernel to tidy up)."""
    until = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    left = marked(mark)
    for line in left:
        os.kill(int(line.split()[0]), 9)
    assert not left, "left behind:\n" + "\n".join(left)


def run_subcommand(*arguments, env=None, timeout=40.0):
    """Run `dbrdist-launch ps` and the like."""
    words = [sys.executable, "-m", "dbrdist_launch", *arguments]
    return subprocess.run(words, env=environment("sub", **(env or {})), capture_output=True, text=True, timeout=timeout)


def told(message):
    """(kind, fields) of a message, as on the wire; those of an event beside its name."""
    head, data = messages.write(message)
    fields = json.loads(head)
    fields.pop("n", None)
    fields |= fields.pop("fields") if fields["t"] == "event" else {}
    return fields.pop("t"), {**fields, "data": bytes(data)} if data else fields


def message(kind, data=b"", **fields):
    """The message of a kind; an event's fields beside its name."""
    if kind == "event":
        fields = {"event": fields.pop("event"), "fields": fields}
    return messages.read({"t": kind, **fields}, data)
