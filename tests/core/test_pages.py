"""Memory in pages of its own where the system refuses something."""

import errno
import mmap

import numpy as np
import pytest

from dbrdist.core import backend, pages


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
