"""From files to batches: the same numbers, whoever makes them, and memory that nobody else writes into."""

from __future__ import annotations

import io
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

from dbrdist import datasets
from dbrdist.cli.builders.build import converter
from dbrdist.core.array.random import generator
from dbrdist.datasets import (
    AugmentedDataset,
    Batch,
    ByEpoch,
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
    TupleDataset,
)
from dbrdist.datasets.image import images, transforms
from dbrdist.datasets.image.transforms import Finisher, at_epoch, transform_batch
from dbrdist.datasets.loading.base import get_batch
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.memory import reused
from dbrdist.errors import CorruptExampleError
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from tests.datasets.image_files import class_folders, picture
from tests.each import each

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


def test_center_resized_crop_is_the_middle():
    image = picture(6, 48, 64)
    assert np.array_equal(CenterResizedCrop(24, 0.5)(image), image[12:36, 20:44])
    assert CenterResizedCrop((10, 20))(image).shape == (10, 20, 3)
    assert CenterResizedCrop(8, 0.001)(picture(1, 3, 3)).shape == (8, 8, 3)


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


def test_parts_of_a_line_of_pixels_are_drawn():
    crop, rng = transforms.RandomResizedCrop(2, (0.1, 0.5), (2.0, 8.0)), np.random.default_rng(0)
    for shape, axis in (((1, 40), 1), ((40, 1), 0)):
        crop.ratio = (2.0, 40.0) if axis else (1 / 40, 0.5)
        found = [crop.window(*shape, rng) for _ in range(30)]
        assert all(w[3 - axis] == 1 and w[2 + axis] > 0 for w in found)
        assert len({w[axis] for w in found}) > 5


needs_opencv = pytest.mark.skipif(images.resizer() != "opencv", reason="OpenCV is missing")


@needs_opencv
def test_a_table_is_made_once_for_each_type(monkeypatch):
    normalize, made = Normalize([0.1, 0.2, 0.3], 0.5), []
    plain = Normalize.image
    monkeypatch.setattr(Normalize, "image", lambda self, *a: [made.append(a[0].shape), plain(self, *a)][1])
    finish = transforms.Finisher([normalize, ToCHW()])
    x = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    expected = ((x / 255 - [0.1, 0.2, 0.3]) / 0.5).transpose(0, 3, 1, 2)
    for dtype in (None, np.float16, None, np.float16):
        np.testing.assert_allclose(finish(x, dtype), expected, atol=2e-3 if dtype else 2e-6)
    assert made == [(1, 256, 3)] * 2


RANDOM = ["ColorJitter", "PCALighting", "RandAugment", "RandomCrop", "RandomErasing", "RandomHorizontalFlip",
          "RandomResizedCrop", "TrivialAugment"]  # fmt: skip
PIXELWISE = ["Normalize", "ToCHW"]


def test_transforms_say_what_they_are():
    """Those that draw get numbers to draw from; those of single pixels take whole batches."""
    kinds = [kind for kind in vars(datasets).values() if isinstance(kind, type) and issubclass(kind, Transform)]
    assert sorted(kind.__name__ for kind in kinds if kind.is_random) == RANDOM
    assert sorted(kind.__name__ for kind in kinds if kind.is_pixelwise) == PIXELWISE
    assert not Transform.is_random and not Transform.is_pixelwise and len(kinds) > 9


def numbered(h, w, c=1):
    """An image whose pixels are all different and not 0 (h * w <= 255)."""
    return np.repeat(np.arange(1, h * w + 1, dtype=np.uint8).reshape(h, w, 1), c, axis=2)


def rng(i=0):
    return generator(0, "augment", 0, i)


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_window_of_padding_alone_is_zero():
    image = np.full((3, 3, 1), 7, np.uint8)
    seen = [RandomCrop(4, padding=9)(image, rng(i)) for i in range(300)]
    padded = np.pad(image, ((9, 9), (9, 9), (0, 0)))
    windows = {padded[y : y + 4, x : x + 4].tobytes() for y in range(18) for x in range(18)}
    assert {found.tobytes() for found in seen} <= windows and any(not found.any() for found in seen)


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


class OwnFlip(RandomHorizontalFlip):
    """Of a program: it may do anything to its image."""


def test_transforms_of_the_package_change_no_image_in_place():
    """They get images of a dataset in memory as they are; transforms of a program get copies."""
    image = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    image.setflags(write=False)
    made = [
        RandomCrop(16), RandomCrop(16, 4), CenterCrop(16), CenterResizedCrop(16), RandomHorizontalFlip(0.5), Resize(16),
        Resize(20), RandomResizedCrop(16), Normalize([0.5] * 3, [0.5] * 3), ToCHW(), datasets.ColorJitter(hue=0.1),
        datasets.PCALighting(), datasets.RandomErasing(1.0), datasets.RandAugment(), datasets.TrivialAugment(),
    ]  # fmt: skip
    for transform in made:
        for seed in range(10):
            transform((image, 0), np.random.default_rng(seed))
    assert transforms.leaves_examples(Compose([*made, ByEpoch({0: made[0], 3: Compose(made)})]))
    for other in (lambda example, rng: example, OwnFlip(0.5)):
        for chain in (other, Compose([made[0], other]), ByEpoch({0: made[0], 1: other})):
            assert not transforms.leaves_examples(chain)


@each(
    **{
        "size, ratio, window": [
            ((10, 100), (1, 1), (0, 45, 10, 10)),
            ((100, 10), (1, 1), (45, 0, 10, 10)),
            ((10, 100), (2, 3), (0, 35, 10, 30)),
            ((90, 10), (0.25, 0.5), (25, 0, 40, 10)),
        ]
    }
)
def test_a_part_that_fits_nowhere_is_the_middle_with_the_nearest_ratio(size, ratio, window):
    """As torchvision has it: of all of an image, no part has a ratio (width to height) so unlike the image's."""
    change = RandomResizedCrop(24, (1, 1), ratio)
    assert change.window(*size, np.random.default_rng(0)) == window
