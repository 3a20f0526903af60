"""Parts of links by themselves: scales of initial values, sizes that are known late, what is cut and normalized."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dbrdist.links as L
from dbrdist import Variable, initializers
from dbrdist.links.model.vision import googlenet, layers, vgg
from tests.each import each

# fan_in and fan_out to the variance (normal) or a third of the squared half width (uniform)
VARIANCES = {
    "LeCun": lambda fan_in, fan_out: 1 / fan_in,
    "Glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "He": lambda fan_in, fan_out: 2 / fan_in,
}


@each(name=VARIANCES, shape=[(1, 1), (5, 1), (1, 5), (3, 2, 1, 1), (4, 3, 2, 5)], scale=[None, 0.5])
def test_scales_of_initial_values_are_those_of_their_fans(name, shape, scale):
    space = math.prod(shape[2:])
    variance = VARIANCES[name](shape[1] * space, shape[0] * space)
    given = {} if scale is None else {"scale": scale}
    normal, uniform = (getattr(initializers, name + kind)(**given) for kind in ("Normal", "Uniform"))
    np.testing.assert_allclose(normal.deviation(shape), (scale or 1) * math.sqrt(variance))
    np.testing.assert_allclose(uniform.deviation(shape), (scale or 1) * math.sqrt(3 * variance))


@each(name=VARIANCES, kind=["Normal", "Uniform"], shape=[(0, 0), (3, 0), (0, 3)])
def test_parameters_without_elements_are_initialized(name, kind, shape):
    """A fan of 0 counts as 1."""
    one, x = getattr(initializers, name + kind)(), np.empty(shape, "f")
    one(x)
    fans = sum(shape) if name == "Glorot" else shape[1]
    variance = (1 if name == "LeCun" else 2) / max(fans, 1)
    np.testing.assert_allclose(one.deviation(x.shape), math.sqrt(variance * (3 if kind == "Uniform" else 1)))


def test_a_recurrent_link_knows_its_input_after_the_first_call():
    link = L.LSTM(None, 3)
    assert link(np.ones((2, 5), "f")).shape == (2, 3)
    assert link.upward.in_size == 5 and link.upward.W.shape == (12, 5)


def test_vgg_begins_with_small_weights_and_no_biases():
    class Small(vgg.VGGLayers):
        channels, hidden_size, num_classes = (4, 6, 8, 8, 8), 12, 5

    params = dict(Small(None, 19).namedparams())
    assert len(params) == 2 * 19  # Simonyan and Zisserman's configuration E
    for path, p in params.items():
        if path.endswith("b"):
            assert not p.array.any()
        elif p.array.size > 500:
            assert 0.008 < p.array.std() < 0.012


def test_googlenet_normalizes_over_five_channels():
    x = 100 * np.random.default_rng(0).standard_normal((1, 7, 2, 2)).astype("f")
    total = np.stack([(x[:, max(c - 2, 0) : c + 3] ** 2).sum(1) for c in range(7)], 1)
    np.testing.assert_allclose(googlenet._normalize(x).array, x / (1 + 1e-4 / 5 * total) ** 0.75, rtol=1e-5)


@pytest.mark.parametrize("oversample", [False, True])
def test_a_prediction_sees_the_middle_or_ten_parts_of_an_image(oversample):
    image = np.random.default_rng(0).random((1, 3, 256, 256), np.float32)
    seen = []

    class Model:
        def _batch(self, images, size):
            assert size == (256, 256)
            return image

        def _send(self, x):
            return Variable(x)

        def __call__(self, x, names):
            seen.append(x.array)
            return {"prob": x[:, :, 0, 0]}

    found = layers.VisionLayers.predict(Model(), [None], oversample)
    middle = image[:, :, 16:240, 16:240]
    corners = [(top, left) for top in (0, 32) for left in (0, 32)]
    parts = [image[0, :, t : t + 224, l : l + 224] for t, l in [(16, 16), *corners]]
    if not oversample:
        np.testing.assert_array_equal(seen[0], middle)
        np.testing.assert_array_equal(found.array, middle[:, :, 0, 0])
        return
    expected = [p for part in parts for p in (part, part[..., ::-1])]
    assert seen[0].shape == (10, 3, 224, 224)
    assert all(sum(np.array_equal(p, s) for s in seen[0]) == 1 for p in expected)
    np.testing.assert_allclose(found.array[0], np.mean([p[:, 0, 0] for p in expected], 0), rtol=1e-6)
