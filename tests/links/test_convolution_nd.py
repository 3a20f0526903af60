"""Convolutions over any axes as links: against the plain formulas with the link's own parameters, saved and loaded."""

from __future__ import annotations

import inspect
import io

import numpy as np
import pytest

from dbrdist import Variable, serializers
from dbrdist import functions as F
from dbrdist import links as L
from tests.each import each
from tests.functions import references as R


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f")


X = {1: draw(2, 4, 9), 2: draw(2, 4, 7, 6), 3: draw(2, 4, 4, 3, 5)}


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


def close(y, expected):
    assert y.shape == expected.shape and y.dtype == np.float32
    np.testing.assert_allclose(y.array, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def loaded(link, copy):
    """``copy`` with the values of ``link``, by way of a file."""
    file = io.BytesIO()
    serializers.save_npz(file, link)
    file.seek(0)
    serializers.load_npz(file, copy)
    return copy


def maker(kind, ndim):
    """The class for one number of axes, or the general one with that number."""
    if ndim == 2:
        return lambda *args, **options: getattr(L, f"{kind}ND")(2, *args, **options)
    return getattr(L, f"{kind}{ndim}D")


OPTIONS = [
    {},
    {"stride": 2},
    {"pad": 1},
    {"dilate": 2},
    {"groups": 2},
    {"nobias": True},
    {"stride": 2, "pad": 1, "dilate": 2, "groups": 2},
]


@each(ndim=[1, 2, 3], options=[*OPTIONS, {"cover_all": True, "stride": 2}])
def test_convolution(ndim, options):
    link = maker("Convolution", ndim)(4, 6, 2, initial_bias=np.arange(6, dtype="f"), **options)
    assert link.W.shape == (6, 4 // options.get("groups", 1), *(2,) * ndim)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X[ndim]), R.convolution_nd(*wide(X[ndim], link.W, link.b), **given))


@each(ndim=[1, 2, 3], options=[*OPTIONS, {"stride": 2, "outsize": True}])
def test_deconvolution(ndim, options):
    options = dict(options)
    if "outsize" in options:
        options["outsize"] = tuple(2 * n + 1 for n in X[ndim].shape[2:])
    link = maker("Deconvolution", ndim)(4, 6, 2, initial_bias=np.arange(6, dtype="f"), **options)
    assert link.W.shape == (4, 6 // options.get("groups", 1), *(2,) * ndim)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X[ndim]), R.deconvolution_nd(*wide(X[ndim], link.W, link.b), **given))


def test_a_number_for_each_axis():
    link = L.ConvolutionND(3, 4, 6, (1, 2, 3), stride=(2, 1, 3), pad=(1, 0, 2), dilate=(1, 1, 2))
    given = {"stride": (2, 1, 3), "pad": (1, 0, 2), "dilate": (1, 1, 2)}
    close(link(X[3]), R.convolution_nd(*wide(X[3], link.W, link.b), **given))


def test_initial_values():
    for link in (L.Convolution3D(2, 4, 1), L.Deconvolution3D(2, 4, 1), L.DepthwiseConvolution2D(2, 4, 1)):
        assert link.W.array.std() > 0 and not link.b.array.any()
    for make in (L.Convolution1D, L.Deconvolution1D, L.DepthwiseConvolution2D):
        link = make(2, 2, 1, initialW=0.25, initial_bias=3)
        assert (link.W.array == 0.25).all() and (link.b.array == 3).all()


SMALL = {
    "Convolution1D": ((4, 6, 2), X[1]),
    "Convolution3D": ((4, 6, 2), X[3]),
    "Deconvolution1D": ((4, 6, 2), X[1]),
    "Deconvolution3D": ((4, 6, 2), X[3]),
    "DilatedConvolution2D": ((4, 6, 2), X[2]),
    "DepthwiseConvolution2D": ((4, 2, 2), X[2]),
    "MLPConvolution2D": ((4, (5, 6), 2), X[2]),
}


@each(name=SMALL)
def test_sizes_follow_from_the_first_batch_or_from_a_file(name):
    arguments, x = SMALL[name]
    link = getattr(L, name)(*arguments)
    y = link(x)
    makers = [(None, *arguments[1:])] + [arguments[1:]] * (name != "DepthwiseConvolution2D")
    for lazy in makers:
        other = getattr(L, name)(*lazy)
        W = dict(other.namedparams())["/0/W" if name == "MLPConvolution2D" else "/W"]
        assert not W.is_initialized
        assert other(x).shape == y.shape
        other = getattr(L, name)(*lazy)
        np.testing.assert_array_equal(loaded(link, other)(x).array, y.array)
    F.sum(link(Variable(x))).backward()
    assert all(p.grad is not None and p.grad.any() for p in link.params())


@each(name=SMALL)
def test_arguments_in_chainers_order(name):
    parameters = list(inspect.signature(getattr(L, name)).parameters)
    start = {"DepthwiseConvolution2D": ["in_channels", "channel_multiplier"]}.get(name, ["in_channels", "out_channels"])
    rest = {
        "C": ["nobias", "initialW", "initial_bias", "cover_all", "dilate", "groups"],
        "Dec": ["nobias", "outsize", "initialW", "initial_bias", "dilate", "groups"],
        "Dep": ["nobias", "initialW", "initial_bias"],
        "Dil": ["dilate", "nobias", "initialW", "initial_bias"],
        "M": ["activation", "conv_init", "bias_init"],
    }
    expected = next(v for k, v in rest.items() if name.startswith(k))
    assert parameters == [*start, "ksize", "stride", "pad", *expected]


@pytest.mark.parametrize("options", [{}, {"stride": (2, 1), "pad": (1, 0)}, {"nobias": True}], ids=str)
def test_depthwise_convolution(options):
    link = L.DepthwiseConvolution2D(4, 3, (2, 3), initial_bias=np.arange(12, dtype="f"), **options)
    assert link.W.shape == (3, 4, 2, 3)
    assert (link.b is None) == options.get("nobias", False)
    given = {k: v for k, v in options.items() if k != "nobias"}
    close(link(X[2]), R.depthwise_convolution_2d(*wide(X[2], link.W, link.b), **given))


def test_dilated_convolution():
    link = L.DilatedConvolution2D(4, 6, 2, 2, 1, (1, 2), initial_bias=0.5)
    close(link(X[2]), R.convolution_2d(*wide(X[2], link.W, link.b), 2, 1, dilate=(1, 2)))
    assert L.DilatedConvolution2D(4, 6, 2, nobias=True).b is None


def test_convolutions_of_one_pixel():
    link = L.MLPConvolution2D(4, (5, 3, 6), (2, 3), (2, 1), 1, F.tanh, None, 0.25)
    assert [(name, p.shape) for name, p in link.namedparams()] == [
        ("/0/W", (5, 4, 2, 3)), ("/0/b", (5,)), ("/1/W", (3, 5, 1, 1)), ("/1/b", (3,)),
        ("/2/W", (6, 3, 1, 1)), ("/2/b", (6,)),
    ]  # fmt: skip
    h = np.tanh(R.convolution_2d(*wide(X[2], link[0].W, link[0].b), (2, 1), 1))
    h = np.tanh(np.einsum("nchw,oc->nohw", h, wide(link[1].W)[0][:, :, 0, 0]) + 0.25)
    close(link(X[2]), np.einsum("nchw,oc->nohw", h, wide(link[2].W)[0][:, :, 0, 0]) + 0.25)
    assert L.MLPConvolution2D(None, [3], 1).activation is F.relu
    assert (L.MLPConvolution2D(None, [3, 2], 1, conv_init=0.5)[1].W.array == 0.5).all()


@each(
    case=[
        (
            lambda: L.ConvolutionND(3, 4, 6, (1, 2)),
            r"ConvolutionND: ksize: expected an integer or 3 of .*, got \(1, 2\)",
        ),
        (lambda: L.Convolution1D(4, 6, 2, stride=(1, 1)), "Convolution1D: stride: expected an integer or 1 of them"),
        (lambda: L.Deconvolution3D(4, 6, 2, outsize=(1, 1)), "Deconvolution3D: outsize: expected an integer or 3 of"),
        (lambda: L.Convolution3D(4, 6, 2, groups=4), "Convolution3D: out_channels: expected a multiple of groups=4"),
        (lambda: L.Deconvolution1D(5, 6, 2, groups=2), "Deconvolution1D: in_channels: expected a multiple of groups=2"),
        (lambda: L.Convolution1D(None, 6, 2)(X[3]), r"Convolution1D: x: expected 3 axes \(N, C, ...\), got shape"),
        (lambda: L.DeconvolutionND(3, 6, 2)(X[1]), r"DeconvolutionND: x: expected 5 axes \(N, C, ...\), got shape"),
        (lambda: L.ConvolutionND(1, 4, None), "ConvolutionND: ksize: expected an integer or 1 of them, got None"),
        (
            lambda: F.convolution_1d(X[1], np.ones((1, 4, 2)), stride=0),
            r"convolution_1d: stride, pad, dilate: expected",
        ),
        (lambda: F.convolution_3d(X[3], np.ones((1, 4, 2, 2, 2)), pad=-1), "convolution_3d: stride, pad, dilate: exp"),
        (lambda: F.deconvolution_3d(X[3], np.ones((4, 1, 2, 2, 2)), stride=0), "deconvolution_3d: stride, pad, dila"),
        (lambda: F.convolution_3d(X[3], np.ones((1, 3, 2, 2, 2))), r"convolution_3d: W: expected shape \(O, C/groups"),
        (lambda: F.convolution_3d(X[3], np.ones((1, 4, 0, 2, 2))), r"convolution_3d: W: expected shape \(O, C/groups"),
        (lambda: F.deconvolution_3d(X[3], np.ones((3, 1, 2, 2, 2))), r"deconvolution_3d: W: expected shape \(C, O/gr"),
        (
            lambda: F.convolution_3d(X[3], np.ones((2, 4, 2, 2, 2)), np.ones(3)),
            r"convolution_3d: b: expected shape \(2",
        ),
        (lambda: L.DepthwiseConvolution2D(3, 2, 2)(X[2]), "DepthwiseConvolution2D: depthwise_convolution_2d: W: expec"),
        (lambda: L.MLPConvolution2D(3, 5, 2), "MLPConvolution2D: out_channels: expected a number for each convolution"),
        (lambda: L.MLPConvolution2D(3, (), 2), "MLPConvolution2D: out_channels: expected a number for each convoluti"),
    ]
)
def test_wrong_arguments_are_named(case):
    call, words = case
    with pytest.raises(ValueError, match=words):
        call()


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_sizes_may_be_left_out_in_front():
    link = L.Deconvolution2D(2, 3)
    assert (link.out_channels, link.ksize, link.W.array) == (2, 3, None)
    assert link(ones(1, 4, 2, 2)).shape == (1, 2, 4, 4)
    link = L.Linear(None, 3)
    assert link(ones(2, 4, 5), n_batch_axes=2).shape == (2, 4, 3) and link.in_size == 5
    link = L.DepthwiseConvolution2D(None, 2, 3)
    assert link(ones(1, 3, 4, 4)).shape == (1, 6, 2, 2) and link.b.shape == (6,)
    link = L.DepthwiseConvolution2D(3, 2, 3, initial_bias=np.arange(6, dtype="f"))
    assert link.b.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert L.DepthwiseConvolution2D(3, 2, 3, nobias=True)(ones(1, 3, 4, 4)).shape == (1, 6, 2, 2)
