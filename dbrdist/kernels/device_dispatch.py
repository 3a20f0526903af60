"""Kernels that only devices have, each in the place of several calls: see :mod:`dbrdist.kernels.table`.

None as a result means that the formula has to do; so it is for arrays of the host.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array.backend import empty, lies_as_images, places_of
from dbrdist.core.array.config import config
from dbrdist.core.array.current_device import current_number, gpu_arrays
from dbrdist.core.array.random import Draw
from dbrdist.core.array.types import Array
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.table import (
    FORMULA,
    composed,
    kernel,
    key_of,
    lies,
    plan_of,
    plan_of_provider,
    planned,
    server_of,
    switches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from dbrdist.core.model.weight_copies import Reader


_placed_form = operator.attrgetter("shape", "strides", "dtype", "data.device_id")
_chosen = operator.itemgetter("use_cudnn", "use_cudnn_tensor_core", "cudnn_deterministic")
_SPATIAL = (0, 2, 3)
_POINTWISE = ConvGeometry()


# ---- convolution


@kernel(is_light=True)
def conv_forward_and_keep(
    x: Array, W: Array, b: Array | None, geometry: ConvGeometry, copy: Reader | None
) -> tuple[Array, Any, Any] | None:
    """:func:`dbrdist.kernels.conv_forward`, and for backward the weights as laid out for it, None where W lies so, and
    the images with the channels that they were given for it, None where they have enough.

    ``copy`` has the weights laid out already, if it is not None.
    """
    return "conv_forward_and_keep", type(x), *lies(x, W), b is None, geometry, switches(x, W, b)


@kernel(is_light=True)
def conv_backward_data_as_laid(
    gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry, laid: Array
) -> Array:  # fmt: skip
    """:func:`dbrdist.kernels.conv_backward_data` of the weights that :func:`conv_forward_and_keep` kept."""
    return "conv_backward_data_as_laid", type(gy), *lies(gy, W), x_shape, geometry, switches(gy, W, laid)


@kernel(is_light=True)
def conv_backward_weight_later(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, out: Array
) -> tuple[Any, Any] | None:
    """The gradient of weights in a library's layout, and how ``out`` is written: a function of many such, and this one.

    None where it is written at once.
    """
    return "conv_backward_weight_later", type(x), *lies(x, gy, out), W_shape, geometry, switches(x, gy, out)


# ---- means of images


@kernel(is_light=True)
def _mean_of_images(x: Array) -> Array | None:
    return "mean_of_images", type(x), *lies(x), places_of(x)


def mean_of_images(x: Array) -> Array | None:
    """The means (N, C) over the pixels of small images that lie as convolutions leave them, in one launch."""
    return None if type(x) is np.ndarray or not lies_as_images(x) else _mean_of_images(x)


@kernel(is_light=True)
def _mean_of_images_backward(gy: Array, x_shape: tuple[int, ...]) -> Array | None:
    return "mean_of_images_backward", type(gy), *lies(gy), x_shape, places_of(gy)


def mean_of_images_backward(gy: Array, x_shape: tuple[int, ...]) -> Array | None:
    """The gradient of :func:`mean_of_images`, images of this shape."""
    return None if type(gy) is np.ndarray else _mean_of_images_backward(gy, x_shape)


# ---- linear


@kernel(is_light=True)
def linear_and_keep(x: Array, W: Array, b: Array | None, copy: Reader | None) -> tuple[Array, Array] | None:
    """:func:`dbrdist.kernels.linear` of weights that are wider than x, and these in the type of x, for backward.

    ``copy`` has them in that type already, if it is not None.
    """
    return "linear_and_keep", type(x), *lies(x, W), b is None, places_of(x, W, b)


@kernel(is_light=True)
def linear_weight_gradients(
    gy: Array, x: Array, dtypes: tuple[Any, Any], out_W: Array | None, out_b: Array | None
) -> tuple[Array, Array] | None:
    """gy^T x and the sums of gy over its rows, in the types of weights and biases, at once.

    ``out_W`` and ``out_b`` take them where they are given.
    """
    return "linear_weight_gradients", type(gy), *lies(gy, x, out_W, out_b), dtypes, places_of(gy, x, out_W, out_b)


# ---- layer normalization


@kernel(is_light=True)
def ln_backward_into(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, out_gamma: Array | None,
    out_beta: Array | None,
) -> tuple[Array, Array, Array] | None:  # fmt: skip
    """:func:`dbrdist.kernels.ln_backward`, with the gradients of gamma and beta where they belong."""
    others = gamma.dtype, mean.dtype, var.dtype, eps
    places = places_of(x, gamma, mean, var, gy, out_gamma, out_beta)
    return "ln_backward_into", type(x), *lies(x, gy, out_gamma, out_beta), *others, places


# ---- recurrent layers


@kernel(is_light=True)
def recurrent_forward(
    kind: str, steps: list[tuple[int, int]], zx: Array, V: Array, d: Array, states: list[Array]
) -> tuple[Array, list[Array], list[Array]] | None:
    """All steps of a layer of ``kind`` lstm or gru: outputs, last states, and what backward needs.

    zx = x W^T + b for all rows (of an LSTM with the other bias, too); V and d belong to the state. ``steps`` are the
    first row and the number of rows of each, in the order of computation.
    """
    return "recurrent_forward", kind, type(zx), *lies(zx, V, d, *states), places_of(zx, V, d, *states)


@kernel(is_light=True)
def recurrent_backward(
    kind: str, steps: list[tuple[int, int]], kept: list[Array], V: Array, gy: Array | None, gs: list[Array]
) -> tuple[Array, Array]:
    """The gradients of zx and zh of :func:`recurrent_forward`; ``gs``, those of the last states, become the first's."""
    places = places_of(V, *kept, gy, *gs)
    return "recurrent_backward", kind, type(V), *lies(V, *kept, *gs), gy is None, places


