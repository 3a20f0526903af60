"""The heavy operations, each served by the plan that was made for its arguments.

A provider is a file with ``ROWS``: for a kernel's name a planner, which takes the kernel's arguments and returns a
plan, a function of the same arguments made for their types, shapes and layouts; where it raises Unsupported, the next
provider is asked (see providers.py). A plan is kept by a full key, which names everything that it depends on, so that
no call changes who serves another one. Plans belong to one thread, as the memory objects of native libraries do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array.backend import number
from dbrdist.core.array.elementwise import hand_down_kernel
from dbrdist.core.array.types import Array
from dbrdist.kernels import providers
from dbrdist.kernels.cpu import loops, onednn_elementwise
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry
from dbrdist.kernels.gpu import cuda_normalization
from dbrdist.kernels.keys import (
    KEYS,
    bn_backward_key,
    bn_forward_key,
    bn_inference_key,
    bn_move_key,
    bn_statistics_key,
    bn_sums_key,
    column_sums_key,
    conv_backward_data_key,
    conv_backward_weight_key,
    conv_bn_inference_key,
    conv_forward_key,
    conv_inference_key,
    cross_entropy_backward_key,
    cross_entropy_key,
    linear_key,
    ln_backward_key,
    ln_forward_key,
    matmul_key,
    packed_key,
    pair_key,
    pool_backward_key,
    pool_forward_key,
    relu_backward_of_sum_key,
    relu_forward_key,
    row_key,
    scaled_sum_key,
    softmax_key,
    stacked_matmul_key,
    update_key,
)
from dbrdist.kernels.reference import numpy_, numpy_normalization
from dbrdist.kernels.small_arrays.small import masked, masked_images

Plan = Callable[..., Any]

_GENERATION = 1024  # plans after which those that were not used since the last time are forgotten
_SMALL = 1024  # elements up to which an elementwise kernel is one call of NumPy
_LARGE = 1 << 18  # elements from which on a result is written over an operand that nobody needs any more
_SPATIAL = (0, 2, 3)
_maximum = np.maximum
_float32 = np.dtype(np.float32)
_zero = number(0.0, _float32)


class _ThreadPlans(threading.local):
    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.older: dict[Any, Plan] = {}  # of the generation before
        self.names: dict[int, str] = {}  # of providers, by the id of a plan that is kept

    def find(self, key: Any, arguments: tuple[Any, ...], provider: str | None = None) -> Plan:
        """The plan for ``key`` from the generation before, or a new one, of the given provider where there is one."""
        plan = self.older.get(key)
        if plan is None:
            if provider is None:
                name, plan = providers.choose(key[0], arguments)
            else:
                name, plan = provider, _of_provider(provider, key[0], arguments)
            self.names[id(plan)] = name
        if len(self.plans) >= _GENERATION:
            self.older, self.plans = self.plans, {}
            kept = {id(plan), *map(id, self.older.values())}
            self.names = {i: name for i, name in self.names.items() if i in kept}
        self.plans[key] = plan
        return plan


def _of_provider(name: str, kernel: str, arguments: tuple[Any, ...]) -> Plan:
    """The plan of the provider that made what the arguments hold, so that no other can take its place."""
    try:
        plan: Plan = providers.PROVIDERS[name][kernel](*arguments)
    except Unsupported as e:
        raise ValueError(f"{kernel}: forward ran on the provider {name!r}, which cannot run backward here: {e}") from e
    return plan


_local = _ThreadPlans()


@contextlib.contextmanager
def use(*names: str) -> Iterator[None]:
    """Let the providers ``names`` serve all threads where they can, and NumPy the rest, for comparisons."""
    before = providers.take_only(frozenset(names))
    _forget()
    try:
        yield
    finally:
        providers.take_only(before)
        _forget()


def provider_of(kernel: str, *arguments: Any) -> str:
    """Name of the provider that serves ``kernel``, such as ``'conv_forward'``, for exactly these arguments."""
    key = KEYS[kernel](*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return _local.names[id(plan)]


def _forget() -> None:
    """Drop the plans of all threads."""
    global _local
    _local = _ThreadPlans()


os.register_at_fork(after_in_child=_forget)


# ---- convolution


def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
    """2-d convolution of x (N, C, H, W) with W (O, C/G, kh, kw) and bias b (O) or None: (N, O, OH, OW)."""
    key = conv_forward_key(x, W, b, geometry)
    plan = _local.plans.get(key) or _local.find(key, (x, W, b, geometry))
    return plan(x, W, b, geometry)


def conv_inference(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Any) -> Array:
    """As :func:`conv_forward`, of weights in C order that stay as they are: a provider keeps what it makes of them.

    ``kept.made`` is a pair, which the provider replaces: what made it, and what was made.
    """
    key = conv_inference_key(x, W, b, geometry, kept)
    plan = _local.plans.get(key) or _local.find(key, (x, W, b, geometry, kept))
    return plan(x, W, b, geometry, kept)


def conv_bn_inference(
    x: Array, W: Array, b: Array | None, vectors: tuple[Any, ...], eps: float, added: Array | None,
    geometry: ConvGeometry, kept: Any,
) -> Array | None:  # fmt: skip
    """A convolution, the normalization of its result with given statistics, and the addition of ``added`` or None.

    ``vectors`` are gamma or None, beta or None, mean and variance, one number for each output. ``kept`` is as in
    :func:`conv_inference`, or None where the weights may change at any time. None: the three have to do, one by one.
    """
    arguments = (x, W, b, vectors, eps, added, geometry, kept)
    key = conv_bn_inference_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


def conv_backward_data(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``; as a forward operation, the transposed convolution."""
    key = conv_backward_data_key(gy, W, x_shape, geometry)
    plan = _local.plans.get(key) or _local.find(key, (gy, W, x_shape, geometry))
    return plan(gy, W, x_shape, geometry)


