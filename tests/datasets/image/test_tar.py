"""Tar shards: read like the standard library reads them, and refused where they are damaged or lie."""

from __future__ import annotations

import io
import os
import tarfile

import numpy as np
import pytest

from dbrdist.datasets import open_images
from dbrdist.datasets.image import tar as tar_format
from dbrdist.datasets.image.tar import TarWriter, key_and_extension, members
from dbrdist.errors import UsageWarning
from tests.datasets.image_files import jpeg, tar

LONG = "folder-" * 30 + "/" + "name-" * 60 + ".jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_the_standard_library(tmp_path, form):
    sizes = [0, 1, 511, 512, 513, 5000]
    names = [f"a/b{k}.jpg" for k in range(6)]
    if form != tarfile.USTAR_FORMAT:
        names += [LONG, "ünïcödé/名.jpg", "./point/x.jpg"]
    data = [os.urandom(s) for s in [*sizes, 7, 8, 9]]
    path = tar(tmp_path / "x.tar", zip(names, data), format=form)
    with tarfile.open(path) as file:
        expected = [(m.name, m.offset_data, m.size) for m in file.getmembers()]
    found = list(members(path))
    assert [(os.fsdecode(m.name), m.offset, m.size) for m in found] == [
        (name.removeprefix("./"), offset, size) for name, offset, size in expected
    ]
    raw = path.read_bytes()
    assert [raw[m.offset : m.offset + m.size] for m in found] == [d for d, _ in zip(data, names)]


def test_long_ustar_names_have_a_prefix(tmp_path):
    name = "p" * 90 + "/" + "q" * 90 + ".jpg"
    path = tar(tmp_path / "x.tar", [(name, b"x")], format=tarfile.USTAR_FORMAT)
    assert [os.fsdecode(m.name) for m in members(path)] == [name]


def test_what_we_write_the_standard_library_reads(tmp_path):
    content = {"a/1.jpg": jpeg(1), "a/1.cls": b"0", LONG: b"long", os.fsdecode(b"caf\xe9.jpg"): b"", "ü": bytes(512)}
    with open(tmp_path / "x.tar", "wb") as file:
        writer = TarWriter(file)
        offsets = [writer.add(os.fsencode(name), data) for name, data in content.items()]
        writer.close()
    with tarfile.open(tmp_path / "x.tar") as file:
        assert [(m.name, m.offset_data) for m in file.getmembers()] == list(zip(content, offsets))
        assert [file.extractfile(m).read() for m in file.getmembers()] == list(content.values())
    assert [os.fsdecode(m.name) for m in members(tmp_path / "x.tar")] == list(content)


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        (b"17.jpg", b"17", b"jpg"),
        (b"a/17.JPEG", b"a/17", b"jpeg"),
        (b"a.b/17.seg.png", b"a.b/17", b"seg.png"),
        (b"a/none", b"a/none", b""),
    ],
)
def test_keys_are_those_of_webdataset(name, key, extension):
    assert key_and_extension(name) == (key, extension)


# ---- samples ----
def test_labels_and_classes(tmp_path):
    def found(members_):
        tar(tmp_path / "0.tar", members_)
        index = open_images(tmp_path)
        return index.classes, index.labels.tolist()

    x = jpeg(0)
    by_folder = [("bee/0.jpg", x), ("ant/1.png", x), ("bee/2.jpeg", x)]
    assert found(by_folder) == (["ant", "bee"], [1, 0, 1])
    numbered = [("0.jpg", x), ("0.cls", b"2"), ("1.cls", b" 0\n"), ("1.jpg", x)]
    assert found(numbered) == (["0", "1", "2"], [2, 0])
    both = [("bee/0.jpg", x), ("bee/0.cls", b"3"), ("ant/1.jpg", x), ("ant/1.cls", b"1")]
    assert found(both) == (["0", "ant", "2", "bee"], [3, 1])
    mixed = [("bee/0.jpg", x), ("bee/0.cls", b"0"), ("bee/1.jpg", x), ("bee/1.cls", b"1")]
    assert found(mixed) == (["0", "1"], [0, 1])
    others = [("readme.txt", b"hello"), ("a/0.json", b"{}"), ("a/0.jpg", x), ("a/0.seg.png", x)]
    assert found(others) == (["a"], [0])


@pytest.mark.filterwarnings("error")
def test_what_is_behind_the_end_mark_and_no_archive_does_not_count(tmp_path):
    whole = tar(tmp_path / "x.TAR", [("a/0.jpg", jpeg(0)), ("a/0.b.jpg", b""), ("a/._1.2.jpg", b"")]).read_bytes()
    (tmp_path / "x.TAR").write_bytes(whole + bytes(512) + b"remains" * 200)
    assert len(open_images(tmp_path)) == 1


def test_images_that_are_none_by_their_ending_are_said(tmp_path):
    x, names = jpeg(0), ["a/0.jpg", "a/1.v2.jpg", "a/1.V2.PNG", "a/2.webp", "a/3.txt", "a/4.seg.png"]
    tar(tmp_path / "0.tar", [(name, x) for name in names])
    with pytest.warns(UsageWarning, match=r"behind the first dot of the name are left out, 4 in all, such as") as said:
        assert len(open_images(tmp_path)) == 1
    assert all(f"0.tar:{names[k]}'" in str(said[0].message) for k in (1, 2, 3, 5))


