"""One GPU per local rank."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Mapping


def count() -> int:
    """NVIDIA GPUs of this host, as the driver lists them."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def for_local_rank(local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES that leaves one device, out of those that were visible before."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [word for word in given.split(",") if word] if given is not None else [str(n) for n in range(count())]
    return {"CUDA_VISIBLE_DEVICES": visible[local_rank % len(visible)]} if visible else {}
