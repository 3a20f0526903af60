"""An example as a user runs it, with mpiexec and dbrdist-train: its time from the command on, accuracy and losses.

    python benchmarks/examples.py digits --record
    python benchmarks/examples.py cifar10 --data ROOT --record
    python benchmarks/examples.py imagenet-sample --data ROOT --record

Goals: digits 97 % in 60 s; cifar10 85 % in at most 10 epochs; imagenet-sample a training loss below 0.5.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

EXAMPLES = {
    "digits": "examples/digits/config.yaml",
    "cifar10": "examples/cifar10/config.yaml",
    "imagenet-sample": "examples/imagenet/sample.yaml",
}
LOSS_GOAL = 0.5
VERSIONS = """
import json, platform
from importlib.metadata import version
names = ("numpy", "dbrdist", "mpi4py", "mpich", "onednn-cpu-gomp")
print(json.dumps({"python": platform.python_version(), **{n: version(n) for n in names}}))
"""


def train(config: str, ranks: int, data: str | None, out: str) -> float:
    """Run the example; its output goes to this terminal. Seconds from the command to its end."""
    scripts = os.path.dirname(sys.executable)
    words = ["mpiexec", "-n", str(ranks), "dbrdist-train", config, f"out={out}"]
    words += [f"data.root={data}"] if data else []
    chosen = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}  # by dbrdist-train, as for a user who sets nothing
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment["PATH"] = scripts + os.pathsep + os.environ["PATH"]
    start = time.perf_counter()
    subprocess.run(words, cwd=harness.ROOT, check=True, env=environment)
    return time.perf_counter() - start


def results(out: Path) -> dict[str, Any]:
    """What the run's folder says: summary, and from the log the curve and the first step below the goal of the loss."""
    summary = json.loads((out / "summary.json").read_text())
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    keys = ("epoch", "iteration", "elapsed_time", "main/loss", "main/accuracy", "validation/main/accuracy")
    curve = [{k: entry[k] for k in keys if k in entry} for entry in log]
    below = [entry["iteration"] for entry in curve if entry.get("main/loss", LOSS_GOAL) < LOSS_GOAL]
    shown = ("status", "epochs", "iterations", "metrics", "num_skipped_examples")
    return {
        **{k: summary[k] for k in shown},
        "first_iteration_with_loss_below_goal": below[0] if below else None,
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("example", choices=list(EXAMPLES))
    parser.add_argument("--data", help="the folder of the images, for examples whose data do not ship with dbrdist")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    seconds = []
    for _ in range(args.repeats):
        folder = tempfile.mkdtemp()
        try:
            seconds.append(train(EXAMPLES[args.example], args.ranks, args.data, os.path.join(folder, "run")))
            found = results(Path(folder) / "run")
        finally:
            shutil.rmtree(folder)
    found = {"wall": harness.summarize(seconds), **found}
    print(f"{args.example}: {found['wall']['median_seconds']:.1f} s, {found['metrics']}")
    if args.record:
        settings = {"config": EXAMPLES[args.example], "num_ranks": args.ranks, "num_repeats": args.repeats}
        if args.data:
            sys.argv = [a.replace(args.data, "ROOT") for a in sys.argv]
        about = json.loads(subprocess.run([sys.executable, "-c", VERSIONS], check=True, capture_output=True).stdout)
        print(harness.record(args.example, settings, found, about))


if __name__ == "__main__":
    main()
