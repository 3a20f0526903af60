"""Tests of dbrdist.links.model.vision.layers."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable
from dbrdist.links.model.vision import layers
from tests.links.model.vision.vision_helpers import NarrowGoogLeNet, NarrowResNet, NarrowVGG


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


@pytest.mark.parametrize(
    "make, scale",
    [(lambda: NarrowVGG(None), lambda fan: 0.01), (lambda: NarrowResNet(None, 50), lambda fan: (2 / fan) ** 0.5),
     (lambda: NarrowGoogLeNet(None), lambda fan: fan**-0.5)],
)  # fmt: skip
def test_weights_without_a_file_are_random(make, scale):
    dbrdist.random.set_seed(0)
    for path, p in make().namedparams():
        if path.endswith("/W") and p.size > 500:
            assert abs(p.array.std() / scale(np.prod(p.shape[1:])) - 1) < 0.15, path
        if path.endswith(("/b", "/beta")):
            assert not p.array.any()
