"""A folder of 1,281,167 small files, as ImageNet has: seconds to the first step on 2 ranks, and memory of the host.

The files are hard links to small copies of the images in ROOT, in 1,000 class folders below FOLDER, which are made if
they are not there and stay. Time is by the clock from the start of mpiexec to the first line of the log, without an
index and with that of `dbrdist-data build`, after one run that warms the caches. Memory is the sum of the ranks'
proportional shares (PSS) after some steps, and how much more it is than on a folder of 1,000 files: pages of libraries
that both ranks map count once, and less where other programs map the same files at that time; the launcher's processes
are left out. Goals: 20 s and 200 MB more.

    python benchmarks/many_files.py imagenet-sample /tmp/many-files --record
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
from image_index import share

from dbrdist.datasets import open_images
from dbrdist.datasets.image.index_format import FILE_NAME
from dbrdist.datasets.image.shards import shrunk

NUM_IMAGES, NUM_CLASSES, NUM_RANKS, NUM_STEPS = 1_281_167, 1000, 2, 12
GOAL_SECONDS, GOAL_BYTES = 20.0, 200e6
CONFIG = """
model: {name: resnet20, num_classes: 1000}
data: {name: image_folder, root: %s, train: ".", test: null}
transforms:
  train: [{name: random_resized_crop, size: 32}, random_flip, {name: normalize, mean: [0.5], std: [0.2]}]
batch: 16
epochs: 1
log: {every: 1 iteration}
"""


def make_tree(root: str, folder: Path, num_images: int) -> None:
    """Class folders with so many files in all."""
    if (folder / ".complete").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    index = open_images(root)
    sources = folder / ".sources"
    sources.mkdir(parents=True)
    for i in range(len(index)):
        (sources / f"{i}.JPEG").write_bytes(shrunk(index.read(i), 48, 80))
    number = 0
    for label in range(NUM_CLASSES):
        place = folder / f"n{label:08d}"
        place.mkdir()
        while number < num_images * (label + 1) // NUM_CLASSES:
            os.link(sources / f"{number % len(index)}.JPEG", place / f"n{label:08d}_{number}.JPEG")
            number += 1
    (folder / ".complete").touch()


def first_step(folder: Path, out: Path) -> tuple[float, int]:
    """Seconds from the start of the job to its first step, and the memory of its ranks after some more."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(CONFIG % folder)
    words = ["dbrdist-train", str(out / "config.yaml"), f"out={out / 'run'}", f"iterations={NUM_STEPS}", "--overwrite"]
    shutil.rmtree(out / "run", ignore_errors=True)
    start = time.perf_counter()
    job = subprocess.Popen(["mpiexec", "-n", str(NUM_RANKS), *words], stdout=subprocess.DEVNULL)
    log, seconds, most = out / "run" / "log.jsonl", 0.0, 0
    while job.poll() is None:
        if not seconds and log.exists() and log.read_text().strip():
            seconds = time.perf_counter() - start
        most = max(most, memory_of(job.pid)) if seconds else 0
        time.sleep(0.02)
    if job.returncode or not seconds:
        raise SystemExit(f"the job ended with code {job.returncode}")
    return seconds, most


def memory_of(pid: int) -> int:
    """The proportional shares of the ranks below a process; those that have just ended count as nothing."""
    total, todo = 0, [pid]
    while todo:
        parent = todo.pop()
        try:
            todo += [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
            words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
            if b"python" in words[0] and any(b"dbrdist-train" in word for word in words):
                total += share(parent)
        except (OSError, StopIteration):
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--only-make", action="store_true", help="make the folders, for a run later on")
    args = parser.parse_args()
    large, small = args.folder / f"{args.images}", args.folder / f"{NUM_CLASSES}"
    make_tree(args.root, small, NUM_CLASSES)
    make_tree(args.root, large, args.images)
    if args.only_make:
        return
    results: dict[str, Any] = {}
    _, base = first_step(small, args.folder / "out")
    for name in ("scan", "index"):
        if name == "index":
            subprocess.run(["dbrdist-data", "build", str(large)], check=True, stdout=subprocess.DEVNULL)
        else:
            (large / FILE_NAME).unlink(missing_ok=True)
        first_step(large, args.folder / "out")  # warms the caches
        seconds, num_bytes = first_step(large, args.folder / "out")
        results[name] = {"seconds": seconds, "host_bytes": num_bytes, "host_bytes_more": num_bytes - base}
        words = f"{seconds:.1f} s to the first step (goal: {GOAL_SECONDS:g}), {num_bytes / 1e6:.0f} MB for {NUM_RANKS} "
        print(f"{name}: {words}ranks, {(num_bytes - base) / 1e6:.0f} MB more than for 1,000 files")
    if args.record:
        settings = {"num_images": args.images, "num_ranks": NUM_RANKS, "goal": [GOAL_SECONDS, GOAL_BYTES]}
        about = {"python": sys.version.split()[0], **{name: version(name) for name in ("numpy", "dbrdist")}}
        print(harness.record("many-files", settings, json.loads(json.dumps(results)), about))


if __name__ == "__main__":
    main()
