"""Links around relatives of convolution: filters that differ from place to place, windows that follow the image."""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from dbrdist import functions as F
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import Sizes
from dbrdist.core.tape.checks import expected
from dbrdist.functions.convolution import pair
from dbrdist.links.convolution import Convolution2D, pairs
from dbrdist.links.initializers import Constant, Initializer, InitialValue, Normal, get_initializer

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand


class _OfOnePlace(Normal):
    """LeCunNormal for filters (O, OH, OW, C, kh, kw): each place of the result sees C kh kw numbers."""

    def deviation(self, shape: tuple[int, ...]) -> float:
        return sqrt(1 / max(prod(shape[3:]), 1))


class LocalConvolution2D(Link):
    """Convolution with different filters at each position: W (O, OH, OW, C, kh, kw) and b (O, OH, OW).

    Args:
        in_channels: channels of the input; None takes them from the first batch.
        out_channels: channels of the output.
        in_size: rows and columns of the input, a number or a pair; None takes them from the first batch.
        ksize, stride: a number, or a pair for rows and columns.
        nobias: leave out b.
        initialW, initial_bias: initializer, array or number; None for a normal distribution of variance
            1 / (C kh kw), and 0.

    Example:
        >>> L.LocalConvolution2D(1, 2, 5, 3)(np.ones((1, 1, 5, 5), np.float32)).shape
        (1, 2, 3, 3)
    """

    def __init__(
        self, in_channels: int | None, out_channels: int, in_size: Sizes = None, ksize: Sizes = None, stride: Sizes = 1,
        nobias: bool = False, initialW: InitialValue = None, initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if ksize is None:
            raise expected("LocalConvolution2D", "ksize", "a number or a pair", "None")
        self.ksize, self.stride = pairs(self, ksize=ksize, stride=stride)
        self.out_channels = out_channels
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW, _OfOnePlace()))
            self.b = None if nobias else Parameter(get_initializer(initial_bias, Constant(0)))
        if in_channels is not None and in_size is not None:
            self._initialize_params(in_channels, *pairs(self, in_size=in_size))

    def _initialize_params(self, in_channels: int, in_size: tuple[int, int]) -> None:
        ksize = pair(self.ksize)  # Chainer pickled a number
        out = tuple((n - k) // s + 1 for n, k, s in zip(in_size, ksize, self.stride))
        if min(out) < 1:
            raise expected("LocalConvolution2D", "in_size", f"at least the window {ksize}", str(tuple(in_size)))
        self.W.initialize((self.out_channels, *out, in_channels, *ksize))
        if self.b is not None:
            self.b.initialize((self.out_channels, *out))

    def forward(self, x: Any) -> Any:
        """``x`` (N, C, H, W) to (N, O, OH, OW)."""
        if not self.W.is_initialized:
            self._initialize_params(x.shape[1], x.shape[2:])
        return F.local_convolution_2d(x, self.W, self.b, self.stride)


class DeformableConvolution2D(Chain):
    """Deformable convolution: ``offset_conv`` tells from the image where the windows of ``deform_conv`` are
    (Dai et al. 2017).

    Args:
        in_channels: channels of the input; None takes them from the first batch.
        out_channels: channels of the output.
        ksize, stride, pad: a number, or a pair for rows and columns.
        offset_nobias, offset_initialW, offset_initial_bias: of the convolution that gives the offsets; None for 0, so
            that it starts as a plain convolution.
        deform_nobias, deform_initialW, deform_initial_bias: of the convolution at these places; None for LeCunNormal
            and 0.

    Example:
        >>> L.DeformableConvolution2D(2, 4, 3)(np.ones((1, 2, 5, 5), np.float32)).shape
        (1, 4, 3, 3)
    """

    def __init__(
        self, in_channels: int | None, out_channels: int, ksize: Sizes, stride: Sizes = 1, pad: Sizes = 0,
        offset_nobias: bool = False, offset_initialW: Initializer | None = None,
        offset_initial_bias: Any = None, deform_nobias: bool = False, deform_initialW: Any = None,
        deform_initial_bias: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        ((kh, kw),) = pairs(self, ksize=ksize)
        offset_initialW = Constant(0) if offset_initialW is None else offset_initialW
        with self.init_scope():
            self.offset_conv = Convolution2D(
                in_channels, 2 * kh * kw, (kh, kw), stride, pad, offset_nobias, offset_initialW, offset_initial_bias
            )
            self.deform_conv = _Sampler(
                in_channels, out_channels, (kh, kw), stride, pad, deform_nobias, deform_initialW, deform_initial_bias
            )

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_channels, H, W) to (N, out_channels, OH, OW)."""
        return self.deform_conv(x, self.offset_conv(x))


class _Sampler(Convolution2D):
    """A convolution at places that are given."""

    dilate, groups = (1, 1), 1  # of links that Chainer pickled, too

    def forward(self, x: Operand, offset: Operand) -> Any:  # type: ignore[override]
        """(N, in_channels, H, W) and offsets (N, 2 kh kw, OH, OW) to (N, out_channels, OH, OW)."""
        if not self.W.is_initialized:
            self._initialize_params(x.shape[1])
            if self.b is not None and not self.b.is_initialized:  # as Chainer pickled it
                self.b.initialize(self.out_channels)
        return F.deformable_convolution_2d_sampler(x, offset, self.W, self.b, self.stride, self.pad)


explain_constructors(globals())
