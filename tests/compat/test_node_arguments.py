"""Hooks read the sizes of convolutions and poolings by Chainer's names, and classes take Chainer's arguments."""

import numpy as np

from dbrdist.functions import convolution

X = np.random.RandomState(0).randn(2, 4, 9, 8).astype("f")
W = np.random.RandomState(1).randn(6, 2, 3, 2).astype("f")


def test_a_hook_reads_the_sizes(installed):
    import chainer
    import chainer.functions as F

    found = []

    class Sizes(chainer.FunctionHook):
        def forward_postprocess(self, function, in_data):
            names = ("kh", "kw", "sy", "sx", "ph", "pw", "dy", "dx", "groups", "cover_all")
            found.append((function.label, *[getattr(function, name, None) for name in names]))

    with Sizes():
        F.convolution_2d(X, W, None, (2, 1), (1, 0), dilate=(1, 2), groups=2)
        F.deconvolution_2d(X, W[:4], None, 2, (0, 1))
        F.max_pooling_2d(X, (3, 2), (2, 1), (1, 0), cover_all=False)
        F.average_pooling_2d(X, 2)
    assert found == [
        ("Convolution2DFunction", None, None, 2, 1, 1, 0, 1, 2, 2, False),
        ("Deconvolution2DFunction", None, None, 2, 2, 0, 1, 1, 1, 1, False),
        ("MaxPoolingND", 3, 2, 2, 1, 1, 0, None, None, None, False),
        ("AveragePooling2D", 2, 2, 2, 2, 0, 0, None, None, None, False),
    ]


def test_a_convolution_of_chainers_arguments(installed):
    import chainer.functions as F
    from chainer.functions.connection.convolution_2d import Convolution2DFunction

    class Binary(Convolution2DFunction):
        """As binary networks have it: a subclass that changes what goes in."""

        def forward(self, xs):
            return super().forward((xs[0], np.sign(xs[1])))

    (y,) = Convolution2DFunction((2, 1), (1, 0), dilate=(1, 2), groups=2).apply((X, W))
    np.testing.assert_array_equal(y.array, F.convolution_2d(X, W, None, (2, 1), (1, 0), dilate=(1, 2), groups=2).array)
    (y,) = Binary(2, 1, False, groups=2).apply((X, W))
    np.testing.assert_allclose(
        y.array, F.convolution_2d(X, np.sign(W), None, 2, 1, groups=2).array, rtol=1e-5, atol=1e-5
    )


def test_natively_they_are_not_there():
    node = convolution.Convolution2D(convolution.ConvGeometry(2, 2))
    assert node.geometry.sh == 2 and not hasattr(node, "sy")
