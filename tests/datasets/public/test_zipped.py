"""Images in zip archives are the images of the files in them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.datasets import (
    ImageDataset,
    LabeledImageDataset,
    LabeledZippedImageDataset,
    MultiZippedImageDataset,
    ZippedImageDataset,
)
from dbrdist.datasets.image import folder
from dbrdist.datasets.public import zipped
from dbrdist.errors import CorruptExampleError, DatasetError
from tests.datasets.image_files import jpeg
from tests.each import each
from tests.warm import ROOT

NAMES = [f"some/{k}.jpg" for k in (4, 0, 3, 1, 2)]


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "some").mkdir()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("some/", b"")
        for k, name in enumerate(NAMES):
            (tmp_path / name).write_bytes(jpeg(k))
            file.write(tmp_path / name, name, zipfile.ZIP_DEFLATED if k % 2 else zipfile.ZIP_STORED)
    return str(tmp_path / "a.zip")


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_images_of_an_archive(archive, tmp_path):
    data = ZippedImageDataset(archive)
    same(data, ImageDataset(NAMES, tmp_path))
    assert data.names == NAMES and data[0].shape[0] == 3 and data[0].dtype == np.float32
    assert np.array_equal(data.get_example("some/3.jpg"), data[2]) and len(data[1:3]) == 2
    assert ZippedImageDataset(archive, np.uint8)[0].dtype == np.uint8
    with dbrdist.using_config("dtype", np.float64):
        assert ZippedImageDataset(archive)[0].dtype == np.float64
    same(pickle.loads(pickle.dumps(data)), data)
    with ThreadPoolExecutor(4) as pool:
        same(list(pool.map(data.get_example, list(range(5)) * 8)), list(data) * 8)
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(KeyError, match=r"the name of a file in .*a.zip, got 'other.jpg'"):
        data.get_example("other.jpg")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_and_an_archive_that_changes(archive, tmp_path):
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(NAMES[0], jpeg(77))
    data = ZippedImageDataset(archive)
    assert not np.array_equal(data[0], data[5])
    packed = pickle.dumps(data)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("new.jpg", jpeg(7))
    with pytest.raises(DatasetError, match=r"a.zip has changed since it was opened: it holds other files"):
        pickle.loads(packed)


def test_several_archives(archive, tmp_path):
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.write(tmp_path / "some/0.jpg", "x.jpg")
    data = MultiZippedImageDataset([archive, tmp_path / "b.zip", archive], np.uint8)
    same(data, list(ImageDataset([*NAMES, "some/0.jpg", *NAMES], tmp_path, np.uint8)))
    same(pickle.loads(pickle.dumps(data)), data)
    assert len(MultiZippedImageDataset([])) == 0


def test_labeled_images(archive, tmp_path):
    (tmp_path / "labels.txt").write_text("some/3.jpg 7\nsome/0.jpg\t-1\n\nsome/3.jpg   2\n")
    data = LabeledZippedImageDataset(archive, tmp_path / "labels.txt", np.float64, np.int64)
    expected = LabeledImageDataset(str(tmp_path / "labels.txt"), tmp_path, np.float64, np.int64)
    assert [int(label) for _, label in data] == [int(label) for _, label in expected] == [7, -1, 2]
    assert data[0][1].dtype == np.int64
    same([x for x, _ in data], [x for x, _ in expected])
    (tmp_path / "labels.txt").write_text("some/3.jpg 7\nsome/9.jpg 1\n")
    with pytest.raises(ValueError, match=r"the names of files in .*a.zip, got 'some/9.jpg'"):
        LabeledZippedImageDataset(archive, tmp_path / "labels.txt")
    (tmp_path / "labels.txt").write_text("some/3.jpg\n")
    with pytest.raises(ValueError, match=r"labels.txt:1: expected a path, a blank and an integer label"):
        LabeledZippedImageDataset(archive, tmp_path / "labels.txt")


def damage(archive, kind):
    data = bytearray(Path(archive).read_bytes())
    if kind == "text":
        data = b"<html>"
    elif kind == "cut":
        data = data[:-30]
    elif kind == "crc":
        data[data.index(b"\xff\xd8") + 40] ^= 1
    elif kind == "encrypted":
        data[data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1) + 8] |= 1
    elif kind == "method":
        data[data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1) + 10] = 99
    Path(archive).write_bytes(data)


@each(kind=["text", "cut"])
def test_what_is_no_archive_is_refused(kind, tmp_path):
    path = tmp_path / f"{kind}.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.jpg", jpeg(0))
    damage(path, kind)
    with pytest.raises(DatasetError, match=rf"a zip archive, but .*{kind}.zip is damaged or another kind of file"):
        ZippedImageDataset(path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("crc", "a readable file some/4.jpg in .*: Bad CRC-32"),
        ("encrypted", "as some/4.jpg in .*a.zip, but it is encrypted"),
        ("method", "a readable file some/4.jpg in .*: That compression method is not supported"),
    ],
)
def test_damaged_members_are_named(archive, kind, words):
    damage(archive, kind)
    data = ZippedImageDataset(archive)
    with pytest.raises(CorruptExampleError, match=words):
        data[0]
    assert data[1].shape[0] == 3


def test_large_claims_and_other_files_are_refused(archive, tmp_path, monkeypatch):
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("notes.txt", "no image")
    with pytest.raises(CorruptExampleError, match=r"corrupt image file notes.txt in .*a.zip: neither JPEG nor PNG"):
        ZippedImageDataset(archive)[5]
    monkeypatch.setattr(zipped, "_MAX_BYTES", 7)
    with pytest.raises(CorruptExampleError, match=r"as some/4.jpg in .*, but it claims [\d,]+ bytes"):
        ZippedImageDataset(archive)[0]


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from dbrdist.datasets import ZippedImageDataset
data = ZippedImageDataset(sys.argv[1])
images = list(data)
child = os.fork()
right = all(np.array_equal(data[i], images[i]) for i in (1, 3, 0))
if child == 0:
    os._exit(0 if right else 3)
assert right and os.waitpid(child, 0)[1] == 0
data = ZippedImageDataset(sys.argv[1])
data[0]
place = os.lseek(data._archive.fp.fileno(), 0, os.SEEK_CUR)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(data[5], images[5]) else 3)
assert os.waitpid(child, 0)[1] == 0
assert os.lseek(data._archive.fp.fileno(), 0, os.SEEK_CUR) == place  # the child has a file of its own
"""


@pytest.mark.programs
def test_a_forked_process_opens_the_archive_again(archive):
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("large.jpg", jpeg(9, 400, 600))  # larger than what is read ahead
    found = subprocess.run(
        [sys.executable, "-c", FORKED, archive], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr


def test_lists_of_images_have_a_length(tmp_path):
    assert len(folder.LabeledImageDataset([("a.png", 1), ("b.png", 0)])) == 2
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in "abc":
            archive.writestr(f"{name}.png", b"")
    (tmp_path / "labels").write_text("c.png 1\na.png 0\n")
    assert len(zipped.LabeledZippedImageDataset(tmp_path / "a.zip", tmp_path / "labels")) == 2


def test_a_file_in_an_archive_has_a_limit_of_bytes(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", b"12345")
    data = zipped.ZippedImageDataset(tmp_path / "a.zip")
    for limit, words in ((5, "neither JPEG nor PNG"), (4, "but it claims 5 bytes")):
        monkeypatch.setattr(zipped, "_MAX_BYTES", limit)
        with pytest.raises(folder.CorruptExampleError, match=words):
            data[0]
