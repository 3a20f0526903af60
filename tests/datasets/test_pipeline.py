"""From files to batches: the same numbers, whoever makes them, and memory that nobody else writes into."""

import io
import pickle

import ml_dtypes
import numpy as np
import pytest
from image_files import class_folders

from dbrdist.cli.build import converter
from dbrdist.core.random import generator
from dbrdist.datasets import (
    Batch,
    CenterCrop,
    CenterResizedCrop,
    Compose,
    ImageFolder,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToCHW,
    Transform,
    images,
)
from dbrdist.datasets.convert import concat_examples
from dbrdist.datasets.memory import reused
from dbrdist.datasets.transforms import Finisher, transform_batch
from dbrdist.errors import CorruptExampleError
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator

Pillow = pytest.importorskip("PIL.Image")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Brighter(Transform):
    """A transform of a user's own."""

    is_random = True

    def image(self, image, rng):
        return np.clip(image.astype(np.int32) + int(rng.integers(40)), 0, 255).astype(np.uint8)


CHAINS = {
    "photographs": [RandomResizedCrop(24), RandomHorizontalFlip(), Normalize(MEAN, STD), ToCHW()],
    "plain": [CenterCrop(20), ToCHW()],
    "own": [RandomCrop(20), Brighter(), RandomHorizontalFlip(), Normalize(0.5, 0.2), ToCHW()],
    "twice": [CenterCrop(20), Normalize(MEAN, STD), Normalize(0.1, 3, 1), ToCHW()],
    "no layout": [CenterCrop(20), Normalize(MEAN, STD)],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """40 JPEGs of several sizes; two are cut off."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for label in range(4):
        (root / f"class{label}").mkdir()
        for i in range(10):
            h, w = rng.integers(24, 60, 2)
            file = io.BytesIO()
            pixels = np.kron(rng.integers(0, 256, (h // 4 + 1, w // 4 + 1, 3)), np.ones((4, 4, 1)))[:h, :w]
            Pillow.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=95)
            data = file.getvalue()
            (root / f"class{label}" / f"{i}.jpg").write_bytes(data[:-40] if (label, i) in ((1, 3), (3, 9)) else data)
    return root


def folder(root, chain):
    return ImageFolder(root, Compose(CHAINS[chain]), on_corrupt="skip")


def one_by_one(dataset, indices, seed, epoch):
    """The reference: each example alone, its mirrored image a view, its numbers by Normalize's formula in float32."""
    images_, labels = [], []
    for i in indices:
        if dataset.path(i).endswith(("class1/3.jpg", "class3/9.jpg")):
            continue
        image, label = dataset.get_raw(i)
        rng = generator(seed, "augment", epoch, i)
        for t in dataset.transform.transforms:
            if isinstance(t, RandomHorizontalFlip):
                image = image[:, ::-1] if rng.random() < t.p else image
            elif isinstance(t, Normalize):
                factor = (1 / (t.scale * t.std)).astype(np.float32)
                image = image.astype(np.float32) * factor - (t.mean / t.std).astype(np.float32)
            elif isinstance(t, ToCHW):
                image = image.astype(np.float32).transpose(2, 0, 1)
            else:
                image = t.image(image, rng)
        images_.append(image)
        labels.append(label)
    return np.stack(images_), np.array(labels)


MAKERS = {
    "serial": SerialIterator,
    "1 thread": lambda *a, **k: MultithreadIterator(*a, n_threads=1, **k),
    "2 threads": lambda *a, **k: MultithreadIterator(*a, n_threads=2, **k),
    "4 threads": lambda *a, **k: MultithreadIterator(*a, n_threads=4, **k),
    "1 worker": lambda *a, **k: MultiprocessIterator(*a, n_processes=1, **k),
    "2 workers": lambda *a, **k: MultiprocessIterator(*a, n_processes=2, **k),
    "4 workers": lambda *a, **k: MultiprocessIterator(*a, n_processes=4, **k),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("make", [m for m in MAKERS if "worker" not in m])
def test_a_batch_is_its_examples_one_by_one(root, chain, make):
    dataset, indices = folder(root, chain), []
    with MAKERS[make](dataset, 15, seed=5, last="short") as iterator:
        for k in range(6):
            batch = iterator.next()
            got = batch.arrays if isinstance(batch, Batch) else concat_examples(batch)
            expected = one_by_one(dataset, iterator.indices, 5, k // 3)
            assert iterator.num_read == len(expected[1]) == len(batch)
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
            indices += iterator.indices.tolist()
        assert sorted(indices) == sorted([*range(40)] * 2)
        assert len(iterator.skipped) == 2 and iterator.num_skipped == 4


@pytest.mark.programs
@pytest.mark.parametrize("make", [m for m in MAKERS if "worker" in m])
def test_processes_make_the_same_numbers(root, make):
    dataset = folder(root, "photographs")
    with (
        MAKERS[make](dataset, 15, seed=5, last="short") as iterator,
        SerialIterator(dataset, 15, seed=5, last="short") as serial,
    ):
        for _ in range(6):
            got, expected = iterator.next(), serial.next()
            assert got._arrays[0].dtype == np.uint8  # a quarter of the bytes in the pipe
            for a, b in zip(got.arrays, expected.arrays, strict=True):
                assert np.array_equal(a, b) and a.strides == b.strides


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_converter_casts_in_the_same_pass(root, dtype):
    dataset = folder(root, "photographs")
    x, t = converter(dtype)(SerialIterator(dataset, 8, seed=1).next(), None)
    y, u = SerialIterator(dataset, 8, seed=1).next().arrays
    assert x.dtype == dtype and t.dtype == np.int32
    assert np.array_equal(x, y.astype(dtype)) and np.array_equal(t, u)
    assert x.strides[1] == x.itemsize  # channels-last


def test_without_opencv_the_numbers_are_the_same(root, monkeypatch):
    chain = [CenterCrop(20), RandomHorizontalFlip(), Normalize(MEAN, STD), ToCHW()]
    expected = SerialIterator(ImageFolder(root, Compose(chain), on_corrupt="skip"), 12, seed=3).next().arrays
    monkeypatch.setattr(images, "resizer", lambda: "numpy")
    got = SerialIterator(ImageFolder(root, Compose(chain), on_corrupt="skip"), 12, seed=3).next().arrays
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [None, np.float16, np.float64])
def test_a_table_holds_what_the_formula_gives(channels, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (3, 5, 7, channels), np.uint8)
    mean, std = rng.random(channels), 0.1 + rng.random(channels)
    found = Finisher([Normalize(mean, std), ToCHW()])(x, dtype)
    factor, shift = (1 / (255 * std)).astype(np.float32), (mean / std).astype(np.float32)
    expected = (x * factor - shift).astype(dtype or np.float32).transpose(0, 3, 1, 2)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


class Grey(Normalize):
    """Mixes channels: no table of single values can hold it."""

    def image(self, image, rng):
        return np.repeat(image.mean(-1, keepdims=True), image.shape[-1], -1).astype(np.float32)


def test_what_mixes_channels_is_no_table():
    x = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    found = Finisher([Grey(0, 1), ToCHW()])(x)
    assert np.array_equal(found, np.repeat(x.mean(-1)[:, None], 3, 1).astype(np.float32))


@pytest.mark.parametrize("make", ["serial", "2 threads"])
def test_batches_that_are_kept_are_left_alone(root, make):
    """Finished or not, whole, in part, or one example alone."""
    dataset = folder(root, "photographs")
    kept, copies = [], []
    with MAKERS[make](dataset, 6, seed=2) as iterator:
        for k in range(20):
            batch = iterator.next()
            one = [batch._arrays[0], batch._arrays[0][:1], batch[1:3], batch][k % 4]
            kept.append(one)
            raw = one._arrays[0] if isinstance(one, Batch) else one
            copies.append(raw.copy())
    for one, copy in zip(kept, copies):
        assert np.array_equal(one._arrays[0] if isinstance(one, Batch) else one, copy)


def test_memory_is_used_again():
    addresses = set()
    for _ in range(10):
        a = reused.empty((4, 64, 64, 3), np.uint8)
        addresses.add(a.ctypes.data)
        del a
    assert len(addresses) == 1
    held = [reused.empty((4, 64, 64, 3), np.uint8) for _ in range(6)]
    assert len({a.ctypes.data for a in held}) == 6


def test_an_unfinished_batch_travels_and_is_cut(root):
    batch = SerialIterator(folder(root, "photographs"), 9, seed=4).next()
    copy, part = pickle.loads(pickle.dumps(batch, protocol=5)), batch[2:5]
    assert (len(copy), len(part)) == (9, 3)
    x, t = batch.arrays
    assert np.array_equal(copy.arrays[0], x) and np.array_equal(part.arrays[0], x[2:5])
    assert np.array_equal(part[0][0], x[2]) and part[0][1] == t[2]


class Bright(RandomHorizontalFlip):
    """Of a user who knows nothing of rows in batches."""

    def image(self, image, rng):
        return np.maximum(super().image(image, rng), 9)


@pytest.mark.parametrize(
    "members",
    [
        [RandomResizedCrop(20), RandomHorizontalFlip(0.5)],
        [RandomHorizontalFlip(0.5), RandomResizedCrop(20)],
        [Resize((20, 20)), RandomHorizontalFlip(1), RandomHorizontalFlip(0.5)],
        [CenterResizedCrop(20), RandomResizedCrop(20), CenterResizedCrop(20, 1.0)],
        [RandomResizedCrop(20), CenterCrop(20), RandomHorizontalFlip(1)],
        [RandomResizedCrop(20), Bright()],
        [Bright(), RandomResizedCrop(20)],
        [Resize(20), RandomHorizontalFlip(1)],
        [CenterCrop(20), RandomHorizontalFlip(1)],
    ],
    ids=lambda members: ", ".join(type(m).__name__ for m in members),
)
@pytest.mark.parametrize("resizer", ["opencv", "numpy"])
def test_images_written_into_the_batch_are_those_made_alone(root, monkeypatch, resizer, members):
    monkeypatch.setattr(images, "resizer", lambda: resizer)
    chain = Compose([*members, ToCHW()])
    dataset = ImageFolder(root, chain, on_corrupt="skip", cache=False)
    kept = [i for i in range(40) if i not in (13, 39)]
    batch = dataset.get_batch(np.array(kept), 3, 1, [])
    for i, (image, label) in zip(kept, batch, strict=True):
        alone, rng = dataset.get_raw(i), generator(3, "augment", 1, i)
        for t in members:
            alone = t(alone, rng)
        assert np.array_equal(image, alone[0].transpose(2, 0, 1)) and label == alone[1]


def test_every_image_but_the_first_is_given_its_place_in_the_batch():
    """The first one says how large they are."""
    given = []

    class Doubled(Transform):
        is_random = False

        def image(self, image, rng, out=None):
            given.append(out)
            return np.multiply(image, 2, out=out)

    images = [np.full((4, 5, 3), i, np.uint8) for i in range(3)]
    batch = transform_batch(Compose([Doubled(), ToCHW()]), enumerate(images), 3, 0, 0, [])
    assert given[0] is None
    assert all(np.shares_memory(out, given[1].base) for out in given[1:])
    assert [image[0, 0, 0] for image in batch] == [0, 2, 4]


def test_memory_of_decoded_images_is_used_again_only_where_nothing_keeps_it(root):
    """A transform of the user's that keeps what it sees, and one that is handed the image after a resize."""
    seen = []

    def keep(example, rng):
        seen.append(example[0])
        return example

    chains = ([keep, CenterCrop(20)], [Resize(30), keep, CenterCrop(20)], [CenterCrop(20)], [])
    for chain in chains:
        seen.clear()
        dataset = ImageFolder(root, Compose([*chain, ToCHW()]), on_corrupt="skip")
        batch = dataset.get_batch(np.arange(8), 0, 0, [])
        copies = [image.copy() for image in seen]
        kept = [np.array(example[0]) for example in batch]
        ImageFolder(root, Compose([RandomResizedCrop(20), ToCHW()]), on_corrupt="skip").get_batch(
            np.arange(20, 39), 0, 0, []
        )
        assert all(np.array_equal(a, b) for a, b in zip(seen, copies, strict=True))
        assert all(np.array_equal(a[0], b) for a, b in zip(batch, kept, strict=True))
    for data in (b"", b"hello", dataset.index.read(13), b"\xff\xd8\xff" + bytes(50) + b"\xff\xd9"):
        with pytest.raises(images.ImageDecodeError):
            images.Encoded(data)


def test_an_image_that_fails_in_the_transform_is_left_out_too(root, monkeypatch):
    """Where the header is fine, only the decoder knows better, and it runs when the crop asks for pixels."""

    def decode(data, *args, **options):
        if data == dataset.index.read(5):
            raise images.ImageDecodeError("no decoder can read it")
        return images_decode(data, *args, **options)

    images_decode = images.decode
    chain = Compose([RandomResizedCrop(20), ToCHW()])
    dataset = ImageFolder(root, chain, on_corrupt="skip")
    wanted = dataset.get_batch(np.array([2, 3, 8]), 0, 0, [])
    monkeypatch.setattr(images, "decode", decode)
    monkeypatch.setattr(images.Encoded, "_decoded", lambda self, bottom: None)
    skipped = []
    batch = dataset.get_batch(np.array([2, 3, 5, 8]), 0, 0, skipped)
    assert skipped == [f"corrupt image file {dataset.path(5)}: no decoder can read it"]
    assert all(np.array_equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(batch, wanted, strict=True))
    with pytest.raises(CorruptExampleError, match=rf"corrupt image file .*{dataset.index.name(5)}: no decoder"):
        ImageFolder(root, chain, on_corrupt="error").get_batch(np.array([2, 3, 5, 8]), 0, 0, [])


def test_fast_decoding_is_close_and_the_same_for_everyone(root):
    simplejpeg = pytest.importorskip("simplejpeg")
    chain = Compose([RandomResizedCrop(20), ToCHW()])
    exact, fast = (ImageFolder(root, chain, on_corrupt="skip", decode=kind) for kind in ("exact", "fast"))
    assert pickle.loads(pickle.dumps(fast)).decode == "fast"
    jpegs = [i for i in range(len(fast)) if fast.index.read(i).startswith(b"\xff\xd8") and i != 13]
    apart = []
    for i in jpegs[:8]:
        plain = simplejpeg.decode_jpeg(fast.index.read(i), "RGB", fastdct=True, fastupsample=True, strict=False)
        assert np.array_equal(fast.get_raw(i)[0], plain)
        apart.append(np.abs(exact.get_raw(i)[0].astype(int) - plain).mean())
    assert max(apart) > 0  # so the option is in use; these images are noise, and a smooth one is close
    y, x = np.mgrid[:64, :96]
    smooth = images.encode_jpeg(np.stack([2 * x, 3 * y, x + y], 2).astype(np.uint8), 90)
    assert np.abs(images.decode(smooth).astype(int) - images.decode(smooth, fast=True)).mean() < 3
    serial, threads = (
        np.concatenate([np.stack([image for image, _ in batch]) for batch in iterator])
        for iterator in (
            SerialIterator(fast, 8, repeat=False, seed=3),
            MultithreadIterator(fast, 8, repeat=False, seed=3, n_threads=2),
        )
    )
    assert np.array_equal(serial, threads)
    with pytest.raises(ValueError, match="expected decode 'exact' or 'fast', got 'quick'"):
        ImageFolder(root, decode="quick")


def test_a_resize_that_changes_nothing_gives_memory_of_its_own(tmp_path):
    seen = []

    def keep(example, rng):
        seen.append((example[0], example[0].copy()))
        return example

    dataset = ImageFolder(class_folders(tmp_path), Compose([Resize((24, 32)), keep, ToCHW()]))
    dataset.get_batch(np.arange(5), 0, 0, [])
    assert len({copy.tobytes() for _, copy in seen}) == 5
    assert all(np.array_equal(image, copy) for image, copy in seen)
