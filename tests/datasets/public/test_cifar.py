"""Tests of dbrdist.datasets.public.cifar."""

import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.dataset import download, set_dataset_root
from dbrdist.datasets import get_cifar10, get_cifar100
from tests.datasets.public.public_files import cifar10, cifar100, folder_of, python2_pickle, tar_gz
from tests.each import each

ARCHIVE = "cifar-10-python.tar.gz"


def test_labels_of_cifar_lie_within_their_classes():
    for num_classes, get, (files, _), name, key in (
        (10, get_cifar10, cifar10(), "cifar-10-batches-py/test_batch", "labels"),
        (100, get_cifar100, cifar100(), "cifar-100-python/test", "fine_labels"),
    ):
        archive = folder_of("cifar") / f"cifar-{num_classes}-python.tar.gz"
        images = np.zeros((2, 3072), np.uint8)
        files[name] = python2_pickle({"data": images, key: [0, num_classes]})
        tar_gz(archive, files)
        with pytest.raises(ValueError, match=rf"expected labels from 0 to {num_classes - 1} in {name}"):
            get()
        files[name] = python2_pickle({"data": images, key: [0, num_classes - 1]})
        tar_gz(archive, files)
        _, test = get()
        assert [int(label) for _, label in test] == [0, num_classes - 1]


def test_the_first_batch_says_whether_the_archive_is_unpacked():
    files, (train, _) = cifar10()
    tar_gz(folder_of("cifar") / ARCHIVE, files)
    second = folder_of("cifar") / "cifar-10-batches-py" / "data_batch_2"
    second.parent.mkdir()
    second.write_bytes(b"half of an archive")
    found, _ = get_cifar10()
    assert len(found) == len(train[0])


@each(member=["link", "larger", "other"])
def test_members_of_archives_that_are_not_taken(member):
    files, _ = cifar10()
    files["cifar-10-batches-py/other"] = b"x"
    path = folder_of("cifar") / ARCHIVE
    tar_gz(path, {k: v for k, v in files.items() if not k.endswith("test_batch")})
    packed = io.BytesIO(gzip.decompress(path.read_bytes()))
    with tarfile.open(fileobj=packed, mode="a") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        if member == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "data_batch_1"
            tar.addfile(info)
        at = tar.offset
    words = {"link": "test_batch in .*, which lacks it", "larger": "but .*test_batch claims 536,870,913 bytes",
             "other": "is damaged"}[member]  # fmt: skip
    data = packed.getvalue()
    if member != "link":
        info.size = (1 << 29) + (member == "larger")
        data = data[:at] + info.tobuf()
    path.write_bytes(gzip.compress(data, 1))
    with pytest.raises(ValueError, match=words):
        get_cifar10()


def test_a_pipe_in_the_place_of_an_archive_is_refused(monkeypatch):
    path = folder_of("cifar") / ARCHIVE
    os.mkfifo(path)
    monkeypatch.setattr(download, "find", lambda *_: [str(path)])
    keeps_open = os.open(path, os.O_RDWR)  # so that who opens it to read would not wait for ever
    os.write(keeps_open, b"x" * 4096)
    try:
        with pytest.raises(ValueError, match="expected a regular file, it is a named pipe"):
            get_cifar10()
    finally:
        os.close(keeps_open)


def test_images_of_cifar_in_either_shape():
    files, (train, test) = cifar10()
    tar_gz(folder_of("cifar") / ARCHIVE, files)
    for part, (x, _) in zip(get_cifar10(withlabel=False, ndim=1, scale=255.0), (train, test)):
        np.testing.assert_array_equal(part, x)
    for part, (x, _) in zip(get_cifar10(withlabel=False, scale=255.0), (train, test)):
        np.testing.assert_array_equal(part, x.reshape(-1, 3, 32, 32))


def check_cifar(found, parts):
    for data, (x, y) in zip(found, parts):
        assert [int(label) for _, label in data] == list(y) and data[0][1].dtype == np.int32
        image = data[1][0]
        assert image.shape == (3, 32, 32) and image.dtype == np.float32
        np.testing.assert_allclose(image.reshape(-1), x[1] / 255.0, rtol=1e-6)


