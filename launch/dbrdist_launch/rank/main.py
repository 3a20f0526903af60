"""Entry of a rank: `python .../rank/main.py BACKEND command ...`, which mpiexec or srun start in the program's place.

Two processes stand around the program. The outer one is what mpiexec knows; mpiexec may kill it at any time (it does
when a rank calls MPI_Abort). The inner one, in a session of its own, sees that, still reads the program's last words,
reports how it really ended, and leaves nothing behind. If the inner one is killed, the kernel kills the program.
"""

import os
import signal
import sys

if __name__ == "__main__" and not __package__:  # run by its path: `python -I -S rank/main.py` starts fastest
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    __package__ = "dbrdist_launch.rank"

from dbrdist_launch import codes, linux

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run the command after the backend's name under supervision; the exit code is the program's."""
    backend, command = arguments[:1], arguments[1:]
    if not command:
        print("usage: python .../dbrdist_launch/rank/main.py BACKEND command ...", file=sys.stderr)
        return codes.USAGE
    linux.adopt_orphans()
    lifeline, held = os.pipe()  # the inner process reads its end when the outer one dies
    inner = os.fork()
    if inner == 0:
        os.close(held)
        os._exit(_inner(backend[0], command, lifeline))
    os.close(lifeline)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: linux.kill(inner, number))
    while True:
        pid, status = os.waitpid(-1, 0)  # also fetches what the inner process left to us
        if pid == inner:
            break
    linux.end_descendants()
    return codes.from_wait_status(status)[0]


def _inner(backend: str, command: list[str], lifeline: int) -> int:
    from dbrdist_launch.rank.supervisor import Supervisor

    try:
        os.setsid()
        return Supervisor(command, lifeline, backend).run()
    except (ConnectionError, RuntimeError) as error:
        print(f"dbrdist-launch: {error}", file=sys.stderr)
        return codes.NOT_STARTED
    except BaseException:
        # An error of our own must not leave the program running without anybody watching it.
        import traceback  # 1 ms of each rank's start, if it were above

        traceback.print_exc()
        return codes.NOT_STARTED
    finally:
        linux.end_descendants()
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
