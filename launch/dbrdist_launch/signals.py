"""Python's `signal` without the enumerations around it, which cost each rank's start 12 ms of processor time."""

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

__all__ = ["signal"]
