"""Random changes beyond crops and mirrors: colours, erased parts, policies. See ``transforms.py`` for what they share.

All of them take and give uint8, draw from the ``rng`` they are handed, and leave the image they were given as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np

from dbrdist.core.array.types import PerAxis
from dbrdist.core.names.limits import Limit, count, count_or_zero, not_negative, share
from dbrdist.datasets.image import pixels
from dbrdist.datasets.image.images import Image
from dbrdist.datasets.image.transforms import Transform, needs


def _bytes(image: Image, transform: Transform) -> Image:
    if image.dtype != np.uint8 or image.ndim != 3:
        name, hint = type(transform).__name__, "put it in front of Normalize, and use images that are read as bytes"
        raise ValueError(f"expected an image (H, W, C) of uint8 for {name}, got {image.dtype} of {image.shape}; {hint}")
    return image


_HALF_A_TURN = Limit("a number from 0 to 0.5", ge=0, le=0.5)
_MAGNITUDE = Limit("a number from 0 to 30", ge=0, le=30)
_OPERATIONS = count_or_zero.but(configured=count.configured)
Fill: TypeAlias = Annotated[Any, "What comes in from outside: an integer from 0 to 255, or one for each channel."]


class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue changed at random, in random order (Howard 2013, arXiv:1312.5402).

    Args:
        brightness, contrast, saturation: the factor is uniform from max(0, 1 - value) to 1 + value; 0 changes nothing.
        hue: the turn is uniform from -hue to hue, as a fraction of the full circle, at most 0.5.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.ColorJitter()((np.zeros((4, 4, 3), np.uint8), 0), rng)[0].shape
        (4, 4, 3)
    """

    is_random = True

    def __init__(
        self,
        brightness: Annotated[float, not_negative, "The factor is between 1 - this and 1 + this, at least 0."] = 0.4,
        contrast: Annotated[float, not_negative, "The factor of the distance from the mean luminance."] = 0.4,
        saturation: Annotated[
            float, not_negative, "The factor of the distance from the luminance of each pixel."
        ] = 0.4,
        hue: Annotated[float, _HALF_A_TURN, "The largest turn of the colours, as a fraction of the full circle."] = 0.0,
    ) -> None:
        self.strengths = (brightness, contrast, saturation)
        self.hue = hue

    def image(self, image: Image, rng: Any) -> Image:
        image = _bytes(image, self)
        order, amounts = needs(rng, self).random(4).argsort(), rng.random(4)
        for k in order:
            image = self._changed(image, int(k), amounts[k])
        return image

    def _changed(self, image: Image, k: int, amount: float) -> Image:
        if k == 3:
            return pixels.hue(image, self.hue * (2 * amount - 1)) if self.hue else image
        strength = self.strengths[k]
        if not strength:
            return image
        low = max(0.0, 1 - strength)
        change = (pixels.brightness, pixels.contrast, pixels.saturation)[k]
        return change(image, low + amount * (1 + strength - low))


class PCALighting(Transform):
    """A random colour added to all pixels, along the principal components of ImageNet's colours.

    Krizhevsky et al. 2012, "ImageNet Classification with Deep Convolutional Neural Networks", section 4.1: the
    eigenvectors times their eigenvalues times normal numbers; values as in fb.resnet.torch, for pixels from 0 to 1.

    Args:
        std: the standard deviation of the normal numbers.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.PCALighting()((np.zeros((4, 4, 3), np.uint8), 0), rng)[0].shape
        (4, 4, 3)
    """

    is_random = True
    EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
    EIGENVECTORS = np.array(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )  # a component in each column

    def __init__(
        self, std: Annotated[float, not_negative, "Standard deviation of the strength of each component."] = 0.1
    ) -> None:
        self.std = std

    def image(self, image: Image, rng: np.random.Generator | None) -> Image:
        alphas = self.std * needs(rng, self).standard_normal(3)
        if _bytes(image, self).shape[2] != 3:
            raise ValueError(f"expected an image of three channels (H, W, 3) for PCALighting, got {image.shape}")
        shift = 255 * self.EIGENVECTORS @ (alphas * self.EIGENVALUES)
        table = np.clip(np.rint(np.arange(256)[:, None] + shift), 0, 255).astype(np.uint8)
        return pixels.by_table(image, table)


