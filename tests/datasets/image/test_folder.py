"""Image folders: classes, corrupt files, the cache, and CIFAR-10 where it is at hand."""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets import (
    ImageDataset,
    ImageFolder,
    LabeledImageDataset,
    Resize,
    SubDataset,
    check_same_classes,
    get_cifar10_folders,
    get_image_folders,
)
from dbrdist.datasets.image import folder
from dbrdist.datasets.image.folder import DatasetError, _ImageCache
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.errors import CorruptExampleError
from dbrdist.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from tests.datasets.image_files import jpeg
from tests.each import each
from tests.warm import ROOT

Pillow = pytest.importorskip("PIL.Image", reason="needs Pillow to write test images")
DATA = Path(os.environ.get("DBRDIST_DATA", ROOT.parent / "shared" / "data"))


def write(path, value, size=(6, 8), channels=3):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((*size, channels), value, np.uint8)
    Pillow.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes with 3 and 2 PNGs, each filled with its own value, and files that are no images."""
    for k, name in enumerate(["ant/a.png", "ant/b.PNG", "ant/c.png", "bee/d.png", "bee/e.png"]):
        write(tmp_path / name, 10 * (k + 1))
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "readme.txt").write_text("no class")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_classes_are_sorted_folders_and_files_follow(root):
    data = ImageFolder(root)
    assert data.classes == ["ant", "bee"]
    assert len(data) == 5
    assert [int(label) for _, label in data] == [0, 0, 0, 1, 1]
    image, label = data[3]
    assert (image.shape, image.dtype, label.dtype) == ((3, 6, 8), np.float32, np.int32)
    assert [float(x[0, 0, 0]) for x, _ in data] == [10, 20, 30, 40, 50]
    assert data.path(1).endswith("ant/b.PNG")


@pytest.mark.parametrize("cache", [False, True])
def test_the_cache_changes_nothing(root, cache):
    data = ImageFolder(root, cache=cache)
    for _ in range(2):
        x, y = concat_examples(next(SerialIterator(data, 5, shuffle=False)))
        assert x[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
        assert y.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("cache", [False, True])
def test_a_transform_that_changes_its_image_in_place_changes_no_other_epoch(root, cache):
    def invert(example, rng):
        image, label = example
        np.subtract(255, image, out=image)
        return image, label

    data, plain = ImageFolder(root, invert, cache=cache), ImageFolder(root, lambda example, rng: example)
    for epoch in range(3):
        np.testing.assert_array_equal(data.example_at(0, 0, epoch)[0], 255 - plain[0][0])


def test_the_cache_decodes_once(root):
    data = ImageFolder(root, cache=True)
    list(SerialIterator(data, 5, repeat=False))
    shutil.rmtree(root / "ant")
    assert float(data[0][0][0, 0, 0]) == 10
    with pytest.raises(CorruptExampleError, match=r"a\.png"):
        pickle.loads(pickle.dumps(data))[0]  # a copy for another process starts with an empty cache


def test_the_cache_wants_images_of_one_size(root):
    write(root / "bee" / "f.png", 60, size=(7, 8))
    data = ImageFolder(root, cache=True)
    with pytest.raises(
        ValueError, match=r"ant/a\.png has \(6, 8, 3\), .*bee/f\.png has \(7, 8, 3\); resize them with prep"
    ):
        list(data)
    assert len(list(ImageFolder(root, cache=True, prepare=Resize((4, 4))))) == 6


def test_the_cache_remembers_what_was_put():
    cache = _ImageCache(3)
    cache.put(1, np.ones((2, 2, 3), np.uint8), str)
    assert cache.get(0) is None and cache.get(1).sum() == 12


def corrupt(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("name", ["ant/broken.jpg", "ant/b.png"])
def test_a_corrupt_file_is_named(root, name):
    write(root / name, 99)
    corrupt(root / name)
    data = ImageFolder(root)
    with pytest.raises(CorruptExampleError, match=f"corrupt image file .*{name}: "):
        list(SerialIterator(data, 2, repeat=False))


@pytest.mark.parametrize(
    "make", [SerialIterator, MultithreadIterator, pytest.param(MultiprocessIterator, marks=pytest.mark.slow)]
)
def test_skipped_files_are_left_out_and_counted(root, make):
    write(root / "ant" / "broken.jpg", 99)
    corrupt(root / "ant" / "broken.jpg")
    data = ImageFolder(root, on_corrupt="skip")
    options = {"n_processes": 1} if make is MultiprocessIterator else {}
    with make(data, 4, shuffle=False, last="short", **options) as it:
        batches = [next(it) for _ in range(4)]
        assert [len(b) for b in batches] == [3, 2, 3, 2]
        assert [float(x[0, 0, 0]) for b in batches[:2] for x, _ in b] == [10, 20, 30, 40, 50]
        assert it.num_skipped == 2
        assert all("broken.jpg" in text for text in it.skipped)
        assert (it.epoch, it.num_samples_global) == (2, 2)
    with pytest.raises(CorruptExampleError, match=r"broken\.jpg"):
        data[2]


def test_skipping_passes_through_a_subset(root):
    write(root / "ant" / "broken.jpg", 99)
    corrupt(root / "ant" / "broken.jpg")
    part = SubDataset(ImageFolder(root, on_corrupt="skip"), 2, 5)
    it = SerialIterator(part, 3, repeat=False, shuffle=False)
    assert [float(x[0, 0, 0]) for x, _ in next(it)] == [30, 40]
    assert it.num_skipped == 1


def test_a_batch_of_corrupt_files_alone_is_empty_with_the_right_shape(root):
    for name in ("a.png", "b.PNG"):
        corrupt(root / "ant" / name)
    it = SerialIterator(ImageFolder(root, on_corrupt="skip"), 2, shuffle=False)
    assert [a.shape for a in concat_examples(next(it))] == [(0, 3, 6, 8), (0,)]
    assert it.num_skipped == 2


def test_a_dataset_of_corrupt_files_alone_is_an_error(root):
    for path in [*root.glob("*/*.png"), *root.glob("*/*.PNG")]:
        corrupt(path)
    it = SerialIterator(ImageFolder(root, on_corrupt="skip"), 2)
    with pytest.raises(CorruptExampleError, match="at least one readable example, but all were skipped; the first: "):
        next(it)


def test_class_folders_that_differ_are_named(tmp_path):
    for name in ["train/ant/a.png", "train/bee/b.png", "test/ant/a.png", "test/wasp/c.png"]:
        write(tmp_path / name, 1)
    with pytest.raises(
        ValueError, match=r"in .*/train and in .*/test; only in the first: bee; only in the second: wasp"
    ):
        get_image_folders(tmp_path)
    with pytest.raises(ValueError, match="only in the second: wasp"):
        ImageFolder(tmp_path / "test", classes=["ant", "bee"])


def test_long_lists_of_classes_are_shortened():
    with pytest.raises(ValueError, match=r"c00, .*, c09 and 5 more; only in the second: none"):
        check_same_classes([f"c{k:02}" for k in range(15)], [], "a", "b")


def test_folders_that_are_missing_or_empty_are_named(root):
    with pytest.raises(FileNotFoundError, match=r"but .*/nowhere is not a folder"):
        ImageFolder(root / "nowhere")
    with pytest.raises(ValueError, match=r"one folder of images per class in .*/ant, found none"):
        ImageFolder(root / "ant")
    (root / "cow").mkdir()
    with pytest.raises(ValueError, match=r"expected images .* in the class folder .*/cow, found none"):
        ImageFolder(root)
    with pytest.raises(ValueError, match="'error' or 'skip', got 'ignore'"):
        ImageFolder(root, on_corrupt="ignore")


def test_image_lists_keep_channels(root):
    write(root / "gray.png", 70, channels=1)
    (root / "list.txt").write_text("ant/a.png\ngray.png\n")
    data = ImageDataset(str(root / "list.txt"), root=root)
    assert [x.shape for x in data] == [(3, 6, 8), (1, 6, 8)]
    assert ImageDataset(["gray.png"], root, np.uint8)[0].dtype == np.uint8
    (root / "pairs.txt").write_text("ant/a.png 3\nbee/d.png 5\n")
    labeled = LabeledImageDataset(str(root / "pairs.txt"), root)
    assert [(float(x[0, 0, 0]), int(y), y.dtype) for x, y in labeled] == [(10, 3, np.int32), (40, 5, np.int32)]
    assert LabeledImageDataset([("gray.png", 2)], root)[0][1] == 2
    write(root / "a gray one.png", 90, channels=1)
    (root / "pairs.txt").write_text("a gray one.png 7\n bee/d.png \t -1 \n")
    labeled = LabeledImageDataset(str(root / "pairs.txt"), root)
    assert [(float(x[0, 0, 0]), int(y)) for x, y in labeled] == [(90, 7), (40, -1)]
    (root / "pairs.txt").write_text("ant/a.png 3\nbee/d.png\n")
    with pytest.raises(
        ValueError, match=r"pairs\.txt:2: expected a path, a blank and an integer label, got 'bee/d.png'"
    ):
        LabeledImageDataset(str(root / "pairs.txt"), root)


# ---- real photographs -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """The first 20 training and 10 test images of each class of CIFAR-10."""
    archive = DATA / "cifar10-jpeg.tar"
    if not archive.exists():
        pytest.skip(f"needs {archive}; set DBRDIST_DATA to the folder that has cifar10-jpeg.tar")
    folder = tmp_path_factory.mktemp("cifar10")
    counts = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            key = parts[-3:-1]
            if member.isfile() and len(key) == 2 and counts.setdefault(key, 0) < (20 if key[0] == "train" else 10):
                counts[key] += 1
                member.name = "/".join(parts[-3:])
                tar.extract(member, folder, filter="data")
                if sum(counts.values()) == 300:  # the archive has 60,000
                    break
    return folder


@pytest.mark.slow
def test_cifar10(cifar):
    train, test = get_cifar10_folders(cifar)
    assert (len(train), len(test)) == (200, 100)
    assert (
        train.classes
        == test.classes
        == (["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
    )
    x, y = concat_examples(next(SerialIterator(test, 100, shuffle=False)))
    assert (x.shape, x.dtype) == ((100, 3, 32, 32), np.float32)
    assert np.bincount(y).tolist() == [10] * 10
    assert np.all(np.abs(x.mean((0, 2, 3))) < 0.3) and np.all(np.abs(x.std((0, 2, 3)) - 1) < 0.2)


@pytest.mark.programs
def test_cifar10_augmentation_is_the_same_for_serial_threads_processes_and_ranks(cifar):
    train, _ = get_cifar10_folders(cifar)
    options = {"seed": 3, "last": "short"}
    with (
        MultithreadIterator(train, 64, n_threads=2, **options) as threads,
        MultiprocessIterator(train, 64, n_processes=2, **options) as processes,
    ):
        serial = SerialIterator(train, 64, **options)
        ranks = [SerialIterator(train, 64, rank=r, size=3, **options) for r in range(3)]
        for _ in range(5):
            x, y = concat_examples(next(serial))
            for other in (concat_examples(next(threads)), concat_examples(next(processes))):
                assert np.array_equal(x, other[0]) and np.array_equal(y, other[1])
            parts = [concat_examples(next(r)) for r in ranks]
            assert np.array_equal(x, np.concatenate([p[0] for p in parts]))


def test_a_damaged_image_is_named(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8\xff no image")
    with pytest.raises(folder.CorruptExampleError, match=f"corrupt image file {path}"):
        folder.read_image(path)
    with pytest.raises(folder.CorruptExampleError, match=r"expected a readable image file: .*b\.jpg"):
        folder.read_image(tmp_path / "b.jpg")


@each(n=[0, 1, 8, 9, 10, 13])
def test_ten_classes_are_named_at_most(n):
    names = [f"class-{i:02}" for i in range(n)]
    with pytest.raises(ValueError, match="the same class folders in one and in two") as caught:
        folder.check_same_classes([*names, "both", "last"], ["both"], "one", "two")
    shown = [*names, "last"]
    words = ", ".join(shown[:10]) + (f" and {n - 9} more" if n > 9 else "")
    assert f"only in the first: {words}; only in the second: none; labels" in str(caught.value)
    with pytest.raises(ValueError, match="only in the first: none; only in the second: other;"):
        folder.check_same_classes(["a"], ["other", "a"], "one", "two")


def test_classes_that_look_alike_are_told_apart():
    """A macOS writes accents as characters of their own; a blank at an end comes from a script."""
    for first, second, words in (
        ("caf\xe9", "cafe\u0301", r"only in the first: 'caf\xe9'; only in the second: 'cafe\u0301';"),
        ("red", "red ", "only in the first: 'red'; only in the second: 'red ';"),
        ("red", "Red", "only in the first: red; only in the second: Red;"),
    ):
        with pytest.raises(ValueError, match="the same class folders") as caught:
            folder.check_same_classes([first, "both"], ["both", second], "one", "two")
        assert words in str(caught.value)


def test_an_image_of_another_size_is_named_with_the_first():
    cache = _ImageCache(5)
    cache.put(3, np.ones((2, 4, 3), np.uint8), "image {}".format)
    assert cache.get(2) is None and cache.get(3).sum() == 24
    words = r"image 3 has \(2, 4, 3\), image 1 has \(2, 3, 3\)"
    with pytest.raises(DatasetError, match=words):
        cache.put(1, np.ones((2, 3, 3), np.uint8), "image {}".format)
    assert cache.get(1) is None


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
