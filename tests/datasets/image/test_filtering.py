"""Filtered resizing against Pillow, on smooth, noisy and extreme images."""

import numpy as np
import pytest

from dbrdist.datasets import CenterResizedCrop, RandomResizedCrop, Resize
from dbrdist.datasets.image import filtering
from dbrdist.datasets.image.images import resize
from tests.each import each

Pillow = pytest.importorskip("PIL.Image")
FLAGS = {"bilinear": Pillow.Resampling.BILINEAR, "bicubic": Pillow.Resampling.BICUBIC}


def images():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (61, 83, 3)).astype(np.uint8)
    yield noise
    yield rng.integers(0, 2, (61, 83, 3)).astype(np.uint8) * 255  # cubics overshoot, and are cut off
    y, x = np.mgrid[:61, :83]
    yield np.stack([x * 3, y * 4, x + y], 2).astype(np.uint8)
    yield noise[:, :, :1]


@each(
    image=list(images()),
    method=["bilinear", "bicubic"],
    size=[(30, 41), (61, 20), (17, 83), (64, 64), (150, 200), (1, 1), (61, 84), (150, 60)],
    resizer=[filtering.resize, filtering.resize_numpy, resize],
)
def test_results_are_within_one_of_pillows(image, method, size, resizer):
    height, width = size
    source = Pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    expected = np.array(source.resize((width, height), FLAGS[method])).reshape(height, width, -1).astype(int)
    made = resizer(image, height, width, method)
    assert made.dtype == np.uint8
    assert made.shape == expected.shape
    assert np.abs(made.astype(int) - expected).max() <= (1 if resizer is filtering.resize_numpy else 0)


@pytest.mark.torch
@each(method=["bilinear", "bicubic"], size=[(30, 41), (17, 83), (100, 20)])
def test_results_are_within_one_of_torchvisions_way(method, size):
    """torch's interpolate with antialias, which torchvision takes for tensors."""
    torch = pytest.importorskip("torch")
    image = list(images())[0 if method == "bilinear" else 2]  # it does not cut off between both directions
    x = torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float32))
    y = torch.nn.functional.interpolate(x, size, mode=method, antialias=True, align_corners=False)
    expected = np.clip(np.rint(y[0].numpy().transpose(1, 2, 0)), 0, 255)
    assert np.abs(filtering.resize_numpy(image, *size, method) - expected).max() <= 1


def test_without_pillow_numpy_serves(monkeypatch):
    image = next(images())
    expected = filtering.resize_numpy(image, 20, 30, "bicubic")
    monkeypatch.setattr(filtering, "_pillow", lambda: None)
    np.testing.assert_array_equal(resize(image, 20, 30, "bicubic"), expected)


def test_transforms_take_the_methods():
    image = next(images())
    expected = np.array(Pillow.fromarray(image).resize((44, 32), FLAGS["bicubic"]))
    np.testing.assert_array_equal(Resize(32, "bicubic")(image), expected)
    middle = image[5:56, 16:67]
    expected = np.array(Pillow.fromarray(middle).resize((20, 20), FLAGS["bilinear"]))
    found = CenterResizedCrop(20, 51 / 61, "bilinear")(image)
    np.testing.assert_array_equal(found, expected)
    whole = RandomResizedCrop(16, (1, 1), (83 / 61, 83 / 61), "bilinear")(image, np.random.default_rng(0))
    np.testing.assert_array_equal(whole, np.array(Pillow.fromarray(image).resize((16, 16), FLAGS["bilinear"])))
