"""Datasets of image files: one folder per class, or lists of paths."""

from __future__ import annotations

import functools
import os
import threading
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import Array
from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.random import generator
from dbrdist.core.array.types import DType
from dbrdist.core.files.regular_file import regular
from dbrdist.datasets.image import images
from dbrdist.datasets.image.index import ImageIndex, open_images
from dbrdist.datasets.image.transforms import (
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToCHW,
    at_epoch,
    sees_a_window,
    transform_batch,
)
from dbrdist.datasets.loading.base import DatasetMixin, SkipExample, read_examples
from dbrdist.datasets.loading.files import read_file
from dbrdist.errors import CorruptExampleError, DatasetError

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def read_image(path: str | os.PathLike[str], keep_channels: bool = False, fast: bool = False) -> images.Image:
    """The pixels of a JPEG or PNG file, (H, W, C) of uint8; a file that cannot be read is a CorruptExampleError.

    ``keep_channels`` and ``fast`` are as for :func:`dbrdist.datasets.image.images.decode`.
    """
    try:
        data = read_file(os.fspath(path))
    except OSError as e:
        raise CorruptExampleError(f"expected a readable image file: {path}: {e.strerror}") from e
    try:
        return images.decode(data, keep_channels, fast)
    except images.ImageDecodeError as e:
        raise CorruptExampleError(f"corrupt image file {path}: {e}") from e


