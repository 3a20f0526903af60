"""From ImageNet's tars to class folders, with small tars of the same layout."""

import gzip
import io
import os
import shutil
import struct

import numpy as np
import pytest

from dbrdist.cli import data
from dbrdist.datasets import open_images
from dbrdist.datasets.image.folder import DatasetError
from dbrdist.datasets.public import imagenet, imagenet_labels, imagenet_plan, imagenet_shards, matlab
from tests.datasets.public.imagenet_helpers import (
    CLASS_TARS,
    CLASSES,
    LABELS,
    OF_VAL,
    TRAIN,
    VAL,
    WHOLE,
    check,
    extract,
    kit,
    tar_of,
)
from tests.each import each


def test_tars_become_class_folders(tars, capsys):
    assert extract(tars) == 0
    check(tars / "root")
    assert "9 training images and 5 validation images of 3 classes, 0 entries left out" in capsys.readouterr().out
    assert extract(tars) == 0  # and nothing is done again
    check(tars / "root")


def images_of(folder):
    """Class, name and bytes of all images of a folder, as training reads them."""
    index = open_images(folder)
    return index.classes, {(int(index.labels[i]), index.name(i).rpartition("/")[2].rpartition(".")[0]): index.read(i)
                           for i in range(len(index))}  # fmt: skip


def expected_images(part):
    files = TRAIN if part == "train" else {w: {n: VAL[n] for n in VAL if OF_VAL[n] == w} for w in CLASSES}
    return {
        (CLASSES.index(wnid), name.removesuffix(".JPEG")): content
        for wnid, found in files.items()
        for name, content in found.items()
    }


def check_shards(root):
    for part in ("train", "val"):
        assert sorted(os.listdir(root / part)) == ["dbrdist.index", *(f"{wnid}.tar" for wnid in CLASSES)]
        assert images_of(root / part) == (list(CLASSES), expected_images(part))
    assert sorted(os.listdir(root)) == ["train", "val"]


def test_tars_become_shards(tars, capsys):
    assert extract(tars, "--shards") == 0
    check_shards(tars / "root")
    assert "9 training images and 5 validation images of 3 classes, 0 entries left out" in capsys.readouterr().out
    before = (tars / "root" / "train" / f"{CLASSES[0]}.tar").stat().st_mtime_ns
    assert extract(tars, "--shards") == 0
    assert (tars / "root" / "train" / f"{CLASSES[0]}.tar").stat().st_mtime_ns == before
    assert data.run(["info", str(tars / "root" / "train")]) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_class_without_validation_images_keeps_its_number_in_shards(tars):
    (tars / "labels.txt").write_text("".join(f"{name} {CLASSES[2]}\n" for name in VAL))
    assert extract(tars, "--shards") == 0
    classes, images = images_of(tars / "root" / "val")
    assert classes == list(CLASSES)
    assert {label for label, _ in images} == {2}


def test_a_class_without_validation_images_is_named_for_class_folders(tars, capsys):
    (tars / "labels.txt").write_text("".join(f"{name} {CLASSES[2]}\n" for name in VAL))
    assert extract(tars, "--shards") == 0
    assert "training refuses" not in capsys.readouterr().err
    shutil.rmtree(tars / "root")
    assert extract(tars) == 0
    words = f"no image of 2 of 3 classes, {CLASSES[0]} for one: training refuses class folders without images"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.tar", "val.tar", "labels.txt"])
def test_a_file_that_is_not_there(tars, capsys, name):
    (tars / name).unlink()
    assert extract(tars) == 2
    expected = f"{tars / name}: No such file or directory; give the path of a file that is there\n"
    assert capsys.readouterr().err == f"dbrdist-data: {expected}"


def test_root_is_a_file(tars, capsys):
    (tars / "root").write_text("x")
    assert extract(tars) == 2
    assert f"{tars / 'root'}: File exists; take a ROOT that is a folder" in capsys.readouterr().err


def test_images_of_one_stem_stay_apart_in_shards(tars):
    files = {"a.JPEG": b"1", "a.png": b"\x89PNG\r\n\x1a\n2", "b.JPEG": b"3"}
    (tars / "train.tar").write_bytes(tar_of({f"{w}.tar": tar_of(files) for w in CLASSES}))
    assert extract(tars, "--shards") == 0
    _, images = images_of(tars / "root" / "train")
    assert sorted(content for (label, _), content in images.items() if label == 1) == sorted(files.values())


def test_an_index_beside_the_class_folders_is_no_image(tars, capsys):
    assert extract(tars) == 0
    for part in ("train", "val"):
        assert data.run(["build", str(tars / "root" / part)]) == 0
    capsys.readouterr()
    assert extract(tars) == 0
    assert "9 training images and 5 validation images of 3 classes" in capsys.readouterr().out


