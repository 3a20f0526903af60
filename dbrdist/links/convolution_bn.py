"""Convolutions that are followed by batch normalizations: one pass over memory at inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dbrdist import functions as F
from dbrdist.core.array.config import config
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.link_hook import thread
from dbrdist.core.model.parameter import Parameter
from dbrdist.core.names.limits import Sizes, Whole
from dbrdist.core.tape.function_node import is_observed
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.convolution import convolution_bn_2d
from dbrdist.links.convolution import Convolution2D
from dbrdist.links.normalization import BatchNormalization, is_one_pass

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


def conv_bn(conv: Any, bn: Any, x: Any, *, relu: bool = False, residual: Any = None) -> Any:
    """``bn(conv(x))``, plus a residual, followed by a ReLU.

    Args:
        conv: a :class:`Convolution2D`.
        bn: the :class:`BatchNormalization` of its output.
        x: (N, C, H, W).
        relu: whether :func:`dbrdist.functions.relu` comes last.
        residual: what is added before the ReLU, an array or a Variable; or a function without arguments that gives it,
            such as a call of the shortcut. None adds nothing.

    In training it is nothing but these calls, one after the other, except that the end, normalization, addition and
    ReLU, is one function with fewer passes over memory, and on a GPU all of it is, so that the host has less to do;
    float32 is rounded as by the calls. At inference (``config.train``
    False, within ``no_backprop_mode``) oneDNN computes them in one pass over memory on a CPU, in float32 and bfloat16:
    ResNet-50 takes 0.87 of the time for one image. Results then differ from those of the separate calls by rounding:
    float32 by a few units in the last place of the summands, bfloat16 is rounded once rather than after each call.
    Where a hook looks on, and with links of other classes, such as subclasses or links that are called through a
    function that you set on them, the calls are made one after the other there too.

    Example:
        >>> conv, bn = L.Convolution2D(3, 4, 3, nobias=True), L.BatchNormalization(4)
        >>> L.conv_bn(conv, bn, np.ones((2, 3, 6, 6), np.float32), relu=True).shape
        (2, 4, 4, 4)
    """
    is_whole = residual is None or (relu and not callable(residual))
    if type(bn) is BatchNormalization and bn._gpu is not None and is_whole and _is_training(conv, bn):
        y = F.residual.convolution_bn_of_batch(
            x, conv.W, (bn.gamma, bn.beta), (bn.avg_mean, bn.avg_var), bn.eps, bn.decay, relu, residual,
            stride=conv.stride, pad=conv.pad, dilate=conv.dilate, groups=conv.groups,
        )  # fmt: skip
        if y is not None:
            return y
    if _is_inference() and _are_plain(conv, bn):
        residual = residual() if callable(residual) else residual
        vectors = bn.gamma, bn.beta, bn.avg_mean, bn.avg_var
        y = convolution_bn_2d(
            x, conv.W, conv.b, vectors, bn.eps, residual, relu,
            stride=conv.stride, pad=conv.pad, dilate=conv.dilate, groups=conv.groups,
        )  # fmt: skip
        if y is not None:
            return y
    h = conv(x)
    if relu and residual is not None and is_one_pass(bn):
        if not callable(residual):
            return bn.add_relu(h, residual)
        # Called after the convolution: where that fails, no statistics of a shortcut may have moved.
        residual = residual()
        y = None
        if bn._gpu is not None and _is_training(conv, bn):
            own, running = (bn.gamma, bn.beta), (bn.avg_mean, bn.avg_var)
            y = F.residual.bn_of_batch_with_convolution(h, conv.W, own, running, bn.eps, bn.decay, residual)
        return bn.add_relu(h, residual) if y is None else y
    h = bn(h)
    residual = residual() if callable(residual) else residual
    h = h if residual is None else h + residual
    return F.relu(h) if relu else h


def fused_block(
    x: Operand, stages: Sequence[tuple[Link, Link]], shortcut: tuple[Link, Link] | None = None
) -> Variable | None:
    """A residual block as one function that never writes what is within (``config.fused_convolutions``).

    Args:
        x: (N, C, H, W).
        stages: convolutions with their normalizations, between which there are ReLUs.
        shortcut: such a pair for ``x``; None adds ``x`` itself.

    Returns:
        the ReLU of the sum; None where the switch is off, and where :func:`conv_bn` has to be called for each pair: at
        inference, with hooks, on a host, in other types than float16, ...
    """
    if not config.fused_convolutions:
        return None
    pairs: list[Any] = [*stages, *[shortcut] * (shortcut is not None)]
    if not all(type(bn) is BatchNormalization and bn._gpu is not None and _is_training(conv, bn) for conv, bn in pairs):
        return None
    made = [
        F.fused_block.StageOperands(
            conv.W, bn.gamma, bn.beta, (bn.avg_mean, bn.avg_var), bn.eps, bn.decay,
            (conv.stride, conv.pad, conv.dilate, conv.groups, False),
        )
        for conv, bn in pairs
    ]  # fmt: skip
    return F.fused_block.residual_block_of_batch(x, made[: len(stages)], None if shortcut is None else made[-1])


def _is_training(conv: Any, bn: Any) -> bool:
    """Is this training of plain links with nothing but filters, scales and shifts, at which nobody looks on?"""
    switches = config.__dict__
    if not (switches["train"] and switches["enable_backprop"]) or switches["in_recomputing"] or thread.hooks:
        return False
    if switches["_function_hooks"] or switches["debug"] or switches["_captured"] is not None:  # is_observed
        return False
    if not _are_plain(conv, bn) or conv.b is not None or bn.keeps_last:
        return False
    return type(conv.W) is type(bn.gamma) is type(bn.beta) is Parameter


def _is_inference() -> bool:
    """Is this inference, at which nobody looks on?"""
    return not (config.train or config.enable_backprop or thread.hooks or is_observed())


def _are_plain(conv: Any, bn: Link) -> bool:
    """Are these links what their classes say, without hooks, and is there nothing left to initialise?"""
    if type(conv) is not Convolution2D or type(bn) is not BatchNormalization or conv._hooks or bn._hooks:
        return False
    axis = bn.axis
    if axis is not None and not (type(axis) is tuple and axis == (0, 2, 3)):
        return False
    return bn.avg_mean is not None and "forward" not in conv.__dict__ and "forward" not in bn.__dict__


class Conv2DBNActiv(Chain):
    """A convolution, a batch normalization and an activation: :func:`conv_bn` as a link, as ChainerCV has it.

    Its children are ``conv``, a :class:`Convolution2D`, and ``bn``, a :class:`BatchNormalization`.

    Args:
        in_channels, out_channels, ksize, stride, pad, dilate, groups, nobias, initialW, initial_bias: as of
            :class:`Convolution2D`. The bias is left out unless asked for, since the normalization has one.
        activ: the function that comes last; None for none.
        bn_kwargs: arguments of :class:`BatchNormalization` by name.

    Example:
        >>> L.Conv2DBNActiv(3, 8, 3, pad=1)(np.ones((2, 3, 6, 6), np.float32)).shape
        (2, 8, 6, 6)
    """

    def __init__(
        self, in_channels: Whole, out_channels: Sizes, ksize: Sizes = None, stride: Sizes = 1, pad: Sizes = 0,
        dilate: Sizes = 1, groups: int = 1, nobias: bool = True, initialW: Any = None,
        initial_bias: Any = None, activ: Callable[[Any], Any] | None = F.relu,
        bn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if ksize is None:
            out_channels, ksize, in_channels = in_channels, out_channels, None
        self.activ = activ
        with self.init_scope():
            self.conv = Convolution2D(
                in_channels, out_channels, ksize, stride, pad, nobias, initialW, initial_bias, dilate=dilate,
                groups=groups,
            )  # fmt: skip
            self.bn = BatchNormalization(out_channels, **(bn_kwargs or {}))

    def forward(self, x: Operand) -> Any:
        """``x`` (N, in_channels, H, W) to (N, out_channels, OH, OW)."""
        y = conv_bn(self.conv, self.bn, x, relu=self.activ is F.relu)
        return y if self.activ is None or self.activ is F.relu else self.activ(y)
