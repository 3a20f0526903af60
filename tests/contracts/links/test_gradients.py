"""Every link with parameters: the gradients by its inputs and by all of its parameters against differences, in float64.

The values of links are compared with references in tests/links; here a parameter that backward forgets, or that it
gives the gradient of another, is noticed for each public link. A new link belongs into ``LINKS``: a test asks for it.
"""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Link, Variable, random, using_config
from dbrdist.core.tape.gradient_check import check_backward


def draw(*shape):
    """Numbers between -1 and 1, the same for the same shape."""
    return np.random.default_rng(len(shape) + sum(shape)).uniform(-1, 1, shape)


def called(link, *xs):
    """The outputs of the link as a tuple."""
    ys = link(*xs)
    return tuple(ys) if isinstance(ys, (tuple, list)) else (ys,)


def stepped(link, x):
    """Three outputs of a link that keeps a state."""
    link.reset_state()
    return link(x), link(x * 0.5), link(x - 0.25)


def fed(*more):
    """The link with further arguments, which take no gradient."""
    return lambda link, *xs: called(link, *xs, *more)


def over_sequences(num_states):
    """A recurrent network over three sequences, one of them empty, from given states."""

    def call(link, *arrays):
        states, xs = arrays[:num_states], arrays[num_states:]
        *lasts, ys = link(*states, [*xs, np.zeros((0, 2))])
        return (*lasts, *ys[:-1])

    return call


