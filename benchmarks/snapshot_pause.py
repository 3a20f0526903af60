"""How long training pauses for a snapshot of ResNet-50: written at once, and in the background.

One process with one thread trains ResNet-50 on a few small images of noise, with momentum, and takes a snapshot of
everything (205 MB) every few steps. The pause is the time from before to after the snapshot's extension; what the
steps after it take longer, since the file is still being written, is printed beside it. The first snapshot allocates
the memory that later ones reuse. Goal: at most 0.1 s in the background, by the clock. It takes a minute.

    python benchmarks/snapshot_pause.py --record
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import numpy as np

import dbrdist.links as L
from dbrdist import datasets, iterators, models, optimizers, training
from dbrdist.training import extensions
from dbrdist.training.extensions import snapshot_writers

EVERY, NUM_SNAPSHOTS = 8, 5
GOAL_SECONDS = 0.1


def run(folder: str, is_background: bool) -> dict[str, Any]:
    """Seconds of steps and of the pauses between them."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((4, 3, 64, 64)).astype(np.float32)
    iterator = iterators.SerialIterator(datasets.TupleDataset(images, np.arange(4, dtype=np.int32)), 4)
    optimizer = optimizers.CorrectedMomentumSGD(0.01).setup(L.Classifier(models.ResNet50()))
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer), (EVERY * NUM_SNAPSHOTS + EVERY, "iteration"), folder
    )
    writer = snapshot_writers.ThreadWriter() if is_background else None
    saver: Any = extensions.snapshot(writer=writer, n_retains=1)
    at: list[tuple[int, str, float]] = []

    def note(word: str) -> Any:
        return lambda trainer: at.append((trainer.updater.iteration, word, time.perf_counter()))

    every = (EVERY, "iteration")
    trainer.extend(note("before"), name="before", trigger=every, priority=saver.priority + 1)
    trainer.extend(saver, trigger=every)
    trainer.extend(note("after"), name="after", trigger=every, priority=saver.priority - 1)
    trainer.extend(note("step"), name="step", trigger=(1, "iteration"), priority=saver.priority + 2)
    trainer.run()
    ends = {i: seconds for i, word, seconds in at if word == "step"}
    after = {i: seconds for i, word, seconds in at if word == "after"}
    before = {i: seconds for i, word, seconds in at if word == "before"}
    pauses = [after[i] - before[i] for i in sorted(after)][:NUM_SNAPSHOTS]
    steps = {i: ends[i] - after.get(i - 1, ends[i - 1]) for i in ends if i - 1 in ends}
    usual = statistics.median(seconds for i, seconds in steps.items() if i % EVERY > EVERY // 2)
    slower = [sum(steps[i + k] - usual for k in range(1, EVERY // 2 + 1)) for i in sorted(after)[:NUM_SNAPSHOTS]]
    size = max(os.path.getsize(path) for path in Path(folder).glob("snapshot_iter_*"))
    return {"pauses": pauses, "slower_steps": slower, "step": usual, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in ("at once", "background"):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found = results[name] = run(folder, name == "background")
        later = statistics.median(found["pauses"][1:])
        found["median_seconds"] = later
        slower = statistics.median(found["slower_steps"])
        goal = f" (goal: {GOAL_SECONDS:g})" if name == "background" else ""
        pauses = f"first {found['pauses'][0]:.3f} s, later {later:.3f} s{goal}, {max(found['pauses']):.3f} at most"
        about = f"{found['bytes'] / 1e6:.0f} MB, a step {found['step']:.3f} s"
        print(f"{name:<12} {pauses}; steps after it {slower:+.3f} s; {about}", flush=True)
    if args.record:
        settings = {"every": EVERY, "snapshots": NUM_SNAPSHOTS, "goal": GOAL_SECONDS}
        versions = {"python": sys.version.split()[0], **{name: version(name) for name in ("numpy", "dbrdist")}}
        print(harness.record("snapshot-pause", settings, results, versions))


if __name__ == "__main__":
    main()
