"""What ``import chainerx`` gives: ChainerX is not available, and no object is one of its arrays.

Chainer 7 installs such a module where ChainerX was not built, and programs of its time import it to compare with it.
"""

from __future__ import annotations

from typing import Any

from dbrdist.compat.absent import error


def is_available() -> bool:
    """False."""
    return False


class ndarray:
    """The class of ChainerX's arrays, for ``isinstance``; it cannot be instantiated."""

    def __init__(self, *args: tuple[int, ...], **kwargs: Any) -> None:
        raise RuntimeError(error("chainerx", "ndarray").args[0])


def __getattr__(name: str) -> Any:
    raise error("chainerx", name)
