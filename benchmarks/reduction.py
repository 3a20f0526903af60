"""Reductions over ranks, against MPI_Allreduce and gloo; small steps; throughput of ranks that train together.

Two ranks with one thread each; all candidates take turns in the same processes, so that they see the same machine. A
time is that of the slowest rank, after all have met. Goals: 102 MB of float32 gradients in the arena 0.3 of
MPI_Allreduce's time and 0.2 of gloo's, bfloat16 0.25 of gloo's; a step with 10 KB of gradients 1.3 of one with a bare
Allreduce in its place, with one rank 1.15 of the plain optimizer's; ResNet-20 on two ranks 0.98 of the throughput of
two trainings that do not know each other. With ``--torch-python`` the interpreter of an environment that has PyTorch,
mpi4py and what dbrdist needs runs the ranks. ``--table`` makes one table of all communicators over MPI on one host, for
2 to 4 ranks, beside MPI_Allreduce; goal: what ``auto`` takes is within a tenth of the fastest in every row.

    python benchmarks/reduction.py --torch-python TORCH_VENV/bin/python --record
    python benchmarks/reduction.py --torch-python TORCH_VENV/bin/python --busy --record
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness

NUM_GRADIENTS = 25_600_000
Run = Callable[[], Any]


def large(peers: bool) -> dict[str, Run]:
    """The reduction of a model's gradients, and of an array of the same size by others."""
    import ml_dtypes
    import numpy as np
    from mpi4py import MPI

    from dbrdist.comm import create_communicator
    from dbrdist.core.link import Link
    from dbrdist.core.parameter import Parameter

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
    return cases | (gloo(comm) if peers else {})


def gloo(comm: Any) -> dict[str, Run]:
    """PyTorch's allreduce over gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = comm.bcast_obj(f"{os.path.join(os.environ['TMPDIR'], 'gloo')}-{os.getpid()}")
    dist.init_process_group("gloo", f"file://{store}", rank=comm.rank, world_size=comm.size)
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


def resnet20(peers: bool) -> dict[str, Run]:
    """A step of ResNet-20 on each rank, together and each for itself."""
    import numpy as np

    import dbrdist.functions as F
    from dbrdist import optimizers
    from dbrdist.comm import create_communicator, create_multi_node_optimizer
    from dbrdist.models.resnet import ResNet20

    comm = create_communicator("flat")
    rng = np.random.default_rng(comm.rank)
    x, t = rng.standard_normal((64, 3, 32, 32), np.float32), rng.integers(0, 10, 64)

    def training(together: bool) -> Run:
        model = ResNet20(10)
        optimizer: Any = optimizers.MomentumSGD(0.01, 0.9)
        optimizer = (create_multi_node_optimizer(optimizer, comm) if together else optimizer).setup(model)
        return lambda: optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))

    return {"independent": training(False), "together": training(True)}


def table(peers: bool) -> dict[str, Run]:
    """The gradients of two models, 102 MB and 10 KB in 160 and 10 parameters, by each communicator."""
    import numpy as np
    from mpi4py import MPI

    from dbrdist.comm import create_communicator
    from dbrdist.core.link import Link
    from dbrdist.core.parameter import Parameter

    cases: dict[str, Run] = {}
    for label, num_params, size in (("102 MB", 160, NUM_GRADIENTS // 160), ("10 KB", 10, 256)):
        model = Link()
        with model.init_scope():
            for k in range(num_params):
                setattr(model, f"p{k}", Parameter(np.zeros(size, np.float32)))
        for p in model.params():
            p.grad = np.ones(size, np.float32)
        repeats = 1 if num_params == 160 else 100
        for name in COMMUNICATORS:
            comm = create_communicator(name)
            cases[f"{name} {label}"] = _repeated(
                repeats, lambda comm=comm, model=model: comm.multi_node_mean_grad(model)
            )
        x = np.zeros(num_params * size, np.float32)
        cases[f"MPI_Allreduce {label}"] = _repeated(repeats, lambda x=x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x))
    return cases


def _repeated(number: int, run: Run) -> Run:
    """Short runs are timed together: the times of a table's 10 KB are those of 100 reductions."""
    return lambda: [run() for _ in range(number)]


