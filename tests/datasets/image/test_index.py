"""Indexes of images: what they say, who shares them, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dbrdist.datasets import ImageFolder, open_images
from dbrdist.datasets.image import index
from dbrdist.datasets.image.index import in_memory, read_index, write_index
from dbrdist.datasets.image.index_format import FILE_NAME, HEAD
from dbrdist.datasets.image.scan import scan
from dbrdist.errors import CorruptExampleError, DatasetError
from dbrdist.iterators import MultiprocessIterator, SerialIterator
from tests.datasets import image_files
from tests.datasets.image_files import class_folders, jpeg, tar
from tests.descriptors import open_files


@pytest.fixture
def root(tmp_path):
    return class_folders(tmp_path / "images")


@pytest.fixture
def shards(tmp_path):
    """Two shards of 3 and 2 images in 2 classes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, keys in enumerate((["ant/0", "ant/1", "bee/2"], ["bee/3", "ant/4"])):
        members = [(f"{k}.{e}", d) for k in keys for e, d in (("jpg", jpeg(int(k[-1]))), ("cls", str(k[0] == "b")))]
        members = [(n, d if isinstance(d, bytes) else str(int(d == "True")).encode()) for n, d in members]
        tar(folder / f"{number}.tar", members)
    return folder


def build(folder):
    write_index(folder / FILE_NAME, scan(folder))
    return folder / FILE_NAME


# ---- what it says ----
@pytest.mark.parametrize("built", [False, True])
def test_an_index_lists_folders_as_they_are(root, built):
    expected = sorted(str(p) for p in root.rglob("*.jpg"))
    if built:
        build(root)
    index = open_images(str(root))
    assert [index.path(i) for i in range(len(index))] == expected
    assert index.classes == ["ant", "bee"] and index.labels.tolist() == [0, 0, 0, 1, 1]
    assert index.labels.dtype == np.int32 and not index.labels.flags.writeable
    assert [index.read(i) for i in range(5)] == [Path(p).read_bytes() for p in expected]
    assert index.path(-1) == expected[-1]
    with pytest.raises(IndexError):
        index.path(5)


@pytest.mark.parametrize("built", [False, True])
def test_an_index_lists_shards_as_they_are(shards, built):
    if built:
        build(shards)
    index = open_images(shards)
    assert [index.read(i) for i in range(5)] == [jpeg(i) for i in range(5)]
    assert index.classes == ["ant", "bee"] and index.labels.tolist() == [0, 0, 1, 1, 0]
    assert index.path(3) == f"{shards}/1.tar:bee/3.jpg"
    assert index.num_bytes() == sum(len(jpeg(i)) for i in range(5))


def test_an_index_may_lie_elsewhere(root, tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path)
    write_index("far/my.index", scan("images"))
    monkeypatch.chdir("far")
    data = ImageFolder("my.index")
    assert len(data) == 5 and data.path(0) == f"{root}/ant/0.jpg"
    data[4]


def test_an_index_inside_moves_with_its_folder(shards, tmp_path):
    build(shards)
    shards.rename(tmp_path / "moved")
    assert open_images(tmp_path / "moved").path(0) == f"{tmp_path}/moved/0.tar:ant/0.jpg"


def test_names_that_are_not_utf_8(tmp_path):
    (tmp_path / "ant").mkdir()
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / "ant" / name).write_bytes(jpeg(0))
    build(tmp_path)
    index = open_images(tmp_path)
    assert index.name(0) == name and index.read(0) == jpeg(0)


@pytest.mark.parametrize("kind", ["folders", "shards"])
def test_batches_come_from_an_index_as_from_the_files(kind, root, shards):
    folder = root if kind == "folders" else shards
    before = SerialIterator(ImageFolder(folder), 5, seed=3).next().arrays
    build(folder)
    after = SerialIterator(ImageFolder(folder), 5, seed=3).next().arrays
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a, b)


# ---- who shares it ----
@pytest.mark.programs
@pytest.mark.parametrize("kind", ["in memory", "file"])
@pytest.mark.parametrize("of", ["folders", "shards"])
def test_an_index_travels_as_a_reference(kind, of, root, shards):
    folder = root if of == "folders" else shards
    if kind == "file":
        build(folder)
    data = ImageFolder(folder)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    code = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(len(d), d.path(4), d[4][1], d.index._path)"
    out = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, timeout=60, check=True)
    words = out.stdout.decode().split()
    assert words[:3] == ["5", data.path(4), str(data.labels[4])]
    assert words[3] == (str(folder / FILE_NAME) if kind == "file" else "None")


