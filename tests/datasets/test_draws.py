"""What random crops draw, how sizes are rounded, and what iterators keep: against closed forms."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from dbrdist.core.random import generator
from dbrdist.core.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.datasets import CenterCrop, Compose, ImageFolder, RandomCrop, RandomResizedCrop, Resize, ToCHW
from dbrdist.datasets.base import get_batch
from dbrdist.datasets.prefetch import MultithreadIterator
from dbrdist.datasets.serial import SerialIterator


def windows(transform, h, w, num=4000):
    return np.array([transform.window(h, w, generator(0, "augment", 0, i)) for i in range(num)])


def test_the_place_of_a_resized_crop_is_uniform():
    """Top and left take each free place equally often: their fraction of the free length is uniform on 0 to 1."""
    top, left, height, width = windows(RandomResizedCrop(8, (0.2, 0.4), (1.0, 1.0)), 200, 300).T
    for place, free in ((top, 200 - height), (left, 300 - width)):
        fraction = (place + 0.5) / (free + 1)
        shares = np.histogram(fraction, 4, (0, 1))[0] / len(place)
        np.testing.assert_allclose(shares, 0.25, atol=0.03)  # four standard deviations
        assert (place >= 0).all() and (place <= free).all() and (place == free).any() and (place == 0).any()
    assert abs(np.corrcoef(top, left)[0, 1]) < 0.06


def test_the_ratio_of_a_resized_crop_is_uniform_in_the_logarithm():
    """Ratios from 1 / 4 to 4: half of them lie below 1, a quarter below 1 / 2; were they uniform, a fifth and less."""
    _, _, height, width = windows(RandomResizedCrop(8, (0.01, 0.02), (0.25, 4.0)), 1000, 1000).T
    ratio = np.log2(width / height)
    for limit, share in ((-1, 0.25), (0, 0.5), (1, 0.75)):
        assert abs((ratio < limit).mean() - share) < 0.03


def test_the_area_of_a_resized_crop_is_uniform():
    _, _, height, width = windows(RandomResizedCrop(8, (0.2, 0.6), (1.0, 1.0)), 500, 500).T
    area = height * width / 250_000
    for limit, share in ((0.3, 0.25), (0.4, 0.5), (0.5, 0.75)):
        assert abs((area < limit).mean() - share) < 0.03


@pytest.mark.parametrize("h, w", [(10, 10), (7, 9), (100, 41), (3, 200), (33, 32)])
@pytest.mark.parametrize("size", [5, 8, 31])
def test_resize_rounds_the_longer_side_to_the_nearest(h, w, size):
    image = np.zeros((h, w, 1), np.uint8)
    long = max(h, w) * size / min(h, w)
    got = Resize(size)(image).shape[:2]
    assert min(got) == size
    assert abs(max(got) - long) <= 0.5
    assert (got[0] > got[1]) == (h > w) or got[0] == got[1]


@pytest.mark.parametrize("h, w, size", [(7, 9, 4), (8, 8, 3), (5, 6, 5)])
def test_a_center_crop_leaves_as_much_before_as_after(h, w, size):
    image = np.arange(h * w).reshape(h, w, 1).astype(np.uint8)
    part = CenterCrop(size)(image)
    top, left = divmod(int(part[0, 0, 0]), w)
    assert (top, left) == (math.floor((h - size) / 2), math.floor((w - size) / 2))


def test_an_example_by_its_number_is_that_of_seed_0_and_epoch_0(tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (9, 9, 3), np.uint8)
        image.fromarray(pixels).save(tmp_path / "cat" / f"{i}.png")
    data = ImageFolder(tmp_path, Compose([RandomCrop(4), ToCHW()]))
    for i in range(3):
        x, label = data[i]
        ((expected, same_label),) = get_batch(data, np.array([i]), 0, 0, [])
        np.testing.assert_array_equal(x, expected)
        assert label == same_label == 0
        others = [get_batch(data, np.array([i]), seed, epoch, [])[0][0] for seed, epoch in ((0, 1), (1, 0), (2, 2))]
        assert any((x != other).any() for other in others)


class Slow:
    """Examples that take a while: the threads are busy when the iterator ends."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(0.01)
        return i


def test_threads_are_gone_when_finalize_returns():
    before = set(threading.enumerate())
    iterator = MultithreadIterator(Slow(), 4, n_threads=3)
    assert len(iterator.next()) == 4
    assert set(threading.enumerate()) - before
    iterator.finalize()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 7])
def test_an_iterator_comes_back_with_where_it_was_before(num_steps):
    def make(**options):
        return SerialIterator(list(range(10)), 3, seed=4, **options)

    iterator = make()
    for _ in range(num_steps):
        iterator.next()
    state = DictionarySerializer()
    iterator.serialize(state)
    again = make()
    again.serialize(NpzDeserializer(state.target))
    for name in ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch", "current_position"):
        assert getattr(again, name) == getattr(iterator, name), name
    if num_steps:
        assert again.previous_epoch_detail == pytest.approx(3 * (num_steps - 1) / 10)
    assert again.next() == iterator.next()
