"""Smaller copies of a dataset's images as tar shards, and a look at all images: what ``dbrdist-data`` does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from dbrdist.core.files.serializer import write_atomically
from dbrdist.datasets.image import images
from dbrdist.datasets.image.index import ImageIndex, write_index
from dbrdist.datasets.image.index_format import FILE_NAME
from dbrdist.datasets.image.scan import UNFINISHED, scan_any
from dbrdist.datasets.image.tar import TarWriter
from dbrdist.errors import CorruptExampleError

_NUM_AHEAD = 4  # images in the making per thread
Progress = Callable[[int, int], None]


class Found(NamedTuple):
    """What came of a pass over all images: how many are good, and for each other its place and what is wrong."""

    num_good: int
    bad: list[str]


def check_images(index: ImageIndex, num_threads: int = 1, progress: Progress = lambda done, total: None) -> Found:
    """Decode all images. ``progress(done, total)`` is called after each."""
    found = Found(0, [])
    for i, (_, wrong) in enumerate(_ordered(lambda i: _attempt(index, i, images.decode), len(index), num_threads)):
        found = _counted(found, wrong)
        progress(i + 1, len(index))
    return found


def prepare_shards(
    index: ImageIndex,
    folder: str | os.PathLike[str],
    *,
    size: int = 256,
    quality: int = 90,
    shard_bytes: int = 256 << 20,
    num_threads: int = 1,
    progress: Progress = lambda done, total: None,
) -> Found:
    """Write all images to tar shards with an index, those larger than ``size`` resized and as JPEG.

    Images keep their order and labels. An image whose shorter side has more than ``size`` pixels is brought to that by
    means over areas; any other file is copied as it is. What cannot be decoded is left out.

    Args:
        index: the images, of :func:`open_images`.
        folder: where the shards go: an empty folder, or none yet.
        size: the new shorter side in pixels.
        quality: of the JPEGs, 1 to 100.
        shard_bytes: a shard ends with the image that brings it to this size.
        num_threads: threads that decode, resize and encode.
        progress: called with (done, total) after each image.
    """
    _check_numbers(size, quality, shard_bytes)
    with _begun(os.fspath(folder)) as mark:
        writer = _Shards(index, os.fspath(folder), shard_bytes)
        smaller = _ordered(
            lambda i: _attempt(index, i, lambda data: shrunk(data, size, quality)), len(index), num_threads
        )
        samples = _reported(enumerate(smaller), len(index), progress)
        writer.write(samples)
        if writer.found.num_good:
            contents = scan_any(os.fspath(folder))
            write_index(os.path.join(folder, FILE_NAME), contents._replace(classes=index.classes))
        os.remove(mark)
    return writer.found


_OURS = re.compile(rf"images-\d{{6,}}\.tar(\.tmp-.*)?|{re.escape(FILE_NAME)}\.tmp-.*")


@contextlib.contextmanager
def _begun(folder: str) -> Iterator[str]:
    """Make the folder, or empty it of what an interrupted start has left; the path of the mark that it is unfinished.

    With the mark nobody takes the shards that are there for all. A lock on it keeps other starts away; on file systems
    without locks nobody is kept out.
    """
    os.makedirs(folder, exist_ok=True)
    mark = os.path.join(folder, UNFINISHED)
    is_new = not os.path.exists(mark)
    with open(mark, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = "another dbrdist-data prepare writes to it; wait until it ends, or take another folder"
            raise FileExistsError(f"{folder}: {words}") from None
        except OSError:
            pass
        names = [name for name in os.listdir(folder) if name != UNFINISHED]
        if names and (is_new or not all(map(_OURS.fullmatch, names))):
            if is_new:
                os.remove(mark)
            raise FileExistsError(
                f"expected an empty folder for the shards, but {folder} has files in it; empty it first"
            )
        for name in names:
            os.remove(os.path.join(folder, name))
        yield mark


def _check_numbers(size: int, quality: int, shard_bytes: int) -> None:
    for name, number, low, high in (
        ("size", size, 1, 1 << 16),
        ("quality", quality, 1, 100),
        ("shard_bytes", shard_bytes, 1, 1 << 50),
    ):
        if not low <= number <= high:
            raise ValueError(f"expected {name} from {low} to {high:,}, got {number}")


def shrunk(data: bytes, size: int, quality: int) -> bytes:
    """A JPEG or PNG file with a shorter side of at most ``size``: the same bytes where it has that already.

    And where the longer side would have more pixels than a JPEG can have.
    """
    image = images.decode(data)
    h, w = image.shape[:2]
    short = min(h, w)
    height, width = round(h * size / short), round(w * size / short)
    if short <= size or max(height, width) > images.MAX_JPEG_SIDE:
        return data
    return images.encode_jpeg(images.resize(image, height, width, "area"), quality)


def _attempt(index: ImageIndex, i: int, function: Callable[[bytes], Any]) -> tuple[Any, str | None]:
    """What ``function`` makes of image ``i``, or what is wrong with the image."""
    try:
        return function(index.read(i)), None
    except images.ImageDecodeError as e:
        return None, f"{index.path(i)}: {e}"
    except CorruptExampleError as e:
        return None, str(e)


def _counted(found: Found, wrong: str | None) -> Found:
    if wrong is None:
        return found._replace(num_good=found.num_good + 1)
    found.bad.append(wrong)
    return found


def _reported(things: Iterable[Any], total: int, progress: Progress) -> Iterator[Any]:
    for done, thing in enumerate(things, 1):
        yield thing
        progress(done, total)


def _ordered(function: Callable[[int], Any], n: int, num_threads: int) -> Iterator[Any]:
    """``function`` of 0 to n - 1 in order, computed by threads that run ahead a little."""
    with ThreadPoolExecutor(num_threads) as pool:
        ahead: deque[Future[Any]] = deque()
        try:
            for i in range(n):
                ahead.append(pool.submit(function, i))
                if len(ahead) > _NUM_AHEAD * num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class _Shards:
    """Writes samples into shards of about one size."""

    def __init__(self, index: ImageIndex, folder: str, shard_bytes: int) -> None:
        self.found = Found(0, [])
        self._index = index
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._keys: set[bytes] = set()  # of the class in hand
        self._label = -1

    def write(self, samples: Iterator[tuple[int, tuple[bytes, str | None]]]) -> None:
        """Write all of ``(i, (image file, None or what is wrong))``."""
        first = self._next_good(samples)
        number = 0
        while first is not None:
            path = os.path.join(self._folder, f"images-{number:06d}.tar")
            rest: list[Any] = []

            def fill(file: BinaryIO, first: Any = first, rest: list[Any] = rest) -> None:
                rest.append(self._fill(TarWriter(file), first, samples))

            write_atomically(path, fill)
            first, number = rest[0], number + 1

    def _next_good(self, samples: Iterator[tuple[int, tuple[bytes, str | None]]]) -> tuple[int, bytes] | None:
        for i, (data, wrong) in samples:
            self.found = _counted(self.found, wrong)
            if wrong is None:
                return i, data
        return None

    def _fill(self, shard: TarWriter, sample: tuple[int, bytes] | None, samples: Any) -> tuple[int, bytes] | None:
        """Write one shard; the first sample of the next one, if there is any."""
        while sample is not None and shard.position < self._shard_bytes:
            i, data = sample
            key = self._key(i)
            shard.add(key + (b".png" if data.startswith(images.PNG) else b".jpg"), data)
            shard.add(key + b".cls", b"%d" % self._index.labels[i])
            sample = self._next_good(samples)
        shard.close()
        return sample

    def _key(self, i: int) -> bytes:
        """``CLASS/NAME``, another one for each image of a class; a key has no dot behind its last '/'."""
        label = int(self._index.labels[i])
        if label != self._label:
            self._label, self._keys = label, set()
        stem = os.path.splitext(os.path.basename(self._index.name(i)))[0].replace(".", "-")
        key = os.fsencode(f"{self._index.classes[label]}/{stem}")
        if key in self._keys:
            key += b"-%d" % i
        self._keys.add(key)
        return key
