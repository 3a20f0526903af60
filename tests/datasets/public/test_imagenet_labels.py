"""The classes of ImageNet's validation images, from kits and lists of many forms, good and bad."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma

import numpy as np
import pytest

from dbrdist.datasets.public.imagenet_labels import read_labels
from dbrdist.errors import DatasetError
from tests.datasets.public.imagenet_helpers import CLASSES, OF_VAL, VAL, kit
from tests.each import each


@each(order=[(0, 1, 2), (2, 0, 1)], compressed=[True, False])
def test_labels_come_from_the_development_kit(tmp_path, order, compressed):
    path = tmp_path / "kit.tar"
    path.write_bytes(kit(order=order, compressed=compressed))
    assert read_labels(str(path), sorted(VAL), sorted(CLASSES)) == OF_VAL


@each(form=["wnids", "indices", "paths", "csv"])
def test_labels_come_from_a_text_file(tmp_path, form):
    wnids = [OF_VAL[name] for name in sorted(VAL)]
    lines = {
        "wnids": wnids,
        "indices": [f"{name} {CLASSES.index(OF_VAL[name])}" for name in VAL],
        "paths": ["# from somewhere", *(f"val/{name.removesuffix('.JPEG')} {wnid}" for name, wnid in OF_VAL.items())],
        "csv": [f"{name},{wnid} 1 2 3 4" for name, wnid in reversed(OF_VAL.items())],
    }[form]
    path = tmp_path / "labels.txt"
    path.write_text("\n".join(lines))
    assert read_labels(str(path), sorted(VAL), sorted(CLASSES)) == OF_VAL


NAMES = sorted(VAL)
FORMS = {
    "Kaggle's table": "ImageId,PredictionString\n"
    + "".join(f"{n[:-5]},{w} 1 2 3 4 {w} 5 6 7 8 \n" for n, w in OF_VAL.items()),
    "a table in quotes": '"filename";"wnid"\n' + "".join(f'"{n}";"{w}"\n' for n, w in OF_VAL.items()),
    "tabs and Windows's line ends": "".join(f"{n}\t{w}\r\n" for n, w in OF_VAL.items()),
    "a byte order mark": "\ufeff" + "".join(f"{n} {w}\n" for n, w in OF_VAL.items()),
    "a script that moves": "mkdir -p n01440764\n" + "".join(f"mv {n} {w}/\n" for n, w in OF_VAL.items()),
    "a list of paths": "".join(f"val/{w}/{n}\n" for n, w in OF_VAL.items()),
    "lines twice": "".join(f"{n} {w}\n" * 2 for n, w in OF_VAL.items()),
    "images of other tars too": "other.JPEG n15075141\n" + "".join(f"{n} {w}\n" for n, w in OF_VAL.items()),
    "no line end": "\n".join(OF_VAL[n] for n in NAMES),
}  # fmt: skip


@each(form=FORMS)
def test_lists_as_people_have_them(tmp_path, form):
    (tmp_path / "labels").write_bytes(FORMS[form].encode())
    assert read_labels(str(tmp_path / "labels"), NAMES, list(CLASSES)) == OF_VAL


WRONG = {
    "the numbers of the kit alone": ("3\n1\n1\n2\n3\n", "got numbers alone, which say nothing without meta.mat"),
    "numbers from 1 on": (
        "".join(f"{n} {CLASSES.index(w) + 1}\n" for n, w in OF_VAL.items()),
        "expected numbers of the sorted classes, from 0 to 2, got 1 to 3: if they begin at 1",
    ),
    "numbers beyond the classes": (
        "".join(f"{n} {2 * CLASSES.index(w)}\n" for n, w in OF_VAL.items()),
        "expected numbers of the sorted classes, from 0 to 2, got 0 to 4",
    ),
    "words": ("".join(f"{n} tench\n" for n in OF_VAL), "labels:1: expected an image and its class, NAME WNID, got"),
    "words alone": ("tench\n" * 5, "expected an image and its class, NAME WNID, got 'tench'; give --labels"),
    "names alone": ("".join(f"{n}\n" for n in OF_VAL), "expected an image and its class, NAME WNID, got"),
    "classes and their words": ("n01440764 tench\nn01443537 goldfish\n", "labels:1: expected an image and its class"),
    "the class first": ("".join(f"{w} {n}\n" for n, w in OF_VAL.items()), "labels:1: expected an image and its class"),
    "boxes of two classes": (f"{NAMES[0]},n01440764 1 2 n01443537 3", "labels:1: expected an image and its class"),
    "bytes": (bytes(range(256)) * 4, "expected an image and its class, NAME WNID, got"),
    "nothing": ("", "5 of 5 validation images have no label, ILSVRC2012_val_00000001.JPEG for one"),
    "comments alone": ("# a\n# b\n", "5 of 5 validation images have no label"),
    "one line too few": ("n01440764\n" * 4, "expected a line for each of 5 validation images, got 4"),
    "another class": ("n99999999\n" * 5, "expected classes of the training tar, got n99999999, which it does not have"),
    "negative numbers": ("".join(f"{n} -1\n" for n in OF_VAL), "labels:1: expected an image and its class"),
}


@each(case=WRONG)
def test_lists_that_say_nothing_sure(tmp_path, case):
    content, words = WRONG[case]
    (tmp_path / "labels").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError) as caught:
        read_labels(str(tmp_path / "labels"), NAMES, list(CLASSES))
    assert words in str(caught.value)
    assert str(tmp_path / "labels") in str(caught.value)


def test_a_folder_is_no_list(tmp_path):
    with pytest.raises(DatasetError, match="expected a file with the classes of the validation images, got a folder"):
        read_labels(str(tmp_path), NAMES, list(CLASSES))


@each(
    **{
        "ids, words": [
            ((3, 1, 1, 2), "it has classes of 4 validation images, expected 5; give the kit that belongs to this tar"),
            ((3, 1, 1, 2, 9), "has the number 9, which is that of no class in meta.mat; download it again"),
            ((0, 1, 1, 2, 3), "has the number 0, which is that of no class in meta.mat"),
        ]
    }
)
def test_a_kit_of_other_images(tmp_path, ids, words):
    (tmp_path / "kit").write_bytes(kit(ids=ids))
    with pytest.raises(DatasetError) as caught:
        read_labels(str(tmp_path / "kit"), NAMES, list(CLASSES))
    assert words in str(caught.value)


def test_an_image_of_number_0_is_not_the_last_one(tmp_path):
    (tmp_path / "kit").write_bytes(kit())
    with pytest.raises(DatasetError, match="it has classes of 5 validation images, expected 1"):
        read_labels(str(tmp_path / "kit"), ["ILSVRC2012_val_00000000.JPEG"], list(CLASSES))


@pytest.mark.slow
@each(compression=["gz", "bz2", "xz"])
def test_damaged_kits_are_refused_or_right(tmp_path, compression):
    """Cut at any place, or with bytes that changed: a sentence, or the right classes; never another exception."""
    whole = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[compression](kit())
    rng = np.random.default_rng(0)
    damaged = [whole[:end] for end in np.linspace(1, len(whole) - 1, 25).astype(int)]
    for place, value in zip(rng.integers(0, len(whole), 50), rng.integers(1, 256, 50)):
        damaged.append(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
    refused = 0
    for content in damaged:
        (tmp_path / "kit").write_bytes(content)
        try:
            assert read_labels(str(tmp_path / "kit"), NAMES, list(CLASSES)) == OF_VAL
        except DatasetError:
            refused += 1
    assert refused > 25


@pytest.mark.slow
def test_a_damaged_meta_mat_is_refused_or_read(tmp_path):
    """Without a checksum around it, changed bytes may give other words; never another exception."""
    whole = kit(compressed=False)
    rng = np.random.default_rng(1)
    for place, value in zip(rng.integers(512, len(whole), 300), rng.integers(1, 256, 300)):
        (tmp_path / "kit").write_bytes(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
        with contextlib.suppress(DatasetError):
            read_labels(str(tmp_path / "kit"), NAMES, list(CLASSES))
