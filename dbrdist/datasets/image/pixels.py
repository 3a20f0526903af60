"""Changes to the pixels of one image (H, W, C) of uint8: colours, contrast, sharpness, affine maps.

They are those of Pillow (``PIL.ImageEnhance``, ``PIL.ImageOps``, ``Image.transform``), from which policies of
augmentation are made, and give its numbers; Pillow itself is not needed. Results are new arrays.
"""

from __future__ import annotations

import math

import numpy as np

from dbrdist.core.array.types import Array, PerAxis
from dbrdist.core.tape.checks import expected
from dbrdist.datasets.image.images import Image

_VALUES = np.arange(256, dtype=np.float32)
_GRAY = np.array([19595, 38470, 7471], np.int32)  # of 65536: ITU-R 601-2, as Pillow rounds it


def by_table(image: Image, table: Array) -> Image:
    """``table[value]`` for each value of the image; (256,) of uint8, or (256, C) with a table for each channel."""
    if table.ndim == 1:
        return table[image]
    return np.stack([table[:, c][image[:, :, c]] for c in range(image.shape[2])], axis=2)


def _clipped(values: Array) -> Array:
    """Floating numbers as uint8, cut towards zero as Pillow cuts them."""
    return np.clip(values, 0, 255).astype(np.uint8)


def blend(first: Array | int, second: Array, factor: float) -> Array:
    """``first + factor (second - first)``, cut to uint8; beyond 1 it leads away from ``first``."""
    a = np.asarray(first, np.float32)
    return _clipped(a + np.float32(factor) * (np.asarray(second, np.float32) - a))


def gray(image: Image) -> Array:
    """The luminance of an RGB image, (H, W) of uint8; a grey image's own values."""
    if image.shape[2] != 3:
        return image[:, :, 0]
    return ((image.astype(np.int32) @ _GRAY + 0x8000) >> 16).astype(np.uint8)


def brightness(image: Image, factor: float) -> Image:
    """Times ``factor``: black at 0, the image itself at 1."""
    return by_table(image, blend(0, _VALUES, factor))


def contrast(image: Image, factor: float) -> Image:
    """Away from the mean luminance by ``factor``: one grey at 0, the image itself at 1."""
    mean = int(gray(image).mean(dtype=np.float64) + 0.5)
    return by_table(image, blend(mean, _VALUES, factor))


def saturation(image: Image, factor: float) -> Image:
    """Away from the luminance of each pixel by ``factor``: grey at 0, the image itself at 1."""
    return blend(gray(_rgb(image, "saturation"))[:, :, None], image, factor)


_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
_TO_RGB = np.array([[1.0, 0.956, 0.621], [1.0, -0.272, -0.647], [1.0, -1.107, 1.705]])


def hue(image: Image, turn: float) -> Image:
    """Colours turned by ``turn`` of a full circle about the grey axis of YIQ; the luminance stays.

    With the matrices of MXNet's ``HueJitterAug``.
    """
    u, w = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
    m = _TO_RGB @ np.array([[1, 0, 0], [0, u, -w], [0, w, u]]) @ _TO_YIQ
    turned = _rgb(image, "hue").reshape(-1, 3).astype(np.float32) @ m.T.astype(np.float32)
    return np.clip(np.rint(turned), 0, 255).astype(np.uint8).reshape(image.shape)


def _rgb(image: Image, function: str) -> Image:
    if image.shape[2] != 3:
        raise expected(function, "image", "three channels, (H, W, 3)", image)
    return image


def sharpness(image: Image, factor: float) -> Image:
    """Away from a smoothed copy by ``factor``: smoothed at 0, the image itself at 1; the border stays."""
    smooth = image.copy()
    h, w = image.shape[:2]
    wide = image.astype(np.uint16)
    total = 4 * wide[1:-1, 1:-1]  # of two rows or columns none lies within
    for y in range(3):
        for x in range(3):
            total += wide[y : h - 2 + y, x : w - 2 + x]
    smooth[1:-1, 1:-1] = (2 * total + 13) // 26  # total / 13, rounded
    return blend(smooth, image, factor)


def posterize(image: Image, bits: int) -> Image:
    """The ``bits`` highest bits of each value, 0 to 8."""
    return image & np.uint8(256 - (1 << (8 - bits)))


def solarize(image: Image, threshold: float) -> Image:
    """Values from ``threshold`` on inverted."""
    return by_table(image, np.where(threshold > _VALUES, _VALUES, 255 - _VALUES).astype(np.uint8))


def solarize_add(image: Image, addend: int, threshold: int = 128) -> Image:
    """Values below ``threshold`` plus ``addend``, at most 255; the others stay."""
    return by_table(image, np.where(threshold > _VALUES, np.minimum(_VALUES + addend, 255), _VALUES).astype(np.uint8))


def autocontrast(image: Image) -> Image:
    """Each channel stretched to the values from 0 to 255."""
    return by_table(image, np.stack([_stretched(image[:, :, c]) for c in range(image.shape[2])], axis=1))


def _stretched(channel: Array) -> Array:
    low, high = int(channel.min()), int(channel.max())
    if high <= low:
        return _VALUES.astype(np.uint8)
    scale = 255.0 / (high - low)
    return _clipped(np.arange(256) * scale + -low * scale)


def equalize(image: Image) -> Image:
    """Each channel's histogram made even."""
    return by_table(image, np.stack([_equalized(image[:, :, c]) for c in range(image.shape[2])], axis=1))


def _equalized(channel: Array) -> Array:
    counts = np.bincount(channel.reshape(-1), minlength=256)
    step = (channel.size - int(counts[np.flatnonzero(counts)[-1]])) // 255
    if step == 0:
        return _VALUES.astype(np.uint8)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.minimum((step // 2 + before) // step, 255).astype(np.uint8)


def affine(image: Image, matrix: tuple[float, float, float, float, float, float], fill: PerAxis = 0) -> Image:
    """The image seen through an affine map, nearest pixel: (a, b, c, d, e, f) takes pixel (x, y) from
    (a x + b y + c, d x + e y + f), counted from the centre of pixels; outside is ``fill``."""
    a, b, c, d, e, f = matrix
    h, w = image.shape[:2]
    x, y = np.arange(w) + 0.5, np.arange(h)[:, None] + 0.5
    from_x = np.floor(a * x + (b * y + c)).astype(np.int32)
    from_y = np.floor(d * x + (e * y + f)).astype(np.int32)
    inside = (from_x >= 0) & (from_x < w) & (from_y >= 0) & (from_y < h)
    out = image.reshape(h * w, -1).take((from_y * w + from_x).clip(0, h * w - 1), axis=0)
    out[~inside] = fill
    return out


def rotation(degrees: float, h: int, w: int) -> tuple[float, float, float, float, float, float]:
    """The map of :func:`affine` that turns an image of h by w counterclockwise about its centre."""
    u, v = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = w / 2, h / 2
    return u, -v, x - u * x + v * y, v, u, y - v * x - u * y
