"""The process of mpiexec or srun: started in a session of its own, and ended with all that belongs to it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from ... import limits, linux
from ...backends.job import Backend
from ...errors import LaunchError
from ...inherited import Inherited


class StarterProcess:
    """mpiexec or srun, with its output on pipes."""

    def __init__(
        self, command: list[str], environment: dict[str, str], backend: Backend, inherited: Inherited,
        without_input: bool = False,
    ) -> None:  # fmt: skip
        self.name = os.path.basename(command[0])
        self.ends_by, self.kills_step = backend.ends_by, backend.kills_step
        parent = os.getpid()
        # An own session: Ctrl-C reaches the launcher alone, which then asks the ranks. mpiexec reading from a terminal
        # that is not its own would be stopped: the launcher reads there, and hands on what is typed.
        stdin = subprocess.DEVNULL if without_input else None if not os.isatty(0) else subprocess.PIPE

        def prepare() -> None:
            linux.die_with_parent(parent, signal.SIGTERM)
            inherited.hand_on(files=False)  # it has some for each rank; the supervisors put the limit back

        linux.load()  # nothing may be loaded after the fork, beside threads that write
        try:
            self.process = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=prepare,
                close_fds=False,  # exec closes ours; what the user opened (`3>log`, `<(command)`) is for the ranks
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r}: {error.strerror}") from error
        assert self.process.stdout is not None and self.process.stderr is not None
        self.pipes = (self.process.stdout.fileno(), self.process.stderr.fileno())
        self.input = os.dup(self.process.stdin.fileno()) if self.process.stdin is not None else None  # whoever takes it
        if self.process.stdin is not None:
            self.process.stdin.close()

    def poll(self) -> int | None:
        return self.process.poll()

    def result(self) -> tuple[int, int]:
        """(exit code, signal or 0) of an ended starter."""
        code = self.process.returncode
        return (128 - code, -code) if code < 0 else (code, 0)

    def _wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def end(self) -> None:
        """End it, by force if need be, with everything in its group (ssh connections, local proxies)."""
        below = linux.descendants(self.process.pid)
        for number in self.ends_by:
            if self.process.poll() is None:
                self.process.send_signal(number)
                self._wait(0.5 if len(self.ends_by) == 1 else 0.3)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        linux.kill_group(self.process.pid, signal.SIGKILL)
        until = time.monotonic() + 1.0
        left = below
        while left and time.monotonic() < until:  # proxies clean up after mpiexec by themselves
            left = [pid for pid in left if linux.state(pid) not in ("", "Z")]
            if left:
                time.sleep(0.01)
        for pid in left:
            linux.kill(pid, signal.SIGKILL)

    def last_words(self) -> list[bytes]:
        """What is left in the pipes of an ended starter, one after the other; nothing is awaited."""
        found = []
        for pipe in self.pipes:
            os.set_blocking(pipe, False)
            data = b""
            try:
                while part := os.read(pipe, limits.READ_BYTES):
                    data += part
            except BlockingIOError:
                pass  # somebody who outlived it holds the pipe
            found.append(data)
        return found

    def close(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