def raw_header(name=b"a/0.jpg", size=b"00000000012\0", kind=b"0", magic=b"ustar\x0000", checksum=None):
    header = bytearray(512)
    header[: len(name)] = name
    header[124 : 124 + len(size)] = size
    header[156:157] = kind
    header[257 : 257 + len(magic)] = magic
    header[148:156] = b" " * 8
    header[148:156] = checksum or b"%06o\0 " % sum(header)
    return bytes(header)


END = bytes(1024)
TARS = {
    "empty": (b"", "is cut short: it ends at byte 0 without an end mark"),
    "no tar": (b"hello" * 200, "expected the header of a member at byte 0, found other data"),
    "no end": (raw_header() + bytes(512), "is cut short: it ends at byte 1,024"),
    "half a header": (raw_header() + bytes(512) + raw_header()[:100], "is cut short: it ends at byte 1,124"),
    "too little data": (raw_header() + b"12345", r"'a/0.jpg' claims 10 bytes, but the file ends after 5 of them"),
    "rubbish between": (raw_header() + bytes(512) + b"x" * 512, "a member at byte 1,024, found other data"),
    "a wrong checksum": (raw_header(checksum=b"000001\0 ") + END, "at byte 0 is damaged: its checksum is wrong"),
    "a checksum of text": (raw_header(checksum=b"hello!\0 ") + END, "for a number"),
    "a size of text": (raw_header(size=b"9" * 12) + END, "for a number"),
    "a huge size": (raw_header(size=b"7" * 11 + b"\0") + END, "claims 8,589,934,591 bytes, but the file ends after"),
    "a huge binary size": (raw_header(size=b"\x80" + b"\xff" * 11) + END, "claims [0-9,]+ bytes, but"),
    "a negative binary size": (raw_header(size=b"\xff" * 12) + END, "for a number"),
    "a path upward": (raw_header(b"a/../../x.jpg") + END, "leads out of the archive"),
    "an absolute path": (raw_header(b"/etc/x.jpg") + END, "leads out of the archive"),
    "a link": (raw_header(kind=b"2", size=b"0\0") + END, "'a/0.jpg' is a link or another special member"),
    "a sparse file": (raw_header(kind=b"S") + bytes(512) + END, "'a/0.jpg' is a link or another special member"),
    "a long long name": (raw_header(kind=b"L", size=b"77777777\0") + END, "claims a name or header of"),
    "a damaged pax header": (
        raw_header(kind=b"x") + b"99 path=x\n".ljust(512) + END,
        "pax header at byte 0 is damaged",
    ),
    "a pax header of zeros": (raw_header(kind=b"x") + bytes(512) + END, "pax header at byte 0 is damaged"),
    "a pax size of text": (raw_header(kind=b"x") + b"10 size=z\n".ljust(512) + END, "for a size"),
    "sparse by pax": (
        raw_header(kind=b"x", size=b"26\0") + b"22 GNU.sparse.major=1\n".ljust(512) + END,
        "is a sparse file",
    ),
    "no images": (END, "found none"),
    "two archives in a row": (
        2 * (raw_header() + bytes(512) + END),
        "another archive begins .* at byte 2,048, as where",
    ),
    "one after a lone block of zeros": (
        raw_header() + bytes(2 << 20) + raw_header() + END,
        "another archive begins behind the end mark, at byte 2,097,6",
    ),
    "other files only": (raw_header(b"x.txt") + bytes(512) + END, "found none"),
    "no label": (raw_header(b"0.jpg") + bytes(512) + END, "expected the number of its class beside each image"),
    "some labels": (
        b"".join(raw_header(n) + b"1".ljust(512, b" ") for n in (b"a/0.jpg", b"a/0.cls", b"a/1.jpg")) + END,
        "beside every image, or beside none: 'a/1' differs",
    ),
    "two images": (
        b"".join(raw_header(n) + bytes(512) for n in (b"a/0.jpg", b"a/0.png")) + END,
        "'a/0.png' is the second of its kind in one sample",
    ),
    "a label of text": (
        b"".join(raw_header(n) + b"dog".ljust(512) for n in (b"0.jpg", b"0.cls")) + END,
        "expected the number of a class from 0 to 999,999 in '0.cls', got b'dog'",
    ),
    "a huge label": (
        b"".join(raw_header(n) + b"9999999999".ljust(512) for n in (b"0.jpg", b"0.cls")) + END,
        "expected the number of a class",
    ),
    "a negative label": (
        b"".join(raw_header(n) + b"-1".ljust(512) for n in (b"0.jpg", b"0.cls")) + END,
        "expected the number of a class",
    ),
}


@pytest.mark.parametrize("kind", TARS)
def test_a_damaged_or_hostile_tar_is_refused(tmp_path, kind):
    data, words = TARS[kind]
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        open_images(tmp_path)


