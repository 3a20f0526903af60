"""Test images with the network's outputs for them, and its worst mistakes, for the report and `--watch`."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array.backend import to_cpu
from dbrdist.core.array.types import Array
from dbrdist.core.files import strict_json
from dbrdist.core.files.serializer import write_atomically
from dbrdist.core.tape.variable import Variable, as_array
from dbrdist.training.extension import PRIORITY_WRITER, Extension

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.model.link import Link
    from dbrdist.training.trainer import Trainer

_WRITE_SECONDS = 5.0  # between two files, at least: a small network evaluates many times a second
_MAX_PIXELS = 96  # of a side of a picture
_NUM_LIKELIEST = 3


class _Shown(NamedTuple):
    loss: float
    image: np.ndarray  # (C, H, W), as the network took it
    label: int
    likeliest: list[list[float]]  # pairs of a class and its probability


class Collector:
    """Keeps some examples of an evaluation on this rank: the first, and those whose label got the least probability.

    Args:
        number: examples of each kind.
        keeps_first: whether the first examples are kept too, which one rank does.
    """

    def __init__(self, number: int, keeps_first: bool):
        self.number, self.keeps_first = number, keeps_first
        self.first: list[_Shown] = []
        self.worst: list[_Shown] = []

    def clear(self) -> None:
        """Forget all, before an evaluation."""
        self.first, self.worst = [], []

    def __call__(self, inputs: Array, outputs: Variable, labels: Array) -> None:
        """Take what is worth keeping of a batch of images with one number per class each; of others nothing."""
        images, scores, truth = as_array(inputs), as_array(outputs), as_array(labels)
        if not (_are_images(images) and scores.ndim == 2 and truth.ndim == 1 and truth.dtype.kind in "iu"):
            return
        scores, truth = np.asarray(to_cpu(scores), np.float64), to_cpu(truth)
        inside = (truth >= 0) & (truth < scores.shape[1])
        with np.errstate(all="ignore"):
            greatest = scores.max(1, keepdims=True)
            sums = np.log(np.exp(scores - greatest).sum(1)) + greatest[:, 0]
            losses = sums - scores[np.arange(len(truth)), np.where(inside, truth, 0)]
        wrong = inside & (scores.argmax(1) != truth) & np.isfinite(losses)
        if self.keeps_first and len(self.first) < self.number:
            rows = np.flatnonzero(inside & np.isfinite(losses))[: self.number - len(self.first)]
            self.first += [_kept(images, scores, truth, losses, sums, row) for row in rows]
        least = self.worst[-1].loss if len(self.worst) == self.number else -np.inf
        rows = np.flatnonzero(wrong & (losses > least))
        rows = rows[np.argsort(-losses[rows], kind="stable")[: self.number]]
        if len(rows):
            self.worst += [_kept(images, scores, truth, losses, sums, row) for row in rows]
            self.worst = sorted(self.worst, key=lambda one: -one.loss)[: self.number]


def _are_images(images: Array) -> bool:
    return images.ndim == 4 and images.shape[1] in (1, 3) and images.dtype.kind != "c"


def _kept(images: Array, scores: Array, truth: Array, losses: Array, sums: Array, row: int) -> _Shown:
    likeliest = np.argsort(-scores[row], kind="stable")[:_NUM_LIKELIEST]
    shares = np.exp(scores[row, likeliest] - sums[row])
    image = np.array(to_cpu(images[row]), np.float32)
    return _Shown(float(losses[row]), image, int(truth[row]), [[int(k), float(p)] for k, p in zip(likeliest, shares)])


class ShowTestExamples(Extension):
    """Writes some examples of the last evaluation as a JSON file of pictures. Collective where it is called.

    The evaluation calls :meth:`begin` before its first batch, and this extension is called after it.

    Args:
        task: what is evaluated; its ``on_outputs`` is set meanwhile.
        comm: the ranks; rank 0 writes.
        number: examples of each kind.
        path: the file.
        classes: names of the classes, or None.
        complain: called with a sentence, once, where the file cannot be written.
    """

    priority = PRIORITY_WRITER - 1  # after the evaluation

    def __init__(
        self,
        task: Link,
        comm: CommunicatorBase,
        number: int,
        path: str,
        classes: Sequence[str] | None,
        complain: Callable[[str], None],
    ):
        self._task, self._comm = task, comm
        self._collector = Collector(number, comm.rank == 0)
        self._path, self._classes, self._complain = path, classes, complain
        self._last = -np.inf  # seconds at which the file was written
        self._pending: dict[str, Any] | None = None

    def begin(self, evaluator: Extension | None = None) -> None:
        """Collect examples from now on."""
        self._collector.clear()
        self._task.on_outputs = self._collector

    def __call__(self, trainer: Trainer) -> None:
        self._task.on_outputs = None
        worst = self._worst_of_all()
        if self._comm.rank == 0:
            place = {"iteration": trainer.updater.iteration, "epoch": trainer.updater.epoch_detail}
            self._pending = {**place, "first": self._collector.first, "worst": worst}
            if time.monotonic() - self._last >= _WRITE_SECONDS:
                self._write()

    def finalize(self) -> None:
        self._write()

    def _worst_of_all(self) -> list[_Shown]:
        """On rank 0: the worst mistakes of all ranks; only pictures that are among these travel. Collective."""
        mine, comm = self._collector.worst, self._comm
        if comm.size == 1:
            return mine
        losses = sorted(loss for theirs in comm.allgather_obj([one.loss for one in mine]) for loss in theirs)
        limit = losses[-self._collector.number :][0] if losses else np.inf
        everyone = comm.gather_obj([one for one in mine if one.loss >= limit])
        found = [one for theirs in everyone or () for one in theirs]
        return sorted(found, key=lambda one: -one.loss)[: self._collector.number]

    def _write(self) -> None:
        if self._pending is None:
            return
        self._last, shown, self._pending = time.monotonic(), self._pending, None
        pictures = {key: [_as_json(one) for one in shown[key]] for key in ("first", "worst")}
        told = {**shown, **pictures, "classes": self._classes}
        text = strict_json.dumps(told).encode()
        try:
            write_atomically(self._path, lambda file: file.write(text))
        except OSError as error:  # the run goes on without
            complain, self._complain = self._complain, lambda words: None
            complain(f"{self._path}: the test examples could not be written: {error.strerror}")


def _as_json(one: _Shown) -> dict[str, Any]:
    picture = base64.b64encode(png(picture_of(one.image))).decode()
    return {"image": picture, "label": one.label, "loss": one.loss, "likeliest": one.likeliest}


def picture_of(image: np.ndarray) -> np.ndarray:
    """An image (C, H, W) of any numbers as bytes (H, W, C), from its least to its greatest; large ones smaller."""
    step = -(-max(image.shape[1:]) // _MAX_PIXELS)
    if step > 1:  # means over squares
        height, width = (size // step * step for size in image.shape[1:])
        if height and width:
            squares = image[:, :height, :width].reshape(len(image), height // step, step, width // step, step)
            image = squares.mean((2, 4))
        else:
            image = image[:, ::step, ::step]
    image = np.nan_to_num(image.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    low, high = image.min(initial=np.inf), image.max(initial=-np.inf)
    scaled = (image - low) * (255.0 / (high - low)) if high > low else np.full(image.shape, 128.0)
    return np.ascontiguousarray(scaled.round().astype(np.uint8).transpose(1, 2, 0))


def png(pixels: np.ndarray) -> bytes:
    """A picture of bytes (H, W, 1) or (H, W, 3) as a PNG file."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter, none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
