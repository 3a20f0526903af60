"""Ranks that wait for each other, or for one that has left, are reported and ended, although every process lives.

A thread on each rank listens on a side channel. A rank that has waited for a while says where, and how far it has come
on each communicator, to the lowest rank, which judges (``deadlock.py``). If ranks seem to wait for each other, it asks
them once more: only where all still are in the same waits, so that they were at one moment, they raise the error. A
rank that computes is never judged, however long the others wait for it; a thread of it that waits for a rank that has
left is.

At its exit a rank waits for the others, asleep. If they do not come, it says that it has left.

The thread needs MPI with THREAD_MULTIPLE, and sees verbs of communicators only, not calls to mpi4py itself.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import stat
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

from dbrdist.comm.failure.channel import FailureChannel
from dbrdist.comm.failure.deadlock import WaitState
from dbrdist.comm.failure.judge import DeadlockJudge
from dbrdist.comm.transport import call_log, environment, mpi
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.disagreement import name_ranks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from mpi4py.MPI import Comm


# A rank says where it waits once it has waited this long; a rank that has left says so after half of it.
patience_seconds = 2.0
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for a rank that is told to end by itself


class _Watch:
    """What this process knows about itself and the others."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.channels: list[FailureChannel] = []
        self.judges: dict[int, DeadlockJudge] = {}  # by position in channels, where this rank judges
        self.has_left = False
        self.others_left: set[int] = set()
        self.over = False
        self.is_ending = False
        self.stop = threading.Event()
        self.listener: threading.Thread | None = None
        self.joined = False
        self.lock = threading.Lock()
        self.said: set[int] = set()  # the waits that the judge was told of
        self.has_said_busy = False  # at the same time another thread did something
        self.left_at = 0.0  # when the judge heard of the first rank that has left
        self.has_named_missing = False
        self.told_at = 0.0  # when this rank was told to end its wait


_watch = _Watch()


def join(mpi_comm: Comm, members: tuple[int, ...]) -> None:
    """Watch over these ranks from now on. Collective."""
    if any(set(members) <= set(channel.members) for channel in _watch.channels):
        return
    channel = FailureChannel(mpi_comm, members)
    with _watch.lock:
        if call_log.process.rank == channel.judge:
            _watch.judges[len(_watch.channels)] = DeadlockJudge(channel)
        _watch.channels.append(channel)
    if _watch.joined:
        return
    _watch.joined = True
    atexit.register(_leave)
    mpi.call_before_finalize(_leave)
    if mpi.watching_is_allowed():
        _watch.listener = threading.Thread(target=_listen, name="dbrdist watch", daemon=True)
        _watch.listener.start()


def is_over() -> bool:
    """True once this process has met the others at the exit."""
    return _watch.over


# ---- the end of a program ----


def all_leave_within(seconds: float) -> bool:
    """Wait for all ranks of all channels at their exit; False if they do not come in time."""
    if _watch.over:
        return True
    if not _watch.channels or mpi.started() is None:
        return False
    end = time.monotonic() + seconds
    pause = 0.0005
    while not _all_arrived():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    _watch.over = True
    _stop_listening()
    return True


def _all_arrived() -> bool:
    arrived = [channel.arrive() for channel in _watch.channels]  # on every channel, even if the first is late
    return all(arrived)


def _stop_listening() -> None:
    _watch.stop.set()
    listener = _watch.listener
    if listener is not None and listener is not threading.current_thread():
        listener.join(5)


def _leave() -> None:
    """The clean exit: meet the others; if they do not come, say that this rank has left and wait for them."""
    if _watch.process != os.getpid() or mpi.started() is None:  # a forked child, or MPI has ended
        return
    if all_leave_within(patience_seconds / 2):
        return
    _watch.has_left = True
    state = _state(keys=())
    for number, channel in enumerate(_watch.channels):
        if number in _watch.judges:
            _watch.judges[number].hear(state, is_answer=False)
        else:  # nobody else needs to know: a thousand ranks would tell each other a million times
            channel.tell(channel.judge, {"what": "state", **state.encode()})
    if not all_leave_within(2 * patience_seconds):
        _say_who_is_missing()
    all_leave_within(float("inf"))


def _say_who_is_missing() -> None:
    """One line, once, by a rank that judges: it knows who has left."""
    rank, size = mpi.world()
    left = {*_watch.others_left, rank} if _watch.has_left else _watch.others_left
    if _watch.has_named_missing or not _watch.judges or not left:
        return
    _watch.has_named_missing = True
    still = [other for other in range(size) if other not in left]
    finished = f"finished {2.5 * patience_seconds:.0f} s ago"
    report_line(min(left), f"{finished}; {name_ranks(still)} of {size} still running")


# ---- the thread ----


def _listen() -> None:
    while not _watch.stop.wait(_LOOK_SECONDS):
        if mpi.started() is None:
            return
        _look()


