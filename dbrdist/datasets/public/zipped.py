"""Images in zip archives, which are read in place."""

from __future__ import annotations

import os
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import require_regular
from dbrdist.datasets.image import images
from dbrdist.datasets.image.folder import lines_of, path_and_label
from dbrdist.datasets.loading.base import DatasetMixin
from dbrdist.datasets.table.combine import ConcatenatedDataset
from dbrdist.errors import CorruptExampleError, DatasetError

_MAX_BYTES = 1 << 28  # what a file in an archive may claim, before memory is taken for it


class ZippedImageDataset(DatasetMixin):
    """The images of a zip archive, (C, H, W), in the order of the archive; it may contain only JPEG and PNG files.

    Any number of threads may read at a time; another process, spawned or forked, opens the archive for itself.

    Args:
        zipfilename: the archive.
        dtype: type of the pixels, 0 to 255; None is ``config.dtype``.

    Example:
        >>> datasets.ZippedImageDataset("images.zip")[0].shape  # doctest: +SKIP
    """

    def __init__(self, zipfilename: str | os.PathLike[str], dtype: DTypeLike | None = None) -> None:
        self._path = os.path.abspath(zipfilename)
        self._dtype = get_dtype(dtype)
        self._open()

    def _open(self) -> None:
        try:
            require_regular(self._path)
            self._archive = zipfile.ZipFile(self._path)
        except zipfile.BadZipFile as e:
            raise DatasetError(
                f"expected a zip archive, but {self._path} is damaged or another kind of file: {e}"
            ) from e
        self._files = [info for info in self._archive.infolist() if not info.is_dir()]
        self._process = os.getpid()

    @property
    def names(self) -> list[str]:
        """The names of the images in the archive."""
        return [info.filename for info in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def get_example(self, i: int | str) -> Array:
        """Image number ``i``, or the one with this name in the archive."""
        if self._process != os.getpid():  # forked: the place in an open file is shared with the parent
            self._open()
        info = self._named(i) if isinstance(i, str) else self._files[i]
        try:
            pixels = images.decode(self._read(info), keep_channels=True)
        except images.ImageDecodeError as e:
            raise CorruptExampleError(f"corrupt image file {info.filename} in {self._path}: {e}") from e
        return pixels.astype(self._dtype).transpose(2, 0, 1)

    def _named(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._archive.getinfo(name)
        except KeyError:
            raise KeyError(f"expected the name of a file in {self._path}, got {name!r}") from None

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        if info.file_size > _MAX_BYTES or info.flag_bits & 1:
            why = "it is encrypted" if info.flag_bits & 1 else f"it claims {info.file_size:,} bytes"
            raise CorruptExampleError(f"expected an image as {info.filename} in {self._path}, but {why}")
        try:
            return self._archive.read(info)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as e:
            raise CorruptExampleError(f"expected a readable file {info.filename} in {self._path}: {e}") from e

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_dtype": self._dtype, "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("names")
        self.__dict__.update(state)
        self._open()
        if self.names != names:
            raise DatasetError(f"{self._path} has changed since it was opened: it holds other files")


class MultiZippedImageDataset(ConcatenatedDataset):
    """The images of several zip archives, one archive after another; see :class:`ZippedImageDataset`.

    Args:
        zipfilenames: the paths of the archives.
        dtype: type of the pixels; None is ``config.dtype``.

    Example:
        >>> datasets.MultiZippedImageDataset(["a.zip", "b.zip"])[0].shape  # doctest: +SKIP
        (3, 32, 32)
    """

    def __init__(self, zipfilenames: Any, dtype: DTypeLike | None = None) -> None:
        super().__init__(*(ZippedImageDataset(name, dtype) for name in zipfilenames))


class LabeledZippedImageDataset(DatasetMixin):
    """Pairs (image, label): images of a zip archive in the order of a file that names and labels them.

    Args:
        zipfilename: the archive.
        labelfilename: a text file with a name in the archive, a blank and a label on each line.
        dtype: type of the pixels; None is ``config.dtype``.
        label_dtype: type of the labels.

    Example:
        >>> datasets.LabeledZippedImageDataset("images.zip", "labels.txt")[0]  # doctest: +SKIP
    """

    def __init__(
        self, zipfilename: str | os.PathLike[str], labelfilename: str | os.PathLike[str],
        dtype: DTypeLike | None = None, label_dtype: DTypeLike = np.int32,
    ) -> None:  # fmt: skip
        self._images = ZippedImageDataset(zipfilename, dtype)
        self._pairs = [path_and_label(line, n, labelfilename) for n, line in enumerate(lines_of(labelfilename), 1)]
        self._label_dtype = np.dtype(label_dtype)
        there = set(self._images.names)
        missing = next((name for name, _ in self._pairs if name not in there), None)
        if missing is not None:
            raise ValueError(f"expected in {labelfilename} the names of files in {zipfilename}, got {missing!r}")

    def __len__(self) -> int:
        return len(self._pairs)

    def get_example(self, i: int) -> tuple[Array, np.generic]:
        name, label = self._pairs[i]
        return self._images.get_example(name), self._label_dtype.type(label)
