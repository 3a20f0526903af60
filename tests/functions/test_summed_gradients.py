"""Several gradients of one ReLU's output, which its backward adds and masks in one pass."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.core.tape.function_node import FunctionHook
from dbrdist.kernels.cpu import onednn_blocks

SHAPE = (3, 8, 120, 95)  # beyond two blocks, with a rest; large enough for the walk to leave the sum to the rule


def images(seed, shape=SHAPE, dtype=np.float32):
    a = backend.empty(shape, dtype)
    a[...] = np.random.default_rng(seed).standard_normal(shape)
    return a


def reference(y, a, b):
    y, a, b = (v.astype("d") for v in (y, a, b))
    with np.errstate(invalid="ignore"):
        return np.where(y != 0, a + b, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("special", [None, np.nan, np.inf])
def test_kernel(dtype, special):
    dtype = backend.as_dtype(dtype)
    y, a, b = (images(seed, SHAPE, dtype) for seed in range(3))
    y[...] = np.maximum(y, dtype.type(0))
    if special is not None:
        a[1, 3, 5], b[:, 1, :, 7] = special, -np.float32(special)
    with np.errstate(invalid="ignore"):
        gx, other = kernels.relu_backward_of_sum(y, a, b), kernels.relu_backward(y, kernels.add(a, b))
        for place in range(2):  # the result may take the place of either
            pair = [backend.copy(a), backend.copy(b)]
            assert kernels.relu_backward_of_sum(y, *pair, pair[place]) is pair[place]
            np.testing.assert_array_equal(pair[place].astype("d"), other.astype("d"))
    assert gx.dtype == dtype
    assert backend.is_channels_last(gx)
    np.testing.assert_allclose(gx.astype("d"), reference(y, a, b), rtol=1e-6 if dtype.itemsize == 4 else 1e-2)
    np.testing.assert_array_equal(gx.astype("d"), other.astype("d"))


def test_kernel_of_other_layouts_and_small_arrays():
    y, a, b = np.maximum(images(0), 0), np.ascontiguousarray(images(1)), images(2)[::-1]
    np.testing.assert_allclose(kernels.relu_backward_of_sum(y, a, b), reference(y, a, b), rtol=1e-6)
    y, a, b = (images(seed, (2, 3, 4, 5)) for seed in range(3))
    np.testing.assert_allclose(kernels.relu_backward_of_sum(y, a, b), reference(y, a, b), rtol=1e-6)


def gradient(num_readers, x, **options):
    x = Variable(x)
    y = F.relu(x * 2)
    z = sum((y * (k + 1.5) for k in range(1, num_readers)), y * 1.5)
    z.grad = images(7).astype(x.dtype)
    z.backward(**options)
    return x.grad


@pytest.mark.parametrize("num_readers", [1, 2, 3, 4])
def test_gradients_of_several_readers(num_readers, monkeypatch):
    x, called = images(0), []
    of_sum = kernels.relu_backward_of_sum
    monkeypatch.setattr(kernels, "relu_backward_of_sum", lambda *arrays: called.append(1) or of_sum(*arrays))
    factor = 2 * sum(k + 1.5 for k in range(num_readers))
    np.testing.assert_allclose(gradient(num_readers, x), np.where(x > 0, factor * images(7).astype("d"), 0), rtol=1e-5)
    assert len(called) == (num_readers > 1)


@pytest.mark.slow
def test_observed_and_higher_passes_give_the_same():
    x = images(0)
    plain = gradient(3, x)

    class Look(FunctionHook):
        def backward_preprocess(self, function, in_data, out_grad):
            assert all(g is None or isinstance(g, np.ndarray) for g in out_grad)

    with Look():
        np.testing.assert_array_equal(gradient(3, x), plain)
    np.testing.assert_array_equal(gradient(3, x, retain_grad=True), plain)
    np.testing.assert_array_equal(gradient(3, x, enable_double_backprop=True), plain)
    np.testing.assert_allclose(gradient(3, x.astype("d")), plain, rtol=1e-5)
    v = Variable(x)
    y = F.relu(v)
    z = y * 2 + y * 3
    gv, gy = dbrdist.grad([z], [v, y], [Variable(images(7))])
    np.testing.assert_allclose(gy.array, 5 * images(7), rtol=1e-5)
    np.testing.assert_allclose(gv.array, np.where(x > 0, 5 * images(7), 0), rtol=1e-5)


@pytest.mark.parametrize("first", ["convolution", "shortcut"])
def test_only_gradients_that_nobody_else_has_are_overwritten(first):
    """The gradient of the block's output goes into the shortcut and into the convolution, whose own one is new."""
    W, held = Variable(np.random.default_rng(3).standard_normal((8, 8, 1, 1)).astype("f")), []

    class Hold(dbrdist.FunctionNode):
        def forward(self, xs):
            return xs

        def derive(self, wanted, gys):
            held.append((gys[0], gys[0].copy()))
            return gys

    x, gz = images(0), images(7)
    v = Variable(x)
    y = F.relu(v * 2)
    shortcut, through = Hold().apply((y,))[0], F.convolution_2d(y, W)
    z = through + shortcut if first == "convolution" else shortcut + through
    z.grad = gz
    z.backward()
    for g, before in held:
        np.testing.assert_array_equal(g, before)
    np.testing.assert_array_equal(z.grad, images(7))
    through = np.einsum("nohw,oc->nchw", gz.astype("d"), W.array[:, :, 0, 0].astype("d"))
    np.testing.assert_allclose(v.grad, np.where(x > 0, 2 * (gz + through), 0), rtol=1e-4, atol=1e-4)


def test_after_a_normalization_whose_backward_masks():
    x, gamma, beta = Variable(images(0)), Variable(np.ones(8, "f")), Variable(np.zeros(8, "f"))
    grads = []
    for _ in range(3):  # from the second call on the ReLU is expected
        for v in (x, gamma, beta):
            v.cleargrad()
        y = F.relu(F.batch_normalization(x * 1, gamma, beta))
        z = y * 2 + y * 3
        z.grad = images(7)
        z.backward()
        grads.append([v.grad.copy() for v in (x, gamma, beta)])
    for others in grads[1:]:
        for one, other in zip(grads[0], others):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_blocks_cover_the_array():
    assert np.prod(SHAPE) % onednn_blocks._BLOCK
    assert np.prod(SHAPE) > 2 * onednn_blocks._BLOCK
