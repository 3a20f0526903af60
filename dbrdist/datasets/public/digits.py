"""The UCI optical digits: 1,797 handwritten digits of 8 by 8 pixels, shipped with the package.

E. Alpaydin and C. Kaynak (1998), "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0; see ``data/digits.txt``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.files.serializer import READING
from dbrdist.datasets.table.combine import TupleDataset

_FILE = Path(__file__).parent / "data" / "digits.npz"
_MAX_PIXEL = 16


def get_digits(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, dtype: DTypeLike | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """(train, test): 1,442 and 355 handwritten digits.

    The split is fixed and stratified: within each class, in the order of the file, every fifth image is a test image.
    Both parts hold digits of the same 13 writers.

    Args:
        withlabel: pairs (image, label) with int32 labels 0 to 9; False: the images alone, as an array.
        ndim: 1: images (64,), 2: (8, 8), 3: (1, 8, 8).
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``.

    Example:
        >>> train, test = datasets.get_digits()
        >>> len(train), len(test), train[0][0].shape
        (1442, 355, (64,))
    """
    if ndim not in (1, 2, 3):
        raise ValueError(f"expected ndim 1, 2 or 3, got {ndim}")
    with READING, np.load(_FILE) as f:
        images, labels = f["images"], f["labels"].astype(np.int32)
    x = (images * (scale / _MAX_PIXEL)).astype(get_dtype(dtype))
    x = x.reshape(len(x), *((64,), (8, 8), (1, 8, 8))[ndim - 1])
    is_test = is_test_image(labels)
    parts = [(x[rows], labels[rows]) for rows in (~is_test, is_test)]
    train, test = [TupleDataset(*part) if withlabel else part[0] for part in parts]
    return train, test


def is_test_image(labels: Array) -> Array:
    """True for every fifth example within each class."""
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return is_test
