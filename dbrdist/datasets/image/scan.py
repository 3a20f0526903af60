"""Finding the images of a dataset: in one folder per class, or in tar shards."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.core.usage import mistakes
from dbrdist.datasets.image import tar
from dbrdist.datasets.image.index_format import MAX_CLASSES, MAX_IMAGE_BYTES, Contents, Shard
from dbrdist.errors import DatasetError

EXTENSIONS = (".jpg", ".jpeg", ".png")
_NOT_READ = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".tif", ".tiff", ".webp")
_IN_TAR = tuple(e[1:].encode() for e in EXTENSIONS)
_LIKE_IMAGES = tuple(e.encode() for e in EXTENSIONS + _NOT_READ)
_MAX_LABEL_BYTES = 64


UNFINISHED = ".unfinished"  # a file in a folder of shards until all are there


def scan(root: str | os.PathLike[str]) -> Contents:
    """What images there are: class folders, or else tar shards, sorted by name.

    Raises FileNotFoundError or ValueError where there are none; DatasetError, a ValueError, names a damaged shard.
    """
    root = os.fspath(root)
    if os.path.exists(os.path.join(root, UNFINISHED)):
        raise DatasetError(
            f"{root}: expected all of its shards, but dbrdist-data prepare did not come to its end there; start the "
            "same command again"
        )
    return scan_any(root)


def scan_any(root: str) -> Contents:
    """As :func:`scan`, of a folder that may not be finished."""
    if not os.path.isdir(root):
        raise FileNotFoundError(f"expected a folder with one folder of images per class, but {root} is not a folder")
    classes = class_folders(root)
    if classes:
        return _scan_folders(root, classes)
    shards = sorted(e.name for e in os.scandir(root) if e.name.lower().endswith(".tar") and not e.name.startswith("."))
    if not shards:
        raise ValueError(f"expected one folder of images per class in {root}, found none, nor tar shards")
    return _scan_shards(root, shards)


class Names:
    """Many names in one piece of memory."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.ends = array("Q")

    def append(self, name: bytes) -> None:
        """One more."""
        self.text += name
        self.ends.append(len(self.text))


class _LeftOut:
    """Images among the files that are not read: how many, and one of each ending."""

    def __init__(self) -> None:
        self._number = 0
        self._some: dict[str, str] = {}  # by what follows the first dot

    def add(self, path: str) -> None:
        """One more."""
        self._number += 1
        self._some.setdefault(os.path.basename(path).partition(".")[2].lower(), path)

    def warn(self, root: str, where: str = "") -> None:
        """Say so: whoever trains on the others does not notice."""
        if self._number:
            some = ", ".join(map(repr, list(self._some.values())[:4]))
            mistakes.warn(
                f"{root}: images of other endings than {', '.join(EXTENSIONS)}{where} are left out, {self._number:,} "
                f"in all, such as {some}; convert or rename them"
            )


def column(numbers: Any, dtype: str) -> Array:
    """An ``array.array`` as a NumPy array."""
    return np.frombuffer(numbers, numbers.typecode).astype(dtype) if len(numbers) else np.empty(0, dtype)


# ---- class folders --------------------------------------------------------------------------------------------------


def class_folders(root: str | Path) -> list[str]:
    """The names of the class folders, sorted: every folder that is not hidden."""
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _scan_folders(root: str, classes: list[str]) -> Contents:
    names, counts, times, left_out = Names(), [], [], _LeftOut()
    for c in classes:
        folder = os.path.join(root, c)
        times.append(os.stat(folder).st_mtime_ns)  # before the names: what comes meanwhile shows as a change
        found = _image_files(folder, left_out)
        counts.append(len(found))
        for name in found:
            names.append(os.fsencode(name))
    left_out.warn(root)
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return Contents(root, classes, times, [], labels, column(names.ends, "<u8"), bytes(names.text))


def _image_files(folder: str, left_out: _LeftOut) -> list[str]:
    names = []
    with os.scandir(folder) as entries:
        for name in sorted(e.name for e in entries if not e.name.startswith(".")):
            if name.lower().endswith(EXTENSIONS):
                names.append(name)
            elif name.lower().endswith(_NOT_READ):
                left_out.add(os.path.join(folder, name))
    if not names:
        raise ValueError(f"expected images ({', '.join(EXTENSIONS)}) in the class folder {folder}, found none")
    return names


def ignored_files(root: str) -> tuple[dict[str, int], int]:
    """The files that :func:`scan` passes over in class folders: how many by ending, and how many in folders below.

    Hidden files do not count.
    """
    endings: dict[str, int] = {}
    below = 0
    for name in class_folders(root):
        folder = os.path.join(root, name)
        for place, folders, files in os.walk(folder):
            folders[:] = [f for f in folders if not f.startswith(".")]
            for file in (f for f in files if not f.startswith(".")):
                if place != folder:
                    below += 1
                elif not file.lower().endswith(EXTENSIONS):
                    ending = os.path.splitext(file)[1].lower() or "no ending"
                    endings[ending] = endings.get(ending, 0) + 1
    return endings, below


