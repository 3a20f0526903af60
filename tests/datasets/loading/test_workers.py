"""Loader processes part by part, in this process: what they answer, where batches lie, how they end."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.datasets.loading import rings, workers
from dbrdist.datasets.loading.order import Step
from dbrdist.errors import LoaderError
from dbrdist.iterators import MultiprocessIterator
from tests.each import each

INSIDE, SLOT = 1 << 14, 1 << 16  # from so many bytes on, arrays travel beside the pickle, and batches in a slot


class OddError(Exception):
    """It cannot be rebuilt from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Sized:
    """Example i is an array of i bytes; some raise."""

    def __len__(self):
        return 200_000

    def __getitem__(self, i):
        if i == 1:
            raise KeyError("example 1")
        if i == 2:
            raise OddError("x", "y")
        return (np.arange(i) % 251).astype(np.uint8)


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def sized(i):
    return (np.arange(i) % 251).astype(np.uint8)


def request(*indices, slot=None, seed=3):
    step = Step(((0, np.array(indices)),))
    return step, seed, step, slot


@contextlib.contextmanager
def served(dataset, slots=()):
    """A worker in a thread, and the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=workers.serve, args=(theirs, list(slots)))
    for fd in (theirs.fileno(), *slots):
        os.set_inheritable(fd, True)
    thread.start()
    try:
        ours.send_bytes(pickle.dumps(dataset))
        yield ours, theirs
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        thread.join(30)
        assert not thread.is_alive()
        ours.close()
        theirs.close()


def slot_file():
    return os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)


@pytest.mark.timeout(60)
@each(sizes=[(5,), (INSIDE - 1,), (INSIDE,), (INSIDE, 7, INSIDE + 1), (SLOT - 1,), (SLOT,), (SLOT, 3, SLOT + 9)])
def test_arrays_take_the_way_that_their_size_says(sizes):
    slots = [slot_file(), slot_file()]
    beside = [size for size in sizes if size >= INSIDE]
    with served(Sized(), slots) as (pipe, _):
        for slot in (None, 1):
            pipe.send(request(*sizes, slot=slot))
            kind, data, found, is_stored, why_not = pipe.recv()
            assert (kind, found, why_not) == ("batch", beside, None)
            assert is_stored == (slot is not None and sum(beside) >= SLOT)
            if is_stored:
                starts = list(itertools.accumulate((size + -size % 64 for size in found), initial=0))
                buffers = [bytearray(os.pread(slots[1], n, at)) for n, at in zip(found, starts)]
            else:
                buffers = [workers._read(pipe.fileno(), n) for n in found]
            batch, skipped = pickle.loads(data, buffers=buffers)
            assert skipped == [] and [a.tolist() for a in batch] == [sized(n).tolist() for n in sizes]
            assert not pipe.poll(0)
    assert os.fstat(slots[0]).st_size == 0
    for fd in slots:
        os.close(fd)


@pytest.mark.timeout(60)
def test_errors_of_a_dataset_travel_with_their_traceback():
    with served(Sized()) as (pipe, _):
        for i, kind, words in ((1, KeyError, "example 1"), (2, LoaderError, "OddError: x and y")):
            pipe.send(request(i))
            what, data, sizes, is_stored, why_not = pipe.recv()
            error, text = pickle.loads(data)
            assert (what, sizes, is_stored, why_not) == ("error", [], False, None)
            assert type(error) is kind and error.args == (words,) and "__getitem__" in text
        pipe.send(request(5))
        assert pipe.recv()[0] == "batch"
    with served(Unreadable()) as (pipe, _):
        for _ in range(2):
            pipe.send(request(5))
            what, data, *_ = pipe.recv()
            assert what == "error" and type(pickle.loads(data)[0]) is ZeroDivisionError


@pytest.mark.timeout(60)
def test_children_of_a_worker_inherit_nothing():
    fd = slot_file()
    with served(Sized(), [fd]) as (pipe, theirs):
        pipe.send(request(5))
        pipe.recv()
        assert not os.get_inheritable(theirs.fileno()) and not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.timeout(60)
def test_a_slot_without_memory_is_left_empty_and_the_batch_takes_the_pipe():
    fd = slot_file()
    os.ftruncate(fd, 100)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with served(Sized(), [fd]) as (pipe, _):
        pipe.send(request(SLOT, slot=0))
        kind, data, sizes, is_stored, why_not = pipe.recv()
        assert (kind, sizes, is_stored) == ("batch", [SLOT], False) and "Operation not permitted" in why_not
        batch, _ = pickle.loads(data, buffers=[workers._read(pipe.fileno(), SLOT)])
        assert np.array_equal(batch[0], sized(SLOT)) and os.fstat(fd).st_size == 0
    os.close(fd)


@pytest.mark.timeout(60)
def test_bytes_that_come_in_pieces(monkeypatch):
    """Of pipes and of slots, which may take or give less than was asked for."""
    data = np.arange(1000).astype(np.uint8)
    write, readv, pwrite, preadv = os.write, os.readv, os.pwrite, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:7]))
    monkeypatch.setattr(os, "readv", lambda fd, views: readv(fd, [views[0][:9]]))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:11], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:13]], at))
    there, here = os.pipe()
    workers._write(here, memoryview(data))
    found = workers._read(there, 1000)
    assert np.array_equal(found, data) and found.dtype == np.uint8
    write(here, b"half")
    os.close(here)
    with pytest.raises(EOFError):
        workers._read(there, 5)
    os.close(there)
    fd = slot_file()
    assert rings.store(fd, [memoryview(data), memoryview(data[:3])]) is None
    assert os.fstat(fd).st_size == 1024 + 3  # each on a cache line of 64 bytes
    assert np.array_equal(rings._read(fd, slice(0, 1000)), data)
    assert rings._read(fd, slice(1024, 1027)).tolist() == [0, 1, 2]
    assert rings._read(fd, slice(5, 5)).tolist() == []
    os.close(fd)


@pytest.mark.timeout(60)
def test_places_in_a_slot():
    assert list(rings._places([0, 1, 64, 65, 3])) == [
        slice(0, 0), slice(0, 1), slice(64, 128), slice(128, 193), slice(256, 259),
    ]  # fmt: skip


@pytest.mark.timeout(60)
def test_the_slot_used_last_is_used_first():
    ring = rings.Ring(3)
    assert len(ring.fds) == 3 and [ring.take() for _ in range(4)] == [0, 1, 2, None]
    ring.give_back(1)
    ring.give_back(2)
    assert [ring.take(), ring.take(), ring.take()] == [2, 1, None]
    assert len(rings.Ring(200).fds) == 128 and rings.Ring(0).take() is None
    ring.give_back(0)
    with pytest.warns(RuntimeWarning, match="batches of loader processes: why; they"):
        ring.fail("why")
    ring.fail("it is said once")  # another warning would be an error
    assert ring.take() is None


def filled(ring, data):
    """A slot of a ring with data in it, as a worker leaves it."""
    slot = ring.take()
    assert rings.store(ring._files[slot].number, [memoryview(a) for a in data]) is None
    return slot


@pytest.mark.timeout(60)
def test_slots_are_mapped_once_and_again_where_they_have_grown():
    ring = rings.Ring(1)
    for size in (4096, 4096, 9000, 100):
        data = [sized(size), sized(5)]
        found = ring.lend(filled(ring, data), [size, 5])
        assert all(np.array_equal(a, b) for a, b in zip(found, data, strict=True)) and found[0].flags.writeable
        del found
        maps = ring._maps[0]
        assert (size != 4096 or len(maps) < 5000) and ring._free == [0]
    assert len(maps) > 9000


@pytest.mark.timeout(60)
def test_slots_that_a_forked_child_sees_are_not_used_again():
    ring = rings.Ring(2)
    found = ring.lend(filled(ring, [sized(9)]), [9])
    assert not any(lease.atexit for lease in ring._leases.values())
    rings._leave_all()
    del found
    assert ring._free == [1]


@pytest.mark.timeout(60)
def test_without_anonymous_files_or_maps_batches_are_read(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(rings.mmap, "mmap", refuse)
        ring = rings.Ring(2)
        slot = filled(ring, [sized(70), sized(5)])
        with pytest.warns(RuntimeWarning, match="Cannot allocate memory; they go through pipes"):
            found = ring.lend(slot, [70, 5])
        assert [a.tolist() for a in found] == [sized(70).tolist(), sized(5).tolist()] and ring.take() is None
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.warns(RuntimeWarning, match="no shared memory .*Cannot allocate memory"):
        ring = rings.Ring(2)
    assert ring.fds == () and ring.take() is None


# ---- seen from the parent -------------------------------------------------------------------------------------------
class Process:
    """A worker in a thread, in the place of a process."""

    started = []

    def __init__(self, args, stdin, pass_fds, env, start_new_session):
        self.args, self.pass_fds, self.env = args, pass_fds, env
        assert start_new_session and stdin == subprocess.DEVNULL
        self.pid, self.returncode = 1000 + len(self.started), None
        pipe, *slots = [os.dup(fd) for fd in pass_fds]
        self.thread = threading.Thread(target=self.run, args=(Connection(pipe), slots))
        self.thread.start()
        self.started.append(self)

    def run(self, pipe, slots):
        self.prepared = pipe.recv()
        workers.serve(pipe, slots)
        pipe.close()
        for fd in slots:
            os.close(fd)
        self.returncode = 0

    def wait(self, timeout=None):
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout)

    def kill(self):
        """A thread that took longer than a worker may ends all the same."""


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(Process, "started", [])
    names = {"Popen": Process, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(workers, "subprocess", SimpleNamespace(**names))
    monkeypatch.setattr(workers, "_python", lambda: ["python"])
    return Process.started


@pytest.mark.timeout(60)
def test_workers_are_started_without_the_launchers_variables(processes, monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "OMP_NUM_THREADS", "MINE"):
        monkeypatch.setenv(name, "7")
    pool = workers.WorkerPool(Sized(), 3, None, 2)
    assert pool.pids == [1000, 1001, 1002]
    for process in processes:
        assert process.env["MINE"] == "7" and process.env["OMP_NUM_THREADS"] == process.env["MKL_NUM_THREADS"] == "1"
        assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & set(process.env)
        assert process.pass_fds[1:] == pool._ring.fds and len(pool._ring.fds) == 2
        assert process.args[-3:] == [str(fd) for fd in process.pass_fds]
    pool.close()
    assert not any(process.thread.is_alive() for process in processes)
    assert type(processes[0].prepared["authkey"]) is bytes


@pytest.mark.timeout(60)
def test_workers_take_turns_and_are_replaced(processes):
    pool = workers.WorkerPool(Sized(), 2, 2, 0)
    tickets = [pool.submit(request(i)[:3]) for i in range(10, 17)]
    assert [processes.index(t.worker.process) for t in tickets] == [0, 1, 0, 1, 2, 3, 2]
    assert [t.number for t in tickets] == [1, 1, 2, 2, 1, 1, 2]
    for i, ticket in enumerate(tickets, 10):
        batch, _ = pool.collect(ticket, 30, RuntimeWarning)
        assert len(batch[0]) == i
    assert pool._retired == [] and [p.thread.is_alive() for p in processes] == [False, False, True, True]
    pool.close()
    assert not any(p.thread.is_alive() for p in processes) and pool.pids == []


@pytest.mark.timeout(60)
def test_answers_lie_in_slots_that_come_back(processes):
    pool = workers.WorkerPool(Sized(), 1, None, 2)
    free = pool._ring._free
    ticket = pool.submit(request(SLOT)[:3])
    assert ticket.slot == 0 and free == [1]
    batch, _ = pool.collect(ticket, 30, RuntimeWarning)
    assert np.array_equal(batch[0], sized(SLOT)) and free == [1]
    small = pool.submit(request(9)[:3])
    assert small.slot == 1
    pool.collect(small, 30, RuntimeWarning)
    assert free == [1]
    del batch
    assert free == [1, 0]
    failing = pool.submit(request(1)[:3])
    with pytest.raises(KeyError) as caught:
        pool.collect(failing, 30, RuntimeWarning)
    assert "This happened in a loader process, at:\nTraceback" in caught.value.__notes__[0] and free == [1, 0]
    assert failing.worker.num_answered == failing.worker.num_asked == 3
    pool.close()


@pytest.mark.timeout(60)
def test_a_slow_worker_is_waited_for_with_a_warning(processes, monkeypatch):
    pool = workers.WorkerPool(Sized(), 1, None, 0)
    waits = []

    def wait(timeout):
        waits.append(timeout)
        return timeout is None

    ticket = pool.submit(request(5)[:3])
    monkeypatch.setattr(ticket.worker, "wait", wait)
    with pytest.warns(MultiprocessIterator.TimeoutWarning, match="from loader process 1000 for 2.5 seconds; still"):
        pool.collect(ticket, 2.5, MultiprocessIterator.TimeoutWarning)
    assert waits == [2.5, None]
    pool.close()


@pytest.mark.timeout(60)
@each(
    case=[
        (None, 0, "closed its pipe without ending after 0 batches$"),
        (-signal.SIGKILL, 0, r"was killed by SIGKILL \(out of memory\?\) after 0 batches$"),
        (-signal.SIGTERM, 2, "was killed by SIGTERM after 2 batches$"),
        (0, 0, "ended with exit code 0 after 0 batches$"),
        (1, 3, "ended with exit code 1 after 3 batches$"),
        (2, 0, "ended with exit code 2 after 0 batches$"),
        (1, 0, "ended with exit code 1 after 0 batches; its own message stands above; a script needs `if __name__"),
    ]
)
def test_how_a_worker_ended(case):
    code, num_answered, words = case
    worker = workers.Worker.__new__(workers.Worker)
    worker.pipe, theirs = multiprocessing.Pipe()
    theirs.close()

    def wait(timeout):
        assert 0 < timeout < 10
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout)

    worker.process = SimpleNamespace(wait=wait, returncode=code, pid=77)
    worker.num_answered = num_answered
    with pytest.raises(LoaderError, match=f"expected a batch from loader process 77, but it {words}"):
        worker.answer(None)
    worker.pipe.close()


@pytest.mark.timeout(60)
def test_a_worker_that_does_not_end_is_killed():
    log = []

    class Stuck:
        def wait(self, timeout=None):
            log.append(timeout)
            if timeout is not None:
                raise subprocess.TimeoutExpired("worker", timeout)

        def kill(self):
            log.append("kill")

    stuck = SimpleNamespace(pipe=SimpleNamespace(close=lambda: log.append("close")), process=Stuck())
    running, retired = [stuck], [stuck]
    workers._end_workers(running, retired)
    assert log == ["close"] * 2 + [2.0, "kill", None] * 2 and running == retired == []


@pytest.mark.timeout(60)
def test_an_iterator_has_slots_for_what_is_in_the_making(processes):
    with MultiprocessIterator(Sized(), 2, shuffle=False, n_processes=2, n_prefetch=3) as it:
        with pytest.raises(KeyError):
            it.next()
        assert len(processes) == 2 and len(it._pool._ring.fds) == 2 + 3 + 2 and len(it._ahead) == 0
    assert not any(p.thread.is_alive() for p in processes)
    with MultiprocessIterator(Sized(), 2, shuffle=False, n_processes=1, shared_mem=0, maxtasksperchild=5) as it:
        with pytest.raises(KeyError):
            it.next()
        assert it._pool._ring.fds == () and it._pool._max_tasks == 5
    with pytest.raises(RuntimeError, match="expected an iterator in use, but this MultiprocessIterator was finalized"):
        it.next()


@pytest.mark.timeout(60)
def test_a_worker_is_told_to_end():
    worker = workers.Worker.__new__(workers.Worker)
    worker.pipe, theirs = multiprocessing.Pipe()
    worker.stop()
    assert theirs.poll(0) and theirs.recv() is None
    theirs.close()
    worker.stop()  # one that is dead needs not be told
    worker.pipe.close()


@each(**{"path, is_kept": [("/nowhere/<stdin>", False), (__file__, True), (None, None)]})
def test_a_loader_is_told_of_a_script_that_is_a_file(path, is_kept):
    given = {"authkey": b"key", "name": "x"} | ({} if path is None else {"init_main_from_path": path})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.spawn, "get_preparation_data", lambda name: given)
        found = workers._preparation()
    assert found.get("init_main_from_path") == (path if is_kept else None) and found["authkey"] == b"key"


@pytest.mark.parametrize("sent", [0, 3, 4, 40, 110])
def test_a_worker_whose_rank_ends_in_the_midst_of_a_message_ends_without_a_word(sent):
    """As where Ctrl-C ends it while it sends its dataset, or a request behind that."""
    data, request = pickle.dumps(list(range(3))), pickle.dumps(bytes(100))
    messages = b"".join(struct.pack("!i", len(m)) + m for m in (data, request))
    assert len(data) < 40 < len(messages) - 20
    ours, theirs = multiprocessing.Pipe()
    os.write(ours.fileno(), messages[:sent])
    ours.close()
    workers.serve(theirs, [])
    theirs.close()


@pytest.mark.programs
def test_a_worker_whose_rank_ends_before_it_has_begun_says_nothing():
    ours, theirs = multiprocessing.Pipe()
    command = [sys.executable, "-S", "-c", workers._START, str(theirs.fileno())]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, pass_fds=[theirs.fileno()])
    ours.close()
    theirs.close()
    assert worker.communicate(timeout=30)[1] == b"" and worker.returncode == 0