def test_cifar10_from_the_archive_and_from_the_folder(tmp_path):
    files, parts = cifar10()
    tar_gz(folder_of("cifar") / "cifar-10-python.tar.gz", files)
    for _ in range(2):
        check_cifar(get_cifar10(), parts)
    set_dataset_root(tmp_path / "other")
    for name, data in files.items():
        (folder_of("cifar") / name).parent.mkdir(exist_ok=True)
        (folder_of("cifar") / name).write_bytes(data)
    check_cifar(get_cifar10(), parts)
    images = get_cifar10(withlabel=False, ndim=1, scale=255.0, dtype=np.float64)[1]
    np.testing.assert_allclose(images, parts[1][0])
    with pytest.raises(ValueError, match="expected ndim 1 or 3 for CIFAR-10, got 2"):
        get_cifar10(ndim=2)


def test_cifar100():
    files, parts = cifar100()
    tar_gz(folder_of("cifar") / "cifar-100-python.tar.gz", files)
    check_cifar(get_cifar100(), parts)


def test_cifar_with_keys_of_bytes():
    """As Python 3 writes the pickles again that it read with ``encoding="bytes"``."""
    files, parts = cifar10()
    for name in files:
        if "batch" in name.rpartition("/")[2]:
            batch = pickle.loads(files[name], encoding="bytes")
            assert b"data" in batch
            files[name] = pickle.dumps(batch, 2)
    tar_gz(folder_of("cifar") / "cifar-10-python.tar.gz", files)
    check_cifar(get_cifar10(), parts)


def hostile(module, name, *arguments):
    """A pickle that calls a function."""

    class Call:
        def __reduce__(self):
            return eval(name, vars(__import__(module))), arguments

    return pickle.dumps(Call(), 2)


IMAGES = np.zeros((2, 3072), np.uint8)
WRONG_CIFAR = {
    "system": (
        hostile("os", "mkdir", "made-by-the-pickle"),
        "refused the pickle in .*train: it refers to .*mkdir, which",
    ),
    "eval": (hostile("builtins", "eval", "1"), "refused the pickle .*: it refers to builtins.eval"),
    "cut": (
        python2_pickle({"data": IMAGES, "fine_labels": [0, 1]})[:-50],
        "a pickle in cifar-100-python/train that can be read: ",
    ),
    "text": (b"<html>", "a pickle in cifar-100-python/train that can be read: "),
    "list": (pickle.dumps([1], 2), "a dictionary with 'data' and 'fine_labels' as .*, got a list"),
    "keys": (python2_pickle({"data": IMAGES}), r"got one with \['data'\]"),
    "shape": (python2_pickle({"data": IMAGES[:, :5], "fine_labels": [1, 2]}), r"got uint8 of \(2, 5\)"),
    "fewer": (python2_pickle({"data": IMAGES, "fine_labels": [1]}), "expected 1 images of 3072 bytes"),
    "label": (python2_pickle({"data": IMAGES, "fine_labels": [1, 100]}), "labels from 0 to 99"),
    "negative": (python2_pickle({"data": IMAGES, "fine_labels": [1, -1]}), "labels from 0 to 99"),
    "no array": (python2_pickle({"data": "abc", "fine_labels": [1]}), "one for each label, got str"),
}


@each(kind=list(WRONG_CIFAR))
def test_hostile_pickles_are_refused_in_words(kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data, words = WRONG_CIFAR[kind]
    tar_gz(folder_of("cifar") / "cifar-100-python.tar.gz", {**cifar100()[0], "cifar-100-python/train": data})
    with pytest.raises(ValueError, match=words):
        get_cifar100()
    assert not Path("made-by-the-pickle").exists()


def test_damaged_archives_are_refused_in_words():
    archive = folder_of("cifar") / "cifar-10-python.tar.gz"
    files, _ = cifar10()
    tar_gz(archive, files)
    for data in (archive.read_bytes()[:-4000], b"", b"<html>"):
        archive.write_bytes(data)
        with pytest.raises(ValueError, match=r"expected a .tar.gz file, but .* is damaged|expected the file cifar-10"):
            get_cifar10()
    del files["cifar-10-batches-py/test_batch"]
    tar_gz(archive, files)
    with pytest.raises(ValueError, match=r"expected the file cifar-10-batches-py/test_batch in .*, which lacks it"):
        get_cifar10()


def test_random_damage_is_refused_in_words(tmp_path):
    rng = np.random.default_rng(0)
    data = python2_pickle({"data": IMAGES, "fine_labels": [1, 99]})
    num_refused = 0
    for _ in range(300):
        broken = bytearray(data)
        at = int(rng.integers(0, 200) if rng.random() < 0.8 else rng.integers(0, len(data)))
        broken[at] = rng.integers(0, 256)
        try:
            dbrdist.datasets.public.cifar._batch("a file", bytes(broken), "fine_labels", 100)
        except ValueError:
            num_refused += 1
    assert num_refused > 100