class ImageFolder(DatasetMixin):
    """Images in one folder per class, ``root/CLASS/anything.jpg`` (or .jpeg, .png), or in tar shards of a folder.

    Example ``i`` is ``(image, label)``: classes are sorted by name and numbered from 0 (int32), files are sorted by
    name within their class. Other files are ignored; a class folder without images is an error. In tar shards, of
    WebDataset's layout, images come in the order of the shards, and labels are what the shards say.

    Args:
        root: the folder of the class folders or shards, with or without an index (``dbrdist-data build``) in it, or the
            file of an index that is elsewhere; see ``docs/data.md``.
        transform: ``t(example, rng)`` on ``(image, label)`` with the image (H, W, 3) of uint8; None gives (3, H, W)
            of float32 from 0 to 255. Its ``rng`` depends on (seed, epoch, i) alone.
        prepare: a transform without randomness for each decoded image, before the cache (for example a Resize).
        cache: keep decoded images in memory as uint8, so that each file is decoded once; all must be of one size.
        on_corrupt: ``'error'``: a file that cannot be read raises CorruptExampleError with its name;
            ``'skip'``: loaders leave the example out of its batch, which becomes smaller, and count it.
        classes: the class folders that must be there, such as ``train.classes`` for a test set.
        decode: ``'exact'``, or ``'fast'``, which takes a tenth of the decoder's time less and changes pixels a little
            (see ``docs/data.md``); it needs simplejpeg, and is as ``'exact'`` without.
        index: which images there are, where that is known: of :func:`open_images`, or of
            ``dbrdist.comm.open_images_once``, by which one rank alone looks. None looks at ``root``.

    Example:
        >>> change = datasets.Compose([datasets.RandomResizedCrop(64), datasets.ToCHW()])
        >>> train = datasets.ImageFolder("images/train", change)  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        *,
        prepare: Callable[..., Any] | None = None,
        cache: bool = False,
        on_corrupt: str = "error",
        classes: Sequence[str] | None = None,
        decode: str = "exact",
        index: ImageIndex | None = None,
    ) -> None:
        if on_corrupt not in ("error", "skip"):
            raise ValueError(f"expected on_corrupt 'error' or 'skip', got {on_corrupt!r}")
        if decode not in ("exact", "fast"):
            raise ValueError(f"expected decode 'exact' or 'fast', got {decode!r}")
        self.root = Path(root)
        self.index = open_images(root) if index is None else index
        if classes is not None:
            check_same_classes(list(classes), self.classes, "the expected classes", str(self.root))
        self.transform = ToCHW() if transform is None else transform
        self.prepare = prepare
        self.on_corrupt = on_corrupt
        self.decode = decode
        self._cache = _ImageCache(len(self.index)) if cache else None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of labels."""
        return self.index.classes

    @property
    def labels(self) -> Array:
        """All labels, int32."""
        return self.index.labels

    def known_example(self, i: int) -> tuple[str, int]:
        """The path and the label of image ``i``."""
        return self.path(i), int(self.labels[i])

    def path(self, i: int) -> str:
        """The file of example ``i``; in a shard, ``SHARD.tar:MEMBER``."""
        return self.index.path(i)

    def get_raw(self, i: int) -> tuple[images.Image, np.int32]:
        """Example ``i`` before the transform: the image (H, W, 3) of uint8, and the label."""
        image = None if self._cache is None else self._cache.get(i)
        if image is None:
            image = self._read(i, images.decode)
            if self.prepare is not None:
                try:
                    image = self.prepare(image, None)
                except images.ImageDecodeError as e:
                    raise self._refusal(i, e) from e
            if self._cache is not None:
                self._cache.put(i, image, self.path)
        return image, self.labels[i]

    def get_encoded(self, i: int) -> tuple[images.Encoded, np.int32]:
        """Example ``i`` with an image that is decoded when a window of it is asked for."""
        return self._read(i, images.Encoded, refuse=functools.partial(self._refusal, i)), self.labels[i]

    def _read(self, i: int, decode: Callable[..., Any], **options: Any) -> Any:
        try:
            return decode(self.index.read(i), fast=self.decode == "fast", **options)
        except (CorruptExampleError, images.ImageDecodeError) as e:
            raise self._refusal(i, e) from e

    def _refusal(self, i: int, error: Exception) -> CorruptExampleError:
        """What is raised for an example that cannot be read."""
        words = str(error) if isinstance(error, CorruptExampleError) else f"corrupt image file {self.path(i)}: {error}"
        return (SkipExample if self.on_corrupt == "skip" else CorruptExampleError)(words)

    def get_example(self, i: int) -> tuple[Array, np.generic]:
        """Example ``i`` as it looks in epoch 0 with seed 0."""
        return self.example_at(i, 0, 0)

    def example_at(self, i: int, seed: int, epoch: int) -> tuple[Array, np.generic]:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        transform = at_epoch(self.transform, epoch)
        raw = self.get_raw(i)
        try:
            return transform(raw, generator(seed, "augment", epoch, int(i) % len(self)))
        except images.ImageDecodeError as e:
            raise self._refusal(i, e) from e

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        sees_windows = self._cache is None and self.prepare is None and sees_a_window(self.transform, epoch)
        raw = _Raw(self.get_encoded if sees_windows else self.get_raw)
        examples = read_examples(raw, indices, seed, epoch, skipped)
        return transform_batch(self.transform, examples, len(indices), seed, epoch, skipped, self._refusal)


class _Raw:
    """An ImageFolder before its transform."""

    def __init__(self, get: Callable[[int], Any]) -> None:
        self._get = get

    def __getitem__(self, i: int) -> Any:
        return self._get(i)


