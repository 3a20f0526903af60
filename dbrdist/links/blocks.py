"""Links made of others or of one function: Maxout, Highway, SimplifiedDropconnect, Inception, InceptionBN."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from dbrdist import functions as F
from dbrdist.core.array.backend import is_array
from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import Sizes
from dbrdist.core.tape.checks import UnknownOptionError, expected, wrong_shape
from dbrdist.links.connection import Linear
from dbrdist.links.convolution import Convolution2D
from dbrdist.links.convolution_bn import conv_bn
from dbrdist.links.initializers import Initializer, InitialValue, get_initializer
from dbrdist.links.normalization import BatchNormalization

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand


class Maxout(Chain):
    """y_i = the maximum over j of (W_ij x + b_ij), from a :class:`Linear` named ``linear`` (Goodfellow et al. 2013).

    Args:
        in_size: elements per example; None takes them from the first input.
        out_size: outputs per example.
        pool_size: how many values each output is the maximum of.
        initialW: initializer, number, or array (out_size, pool_size, in_size); default LeCunNormal.
        initial_bias: likewise, an array being (out_size, pool_size); None leaves b out.

    Example:
        >>> L.Maxout(4, 3, 2)(np.ones((2, 4), np.float32)).shape
        (2, 3)
    """

    def __init__(
        self, in_size: int | None, out_size: int, pool_size: int, initialW: InitialValue = None,
        initial_bias: InitialValue = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_size, self.pool_size = out_size, pool_size
        shape = out_size, pool_size
        with self.init_scope():
            self.linear = Linear(
                in_size, out_size * pool_size, initial_bias is None,
                _with_rows("initialW", initialW, (*shape, in_size)), _with_rows("initial_bias", initial_bias, shape),
            )  # fmt: skip

    def forward(self, x: Any) -> Any:
        """``x`` (N, ...) to (N, out_size)."""
        return F.maxout(self.linear(x), self.pool_size)


def _with_rows(argument: str, initial: InitialValue, shape: tuple[int | None, ...]) -> Any:
    """An array whose first two axes are one; a function gets an array that has them; anything else as it is."""
    if callable(initial) and not isinstance(initial, (Initializer, type)):
        return functools.partial(_fill_rows, initial, shape[:2])
    if not is_array(initial) or not initial.ndim:
        return initial
    if initial.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, initial.shape)):
        raise expected("Maxout", argument, f"shape {shape}", initial)
    return initial.reshape(-1, *initial.shape[2:])


def _fill_rows(initial: Callable[[Any], Any], rows: tuple[int | None, ...], array: Array) -> None:
    """What is no lambda, so that the link can be pickled."""
    initial(array.reshape(*rows, *array.shape[1:]))


class Highway(Chain):
    """y = t a(plain(x)) + (1 - t) x with the gate t = sigmoid(transform(x)) (Srivastava et al. 2015, arXiv:1505.00387).

    Args:
        in_out_size: elements per example, of the input and of the output.
        nobias: leave out the biases of ``plain`` and ``transform``, two :class:`Linear`.
        activate: the function a.
        init_Wh, init_bh: initial values of ``plain``: initializer, array or number; None for LeCunNormal and 0.
        init_Wt, init_bt: likewise of ``transform``; a bias below 0 lets most of x through at first.

    Example:
        >>> L.Highway(4)(np.ones((2, 4), np.float32)).shape
        (2, 4)
    """

    def __init__(
        self, in_out_size: int, nobias: bool = False, activate: Callable[[Any], Any] = F.relu,
        init_Wh: Array | None = None, init_Wt: Any = None, init_bh: Any = None,
        init_bt: Any = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activate = activate
        with self.init_scope():
            self.plain = Linear(in_out_size, in_out_size, nobias, init_Wh, init_bh)
            self.transform = Linear(in_out_size, in_out_size, nobias, init_Wt, init_bt)

    def forward(self, x: Operand | Sequence[Sequence[float]]) -> Any:
        """``x`` (N, in_out_size) to the same shape."""
        gate = F.sigmoid(self.transform(x))
        return gate * self.activate(self.plain(x)) + (1 - gate) * x


class SimplifiedDropconnect(Link):
    """y = W' x + b with elements of W (out_size, in_size) dropped at random; see
    :func:`dbrdist.functions.simplified_dropconnect`.

    Args:
        in_size: elements per example; None takes them from the first input.
        out_size: outputs per example.
        ratio: the probability that an element of W is dropped.
        nobias: leave out b.
        initialW, initial_bias: initializer, array or number; None for LeCunNormal and 0.

    Example:
        >>> L.SimplifiedDropconnect(4, 3)(np.ones((2, 4), np.float32)).shape
        (2, 3)
    """

    def __init__(
        self, in_size: int | None, out_size: int, ratio: float = 0.5, nobias: bool = False,
        initialW: InitialValue = None, initial_bias: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_size, self.ratio = out_size, ratio
        with self.init_scope():
            self.W = Parameter(get_initializer(initialW), None if in_size is None else (out_size, in_size))
            self.b = (
                None if nobias else Parameter(get_initializer(0 if initial_bias is None else initial_bias), out_size)
            )  # fmt: skip

    def forward(
        self, x: Operand, train: bool = True, mask: Operand | None = None, use_batchwise_mask: bool = True
    ) -> Any:
        """(N, ...) to (N, out_size); ``train`` False drops nothing, ``mask`` has 0 for elements of W to drop.

        Args:
            x: the input (N, ...), to (N, out_size).
            train: False drops nothing; default True.
            mask: 0 for the elements of W to drop, 1 for the others; None draws it.
            use_batchwise_mask: whether each example has a mask of its own (default), or all have the same.
        """
        if not self.W.is_initialized:
            self.W.initialize((self.out_size, math.prod(x.shape[1:])))
        return F.simplified_dropconnect(x, self.W, self.b, self.ratio, train, mask, use_batchwise_mask)


class Inception(Chain):
    """The module of GoogLeNet: windows of 1, 3 and 5 pixels and a pooling, side by side (Szegedy et al. 2014,
    arXiv:1409.4842).

    Args:
        in_channels: channels of the input; None takes them from the first batch.
        out1, out3, out5: outputs of the convolutions with windows of 1, 3 and 5 pixels.
        proj3, proj5: outputs of the convolutions with windows of one pixel before those of 3 and 5.
        proj_pool: outputs of such a convolution after the pooling.
        conv_init, bias_init: initializers of all filters and biases.

    Example:
        >>> L.Inception(3, 4, 2, 4, 2, 4, 4)(np.ones((1, 3, 8, 8), np.float32)).shape
        (1, 16, 8, 8)
    """

    def __init__(
        self, in_channels: int | None, out1: int, proj3: int, out3: int, proj5: int, out5: int, proj_pool: int,
        conv_init: InitialValue = None, bias_init: InitialValue = None,
    ) -> None:  # fmt: skip
        super().__init__()
        values = {"initialW": conv_init, "initial_bias": bias_init}
        with self.init_scope():
            self.conv1 = Convolution2D(in_channels, out1, 1, **values)
            self.proj3 = Convolution2D(in_channels, proj3, 1, **values)
            self.conv3 = Convolution2D(proj3, out3, 3, pad=1, **values)
            self.proj5 = Convolution2D(in_channels, proj5, 1, **values)
            self.conv5 = Convolution2D(proj5, out5, 5, pad=2, **values)
            self.projp = Convolution2D(in_channels, proj_pool, 1, **values)

    def forward(self, x: Any) -> Any:
        """``x`` (N, in_channels, H, W) to (N, out1 + out3 + out5 + proj_pool, H, W)."""
        parts = [
            self.conv1(x),
            self.conv3(F.relu(self.proj3(x))),
            self.conv5(F.relu(self.proj5(x))),
            self.projp(F.max_pooling_2d(x, 3, stride=1, pad=1)),
        ]
        return F.relu(F.concat(parts, axis=1))


class InceptionBN(Chain):
    """:class:`Inception` with a batch normalization after each convolution, and two windows of 3 pixels instead of one
    of 5 (Ioffe and Szegedy 2015, arXiv:1502.03167).

    Args:
        in_channels: channels of the input; None takes them from the first batch.
        out1: outputs of the convolution with windows of one pixel; 0 leaves it out.
        proj3, out3: outputs of one convolution of 1 pixel and one of 3.
        proj33, out33: outputs of one convolution of 1 pixel and of two of 3.
        pooltype: 'max' or 'avg'.
        proj_pool: outputs of the convolution after the pooling; None leaves it out.
        stride: of the last convolution of each part and of the pooling; where ``out1`` is not 0, it is 1.
        conv_init: initializer of all filters.
        dtype: type of the batch normalizations.

    Example:
        >>> L.InceptionBN(3, 4, 2, 4, 2, 4, "avg", 4)(np.ones((2, 3, 8, 8), np.float32)).shape
        (2, 16, 8, 8)
    """

    def __init__(
        self, in_channels: int | None, out1: int, proj3: int, out3: int, proj33: int, out33: int, pooltype: str,
        proj_pool: int | None = None, stride: Sizes = 1, conv_init: InitialValue = None, dtype: DTypeLike | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if pooltype not in ("max", "avg"):
            raise UnknownOptionError("InceptionBN", "pooltype", "'max' or 'avg'", repr(pooltype))
        if out1 and stride not in (1, (1, 1)):
            raise wrong_shape("InceptionBN", "stride", f"1 where out1 is {out1}", repr(stride))
        if out1 and proj_pool is None:
            raise wrong_shape("InceptionBN", "proj_pool", f"a number of channels where out1 is {out1}", "None")
        self.out1, self.proj_pool, self.stride, self.pooltype = out1, proj_pool, stride, pooltype

        def add(name: str, c: int | None, o: int, ksize: int = 1, **options: Any) -> None:
            setattr(self, name, Convolution2D(c, o, ksize, nobias=True, initialW=conv_init, **options))
            setattr(self, name + "n", BatchNormalization(o, dtype=dtype))

        with self.init_scope():
            add("proj3", in_channels, proj3)
            add("conv3", proj3, out3, 3, pad=1, stride=stride)
            add("proj33", in_channels, proj33)
            add("conv33a", proj33, out33, 3, pad=1)
            add("conv33b", out33, out33, 3, pad=1, stride=stride)
            if out1:
                add("conv1", in_channels, out1)
            if proj_pool is not None:
                add("poolp", in_channels, proj_pool)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_channels, H, W) to (N, [out1 +] out3 + out33 + (proj_pool or in_channels), OH, OW)."""
        parts = [self._through(x, "conv1")] if self.out1 else []
        parts += [self._through(x, "proj3", "conv3"), self._through(x, "proj33", "conv33a", "conv33b")]
        if self.pooltype == "max":
            pooled = F.max_pooling_2d(x, 3, stride=self.stride, pad=1, cover_all=False)
        else:
            pooled = F.average_pooling_2d(x, 3, stride=self.stride, pad=1)
        parts.append(pooled if self.proj_pool is None else self._through(pooled, "poolp"))
        return F.concat(parts, axis=1)

    def _through(self, x: Any, *names: str) -> Any:
        for name in names:
            x = conv_bn(self[name], self[name + "n"], x, relu=True)
        return x


explain_constructors(globals())
