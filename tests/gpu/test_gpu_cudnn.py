"""Convolutions by cuDNN against NumPy's in float64, over strides, padding, dilation, groups, channels and layouts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import images, put

import dbrdist.functions as F
from dbrdist import Variable, kernels, using_config
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.reference import numpy_

TYPES = ["float32", "float16", "bfloat16"]
# Roundings of the type against sums of up to some thousand terms in float32; those of TF32 are 2^-11.
NUM_EPS = {"float32": 256, "float16": 4, "bfloat16": 4}
# x, W, geometry
CASES = {
    "3x3": ((2, 8, 9, 7), (16, 8, 3, 3), ConvGeometry(1, 1, 1, 1)),
    "1x1": ((2, 16, 5, 6), (8, 16, 1, 1), ConvGeometry()),
    "strided 1x1": ((2, 16, 7, 6), (8, 16, 1, 1), ConvGeometry(2, 2)),
    "stem of three channels": ((3, 3, 23, 21), (8, 3, 7, 7), ConvGeometry(2, 2, 3, 3)),
    "1x1 of three channels": ((2, 3, 5, 6), (8, 3, 1, 1), ConvGeometry()),
    "one channel": ((2, 1, 8, 9), (5, 1, 3, 3), ConvGeometry(1, 1, 1, 1)),
    "one channel out": ((2, 4, 8, 9), (1, 4, 3, 3), ConvGeometry(1, 1, 1, 1)),
    "two taps in a row": ((2, 8, 5, 6), (4, 8, 1, 2), ConvGeometry()),
    "two taps in a column": ((2, 8, 5, 6), (4, 8, 2, 1), ConvGeometry(1, 1, 1, 0)),
    "odd sizes": ((1, 7, 11, 13), (5, 7, 3, 2), ConvGeometry(2, 3, 1, 0)),
    "dilation": ((2, 8, 12, 10), (4, 8, 3, 3), ConvGeometry(1, 2, 2, 1, 2, 3)),
    "groups": ((2, 8, 9, 9), (12, 4, 3, 3), ConvGeometry(2, 2, 1, 1, 1, 1, 2)),
    "groups of one channel": ((2, 8, 9, 9), (8, 1, 3, 3), ConvGeometry(1, 1, 1, 1, 1, 1, 8)),
    "cover_all": ((2, 6, 8, 8), (4, 6, 3, 3), ConvGeometry(3, 3, 1, 1, 1, 1, 1, True)),
    "rows that no window sees": ((2, 6, 10, 10), (4, 6, 2, 2), ConvGeometry(3, 3)),
    "whole image": ((3, 6, 5, 5), (4, 6, 5, 5), ConvGeometry()),
    "much padding": ((1, 4, 3, 3), (4, 4, 3, 3), ConvGeometry(1, 1, 4, 4)),
    "many pixels": ((4, 16, 40, 40), (32, 16, 3, 3), ConvGeometry(1, 1, 1, 1)),
}


@pytest.fixture(autouse=True)
def cudnn(on):
    if on not in ("cupy", "host-cuda"):
        pytest.skip("cuDNN works on CuPy's arrays alone")
    pytest.importorskip("cudnn")
    with kernels.use("cudnn", "cuda"):
        yield


def operands(rng, case, dtype):
    """x, W, gy of a case, rounded to the type."""
    x_shape, W_shape, g = CASES[case]
    y_shape = (x_shape[0], W_shape[0], *g.out_hw(*x_shape[2:], *W_shape[2:]))
    dtype = backend.as_dtype(dtype)
    W = np.ascontiguousarray(rng.standard_normal(W_shape).astype(dtype))
    return images(rng, x_shape, dtype), W, images(rng, y_shape, dtype), g


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def assert_close(a, exact, num_eps):
    """Within so many roundings of the type of ``a``, of the largest value."""
    assert a.shape == exact.shape
    eps = float(_eps(a.dtype))
    difference = np.abs(backend.to_cpu(a).astype(np.float64) - exact)
    assert difference.max() <= num_eps * eps * max(1.0, np.abs(exact).max()), difference.max()


def _eps(dtype):
    return 2.0**-7 if dtype.name == "bfloat16" else np.finfo(dtype).eps


def sent(device, x, W, gy):
    """On the device, weights in C order, as links hold them."""
    return put(device, x), device.send(W.reshape(-1)).reshape(W.shape), put(device, gy)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_convolution(case, dtype, device, rng):
    x, W, gy, g = operands(rng, case, dtype)
    b = rng.standard_normal(len(W)).astype(np.float32)
    expected = [
        numpy_.conv_forward(*wide(x, W, b), g),
        numpy_.conv_backward_data(*wide(gy, W), x.shape, g),
        numpy_.conv_backward_weight(*wide(x, gy), W.shape, g, np.dtype("d")),
    ]
    xd, Wd, gyd = sent(device, x, W, gy)
    bd = device.send(b)
    assert kernels.provider_of("conv_forward", xd, Wd, bd, g) == "cudnn"
    assert kernels.provider_of("conv_backward_data", gyd, Wd, x.shape, g) == "cudnn"
    assert kernels.provider_of("conv_backward_weight", xd, gyd, W.shape, g, x.dtype, None) == "cudnn"
    found = [
        kernels.conv_forward(xd, Wd, bd, g),
        kernels.conv_backward_data(gyd, Wd, x.shape, g),
        kernels.conv_backward_weight(xd, gyd, W.shape, g),
    ]
    y, laid, _ = kernels.conv_forward_and_keep(xd, Wd, bd, g, None)
    kept = [y] if laid is None else [y, kernels.conv_backward_data_as_laid(gyd, Wd, x.shape, g, laid)]
    for a, exact in zip((*found, *kept), (*expected, *expected)):
        assert a.dtype == x.dtype
        assert_close(a, exact, NUM_EPS[dtype])
    assert backend.is_channels_last(found[0]) and backend.is_channels_last(found[1])
    assert found[2].flags.c_contiguous


@pytest.mark.parametrize("case", ["3x3", "1x1", "stem of three channels"])
def test_tf32_is_asked_for(case, device, rng):
    """By default float32 keeps its 24 bits; 'always' may take the 11 of TF32."""
    x, W, gy, g = operands(rng, case, "float32")
    exact = numpy_.conv_forward(*wide(x, W), None, g)
    xd, Wd, _ = sent(device, x, W, gy)
    assert_close(kernels.conv_forward(xd, Wd, None, g), exact, NUM_EPS["float32"])
    with using_config("use_cudnn_tensor_core", "never"):
        assert_close(kernels.conv_forward(xd, Wd, None, g), exact, NUM_EPS["float32"])
    with using_config("use_cudnn_tensor_core", "always"):
        assert_close(kernels.conv_forward(xd, Wd, None, g), exact, 2.0**13)


def test_switches_are_heeded(device, rng):
    x, W, gy, g = operands(rng, "3x3", "float32")
    xd, Wd, gyd = sent(device, x, W, gy)
    with using_config("use_cudnn", "never"):
        assert kernels.provider_of("conv_forward", xd, Wd, None, g) == "numpy"
    assert kernels.provider_of("conv_forward", xd, Wd, None, g) == "cudnn"
    with using_config("cudnn_deterministic", True):
        first = backend.to_cpu(kernels.conv_backward_weight(xd, gyd, W.shape, g))
        for _ in range(5):
            again = backend.to_cpu(kernels.conv_backward_weight(xd, gyd, W.shape, g))
            np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("layout", ["NCHW", "sliced", "misaligned", "reversed"])
def test_layouts(layout, device, rng, xp):
    """Inputs that do not lie as cuDNN wants them are copied first."""
    x, W, gy, g = operands(rng, "3x3", "float16")
    xd, Wd, gyd = sent(device, x, W, gy)

    def moved(a):
        n, c, h, w = a.shape
        if layout == "NCHW":
            return xp.ascontiguousarray(a)
        if layout == "sliced":
            big = xp.zeros((n + 1, h + 3, w + 1, c + 2), a.dtype)
            view = big[1:, 2:-1, :-1, 1:-1].transpose(0, 3, 1, 2)
        elif layout == "misaligned":
            flat = xp.zeros(a.size + 1, a.dtype)
            view = flat[1:].reshape(n, h, w, c).transpose(0, 3, 1, 2)
        else:
            view = xp.zeros((n, h, w, c), a.dtype).transpose(0, 3, 1, 2)[:, :, ::-1]
        view[...] = a
        return view

    y, gx = kernels.conv_forward(moved(xd), Wd, None, g), kernels.conv_backward_data(moved(gyd), Wd, x.shape, g)
    gW = kernels.conv_backward_weight(moved(xd), moved(gyd), W.shape, g)
    assert_close(y, numpy_.conv_forward(*wide(x, W), None, g), 4)
    assert_close(gx, numpy_.conv_backward_data(*wide(gy, W), x.shape, g), 4)
    assert_close(gW, numpy_.conv_backward_weight(*wide(x, gy), W.shape, g, np.dtype("d")), 4)


@pytest.mark.parametrize("case", ["3x3", "1x1", "stem of three channels"])
def test_weights_and_gradients_of_other_types_and_places(case, device, rng, xp):
    """Weights in float32 beside float16, and gradients written where they are wanted, as ``mixed16`` needs them."""
    x, W, gy, g = operands(rng, case, "float16")
    W = W.astype(np.float32)
    xd, Wd, gyd = sent(device, x, W, gy)
    assert_close(kernels.conv_forward(xd, Wd, None, g), numpy_.conv_forward(*wide(x, W), None, g), 4)
    assert_close(
        kernels.conv_backward_data(gyd, Wd, x.shape, g), numpy_.conv_backward_data(*wide(gy, W), x.shape, g), 4
    )
    exact = numpy_.conv_backward_weight(*wide(x, gy), W.shape, g, np.dtype("d"))
    for dtype in ("float32", "float16"):
        flat = xp.zeros(2 * W.size + 1, dtype)
        for out in (flat[: W.size], flat[1 : W.size + 1], flat[::2][: W.size]):
            assert kernels.conv_backward_weight(xd, gyd, W.shape, g, out.dtype, out) is out
            difference = np.abs(backend.to_cpu(out).reshape(W.shape) - exact).max()
            assert difference <= 4 * 2.0**-10 * np.abs(exact).max()
    assert kernels.conv_backward_weight(xd, gyd, W.shape, g, "float32").dtype == np.float32


def test_what_cudnn_does_not_take(device, rng):
    """float64 and empty batches are NumPy's formula on CuPy's arrays."""
    x, W, gy, g = operands(rng, "3x3", "float64")
    xd, Wd, _ = sent(device, x, W, gy)
    assert kernels.provider_of("conv_forward", xd, Wd, None, g) == "numpy"
    assert_close(kernels.conv_forward(xd, Wd, None, g), numpy_.conv_forward(x, W, None, g), 64)
    assert kernels.conv_forward(xd[:0].astype("f"), Wd.astype("f"), None, g).shape == (0, 16, 9, 7)
    gW = kernels.conv_backward_weight(xd[:0], put(device, gy)[:0], W.shape, g)
    assert not backend.to_cpu(gW).any()


def test_functions_and_second_derivatives(device, rng):
    """Convolution and deconvolution through the graph, twice."""
    x, W = images(rng, (2, 4, 7, 6)), rng.standard_normal((6, 4, 3, 3)).astype(np.float32)

    def gradients(place, dtype):
        xv, Wv = (Variable(place.send(backend.copy(a.astype(dtype)))) for a in (x, W))
        y = F.deconvolution_2d(F.convolution_2d(xv, Wv, stride=2, pad=1) ** 2, Wv, stride=2, pad=1, outsize=(7, 6))
        y.grad = place.xp.ones_like(y.array)
        y.backward(enable_double_backprop=True)
        loss = F.sum(xv.grad_var**2) + F.sum(Wv.grad_var**2)
        xv.cleargrad(), Wv.cleargrad()
        loss.backward()
        return [backend.to_cpu(a).astype(np.float64) for a in (y.array, xv.grad, Wv.grad)]

    for a, exact in zip(gradients(device, "float32"), gradients(backend.get_device("@numpy"), "float64")):
        np.testing.assert_allclose(a, exact, 2e-4, 2e-4 * np.abs(exact).max())


def test_threads_and_streams_keep_apart(device, rng, xp):
    """Handles belong to threads, and follow the stream of the moment."""
    x, W, gy, g = operands(rng, "many pixels", "float16")
    exact = numpy_.conv_forward(*wide(x, W), None, g)
    failures = []

    def work():
        device.use()
        with xp.cuda.Stream(non_blocking=True):
            xd, Wd, _ = sent(device, x, W, gy)
            for _ in range(20):
                y = kernels.conv_forward(xd, Wd, None, g)
            try:
                assert_close(y, exact, 4)
            except AssertionError as e:
                failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_weights_are_kept_at_inference(device, rng):
    """``conv_inference`` turns weights once, until they change."""
    x, W, gy, g = operands(rng, "3x3", "float32")
    xd, Wd, _ = sent(device, x, W, gy)

    class Kept:
        made = None, None

    kept = Kept()
    exact = numpy_.conv_forward(*wide(x, W), None, g)
    assert_close(kernels.conv_inference(xd, Wd, None, g, kept), exact, 64)
    maker, made = kept.made
    assert_close(kernels.conv_inference(xd, Wd, None, g, kept), exact, 64)
    assert kept.made[0] is maker and kept.made[1] is made


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize("case", ["3x3", "1x1", "strided 1x1", "many pixels"])
def test_fused_convolution(case, is_rectified, device, rng):
    """Sums of channels and of squares, and the gradient of weights, of x or of max(a x + b, 0) rounded to the type."""
    x, W, gy, g = operands(rng, case, "float16")
    affine = rng.standard_normal((2, x.shape[1])).astype(np.float16)
    seen = x
    if is_rectified:
        factor, summand = (v.astype(np.float64)[:, np.newaxis, np.newaxis] for v in affine)
        seen = np.maximum(x.astype(np.float64) * factor + summand, 0).astype(np.float16)
    exact = numpy_.conv_forward(*wide(seen, W), None, g)
    xd, Wd, gyd = sent(device, x, W, gy)
    given = device.send(affine) if is_rectified else None
    assert kernels.provider_of("conv_and_sums", xd, Wd, g, given, None) == "cudnn"
    y, sums, _ = kernels.conv_and_sums(xd, Wd, g, given, None)
    assert y.dtype == np.float16 and sums.dtype == np.float32
    assert_close(y, exact, NUM_EPS["float16"])
    written = backend.to_cpu(y).astype(np.float64)
    of_channels = np.stack([written.sum((0, 2, 3)), np.square(written).sum((0, 2, 3))])
    # of what was written, or of what was not rounded yet
    bound = 2.0**-11 * np.stack([np.abs(written).sum((0, 2, 3)), 2 * of_channels[1]])
    assert (np.abs(backend.to_cpu(sums) - of_channels) <= bound + 1e-3).all()
    if is_rectified:
        exact = numpy_.conv_backward_weight(*wide(seen, gy), W.shape, g, np.dtype("d"))
        for dtype in (np.float16, np.float32):
            out = device.send(np.full(W.size, np.nan, dtype)).reshape(W.shape)
            name = "conv_backward_weight_rectified"
            assert kernels.provider_of(name, xd, given, gyd, W.shape, g, out) == "cudnn"
            write, piece = kernels.conv_backward_weight_rectified(xd, given, gyd, W.shape, g, out)
            if write is not None:
                write([piece])
            assert_close(out, exact, NUM_EPS["float16"] * np.finfo(np.float16).eps / np.finfo(dtype).eps)
