"""Changes to pixels give Pillow's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.datasets.image import pixels
from tests.datasets.image_files import picture
from tests.each import each

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow to compare with")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ImageOps = pytest.importorskip("PIL.ImageOps")


def noise(h=23, w=31, c=3):
    return np.random.default_rng(h).integers(0, 256, (h, w, c), np.uint8)


IMAGES = {
    "noise": noise(),
    "smooth": picture(3, 40, 56),
    "dark": noise() // 5,
    "few values": noise() // 100 * 100,
    "one value": np.full((9, 9, 3), 77, np.uint8),
    "one pixel": noise(1, 1),
    "a row": noise(1, 9),
    "two rows": noise(2, 9),
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pixels.brightness, ImageEnhance.Brightness),
        (pixels.contrast, ImageEnhance.Contrast),
        (pixels.saturation, ImageEnhance.Color),
        (pixels.sharpness, ImageEnhance.Sharpness),
    ],
)
@each(name=IMAGES, factor=[0.0, 0.3, 0.95, 1.0, 1.4, 1.9, 3.0])
def test_enhancements_are_pillows(name, factor, ours, theirs):
    image = IMAGES[name]
    expected = np.asarray(theirs(Pillow.fromarray(image)).enhance(factor))
    before = image.copy()
    assert np.array_equal(ours(image, factor), expected)
    assert np.array_equal(image, before)


@pytest.mark.parametrize("name", IMAGES)
def test_operations_on_values_are_pillows(name):
    image = IMAGES[name]
    theirs = Pillow.fromarray(image)
    assert np.array_equal(pixels.autocontrast(image), np.asarray(ImageOps.autocontrast(theirs)))
    assert np.array_equal(pixels.equalize(image), np.asarray(ImageOps.equalize(theirs)))
    assert np.array_equal(pixels.gray(image), np.asarray(theirs.convert("L")))
    for bits in range(1, 9):
        assert np.array_equal(pixels.posterize(image, bits), np.asarray(ImageOps.posterize(theirs, bits)))
    for threshold in (0, 1, 127.5, 200, 255, 256):
        assert np.array_equal(pixels.solarize(image, threshold), np.asarray(ImageOps.solarize(theirs, threshold)))


MAPS = [
    (1, 0.3, 0, 0, 1, 0),
    (1, 0, 0, -0.2, 1, 0),
    (1, 0, 7, 0, 1, 0),
    (1, 0, 0, 0, 1, -5),
    (0.5, 0.1, 3, -0.2, 1.5, 1),
]


@pytest.mark.parametrize("matrix", MAPS)
@pytest.mark.parametrize("fill", [0, (1, 2, 3)])
def test_affine_maps_are_pillows(matrix, fill):
    image = IMAGES["noise"]
    expected = Pillow.fromarray(image).transform(
        image.shape[1::-1], Pillow.Transform.AFFINE, matrix, Pillow.Resampling.NEAREST, fillcolor=fill or (0, 0, 0)
    )
    same = (pixels.affine(image, matrix, fill) == np.asarray(expected)).all(-1)
    assert same.mean() > 0.99  # Pillow counts in 65536ths, which decides where a pixel's border is hit


@pytest.mark.parametrize("degrees", [0, 10, -30, 90, 180])
def test_rotations_are_pillows(degrees):
    image = IMAGES["smooth"]
    expected = np.asarray(Pillow.fromarray(image).rotate(degrees))
    same = (pixels.affine(image, pixels.rotation(degrees, *image.shape[:2])) == expected).all(-1)
    assert same.mean() > 0.97


def test_hue_turns_the_colour_and_keeps_the_luminance():
    image = (picture(1) // 4 + 96).astype(np.uint8)
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
    np.testing.assert_array_equal(pixels._TO_YIQ, to_yiq)
    np.testing.assert_allclose(pixels._TO_RGB @ to_yiq, np.eye(3), atol=0.004)
    before = image.astype(np.float64) @ to_yiq.T
    for turn in (-0.5, -0.1, 0.0, 0.2):
        after = pixels.hue(image, turn).astype(np.float64) @ to_yiq.T
        chroma = (before[..., 1] + 1j * before[..., 2]) * np.exp(2j * np.pi * turn)
        assert np.abs(after[..., 0] - before[..., 0]).max() < 1.5
        assert np.abs(after[..., 1] + 1j * after[..., 2] - chroma).max() < 2
    assert np.abs(pixels.hue(image, 0).astype(int) - image).max() <= 1


def test_colours_need_three_channels():
    for change in (pixels.saturation, pixels.hue):
        with pytest.raises(ValueError, match=r"image: expected three channels, \(H, W, 3\), got shape \(5, 5, 1\)"):
            change(noise(5, 5, 1), 0.5)
    assert pixels.contrast(noise(5, 5, 1), 0).std() == 0


@each(shape=[(1, 1), (1, 5), (2, 2), (2, 6), (6, 2), (5, 1), (3, 3), (4, 5)])
def test_what_has_no_neighbours_on_all_sides_is_as_sharp_as_it_was(shape):
    image = np.random.default_rng(2).integers(0, 256, (*shape, 3), np.uint8)
    expected = image.astype(float)
    for y in range(1, shape[0] - 1):
        for x in range(1, shape[1] - 1):
            around = image[y - 1 : y + 2, x - 1 : x + 2].astype(float)
            expected[y, x] = (around.sum((0, 1)) + 4.0 * image[y, x]) / 13
    np.testing.assert_array_equal(pixels.sharpness(image, 0.0), np.floor(expected + 0.5))
    np.testing.assert_array_equal(pixels.sharpness(image, 1.0), image)