class RandomErasing(Transform):
    """A random rectangle replaced by one value or by noise (Zhong et al. 2017, arXiv:1708.04896).

    Args:
        p: the probability that an image is changed.
        area: least and greatest fraction of the image's area.
        ratio: least and greatest ratio of height to width, uniform in the logarithm.
        value: what stands there: an integer from 0 to 255, one for each channel, or ``'noise'``.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.RandomErasing(p=1.0, value=255)((np.zeros((16, 16, 3), np.uint8), 0), rng)[0].max()
        np.uint8(255)
    """

    is_random = True

    def __init__(
        self,
        p: float = 0.5,
        area: tuple[float, float] = (0.02, 1 / 3),
        ratio: tuple[float, float] = (0.3, 1 / 0.3),
        value: int | str | tuple[int, ...] = 0,
    ) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"expected a probability from 0 to 1, got {p}")
        if not 0 < area[0] <= area[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"expected 0 < area <= 1 and 0 < ratio, each (low, high), got {area} and {ratio}")
        if value != "noise" and not all(isinstance(v, (int, np.integer)) and 0 <= v <= 255 for v in _each(value)):
            raise ValueError(f"expected a value from 0 to 255, one for each channel, or 'noise', got {value!r}")
        self.p, self.area, self.ratio, self.value = p, tuple(area), tuple(ratio), value

    def image(self, image: Image, rng: Any) -> Image:
        if needs(rng, self).random() >= self.p:
            return image
        window = self._window(*image.shape[:2], rng)
        if window is None:
            return image
        top, left, height, width = window
        out = _bytes(image, self).copy()
        shape = (height, width, image.shape[2])
        noise = isinstance(self.value, str)
        filled = rng.integers(0, 256, shape, np.uint8) if noise else self.value
        out[top : top + height, left : left + width] = filled
        return out

    def _window(self, h: int, w: int, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Top, left, height and width; None where ten tries did not fit."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = h * w * (self.area[0] + rng.random() * (self.area[1] - self.area[0]))
            ratio = math.exp(low + rng.random() * (high - low))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < height <= h and 0 < width <= w:
                return int(rng.random() * (h - height + 1)), int(rng.random() * (w - width + 1)), height, width
        return None


def _each(value: int | str | tuple[int, ...]) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list, np.ndarray)) else (value,)


# An operation of a policy: a function of (image, strength, sign) with the strength from 0 to 1.
_Operation = Callable[[Image, float, int, Any], Image]


def _enhanced(change: Callable[[Image, float], Image]) -> _Operation:
    return lambda image, strength, sign, fill: change(image, 1 + sign * 0.9 * strength)


def _moved(image: Image, x: float, y: float, fill: PerAxis) -> Image:
    return pixels.affine(image, (1, 0, float(int(x)), 0, 1, float(int(y))), fill)


# Names and greatest strengths of RandAugment's operations for ImageNet, as torchvision has them.
OPERATIONS: dict[str, _Operation] = {
    "identity": lambda image, strength, sign, fill: image,
    "shear_x": lambda image, strength, sign, fill: pixels.affine(image, (1, sign * 0.3 * strength, 0, 0, 1, 0), fill),
    "shear_y": lambda image, strength, sign, fill: pixels.affine(image, (1, 0, 0, sign * 0.3 * strength, 1, 0), fill),
    "translate_x": lambda image, strength, sign, fill: _moved(
        image, sign * strength * image.shape[1] * 150 / 331, 0, fill
    ),
    "translate_y": lambda image, strength, sign, fill: _moved(
        image, 0, sign * strength * image.shape[0] * 150 / 331, fill
    ),
    "rotate": lambda image, strength, sign, fill: pixels.affine(
        image, pixels.rotation(sign * 30 * strength, *image.shape[:2]), fill
    ),
    "brightness": _enhanced(pixels.brightness),
    "color": _enhanced(pixels.saturation),
    "contrast": _enhanced(pixels.contrast),
    "sharpness": _enhanced(pixels.sharpness),
    "posterize": lambda image, strength, sign, fill: pixels.posterize(image, 8 - round(4 * strength)),
    "solarize": lambda image, strength, sign, fill: pixels.solarize(image, 255 * (1 - strength)),
    "autocontrast": lambda image, strength, sign, fill: pixels.autocontrast(image),
    "equalize": lambda image, strength, sign, fill: pixels.equalize(image),
}
LARGEST_MAGNITUDE = 30


