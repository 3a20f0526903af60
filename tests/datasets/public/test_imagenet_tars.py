"""ImageNet's tars as strangers may have made them: compressed, nested, cut, with links and hostile names."""

import bz2
import gzip
import io
import lzma
import shutil
import tarfile

import numpy as np
import pytest

from dbrdist.datasets.public import imagenet_tars
from tests.datasets.public.imagenet_helpers import CLASS_TARS, CLASSES, TRAIN, VAL, WHOLE, check, extract, tar_of
from tests.each import each

FIRST = f"{CLASSES[0]}.tar"
OTHER_FILES = {
    "gzip: unpack it with gunzip first": gzip.compress(WHOLE),
    "bzip2: unpack it with bunzip2 first": bz2.compress(WHOLE),
    "xz: unpack it with unxz first": lzma.compress(WHOLE),
    "zstd: unpack it with unzstd first": b"\x28\xb5\x2f\xfd" + b"x" * 2000,
    "got a zip archive": b"PK\x03\x04" + b"x" * 2000,
    "got a page of a web site, perhaps that of its login": b"\n<!DOCTYPE html><html>" + b" " * 2000,
    "got an image": b"\xff\xd8\xff\xe0" + b"x" * 2000,
    "got another file, or a part of one": b"",
}


@each(name=["train.tar", "val.tar"], words=OTHER_FILES)
def test_files_of_other_kinds_are_named(tars, capsys, name, words):
    """Before anything is written."""
    whole = (tars / name).read_bytes()
    (tars / name).write_bytes(OTHER_FILES[words])
    assert extract(tars) == 2
    err = capsys.readouterr().err
    assert f"{name}: expected a tar (not compressed), got" in err
    assert words in err
    assert not any((tars / "root").iterdir())
    (tars / name).write_bytes(whole)


NOT_CLASSES = {
    "it begins with ILSVRC2012_img_train.tar: extract that first": {"ILSVRC2012_img_train.tar": WHOLE},
    "it begins with n01440764.tar.gz: extract that first": {f"{FIRST}.gz": gzip.compress(CLASS_TARS[FIRST])},
    "n01440764.tar: expected a tar of images": {**CLASS_TARS, FIRST: gzip.compress(CLASS_TARS[FIRST])},
    "n01440764.tar: the tar is cut short": {**CLASS_TARS, FIRST: CLASS_TARS[FIRST][:1536]},
    "it begins with train/n01440764/a.JPEG, which look like validation": {"train/n01440764/a.JPEG": b"1"},
}


@each(words=NOT_CLASSES)
def test_tars_of_another_layout_are_refused_before_anything_is_written(tars, capsys, words):
    (tars / "train.tar").write_bytes(tar_of(NOT_CLASSES[words]))
    assert extract(tars) == 2
    assert words in capsys.readouterr().err
    assert not any((tars / "root").iterdir())


def test_a_folder_is_no_tar(tars, capsys):
    (tars / "train.tar").unlink()
    (tars / "train.tar").mkdir()
    assert extract(tars) == 2
    assert "train.tar: expected a tar, got a folder; give the tar as it was downloaded" in capsys.readouterr().err


@pytest.mark.slow
@each(name=["train.tar", "val.tar"])
def test_a_tar_cut_at_any_place_is_refused(tars, capsys, name):
    """At 40 places, and at those where entries begin."""
    whole = (tars / name).read_bytes()
    with tarfile.open(tars / name) as tar:
        begins = [m.offset for m in tar] + [m.offset_data for m in tar]
        last = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    for end in sorted({*begins, last, *np.linspace(0, last, 40).astype(int).tolist()}):
        (tars / name).write_bytes(whole[:end])
        assert extract(tars) == 2, end
        assert name in capsys.readouterr().err
        assert not any((tars / "root").iterdir())
    (tars / name).write_bytes(whole)


def test_a_damaged_head_in_the_middle_does_not_end_the_list(tars, capsys):
    """Of a tar of images: tarfile stops at it as if the tar ended there."""
    damaged = bytearray((tars / "val.tar").read_bytes())
    with tarfile.open(tars / "val.tar") as tar:
        damaged[tar.getmembers()[2].offset + 150] ^= 0xFF  # of its checksum
    (tars / "val.tar").write_bytes(damaged)
    assert extract(tars) == 2
    assert "val.tar: the tar is cut short: after 2 entries there is no end mark" in capsys.readouterr().err


