"""The heavy operations, each declared once: see :mod:`dbrdist.kernels.table`.

What stands below a kernel's docstring is the key of a call, of which the public function is made. Where a call does
more than to find its plan and run it, the function is written out, and ``key_of`` declares the key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array.backend import number, place_of, places_of
from dbrdist.core.array.config import config
from dbrdist.core.array.elementwise import hand_down_kernel
from dbrdist.core.array.types import Array
from dbrdist.kernels import providers
from dbrdist.kernels.cpu import loops, onednn_elementwise
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry
from dbrdist.kernels.reference import numpy_, numpy_normalization
from dbrdist.kernels.small_arrays.small import masked, masked_images
from dbrdist.kernels.table import FORMULA, kernel, key_of, planned, server_of

_SMALL = 1024  # elements up to which an elementwise kernel is one call of NumPy
_LARGE = 1 << 18  # elements from which on a result is written over an operand that nobody needs any more
_SPATIAL = (0, 2, 3)
_maximum = np.maximum
_float32 = np.dtype(np.float32)
_zero = number(0.0, _float32)


# ---- parts of keys


def _place(x: Array) -> Any:
    """The device, for what is compiled for one."""
    return None if type(x) is ndarray else place_of(x)


def _places(x: Array, *others: Array | None) -> Any:
    """The devices of all operands: a kernel of our own, unlike CuPy's, does not see that one is elsewhere."""
    return None if type(x) is ndarray else places_of(x, *others)


def _switches(x: Array, *others: Array | None) -> Any:
    """The switches that decide about a convolution, on a GPU with the devices."""
    if type(x) is ndarray:
        return config.float32_products
    return _places(x, *others), config.use_cudnn, config.use_cudnn_tensor_core, config.cudnn_deterministic


def _products(x: Array, *others: Array | None) -> Any:
    """The devices of the operands of a product, and on the host in which type it multiplies float32."""
    return config.float32_products if type(x) is ndarray else places_of(x, *others)


def _pair(kernel: str, a: Array, b: Array) -> Any:
    """Of two arrays of one shape."""
    return kernel, type(a), a.shape, a.strides, a.dtype, b.strides, b.dtype, _places(a, b)


def _rows(kernel: str, axis: int, x: Array, *others: Array) -> Any:
    """Of arrays of one shape and an axis."""
    return kernel, type(x), x.shape, axis, *[(a.strides, a.dtype) for a in (x, *others)], _places(x, *others)


