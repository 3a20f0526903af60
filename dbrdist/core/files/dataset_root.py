"""The folder in which files of public datasets and of public weights lie, as Chainer keeps them."""

from __future__ import annotations

import os

_root: str | None = None


def get_dataset_root() -> str:
    """The folder of all datasets: what :func:`set_dataset_root` said, else ``CHAINER_DATASET_ROOT``, else
    ``~/.chainer/dataset``.

    Example:
        >>> isinstance(dbrdist.dataset.get_dataset_root(), str)
        True
    """
    if _root is not None:
        return _root
    return os.path.expanduser(os.environ.get("CHAINER_DATASET_ROOT") or os.path.join("~", ".chainer", "dataset"))


def set_dataset_root(path: str | os.PathLike[str]) -> None:
    """Keep datasets under this folder from now on, in this process.

    Args:
        path: the folder; it is made when a dataset needs it.

    Example:
        >>> dbrdist.dataset.set_dataset_root("/data/chainer")  # doctest: +SKIP
    """
    global _root
    _root = os.fspath(path)