def conv_backward_weight(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any = None, out: Array | None = None
) -> Array:
    """Gradient of W in plain OIHW memory: into ``out`` (any shape of that size, C order) where given."""
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    key = conv_backward_weight_key(x, gy, W_shape, geometry, dtype, out)
    plan = _local.plans.get(key) or _local.find(key, (x, gy, W_shape, geometry, dtype, out))
    return plan(x, gy, W_shape, geometry, dtype, out)


# ---- matrix product


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """a (M, K) times b (K, N) in any layout; in the type of a, or into ``out`` (M, N) of its own type.

    16-bit types are summed in float32; a 16-bit matrix beside a float32 one is multiplied in its own type.

    oneDNN has kernels for processors on which NumPy's OpenBLAS falls back to older instructions: on a Zen 5 it does
    230 GFLOP/s where NumPy does 120. bfloat16, which NumPy multiplies by way of float32, gains most.
    """
    key = matmul_key(a, b, out)
    plan = _local.plans.get(key) or _local.find(key, (a, b, out))
    return plan(a, b, out)


def stacked_matmul(a: Array, b: Array) -> Array | None:
    """The products of stacks of matrices, as ``numpy.matmul`` in C order; None: NumPy's own has to do."""
    key = stacked_matmul_key(a, b)
    plan = _local.plans.get(key) or _local.find(key, (a, b))
    return plan(a, b)


def linear(x: Array, W: Array, b: Array | None) -> Array:
    """x (N, I) times the transpose of W (O, I), plus b (O) or None: (N, O) in the type of x.

    16-bit types are summed in float32, and W and b may be of a wider type than x.
    """
    key = linear_key(x, W, b)
    plan = _local.plans.get(key) or _local.find(key, (x, W, b))
    return plan(x, W, b)


def packed(b: Array, rows: int, is_often: bool) -> Callable[[Array, Array], None]:
    """A function of a (rows, K) and out (rows, N) that adds the product of a and b (K, N) to out, in this thread.

    All are of one type, a and out in C order. Where it is called often while b stays as it is, a provider may bring b
    to a layout of its own first.
    """
    key = packed_key(b, rows, is_often)
    plan = _local.plans.get(key) or _local.find(key, (b, rows, is_often))
    return plan(b, rows, is_often)


