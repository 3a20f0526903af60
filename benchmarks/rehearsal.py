"""What `dbrdist-train --rehearse` predicts, and what runs did: time of a step, bytes on the network, memory of a rank.

ResNet-18 on made-up images of 64 pixels, a few for each rank, with and without virtual workers, on one host and on two.
The speed of a rank is what a rehearsal measures here, right before each job, by as many processes at the same time as
the job has ranks, but no more than there are cores. A rehearsal supposes a core for each rank; where there are fewer,
the prediction is multiplied by ranks per core. Two hosts are namespaces joined by a cable of 1 Gbit/s (two_hosts.py:
Linux, root).
Times are medians of steps; bytes are those that the first host's interface counts in the last steps; memory is what the
largest resident memory of a rank grows by with the batch. Goal: each within 25 % of the prediction. It takes two
minutes; more ranks with --ranks.

    python benchmarks/rehearsal.py --record
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import two_hosts

from dbrdist.cli.configuration import load
from dbrdist.cli.running import rehearsal

PER_RANK, NUM_STEPS, NUM_FIRST = 4, 14, 4
MEMORY_BATCHES = (32, 128)
RATE, GIGABITS, MICROSECONDS = "1gbit", 1.0, 50.0
GOAL = 0.25
ENV = {**os.environ}  # of jobs: measuring sets numbers of threads in that of this process
CONFIG = """
model: {name: resnet18, num_classes: 1000}
data: {name: image_folder, root: data, test: null}
transforms:
  train: [{name: random_resized_crop, size: 64}, {name: normalize, mean: [0.5], std: [0.2]}]
batch: 4
epochs: 1000
log: {every: 1 iteration}
snapshot: {every: 1000 epochs}
"""


def batch_of(ranks: int, is_virtual: bool) -> str:
    if is_virtual:
        return f"batch={{virtual_workers: {ranks}, per_worker: {PER_RANK}}}"
    return f"batch={PER_RANK * ranks}"


def entries(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def seconds_of(out: Path) -> float:
    """The median of a run's steps, without the first ones."""
    times = [entry["elapsed_time"] for entry in entries(out)]
    return statistics.median([b - a for a, b in zip(times[NUM_FIRST:], times[NUM_FIRST + 1 :])])


def train(start: list[str], folder: Path, out: str, *words: str, steps: int = NUM_STEPS) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "dbrdist.cli.train"]
    more = [f"out={folder / out}", f"data.root={folder / 'data'}", f"iterations={steps}", "--overwrite", *words]
    return subprocess.Popen([*start, *program, str(folder / "c.yaml"), *more], env=ENV, stdout=subprocess.DEVNULL)


def finished(*jobs: subprocess.Popen[bytes]) -> None:
    if codes := [job.wait() for job in jobs if job.wait()]:
        raise SystemExit(f"a run ended with code {codes[0]}")


# ---- time and bytes --------------------------------------------------------------------------------------------------


