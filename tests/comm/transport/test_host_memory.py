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
from tests.launch.processes import until

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
    new = left_in_shm() - before
    until(lambda: all(in_use(f"/dev/shm/{name}") for name in new & left_in_shm()))  # others map and unlink theirs


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


def test_what_is_mapped_has_no_descriptor():
    """Else each rank would have one for each other rank of its host, and each communicator."""
    segment = host_memory.Segment(100)
    before = open_files()
    other = host_memory.attach(segment.ticket)
    segment.raw[7] = 3
    assert other[7] == 3 and open_files() == before


def test_mapped_memory_goes_with_its_last_array():
    def num_maps():
        with open("/proc/self/maps") as lines:
            return sum("memfd:dbrdist" in line for line in lines)

    before = num_maps()
    segment = host_memory.Segment(100)
    views = [segment.raw[3:9], host_memory.attach(segment.ticket)[5:]]
    assert num_maps() == before + 2
    del segment
    views[0][:] = 3
    assert num_maps() == before + 2 and views[1][0] == 3
    del views
    assert num_maps() == before


def groups(folder, monkeypatch, said, **files):
    """A tree of control groups, with this text in /proc/self/cgroup."""
    real = host_memory.pathlib.Path
    (folder / "said").write_text(said)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_memory, "_GROUPS", folder)
    found = lambda path: folder / "said" if path == "/proc/self/cgroup" else real(path)  # noqa: E731
    monkeypatch.setattr(host_memory.pathlib, "Path", found)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch, version):
    """A container is killed at its limit, whatever the machine has left; pages of files can be given back."""
    if version == 2:
        files = {"job__memory_DOT_max": "max", "job__in__memory_DOT_max": "5000000", "job__in__memory_DOT_current":
                 "3000000", "job__in__memory_DOT_stat": "anon 1\ninactive_file 1000000\n"}  # fmt: skip
        said = "0::/job/in/deeper\n"
    else:
        names = {"limit_in_bytes": "5000000", "usage_in_bytes": "3000000", "stat": "total_inactive_file 1000000\n"}
        files = {f"memory__job__in__memory_DOT_{name}": text for name, text in names.items()}
        said = "4:cpu:/other\n7:memory:/job/in\n"
    groups(tmp_path, monkeypatch, said, **files)
    assert host_memory._free_bytes() == 3_000_000
    with pytest.raises(OSError, match="expected 3000001 bytes of free memory, but there are 3000000"):
        Segment(3_000_001)
    Segment(3000)


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


def test_names_of_control_groups_may_have_colons(monkeypatch):
    text = "0::/a:b/c\n7:cpu:/x\n"
    monkeypatch.setattr(host_memory.pathlib.Path, "read_text", lambda self: text)
    folders = [folder for folder, *_ in host_memory._group_folders()]
    assert host_memory._GROUPS / "a:b/c" in folders
