"""The environment in which a rank's program runs: as its MPI made it, and what the launcher adds."""

from __future__ import annotations

import os

from ..cores import available_cores
from ..wire import whole
from .gpus import for_local_rank

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..identity import Identity
    from ..messages import Welcome

ADDRESS = "DBRDIST_LAUNCH_CHANNEL"
TOKEN = "DBRDIST_LAUNCH_TOKEN"
ONLY_IF_UNSET = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
# Whatever of a rank's environment plain mpiexec would not give it: this list, and what --env names.
ADDED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *ONLY_IF_UNSET, "CUDA_VISIBLE_DEVICES", "PYTHONPATH",
    "DBRDIST_LAUNCH", "DBRDIST_RESTART", "DBRDIST_HEARTBEAT", "DBRDIST_LAUNCH_EVENTS", "DBRDIST_LAUNCH_INJECTED",
    "DBRDIST_LAUNCH_LAST",
)  # fmt: skip


def surroundings(inherited: Mapping[str, str], terms: Welcome, identity: Identity) -> dict[str, str]:
    """Variables of the program. The names that other frameworks read are set where nobody has set them."""
    found = {name: value for name, value in inherited.items() if name not in (ADDRESS, TOKEN)}
    found.update(terms.environment)
    local_size = identity.local_size or terms.local_sizes.get(identity.host, 1)
    for name, value in (
        ("RANK", identity.rank),
        ("LOCAL_RANK", identity.local_rank),
        ("WORLD_SIZE", identity.size),
        ("LOCAL_WORLD_SIZE", local_size),
    ):
        found[name] = str(value)  # one left from another job would be a lie
    found.setdefault("MASTER_ADDR", terms.master or "127.0.0.1")
    if terms.port:
        found.setdefault("MASTER_PORT", str(terms.port))
    found["DBRDIST_LAUNCH"] = "1"
    if terms.threads == "auto":
        found.setdefault("OMP_NUM_THREADS", str(_threads(inherited, local_size)))
    if terms.gpus == "rank":
        found.update(for_local_rank(identity.local_rank, found))
    if terms.inject:
        before = found.get("PYTHONPATH")
        here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
        found["DBRDIST_LAUNCH_INJECTED"] = "set" if before else "empty" if before is not None else "unset"
        found["PYTHONPATH"] = here + (os.pathsep + before if before else "")
    return found


def _threads(inherited: Mapping[str, str], local_size: int) -> int:
    """The cores of this rank: what Slurm counts for each task, else the host's, divided by its ranks."""
    each = whole(inherited.get("SLURM_CPUS_PER_TASK")) if "SLURM_STEP_ID" in inherited else None
    return max(1, min(each, available_cores()) if each else available_cores() // max(1, local_size))