def column_sums(x: Array, dtype: Any, out: Array | None = None) -> Array:
    """The sums over the rows of x (N, O), as ``dtype`` (O,), into ``out`` where given; 16-bit types add in float32."""
    key = column_sums_key(x, dtype, out)
    plan = _local.plans.get(key) or _local.find(key, (x, dtype, out))
    return plan(x, dtype, out)


# ---- batch normalization


def bn_forward(
    x: Array, gamma: Array, beta: Array, eps: float, relu: bool = False, axis: tuple[int, ...] = _SPATIAL
) -> tuple[Array, Array, Array, Any]:
    """Batch normalization over ``axis``, followed by a ReLU where asked: y, mean, biased variance, saved.

    Statistics have the shape of gamma (the axes that are kept) and the accumulation type of x.
    """
    arguments = (x, gamma, beta, eps, axis, relu)
    key = bn_forward_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    y, mean, var, saved = plan(*arguments)
    return y, mean, var, (_local.names[id(plan)], saved)


def bn_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, relu: bool = False,
    axis: tuple[int, ...] = _SPATIAL, out: Array | None = None,
) -> Array:  # fmt: skip
    """Normalization with given statistics, followed by a ReLU where asked; ``out`` is laid out as ``backend.empty``."""
    arguments = (x, gamma, beta, mean, var, eps, axis, relu, out)
    key = bn_inference_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


def bn_statistics(x: Array, axis: tuple[int, ...] = _SPATIAL) -> tuple[Array, Array]:
    """Mean and biased variance over ``axis``: with :func:`bn_inference`, in two parts what :func:`bn_forward` does."""
    key = bn_statistics_key(x, axis)
    plan = _local.plans.get(key) or _local.find(key, (x, axis))
    return plan(x, axis)


def bn_sums(
    x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: tuple[int, ...] = _SPATIAL
) -> tuple[Array, Array]:
    """The sums of gy x_hat and of gy over ``axis``, which are the gradients of gamma and beta."""
    arguments = (x, mean, var, gy, eps, axis)
    key = bn_sums_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


def bn_input_gradient(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, ggamma: Array, gbeta: Array, count: float, eps: float,
    axis: tuple[int, ...] = _SPATIAL,
) -> Array:  # fmt: skip
    """The gradient of x from sums over ``count`` elements, here or elsewhere: the second part of a backward pass."""
    return numpy_normalization.bn_input_gradient(x, gamma, mean, var, gy, ggamma, gbeta, count, eps, axis)


