"""As much of mpi4py as the communicators use, with ranks that are threads of this process: no launcher, no MPI.

What is sent is copied when it is sent, so that a rank that reads or writes a buffer too late is noticed. Messages never
wait for their receiver. Nothing is watched, and nothing overlaps with backward.
"""

from __future__ import annotations

import functools
import operator
import pickle
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from dbrdist.comm.communicators import cores, mpi_communicator
from dbrdist.comm.failure import abort
from dbrdist.comm.transport import call_log, hosts, mpi

LIMIT_SECONDS = 60.0
MOMENT_SECONDS = 0.002
_here = threading.local()  # comm: the world as this thread's rank has it; record: its verbs


class Job:
    """What all ranks share."""

    def __init__(self):
        self.changed = threading.Condition()
        self.failed = False
        self.num_living = 0  # communicators that were made and not freed, of all ranks

    def wait_for(self, test):
        with self.changed:
            if not self.changed.wait_for(lambda: self.failed or test(), LIMIT_SECONDS):
                raise TimeoutError("the other ranks do not come")
        self.look()

    def look(self):
        if self.failed:
            raise RuntimeError("another rank has failed")


class Slot:
    """One meeting of a communicator."""

    def __init__(self, size):
        self.items, self.num_there, self.made = [None] * size, 0, {}


class Group:
    """One communicator: its ranks, as numbered in the world, and what is under way between them."""

    def __init__(self, job, members):
        self.job, self.members, self.size, self.slots = job, members, len(members), {}
        self.mail = defaultdict(lambda: SimpleNamespace(box={}, num_sent=0, num_taken=0))  # (from, to, tag) ->

    def Translate_ranks(self, ranks, other):
        return [other.members.index(self.members[rank]) for rank in ranks]

    def Free(self):
        """It is for the communicator to end."""


class Request:
    def __init__(self, job, is_there, finish=lambda: None):
        self._job, self._is_there, self._finish, self._is_done = job, is_there, finish, False

    def Test(self):
        """Waits a moment itself, so that the other threads run."""
        self._job.look()
        if not self._is_done and not self._is_there():
            with self._job.changed:
                self._job.changed.wait_for(lambda: self._job.failed or self._is_there(), MOMENT_SECONDS)
        if not self._is_done and self._is_there():
            self._finish()
            self._is_done = True
        return self._is_done

    def wait(self):
        self._job.wait_for(self._is_there)
        assert self.Test()