@pytest.mark.programs
def test_loader_processes_share_it(shards):
    data = ImageFolder(shards)
    with MultiprocessIterator(data, 2, n_processes=2, seed=1) as there, SerialIterator(data, 2, seed=1) as here:
        for _ in range(4):
            for a, b in zip(there.next().arrays, here.next().arrays, strict=True):
                assert np.array_equal(a, b)


def test_where_the_memory_is_gone_the_images_are_scanned_again(root):
    index = open_images(root)
    pickled = pickle.dumps(index)
    del index
    again = pickle.loads(pickled)
    assert len(again) == 5 and again.read(4) == jpeg(101)
    pickled = pickle.dumps(again)
    del again
    (root / "bee" / "9.jpg").write_bytes(jpeg(9))
    with pytest.raises(DatasetError, match=r"the images in .*images differ from those that the sending process saw"):
        pickle.loads(pickled)


def test_another_host_gets_the_block(shards):
    build(shards)
    first = open_images(shards)
    second = in_memory(first.block().copy(), first.root)
    assert [second.path(i) for i in range(5)] == [first.path(i) for i in range(5)]
    assert second.read(4) == first.read(4)


def test_no_descriptor_is_left_open(root):
    before = open_files()
    for _ in range(5):
        pickle.loads(pickle.dumps(open_images(root)))
    assert not open_files() - before


# ---- what is refused ----
def test_a_changed_folder_or_shard_is_refused(root, shards):
    build(root)
    (root / "bee" / "new.jpg").write_bytes(jpeg(9))
    os.utime(root / "bee", ns=(1, 1))
    with pytest.raises(DatasetError, match=r"out of date: files came or went in the class folder .*bee after it was"):
        open_images(root)
    build(root)
    (root / "cat").mkdir()
    with pytest.raises(DatasetError, match="has other class folders than when it was indexed; make it again"):
        open_images(root)
    shutil.rmtree(root / "ant")
    with pytest.raises(DatasetError, match="ant cannot be read: No such file"):
        open_images(root)
    build(shards)
    os.utime(shards / "1.tar", ns=(1, 1))
    with pytest.raises(DatasetError, match=r"the shard .*1\.tar was written after it was indexed; make it again"):
        open_images(shards)
    with open(shards / "0.tar", "ab") as f:
        f.write(bytes(512))
    with pytest.raises(DatasetError, match=r"the shard .*0\.tar has [\d,]+ bytes and had [\d,]+ when it was indexed"):
        open_images(shards)
    (shards / "0.tar").unlink()
    with pytest.raises(DatasetError, match=r"the shard .*0\.tar cannot be read: No such file"):
        open_images(shards)


def test_a_copy_with_whole_seconds_is_the_same(shards):
    build(shards)
    for path in shards.glob("*.tar"):
        seconds = path.stat().st_mtime_ns // 10**9
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))
    assert len(open_images(shards)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("of", ["folders", "shards"])
def test_any_damage_is_found(of, root, shards):
    path = build(root if of == "folders" else shards)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for k in range(150):
        data = bytearray(whole)
        if k % 3 == 0:
            data = data[: rng.integers(len(data))]
        elif k % 3 == 1:
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        else:
            start = int(rng.integers(len(data)))
            data[start : start + 64] = os.urandom(len(data[start : start + 64]))
        path.write_bytes(data)
        with pytest.raises(DatasetError, match="index"):
            read_index(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected an index of images, got an empty file"),
        (b"hello", "expected an index of images as `dbrdist-data build` writes it, got another file"),
        (b"\xff\xd8\xff" + bytes(100), "got another file"),
    ],
)
def test_other_files_are_no_indexes(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DatasetError, match=words):
        open_images(tmp_path / "x")


