"""Regions of interest pooled to one size (Girshick 2015; He et al. 2017).

Legend: N images, C channels, H W rows and columns, R regions, I J rows and columns of the result; x (N, C, H, W).
Regions take no gradient. Averages are products with a matrix for rows and one for columns, so that an image with NaN or
infinity anywhere gives NaN in all its regions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, to_cpu
from dbrdist.core.array.types import Module, PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.array import separate
from dbrdist.functions.convolution import pair


class Regions(NamedTuple):
    """Regions in pixels of x, on the host in float64, and the sizes of the result."""

    image: Array  # (R,) the index of the image
    start: tuple[Array, Array]  # (R,) for rows and columns
    end: tuple[Array, Array]
    out: tuple[int, int]


def _regions(
    function: str, x: Variable, rois: Any, roi_indices: Any, outsize: PerAxis, spatial_scale: float
) -> Regions:
    """The arguments of all functions here, checked."""
    floating(function, rois=rois)
    rois, indices = to_cpu(as_array(rois)).astype(np.float64), as_array(roi_indices)
    if rois.ndim != 2 or rois.shape[1] != 4:
        raise expected(function, "rois", "shape (R, 4): y_min, x_min, y_max, x_max", rois)
    if getattr(indices, "shape", None) != rois.shape[:1] or indices.dtype.kind not in "iu":
        raise expected(function, "roi_indices", f"integers of shape {rois.shape[:1]}, one for each region", indices)
    return _placed(function, "roi_indices", x, rois, to_cpu(indices), pair(outsize), spatial_scale)


def _placed(
    function: str, name: str, x: Variable, rois: Array, indices: Array, out: tuple[int, int], spatial_scale: float
) -> Regions:
    if indices.size and not 0 <= indices.min() <= indices.max() < x.shape[0]:
        got = f"indices from {indices.min()} to {indices.max()}"
        raise expected(function, name, f"indices from 0 to {x.shape[0] - 1} of the images of x {x.shape}", got)
    if any(not isinstance(n, (int, np.integer)) or n < 1 for n in out):
        raise expected(function, "outsize", "sizes from 1 on", str(out))
    if not spatial_scale > 0:
        raise expected(function, "spatial_scale", "a number above 0", spatial_scale)
    if not np.isfinite(rois).all():
        raise expected(function, "rois", "finite numbers", f"NaN or infinity in row {int(_first_bad(rois))}")
    places = (rois * float(spatial_scale)).T
    return Regions(indices.astype(np.int64), (places[0], places[1]), (places[2], places[3]), (int(out[0]), int(out[1])))


def _first_bad(rois: Array) -> np.generic:
    return np.argmin(np.isfinite(rois).all(axis=1))


def _images(function: str, x: Operand) -> Variable:
    floating(function, x=x)
    x = as_variable(x)
    if x.ndim != 4:
        raise expected(function, "x", "images, shape (N, C, H, W)", x)
    if not x.shape[2] * x.shape[3]:
        raise expected(function, "x", "at least one pixel", x)
    return x


# ---- averages: products with a matrix for rows and one for columns --------------------------------------------------


def _product(x: Variable, regions: Regions, rows: Array, columns: Array) -> Any:
    """y[r] = rows[r] x[image of r] columns[r]'; rows (R, I, H), columns (R, J, W)."""
    xp, wide, (i, j) = get_array_module(x.array), accumulation_dtype(x.dtype), regions.out
    _, c, h, w = x.shape
    order = np.argsort(regions.image, kind="stable")
    rows, columns = (xp.asarray(m[order].astype(wide)) for m in (rows, columns))
    found, first, images = [], 0, separate(x) if len(order) else ()
    for image in np.unique(regions.image):  # one product for the rows of all regions of an image
        num = int((regions.image == image).sum())
        pixels = ops.transpose(ops.cast(images[image], wide), (1, 2, 0))
        lines = ops.matmul(rows[first : first + num].reshape(num * i, h), ops.reshape(pixels, (h, w * c)))
        found.append(ops.matmul(columns[first : first + num, None], ops.reshape(lines, (num, i, w, c))))
        first += num
    y = ops.concat(found, 0) if found else ops.reshape(ops.cast(x, wide), (0, i, j, c))
    if (order[1:] < order[:-1]).any():
        y = ops.getitem(y, xp.asarray(np.argsort(order, kind="stable")))
    return ops.cast(ops.transpose(y, (0, 3, 1, 2)), x.dtype)


