"""Batches in memory shared with workers: the same numbers, no copy, never overwritten while somebody has them."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets.loading import rings
from dbrdist.errors import LoaderError
from dbrdist.iterators import MultiprocessIterator, SerialIterator
from tests.datasets.loader_examples import Broad, Doomed, broad
from tests.descriptors import open_files
from tests.warm import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.timeout(60)]


def iterator(dataset, batch_size=4, n_processes=2, **options):
    return MultiprocessIterator(dataset, batch_size, n_processes=n_processes, seed=3, **options)


def ring(it):
    return it._pool._ring


def in_ring(it, batch):
    """Whether all examples of a batch lie in the memory of one of the slots."""
    maps = [np.frombuffer(m, np.uint8) for m in ring(it)._maps.values()]
    return all(any(np.shares_memory(x, m) for m in maps) for x, _ in batch)


def check(it, batch):
    assert [int(y) for _, y in batch] == it.indices.tolist()
    check_values(batch, it.pieces[0])


def check_values(batch, pieces):
    expected = [broad(i, 3, epoch) for epoch, indices in pieces for i in indices]
    assert len(batch) == len(expected)
    assert all(np.array_equal(x, e) for (x, _), e in zip(batch, expected))


@pytest.mark.parametrize("n_processes", [1, 2, 4])
def test_batches_in_the_ring_are_those_of_one_process(n_processes):
    with iterator(Broad(10), n_processes=n_processes) as it:
        serial = SerialIterator(Broad(10), 4, seed=3)
        for _ in range(12):
            batch, expected = next(it), next(serial)
            assert in_ring(it, batch)
            check(it, batch)
            for (x, y), (a, b) in zip(batch, expected, strict=True):
                assert np.array_equal(x, a) and y == b and x.dtype == a.dtype
                assert x.flags.writeable and x.ctypes.data % 64 == 0


def test_somebody_who_keeps_all_batches_keeps_their_values():
    with iterator(Broad(10)) as it:
        kept = [(next(it), it.pieces[0]) for _ in range(30)]
        found = [in_ring(it, batch) for batch, _ in kept]
        assert found[:3] == [True] * 3 and not any(found[-20:])
        assert sum(found) <= len(ring(it).fds) == it.n_processes + it.n_prefetch + 2
    for batch, pieces in kept:  # also when the workers are gone
        check_values(batch, pieces)


def test_a_view_of_one_example_keeps_its_slot():
    with iterator(Broad(40), n_processes=1) as it:
        batch = next(it)
        kept, expected = memoryview(batch[1][0][10:])[5:], batch[1][0][15:].copy()
        del batch
        for _ in range(12):
            next(it)
        assert np.array_equal(kept, expected)
        del kept
        for _ in range(4):
            next(it)
        assert in_ring(it, next(it))


def test_slots_are_free_again_and_memory_does_not_grow():
    with iterator(Broad(10)) as it:
        for _ in range(30):
            batch = next(it)
            assert in_ring(it, batch)
        del batch
        assert len(ring(it)._free) == 2  # the others hold what is in the making
        sizes = [os.fstat(fd).st_size for fd in ring(it).fds]
        assert 0 < sum(sizes) <= len(sizes) * 4 * (60_000 + 64)


def test_batches_of_growing_size_fit():
    with iterator(Broad(64), batch_size=2, n_processes=1) as it:
        first, pieces = next(it), it.pieces[0]
        it._plan.batch_size = 9
        for _ in range(12):
            batch = None  # with the first, one more than there are slots for
            batch = next(it)
            check(it, batch)
        assert len(batch) == 9 and in_ring(it, batch)
        check_values(first, pieces)


@pytest.mark.parametrize("reason", ["shared_mem", "small"])
def test_other_batches_take_the_pipe_and_leave_their_slots_free(reason):
    options = {"shared_mem": 0} if reason == "shared_mem" else {"batch_size": 1}  # 60,000 bytes are below the limit
    with iterator(Broad(10), **options) as it:
        for _ in range(20):
            check(it, next(it))
        assert not ring(it)._maps
        assert len(ring(it)._free) == (0 if reason == "shared_mem" else 2)


def test_an_error_gives_its_slot_back():
    with iterator(Doomed(40, 3, "raise"), batch_size=2, n_processes=1, shuffle=False) as it:
        next(it)
        for _ in range(8):
            with pytest.raises(KeyError, match="example 3 is bad"):
                next(it)
        assert len(ring(it)._free) == 4


def test_without_anonymous_files_it_says_so_once_and_goes_on(monkeypatch):
    def refuse(name):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with iterator(Broad(10)) as it:
        with pytest.warns(RuntimeWarning, match="no shared memory for .* Function not implemented; they go"):
            check(it, next(it))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                check(it, next(it))


@pytest.mark.parametrize("limit_bytes", [0, 100_000, 200_000])
def test_a_worker_without_memory_says_so_once_and_goes_on(limit_bytes):
    with iterator(Broad(10, limit_bytes)) as it:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            batches = [(next(it), it.pieces[0]) for _ in range(12)]
        assert [str(w.message) for w in found if "no shared memory" in str(w.message)] == [
            "no shared memory for the batches of loader processes: [Errno 27] File too large; "
            "they go through pipes, which is slower"
        ]
        for batch, pieces in batches:
            check_values(batch, pieces)
        assert ring(it).take() is None
        assert not ring(it)._maps and sum(os.fstat(fd).st_size for fd in ring(it).fds) == 0


def test_a_slot_that_cannot_be_mapped_is_read(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(rings.mmap, "mmap", refuse)
    with iterator(Broad(10)) as it:
        with pytest.warns(RuntimeWarning, match="Cannot allocate memory"):
            check(it, next(it))
        for _ in range(8):
            check(it, next(it))


def test_a_forked_child_keeps_the_values_it_saw():
    with iterator(Broad(10)) as it:
        batch, pieces = next(it), it.pieces[0]
        there, here = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.read(there, 1)
                check_values(batch, pieces)
                code = 0
            finally:
                os._exit(code)
        del batch
        for _ in range(20):
            check(it, next(it))
        os.write(here, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(there)
        os.close(here)


def test_replaced_workers_use_the_same_slots():
    with iterator(Broad(10), maxtasksperchild=2) as it:
        for _ in range(12):
            batch = next(it)
            check(it, batch)
            assert in_ring(it, batch)
        assert len(ring(it)._maps) <= len(ring(it).fds) == 5


def test_a_killed_worker_is_named_and_kept_batches_stay_right():
    with iterator(Broad(40)) as it:
        kept = [(next(it), it.pieces[0]) for _ in range(2)]
        for pid in it._pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(LoaderError, match="was killed by SIGKILL"):
            for _ in range(5):
                next(it)
    for batch, pieces in kept:
        check_values(batch, pieces)


def test_files_and_maps_are_closed_with_the_iterator():
    def maps():
        return {line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "dbrdist-batch" in line}

    files, before = open_files(), maps()
    with iterator(Broad(10)) as it:
        for _ in range(6):
            next(it)
        assert maps() - before and any("dbrdist-batch" in name for _, name in open_files() - files)
    del it
    assert not maps() - before and not open_files() - files


def test_two_ranks_of_one_host_have_rings_of_their_own():
    options = {"size": 2, "batch_size": 8}
    with iterator(Broad(20), rank=0, **options) as a, iterator(Broad(20), rank=1, **options) as b:
        for _ in range(10):
            for it in (a, b):
                batch = next(it)
                assert in_ring(it, batch)
                check(it, batch)


def test_virtual_workers_have_slots_for_each():
    with iterator(Broad(20), batch_size=8, virtual_workers=4) as it:
        for _ in range(10):
            found = next(it)
            assert len(found) == 4
            for batch, pieces in zip(found, it.pieces):
                check_values(batch, pieces)
                assert in_ring(it, batch)


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from tests.datasets.loader_examples import Broad
from dbrdist.iterators import MultiprocessIterator
if __name__ == "__main__":
    it = MultiprocessIterator(Broad(40), 4, n_processes=2, seed=3)
    kept = [it.next() for _ in range(3)]
    print(sum(int(x.sum()) for batch in kept for x, _ in batch))
"""


def test_a_script_that_keeps_batches_to_its_end_ends_quietly(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(ROOT)))
    done = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=50)
    serial = SerialIterator(Broad(40), 4, seed=3)
    expected = sum(int(x.sum()) for _ in range(3) for x, _ in next(serial))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{expected}\n")
