"""Kernels of residual blocks whose convolutions do more than convolve (``config.fused_convolutions``).

A convolution leaves the sums of its channels and of their squares, from which the statistics of its normalization come.
The next one normalizes and rectifies what it reads, so that this is never written, and the gradient of its weights does
so again. As in :mod:`dbrdist.kernels.device_dispatch`, None as a result means that the formula has to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dbrdist.core.array.backend import empty, places_of
from dbrdist.core.array.current_device import current_number
from dbrdist.core.array.types import Array, DType
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.table import KEYS, kernel, lies, plan_of, planned, switches

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.core.model.weight_copies import Reader

Running: TypeAlias = tuple[Array, Array]  # mean and variance
Moved: TypeAlias = tuple[Running | None, float, tuple[float, float]]  # their decay, the batch's weights in both
Vectors: TypeAlias = tuple[Array, Array, Array, Array, float]  # mean, variance, gamma, beta and eps of a normalization


@kernel(is_light=True)
def conv_and_sums(
    x: Array, W: Array, geometry: ConvGeometry, affine: Array | None, copy: Reader | None
) -> tuple[Array, Array, Array | None] | None:
    """x * W, the float32 sums (2, O) of its channels and of their squares, and the weights as laid out for backward.

    ``affine`` (2, C), of the type of x: where it is not None, max(a x + b, 0) takes the place of x, with a factor a and
    a summand b for each channel. ``copy`` has the weights laid out already, if it is not None.
    """
    return "conv_and_sums", type(x), *lies(x, W), geometry, affine is None, switches(x, W, affine)


@kernel(is_light=True)
def conv_backward_weight_rectified(
    x: Array, affine: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, out: Array
) -> tuple[Any, Any] | None:
    """The gradient of the weights of :func:`conv_and_sums` with ``affine``, as ``conv_backward_weight_later`` gives it.

    Two times None where ``out`` has been written.
    """
    return "conv_backward_weight_rectified", type(x), *lies(x, gy, out), W_shape, geometry, switches(x, affine, gy, out)


@kernel(is_light=True)
def bn_of_sums(
    sums: Array, gamma: Array, beta: Array, eps: float, count: int, dtype: DType, running: Running | None,
    decay: float, weights: tuple[float, float],
) -> tuple[Array, Array, Array, Array] | None:  # fmt: skip
    """Mean and biased variance of ``count`` numbers from :func:`conv_and_sums`, and two results more.

    These are gamma and beta in one float32 vector, which ``bn_backward`` asks for, and the ``affine`` of ``dtype`` that
    normalizes. Running statistics move as by ``bn_move``. A variance that is small beside the square of its mean loses
    digits: its relative error is (mean / deviation)^2 times that of the sums.
    """
    places = places_of(sums, gamma, beta, *(running or ()))
    return "bn_of_sums", type(sums), *lies(sums, gamma, beta, *(running or ())), eps, count, dtype, places


@kernel(is_light=True)
def bn_relu_of_sum(x: Array, of_x: Vectors, added: Array, of_added: Vectors | None) -> Array | None:
    """The ReLU of the normalization of x plus ``added``, which is normalized too unless ``of_added`` is None."""
    places = places_of(x, *of_x[:4], added, *(of_added or ())[:4])
    return "bn_relu_of_sum", type(x), *lies(x, added), of_added is None, places


@kernel(is_light=True)
def bn_backward_of_two(
    xs: tuple[Array, Array], of_xs: tuple[Vectors, Vectors], y: Array, gys: tuple[Array, ...],
    outs: tuple[Array | None, ...], is_ours: bool,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]] | None:  # fmt: skip
    """The gradients of x, gamma and beta of both normalizations of :func:`bn_relu_of_sum`, whose result is y.

    ``gys`` are one or two gradients of y, which are added up first; the last may be overwritten if it ``is_ours``.
    ``outs`` are where the gradients of both gamma and beta belong, or None.
    """
    arrays = *xs, y, *gys
    places = places_of(*arrays, *of_xs[0][:4], *of_xs[1][:4], *outs)
    return "bn_backward_of_two", type(y), *lies(*arrays, *outs), len(gys), places


# ---- blocks


class Stage(NamedTuple):
    """A convolution with its normalization."""

    geometry: ConvGeometry
    eps: float


class FusedBlock(NamedTuple):
    """Stages, with a ReLU after each but the last; a shortcut of a stage or None; and the ReLU of their sum."""

    stages: tuple[Stage, ...]
    shortcut: Stage | None


class InStage(NamedTuple):
    """What forward leaves of a stage for backward besides operands."""

    h: Array  # the convolution
    mean: Array
    var: Array
    saved: Array  # gamma and beta as they were
    affine: Array  # what normalizes h for the convolution that comes next
    laid: Array | None  # the weights as the convolution read them, where they are of use to backward


ForwardPlan: TypeAlias = "Callable[..., tuple[Array, list[InStage]]]"


def _planned_stage(
    x: Array, W: Array, gamma: Array, beta: Array, stage: Stage, affine: Array | None, moved: Moved
) -> tuple[tuple[Callable[..., tuple[Array, ...]], Callable[..., tuple[Array, ...]], bool], Array] | None:
    """The two plans of a stage, whether running statistics move apart, and an array like its result; or None."""
    convolve = plan_of("conv_and_sums", x, W, stage.geometry, affine, None)
    if convolve is None:
        return None
    h = empty((x.shape[0], W.shape[0], *stage.geometry.out_hw(*x.shape[2:], *W.shape[2:])), x.dtype, x)
    sums = empty((2, W.shape[0]), "float32", x)
    given = sums, gamma, beta, stage.eps, h.size // len(W), x.dtype
    together = plan_of("bn_of_sums", *given, *moved)
    finish = together or plan_of("bn_of_sums", *given, None, *moved[1:])
    if affine is not None:
        room = empty((W.size,), W.dtype, W).reshape(W.shape)
        weight = plan_of("conv_backward_weight_rectified", x, affine, h, W.shape, stage.geometry, room)
        finish = None if weight is None else finish
    return None if finish is None else ((convolve, finish, together is None), h)


def plan_fused_block(xs: tuple[Array, ...], block: FusedBlock, *moved: Moved) -> ForwardPlan | None:
    """A function for a residual block of operands like these; None where no kernels do it.

    ``xs`` are x and three arrays a stage: W, gamma and beta; those of the shortcut come last. ``moved`` are, for each
    stage, the running statistics, their decay and the weights of mean and variance. The function takes ``xs``, what has
    the weights of each stage laid out already or None, and ``moved``.
    """
    x, stages = xs[0], [*block.stages, *[block.shortcut] * (block.shortcut is not None)]
    operands = [xs[1 + 3 * k : 4 + 3 * k] for k in range(len(stages))]
    last = len(block.stages) - 1
    if places_of(*xs, *[a for of_stage in moved for a in of_stage[0]]) != current_number():
        return None
    plans: list[tuple[Callable[..., tuple[Array, ...]], Callable[..., tuple[Array, ...]], bool]] = []
    hs: list[Array] = []
    for k, (stage, (W, gamma, beta)) in enumerate(zip(stages, operands)):
        is_inner = 0 < k <= last
        seen = hs[-1] if is_inner else x
        affine = empty((2, seen.shape[1]), x.dtype, x) if is_inner else None
        made = _planned_stage(seen, W, gamma, beta, stage, affine, moved[k])
        if made is None:
            return None
        plans.append(made[0])
        hs.append(made[1])
    vectors = (empty((len(operands[last][0]),), "float32", x),) * 4
    of_added = None if block.shortcut is None else (*vectors, 0.0)
    end = plan_of("bn_relu_of_sum", hs[last], (*vectors, 0.0), x if of_added is None else hs[-1], of_added)
    if end is None:
        return None

    def forward(xs: tuple[Array, ...], copies: tuple[Reader | None, ...], *moved: Moved) -> tuple[Array, list[InStage]]:
        x, kept = xs[0], []
        seen, affine = x, None
        for k, (convolve, finish, moves_apart) in enumerate(plans):
            W, gamma, beta = xs[1 + 3 * k : 4 + 3 * k]
            if k > last:
                seen, affine = x, None
            h, sums, laid = convolve(seen, W, stages[k].geometry, affine, copies[k])
            running, decay, weights = moved[k]
            given = sums, gamma, beta, stages[k].eps, h.size // len(W), h.dtype
            mean, var, saved, affine = finish(*given, None if moves_apart else running, decay, weights)
            if moves_apart:
                apart = *running, mean, var, decay, weights
                planned(KEYS["bn_move"](*apart), apart)(*apart)
            kept.append(InStage(h, mean, var, saved, affine, laid))
            seen = h
        of = [(left.mean, left.var, *xs[2 + 3 * k : 4 + 3 * k], stages[k].eps) for k, left in enumerate(kept)]
        if last + 1 == len(plans):
            return end(kept[last].h, of[last], x, None), kept
        return end(kept[last].h, of[last], kept[-1].h, of[-1]), kept

    return forward