def test_an_interrupted_run_into_shards_continues(tars, monkeypatch, capsys):
    """Killed once within each shard: its beginning is removed, and the same command ends well."""
    whole, seen = imagenet_shards.write_shard, set()

    def killed(folder, wnid, label, tar, images):
        if (folder, wnid) not in seen:
            seen.add((folder, wnid))
            with open(os.path.join(folder, f"{wnid}.tar.tmp-1-2"), "wb") as file:
                file.write(b"half")
            raise KeyboardInterrupt
        whole(folder, wnid, label, tar, images)

    monkeypatch.setattr(imagenet_shards, "write_shard", killed)
    codes = []
    while not codes or codes[-1]:
        codes.append(extract(tars, "--shards"))
        assert codes[-1] == 0 or not (tars / "root" / "val").exists()
    assert codes == [130] * 6 + [0]
    check_shards(tars / "root")


@each(first=["--shards", None])
def test_folders_and_shards_are_not_mixed(tars, capsys, monkeypatch, first):
    shutil.rmtree(tars / "root", ignore_errors=True)
    words = [[first] if first else [], [] if first else ["--shards"]]
    kinds = ("tar shards", "class folders") if first else ("class folders", "tar shards")
    with monkeypatch.context() as patch:
        patch.setattr(imagenet, "_finish", interrupt)
        assert extract(tars, *words[0]) == 130
    assert extract(tars, *words[1]) == 2
    advice = "give --shards" if first else "leave out --shards"
    assert f"train.part: expected {kinds[1]}, but it holds {kinds[0]}; {advice}" in capsys.readouterr().err
    assert extract(tars, *words[0]) == 0
    assert extract(tars, *words[1]) == 2
    assert f"root/train: expected {kinds[1]}, but it holds {kinds[0]}" in capsys.readouterr().err


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_kit_that_is_compressed_serves_a_whole_run(tars):
    (tars / "kit.tar.gz").write_bytes(gzip.compress(kit()))
    assert extract(tars, labels="kit.tar.gz") == 0
    check(tars / "root")


def test_an_interrupted_run_continues(tars, monkeypatch, capsys):
    """Interrupted once at each file: nothing partial has a final name, and the same command ends well."""
    whole, seen = imagenet._store, set()

    def interrupted(tar, member, path):
        if path not in seen:
            seen.add(path)
            with open(f"{path}.part", "wb") as file:
                file.write(b"half")
            raise KeyboardInterrupt
        whole(tar, member, path)

    monkeypatch.setattr(imagenet, "_store", interrupted)
    for _ in range(30):
        code = extract(tars)
        if code == 0:
            break
        assert code == 130
        assert not (tars / "root" / "val").exists()
        assert (tars / "root" / "train").exists() != (tars / "root" / "train.part").exists()
    check(tars / "root")
    assert "continuing" in capsys.readouterr().err


def test_a_full_disk_is_said_and_the_run_continues(tars, monkeypatch, capsys):
    def full(tar, member, path):
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(imagenet, "_store", full)
        assert extract(tars) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert extract(tars) == 0
    check(tars / "root")


def test_room_is_looked_for_before(tars, monkeypatch, capsys):
    monkeypatch.setattr(imagenet_plan.os, "statvfs", lambda path: type("Stat", (), {"f_bavail": 1, "f_frsize": 512})())
    assert extract(tars) == 2
    assert "the rest of the training images need" in capsys.readouterr().err


def test_what_is_no_image_is_left_out_and_named(tars, capsys):
    files = {f"{w}.tar": tar_of({**files, "readme.txt": b"?"}) for w, files in TRAIN.items()}
    (tars / "train.tar").write_bytes(tar_of({**files, "notes": b"!"}))
    assert extract(tars) == 0
    out = capsys.readouterr().out
    assert "train.tar: notes is no tar of a class and was left out" in out
    assert "train.tar: n01440764.tar: readme.txt is no image" in out
    assert "4 entries left out" in out
    check(tars / "root")


def cut(content, num_bytes):
    return content[: len(content) - num_bytes]


BAD = {
    "train.tar": {
        "is cut short: after 2 entries": WHOLE[: 2 * (512 + 10240)],
        "the tar is": cut(WHOLE, 13000),
        "expected a tar (not compressed), got another file, or a part": b"no tar at all" * 100,
        "are the tars swapped": tar_of(VAL),
        "it is empty": tar_of({}),
        "n01440764 is there twice": tar_of([("n01440764.tar", tar_of(TRAIN[CLASSES[0]]))] * 2),
        "expected images of this class, got none": tar_of({**CLASS_TARS, "n01440764.tar": tar_of({})}),
        "n01440764.tar: expected a tar of images": tar_of({"n01440764.tar": b"x" * 2000}),
        "n01440764.tar: the tar is": tar_of({"n01440764.tar": cut(tar_of(TRAIN[CLASSES[0]]), 9000)}),
        "a.JPEG is there twice": tar_of({**CLASS_TARS, "n01440764.tar": tar_of([("a.JPEG", b"1"), ("a.JPEG", b"2")])}),
        "which it does not have": tar_of({"n01440764.tar": tar_of(TRAIN[CLASSES[0]])}),
    },
    "val.tar": {
        "are the tars swapped": WHOLE,
        "expected validation images, got none": tar_of({"readme.txt": b"?"}),
        "1 of 6 validation images have no label, ILSVRC2012_val_00000009.JPEG": tar_of(
            {**VAL, "ILSVRC2012_val_00000009.JPEG": b"9"}
        ),
        "the tar is cut short: after 4 entries": tar_of(VAL)[: 4 * 1024],
    },
    "labels.txt": {
        "labels.txt:1: expected an image and its class, NAME WNID": b"ILSVRC2012_val_00000001.JPEG cat",
        "4 of 5 validation images have no label": b"ILSVRC2012_val_00000001.JPEG n01440764",
        "expected a line for each of 5 validation images, got 2": b"n01440764\nn01440764\n",
        "has two classes, n01440764 and n01443537": b"a.JPEG n01440764\na.JPEG n01443537",
        "there is no ILSVRC2012_validation_ground_truth.txt in it": tar_of({"meta.mat": b"x"}),
        "the development kit is damaged": tar_of({"meta.mat": b"x", imagenet_labels._GROUND_TRUTH: b"1"}),
    },
}


