"""Convolution, pooling and batch normalization: values, first and second derivatives, messages."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable
from dbrdist import functions as F
from dbrdist.core.gradient_check import check_backward, check_double_backward
from tests.each import each


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def check_gradients(function, inputs):
    """First and second derivatives along random directions; a small step, for kinks may be near."""
    gy = draw(99, *function(*inputs).shape)
    ggs = [draw(100 + i, *x.shape) for i, x in enumerate(inputs)]
    check_backward(function, inputs, gy, eps=1e-5, atol=1e-7, rtol=1e-6)
    check_double_backward(function, inputs, gy, ggs, eps=1e-5, atol=1e-6, rtol=1e-6)


CONVOLUTIONS = [
    {},
    {"stride": 2, "pad": 1},
    {"stride": (2, 1), "pad": (0, 1), "dilate": (1, 2)},
    {"groups": 2, "pad": 1},
    {"stride": 2, "cover_all": True},
]


@pytest.mark.parametrize("kwargs", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_gradients(kwargs, bias):
    channels = 4 // kwargs.get("groups", 1)
    inputs = [draw(0, 2, 4, 6, 5), draw(1, 6, channels, 3, 2)] + [draw(2, 6)] * bias
    check_gradients(lambda x, W, b=None: F.convolution_2d(x, W, b, **kwargs), inputs)


@pytest.mark.parametrize(
    "kwargs", [{}, {"stride": 2, "pad": 1}, {"stride": 2, "outsize": (12, 10)}, {"groups": 2}, {"dilate": 2}]
)
def test_deconvolution_gradients(kwargs):
    channels = 6 // kwargs.get("groups", 1)
    inputs = [draw(0, 2, 4, 5, 4), draw(1, 4, channels, 3, 3), draw(2, 6)]
    check_gradients(lambda x, W, b: F.deconvolution_2d(x, W, b, **kwargs), inputs)


def test_deconvolution_is_the_gradient_of_convolution():
    x, W = Variable(draw(0, 2, 3, 7, 7)), draw(1, 4, 3, 3, 3)
    y = F.convolution_2d(x, W, stride=2)
    gy = draw(2, *y.shape)
    (gx,) = dbrdist.grad([y], [x], [Variable(gy)])
    np.testing.assert_allclose(F.deconvolution_2d(gy, W, stride=2).array, gx.array, atol=1e-12)


def test_deconvolution_grows_images():
    assert F.deconvolution_2d(np.ones((1, 8, 4, 4), "f"), np.ones((8, 3, 4, 4), "f"), stride=2, pad=1).shape == (
        1,
        3,
        8,
        8,
    )


@pytest.mark.parametrize("kwargs", [{}, {"stride": 1, "pad": 1}, {"stride": 2, "cover_all": False}, {"pad": 1}])
def test_max_pooling_gradients(kwargs):
    check_gradients(lambda x: F.max_pooling_2d(x, 3, **kwargs), [draw(0, 2, 3, 6, 7)])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ksize": 2, "pad": 2},
        {"ksize": (3, 1), "pad": (1, 1), "stride": 1},
        {"ksize": 1, "stride": 4},  # with cover_all the last window starts at row 8 of 6
        {"ksize": 2, "stride": 9},
        {"ksize": (2, 3), "stride": (2, 12)},
    ],
)
def test_max_pooling_refuses_windows_that_see_nothing(kwargs):
    x = draw(0, 2, 3, 6, 7)
    with pytest.raises(ValueError, match=r"max_pooling_2d: ksize.*windows that each see a part of the image of 6 x 7"):
        F.max_pooling_2d(x, **kwargs)
    assert np.isfinite(F.max_pooling_2d(x, **{**kwargs, "pad": 0, "cover_all": False}).array).all()


@pytest.mark.parametrize(
    "kwargs", [{"ksize": 3, "pad": 2, "stride": 2}, {"ksize": 2, "stride": 3}, {"ksize": 1, "stride": 6}]
)
def test_max_pooling_takes_windows_that_see_one_element(kwargs):
    """Each window against the elements that it sees, in plain Python."""
    x = draw(0, 1, 1, 7, 7)
    y = F.max_pooling_2d(x, **kwargs).array[0, 0]
    k, s, p = kwargs["ksize"], kwargs.get("stride", kwargs["ksize"]), kwargs.get("pad", 0)
    for i, row in enumerate(y):
        for j, value in enumerate(row):
            seen = x[0, 0, max(i * s - p, 0) : i * s - p + k, max(j * s - p, 0) : j * s - p + k]
            assert seen.size
            assert value == seen.max()


@pytest.mark.parametrize("kwargs", [{}, {"stride": 1, "pad": 1}, {"stride": (2, 1), "pad": (1, 0)}])
def test_average_pooling_gradients(kwargs):
    check_gradients(lambda x: F.average_pooling_2d(x, (3, 2), **kwargs), [draw(0, 2, 3, 7, 8)])


def test_pooling_values():
    x = np.arange(25.0).reshape(1, 1, 5, 5)
    y, indices = F.max_pooling_2d(x, 2, return_indices=True)
    np.testing.assert_array_equal(y.array[0, 0], [[6, 8, 9], [16, 18, 19], [21, 23, 24]])
    np.testing.assert_array_equal(indices[0, 0], [[3, 3, 2], [3, 3, 2], [1, 1, 0]])
    np.testing.assert_array_equal(F.max_pooling_2d(x, 2, cover_all=False).array[0, 0], [[6, 8], [16, 18]])
    np.testing.assert_array_equal(F.average_pooling_2d(x, 2, 2, 1).array[0, 0, 0], [0, 0.75, 1.75])
    np.testing.assert_allclose(F.global_average_pooling_2d(x).array, [[12.0]])


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 3, 2, 5), None), ((6, 3), None), ((5, 2, 3, 2), 0), ((3, 2, 4), (0, 2)), ((2, 3, 4), None)]
)
@pytest.mark.parametrize("fixed", [False, True])
def test_batch_normalization_gradients(shape, axis, fixed):
    kept = shape[1:] if axis == 0 else shape[1:2]
    x, gamma, beta = draw(0, *shape), draw(1, *kept), draw(2, *kept)
    if fixed:
        inputs = [x, gamma, beta, draw(3, *kept), draw(4, *kept) ** 2 + 0.5]
        check_gradients(lambda *xs: F.fixed_batch_normalization(*xs, eps=0.1, axis=axis), inputs)
    else:
        check_gradients(lambda *xs: F.batch_normalization(*xs, eps=0.1, axis=axis), [x, gamma, beta])


def test_running_statistics_are_unbiased_and_an_empty_batch_moves_nothing():
    x, one = draw(0, 4, 3, 2, 2), np.ones(3)
    mean, var = np.zeros(3), np.ones(3)
    F.batch_normalization(x, one, one, running_mean=mean, running_var=var, decay=0.75)
    np.testing.assert_allclose(mean, 0.25 * x.mean((0, 2, 3)))
    np.testing.assert_allclose(var, 0.75 + 0.25 * x.var((0, 2, 3), ddof=1))
    before = mean.copy(), var.copy()
    F.batch_normalization(x[:0], one, one, running_mean=mean, running_var=var)
    np.testing.assert_array_equal((mean, var), before)


# ---- what waits for a ReLU

LARGE = (4, 16, 10, 10)


def normalized(read, **kwargs):
    """A net with BN, ReLU and an addition; ``read`` looks at intermediate results at some point."""
    x = Variable(draw(0, *LARGE).astype("f"))
    z = Variable(draw(1, *LARGE).astype("f"))
    gamma, beta = Variable(draw(2, 16).astype("f")), Variable(draw(3, 16).astype("f"))
    h = F.batch_normalization(x, gamma, beta, **kwargs)
    seen = [h.array.copy()] if read == "before" else []
    y = F.relu(h)
    if read in ("after", "twice"):
        seen.append(h.array.copy())
    s = h + z
    if read == "twice":
        seen.append(h.array.copy())
        seen.append(s.array.copy())
    t = F.relu(s)
    out = y * t
    out.grad = draw(4, *LARGE).astype("f")
    out.backward()
    return [out.array, x.grad, z.grad, gamma.grad, beta.grad], seen


@pytest.mark.parametrize("read", ["never", "after", "twice"])
def test_reading_intermediate_results_changes_nothing(read):
    expected, before = normalized("before")
    values, seen = normalized(read)
    for actual, wanted in zip(values, expected):
        np.testing.assert_allclose(actual, wanted, atol=2e-5 * np.abs(wanted).max())
    for a in seen[:2]:
        np.testing.assert_array_equal(a, before[0])


def test_relu_after_batch_normalization_is_one_kernel(monkeypatch):
    """Once a ReLU has taken the output of a gamma, the next one finds its result there."""
    from dbrdist import kernels

    x, gamma = Variable(draw(0, *LARGE).astype("f")), Variable(np.ones(16, "f"))
    F.relu(F.batch_normalization(x * 1.0, gamma, gamma))
    calls = []
    forward, backward = kernels.bn_forward, kernels.bn_backward
    monkeypatch.setattr(kernels, "bn_forward", lambda *a: calls.append(("forward", a[4])) or forward(*a))
    monkeypatch.setattr(kernels, "bn_backward", lambda *a: calls.append(("backward", a[7])) or backward(*a))
    monkeypatch.setattr("dbrdist.functions.rectifier.relu_forward", None)
    monkeypatch.setattr("dbrdist.functions.rectifier.relu_backward", None)
    y = F.relu(F.batch_normalization(x * 1.0, gamma, gamma))
    y.grad = y.array
    y.backward()
    assert calls == [("forward", True), ("backward", True)]
    assert x.grad is not None


def test_relu_after_fixed_batch_normalization_is_one_kernel(monkeypatch):
    x, one, gamma = draw(0, *LARGE).astype("f"), np.ones(16, "f"), Variable(np.ones(16, "f"))

    def net():
        return F.relu(F.fixed_batch_normalization(Variable(x) * 1.0, gamma, 0 * one, 0 * one, one, eps=0.0))

    with dbrdist.no_backprop_mode():
        net()
        monkeypatch.setattr("dbrdist.functions.rectifier.relu_forward", None)
        y = net()
    np.testing.assert_allclose(y.array, np.maximum(x, 0), atol=1e-6)


def test_second_derivatives_of_batch_normalization_make_no_cycle():
    """The graph dies by reference count, compiled as well: closures would keep it."""
    gc.collect()
    gc.disable()
    try:
        x, gamma, beta = Variable(draw(0, 4, 3, 5, 5)), Variable(draw(1, 3)), Variable(draw(2, 3))
        for function in (
            lambda: F.batch_normalization(x, gamma, beta),
            lambda: F.fixed_batch_normalization(x, gamma, beta, np.zeros(3), np.ones(3)),
        ):
            y = function()
            (gx,) = dbrdist.grad([F.sum(y * y * y)], [x], enable_double_backprop=True)
            (ggx,) = dbrdist.grad([F.sum(gx * gx)], [x], enable_double_backprop=True)
            F.sum(ggx * ggx).backward()
            nodes = [weakref.ref(v.creator) for v in (y, gx, ggx)]
            del y, gx, ggx
            assert [n() for n in nodes] == [None] * 3
    finally:
        gc.enable()


class Meeting:
    """Adds up vectors over threads, all of which bring one."""

    def __init__(self, size):
        self.vectors, self.barrier = [None] * size, threading.Barrier(size)

    def share(self, rank):
        def add(a):
            assert a.dtype == np.float64
            self.vectors[rank] = a
            self.barrier.wait(10)
            total = sum(self.vectors)
            self.barrier.wait(10)
            return total

        return add


@pytest.mark.parametrize("shape", [(7, 3, 4, 5), (9, 4)])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_parts_of_a_batch_are_normalized_together(shape, dtype):
    """Three parts of 2, 4 and the rest, with a large mean, against the whole batch in float64."""
    from dbrdist.functions.normalization import SharedBatchNormalization

    x, gy, gamma, beta = draw(0, *shape) + 50, draw(1, *shape), draw(2, shape[1]), draw(3, shape[1])
    whole = Variable(x), Variable(gamma), Variable(beta)
    y = F.batch_normalization(*whole, eps=1e-3)
    y.grad = gy
    y.backward()
    cuts, meeting, axis = [slice(0, 2), slice(2, 6), slice(6, None)], Meeting(3), (0, *range(2, len(shape)))

    def work(rank):
        part = [Variable(a.astype(dtype)) for a in (x[cuts[rank]], gamma, beta)]
        z = F.relu(SharedBatchNormalization(1e-3, axis, meeting.share(rank)).apply(tuple(part))[0])
        h = SharedBatchNormalization(1e-3, axis, meeting.share(rank)).apply(tuple(part))[0]
        h.grad = gy[cuts[rank]].astype(dtype)
        h.backward()
        return [h.array, part[0].grad, part[1].grad, part[2].grad, z.array]

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(work, range(3)))
    ys, gxs, ggammas, gbetas, zs = zip(*parts)
    tolerance = 1e-9 if dtype == "d" else 2e-3
    np.testing.assert_allclose(np.concatenate(ys), y.array, atol=tolerance)
    np.testing.assert_allclose(np.concatenate(zs), np.maximum(y.array, 0), atol=tolerance)
    np.testing.assert_allclose(np.concatenate(gxs), whole[0].grad, atol=tolerance)
    np.testing.assert_allclose(sum(ggammas), whole[1].grad, atol=tolerance * 10)
    np.testing.assert_allclose(sum(gbetas), whole[2].grad, atol=tolerance * 10)


def test_second_derivatives_over_parts_are_refused():
    from dbrdist.functions.normalization import SharedBatchNormalization

    x, one = Variable(draw(0, 4, 3)), Variable(np.ones(3))
    y = SharedBatchNormalization(1e-3, (0,), lambda a: a).apply((x, one, one))[0]
    (gx,) = dbrdist.grad([F.sum(y * y)], [x], enable_double_backprop=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        F.sum(gx * gx).backward()


# ---- messages


def test_messages_of_misfits():
    x, W = np.ones((1, 3, 4, 4), "f"), np.ones((2, 4, 3, 3), "f")
    with pytest.raises(ValueError, match=r"x: expected shape \(N, 4, H, W\) for W \(2, 4, 3, 3\) with groups=1, got"):
        F.convolution_2d(x, W)
    with pytest.raises(ValueError, match="expected an image no smaller than the kernel of W"):
        F.convolution_2d(x, np.ones((2, 3, 5, 5), "f"))
    with pytest.raises(ValueError, match=r"convolution_2d: b: expected shape \(2,\), got shape \(3,\)"):
        F.convolution_2d(x, W[:, :3], np.ones(3, "f"))
    with pytest.raises(TypeError, match=r"x: expected a floating type, got shape .* and dtype int64; cast it first"):
        F.convolution_2d(x.astype(int), W[:, :3])
    with pytest.raises(ValueError, match=r"deconvolution_2d: outsize: expected .* got \(20, 20\)"):
        F.deconvolution_2d(x, np.ones((3, 2, 3, 3), "f"), stride=2, outsize=(20, 20))
    with pytest.raises(ValueError, match="expected an image no smaller than the window 6 x 6"):
        F.max_pooling_2d(x, 6, 1, cover_all=False)
    with pytest.raises(ValueError, match=r"batch_normalization: beta: expected shape \(3,\) for x .* got shape \(4,\)"):
        F.batch_normalization(x, np.ones(3, "f"), np.ones(4, "f"))


@each(
    **{
        "stride, pad, dilate": [
            ((1, 2, 3), (2, 1, 0), (1, 1, 2)),
            ((3, 1, 2), (0, 2, 1), (2, 1, 1)),
            ((2, 3, 1), (1, 0, 2), (1, 2, 1)),
            ((2, 1, 1), (0, 0, 0), (1, 3, 2)),
            ((1, 2, 2), (1, 1, 1), (3, 1, 1)),
            ((3, 1, 2), (1, 0, 2), (1, 1, 1)),
        ]
    },
    groups=[1, 2],
    cover_all=[False, True],
)
def test_a_transposed_convolution_over_three_axes_is_the_transpose(stride, pad, dilate, groups, cover_all):
    """<conv(x), y> = <x, deconv(y)>, with another number along each axis."""
    x, W = draw(0, 2, 4, 9, 8, 7), draw(1, 6, 4 // groups, 3, 2, 3)
    conv = F.convolution_nd(x, W, stride=stride, pad=pad, dilate=dilate, groups=groups, cover_all=cover_all).array
    y = draw(2, *conv.shape)
    options = {"stride": stride, "pad": pad, "dilate": dilate, "groups": groups, "outsize": x.shape[2:]}
    back = F.deconvolution_nd(y, W, **options).array
    assert back.shape == x.shape
    np.testing.assert_allclose((conv * y).sum(), (x * back).sum(), rtol=1e-10)
