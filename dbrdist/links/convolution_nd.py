"""Convolutions over any number of axes, and special forms over two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from dbrdist import functions as F
from dbrdist.core.model.chain import ChainList
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import Sizes, Whole
from dbrdist.core.tape.checks import expected, wrong_type
from dbrdist.core.tape.variable import Operand, as_array
from dbrdist.functions.convolution import pair
from dbrdist.functions.convolution_nd import each_axis
from dbrdist.links.connection import see_biases
from dbrdist.links.convolution import Convolution2D, pairs
from dbrdist.links.initializers import Constant, InitialValue, get_initializer


class _FiltersND(Link):
    """Filters W and bias b over ``ndim`` axes, whose input channels may follow from the first batch."""

    def __init__(
        self, ndim: int, in_channels: Whole, out_channels: Sizes, ksize: Sizes, stride: Sizes, pad: Sizes, nobias: bool,
        initialW: InitialValue, initial_bias: InitialValue, dilate: Sizes, groups: int,
    ) -> None:  # fmt: skip
        super().__init__()
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        if ksize is None:
            raise self._refused("ksize", f"an integer or {ndim} of them", "None")
        self.ndim, self.out_channels, self.groups = ndim, out_channels, groups
        self.ksize, self.stride, self.pad, self.dilate = (
            each_axis(type(self).__name__, name, value, ndim)
            for name, value in (("ksize", ksize), ("stride", stride), ("pad", pad), ("dilate", dilate))
        )
        if not isinstance(out_channels, (int, np.integer)):
            raise expected(type(self).__name__, "out_channels", "an integer", out_channels)
        if out_channels % self.groups:
            raise self._refused("out_channels", f"a multiple of groups={groups}", str(out_channels))
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW))
            self.b = None if nobias else Parameter(get_initializer(initial_bias, Constant(0)), out_channels)
        if in_channels is not None:
            self._initialize_params(in_channels)

    def _refused(self, argument: str, what: str, got: str) -> Exception:
        return expected(type(self).__name__, argument, what, got)

    def _initialize_params(self, in_channels: int) -> None:
        if in_channels % self.groups:
            raise self._refused("in_channels", f"a multiple of groups={self.groups}", str(in_channels))
        self.W.initialize((*self._channels(in_channels), *self.ksize))

    def _channels(self, in_channels: int) -> tuple[int, int]:
        """The first two axes of W."""
        raise NotImplementedError

    def _expect_axes(self, x: Operand) -> None:
        """Look at the first batch before W takes its size from it."""
        ndim = len(self.ksize)  # the link's own is not among what Chainer pickled
        if len(x.shape) != ndim + 2:
            raise self._refused("x", f"{ndim + 2} axes (N, C, ...)", f"shape {tuple(x.shape)}")
        if not self.W.is_initialized:
            self._initialize_params(x.shape[1])


class ConvolutionND(_FiltersND):
    """Convolution over ``ndim`` axes with its filters W (out_channels, in_channels/groups, ...) and bias b.

    Args:
        ndim: how many axes follow the channels.
        in_channels: channels of the input; None takes them from the first batch. ``ConvolutionND(ndim, out_channels,
            ksize)`` means the same.
        out_channels: channels of the output.
        ksize, stride, pad, dilate: a number, or one for each axis.
        nobias: leave out b.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.
        cover_all: add windows at the end until each element is seen.
        groups: split channels into this many independent groups.

    Example:
        >>> L.ConvolutionND(1, 2, 4, 3)(np.ones((1, 2, 8), np.float32)).shape
        (1, 4, 6)
    """

    def __init__(
        self, ndim: int, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1,
        pad: Sizes = 0, nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None,
        cover_all: bool = False, dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            ndim, in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, dilate, groups
        )
        self.cover_all = cover_all

    _takes_ndim: ClassVar[bool] = True  # whether the constructor is told how many axes there are

    @classmethod
    def from_params(
        cls, W: Any, b: Any = None, stride: Any = 1, pad: Any = 0, nobias: bool = False, *,
        cover_all: bool = False, dilate: Any = 1, groups: int = 1,
    ) -> ConvolutionND:  # fmt: skip
        """A link with these filters (out_channels, in_channels/groups, ...) and biases, which are copied.

        Args:
            W: the filters; the channels and ``ksize`` follow from their shape.
            b: the biases (out_channels,); None for zeros.
            stride, pad, nobias, cover_all, dilate, groups: as in the constructor.
        """
        see_biases(cls, W.shape[0], b)
        ndim = (len(W.shape) - 2,) if cls._takes_ndim else ()
        biases = None if b is None else as_array(b)
        return cls(
            *ndim, W.shape[1] * groups, W.shape[0], W.shape[2:], stride, pad, nobias, as_array(W), biases, cover_all,
            dilate, groups,
        )  # fmt: skip

    def _channels(self, in_channels: int) -> tuple[int, int]:
        return self.out_channels, in_channels // self.groups

    def forward(self, x: Operand) -> Any:
        """The convolution of a batch.

        Args:
            x: shape (N, in_channels, D_1, ..., D_ndim).

        Returns:
            A Variable of shape (N, out_channels, ...).
        """
        self._expect_axes(x)
        return F.convolution_nd(
            x, self.W, self.b, self.stride, self.pad, self.cover_all, self.dilate, self.groups
        )  # fmt: skip


class Convolution1D(ConvolutionND):
    """:class:`ConvolutionND` over one axis: x (N, C, L), W (out_channels, in_channels/groups, k).

    Args:
        in_channels: number of input channels; None takes it from the first input.
        out_channels: number of output channels (filters).
        ksize: length of the window, a number or one for each axis; without it the first two arguments are
            ``out_channels`` and ``ksize``.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        nobias: leave out the bias; default False.
        initialW: initializer of the weights, an array or a number; None for LeCunNormal.
        initial_bias: initializer of the bias; None for zeros.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> L.Convolution1D(2, 4, 3)(np.ones((1, 2, 8), np.float32)).shape
        (1, 4, 6)
    """

    _takes_ndim = False

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None, cover_all: bool = False,
        dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            1, in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, cover_all, dilate, groups
        )


class Convolution3D(ConvolutionND):
    """:class:`ConvolutionND` over three axes: x (N, C, D, H, W), W (out_channels, in_channels/groups, kd, kh, kw).

    Args:
        in_channels: number of input channels; None takes it from the first input.
        out_channels: number of output channels (filters).
        ksize: length of the window, a number or one for each axis; without it the first two arguments are
            ``out_channels`` and ``ksize``.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        nobias: leave out the bias; default False.
        initialW: initializer of the weights, an array or a number; None for LeCunNormal.
        initial_bias: initializer of the bias; None for zeros.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> L.Convolution3D(2, 4, 3)(np.ones((1, 2, 5, 5, 5), np.float32)).shape
        (1, 4, 3, 3, 3)
    """

    _takes_ndim = False

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None, cover_all: bool = False,
        dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            3, in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, cover_all, dilate, groups
        )


class DeconvolutionND(_FiltersND):
    """The transpose of :class:`ConvolutionND`, with its filters W (in_channels, out_channels/groups, ...) and bias b.

    Args:
        ndim: how many axes follow the channels.
        in_channels: channels of the input; None takes them from the first batch. ``DeconvolutionND(ndim, out_channels,
            ksize)`` means the same.
        out_channels: channels of the output.
        ksize, stride, pad, dilate: a number, or one for each axis.
        nobias: leave out b.
        outsize: the sizes of the output; None for the smallest that fit.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.
        groups: split channels into this many independent groups.

    Example:
        >>> L.DeconvolutionND(1, 2, 4, 2, stride=2)(np.ones((1, 2, 8), np.float32)).shape
        (1, 4, 16)
    """

    def __init__(
        self, ndim: int, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1,
        pad: Sizes = 0, nobias: bool = False, outsize: Sizes = None, initialW: InitialValue = None,
        initial_bias: InitialValue = None, dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            ndim, in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, dilate, groups
        )
        self.outsize = None if outsize is None else each_axis(type(self).__name__, "outsize", outsize, ndim)

    def _channels(self, in_channels: int) -> tuple[int, int]:
        return in_channels, self.out_channels // self.groups

    def forward(self, x: Operand) -> Any:
        """The transposed convolution of a batch.

        Args:
            x: shape (N, in_channels, D_1, ..., D_ndim).

        Returns:
            A Variable of shape (N, out_channels, ...).
        """
        self._expect_axes(x)
        return F.deconvolution_nd(
            x, self.W, self.b, self.stride, self.pad, self.outsize, self.dilate, self.groups
        )  # fmt: skip


class Deconvolution1D(DeconvolutionND):
    """:class:`DeconvolutionND` over one axis: x (N, C, L), W (in_channels, out_channels/groups, k).

    Args:
        in_channels: number of input channels; None takes it from the first input.
        out_channels: number of output channels (filters).
        ksize: length of the window, a number or one for each axis; without it the first two arguments are
            ``out_channels`` and ``ksize``.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        nobias: leave out the bias; default False.
        outsize: sizes of the output; None for the smallest that fit.
        initialW: initializer of the weights, an array or a number; None for LeCunNormal.
        initial_bias: initializer of the bias; None for zeros.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> L.Deconvolution1D(2, 4, 2, stride=2)(np.ones((1, 2, 8), np.float32)).shape
        (1, 4, 16)
    """

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, outsize: Sizes = None, initialW: InitialValue = None, initial_bias: InitialValue = None,
        dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            1, in_channels, out_channels, ksize, stride, pad, nobias, outsize, initialW, initial_bias, dilate, groups
        )


class Deconvolution3D(DeconvolutionND):
    """:class:`DeconvolutionND` over three axes: x (N, C, D, H, W), W (in_channels, out_channels/groups, kd, kh, kw).

    Args:
        in_channels: number of input channels; None takes it from the first input.
        out_channels: number of output channels (filters).
        ksize: length of the window, a number or one for each axis; without it the first two arguments are
            ``out_channels`` and ``ksize``.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        nobias: leave out the bias; default False.
        outsize: sizes of the output; None for the smallest that fit.
        initialW: initializer of the weights, an array or a number; None for LeCunNormal.
        initial_bias: initializer of the bias; None for zeros.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> L.Deconvolution3D(2, 1, 2, stride=2)(np.ones((1, 2, 2, 2, 2), np.float32)).shape
        (1, 1, 4, 4, 4)
    """

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, outsize: Sizes = None, initialW: InitialValue = None, initial_bias: InitialValue = None,
        dilate: Sizes = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            3, in_channels, out_channels, ksize, stride, pad, nobias, outsize, initialW, initial_bias, dilate, groups
        )


class DepthwiseConvolution2D(Link):
    """Each channel convolved by itself, with filters W (channel_multiplier, in_channels, kh, kw) and bias b.

    The default W has the variance 1 / (in_channels kh kw), as in Chainer, though each output sees kh kw elements only:
    for outputs as large as the inputs give ``initialW=LeCunNormal(scale=in_channels**0.5)``.

    Args:
        in_channels: channels of the input; None takes them from the first batch.
        channel_multiplier: filters for each channel; the output has ``in_channels * channel_multiplier`` channels.
        ksize, stride, pad: a number, or a pair for rows and columns.
        nobias: leave out b.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.

    Example:
        >>> L.DepthwiseConvolution2D(3, 2, 3)(np.ones((1, 3, 5, 5), np.float32)).shape
        (1, 6, 3, 3)
    """

    def __init__(
        self, in_channels: int | None, channel_multiplier: int, ksize: Sizes, stride: Sizes = 1, pad: Sizes = 0,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.channel_multiplier = channel_multiplier
        self.ksize = ksize
        _, self.stride, self.pad = pairs(self, ksize=ksize, stride=stride, pad=pad)
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW))
            self.b = None if nobias else Parameter(get_initializer(initial_bias, Constant(0)))
        if in_channels is not None:
            self._initialize_params(in_channels)

    def _initialize_params(self, in_channels: int) -> None:
        self.W.initialize((self.channel_multiplier, in_channels, *pair(self.ksize)))
        if self.b is not None and not self.b.is_initialized:
            self.b.initialize(self.channel_multiplier * in_channels)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_channels, H, W) to (N, in_channels * channel_multiplier, OH, OW)."""
        if not self.W.is_initialized:
            self._initialize_params(x.shape[1])
        return F.depthwise_convolution_2d(x, self.W, self.b, self.stride, self.pad)