class Place:
    """One host or two."""

    def __init__(self, folder: Path, hosts: Any) -> None:
        self.folder, self.hosts = folder, hosts

    def run(self, ranks: int, words: str, steps: int) -> tuple[float, int]:
        """Seconds of a step, and the bytes that the first host has sent in all."""
        mpiexec = shutil.which("mpiexec") or "mpiexec"
        start = [mpiexec, "-n", str(ranks)] if self.hosts is None else self.hosts.mpiexec(mpiexec, ranks)
        before = self.sent()
        finished(train(start, self.folder, "job", words, steps=steps))
        return seconds_of(self.folder / "job") if steps > NUM_FIRST + 1 else 0.0, self.sent() - before

    def sent(self) -> int:
        if self.hosts is None:
            return 0
        words = [*self.hosts.inside(0), "cat", f"/sys/class/net/{two_hosts.INTERFACE}/statistics/tx_bytes"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def compare(place: Place, ranks: int, is_virtual: bool) -> dict[str, dict[str, float]]:
    """Measured and predicted seconds of a step, and bytes that a host sends in one."""
    words = batch_of(ranks, is_virtual)
    config, origin = load.load(place.folder / "c.yaml", [words])
    measured = rehearsal.measure(config, origin, rehearsal.TargetJob(ranks, ranks))  # the cores of both hosts are these
    turns = max(ranks / len(os.sched_getaffinity(0)), 1.0)
    measured = measured._replace(
        seconds_per_example=measured.seconds_per_example * turns, update_seconds=measured.update_seconds * turns
    )
    job = rehearsal.TargetJob(ranks, ranks if place.hosts is None else ranks // 2, GIGABITS, MICROSECONDS)
    seconds, num_bytes = place.run(ranks, words, NUM_STEPS)
    found = {"seconds": {"measured": seconds, "predicted": rehearsal.predict(config, job, measured).step}}
    if place.hosts is not None:
        _, first = place.run(ranks, words, NUM_FIRST)
        predicted = rehearsal.ring_bytes(job.hosts, rehearsal.wire_bytes(config, measured))
        found["bytes"] = {"measured": (num_bytes - first) / (NUM_STEPS - NUM_FIRST), "predicted": predicted}
    return found


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(folder: Path) -> dict[str, float]:
    """Bytes of a rank for more examples in a step: a start needs more than the step of a few."""
    resident, predicted = [], []
    for batch in MEMORY_BATCHES:
        words = [f"batch={batch}"]
        finished(train([], folder, f"memory-{batch}", *words, steps=2))
        resident.append(max(entry["memory_bytes"] for entry in entries(folder / f"memory-{batch}")))
        config, origin = load.load(folder / "c.yaml", words)
        need = rehearsal.measure(config, origin, rehearsal.TargetJob(1, 1, examples_per_second=1.0)).memory_bytes
        assert need is not None
        predicted.append(need)
    return {"measured": resident[1] - resident[0], "predicted": predicted[1] - predicted[0]}


# ---- all of it -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def places(names: list[str], folder: Path) -> Iterator[dict[str, Place]]:
    with contextlib.ExitStack() as stack:
        hosts = {n: stack.enter_context(two_hosts.TwoHosts(RATE)) if n == "two hosts" else None for n in names}
        yield {name: Place(folder, found) for name, found in hosts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", choices=["one host", "two hosts"], nargs="*", default=["one host", "two hosts"])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="of the jobs; on two hosts the even ones")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results: dict[str, Any] = {}

    def note(key: str, found: dict[str, float], unit: str, scale: float) -> None:
        results[key] = found
        measured, predicted = found["measured"] / scale, found["predicted"] / scale
        print(f"{key:<48} {measured:8.3f} {unit}, predicted {predicted:.3f}: {measured / predicted:.2f}", flush=True)

    with tempfile.TemporaryDirectory() as name, places(args.hosts, Path(name)) as found_places:
        folder = Path(name)
        rehearsal.make_photographs(str(folder / "data"), 64)
        (folder / "c.yaml").write_text(CONFIG)
        note(f"memory for {MEMORY_BATCHES[1] - MEMORY_BATCHES[0]} more examples", memory(folder), "MB", 1e6)
        for place_name, place in found_places.items():
            for ranks in args.ranks if place.hosts is None else [n for n in args.ranks if n % 2 == 0]:
                for kind in ("plain", "virtual workers"):
                    key = f"{place_name}, {ranks} rank{'s' * (ranks > 1)}, {kind}"
                    found = compare(place, ranks, kind != "plain")
                    note(key, found["seconds"], "s ", 1)
                    if "bytes" in found:
                        note(f"{key}, sent", found["bytes"], "MB", 1e6)
    worst = max(abs(r["measured"] / r["predicted"] - 1) for r in results.values())
    print(f"largest difference {worst:.0%} (goal: {GOAL:.0%})")
    if args.record:
        settings = {"per_rank": PER_RANK, "steps": NUM_STEPS - NUM_FIRST, "rate": RATE, "goal": GOAL}
        about = {"python": sys.version.split()[0], **{name: version(name) for name in ("numpy", "dbrdist")}}
        print(harness.record("rehearsal", settings, results, about))


if __name__ == "__main__":
    main()
