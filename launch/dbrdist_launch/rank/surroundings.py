"""The environment in which a rank's program runs: as its MPI made it, and what the launcher adds."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..channel import Message
from ..cores import available_cores
from ..identity import Identity
from .gpus import for_local_rank

_OURS = ("DBRDIST_LAUNCH_CHANNEL", "DBRDIST_LAUNCH_TOKEN")


def surroundings(inherited: Mapping[str, str], terms: Message, identity: Identity) -> dict[str, str]:
    """Variables of the program. The names that other frameworks read are set where nobody has set them."""
    found = {name: value for name, value in inherited.items() if name not in _OURS}
    found.update(terms["environment"])
    local_size = identity.local_size or int(terms.get("local_sizes", {}).get(identity.host, 1))
    for name, value in (
        ("RANK", identity.rank),
        ("LOCAL_RANK", identity.local_rank),
        ("WORLD_SIZE", identity.size),
        ("LOCAL_WORLD_SIZE", local_size),
    ):
        found[name] = str(value)  # one left from another job would be a lie
    found.setdefault("MASTER_ADDR", str(terms.get("master") or "127.0.0.1"))
    found["DBRDIST_LAUNCH"] = "1"
    if not found.get("PYTHONUNBUFFERED"):
        found["PYTHONUNBUFFERED"] = "1"  # lines arrive when they are written, also before a SIGKILL
        found["DBRDIST_LAUNCH_LINES"] = "1"  # and whole, by one write: unbuffered, each word of a print is one
    if terms.get("threads") == "auto":
        found.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // max(1, local_size))))
    if terms.get("gpus") == "rank":
        found.update(for_local_rank(identity.local_rank, found))
    if terms.get("inject", True):
        before = found.get("PYTHONPATH", "")
        here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
        found["DBRDIST_LAUNCH_INJECTED_PYTHONPATH"] = before
        found["PYTHONPATH"] = here + (os.pathsep + before if before else "")
    return found
