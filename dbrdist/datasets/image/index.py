"""Which images a dataset has: an index of their places, labels and names, that all processes of a host share.

An index lists images in class folders (a file each), or in tar shards (offset and size of each). It is one block of
bytes: a file that is mapped, or memory without a name that goes when the last process closes it. The processes of a
host map the same pages, so that 1.28 million images cost some 60 MB once, whatever the number of ranks and workers.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import write_atomically
from dbrdist.datasets.image.index_format import (
    AGAIN,
    ALIGNMENT,
    FILE_NAME,
    IN_FOLDERS,
    IN_SHARDS,
    MAX_CLASSES,
    Contents,
    Shard,
    are_names,
    read_header,
    same_time,
)
from dbrdist.datasets.image.scan import class_folders, scan
from dbrdist.datasets.loading.files import Descriptor, OpenFiles, as_binary, read_file
from dbrdist.errors import CorruptExampleError, DatasetError


class ImageIndex:
    """The images of a dataset: image ``i`` has a label, a name, and a place to read it from.

    Make one with :func:`dbrdist.datasets.open_images`. A pickled index is a reference: the process that unpickles it
    maps the same memory or file, or scans the images again where it cannot.

    Args:
        block: the bytes of the index, an array of uint8.
        origin: where the bytes come from, for messages.
        root: the folder of the class folders or of the shards.
        path: the file of the index; None where it is in memory alone.
        descriptor: the shared memory that holds it; None where there is none.
        check: look at every entry at once, not only at those that are read.

    Attributes:
        root: the folder of the class folders or of the shards.
        classes: the names of the classes; labels are numbered in this order.
        labels: int32, shape (images,), read-only.
        shards: the tar files; empty where each image is a file.

    Raises:
        DatasetError: the index is damaged.

    Example:
        >>> index = datasets.open_images("images/train")  # doctest: +SKIP
        >>> index.classes, len(index.labels)  # doctest: +SKIP
        (('cat', 'dog'), 200)
    """

    def __init__(
        self,
        block: Array,
        origin: str,
        root: str,
        path: str | None = None,
        descriptor: Descriptor | None = None,
        check: bool = False,
    ) -> None:
        self._block = block
        self._path = path
        self._descriptor = descriptor
        about, start = read_header(block, origin, check)
        try:
            self._take(about, start, root)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise DatasetError(f"{origin}: the index is damaged: {e}; {AGAIN}") from e
        if check:
            self._check(origin)
        self._files = OpenFiles()

    def _take(self, about: dict[str, Any], position: int, root: str) -> None:
        self.root = os.fsdecode(bytes.fromhex(about["root"])) or root
        self._identity: int = about["identity"]
        self.classes: list[str] = about["classes"]
        self.folder_times: list[int] = about["folder_times"]
        self.shards = [Shard(*s) for s in about["shards"]]
        self._shard_ends = np.array([s.end for s in self.shards], np.int64)
        for name, dtype in IN_SHARDS if self.shards else IN_FOLDERS:
            position += -position % ALIGNMENT
            column = np.frombuffer(self._block, dtype, about["num_images"], position)
            setattr(self, f"_{name}", column)
            position += column.nbytes
        self._names = memoryview(self._block)[position + -position % ALIGNMENT :]

    _labels: Array
    _name_ends: Array
    _offsets: Array
    _sizes: Array

    @property
    def labels(self) -> Array:
        return self._labels

    @property
    def sizes(self) -> Array | None:
        """The bytes of each image; None for class folders, whose files were not asked for their sizes."""
        return self._sizes if self.shards else None

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, i: int) -> str:
        """The file name of image ``i``, or that of the member of a shard."""
        start = int(self._name_ends[i - 1]) if i else 0
        return os.fsdecode(bytes(self._names[start : int(self._name_ends[i])]))

    def path(self, i: int) -> str:
        """Where image ``i`` is: its file, or its shard and the member's name."""
        i = range(len(self))[i]
        if self.shards:
            return f"{self.root}/{self.shards[self._shard_of(i)].name}:{self.name(i)}"
        return f"{self.root}/{self.classes[self._labels[i]]}/{self.name(i)}"

    def _shard_of(self, i: int) -> int:
        return int(np.searchsorted(self._shard_ends, i, side="right"))

    def read(self, i: int) -> bytes:
        """The bytes of image ``i``. Raises CorruptExampleError where they cannot be read."""
        try:
            if not self.shards:
                return read_file(self.path(i))
            i = range(len(self))[i]
            shard = self.shards[self._shard_of(i)]
            return self._files.read(f"{self.root}/{shard.name}", int(self._offsets[i]), int(self._sizes[i]))
        except OSError as e:
            raise CorruptExampleError(f"expected a readable image file: {self.path(i)}: {e.strerror or e}") from e

    def num_bytes(self) -> int | None:
        """The bytes of all images; None for class folders, whose files were not asked for their sizes."""
        return int(self._sizes.sum(dtype=np.int64)) if self.shards else None

    # ---- checks ----

    def _check(self, origin: str) -> None:
        wrong = next(self._wrong(), None)
        if wrong is not None:
            raise DatasetError(f"{origin}: the index is damaged: {wrong}; {AGAIN}")

    def _wrong(self) -> Iterator[str]:
        """What in this index cannot be, as sentences."""
        ends, labels = self._name_ends, self._labels
        if not len(self):
            yield "it lists no images"
        if not (are_names(self.classes) if not self.shards else _are_texts(self.classes)):
            yield "the classes are not a list of names"
        if not 0 < len(self.classes) <= MAX_CLASSES:
            yield f"it has {len(self.classes):,} classes, not 1 to {MAX_CLASSES:,}"
        if int(labels.min()) < 0 or int(labels.max()) >= len(self.classes):
            yield f"labels go from {labels.min()} to {labels.max()} with {len(self.classes)} classes"
        if np.any(ends[1:] < ends[:-1]) or int(ends[-1]) != len(self._names):
            yield "the names do not end where they should"
        if _has(self._names, b"\0") or (not self.shards and _has(self._names, b"/")):
            yield "a file's name has '/' or NUL in it"
        if not self.shards and len(self.folder_times) != len(self.classes):
            yield "there is not one time for each class folder"
        if self.shards:
            yield from self._wrong_in_shards()

    def _wrong_in_shards(self) -> Iterator[str]:
        starts = np.concatenate([[0], self._shard_ends[:-1]])
        if not are_names([s.name for s in self.shards]):
            yield "the shards' names are not names of files without '/'"
        elif not all(type(n) is int and n >= 0 for s in self.shards for n in s[1:]):
            yield "sizes and times of shards are not whole numbers"
        elif np.any(self._shard_ends < starts) or self._shard_ends[-1] != len(self):
            yield "the shards do not have as many images as there are"
        else:
            limits = np.repeat(np.array([s.size for s in self.shards], np.uint64), self._shard_ends - starts)
            if np.any(self._offsets > limits) or np.any(self._sizes > limits - self._offsets):
                yield "an image lies beyond the end of its shard"

    def changed(self) -> str | None:
        """What has changed since the images were indexed, as a sentence; None where nothing has."""
        for shard in self.shards:
            path = os.path.join(self.root, shard.name)
            try:
                now = os.stat(path)
            except OSError as e:
                return f"the shard {path} cannot be read: {e.strerror}"
            if now.st_size != shard.size:
                return f"the shard {path} has {now.st_size:,} bytes and had {shard.size:,} when it was indexed"
            if not same_time(now.st_mtime_ns, shard.mtime_ns):
                return f"the shard {path} was written after it was indexed"
        return None if self.shards else self._changed_folder()

    def _changed_folder(self) -> str | None:
        for name, then in zip(self.classes, self.folder_times):
            path = os.path.join(self.root, name)
            try:
                now = os.stat(path).st_mtime_ns
            except OSError as e:
                return f"the class folder {path} cannot be read: {e.strerror}"
            if not same_time(now, then):
                return f"files came or went in the class folder {path} after it was indexed"
        found = class_folders(self.root)
        if found != self.classes:
            return f"{self.root} has other class folders than when it was indexed"
        return None

    # ---- other processes ----

    def __reduce__(self) -> Any:
        where = self._path
        if self._descriptor is not None:
            where = f"/proc/{os.getpid()}/fd/{self._descriptor.number}"
        return _reopened, (where, self._path is not None, self.root, self._identity)

    def block(self) -> Array:
        """The bytes of this index, for another host; see :func:`in_memory`."""
        return self._block