def entry(name, kind=tarfile.REGTYPE, content=b"", target=""):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(content), target
    return info, content


def tar_of_entries(*entries):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


@each(more=[[], ["--shards"]])
def test_entries_that_lead_elsewhere_stay_below_root(tars, capsys, more):
    """Absolute names and those with `..` lose their folders; links and devices are left out, and named."""
    shutil.rmtree(tars / "root", ignore_errors=True)
    files = [entry(f"{path}{name}", content=content)
             for (name, content), path in zip(TRAIN[CLASSES[0]].items(), ("/", "../../", "./x/"))]  # fmt: skip
    links = [
        entry("folder", tarfile.DIRTYPE),
        entry("a.JPEG", tarfile.SYMTYPE, target="/etc/passwd"),
        entry("b.JPEG", tarfile.LNKTYPE, target=f"/{CLASSES[0]}_0.JPEG"),
        entry("c.JPEG", tarfile.FIFOTYPE),
    ]
    tar = tar_of({**CLASS_TARS, FIRST: tar_of_entries(*files, *links)})
    (tars / "train.tar").write_bytes(tar)
    before = sorted(p.name for p in tars.iterdir())
    assert extract(tars, *more) == 0
    out = capsys.readouterr().out
    for words in ("a.JPEG is a link", "b.JPEG is a link", "c.JPEG is no file"):
        assert f"n01440764.tar: {words} and was left out" in out
    assert "3 entries left out" in out
    assert sorted(p.name for p in tars.iterdir()) == sorted([*before, "root"])
    if not more:
        check(tars / "root")


@each(name=["x.jpg", "x.JPG", "x.Png", "a b (1).jpeg", "v1.2.JPEG", "\u00e9.JPEG"])
def test_names_of_images(name):
    assert imagenet_tars.is_image(name)


@each(name=["._n01440764_1.JPEG", ".x.jpg", "x.gif", "JPEG", "x.jpg.txt", "x.tar"])
def test_names_that_are_not_of_images(name):
    assert not imagenet_tars.is_image(name)


@each(more=[[], ["--shards"]])
def test_empty_images_are_left_out_and_named_and_odd_ones_are_named(tars, capsys, more):
    shutil.rmtree(tars / "root", ignore_errors=True)
    jpeg = b"\xff\xd8\xff\xe0 and so on"
    (tars / "train.tar").write_bytes(tar_of({**CLASS_TARS, FIRST: tar_of({"a.JPEG": b"", "b.JPEG": jpeg})}))
    (tars / "val.tar").write_bytes(tar_of({**dict.fromkeys(VAL, jpeg), min(VAL): b""}))
    assert extract(tars, *more) == 0
    out = capsys.readouterr().out
    assert "n01440764.tar: a.JPEG is empty and was left out" in out
    assert "val.tar: ILSVRC2012_val_00000001.JPEG is empty and was left out" in out
    assert "7 training images and 4 validation images of 3 classes, 2 entries left out" in out
    assert "6 images beginning as neither JPEG nor PNG" in out
    assert "n01443537.tar: n01443537_0.JPEG for one: dbrdist-data check" in out


def test_an_undecodable_name_can_be_printed(tars, capsys):
    info, content = entry("n\udcff.txt", content=b"1")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", errors="surrogateescape", format=tarfile.GNU_FORMAT) as tar:
        for name, whole in VAL.items():
            tar.addfile(*entry(name, content=whole)[:1], io.BytesIO(whole))
        tar.addfile(info, io.BytesIO(content))
    (tars / "val.tar").write_bytes(made.getvalue())
    assert extract(tars) == 0
    assert "is no image and was left out" in capsys.readouterr().out


def test_fingerprints_differ_by_entries_and_labels():
    def of(files, *labels):
        with tarfile.open(fileobj=io.BytesIO(tar_of(files))) as tar:
            return imagenet_tars.fingerprint(tar, tar.getmembers(), labels)

    longer = {name: content + b"1" for name, content in VAL.items()}
    other = {**CLASS_TARS, FIRST: tar_of({"a.JPEG": b"1"})}  # of the same size
    found = [
        of(VAL),
        of({**VAL, "x.JPEG": b"1"}),
        of(longer),
        of(VAL, "a b"),
        of(VAL, "a c"),
        of(CLASS_TARS),
        of(other),
    ]
    assert len(set(found)) == 7
    assert of(VAL) == found[0]
