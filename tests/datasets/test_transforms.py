"""Transforms: what they do, how often, and that a batch gives the numbers of its examples one by one."""

import numpy as np
import pytest

from dbrdist.core.random import generator
from dbrdist.datasets import (
    AugmentedDataset,
    Batch,
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToCHW,
    TupleDataset,
)
from dbrdist.datasets.base import get_batch


def numbered(h, w, c=1):
    """An image whose pixels are all different and not 0 (h * w <= 255)."""
    return np.repeat(np.arange(1, h * w + 1, dtype=np.uint8).reshape(h, w, 1), c, axis=2)


def rng(i=0):
    return generator(0, "augment", 0, i)


def test_random_crop_takes_each_place_equally_often():
    image = numbered(6, 7)
    corners = np.zeros((3, 3), int)
    for i in range(9000):
        part = RandomCrop((4, 5))(image, rng(i))
        y, x = divmod(int(part[0, 0, 0]) - 1, 7)
        assert np.array_equal(part, image[y : y + 4, x : x + 5])
        corners[y, x] += 1
    assert np.abs(corners - 1000).max() < 150  # five standard deviations


def test_random_crop_pads_with_zeros():
    image = numbered(4, 4)
    padded = np.zeros((8, 8, 1), np.uint8)
    padded[2:6, 2:6] = image
    windows = {padded[y : y + 4, x : x + 4].tobytes() for y in range(5) for x in range(5)}
    seen = {RandomCrop(4, padding=2)(image, rng(i)).tobytes() for i in range(500)}
    assert seen == windows


def test_flip_mirrors_half_of_the_images():
    image = numbered(3, 5)
    flipped = [RandomHorizontalFlip()(image, rng(i)) for i in range(4000)]
    num = sum(np.array_equal(f, image[:, ::-1]) for f in flipped)
    assert num + sum(np.array_equal(f, image) for f in flipped) == 4000
    assert abs(num - 2000) < 5 * 32
    assert np.array_equal(RandomHorizontalFlip(0)(image, rng()), image)
    assert np.array_equal(RandomHorizontalFlip(1)(image, rng()), image[:, ::-1])


def test_random_resized_crop_covers_the_stated_areas_and_ratios():
    t = RandomResizedCrop(8, scale=(0.2, 0.8), ratio=(0.5, 2.0))
    areas, ratios = [], []
    for i in range(3000):
        top, left, height, width = t.window(100, 120, rng(i))
        assert 0 <= top <= 100 - height and 0 <= left <= 120 - width
        areas.append(height * width / 12000)
        ratios.append(np.log(width / height))
    assert 0.19 < min(areas) < 0.22 and 0.7 < max(areas) < 0.81
    assert abs(np.mean(ratios) - np.log(1.2) / 4) < 0.15  # wide images lose fewer wide windows
    assert min(ratios) > np.log(0.48) and max(ratios) < np.log(2.1)
    assert t(numbered(15, 16, 3), rng()).shape == (8, 8, 3)


def test_random_resized_crop_falls_back_to_the_middle():
    top, left, height, width = RandomResizedCrop(8, scale=(0.9, 1.0)).window(10, 1000, rng())
    assert (top, height) == (0, 10)
    assert (width, left) == (13, 493)


def test_center_crop_and_resize():
    image = numbered(6, 8)
    assert np.array_equal(CenterCrop((2, 4))(image), image[2:4, 2:6])
    assert Resize(3)(image).shape == (3, 4, 1)
    assert Resize(3)(image.transpose(1, 0, 2)).shape == (4, 3, 1)
    assert Resize((5, 9))(image).shape == (5, 9, 1)


def test_normalize_and_to_chw_have_the_stated_formula():
    image = numbered(6, 8, 3)
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 0.125]
    y = Compose([Normalize(mean, std), ToCHW()])(image)
    expected = ((image / 255 - mean) / std).transpose(2, 0, 1)
    assert (y.shape, y.dtype) == ((3, 6, 8), np.float32)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(Normalize(0.5, 0.25)(image), (image / 255 - 0.5) / 0.25, rtol=0, atol=2e-6)


