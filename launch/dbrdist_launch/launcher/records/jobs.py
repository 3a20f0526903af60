"""The jobs that run on this machine: `dbrdist-launch ps`, `stacks JOB` and `stop JOB` ask their launchers.

Each launcher has a folder of its user's alone, with a socket and job.json; it goes when the launcher does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import time
from typing import Any

from ... import limits, wire
from ...channel import Channel
from ...errors import LaunchError
from ...messages import Answer, Ask

_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux


def bases() -> list[str]:
    """Where folders may stand: a job of cron or Slurm has another place than a login by ssh. Our own is the first."""
    own = os.getuid()
    found = [f"/run/user/{own}/dbrdist-launch", f"/tmp/dbrdist-launch-{own}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return list(dict.fromkeys([os.path.join(runtime, "dbrdist-launch"), *found]))
    return [found[1], found[0]]


def base() -> str:
    """Where this launcher's folder stands."""
    return bases()[0]


class JobFolder:
    """This launcher's folder; `socket` is None where none can be made: then the job runs without it.

    Its name is random, since another container may use the same place and have the same process ids; and whether its
    launcher lives shows in a lock on it.
    """

    def __init__(self, name: str, command: list[str], token: str) -> None:
        self.folder: str | None = os.path.join(base(), os.urandom(6).hex())
        self.socket: str | None = os.path.join(self.folder, "socket")
        self._lock = -1
        try:
            os.makedirs(base(), mode=0o700, exist_ok=True)
            if not is_ours(base()) or len(os.fsencode(self.socket)) > _MOST_PATH_BYTES:
                raise OSError("not ours alone")
            self._make(name, command, token)
        except OSError:
            self.close()
            self.folder = self.socket = None

    def _make(self, name: str, command: list[str], token: str) -> None:
        """Under a name that nobody looks at until it is locked."""
        assert self.folder is not None
        new = os.path.join(base(), f".{os.path.basename(self.folder)}")
        os.mkdir(new, 0o700)
        self._lock = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content = {"job": name, "pid": os.getpid(), "command": command, "token": token, "started": time.time()}
        for file_name, text in (("job.json", wire.dumps(wire.valid(content))), ("token", token)):
            with open(os.path.join(new, file_name), "w") as file:
                file.write(text)
        os.rename(new, self.folder)

    def add_modules(self, bundle: bytes) -> None:
        """What ranks on this machine load first; where it cannot be written they do without."""
        if self.folder is None:
            return
        path = os.path.join(self.folder, "modules")
        try:
            with open(path, "xb") as file:
                file.write(bundle)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)

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
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_ours(folder: str) -> bool:
    """Whether a folder is its user's alone: what others could write there is neither shown nor believed."""
    try:
        found = os.stat(folder, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _is_abandoned(folder: str) -> bool:
    """Whether its launcher has ended: nobody holds the lock. A file system without locks says that it lives."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def running() -> list[dict[str, Any]]:
    """What job.json says of each job whose launcher lives; folders of dead ones are taken away."""
    return [job for place in bases() if is_ours(place) for job in _running_in(place)]


def _running_in(place: str) -> list[dict[str, Any]]:
    found = []
    for name in sorted(os.listdir(place)):
        folder = os.path.join(place, name)
        try:
            if name.startswith(".") or not is_ours(folder):
                continue  # a launcher is just making it
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with open(os.path.join(folder, "job.json"), "rb") as file:
                job = wire.loads(file.read())
            job = {**job, "job": str(job["job"]), "pid": int(job["pid"]), "command": list(map(str, job["command"]))}
            found.append({**job, "id": name, "socket": os.path.join(folder, "socket")})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def ask(job: dict[str, str], what: str) -> str:
    """The launcher's answer: what its ranks do, their stacks, or that they are asked to stop."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(job["socket"])
            channel = Channel(connection)
            channel.send(Ask(job["token"], what))
            connection.settimeout(limits.REPLY_SECONDS)
            while True:
                messages = channel.receive()
                if messages is None:
                    return "no answer"
                if messages:
                    (answer,) = messages[:1]
                    return answer.data.decode(errors="replace") if isinstance(answer, Answer) else "no answer"
    except OSError as error:
        return f"no answer: {error.strerror or error}; the job may be between two attempts"


def find(word: str) -> dict[str, Any]:
    """The one job of a name or process id, or of the word that `ps` shows where these are not unique."""
    jobs = running()
    found = [job for job in jobs if word in (job["job"], str(job["pid"]), job["id"])]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{job['job']} ({job['pid']})" for job in jobs) or "none"
    if found:
        several = ", ".join(f"{job['pid']} or {job['id']}" for job in found)
        raise LaunchError(
            f"{len(found)} running jobs are called {word!r}; give a process id or the job's id: {several}"
        )
    raise LaunchError(f"no job {word!r} is running on this machine; running jobs: {known}")


def plain(text: str) -> str:
    """Without what a terminal would obey; lines and tabs stay."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def describe(job: dict[str, Any]) -> str:
    """One job with its ranks."""
    seconds = time.time() - float(job.get("started", time.time()))
    head = f"{job['job']}  pid {job['pid']}  id {job['id']}  {seconds:.0f} s  {' '.join(job['command'])[:100]}"
    return "\n".join([head, *("  " + line for line in ask(job, "state").splitlines())])
