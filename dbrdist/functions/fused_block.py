"""A residual block as one function for devices, with convolutions that do more than convolve.

Each leaves the sums of its channels, from which the statistics of its normalization come, and each but the first
normalizes and rectifies what it reads. So the activations within a block are never written, and nobody can ask for
them: that is why all of it is one function. See ``config.fused_convolutions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dbrdist import kernels
from dbrdist.core.array.backend import Array, empty
from dbrdist.core.array.current_device import On, elsewhere, gpu_arrays, is_of_gpu
from dbrdist.core.array.types import Destinations
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import ArgumentError
from dbrdist.core.tape.deferred import Deferred, write_later
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.node import Value
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.connection import activation
from dbrdist.functions.convolution import Convolution2D, geometry_of, gradient_of_images, gradient_of_weights
from dbrdist.functions.normalization import BatchNormalization
from dbrdist.functions.rectified import SpreadGradient, SummedGradient, defer_sum
from dbrdist.functions.rectifier import ReLU
from dbrdist.kernels import ConvGeometry, FusedBlock, Stage
from dbrdist.kernels.table import composed

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.core.model.weight_copies import Reader
    from dbrdist.core.tape.deferred import Gradient
    from dbrdist.kernels import ForwardPlan, InStage, Moved, Vectors

_SPATIAL = (0, 2, 3)
_POINTWISE = ConvGeometry()
_array_of = attrgetter("_array")
# Stride, padding, dilation, groups and cover_all.
Window: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]
Views: TypeAlias = "dict[int, Array | None]"  # by input: where its gradient belongs
Gradients: TypeAlias = "dict[int, Array]"


class StageOperands(NamedTuple):
    """A convolution without bias and the batch normalization of its result.

    ``W`` (O, I, kh, kw), ``gamma`` and ``beta`` (O) are parameters, ``running`` the mean and the variance (O) that move
    towards those of the batch.
    """

    W: Parameter
    gamma: Parameter
    beta: Parameter
    running: tuple[Array, Array]
    eps: float
    decay: float
    window: Window


class ResidualBlock(FunctionNode):
    """y = max(u_n + s, 0) with u_k = gamma_k x_hat_k + beta_k of max(u_k-1, 0) * W_k and its statistics

    Inputs are x = u_0, which is not rectified, and W, gamma and beta of each stage; s is x, or such a stage of x, whose
    three come last.
    """

    writes = gives_new = True
    reads_copy_of = 1
    defer_sum = staticmethod(defer_sum)
    left: list[InStage] | None = None  # for backward, of each stage

    def __init__(
        self, block: FusedBlock, plan: ForwardPlan, copies: tuple[Reader | None, ...], moved: tuple[Moved, ...]
    ) -> None:  # fmt: skip
        self.block = block
        self.planned: tuple[ForwardPlan, tuple[Reader | None, ...], tuple[Moved, ...]] | None = plan, copies, moved

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs, self._keep_outputs = tuple(range(len(xs))), (0,)
        (plan, copies, moved), self.planned, self.copy = self.planned, None, None
        y, self.left = plan(xs, copies, *moved)
        return (y,)

    def derive(
        self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Destinations = None
    ) -> tuple[Gradient, ...]:  # fmt: skip
        if self._on_variables:
            return self._on_tape(wanted, gys[0])
        gy, is_ours = gys[0], self.owns_gy
        if type(gy) is SummedGradient:
            gys, is_ours = gy.taken(), gy.is_ours
        elif isinstance(gy, Deferred):
            gys, is_ours = (gy.force(),), True
        outs: Views = {} if out is None else dict(zip(wanted, out))
        grads: Gradients = {}
        stages, shortcut = self.block
        last = len(stages) - 1
        of_end = self._through_end(gys, is_ours, outs, grads)
        gh = of_end[0]
        for k in range(last, -1, -1):
            gv = self._through_convolution(k, gh, wanted, outs, grads)
            if k:
                gh = self._through_normalization(k - 1, gv, outs, grads)
        if 0 in wanted:
            grads[0] = self._with_shortcut(gv, of_end[1])
        if shortcut is not None:
            self._gradient_of_weights(last + 1, of_end[1], wanted, outs, grads)
        return tuple([grads[i] for i in wanted])

    def _vectors(self, k: int) -> Vectors:
        """Mean, variance, gamma, beta and eps of a stage."""
        left, stages = self.left[k], self.block.stages
        stage = stages[k] if k < len(stages) else self.block.shortcut
        return left.mean, left.var, *self._kept_xs[2 + 3 * k : 4 + 3 * k], stage.eps

    def _through_end(self, gys: tuple[Array, ...], is_ours: bool, outs: Views, grads: Gradients) -> tuple[Array, Array]:
        """The gradients of the last convolution and of what is added: the sum's, or the shortcut's convolution's."""
        last, y = len(self.block.stages) - 1, self._kept_ys[0]
        at = 2 + 3 * last
        mean, var, gamma, _, eps = vectors = self._vectors(last)
        if self.block.shortcut is None:
            views = outs.get(at), outs.get(at + 1)
            made = kernels.bn_backward_of_sum(
                self.left[last].h, gamma, mean, var, y, gys, eps, _SPATIAL, *views, is_ours
            )  # fmt: skip
            gh, grads[at], grads[at + 1], g = made
            return gh, g
        hs, of_both = (self.left[last].h, self.left[-1].h), (vectors, self._vectors(last + 1))
        places = at, at + 1, at + 3, at + 4
        made = kernels.bn_backward_of_two(hs, of_both, y, gys, tuple(map(outs.get, places)), is_ours)
        (gh, *first), (gs, *second) = made
        grads.update(zip(places, (*first, *second)))
        return gh, gs

    def _through_normalization(self, k: int, gv: Array, outs: Views, grads: Gradients) -> Array:
        """The gradient of a convolution from that of its rectified normalization."""
        left, at, (mean, var, gamma, _, eps) = self.left[k], 2 + 3 * k, self._vectors(k)
        saved, views = ("cuda", left.saved), (outs.get(at), outs.get(at + 1))
        gh, grads[at], grads[at + 1] = kernels.bn_backward(
            left.h, gamma, mean, var, gv, eps, saved, True, _SPATIAL, *views, True
        )  # fmt: skip
        return gh

    def _through_convolution(
        self, k: int, gh: Array, wanted: tuple[int, ...], outs: Views, grads: Gradients
    ) -> Array | None:
        """The gradient of what a convolution of the block reads; None where nobody wants that of x."""
        self._gradient_of_weights(k, gh, wanted, outs, grads)
        if k == 0 and 0 not in wanted:
            return None
        shape = self.left[k - 1].h.shape if k else self._kept_xs[0].shape
        return gradient_of_images(gh, self._kept_xs[1 + 3 * k], shape, self.block.stages[k].geometry, self.left[k].laid)

    def _gradient_of_weights(self, k: int, gh: Array, wanted: tuple[int, ...], outs: Views, grads: Gradients) -> None:
        at, stages = 1 + 3 * k, self.block.stages
        if at not in wanted:
            return
        W, out, stage = self._kept_xs[at], outs.get(at), stages[k] if k < len(stages) else self.block.shortcut
        seen = self._kept_xs[0]
        if 0 < k < len(stages):
            before = self.left[k - 1]
            target = empty((W.size,), W.dtype, W).reshape(W.shape) if out is None else out
            made = kernels.conv_backward_weight_rectified(
                before.h, before.affine, gh, W.shape, stage.geometry, target
            )  # fmt: skip
            if made is not None:
                grads[at] = target
                if made[0] is not None and out is not None:
                    write_later(*made, target)
                elif made[0] is not None:
                    made[0]([made[1]])
                return
            size, eps = before.mean.size, stages[k - 1].eps  # switches have changed since forward
            vectors = before.saved[:size], before.saved[size:], before.mean, before.var
            seen = kernels.bn_inference(before.h, *vectors, eps, True, _SPATIAL)
        grads[at] = gradient_of_weights(seen, gh, W, stage.geometry, out, None)

    def _with_shortcut(self, gv: Array, of_added: Array) -> Array | SummedGradient:
        """The gradient of x: that of the first convolution and that by the shortcut."""
        x, shortcut, creator = self._kept_xs[0], self.block.shortcut, self.inputs[0].creator_node
        if shortcut is not None:
            g, W, laid = shortcut.geometry, self._kept_xs[-3], self.left[-1].laid
            if g.sh * g.sw > 1 and W.shape[2:] == (1, 1) and g == ConvGeometry(g.sh, g.sw):
                seen = gradient_of_images(of_added, W, (*x.shape[:2], *of_added.shape[2:]), _POINTWISE, laid)
                return SpreadGradient(seen, x.shape, (g.sh, g.sw)).plus(gv, True)
            of_added = gradient_of_images(of_added, W, x.shape, g, laid)
        waits = None if creator is None or creator.defer_sum is None else creator.defer_sum(of_added, gv, True)
        return ops.add(of_added, gv) if waits is None else waits

    def _on_tape(self, wanted: tuple[int, ...], gy: Variable) -> tuple[Variable, ...]:
        """The gradients as functions of Variables, by the functions that this one stands for, which are called anew."""
        xs, (stages, shortcut) = self.retained_inputs(), self.block
        links = [*stages, *[shortcut] * (shortcut is not None)]
        done: list[tuple[Convolution2D, BatchNormalization, ReLU]] = []
        v, outputs = xs[0], []
        for k, stage in enumerate(links):
            v = xs[0] if k == len(stages) else v
            conv, bn, rectify = Convolution2D(stage.geometry), BatchNormalization(stage.eps, _SPATIAL), ReLU()
            (u,) = bn.apply((*conv.apply((v, xs[1 + 3 * k])), *xs[2 + 3 * k : 4 + 3 * k]))
            done.append((conv, bn, rectify))
            outputs.append(u)
            if k + 1 < len(stages):
                (v,) = rectify.apply((u,))
        end = done[len(stages) - 1][2]
        end.apply((ops.add(outputs[len(stages) - 1], xs[0] if shortcut is None else outputs[-1]),))
        (g,) = end.derive_variables((0,), (gy,))
        grads: dict[int, Variable] = {}

        def back(k: int, g: Variable) -> Variable:
            conv, bn, _ = done[k]
            gh, grads[2 + 3 * k], grads[3 + 3 * k] = bn.derive_variables((0, 1, 2), (g,))
            gv, grads[1 + 3 * k] = conv.derive_variables((0, 1), (gh,))
            return gv

        of_added = g if shortcut is None else back(len(stages), g)
        for k in range(len(stages) - 1, -1, -1):
            g = back(k, g)
            if k:
                (g,) = done[k - 1][2].derive_variables((0,), (g,))
        grads[0] = ops.add(g, of_added)
        return tuple([ops.cast(grads[i], self.inputs[i].dtype) for i in wanted])

    def _drop_copies(self) -> None:
        self.left = [left._replace(laid=None) for left in self.left]

    def unchain(self) -> None:
        super().unchain()
        self.left = None


