"""Images as the input of a network."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.array.backend import is_array, to_cpu
from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array, Module
from dbrdist.core.tape.checks import expected


def subtract_mean(image: Any, size: tuple[int, int] | None, mean: tuple[float, float, float]) -> Array:
    """An image as Chainer's networks take it: (3, H, W), blue, green and red, less their means.

    Args:
        image: a Pillow image, or an array of shape (H, W), (1, H, W), (3, H, W) or (H, W, 3) with values from 0 to 255.
        size: columns and rows to resize to; None leaves the image as it is.
        mean: of blue, green and red.
    """
    blue_green_red = _pixels(image, size)[:, :, ::-1].astype(np.float32)
    return _as_input(blue_green_red - np.array(mean, np.float32))


def standardize(image: Array, size: tuple[int, int] | None) -> Array:
    """An image as torchvision's networks take it: (3, H, W), red, green and blue from 0 to 1, standardized."""
    mean, deviation = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    return _as_input((_pixels(image, size).astype(np.float32) / 255 - mean) / deviation)


def _as_input(pixels: Array) -> Array:
    return pixels.transpose(2, 0, 1).astype(get_dtype())


def _pixels(image: Any, size: tuple[int, int] | None) -> Array:
    """(H, W, 3), uint8, red, green and blue."""
    if is_array(image):
        image = _as_rows(image)
        if image.ndim == 3 and image.shape[2] == 3 and (not size or tuple(size) == image.shape[1::-1]):
            return image
        image = _pillow().fromarray(image)
    image = image.convert("RGB")
    return np.asarray(image.resize(size) if size else image)


def _as_rows(image: Array) -> Array:
    """An array of Pillow's shapes: (H, W) or (H, W, C)."""
    a = np.asarray(to_cpu(image))
    if a.ndim == 3 and a.shape[0] in (1, 3):
        a = a.transpose(1, 2, 0)
    if a.ndim == 3 and a.shape[2] == 1:
        a = a[:, :, 0]
    if a.ndim not in (2, 3) or (a.ndim == 3 and a.shape[2] not in (3, 4)) or not a.size:
        raise expected("prepare", "image", "an image of shape (H, W), (3, H, W) or (H, W, 3)", image)
    return a.astype(np.uint8)


def _pillow() -> Module:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("resizing images and images with one channel need Pillow: pip install pillow") from error
    return Image
