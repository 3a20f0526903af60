"""Images per second from JPEG files to a batch of uint8: a random part of each, as 224x224 pixels, mirrored or not.

Ours against loops by hand, with simplejpeg and OpenCV and with Pillow, in one process and one thread, by processor
time, alternately. Goals: 0.95 of the first, and of the second 1.7 times as many images of full size, 2.3 times of
copies of 256 pixels. The batch in float32, normalised, is timed too. Then by the clock: two threads against one, past
their first batches (goal 1.8 on two cores), and two loader processes with shared memory against two with pipes. Then
the peak memory of loaders at batch 256, in processes of their own, beside what is there before and the batches in
flight (goal: under 150 MB).
ROOT has a folder of images per class; `dbrdist-data prepare` makes copies, but as shards: unpack them with tar.

    python benchmarks/loader.py ROOT --record
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import cv2
import harness
import numpy as np
import simplejpeg
from PIL import Image as Pillow

from dbrdist.datasets import Compose, ImageFolder, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToCHW
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator

GOAL, GOAL_THREADS, GOAL_BYTES = 0.95, 1.8, 150e6
GOALS_PILLOW = {"full": 1.7, "prepared": 2.3}
SIZE, BATCH, LARGE_BATCH = 224, 48, 256
NUM_FIRST, NUM_BATCHES = 5, 25  # batches until threads are at work, and while they are
PREPARED_SIDE = 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOADERS: dict[str, Callable[[Any], Any]] = {
    "serial": lambda dataset: SerialIterator(dataset, LARGE_BATCH, seed=1),
    "2 threads": lambda dataset: MultithreadIterator(dataset, LARGE_BATCH, n_threads=2, seed=1),
    "2 processes": lambda dataset: MultiprocessIterator(dataset, LARGE_BATCH, n_processes=2, seed=1),
}


def opened(root: str, decode: str = "exact") -> ImageFolder:
    """The images, with the transforms of training on ImageNet."""
    chain = [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD), ToCHW()]
    return ImageFolder(root, Compose(chain), decode=decode)


# ---- images per second ----------------------------------------------------------------------------------------------


def ours(dataset: ImageFolder, finish: bool) -> None:
    """One pass; `finish` makes normalised float32 of each batch. A batch is gone before the next, as by hand."""
    for batch in SerialIterator(dataset, BATCH, repeat=False, seed=1):
        if finish:
            batch.finished()
        del batch


def by_hand(paths: list[str]) -> None:
    """The same work in a loop that a user would write."""
    rng, out = np.random.default_rng(1), np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    for k, i in enumerate(rng.permutation(len(paths))):
        with open(paths[i], "rb") as file:
            image = simplejpeg.decode_jpeg(file.read(), "RGB")
        top, left, height, width = window(*image.shape[:2], rng)
        part = cv2.resize(image[top : top + height, left : left + width], (SIZE, SIZE))
        out[k % BATCH] = cv2.flip(part, 1) if rng.random() < 0.5 else part


def by_pillow(paths: list[str]) -> None:
    """The same with Pillow."""
    rng, out = np.random.default_rng(1), np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    for k, i in enumerate(rng.permutation(len(paths))):
        with Pillow.open(paths[i]) as image:
            whole = image.convert("RGB")
        top, left, height, width = window(whole.height, whole.width, rng)
        box = (left, top, left + width, top + height)
        part = whole.resize((SIZE, SIZE), Pillow.Resampling.BILINEAR, box)
        out[k % BATCH] = part.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def window(h: int, w: int, rng: Any) -> tuple[int, int, int, int]:
    """A random part of 8 to 100 % of the area."""
    for _ in range(10):
        area = h * w * (0.08 + 0.92 * rng.random())
        ratio = math.exp(math.log(3 / 4) + rng.random() * math.log(16 / 9))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= h and 0 < width <= w:
            return int(rng.random() * (h - height + 1)), int(rng.random() * (w - width + 1)), height, width
    return 0, 0, min(h, w), min(h, w)


Runs = dict[str, Callable[[], None]]


def alternately(runs: Runs, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each, round after round, after one round that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if k:
                samples[name].append(clock() - start)
    return samples


def ratio(first: list[float], second: list[float]) -> float:
    """How many times as fast the second is: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(first, second))


def speeds(dataset: ImageFolder, kind: str, repeats: int) -> dict[str, Any]:
    """In one thread, by processor time; `fast` is uint8 with `decode="fast"`."""
    paths = [dataset.path(i) for i in range(len(dataset))]
    runs: Runs = {
        "by_hand": lambda: by_hand(paths),
        "pillow": lambda: by_pillow(paths),
        "uint8": lambda: ours(dataset, False),
        "float32": lambda: ours(dataset, True),
        "fast": lambda: ours(opened(str(dataset.root), "fast"), False),
    }
    samples = alternately(runs, repeats, time.process_time)
    results = {}
    for name, s in samples.items():
        against = {"of_by_hand": ratio(samples["by_hand"], s), "of_pillow": ratio(samples["pillow"], s)}
        results[name] = harness.summarize(s) | {"images_per_second": len(dataset) / statistics.median(s)} | against
        speed, hand, pillow = results[name]["images_per_second"], against["of_by_hand"], against["of_pillow"]
        print(f"{name:<8} {speed:7.0f} images/s, {hand:.2f} of the loop by hand, {pillow:.2f} of Pillow's")
    print(f"goal     {GOAL:.2f} and {GOALS_PILLOW[kind]:.1f} for uint8")
    return results


