"""The jobs that run on this machine: `dbrdist-launch ps`, `stacks JOB` and `stop JOB` ask their launchers.

Each launcher has a folder of its user's alone, with a socket and job.json; it goes when the launcher does.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from typing import Any

from .. import limits
from ..channel import Channel
from ..errors import LaunchError
from .runs import write_json

_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux


def base() -> str:
    """Where the folders stand."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return os.path.join(runtime, "dbrdist-launch")
    return f"/tmp/dbrdist-launch-{os.getuid()}"


class JobFolder:
    """This launcher's folder; `socket` is None where none can be made: then the job runs without it."""

    def __init__(self, name: str, command: list[str], token: str) -> None:
        self.folder: str | None = os.path.join(base(), str(os.getpid()))
        self.socket: str | None = os.path.join(self.folder, "socket")
        try:
            os.makedirs(base(), mode=0o700, exist_ok=True)
            found = os.stat(base(), follow_symlinks=False)
            if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(os.fsencode(self.socket)) > _MOST_PATH_BYTES:
                raise OSError("not ours alone")
            shutil.rmtree(self.folder, ignore_errors=True)  # of a launcher that was killed and had our number
            os.mkdir(self.folder, 0o700)
            content = {"job": name, "pid": os.getpid(), "command": command, "token": token, "started": time.time()}
            write_json(os.path.join(self.folder, "job.json"), content)
        except OSError:
            self.folder = self.socket = None

    def ssh_with(self, agent: str, options: tuple[str, ...]) -> str:
        """A program that calls ssh with options that hold spaces, which mpiexec would take for several words."""
        import shlex

        if self.folder is None:
            raise LaunchError("--ssh-option with spaces needs a folder for a script, but none can be created here")
        path = os.path.join(self.folder, "ssh")
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\nexec {shlex.join([agent, *options])} "$@"\n')
        os.chmod(path, 0o700)
        return path

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def running() -> list[dict[str, Any]]:
    """What job.json says of each job whose launcher lives; folders of dead ones are taken away."""
    found = []
    try:
        names = sorted(os.listdir(base()))
    except OSError:
        return []
    for name in names:
        folder = os.path.join(base(), name)
        try:
            with open(os.path.join(folder, "job.json")) as file:
                job = json.load(file)
            os.kill(int(job["pid"]), 0)
            found.append({**job, "socket": os.path.join(folder, "socket")})
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def ask(job: dict[str, Any], what: str) -> str:
    """The launcher's answer: what its ranks do, their stacks, or that they are asked to stop."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(job["socket"])
            channel = Channel(connection)
            channel.send("ask", token=job["token"], what=what)
            connection.settimeout(limits.REPLY_SECONDS)
            while True:
                messages = channel.receive()
                if messages is None:
                    return "no answer"
                if messages:
                    return str(messages[0].get("data", b"").decode(errors="replace"))
    except OSError as error:
        return f"no answer: {error.strerror or error}; the job may be between two attempts"


def find(word: str) -> dict[str, Any]:
    """The job of a name or process id."""
    jobs = running()
    for job in jobs:
        if word in (job["job"], str(job["pid"])):
            return job
    known = ", ".join(f"{job['job']} ({job['pid']})" for job in jobs) or "none"
    raise LaunchError(f"no job {word!r} is running on this machine; running jobs: {known}")


def describe(job: dict[str, Any]) -> str:
    """One job with its ranks."""
    seconds = time.time() - float(job.get("started", time.time()))
    head = f"{job['job']}  pid {job['pid']}  {seconds:.0f} s  {' '.join(job['command'])[:100]}"
    return "\n".join([head, *("  " + line for line in ask(job, "state").splitlines())])
