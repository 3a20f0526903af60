"""The file of a cluster's measured network: `~/.cache/dbrdist/network.json`, one entry per set of hosts.

{"node0 node1": {"date", "ranks", "library", "latency_seconds", "bandwidth_bytes_per_second",
"allreduce_latency_seconds", "allreduce_bandwidth_bytes_per_second", "ping_pong": [[bytes, seconds], ...],
"allreduce": [[bytes, seconds], ...]}}
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from .. import cache
from ..launcher.records.runs import write_json
from .fit import latency_and_bandwidth


def path() -> str:
    """Where the record stands; DBRDIST_NETWORK_FILE names another place, such as a disk that all hosts share."""
    return os.environ.get("DBRDIST_NETWORK_FILE") or os.path.join(cache.directory(), "network.json")


def read(hosts: list[str]) -> dict[str, Any] | None:
    """What was measured between these hosts, in any order; None when nothing was."""
    try:
        with open(path()) as file:
            found = json.load(file).get(" ".join(sorted(set(hosts))))
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None


def entry_of(result: dict[str, Any]) -> dict[str, Any]:
    """The fitted result of a probe."""
    latency, bandwidth = latency_and_bandwidth(result["ping_pong"])
    all_latency, all_bandwidth = latency_and_bandwidth(result["allreduce"])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "ranks": result["size"],
        "library": result["library"],
        "latency_seconds": latency,
        "bandwidth_bytes_per_second": bandwidth,
        "allreduce_latency_seconds": all_latency,
        "allreduce_bandwidth_bytes_per_second": all_bandwidth,
        "ping_pong": result["ping_pong"],
        "allreduce": result["allreduce"],
    }


def write(result: dict[str, Any], entry: dict[str, Any]) -> None:
    """Store an entry beside those of other sets of hosts; OSError where that cannot be."""
    content: Any = {}
    try:
        with open(path()) as file:
            content = json.load(file)
    except (OSError, ValueError):
        pass
    content = content if isinstance(content, dict) else {}
    content[" ".join(sorted(set(result["hosts"])))] = entry
    os.makedirs(os.path.dirname(path()), exist_ok=True)
    write_json(path(), content)
