"""What mpiexec or srun write themselves: their own words, and what processes write that a program has spawned.

A spawned process (MPI_Comm_spawn, `mpi4py.futures`) stands below mpiexec without a supervisor. Whatever is not known as
mpiexec's own is such a process's output, and is shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from ... import limits
from ...loop import Loop
from .pieces import SPAWNED, Piece

# Of MPICH and Intel MPI, Open MPI, Slurm and Flux.
_OWN = (
    rb"\[(mpiexec|proxy)[@:]|srun: |slurmstepd(-|: )|flux-job: |\[[\w.-]+:\d+\] |dbrdist-launch: "
    rb"|YOUR APPLICATION TERMINATED WITH |This typically refers to a problem with your application|"
    rb"Please see the FAQ page for debugging suggestions"
)
_RULE = rb"(=|-){60,}\s*$"
_IN_BOX = rb"=   |\s*$"


class StarterOutput:
    """Splits one stream of mpiexec's into its own lines and what is passed on as it came."""

    def __init__(self, say: Callable[[str], None], show: Callable[[bytes], None]) -> None:
        self.say, self.show = say, show
        self._rest = b""  # of a line that may be mpiexec's own
        self._in_line = False  # the last line that was shown is not complete
        self._blank = b""  # an empty line, which hydra writes before a message
        self._is_table = False  # of a program
        self._box: list[bytes] | None = None  # lines of a message between two rules

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line + b"\n")
        if self._rest and (self._in_line or len(self._rest) > limits.STARTER_LINE_BYTES):
            self._pass_on(self._rest)
            self._in_line, self._rest = True, b""

    def end(self) -> None:
        if self._rest:
            self._take(self._rest)
        self._rest = b""
        box, self._box = self._box, None
        for line in box or ():
            self._pass_on(line)
        self._blank = b""

    def _take(self, line: bytes) -> None:
        blank, self._blank = self._blank, b""
        if self._in_line or self._box is not None:
            self._pass_on(blank)
        elif line == b"\n":
            self._pass_on(blank)
            self._blank = line
            return
        elif not re.match(_RULE, line):
            self._pass_on(blank)
        if self._in_line:
            self._pass_on(line)
            self._in_line = False
        elif re.match(_RULE, line):
            self._on_rule(line)
        elif self._box is not None:
            self._box.append(line)
            if len(self._box) > limits.STARTER_BOX_LINES or (self._box[0][:1] == b"=" and not re.match(_IN_BOX, line)):
                self._release()
        elif re.match(_OWN, line):
            self._say(line)
        else:
            self._pass_on(line)

    def _on_rule(self, line: bytes) -> None:
        """A line of dashes begins a message of Open MPI and ends it; so does one of equals signs with hydra."""
        if self._is_table:
            self._is_table = False
            self._pass_on(line)
        elif self._box is None:
            self._box = [line]
        elif self._box[0][:1] != line[:1]:
            self._release()
            self._take(line)
        else:
            box, self._box = self._box, None
            for kept in (*box, line):
                self._say(kept)

    def _release(self) -> None:
        """These lines are no message of mpiexec's, and a rule that follows them begins none."""
        box, self._box = self._box or [], None
        self._pass_on(b"".join(box))
        self._is_table = True

    def _say(self, line: bytes) -> None:
        text = line.decode("utf-8", "surrogateescape").rstrip()
        if text:
            self.say(text)

    def _pass_on(self, data: bytes) -> None:
        if data:
            self.show(data)


class StarterOutputs:
    """Both streams of mpiexec's, read as they fill, and no faster than what they hold is written."""

    def __init__(
        self, loop: Loop, pipes: Sequence[int], say: Callable[[str], None], show: Callable[[Piece], None]
    ) -> None:
        self.loop, self.pipes, self.say, self.show = loop, list(pipes), say, show
        self.all_started = False  # before that the other words are those of ssh and the like
        self._owed = 0  # bytes that have not been written yet
        self._paused = False
        self._outputs = {
            pipe: StarterOutput(say, partial(self._on_spawned, stream)) for pipe, stream in zip(pipes, ("out", "err"))
        }
        self._watch()

    def _watch(self) -> None:
        for pipe in self.pipes:
            self.loop.watch(pipe, partial(self._read, pipe))

    def _read(self, pipe: int) -> None:
        data = os.read(pipe, limits.READ_BYTES)
        if data:
            self._outputs[pipe].feed(data)
        else:
            self.pipes.remove(pipe)
            self.loop.forget(pipe)
            self._outputs[pipe].end()

    def _on_spawned(self, stream: str, data: bytes) -> None:
        """What is not mpiexec's own: of ssh while ranks start, later of processes that the program has spawned."""
        if not self.all_started:
            for line in data.decode("utf-8", "surrogateescape").split("\n"):
                if line.strip():
                    self.say(line.rstrip())
            return
        self._owed += len(data) + limits.PIECE_BYTES
        self.show(Piece(SPAWNED, os.uname().nodename, stream, data, urgent=True))
        if self._owed > limits.LOCAL_WINDOW_BYTES and not self._paused:
            self._paused = True
            for pipe in self.pipes:
                self.loop.forget(pipe)

    def give_credit(self, count: int) -> None:
        """So many bytes have been written: more may be read."""
        self._owed -= count
        if self._paused and self._owed < limits.LOCAL_WINDOW_BYTES // 2:
            self._paused = False
            self._watch()

    def finish(self, last_words: Sequence[bytes]) -> None:
        """mpiexec has ended: what was left in its pipes."""
        for output, data in zip(self._outputs.values(), last_words):
            output.feed(data)
            output.end()
        for pipe in self.pipes:
            self.loop.forget(pipe)
