"""Crops, flips and sizes of one image."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.core.names.limits import count_or_zero, part
from dbrdist.datasets.image.images import (
    ANY_METHOD,
    METHODS,
    Image,
    ImageDecodeError,
    check_pixels,
    mirror,
    resize,
)
from dbrdist.datasets.image.transform_base import Transform, needs

# How images are resized, as a setting.
Method: TypeAlias = Annotated[
    Literal["linear", "area", "bilinear", "bicubic"],
    "How it is resized: `linear` between pixels; `area`: means over areas where it shrinks; `bilinear` and `bicubic`: "
    "filtered where it shrinks, as Pillow does.",
]


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, (int, np.integer)) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, (int, np.integer)) and n > 0 for n in pair):
        raise ValueError(f"expected a positive size or a pair (height, width), got {size!r}")
    return int(pair[0]), int(pair[1])


def one_method(method: str) -> str:
    """A way to resize, if there is one of this name."""
    if method not in METHODS:
        raise ValueError(f"expected the method {ANY_METHOD}, got {method!r}")
    return method


def _crop(image: Image, top: int, left: int, height: int, width: int) -> Image:
    """A window that may reach beyond the image, where it is zero."""
    h, w, c = image.shape
    if top >= 0 and left >= 0 and top + height <= h and left + width <= w:
        return image[top : top + height, left : left + width]
    check_pixels(height, width, f"a window of {height}x{width} pixels")
    out = np.zeros((height, width, c), image.dtype)
    y0, y1, x0, x1 = max(top, 0), min(top + height, h), max(left, 0), min(left + width, w)
    if y0 < y1 and x0 < x1:
        out[y0 - top : y1 - top, x0 - left : x1 - left] = image[y0:y1, x0:x1]
    return out


def _resized(image: Image, height: int, width: int, method: str, out: Array | None) -> Image:
    """The image at another size, in memory of its own: see :func:`sees_a_window`."""
    found = resize(image, height, width, method, out)
    return image.copy() if found is image else found


class RandomCrop(Transform):
    """A window at a uniformly random place of the image.

    Args:
        size: side of the square in pixels, or a pair (height, width).
        padding: zeros added to each side before cutting, in pixels.

    Raises:
        ValueError: the size is not positive, or at the call, larger than the padded image.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.RandomCrop(32, padding=4)((np.zeros((32, 32, 3), np.uint8), 0), rng)[0].shape
        (32, 32, 3)
    """

    is_random = True

    def __init__(
        self,
        size: Annotated[int | tuple[int, int], "Side of the square in pixels."],
        padding: Annotated[int, count_or_zero, "Zeros added to each side before cutting, in pixels."] = 0,
    ) -> None:
        self.size = _pair(size)
        self.padding = padding

    def image(self, image: Image, rng: np.random.Generator) -> Image:
        height, width = self.size
        free_y = image.shape[0] + 2 * self.padding - height
        free_x = image.shape[1] + 2 * self.padding - width
        if free_y < 0 or free_x < 0:
            raise ImageDecodeError(
                f"expected an image of at least {height}x{width} with padding {self.padding} for RandomCrop, "
                f"got {image.shape[0]}x{image.shape[1]}; put a Resize in front"
            )
        draw = needs(rng, self).random
        top, left = int(draw() * (free_y + 1)), int(draw() * (free_x + 1))
        return _crop(image, top - self.padding, left - self.padding, height, width)


class CenterCrop(Transform):
    """The window in the middle of the image.

    Args:
        size: side of the square in pixels, or a pair (height, width); not larger than the image.

    Raises:
        ValueError: the size is not positive, or at the call, larger than the image.

    Example:
        >>> datasets.CenterCrop(2)((np.arange(16, dtype=np.uint8).reshape(4, 4, 1), 0), None)[0][..., 0]
        array([[ 5,  6],
               [ 9, 10]], dtype=uint8)
    """

    def __init__(self, size: Annotated[int | tuple[int, int], "Side of the square in pixels."]) -> None:
        self.size = _pair(size)

    def image(self, image: Image, rng: np.random.Generator | None) -> Image:
        height, width = self.size
        h, w = image.shape[:2]
        if h < height or w < width:
            raise ImageDecodeError(
                f"expected an image of at least {height}x{width} for CenterCrop, got {h}x{w}; put a Resize in front"
            )
        return _crop(image, (h - height) // 2, (w - width) // 2, height, width)


class CenterResizedCrop(Transform):
    """The square in the middle with ``ratio`` of the shorter side, resized to ``size``: one pass over the image.

    With 224 of 256, the default, it shows about what a Resize to 256 and a CenterCrop of 224 show.

    Args:
        size: side of the result in pixels, or a pair (height, width).
        ratio: side of the square, as a fraction of the image's shorter side.
        method: how it is resized: ``'linear'`` between pixels; ``'area'``: means over areas where it shrinks;
            ``'bilinear'`` and ``'bicubic'``: filtered where it shrinks, as Pillow does.

    Example:
        >>> datasets.CenterResizedCrop(8)((np.zeros((32, 40, 3), np.uint8), 0), None)[0].shape
        (8, 8, 3)
    """

    def __init__(
        self,
        size: Annotated[int | tuple[int, int], "Side of the result in pixels."],
        ratio: Annotated[float, part, "Side of the square, as a fraction of the image's shorter side."] = 224 / 256,
        method: Method = "linear",
    ) -> None:
        self.size = _pair(size)
        self.ratio = ratio
        self.method = one_method(method)

    def image(self, image: Image, rng: np.random.Generator | None, out: Array | None = None) -> Image:
        h, w = image.shape[:2]
        side = max(round(min(h, w) * self.ratio), 1)
        return _resized(_crop(image, (h - side) // 2, (w - side) // 2, side, side), *self.size, self.method, out)


class RandomHorizontalFlip(Transform):
    """The image mirrored left to right at random.

    Args:
        p: the probability, from 0 to 1.

    Raises:
        ValueError: p is no probability.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.RandomHorizontalFlip(1.0)((np.array([[[1], [2]]], np.uint8), 0), rng)[0][..., 0]
        array([[2, 1]], dtype=uint8)
    """

    is_random = True

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"expected a probability from 0 to 1, got {p}")
        self.p = p

    def image(self, image: Image, rng: np.random.Generator, out: Array | None = None) -> Image:
        return mirror(image, out) if needs(rng, self).random() < self.p else image


class Resize(Transform):
    """The image at another size.

    Args:
        size: the new length of the shorter side in pixels, or a pair (height, width).
        method: ``'linear'`` between pixels; ``'area'``: means over areas where it shrinks; ``'bilinear'`` and
            ``'bicubic'``: filtered where it shrinks, as Pillow does.

    Raises:
        ValueError: the size is not positive, or the method is unknown.

    Example:
        >>> datasets.Resize(16)((np.zeros((32, 40, 3), np.uint8), 0), None)[0].shape
        (16, 20, 3)
    """

    def __init__(
        self,
        size: Annotated[int | tuple[int, int], "The shorter side's new length in pixels."],
        method: Method = "linear",
    ) -> None:
        self.size = size
        self._pair = _pair(size)
        self.method = one_method(method)

    def image(self, image: Image, rng: np.random.Generator | None, out: Array | None = None) -> Image:
        height, width = self._pair
        if isinstance(self.size, (int, np.integer)):
            h, w = image.shape[:2]
            short = min(h, w)
            height, width = round(h * height / short), round(w * width / short)
        return _resized(_crop(image, 0, 0, *image.shape[:2]), height, width, self.method, out)


class RandomResizedCrop(Transform):
    """A random part of the image, resized to ``size`` (Szegedy et al. 2015, "Going deeper with convolutions").

    The part covers a uniformly random fraction of the area within ``scale``; its ratio of width to height is random
    within ``ratio``, uniform in the logarithm. After ten parts that do not fit, the middle of the image is taken.

    Args:
        size: side of the result in pixels, or a pair (height, width).
        scale: lower and upper bound of the part's area, as fractions of the image's.
        ratio: lower and upper bound of the part's width over its height.
        method: how it is resized: ``'linear'``, ``'area'``, ``'bilinear'`` or ``'bicubic'``; see :class:`Resize`.

    Raises:
        ValueError: the bounds are not in order or out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.RandomResizedCrop(8)((np.zeros((32, 40, 3), np.uint8), 0), rng)[0].shape
        (8, 8, 3)
    """

    is_random = True

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        method: str = "linear",
    ) -> None:
        if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"expected 0 < scale <= 1 and 0 < ratio, each (low, high), got {scale} and {ratio}")
        self.size = _pair(size)
        self.scale = scale
        self.ratio = ratio
        self.method = one_method(method)

    def window(self, h: int, w: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part for an image of ``h`` by ``w`` pixels, drawn from ``rng``."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = h * w * (self.scale[0] + rng.random() * (self.scale[1] - self.scale[0]))
            aspect = math.exp(low + rng.random() * (high - low))
            height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < height <= h and 0 < width <= w:
                return int(rng.random() * (h - height + 1)), int(rng.random() * (w - width + 1)), height, width
        aspect = min(max(w / h, self.ratio[0]), self.ratio[1])
        height, width = min(h, round(w / aspect) or 1), min(w, round(h * aspect) or 1)
        return (h - height) // 2, (w - width) // 2, height, width

    def image(self, image: Image, rng: np.random.Generator, out: Array | None = None) -> Image:
        part = _crop(image, *self.window(*image.shape[:2], needs(rng, self)))
        return _resized(part, *self.size, self.method, out)