# timm's operations whose severity grows with the magnitude (``inc1``), with the strength from 0 to 1.
INCREASING_OPERATIONS: dict[str, _Operation] = {
    "autocontrast": OPERATIONS["autocontrast"],
    "equalize": OPERATIONS["equalize"],
    "invert": lambda image, strength, sign, fill: 255 - image,
    "rotate": OPERATIONS["rotate"],
    "posterize": lambda image, strength, sign, fill: pixels.posterize(image, 4 - int(4 * strength)),
    "solarize": lambda image, strength, sign, fill: pixels.solarize(image, 256 - min(256, int(256 * strength))),
    "solarize_add": lambda image, strength, sign, fill: pixels.solarize_add(image, min(128, int(110 * strength))),
    "color": _enhanced(pixels.saturation),
    "contrast": _enhanced(pixels.contrast),
    "brightness": _enhanced(pixels.brightness),
    "sharpness": _enhanced(pixels.sharpness),
    "shear_x": OPERATIONS["shear_x"],
    "shear_y": OPERATIONS["shear_y"],
    "translate_x": lambda image, strength, sign, fill: _moved(image, sign * strength * image.shape[1] * 0.45, 0, fill),
    "translate_y": lambda image, strength, sign, fill: _moved(image, 0, sign * strength * image.shape[0] * 0.45, fill),
}
LARGEST_INCREASING = 10


class RandAugment(Transform):
    """``num_ops`` operations, each drawn at random, all of one magnitude (Cubuk et al. 2019, arXiv:1909.13719).

    The operations and their strengths are those of torchvision: shears to 0.3, translations to 150/331 of the side,
    rotations to 30 degrees, brightness, colour, contrast and sharpness by 1 +- 0.9, posterizing to 4 bits, solarizing,
    autocontrast, equalizing, identity. Directions are drawn. With ``increasing`` they are those of timm's ``inc1``:
    inverting, and solarizing after an addition, instead of identity; posterizing from 4 bits to none, translations to
    0.45 of the side; and magnitudes are from 0 to 10. Maps take the nearest pixel, where timm interpolates.

    timm's ``rand-m7-mstd0.5-inc1`` is ``RandAugment(2, 7, (124, 116, 104), std=0.5, increasing=True, p=0.5)``.

    Args:
        num_ops: how many operations.
        magnitude: their strength, 0 to 30, or to 10 with ``increasing``.
        fill: what comes in from outside: an integer from 0 to 255, or one for each channel.
        std: standard deviation of a normal number that is added to the magnitude of each operation.
        increasing: take timm's operations whose severity grows with the magnitude.
        p: the probability that an operation, once drawn, is applied.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.RandAugment()((np.zeros((8, 8, 3), np.uint8), 0), rng)[0].shape
        (8, 8, 3)
    """

    is_random = True
    largest, std, increasing, p = LARGEST_MAGNITUDE, 0.0, False, 1.0  # in pickles of versions without these, too

    def __init__(
        self,
        num_ops: Annotated[int, _OPERATIONS, "Number of operations for each image."] = 2,
        magnitude: Annotated[float, _MAGNITUDE, "Their strength, 0 to 30; with `increasing` at most 10."] = 9.0,
        fill: Fill = 0,
        *,
        std: Annotated[
            float,
            not_negative,
            "Standard deviation of a normal number that is added to the strength of each operation.",
        ] = 0.0,
        increasing: Annotated[
            bool,
            "Whether the operations are those of timm's `inc1`, whose severity grows with the strength, from 0 to 10.",
        ] = False,
        p: Annotated[float, share, "The probability that an operation, once drawn, is applied; timm takes 0.5."] = 1.0,
    ) -> None:
        self.largest = LARGEST_INCREASING if increasing else LARGEST_MAGNITUDE
        if magnitude > self.largest:
            raise ValueError(f"expected a magnitude from 0 to {self.largest}, got {magnitude}")
        self.num_ops, self.magnitude, self.fill = num_ops, magnitude, fill
        self.std, self.increasing, self.p = std, increasing, p

    def image(self, image: Image, rng: Any) -> Image:
        operations = tuple((INCREASING_OPERATIONS if self.increasing else OPERATIONS).values())
        draw = needs(rng, self).random
        for _ in range(self.num_ops):
            operation, sign = operations[int(draw() * len(operations))], 1 if draw() < 0.5 else -1
            if self.p < 1 and draw() >= self.p:
                continue
            magnitude = self.magnitude
            if self.std:
                magnitude = min(max(magnitude + self.std * rng.standard_normal(), 0), self.largest)
            image = operation(_bytes(image, self), magnitude / self.largest, sign, self.fill)
        return image


