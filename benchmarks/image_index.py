"""An index of 1.28 million images: seconds to open it, seconds to the first batch, and memory of a host.

The index lists a few real images, in a shard, again and again, so that each entry can be read. Memory is that of 4
processes with 2 loader processes each, as ranks on one host: the sum of their proportional shares (PSS), against the
same processes on an index of the few. Goals: under 2 s, under 3 s, under 200 MB. ROOT has images, 50 or so suffice.

    python benchmarks/image_index.py ROOT --record
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import numpy as np

from dbrdist.datasets import CenterResizedCrop, Compose, ImageFolder, ToCHW, open_images
from dbrdist.datasets.image.index import write_index
from dbrdist.datasets.image.index_format import FILE_NAME
from dbrdist.datasets.image.scan import scan
from dbrdist.datasets.image.shards import prepare_shards
from dbrdist.iterators import MultiprocessIterator, SerialIterator

NUM_IMAGES, BATCH, NUM_RANKS, NUM_WORKERS = 1_281_167, 48, 4, 2
GOAL_OPEN, GOAL_BATCH, GOAL_BYTES = 2.0, 3.0, 200e6


def build(root: str, folder: Path, num_images: int) -> None:
    """A shard of the images in ``root`` and an index in which ``num_images`` entries, in turn, are one of them."""
    prepare_shards(open_images(root), folder, size=64)
    few = scan(folder)
    ends = few.name_ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    chosen = np.arange(num_images) * len(ends) // num_images
    names = b"".join(few.names[starts[i] : ends[i]] for i in chosen)
    columns = {name: getattr(few, name)[chosen] for name in ("labels", "offsets", "sizes")}
    shards = [few.shards[0]._replace(end=num_images)]
    name_ends = np.cumsum((ends - starts)[chosen]).astype(np.uint64)
    write_index(folder / FILE_NAME, few._replace(shards=shards, names=names, name_ends=name_ends, **columns))


def rank(folder: str, workers: int) -> None:
    """A process of its own: opens the index, reads a batch, says how long it took; with workers, waits then."""
    start = time.perf_counter()
    dataset = ImageFolder(folder, Compose([CenterResizedCrop(56), ToCHW()]))
    opened = time.perf_counter() - start
    if not workers:
        SerialIterator(dataset, BATCH, seed=1).next()
        print(json.dumps({"open_seconds": opened, "first_batch_seconds": time.perf_counter() - start}), flush=True)
        return
    with MultiprocessIterator(dataset, BATCH, n_processes=workers, seed=1) as iterator:
        for _ in range(3 * workers):
            iterator.next()
        print(json.dumps([os.getpid(), *iterator._pool.pids]), flush=True)
        sys.stdin.readline()


def shares(folder: Path) -> int:
    """The memory of all ranks and their workers in bytes, each page counted once."""
    command = [sys.executable, os.path.abspath(__file__), str(folder), "--rank", str(NUM_WORKERS)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(NUM_RANKS)]
    try:
        pids = [pid for process in ranks for pid in json.loads(process.stdout.readline())]
        return sum(share(pid) for pid in pids)
    finally:
        for process in ranks:
            process.communicate("\n", timeout=60)


def share(pid: int) -> int:
    """The proportional share of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.root, args.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        build(args.root, large, NUM_IMAGES)
        build(args.root, small, 2 * NUM_RANKS * BATCH)
        command = [sys.executable, os.path.abspath(__file__), str(large), "--rank", "0"]
        samples = [
            json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(args.repeats)
        ]
        results: dict[str, Any] = {key: harness.summarize([s[key] for s in samples]) for key in samples[0]}
        results["index_bytes"] = (large / FILE_NAME).stat().st_size
        results["host_bytes"] = shares(large) - shares(small)
    goals = {"open_seconds": GOAL_OPEN, "first_batch_seconds": GOAL_BATCH}
    for key, goal in goals.items():
        print(f"{key:<20} {results[key]['median_seconds']:.2f} (goal: under {goal:g})")
    processes = f"{NUM_RANKS} ranks with {NUM_WORKERS} workers each"
    host, goal = results["host_bytes"] / 1e6, GOAL_BYTES / 1e6
    print(f"host_bytes           {host:.0f} MB more, {processes} (goal: under {goal:.0f})")
    if args.record:
        settings = {
            "num_images": NUM_IMAGES,
            "num_ranks": NUM_RANKS,
            "num_workers": NUM_WORKERS,
            "repeats": args.repeats,
        }
        settings["goals"] = {**goals, "host_bytes": GOAL_BYTES}
        about = {"python": sys.version.split()[0], **{name: version(name) for name in ("numpy", "dbrdist")}}
        print(harness.record("image-index", settings, results, about))


if __name__ == "__main__":
    main()
