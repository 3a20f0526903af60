"""Virtual workers on real ranks: the same bits on 1, 2, 3, 4 and 8 ranks, after a resume too, and what that costs.

    python benchmarks/reproducible.py --data ROOT --record

ROOT has CIFAR-10 as images, in train/CLASS and test/CLASS. ResNet-20 with dropout, crops and mirroring is trained for
100 steps on 1,024 images with momentum; and with LARS and clipping on 1,003, so that the last batch of an epoch
does not divide. Hashes are over all entries of the last snapshot (weights, optimizer state, statistics, position, log
sums) but the elapsed time, and over the log without what it measures of the machine. Runs that are resumed stop after
50 steps, in the middle of an epoch; the audit looks at each. Goals: one hash per recipe; on two ranks at most 1.3
times the step of a plain run, with as many workers as ranks (more of them compute in smaller batches, which costs more
with plain sums as well).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

from dbrdist import links as L
from dbrdist import models, optimizers
from dbrdist.comm import VirtualUpdater, create_communicator, create_multi_node_optimizer
from dbrdist.datasets import TupleDataset
from dbrdist.iterators import SerialIterator
from dbrdist.training import StandardUpdater

NUM_RANKS = (1, 2, 3, 4, 8)
RESUMED = ((1, 2), (2, 1), (4, 3), (3, 8))
MEASURED = {"elapsed_time", "examples_per_second", "data_wait_fraction", "memory_bytes", "time"}
NUM_TEST = 300
CONFIG = """\
model: reproducible_net:Net
data: {name: image_folder, root: ROOT, cache: true}
transforms:
  train:
    - {name: random_crop, size: 32, padding: 4}
    - random_flip
    - {name: normalize, mean: [0.4914, 0.4822, 0.4465], std: [0.2470, 0.2435, 0.2616]}
  test:
    - {name: normalize, mean: [0.4914, 0.4822, 0.4465], std: [0.2470, 0.2435, 0.2616]}
batch: {virtual_workers: 8, per_worker: 2}
reproducible: true
audit: true
epochs: 100
iterations: 100
evaluation: {every: 50 iterations, batch: 100}
snapshot: {every: 50 iterations, keep: 1}
log: {every: 1 iteration}
optimizer: OPTIMIZER
"""
NET = """\
import dbrdist
import dbrdist.functions as F
from dbrdist.models import ResNet20


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.net = ResNet20(10)

    def forward(self, x):
        return self.net(F.dropout(x, 0.1))
"""
RECIPES = {
    "momentum": (
        1024,
        "{name: momentum_sgd, lr: 0.05, hooks: [{name: weight_decay, rate: 1e-4}], schedule: {name: cosine}}",
    ),
    "lars": (
        1003,
        "{name: lars, lr: 2.0, weight_decay: 1e-4, hooks: [{name: gradient_clipping, threshold: 1.0}]}",
    ),
}
BATCH = 64  # of the measurement of costs
COSTS = {  # virtual workers, None for a plain run, and whether their sums are reproducible
    "plain": (None, False),
    "2 workers": (2, False),
    "2 workers, reproducible": (2, True),
    "8 workers": (8, False),
    "8 workers, reproducible": (8, True),
}
HASH = """
import hashlib, sys
import numpy as np
from dbrdist.training.extensions import snapshots
total = hashlib.sha256()
with np.load(snapshots.newest(sys.argv[1])) as entries:
    for key in sorted(entries.files):
        if not key.endswith("_snapshot_elapsed_time"):
            total.update(key.encode() + np.ascontiguousarray(entries[key]).tobytes())
