"""Parts of decoding, looking up and changing images by themselves, against their definitions."""

from __future__ import annotations

import importlib
import sys
import types

import numpy as np
import pytest
from image_files import jpeg

from dbrdist import datasets
from dbrdist.datasets import Normalize, ToCHW, folder, images, pixels, shards, transforms
from dbrdist.datasets.folder import DatasetError, _ImageCache
from dbrdist.datasets.transforms import Transform
from tests.each import each

BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2
END = b"\xff\xd9"


def segment(marker, body=b"", length=None):
    return bytes([0xFF, marker]) + (len(body) + 2 if length is None else length).to_bytes(2) + body


def frame(factors=(0x22, 0x11, 0x11), kind=BASELINE, num_components=None, height=40, width=56):
    """The header of a frame: precision, height, width, and number, factors and table of each component."""
    components = b"".join(bytes([k + 1, factor, 0]) for k, factor in enumerate(factors))
    number = len(factors) if num_components is None else num_components
    return segment(kind, bytes([8]) + height.to_bytes(2) + width.to_bytes(2) + bytes([number]) + components)


def scan(num_components=3, marker=0xDA):
    return segment(marker, bytes([num_components, *2 * num_components * [0], 0, 63, 0]))


# ---- the header of a JPEG


@each(
    **{"head, following, more": [
        (frame(), scan(), 2),
        (frame(kind=EXTENDED), scan(), 2),
        (frame((0x21, 0x12, 0x11)), scan(), 2),
        (frame((0x41, 0x11, 0x13)), scan(), 3),
        (frame((0x4F,)), scan(1), 15),
        (frame((0x11, 0x14), num_components=1), scan(1), 1),
        (frame((), num_components=0), scan(0), 0),
        (frame(kind=PROGRESSIVE), scan(), None),
        (frame(kind=0xC3), scan(), None),
        (frame(), scan(2), None),
        (frame((0x11,)), scan(3), None),
        (frame(), scan(marker=0xDB), None),
        (frame(kind=PROGRESSIVE), scan(2, marker=0xDB), None),
    ]}
)  # fmt: skip
def test_how_many_rows_of_a_jpeg_are_needed(head, following, more):
    for garbage in (b"", b"\1\2\3\4\5"):
        data = garbage + head + following
        found = images._last_row(data, len(garbage), len(garbage) + len(head), 7)
        assert found == (0xFFFF if more is None else 7 + more)


@each(marker=range(0xC0, 0xD0))
def test_the_size_is_that_of_a_frame(marker):
    """ITU-T T.81, table B.1: C4, C8 and CC mark tables, an extension and arithmetic coding."""
    data = b"\xff\xd8" + segment(0xE0, bytes(5)) + frame(kind=marker, height=300, width=2) + scan() + END
    place = 0 if marker in (0xC4, 0xC8, 0xCC) else 2 + 9
    assert images._check_jpeg(data) == (place, 2 + 9 + 19)
    assert images._size(data, place) == ((300, 2) if place else (0, 0))


def test_segments_of_a_jpeg_are_gone_through_to_the_scan():
    start, body = b"\xff\xd8", bytes(20)
    first = segment(0xE1, body)
    for between in (b"", b"\xff", b"\xff\xff\xff", first, segment(0x00, body), segment(0x01)):
        data = start + first + between + frame() + scan() + body + END
        place = 2 + len(first) + len(between)
        assert images._check_jpeg(data) == (place, place + len(frame())), between
    for stop in (b"\xfe\xff\0\4\0\0", b"\0\0\0\4\0\0", scan()):
        assert images._check_jpeg(start + first + stop + frame() + body + END) == (0, 2 + len(first))
    two = start + frame(height=1) + frame(height=2) + scan() + END
    assert images._size(two, images._check_jpeg(two)[0]) == (2, 56)


def test_the_end_of_a_jpeg_stands_behind_its_scan():
    start = b"\xff\xd8" + frame()
    thumbnail = segment(0xE1, END + bytes(20))
    assert images._check_jpeg(start + thumbnail + scan() + END)[0] == 2
    for data in (start + thumbnail + scan(), start + segment(0xE1, bytes(30), length=60) + END):
        with pytest.raises(images.ImageDecodeError, match=f"cut short: its {len(data)} bytes have no end marker"):
            images._check_jpeg(data)


def test_a_frame_has_its_size_and_its_number_of_components():
    """What is read of it lies within the file."""
    short = segment(BASELINE, bytes(3), length=2)
    for num_behind, is_read in ((3, True), (2, False)):
        data = b"\xff\xd8" + segment(0xE0, bytes(4)) + short + bytes(num_behind - 2) + END
        assert images._check_jpeg(data)[0] == (10 if is_read else 0)


# ---- tables


needs_opencv = pytest.mark.skipif(images.resizer() != "opencv", reason="OpenCV is missing")


@needs_opencv
@each(dtype=["f2", "f4", "f8", "u2", "i4"], channels=[1, 2, 3, 4])
def test_values_are_looked_up(dtype, channels):
    rng = np.random.default_rng(channels)
    table = rng.integers(0, 2000, (256, channels)).astype(dtype)
    for shape in ((5, 7), (2, 5, 7), (2, 1, 3, 2)):
        x = rng.integers(0, 256, (*shape, channels), np.uint8)
        found = images.lookup(x, table)
        assert found.dtype == table.dtype
        np.testing.assert_array_equal(found, table[x, np.arange(channels)])


