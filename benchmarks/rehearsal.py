"""What `dbrdist-train --rehearse` predicts of a step, and steps that were run, on one host and on two.

ResNet-18 on made-up images of 64 pixels, a few for each rank, with and without virtual workers. The speed of a rank is
that of runs without communication, as many at the same time as the job has ranks, since ranks of a host share cores and
memory. Two hosts are namespaces joined by a cable of 1 Gbit/s (two_hosts.py: Linux, root). Medians of steps; goal: each
within 25 % of the prediction.

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

PER_RANK, NUM_STEPS, NUM_FIRST, NUM_PARAMETERS = 4, 14, 4, 11_689_512
RATE, GIGABITS, MICROSECONDS = "1gbit", 1.0, 50.0
GOAL = 0.25
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


def seconds_of(out: Path) -> float:
    """The median of a run's steps, without the first ones."""
    times = [json.loads(line)["elapsed_time"] for line in (out / "log.jsonl").read_text().splitlines()]
    return statistics.median([b - a for a, b in zip(times[NUM_FIRST:], times[NUM_FIRST + 1 :])])


def train(start: list[str], folder: Path, out: str, *words: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "dbrdist.cli.train"]
    more = [f"out={out}", f"iterations={NUM_STEPS}", "--overwrite", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*start, *program, "c.yaml", *more], cwd=folder, env=env, stdout=subprocess.DEVNULL)


def finished(*jobs: subprocess.Popen[bytes]) -> None:
    if codes := [job.wait() for job in jobs if job.wait()]:
        raise SystemExit(f"a run ended with code {codes[0]}")


def compare(folder: Path, ranks: int, hosts: Any, is_virtual: bool) -> dict[str, float]:
    """Measured and predicted seconds of a step."""
    alone = [[] if hosts is None else hosts.inside(rank * 2 // ranks) for rank in range(ranks)]
    finished(*(train(start, folder, f"alone-{k}", f"batch={PER_RANK}") for k, start in enumerate(alone)))
    rate = PER_RANK / statistics.mean(seconds_of(folder / f"alone-{k}") for k in range(ranks))
    mpiexec = shutil.which("mpiexec") or "mpiexec"
    start = [mpiexec, "-n", str(ranks)] if hosts is None else hosts.mpiexec(mpiexec, ranks)
    words = batch_of(ranks, is_virtual)
    finished(train(start, folder, "job", words))
    config, _ = load.load(folder / "c.yaml", [words])
    per_host = ranks if hosts is None else ranks // 2
    job = rehearsal.Job(ranks, per_host, GIGABITS, MICROSECONDS, rate)
    measured = rehearsal.Measured(NUM_PARAMETERS, 4 * NUM_PARAMETERS, 1 / rate, None)
    return {"measured": seconds_of(folder / "job"), "predicted": rehearsal.predict(config, job, measured).step}


@contextlib.contextmanager
def places(names: list[str]) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(two_hosts.TwoHosts(RATE)) if name == "two hosts" else None for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", choices=["one host", "two hosts"], nargs="*", default=["one host", "two hosts"])
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, places(args.hosts) as hosts:
        folder = Path(name)
        rehearsal.make_photographs(str(folder / "data"), 64)
        (folder / "c.yaml").write_text(CONFIG)
        for place, where in hosts.items():
            for ranks in (1, 2, 3, 4) if where is None else (2, 4):
                for kind in ("plain", "virtual workers"):
                    key = f"{place}, {ranks} ranks, {kind}"
                    found = results[key] = compare(folder, ranks, where, kind != "plain")
                    ratio = found["measured"] / found["predicted"]
                    print(
                        f"{key:<36} {found['measured']:.3f} s, predicted {found['predicted']:.3f}: {ratio:.2f}",
                        flush=True,
                    )
    worst = max(abs(r["measured"] / r["predicted"] - 1) for r in results.values())
    print(f"largest difference {worst:.0%} (goal: {GOAL:.0%})")
    if args.record:
        settings = {"per_rank": PER_RANK, "steps": NUM_STEPS - NUM_FIRST, "rate": RATE, "goal": GOAL}
        about = {"python": sys.version.split()[0], **{name: version(name) for name in ("numpy", "dbrdist")}}
        print(harness.record("rehearsal", settings, results, about))


if __name__ == "__main__":
    main()
