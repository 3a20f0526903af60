"""Memory in pages of its own where the system refuses something."""

import errno
import mmap

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.core import backend, flat, pages


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 80])
def test_what_the_machine_does_not_have_is_a_memory_error_that_says_how_much(num_bytes):
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes"):
        pages.own_pages(num_bytes)
    with pytest.raises(MemoryError):
        backend.aligned_zeros(num_bytes, np.uint8, np.empty(0))
    with pytest.raises(MemoryError):
        backend.unwritten((1, 1, num_bytes, 1), np.uint8, np.empty(0))


def test_a_system_without_huge_pages_has_pages_all_the_same(monkeypatch):
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", WithoutHugePages)
    found = pages.own_pages(1 << 20)
    found[-1] = 3
    assert found.sum() == 3 and found.shape == (1 << 20,)


def test_free_pages_of_the_heap_go_back_where_the_c_library_can():
    backend.tune_heap()  # from here on the heap keeps what is freed
    for _ in range(2):
        # The second is the one at the end of the heap, which glibc keeps where something else lies right behind it.
        first, second = np.ones(1 << 25, np.uint8), np.ones(1 << 25, np.uint8)
        full = resident()
        del first
        pages.release_free()
        assert full - resident() > 1 << 24
        del second


def test_another_c_library_keeps_what_it_has(monkeypatch):
    class WithoutTrim:
        def __init__(self, name):
            assert name is None

    monkeypatch.setattr(pages.ctypes, "CDLL", WithoutTrim)
    pages.release_free()


def test_parameters_that_move_into_an_arena_leave_no_memory_behind(monkeypatch):
    calls = []
    monkeypatch.setattr(flat, "release_free", lambda: calls.append(1))
    small, large = (optimizers.SGD().setup(L.Linear(n, n)) for n in (10, 1 << 11))
    assert small.target and large.target and calls == [1]
    flat.gather(large.target.params())
    flat.gather([*large.target.params(), *L.Linear(10, 10).params()])
    assert calls == [1]  # the many are there already


def resident():
    """Bytes of memory that this process has in use, of those that the system knows."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * mmap.PAGESIZE
