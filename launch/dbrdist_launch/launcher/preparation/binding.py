"""Where ranks will run on their hosts, for `--print`: cores, NUMA nodes, GPUs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator

from ...backends.hosts import is_local
from ...backends.job import Backend, Job
from ...rank import gpus

_CPUS = "/sys/devices/system"
_MOST_LINES = 64
_KINDS = {"core": "core", "numa": "NUMA node"}


def _numbers(path: str) -> list[int]:
    """The processors of a file such as 0-3,8; [] where there is none."""
    try:
        with open(path) as file:
            parts = [part.partition("-") for part in file.read().strip().split(",") if part]
    except OSError:
        return []
    return [number for first, _, last in parts for number in range(int(first), int(last or first) + 1)]


def nodes(root: str = _CPUS) -> list[tuple[str, list[int]]]:
    """(name, processors) of this machine's NUMA nodes that have any, in order."""
    folders = sorted(glob.glob(f"{root}/node/node[0-9]*"), key=lambda path: int(re.sub(r".*node", "", path)))
    found = [(os.path.basename(path).removeprefix("node"), _numbers(f"{path}/cpulist")) for path in folders]
    return [(name, numbers) for name, numbers in found if numbers]


def cores(root: str = _CPUS) -> list[tuple[str, list[int]]]:
    """(NUMA node, processors) of this machine's cores, in the order in which mpiexec counts them."""
    found: dict[tuple[int, ...], str] = {}
    for name, numbers in nodes(root):
        for number in numbers:
            siblings = _numbers(f"{root}/cpu/cpu{number}/topology/thread_siblings_list")
            found.setdefault(tuple(siblings or [number]), name)
    return [(name, list(numbers)) for numbers, name in found.items()]


def _places(job: Job) -> Iterator[tuple[str, int]]:
    """(host, local rank) of each rank."""
    if job.hosts:
        for host in job.hosts:
            yield from ((host.name, number) for number in range(host.slots))
    else:
        yield from ((os.uname().nodename, number) for number in range(job.ranks))


def _bound_to(job: Job, backend: Backend, host: str, local_rank: int) -> str:
    if job.bind == "none":
        return ""
    if job.bind not in getattr(backend, "in_turn", ()):
        return f"a {_KINDS[job.bind]} that {backend.label} chooses"
    here = (cores() if job.bind == "core" else nodes()) if is_local(host) else []
    if not here:
        return f"{_KINDS[job.bind]} {local_rank} of {host}, modulo their number"
    name, numbers = here[local_rank % len(here)]
    listed = ",".join(map(str, numbers))
    return f"processors {listed} (NUMA node {name})" if job.bind == "numa" else f"core {listed} (NUMA node {name})"


def _gpu(host: str, local_rank: int) -> str:
    if not is_local(host):
        return f"GPU {local_rank} of {host}, modulo their number"
    shown = gpus.for_local_rank(local_rank, os.environ)
    return f"GPU {shown['CUDA_VISIBLE_DEVICES']}" if shown else "no GPU: none is visible here"


def lines(job: Job, backend: Backend, gpu_each: bool) -> list[str]:
    """A line for each rank, where anything is bound; `gpu_each`: each rank sees one GPU."""
    if job.bind == "none" and not gpu_each:
        return []
    if backend.places_ranks and not job.hosts:
        return [f"# {backend.label} places the ranks and binds them on the hosts that it chooses (--bind {job.bind})"]
    found = []
    for rank, (host, local_rank) in enumerate(_places(job)):
        where = [_bound_to(job, backend, host, local_rank)]
        if gpu_each:
            where.append(_gpu(host, local_rank))
        found.append(f"# rank {rank} on {host}: {', '.join(part for part in where if part)}")
    more = [f"# and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return found[:_MOST_LINES] + more
