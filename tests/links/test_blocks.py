"""Links made of others: against NumPy with their own parameters, names as Chainer's, sizes from the first batch."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest

from dbrdist import Variable, serializers
from dbrdist import functions as F
from dbrdist import links as L
from tests.each import each
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((5, 4)).astype("f")
IMAGES = np.random.default_rng(1).standard_normal((2, 3, 6, 5)).astype("f")


def wide(p):
    return None if p is None else np.asarray(p.array, np.float64)


def close(y, expected, tolerance=1e-5):
    assert y.shape == expected.shape and y.dtype == np.float32
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def named(link):
    return {name: p.shape for name, p in link.namedparams()}


MAKERS = {
    "Maxout": lambda size: (L.Maxout(size, 3, 2), X),
    "SimplifiedDropconnect": lambda size: (L.SimplifiedDropconnect(size, 3, 0.0), X),
    "Inception": lambda size: (L.Inception(size and 3, 2, 3, 4, 5, 6, 7), IMAGES),
    "InceptionBN": lambda size: (L.InceptionBN(size and 3, 2, 3, 4, 5, 6, "avg", 7), IMAGES),
    "Highway": lambda size: (L.Highway(4), X),
}


@each(name=MAKERS)
def test_sizes_follow_from_the_first_batch_or_from_a_file(name):
    link, x = MAKERS[name](4)
    y = link(x)
    assert MAKERS[name](None)[0](x).shape == y.shape
    file = io.BytesIO()
    serializers.save_npz(file, link)
    file.seek(0)
    lazy = MAKERS[name](None)[0]
    serializers.load_npz(file, lazy)
    assert named(lazy) == named(link)
    np.testing.assert_array_equal(lazy(x).array, link(x).array)
    F.sum(link(Variable(x)) ** 2).backward()
    assert all(p.grad is not None and np.isfinite(p.grad).all() for p in link.params())


def test_maxout():
    W = np.random.default_rng(2).standard_normal((3, 2, 4)).astype("f")
    b = np.arange(6, dtype="f").reshape(3, 2)
    link = L.Maxout(4, 3, 2, W, b)
    assert named(link) == {"/linear/W": (6, 4), "/linear/b": (6,)}
    close(link(X), (np.einsum("ijk,nk->nij", W.astype(float), X) + b).max(axis=2))
    assert L.Maxout(4, 3, 2, initial_bias=None).linear.b is None
    assert (L.Maxout(4, 3, 2, 0.5, 2).linear.b.array == 2).all()
    close(L.Maxout(None, 3, 2, W, None)(X), np.einsum("ijk,nk->nij", W.astype(float), X).max(axis=2))


def test_highway():
    link = L.Highway(4, False, F.tanh, init_bh=0.5)
    assert named(link) == {"/plain/W": (4, 4), "/plain/b": (4,), "/transform/W": (4, 4), "/transform/b": (4,)}
    assert (link.transform.b.array == -1).all() and (link.plain.b.array == 0.5).all()
    t = R.sigmoid(X @ wide(link.transform.W).T - 1)
    close(link(X), t * np.tanh(X @ wide(link.plain.W).T + 0.5) + (1 - t) * X)
    link = L.Highway(4, nobias=True, init_Wh=np.eye(4, dtype="f"), init_Wt=0)
    assert link.plain.b is None and link.transform.b is None
    close(link(X), (np.maximum(X, 0) + X) / 2)


def test_dropconnect():
    link = L.SimplifiedDropconnect(4, 3, 0.25, initial_bias=np.arange(3, dtype="f"))
    assert named(link) == {"/W": (3, 4), "/b": (3,)}
    close(link(X, train=False), X @ wide(link.W).T + np.arange(3))
    mask = np.random.default_rng(3).integers(0, 2, (5, 3, 4))
    close(link(X, mask=mask), np.einsum("noi,ni->no", mask * wide(link.W) / 0.75, X) + np.arange(3))
    close(link(X, True, mask[0], False), X @ (mask[0] * wide(link.W) / 0.75).T + np.arange(3))
    assert not np.array_equal(link(X).array, link(X).array)
    assert L.SimplifiedDropconnect(None, 3, nobias=True)(IMAGES).shape == (2, 3)


def conv(x, link, **options):
    return R.convolution_2d(x, wide(link.W), wide(link.b), **options)


def window_of_three(x, pooled, fill, stride=1):
    """Windows of 3 x 3 pixels around each one."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=fill)
    return pooled(np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3)), (-2, -1))[:, :, ::stride, ::stride]