def scaling(dataset: ImageFolder, repeats: int) -> dict[str, Any]:
    """Two threads against one, by the clock, once they are at work."""
    samples: dict[str, list[float]] = {"1": [], "2": []}
    for k in range(repeats + 1):
        for name, found in samples.items():
            with MultithreadIterator(dataset, BATCH, n_threads=int(name), seed=1) as iterator:
                for _ in range(NUM_FIRST):
                    next(iterator)
                start = time.perf_counter()
                for _ in range(NUM_BATCHES):
                    next(iterator)
                if k:
                    found.append(time.perf_counter() - start)
    gain = ratio(samples["1"], samples["2"])
    print(f"threads  2 are {gain:.2f} times as fast as 1 (goal {GOAL_THREADS} on two cores; {os.cpu_count()} here)")
    return {name: harness.summarize(s) for name, s in samples.items()} | {"two_of_one": gain}


class Ready:
    """Images that cost almost nothing to make, so that the way of a batch is what is timed."""

    def __len__(self) -> int:
        return 16 * BATCH

    def __getitem__(self, i: int) -> Any:
        return np.full((SIZE, SIZE, 3), i % 256, np.uint8), np.int32(i)


def workers(dataset: ImageFolder, repeats: int) -> dict[str, Any]:
    """Two loader processes, by the clock: with shared memory against pipes, with decoding and without."""
    results = {}
    for name, data in {"decoded": dataset, "ready": Ready()}.items():
        with contextlib.ExitStack() as stack:
            runs: Runs = {}
            for way, shared_mem in {"pipes": 0, "rings": None}.items():
                made = MultiprocessIterator(data, BATCH, n_processes=2, shared_mem=shared_mem, seed=1)
                runs[way] = functools.partial(take, stack.enter_context(made), len(data) // BATCH)
            samples = alternately(runs, repeats, time.perf_counter)
        found = ratio(samples["pipes"], samples["rings"])
        print(f"workers  {name} images: 2 with shared memory are {found:.2f} times as fast as 2 with pipes")
        results[name] = {way: harness.summarize(s) for way, s in samples.items()} | {"rings_of_pipes": found}
    return results


def take(iterator: Any, num_batches: int) -> None:
    """Read batches, and each value of them once, as a step would; nothing is in the making before or afterwards."""
    for _ in range(num_batches):
        batch = iterator.next()
        for array in batch.raw[0] if hasattr(batch, "raw") else [image for image, _ in batch]:
            array.max()
        del batch
    iterator.reset()


# ---- memory ---------------------------------------------------------------------------------------------------------


def peak(root: str, loader: str) -> None:
    """In a process of its own: print the peak of resident memory beside what was there before, and a batch's bytes."""
    dataset = opened(root)
    for _ in SerialIterator(dataset, 2, repeat=False, seed=0):  # now libraries are loaded, and buffers of decoders made
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with LOADERS[loader](dataset) as iterator:
        for _ in range(6):
            num_bytes = iterator.next().raw[0][0].nbytes
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": after - before, "batch_bytes": num_bytes}))


def memory(root: str) -> dict[str, Any]:
    """The peak of each loader in the process that trains, at batch 256, without the three batches that may be alive."""
    results = {}
    for loader in LOADERS:
        command = [sys.executable, os.path.abspath(__file__), root, "--peak", loader]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
        found["beside_batches_bytes"] = max(found["peak_bytes"] - 3 * found["batch_bytes"], 0)
        results[loader] = found
        print(
            f"{loader:<11} peak {found['peak_bytes'] / 1e6:.0f} MB, batches of {found['batch_bytes'] / 1e6:.0f} MB: "
            f"{found['beside_batches_bytes'] / 1e6:.0f} MB beside three of them (goal: under {GOAL_BYTES / 1e6:.0f})"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    parser.add_argument("--peak", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cv2.setNumThreads(1)
    if args.peak:
        peak(args.root, args.peak)
        return
    dataset = opened(args.root)
    sides = [min(dataset.get_raw(i)[0].shape[:2]) for i in range(min(len(dataset), 48))]
    kind = "prepared" if statistics.median(sides) <= PREPARED_SIDE else "full"
    results = speeds(dataset, kind, args.repeats)
    results |= {"threads": scaling(dataset, args.repeats), "workers": workers(dataset, args.repeats)}
    results["memory"] = memory(args.root)
    if args.record:
        goals = {"of_by_hand": GOAL, "of_pillow": GOALS_PILLOW[kind], "threads": GOAL_THREADS, "bytes": GOAL_BYTES}
        settings = {"num_images": len(dataset), "size": SIZE, "batch": BATCH, "repeats": args.repeats, "goals": goals}
        names = ("numpy", "dbrdist", "simplejpeg", "opencv-python-headless", "pillow")
        about = {"python": sys.version.split()[0], **{name: version(name) for name in names}}
        print(harness.record(f"loader-{kind}", settings, results, about))


if __name__ == "__main__":
    main()