def residual_block_of_batch(
    x: Operand, stages: Sequence[StageOperands], shortcut: StageOperands | None
) -> Variable | None:
    """The function of a residual block with the statistics of the batch, for training on a device; None where the
    functions have to be called one by one.

    ``x`` (N, C, H, W); the block's result has its shape unless there is a ``shortcut``.
    """
    x = activation(x)
    if not isinstance(x, Value):
        return None
    links = [*stages, *[shortcut] * (shortcut is not None)]
    operands = x, *[v for link in links for v in (link.W, link.gamma, link.beta)]
    arrays, running = tuple(map(_array_of, operands)), [link.running for link in links]
    placed = *arrays, *[a for pair in running for a in pair]
    if not gpu_arrays.issuperset(map(type, placed)) and not all(is_of_gpu(type(a)) for a in placed):
        return None
    windows = tuple([(link.window, link.eps) for link in links])
    key = "fused_block", windows, shortcut is None, kernels.conv_bn_key(*placed)
    try:
        block, plan, corrections = composed(key, _decide, (windows, shortcut is not None, arrays, running))
    except TypeError:  # a stride or an eps that is no number and cannot be hashed
        return None
    number = elsewhere(arrays) if plan is None else None
    if number is not None:
        with On(number):
            return residual_block_of_batch(x, stages, shortcut)
    if plan is None:
        return None
    weights = operands[1::3]
    for W in weights:
        if W._kept is not None:
            W.release()
    moved = tuple([_moved(link.running, link.decay, c) for link, c in zip(links, corrections)])
    return ResidualBlock(block, plan, tuple([W.copy_for_reading() for W in weights]), moved).apply(operands)[0]


