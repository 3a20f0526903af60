"""This installation of dbrdist against another one, such as that of an earlier version: is anything slower?

Steps of one process (an MLP of three layers of 8 units, ResNet-20, ResNet-50), and of two ranks (a small step, a
reduction of 25.6 M gradients), in turns; importing, and installing a wheel or a source tree with pip. What counts is
processor time; of two ranks that of the rank that takes more, in a job of its own for each sample, where a rank that
waits takes time as well: only a quiet machine with a core for each tells anything. The small step has a process of its
own for each sample, too: how attributes fall into Python's cache of them differs by 2 % between processes. The figure
is the median of the ratios of pairs, with an interval of 95 % by resampling the pairs; goal: the interval ends below
1.03. Both installations are as users have them, compiled.

    .venv-wheel/bin/python benchmarks/versions.py --against OTHER/bin/python --record
    .venv-wheel/bin/python benchmarks/versions.py --against OTHER/bin/python --wheels OWN.whl OTHER.whl --only install
    .venv-wheel/bin/python benchmarks/versions.py --against OTHER/bin/python --trees OWN OTHER --only build

Both ways to import are compared by ``imports.py --against``.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import imports
import overhead
import ranks
import reduction
import resnet

GOAL_RATIO = 1.03
Run = Callable[[], Any]
STEPS: dict[str, tuple[Callable[..., Run], dict[str, Any], int, int]] = {
    # the step, its arguments, calls at a time, rounds in one process
    "small step": (overhead.dbrdist_step, {"units": 8, "batch": 8}, 200, 1),
    "ResNet-20": (
        resnet.dbrdist_step,
        {"model": "resnet20", "batch": 32, "rows": 32, "dtype": "float32", "inference": False},
        1,
        100,
    ),
    "ResNet-50": (
        resnet.dbrdist_step,
        {"model": "resnet50", "batch": 4, "rows": 224, "dtype": "float32", "inference": False},
        1,
        100,
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
    # Each 11th collection of garbage takes 1 ms, a fortieth of what is measured: whether the next one was such depended
    # on how much had been imported. So both installations begin to count anew.
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    start = time.process_time()
    for _ in range(repeats):
        call()
    seconds = MPI.COMM_WORLD.allreduce((time.process_time() - start) / repeats, MPI.MAX)
    ranks.answer({"seconds": seconds})


def steps(name: str, pythons: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Samples of a step of one process, from processes of each installation."""
    _, arguments, calls, num_together = STEPS[name]
    samples: dict[str, list[float]] = {label: [] for label in pythons}
    for begin in range(0, num_rounds, num_together):
        turns = list(pythons.items())[:: 1 if begin % 2 else -1]
        workers = {label: harness.Worker(python, __file__, "steps", installed=True) for label, python in turns}
        num = min(num_together, num_rounds - begin)
        found = harness.compare(workers, name, num_rounds=num, calls=calls, arguments=arguments, is_cpu_time=True)
        for label, worker in workers.items():
            samples[label] += found[label]["samples"]
            worker.close()
    return samples


def jobs(name: str, pythons: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Samples of two ranks, a job for each, in turns whose order changes."""
    samples: dict[str, list[float]] = {label: [] for label in pythons}
    for k in range(num_rounds):
        for label in list(pythons)[:: 1 if k % 2 else -1]:
            words = [__file__, "--worker", name]
            samples[label].append(ranks.run(words, pythons[label], 2, installed=True)["seconds"])
    return samples


def import_seconds(python: str) -> float:
    """Of the processor, for importing what a program begins with, beyond NumPy's own import."""
    return imports.cpu_seconds(python, imports.STATEMENTS["dbrdist"])


def install_seconds(path: str) -> float:
    """Of the processor, for pip to install a wheel or a tree into an empty folder; by this interpreter's pip."""
    offline = ["--no-index"] if path.endswith(".whl") else []  # a tree is built with what pip fetches for that
    with tempfile.TemporaryDirectory() as folder:
        words = ["install", "--quiet", "--no-deps", *offline, "--target", folder, os.path.abspath(path)]
        before = _of_children()
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True)
        return _of_children() - before


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_turns(take: Callable[[str], float], subjects: dict[str, str], num_rounds: int) -> dict[str, list[float]]:
    """Samples of each subject in turns whose order changes, after one of each that fills the caches of files."""
    samples: dict[str, list[float]] = {label: [] for label in subjects}
    for k in range(-1, num_rounds):
        for label in list(subjects)[:: 1 if k % 2 else -1]:
            seconds = take(subjects[label])
            if k >= 0:
                samples[label].append(seconds)
    return samples


def measure(
    name: str, pythons: dict[str, str], paths: dict[str, dict[str, str]], num_rounds: int
) -> dict[str, list[float]]:
    """The samples of a subject."""
    if name == "import":
        return in_turns(import_seconds, pythons, num_rounds)
    if name in ("install", "build"):
        return in_turns(install_seconds, paths[name], num_rounds)
    return (steps if name in STEPS else jobs)(name, pythons, num_rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of the other installation")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--wheels", nargs=2, metavar=("OWN", "OTHER"), help="of both installations, to install")
    parser.add_argument("--trees", nargs=2, metavar=("OWN", "OTHER"), help="source trees, to build and install")
    subjects = [*STEPS, *OF_RANKS, "import", "install", "build"]
    parser.add_argument("--only", choices=subjects, action="append", help="these subjects; default all there is for")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "steps":
        harness.serve({name: make for name, (make, *_) in STEPS.items()})
        return
    if args.worker:
        serve_rank(args.worker)
        return
    if not args.against or not harness.is_installed():
        parser.error(
            "name the other installation by --against, and run this with an interpreter that has dbrdist installed"
        )
    for name, option, given in (("install", "wheels", args.wheels), ("build", "trees", args.trees)):
        if name in (args.only or ()) and not given:
            parser.error(f"name the {option} of both installations by --{option}")
    pythons = {"own": sys.executable, "other": args.against}
    paths = {"install": dict(zip(pythons, args.wheels or ())), "build": dict(zip(pythons, args.trees or ()))}
    results: dict[str, Any] = {}
    for name in args.only or [name for name in subjects if paths.get(name, pythons)]:
        samples = measure(name, pythons, paths, args.rounds)
        found = harness.paired_ratio(samples["other"], samples["own"])
        results[name] = {**found, **{label: harness.summarize(s) for label, s in samples.items()}}
        times = [results[name][label]["median_seconds"] * 1e3 for label in ("own", "other")]
        print(f"{name:<22} {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]; "
              f"{times[0]:.3f} and {times[1]:.3f} ms", flush=True)  # fmt: skip
    if args.record:
        settings = {"num_rounds": args.rounds, "num_threads": 1, "goal_ratio": GOAL_RATIO}
        print(harness.record("-".join(["versions", *(args.only or ())]), settings, results))


if __name__ == "__main__":
    main()
