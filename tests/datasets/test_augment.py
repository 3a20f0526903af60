"""Random changes: their distributions, their references, and that they are functions of the generator alone."""

import numpy as np
import pytest
from image_files import picture

from dbrdist.core.random import generator
from dbrdist.datasets import (
    ByEpoch,
    CenterResizedCrop,
    ColorJitter,
    Compose,
    PCALighting,
    RandAugment,
    RandomErasing,
    Resize,
    augment,
    pixels,
)
from dbrdist.datasets.transforms import at_epoch, transform_batch

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow to compare with")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")


def rng(i=0):
    return generator(0, "augment", 0, i)


RANDOM = {
    "jitter": ColorJitter(0.4, 0.4, 0.4, 0.1),
    "lighting": PCALighting(0.3),
    "erasing": RandomErasing(0.9),
    "noise": RandomErasing(0.9, value="noise"),
    "policy": RandAugment(2, 15),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_change_is_a_function_of_its_generator(name):
    image, change = picture(1, 40, 50), RANDOM[name]
    before, seen = image.copy(), set()
    for i in range(12):
        out = change(image, rng(i))
        assert out.shape == image.shape and out.dtype == np.uint8
        assert np.array_equal(out, change(image.copy(), rng(i)))
        seen.add(out.tobytes())
    assert len(seen) > 8
    assert np.array_equal(image, before)
    assert change((image, 7), rng(3))[1] == 7
    with pytest.raises(TypeError, match=rf"expected a random generator as in {type(change).__name__}\(\.\.\.\)"):
        change(image)


def test_color_jitter_is_pillows_in_the_drawn_order():
    image = picture(2, 30, 40)
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    orders = set()
    for i in range(40):
        draws = rng(i)
        order, amounts = [int(k) for k in draws.random(4).argsort()], draws.random(4)
        theirs = Pillow.fromarray(image)
        for k in order:
            if k < 3:
                theirs = kinds[k](theirs).enhance(0.6 + 0.8 * amounts[k])
        assert np.array_equal(ColorJitter(0.4, 0.4, 0.4)(image, rng(i)), np.asarray(theirs))
        orders.add(tuple(order))
    assert len(orders) > 15


def test_color_jitter_turns_hues_either_way():
    image, turns = picture(3, 20, 30), []
    for i in range(20):
        ours, draws = rng(i), rng(i)
        draws.random(4)
        turns.append(0.3 * (2 * draws.random(4)[3] - 1))
        assert np.array_equal(ColorJitter(0, 0, 0, 0.3)(image, ours), pixels.hue(image, turns[-1]))
        assert ours.random() == draws.random()  # what comes after draws the same whatever is jittered
    assert min(turns) < -0.2 and max(turns) > 0.2


def test_color_jitter_of_nothing_changes_nothing():
    image = picture(2)
    assert np.array_equal(ColorJitter(0, 0, 0, 0)(image, rng()), image)
    assert {ColorJitter(2, 0, 0)(np.full((1, 1, 3), 100, np.uint8), rng(i)).max() for i in range(300)} >= {0, 255}


def test_lighting_adds_one_colour_of_the_right_covariance():
    image = np.full((2, 2, 3), 128, np.uint8)
    shifts = np.array([PCALighting(1.0)(image, rng(i))[0, 0].astype(float) - 128 for i in range(4000)])
    values = np.array([0.2175, 0.0188, 0.0045]) * 255
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    expected = vectors @ np.diag(values**2) @ vectors.T
    assert np.abs(np.cov(shifts.T) - expected).max() < 0.1 * expected.max()
    varied = picture(5)
    out = PCALighting(0.5)(varied, rng(7)).astype(int)
    inside = (out > 0) & (out < 255)
    for c in range(3):
        assert len(set((out - varied)[..., c][inside[..., c]].tolist())) == 1
    assert np.array_equal(PCALighting(0)(varied, rng()), varied)


@pytest.mark.parametrize("std", [None, 2.0])
def test_lighting_has_the_stated_formula(std):
    noise = np.random.default_rng(1).integers(0, 256, (16, 17, 3), np.uint8)
    image = np.concatenate([noise, np.full((1, 17, 3), 255, np.uint8), np.zeros((1, 17, 3), np.uint8)])
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    change = PCALighting() if std is None else PCALighting(std)
    for i in range(9):
        alphas = (std or 0.1) * rng(i).standard_normal(3)
        expected = image + 255 * vectors @ (alphas * [0.2175, 0.0188, 0.0045])
        assert np.array_equal(change(image, rng(i)), np.rint(expected).clip(0, 255))


class Drawn:
    """Random numbers that are written down."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def test_the_window_that_is_erased():
    """Area and ratio from two numbers, the ratio in the logarithm; top and left from two more."""
    change = RandomErasing(area=(0.1, 0.3), ratio=(0.5, 2))
    height, width = 23, 16  # of area 360 = 40 * 60 * 0.15, and ratio sqrt(2) = 0.5 * 4**0.75
    assert change._window(40, 60, Drawn(0.25, 0.75, 0, 0)) == (0, 0, height, width)
    assert change._window(40, 60, Drawn(0.25, 0.75, 0.999, 0.999)) == (17, 44, height, width)
    assert change._window(40, 60, Drawn(0.25, 0.75, 0.5, 0.2)) == (9, 9, height, width)
    whole = RandomErasing(area=(1, 1), ratio=(0.25, 4))  # fits where the ratio is that of the image alone
    others = (0, 0) * 9
    assert whole._window(8, 8, Drawn(*others, 0, 0.5, 0.9, 0.9)) == (0, 0, 8, 8)
    assert whole._window(8, 8, Drawn(*others, 0, 0)) is None  # 4 by 16, ten times
    assert whole._window(8, 8, Drawn(*others, 0, 1)) is None
    assert RandomErasing(area=(0.01, 1), ratio=(1, 1))._window(10, 10, Drawn(0, 0, 0.99, 0)) == (9, 0, 1, 1)
    for ratio in (1 / 9, 9):  # a side of a third of a pixel
        assert RandomErasing(area=(0.01, 1), ratio=(ratio, ratio))._window(10, 10, Drawn(*(0, 0) * 10)) is None


def test_erasing_at_its_bounds():
    image = picture(1)
    assert RandomErasing(0).image(image, Drawn(0.0)) is image
    assert (RandomErasing(1, (1, 1), (0.75, 0.75), 255).image(image, Drawn(0.999, 0, 0, 0, 0)) == 255).all()
    noise = RandomErasing(1, (1, 1), (0.75, 0.75), "noise").image(image, rng())
    assert noise.min() == 0 and noise.max() == 255
    change = RandomErasing()
    assert (change.p, change.area, change.ratio, change.value) == (0.5, (0.02, 1 / 3), (0.3, 1 / 0.3), 0)


def test_erasing_covers_the_stated_areas_with_the_value():
    image = np.full((60, 80, 3), 200, np.uint8)
    areas, ratios, num = [], [], 0
    change = RandomErasing(0.5, area=(0.05, 0.3), ratio=(0.5, 2), value=(1, 2, 3))
    for i in range(600):
        out = change(image, rng(i))
        erased = (out == (1, 2, 3)).all(-1)
        assert (out[~erased] == 200).all()
        if erased.any():
            rows, columns = np.flatnonzero(erased.any(1)), np.flatnonzero(erased.any(0))
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            assert erased.sum() == height * width
            areas.append(height * width / erased.size)
            ratios.append(height / width)
            num += 1
    assert abs(num - 300) < 62
    assert 0.04 < min(areas) < 0.07 and 0.27 < max(areas) < 0.32
    assert 0.45 < min(ratios) < 0.55 and 1.8 < max(ratios) < 2.2
    assert len(np.unique(RandomErasing(1, value="noise")(image, rng(1)))) > 50
    assert np.array_equal(RandomErasing(1, area=(1, 1), ratio=(9, 9))(image, rng()), image)  # fits nowhere


def test_a_policy_draws_each_operation_equally_often(monkeypatch):
    counts, signs = dict.fromkeys(augment.OPERATIONS, 0), []

    def counting(name):
        def count(image, strength, sign, fill):
            counts[name] += 1
            signs.append(sign)
            assert strength == 0.5
            return image

        return count

    monkeypatch.setattr(augment, "OPERATIONS", {name: counting(name) for name in counts})
    for i in range(1400):
        RandAugment(2, 15)(np.zeros((2, 2, 3), np.uint8), rng(i))
    assert len(counts) == 14 and max(abs(n - 200) for n in counts.values()) < 70
    assert abs(np.mean(signs)) < 0.1


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_the_operations_have_the_strengths_of_the_paper(strength):
    """At magnitudes 30 and 15, against the same call by hand."""
    image, fill = picture(4, 33, 66), (7, 8, 9)
    x, y, bits, threshold = {1.0: (29, 14, 4, 0), 0.5: (14, 7, 6, 127.5)}[strength]
    for sign in (1, -1):
        factor = {(1.0, 1): 1.9, (1.0, -1): 0.1, (0.5, 1): 1.45, (0.5, -1): 0.55}[strength, sign]
        expected = {
            "identity": image,
            "shear_x": pixels.affine(image, (1, sign * 0.3 * strength, 0, 0, 1, 0), fill),
            "shear_y": pixels.affine(image, (1, 0, 0, sign * 0.3 * strength, 1, 0), fill),
            "translate_x": pixels.affine(image, (1, 0, sign * x, 0, 1, 0), fill),
            "translate_y": pixels.affine(image, (1, 0, 0, 0, 1, sign * y), fill),
            "rotate": pixels.affine(image, pixels.rotation(sign * 30 * strength, 33, 66), fill),
            "brightness": pixels.brightness(image, factor),
            "color": pixels.saturation(image, factor),
            "contrast": pixels.contrast(image, factor),
            "sharpness": pixels.sharpness(image, factor),
            "posterize": pixels.posterize(image, bits),
            "solarize": pixels.solarize(image, threshold),
            "autocontrast": pixels.autocontrast(image),
            "equalize": pixels.equalize(image),
        }
        assert list(expected) == list(augment.OPERATIONS)
        for name, operation in augment.OPERATIONS.items():
            assert np.array_equal(operation(image, strength, sign, fill), expected[name]), name


def test_center_resized_crop_is_the_middle():
    image = picture(6, 48, 64)
    assert np.array_equal(CenterResizedCrop(24, 0.5)(image), image[12:36, 20:44])
    assert CenterResizedCrop((10, 20))(image).shape == (10, 20, 3)
    assert CenterResizedCrop(8, 0.001)(picture(1, 3, 3)).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColorJitter(-1), "expected brightness, contrast and saturation of at least 0 and hue from 0 to 0.5"),
        (lambda: ColorJitter(hue=0.6), "hue from 0 to 0.5, got 0.4, 0.4, 0.4 and 0.6"),
        (lambda: PCALighting(-0.1), "expected a standard deviation of at least 0, got -0.1"),
        (lambda: PCALighting(float("nan")), "at least 0, got nan"),
        (lambda: RandomErasing(2), "expected a probability from 0 to 1, got 2"),
        (lambda: RandomErasing(area=(0, 0.1)), r"expected 0 < area <= 1 and 0 < ratio, each .* got \(0, 0.1\)"),
        (lambda: RandomErasing(area=(0.5, 1.1)), r"expected 0 < area <= 1 and 0 < ratio, each .* got \(0.5, 1.1\)"),
        (lambda: RandomErasing(ratio=(2, 1)), r"0 < ratio, each .* and \(2, 1\)"),
        (lambda: RandomErasing(value=(0, 256)), r"expected a value from 0 to 255, .* got \(0, 256\)"),
        (lambda: RandomErasing(value=-1), "expected a value from 0 to 255, .* got -1"),
        (lambda: RandomErasing(area=(0.5, 0.1)), "expected 0 < area <= 1 and 0 < ratio, each"),
        (lambda: RandomErasing(ratio=(0, 1)), "0 < ratio, each"),
        (lambda: RandomErasing(value=300), "expected a value from 0 to 255, one for each channel, or 'noise', got 300"),
        (lambda: RandomErasing(value="random"), "or 'noise', got 'random'"),
        (lambda: RandAugment(-1), "expected num_ops of at least 0 and a magnitude from 0 to 30"),
        (lambda: RandAugment(2, 31), "got 2 and 31"),
        (lambda: CenterResizedCrop(8, 1.5), "expected a ratio above 0 and at most 1, got 1.5"),
        (lambda: Resize(8, "lanczos"), "expected the method 'linear' or 'area', got 'lanczos'"),
        (lambda: ByEpoch({}), "expected transforms by epochs from 0 on"),
        (lambda: ByEpoch({1: Resize(8)}), r"from 0 on, whole numbers, got \[1\]"),
        (lambda: ByEpoch({0: Resize(8), 1.5: Resize(9)}), "whole numbers"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_lighting_needs_three_channels():
    with pytest.raises(ValueError, match="expected an image of three channels"):
        PCALighting()(np.zeros((4, 4, 1), np.uint8), rng())


# ---- by epoch ----


def test_stages_hold_from_their_epoch_on():
    small, large = Resize((4, 4)), Resize((8, 8))
    change = Compose([ByEpoch({3: large, 0: small}), lambda example, rng: example])
    stages = [change.at_epoch(e) for e in range(5)]
    assert [s.transforms[0] for s in stages] == [small, small, small, large, large]
    assert stages[0] is stages[2] and stages[3] is stages[4]
    plain = Compose([small])
    assert plain.at_epoch(9) is plain and at_epoch(str, 3) is str
    examples = [(i, (picture(i), np.int32(i))) for i in range(3)]
    for epoch, size in ((0, 4), (2, 4), (3, 8)):
        batch = transform_batch(Compose([ByEpoch({0: small, 3: large})]), examples, 3, 0, epoch, [])
        assert {image.shape[:2] for image, _ in batch} == {(size, size)}
    assert change((picture(0), 1), None)[0].shape == (4, 4, 3)