class _ImageCache:
    """Decoded images of one size, filled as they are read; a pickled copy (for a worker) starts empty."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images
        self.pixels: Any = None
        self.is_filled = np.zeros(num_images, bool)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _ImageCache, (self.num_images,)

    def get(self, i: int) -> Any:
        return self.pixels[i].copy() if self.is_filled[i] else None  # a transform may change its image in place

    def put(self, i: int, image: images.Image, path: Callable[[int], str]) -> None:
        with self._lock:  # two threads must not both make the array
            if self.pixels is None:
                self.first, self.pixels = i, np.empty((self.num_images, *image.shape), np.uint8)
        if image.shape != self.pixels.shape[1:]:
            raise DatasetError(
                f"expected images of one size for cache=True: {path(self.first)} has {self.pixels.shape[1:]}, "
                f"{path(i)} has {image.shape}; resize them with prepare=, or set cache=False"
            )
        self.pixels[i] = image
        self.is_filled[i] = True  # after the pixels, for another thread may read at any time


def check_same_classes(first: Sequence[str], second: Sequence[str], first_name: str, second_name: str) -> None:
    """Raise a ValueError if the classes of two datasets differ; it names those that only one has or whose number
    differs.

    Args:
        first, second: the names of the classes in the order of their numbers.
        first_name, second_name: what the message calls the two, such as their folders.

    Raises:
        ValueError: the names or their order differ.

    Example:
        >>> datasets.check_same_classes(["cat", "dog"], ["cat", "dog"], "train", "test")
    """
    only_first, only_second = sorted(set(first) - set(second)), sorted(set(second) - set(first))
    if only_first or only_second:
        escaped = not set(map(_seen, only_first)).isdisjoint(map(_seen, only_second))
        raise ValueError(
            f"expected the same class folders in {first_name} and in {second_name}; "
            f"only in the first: {_some(only_first, escaped)}; only in the second: {_some(only_second, escaped)}; "
            "labels are numbered by sorted folder names, so both must have the same"
        )
    moved = [f"{a!r} and {b!r}" for a, b in zip(first, second) if a != b]
    if moved:
        raise ValueError(
            f"expected the same numbers of classes in {first_name} and in {second_name}, but the order differs: the "
            f"first label that differs is {moved[0]}"
        )


def _seen(name: str) -> str:
    """What of a name can be seen: neither how accents are encoded, in which systems differ, nor blanks at its ends."""
    return unicodedata.normalize("NFC", name).strip()


def _some(names: list[str], is_escaped: bool, limit: int = 10) -> str:
    shown = ", ".join(ascii(name) if is_escaped else name for name in names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def get_image_folders(
    root: str | os.PathLike[str],
    train_transform: Callable[..., Any] | None = None,
    test_transform: Callable[..., Any] | None = None,
    *,
    train: str = "train",
    test: str = "test",
    find: Callable[[str], ImageIndex] = open_images,
    **options: Any,
) -> tuple[ImageFolder, ImageFolder]:
    """(train, test) from ``root/train/CLASS/*`` and ``root/test/CLASS/*``; both must have the same class folders.

    ``find(path)`` gives the index of the images in each of the two; ``options`` go to :class:`ImageFolder`.

    Args:
        root: the folder of both.
        train_transform: ``t(example, rng)`` for training images; see :class:`ImageFolder`.
        test_transform: the same for test images.
        train, test: the names of the two folders.
        find: a function of a path that gives the index of its images.
        options: further arguments of :class:`ImageFolder`, for both.

    Raises:
        FileNotFoundError, ValueError: a folder is missing or empty, or their classes differ.

    Example:
        >>> train, test = datasets.get_image_folders("images", test="val")  # doctest: +SKIP
        >>> train.classes == test.classes  # doctest: +SKIP
        True
    """
    train, test = os.path.join(root, train), os.path.join(root, test)
    first = ImageFolder(train, train_transform, index=find(train), **options)
    second = ImageFolder(test, test_transform, index=find(test), **options)
    check_same_classes(first.classes, second.classes, str(first.root), str(second.root))
    return first, second


def get_cifar10_folders(
    root: str | os.PathLike[str], augment: bool = True, **options: Any
) -> tuple[ImageFolder, ImageFolder]:
    """(train, test) of CIFAR-10 (Krizhevsky 2009) from ``root/train/CLASS/*`` and ``root/test/CLASS/*``.

    Images are (3, 32, 32), normalised by the mean and deviation of the training set. With ``augment`` the training
    images are cropped at random from 4 pixels of padding and mirrored with probability 1/2. Decoded images are kept in
    memory (150 MB). ``options`` go to :class:`ImageFolder`.

    Args:
        root: the folder with ``train`` and ``test``.
        augment: whether training images are changed at random.
        options: further arguments of :class:`ImageFolder`.

    Raises:
        FileNotFoundError: a folder is missing.

    Example:
        >>> train, test = datasets.get_cifar10_folders("cifar10")  # doctest: +SKIP
        >>> train[0][0].shape  # doctest: +SKIP
        (3, 32, 32)
    """
    plain = [Normalize(CIFAR10_MEAN, CIFAR10_STD), ToCHW()]
    changes = [RandomCrop(32, padding=4), RandomHorizontalFlip()] if augment else []
    return get_image_folders(root, Compose(changes + plain), Compose(plain), **{"cache": True, **options})


class ImageDataset(DatasetMixin):
    """Images (C, H, W) from a list of paths; gray files have C = 1, PNGs with transparency C = 4.

    Args:
        paths: paths, or the path of a text file with one per line.
        root: the folder that they are relative to.
        dtype: type of the pixels, 0 to 255; None is ``config.dtype``.

    Example:
        >>> datasets.ImageDataset(["a.jpg", "b.png"], root="images")[0].shape  # doctest: +SKIP
    """

    def __init__(
        self, paths: str | Sequence[str], root: str | os.PathLike[str] = ".", dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        self._paths = lines_of(paths)
        self._root = root
        self._dtype = get_dtype(dtype)

    def __len__(self) -> int:
        return len(self._paths)

    def known_example(self, i: int) -> str:
        """The path of image ``i``."""
        return self._paths[i]

    def get_example(self, i: int) -> Array:
        return _image_chw(os.path.join(self._root, self._paths[i]), self._dtype)


class LabeledImageDataset(DatasetMixin):
    """Pairs (image, label) from a list of (path, label): images as in :class:`ImageDataset`.

    Args:
        pairs: pairs (path, label), or the path of a text file with a path, a blank and a label on each line.
        root: the folder that paths are relative to.
        dtype: type of the pixels; None is ``config.dtype``.
        label_dtype: type of the labels.

    Example:
        >>> datasets.LabeledImageDataset([("a.jpg", 0), ("b.png", 1)], root="images")[0][1]  # doctest: +SKIP
    """

    def __init__(
        self, pairs: Any, root: str | os.PathLike[str] = ".", dtype: DTypeLike | None = None,
        label_dtype: DTypeLike = np.int32,
    ) -> None:  # fmt: skip
        if isinstance(pairs, (str, os.PathLike)):
            pairs = [path_and_label(line, n, pairs) for n, line in enumerate(lines_of(pairs), 1)]
        self._pairs = list(pairs)
        self._root = root
        self._dtype = get_dtype(dtype)
        self._label_dtype = np.dtype(label_dtype)

    def __len__(self) -> int:
        return len(self._pairs)

    def known_example(self, i: int) -> tuple[str, int]:
        """The path and the label of image ``i``."""
        return self._pairs[i]

    def get_example(self, i: int) -> tuple[Array, np.generic]:
        path, label = self._pairs[i]
        return _image_chw(os.path.join(self._root, path), self._dtype), self._label_dtype.type(label)


def _image_chw(path: str, dtype: DType) -> Array:
    return read_image(path, keep_channels=True).astype(dtype).transpose(2, 0, 1)


def lines_of(paths: Any) -> list[str]:
    """The lines of a text file that are not empty; a list as it is."""
    if not isinstance(paths, (str, os.PathLike)):
        return list(paths)
    with open(paths, encoding="utf-8", opener=regular) as f:
        return [line.rstrip("\n") for line in f if line.strip()]


def path_and_label(line: str, number: int, file: Any) -> tuple[str, int]:
    """The path and the label on a line of ``file``."""
    path, *rest = line.strip().rsplit(None, 1)
    if not rest or not rest[0].lstrip("-").isdigit():
        raise ValueError(f"{file}:{number}: expected a path, a blank and an integer label, got {line!r}")
    return path, int(rest[0])