# TrivialAugment's operations with the wide ranges of strengths, as torchvision has them.
WIDE_OPERATIONS: dict[str, _Operation] = {
    "identity": OPERATIONS["identity"],
    "shear_x": lambda image, strength, sign, fill: pixels.affine(image, (1, sign * 0.99 * strength, 0, 0, 1, 0), fill),
    "shear_y": lambda image, strength, sign, fill: pixels.affine(image, (1, 0, 0, sign * 0.99 * strength, 1, 0), fill),
    "translate_x": lambda image, strength, sign, fill: _moved(image, sign * 32 * strength, 0, fill),
    "translate_y": lambda image, strength, sign, fill: _moved(image, 0, sign * 32 * strength, fill),
    "rotate": lambda image, strength, sign, fill: pixels.affine(
        image, pixels.rotation(sign * 135 * strength, *image.shape[:2]), fill
    ),
    "brightness": lambda image, strength, sign, fill: pixels.brightness(image, 1 + sign * 0.99 * strength),
    "color": lambda image, strength, sign, fill: pixels.saturation(image, 1 + sign * 0.99 * strength),
    "contrast": lambda image, strength, sign, fill: pixels.contrast(image, 1 + sign * 0.99 * strength),
    "sharpness": lambda image, strength, sign, fill: pixels.sharpness(image, 1 + sign * 0.99 * strength),
    "posterize": lambda image, strength, sign, fill: pixels.posterize(image, 8 - round(6 * strength)),
    "solarize": OPERATIONS["solarize"],
    "autocontrast": OPERATIONS["autocontrast"],
    "equalize": OPERATIONS["equalize"],
}
_NUM_BINS = 31


class TrivialAugment(Transform):
    """One operation, drawn at random, of a random strength (Mueller and Hutter 2021, arXiv:2103.10158), "wide".

    The operations, their ranges and 31 strengths are those of torchvision's ``TrivialAugmentWide``; directions are
    drawn.

    Args:
        fill: what comes in from outside: an integer from 0 to 255, or one for each channel.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> datasets.TrivialAugment()((np.zeros((8, 8, 3), np.uint8), 0), rng)[0].shape
        (8, 8, 3)
    """

    is_random = True

    def __init__(self, fill: Fill = 0) -> None:
        self.fill = fill

    def image(self, image: Image, rng: np.random.Generator) -> Image:
        operations = tuple(WIDE_OPERATIONS.values())
        draw = needs(rng, self).random
        operation = operations[int(draw() * len(operations))]
        strength = int(draw() * _NUM_BINS) / (_NUM_BINS - 1)
        return operation(_bytes(image, self), strength, 1 if draw() < 0.5 else -1, self.fill)