def test_labels_pass_through():
    image, label, name = Compose([RandomHorizontalFlip(), ToCHW()])((numbered(3, 3), np.int32(4), "cat"), rng())
    assert (image.shape, label, name) == ((1, 3, 3), 4, "cat")


PIPELINE = Compose([RandomCrop(5, padding=2), RandomHorizontalFlip(), Normalize(0.4, 0.3), ToCHW()])


def augmented(transform=PIPELINE, n=20):
    images = np.random.default_rng(0).integers(0, 256, (n, 6, 7, 3), np.uint8)
    return AugmentedDataset(TupleDataset(images, np.arange(n, dtype=np.int32)), transform)


def test_a_batch_equals_its_examples_one_by_one():
    data = augmented()
    batch = get_batch(data, np.array([3, 17, 4, 4]), 5, 2, [])
    assert isinstance(batch, Batch)
    x, y = batch.arrays
    assert (x.shape, x.dtype, y.tolist()) == ((4, 3, 5, 5), np.float32, [3, 17, 4, 4])
    assert x.transpose(0, 2, 3, 1).flags.c_contiguous  # channels-last
    for row, i in enumerate([3, 17, 4, 4]):
        assert np.array_equal(x[row], data.example_at(i, 5, 2)[0])


def test_augmentation_changes_with_seed_epoch_and_sample_alone():
    same = augmented()
    a, b = same.example_at(3, 1, 2)[0], same.example_at(3, 1, 2)[0]
    assert np.array_equal(a, b)
    images = TupleDataset(np.repeat(numbered(6, 7)[None], 50, axis=0), np.arange(50))
    data = AugmentedDataset(images, RandomCrop(3, padding=1))
    crops = [data.example_at(i, seed, epoch)[0].tobytes() for i in range(50) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(crops)) > 36  # of 6 * 7 places


def test_shapes_that_differ_give_a_list():
    data = AugmentedDataset(TupleDataset([numbered(3, 4), numbered(4, 4)], [0, 1]), ToCHW())
    batch = get_batch(data, np.array([0, 1]), 0, 0, [])
    assert [x.shape for x, _ in batch] == [(1, 3, 4), (1, 4, 4)]


def test_a_users_transform_may_stand_in_a_pipeline():
    def double_label(example, rng):
        image, label = example
        return image, label * 2 + (rng.random() < 2)

    data = augmented(Compose([double_label, ToCHW()]))
    assert get_batch(data, np.array([2, 6]), 0, 0, []).arrays[1].tolist() == [5, 13]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (RandomCrop(9), "at least 9x9 with padding 0 for RandomCrop, got 6x7"),
        (CenterCrop(7), "at least 7x7 for CenterCrop, got 6x7"),
        (Normalize([0.1, 0.2], 1), "mean and std of 1 or 1 channels, got 2 and 1"),
    ],
)
def test_images_that_do_not_fit_are_refused(transform, message):
    with pytest.raises(ValueError, match=message):
        transform(numbered(6, 7), rng())


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"a pair \(height, width\), got 0"):
        RandomCrop(0)
    with pytest.raises(ValueError, match="probability from 0 to 1, got 2"):
        RandomHorizontalFlip(2)
    with pytest.raises(ValueError, match="0 < scale <= 1"):
        RandomResizedCrop(8, scale=(0.5, 2))
    with pytest.raises(ValueError, match="positive standard deviations"):
        Normalize(0, 0)
    with pytest.raises(TypeError, match=r"random generator as in RandomCrop\(...\)\(example, rng\), got None"):
        RandomCrop(2)(numbered(3, 3))


def test_the_middle_of_a_tiny_image_has_a_pixel_at_least():
    """Where ten parts did not fit, and no ratio that is asked for is one of the image."""
    for ratio in ((3, 4), (1 / 4, 1 / 3), (30, 40)):
        for h, w in ((1, 1), (1, 2), (2, 1)):
            image = numbered(h, w, 3)
            part = RandomResizedCrop(4, ratio=ratio)(image, rng())
            assert part.shape == (4, 4, 3) and np.isin(part, np.arange(image.min(), image.max() + 1)).all()