@pytest.mark.parametrize("more", [[], ["--shards"]])
@pytest.mark.parametrize("name", BAD)
@each(words=lambda name: BAD[name])
def test_bad_input_is_named_and_nothing_looks_complete(tmp_path, capsys, name, more, words):
    for file, content in {"train.tar": WHOLE, "val.tar": tar_of(VAL)}.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / "labels.txt").write_text(LABELS)
    (tmp_path / name).write_bytes(BAD[name][words])
    capsys.readouterr()
    assert extract(tmp_path, *more) == 2
    assert words in capsys.readouterr().err
    root = tmp_path / "root"
    assert not (root / "val").exists()
    shutil.rmtree(root, ignore_errors=True)


def test_labels_are_asked_for(tars, capsys):
    assert extract(tars, labels=None) == 2
    assert "give --labels ILSVRC2012_devkit_t12.tar.gz" in capsys.readouterr().err


def test_other_folders_that_are_there_are_not_touched(tars, capsys):
    (tars / "root" / "train" / "cats").mkdir(parents=True)
    assert extract(tars) == 2
    assert "it is there already, but with other classes (1, expected 3" in capsys.readouterr().err
    assert os.listdir(tars / "root" / "train") == ["cats"]


def test_official_tars_have_known_sizes_and_checksums(tars, capsys, monkeypatch):
    paths = [str(tars / name) for name in ("train.tar", "val.tar", "root")]
    words = ["imagenet", *paths, "--labels", str(tars / "labels.txt")]
    assert data.run(words) == 2
    assert "expected the 147,897,477,120 bytes of ILSVRC 2012, got" in capsys.readouterr().err
    sizes = {name: os.path.getsize(tars / name) for name in ("train.tar", "val.tar")}
    monkeypatch.setattr(imagenet, "TRAIN_FILE", (sizes["train.tar"], "0" * 32))
    monkeypatch.setattr(imagenet, "VAL_FILE", (sizes["val.tar"], "0" * 32))
    assert data.run(words) == 2
    assert f"expected the MD5 {'0' * 32}, got" in capsys.readouterr().err
    with pytest.raises(DatasetError, match=f"expected the MD5 {'0' * 32}, got"):
        imagenet.extract(*paths, str(tars / "labels.txt"))
    assert data.run([*words, "--no-checksums"]) == 2
    assert "expected 1,000 classes, got 3" in capsys.readouterr().err


@each(compressed=[False, True])
def test_numbers_and_words_of_matlabs_files_are_those_that_scipy_writes(compressed):
    scipy_io = pytest.importorskip("scipy.io")
    types = "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"
    numbers = {f"a_{t}": np.arange(6).reshape(2, 3).astype(t) for t in types}
    file = io.BytesIO()
    values = {**numbers, "text": "words", "cell": np.array(["a", "bc"], object)}
    scipy_io.savemat(file, values, do_compression=compressed)
    found = matlab.read(file.getvalue())
    assert (found.pop("text"), found.pop("cell")) == ("words", ["a", "bc"])
    assert {name: (a.dtype, a.tolist()) for name, a in found.items()} == {
        name: (a.dtype, a.tolist()) for name, a in numbers.items()
    }


def test_words_of_matlabs_files_may_have_two_bytes_for_each_character():
    def element(kind, content):
        return struct.pack("<II", kind, len(content)) + content + b"\0" * (-len(content) % 8)

    for kind, words in ((17, "öxß".encode("utf-16-le")), (4, "öxß".encode("utf-16-le")), (16, b"axz")):
        sizes = element(5, struct.pack("<ii", 1, 3))
        matrix = element(6, struct.pack("<II", 4, 0)) + sizes + element(1, b"text") + element(kind, words)
        read = matlab.read(b"\0" * 126 + b"IM" + element(14, matrix))
        assert read == {"text": "axz" if kind == 16 else "öxß"}


@each(content=[b"", b"x" * 200, b"\0" * 126 + b"IM" + b"\x0f\0\0\0\xff\0\0\0"])
def test_files_that_are_not_matlabs_are_refused(content):
    with pytest.raises(ValueError, match="MATLAB"):
        matlab.read(content)