def _bins(regions: Regions, axis: int, length: int, adds_one: bool = False) -> tuple[Array, Array]:
    """First and last (exclusive) pixels of the bins of each region along an axis, each (R, I)."""
    start, end = (np.round(v[axis]).clip(-(2**52), 2**52).astype(np.int64) for v in (regions.start, regions.end))
    size = np.maximum(end - start + adds_one, 1) / regions.out[axis]
    number = np.arange(regions.out[axis])
    low = np.floor(number * size[:, None]).astype(np.int64) + start[:, None]
    high = np.ceil((number + 1) * size[:, None]).astype(np.int64) + start[:, None]
    return low.clip(0, length), high.clip(0, length)


def _mean_weights(regions: Regions, axis: int, length: int) -> Array:
    """(R, I, length): 1 / size for the pixels of a bin, 0 for others."""
    low, high = _bins(regions, axis, length)
    pixel = np.arange(length)
    inside = (pixel >= low[..., None]) & (pixel < high[..., None])
    return inside / np.maximum(high - low, 1)[..., None]


def roi_average_pooling_2d(
    x: Operand, rois: Operand, roi_indices: Operand, outsize: PerAxis, spatial_scale: float
) -> Variable:
    """The mean of x over each bin of each region: (R, C, I, J).

    Args:
        x: images.
        rois: y_min, x_min, y_max, x_max of each region, shape (R, 4); multiplied by ``spatial_scale`` and rounded they
            are pixels, of which the last is not part of the region.
        roi_indices: the image of each region, integers (R,).
        outsize: rows and columns of the result, a number or a pair. Bins overlap where they do not divide the region.
        spatial_scale: size of x divided by the size in which ``rois`` are given.

    A bin beyond the image gives 0.

    Example:
        >>> x, rois = np.arange(16.0).reshape(1, 1, 4, 4), np.array([[0.0, 0.0, 2.0, 2.0]])
        >>> F.roi_average_pooling_2d(x, rois, np.array([0]), 1, 1.0).array
        array([[[[2.5]]]])
    """
    name = "roi_average_pooling_2d"
    x = _images(name, x)
    regions = _regions(name, x, rois, roi_indices, outsize, spatial_scale)
    return _product(x, regions, *(_mean_weights(regions, axis, x.shape[2 + axis]) for axis in (0, 1)))


class Samples(NamedTuple):
    """Places between pixels along an axis, for each bin: arrays (R, I, S), with 0 for what a region has not."""

    low: Array
    high: Array
    weight: Array  # of the pixel ``high``
    is_inside: Array
    is_taken: Array
    count: Array  # (R, 1, 1) of a bin, with those beyond the image that are left out here


def _ratios(function: str, sampling_ratio: Any) -> tuple[Any, Any]:
    ratios = tuple(sampling_ratio) if np.ndim(sampling_ratio) else (sampling_ratio, sampling_ratio)
    if len(ratios) != 2:
        raise expected(function, "sampling_ratio", "a number, or two for rows and columns", repr(sampling_ratio))
    for n in ratios:
        if n is not None and (not isinstance(n, (int, np.integer)) or n < 1):
            raise expected(function, "sampling_ratio", "None, or numbers from 1 on", repr(sampling_ratio))
    return ratios[0], ratios[1]


def _samples(regions: Regions, axis: int, length: int, ratio: int | None) -> Samples:
    start: Array = regions.start[axis]
    size: Array = np.maximum(regions.end[axis] - start, 1.0) / regions.out[axis]
    counts: Array = np.ceil(size) if ratio is None else np.full(len(size), float(ratio))
    start, size, count = (v[:, None, None] for v in (start, size, counts))
    bins: Array = np.arange(regions.out[axis])[:, None]
    # A bin may be far larger than the image: only the samples from the first within it on, as many as may be there.
    outside: Array = np.ceil((-1 - start - bins * size) * count / size - 0.5)
    first: Array = np.maximum(outside - 1, 0)
    most = min(counts.max(initial=1), np.ceil((length + 2) * (count / size).max(initial=1)) + 2)
    number = first + np.arange(int(most))
    at = start + (bins + (number + 0.5) / count) * size
    is_inside = (at >= -1) & (at <= length)
    at = at.clip(0, length - 1)
    low = np.floor(at).astype(np.int64)
    return Samples(low, np.minimum(low + 1, length - 1), at - low, is_inside, number < count, count)


