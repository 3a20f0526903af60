"""Exit codes: one table for all backends."""

DONE = 0
USAGE = 2  # the launch was refused: nothing was started
LOST_PEER = 14  # not ours: with it Open MPI ends a program whose peer on another host is gone
HOST_LOST = 69  # a host died or the network to it was cut (EX_UNAVAILABLE of sysexits.h)
NOT_STARTED = 71  # the ranks did not appear within the stated time (EX_OSERR)
PREEMPTED = 75  # asked to stop, saved its state, may be started again (EX_TEMPFAIL)
STALLED = 124  # no progress within the heartbeat time, or stopped (as `timeout` says it)
COMMAND_NOT_RUNNABLE = 126  # found, but not executable
COMMAND_NOT_FOUND = 127
DAEMON_FAILED = 213  # not ours: Open MPI ends with it where its session folder, called by its process id, exists


def from_signal(number: int) -> int:
    """The exit code that stands for an end by a signal."""
    return 128 + number


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals, which have no name of their own, as SIGRTMIN+n."""
    import signal  # its enumerations cost each rank's start 12 ms

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def from_wait_status(status: int) -> tuple[int, int]:
    """(exit code, signal number or 0) from what `os.waitpid` gave: an exit code of 9 is not a SIGKILL."""
    import os

    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return from_signal(number), number
    return os.WEXITSTATUS(status), 0


def describe_end(code: int, signal_number: int) -> str:
    """Exit code 3, or SIGKILL."""
    return signal_name(signal_number) if signal_number else f"exit code {code}"
