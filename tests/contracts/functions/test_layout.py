"""Every operation on images keeps channels-last memory, forward and backward.

``Contiguous`` stands for CuPy, whose elementwise kernels always allocate C-contiguous results: only code that asks the
backend for memory, or works on N H W C views, keeps the layout there.
"""

import numpy as np
import pytest

from dbrdist import Variable, backward, kernels
from dbrdist import functions as F
from dbrdist.core.array import backend
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.tape import ops
from dbrdist.functions import convolution
from dbrdist.kernels import ConvGeometry
from tests.each import each
from tests.functions.cases import CASES

SHAPE = (2, 16, 12, 10)  # large enough for sums and normalizations to wait for a ReLU


class Contiguous(np.ndarray):
    """An array whose ufuncs and functions return C-contiguous results, as CuPy's do."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(np.asarray(o) if isinstance(o, np.ndarray) else o for o in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        return out[0] if out is not None else _contiguous(result)

    def __array_function__(self, function, types, args, kwargs):
        result = super().__array_function__(function, types, args, kwargs)
        return result if function is np.broadcast_to else _contiguous(result)

    def astype(self, dtype, order="C", copy=True, **kwargs):
        return self if not copy and self.dtype == dtype else super().astype(dtype, order="C", **kwargs)

    def copy(self, order="C"):
        return super().copy("C")


def _contiguous(a):
    return np.ascontiguousarray(a).reshape(np.shape(a)).view(Contiguous) if isinstance(a, np.ndarray) else a


def images(seed, shape=SHAPE, kind=np.ndarray):
    a = backend.empty(shape, np.float32)
    a[...] = np.random.default_rng(seed).standard_normal(shape)
    return a.view(kind)


def weights(seed, shape, kind):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).view(kind)


OPERATIONS = {
    "convolution": lambda x, a: F.convolution_2d(x, a(1, (8, 16, 3, 3)), a(2, (8,)), 2, 1),
    "convolution 1x1": lambda x, a: F.convolution_2d(x, a(1, (8, 16, 1, 1))),
    "convolution in groups": lambda x, a: F.convolution_2d(x, a(1, (8, 4, 3, 3)), groups=4, dilate=2),
    "convolution to 1x1": lambda x, a: F.convolution_2d(x, a(1, (8, 16, 12, 10))),
    "deconvolution": lambda x, a: F.deconvolution_2d(x, a(1, (16, 8, 4, 4)), a(2, (8,)), 2, 1),
    "max pooling": lambda x, a: F.max_pooling_2d(x, 3, 2, 1),
    "average pooling": lambda x, a: F.average_pooling_2d(x, 3, 2, 1),
    "batch normalization": lambda x, a: F.batch_normalization(x, a(1, (16,)), a(2, (16,))),
    "batch normalization per element": lambda x, a: F.batch_normalization(x, a(1, SHAPE[1:]), a(2, SHAPE[1:])),
    "fixed batch normalization": lambda x, a: F.fixed_batch_normalization(
        x, a(1, (16,)), a(2, (16,)), a(3, (16,)), a(4, (16,)) ** 2
    ),
    "relu": lambda x, a: F.relu(x),
    "batch normalization and relu": lambda x, a: F.relu(F.batch_normalization(x, a(1, (16,)), a(2, (16,)))),
    "sum and relu": lambda x, a: F.relu(x + ops.neg(x)),
    "square": lambda x, a: x * x,
    "difference": lambda x, a: x - 2 * x,
    "quotient": lambda x, a: x / 3,
    "exponential": lambda x, a: ops.exp(x),
    "channel scale": lambda x, a: x * ops.reshape(Variable(a(1, (16,))), (1, 16, 1, 1)),
    "constant in NCHW": lambda x, a: x + np.ascontiguousarray(a(1, SHAPE)),
    "product with a constant in NCHW": lambda x, a: x * np.ascontiguousarray(a(1, SHAPE)),
    "concatenation": lambda x, a: ops.concat([x, x * 2], 1),
    "selection": lambda x, a: ops.where(np.asarray(x.array) > 0, x, ops.neg(x)),
    "cast": lambda x, a: ops.cast(ops.cast(x, np.dtype(np.float64)), np.dtype(np.float32)),
    "mean over channels and back": lambda x, a: x - ops.broadcast_to(ops.sum(x, 1, True), SHAPE),
}


def check_layout(function, kind, provider):
    """Forward, backward from a channels-last gradient, and the gradient of every intermediate."""
    with kernels.use(provider):
        x = Variable(images(0, kind=kind))
        h = x * 1.5
        y = function(h, lambda seed, shape: weights(seed, shape, kind))
        assert type(y.array) is kind
        assert backend.is_channels_last(y.array)
        y.grad = images(5, y.shape, kind)
        y.backward(retain_grad=True)
        assert type(h.grad) is kind
        assert backend.is_channels_last(h.grad)
        assert backend.is_channels_last(x.grad)


@each(name=OPERATIONS, kind=[np.ndarray, Contiguous])
def test_layout(name, kind):
    check_layout(OPERATIONS[name], kind, "numpy")


@each(name=OPERATIONS)
def test_layout_of_the_fastest_provider(name):
    check_layout(OPERATIONS[name], np.ndarray, "onednn")


def test_image_in_nchw_is_converted_by_the_first_convolution():
    x = Variable(np.ascontiguousarray(images(0)))
    y = F.relu(F.convolution_2d(x, weights(1, (8, 16, 3, 3), np.ndarray)))
    assert backend.is_channels_last(y.array)


@pytest.mark.parametrize("kind", [np.ndarray, Contiguous])
def test_broadcast_gradient_stays_channels_last(kind):
    """The gradient of a mean over rows and columns is a view with zero strides; what is behind it is channels-last."""
    x = Variable(images(0, kind=kind))
    h = F.relu(x * 2)
    y = ops.sum(h, (2, 3))
    y.grad = weights(1, y.shape, kind)
    y.backward(retain_grad=True)
    assert backend.is_channels_last(x.grad)


def test_the_stand_in_loses_the_layout_by_itself():
    x = images(0, kind=Contiguous)
    assert backend.is_channels_last(x)
    assert not backend.is_channels_last(x + 1)
    assert backend.is_channels_last(elementwise(np.add, x, 1))


@each(
    piece=[np.s_[1], np.s_[:, 2:9], np.s_[:, :, 0, 0], np.s_[..., 1], np.s_[[1, 0, 1]], np.s_[:, [3, 3]], np.s_[None]],
    is_channels_last=[True, False],
)  # fmt: skip
def test_the_gradient_of_a_piece_lies_as_the_whole_does(piece, is_channels_last):
    whole = images(0) if is_channels_last else np.ascontiguousarray(images(0))
    x = Variable(whole)
    y = ops.getitem(x, piece)
    y.grad = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward()
    expected = np.zeros(SHAPE)
    np.add.at(expected, piece, y.grad)
    np.testing.assert_allclose(x.grad, expected, rtol=1e-6)
    assert x.grad.strides == whole.strides


# What moves axes or cuts pieces gives views, whose order of axes in memory follows from the operation.
VIEWS = {
    "transpose", "swapaxes", "rollaxis", "get_item", "flip", "flipud", "fliplr", "split_axis", "split_axis_one_used",
    "get_item_arrays", "broadcast",
    # The gradients of sums repeat one number without memory of their own.
    "sum", "sum_axis", "mean", "mean_axis", "mean_keepdims", "average", "repeat_axis", "separate",
}  # fmt: skip


def image_shapes(case):
    return [shapes for shapes in case.shapes if any(len(s) == 4 and min(s) > 1 for s in shapes)]


@pytest.mark.slow
@each(case=[c for c in CASES if c.name not in VIEWS and image_shapes(c)])
@each(shapes=image_shapes)
def test_four_axes_stay_channels_last(case, shapes):
    arrays = [backend.channels_last(a) if a.ndim == 4 else a for a in case.inputs(shapes, np.float32)]
    xs = [Variable(a) for a in arrays]
    ys = case.function(*xs)
    ys = [y * 1.0 for y in (ys if isinstance(ys, tuple) else (ys,))]  # a reader sees the layout that is handed on
    gys = [np.ones(y.shape, y.dtype) for y in ys]
    backward(ys, [backend.channels_last(g) if g.ndim == 4 else g for g in gys])
    for y in ys:
        assert y.ndim != 4 or backend.is_channels_last(y.array)
    filters = "convolution" in case.name
    for x in xs[:1] if filters else xs:  # the gradient of a filter is no activation
        assert x.ndim != 4 or lies_as_nhwc(x.grad)


def lies_as_nhwc(a):
    """True for channels-last arrays and for pieces of them."""
    strides = [s for n, s in zip(np.take(a.shape, (0, 2, 3, 1)), np.take(a.strides, (0, 2, 3, 1))) if n > 1]
    return strides == sorted(strides, reverse=True)


# ---- 1x1 convolutions with strides, after a ReLU: the gradient of the pixels that they see
@each(
    **{
        "filters, geometry, is_large, expected": [
            ((1, 1), (2, 2), True, True),
            ((1, 1), (2, 1), True, True),
            ((1, 1), (1, 2), True, True),
            ((1, 1), (1, 1), True, False),
            ((1, 1), (2, 2), False, False),
            ((3, 3), (2, 2), True, False),
            ((1, 3), (2, 2), True, False),
            ((1, 1), (2, 2, 1, 1), True, False),
            ((1, 1), (2, 2, 0, 0, 1, 1, 2), True, False),
        ]
    }
)
def test_the_gradient_of_pixels_that_are_seen_is_kept_apart(filters, geometry, is_large, expected):
    size, shape = convolution._LARGE - (not is_large), (8, 4, *filters)
    after = [F.relu(Variable(np.ones(1))).creator_node, F.tanh(Variable(np.ones(1))).creator_node, None]
    found = [convolution.sees_a_part(ConvGeometry(*geometry), shape, size, creator) for creator in after]
    assert found == [expected, False, False]


@each(stride=[(2, 2), (1, 2), (3, 1)])
def test_gradients_of_pixels_that_are_not_seen_are_zero(stride):
    rows = int((convolution._LARGE / 8) ** 0.5) + 1
    rng = np.random.default_rng(0)
    x, W = rng.normal(size=(2, 4, rows, rows)).astype("f"), rng.normal(size=(3, 4, 1, 1)).astype("f")
    v = Variable(x)
    y = F.convolution_2d(F.relu(v), W, stride=stride)
    y.grad = rng.normal(size=y.shape).astype("f")
    y.backward()
    expected = np.zeros(x.shape)
    seen = (slice(None), slice(None), slice(None, None, stride[0]), slice(None, None, stride[1]))
    expected[seen] = np.einsum("nohw,oc->nchw", y.grad.astype("d"), W[:, :, 0, 0]) * (x[seen] > 0)
    np.testing.assert_allclose(v.grad, expected, rtol=1e-4, atol=1e-5)