def _align_weights(samples: Samples, length: int) -> Array:
    """(R, I, length): how much each pixel has in the mean over the samples of a bin."""
    kept = samples.is_inside & samples.is_taken
    pixel = np.arange(length)
    total = np.zeros((*kept.shape[:2], length))
    for s in range(kept.shape[2]):
        for index, weight in ((samples.low, 1 - samples.weight), (samples.high, samples.weight)):
            total += (pixel == index[:, :, s, None]) * (weight * kept)[:, :, s, None]
    return total / samples.count


def roi_average_align_2d(
    x: Operand,
    rois: Operand,
    roi_indices: Operand,
    outsize: PerAxis,
    spatial_scale: float,
    sampling_ratio: PerAxis | None = None,
) -> Variable:
    """The mean of x at places between its pixels in each bin of each region: (R, C, I, J).

    Args:
        x: images.
        rois: y_min, x_min, y_max, x_max of each region, shape (R, 4).
        roi_indices: the image of each region, integers (R,).
        outsize: rows and columns of the result, a number or a pair.
        spatial_scale: size of x divided by the size in which ``rois`` are given.
        sampling_ratio: how many places a bin has along each axis, a number or a pair; None for one in each pixel.

    Values between pixels are bilinear; places more than one pixel beyond the border count as 0.

    Example:
        >>> x, rois = np.ones((1, 1, 4, 4)), np.array([[0.0, 0.0, 2.0, 2.0]])
        >>> F.roi_average_align_2d(x, rois, np.array([0]), 1, 1.0, 2).array
        array([[[[1.]]]])
    """
    name = "roi_average_align_2d"
    x = _images(name, x)
    regions, ratios = _regions(name, x, rois, roi_indices, outsize, spatial_scale), _ratios(name, sampling_ratio)
    sizes = x.shape[2:]
    weights = (_align_weights(_samples(regions, k, sizes[k], ratios[k]), sizes[k]) for k in (0, 1))
    return _product(x, regions, *weights)


# ---- maxima: where they are is found on bare arrays, and the values are taken from there -----------------------------


class _Pixels:
    """The pixels of images by number, (N H W, C): rows of memory where images lie channels-last."""

    def __init__(self, x: Variable) -> None:
        n, c, h, w = x.shape
        self.xp, self.shape = get_array_module(x.array), x.shape
        self.rows = x.array.transpose(0, 2, 3, 1).reshape(n * h * w, c)
        self.has_nan = bool((self.rows != self.rows).any())

    def number(self, image: Array, row: Array, column: Array) -> Array:
        """The numbers of pixels, of the shape to which the arguments broadcast."""
        _, _, h, w = self.shape
        return self.xp.asarray((image * h + row) * w + column)

    def is_better(self, value: Array, best: Array) -> Array:
        """Larger, or the first NaN."""
        larger = value > best
        return larger | ((value != value) & (best == best)) if self.has_nan else larger

    def chosen(self, x: Variable, number: Array) -> Variable:
        """The elements of pixels (R, I, J, C) that differ by channel, from the images x."""
        c = self.shape[1]
        flat = ops.reshape(ops.transpose(x, (0, 2, 3, 1)), (x.size,))
        return ops.getitem(flat, number * c + self.xp.arange(c))


