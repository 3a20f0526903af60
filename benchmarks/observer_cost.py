"""What ``dbrdist-train --profile`` and ``--watch`` add to the time of a run: pairs that take turns, one after another.

``profile``: whole runs with and without ``--profile``, on one rank with one thread; the time of a run is that of its
training loop, and its CPU time that of the process. ``watch``: one run with a rank on each core, of which stretches
are watched (a client asks as often as the page in a browser does) and stretches are not; the speed of each follows
from the log. Goals: 5 % and 0.5 %.

    python benchmarks/observer_cost.py profile --record   # about 10 minutes
    python benchmarks/observer_cost.py watch --record     # about 7 minutes
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

PAGE_SECONDS = 2.0  # between two questions of a page: SECONDS in dbrdist/cli/inspection/watch.js
STRETCH_SECONDS = 8.0
# model, its settings, shape of an example, batch, steps of a run of some eight seconds
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"name": "mlp", "units": [8, 8]}, "shape": [8], "batch": 8, "steps": 40_000},
    "lenet": {
        "model": {"name": "lenet", "channels": [32, 64], "units": 128}, "shape": [1, 8, 8], "batch": 64, "steps": 3000,
    },
    "resnet20": {"model": {"name": "resnet20"}, "shape": [3, 32, 32], "batch": 128, "steps": 32},
}  # fmt: skip
NUM_BATCHES = 32  # of an epoch
COMMAND = [sys.executable, "-m", "dbrdist.cli.train"]


def environment() -> dict[str, str]:
    """One thread for each process, and dbrdist from the checkout."""
    paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "launch")])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": paths}


def prepare(folder: Path, case: str, *, steps: int, log_every: int) -> None:
    """A configuration ``run.yaml`` and its random data; the run's folder is ``run``."""
    import numpy as np

    settings = CASES[case]
    rng, n = np.random.default_rng(0), NUM_BATCHES * settings["batch"]
    x, y = rng.standard_normal((n, *settings["shape"]), np.float32), rng.integers(0, 10, n).astype(np.int32)
    np.savez(folder / "data.npz", x=x, y=y)
    config = {
        "model": {**settings["model"], "num_classes": 10},
        "data": {"name": "npz", "train": "data.npz"},
        "batch": settings["batch"],
        "epochs": 1e6,
        "iterations": steps,
        "optimizer": {"name": "momentum_sgd", "lr": 1e-3},
        "snapshot": {"every": "1000000000 iterations"},
        "log": {"every": f"{log_every} iterations"},
        "out": "run",
    }
    (folder / "run.yaml").write_text(json.dumps(config))