def _moved(running: tuple[Array, Array], decay: float, correction: float) -> Moved:
    """How running statistics move: arguments of ``bn_of_sums``."""
    return running, decay, (1 - decay, (1 - decay) * correction)


def _decide(
    windows: tuple[tuple[Window, float], ...],
    has_shortcut: bool,
    arrays: tuple[Array, ...],
    running: list[tuple[Array, Array]],
) -> tuple[FusedBlock | None, ForwardPlan | None, list[float]]:
    """The block, its plan and the corrections of variances for operands like these; a plan of None if there is none."""
    x, nothing, num_stages = arrays[0], (None, None, []), len(windows) - has_shortcut
    links, corrections, shapes = [], [], []
    for k, (window, eps) in enumerate(windows):
        W, gamma, beta = arrays[1 + 3 * k : 4 + 3 * k]
        shape = x.shape if k in (0, num_stages) else shapes[-1]
        try:
            g = geometry_of("convolution_2d", window, (shape, x.dtype), (W.shape, W.dtype))
        except (ArgumentError, ValueError, TypeError):
            return nothing
        n, height, width = shape[0], *g.out_hw(*shape[2:], *W.shape[2:])
        count = n * height * width
        if count < 2 or not len(W) or any(v.shape != W.shape[:1] for v in (gamma, beta, *running[k])):
            return nothing
        links.append(Stage(g, eps))
        corrections.append(count / (count - 1.0))
        shapes.append((n, len(W), height, width))
    if shapes[num_stages - 1] != (shapes[-1] if has_shortcut else x.shape):
        return nothing
    block = FusedBlock(tuple(links[:num_stages]), links[-1] if has_shortcut else None)
    moved = [_moved(pair, 0.0, 1.0) for pair in running]
    return block, kernels.plan_fused_block(arrays, block, *moved), corrections
