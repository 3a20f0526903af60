"""Images per second from JPEG files to a batch of uint8: a random part of each, as 224x224 pixels, mirrored or not.

Ours against a loop by hand with simplejpeg and OpenCV, in one process and one thread, by processor time, alternately.
The batch in float32, normalised, is timed too. Goal: 0.95 of the loop by hand. ROOT has a folder of images per class.

    python benchmarks/loader.py ROOT --record
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import cv2
import harness
import numpy as np
import simplejpeg

from dbrdist.datasets import Compose, ImageFolder, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToCHW
from dbrdist.iterators import SerialIterator

GOAL = 0.95
SIZE, BATCH = 224, 48
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def ours(dataset: ImageFolder, finish: bool) -> None:
    """One pass; `finish` makes normalised float32 of each batch."""
    for batch in SerialIterator(dataset, BATCH, repeat=False, seed=1):
        if finish:
            batch.finished()


def by_hand(paths: list[str]) -> None:
    """The same work in a loop that a user would write."""
    rng, out = np.random.default_rng(1), np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    for k, i in enumerate(rng.permutation(len(paths))):
        with open(paths[i], "rb") as file:
            image = simplejpeg.decode_jpeg(file.read(), "RGB")
        top, left, height, width = window(*image.shape[:2], rng)
        part = cv2.resize(image[top : top + height, left : left + width], (SIZE, SIZE))
        out[k % BATCH] = cv2.flip(part, 1) if rng.random() < 0.5 else part


def window(h: int, w: int, rng: Any) -> tuple[int, int, int, int]:
    """A random part of 8 to 100 % of the area."""
    for _ in range(10):
        area = h * w * (0.08 + 0.92 * rng.random())
        ratio = math.exp(math.log(3 / 4) + rng.random() * math.log(16 / 9))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= h and 0 < width <= w:
            return int(rng.random() * (h - height + 1)), int(rng.random() * (w - width + 1)), height, width
    return 0, 0, min(h, w), min(h, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    chain = [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD), ToCHW()]
    dataset = ImageFolder(args.root, Compose(chain))
    paths = [dataset.path(i) for i in range(len(dataset))]
    runs: dict[str, Callable[[], None]] = {
        "by_hand": lambda: by_hand(paths),
        "uint8": lambda: ours(dataset, False),
        "float32": lambda: ours(dataset, True),
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            samples[name].append(time.process_time() - start)
    results: dict[str, Any] = {name: harness.summarize(s) for name, s in samples.items()}
    for name, s in samples.items():
        ratio = statistics.median(hand / own for hand, own in zip(samples["by_hand"], s))
        results[name] |= {"images_per_second": len(dataset) / statistics.median(s), "of_by_hand": ratio}
        print(f"{name:<8} {results[name]['images_per_second']:7.0f} images/s, {ratio:.2f} of the loop by hand")
    print(f"goal     {GOAL:.2f} for uint8")
    if args.record:
        settings = {"num_images": len(dataset), "size": SIZE, "batch": BATCH, "repeats": args.repeats, "goal": GOAL}
        names = ("numpy", "dbrdist", "simplejpeg", "opencv-python-headless")
        about = {"python": sys.version.split()[0], **{name: version(name) for name in names}}
        print(harness.record("loader", settings, results, about))


if __name__ == "__main__":
    main()
