"""How long a reduction between ranks takes: a line over its bytes, measured once and kept for the next job there.

The line gives the size of the buckets that are sent while backward runs: smaller ones spend their time on latency,
larger ones begin later and leave more for the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dbrdist.comm.protocol.gate import digest

_SIZES = (1 << 14, 1 << 18, 1 << 21)  # bytes
_NUM_TIMES = 3
_LATENCY_SHARE = 0.05  # of a bucket's time
_SMALLEST, _LARGEST = 1 << 18, 1 << 25  # bytes of a bucket


class Line(NamedTuple):
    """Seconds = latency + seconds per byte times bytes."""

    latency_seconds: float
    seconds_per_byte: float

    def bucket_bytes(self) -> int:
        """The least bytes of which latency takes a twentieth of the time, within 256 KiB and 32 MiB."""
        wanted = self.latency_seconds / max(self.seconds_per_byte, 1e-15) * (1 - _LATENCY_SHARE) / _LATENCY_SHARE
        return int(min(max(wanted, _SMALLEST), _LARGEST))


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line through measured times, by least squares of relative errors, so that small sizes count as much."""
    rows = np.array([[1.0, size] for size in sizes]) / np.array(seconds)[:, None]
    latency, slope = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0].tolist()
    return Line(max(latency, 0.0), max(slope, 0.0))


def bucket_bytes(comm: Any) -> int:
    """The size of a bucket on these ranks, from what was kept or is measured now. Collective.

    The file lies in ``~/.cache/dbrdist`` (or ``$XDG_CACHE_HOME``); its name stands for the number of hosts, their names
    without numbers, the ranks on each, and what carries bytes between hosts. Remove it to measure again.
    """
    names = comm.allgather_obj(socket.gethostname())
    cluster = _cluster(names) + comm.reducer.between_hosts()
    path = _path(cluster)
    line = comm.bcast_obj(_load(path) if comm.rank == 0 else None)
    if line is None:
        times = [min(comm.reducer.time_reduction(size) for _ in range(_NUM_TIMES)) for size in _SIZES]
        # Rank 0 always takes part in the exchange between hosts; a rank that does not has no times.
        line = comm.bcast_obj(fit(_SIZES, times) if comm.rank == 0 else None)
        if comm.rank == 0:
            _keep(path, line, cluster)
    return Line(*line).bucket_bytes()


def _cluster(names: Sequence[str]) -> str:
    """For example ``node#: 4 4``: hosts called node with any numbers, two of them, four ranks on each."""
    ranks = Counter(names)
    kinds = sorted({re.sub(r"\d+", "#", name) for name in ranks})
    return f"{' '.join(kinds)}: {' '.join(str(n) for n in sorted(ranks.values()))}"


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _path(cluster: str) -> str:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(folder, "dbrdist", f"reduction-{digest(cluster):x}.json")


def _load(path: str) -> Line | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        line = Line(float(found["latency_seconds"]), float(found["seconds_per_byte"]))
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or not ours: measure
        return None
    return line if all(math.isfinite(x) and x >= 0 for x in line) else None


def _keep(path: str, line: Line, cluster: str) -> None:
    beside = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a home that cannot be written: the next job measures again
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            json.dump({**line._asdict(), "cluster": cluster}, file)
        os.replace(beside, path)
