"""Folders for the time of a block."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tempdir(**kwargs: Any) -> Iterator[str]:
    """The path of a new folder, which is removed after the ``with`` block.

    ``ignore_errors`` (False): whether what cannot be removed stays in silence. The rest goes to ``tempfile.mkdtemp``.

    Example:
        >>> import os
        >>> with dbrdist.utils.tempdir() as folder:
        ...     os.path.isdir(folder)
        True
    """
    ignore_errors = kwargs.pop("ignore_errors", False)
    path = tempfile.mkdtemp(**kwargs)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=ignore_errors)
