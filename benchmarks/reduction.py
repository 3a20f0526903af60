"""Reductions of two ranks on one host, against MPI_Allreduce and gloo; small steps.

The ranks have one thread each; all candidates take turns in the same processes, so that they see the same machine. A
time is that of the slowest rank, after all have met. Goals: 102 MB of float32 gradients in the arena 0.3 of
MPI_Allreduce's time and 0.2 of gloo's, bfloat16 0.25 of gloo's; a step with 10 KB of gradients 1.3 of one with a bare
Allreduce in its place, with one rank 1.15 of the plain optimizer's. With ``--torch-python`` the interpreter of an
environment that has PyTorch, mpi4py and what dbrdist needs runs the ranks. All communicators, more ranks and two hosts:
``reduction_table.py``; whole steps: ``data_parallel.py``.

    python benchmarks/reduction.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/reduction.py --torch-python TORCH_VENV/bin/python --busy --record
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import harness
import ranks

NUM_GRADIENTS = 25_600_000
Run = Callable[[], Any]


def large(peers: bool) -> dict[str, Run]:
    """The reduction of a model's gradients, and of an array of the same size by others."""
    import ml_dtypes
    import numpy as np
    from mpi4py import MPI

    from dbrdist import Link, Parameter
    from dbrdist.comm import create_communicator

    comm = create_communicator("flat")

    def arena(dtype: Any) -> Run:
        model = Link()
        with model.init_scope():
            model.w = Parameter(np.zeros(NUM_GRADIENTS, dtype))
        model.w.grad = np.ones(NUM_GRADIENTS, dtype)
        return lambda: comm.multi_node_mean_grad(model)

    x = np.zeros(NUM_GRADIENTS, np.float32)
    cases: dict[str, Run] = {
        "float32": arena(np.float32),
        "bfloat16": arena(ml_dtypes.bfloat16),
        "MPI_Allreduce float32": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x),
    }
    return cases | (gloo() if peers else {})


def gloo() -> dict[str, Run]:
    """PyTorch's allreduce over gloo."""
    import torch
    import torch.distributed as dist

    ranks.start_gloo()
    arrays = {name: torch.zeros(NUM_GRADIENTS, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {f"gloo {name}": lambda x=x: dist.all_reduce(x) for name, x in arrays.items()}


def small(peers: bool) -> dict[str, Run]:
    """A training step with 10 KB of gradients: alone, with a bare Allreduce in it, multi-node."""
    import numpy as np
    from mpi4py import MPI

    import dbrdist.functions as F
    import dbrdist.links as L
    from dbrdist import Sequential, optimizers
    from dbrdist.comm import create_communicator, create_multi_node_optimizer

    comm = create_communicator("flat")
    rng = np.random.default_rng(comm.rank)
    x, t = rng.standard_normal((8, 40), np.float32), rng.integers(0, 20, 8)

    def training(together: bool) -> tuple[Any, Any, Run]:
        model = Sequential(L.Linear(40, 40), F.relu, L.Linear(40, 20))
        optimizer: Any = optimizers.MomentumSGD(0.01, 0.9)
        optimizer = (create_multi_node_optimizer(optimizer, comm) if together else optimizer).setup(model)
        return model, optimizer, lambda: F.softmax_cross_entropy(model(x), t)

    model, optimizer, loss = training(False)
    grad = model[0].W.slot.arena.grad

    def bare() -> None:
        value = loss()
        model.cleargrads()
        value.backward()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, grad)
        np.multiply(grad, np.float32(1 / comm.size), out=grad)
        optimizer.update()

    _, alone, own_loss = training(False)
    _, multi, shared_loss = training(True)
    steps = {
        "alone": lambda: alone.update(own_loss),
        "Allreduce": bare,
        "multi-node": lambda: multi.update(shared_loss),
    }
    return {name: lambda step=step: [step() for _ in range(100)] for name, step in steps.items()}


SUBJECTS = {"large": (large, 2), "small": (small, 2), "small on one rank": (small, 1)}
RATIOS = {  # of two cases; the goal
    "large": [
        ("float32", "MPI_Allreduce float32", 0.3),
        ("float32", "gloo float32", 0.2),
        ("bfloat16", "gloo bfloat16", 0.25),
    ],
    "small": [("multi-node", "Allreduce", 1.3)],
    "small on one rank": [("multi-node", "alone", 1.15)],
}


def serve(subject: str, num_rounds: int, peers: bool) -> None:
    """On each rank: time the cases in turn."""
    ranks.answer({"samples": ranks.take_turns(SUBJECTS[subject][0](peers), num_rounds)})


def measure(subject: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a subject and take what they measure."""
    words = [__file__, "--worker", subject, "--rounds", str(args.rounds), *["--peers"] * bool(args.torch_python)]
    with busy_cores() if args.busy else contextlib.nullcontext():
        return ranks.run(words, args.torch_python or sys.executable, SUBJECTS[subject][1])


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep each core busy with a process that counts."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def main() -> None:
    parser = ranks.parser(__doc__.split("\n")[0], 15, {"choices": SUBJECTS})
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="these subjects; default all")
    parser.add_argument("--busy", action="store_true", help="keep all cores busy with other processes meanwhile")
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.rounds, args.peers)
        return
    results: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for subject in args.only or SUBJECTS:
        found = measure(subject, args)
        versions = versions | found["versions"]
        cases = {name: harness.summarize(samples) for name, samples in found["samples"].items()}
        ratios: dict[str, Any] = {}
        for one, other, goal in RATIOS[subject]:
            if other in cases:
                ratio = cases[one]["median_seconds"] / cases[other]["median_seconds"]
                ratios[f"{one} / {other}"] = {"ratio": ratio, "goal": goal}
        results[subject] = {**cases, "ratios": ratios}
        for name, r in cases.items():
            print(f"{subject}: {name:<22} {r['median_seconds'] * 1e3:9.3f} ms  ({r['min_seconds'] * 1e3:.3f} to "
                  f"{r['max_seconds'] * 1e3:.3f})")  # fmt: skip
        for name, r in ratios.items():
            print(f"{subject}: {name}  {r['ratio']:.3f}  (goal {r['goal']:.3f})")
    if args.record:
        settings = {"num_rounds": args.rounds, "num_threads": 1, "num_gradients": NUM_GRADIENTS, "busy": args.busy}
        print(harness.record("reduction-busy" if args.busy else "reduction", settings, results, versions))


if __name__ == "__main__":
    main()