print(total.hexdigest())
"""


class Folder:
    """A temporary folder with images, network and configurations, in which runs leave what they have."""

    def __init__(self, path: str, data: str) -> None:
        self.path = Path(path)
        (self.path / "reproducible_net.py").write_text(NET)
        for name, (num_images, optimizer) in RECIPES.items():
            link_images(Path(data), self.path / name, num_images)
            text = CONFIG.replace("ROOT", str(self.path / name)).replace("OPTIMIZER", optimizer)
            (self.path / f"{name}.yaml").write_text(text)

    def train(self, recipe: str, num_ranks: int, out: str, *words: str) -> None:
        """One run; SystemExit with its output where it fails."""
        command = ["mpiexec", "-n", str(num_ranks), sys.executable, "-m", "dbrdist.cli.train", f"{recipe}.yaml"]
        self.run([*command, f"out={out}", *words], f"{recipe} on {num_ranks} ranks")

    def run(self, command: Sequence[str], what: str) -> str:
        """Its standard output."""
        paths = os.pathsep.join(
            [
                str(harness.ROOT),
                str(harness.ROOT / "benchmarks"),
                str(harness.ROOT / "launch"),
                os.environ.get("PYTHONPATH", ""),
            ]
        )
        path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        environment = {**os.environ, "PYTHONPATH": paths, "PATH": path}
        done = subprocess.run(command, cwd=self.path, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{what} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def hashes(self, out: str) -> dict[str, str]:
        """Of the state and of the log of the steps; an evaluation at a former end does not count."""
        state = self.run([sys.executable, "-c", HASH, out], f"the hash of {out}").strip()
        total = hashlib.sha256()
        for line in (self.path / out / "log.jsonl").read_text().splitlines():
            entry = {key: value for key, value in json.loads(line).items() if key not in MEASURED}
            total.update(json.dumps(entry).encode())
        self.run([sys.executable, "-m", "dbrdist.cli.train", "--audit", out], f"the audit of {out}")
        return {"state": state, "log": total.hexdigest()}


def link_images(data: Path, root: Path, num_images: int) -> None:
    """A folder with as many training images, of all classes alike, and some test images."""
    for part, count in (("train", num_images), ("test", NUM_TEST)):
        classes = sorted(p.name for p in (data / part).iterdir() if p.is_dir())
        for k, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            images = sorted((data / part / name).iterdir())
            for image in images[: len(range(k, count, len(classes)))]:
                (root / part / name / image.name).symlink_to(image.resolve())


def same_bits(folder: Folder, recipe: str, numbers: Sequence[int]) -> dict[str, Any]:
    """Hashes of straight runs by number of ranks, and of resumed ones by both numbers."""
    found = {}
    for num_ranks in numbers:
        out = f"{recipe}-{num_ranks}"
        folder.train(recipe, num_ranks, out)
        found[f"{num_ranks}"] = folder.hashes(out)
        print(f"{recipe}, {num_ranks} ranks: {found[f'{num_ranks}']['state'][:16]}", flush=True)
    for first, then in (pair for pair in RESUMED if {*pair} <= {*numbers}):
        out = f"{recipe}-{first}-{then}"
        folder.train(recipe, first, out, "iterations=50")
        folder.train(recipe, then, out, "--resume")
        found[f"{first} -> {then}"] = folder.hashes(out)
        print(f"{recipe}, {first} -> {then} ranks: {found[f'{first} -> {then}']['state'][:16]}", flush=True)
    is_one = len({json.dumps(hashes) for hashes in found.values()}) == 1
    return {"is_one_hash": is_one, "hashes": found}


def updater_of(comm: Any, num_workers: int | None, is_reproducible: bool) -> Any:
    """ResNet-20 on images in memory."""
    net = L.Classifier(models.ResNet20(10))
    optimizer = optimizers.MomentumSGD(0.01).setup(net)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, BATCH).astype(np.int32)
    options = {"rank": comm.rank, "size": comm.size, "virtual_workers": num_workers}
    iterator = SerialIterator(TupleDataset(*images), BATCH, **options)
    if num_workers is None:
        return StandardUpdater(iterator, create_multi_node_optimizer(optimizer, comm))
    return VirtualUpdater(iterator, optimizer, comm, reproducible=is_reproducible)


def measure(num_rounds: int) -> None:
    """On each rank: seconds of steps of all variants, in turns; rank 0 prints the samples as JSON."""
    comm = create_communicator("flat")
    updaters = {name: updater_of(comm, *variant) for name, variant in COSTS.items()}
    samples: dict[str, list[float]] = {name: [] for name in COSTS}
    for number in range(num_rounds + 2):
        for name, updater in updaters.items():
            comm.barrier()
            began = time.perf_counter()
            updater.update()
            comm.barrier()
            if number >= 2:  # the first ones compile
                samples[name].append(time.perf_counter() - began)
    if comm.rank == 0:
        print(json.dumps(samples), flush=True)


def costs(folder: Folder, num_rounds: int) -> dict[str, Any]:
    """Seconds of a step of 64 images on two ranks, in turns in the same processes."""
    command = ["mpiexec", "-n", "2", sys.executable, os.path.abspath(__file__), "--measure", str(num_rounds)]
    samples = json.loads(folder.run(command, "the measurement of costs").splitlines()[-1])
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, seconds in medians.items():
        print(f"{name}: {1000 * seconds:.1f} ms per step, {seconds / medians['plain']:.2f} of plain", flush=True)
    return {name: harness.summarize(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="the folder with train/CLASS and test/CLASS of CIFAR-10")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(NUM_RANKS), help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=30, help="of the measurement of costs; 0 leaves it out")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure)
        return
    if not args.data:
        parser.error("expected --data ROOT")
    path = tempfile.mkdtemp()
    try:
        folder = Folder(path, args.data)
        found: dict[str, Any] = {recipe: same_bits(folder, recipe, args.ranks) for recipe in args.recipes}
        if args.rounds:
            found["step_seconds_on_2_ranks"] = costs(folder, args.rounds)
    finally:
        shutil.rmtree(path)
    bad = [recipe for recipe in args.recipes if not found[recipe]["is_one_hash"]]
    if args.record:
        sys.argv = [a.replace(args.data, "ROOT") for a in sys.argv]
        settings = {"config": CONFIG, "recipes": {name: RECIPES[name] for name in args.recipes}, "costs": COSTS}
        print(harness.record("reproducible", settings, found))
    sys.exit(f"the bits differ: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