def bn_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Any, relu: bool = False,
    axis: tuple[int, ...] = _SPATIAL, out_gamma: Array | None = None, out_beta: Array | None = None,
    is_ours: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of x, gamma, beta. ``relu``: gy belongs to the rectified output of a forward that ran with a ReLU.

    Without ``relu``, gy belongs to the normalization's own output, whichever way forward ran. ``is_ours``: the gradient
    of x may be written over gy.
    """
    name, inner = saved  # only the provider of the forward pass can read what that saved
    arguments = (x, gamma, mean, var, gy, eps, inner, axis, relu, out_gamma, out_beta, is_ours)
    key = bn_backward_key(name, arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments, name)
    return plan(*arguments)


def bn_mask(saved: Any, y_shape: tuple[int, ...], dtype: Any) -> Callable[[], Array] | None:
    """A function that gives 0 where the ReLU of :func:`bn_forward` stopped an element and 1 elsewhere, as y lies.

    None where the provider cannot tell that from ``saved``.
    """
    name, inner = saved
    rows = providers.PROVIDERS[name]
    return partial(rows["bn_mask"](inner), inner, y_shape, dtype) if "bn_mask" in rows else None


def bn_vectors(saved: Any, *vectors: Array) -> Callable[[], Any]:
    """A function that gives gamma, beta, mean and variance as they are now, whatever happens to gamma and beta.

    ``saved`` is what a rectified forward pass returned, or None.
    """
    name, inner = saved or (None, None)
    if name == "cuda":
        return partial(cuda_normalization.vectors, inner, *vectors[2:])
    copies = [v.copy() for v in vectors]
    return lambda: copies


def bn_move(
    running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
) -> None:
    """Each running statistic becomes decay times itself plus its weight times that of the batch."""
    arguments = (running_mean, running_var, mean, var, decay, weights)
    key = bn_move_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    plan(*arguments)


# ---- layer normalization


def ln_forward(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
    """The rows of a matrix (M, K) normalized, times gamma (K) plus beta (K): y, mean (M) and biased variance (M)."""
    key = ln_forward_key(x, gamma, beta, eps)
    plan = _local.plans.get(key) or _local.find(key, (x, gamma, beta, eps))
    return plan(x, gamma, beta, eps)


def ln_backward(x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float) -> tuple[Array, Array, Array]:
    """Gradients of x, gamma, beta."""
    arguments = (x, gamma, mean, var, gy, eps)
    key = ln_backward_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


# ---- pooling


def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
    """Maximum or average over windows: y and saved."""
    key = pool_forward_key(x, geometry)
    plan = _local.plans.get(key) or _local.find(key, (x, geometry))
    y, saved = plan(x, geometry)
    return y, (_local.names[id(plan)], saved)


def pool_backward(gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``."""
    name, inner = saved
    arguments = (gy, tuple(x_shape), inner, geometry)
    key = pool_backward_key(name, *arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments, name)
    return plan(*arguments)


def pool_indices(saved: Any, y_shape: tuple[int, ...], geometry: PoolGeometry) -> Array:
    """For a maximum: where in its window each output lies, u * kw + v, as int32 of shape ``y_shape``."""
    name, inner = saved
    arguments = (inner, tuple(y_shape), geometry)
    return providers.PROVIDERS[name]["pool_indices"](*arguments)(*arguments)


def pool_gather(x: Array, indices: Array, geometry: PoolGeometry) -> Array:
    """The elements of x that the windows' maxima ``indices`` point to, for second derivatives."""
    return numpy_.pool_gather(x, indices, geometry)


# ---- softmax


