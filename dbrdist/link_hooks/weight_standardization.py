"""Weights with mean 0 and variance 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbrdist import functions as F
from dbrdist.core.tape.checks import expected
from dbrdist.link_hooks.weight import WeightHook

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.variable import Variable


class WeightStandardization(WeightHook):
    """Forward sees (W - mean) / (std + eps), taken over all axes but the first (Qiao et al. 2019, arXiv:1903.10520).

    Args:
        eps: added to the standard deviation.
        weight_name: the parameter of the link.
        name: of the hook; default ``WeightStandardization``.

    Example:
        >>> layer = L.Convolution2D(3, 2, 3)
        >>> layer.add_hook(dbrdist.link_hooks.WeightStandardization())
        Convolution2D(in_channels=3, out_channels=2, ksize=3, stride=(1, 1), pad=(0, 0), nobias=False, dilate=(1, 1),
        groups=1)
        >>> layer(np.ones((1, 3, 5, 5), np.float32)).shape
        (1, 2, 3, 3)
    """

    name = "WeightStandardization"

    def __init__(self, *, eps: float = 1e-5, weight_name: str = "W", name: str | None = None) -> None:
        super().__init__(weight_name, name)
        self.eps = eps

    def weight(self, link: Link, W: Variable) -> Variable:
        """The weight ``W`` of ``link`` with mean 0 and variance 1 for each output; it has two axes or more."""
        if W.ndim < 2:
            raise expected("WeightStandardization", self.weight_name, "two axes or more", W)
        axes = tuple(range(1, W.ndim))
        centred = W - F.broadcast_to(F.mean(W, axis=axes, keepdims=True), W.shape)
        variance = F.mean(centred * centred, axis=axes, keepdims=True)
        # Rows of equal weights have no deviation: the root's derivative there would be infinite.
        is_flat = variance.array == 0
        deviation = F.where(is_flat, variance, F.sqrt(F.where(is_flat, variance + 1, variance)))
        return centred / F.broadcast_to(deviation + self.eps, W.shape)
