"""Changes to images on their way into a batch: crop, flip, resize, normalise.

A transform is a callable ``t(example, rng)``: an example is an image (H, W, C), or a tuple that starts with one and is
passed on otherwise unchanged; ``rng`` is a ``numpy.random.Generator`` keyed by (seed, epoch, sample), so that the
result depends on no rank, worker or order of calls. It serves that call alone: it gets a new key for the next example.
Images stay uint8 and (H, W, C) until ``Normalize`` and ``ToCHW``, which run once per batch. H height, W width, C
channels.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist import kernels
from dbrdist.core.array.backend import Array, device_of, get_array_module
from dbrdist.core.array.random import SampleGenerator
from dbrdist.core.names.limits import positive
from dbrdist.datasets.image.crops import CenterCrop as CenterCrop
from dbrdist.datasets.image.crops import CenterResizedCrop as CenterResizedCrop
from dbrdist.datasets.image.crops import RandomCrop as RandomCrop
from dbrdist.datasets.image.crops import RandomHorizontalFlip as RandomHorizontalFlip
from dbrdist.datasets.image.crops import RandomResizedCrop as RandomResizedCrop
from dbrdist.datasets.image.crops import Resize as Resize
from dbrdist.datasets.image.crops import one_method as one_method
from dbrdist.datasets.image.images import (
    Image,
    ImageDecodeError,
    lookup,
)
from dbrdist.datasets.image.transform_base import ByEpoch as ByEpoch
from dbrdist.datasets.image.transform_base import Compose as Compose
from dbrdist.datasets.image.transform_base import Transform as Transform
from dbrdist.datasets.image.transform_base import at_epoch as at_epoch
from dbrdist.datasets.image.transform_base import leaves_examples as leaves_examples
from dbrdist.datasets.image.transform_base import needs as needs
from dbrdist.datasets.loading.base import Batch, SkipExample
from dbrdist.datasets.loading.memory import reused


class Normalize(Transform):
    """``(x / scale - mean) / std`` per channel, as float32.

    Args:
        mean: the mean of each channel, for pixels from 0 to 1; a number for all channels.
        std: the standard deviation of each channel, for pixels from 0 to 1, above 0.
        scale: the largest value of a pixel.

    Raises:
        ValueError: a standard deviation is not above 0.

    Example:
        >>> datasets.Normalize(0.5, 0.25)((np.full((1, 1, 3), 255, np.uint8), 0), None)[0]
        array([[[2., 2., 2.]]], dtype=float32)
    """

    is_pixelwise = True

    def __init__(
        self,
        mean: Annotated[Sequence[float] | float, "The mean of each channel, for pixels from 0 to 1."],
        std: Annotated[Sequence[float] | float, "The standard deviation of each channel, for pixels from 0 to 1."],
        scale: Annotated[float, positive, "The largest value of a pixel."] = 255.0,
    ) -> None:
        self.mean = np.atleast_1d(np.asarray(mean, np.float64))
        self.std = np.atleast_1d(np.asarray(std, np.float64))
        self.scale = scale
        if not np.all(self.std > 0):
            raise ValueError(f"expected positive standard deviations, got {std}")

    def image(self, image: Image, rng: np.random.Generator | None) -> Any:
        *lead, w, c = image.shape
        if not {len(self.mean), len(self.std)} <= {1, c}:
            raise ValueError(f"expected mean and std of 1 or {c} channels, got {len(self.mean)} and {len(self.std)}")
        # Whole rows of W*C numbers, for NumPy is slow where the last axis is as short as C.
        xp = get_array_module(image)
        rows = image.reshape(*lead, w * c)
        factor = np.broadcast_to(1 / (self.scale * self.std), (w, c)).ravel().astype(np.float32)
        shift = np.broadcast_to(self.mean / self.std, (w, c)).ravel().astype(np.float32)
        out = xp.multiply(rows, xp.asarray(factor), dtype=np.float32)
        out -= xp.asarray(shift)
        return out.reshape(image.shape)


class ToCHW(Transform):
    """From (H, W, C) to float32 of (C, H, W): the axes change, the memory stays channels-last.

    Example:
        >>> datasets.ToCHW()((np.zeros((4, 6, 3), np.uint8), 0), None)[0].shape
        (3, 4, 6)
    """

    is_pixelwise = True

    def image(self, image: Image, rng: np.random.Generator | None) -> Any:
        *lead, h, w, c = range(image.ndim)
        return image.astype(np.float32, copy=False).transpose(*lead, c, h, w)


# ---- many examples --------------------------------------------------------------------------------------------------


def transform_batch(
    transform: Any,
    examples: Iterable[tuple[int, Any]],
    num_examples: int,
    seed: int,
    epoch: int,
    skipped: list[str],
    refuse: Callable[[int, Exception], Exception] | None = None,
) -> Batch | list[tuple[Array, np.generic]]:
    """``transform`` of pairs (sample, example), each with the ``rng`` of its sample; a Batch where shapes agree.

    Each example goes through the members that are its own as soon as it is there, while it is in the processor's cache,
    and into the batch. The last, pixelwise members of a Compose run once for all images; they give the same numbers as
    one by one. ``num_examples`` is the largest possible number of examples. Where a transform raises SkipExample, the
    example is left out, and the text of the error appended to ``skipped``. ``refuse(sample, error)`` makes the
    exception to raise of an ImageDecodeError, such as that of a transform whose result would be too large.
    """
    transform = at_epoch(transform, epoch)
    each, last = _each_and_last(transform)
    draws = any(getattr(t, "is_random", True) for t in each)  # a callable of the user's may draw
    first, into = _writers(each)
    stack = _Stack(num_examples, bool(last))
    rngs = SampleGenerator(seed, "augment", epoch) if draws else None
    for sample, example in examples:
        rng = None if rngs is None else rngs.at(sample)
        try:
            for t in first:
                example = t(example, rng)
            out = stack.next_row()
            for t in into:
                example = t(example, rng, *out)
        except (SkipExample, ImageDecodeError) as e:
            error = e if refuse is None or isinstance(e, SkipExample) else refuse(sample, e)
            if not isinstance(error, SkipExample):
                raise error from e
            skipped.append(str(error))
        else:
            stack.append(example)
    stacked = stack.arrays()
    if stacked is None:
        return [Compose(last)(example) for example in stack.examples()]
    finish = _finisher(transform, last)
    return Batch(stacked, finish) if _images_of(stacked).dtype == np.uint8 else Batch(finish(stacked))


def _each_and_last(transform: Any) -> tuple[list[Any], list[Any]]:
    members = transform.transforms if isinstance(transform, Compose) else [transform]
    num_each = len(members)
    while num_each and getattr(members[num_each - 1], "is_pixelwise", False):
        num_each -= 1
    return members[:num_each], members[num_each:]


def _writers(members: list[Any]) -> tuple[list[Any], list[Any]]:
    """The members, divided where the last ones begin of which every one can write into the batch."""
    k = len(members)
    while k and isinstance(members[k - 1], Transform) and _takes_out(type(members[k - 1]).image):
        k -= 1
    return members[:k], members[k:]


@functools.cache
def _takes_out(function: Callable[..., Any]) -> bool:
    return "out" in inspect.signature(function).parameters


def sees_a_window(transform: Any, epoch: int) -> bool:
    """Whether a transform looks at one window of its image and keeps none of its memory: one that resizes is first.

    Such a window is all that needs to be decoded: see :class:`dbrdist.datasets.image.images.Encoded`.
    """
    each, _ = _each_and_last(at_epoch(transform, epoch))
    return bool(each) and type(each[0]) in (RandomResizedCrop, CenterResizedCrop, Resize)


def _images_of(arrays: Array | tuple[Array, ...]) -> Array:
    return arrays[0] if isinstance(arrays, tuple) else arrays


class _Stack:
    """Examples as they come: images of one shape go into one array at once."""

    def __init__(self, num_examples: int, wanted: bool) -> None:
        self._num_examples = num_examples
        self._wanted = wanted
        self._images: Any = None
        self._row: Any = None  # where the image in hand may have been written
        self._others: list[Any] = []  # the entries behind the image; the whole examples where nothing is stacked

    def next_row(self) -> tuple[Array, ...]:
        """The place of the next image, where there is one for it: in a batch that was begun, by others too."""
        if self._images is None and self._wanted and not self._others:
            self._images = reused.begun(self._num_examples)
        self._row = None if self._images is None else self._images[len(self._others)]
        return () if self._row is None else (self._row,)

    def append(self, example: Any) -> None:
        """One more example; its image may stand in its row already."""
        image = example[0] if isinstance(example, tuple) and example else example
        if not self._others and self._wanted:
            self._begin(image)
            self._is_tuple = isinstance(example, tuple)
        if self._images is not None and not self._fits(example, image):
            self._others, self._images = self.examples(), None
        if self._images is None:
            self._others.append(example)
        else:
            if image is not self._row:
                self._images[len(self._others)] = image
            self._others.append(example[1:] if self._is_tuple else ())

    def _begin(self, image: Array) -> None:
        """Find memory for images like the first one."""
        if getattr(image, "ndim", 0) != 3:
            self._images = None
        elif self._images is None or not self._takes(image):
            self._images = reused.empty((self._num_examples, *image.shape), image.dtype)

    def _takes(self, image: Array) -> bool:
        shape = getattr(image, "shape", None)
        return bool(shape == self._images.shape[1:] and image.dtype == self._images.dtype)

    def _fits(self, example: Any, image: Array) -> bool:
        if isinstance(example, tuple) != self._is_tuple or not self._takes(image):
            return False
        return not self._others or not self._is_tuple or len(example) == 1 + len(self._others[0])

    def examples(self) -> list[Any]:
        """What was appended, one by one."""
        if self._images is None or not self._others:
            return self._others
        return [(image, *rest) if self._is_tuple else image for image, rest in zip(self._images, self._others)]

    def arrays(self) -> Any:
        """The images as (N, H, W, C) and the other entries as arrays; None where that cannot be."""
        if self._images is None or not self._others:
            return None
        images = self._images[: len(self._others)]
        if not self._is_tuple:
            return images
        try:
            return (images, *(np.asarray(column) for column in zip(*self._others)))
        except ValueError:  # entries of different shapes: left as a list of examples
            return None


_finishers: weakref.WeakKeyDictionary[Any, Finisher] = weakref.WeakKeyDictionary()


def _finisher(transform: Compose | ToCHW, last: Sequence[Any]) -> Finisher:
    """The last members of a transform for whole batches; one object for each transform, which keeps its tables."""
    try:
        return _finishers.setdefault(transform, Finisher(last))
    except TypeError:  # a transform without a hash, or that takes no weak reference
        return Finisher(last)


class Finisher:
    """The pixelwise end of a transform, for a batch of images (N, H, W, C) and what comes with them.

    Where that is what each value becomes in its channel, in uint8 of 256 values, a table holds the results; taking them
    from there, in the type that is wanted, is one pass over memory instead of three. The numbers are the same.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self._compose = Compose(members)
        self._tables: dict[Any, Any] = {}

    def __reduce__(self) -> Any:
        return Finisher, (self._compose.transforms,)

    def __call__(self, arrays: Any, dtype: DTypeLike | None = None) -> Any:
        images = _images_of(arrays)
        found = self._from_table(images, dtype)
        if found is None:
            return _cast(self._compose(arrays), dtype)
        rest = arrays[1:] if isinstance(arrays, tuple) else ()
        return (found, *rest) if isinstance(arrays, tuple) else found

    def _from_table(self, images: Array, dtype: Any) -> Any:
        *values, layout = self._compose.transforms
        if images.dtype != np.uint8 or not _is_table(values, layout):
            return None
        is_host, c = isinstance(images, np.ndarray), images.shape[-1]
        table = self._table(values, c, dtype) if is_host else self._on_device(values, images, dtype)
        found = kernels.by_table(images, table) if images.ndim == 4 else None
        if found is None and is_host:
            values_of = lookup(images, table)
            found = None if values_of is None else np.moveaxis(values_of, -1, -3)
        return found

    def _table(self, values: Sequence[Any], num_channels: int, dtype: Any) -> Array:
        key = (num_channels, dtype)
        table = self._tables.get(key)
        if table is None:
            every = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], num_channels, axis=2)
            table = _cast(Compose(values)(every).astype(np.float32, copy=False), dtype)[0]
            self._tables[key] = table
        return table

    def _on_device(self, values: Sequence[Any], images: Array, dtype: Any) -> Array:
        """The table on the GPU of the images, so that they have the same numbers there as on the host."""
        device = device_of(images)
        key = (images.shape[-1], dtype, device)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = device.send(self._table(values, images.shape[-1], dtype))
        return table


def _is_table(values: Sequence[Any], layout: Any) -> bool:
    return isinstance(layout, ToCHW) and all(type(t) is Normalize for t in values)


def _cast(arrays: Array | tuple[Array, ...], dtype: DTypeLike) -> Any:
    images = _images_of(arrays)
    if dtype is None or images.dtype == dtype or images.dtype.kind not in "fV":
        return arrays
    cast = images.astype(dtype)
    return (cast, *arrays[1:]) if isinstance(arrays, tuple) else cast