@needs_opencv
@each(reason=["five channels", "no values", "a stride", "one byte", "sixteen bytes", "no OpenCV"])
def test_what_is_not_looked_up(reason, monkeypatch):
    x, table = np.zeros((4, 6, 3), np.uint8), np.ones((256, 3), np.float32)
    assert images.lookup(x, table) is not None
    if reason == "five channels":
        x, table = np.zeros((4, 6, 5), np.uint8), np.ones((256, 5), np.float32)
    elif reason == "no OpenCV":
        monkeypatch.setattr(images, "resizer", lambda: "numpy")
        monkeypatch.setattr(images, "_cv2", None)
    else:
        x = {"no values": x[:0], "a stride": x[:, ::2]}.get(reason, x)
        table = table.astype({"one byte": "u1", "sixteen bytes": "c16"}.get(reason, "f4"))
    assert images.lookup(x, table) is None


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
          "RandomResizedCrop"]  # fmt: skip
PIXELWISE = ["Normalize", "ToCHW"]


def test_transforms_say_what_they_are():
    """Those that draw get numbers to draw from; those of single pixels take whole batches."""
    kinds = [kind for kind in vars(datasets).values() if isinstance(kind, type) and issubclass(kind, Transform)]
    assert sorted(kind.__name__ for kind in kinds if kind.is_random) == RANDOM
    assert sorted(kind.__name__ for kind in kinds if kind.is_pixelwise) == PIXELWISE
    assert not Transform.is_random and not Transform.is_pixelwise and len(kinds) > 9


# ---- small images, and caches of images


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


def test_an_image_of_another_size_is_named_with_the_first():
    cache = _ImageCache(5)
    cache.put(3, np.ones((2, 4, 3), np.uint8), "image {}".format)
    assert cache.get(2) is None and cache.get(3).sum() == 24
    words = r"image 3 has \(2, 4, 3\), image 1 has \(2, 3, 3\)"
    with pytest.raises(DatasetError, match=words):
        cache.put(1, np.ones((2, 3, 3), np.uint8), "image {}".format)
    assert cache.get(1) is None


@each(size=[(4, 3), (2, 6), (2, 3), (1, 1)], way=["opencv", "numpy"])
def test_means_over_areas_of_one_side_or_of_both(size, way):
    image = np.random.default_rng(3).integers(0, 256, (4, 6, 3), np.uint8)
    (h, w), (height, width) = image.shape[:2], size
    expected = image.reshape(height, h // height, width, w // width, 3).mean((1, 3))
    if way == "opencv" and images.resizer() != "opencv":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "resizer", lambda: way)
        found = images.resize(image, height, width, "area")
    np.testing.assert_allclose(found, expected, atol=0.51)


def test_cifar10_in_folders_is_normalised_and_changed_at_random(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "a.jpg").write_bytes(jpeg(len(name + part), 32, 32))
    train, test = folder.get_cifar10_folders(tmp_path)
    plain, same = folder.get_cifar10_folders(tmp_path, augment=False, cache=False)
    assert train._cache is not None and test._cache is not None and plain._cache is same._cache is None
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    for data, index in ((test, 1), (same, 0), (plain, 1)):
        expected = (data.get_raw(index)[0] / 255 - mean) / std
        np.testing.assert_allclose(data[index][0], expected.transpose(2, 0, 1), atol=1e-5)
    crop, flip = train.transform.transforms[:2]
    assert (crop.size, crop.padding, flip.p) == ((32, 32), 4, 0.5)
    assert len({train.example_at(0, seed, 0)[0].tobytes() for seed in range(9)}) > 5


# ---- names in shards


def test_images_of_a_class_have_different_names_in_its_shards(tmp_path):
    names = ["a.jpg", "a.png", "b.c.jpg", "b-c.jpg", "deep/a.jpg", "a.jpg"]
    index = types.SimpleNamespace(labels=[0, 0, 0, 0, 0, 1], classes=["ant", "bee"], name=names.__getitem__)
    made = shards._Shards(index, str(tmp_path), 1)
    assert [made._key(i) for i in range(6)] == [b"ant/a", b"ant/a-1", b"ant/b-c", b"ant/b-c-3", b"ant/a-4", b"bee/a"]
    assert made._keys == {b"bee/a"}  # not those of all classes, which may be many


# ---- the library of images


@each(is_there=[True, False])
def test_threads_of_the_library_are_left_to_a_program_that_has_loaded_it(is_there, tmp_path_factory):
    folder_of_fake = tmp_path_factory.mktemp("fake")
    (folder_of_fake / "cv2.py").write_text("threads = []\nsetNumThreads = threads.append\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder_of_fake))
        patch.delitem(sys.modules, "cv2", raising=False)
        if is_there:
            importlib.import_module("cv2")
        found = images._cv2.__wrapped__()
        del sys.modules["cv2"]
        assert found.__file__.startswith(str(folder_of_fake)) and found.threads == [1] * (not is_there)