class Comm:
    """A communicator as one of its ranks has it."""

    def __init__(self, group, rank):
        self._group, self.rank, self.size, self._number, self._is_free = group, rank, group.size, 0, False

    def Get_group(self):
        return self._group

    def Is_inter(self):
        return False

    def Free(self):
        assert not self._is_free, "it was freed before"
        self._is_free = True
        with self._group.job.changed:
            self._group.job.num_living -= 1

    # ---- meetings ----

    def _meet(self, item, finish=lambda items: None):
        group, job = self._group, self._group.job
        assert not self._is_free, "it was freed"
        self._number += 1
        with job.changed:
            slot = group.slots.setdefault(self._number, Slot(self.size))
            slot.items[self.rank] = item
            slot.num_there += 1
            job.changed.notify_all()
        request = Request(job, lambda: slot.num_there == self.size, lambda: finish(slot.items))
        request.slot = slot
        return request

    def _found(self, item):
        """What all ranks bring."""
        found = []
        self._meet(pickle.dumps(item), lambda items: found.extend(map(pickle.loads, items))).wait()
        return found

    def _made(self, slot, key, members):
        """The communicator that the ranks of a meeting make for themselves."""
        with self._group.job.changed:
            group = slot.made.setdefault(key, Group(self._group.job, members))
            self._group.job.num_living += 1
        return Comm(group, members.index(self._group.members[self.rank]))

    def Idup(self):
        request = self._meet(None)
        return self._made(request.slot, None, self._group.members), request

    def Dup(self):
        made, request = self.Idup()
        request.wait()
        return made

    def Split(self, color, key):
        found = []
        request = self._meet((color, key, self.rank), found.extend)
        request.wait()
        if color is Module.UNDEFINED:
            return Module.COMM_NULL
        ranks = [rank for other, _, rank in sorted((o, k, r) for o, k, r in found if o == color)]
        return self._made(request.slot, color, tuple(self._group.members[rank] for rank in ranks))

    def Split_type(self, kind, key):
        assert kind is Module.COMM_TYPE_SHARED
        return self.Split(0, key)

    def allgather(self, item):
        return self._found(item)

    # No reductions of objects: mpi4py duplicates the communicator in the first of them while it keeps Python's lock, so
    # that ranks with two threads can wait for each other for ever.

    def bcast(self, item, root=0):
        return self._found(item if self.rank == root else None)[root]

    def Ibarrier(self):
        return self._meet(None)

    def Barrier(self):
        self.Ibarrier().wait()

    def Ibcast(self, buffer, root):
        x = array_of(buffer)

        def take(items):
            if self.rank != root:  # whose memory may be read-only
                x[...] = items[root]

        return self._meet(x.copy() if self.rank == root else None, take)

    def Bcast(self, buffer, root):
        self.Ibcast(buffer, root).wait()

    def Iallgather(self, sent, received):
        def take(items):
            received[...] = items

        return self._meet(sent.copy(), take)

    def Iallgatherv(self, sent, received):
        raw, (counts, starts), _ = received
        mine = slice(starts[self.rank], starts[self.rank] + counts[self.rank])

        def take(items):
            for theirs, count, start in zip(items, counts, starts, strict=True):
                raw[start : start + count] = theirs

        return self._meet((raw[mine] if sent is Module.IN_PLACE else array_of(sent)).copy(), take)

    def Allgatherv(self, sent, received):
        self.Iallgatherv(sent, received).wait()

    def Alltoallv(self, sent, received):
        raw, (counts, starts), _ = received
        own, (own_counts, own_starts), _ = sent

        def take(items):
            for (theirs, their_counts, their_starts), count, start in zip(items, counts, starts, strict=True):
                begin = their_starts[self.rank]
                assert count == their_counts[self.rank]
                raw[start : start + count] = theirs[begin : begin + count]

        self._meet((own.copy(), list(own_counts), list(own_starts)), take).wait()

    def Iallreduce(self, sent, x, op):
        def take(items):
            x[...] = functools.reduce(op, items)

        return self._meet((x if sent is Module.IN_PLACE else sent).copy(), take)

    def Allreduce(self, sent, x, op):
        self.Iallreduce(sent, x, op).wait()

    def Ireduce(self, sent, received, op, root):
        def take(items):
            if self.rank == root:
                received[...] = functools.reduce(op, items)

        return self._meet((received if sent is Module.IN_PLACE else sent).copy(), take)

    def Ireduce_scatter(self, sent, received, counts, op):
        start = int(sum(counts[: self.rank]))

        def take(items):
            received[...] = functools.reduce(op, items)[start : start + counts[self.rank]]

        return self._meet(sent.copy(), take)

    # ---- messages ----

    def _mail(self, sender, receiver, tag):
        return self._group.mail[sender, receiver, tag]

    def Isend(self, buffer, peer, tag=0):
        job, sent = self._group.job, array_of(buffer)
        raw = sent if isinstance(sent, bytes) else sent.tobytes()
        with job.changed:
            mail = self._mail(self.rank, peer, tag)
            mail.box[mail.num_sent] = raw
            mail.num_sent += 1
            job.changed.notify_all()
        return Request(job, lambda: True)

    def Irecv(self, buffer, peer, tag=0):
        x = array_of(buffer)
        with self._group.job.changed:
            mail = self._mail(peer, self.rank, tag)
            number = mail.num_taken
            mail.num_taken += 1

        def take():
            x[...] = np.frombuffer(mail.box.pop(number), x.dtype).reshape(x.shape)

        return Request(self._group.job, lambda: number in mail.box, take)

    def Iprobe(self, peer, tag):
        self._group.job.look()

    def Improbe(self, peer, tag, status):
        self._group.job.look()
        with self._group.job.changed:
            mail = self._mail(peer, self.rank, tag)
            raw = mail.box.pop(mail.num_taken, None)
            mail.num_taken += raw is not None
        if raw is None:
            return None
        status.Get_count = lambda kind: len(raw) // np.dtype(kind).itemsize

        def receive(buffer):
            x = array_of(buffer)
            x[...] = np.frombuffer(raw, x.dtype).reshape(x.shape)

        return SimpleNamespace(Recv=receive)


def array_of(buffer):
    return buffer[0] if isinstance(buffer, list) else buffer


class Module:
    """In the place of mpi4py.MPI."""

    ANY_SOURCE, ANY_TAG = -1, -1
    BYTE, INT64_T, INT = np.uint8, np.int64, np.int32
    SUM, LOR, MIN, MAX = operator.add, np.logical_or, np.minimum, np.maximum
    IN_PLACE, UNDEFINED, COMM_NULL, COMM_TYPE_SHARED = object(), object(), object(), object()
    THREAD_SINGLE, THREAD_MULTIPLE = 0, 3
    Comm = Comm
    Status = SimpleNamespace

    @property
    def COMM_WORLD(self):
        return _here.comm

    def Query_thread(self):
        return self.THREAD_SINGLE  # what overlaps with backward is one rank's in a process

    def Is_initialized(self):
        return True

    def Is_finalized(self):
        return False


class OwnRecord:
    """In the place of the module of records: a rank's thread has a record of its own, as a process has."""

    @property
    def process(self):
        return _here.record


def on_ranks(monkeypatch, size, function, layout=lambda rank, size: 0, all_are_freed=False):
    """What ``function()`` returns on each rank; the first error of any. ``layout(rank, size)`` numbers the hosts.

    With ``all_are_freed`` no communicator may be left.
    """
    module, job = Module(), Job()
    for target, name, value in (
        (mpi, "start", lambda: module), (mpi, "started", lambda: module), (mpi, "_module", module), (mpi, "_spins", 20),
        (mpi, "_is_forked", False),
        (mpi, "unlink_segments", lambda: None), (mpi, "share_cores", lambda are_enough, num_ranks: False),
        (mpi_communicator, "call_log", OwnRecord()), (cores, "share_out", lambda comm: None),
        (abort, "guard_library_use", lambda comm: None),
        (hosts, "local_ranks", lambda _, comm: comm.Split(layout(comm.rank, comm.size), comm.rank)),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    world, results, errors = Group(job, tuple(range(size))), [None] * size, []

    def work(rank):
        _here.comm, _here.record = Comm(world, rank), call_log.CallLog(rank, threading.get_ident())
        try:
            results[rank] = function()
        except BaseException as error:
            errors.append(error)
            with job.changed:
                job.failed = True
                job.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    if all_are_freed:
        assert job.num_living == 0
    return results