def _look() -> None:
    """One turn: hear, say where this rank waits, and judge."""
    with _watch.lock:
        channels = list(enumerate(_watch.channels))
    for number, channel in channels:
        for words in channel.hear():
            _obey(words, channel, _watch.judges.get(number))
    _say_where()
    for judge in list(_watch.judges.values()):
        _pronounce(judge)
    now = time.monotonic()
    if _watch.told_at and now - _watch.told_at > _GRACE_SECONDS:
        _end_if_stuck()
    if _watch.left_at and now - _watch.left_at > 2 * patience_seconds:
        _say_who_is_missing()


def _state(keys: Iterable[Sequence[Hashable]] | None) -> WaitState:
    return WaitState.of(call_log.process, time.monotonic(), _watch.has_left, keys)


def _say_where() -> None:
    """Tell the judge where this rank waits, once for each wait, and once when it waits there no more.

    If another thread of it does something else meanwhile, it says so once more when that is over.
    """
    now = time.monotonic()
    calls = [call for call in list(call_log.process.running.values()) if call.is_waiting]
    late = {call.wait_id for call in calls if now - call.since > patience_seconds}
    if not late - _watch.said and not (late and _watch.has_said_busy and not call_log.process.is_busy()):
        if _watch.said and not _watch.said & {call.wait_id for call in calls}:
            _watch.said = set()
            for each in _watch.channels:
                each.tell(each.judge, {"what": "goes on", "rank": call_log.process.rank})
        return
    state = _state(keys=())
    if not late <= state.wait_ids():
        return
    _watch.said, _watch.has_said_busy = late, state.is_busy
    for each in _watch.channels:
        each.tell(each.judge, {"what": "state", **state.encode()})


def _obey(words: dict[str, Any], channel: FailureChannel, judge: DeadlockJudge | None) -> None:
    what = words.pop("what")
    if what in ("state", "answer"):
        state = WaitState.decode(words)
        if state.has_left:
            _watch.left_at = _watch.left_at or time.monotonic()
            _watch.others_left.add(state.rank)
        if judge is not None:
            judge.hear(state, what == "answer")
    elif what == "goes on":
        if judge is not None:
            judge.hear_that_it_goes_on(words["rank"])
    elif what == "ask":
        channel.tell(channel.judge, {"what": "answer", **_state(words.get("keys", ())).encode()})
    elif what == "end":
        for call in list(call_log.process.running.values()):
            if call.wait_id in words["wait_ids"]:
                call.error = words["text"]
        _watch.told_at = time.monotonic()
    elif what == "failing":
        say_record()


def _pronounce(judge: DeadlockJudge) -> None:
    verdict = judge.look()
    if verdict is None:
        return
    text, waits = verdict
    for rank, wait_ids in waits.items():
        judge.channel.tell(rank, {"what": "end", "text": text, "wait_ids": sorted(wait_ids)})


def _end_if_stuck() -> None:
    """A wait inside MPI cannot raise; whoever was told to end it and has not ends the job."""
    _watch.told_at = 0.0
    errors = [call.error for call in list(call_log.process.running.values()) if call.error]
    if errors:
        report_line(mpi.world()[0], f"{errors[0]}; the job is ended")
        say_record()
        mpi.end_job(1)


def end_for(call: Call, reason: str) -> None:
    """End the job, because this rank failed in a verb in which the others wait for its bytes inside MPI."""
    if not _watch.channels:
        return
    where = f"{call.verb} at {call.where()}"
    report_line(mpi.world()[0], f"{where} ended with {reason}; the others wait in it, so the job is ended")
    mpi.end_job(1)


_NUM_RECORDS = 4  # of each rank that stay in the temporary folder


def _remove_older(folder: str, rank: int) -> None:
    """Keep the newest few records of this rank: every failed job leaves one."""
    pattern = os.path.join(glob.escape(folder), f"dbrdist-verbs-rank{rank}-*.txt")
    found = []
    for path in glob.glob(pattern):
        with contextlib.suppress(OSError):  # another job removes it too
            about = os.lstat(path)
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                found.append((about.st_mtime, path))
    for _, path in sorted(found)[:-_NUM_RECORDS]:
        with contextlib.suppress(OSError):
            os.remove(path)


# ---- reports ----


def report_line(rank: int, text: str) -> None:
    """One line on stderr, by one system call."""
    os.write(2, f"{environment.prefix(rank)}{text}\n".encode())


def tell_that_this_rank_fails() -> None:
    """Have every rank write down its last verbs, this one too."""
    for channel in _watch.channels:
        channel.tell_all({"what": "failing"})
    say_record()


def say_record() -> None:
    """Write the last verbs of this rank to a file, once, and say where it is."""
    if _watch.is_ending:
        return
    _watch.is_ending = True
    rank = mpi.world()[0]
    if not call_log.process.last:
        return
    folder = tempfile.gettempdir()
    try:  # a new file, of a name that nobody knows before: others may write into this folder
        file, path = tempfile.mkstemp(prefix=f"dbrdist-verbs-rank{rank}-{os.getpid()}-", suffix=".txt", dir=folder)
        os.close(file)
    except OSError:
        return
    if call_log.process.dump(path):
        _remove_older(folder, rank)
        report_line(rank, f"the last {len(call_log.process.last)} verbs of this rank are in {path}")
    else:
        os.remove(path)
