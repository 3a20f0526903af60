"""Starts the program of a rank as a child that cannot outlive its supervisor."""

import os
import signal
import sys
from collections.abc import Mapping

from .. import codes, linux


class Child:
    """The program: its process id and the read ends of its output, error and event pipes."""

    def __init__(self, command: list[str], environment: Mapping[str, str], directory: str | None) -> None:
        self.out, out_write = os.pipe()
        self.err, err_write = os.pipe()
        self.events, self.events_write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()  # a group of its own: a key pressed or a signal to mpiexec's group does not reach it
                linux.die_with_parent(parent)
                os.dup2(out_write, 1)
                os.dup2(err_write, 2)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
                os.set_inheritable(self.events_write, True)
                _run(
                    command,
                    {**environment, "DBRDIST_LAUNCH_EVENTS": f"{self.events_write},{stack_signal()}"},
                    directory,
                )
            finally:
                os._exit(codes.COMMAND_NOT_FOUND)
        os.close(out_write)
        os.close(err_write)
        os.close(self.events_write)


def _run(command: list[str], environment: dict[str, str], directory: str | None) -> None:
    try:
        if directory is not None:
            os.chdir(directory)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        subject = error.filename if error.filename is not None else command[0]
        if isinstance(subject, bytes):
            subject = os.fsdecode(subject)
        print(f"cannot run {command[0]!r}: {error.strerror}: {subject!r}", file=sys.stderr, flush=True)
        found = isinstance(error, PermissionError)
        os._exit(codes.COMMAND_NOT_RUNNABLE if found else codes.COMMAND_NOT_FOUND)


def stack_signal() -> int:
    """The signal on which a supervised Python program writes its stacks: one that nobody else uses."""
    return int(signal.SIGRTMAX) - 3