def _softmax(kernel: str, *arguments: Any) -> Array:
    key = softmax_key(kernel, *arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


def softmax(x: Array, axis: int) -> Array:
    """exp(x) / sum exp(x) along an axis from 0 on; sums of 16-bit types run in float32."""
    return _softmax("softmax", x, axis)


def log_softmax(x: Array, axis: int) -> Array:
    """x - ln sum exp(x) along an axis from 0 on."""
    return _softmax("log_softmax", x, axis)


def softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """y (gy - sum(y gy)) for the output y of :func:`softmax`."""
    return _softmax("softmax_backward", y, gy, axis)


def log_softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """gy - exp(y) sum(gy) for the output y of :func:`log_softmax`."""
    return _softmax("log_softmax_backward", y, gy, axis)


def cross_entropy(x: Array, t: Array, ignore_label: int, divisor: int) -> tuple[Array, tuple[Array, ...]]:
    """The sum of -ln softmax(x)[n, t_n] over ``divisor``, or over the number of labels that count where that is 0.

    x (N, K) and the integers t (N,) in C order, on a device. Labels equal to ``ignore_label`` count nothing; others
    that are no class give NaN. The result is 0-d in the type of x; then what the gradient needs, in the accumulation
    type: the largest of each row, the sum of exp(x - largest), and 1 over what the mean is over.
    """
    arguments = (x, t, ignore_label, divisor)
    key = cross_entropy_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


def cross_entropy_backward(x: Array, t: Array, saved: tuple[Array, ...], gy: Array, ignore_label: int) -> Array:
    """The gradient of x."""
    arguments = (x, t, saved, gy, ignore_label)
    key = cross_entropy_backward_key(*arguments)
    plan = _local.plans.get(key) or _local.find(key, arguments)
    return plan(*arguments)


# ---- updates


def update(rule: str, arrays: tuple[Array, ...], numbers: tuple[Any, ...], before: tuple[Any, ...] = ()) -> bool:
    """One pass of a rule over flat memory: parameters, gradients, state. False: the formula has to do.

    By name: ``sgd`` (lr), ``momentum_sgd`` (lr, momentum), ``adam`` (beta1, 1 - beta1, beta2, 1 - beta2, alpha with the
    correction of both biases, eps, the factor of p) where the last array may be the largest v, ``lars`` (layers, lr,
    momentum, decay, trust coefficient, eps), where layers are (first element, last + 1, whether it is scaled).

    ``before`` are elementwise hooks, which change parameters and gradients first, within the same pass: names, numbers,
    and the first and last + 1 element of the stretches that each is for, or None for all.
    """
    key = update_key(rule, arrays, numbers, before)
    plan = _local.plans.get(key) or _local.find(key, (rule, arrays, numbers, before))
    return bool(plan(rule, arrays, numbers, before))


# ---- elementwise


def relu_forward(x: Array) -> Array:
    """max(x, 0); NaN stays."""
    if type(x) is ndarray and x.size <= _SMALL:  # a plan would cost more, and one operand's layout stays as it is
        dtype = x.dtype
        return _maximum(x, _zero if dtype is _float32 else number(0.0, dtype))
    key = relu_forward_key(x)
    plan = _local.plans.get(key) or _local.find(key, (x,))
    return plan(x)


def relu_backward(y: Array, gy: Array) -> Array:
    """0 where y, the output of a ReLU, is 0, whatever gy is there; else gy."""
    if type(gy) is ndarray and gy.size <= _SMALL:
        dtype = gy.dtype
        if gy.ndim != 4:
            return masked(y, gy)
        if dtype is _float32 and y.strides == gy.strides:
            return masked_images(y, gy)
    key = pair_key("relu_backward", y, gy)
    plan = _local.plans.get(key) or _local.find(key, (y, gy))
    return plan(y, gy)


def relu_backward_over(y: Array, gy: Array) -> Array:
    """As :func:`relu_backward`, of a gradient that may be overwritten: a large one is."""
    if type(gy) is not ndarray or gy.size < _LARGE or not gy.flags.writeable:
        return relu_backward(y, gy)
    key = pair_key("relu_backward_over", y, gy)
    plan = _local.plans.get(key) or _local.find(key, (y, gy))
    return plan(y, gy)


def relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Array:
    """:func:`relu_backward` of a + b, all of one shape and type; ``out`` is a or b, or None for a new array."""
    key = relu_backward_of_sum_key(y, a, b, out)
    plan = _local.plans.get(key) or _local.find(key, (y, a, b, out))
    return plan(y, a, b, out)


def add(a: Array, b: Array) -> Array:
    """a + b for equal shapes and types, such as two gradients of one array."""
    key = pair_key("add", a, b)
    plan = _local.plans.get(key) or _local.find(key, (a, b))
    return plan(a, b)


hand_down_kernel(np.add, add)


def scaled_sum(terms: tuple[Array, ...], scale: float, out: Array) -> None:
    """``sum(terms) * scale`` into ``out``, which may be the first term: added in order and rounded once."""
    key = scaled_sum_key(terms, scale, out)
    plan = _local.plans.get(key) or _local.find(key, (terms, scale, out))
    plan(terms, scale, out)


def row(name: Any, names: tuple[str, ...], arrays: tuple[Array, ...], numbers: tuple[Any, ...]) -> Array | None:
    """A row of elementwise functions by its name, or the gradient of an operand by that name and the operand's place.

    ``names`` are those of the arrays; the last one of a gradient is gy. None: the row's own formula has to do.
    """
    key = row_key(name, names, arrays, numbers)
    plan = _local.plans.get(key) or _local.find(key, (name, names, arrays, numbers))
    return plan(name, names, arrays, numbers)


hand_down_kernel(np.matmul, stacked_matmul)
hand_down_kernel("update", update)
for _name in {**onednn_elementwise.TABLE, **loops.TABLE}:
    hand_down_kernel(_name, partial(row, _name))