# ---- tar shards -----------------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """An image in a shard, with the member that has its label, if any."""

    key: bytes
    image: tar.Member
    label: tar.Member | None


def _scan_shards(root: str, shards: list[str]) -> Contents:
    names, offsets, sizes, labels = Names(), array("Q"), array("Q"), array("q")
    folders: dict[bytes, int] = {}  # the samples' folders, numbered as they come
    places, found, has_labels, left_out = array("q"), [], None, _LeftOut()
    for shard in shards:
        path = os.path.join(root, shard)
        now = os.stat(path)
        for sample in _samples(path, left_out):
            if has_labels is None:
                has_labels = sample.label is not None
            if has_labels != (sample.label is not None):
                words = "a .cls member beside every image, or beside none"
                raise DatasetError(f"{path}: expected {words}: {os.fsdecode(sample.key)!r} differs from those before")
            places.append(folders.setdefault(sample.key.rpartition(b"/")[0], len(folders)))
            labels.append(0 if sample.label is None else _label(path, sample.label))
            names.append(sample.image.name)
            offsets.append(sample.image.offset)
            sizes.append(sample.image.size)
        found.append(Shard(shard, now.st_size, now.st_mtime_ns, len(offsets)))
    left_out.warn(root, " behind the first dot of the name")
    if not len(offsets):
        raise ValueError(f"expected images ({', '.join(EXTENSIONS)}) in the tar shards of {root}, found none")
    classes, numbers = _classes(root, folders, column(places, "<i8"), column(labels, "<i8"), bool(has_labels))
    columns = (column(names.ends, "<u8"), bytes(names.text), column(offsets, "<u8"), column(sizes, "<u4"))
    return Contents(root, classes, [], found, numbers, *columns)


def _samples(path: str, left_out: _LeftOut) -> Iterator[_Sample]:
    """The images of a shard in order, each with its label; ``left_out`` gets those of samples without a plain one."""
    key, image, label = b"", None, None
    others: list[str] = []
    for member in tar.members(path):
        its_key, extension = tar.key_and_extension(member.name)
        if its_key != key:
            yield from _finished(key, image, label, others, left_out)
            key, image, label, others = its_key, None, None, []
        if extension in _IN_TAR or extension == b"cls":
            name = os.fsdecode(member.name)
            if not member.is_regular:
                raise DatasetError(f"{path}: expected a regular file, but {name!r} is a link or another special member")
            if (image if extension in _IN_TAR else label) is not None:
                raise DatasetError(f"{path}: {name!r} is the second of its kind in one sample")
            if member.size > MAX_IMAGE_BYTES:
                raise DatasetError(f"{path}: {name!r} claims {member.size:,} bytes, more than an image can have")
            image, label = (member, label) if extension in _IN_TAR else (image, member)
        elif member.name.lower().endswith(_LIKE_IMAGES) and key.rpartition(b"/")[2]:  # a hidden file has no key
            others.append(f"{path}:{os.fsdecode(member.name)}")
    yield from _finished(key, image, label, others, left_out)


def _finished(
    key: bytes, image: tar.Member | None, label: tar.Member | None, others: list[str], left_out: _LeftOut
) -> Iterator[_Sample]:
    if image is not None:
        yield _Sample(key, image, label)
        return
    for path in others:
        left_out.add(path)


def _label(path: str, member: tar.Member) -> int:
    with open(path, "rb", opener=regular) as f:
        f.seek(member.offset)
        text = f.read(min(member.size, _MAX_LABEL_BYTES)).strip()
    if not text.isdigit() or int(text) >= MAX_CLASSES or member.size > _MAX_LABEL_BYTES:
        raise DatasetError(
            f"{path}: expected the number of a class from 0 to {MAX_CLASSES - 1:,} in {os.fsdecode(member.name)!r}, "
            f"got {text[:20]!r}"
        )
    return int(text)


def _classes(
    root: str, folders: dict[bytes, int], places: Array, labels: Array, has_labels: bool
) -> tuple[list[str], Any]:
    """The names of the classes, and each image's label: folders name the classes where they are the same thing."""
    if not has_labels:
        if b"" in folders:
            raise DatasetError(
                f"{root}: expected the number of its class beside each image in the shards (NAME.cls with NAME.jpg), "
                "or a folder named for its class"
            )
        ordered = sorted(folders)
        number = {folder: n for n, folder in enumerate(ordered)}
        ranks = np.array([number[folder] for folder in folders], np.int32)
        return [os.fsdecode(folder) for folder in ordered], ranks[places]
    pairs = np.unique(np.stack([places, labels], 1), axis=0)
    names = [str(n) for n in range(int(labels.max()) + 1)]
    if len(pairs) == len(folders) == len(np.unique(labels)) and b"" not in folders:
        for folder, (_, label) in zip(folders, pairs):
            names[label] = os.fsdecode(folder)
    return names, labels.astype(np.int32)