def _has(text: memoryview, byte: bytes, step: int = 1 << 20) -> bool:
    """Whether ``byte`` is in ``text``, which is looked through in pieces, for it may be large."""
    return any(byte in bytes(text[k : k + step]) for k in range(0, len(text), step))


def _are_texts(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(n, str) for n in names)


# ---- where an index lies --------------------------------------------------------------------------------------------


def _mapped(descriptor: int) -> Array:
    return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


def open_images(root: str | os.PathLike[str]) -> ImageIndex:
    """The index of the images under ``root``, as :class:`ImageFolder` takes it.

    ``root`` is a folder of class folders or of tar shards: the index in it (``dbrdist.index``) is used, or else the
    images are scanned. Or it is the file of an index that is elsewhere.

    Args:
        root: the folder, or the file of an index.

    Raises:
        FileNotFoundError: there is nothing at ``root``.
        ValueError: there are no images.
        DatasetError: a shard or the index is damaged, or the images have changed since it was made.

    Example:
        >>> datasets.open_images("images/train").classes  # doctest: +SKIP
        ('cat', 'dog')
    """
    path = os.path.join(root, FILE_NAME) if os.path.isdir(root) else os.fspath(root)
    if not os.path.isfile(path):
        return in_memory(scan(root))
    index = read_index(path)
    changed = index.changed()
    if changed is not None:
        raise DatasetError(f"{path}: the index is out of date: {changed}; {AGAIN}, or delete it")
    return index


