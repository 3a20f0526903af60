"""What becomes of shared memory when ranks die; values are in tests/mpi/test_mpi_arenas.py."""

import errno
import os
import resource

import pytest

from dbrdist.comm import host_memory
from tests.comm import jobs
from tests.descriptors import open_files

PROGRAM = jobs.PROGRAMS / "dies_in_reduction.py"


def left_in_shm():
    """What MPI and we might leave; other jobs of the machine come and go meanwhile."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("mpich_shm", "dbrdist"))}


@pytest.mark.parametrize("how", ["kill", "all", "raise"])
def test_a_rank_that_dies_in_a_reduction_ends_the_job(how):
    outcome = jobs.run(3, PROGRAM, how)
    assert outcome.text.count("shares True") == 3
    assert outcome.code != 0
    if how == "raise":
        assert "[rank 1] weighted_mean_grad at " in outcome.text
        assert "ended with ValueError: on purpose; the others wait in it, so the job is ended" in outcome.text


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


def test_a_segment_is_zeros_that_another_mapping_sees():
    segment = host_memory.Segment(10_000)
    other = host_memory.attach(segment.ticket)
    assert not other.any()
    segment.raw[-1] = 7
    assert other[-1] == 7
    del segment
    assert other[-1] == 7


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


def test_a_ticket_of_other_memory_is_refused():
    segment, other = host_memory.Segment(100), host_memory.Segment(100)
    with pytest.raises(OSError, match="is not the memory of that rank"):
        host_memory.attach(segment.ticket._replace(inode=other.ticket.inode))
    with pytest.raises(OSError, match="No such file"):
        host_memory.attach(segment.ticket._replace(pid=1 << 30))


def test_memory_that_is_not_there_is_an_error_in_words():
    with pytest.raises(OSError, match="expected 1152921504606846976 bytes of free memory, but there are"):
        host_memory.Segment(1 << 60)


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


def test_systems_without_anonymous_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous files"):
        host_memory.Segment(100)


OVERLAP = jobs.PROGRAMS / "overlap.py"


def test_a_rank_that_raises_while_gradients_travel_ends_the_job():
    outcome = jobs.run(2, OVERLAP, "raise", limit_seconds=40)
    assert outcome.code == 1
    assert "[rank 1] ValueError: in backward, on purpose" in outcome.text


def test_after_an_error_while_gradients_travel_there_is_no_next_step():
    """Ranks may have failed at different buckets, which would meet those of the next step."""
    outcome = jobs.run(2, OVERLAP, "caught", limit_seconds=40)
    assert outcome.code == 1, outcome.text
    assert "after MPI_FINALIZE" not in outcome.text  # as of the thread that had begun to reduce
    assert "this communicator cannot be used any more, because update at " in outcome.text
    assert "ended with ValueError: in backward, on purpose" in outcome.text


def test_a_rank_that_is_killed_while_gradients_travel_ends_the_job():
    assert jobs.run(2, OVERLAP, "kill", limit_seconds=40).code != 0


@pytest.mark.parametrize("how", ["leave", "extra"])
def test_a_thread_that_has_nothing_to_do_keeps_nobody_waiting(how):
    """The watch proves that the rank is stuck although its other thread lives."""
    outcome = jobs.run(2, OVERLAP, how, limit_seconds=40)
    assert outcome.code == 1, outcome.text
    assert "has left, but" in outcome.text
    assert {"leave": "in recv with tag 0", "extra": "in update"}[how] in outcome.text
