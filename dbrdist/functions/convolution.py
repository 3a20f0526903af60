"""Convolution and transposed convolution of images.

Legend: N batch, C channels in, O channels out, G groups, kh kw kernel. x (N, C, H, W), W (O, C/G, kh, kw), b (O).
A convolution is linear in x and in W. Its two gradients are operations of their own, and the gradients of all three
are again among the three, so that derivatives of any order come from these paragraphs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist import kernels
from dbrdist.core.array.backend import Array, is_floating
from dbrdist.core.array.config import config
from dbrdist.core.array.types import Destinations, DType, Number, PerAxis
from dbrdist.core.model.parameter import Kept, Parameter
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import ArgumentError, Given, Operands, expected
from dbrdist.core.tape.deferred import write_later
from dbrdist.core.tape.function_node import FunctionNode, call, is_observed
from dbrdist.core.tape.fusion import discreet, waiting
from dbrdist.core.tape.node import form
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.functions.connection import activation
from dbrdist.functions.recomputed import Recomputed, taken
from dbrdist.functions.rectified import SpreadGradient
from dbrdist.kernels import ConvGeometry

_SPATIAL = (0, 2, 3)
_POINTWISE = ConvGeometry()
_LARGE = 1 << 18  # elements of a gradient that does not stay in the cache


class Convolution2D(FunctionNode):
    """y = x * W + b"""

    operands = Operands("convolution_2d", x="float", W="float", b="float")
    writes = gives_new = True
    reads_copy_of = 1
    kept: Any = None  # where what is made of W may stay
    laid: Any = None  # on a device: W in the layout and type in which forward read it, for backward,
    widened: Any = None  # and x where it was given more channels
    recipe: Recomputed | None = None  # on the host: in the place of x, what makes it again for backward

    def __init__(self, geometry: ConvGeometry) -> None:
        self.geometry = geometry

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs, self.recipe = (0, 1), None
        b = xs[2] if len(xs) > 2 else None
        if self.kept is not None:
            return (kernels.conv_inference(xs[0], xs[1], b, self.geometry, self.kept),)
        if type(xs[0]) is not ndarray:
            copy, self.copy = self.copy, None
            made = kernels.conv_forward_and_keep(xs[0], xs[1], b, self.geometry, copy)
            if made is not None:
                y, self.laid, self.widened = made
                return (y,)
        y = kernels.conv_forward(xs[0], xs[1], b, self.geometry)
        if waiting:
            self.recipe = taken(xs[0])
            if self.recipe is not None:
                self._keep_inputs = (1,)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations) -> tuple[Array, ...]:
        on_variables = self._on_variables  # else the kernels themselves, without a node for each
        if self.recipe is not None and not on_variables:
            return self._derive_by_recipe(wanted, gys[0], out)
        gy, (x, W), g = gys[0], self.retained_inputs() if on_variables else self._kept_xs, self.geometry
        gxs = []
        for k, i in enumerate(wanted):
            target = None if out is None else out[k]
            if i > 1:
                gxs.append(_bias_gradient(gy, self.inputs[i].dtype))
            elif on_variables:
                gx = ConvolutionWeight(g, W.shape, W.dtype, target) if i else ConvolutionData(g, x.shape)
                gxs.append(call(gx, x, gy) if i else call(gx, gy, W))
            elif i:
                gxs.append(gradient_of_weights(x, gy, W, g, target, self.widened))
            elif sees_a_part(g, W.shape, x.size, self.inputs[0].creator_node):
                seen = gradient_of_images(gy, W, (*x.shape[:2], *gy.shape[2:]), _POINTWISE, self.laid)
                gxs.append(SpreadGradient(seen, x.shape, (g.sh, g.sw)))
            else:
                gxs.append(gradient_of_images(gy, W, x.shape, g, self.laid))
        return tuple(gxs)

    def _derive_by_recipe(self, wanted: tuple[int, ...], gy: Array, out: Destinations) -> tuple[Any, ...]:
        """As :meth:`derive`, the gradient of the weights first: x, which is made for it, is gone before that of x."""
        (W,), g, recipe, node = self._kept_xs, self.geometry, self.recipe, self.inputs[0]
        assert recipe is not None
        gxs: list[Any] = [None] * len(wanted)
        for k in range(len(wanted) - 1, -1, -1):
            i, shape = wanted[k], node.shape
            if i > 1:
                gxs[k] = _bias_gradient(gy, self.inputs[i].dtype)
            elif i:
                x = recipe.array(shape, node.dtype)
                gxs[k] = gradient_of_weights(x, gy, W, g, None if out is None else out[k], None)
                x = None
            elif sees_a_part(g, W.shape, prod(shape), node.creator_node):
                seen = gradient_of_images(gy, W, (*shape[:2], *gy.shape[2:]), _POINTWISE, None)
                gxs[k] = SpreadGradient(seen, shape, (g.sh, g.sw))
            else:
                gxs[k] = gradient_of_images(gy, W, shape, g, None)
        return tuple(gxs)

    def _hand_out_inputs(self) -> None:
        if self.recipe is not None:  # whoever asks has what forward had
            (W,), recipe, node, self.recipe = self._kept_xs, self.recipe, self.inputs[0], None
            self._keep_inputs, self._kept_xs = (0, 1), (recipe.handed_out(node.shape, node.dtype), W)
        super()._hand_out_inputs()

    def unchain(self) -> None:
        super().unchain()
        self.recipe = None

    def _drop_copies(self) -> None:
        self.laid = self.widened = None


discreet[Convolution2D] = Convolution2D.forward


def gradient_of_images(gy: Array, W: Array, x_shape: tuple[int, ...], g: ConvGeometry, laid: Array | None) -> Array:
    """The gradient of x, by the weights as forward has ``laid`` them out, if it has."""
    if laid is not None and gy.dtype == laid.dtype:
        return kernels.conv_backward_data_as_laid(gy, W, x_shape, g, laid)
    return kernels.conv_backward_data(gy, W, x_shape, g)


def gradient_of_weights(
    x: Array, gy: Array, W: Array, g: ConvGeometry, target: Array | None, widened: Array | None
) -> Array:
    """The gradient of W, in ``target`` if there is one, which a device writes along with those of other layers.

    ``widened`` is x where forward gave it more channels.
    """
    if target is not None and type(gy) is not ndarray:
        seen = x if widened is None or widened.dtype != gy.dtype else widened
        made = kernels.conv_backward_weight_later(seen, gy, W.shape, g, target)
        if made is not None:
            return write_later(*made, target)
    return kernels.conv_backward_weight(x, gy, W.shape, g, W.dtype, target)


def sees_a_part(g: ConvGeometry, W_shape: tuple[int, ...], size: int, creator: FunctionNode | None) -> bool:
    """Does a 1x1 convolution look at a part of the pixels that a ReLU made, whose rule takes their gradients alone?"""
    if g.sh * g.sw == 1 or size < _LARGE or W_shape[2:] != (1, 1) or creator is None or creator.defer_sum is None:
        return False
    return g == ConvGeometry(g.sh, g.sw)


class ConvolutionData(FunctionNode):
    """The gradient of a convolution with respect to x; with a bias, the transposed convolution."""

    operands = Operands("deconvolution_2d", x="float", W="float", b="float")
    writes = gives_new = True

    def __init__(self, geometry: ConvGeometry, x_shape: tuple[int, ...]) -> None:
        self.geometry = geometry
        self.x_shape = x_shape

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        y = kernels.conv_backward_data(xs[0], xs[1], self.x_shape, self.geometry)
        if len(xs) > 2:
            y = ops.add(y, _per_channel(xs[2], y.dtype))
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations) -> tuple[Array, ...]:
        (ggx,), (gy, W), g = gys, self.retained_inputs(), self.geometry
        gxs = []
        for k, i in enumerate(wanted):
            if i == 0:
                gxs.append(call(Convolution2D(g), ggx, W))
            elif i == 1:
                gxs.append(call(ConvolutionWeight(g, W.shape, W.dtype, None if out is None else out[k]), ggx, gy))
            else:
                gxs.append(_bias_gradient(ggx, self.inputs[i].dtype))
        return tuple(gxs)


class ConvolutionWeight(FunctionNode):
    """The gradient of a convolution with respect to W, into ``out`` where given."""

    def __init__(
        self, geometry: ConvGeometry, W_shape: tuple[int, ...], dtype: DType, out: Array | None = None
    ) -> None:
        self.geometry = geometry
        self.W_shape = W_shape
        self.dtype = dtype
        self.out = out

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        return (kernels.conv_backward_weight(*xs, self.W_shape, self.geometry, self.dtype, self.out),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (ggW,), (x, gy), g = gys, self.retained_inputs(), self.geometry
        rules = (lambda: call(ConvolutionData(g, x.shape), gy, ggW), lambda: call(Convolution2D(g), x, ggW))
        return tuple(rules[i]() for i in wanted)


def _per_channel(b: Array, dtype: DType) -> Array:
    return b.reshape(1, -1, 1, 1).astype(dtype, copy=False)


def _bias_gradient(gy: Operand, dtype: DType) -> Operand:
    """Summed and kept in the type of the bias where that is the wider one."""
    if dtype.itemsize > gy.dtype.itemsize:
        gy = ops.cast(gy, dtype)
    return ops.cast(ops.sum(gy, _SPATIAL), dtype)


def convolution_2d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0, cover_all: bool = False, *,
    dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Two-dimensional convolution (a cross-correlation, as in all frameworks).

    Args:
        x: images (N, C, H, W).
        W: filters (O, C/groups, kh, kw).
        b: bias (O), or None.
        stride, pad, dilate: a number, or a pair for rows and columns.
        cover_all: let the last window reach beyond the image, so that every element is covered.
        groups: split channels into this many independent groups.

    Returns:
        (N, O, OH, OW) with OH = floor((H + 2 pad - dilate (kh - 1) - 1) / stride) + 1; rounded up with ``cover_all``.

    A value of x that is not finite reaches every output whose window covers it, one of W every output whose
    window has an element of x there. Whether 0 times such a weight counts in the padding depends on the provider:
    oneDNN leaves padding out, as PyTorch does.

    Example:
        >>> F.convolution_2d(np.ones((1, 3, 8, 8)), np.ones((16, 3, 3, 3)), stride=2, pad=1).shape
        (1, 16, 4, 4)
    """
    window = _hashable(stride), _hashable(pad), _hashable(dilate), operator.index(groups), cover_all
    x = activation(x)
    arguments = (x, W) if b is None else (x, W, b)
    node = Convolution2D(geometry_of("convolution_2d", window, *map(form, arguments)))
    if type(W) is Parameter:
        node.kept = _kept(W)
    return node.apply(arguments)[0]


