"""SVHN: house numbers of Street View, 73,257 and 26,032 digits of 32 by 32 pixels in colour, and 531,131 easier ones.

Y. Netzer et al. (2011), "Reading Digits in Natural Images with Unsupervised Feature Learning",
http://ufldl.stanford.edu/housenumbers/.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.scipy_parts import read_mat
from dbrdist.core.array.types import Array
from dbrdist.datasets.public import download
from dbrdist.datasets.public.mnist import scaled

_FOLDER = "pfnet/chainer/svhn"
_CHECKSUMS = {
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test": "eb5a983be6a315427106f1b164d9cef3",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
}


def get_svhn(
    withlabel: bool = True,
    scale: float = 1.0,
    dtype: DTypeLike | None = None,
    label_dtype: DTypeLike = np.int32,
    add_extra: bool = False,
) -> tuple[Any, ...]:
    """(train, test) of SVHN, or (train, test, extra): images (3, 32, 32) of single digits.

    ``train_32x32.mat`` and so on are taken from ``pfnet/chainer/svhn`` under
    :func:`~dbrdist.dataset.get_dataset_root`, or downloaded. They are read by SciPy, once: what was read is kept beside
    them.

    Args:
        withlabel: pairs (image, label) as a TupleDataset; False: the images alone, as an array.
        scale: pixels go from 0 to ``scale``.
        dtype: type of the pixels; None is ``config.dtype``. In float32 the extra images take 6.5 GB.
        label_dtype: type of the labels, which are the digits 0 to 9.
        add_extra: also the extra training images.

    Example:
        >>> train, test = datasets.get_svhn()  # doctest: +SKIP
    """
    parts = []
    for part in ("train", "test", "extra") if add_extra else ("train", "test"):
        raw = download.arrays_once(_FOLDER, f"{part}.npz", ("x", "y"), lambda part=part: _read_part(part))
        labels = raw["y"].reshape(-1) % 10  # the files call the digit 0 by 10
        parts.append(scaled(raw["x"].transpose(3, 2, 0, 1), labels, withlabel, scale, dtype, label_dtype))
    return tuple(parts)


def _read_part(part: str) -> dict[str, Array]:
    name = f"{part}_32x32.mat"
    source = download.Source(name, (f"http://ufldl.stanford.edu/housenumbers/{name}",), _CHECKSUMS[part])
    (path,) = download.find("SVHN", _FOLDER, [source])
    raw = read_mat(path)
    if not {"X", "y"} <= set(raw):
        raise ValueError(f"expected the arrays X and y in {path}, which has {sorted(raw)}")
    x, y = raw["X"], raw["y"]
    if x.dtype != np.uint8 or not y.size or x.shape != (32, 32, 3, y.size) or y.min() < 1 or y.max() > 10:
        labels = f"{y.size} labels" + (f" from {y.min()} to {y.max()}" if y.size else "")
        raise ValueError(
            f"expected bytes (32, 32, 3, N) and N labels from 1 to 10 in {path}, "
            f"got {x.dtype} of {x.shape} and {labels}"
        )
    return {"x": x, "y": y.astype(np.uint8)}
