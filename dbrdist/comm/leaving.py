"""How ranks leave: together, or with a report that says who left and who still waits for it.

At its exit a rank waits for the others, asleep. If they do not come, it tells them that it has left. A thread on every
rank listens for that; when its rank then stays in a verb that needs the one that left, it reports both and ends the
job. Ranks that go on without communicating (rank 0 writing results for an hour, say) are left alone.

The listening thread needs MPI with THREAD_MULTIPLE, and sees verbs of communicators only, not calls to mpi4py itself.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from dbrdist.comm import environment, mpi, waiting
from dbrdist.comm.agree import name_ranks

# A rank that has left while another has waited for it this long ends the job.
patience_seconds = 10.0
_LISTEN_SECONDS = 0.5


class _State:
    """What this process knows about leaving."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.channels: list[mpi.SideChannel] = []
        self.left: dict[int, float] = {}  # world rank -> when we heard
        self.over = False
        self.stop = threading.Event()
        self.listener: threading.Thread | None = None
        self.joined = False
        self.lock = threading.Lock()


_state = _State()


def join(comm: mpi.MpiCommunicator) -> None:
    """Watch over the ranks of ``comm`` from now on. Collective."""
    channel = mpi.SideChannel(comm)
    with _state.lock:
        _state.channels.append(channel)
    if _state.joined:
        return
    _state.joined = True
    atexit.register(_leave)
    mpi.call_before_finalize(_leave)
    if mpi.watching_is_allowed():
        _state.listener = threading.Thread(target=_listen, name="dbrdist listener", daemon=True)
        _state.listener.start()


def is_over() -> bool:
    """True once this process has met the others at the exit."""
    return _state.over


def all_leave_within(seconds: float) -> bool:
    """Wait for all ranks of all channels at their exit; False if they do not come in time."""
    if _state.over:
        return True
    if not _state.channels or mpi.started() is None:
        return False
    end = time.monotonic() + seconds
    pause = 0.0005
    while not _all_arrived():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    _state.over = True
    _stop_listening()
    return True


def _all_arrived() -> bool:
    return all([channel.arrive() for channel in _state.channels])


def _stop_listening() -> None:
    _state.stop.set()
    listener = _state.listener
    if listener is not None and listener is not threading.current_thread():
        listener.join(5)


def _leave() -> None:
    """The clean exit: meet the others; if they do not come, say that this rank has left and wait for them."""
    if _state.process != os.getpid() or mpi.started() is None:  # a forked child, or MPI has ended
        return
    if all_leave_within(patience_seconds / 2):
        return
    for channel in _state.channels:
        channel.tell_all()
    if not all_leave_within(patience_seconds):
        _say_who_is_missing()
    all_leave_within(float("inf"))


def _say_who_is_missing() -> None:
    """One line, by the lowest rank that has left."""
    rank, size = mpi.world()
    left = {*_state.left, rank}
    if rank != min(left):
        return
    still = [other for other in range(size) if other not in left]
    report_line(rank, f"finished {1.5 * patience_seconds:.0f} s ago; {name_ranks(still)} of {size} still running")


def _listen() -> None:
    while not _state.stop.wait(_LISTEN_SECONDS):
        if mpi.started() is None:
            return
        with _state.lock:
            channels = list(_state.channels)
        for channel in channels:
            for rank in channel.who_left():
                _state.left.setdefault(rank, time.monotonic())
        if _state.left:
            _check_waits()


def _check_waits() -> None:
    now = time.monotonic()
    for wait in waiting.all_waits():
        missing = sorted(set(wait.waits_for()) & {r for r, t in _state.left.items() if now - t > patience_seconds / 2})
        if missing and now - wait.since > patience_seconds:
            who = name_ranks(missing)
            have = "has" if len(missing) == 1 else "have"
            report_line(
                mpi.world()[0],
                f"{who} {have} left, but this rank has waited {now - wait.since:.0f} s for {who} in {wait.verb} "
                f"({wait.caller()}); the job is ended",
            )
            mpi.end_job(1)


def report_line(rank: int, text: str) -> None:
    """One line on stderr, by one system call."""
    os.write(2, f"{environment.prefix(rank)}{text}\n".encode())
