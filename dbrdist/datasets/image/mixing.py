"""Examples made of two: mixup and CutMix, with soft labels.

Which examples are mixed, and how, is a function of (seed, epoch, sample): neighbours in the epoch's order are partners
of each other. So numbers depend on no rank, worker or batch size, and partners nearly always are in one batch, where
each image is read and decoded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.random import generator, permutation
from dbrdist.core.names.limits import positive, share
from dbrdist.core.usage.mistakes import given_a_class
from dbrdist.datasets.loading.base import Batch, DatasetMixin, get_batch, join
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.memory import reused
from dbrdist.errors import DatasetError


@functools.lru_cache(maxsize=2)  # two epochs may meet in one batch
def positions(seed: int, epoch: int, n: int) -> Array:
    """Where each of n examples stands in the order of an epoch, shape (n,) of int32."""
    order = permutation(seed, epoch, n)
    found = np.empty(n, np.int32)
    found[order] = np.arange(n, dtype=np.int32)
    return found


Share: TypeAlias = Annotated[float, share, "The probability that an image is mixed."]


class Mixing:
    """Base of ways to mix two images: ``mix(out, other, rng, axes)`` changes ``out`` in place.

    ``axes`` are those of height and width. It returns how much of ``out`` is still its own, from 0 to 1, which becomes
    the weight of its label.

    Args:
        alpha: the share of the other image follows Beta(alpha, alpha): small values leave most images nearly alone.
        p: the probability that an example is mixed at all.

    Example:
        >>> datasets.Mixup(alpha=0.2).alpha
        0.2
    """

    def __init__(self, alpha: float = 1.0, p: float = 1.0) -> None:
        if not alpha > 0 or not 0 <= p <= 1:
            raise ValueError(f"expected alpha above 0 and p from 0 to 1, got {alpha} and {p}")
        self.alpha = alpha
        self.p = p

    def mix(self, out: Any, other: Any, rng: Any, axes: tuple[int, int]) -> float:
        """Change ``out`` in place and return the share of ``out`` in the result, from 0 to 1.

        Args:
            out, other: two images, arrays of the same shape and type.
            rng: the generator from which the share and the place are drawn.
            axes: the axes of height and width.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mix(out, other, rng, axes)")


class Mixup(Mixing):
    """Each image mixed with another one, and their labels (Zhang et al. 2018, arXiv:1710.09412).

    It becomes ``w out + (1 - w) other``, w in 256ths; integers are rounded to nearest.

    Args:
        alpha: the share of the other image follows Beta(alpha, alpha); above 0.
        p: the probability that an image is mixed.

    Example:
        >>> train = [(np.zeros((8, 8, 3), np.uint8), 0), (np.ones((8, 8, 3), np.uint8), 1)]
        >>> image, label = datasets.MixedDataset(train, [datasets.Mixup()], num_classes=2)[0]
        >>> image.shape, round(float(label.sum()), 3)
        ((8, 8, 3), 1.0)
    """

    def __init__(
        self,
        alpha: Annotated[float, positive, "The share of the other image follows Beta(alpha, alpha)."] = 0.2,
        p: Share = 1.0,
    ) -> None:
        super().__init__(alpha, p)

    def mix(self, out: Any, other: Any, rng: np.random.Generator, axes: tuple[int, int]) -> float:
        w = round(256 * rng.beta(self.alpha, self.alpha))
        if out.dtype.kind in "iu":
            wide = np.dtype(np.uint16 if out.dtype == np.uint8 else np.int64).type
            out[...] = (out * wide(w) + other * wide(256 - w) + wide(128)) >> 8
        else:
            out *= out.dtype.type(w / 256)
            out += other * out.dtype.type(1 - w / 256)
        return w / 256