def _kept(W: Parameter) -> Kept | None:
    """Where what is made of weights may stay until they change: at inference, where nobody else sees the array."""
    if not config.enable_backprop and not is_observed():
        return W.keep()
    if W._kept is not None:
        W.release()
    return None


def convolution_bn_2d(
    x: Any, W: Any, b: Any, vectors: tuple[Any, ...], eps: float, added: Any, relu: bool, *,
    stride: tuple[int, ...], pad: tuple[int, ...], dilate: tuple[int, ...], groups: int,
) -> Any:  # fmt: skip
    """:func:`convolution_2d`, normalization with given statistics, an addition and :func:`relu` at once.

    For inference at which no hook looks on. ``vectors`` are gamma and beta, or None for 1 and 0, mean and variance;
    ``b`` and ``added`` may be None. The result is None where the functions have to be called one by one: where
    arguments do not fit, about which those have the words, and where no provider has a kernel.
    """
    if type(W) is not Parameter or not _are_at_hand(W._array, x, added, b, *vectors):
        return None
    x, added, b, *vectors = map(as_array, (x, added, b, *vectors))
    window = _hashable(stride), _hashable(pad), _hashable(dilate), operator.index(groups), False
    try:
        geometry = geometry_of("convolution_2d", window, form(x), form(W))
    except ArgumentError:
        return None
    kept = _kept(W)  # while nobody holds the array
    y = kernels.conv_bn_inference(x, W._array, b, tuple(vectors), eps, added, geometry, kept)
    if y is None:
        return None
    if relu:  # in place, where it takes as long as a look for NaN, which oneDNN's own would lose
        y = np.maximum(y, 0, out=y) if y.dtype == np.float32 else kernels.relu_forward(y)
    return Variable(y, requires_grad=False)


