"""What a transform is, and several of them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.datasets.image.images import (
    Image,
)


class Transform:
    """Base of image transforms: implement ``image(image, rng)``.

    ``is_random`` says that it draws from ``rng``; ``is_pixelwise`` that it takes any axes before H, W, C, so that a
    whole batch is one call. Where ``image`` takes a third argument ``out``, an array (H, W, C) of undefined values in
    the batch, the result may be written there, and ``out`` returned; the image given may be ``out`` itself.

    Example:
        >>> class Invert(datasets.Transform):
        ...     def image(self, image, rng):
        ...         return 255 - image
    """

    is_random = False
    is_pixelwise = False

    def __call__(self, example: Any, rng: np.random.Generator | None = None, *out: Array) -> Any:
        if isinstance(example, tuple):
            return (self.image(example[0], rng, *out), *example[1:])
        return self.image(example, rng, *out)

    def image(self, image: Image, rng: Any) -> Image:
        """The transformed image.

        Args:
            image: an array (H, W, 3) of uint8, or what the transform before this one made of it.
            rng: the generator of this example in this epoch; None where nothing random is asked for.
            out: where a transform takes it, an array (H, W, C) in the batch that may hold the result.
        """
        raise NotImplementedError(f"{type(self).__name__} must define image(image, rng)")

    def at_epoch(self, epoch: int) -> Any:
        """The transform for ``epoch``, from 0; itself, unless it changes over the run."""
        return self


class Compose:
    """Transforms one after the other; they draw from the same ``rng`` in this order.

    Members are transforms of this module or your own callables ``(example, rng)``.

    Args:
        transforms: the transforms, in the order in which they are applied.

    Example:
        >>> both = datasets.Compose([datasets.CenterCrop(2), datasets.ToCHW()])
        >>> both((np.zeros((4, 4, 3), np.uint8), 0), None)[0].shape
        (3, 2, 2)
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self.transforms = list(transforms)
        self._stages: dict[tuple[int, ...], Compose] = {}

    def __call__(self, example: Any, rng: np.random.Generator | None = None) -> Any:
        for t in self.transforms:
            example = t(example, rng)
        return example

    def at_epoch(self, epoch: int) -> Compose:
        """This with its members for ``epoch``: the same object for the same members."""
        members = [at_epoch(t, epoch) for t in self.transforms]
        if all(a is b for a, b in zip(members, self.transforms)):
            return self
        return self._stages.setdefault(tuple(map(id, members)), Compose(members))


def at_epoch(transform: Any, epoch: int) -> Any:
    """What stands for a transform in an epoch; a callable of the user's need not say."""
    method = getattr(transform, "at_epoch", None)
    return transform if method is None else method(epoch)


class ByEpoch(Transform):
    """A transform that depends on the epoch, for example for progressive resizing.

    ``ByEpoch({0: RandomResizedCrop(128), 10: RandomResizedCrop(192), 15: RandomResizedCrop(224)})``. Batches that hold
    the end of one epoch and the start of the next must not change their size there: end epochs with ``last='short'``.

    Args:
        stages: transforms by the epoch from which each holds, counted from 0; the first must be 0. The example takes
            the transform of its epoch, through the datasets' ``example_at`` and ``get_batch``.

    Example:
        >>> sizes = datasets.ByEpoch({0: datasets.CenterCrop(2), 5: datasets.CenterCrop(4)})
    """

    def __init__(self, stages: Mapping[int, Callable[..., Any]]) -> None:
        self.stages = dict(sorted(stages.items()))
        if not self.stages or min(self.stages) != 0 or not all(isinstance(e, (int, np.integer)) for e in self.stages):
            raise ValueError(f"expected transforms by epochs from 0 on, whole numbers, got {sorted(stages)}")

    def at_epoch(self, epoch: int) -> Any:
        """The transform that holds in ``epoch``, from 0."""
        return at_epoch(self.stages[max(e for e in self.stages if e <= epoch)], epoch)

    def __call__(self, example: Any, rng: Any = None) -> Any:
        """The first stage; datasets ask for that of the epoch."""
        return self.at_epoch(0)(example, rng)


def leaves_examples(transform: Any) -> bool:
    """Whether a transform changes no example in place: those of this package do not, a callable of the user's may."""
    if isinstance(transform, Compose):
        return all(map(leaves_examples, transform.transforms))
    if isinstance(transform, ByEpoch):
        return all(map(leaves_examples, transform.stages.values()))
    return isinstance(transform, Transform) and type(transform).__module__.startswith("dbrdist.")


def needs(rng: np.random.Generator | None, transform: Any) -> np.random.Generator:
    """``rng``, or a TypeError where a random transform was called without."""
    if rng is None:
        name = type(transform).__name__
        raise TypeError(f"expected a random generator as in {name}(...)(example, rng), got None")
    return rng
