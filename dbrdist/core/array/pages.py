"""Memory of the host outside of the heap, in pages of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import Any

import numpy as np

_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


def own_pages(num_bytes: int) -> np.ndarray[Any, Any]:
    """Zeros, shape (num_bytes,), which take no memory until they are written: for what lives long or is never used.

    In the heap, amid what a step frees, a long-lived array would leave room on both sides that no large array fits.
    """
    try:
        pages = mmap.mmap(-1, num_bytes, **_PRIVATE)
    except (OSError, OverflowError) as e:  # as of NumPy, so that who tries a smaller batch need not know
        raise MemoryError(f"unable to allocate {num_bytes} bytes in pages of their own: {e}") from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def release_free() -> None:
    """Give the kernel back what the heap holds and nobody uses, whole pages of it; a heap that cannot stays as it is.

    Afterwards those pages cost a fault each: for moments at which much was freed that will not come again.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
