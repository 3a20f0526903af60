"""The outer process of a rank, which mpiexec knows: passes signals on, and reports how the inner one ended."""

from __future__ import annotations

import os
import sys

from .. import codes, linux
from ..inherited import Inherited, restore_environment
from ..signals import PASSED_ON, STOPS, signal
from .supervisor import Supervisor

_FORWARDED = (*STOPS, *PASSED_ON)
_ORPHANED = signal.SIGURG  # sent by the kernel when the process of mpiexec that started us has ended


def main(arguments: list[str]) -> None:
    """Run the program of this rank under supervision, and leave with its exit code."""
    restore_environment()
    if len(arguments) < 2:
        print("usage: python .../dbrdist_launch/rank/main.py BACKEND ADDRESS ...", file=sys.stderr)
        os._exit(codes.USAGE)
    try:
        code = _run(*arguments[:2])
    except OSError as error:
        _complain(f"this rank cannot be started: {error.strerror} ({error!r})")
        code = codes.NOT_STARTED
    _leave(code)


def _run(backend: str, address: str) -> int:
    inherited, parent = Inherited(), os.getppid()
    inherited.widen()
    linux.adopt_orphans()
    lifeline, held = os.pipe()  # the inner process reads its end when the outer one dies
    inner = os.fork()
    if inner == 0:
        os.close(held)
        _leave(_inner(backend, address, lifeline, inherited))
    os.close(lifeline)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: linux.kill(inner, number))
    signal.signal(_ORPHANED, lambda *_: _tell(held) if os.getppid() != parent else None)
    inherited.hear((*_FORWARDED, _ORPHANED))
    linux.die_with_parent(parent, _ORPHANED)
    while True:
        pid, status = os.waitpid(-1, 0)  # also fetches what the inner process left to us
        if pid == inner:
            break
    linux.end_descendants()
    return codes.from_wait_status(status)[0]


def _tell(held: int) -> None:
    try:
        os.write(held, b"o")
    except OSError:
        pass  # the inner process has ended


def _inner(backend: str, address: str, lifeline: int, inherited: Inherited) -> int:
    one = None
    try:
        os.setsid()
        one = Supervisor(lifeline, backend, address, inherited)
        return one.run()
    except BaseException as error:
        # An error of our own must not leave the program running without anybody watching it.
        text = str(error) if isinstance(error, (ConnectionError, RuntimeError)) else repr(error)
        if one is None or not one.tell_failure(text):
            _complain(text)
        return codes.NOT_STARTED
    finally:
        linux.end_descendants()


def _complain(text: str) -> None:
    """Say it where mpiexec reads it, and the launcher from there."""
    rank = next((os.environ[name] for name in ("PMI_RANK", "PMIX_RANK", "SLURM_PROCID") if name in os.environ), "?")
    os.write(2, f"dbrdist-launch: rank {rank}: {text}\n".encode("utf-8", "replace"))


def _leave(code: int) -> None:
    """Without the end of the interpreter, which costs each rank 3 ms: nothing is left to be written."""
    os._exit(code)