class DilatedConvolution2D(Convolution2D):
    """:class:`Convolution2D` with ``dilate`` before ``nobias``, and without groups.

    Args:
        in_channels: number of input channels; None takes it from the first input.
        out_channels: number of output channels (filters).
        ksize: length of the window, a number or one for each axis; without it the first two arguments are
            ``out_channels`` and ``ksize``.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        dilate: distance between elements of a window; default 1.
        nobias: leave out the bias; default False.
        initialW: initializer of the weights, an array or a number; None for LeCunNormal.
        initial_bias: initializer of the bias; None for zeros.

    Example:
        >>> L.DilatedConvolution2D(1, 4, 3, dilate=2)(np.ones((1, 1, 7, 7), np.float32)).shape
        (1, 4, 3, 3)
    """

    groups = 1  # of links that Chainer pickled, too

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        dilate: Sizes = 1, nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, dilate=dilate
        )  # fmt: skip


class MLPConvolution2D(ChainList):
    """A convolution and then convolutions of one pixel, with an activation between them (Lin et al. 2013).

    Args:
        in_channels: channels of the input; None takes them from the first batch. ``MLPConvolution2D(out_channels,
            ksize)`` means the same.
        out_channels: channels of the output of each convolution, a sequence.
        ksize, stride, pad: of the first convolution; a number, or a pair for rows and columns.
        activation: between convolutions, not after the last one.
        conv_init, bias_init: initializers of all filters and biases.

    Example:
        >>> L.MLPConvolution2D(3, (8, 4), 3)(np.ones((1, 3, 6, 6), np.float32)).shape
        (1, 4, 4, 4)
    """

    def __init__(
        self, in_channels: Sizes, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        activation: Callable[[Any], Any] = F.relu, conv_init: InitialValue = None,
        bias_init: InitialValue = None,
    ) -> None:  # fmt: skip
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        if np.ndim(out_channels) != 1 or not len(out_channels):
            raise wrong_type("MLPConvolution2D", "out_channels", "a number for each convolution", out_channels)
        values = {"initialW": conv_init, "initial_bias": bias_init}
        super().__init__(
            Convolution2D(in_channels, out_channels[0], ksize, stride, pad, **values),
            *(Convolution2D(c, o, 1, **values) for c, o in itertools.pairwise(out_channels)),
        )
        self.activation = activation

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_channels, H, W) to (N, out_channels[-1], OH, OW)."""
        *hidden, last = self.children()
        for convolution in hidden:
            x = self.activation(convolution(x))
        return last(x)


explain_constructors(globals())