class CutMix(Mixing):
    """A rectangle of another image put into each, and their labels mixed (Yun et al. 2019, arXiv:1905.04899).

    Its sides are sqrt(1 - w) of the image's with w from Beta(alpha, alpha), its centre is uniform, and what is beyond
    the image is cut off; the weight is what is left.

    Args:
        alpha: the part of the image that is left follows Beta(alpha, alpha); above 0.
        p: the probability that an image is mixed.

    Example:
        >>> train = [(np.zeros((8, 8, 3), np.uint8), 0), (np.ones((8, 8, 3), np.uint8), 1)]
        >>> image, label = datasets.MixedDataset(train, [datasets.CutMix()], num_classes=2)[0]
        >>> image.shape, label.shape
        ((8, 8, 3), (2,))
    """

    def __init__(
        self,
        alpha: Annotated[float, positive, "The part of the image that is left follows Beta(alpha, alpha)."] = 1.0,
        p: Share = 1.0,
    ) -> None:
        super().__init__(alpha, p)

    def mix(self, out: Array, other: Array, rng: np.random.Generator, axes: tuple[int, int]) -> float:
        side = math.sqrt(1 - rng.beta(self.alpha, self.alpha))
        window, covered = [slice(None)] * out.ndim, 1.0
        for axis in axes:
            n = out.shape[axis]
            length, centre = int(n * side), int(rng.random() * n)
            start, end = max(centre - length // 2, 0), min(centre + length // 2, n)
            window[axis] = slice(start, end)
            covered *= (end - start) / n
        out[tuple(window)] = other[tuple(window)]
        return 1 - covered


def _check_ways(dataset: Any, mixings: Any) -> None:
    """Refuse what is no way to mix, or arguments in another order."""
    ways = mixings if isinstance(mixings, (list, tuple)) else [mixings]
    for way in ways:
        if isinstance(way, type) and issubclass(way, Mixing):
            raise given_a_class("MixedDataset: mixings", way, "a way to mix")
        if not hasattr(way, "mix"):
            ways = [way]
            break
    if isinstance(dataset, Mixing) or not (isinstance(mixings, Sequence) and all(hasattr(w, "mix") for w in ways)):
        got = type(dataset if isinstance(dataset, Mixing) else ways[0]).__name__
        raise TypeError(
            f"MixedDataset: mixings: expected ways to mix, got {got}; write MixedDataset(dataset, [Mixup(), CutMix()], "
            "num_classes)"
        )


class MixedDataset(DatasetMixin):
    """A dataset of (image, label) whose examples are mixed in pairs: (image, weights of the classes).

    Images are mixed after the dataset's own transforms, as uint8 where its loaders keep them so; weights are float32 of
    shape (classes,) and sum to 1, for ``softmax_cross_entropy`` and ``accuracy``. An example whose partner cannot be
    read, and the last of an odd number, stay alone.

    Args:
        dataset: the examples, images of one size with integer labels.
        mixings: ways to mix; of several one is drawn for each example.
        num_classes: how many classes there are.
        per: examples, of the epoch's order, that are mixed in one and the same way: with the same share, and the same
            rectangle. torchvision and timm do so with whole batches; 1 draws for each example.

    Example:
        >>> train = [(np.zeros((8, 8, 3), np.uint8), 0), (np.ones((8, 8, 3), np.uint8), 1)]
        >>> datasets.MixedDataset(train, [datasets.Mixup(), datasets.CutMix()], num_classes=2)[0][1].shape
        (2,)
    """

    def __init__(self, dataset: Any, mixings: Sequence[Mixing], num_classes: int, per: int = 1) -> None:
        if isinstance(mixings, Mixing):
            mixings = [mixings]
        _check_ways(dataset, mixings)
        if not mixings or num_classes < 1:
            raise ValueError(
                f"expected at least one way to mix and one class, got {len(mixings)} ways and {num_classes} classes"
            )
        self._dataset = dataset
        self.mixings = tuple(mixings)
        if per < 1:
            raise ValueError(f"expected per of 1 or more, got {per}")
        self.num_classes = num_classes
        self.per = per
        self._partners: dict[tuple[int, int], Array] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __reduce__(self) -> Any:
        return MixedDataset, (self._dataset, self.mixings, self.num_classes, self.per)

    def get_example(self, i: int) -> tuple[Array, Array]:
        return self.example_at(i, 0, 0)

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        skipped: list[str] = []
        batch = self.get_batch(np.array([range(len(self))[i]]), seed, epoch, skipped)
        return batch[0] if len(batch) else self._dataset[i]  # which says what is wrong with it

    def partners(self, seed: int, epoch: int) -> Array:
        """Each example's partner in ``epoch`` of a run with ``seed``: positions 2k and 2k + 1 form a pair."""
        table = self._partners.get((seed, epoch))
        if table is None:
            order = permutation(seed, epoch, len(self)).astype(np.int32)
            first, second = order[0 : len(order) - 1 : 2], order[1::2]
            table = np.arange(len(order), dtype=np.int32)
            table[first], table[second] = second, first
            latest = list(self._partners.items())[-1:]  # two epochs may meet in one batch
            self._partners = {**dict(latest), (seed, epoch): table}
        return table

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        indices = np.asarray(indices, np.int64)
        partners = self.partners(seed, epoch)[indices]
        read = _Read(self._dataset, np.union1d(indices, partners), seed, epoch)
        skipped += [read.wrong[i] for i in indices if i in read.wrong]
        pairs = [(int(i), int(j)) for i, j in zip(indices, partners) if int(i) not in read.wrong]
        if not pairs:
            return []
        images, labels, finish = read.arrays(self.num_classes)
        axes = (0, 1) if finish is not None else (images.ndim - 3, images.ndim - 2)
        out = reused.empty((len(pairs), *images.shape[1:]), images.dtype)
        weights = np.zeros((len(pairs), self.num_classes), np.float32)
        for row, (i, j) in enumerate(pairs):
            a, b = read.rows[i], read.rows.get(j, read.rows[i])
            out[row] = images[a]
            share = 1.0 if a == b else self._mix(out[row], images[b], self._chance(seed, epoch, i), axes)
            weights[row, labels[a]] += share
            weights[row, labels[b]] += 1 - share
        return Batch((out, weights), finish)

    def _chance(self, seed: int, epoch: int, i: int) -> np.random.Generator:
        """The random numbers with which an example is mixed: its own, or those of its block."""
        if self.per == 1:
            return generator(seed, "mix", epoch, i)
        return generator(seed, "mix of a batch", epoch, int(positions(seed, epoch, len(self))[i]) // self.per)

    def _mix(self, out: Array, other: Array, rng: np.random.Generator, axes: tuple[int, int]) -> float:
        mixing = self.mixings[int(rng.random() * len(self.mixings))]
        return mixing.mix(out, other, rng, axes) if rng.random() < mixing.p else 1.0


class _Read:
    """Examples by index: ``rows`` has the place of each in ``batch``, ``wrong`` why each other could not be read."""

    def __init__(self, dataset: Any, indices: Array, seed: int, epoch: int) -> None:
        skipped: list[str] = []
        self.batch = get_batch(dataset, indices, seed, epoch, skipped)
        self.wrong: dict[int, str] = {}
        if skipped:  # which ones they were shows one by one
            parts = []
            for i in indices:
                found: list[str] = []
                part = get_batch(dataset, np.array([i]), seed, epoch, found)
                if found:
                    self.wrong[int(i)] = found[0]
                else:
                    parts.append(part)
            self.batch = (join(parts) or [e for part in parts for e in part]) if parts else []
        good = [int(i) for i in indices if int(i) not in self.wrong]
        self.rows = {i: row for row, i in enumerate(good)}

    def arrays(self, num_classes: int) -> tuple[Any, Any, Any]:
        """Images, labels, and what finishes the images, which are (N, H, W, C) until then; checked."""
        batch = self.batch if isinstance(self.batch, Batch) else Batch(concat_examples(self.batch))
        arrays, finish = batch.raw
        if not isinstance(arrays, tuple) or len(arrays) != 2 or arrays[0].ndim < 4:
            raise DatasetError("expected examples of (image, label) with images of one size to mix")
        images, labels = arrays
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise DatasetError(f"expected an integer label for each image to mix, got {labels.dtype} of {labels.shape}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise DatasetError(
                f"expected labels from 0 to {num_classes - 1} to mix, got {labels.min()} to {labels.max()}"
            )
        return images, labels, finish
