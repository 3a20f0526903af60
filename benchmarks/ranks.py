"""Benchmarks on ranks: how they are started, on this host or on two, take turns, and give their times back.

A benchmark script is both sides: run plainly it is the parent, which calls :func:`run`; with ``--worker`` it is a rank,
which times with :func:`take_turns` and ends with :func:`answer`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import two_hosts

# ---- parent ---------------------------------------------------------------------------------------------------------


def parser(description: str, num_rounds: int, worker: dict[str, Any]) -> argparse.ArgumentParser:
    """The options of a benchmark whose ranks serve the same file; ``worker`` says what ``--worker`` takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--torch-python", help="interpreter of an environment that has PyTorch, mpi4py and MPICH")
    made.add_argument("--rounds", type=int, default=num_rounds)
    made.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    made.add_argument("--worker", help=argparse.SUPPRESS, **worker)
    made.add_argument("--peers", action="store_true", help=argparse.SUPPRESS)
    return made


def run(
    words: Sequence[str],
    python: str,
    num_ranks: int,
    hosts: two_hosts.TwoHosts | None = None,
    timeout_seconds: float = 600,
    installed: bool = False,
) -> dict[str, Any]:
    """Run ``python words`` on that many ranks, each with one thread, on this host or on two; what rank 0 answers.

    mpiexec is the one beside the interpreter. They take dbrdist from the checkout, or with ``installed`` from where
    the interpreter finds it.
    """
    program = str(Path(python).absolute().with_name("mpiexec"))
    command = [program, "-n", str(num_ranks)] if hosts is None else hosts.mpiexec(program, num_ranks)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    sources = () if installed else (harness.ROOT, harness.ROOT / "launch")
    paths = os.pathsep.join(map(str, (*sources, harness.ROOT / "benchmarks")))
    env = {"TMPDIR": "/tmp", **os.environ, **threads, "PYTHONPATH": paths}
    if hosts is not None:
        env |= {"GLOO_SOCKET_IFNAME": two_hosts.INTERFACE, "XDG_CACHE_HOME": two_hosts.CACHE}
    with ended_by_term():
        done = subprocess.run(
            [*command, python, *words], env=env, stdout=subprocess.PIPE, text=True, timeout=timeout_seconds, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@contextlib.contextmanager
def ended_by_term() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what was started is ended."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


# ---- on each rank ---------------------------------------------------------------------------------------------------


def take_turns(
    runs: Mapping[str, Callable[[], Any]], num_rounds: int, repeats: int = 1, num_warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of a call on the slowest rank, after all have met: one sample of each in every round."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(num_rounds + num_warm_up):
        for name, call in runs.items():
            world.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds = world.allreduce((time.perf_counter() - start) / repeats, MPI.MAX)
            if number >= num_warm_up:
                samples[name].append(seconds)
    return samples


def answer(found: dict[str, Any]) -> None:
    """Rank 0 gives this to the parent, with the versions of what it has loaded."""
    from mpi4py import MPI

    versions = {"mpi": MPI.Get_library_version().split("\n")[0].strip("\0"), "python": sys.version.split()[0]}
    versions |= {name: sys.modules[name].__version__ for name in ("numpy", "torch") if name in sys.modules}
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(f"\n{json.dumps({**found, 'versions': versions})}\n")
        sys.stdout.flush()


def start_gloo() -> None:
    """PyTorch's process group of the ranks of MPI, with one thread each."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    torch.set_num_threads(1)
    if not dist.is_initialized():
        world = MPI.COMM_WORLD
        store = world.bcast(f"{os.path.join(os.environ['TMPDIR'], 'gloo')}-{os.getpid()}")
        dist.init_process_group("gloo", f"file://{store}", rank=world.rank, world_size=world.size)