def test_inception():
    link = L.Inception(3, 2, 3, 4, 5, 6, 7, bias_init=0.25)
    assert {n: s for n, s in named(link).items() if n.endswith("W")} == {
        "/conv1/W": (2, 3, 1, 1), "/proj3/W": (3, 3, 1, 1), "/conv3/W": (4, 3, 3, 3), "/proj5/W": (5, 3, 1, 1),
        "/conv5/W": (6, 5, 5, 5), "/projp/W": (7, 3, 1, 1),
    }  # fmt: skip
    parts = [
        conv(IMAGES, link.conv1),
        conv(np.maximum(conv(IMAGES, link.proj3), 0), link.conv3, pad=1),
        conv(np.maximum(conv(IMAGES, link.proj5), 0), link.conv5, pad=2),
        conv(window_of_three(IMAGES.astype(float), np.max, -np.inf), link.projp),
    ]
    close(link(IMAGES), np.maximum(np.concatenate(parts, axis=1), 0))
    assert all((p.array == 0.25).all() for n, p in link.namedparams() if n.endswith("b"))
    assert (L.Inception(3, 2, 3, 4, 5, 6, 7, conv_init=0.5).conv5.W.array == 0.5).all()


@each(pooltype=["max", "avg"], out1=[0, 2], proj_pool=[None, 7], stride=[1, 2])
def test_inception_with_batch_normalization(pooltype, out1, proj_pool, stride):
    if out1 and (stride != 1 or proj_pool is None):
        with pytest.raises(ValueError, match=r"InceptionBN: (stride|proj_pool): expected .* where out1 is 2"):
            L.InceptionBN(3, out1, 3, 4, 5, 6, pooltype, proj_pool, stride)
        return
    link = L.InceptionBN(3, out1, 3, 4, 5, 6, pooltype, proj_pool, stride)
    names = ["proj3", "conv3", "proj33", "conv33a", "conv33b"] + ["conv1"] * bool(out1) + ["poolp"] * bool(proj_pool)
    assert sorted(named(link)) == sorted(
        path for name in names for path in (f"/{name}/W", f"/{name}n/gamma", f"/{name}n/beta")
    )

    def through(x, *steps, stride=1):
        for i, name in enumerate(steps):
            last = i == len(steps) - 1
            pad = 1 if link[name].W.shape[2] == 3 else 0
            x = conv(x, link[name], pad=pad, stride=stride if last else 1)
            mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
            x = np.maximum((x - mean) / np.sqrt(var + 2e-5), 0)
        return x

    x = IMAGES.astype(float)
    pooled = window_of_three(x, *((np.max, -np.inf) if pooltype == "max" else (np.mean, 0)), stride)
    parts = [through(x, "conv1")] if out1 else []
    parts += [through(x, "proj3", "conv3", stride=stride), through(x, "proj33", "conv33a", "conv33b", stride=stride)]
    parts.append(through(pooled, "poolp") if proj_pool else pooled)
    close(link(IMAGES), np.concatenate(parts, axis=1), 1e-4)


def test_types_of_batch_normalizations():
    link = L.InceptionBN(3, 0, 3, 4, 5, 6, "max", conv_init=0.5, dtype=np.float64)
    assert link.conv33bn.gamma.dtype == np.float64 and (link.conv33b.W.array == 0.5).all()


@each(
    case=[
        (lambda: L.Maxout(4, 3, 2, np.zeros((6, 4), "f")), r"Maxout: initialW: expected shape \(3, 2, 4\), got"),
        (lambda: L.Maxout(4, 3, 2, None, np.zeros(6, "f")), r"Maxout: initial_bias: expected shape \(3, 2\), got"),
        (lambda: L.InceptionBN(3, 0, 3, 4, 5, 6, "sum"), "InceptionBN: pooltype: expected 'max' or 'avg', got 'sum'"),
        (lambda: L.SimplifiedDropconnect(4, 3)(X[:, :3]), "SimplifiedDropconnect: simplified_dropconnect: x: expected"),
        (lambda: L.SimplifiedDropconnect(4, 3, 1.0)(X), "ratio: expected a number from 0 to less than 1, got 1.0"),
        (lambda: L.Highway(3)(X), r"link Highway/transform \(Linear\): linear: x: expected 3 elements"),
        (lambda: L.Inception(4, 1, 1, 1, 1, 1, 1)(IMAGES), r"link Inception/conv1 \(Convolution2D\)"),
    ]
)
def test_wrong_arguments_are_named(case):
    call, words = case
    with pytest.raises(ValueError, match=words):
        call()


def test_an_initializer_of_maxout_gets_an_axis_for_the_pool():
    seen = []

    def fill(array):
        seen.append(array.shape)
        array[...] = np.arange(array.size).reshape(array.shape)

    link = L.Maxout(2, 3, 4, fill, fill)
    assert seen == [(3, 4, 2), (3, 4)]
    np.testing.assert_array_equal(link.linear.W.array, np.arange(24).reshape(12, 2))


def ones_and_first(array):
    array[...] = 1
    array[0] = 7


def test_a_maxout_whose_initializer_is_a_function_can_be_pickled():
    link = pickle.loads(pickle.dumps(L.Maxout(None, 3, 4, ones_and_first)))
    link(np.ones((1, 2), "f"))
    np.testing.assert_array_equal(link.linear.W.array, np.repeat([[7, 7], [1, 1], [1, 1]], 4, 0))
