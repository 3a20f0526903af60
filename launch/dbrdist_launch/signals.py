"""Python's `signal` without the enumerations around it, which cost each rank's start 12 ms of processor time."""

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["PASSED_ON", "REAL_TIME", "STOPS", "signal"]

# Requests to save and stop, whoever sends them.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# What batch systems and their users send besides: for programs that have a handler, else a request to stop as well.
PASSED_ON = (
    signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR,
)  # fmt: skip
REAL_TIME = tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))  # the same, sent to the launcher