def last_line(folder: Path) -> dict[str, Any]:
    """The last whole line of the run's log."""
    with open(folder / "run" / "log.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        whole = file.read().rpartition(b"\n")[0]
    return json.loads(whole.rpartition(b"\n")[2])


# ---- profile --------------------------------------------------------------------------------------------------------


def timed_run(folder: Path, *options: str) -> tuple[float, float]:
    """Seconds of the training loop, and CPU seconds of the process, of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*COMMAND, "run.yaml", "--overwrite", *options], cwd=folder, env=environment(), check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["elapsed_time"], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def profile(case: str, pairs: int, scale: float) -> dict[str, Any]:
    """Runs with and without ``--profile``, each as often first as second."""
    steps = max(1, round(CASES[case]["steps"] * scale))
    loops: dict[str, list[float]] = {"plain": [], "profiled": []}
    processors: dict[str, list[float]] = {"plain": [], "profiled": []}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), case, steps=steps, log_every=steps)
        for turn in range(2 * pairs):
            kind = ("plain", "profiled")[(turn + turn // 2) % 2]
            loop, processor = timed_run(Path(name), *(["--profile"] if kind == "profiled" else []))
            loops[kind].append(loop)
            processors[kind].append(processor)
    return {
        "steps": steps,
        **{name: harness.summarize(samples) for name, samples in loops.items()},
        "overhead": overhead(loops["plain"], loops["profiled"]),
        "overhead_of_cpu_time": overhead(processors["plain"], processors["profiled"]),
    }


# ---- watch ----------------------------------------------------------------------------------------------------------


@contextmanager
def started(command: list[str], folder: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended behind the block; by a signal that a job in the background does not ignore."""
    process = subprocess.Popen(command, cwd=folder, env=environment(), text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Page:
    """What the page in a browser asks for."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.marks: dict[str, str] = {}
        self.num_bytes = 0

    def look(self) -> None:
        """Ask for what has changed."""
        with urllib.request.urlopen(f"{self.address}state?known={','.join(self.marks.values())}") as answer:
            text = answer.read()
        self.num_bytes += len(text)
        state = json.loads(text)
        self.marks |= {name: section["mark"] for name, section in state["sections"].items()}
        if state.get("charts"):
            self.marks["charts"] = state["charts"]["mark"]


def stretch(folder: Path, page: Page | None, seconds: float) -> float:
    """Steps per second of the run in a stretch of time, by the last lines of its log."""
    end = time.monotonic() + seconds
    first = last_line(folder)
    while time.monotonic() < end:
        if page is not None:
            page.look()
        time.sleep(max(0.0, min(PAGE_SECONDS, end - time.monotonic())))
    last = last_line(folder)
    return (last["iteration"] - first["iteration"]) / (last["elapsed_time"] - first["elapsed_time"])


def watch(case: str, pairs: int, scale: float) -> dict[str, Any]:
    """Stretches of one run that are watched and not watched, each as often first as second."""
    ranks, seconds = os.cpu_count() or 1, STRETCH_SECONDS * scale
    speeds: dict[str, list[float]] = {"plain": [], "watched": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, case, steps=10**9, log_every=20)
        run = ["mpiexec", "-n", str(ranks), *COMMAND, "run.yaml"]
        with started(run, folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
            while not (folder / "run" / "log.jsonl").exists() or len(lines_of(folder)) < 50:
                assert training.poll() is None, "the run ended before it was watched"
                time.sleep(0.2)
            with started([*COMMAND, "--watch", "run"], folder, stdout=subprocess.PIPE) as server:
                assert server.stdout is not None
                page = Page(server.stdout.readline().split()[-1])
                page.look()
                began = cpu_seconds(server.pid)
                for turn in range(2 * pairs):
                    kind = ("plain", "watched")[(turn + turn // 2) % 2]
                    speeds[kind].append(stretch(folder, page if kind == "watched" else None, seconds))
                used = cpu_seconds(server.pid) - began
    times = {kind: [1 / speed for speed in found] for kind, found in speeds.items()}
    return {
        "ranks": ranks,
        **{kind: harness.summarize(samples) for kind, samples in times.items()},
        "overhead": overhead(times["plain"], times["watched"]),
        "cpu_seconds_of_server_per_watched_second": used / (pairs * seconds),
        "bytes_per_watched_second": page.num_bytes / (pairs * seconds),
    }


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "run" / "log.jsonl").read_bytes().splitlines()


# ---- both -----------------------------------------------------------------------------------------------------------


def overhead(plain: list[float], observed: list[float]) -> dict[str, float]:
    """The median over pairs of what is added, as a fraction, with an interval of 95 % by resampling the pairs."""
    ratios = [b / a - 1 for a, b in zip(plain, observed)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "low": medians[50], "high": medians[-51]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["profile", "watch"])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--pairs", type=int, help="default: 9 pairs of runs, 25 of stretches")
    parser.add_argument("--scale", type=float, default=1.0, help="of the length of a run or stretch; small for a trial")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    is_profile = args.what == "profile"
    pairs = args.pairs or (9 if is_profile else 25)
    results = {}
    for case in args.case or (list(CASES) if is_profile else ["lenet"]):
        found = results[case] = (profile if is_profile else watch)(case, pairs, args.scale)
        added = {name: found[name] for name in ("overhead", "overhead_of_cpu_time") if name in found}
        words = ", ".join(
            f"{name.replace('_', ' ')} {o['median']:+.2%} ({o['low']:+.2%} to {o['high']:+.2%})"
            for name, o in added.items()
        )
        print(f"{case:<9} {words}", flush=True)
        if not is_profile:
            print(f"{'':<9} the server took {found['cpu_seconds_of_server_per_watched_second']:.2%} of one core")
    if args.record:
        print(harness.record(f"{args.what}-cost", {"pairs": pairs, "scale": args.scale, "cases": CASES}, results))


if __name__ == "__main__":
    main()