def _max_pooling(x: Variable, regions: Regions, adds_one: bool) -> Variable:
    """The maximum of each bin, 0 for one without pixels."""
    pixels, (h, w) = _Pixels(x), x.shape[2:]
    xp, image = pixels.xp, regions.image[:, None, None]
    (top, bottom), (left, right) = _bins(regions, 0, h, adds_one), _bins(regions, 1, w, adds_one)
    is_empty = ((top >= bottom)[:, :, None] | (left >= right)[:, None])[..., None]  # (R, I, J, 1)
    best: Any = None
    for i in range(max(int((bottom - top).max(initial=0)), 1)):
        row = np.minimum(top + i, np.maximum(bottom - 1, top)).clip(0, h - 1)  # past the end: the last once more
        for j in range(max(int((right - left).max(initial=0)), 1)):
            column = np.minimum(left + j, np.maximum(right - 1, left)).clip(0, w - 1)
            number = pixels.number(image, row[:, :, None], column[:, None])
            value = pixels.rows[number]
            if best is None:
                best, found = value, xp.broadcast_to(number[..., None], value.shape)
                continue
            is_new = pixels.is_better(value, best)
            best, found = xp.where(is_new, value, best), xp.where(is_new, number[..., None], found)
    y = pixels.chosen(x, found)
    y = ops.where(xp.asarray(is_empty), x.dtype.type(0), y) if is_empty.any() else y
    return ops.transpose(y, (0, 3, 1, 2))


def roi_max_pooling_2d(
    x: Operand, rois: Operand, roi_indices: Operand, outsize: PerAxis, spatial_scale: float
) -> Variable:
    """The maximum of x over the pixels in each bin of each region (Girshick 2015).

    The gradient goes to the first of equal maxima; a bin beyond the image gives 0.

    Args:
        x: images, shape (N, C, H, W).
        rois: regions, shape (R, 4): (y_min, x_min, y_max, x_max) in pixels of the original image.
        roi_indices: the number of the image of each region, integers of shape (R,).
        outsize: the number of bins of a region, (I, J) or one number for both.
        spatial_scale: the size of x divided by that of the original image.

    Returns:
        A Variable of shape (R, C, I, J).

    Example:
        >>> x, rois = np.arange(16.0).reshape(1, 1, 4, 4), np.array([[0.0, 0.0, 2.0, 2.0]])
        >>> F.roi_max_pooling_2d(x, rois, np.array([0]), 1, 1.0).array
        array([[[[5.]]]])
    """
    name = "roi_max_pooling_2d"
    x = _images(name, x)
    return _max_pooling(x, _regions(name, x, rois, roi_indices, outsize, spatial_scale), False)


def roi_pooling_2d(x: Operand, rois: Operand, outh: int, outw: int, spatial_scale: float) -> Variable:
    """The maximum of x over each bin of each region: (R, C, outh, outw).

    Args:
        x: images.
        rois: the index of the image, x_min, y_min, x_max, y_max of each region, shape (R, 5); multiplied by
            ``spatial_scale`` and rounded they are pixels, of which the last is part of the region.
        outh, outw: rows and columns of the result.
        spatial_scale: size of x divided by the size in which ``rois`` are given.

    As :func:`roi_max_pooling_2d`, which has another order of numbers and does not count the last pixel.

    Example:
        >>> F.roi_pooling_2d(np.ones((1, 2, 4, 4)), np.array([[0.0, 0.0, 0.0, 3.0, 3.0]]), 2, 2, 1.0).shape
        (1, 2, 2, 2)
    """
    name = "roi_pooling_2d"
    x = _images(name, x)
    floating(name, rois=rois)
    rois = to_cpu(as_array(rois)).astype(np.float64)
    if rois.ndim != 2 or rois.shape[1] != 5:
        raise expected(name, "rois", "shape (R, 5): index of the image, x_min, y_min, x_max, y_max", rois)
    regions = _placed(name, "rois", x, rois[:, [2, 1, 4, 3]], rois[:, 0], (outh, outw), spatial_scale)
    return _max_pooling(x, regions, True)