# ---- dropout


@kernel(is_light=True)
def dropout(x: Array, length: int, draw: Draw, threshold: int, scale: float) -> tuple[Array, Array] | None:
    """x times a mask, and the mask: lines of ``length`` elements, each 0 where its 32 bits are below the threshold.

    ``draw`` names the bits, as ``core.random.next_draw`` does; ``scale`` is what the mask holds elsewhere.
    """
    return "dropout", type(x), *lies(x), length, places_of(x)


# ---- linear maps with what follows: z (N, K) still lacks its bias b (K), which may be None


@kernel(is_light=True)
def relu_dropout(z: Array, b: Array | None, draw: Draw | None, threshold: int, scale: float) -> Array | None:
    """max(z + b, 0), times a mask as by :func:`dropout` unless ``draw`` is None; it is written over z."""
    return "relu_dropout", type(z), *lies(z, b), places_of(z, b)


@kernel(is_light=True)
def relu_dropout_backward(y: Array, gy: Array, scale: float) -> Array | None:
    """gy times the scale where y, the result of :func:`relu_dropout`, is not 0."""
    return "relu_dropout_backward", type(y), *lies(y, gy), places_of(y, gy)


@kernel(is_light=True)
def dropout_add(
    z: Array, b: Array | None, r: Array, draw: Draw | None, threshold: int, scale: float
) -> tuple[Array, Array | None] | None:
    """r plus the dropped z + b, written over z, and the mask: booleans, or None where ``draw`` is None."""
    return "dropout_add", type(z), *lies(z, b, r), places_of(z, b, r)


@kernel(is_light=True)
def masked(gy: Array, mask: Array, scale: float) -> Array | None:
    """gy times the scale where a mask of booleans holds, else 0."""
    return "masked", type(gy), *lies(gy, mask), places_of(gy, mask)


@kernel(is_light=True)
def ln_of_sum(
    z: Array, b: Array | None, r: Array, gamma: Array, beta: Array, eps: float, draw: Draw | None, threshold: int,
    scale: float,
) -> tuple[Array, Array, Array, Array | None] | None:  # fmt: skip
    """The layer normalization of :func:`dropout_add`, whose sum is written over z: y, mean, variance, mask."""
    return "ln_of_sum", type(z), *lies(z, b, r, gamma, beta), places_of(z, b, r, gamma, beta)


@kernel(is_light=True)
def ln_of_sum_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, mask: Array, scale: float,
    out_gamma: Array | None, out_beta: Array | None,
) -> tuple[Array, Array, Array, Array] | None:  # fmt: skip
    """The gradients of z, r, gamma and beta of :func:`ln_of_sum`; x is the sum."""
    arrays = x, gamma, mean, var, gy, mask, out_gamma, out_beta
    return "ln_of_sum_backward", type(x), *lies(*arrays), places_of(*arrays)


# ---- attention


@kernel(is_light=True)
def scaled_matmul(a: Array, b: Array, factor: float) -> Array | None:
    """The products of stacks of matrices of one type times a number, rounded once."""
    return "scaled_matmul", type(a), *lies(a, b), places_of(a, b)


