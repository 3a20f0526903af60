"""Links around convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist import functions as F
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import Sizes, Whole
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, as_array
from dbrdist.core.usage.mistakes import warn
from dbrdist.functions.convolution import pair
from dbrdist.links.connection import see_biases
from dbrdist.links.initializers import Constant, InitialValue, get_initializer


def see_channels_first(where: str, x: Any) -> None:
    """Warn where the first images of a link without a number of input channels look like (N, H, W, C)."""
    shape = x.shape
    if len(shape) == 4 and shape[1] == shape[2] >= 8 and shape[3] in (1, 3, 4):
        warn(
            f"{where}: x: expected images (N, C, H, W), got shape {shape}, which looks like (N, H, W, C); write "
            f"x.transpose(0, 3, 1, 2), or give in_channels={shape[1]} if these are channels"
        )


def pairs(link: Link, **sizes: Any) -> list[tuple[int, int]]:
    """Each argument as numbers for rows and columns."""
    return [pair(value, type(link).__name__, name) for name, value in sizes.items()]


class Convolution2D(Link):
    """Two-dimensional convolution with its filters W (out_channels, in_channels/groups, kh, kw) and bias b.

    Args:
        in_channels: channels of the input; None takes them from the first batch. ``Convolution2D(out_channels, ksize)``
            means the same.
        out_channels: channels of the output.
        ksize, stride, pad, dilate: a number, or a pair for rows and columns.
        nobias: leave out b.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.
        groups: split channels into this many independent groups.

    Example:
        >>> L.Convolution2D(3, 16, 3, stride=2, pad=1)(np.ones((1, 3, 8, 8), np.float32)).shape
        (1, 16, 4, 4)
    """

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None, *, dilate: Sizes = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        self.ksize, self.groups, self.out_channels = ksize, groups, out_channels
        _, self.stride, self.pad, self.dilate = pairs(self, ksize=ksize, stride=stride, pad=pad, dilate=dilate)
        if not isinstance(out_channels, (int, np.integer)):
            raise expected(type(self).__name__, "out_channels", "an integer", out_channels)
        if out_channels % self.groups:
            raise expected("Convolution2D", "out_channels", f"a multiple of groups={groups}", str(out_channels))
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW))
            self.b = None if nobias else Parameter(get_initializer(initial_bias, Constant(0)), out_channels)
        if in_channels is not None:
            self._initialize_params(in_channels)

    def _initialize_params(self, in_channels: int) -> None:
        if in_channels % self.groups:
            raise expected("Convolution2D", "in_channels", f"a multiple of groups={self.groups}", str(in_channels))
        self.W.initialize((self.out_channels, in_channels // self.groups, *pair(self.ksize)))

    @property
    def printable_specs(self) -> Any:
        """Pairs shown by ``repr``."""
        in_channels = self.W.shape[1] * self.groups if self.W.is_initialized else None
        yield from {
            "in_channels": in_channels, "out_channels": self.out_channels, "ksize": self.ksize, "stride": self.stride,
            "pad": self.pad, "nobias": self.b is None, "dilate": self.dilate, "groups": self.groups,
        }.items()  # fmt: skip

    @classmethod
    def from_params(
        cls, W: Any, b: Any = None, stride: Any = 1, pad: Any = 0, nobias: bool = False, *,
        dilate: Any = 1, groups: int = 1,
    ) -> Convolution2D:  # fmt: skip
        """A link with these filters (out_channels, in_channels/groups, kh, kw) and biases, which are copied.

        Args:
            W: the filters; ``in_channels``, ``out_channels`` and ``ksize`` follow from their shape.
            b: the biases (out_channels,); None for zeros.
            stride, pad, nobias, dilate, groups: as in the constructor.
        """
        see_biases(cls, W.shape[0], b)
        return cls(
            W.shape[1] * groups, W.shape[0], W.shape[2:], stride, pad, nobias, as_array(W),
            None if b is None else as_array(b), dilate=dilate, groups=groups,
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        """The convolution of a batch of images.

        Args:
            x: images, shape (N, in_channels, H, W).

        Returns:
            A Variable of shape (N, out_channels, OH, OW).
        """
        W = self.W
        if W._array is None:
            see_channels_first("Convolution2D", x)
            self._initialize_params(x.shape[1])
        return F.convolution_2d(x, W, self.b, self.stride, self.pad, dilate=self.dilate, groups=self.groups)


class Deconvolution2D(Link):
    """Two-dimensional transposed convolution with its filters W (in_channels, out_channels/groups, kh, kw) and bias b.

    Args:
        in_channels: channels of the input; None takes them from the first batch. ``Deconvolution2D(out_channels,
            ksize)`` means the same.
        out_channels: channels of the output.
        ksize, stride, pad, dilate: a number, or a pair for rows and columns.
        nobias: leave out b.
        outsize: rows and columns of the output; None for the smallest that fits.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.
        groups: split channels into this many independent groups.

    Example:
        >>> L.Deconvolution2D(16, 3, 4, stride=2, pad=1)(np.ones((1, 16, 4, 4), np.float32)).shape
        (1, 3, 8, 8)
    """

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, outsize: Sizes = None, initialW: InitialValue = None, initial_bias: InitialValue = None,
        *, dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        self.ksize, self.outsize, self.groups, self.out_channels = ksize, outsize, groups, out_channels
        _, self.stride, self.pad, self.dilate = pairs(self, ksize=ksize, stride=stride, pad=pad, dilate=dilate)
        if not isinstance(out_channels, (int, np.integer)):
            raise expected(type(self).__name__, "out_channels", "an integer", out_channels)
        if out_channels % self.groups:
            raise expected("Deconvolution2D", "out_channels", f"a multiple of groups={groups}", str(out_channels))
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW))
            self.b = None if nobias else Parameter(get_initializer(initial_bias, Constant(0)), out_channels)
        if in_channels is not None:
            self._initialize_params(in_channels)

    def _initialize_params(self, in_channels: int) -> None:
        if in_channels % self.groups:
            raise expected("Deconvolution2D", "in_channels", f"a multiple of groups={self.groups}", str(in_channels))
        self.W.initialize((in_channels, self.out_channels // self.groups, *pair(self.ksize)))

    def forward(self, x: Operand) -> Any:
        """The transposed convolution of a batch of images.

        Args:
            x: images, shape (N, in_channels, H, W).

        Returns:
            A Variable of shape (N, out_channels, OH, OW).
        """
        if not self.W.is_initialized:
            see_channels_first("Deconvolution2D", x)
            self._initialize_params(x.shape[1])
        return F.deconvolution_2d(
            x, self.W, self.b, self.stride, self.pad, self.outsize, dilate=self.dilate, groups=self.groups
        )  # fmt: skip
