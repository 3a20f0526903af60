"""Photographs per second with 2 workers, against PyTorch's DataLoader: with Pillow, and with its fastest decoder.

Random parts of each photograph as 224x224 pixels, mirrored or not, normalized, in batches of 48. Ours: an ImageFolder
with 2 threads and with 2 processes; the DataLoader has 2 workers that decode and resize with Pillow, filtered where it
shrinks, or with simplejpeg and OpenCV, between pixels. Ours resizes as the peer does: `bilinear` beside Pillow,
`linear` beside OpenCV. By the clock and by the processor time of this process and its loaders, alternately, past the
first batches, in two minutes; on a busy machine only the second can be believed. One interpreter has both, and dbrdist
as a wheel (``pip wheel --no-deps .``), as users install it: resizing is compiled there.

    TORCH_VENV/bin/python benchmarks/loader_torch.py imagenet-sample --record

Goals: twice as fast as the DataLoader with Pillow, 1.2 times as fast as with its fastest decoder.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import harness
import numpy as np
import simplejpeg
import torch
from PIL import Image

import dbrdist
from dbrdist.datasets import Compose, ImageFolder, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToCHW
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator

SIZE, BATCH, WORKERS = 224, 48, 2
NUM_FIRST, NUM_BATCHES = 16, 24  # until then tables of weights are made for the sizes that photographs have
GOALS = {"pillow": 2.0, "simplejpeg": 1.2}
METHODS = {"pillow": "bilinear", "simplejpeg": "linear"}  # of ours beside each
KINDS = ("threads", "processes")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def place(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, as torchvision draws it."""
    for _ in range(10):
        area = height * width * float(torch.empty(1).uniform_(0.08, 1))
        ratio = math.exp(float(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = torch.randint(0, height - h + 1, (1,)).item(), torch.randint(0, width - w + 1, (1,)).item()
            return int(top), int(left), h, w
    return 0, 0, height, width


class Photographs(torch.utils.data.Dataset):
    """What a torchvision user's dataset does, with a decoder of choice; bytes, to be normalized in batches."""

    def __init__(self, root: str, decoder: str) -> None:
        self.paths = [os.path.join(a, f) for a, _, files in sorted(os.walk(root)) for f in sorted(files) if f[0] != "."]
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        if self.decoder == "pillow":
            image = Image.open(self.paths[i]).convert("RGB")
            top, left, h, w = place(image.height, image.width)
            pixels = np.array(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + w, top + h)))
        else:
            with open(self.paths[i], "rb") as file:
                whole = simplejpeg.decode_jpeg(file.read())
            top, left, h, w = place(*whole.shape[:2])
            pixels = cv2.resize(whole[top : top + h, left : left + w], (SIZE, SIZE))
        if torch.rand(1) < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels)), i


def theirs(root: str, decoder: str) -> Iterator[Any]:
    """Normalized batches of the DataLoader, for ever."""
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    torch.set_num_threads(1)
    while True:
        loader = torch.utils.data.DataLoader(
            Photographs(root, decoder),
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            drop_last=True,
            persistent_workers=True,
        )
        for _ in range(1000):
            for images, _ in loader:
                yield images.permute(0, 3, 1, 2).float().sub_(mean).div_(std)


def ours(root: str, kind: str, method: str) -> Iterator[Any]:
    """Normalized batches of an ImageFolder, for ever."""
    chain = [RandomResizedCrop(SIZE, method=method), RandomHorizontalFlip(), Normalize(MEAN, STD), ToCHW()]
    dataset, options = ImageFolder(root, Compose(chain)), {"seed": 1, "last": "drop"}
    iterator: Any = (
        MultithreadIterator(dataset, BATCH, n_threads=WORKERS, **options)
        if kind == "threads"
        else MultiprocessIterator(dataset, BATCH, n_processes=WORKERS, **options)
    )
    while True:
        yield dbrdist.dataset.concat_examples(iterator.next())


CASES: dict[str, Callable[[str], Iterator[Any]]] = {
    **{name: functools.partial(theirs, decoder=name) for name in METHODS},
    **{
        f"{kind}, {method}": functools.partial(ours, kind=kind, method=method)
        for method in METHODS.values()
        for kind in KINDS
    },
}


def rates(batches: Iterator[Any], number: int) -> tuple[float, float]:
    """Photographs per second, and per second of a core."""
    start, busy = time.perf_counter(), processor_seconds()
    for _ in range(number):
        next(batches)
    return number * BATCH / (time.perf_counter() - start), number * BATCH / (processor_seconds() - busy)


def processor_seconds() -> float:
    """Of this process and the children that it has now."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in ["self", *children]]
    return sum(int(t) for both in ticks for t in both) / os.sysconf("SC_CLK_TCK")


def summary(samples: dict[str, list[tuple[float, float]]], name: str) -> dict[str, Any]:
    """Medians of a case, and for one of theirs how much faster ours is: the faster of our loaders."""
    clock, core = zip(*samples[name])
    result: dict[str, Any] = {"images_per_second": statistics.median(clock), "samples": list(clock)}
    result |= {"images_per_core_second": statistics.median(core), "core_samples": list(core)}
    if name in METHODS:
        for column, key in enumerate(("ours_relative", "ours_by_core")):
            ours = [statistics.median(s[column] for s in samples[f"{kind}, {METHODS[name]}"]) for kind in KINDS]
            result[key] = max(ours) / statistics.median(s[column] for s in samples[name])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="that are timed in a round")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    args = parser.parse_args()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name, make in CASES.items():
            batches = make(args.root)  # loaders end with their generator: no other one's workers run meanwhile
            for _ in range(NUM_FIRST):
                next(batches)
            samples[name].append(rates(batches, args.batches))
            del batches
    results = {name: summary(samples, name) for name in CASES}
    for name, r in results.items():
        goal = ""
        if name in METHODS:
            goal = f"; ours {r['ours_relative']:.2f} and {r['ours_by_core']:.2f} times as fast (goal: {GOALS[name]:g})"
        speed, by_core = r["images_per_second"], r["images_per_core_second"]
        print(f"{name:<20} {speed:7.0f} photographs/s, {by_core:7.0f} per second of a core{goal}")
    if args.record:
        settings = {"size": SIZE, "batch": BATCH, "workers": WORKERS, "rounds": args.rounds, "goals": GOALS}
        about = {"torch": torch.__version__, "pillow": Image.__version__, "dbrdist": dbrdist.__version__}
        print(harness.record("loader-torch", settings, results, about))


if __name__ == "__main__":
    main()