@kernel(is_light=True)
def attention_weights(
    s: Array, keys: Array | None, added: Array | None, is_causal: bool, draw: Draw | None, threshold: int, scale: float
) -> tuple[Array, Array] | None:
    """The softmax of scores s (B, H, L, S) over the keys that are seen, written over s, and that with some dropped.

    ``keys`` (booleans) and ``added`` broadcast to the scores; a query that sees no key gets zeros.
    """
    return "attention_weights", type(s), *lies(s, keys, added), is_causal, places_of(s, keys, added)


@kernel(is_light=True)
def attention_weights_backward(p: Array, w: Array, g: Array) -> Array | None:
    """The gradient of the scores, written over g, the gradient of w; both as :func:`attention_weights` returns them."""
    return "attention_weights_backward", type(p), *lies(p, w, g), places_of(p, w, g)


@kernel(is_light=True)
def split_heads(
    xs: tuple[Array, ...], biases: tuple[Array | None, ...], num_heads: int
) -> tuple[Array, ...] | None:  # fmt: skip
    """Up to three arrays (B, L, H D), each plus a bias (H D) or None, to (B, H, L, D)."""
    return "split_heads", type(xs[0]), *lies(*xs, *biases), len(xs), num_heads, places_of(*xs, *biases)


@kernel(is_light=True)
def merge_heads(ys: tuple[Array, ...]) -> tuple[Array, ...] | None:
    """Up to three arrays (B, H, L, D) to (B, L, H D)."""
    return "merge_heads", type(ys[0]), *lies(*ys), places_of(*ys)


@kernel(is_light=True)
def fused_attention(
    q: Array, k: Array, v: Array, drop: tuple[Draw | None, int, float], scale: float, is_causal: bool, is_merged: bool
) -> tuple[Array, Array, Array | None] | None:
    """softmax(scale q k') v of heads (B, H, L, D), and what backward needs; scores are never stored.

    ``drop``: what is drawn, the threshold and the scale of a dropout of weights; a draw of None drops nothing. The
    result is (B, H, L, V) or, if ``is_merged``, (B, L, H V); the last value is the dropout's mask, or None.
    """
    drops = drop[0] is not None
    return "fused_attention", type(q), *lies(q, k, v), drops, scale, is_causal, is_merged, switches(q, k, v)


@kernel(is_light=True)
def fused_attention_backward(
    q: Array, k: Array, v: Array, y: Array, stats: Array, mask: Array | None, gy: Array, scale: float, is_causal: bool,
    is_merged: bool,
) -> tuple[Array, ...] | None:  # fmt: skip
    """The gradients of q, k and v of :func:`fused_attention`, with heads side by side if ``is_merged``."""
    arrays = q, k, v, y, stats, mask, gy
    return "fused_attention_backward", type(q), *lies(*arrays), scale, is_causal, is_merged, switches(*arrays)


# ---- batch normalization


@key_of("bn_forward_and_move", is_light=True)
def _bn_forward_and_move_key(
    x: Array, gamma: Array, beta: Array, eps: float, axis: tuple[int, ...], relu: bool, running: tuple[Array, Array],
    decay: float, weights: tuple[float, float],
) -> Hashable:  # fmt: skip
    places = places_of(x, gamma, beta, *running)
    return "bn_forward_and_move", type(x), *lies(x, *running), eps, axis, relu, places


def bn_forward_and_move(
    x: Array, gamma: Array, beta: Array, eps: float, relu: bool, axis: tuple[int, ...],
    running: tuple[Array, Array], decay: float, weights: tuple[float, float],
) -> tuple[Array, Array, Array, Any] | None:  # fmt: skip
    """:func:`dbrdist.kernels.bn_forward`, and the running statistics move in the same launch as by ``bn_move``."""
    arguments = (x, gamma, beta, eps, axis, relu, running, decay, weights)
    plan = planned(_bn_forward_and_move_key(*arguments), arguments)
    made = plan(*arguments)
    return None if made is None else (*made[:3], (server_of(plan), made[3]))


@key_of("bn_add_relu", is_light=True)
def _bn_add_relu_key(
    x: Array, gamma: Array, beta: Array, added: Array, eps: float, axis: tuple[int, ...],
    running: tuple[Array, Array] | None, decay: float, weights: tuple[float, float],
) -> Any:  # fmt: skip
    statistics = running or ()
    return (
        "bn_add_relu",
        type(x),
        *lies(x, added, *statistics),
        eps,
        axis,
        places_of(x, gamma, beta, added, *statistics),
    )


