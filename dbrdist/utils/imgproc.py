"""Crops of images for a prediction."""

from __future__ import annotations

import numpy as np

from dbrdist.core.array.types import Array


def oversample(images: Array, crop_dims: tuple[int, int]) -> Array:
    """Ten crops of each image: the four corners, the middle, and the mirror images of these five.

    Args:
        images: (N, C, H, W).
        crop_dims: rows and columns of a crop.

    Returns:
        (10 N, C, *crop_dims) in float32, the crops of an image one after the other.
    """
    x = np.asarray(images)
    height, width = crop_dims
    if x.ndim != 4 or x.shape[2] < height or x.shape[3] < width:
        raise ValueError(f"oversample: images: expected shape (N, C, >= {height}, >= {width}), got {x.shape}")
    rows, columns = x.shape[2] - height, x.shape[3] - width
    corners = [(i, j) for i in (0, rows) for j in (0, columns)]
    crops = [x[:, :, i : i + height, j : j + width] for i, j in (*corners, (rows // 2, columns // 2))]
    both = np.stack(crops + [crop[..., ::-1] for crop in crops], 1)
    return both.reshape(-1, *both.shape[2:]).astype(np.float32)
