"""Memory for batches: threads write into one array, and nobody gets rows that another one has."""

import os
import threading

import numpy as np
import pytest
from each import each
from image_files import class_folders, jpeg

from dbrdist.core import backend
from dbrdist.core.random import SampleGenerator, generator
from dbrdist.datasets import (
    Compose,
    ImageFolder,
    MixedDataset,
    Mixup,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToCHW,
    files,
)
from dbrdist.datasets.base import Batch, SkipExample, join
from dbrdist.datasets.files import read_file
from dbrdist.datasets.memory import Canvas, Reused, reused
from dbrdist.datasets.transforms import Transform, transform_batch
from dbrdist.iterators import MultithreadIterator, SerialIterator

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


def test_memory_of_others_is_copied():
    whole = np.arange(8 * 12, dtype=np.uint8).reshape(8, 2, 2, 3)
    joined = join([Batch((whole[:4], np.arange(4))), Batch((whole[4:], np.arange(4)))])
    np.testing.assert_array_equal(joined.arrays[0], whole)
    assert not np.shares_memory(joined.arrays[0], whole)


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


def test_whole_files(tmp_path):
    for size in (0, 1, 5000, 3_000_000):
        data = os.urandom(size)
        (tmp_path / "file").write_bytes(data)
        assert read_file(str(tmp_path / "file")) == data
    with pytest.raises(IsADirectoryError):
        read_file(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        read_file(str(tmp_path / "nothing"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="there is no /proc")
def test_a_file_whose_size_is_not_known():
    assert read_file("/proc/self/status").startswith(b"Name:") and len(read_file("/proc/self/status")) > 200


def test_a_pipe_to_which_nobody_writes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WRITER_MS", 20)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"nobody writes to this pipe.*pipe"):
        read_file(str(tmp_path / "pipe"))


def test_a_pipe_is_read_to_its_end(tmp_path):
    path, data = str(tmp_path / "pipe"), jpeg(0) * 300
    os.mkfifo(path)

    def write():
        with open(path, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_file(path) == data
    thread.join(30)