def bn_add_relu(
    x: Array, gamma: Array, beta: Array, added: Array, eps: float, axis: tuple[int, ...],
    running: tuple[Array, Array] | None, decay: float, weights: tuple[float, float],
) -> tuple[Array, Array, Array, Any] | None:  # fmt: skip
    """The ReLU of a normalization plus ``added``: y, mean, biased variance, and what :func:`bn_backward` asks for.

    The running statistics, if there are any, move in the same launch as by ``bn_move``.
    """
    arguments = (x, gamma, beta, added, eps, axis, running, decay, weights)
    plan = planned(_bn_add_relu_key(*arguments), arguments)
    made = plan(*arguments)
    return None if made is None else (*made, (server_of(plan), None))


@kernel(is_light=True)
def bn_backward_of_sum(
    x: Array, gamma: Array, mean: Array, var: Array, y: Array, gys: tuple[Array, ...], eps: float,
    axis: tuple[int, ...], out_gamma: Array | None = None, out_beta: Array | None = None, is_ours: bool = False,
) -> tuple[Array, Array, Array, Array] | None:  # fmt: skip
    """The gradients of x, gamma, beta and of what was added by :func:`bn_add_relu`, whose result is y.

    ``gys`` are one or two gradients of y, which are added up first. ``is_ours``: the gradient of the sum may be written
    over the last of them.
    """
    places = places_of(x, gamma, mean, var, y, *gys, out_gamma, out_beta)
    return "bn_backward_of_sum", type(x), *lies(x, y, *gys), gamma.dtype, eps, axis, places


# ---- inputs


@kernel(is_light=True)
def by_table(x: Array, entries: Array) -> Array | None:
    """Images (N, C, H, W) of x (N, H, W, C) in uint8: each value's entry in its channel, of ``entries`` (256, C)."""
    return "by_table", type(x), *lies(x, entries), places_of(x, entries)


# ---- blocks: a convolution, the batch normalization of its result, an addition and a ReLU, by one plan: those of the
# kernels that the separate calls would run, one after the other, with the same operands


class Block(NamedTuple):
    """What a convolution and a normalization do, whatever arrays they are given."""

    geometry: ConvGeometry
    eps: float
    relu: bool
    adds: bool  # something before the ReLU


class InBlock(NamedTuple):
    """What forward leaves for backward besides operands and results."""

    h: Array  # the convolution
    mean: Array
    var: Array
    saved: tuple[str, Any]  # the provider of the normalization, and what that kept
    laid: Array | None  # the weights as the convolution read them, where they are of use to backward
    widened: Array | None  # x where it was given more channels


def conv_bn_key(*arrays: Array) -> tuple[Any, ...]:
    """What a plan of a block depends on besides the block."""
    return current_number(), *map(_placed_form, arrays), *_chosen(config.__dict__)


def conv_bn_backward(
    xs: tuple[Array, ...], y: Array | None, kept: InBlock, gys: tuple[Array, ...], block: Block,
    outs: tuple[Array, Array, Array], is_ours: bool, with_x: bool, sees_a_part: bool,
) -> tuple[tuple[Any, Any] | None, tuple[Array, ...]] | None:  # fmt: skip
    """The gradients of what :func:`plan_conv_bn` plans of x, W, gamma, ..., whose result is y; no x unless ``with_x``.

    ``gys`` are one gradient of y or, if the block adds, one or two. ``outs`` take the gradients of W, gamma and beta;
    what comes first is None, or as ``conv_backward_weight_later`` says how that of W is written. ``is_ours``: the
    gradient of the sum may be written over the last of ``gys``. ``sees_a_part``: the gradient of x at the pixels that a
    1x1 convolution read is enough.
    """
    arrays = *xs, kept.h, *gys, *outs
    if not gpu_arrays.issuperset(map(type, arrays)):
        return None
    left = kept.saved[0], kept.laid is None, kept.widened is None, with_x, sees_a_part, *_chosen(config.__dict__)
    key = "conv_bn_backward", block, current_number(), *map(_placed_form, arrays), left
    arguments = xs, y, kept, gys, block, outs, is_ours, with_x, sees_a_part
    return composed(key, _plan_backward, arguments)(*arguments)


def _declined(*arguments: Any) -> None:
    """The plan of a call that the separate kernels have to serve."""


