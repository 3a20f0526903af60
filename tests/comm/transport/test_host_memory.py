"""Tests of dbrdist.comm.transport.host_memory."""

import errno
import mmap
import os
import resource

import pytest

from dbrdist.comm.transport import host_memory
from dbrdist.comm.transport.host_memory import Segment, attach
from tests.comm import jobs
from tests.descriptors import open_files

PROGRAM = jobs.PROGRAMS / "dies_in_reduction.py"


def left_in_shm():
    """What MPI and we might leave; other jobs of the machine come and go meanwhile."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("mpich_shm", "dbrdist"))}


@pytest.mark.mpiexec
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm, where MPI keeps its shared memory")
def test_killed_jobs_leave_nothing_in_shared_memory(tmp_path):
    """Each rank writes down what names its job has in /dev/shm once all share memory; then all are killed."""
    before = left_in_shm()
    for _ in range(2):
        jobs.run(2, PROGRAM, "all")
    new = {name for name in left_in_shm() - before if not in_use(f"/dev/shm/{name}")}
    assert not new


def in_use(path):
    """Whether a living process maps a file: then it belongs to another job."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if path in maps.read():
                    return True
        except OSError:
            continue
    return False


@pytest.mark.mpiexec
def test_a_segment_is_zeros_that_another_mapping_sees():
    segment = host_memory.Segment(10_000)
    other = host_memory.attach(segment.ticket)
    assert not other.any()
    segment.raw[-1] = 7
    assert other[-1] == 7
    del segment
    assert other[-1] == 7


@pytest.mark.mpiexec
def test_a_forked_child_has_its_own_copy():
    segment = host_memory.Segment(5000)
    segment.raw[7] = 1
    child = os.fork()
    if child == 0:
        was_right = segment.raw[7] == 1
        segment.raw[:] = 9
        os._exit(0 if was_right else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert segment.raw[7] == 1
    assert segment.raw.sum() == 1


@pytest.mark.mpiexec
def test_a_ticket_of_other_memory_is_refused():
    segment, other = host_memory.Segment(100), host_memory.Segment(100)
    with pytest.raises(OSError, match="is not the memory of that rank"):
        host_memory.attach(segment.ticket._replace(inode=other.ticket.inode))
    with pytest.raises(OSError, match="No such file"):
        host_memory.attach(segment.ticket._replace(pid=1 << 30))


@pytest.mark.mpiexec
def test_memory_that_is_not_there_is_an_error_in_words():
    with pytest.raises(OSError, match="expected 1152921504606846976 bytes of free memory, but there are"):
        host_memory.Segment(1 << 60)


@pytest.mark.mpiexec
def test_a_file_size_limit_is_an_error_in_words():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    before = open_files()
    try:
        with pytest.raises(OSError, match="for 2000 bytes of shared memory") as info:
            host_memory.Segment(2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert info.value.errno == errno.EFBIG
    assert not open_files() - before


@pytest.mark.mpiexec
def test_systems_without_anonymous_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous files"):
        host_memory.Segment(100)


def test_a_segment_that_is_attached_has_one_descriptor():
    """That of the mapping."""
    segment = host_memory.Segment(100)
    before = open_files()
    other = host_memory.attach(segment.ticket)
    segment.raw[7] = 3
    assert other[7] == 3 and len(open_files() - before) == 1


def test_whole_pages_of_a_segment_are_given_back():
    page = mmap.PAGESIZE
    segment = Segment(4 * page)
    other = attach(segment.ticket)
    for begin, end, emptied in ((100, 3 * page + 5, [1, 2]), (page, 2 * page, [1]), (0, page - 1, []),
                                (1, 2 * page - 1, []), (0, 4 * page, [0, 1, 2, 3])):  # fmt: skip
        segment.raw[:] = 7
        assert segment.resident_bytes() == 4 * page
        segment.release(begin, end)
        pages = other.reshape(4, page)
        assert [k for k in range(4) if not pages[k].any()] == emptied
        assert all((pages[k] == 7).all() for k in range(4) if k not in emptied)
        assert os.fstat(segment.ticket.fd).st_size == 4 * page
    assert not other.any()