def _convolution(kernel: str, x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Any:
    return (
        kernel, type(x), x.shape, x.strides, x.dtype, W.shape, W.strides, W.dtype, b is None, geometry,
        _switches(x, W, b),
    )  # fmt: skip


def _lies(x: Array, *others: Array) -> Any:
    """On a GPU devices, layouts and types; the host's kernels look at these themselves."""
    return None if type(x) is ndarray else (places_of(x, *others), *[(a.strides, a.dtype) for a in (x, *others)])


# ---- convolution


@kernel()
def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
    """2-d convolution of x (N, C, H, W) with W (O, C/G, kh, kw) and bias b (O) or None: (N, O, OH, OW)."""
    return _convolution("conv_forward", x, W, b, geometry)


@kernel()
def conv_inference(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Any) -> Array:
    """As :func:`conv_forward`, of weights in C order that stay as they are: a provider keeps what it makes of them.

    ``kept.made`` is a pair, which the provider replaces: what made it, and what was made.
    """
    return _convolution("conv_inference", x, W, b, geometry)


@kernel(is_light=True)
def conv_bn_inference(
    x: Array, W: Array, b: Array | None, vectors: tuple[Any, ...], eps: float, added: Array | None,
    geometry: ConvGeometry, kept: Any,
) -> Array | None:  # fmt: skip
    """A convolution, the normalization of its result with given statistics, and the addition of ``added`` or None.

    ``vectors`` are gamma or None, beta or None, mean and variance, one number for each output. ``kept`` is as in
    :func:`conv_inference`, or None where the weights may change at any time. None: the three have to do, one by one.
    """
    other = None if added is None else (type(added), added.shape, added.dtype)
    return *_convolution("conv_bn_inference", x, W, b, geometry), other, kept is None


@kernel()
def conv_backward_data(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``; as a forward operation, the transposed convolution."""
    return (
        "conv_backward_data", type(gy), gy.shape, gy.strides, gy.dtype, W.shape, W.strides, W.dtype, x_shape, geometry,
        _switches(gy, W),
    )  # fmt: skip


@key_of("conv_backward_weight")
def _conv_backward_weight_key(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any, out: Array | None
) -> Any:
    return (
        "conv_backward_weight", type(x), x.shape, x.strides, x.dtype, gy.shape, gy.strides, gy.dtype, W_shape, geometry,
        dtype, out is None, None if out is None else out.dtype, _switches(x, gy, out),
    )  # fmt: skip


def conv_backward_weight(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any = None, out: Array | None = None
) -> Array:
    """Gradient of W in plain OIHW memory: into ``out`` (any shape of that size, C order) where given."""
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    arguments = (x, gy, W_shape, geometry, dtype, out)
    return planned(_conv_backward_weight_key(*arguments), arguments)(*arguments)


# ---- matrix product


@kernel(is_light=True)
def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """a (M, K) times b (K, N) in any layout; in the type of a, or into ``out`` (M, N) of its own type.

    16-bit types are summed in float32; a 16-bit matrix beside a float32 one is multiplied in its own type.

    oneDNN has kernels for processors on which NumPy's OpenBLAS falls back to older instructions: on a Zen 5 it does
    230 GFLOP/s where NumPy does 120. bfloat16, which NumPy multiplies by way of float32, gains most.
    """
    strides = None if out is None else (out.strides, out.dtype)
    return "matmul", type(a), a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, strides, _products(a, b, out)


@kernel(is_light=True)
def stacked_matmul(a: Array, b: Array) -> Array | None:
    """The products of stacks of matrices, as ``numpy.matmul`` in C order; None: NumPy's own has to do."""
    return "stacked_matmul", type(a), a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype, _products(a, b)


@kernel(is_light=True)
def linear(x: Array, W: Array, b: Array | None) -> Array:
    """x (N, I) times the transpose of W (O, I), plus b (O) or None: (N, O) in the type of x.

    16-bit types are summed in float32, and W and b may be of a wider type than x.
    """
    return "linear", type(x), x.shape, x.strides, x.dtype, W.shape, W.strides, W.dtype, b is None, _products(x, W, b)


@kernel(is_light=True)
def packed(b: Array, rows: int, is_often: bool) -> Callable[[Array, Array], None]:
    """A function of a (rows, K) and out (rows, N) that adds the product of a and b (K, N) to out, in this thread.

    All are of one type, a and out in C order. Where it is called often while b stays as it is, a provider may bring b
    to a layout of its own first.
    """
    return "packed", type(b), b.shape, b.strides, b.dtype, rows, is_often, _products(b)


@kernel(is_light=True)
def column_sums(x: Array, dtype: Any, out: Array | None = None) -> Array:
    """The sums over the rows of x (N, O), as ``dtype`` (O,), into ``out`` where given; 16-bit types add in float32."""
    strides = None if out is None else (out.strides, out.dtype)
    return "column_sums", type(x), x.shape, x.strides, x.dtype, dtype, strides, _places(x, out)


# ---- batch normalization


@key_of("bn_forward")
def _bn_forward_key(x: Array, gamma: Array, beta: Array, eps: float, axis: tuple[int, ...], relu: bool) -> Any:
    return "bn_forward", type(x), x.shape, x.strides, x.dtype, eps, axis, relu, _places(x, gamma, beta)


def bn_forward(
    x: Array, gamma: Array, beta: Array, eps: float, relu: bool = False, axis: tuple[int, ...] = _SPATIAL
) -> tuple[Array, Array, Array, Any]:
    """Batch normalization over ``axis``, followed by a ReLU where asked: y, mean, biased variance, saved.

    Statistics have the shape of gamma (the axes that are kept) and the accumulation type of x.
    """
    arguments = (x, gamma, beta, eps, axis, relu)
    plan = planned(_bn_forward_key(*arguments), arguments)
    y, mean, var, saved = plan(*arguments)
    return y, mean, var, (server_of(plan), saved)


@key_of("bn_inference")
def _bn_inference_key(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: tuple[int, ...], relu: bool,
    out: Array | None = None,
) -> Any:  # fmt: skip
    places = _places(x, gamma, beta, mean, var, out)
    return "bn_inference", type(x), x.shape, x.strides, x.dtype, eps, axis, relu, places


def bn_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, relu: bool = False,
    axis: tuple[int, ...] = _SPATIAL, out: Array | None = None,
) -> Array:  # fmt: skip
    """Normalization with given statistics, followed by a ReLU where asked; ``out`` is laid out as ``backend.empty``."""
    arguments = (x, gamma, beta, mean, var, eps, axis, relu, out)
    return planned(_bn_inference_key(*arguments), arguments)(*arguments)


@kernel()
def bn_statistics(x: Array, axis: tuple[int, ...] = _SPATIAL) -> tuple[Array, Array]:
    """Mean and biased variance over ``axis``: with :func:`bn_inference`, in two parts what :func:`bn_forward` does."""
    return "bn_statistics", type(x), x.shape, x.strides, x.dtype, axis, _place(x)


@kernel()
def bn_sums(
    x: Array, mean: Array, var: Array, gy: Array, eps: float, axis: tuple[int, ...] = _SPATIAL
) -> tuple[Array, Array]:
    """The sums of gy x_hat and of gy over ``axis``, which are the gradients of gamma and beta."""
    return "bn_sums", type(x), x.shape, x.strides, x.dtype, gy.strides, eps, axis, _places(x, mean, var, gy)


def bn_input_gradient(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, ggamma: Array, gbeta: Array, count: float, eps: float,
    axis: tuple[int, ...] = _SPATIAL,
) -> Array:  # fmt: skip
    """The gradient of x from sums over ``count`` elements, here or elsewhere: the second part of a backward pass."""
    return numpy_normalization.bn_input_gradient(x, gamma, mean, var, gy, ggamma, gbeta, count, eps, axis)


def _bn_backward_key(name: str, arguments: tuple[Any, ...]) -> Any:
    """``name`` is the provider of the forward pass."""
    x, gamma, mean, var, gy, eps, saved, axis, relu, out_gamma, out_beta, _is_ours = arguments
    kind = None if saved is None else saved.dtype
    layout = type(x), x.shape, x.strides, x.dtype, gy.strides, gy.dtype
    places = _places(x, gamma, mean, var, gy, saved, out_gamma, out_beta)
    return "bn_backward", name, *layout, eps, axis, relu, kind, places


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
    return planned(_bn_backward_key(name, arguments), arguments, name)(*arguments)


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
    name, inner = saved or (FORMULA, None)
    rows = providers.PROVIDERS[name]
    if "bn_vectors" in rows:
        return partial(rows["bn_vectors"](inner), inner, *vectors[2:])
    copies = [v.copy() for v in vectors]
    return lambda: copies


@kernel()
def bn_move(
    running_mean: Array, running_var: Array, mean: Array, var: Array, decay: float, weights: tuple[float, float]
) -> None:
    """Each running statistic becomes decay times itself plus its weight times that of the batch."""
    layouts = [(a.shape, a.strides, a.dtype) for a in (running_mean, running_var, mean, var)]
    return "bn_move", type(mean), *layouts, _places(mean, var, running_mean, running_var)


# ---- layer normalization


@kernel()
def ln_forward(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
    """The rows of a matrix (M, K) normalized, times gamma (K) plus beta (K): y, mean (M) and biased variance (M)."""
    return "ln_forward", type(x), x.shape, x.dtype, eps, _lies(x, gamma, beta)


@kernel()
def ln_backward(x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float) -> tuple[Array, Array, Array]:
    """Gradients of x, gamma, beta."""
    return "ln_backward", type(x), x.shape, x.dtype, gy.dtype, mean.dtype, eps, _lies(x, gamma, mean, var, gy)


# ---- pooling


@key_of("pool_forward")
def _pool_forward_key(x: Array, geometry: PoolGeometry) -> Any:
    return "pool_forward", type(x), x.shape, x.dtype, geometry, _place(x)


def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
    """Maximum or average over windows: y and saved."""
    plan = planned(_pool_forward_key(x, geometry), (x, geometry))
    y, saved = plan(x, geometry)
    return y, (server_of(plan), saved)


def _pool_backward_key(name: str, gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Any:
    kind = None if saved is None else saved.dtype
    return "pool_backward", name, type(gy), gy.shape, gy.dtype, x_shape, kind, geometry, _places(gy, saved)


def pool_backward(gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Array:
    """Gradient of x, of shape ``x_shape``."""
    name, inner = saved
    arguments = (gy, tuple(x_shape), inner, geometry)
    return planned(_pool_backward_key(name, *arguments), arguments, name)(*arguments)


def pool_indices(saved: Any, y_shape: tuple[int, ...], geometry: PoolGeometry) -> Array:
    """For a maximum: where in its window each output lies, u * kw + v, as int32 of shape ``y_shape``."""
    name, inner = saved
    arguments = (inner, tuple(y_shape), geometry)
    return providers.PROVIDERS[name]["pool_indices"](*arguments)(*arguments)


def pool_gather(x: Array, indices: Array, geometry: PoolGeometry) -> Array:
    """The elements of x that the windows' maxima ``indices`` point to, for second derivatives."""
    return numpy_.pool_gather(x, indices, geometry)


# ---- softmax


@kernel(is_light=True)
def softmax(x: Array, axis: int) -> Array:
    """exp(x) / sum exp(x) along an axis from 0 on; sums of 16-bit types run in float32."""
    return _rows("softmax", axis, x)


@kernel(is_light=True)
def log_softmax(x: Array, axis: int) -> Array:
    """x - ln sum exp(x) along an axis from 0 on."""
    return _rows("log_softmax", axis, x)


@kernel(is_light=True)
def softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """y (gy - sum(y gy)) for the output y of :func:`softmax`."""
    return _rows("softmax_backward", axis, y, gy)


@kernel(is_light=True)
def log_softmax_backward(y: Array, gy: Array, axis: int) -> Array:
    """gy - exp(y) sum(gy) for the output y of :func:`log_softmax`."""
    return _rows("log_softmax_backward", axis, y, gy)


@kernel(is_light=True)
def cross_entropy(x: Array, t: Array, ignore_label: int, divisor: int) -> tuple[Array, tuple[Array, ...]]:
    """The sum of -ln softmax(x)[n, t_n] over ``divisor``, or over the number of labels that count where that is 0.

    x (N, K) and the integers t (N,) in C order, on a device. Labels equal to ``ignore_label`` count nothing; others
    that are no class give NaN. The result is 0-d in the type of x; then what the gradient needs, in the accumulation
    type: the largest of each row, the sum of exp(x - largest), and 1 over what the mean is over.
    """
    return "cross_entropy", type(x), x.shape, x.strides, x.dtype, t.strides, t.dtype, _places(x, t)


@kernel(is_light=True)
def cross_entropy_backward(x: Array, t: Array, saved: tuple[Array, ...], gy: Array, ignore_label: int) -> Array:
    """The gradient of x."""
    layouts = x.strides, x.dtype, t.strides, t.dtype, gy.dtype
    return "cross_entropy_backward", type(x), x.shape, *layouts, _places(x, t, *saved, gy)


# ---- updates


@kernel(is_light=True)
def update(rule: str, arrays: tuple[Array, ...], numbers: tuple[Any, ...], before: tuple[Any, ...] = ()) -> bool:
    """One pass of a rule over flat memory: parameters, gradients, state. False: the formula has to do.

    By name: ``sgd`` (lr), ``momentum_sgd`` (lr, momentum), ``adam`` (beta1, 1 - beta1, beta2, 1 - beta2, alpha with the
    correction of both biases, eps, the factor of p) where the last array may be the largest v, ``lars`` (layers, lr,
    momentum, decay, trust coefficient, eps), where layers are (first element, last + 1, whether it is scaled).

    ``before`` are elementwise hooks, which change parameters and gradients first, within the same pass: names, numbers,
    and the first and last + 1 element of the stretches that each is for, or None for all.
    """
    kinds = [(a.dtype, a.size > 0) for a in arrays]
    return "update", rule, type(arrays[0]), _places(*arrays), tuple([name for name, _, _ in before]), *kinds


# ---- elementwise


@kernel(is_light=True)
def _relu_forward(x: Array) -> Array:
    return "relu_forward", type(x), x.shape, x.strides, x.dtype, _place(x)


def relu_forward(x: Array) -> Array:
    """max(x, 0); NaN stays."""
    if type(x) is ndarray and x.size <= _SMALL:  # a plan would cost more, and one operand's layout stays as it is
        dtype = x.dtype
        return _maximum(x, _zero if dtype is _float32 else number(0.0, dtype))
    return _relu_forward(x)


@kernel(is_light=True)
def _relu_backward(y: Array, gy: Array) -> Array:
    return _pair("relu_backward", y, gy)


def relu_backward(y: Array, gy: Array) -> Array:
    """0 where y, the output of a ReLU, is 0, whatever gy is there; else gy."""
    if type(gy) is ndarray and gy.size <= _SMALL:
        dtype = gy.dtype
        if gy.ndim != 4:
            return masked(y, gy)
        if dtype is _float32 and y.strides == gy.strides:
            return masked_images(y, gy)
    return _relu_backward(y, gy)


@kernel(is_light=True)
def _relu_backward_over(y: Array, gy: Array) -> Array:
    return _pair("relu_backward_over", y, gy)


def relu_backward_over(y: Array, gy: Array) -> Array:
    """As :func:`relu_backward`, of a gradient that may be overwritten: a large one is."""
    if type(gy) is not ndarray or gy.size < _LARGE or not gy.flags.writeable:
        return relu_backward(y, gy)
    return _relu_backward_over(y, gy)


@kernel()
def relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Array:
    """:func:`relu_backward` of a + b, all of one shape and type; ``out`` is a or b, or None for a new array."""
    layouts = a.strides, a.dtype, b.strides, b.dtype
    return "relu_backward_of_sum", type(y), y.shape, y.strides, y.dtype, *layouts, _places(y, a, b, out)


@kernel(is_light=True)
def add(a: Array, b: Array) -> Array:
    """a + b for equal shapes and types, such as two gradients of one array."""
    return _pair("add", a, b)


@kernel(is_light=True)
def scaled_sum(terms: tuple[Array, ...], scale: float, out: Array) -> None:
    """``sum(terms) * scale`` into ``out``, which may be the first term: added in order and rounded once."""
    return "scaled_sum", scale, type(out), out.shape, out.strides, out.dtype, *[(t.strides, t.dtype) for t in terms]


@kernel(is_light=True)
def row(name: Any, names: tuple[str, ...], arrays: tuple[Array, ...], numbers: tuple[Any, ...]) -> Array | None:
    """A row of elementwise functions by its name, or the gradient of an operand by that name and the operand's place.

    ``names`` are those of the arrays; the last one of a gradient is gy. None: the row's own formula has to do.
    """
    return "row", name, numbers, *[(type(a), a.shape, a.strides, a.dtype) for a in arrays]


hand_down_kernel(np.add, add)
hand_down_kernel(np.matmul, stacked_matmul)
hand_down_kernel("update", update)
for _name in {**onednn_elementwise.TABLE, **loops.TABLE}:
    hand_down_kernel(_name, partial(row, _name))
