"""Memory in pages of its own where the system refuses something."""

import contextlib
import errno
import mmap
import os

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.core.array import backend, pages
from dbrdist.core.model import flat


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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="looks at memory that is no longer its own")
def test_free_pages_of_the_heap_go_back_where_the_c_library_can():
    backend.tune_heap()  # from here on the heap keeps what is freed
    for _ in range(2):
        freed, behind = two_in_a_row(1 << 23)
        place = backend.address(freed)
        assert num_kept(place, freed.nbytes) == freed.nbytes
        del freed
        pages.release_free()
        assert num_kept(place, 1 << 23) < 1 << 16
        assert behind.all()


def test_another_c_library_keeps_what_it_has(monkeypatch):
    class WithoutTrim:
        def __init__(self, name):
            assert name is None

    monkeypatch.setattr(pages.ctypes, "CDLL", WithoutTrim)
    pages.release_free()


@pytest.mark.slow
def test_parameters_that_move_into_an_arena_leave_no_memory_behind(monkeypatch):
    calls = []
    monkeypatch.setattr(flat, "release_free", lambda: calls.append(1))
    small, large = (optimizers.SGD().setup(L.Linear(n, n)) for n in (10, 1 << 11))
    assert small.target and large.target and calls == [1]
    flat.gather(large.target.params())
    flat.gather([*large.target.params(), *L.Linear(10, 10).params()])
    assert calls == [1]  # the many are there already


def two_in_a_row(num_bytes):
    """Arrays of ones, the second right behind the first: glibc may keep what is free at the very end of its heap."""
    made = []
    for _ in range(16):  # the first ones may fill gaps that earlier tests left
        made.append(np.ones(num_bytes, np.uint8))
        for one in made:
            if 0 < backend.address(made[-1]) - backend.address(one) - num_bytes < mmap.PAGESIZE:
                return one, made[-1]
    raise AssertionError("no two arrays lie in a row")


def num_kept(address, num_bytes):
    """How many bytes of ones are still there: pages that the kernel took back read as zeros, or not at all.

    What the whole process has in use would tell less: other memory comes and goes, and the kernel counts it roughly.
    """
    found = 0
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for place in range(address, address + num_bytes, mmap.PAGESIZE):
            with contextlib.suppress(OSError):
                found += os.pread(memory.fileno(), min(mmap.PAGESIZE, address + num_bytes - place), place).count(1)
    return found


def test_copies_take_the_memory_of_the_copies_before():
    space = pages.CopySpace()
    arrays = [
        np.arange(5000.0).reshape(50, 100).T,
        np.asfortranarray(np.ones((70, 90), np.float32)),
        np.arange(3),
        np.zeros((0, 4)),
        np.full(3000, "abc"),
        np.ones(5001, backend.as_dtype("bfloat16")),
    ]
    first = [space.copy(a) for a in arrays]
    for a, b in zip(arrays, first):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert b.flags.c_contiguous
        assert not np.shares_memory(a, b)
        assert np.all(a == b)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(first) for b in first[:i])
    more = space.copy(arrays[0])
    assert not any(np.shares_memory(more, b) for b in first)
    space.restart()
    second = [space.copy(a) for a in arrays]
    shared = [np.shares_memory(a, b) for a, b in zip(first, second)]
    assert shared == [a.nbytes >= mmap.PAGESIZE for a in arrays]


def test_a_copy_space_grows_beyond_what_was_reserved(monkeypatch):
    monkeypatch.setattr(pages, "_BLOCK_BYTES", 1 << 13)
    space = pages.CopySpace()
    space.reserve(0)
    space.reserve(3 << 12)
    for _ in range(2):
        made = [space.copy(np.full(n << 12, n, np.uint8)) for n in (1, 1, 2, 5, 1)]
        assert [int(a[0]) for a in made] == [1, 1, 2, 5, 1]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(made) for b in made[:i])
        space.restart()


def test_copies_go_into_reserved_memory_one_behind_the_other_and_again_from_the_start():
    space, a = pages.CopySpace(), np.arange(3 * mmap.PAGESIZE, dtype=np.uint8)
    space.reserve(0)
    assert space._blocks == []
    space.reserve(2 * a.nbytes)
    first, second = space.copy(a), space.copy(a)
    (block,) = space._blocks
    assert all(np.shares_memory(copy, block) for copy in (first, second)) and not np.shares_memory(first, second)
    assert np.array_equal(first, a) and np.array_equal(second, a)
    assert first.__array_interface__["data"][0] == block.__array_interface__["data"][0]
    space.restart()
    assert np.shares_memory(space.copy(a), first)
    small = np.ones(3)
    assert not np.shares_memory(space.copy(small), block)