def _are_at_hand(
    W: Any,
    x: Any,
    added: Operand | Number | None,
    b: Parameter | None,
    gamma: Any,
    beta: Parameter | None,
    mean: Operand,
    var: Array | None,
) -> bool:
    """Are these arrays on the host, of types that the functions would not cast first, and vectors of W's length?

    Some may be None, but a parameter that has no array yet is not at hand.
    """
    images, vectors = [x], [mean, var, *[v for v in (b, gamma, beta) if v is not None]]
    if added is not None:
        images.append(added)
    for a in (W, *map(as_array, images), *map(as_array, vectors)):
        if type(a) is not ndarray or not is_floating(a.dtype):
            return False
    return (x.dtype == W.dtype or x.dtype.itemsize < 4) and all(v.shape == W.shape[:1] for v in vectors)


def deconvolution_2d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0,
    outsize: PerAxis | None = None, *, dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Transposed two-dimensional convolution: the gradient of :func:`convolution_2d` with respect to its input.

    Args:
        x: (N, C, H, W).
        W: filters (C, O/groups, kh, kw).
        b: bias (O), or None.
        stride, pad, dilate: a number, or a pair for rows and columns.
        outsize: rows and columns of the result; None for the smallest that fits.
        groups: split channels into this many independent groups.

    Returns:
        (N, O) + outsize, by default OH = stride (H - 1) + dilate (kh - 1) + 1 - 2 pad.

    Example:
        >>> F.deconvolution_2d(np.ones((1, 16, 4, 4)), np.ones((16, 3, 4, 4)), stride=2, pad=1).shape
        (1, 3, 8, 8)
    """
    window = _hashable(stride), _hashable(pad), _hashable(dilate), operator.index(groups), False
    x = activation(x)
    arguments = (x, W) if b is None else (x, W, b)
    g = geometry_of("deconvolution_2d", window, *map(form, arguments))
    (h, w), (kh, kw) = x.shape[2:], W.shape[2:]
    if isinstance(outsize, (int, np.integer)):
        outsize = pair(outsize)
    if outsize is None or tuple(outsize) == (None, None):
        outsize = (g.sh * (h - 1) + g.dh * (kh - 1) + 1 - 2 * g.ph, g.sw * (w - 1) + g.dw * (kw - 1) + 1 - 2 * g.pw)
    # Either rounding will do: Chainer lets outsize be what a convolution with cover_all would have come from.
    if min(outsize) < 1 or (h, w) not in (
        g.out_hw(*outsize, kh, kw), g._replace(cover_all=True).out_hw(*outsize, kh, kw),
    ):  # fmt: skip
        what = f"what a convolution with {g} and kernel {kh} x {kw} takes to {h} x {w}"
        raise expected("deconvolution_2d", "outsize", what, str(tuple(outsize)))
    geometry = g._replace(cover_all=g.out_hw(*outsize, kh, kw) != (h, w))
    shape = (x.shape[0], W.shape[1] * g.groups, *outsize)
    return ConvolutionData(geometry, shape).apply(arguments)[0]


def pair(value: Any, where: str = "", name: str = "") -> tuple[int, int]:
    """A number for both rows and columns, or two; where it is neither, the error says which argument it is."""
    has_several = hasattr(value, "__getitem__") and getattr(value, "ndim", 1) > 0  # NumPy's numbers have it, too
    if value is None or (has_several and len(value) != 2):
        words = "a number, or one for rows and one for columns"
        raise expected(where, name, words, repr(value)) if name else ValueError(f"expected {words}, got {value!r}")
    if has_several:
        first, second = value
        return operator.index(first), operator.index(second)
    return (n := operator.index(value)), n


def _hashable(value: PerAxis) -> int | tuple[int, int]:
    return value if type(value) is tuple or type(value) is int else pair(value)


def _words(g: ConvGeometry) -> str:
    return f"stride {g.sh, g.sw}, pad {g.ph, g.pw}, dilate {g.dh, g.dw}, groups {g.groups}"


def _what_was_meant(shape: Sequence[int], num_channels: int) -> str:
    """What to write for images with channels last, for a single one, and for grey ones without an axis of channels."""
    if len(shape) == 4 and shape[3] == num_channels:
        return "images with channels last, (N, H, W, C), are x.transpose(0, 3, 1, 2)"
    if len(shape) == 3 and shape[0] == num_channels:
        return "a single image needs an axis of examples, x[None]"
    if len(shape) == 3 and num_channels == 1:
        return "grey images need an axis of channels, x[:, None]"
    return ""


@lru_cache(maxsize=1024)
def geometry_of(name: str, window: tuple[Any, ...], *arrays: Any) -> ConvGeometry:
    """The geometry of a call; shapes and types that do not fit together are refused, in words.

    ``window``: stride, pad, dilate, groups, cover_all; ``arrays``: shapes and types of x, W and b. Remembered, since
    it takes 5 us and a network asks the same at each step.
    """
    stride, pad, dilate, groups, cover_all = window
    g = ConvGeometry(*pair(stride), *pair(pad), *pair(dilate), groups, cover_all)
    if min(g.sh, g.sw, g.dh, g.dw, g.groups) < 1 or min(g.ph, g.pw) < 0:
        raise expected(name, "stride, pad, dilate, groups", "numbers >= 1, and pad >= 0", _words(g))
    given = [Given(*a) for a in arrays]
    x, W = given[:2]
    if len(W.shape) != 4 or W.shape[0] % g.groups:
        raise expected(name, "W", f"4 axes, the first a multiple of groups={g.groups}", W)
    is_forward = name == "convolution_2d"
    x_channels, out_channels = (W.shape[1] * groups, W.shape[0]) if is_forward else (W.shape[0], W.shape[1] * groups)
    if len(x.shape) != 4 or x.shape[1] != x_channels:
        want = f"shape (N, {x_channels}, H, W) for W {tuple(W.shape)} with groups={g.groups}"
        raise expected(name, "x", want, x, _what_was_meant(x.shape, x_channels))
    if len(given) > 2 and tuple(given[2].shape) != (out_channels,):
        raise expected(name, "b", f"shape ({out_channels},)", given[2])
    if is_forward and min(g.out_hw(*x.shape[2:], *W.shape[2:])) < 1:
        raise expected(
            name, "x", f"an image no smaller than the kernel of W {tuple(W.shape)}", x, "pad it, or shrink W"
        )
    return g
