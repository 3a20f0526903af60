"""Links on the device give what they give on the host, and bring their samplers, trees and hooks along."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Variable, link_hooks
from dbrdist.core.array.backend import to_cpu

X = np.random.default_rng(0).standard_normal((5, 4)).astype("f")
IMAGES = np.random.default_rng(1).standard_normal((2, 4, 6, 6)).astype("f")
T = np.array([0, 1, 2, 0, 1])
COUNTS = [5, 1, 3]
CASES = {
    "Convolution1D": (lambda: L.Convolution1D(6, 3, 2, 2, 1), X[None].repeat(6, 1)[:, :6]),
    "ConvolutionND": (lambda: L.ConvolutionND(2, 4, 6, 3, 2, 1, dilate=2, groups=2), IMAGES),
    "Convolution3D": (lambda: L.Convolution3D(2, 3, 2), IMAGES[None]),
    "Deconvolution3D": (lambda: L.Deconvolution3D(2, 3, 2, 2), IMAGES[None]),
    "DepthwiseConvolution2D": (lambda: L.DepthwiseConvolution2D(4, 2, 3), IMAGES),
    "DilatedConvolution2D": (lambda: L.DilatedConvolution2D(4, 2, 3, dilate=2), IMAGES),
    "MLPConvolution2D": (lambda: L.MLPConvolution2D(4, (3, 2), 3), IMAGES),
    "LocalConvolution2D": (lambda: L.LocalConvolution2D(4, 2, 6, 3, 2), IMAGES),
    "DeformableConvolution2D": (lambda: L.DeformableConvolution2D(4, 2, 3, offset_initial_bias=0.3), IMAGES),
    "BatchRenormalization": (lambda: L.BatchRenormalization(4, 2, 1, initial_avg_mean=0.3), IMAGES),
    "DecorrelatedBatchNormalization": (lambda: L.DecorrelatedBatchNormalization(4, 2), IMAGES),
    "MultiHeadAttention": (lambda: L.MultiHeadAttention(4, 2, 0.3), X[None]),
    "RMSNormalization": (lambda: L.RMSNormalization(4), X),
    "TransformerBlock": (lambda: L.TransformerBlock(4, 2, 6, 0.3, norm_first=True), X[None]),
    "Maxout": (lambda: L.Maxout(4, 3, 2), X),
    "Highway": (lambda: L.Highway(4), X),
    "SimplifiedDropconnect": (lambda: L.SimplifiedDropconnect(4, 3), X),
    "Inception": (lambda: L.Inception(4, 2, 3, 4, 5, 6, 7), IMAGES),
    "InceptionBN": (lambda: L.InceptionBN(4, 2, 3, 4, 5, 6, "max", 7), IMAGES),
    "CRF1d": (lambda: L.CRF1d(4), [X, X[:2]], [T, T[:2]]),
    "NegativeSampling": (lambda: L.NegativeSampling(4, COUNTS, 2), X, T),
    "BlackOut": (lambda: L.BlackOut(4, COUNTS, 2), X, T),
    "BinaryHierarchicalSoftmax": (lambda: L.BinaryHierarchicalSoftmax(4, ((0, 1), 2)), X, T),
    "SpectralNormalization": (lambda: L.Linear(4, 3).add_hook(link_hooks.SpectralNormalization(use_gamma=True)), X),
    "WeightStandardization": (lambda: L.Linear(4, 3).add_hook(link_hooks.WeightStandardization()), X),
}


def outcome(net, arguments):
    dbrdist.random.set_seed(3)
    net.cleargrads()
    y = net.link(*arguments)
    if y.requires_grad:  # a link without parameters has none, of plain arrays
        F.sum(y * y).backward()
    return [to_cpu(y.array), *(to_cpu(p.grad) for p in net.params())]


@pytest.mark.parametrize("name", CASES)
def test_links(name, device):
    make, *arguments = CASES[name]
    net = Chain(link=make())  # moved as part of a model
    there = copy.deepcopy(net).to_device(device)
    expected = outcome(net, arguments)
    for a, b in zip(outcome(there, there.device.send(arguments)), expected, strict=True):
        largest = max(1.0, float(np.abs(b).max(initial=0)))  # sums of such numbers are rounded by their size
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("make", [lambda: L.Convolution2D(4, 3, 3), lambda: L.Linear(4, 3)])
def test_an_array_of_16_bits_decides_the_type(make, device):
    """Not the float32 weights of ``mixed16`` beside it."""
    with dbrdist.using_config("dtype", dbrdist.mixed16):
        link = make().to_device(device)
    x = IMAGES if isinstance(link, L.Convolution2D) else X
    assert link(device.send(x.astype("e"))).dtype == np.float16


def test_words_sampled_from_a_tree(device):
    link = L.BinaryHierarchicalSoftmax(4, ((0, 1), 2))
    there = copy.deepcopy(link).to_device(device)
    found = []
    for one in (link, there):
        dbrdist.random.set_seed(3)
        found.append(to_cpu(one.sample(Variable(one.device.send(X)))))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("make", [lambda: L.Convolution2D(4, 6, 3, pad=1), lambda: L.Conv2DBNActiv(4, 6, 3, pad=1)])
def test_at_inference_without_an_optimizer(make, device):
    """Nobody else has the weights; but arrays of a device cannot be made read-only while something is kept of them."""
    link = make()
    net = copy.deepcopy(link).to_device(device)
    for a_copy in (net, copy.deepcopy(net)):
        with dbrdist.using_config("train", False), dbrdist.no_backprop_mode():
            for scale in (1, 2):
                found = to_cpu(a_copy(device.send(IMAGES * scale)).array)
                np.testing.assert_allclose(found, link(IMAGES * scale).array, 1e-4, 1e-4)
