"""Resizing with a filter against aliasing, as Pillow does it: by Pillow where it is installed, else by NumPy.

A pixel of the result is a weighted mean of the pixels around its place, with a triangle or a cubic whose support grows
with the factor of reduction (``Image.resize`` with BILINEAR or BICUBIC; torchvision calls it antialiasing). Both
directions are rounded to bytes, first along rows, then along columns.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np

from dbrdist.core.array.types import Array

_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}


@functools.cache
def _pillow() -> Any:
    """Pillow's module of images; None where it is not installed."""
    if importlib.util.find_spec("PIL") is None:
        return None
    from PIL import Image

    return Image


def resize(image: Array, height: int, width: int, method: str) -> Array:
    """``image`` (H, W, C) of uint8 as (height, width, C); ``method`` is 'bilinear' or 'bicubic'."""
    pillow = _pillow()
    if pillow is None or image.shape[2] not in (1, 3):
        return resize_numpy(image, height, width, method)
    filters = pillow.Resampling
    flag = filters.BILINEAR if method == "bilinear" else filters.BICUBIC
    source = image[:, :, 0] if image.shape[2] == 1 else image
    made = pillow.fromarray(np.ascontiguousarray(source)).resize((width, height), flag)
    return np.array(made).reshape(height, width, image.shape[2])


def resize_numpy(image: Array, height: int, width: int, method: str) -> Array:
    """The same without Pillow: two products with the weights of columns and of rows, at most 1 of 255 away.

    Some versions of Pillow take rows first where that is less work. Cubics overshoot, and what is cut off in between
    then differs: by more than 1 at edges from black to white.
    """
    h, w, c = image.shape
    if w != width:
        columns = np.ascontiguousarray(image.transpose(1, 0, 2), np.float32).reshape(w, h * c)
        image = _rounded(_weights(w, width, method) @ columns).reshape(width, h, c).transpose(1, 0, 2)
    if h != height:
        rows = np.ascontiguousarray(image, np.float32).reshape(h, width * c)
        image = _rounded(_weights(h, height, method) @ rows).reshape(height, width, c)
    return np.ascontiguousarray(image)


def _rounded(values: Array) -> Array:
    return np.clip(np.floor(values + np.float32(0.5)), 0, 255).astype(np.uint8)


@functools.lru_cache(maxsize=64)
def _weights(old: int, new: int, method: str) -> Any:
    """(new, old) weights of old pixels in each new one along an axis; each row sums to 1."""
    scale = old / new
    stretch = max(scale, 1.0)
    reach = _SUPPORT[method] * stretch
    centre = (np.arange(new)[:, None] + 0.5) * scale
    pixel = np.arange(old)[None, :]
    first, last = np.floor(centre - reach + 0.5), np.floor(centre + reach + 0.5)  # pixels that Pillow looks at
    x = np.abs((pixel + 0.5 - centre) / stretch)
    weights = np.maximum(1 - x, 0) if method == "bilinear" else _cubic(x)
    weights = np.where((pixel >= first) & (pixel < last), weights, 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _cubic(x: Array) -> Array:
    """Keys' cubic with a = -1/2 at distances x (1981, "Cubic convolution interpolation")."""
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))
