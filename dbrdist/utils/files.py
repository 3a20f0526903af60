"""Folders for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tempdir(**kwargs: Any) -> Iterator[str]:
    """The path of a new folder, which is removed after the ``with`` block.

    Args:
        kwargs: ``ignore_errors=True`` leaves what cannot be removed without an error; the rest goes to
            :func:`tempfile.mkdtemp`.

    Example:
        >>> import os
        >>> with dbrdist.utils.tempdir() as folder:
        ...     os.path.isdir(folder)
        True
    """
    import shutil  # both load much that is needed nowhere else
    import tempfile

    ignore_errors = kwargs.pop("ignore_errors", False)
    path = tempfile.mkdtemp(**kwargs)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=ignore_errors)
