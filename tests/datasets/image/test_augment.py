"""Random changes: their distributions, their references, and that they are functions of the generator alone."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import datasets
from dbrdist.core.array import random
from dbrdist.core.array.random import generator
from dbrdist.datasets import (
    ByEpoch,
    CenterResizedCrop,
    ColorJitter,
    MixedDataset,
    Mixup,
    PCALighting,
    RandAugment,
    RandomErasing,
    RepeatedDataset,
    Resize,
    TrivialAugment,
)
from dbrdist.datasets.image import augment, pixels
from dbrdist.datasets.loading.base import get_batch
from dbrdist.datasets.table.combine import AugmentedDataset, TupleDataset
from tests.datasets.image_files import picture
from tests.datasets.loader_examples import Fixed
from tests.each import each

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColorJitter(-1), "brightness: expected a number of 0 or more, got -1"),
        (lambda: ColorJitter(hue=0.6), "hue: expected a number from 0 to 0.5, got 0.6"),
        (lambda: PCALighting(-0.1), "std: expected a number of 0 or more, got -0.1"),
        (lambda: PCALighting(float("nan")), "0 or more, got nan"),
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
        (lambda: RandAugment(-1), "num_ops: expected an integer of 0 or more, got -1"),
        (lambda: RandAugment(2, 31), "magnitude: expected a number from 0 to 30, got 31"),
        (lambda: CenterResizedCrop(8, 1.5), "ratio: expected a number above 0 and at most 1, got 1.5"),
        (lambda: Resize(8, "lanczos"), "expected the method 'linear', 'area', 'bilinear' or 'bicubic', got 'lanczos'"),
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


IMAGE = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@each(sign_draw=[0.0, 0.49999, 0.5, 0.999])
def test_operations_go_either_way_at_one_half(sign_draw):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "OPERATIONS", {"a": lambda image, strength, sign, fill: seen.append(sign) or image})
        datasets.RandAugment(1).image(IMAGE, Fixed(0.0, sign_draw))
    assert seen == [1 if sign_draw < 0.5 else -1]


@each(
    **{"num_ops, magnitude, holds": [(0, 0, True), (1, 30, True), (-1, 9, False), (2, -0.1, False), (2, 30.1, False)]}
)
def test_operations_and_magnitudes_of_randaugment(num_ops, magnitude, holds):
    if holds:
        augment.RandAugment(num_ops, magnitude)
    else:
        with pytest.raises(
            ValueError, match=r"num_ops: expected an integer of 0 or more|magnitude: expected a number from 0 to 30"
        ):
            augment.RandAugment(num_ops, magnitude)


@each(name=["translate_x", "translate_y"], sign=[1, -1])
def test_images_are_moved_by_150_of_331_parts_at_most(name, sign):
    line = np.arange(1, 332, dtype=np.uint16) % 251 + 1
    image = line.astype(np.uint8)[None, :, None]
    if name == "translate_y":
        image = image.transpose(1, 0, 2)
    moved = augment.OPERATIONS[name](image, 1.0, sign, 0).ravel()
    line = image.ravel()
    kept, given = (moved[:-150], line[150:]) if sign > 0 else (moved[150:], line[:-150])
    np.testing.assert_array_equal(kept, given)
    assert not (moved[-150:] if sign > 0 else moved[:150]).any()


# ---- TrivialAugment, timm's RandAugment and repeated augmentation against what they are defined by ----


PHOTO = np.random.default_rng(0).integers(0, 256, (24, 32, 3)).astype(np.uint8)
GRAY = np.full((24, 32, 3), 100, np.uint8)


class Draws:
    """A generator with given uniform and normal numbers."""

    def __init__(self, *uniform, normal=()):
        self.uniform, self.normal = list(uniform), list(normal)

    def random(self):
        return self.uniform.pop(0)

    def standard_normal(self):
        return self.normal.pop(0)


def chosen(operations, name):
    """A number that draws the operation of that name."""
    return (list(operations).index(name) + 0.5) / len(operations)


# Of TrivialAugment at the highest of 31 strengths, sign +, as torchvision's wide space has them.
WIDE = {
    "identity": lambda x: x,
    "brightness": lambda x: pixels.brightness(x, 1.99),
    "color": lambda x: pixels.saturation(x, 1.99),
    "contrast": lambda x: pixels.contrast(x, 1.99),
    "sharpness": lambda x: pixels.sharpness(x, 1.99),
    "posterize": lambda x: x & 0xC0,
    "solarize": lambda x: 255 - x,
    "autocontrast": pixels.autocontrast,
    "equalize": pixels.equalize,
    "translate_x": lambda x: np.concatenate([x[:, 32:], np.full((24, 32, 3), 7, np.uint8)], 1)[:, :32],
    "translate_y": lambda x: np.full_like(x, 7),
    "shear_x": lambda x: pixels.affine(x, (1, 0.99, 0, 0, 1, 0), 7),
    "shear_y": lambda x: pixels.affine(x, (1, 0, 0, 0.99, 1, 0), 7),
    "rotate": lambda x: pixels.affine(x, pixels.rotation(135, 24, 32), 7),
}


@each(name=WIDE)
def test_trivial_augment_at_its_strongest(name):
    made = TrivialAugment(7)(PHOTO, Draws(chosen(augment.WIDE_OPERATIONS, name), 0.999, 0.1))
    np.testing.assert_array_equal(made, WIDE[name](PHOTO))


def test_trivial_augment_has_14_operations_of_31_strengths():
    assert set(WIDE) == set(augment.WIDE_OPERATIONS)
    for k in (0, 1, 15, 30):
        draw = chosen(augment.WIDE_OPERATIONS, "brightness")
        for sign, number in ((1, 0.1), (-1, 0.9)):
            made = TrivialAugment()(PHOTO, Draws(draw, (k + 0.5) / 31, number))
            np.testing.assert_array_equal(made, pixels.brightness(PHOTO, 1 + sign * 0.99 * k / 30))


# Of timm's inc1 at magnitude 7 of 10, sign -.
INCREASING = {
    "invert": lambda x: 255 - x,
    "posterize": lambda x: x & 0xC0,  # 4 - int(2.8) = 2 bits
    "solarize": lambda x: np.where(x < 256 - int(0.7 * 256), x, 255 - x),
    "solarize_add": lambda x: np.where(x < 128, x + 77, x),
    "brightness": lambda x: pixels.brightness(x, 1 - 0.63),
    "color": lambda x: pixels.saturation(x, 1 - 0.63),
    "contrast": lambda x: pixels.contrast(x, 1 - 0.63),
    "sharpness": lambda x: pixels.sharpness(x, 1 - 0.63),
    "rotate": lambda x: pixels.affine(x, pixels.rotation(-21, 24, 32), (1, 2, 3)),
    "shear_x": lambda x: pixels.affine(x, (1, -0.21, 0, 0, 1, 0), (1, 2, 3)),
    "shear_y": lambda x: pixels.affine(x, (1, 0, 0, -0.21, 1, 0), (1, 2, 3)),
    "translate_x": lambda x: pixels.affine(x, (1, 0, -10.0, 0, 1, 0), (1, 2, 3)),  # int(0.7 * 0.45 * 32)
    "translate_y": lambda x: pixels.affine(x, (1, 0, 0, 0, 1, -7.0), (1, 2, 3)),
    "autocontrast": pixels.autocontrast,
    "equalize": pixels.equalize,
}


@each(name=INCREASING)
def test_operations_whose_severity_increases(name):
    transform = RandAugment(1, 7, (1, 2, 3), increasing=True, p=0.5)
    draw = chosen(augment.INCREASING_OPERATIONS, name)
    np.testing.assert_array_equal(transform(PHOTO, Draws(draw, 0.9, 0.4)), INCREASING[name](PHOTO))
    np.testing.assert_array_equal(transform(PHOTO, Draws(draw, 0.9, 0.6)), PHOTO)  # drawn, but not applied


def test_there_are_timms_15_operations():
    assert set(INCREASING) == set(augment.INCREASING_OPERATIONS)


@each(**{"normal, strength": [(1.0, 0.8), (-2.0, 0.5), (9.0, 1.0), (-30.0, 0.0)]})
def test_the_magnitude_varies_within_its_range(normal, strength):
    draw = chosen(augment.INCREASING_OPERATIONS, "brightness")
    made = RandAugment(1, 7, std=1.0, increasing=True)(PHOTO, Draws(draw, 0.1, normal=[normal]))
    np.testing.assert_array_equal(made, pixels.brightness(PHOTO, 1 + 0.9 * strength))


@each(settings=[{"magnitude": 11, "increasing": True}, {"std": -1}, {"p": 1.5}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="expected"):
        RandAugment(**settings)


def test_solarize_add_by_hand():
    x = np.array([[[0], [100], [127], [128], [255]]], np.uint8)
    assert pixels.solarize_add(x, 110).ravel().tolist() == [110, 210, 237, 128, 255]


# ---- repeated augmentation ------------------------------------------------------------------------------------------


class Noise:
    is_random = True

    def __call__(self, example, rng):
        return example[0] + rng.random(), example[1]


def numbered(n):
    return AugmentedDataset(TupleDataset(np.arange(n) * 10.0, np.arange(n)), Noise())


@each(n=[24, 23, 5, 1], repeats=[1, 2, 3, 4], block=[4, 6, 8])
def test_each_image_comes_so_often_in_its_batch(n, repeats, block):
    dataset = RepeatedDataset(numbered(n), repeats, block)
    order = random.permutation(3, 1, n)
    for start in range(0, n, block):
        batch = order[start : start + block]
        images, copies = dataset.sources(batch, 3, 1)
        _, counts = np.unique(images, return_counts=True)
        assert counts.max() <= repeats
        assert len(counts) == -(-len(batch) // max(repeats, 1)) or len(batch) < repeats
        assert set(images) <= set(batch)
        assert len({(i, c) for i, c in zip(images, copies)}) == len(batch)


def test_copies_differ_and_the_first_one_is_as_without():
    dataset = RepeatedDataset(numbered(24), 3, 12)
    batch = random.permutation(0, 2, 24)[:12]
    x, t = zip(*[get_batch(dataset, np.array([i]), 0, 2, [])[0] for i in batch])
    whole = get_batch(dataset, batch, 0, 2, [])
    assert [label for _, label in whole] == list(t)
    assert [float(v) for v, _ in whole] == [float(v) for v in x]
    assert len(set(map(float, x))) == 12
    assert sorted(t) == sorted(list(t[:4]) * 3)
    plain = get_batch(numbered(24), batch[:4], 0, 2, [])
    assert [float(v) for v, _ in plain] == [float(v) for v in x[:4]]


def test_other_epochs_show_other_images():
    dataset = RepeatedDataset(numbered(24), 4, 8)
    shown = [frozenset(dataset.sources(np.arange(24), 0, epoch)[0].tolist()) for epoch in range(4)]
    assert {len(images) for images in shown} == {6}
    assert len(set(shown)) == 4


def test_impossible_repeats_are_refused():
    for repeats, block in ((0, 4), (5, 4)):
        with pytest.raises(ValueError, match="expected repeats from 1 to the block's length"):
            RepeatedDataset(numbered(8), repeats, block)


def test_a_block_is_mixed_in_one_way():
    images = np.random.default_rng(0).random((12, 3, 4, 4)).astype(np.float32)
    dataset = MixedDataset(TupleDataset(images, np.arange(12)), [Mixup(0.5)], 12, per=4)
    order = random.permutation(0, 1, 12)
    shares = []
    for i in order:
        _, weights = get_batch(dataset, np.array([i]), 0, 1, [])[0]
        shares.append(float(weights[i]))
    assert [len(set(shares[k : k + 4])) for k in (0, 4, 8)] == [1, 1, 1]
    assert len(set(shares)) == 3


@each(sign=[1, -1], **{"name, axis": [("translate_x", 1), ("translate_y", 0)]})
def test_trivial_augment_moves_half_as_far_at_half_of_the_strength(name, axis, sign):
    draw = Draws(chosen(augment.WIDE_OPERATIONS, name), 15.5 / 31, 0.1 if sign > 0 else 0.9)
    made = np.moveaxis(TrivialAugment(7)(PHOTO, draw), axis, 0)
    photo = np.moveaxis(PHOTO, axis, 0)
    filled = np.full((16, *photo.shape[1:]), 7, np.uint8)
    kept = photo[16:] if sign > 0 else photo[:-16]
    np.testing.assert_array_equal(made, np.concatenate([kept, filled] if sign > 0 else [filled, kept]))