COMMUNICATORS = ("flat", "naive", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "dummy")
TABLES = {f"table of {n} ranks": n for n in (2, 3, 4)}
SUBJECTS = {"large": (large, 2), "small": (small, 2), "small on one rank": (small, 1), "resnet20": (resnet20, 2)}
SUBJECTS |= {name: (table, num_ranks) for name, num_ranks in TABLES.items()}
RATIOS = {  # of two cases; the goal
    "large": [
        ("float32", "MPI_Allreduce float32", 0.3),
        ("float32", "gloo float32", 0.2),
        ("bfloat16", "gloo bfloat16", 0.25),
    ],
    "small": [("multi-node", "Allreduce", 1.3)],
    "small on one rank": [("multi-node", "alone", 1.15)],
    "resnet20": [("together", "independent", 1 / 0.98)],
}
for _name in TABLES:  # what "auto" takes on one host is the fastest that reduces, or within a tenth of it
    RATIOS[_name] = [("flat 102 MB", "fastest 102 MB", 1.1), ("flat 10 KB", "fastest 10 KB", 1.1)]


def serve(subject: str, num_rounds: int, peers: bool) -> None:
    """On each rank: time the cases in turn; rank 0 writes the samples of the slowest rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cases = SUBJECTS[subject][0](peers)
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(num_rounds + 2):  # two to warm up
        for name, run in cases.items():
            world.Barrier()
            start = time.perf_counter()
            run()
            seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
            if number > 1:
                samples[name].append(seconds)
    versions = {"mpi": MPI.Get_library_version().split("\n")[0].strip("\0"), "python": sys.version.split()[0]}
    versions |= {name: sys.modules[name].__version__ for name in ("numpy", "torch") if name in sys.modules}
    if world.rank == 0:
        sys.stdout.write(f"\n{json.dumps({'samples': samples, 'versions': versions})}\n")
        sys.stdout.flush()


def measure(subject: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a subject and take what rank 0 writes."""
    python = args.torch_python or sys.executable
    command = [
        str(Path(python).with_name("mpiexec")),
        "-n",
        str(SUBJECTS[subject][1]),
        python,
        os.path.abspath(__file__),
    ]
    command += ["--worker", subject, "--rounds", str(args.rounds), *(["--peers"] if args.torch_python else [])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = os.pathsep.join(map(str, (harness.ROOT, harness.ROOT / "launch", harness.ROOT / "benchmarks")))
    env = {"TMPDIR": "/tmp", **os.environ, **threads, "PYTHONPATH": paths}
    with busy_cores() if args.busy else contextlib.nullcontext():
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


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


def with_fastest(cases: dict[str, Any]) -> dict[str, Any]:
    """The cases, and for each size those of the fastest that adds gradients; single_node is flat by another name."""
    for label in ("102 MB", "10 KB"):
        names = [f"{name} {label}" for name in COMMUNICATORS if name not in ("single_node", "dummy")]
        cases[f"fastest {label}"] = min((cases[name] for name in names), key=lambda case: case["median_seconds"])
    return cases


def print_table(results: dict[str, Any]) -> None:
    """Milliseconds of one reduction in Markdown, a row for each communicator."""
    found = [name for name in TABLES if name in results]
    columns = [(name, label, 1e3 / (100 if label == "10 KB" else 1)) for label in ("102 MB", "10 KB") for name in found]
    print("| ms | " + " | ".join(f"{label}, {TABLES[name]} ranks" for name, label, _ in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in (*COMMUNICATORS, "MPI_Allreduce"):
        cells = [f"{results[name][f'{row} {label}']['median_seconds'] * scale:.3f}" for name, label, scale in columns]
        print(f"| `{row}` | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-python", help="interpreter of an environment that has PyTorch, mpi4py and MPICH")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="these subjects; default all")
    parser.add_argument("--table", action="store_true", help="only the table of all communicators, with 2 to 4 ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="keep all cores busy with other processes meanwhile")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--peers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.rounds, args.peers)
        return
    results: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for subject in args.only or (TABLES if args.table else SUBJECTS):
        found = measure(subject, args)
        versions = versions | found["versions"]
        cases = {name: harness.summarize(samples) for name, samples in found["samples"].items()}
        if subject in TABLES:
            cases = with_fastest(cases)
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
    if any(name in results for name in TABLES):
        print_table(results)
    if args.record:
        settings = {"num_rounds": args.rounds, "num_threads": 1, "num_gradients": NUM_GRADIENTS, "busy": args.busy}
        print(harness.record("reduction-busy" if args.busy else "reduction", settings, results, versions))


if __name__ == "__main__":
    main()