def resealed(path, change_header=None, version=None, change_columns=None):
    """An index with something else in it and a right checksum: what a hostile hand would make."""
    raw = bytearray(path.read_bytes())
    magic, old_version, _, _, num_header = HEAD.unpack(raw[: HEAD.size])
    about = json.loads(raw[HEAD.size : HEAD.size + num_header])
    columns = bytearray(raw[(HEAD.size + num_header + 63) // 64 * 64 :])
    if change_header:
        change_header(about)
    if change_columns:
        change_columns(columns)
    header = json.dumps(about).encode()
    header += b" " * (-(HEAD.size + len(header)) % 64)
    rest = struct.pack("<QQ", HEAD.size + len(header) + len(columns), len(header)) + header + columns
    path.write_bytes(struct.pack("<16sII", magic, version or old_version, zlib.crc32(rest)) + rest)


def put(position, dtype, value):
    def change(columns):
        np.frombuffer(columns, dtype, 1, position * np.dtype(dtype).itemsize)[0] = value

    return change


LIES = {  # the columns of 5 images in shards: offsets, sizes, labels, ends of names, names; each begins at 64 bytes
    "a version to come": ({"version": 99}, "expected an index of version 1, got version 99; make it again"),
    "an offset beyond the end": ({"change_columns": put(0, "<u8", 1 << 60)}, "lies beyond the end of its shard"),
    "a size beyond the end": ({"change_columns": put(16, "<u4", 1 << 31)}, "lies beyond the end of its shard"),
    "a label too large": ({"change_columns": put(32, "<i4", 7)}, "labels go from 0 to 7 with 2 classes"),
    "the label behind the last": ({"change_columns": put(32, "<i4", 2)}, "labels go from 0 to 2 with 2 classes"),
    "a negative label": ({"change_columns": put(32, "<i4", -1)}, "labels go from -1"),
    "names that go back": ({"change_columns": put(24, "<u8", 99)}, "names do not end where they should"),
    "names beyond the end": ({"change_columns": put(28, "<u8", 1 << 40)}, "names do not end where they should"),
    "NUL in a name": ({"change_columns": put(256, "u1", 0)}, "has '/' or NUL"),
    "a path as a shard": ({"change_header": lambda h: h["shards"][0].__setitem__(0, "../x")}, "without '/'"),
    "an absolute shard": ({"change_header": lambda h: h["shards"][0].__setitem__(0, "/etc/passwd")}, "without '/'"),
    "the folder above": ({"change_header": lambda h: h["shards"][0].__setitem__(0, "..")}, "without '/'"),
    "NUL in a shard": ({"change_header": lambda h: h["shards"][0].__setitem__(0, "x\0")}, "without '/'"),
    "a size of text": ({"change_header": lambda h: h["shards"][0].__setitem__(1, "9")}, "not whole numbers"),
    "a negative size": ({"change_header": lambda h: h["shards"][0].__setitem__(1, -9)}, "not whole numbers"),
    "an infinite time": ({"change_header": lambda h: h["shards"][0].__setitem__(2, 1e400)}, "not whole numbers"),
    "shards that go back": ({"change_header": lambda h: h["shards"][0].__setitem__(3, 9)}, "as many images"),
    "a missing end": ({"change_header": lambda h: h["shards"][1].__setitem__(3, 4)}, "as many images"),
    "a huge end": ({"change_header": lambda h: h["shards"][1].__setitem__(3, 1 << 70)}, "damaged"),
    "a short shard": ({"change_header": lambda h: h["shards"].__setitem__(0, ["x"])}, "damaged"),
    "no shards": ({"change_header": lambda h: h.update(shards=[])}, "damaged"),
    "no images": ({"change_header": lambda h: h.update(num_images=0)}, "damaged"),
    "many images": ({"change_header": lambda h: h.update(num_images=1 << 40)}, "damaged"),
    "less than no images": ({"change_header": lambda h: h.update(num_images=-1)}, "damaged"),
    "a number as classes": ({"change_header": lambda h: h.update(classes=3)}, "damaged"),
    "numbers as classes": ({"change_header": lambda h: h.update(classes=[1, 2])}, "not a list of names"),
    "no classes": ({"change_header": lambda h: h.update(classes=[])}, "it has 0 classes, not 1 to"),
    "a root that is no text": ({"change_header": lambda h: h.update(root=3)}, "damaged"),
    "a missing entry": ({"change_header": lambda h: h.pop("identity")}, "damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(shards, lie):
    path = build(shards)
    change, words = LIES[lie]
    resealed(path, **change)
    with pytest.raises(DatasetError, match=rf"{FILE_NAME}: .*{words}"):
        read_index(path)


@pytest.mark.parametrize("place", [1, 2])
def test_times_of_shards_may_be_zero_and_not_below(shards, place):
    for value, is_taken in ((0, place == 2), (-1, False)):
        path = build(shards)
        resealed(path, change_header=lambda h, value=value: h["shards"][0].__setitem__(place, value))
        if is_taken:
            assert read_index(path).shards[0].mtime_ns == 0
        else:
            with pytest.raises(DatasetError, match="whole numbers" if value else "lies beyond the end of its shard"):
                read_index(path)


def test_an_index_has_the_length_that_it_claims(shards):
    path = build(shards)
    data = path.read_bytes()
    for other in (data[:-1], data + b"x", data[: HEAD.size]):
        path.write_bytes(other)
        words = f"the index has {len(other):,} bytes instead of {len(data):,}; make it again"
        with pytest.raises(DatasetError, match=words):
            read_index(path)
    path.write_bytes(data[: HEAD.size - 1])
    with pytest.raises(DatasetError, match="expected an index of images"):
        read_index(path)


def test_an_image_may_end_with_its_shard(shards):
    path = build(shards)
    index = read_index(path)
    to_the_end = index.shards[0].size - int(index._offsets[0])
    resealed(path, change_columns=put(16, "<u4", to_the_end))
    assert len(read_index(path)) == 5
    resealed(path, change_columns=lambda c: [put(0, "<u8", index.shards[0].size)(c), put(16, "<u4", 0)(c)])
    assert read_index(path).read(0) == b""  # an image without bytes at the very end
    resealed(path, change_columns=lambda c: [put(0, "<u8", index.shards[0].size + 1)(c), put(16, "<u4", 0)(c)])
    with pytest.raises(DatasetError, match="lies beyond the end of its shard"):
        read_index(path)
    build(shards)
    resealed(path, change_columns=put(16, "<u4", to_the_end + 1))
    with pytest.raises(DatasetError, match="lies beyond the end of its shard"):
        read_index(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(classes=["ant", ".."]), "not a list of names"),
        (lambda h: h.update(classes=["ant", "x/y"]), "not a list of names"),
        (lambda h: h.update(folder_times=[1]), "one time for each class folder"),
    ],
)
def test_an_index_of_folders_leads_nowhere_else(root, change, words):
    path = build(root)
    resealed(path, change)
    with pytest.raises(DatasetError, match=words):
        read_index(path)


def test_file_names_of_an_index_lead_nowhere_else(root):
    path = build(root)
    whole = path.read_bytes()
    resealed(path, change_columns=lambda c: c.__setitem__(slice(128, 133), b"../x."))
    with pytest.raises(DatasetError, match="has '/' or NUL"):
        read_index(path)
    path.write_bytes(whole)
    resealed(path)
    assert len(open_images(root)) == 5  # what the tests reseal is taken where nothing lies


def test_a_shard_cut_after_it_was_opened_names_the_image(shards):
    data = ImageFolder(shards)
    with open(shards / "1.tar", "r+b") as f:
        f.truncate(700)
    with pytest.raises(CorruptExampleError, match=r"1\.tar:bee/3\.jpg: the file ends after \d+ of \d+ bytes at"):
        data[3]
    skipped = []
    ImageFolder(shards, index=data.index, on_corrupt="skip").get_batch(np.arange(5), 0, 0, skipped)
    assert len(skipped) == 2 and "bee/3.jpg" in skipped[0]


def test_the_memory_of_another_index_is_not_taken_for_it(root, shards):
    index = open_images(root)
    number, pickled = index._descriptor.number, pickle.dumps(index)
    del index
    other = open_images(shards)
    assert other._descriptor.number == number  # so what was pickled names the memory of another index
    assert pickle.loads(pickled).path(0) == f"{root}/ant/0.jpg"


def test_an_index_lies_in_memory_of_its_own_where_there_is_no_other(tmp_path, monkeypatch):
    image_files.class_folders(tmp_path / "images")
    one = index.open_images(tmp_path / "images")
    monkeypatch.delattr(index.os, "memfd_create")
    other = index.open_images(tmp_path / "images")
    assert other.classes == one.classes and other.labels.tolist() == one.labels.tolist() and len(one)
    assert [other.path(i) for i in range(len(other))] == [one.path(i) for i in range(len(one))]
    block = index.in_memory(one.block(), "elsewhere")
    assert block.classes == one.classes and block.root == one.root and len(block) == len(one)
