"""Memory for batches: threads write into one array, and nobody gets rows that another one has."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.core.array.random import SampleGenerator, generator
from dbrdist.datasets import Compose, ImageFolder, MixedDataset, Mixup, RandomHorizontalFlip, RandomResizedCrop, ToCHW
from dbrdist.datasets.image.transforms import Transform, transform_batch
from dbrdist.datasets.loading import memory
from dbrdist.datasets.loading.base import Batch, SkipExample, join
from dbrdist.datasets.loading.memory import Canvas, Reused, reused
from dbrdist.iterators import MultithreadIterator, SerialIterator
from tests.datasets.image_files import class_folders
from tests.each import each

CHAIN = Compose([RandomResizedCrop(16), RandomHorizontalFlip(), ToCHW()])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """30 images; two of them are cut off."""
    root = class_folders(tmp_path_factory.mktemp("images"), (("ant", 14), ("bee", 16)))
    for name in ("ant/3.jpg", "bee/7.jpg"):
        (root / name).write_bytes((root / name).read_bytes()[:-40])
    return root


class Odd:
    """Images of which one has another size."""

    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 24

    def get_batch(self, indices, seed, epoch, skipped):
        side = 5 if self.odd in indices else 4
        images = reused.empty((len(indices), side, side, 3), np.uint8)
        images[...] = np.asarray(indices)[:, None, None, None]
        return Batch((images, np.asarray(indices)))

    def __getitem__(self, i):
        return self.get_batch(np.array([i]), 0, 0, [])[0]


def same(a, b):
    """Two iterators give the same for two epochs and a half."""
    for _ in range(8):
        one, other = a.next(), b.next()
        one, other = (x.finished().arrays if isinstance(x, Batch) else x for x in (one, other))
        for x, y in zip(one, other):
            np.testing.assert_array_equal(np.asarray(x, dtype=object), np.asarray(y, dtype=object))


@pytest.mark.slow
@each(last=["wrap", "short", "drop"], num_threads=[1, 3])
def test_threads_give_the_batches_of_one(root, last, num_threads):
    dataset = ImageFolder(root, CHAIN, on_corrupt="skip")
    options = {"seed": 3, "last": last}
    with MultithreadIterator(dataset, 12, n_threads=num_threads, **options) as threads:
        same(SerialIterator(dataset, 12, **options), threads)
        assert threads.num_skipped >= 2


def test_threads_find_a_heap_that_keeps_its_pages(root, monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "tune_heap", lambda: asked.append(threading.current_thread()))
    with MultithreadIterator(ImageFolder(root, CHAIN, on_corrupt="skip"), 12, n_threads=2, seed=3) as threads:
        assert not asked
        threads.next(), threads.next()
    assert asked == [threading.current_thread()]


def test_mixed_images_too(root):
    dataset = MixedDataset(ImageFolder(root, CHAIN, on_corrupt="skip"), [Mixup(0.3)], 2)
    with MultithreadIterator(dataset, 12, n_threads=2, seed=3) as threads:
        same(SerialIterator(dataset, 12, seed=3), threads)


def test_threads_write_straight_into_the_batch(tmp_path):
    dataset = ImageFolder(class_folders(tmp_path, (("ant", 14), ("bee", 16))), CHAIN)
    with MultithreadIterator(dataset, 12, n_threads=2, seed=3) as threads:
        images = threads.next().raw[0][0]
        assert images.shape == (12, 16, 16, 3)
        assert any(images.base is kept and len(kept) == 12 for kept in reused._kept)


@each(odd=[0, 7, 23])
def test_a_part_of_another_shape_is_left_apart(odd):
    with MultithreadIterator(Odd(odd), 24, shuffle=False, n_threads=2, seed=0) as threads:
        batch = threads.next()
        assert [int(np.asarray(image).flat[0]) for image, _ in batch] == list(range(24))


class Side(Transform):
    """Images of a side that depends on the label; notes where it could have written."""

    def __init__(self, sides):
        self.sides = sides
        self.rooms = []

    def __call__(self, example, rng=None, out=None):
        self.rooms.append(None if out is None else out.shape)
        side = self.sides[int(example[1])]
        return np.full((side, side, 3), example[1], np.uint8), example[1]

    def image(self, image, rng, out=None):
        raise AssertionError("it takes whole examples")


def read_on(canvas, start, labels, chain):
    with reused.on(canvas, start, len(labels)):
        pairs = [(k, (np.zeros((1, 1, 3), np.uint8), np.int32(label))) for k, label in enumerate(labels)]
        return transform_batch(chain, pairs, len(labels), 0, 0, [])


def test_the_first_image_of_a_share_goes_into_a_batch_that_others_began():
    canvas, side = Canvas(6), Side([4, 4])
    chain = Compose([side, ToCHW()])
    parts = [read_on(canvas, 0, [0, 1, 0], chain), read_on(canvas, 3, [1, 0, 1], chain)]
    assert side.rooms == [None] + [(4, 4, 3)] * 5
    whole = join(parts)
    assert np.shares_memory(whole.raw[0][0], parts[1].raw[0][0])
    np.testing.assert_array_equal(whole.raw[0][0][:, 0, 0, 0], [0, 1, 0, 1, 0, 1])


def test_a_share_that_begins_with_another_shape_has_memory_of_its_own():
    canvas, chain = Canvas(4), Compose([Side([4, 5]), ToCHW()])
    first, second = read_on(canvas, 0, [0, 0], chain), read_on(canvas, 2, [1, 1], chain)
    np.testing.assert_array_equal(second.raw[0][0], np.ones((2, 5, 5, 3), np.uint8))
    np.testing.assert_array_equal(first.raw[0][0], np.zeros((2, 4, 4, 3), np.uint8))
    mixed = read_on(Canvas(2), 0, [1, 0], chain)
    assert [image.shape for image, _ in mixed] == [(3, 5, 5), (3, 4, 4)]


def test_a_share_of_a_batch_that_others_began_may_have_no_image():
    canvas = Canvas(4)
    read_on(canvas, 0, [0, 0], Compose([Side([4]), ToCHW()]))
    with reused.on(canvas, 2, 2):
        assert transform_batch(Compose([Refuse(), ToCHW()]), [(0, (None, 0)), (1, (None, 1))], 2, 0, 0, []) == []


class Refuse(Side):
    """Leaves out every example."""

    def __init__(self):
        super().__init__([])

    def __call__(self, example, rng=None, out=None):
        raise SkipExample("left out")


def test_rows_of_a_canvas_are_given_once():
    memory, canvas = Reused(), Canvas(10)
    with memory.on(canvas, 2, 5):
        first = memory.empty((3, 4, 4, 3), np.uint8)
        second = memory.empty((2, 4, 4, 3), np.uint8)
        beyond = memory.empty((1, 4, 4, 3), np.uint8)
        other = memory.empty((0, 5, 5, 3), np.uint8)
    outside = memory.empty((3, 4, 4, 3), np.uint8)
    arrays = [first, second, beyond, other, outside]
    assert all(not np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert first.base is second.base and beyond.base is not first.base


def test_neighbours_are_joined_without_a_copy_others_with_one():
    canvas = Canvas(9)
    parts = [canvas.rows(start, (3, 2, 2, 3), np.uint8) for start in (0, 3, 6)]
    for value, part in enumerate(parts):
        part[...] = value
    whole = reused.concatenated(parts)
    assert np.shares_memory(whole, parts[0]) and np.shares_memory(whole, parts[2]) and len(whole) == 9
    for chosen in ((0, 2), (1, 0), (1, 1), (2,)):
        found = reused.concatenated([parts[k] for k in chosen])
        assert found[:, 0, 0, 0].tolist() == [k for k in chosen for _ in range(3)]
    shorter = reused.concatenated([parts[0][:2], parts[1]])  # an example was left out
    assert shorter[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 1] and not np.shares_memory(shorter, parts[1])


def test_threads_that_begin_at_once_share_one_array():
    canvas, barrier, found = Canvas(64), threading.Barrier(16), []

    def draw(k):
        barrier.wait(timeout=30)
        found.append(canvas.rows(4 * k, (4, 3, 3, 3), np.uint8))

    threads = [threading.Thread(target=draw, args=(k,)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({id(rows.base) for rows in found}) == 1 and len(found) == 16


def test_one_generator_serves_many_samples():
    rng = np.random.default_rng(0)
    for seed, epoch in ((0, 0), (2**64 - 1, 7), (2**63, 10**9)):
        rngs = SampleGenerator(seed, "augment", epoch)
        for sample in (5, 0, 5, 2**40):
            one, other = rngs.at(sample), generator(seed, "augment", epoch, sample)
            number = int(rng.integers(1, 8))  # which may leave half a word, or half a block
            for draw in ("random", "standard_normal", "permutation"):
                np.testing.assert_array_equal(getattr(one, draw)(number), getattr(other, draw)(number))
            for _ in range(number):
                assert one.integers(3, dtype=np.uint32) == other.integers(3, dtype=np.uint32)


def test_images_that_follow_each_other_are_one_array_without_a_copy():
    reused = memory.Reused()
    whole = reused.fresh((6, 2, 2, 3), np.uint8)
    whole[...] = np.arange(whole.size).reshape(whole.shape)
    parts = [whole[:2], whole[2:3], whole[3:]]
    found = reused.concatenated(parts)
    assert np.shares_memory(found, whole) and found.shape == whole.shape
    for others in (
        [parts[0], parts[2]],
        [parts[1], parts[0]],
        [whole[:2].copy(), parts[1]],
        [parts[0], whole[2:3].copy()],
    ):
        found = reused.concatenated(others)
        assert not np.shares_memory(found, whole)
        np.testing.assert_array_equal(found, np.concatenate(others))
    foreign = np.ones((4, 2, 2, 3), np.uint8)
    assert not np.shares_memory(reused.concatenated([foreign[:1], foreign[1:]]), foreign)


def test_rows_of_a_canvas_are_given_out_until_they_end():
    reused, canvas = memory.Reused(), memory.Canvas(7)
    with reused.on(canvas, 2, 3):
        assert reused.begun(1) is None  # nobody has said what an image is like
        first = reused.empty((2, 4, 4, 3), np.uint8)
        assert reused.begun(2) is None
        last = reused.begun(1)
        assert reused.begun(1) is None
        assert not np.shares_memory(reused.empty((1, 4, 4, 3), np.uint8), first.base)
    first[...], last[...] = 5, 6
    whole = canvas.rows(0, (7, 4, 4, 3), np.uint8)
    assert [set(row.ravel().tolist()) for row in whole[2:5]] == [{5}, {5}, {6}]
    assert canvas.rows(0, (1, 4, 4, 4), np.uint8) is canvas.rows(0, (1, 4, 4, 3), np.uint16) is None
    assert reused.begun(1) is None  # this thread has no canvas any more


def test_images_outside_of_a_share_go_to_no_canvas():
    """Also after an image that could not be read has left rows of it free."""
    own, canvas = Reused(), Canvas(4)
    with pytest.raises(ValueError, match="corrupt"), own.on(canvas, 0, 4):
        whole = own.empty((1, 5, 5, 3), np.uint8).base
        raise ValueError("corrupt")
    assert own.begun(1) is None
    assert not np.shares_memory(own.empty((1, 5, 5, 3), np.uint8), whole)
