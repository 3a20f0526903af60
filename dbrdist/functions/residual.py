"""Parts of residual networks as one function for devices.

They are the end of a block, relu(batch_normalization(x) + residual), and a convolution with that, or with a part of it:
the calls one after the other run the same kernels with the same operands, which takes the host longer.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple
from weakref import ref

from dbrdist import kernels
from dbrdist.core.array.backend import Array, DType, channels_last, full, is_channels_last, is_floating
from dbrdist.core.array.current_device import On, elsewhere, gpu_arrays, is_of_gpu
from dbrdist.core.array.types import Destinations, Shape
from dbrdist.core.tape import ops
from dbrdist.core.tape.call import revive
from dbrdist.core.tape.checks import ArgumentError
from dbrdist.core.tape.deferred import Deferred, write_later
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.fusion import discreet
from dbrdist.core.tape.node import Value, assignments
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.connection import activation
from dbrdist.functions.convolution import (
    Convolution2D,
    ConvolutionData,
    ConvolutionWeight,
    geometry_of,
    sees_a_part,
)
from dbrdist.functions.normalization import (
    BatchNormalization,
    BatchNormalizationGradient,
    batch_normalization,
    checked_axis,
    in_types_of_inputs,
    move_running,
    of_batch,
    view_of,
)
from dbrdist.functions.recomputed import may_be_offered, offer_sum
from dbrdist.functions.rectified import SpreadGradient, SummedGradient, defer_sum
from dbrdist.functions.rectifier import ReLU, ReLUGradient, relu
from dbrdist.kernels import Block, InBlock
from dbrdist.kernels.table import composed

_SPATIAL = (0, 2, 3)
_FEWEST = 4096  # elements: a ReLU of fewer is a function of its own
_form = operator.attrgetter("shape", "dtype")
_array_of = operator.attrgetter("_array")
_NEITHER = None, None  # plan nor running statistics that move: for a second call of forward
_KEPT, _FIRST = (0, 1, 2), (0,)
_BUT_X = {4: (1, 2, 3), 5: (1, 2, 3, 4)}  # by the number of inputs


class RectifiedSum(BatchNormalization):
    """y = max(gamma x_hat + beta + r, 0), of x, gamma, beta and r

    On a GPU the sum is never written, and backward adds the gradients of y, masks them and sums them up in one pass.
    Elsewhere one pass over the normalization makes y of it.
    """

    defer_sum = staticmethod(defer_sum)
    marks: Array | None = None  # of the elements of y that are not 0, in the place of y, which may be made again

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs, self._keep_outputs, self.marks = (0, 1), (0,), None
        x, gamma, beta, added = xs
        moving = self.moving or (None, 0.0, (0.0, 0.0))
        made = kernels.bn_add_relu(x, gamma, beta, added, self.eps, self.axis, *moving)
        if made is None:
            y, self.mean, self.var, self.saved = self._normalized(x, gamma, beta, False)
            offers, self.offers = self.offers, False  # good for one call
            if offers and is_channels_last(added):
                self._keep_outputs = ()
                self.marks = kernels.relu_of_sum_marked(y, added)
                vectors = kernels.bn_vectors(self.saved, gamma, beta, self.mean, self.var)
                offer_sum(y, added, ref(self), x, vectors, self.saved, self.eps, self.axis, False)
            elif not kernels.relu_of_sum_over(y, added):
                y = kernels.relu_forward(ops.add(y, added))
            return (y,)
        self.has_moved, self.moving = self.moving is not None, None
        y, self.mean, self.var, self.saved = made
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any = None) -> tuple[Any, ...]:
        grads = self._gradients_on_tape(gys[0]) if self._on_variables else self._gradients(wanted, gys[0], out)
        return in_types_of_inputs(self, wanted, [grads[i] for i in wanted])

    def _gradients_on_tape(self, gy: Any) -> tuple[Any, ...]:
        g = call(ReLUGradient(self._kept_ys[0] if self.marks is None else self._passed()), gy)
        return *BatchNormalizationGradient(self).apply((*self.retained_inputs(), g)), g

    def _passed(self) -> Array:
        """What is not 0 where y is not."""
        assert self.marks is not None
        x = self._kept_xs[0]
        return kernels.relu_backward_marked(self.marks, full(x.shape, 1, x.dtype, x), None, True)

    def _gradients(self, wanted: tuple[int, ...], gy: Any, out: Any) -> tuple[Array, ...]:
        """The gradients of all inputs; that of r is the gradient of the sum."""
        (x, gamma), views = self._kept_xs, (view_of(out, wanted, 1), view_of(out, wanted, 2))
        gys: tuple[Array, ...] = (gy,)
        is_ours = self.owns_gy
        if type(gy) is SummedGradient:
            gys, is_ours = gy.taken(), gy.is_ours
        elif isinstance(gy, Deferred):
            gys, is_ours = (gy.force(),), True
        if self.marks is not None:
            g, gys = _masked_by_marks(self.marks, gys, is_ours), ()
            return *self.backward_kernel(x, gamma, g, *views), g
        y, statistics = self._kept_ys[0], (self.mean, self.var)
        grads = kernels.bn_backward_of_sum(x, gamma, *statistics, y, gys, self.eps, self.axis, *views, is_ours)
        if grads is None:
            g, gys = _masked(y, gys, is_ours), ()
            grads = *self.backward_kernel(x, gamma, g, *views), g
        return grads


discreet[RectifiedSum] = RectifiedSum.forward


def _masked_by_marks(marks: Array, gys: tuple[Array, ...], is_ours: bool) -> Array:
    """As :func:`_masked`, by marks of y."""
    gys = tuple(map(channels_last, gys))
    is_ours = is_ours and gys[-1].flags.writeable
    return kernels.relu_backward_marked(marks, gys[-1], gys[0] if len(gys) > 1 else None, is_ours)


def _masked(y: Array, gys: tuple[Array, ...], is_ours: bool) -> Array:
    """The gradient of what the ReLU took, over the last of the gradients of y where that may be."""
    if len(gys) == 1:
        return (kernels.relu_backward_over if is_ours else kernels.relu_backward)(y, *gys)
    return kernels.relu_backward_of_sum(y, gys[0], gys[1], gys[1] if is_ours else None)


def batch_normalization_add_relu(
    x: Operand, gamma: Operand, beta: Operand, residual: Operand, *, eps: float = 2e-5,
    running_mean: Array | None = None, running_var: Array | None = None, decay: float = 0.9, axis: Any = None,
) -> Variable:  # fmt: skip
    """``relu(batch_normalization(x, gamma, beta, ...) + residual)`` in fewer passes: on a GPU two over x, not four.

    Args:
        x: the input, (N, C, H, W) or (N, C).
        gamma, beta, eps, running_mean, running_var, decay, axis: see :func:`batch_normalization`.
        residual: what is added, in the shape and type of x; others broadcast and are added by a call of their own.
    """
    if (getattr(residual, "shape", None), getattr(residual, "dtype", None)) != (x.shape, x.dtype):
        y = batch_normalization(
            x, gamma, beta, eps=eps, running_mean=running_mean, running_var=running_var, decay=decay, axis=axis
        )
        return relu(ops.add(y, residual))
    axis = checked_axis("batch_normalization", x, gamma, axis, beta=beta)
    node = RectifiedSum(eps, axis)
    node.offers = may_be_offered(x)
    return of_batch(node, (x, gamma, beta, residual), running_mean, running_var, decay)


class Site(NamedTuple):
    """What does not change from call to call as long as shapes and types do not."""

    block: Block
    correction: float  # of the batch's variance for the running one: n / (n - 1)
    may_see_a_part: bool  # a 1x1 convolution that leaves pixels out


class NormalizedConvolution(FunctionNode):
    """y = gamma x_hat + beta of x * W and its statistics, of x, W, gamma and beta"""

    writes = gives_new = True
    reads_copy_of = 1
    rectifies = False
    left: Any = None  # an InBlock, for backward
    by_parts = False  # whether forward ran the kernels of the separate functions
    convolved: Any = None  # h, laid and widened as in InBlock where a call of its own has convolved, until forward

    def __init__(self, site: Site, running: tuple[Array, Array], decay: float, plan: Any = None) -> None:
        self.site = site
        self.planned: Any = plan, _moved(site, running, decay)

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs = _KEPT
        if self.rectifies:
            self._keep_outputs = _FIRST
        copy, self.copy, (plan, moved), self.planned = self.copy, None, self.planned, _NEITHER
        if plan is None:
            return (self._forward_by_parts(xs, moved, copy),)
        convolved, self.convolved = self.convolved, None
        y, self.left = plan(xs, copy, convolved, *moved)
        return (y,)

    def _forward_by_parts(self, xs: tuple[Array, ...], moving: Any, copy: Any) -> Array:
        """By the functions that this one stands for, one after the other."""
        x, W, gamma, beta = xs[:4]
        conv, bn, block = Convolution2D(self.site.block.geometry), self._normalization(), self.site.block
        conv.copy, bn.moving = copy, moving
        if self.convolved is None:
            (h,) = conv.forward((x, W))
        else:
            (h, conv.laid, conv.widened), self.convolved = self.convolved, None
        if block.adds:
            (y,) = bn.forward((h, *xs[2:]))
        else:
            y, bn.mean, bn.var, bn.saved = bn._normalized(h, gamma, beta, block.relu)
        if moving is not None and not bn.has_moved:
            (mean, var), decay, _ = moving
            move_running(mean, var, bn.mean, bn.var, decay, h.size // (bn.mean.size or 1))
        self.by_parts = True
        self.left = InBlock(h, bn.mean, bn.var, bn.saved, conv.laid, conv.widened)
        return y

    def _normalization(self) -> Any:
        """The function of the normalization, with what this one left for it."""
        block = self.site.block
        bn = (RectifiedSum if block.adds else BatchNormalization)(block.eps, _SPATIAL)
        if self.left is not None:
            bn.mean, bn.var, bn.saved = self.left[1:4]
        return bn

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Destinations = None) -> tuple[Any, ...]:
        if self._on_variables:
            return self._on_tape(wanted, gys[0])
        gy, is_ours, site = gys[0], self.owns_gy, self.site
        if isinstance(gy, Deferred):
            if type(gy) is SummedGradient and site.block.adds:
                gys, is_ours = (gy.a, gy.b), gy.is_ours
            else:
                gys, is_ours = (gy.force(),), True
        num_inputs = len(self.inputs)
        with_x = len(wanted) == num_inputs
        if out is None or self.by_parts or not (with_x or wanted == _BUT_X[num_inputs]):
            return self._by_parts(wanted, gys, out, is_ours)
        views: Any = out[1:4] if with_x else out[:3]
        is_part = with_x and site.may_see_a_part and _takes_parts(self.inputs[0].creator_node)
        y = self._kept_ys[0] if self.rectifies else None
        xs = self._kept_xs
        made = kernels.conv_bn_backward(xs, y, self.left, gys, site.block, views, is_ours, with_x, is_part)
        if made is None:
            return self._by_parts(wanted, gys, out, is_ours)
        later, grads = made
        if later is not None:
            write_later(*later, views[0])
        if is_part:
            return SpreadGradient(grads[0], xs[0].shape, site.block.geometry[:2]), *grads[1:]
        return grads

    def _by_parts(
        self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations, is_ours: bool
    ) -> tuple[Any, ...]:  # fmt: skip
        """The gradients by the functions that this one stands for, one after the other."""
        (x, W, gamma), block, bn = self._kept_xs, self.site.block, self._normalization()
        outs = dict(zip(wanted, out)) if out is not None else {}
        views = outs.get(2), outs.get(3)
        h, mean, var, saved, laid, widened = self.left
        if block.adds:
            bn._kept_xs, bn._kept_ys, bn.owns_gy = (h, gamma), self._kept_ys, is_ours
            gy = gys[0] if len(gys) == 1 else SummedGradient(gys[0], gys[1], ops.add, is_ours)
            gh, *others = bn._gradients((0, 1, 2, 3), gy, (None, *views, None))
        else:
            gh, *others = kernels.bn_backward(
                h, gamma, mean, var, gys[0], block.eps, saved, block.relu, _SPATIAL, *views, is_ours
            )  # fmt: skip
        conv, of_conv = Convolution2D(block.geometry), tuple([i for i in wanted if i < 2])
        conv.inputs, conv._kept_xs, conv.laid, conv.widened = self.inputs[:2], (x, W), laid, widened
        gh = ops.cast(gh, h.dtype)
        grads = conv.derive(of_conv, (gh,), [outs.get(i) for i in of_conv])
        return *grads, *[others[i - 2] for i in wanted if i > 1]

    def _on_tape(self, wanted: tuple[int, ...], gy: Variable) -> tuple[Any, ...]:
        """The gradients as functions of Variables."""
        geometry, left = self.site.block.geometry, self.left
        x, W, gamma = self.retained_inputs()
        h = _KnownConvolution(geometry, left.h).apply((x, W))[0]
        g = call(ReLUGradient(self._kept_ys[0]), gy) if self.rectifies else gy
        gh, *others = BatchNormalizationGradient(self._normalization()).apply((h, gamma, g))
        rules = {
            0: lambda: call(ConvolutionData(geometry, x.shape), gh, W),
            1: lambda: call(ConvolutionWeight(geometry, W.shape, W.dtype), x, gh),
            4: lambda: g,
        }  # fmt: skip
        grads = [others[i - 2] if i in (2, 3) else rules[i]() for i in wanted]
        return tuple([ops.cast(v, self.inputs[i].dtype) for i, v in zip(wanted, grads)])

    def _drop_copies(self) -> None:
        self.left = self.left._replace(laid=None, widened=None)

    def unchain(self) -> None:
        super().unchain()
        self.left = None


class RectifiedConvolution(NormalizedConvolution):
    """y = max(gamma x_hat + beta, 0) of x * W and its statistics, or of the sum with a residual, the last input"""

    reads_copy_of = 1
    rectifies = True
    defer_sum = staticmethod(defer_sum)


class _KnownConvolution(Convolution2D):
    """A convolution whose result exists already."""

    def __init__(self, geometry: kernels.ConvGeometry, y: Array) -> None:
        super().__init__(geometry)
        self.y = y

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self._keep_inputs = (0, 1)
        return (self.y,)


def _takes_parts(creator: FunctionNode | None) -> bool:
    """Does the rule of a function complete gradients of a part of the pixels?"""
    return creator is not None and creator.defer_sum is not None


def convolution_bn_of_batch(
    x: Operand, W: Any, vectors: tuple[Any, Any], running: tuple[Array, Array], eps: float, decay: float, relu: bool,
    added: Any, *, stride: tuple[int, ...], pad: tuple[int, ...], dilate: tuple[int, ...], groups: int,
) -> Variable | None:  # fmt: skip
    """relu(bn(x * W) + added) with the statistics of the batch, for training on a device.

    ``vectors`` are gamma and beta, ``running`` the mean and the variance that move towards those of the batch;
    ``added`` may be None. The result is None where the functions have to be called one by one: where arguments do not
    fit, about which those have the words, and where a ReLU has so few elements that it is no part of a normalization.
    """
    x, (gamma, beta) = activation(x), vectors
    is_variable = are_variables = isinstance(x, Value)
    operands: tuple[Any, ...] = (x, W, gamma, beta)
    arrays: tuple[Array, ...] = (_array_of(x) if is_variable else x, *map(_array_of, operands[1:]))
    if added is not None:
        operands = (*operands, added)
        are_variables = is_variable and isinstance(added, Value)
        arrays = (*arrays, _array_of(added) if isinstance(added, Value) else added)
    site, plan = _decided((stride, pad, dilate, groups, False), eps, relu, is_variable, arrays, running, decay)
    if site is None:
        return None
    number = elsewhere(arrays) if plan is None else None
    if number is not None:
        with On(number):
            return convolution_bn_of_batch(
                x, W, vectors, running, eps, decay, relu, added, stride=stride, pad=pad, dilate=dilate, groups=groups
            )
    if W._kept is not None:
        W.release()
    node = (RectifiedConvolution if relu else NormalizedConvolution)(site, running, decay, plan)
    if plan is None or not are_variables:
        return node.apply(operands)[0]
    return node.apply_here(operands, arrays)[0]


def bn_of_batch_with_convolution(
    h: Variable, W: Any, vectors: tuple[Any, Any], running: tuple[Array, Array], eps: float, decay: float, added: Any
) -> Variable | None:
    """relu(bn(h) + added) for h = x * W of a call before, which becomes part of the function: see
    :func:`convolution_bn_of_batch`. Nobody else may have ``h``.
    """
    conv = h.node.creator_node
    if type(conv) is not Convolution2D or len(conv.inputs) != 2 or conv.recorded_at != assignments[0] or conv.recipe:
        return None
    (x, _), (gamma, beta), g = conv._kept_xs, vectors, conv.geometry
    x_operand = revive(conv.inputs[0], x) if conv.inputs[0].requires_grad else x
    operands = x_operand, W, gamma, beta, added
    arrays = x, *map(_array_of, operands[1:4]), _array_of(added) if isinstance(added, Value) else added
    window = (g.sh, g.sw), (g.ph, g.pw), (g.dh, g.dw), g.groups, False
    site, plan = _decided(window, eps, True, True, arrays, running, decay)
    if site is None or site.block.geometry != g or conv.inputs[1] is not W.node:
        return None
    node = RectifiedConvolution(site, running, decay, plan)
    node.convolved = _array_of(h), conv.laid, conv.widened
    return node.apply(operands)[0]


def _moved(site: Site, running: tuple[Array, Array], decay: float) -> tuple[Any, ...]:
    """How running statistics move: arguments of ``bn_forward_and_move``."""
    return running, decay, (1 - decay, (1 - decay) * site.correction)


def _decided(
    window: tuple[Any, ...], eps: float, relu: bool, is_variable: bool, arrays: tuple[Array, ...],
    running: tuple[Array, Array], decay: float,
) -> tuple[Site | None, Any]:  # fmt: skip
    """What is decided for a call, and the plan of its kernels if the current device has them."""
    placed = *running, *arrays
    if not gpu_arrays.issuperset(map(type, placed)) and not all(is_of_gpu(type(a)) for a in placed):
        return None, None
    key = "conv_bn", window, eps, relu, is_variable, kernels.conv_bn_key(*placed)
    try:
        return composed(key, _decide, (window, eps, relu, is_variable, arrays, running, decay))
    except TypeError:  # a stride or an eps that is no number and cannot be hashed
        return None, None


def _decide(
    window: tuple[Any, ...], eps: float, relu: bool, is_variable: bool, arrays: tuple[Array, ...],
    running: tuple[Array, Array], decay: float,
) -> tuple[Site | None, Any]:  # fmt: skip
    site = _site(window, eps, relu, is_variable, *map(_form, (*running, *arrays)))
    return site, None if site is None else kernels.plan_conv_bn(arrays, site.block, *_moved(site, running, decay))


def _site(
    window: tuple[Any, ...], eps: float, relu: bool, is_variable: bool, mean: tuple[Shape, DType],
    var: tuple[Shape, DType], x: tuple[Shape, DType], W: tuple[Shape, DType], gamma: tuple[Shape, DType],
    beta: tuple[Shape, DType], added: tuple[Shape, DType] | None = None,
) -> Site | None:  # fmt: skip
    """What is decided for operands of these shapes and types; None where they do not fit together."""
    try:
        geometry = geometry_of("convolution_2d", window, x, W)
    except (ArgumentError, ValueError, TypeError):
        return None
    n, height, width = x[0][0], *geometry.out_hw(*x[0][2:], *W[0][2:])
    shape, count = (n, W[0][0], height, width), n * height * width
    size = count * W[0][0]
    if (
        not is_floating(x[1])
        or not (is_variable or x[1] == W[1])
        or any(v[0] != W[0][:1] for v in (mean, var, gamma, beta))
    ):
        return None
    if count < 2 or not size or (added is None and relu and size < _FEWEST) or (added is not None and not relu):
        return None
    if added is not None and (added[0] != shape or added[1] != x[1]):
        return None
    block = Block(geometry, eps, relu, added is not None)
    x_size = n * x[0][1] * x[0][2] * x[0][3]
    return Site(block, count / (count - 1.0), sees_a_part(geometry, W[0], x_size, ReLU()))
