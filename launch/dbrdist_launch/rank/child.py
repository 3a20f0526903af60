"""Starts the program of a rank as a child that cannot outlive its supervisor."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

from .. import codes, limits, linux
from ..inherited import Inherited
from ..signals import PASSED_ON, STOPS, signal

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HIGH = 300  # the program is given descriptors from here on: one that closes the first hundred does not take them
_CAUGHT = (*STOPS, *PASSED_ON)


class Child:
    """The program: its process id, and our ends of its output, error, event and input pipes."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], directory: str | None, page: int | None,
        ignored: set[int], inherited: Inherited, prepare: Callable[[], None] = lambda: None, has_input: bool = False,
    ) -> None:  # fmt: skip
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        self.events, events_write = os.pipe()
        in_read, self.input = os.pipe() if has_input else (-1, -1)
        try:
            fcntl.fcntl(out_write, fcntl.F_SETPIPE_SZ, limits.PIPE_BYTES)
        except OSError:
            pass  # this user's pipes hold as much as they may
        parent = os.getpid()
        # A signal that comes before the child has put off our handlers waits until it has.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # a group of its own: a key pressed or a signal to mpiexec's group does not reach it
                linux.die_with_parent(parent)
                os.dup2(out_write, 1)
                os.dup2(err_write, 2)
                if has_input:
                    os.dup2(in_read, 0)
                signal.set_wakeup_fd(-1)
                for number in (*_CAUGHT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
                prepare()
                told = {"DBRDIST_LAUNCH_EVENTS": f"{_inherited(events_write)},{stack_signal()}"}
                if page is not None:
                    told["DBRDIST_HEARTBEAT"] = f"/proc/{parent}/fd/{page},{_inherited(page)}"
                _run(command, {**environment, **told}, directory, inherited)
            finally:
                os._exit(codes.COMMAND_NOT_FOUND)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for descriptor in (out_write, err_write, events_write, *((in_read,) if has_input else ())):
            os.close(descriptor)


def _inherited(descriptor: int) -> int:
    """A copy that the program gets, with a high number."""
    try:
        copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH)
    except OSError:  # so many files may not be open here
        copy = os.dup(descriptor)
    os.set_inheritable(copy, True)
    return copy


def _run(command: list[str], environment: dict[str, str], directory: str | None, inherited: Inherited) -> None:
    try:
        if directory is not None:
            os.chdir(directory)
        inherited.hand_on()
        try:
            os.execve(command[0], command, environment)  # an absolute path: see launcher/preparation/program.py
        except OSError as error:
            if error.errno != errno.ENOEXEC or _is_binary(command[0]):
                raise
            os.execve("/bin/sh", ["/bin/sh", *command], environment)  # it names no interpreter: as execvp(3) of C does
    except OSError as error:
        subject = error.filename if error.filename is not None else command[0]
        if error.errno == errno.ENOENT and (interpreter := _interpreter(command[0])):
            subject = interpreter  # with a carriage return where the script has the line ends of Windows
        print(f"cannot run {command[0]!r}: {error.strerror}: {subject!r}", file=sys.stderr, flush=True)
        found = isinstance(error, PermissionError)
        os._exit(codes.COMMAND_NOT_RUNNABLE if found else codes.COMMAND_NOT_FOUND)


def _interpreter(path: str) -> str:
    """What the first line of a script names to run it; empty where the file is no script, or is not there."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return ""
    return os.fsdecode(line[2:].rstrip(b"\n").strip(b" \t").partition(b" ")[0]) if line.startswith(b"#!") else ""


def _is_binary(path: str) -> bool:
    """Whether a file that the kernel cannot run is no script either, such as a program for another machine."""
    with open(path, "rb") as file:
        return b"\0" in file.read(1024)


def stack_signal() -> int:
    """The signal on which a supervised Python program writes its stacks: one that nobody else uses."""
    return int(signal.SIGRTMAX) - 3