LABELS = np.array([0, 3, 1, 2])
MASK = np.arange(12).reshape(4, 3) % 5 > 1
ROWS, IMAGES = (draw(4, 3),), (draw(2, 2, 5, 4),)
SEQUENCES = (draw(3, 2), draw(1, 2))
TWO_CHILDREN = (draw(4, 2), draw(4, 2) / 2, draw(4, 2) / 3, draw(4, 2) / 4, draw(4, 3))
TREE = ((3, (0, 2)), 1)
# How to make it, what it takes a gradient by, and how it is called.
LINKS = {
    "Linear": (lambda: L.Linear(3, 2), ROWS, called),
    "Bilinear": (lambda: L.Bilinear(3, 2, 4), (draw(4, 3), draw(4, 2)), called),
    "EmbedID": (lambda: L.EmbedID(4, 3), (), fed(LABELS)),
    "Classifier": (lambda: L.Classifier(L.Linear(3, 4)), ROWS, fed(LABELS)),
    "Highway": (lambda: L.Highway(3, activate=F.tanh), ROWS, called),
    "Maxout": (lambda: L.Maxout(3, 2, 3), ROWS, called),
    "SimplifiedDropconnect": (
        lambda: L.SimplifiedDropconnect(3, 4), ROWS, lambda link, x: (link(x, mask=MASK, use_batchwise_mask=False),),
    ),
    "Bias": (lambda: L.Bias(shape=(3,)), ROWS, called),
    "Scale": (lambda: L.Scale(W_shape=(3,), bias_term=True), ROWS, called),
    "Parameter": (lambda: L.Parameter(draw(3, 2)), (), called),
    "PReLU": (lambda: L.PReLU((3,)), ROWS, called),
    "Swish": (lambda: L.Swish((3,)), ROWS, called),
    # convolutions
    "Convolution1D": (lambda: L.Convolution1D(2, 4, 3, 2, 1, groups=2), (draw(2, 2, 7),), called),
    "Convolution2D": (lambda: L.Convolution2D(2, 4, 3, 2, 1, groups=2), IMAGES, called),
    "Convolution3D": (lambda: L.Convolution3D(2, 3, 2), (draw(2, 2, 3, 4, 3),), called),
    "ConvolutionND": (lambda: L.ConvolutionND(2, 2, 3, 3, dilate=2, pad=1), IMAGES, called),
    "Deconvolution1D": (lambda: L.Deconvolution1D(2, 4, 3, 2, groups=2), (draw(2, 2, 4),), called),
    "Deconvolution2D": (lambda: L.Deconvolution2D(2, 4, 3, 2, 1, groups=2), IMAGES, called),
    "Deconvolution3D": (lambda: L.Deconvolution3D(2, 3, 2), (draw(2, 2, 3, 2, 3),), called),
    "DeconvolutionND": (lambda: L.DeconvolutionND(2, 2, 3, 3, 2), IMAGES, called),
    "DepthwiseConvolution2D": (lambda: L.DepthwiseConvolution2D(2, 3, 3), IMAGES, called),
    "DilatedConvolution2D": (lambda: L.DilatedConvolution2D(2, 3, 2, dilate=2), IMAGES, called),
    "LocalConvolution2D": (lambda: L.LocalConvolution2D(2, 3, (5, 4), 2), IMAGES, called),
    "DeformableConvolution2D": (lambda: L.DeformableConvolution2D(2, 3, 2), IMAGES, called),
    "MLPConvolution2D": (lambda: L.MLPConvolution2D(2, (3, 2), 2), IMAGES, called),
    "Conv2DBNActiv": (lambda: L.Conv2DBNActiv(2, 3, 3), IMAGES, called),
    "Inception": (lambda: L.Inception(2, 2, 3, 2, 2, 3, 2), IMAGES, called),
    "InceptionBN": (lambda: L.InceptionBN(2, 2, 3, 2, 2, 3, "avg", 2), IMAGES, called),
    # normalizations
    "BatchNormalization": (lambda: L.BatchNormalization(2), IMAGES, called),
    # By default r is 1 and d is 0; other values, which the gradient takes for constants, change with the averages.
    "BatchRenormalization": (lambda: L.BatchRenormalization(2), IMAGES, called),
    "DecorrelatedBatchNormalization": (
        lambda: L.DecorrelatedBatchNormalization(4, 2, dtype=np.float64), (draw(8, 4),), called,
    ),
    "GroupNormalization": (lambda: L.GroupNormalization(2, 4), (draw(2, 4, 3),), called),
    "LayerNormalization": (lambda: L.LayerNormalization(3), ROWS, called),
    "RMSNormalization": (lambda: L.RMSNormalization(3), ROWS, called),
    # attention
    "MultiHeadAttention": (
        lambda: L.MultiHeadAttention(4, 2), (draw(2, 3, 4), draw(2, 5, 4), draw(2, 5, 4) + 1), called,
    ),
    "TransformerBlock": (lambda: L.TransformerBlock(4, 2, 6, dropout=0.0), (draw(2, 3, 4),), called),
    # recurrent networks
    "GRU": (lambda: L.GRU(3, 2), ROWS, stepped),
    "LSTM": (lambda: L.LSTM(3, 2), ROWS, stepped),
    "StatefulGRU": (lambda: L.StatefulGRU(3, 2), ROWS, stepped),
    "StatefulMGU": (lambda: L.StatefulMGU(3, 2), ROWS, stepped),
    "StatefulPeepholeLSTM": (lambda: L.StatefulPeepholeLSTM(3, 2), ROWS, stepped),
    "StatefulZoneoutLSTM": (lambda: L.StatefulZoneoutLSTM(3, 2), ROWS, stepped),
    "StatelessGRU": (lambda: L.StatelessGRU(3, 2), (draw(4, 2), draw(4, 3)), called),
    "StatelessLSTM": (lambda: L.StatelessLSTM(3, 2), (draw(4, 2), draw(4, 2) / 2, draw(4, 3)), called),
    "StatelessMGU": (lambda: L.StatelessMGU(3, 2), (draw(4, 2), draw(4, 3)), called),
    "ChildSumTreeLSTM": (lambda: L.ChildSumTreeLSTM(3, 2), TWO_CHILDREN, called),
    "NaryTreeLSTM": (lambda: L.NaryTreeLSTM(3, 2), TWO_CHILDREN, called),
    "NStepGRU": (lambda: L.NStepGRU(2, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    "NStepBiGRU": (lambda: L.NStepBiGRU(1, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    "NStepLSTM": (lambda: L.NStepLSTM(2, 2, 3, 0.0), (draw(2, 3, 3), draw(2, 3, 3) / 2, *SEQUENCES), over_sequences(2)),
    "NStepBiLSTM": (
        lambda: L.NStepBiLSTM(1, 2, 3, 0.0), (draw(2, 3, 3), draw(2, 3, 3) / 2, *SEQUENCES), over_sequences(2),
    ),
    "NStepRNNReLU": (lambda: L.NStepRNNReLU(2, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    "NStepBiRNNReLU": (lambda: L.NStepBiRNNReLU(1, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    "NStepRNNTanh": (lambda: L.NStepRNNTanh(2, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    "NStepBiRNNTanh": (lambda: L.NStepBiRNNTanh(1, 2, 3, 0.0), (draw(2, 3, 3), *SEQUENCES), over_sequences(1)),
    # losses
    "BinaryHierarchicalSoftmax": (lambda: L.BinaryHierarchicalSoftmax(3, TREE), ROWS, fed(LABELS)),
    "BlackOut": (lambda: L.BlackOut(3, [8, 1, 3, 4], 2), ROWS, fed(LABELS)),
    "NegativeSampling": (lambda: L.NegativeSampling(3, [8, 1, 3, 4], 2), ROWS, fed(LABELS)),
    "CRF1d": (
        lambda: L.CRF1d(3), (draw(4, 3), draw(4, 3) / 2, draw(2, 3)),
        lambda link, *xs: (link(xs, [LABELS % 3, LABELS[::-1] % 3, LABELS[:2] % 3]),),
    ),
}  # fmt: skip
# Why a public link has no row above. Each reason is one of size; the table may only become shorter.
EXEMPT = dict.fromkeys(
    ["GoogLeNet", "ResNet50Layers", "ResNet101Layers", "ResNet152Layers", "VGG16Layers", "VGG19Layers"],
    "chains of the links above with millions of parameters, for images of 224 pixels",
)


def public_links():
    """The names of all public classes of links."""
    made = {name: getattr(L, name) for name in L.__all__}
    return {name for name, kind in made.items() if isinstance(kind, type) and issubclass(kind, Link)}


def check(make, arrays, call):
    """Move each parameter from its initial value, where zeros and ones hide factors, and compare."""
    with using_config("dtype", np.float64):
        link = make()
        call(link, *map(Variable, arrays))  # sizes that follow from the first batch
        rng = np.random.default_rng(7)
        for _, p in sorted(link.namedparams()):
            p.array[...] += 0.3 * rng.standard_normal(p.shape)

        def outputs(*xs):
            random.set_seed(0)  # the same draws at each point
            return call(link, *xs)

        gys = [np.asarray(0.5 + rng.uniform(size=y.shape)) for y in outputs(*map(Variable, arrays))]
        params = list(link.params())
        assert all(p.dtype == np.float64 for p in params)
        check_backward(outputs, arrays, gys, params, eps=1e-4, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", LINKS)
def test_gradients_by_inputs_and_parameters(name):
    check(*LINKS[name])


def test_every_public_link_is_checked(monkeypatch):
    assert public_links() == LINKS.keys() | EXEMPT.keys()
    monkeypatch.setattr(L, "Dummy", type("Dummy", (Link,), {}), raising=False)
    monkeypatch.setattr(L, "__all__", [*L.__all__, "Dummy"])
    assert public_links() - LINKS.keys() - EXEMPT.keys() == {"Dummy"}  # is noticed


def test_exemptions_only_become_fewer():
    assert len(EXEMPT) <= 6 and LINKS.keys().isdisjoint(EXEMPT)


class Forgetful(L.Linear):
    """A linear link whose bias takes no gradient."""

    def forward(self, x, n_batch_axes=1):
        return F.linear(x, self.W, self.b.array)


def test_a_forgotten_parameter_is_noticed():
    with pytest.raises(AssertionError, match="expected a slope of"):
        check(lambda: Forgetful(3, 2), ROWS, called)
