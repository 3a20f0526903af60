"""MNIST, Fashion-MNIST and Kuzushiji-MNIST: 60,000 and 10,000 gray images of 28 by 28 pixels, in ten classes.

Y. LeCun, C. Cortes, C. Burges, http://yann.lecun.com/exdb/mnist/; H. Xiao, K. Rasul, R. Vollgraf (2017),
https://github.com/zalandoresearch/fashion-mnist; T. Clanuwat et al. (2018), http://codh.rois.ac.jp/kmnist/.
"""

from __future__ import annotations

import gzip
import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.datasets.public import download
from dbrdist.datasets.table.combine import TupleDataset

_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MAX_BYTES = 1 << 30  # what an idx file may unpack to: the largest of these takes 47 MB


def _sources(bases: tuple[str, ...], checksums: tuple[str, ...]) -> list[download.Source]:
    return [
        download.Source(name, tuple(base + name for base in bases), md5)
        for name, md5 in zip(_FILES, checksums, strict=True)
    ]


_MNIST = _sources(
    ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
_FASHION = _sources(
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
_KUZUSHIJI = _sources(
    ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
    (
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
)


def get_mnist(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, dtype: DTypeLike | None = None,
    label_dtype: DTypeLike = np.int32, rgb_format: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(train, test) of MNIST: handwritten digits.

    The files are taken from ``pfnet/chainer/mnist`` under :func:`~dbrdist.dataset.get_dataset_root`; what is missing is
    downloaded. Without a network an OSError says which files to put there.

    Args:
        withlabel: pairs (image, label) as a TupleDataset; False: the images alone, as an array.
        ndim: 1: images (784,), 2: (28, 28), 3: (1, 28, 28).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.
        label_dtype: type of the labels.
        rgb_format: with ``ndim`` 3, images (3, 28, 28) of three equal channels.

    Example:
        >>> train, test = datasets.get_mnist()  # doctest: +SKIP
    """
    return _get("MNIST", "pfnet/chainer/mnist", _MNIST, withlabel, ndim, scale, dtype, label_dtype, rgb_format)


def get_fashion_mnist(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, dtype: DTypeLike | None = None,
    label_dtype: DTypeLike = np.int32, rgb_format: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(train, test) of Fashion-MNIST: articles of clothing (Xiao et al. 2017, arXiv:1708.07747).

    The files are taken from ``pfnet/chainer/fashion-mnist`` under :func:`~dbrdist.dataset.get_dataset_root`, or
    downloaded.

    Args:
        withlabel: pairs (image, label) as a TupleDataset; False: the images alone, as an array.
        ndim: 1: images (784,), 2: (28, 28), 3: (1, 28, 28).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.
        label_dtype: type of the labels.
        rgb_format: with ``ndim`` 3, images (3, 28, 28) of three equal channels.

    Raises:
        OSError: the files are missing and cannot be downloaded; the message says where to put them.

    Example:
        >>> train, test = datasets.get_fashion_mnist(ndim=3)  # doctest: +SKIP
        >>> len(train), train[0][0].shape  # doctest: +SKIP
        (60000, (1, 28, 28))
    """
    return _get(
        "Fashion-MNIST", "pfnet/chainer/fashion-mnist", _FASHION, withlabel, ndim, scale, dtype, label_dtype, rgb_format
    )


def get_fashion_mnist_labels() -> list[str]:
    """What the ten labels of Fashion-MNIST mean.

    Example:
        >>> datasets.get_fashion_mnist_labels()[:2]
        ['T-shirt/top', 'Trouser']
    """
    return [
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ]  # fmt: skip


def get_kuzushiji_mnist(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, dtype: DTypeLike | None = None,
    label_dtype: DTypeLike = np.int32, rgb_format: bool = False,
) -> tuple[TupleDataset, TupleDataset]:  # fmt: skip
    """(train, test) of Kuzushiji-MNIST: cursive Japanese characters (Clanuwat et al. 2018, arXiv:1812.01718).

    The files are taken from ``pfnet/chainer/kuzushiji_mnist`` under :func:`~dbrdist.dataset.get_dataset_root`, or
    downloaded.

    Args:
        withlabel: pairs (image, label) as a TupleDataset; False: the images alone, as an array.
        ndim: 1: images (784,), 2: (28, 28), 3: (1, 28, 28).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.
        label_dtype: type of the labels.
        rgb_format: with ``ndim`` 3, images (3, 28, 28) of three equal channels.

    Raises:
        OSError: the files are missing and cannot be downloaded; the message says where to put them.

    Example:
        >>> train, test = datasets.get_kuzushiji_mnist()  # doctest: +SKIP
        >>> len(train), train[0][0].shape  # doctest: +SKIP
        (60000, (784,))
    """
    return _get(
        "Kuzushiji-MNIST", "pfnet/chainer/kuzushiji_mnist", _KUZUSHIJI, withlabel, ndim, scale, dtype, label_dtype,
        rgb_format,
    )  # fmt: skip


def get_kuzushiji_mnist_labels() -> list[tuple[str, str]]:
    """The characters of the ten labels of Kuzushiji-MNIST: pairs of the sound and the hiragana.

    Example:
        >>> len(datasets.get_kuzushiji_mnist_labels())
        10
    """
    return list(zip(("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"), "おきすつなはまやれを"))


def _get(
    dataset: str, folder: str, sources: list[download.Source], withlabel: bool, ndim: int, scale: float,
    dtype: DTypeLike, label_dtype: DTypeLike, rgb_format: bool,
) -> tuple[Any, Any]:  # fmt: skip
    if ndim not in (1, 2, 3):
        raise ValueError(f"expected ndim 1, 2 or 3 for {dataset}, got {ndim}")
    parts = []
    for name, files in (("train.npz", sources[:2]), ("test.npz", sources[2:])):
        raw = download.arrays_once(folder, name, ("x", "y"), lambda files=files: _read_pair(dataset, folder, files))
        images = raw["x"].reshape((-1, *((784,), (28, 28), (1, 28, 28))[ndim - 1]))
        if ndim == 3 and rgb_format:
            images = np.broadcast_to(images, (len(images), 3, 28, 28))
        parts.append(scaled(images, raw["y"], withlabel, scale, dtype, label_dtype))
    return parts[0], parts[1]


def scaled(
    images: Array, labels: Array, withlabel: bool, scale: float, dtype: DTypeLike, label_dtype: DTypeLike,
) -> Any:  # fmt: skip
    """Pixels of uint8 as numbers from 0 to ``scale``, with their labels or without."""
    pixels = images.astype(get_dtype(dtype), order="C")
    pixels *= scale / 255.0
    return TupleDataset(pixels, labels.astype(label_dtype)) if withlabel else pixels


def _read_pair(dataset: str, folder: str, files: list[download.Source]) -> dict[str, Array]:
    images, labels = download.find(dataset, folder, files)
    x, y = read_idx(images, (28, 28)), read_idx(labels, ())
    if len(x) != len(y):
        raise ValueError(
            f"expected as many labels as images, got {len(x)} images in {images}, {len(y)} labels in {labels}"
        )
    if len(y) and y.max() > 9:
        raise ValueError(f"expected labels from 0 to 9 in {labels}, got {y.max()}")
    return {"x": x.reshape(len(x), 784), "y": y}


def read_idx(path: str, shape: tuple[int, ...]) -> Array:
    """The bytes of an idx file, packed by gzip or plain: (N, *shape) of uint8.

    An idx file starts with two zeros, the type of its numbers (8: uint8), the number of axes, and their lengths as
    big-endian integers of 32 bits.
    """
    with open(path, "rb", opener=regular) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_packed else open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"expected an idx file packed by gzip, but {path} is damaged: {e}") from e
    ndim = len(shape) + 1
    if len(data) > _MAX_BYTES or data[:4] != bytes([0, 0, 8, ndim]):
        raise ValueError(f"expected an idx file of bytes with {ndim} axes, but {path} starts with {data[:4]!r}")
    lengths = tuple(np.frombuffer(data, ">u4", ndim, 4).tolist()) if len(data) >= 4 + 4 * ndim else (0,)
    if lengths[1:] != shape or len(data) != 4 + 4 * ndim + math.prod(lengths):
        raise ValueError(
            f"expected an idx file of {('N', *shape)} bytes, but {path} says {lengths} and has {len(data)} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(lengths)
