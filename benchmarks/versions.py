"""This installation of dbrdist against another one, such as that of an earlier version: is anything slower?

Steps of one process (an MLP of three layers of 8 units, ResNet-20, ResNet-50), and of two ranks (a small step, a
reduction of 25.6 M gradients), in turns. What counts is processor time; of two ranks that of the rank that takes more,
in a job of its own for each sample. The figure is the median of the ratios of pairs, with an interval of 95 % by
resampling the pairs; goal: the interval ends below 1.03. Both installations are as users have them, compiled.

    .venv-wheel/bin/python benchmarks/versions.py --against OTHER/bin/python --record

Imports are compared by ``imports.py --against``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import overhead
import ranks
import reduction
import resnet

GOAL_RATIO = 1.03
Run = Callable[[], Any]
STEPS: dict[str, tuple[Callable[..., Run], dict[str, Any], int]] = {  # the step, its arguments, calls at a time
    "small step": (overhead.dbrdist_step, {"units": 8, "batch": 8}, 200),
    "ResNet-20": (
        resnet.dbrdist_step,
        {"model": "resnet20", "batch": 32, "rows": 32, "dtype": "float32", "inference": False},
        1,
    ),
    "ResNet-50": (
        resnet.dbrdist_step,
        {"model": "resnet50", "batch": 4, "rows": 224, "dtype": "float32", "inference": False},
        1,
    ),
}
OF_RANKS: dict[str, tuple[Callable[[bool], dict[str, Run]], str, int]] = {  # the cases, which of them, how often
    "small step of 2 ranks": (reduction.small, "multi-node", 10),
    "reduction of 2 ranks": (reduction.large, "float32", 8),
}


def serve_rank(subject: str) -> None:
    """On each rank: seconds of the processor for a call, of the rank that takes more."""
    from mpi4py import MPI

    cases, name, repeats = OF_RANKS[subject]
    call = cases(False)[name]
    for _ in range(2):
        call()
    MPI.COMM_WORLD.Barrier()
    start = time.process_time()
    for _ in range(repeats):
        call()
    seconds = MPI.COMM_WORLD.allreduce((time.process_time() - start) / repeats, MPI.MAX)
    ranks.answer({"seconds": seconds})


def steps(name: str, pythons: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Samples of a step of one process, from a process of each installation."""
    workers = {label: harness.Worker(p, __file__, "steps", installed=True) for label, p in pythons.items()}
    _, arguments, calls = STEPS[name]
    found = harness.compare(workers, name, num_rounds=num_rounds, calls=calls, arguments=arguments, is_cpu_time=True)
    for worker in workers.values():
        worker.close()
    return {label: r["samples"] for label, r in found.items()}


def jobs(name: str, pythons: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Samples of two ranks, a job for each, in turns whose order changes."""
    samples: dict[str, list[float]] = {label: [] for label in pythons}
    for k in range(num_rounds):
        for label in list(pythons)[:: 1 if k % 2 else -1]:
            words = [__file__, "--worker", name]
            samples[label].append(ranks.run(words, pythons[label], 2, installed=True)["seconds"])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of the other installation")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", choices=[*STEPS, *OF_RANKS], action="append", help="these subjects; default all")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "steps":
        harness.serve({name: make for name, (make, _, _) in STEPS.items()})
        return
    if args.worker:
        serve_rank(args.worker)
        return
    if not args.against or not harness.is_installed():
        parser.error(
            "name the other installation by --against, and run this with an interpreter that has dbrdist installed"
        )
    pythons = {"own": sys.executable, "other": args.against}
    results: dict[str, Any] = {}
    for name in args.only or [*STEPS, *OF_RANKS]:
        samples = (steps if name in STEPS else jobs)(name, pythons, args.rounds)
        found = harness.paired_ratio(samples["other"], samples["own"])
        results[name] = {**found, **{label: harness.summarize(s) for label, s in samples.items()}}
        times = [results[name][label]["median_seconds"] * 1e3 for label in ("own", "other")]
        print(f"{name:<22} {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]; "
              f"{times[0]:.3f} and {times[1]:.3f} ms", flush=True)  # fmt: skip
    if args.record:
        settings = {"num_rounds": args.rounds, "num_threads": 1, "goal_ratio": GOAL_RATIO}
        print(harness.record("versions", settings, results))


if __name__ == "__main__":
    main()