def roi_max_align_2d(
    x: Operand,
    rois: Operand,
    roi_indices: Operand,
    outsize: PerAxis,
    spatial_scale: float,
    sampling_ratio: PerAxis | None = None,
) -> Variable:
    """The maximum of x over places between its pixels in each bin of each region.

    Places beyond the border are left out; a bin without any gives 0.

    Args:
        x: images, shape (N, C, H, W).
        rois: regions, shape (R, 4): (y_min, x_min, y_max, x_max) in pixels of the original image.
        roi_indices: the number of the image of each region, integers of shape (R,).
        outsize: the number of bins of a region, (I, J) or one number for both.
        spatial_scale: the size of x divided by that of the original image.
        sampling_ratio: places per bin along each axis, a number or a pair; None takes as many as the bin has pixels.

    Returns:
        A Variable of shape (R, C, I, J).

    Example:
        >>> x, rois = np.arange(16.0).reshape(1, 1, 4, 4), np.array([[0.0, 0.0, 4.0, 4.0]])
        >>> F.roi_max_align_2d(x, rois, np.array([0]), 1, 1.0, 2).shape
        (1, 1, 1, 1)
    """
    name = "roi_max_align_2d"
    x = _images(name, x)
    regions, ratios = _regions(name, x, rois, roi_indices, outsize, spatial_scale), _ratios(name, sampling_ratio)
    rows, columns = (_samples(regions, k, x.shape[2 + k], ratios[k]) for k in (0, 1))
    between = _Between(x, regions, rows, columns)
    best, is_found = between.best()
    y = between.of_each(ops.cast(x, between.dtype), best)
    return ops.cast(ops.transpose(ops.where(is_found, y, y.dtype.type(0)), (0, 3, 1, 2)), x.dtype)


class _Between:
    """Bilinear values at samples of rows and of columns, (R, I, J, C)."""

    def __init__(self, x: Variable, regions: Regions, rows: Samples, columns: Samples) -> None:
        self.dtype, self.image, self.rows, self.columns = accumulation_dtype(x.dtype), regions.image, rows, columns
        self.pixels = _Pixels(x)
        self.wide = ops.cast(self.pixels.rows, self.dtype)

    def corners(self, i: int, j: int) -> Any:
        """The numbers and weights (R, I, J) of the four pixels around the sample (i, j) of each bin."""
        image, rows, columns = self.image[:, None, None], self.rows, self.columns
        for row, down in ((rows.low, 1 - rows.weight), (rows.high, rows.weight)):
            for column, right in ((columns.low, 1 - columns.weight), (columns.high, columns.weight)):
                weight = down[:, :, i][:, :, None] * right[:, :, j][:, None]
                number = self.pixels.number(image, row[:, :, i][:, :, None], column[:, :, j][:, None])
                yield number, self.pixels.xp.asarray(weight.astype(self.dtype))

    def is_kept(self, i: int, j: int) -> Array:
        """Whether a sample counts, (R, I, J, 1)."""
        down, right = ((s.is_inside & s.is_taken)[:, :, k] for s, k in ((self.rows, i), (self.columns, j)))
        return self.pixels.xp.asarray((down[:, :, None] & right[:, None])[..., None])

    def best(self) -> tuple[Array, Array]:
        """Which sample of each bin is the largest, (R, I, J, C), and whether there is any."""
        xp, width = self.pixels.xp, self.columns.low.shape[2]
        best: Any = None
        for k in range(self.rows.low.shape[2] * width):
            value = sum(self.wide[number] * weight[..., None] for number, weight in self.corners(*divmod(k, width)))
            kept = self.is_kept(*divmod(k, width))
            if best is None:
                best, sample, is_found = value, xp.zeros(value.shape, np.int64), kept
                continue
            is_new = kept & (self.pixels.is_better(value, best) | ~is_found)
            best, sample, is_found = xp.where(is_new, value, best), xp.where(is_new, k, sample), is_found | kept
        return sample, xp.broadcast_to(is_found, best.shape)

    def of_each(self, x: Variable, sample: Array) -> Variable:
        """The values of chosen samples, from the images x."""
        xp, width = self.pixels.xp, self.columns.low.shape[2]
        every = [list(self.corners(*divmod(k, width))) for k in range(self.rows.low.shape[2] * width)]
        total: Any = None
        for corner in range(4):
            numbers, weights = (xp.stack([pairs[corner][part] for pairs in every], 3) for part in (0, 1))
            number, weight = (_along_last(xp, a, sample) for a in (numbers, weights))
            part = ops.mul(self.pixels.chosen(x, number), weight)
            total = part if total is None else ops.add(total, part)
        return total


def _along_last(xp: Module, a: Array, index: Array) -> Array:
    """a[r, i, j, index[r, i, j, c]] for a (R, I, J, S)."""
    start = xp.arange(a.size // a.shape[3]).reshape(*a.shape[:3], 1) * a.shape[3]
    return a.reshape(-1)[start + index]
