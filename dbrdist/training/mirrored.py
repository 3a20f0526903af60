"""Evaluation with mirror images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.backend import empty
from dbrdist.core.tape.variable import Variable

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand


def mean_over_mirrored(network: Callable[[Operand], Variable], images: Operand) -> Variable:
    """The means of a network's outputs for images and for their mirror images, as the key `evaluation.flip` has them.

    Args:
        network: takes images and gives a Variable.
        images: an array or a Variable of shape (N, C, H, W).

    Example:
        >>> net = L.Convolution2D(3, 2, 3)
        >>> images = np.zeros((4, 3, 8, 8), np.float32)
        >>> training.mean_over_mirrored(net, images).shape
        (4, 2, 6, 6)
    """
    turned = _mirrored(images)
    return (network(images) + network(turned)) * 0.5


def _mirrored(images: Any) -> Any:
    """Images with left and right exchanged, arrays in the same order of memory."""
    if getattr(images, "ndim", 0) != 4:
        got = f"{images.ndim} axes" if hasattr(images, "ndim") else type(images).__name__
        raise ValueError(f"mean_over_mirrored: expected images (N, C, H, W) as inputs, got {got}")
    turned = images[:, :, :, ::-1]
    if not isinstance(images, Variable):
        turned, view = empty(images.shape, images.dtype, images), turned
        turned[...] = view
    return turned
