"""Names of ``chainer.backend`` for devices that dbrdist does not have: no device is an instance of them."""

from __future__ import annotations

from typing import Any

from dbrdist.compat.absent import error
from dbrdist.compat.intel64 import Intel64Device as Intel64Device


class ChainerxDevice:
    """The class of ChainerX's devices, for ``isinstance``; it cannot be instantiated."""

    def __init__(self, *args: tuple[int, ...], **kwargs: Any) -> None:
        raise RuntimeError(error("chainerx", "Device").args[0])