def read_index(path: str | os.PathLike[str]) -> ImageIndex:
    """The index in a file, checked. Raises DatasetError where it is damaged, old, or no index."""
    with open(path, "rb", opener=regular) as f:
        if os.fstat(f.fileno()).st_size == 0:
            raise DatasetError(f"{path}: expected an index of images, got an empty file; {AGAIN}")
        return ImageIndex(
            _mapped(f.fileno()), str(path), os.path.dirname(path) or ".", os.path.abspath(path), check=True
        )


def write_index(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write an index to a file. It names its root only where that is not the folder in which the file lies."""
    inside = os.path.realpath(os.path.dirname(path) or ".") == os.path.realpath(contents.root)
    placed = contents._replace(root="" if inside else os.path.abspath(contents.root))
    write_atomically(path, placed.write)


def in_memory(contents: Contents | Array, root: str = "") -> ImageIndex:
    """An index in memory that other processes of this host can map: its contents, or the block of another host.

    ``root`` is where the images are; contents name it themselves.
    """
    try:
        descriptor = Descriptor(os.memfd_create("dbrdist-index"))
    except (AttributeError, OSError):  # outside of Linux: this process's own memory
        return _in_own_memory(contents, root)
    with as_binary(descriptor) as f:
        _write(contents, f)
    return ImageIndex(_mapped(descriptor.number), "the list of images", root, descriptor=descriptor)


def _in_own_memory(contents: Contents | Array, root: str) -> ImageIndex:
    f = io.BytesIO()
    _write(contents, f)
    return ImageIndex(np.frombuffer(f.getvalue(), np.uint8), "the list of images", root)


def _write(contents: Contents | Array, file: BinaryIO) -> None:
    if isinstance(contents, Contents):
        contents.write(file)
    else:
        file.write(memoryview(contents))


def _reopened(where: str | None, is_file: bool, root: str, identity: int) -> ImageIndex:
    """An index that another process has: its memory or file, or the images scanned again where that is not here."""
    if where is not None:
        with contextlib.suppress(OSError, ValueError, DatasetError):
            descriptor = Descriptor(os.open(where, os.O_RDONLY | os.O_CLOEXEC))
            path, kept = (where, None) if is_file else (None, descriptor)
            index = ImageIndex(_mapped(descriptor.number), where, root, path, kept)
            if index._identity == identity:
                return index
    index = open_images(root)
    if index._identity != identity:
        raise DatasetError(f"the images in {root} differ from those that the sending process saw")
    return index
