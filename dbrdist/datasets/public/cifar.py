"""CIFAR-10 and CIFAR-100: 50,000 and 10,000 photographs of 32 by 32 pixels, in 10 or 100 classes.

A. Krizhevsky (2009), "Learning Multiple Layers of Features from Tiny Images", https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import require_regular
from dbrdist.datasets.loading.files import read_file
from dbrdist.datasets.public import download
from dbrdist.datasets.public.mnist import scaled
from dbrdist.datasets.public.unpickle import ARRAYS, DataUnpickler, reading

if TYPE_CHECKING:
    from dbrdist.datasets.table.combine import TupleDataset

_FOLDER = "pfnet/chainer/cifar"
_MAX_BYTES = 1 << 29  # of one batch of images: the largest has 155 MB
_PIXELS = 3 * 32 * 32


def get_cifar10(
    withlabel: bool = True, ndim: int = 3, scale: float = 1.0, dtype: DTypeLike | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(train, test) of CIFAR-10.

    ``cifar-10-python.tar.gz``, or the folder ``cifar-10-batches-py`` that it holds, is taken from
    ``pfnet/chainer/cifar`` under :func:`~dbrdist.dataset.get_dataset_root`; the archive is downloaded if both are
    missing. Its pickles are read without running what they say.

    Args:
        withlabel: pairs (image, label) as a TupleDataset, labels int32; False: the images alone, as an array.
        ndim: 1: images (3072,), 3: (3, 32, 32).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.

    Example:
        >>> train, test = datasets.get_cifar10()  # doctest: +SKIP
    """
    batches = [f"cifar-10-batches-py/data_batch_{k}" for k in range(1, 6)]
    source = _source("cifar-10", "c58f30108f718f92721af3b95e74349a")
    return _get(
        "CIFAR-10", source, batches, "cifar-10-batches-py/test_batch", "labels", 10, withlabel, ndim, scale, dtype
    )


def get_cifar100(
    withlabel: bool = True, ndim: int = 3, scale: float = 1.0, dtype: DTypeLike | None = None,
) -> tuple[TupleDataset, TupleDataset]:  # fmt: skip
    """(train, test) of CIFAR-100 with its 100 fine classes (Krizhevsky 2009).

    ``cifar-100-python.tar.gz`` or the folder ``cifar-100-python`` is taken from ``pfnet/chainer/cifar`` under
    :func:`~dbrdist.dataset.get_dataset_root`, or downloaded.

    Args:
        withlabel: pairs (image, label) as a TupleDataset, labels int32; False: the images alone, as an array.
        ndim: 1: images (3072,), 3: (3, 32, 32).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.

    Raises:
        OSError: the files are missing and cannot be downloaded; the message says where to put them.

    Example:
        >>> train, test = datasets.get_cifar100()  # doctest: +SKIP
        >>> len(train), train[0][0].shape  # doctest: +SKIP
        (50000, (3, 32, 32))
    """
    source = _source("cifar-100", "eb9058c3a382ffc7106e4002c42a8d85")
    files = ["cifar-100-python/train"], "cifar-100-python/test"
    return _get("CIFAR-100", source, *files, "fine_labels", 100, withlabel, ndim, scale, dtype)


def _source(name: str, md5: str) -> download.Source:
    archive = f"{name}-python.tar.gz"
    return download.Source(archive, (f"https://www.cs.toronto.edu/~kriz/{archive}",), md5)


def _get(
    dataset: str, source: download.Source, train: list[str], test: str, key: str, num_classes: int, withlabel: bool,
    ndim: int, scale: float, dtype: DTypeLike,
) -> tuple[Any, Any]:  # fmt: skip
    if ndim not in (1, 3):
        raise ValueError(f"expected ndim 1 or 3 for {dataset}, got {ndim}")

    def make() -> dict[str, Array]:
        names = [*train, test]
        files = _files(dataset, source, names)
        parts = [_batch(name, files[name], key, num_classes) for name in names]
        (train_x, train_y), (test_x, test_y) = (map(np.concatenate, zip(*parts[:-1]))), parts[-1]
        return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}

    keys = ("train_x", "train_y", "test_x", "test_y")
    raw = download.arrays_once(_FOLDER, f"{dataset.lower()}.npz", keys, make)
    shape = (-1, _PIXELS) if ndim == 1 else (-1, 3, 32, 32)
    first, second = (
        scaled(raw[f"{part}_x"].reshape(shape), raw[f"{part}_y"], withlabel, scale, dtype, np.int32)
        for part in ("train", "test")
    )
    return first, second


def _files(dataset: str, source: download.Source, names: list[str]) -> dict[str, bytes]:
    """The files of these names: from the folder that the archive was unpacked to, or from the archive."""
    here = download.get_dataset_directory(_FOLDER, create_directory=False)
    if os.path.isfile(os.path.join(here, names[0])):
        return {name: read_file(os.path.join(here, name)) for name in names}
    (archive,) = download.find(dataset, _FOLDER, [source])
    found = _members(archive, set(names))
    for name in names:
        if name not in found:
            raise ValueError(f"expected the file {name} in {archive}, which lacks it")
    return found


def _members(archive: str, names: set[str]) -> dict[str, bytes]:
    """Files of a packed archive, in one pass; nothing is unpacked to disk."""
    found = {}
    try:
        require_regular(archive)
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.name in names and member.isreg() else None
                if file is not None:
                    if member.size > _MAX_BYTES:
                        raise ValueError(f"expected batches of images, but {member.name} claims {member.size:,} bytes")
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as e:
        raise ValueError(f"expected a .tar.gz file, but {archive} is damaged: {e}") from e
    return found


def _batch(name: str, data: bytes, key: str, num_classes: int) -> tuple[Array, Array]:
    """Images (N, 3072) and labels (N,) of uint8 from one of the pickles."""
    found = reading(f"in {name}", DataUnpickler(io.BytesIO(data), ARRAYS, encoding="latin-1").load)
    if isinstance(found, dict):  # Python 3 may have written keys of bytes
        found = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in found.items()}
    if not isinstance(found, dict) or not {"data", key} <= set(found):
        raise ValueError(f"expected a dictionary with 'data' and {key!r} as {name}, got {_seen(found)}")
    images, labels = found["data"], np.asarray(found[key])
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != (len(labels), _PIXELS):
        got = f"{images.dtype} of {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"expected {len(labels)} images of {_PIXELS} bytes in {name}, one for each label, got {got}")
    if labels.dtype.kind not in "iu" or (len(labels) and not 0 <= labels.min() <= labels.max() < num_classes):
        raise ValueError(f"expected labels from 0 to {num_classes - 1} in {name}")
    return images, labels.astype(np.uint8)


def _seen(found: Any) -> str:
    return f"one with {sorted(map(str, found))}" if isinstance(found, dict) else f"a {type(found).__name__}"