def plan_conv_bn(
    xs: tuple[Array, ...], block: Block, *moved: Any
) -> Callable[..., tuple[Array, InBlock]] | None:  # fmt: skip
    """A function for the normalization of a convolution of operands like these; None where no kernels do it.

    ``xs`` are x, W, gamma, beta and, if the block adds it, what is added before the ReLU. ``moved`` are the running
    statistics, which move as by ``bn_move``, and its other arguments. The function takes ``xs``; None or what has the
    weights laid out already; None or what ``conv_forward_and_keep`` gave if it was called before; and ``moved``.
    """
    (x, W, *others), (geometry, eps, relu, adds) = xs, block
    if places_of(*xs, *moved[0]) != current_number():
        return None
    convolve = plan_of("conv_forward_and_keep", x, W, None, geometry, None)
    h = empty((x.shape[0], W.shape[0], *geometry.out_hw(*x.shape[2:], *W.shape[2:])), x.dtype, x)  # as it will be
    name, last = ("bn_add_relu", ()) if adds else ("bn_forward_and_move", (relu,))
    normalize = plan_of(name, h, *others, eps, _SPATIAL, *last, *moved)
    if convolve is None or normalize is None:
        return None
    server = server_of(normalize)

    def forward(xs: Any, copy: Reader | None, convolved: Any, *moved: Any) -> tuple[Array, InBlock]:
        x, W, gamma, beta = xs
        h, laid, widened = convolve(x, W, None, geometry, copy)
        y, mean, var, saved = normalize(h, gamma, beta, eps, _SPATIAL, relu, *moved)
        return y, InBlock(h, mean, var, (server, saved), laid, widened)

    def forward_of_sum(xs: Any, copy: Reader | None, convolved: Any, *moved: Any) -> tuple[Array, InBlock]:
        x, W, gamma, beta, added = xs
        h, laid, widened = convolve(x, W, None, geometry, copy) if convolved is None else convolved
        y, mean, var = normalize(h, gamma, beta, added, eps, _SPATIAL, *moved)
        return y, InBlock(h, mean, var, (server, None), laid, widened)

    return forward_of_sum if adds else forward


def _plan_backward(
    xs: tuple[Array, ...], y: Any, kept: InBlock, gys: Any, block: Block, outs: Any, is_ours: bool, *parts: bool
) -> Callable[..., Any]:  # fmt: skip
    (geometry, eps, relu, adds), (x, W, gamma), (with_x, sees_a_part) = block, xs, parts
    h, mean, var, (server, saved), laid, widened = kept  # h stands for its gradient, which lies as it does
    if places_of(*xs, *gys, *outs) != current_number() or server == FORMULA:
        return _declined
    if adds:
        normalize = plan_of("bn_backward_of_sum", h, gamma, mean, var, y, gys, eps, _SPATIAL, *outs[1:], is_ours)
    else:
        given = h, gamma, mean, var, gys[0], eps, saved, _SPATIAL, relu, *outs[1:], is_ours
        normalize = plan_of_provider(server, "bn_backward", given)
    x_shape, reads = ((*x.shape[:2], *h.shape[2:]), _POINTWISE) if sees_a_part else (x.shape, geometry)
    arguments = ("conv_backward_data", h, W, x_shape, reads)
    arguments = arguments if laid is None else ("conv_backward_data_as_laid", *arguments[1:], laid)
    data = plan_of(*arguments) if with_x else None
    later = plan_of("conv_backward_weight_later", x if widened is None else widened, h, W.shape, geometry, outs[0])
    at_once = later or plan_of("conv_backward_weight", x, h, W.shape, geometry, W.dtype, outs[0])
    if normalize is None or at_once is None or (with_x and data is None):
        return _declined
    W_shape, W_dtype, reads_laid = W.shape, W.dtype, laid is not None

    def backward(
        xs: tuple[Array, ...], y: Any, kept: InBlock, gys: Any, block: Block, outs: Any, is_ours: bool, *parts: bool
    ) -> tuple[Any, Any]:  # fmt: skip
        (x, W, gamma), (h, mean, var, (_, saved), laid, widened), (out_W, out_gamma, out_beta) = xs, kept, outs
        if adds:
            gh, *gs = normalize(h, gamma, mean, var, y, gys, eps, _SPATIAL, out_gamma, out_beta, is_ours)
        else:
            gh, *gs = normalize(h, gamma, mean, var, gys[0], eps, saved, _SPATIAL, relu, out_gamma, out_beta, is_ours)
        gs = out_W, *gs
        if with_x:
            gs = data(gh, W, x_shape, reads, laid) if reads_laid else data(gh, W, x_shape, reads), *gs
        if later is not None:
            return later(x if widened is None else widened, gh, W_shape, geometry, out_W), gs
        at_once(x, gh, W_shape, geometry, W_dtype, out_W)
        return None, gs

    return backward