@pytest.mark.slow
def test_random_damage_never_crashes(tmp_path):
    """Each is refused in a sentence, or lists images that lie within the file."""
    whole = tar(
        tmp_path / "x.tar", [(f"a/{k}.{e}", d) for k in range(4) for e, d in (("jpg", jpeg(k)), ("cls", b"1"))]
    ).read_bytes()
    rng, num_refused = np.random.default_rng(0), 0
    for k in range(200):
        data = bytearray(whole)
        if k % 2:
            for _ in range(4):
                data[rng.integers(len(data) // 512) * 512 + rng.integers(512)] ^= 1 << int(rng.integers(8))
        else:
            data = data[: rng.integers(len(data))]
        (tmp_path / "x.tar").write_bytes(data)
        try:
            index = open_images(tmp_path)
        except ValueError as e:
            num_refused += 1
            assert "x.tar" in str(e)
        else:
            assert all(len(index.read(i)) >= 0 for i in range(len(index)))
    assert num_refused > 100


def header(name=b"a", size=0, kind=b"0", magic=b"ustar\x0000", prefix=b"", number=None):
    field = b"%011o\0" % size if number is None else number
    made = bytearray(tar_format.BLOCK)
    for start, part in ((0, name), (124, field), (156, kind), (257, magic), (345, prefix)):
        made[start : start + len(part)] = part
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def padded(data):
    return data + bytes(-len(data) % tar_format.BLOCK)


def members_of(data):
    return [(m.name, m.offset, m.size, m.is_regular) for m in tar_format._members(io.BytesIO(data), len(data))]


TAR_END = bytes(2 * tar_format.BLOCK)


def test_members_of_tar_files():
    assert members_of(TAR_END) == []
    assert members_of(header(size=3) + padded(b"abc") + TAR_END) == [(b"a", 512, 3, True)]
    assert members_of(header(size=512) + bytes(512) + header(b"b") + TAR_END) == [
        (b"a", 512, 512, True),
        (b"b", 1536, 0, True),
    ]
    assert members_of(header(b"./././a") + TAR_END)[0][0] == b"a"
    assert members_of(header(b"folder/", kind=b"5") + TAR_END) == []
    assert members_of(header(prefix=b"in") + TAR_END)[0][0] == b"in/a"
    assert members_of(header(prefix=b"in", magic=b"ustar  \0") + TAR_END)[0][0] == b"a"
    assert members_of(header(size=0, number=b" " * 12) + TAR_END)[0][2] == 0
    assert members_of(header(number=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + TAR_END)[0][2] == 3
    assert members_of(header(kind=b"2") + TAR_END) == [(b"a", 512, 0, False)]
    long = header(size=5, kind=b"L") + padded(b"long\0")
    assert members_of(long + header() + header(b"b") + TAR_END) == [
        (b"long", 1536, 0, True),
        (b"b", 2048, 0, True),
    ]
    pax = b"12 path=new\n" + b"9 size=3\n"
    found = header(size=len(pax), kind=b"x") + padded(pax) + header() + padded(b"abc") + header(b"b") + TAR_END
    assert members_of(found) == [(b"new", 1536, 3, True), (b"b", 2560, 0, True)]


def test_damage_in_tar_files(monkeypatch):
    monkeypatch.setattr(tar_format, "_MAX_EXTRA_BYTES", 600)
    assert members_of(header(size=600, kind=b"L") + padded(b"n" * 600) + header() + TAR_END)[0][0] == b"n" * 600
    pax = [
        (b"8 size=x\n"[:8] + b"", "has"), (b"x size=3\n", "is damaged"), (b"99 size=3\n", "is damaged"),
        (b"1 size=3\n", "is damaged"), (b"17 GNU.sparse.a=1\n"[:18], "sparse|damaged"),
    ]  # fmt: skip
    for data, words in (
        (header(), "is cut short: it ends at byte 512 without an end mark"),
        (header() + bytes(511), "is cut short: it ends at byte 1,023"),
        (header(magic=b"posix") + TAR_END, "expected the header of a member at byte 0, found other data"),
        (header()[:100] + b"\1" + header()[101:] + TAR_END, "its checksum is wrong"),
        (header(number=b"x" * 11 + b"\0") + TAR_END, "has b'xxxxxxxxxxx.* for a number"),
        (header(size=601, kind=b"L") + padded(b"n" * 601) + TAR_END, "claims a name or header of 601 bytes"),
        (header(size=513, kind=b"L") + bytes(512), "claims a name or header of 513 bytes"),
        (header(size=4) + b"abc", "'a' claims 4 bytes, but the file ends after 3 of them"),
        (header(size=1), "'a' claims 1 bytes, but the file ends after 0 of them"),
        *((header(name) + TAR_END, "leads out of the archive") for name in (b"/a", b"../a", b"a/../b", b"a/..")),
        *((header(size=len(p), kind=b"x") + padded(p) + header() + TAR_END, words) for p, words in pax),
    ):
        with pytest.raises(tar_format._Damage, match=words):
            members_of(data)
    assert members_of(header(size=3) + padded(b"abc") + TAR_END)[0][1] == 512
    assert members_of(header(b"a..b/..c") + TAR_END)[0][0] == b"a..b/..c"
