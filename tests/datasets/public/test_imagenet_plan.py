"""What is in ROOT already, from nothing to a complete extraction, and what is not to be taken for one."""

import errno
import fcntl
import os
import shutil

import pytest

from dbrdist.datasets.public import imagenet, imagenet_plan
from tests.datasets.public.imagenet_helpers import CLASS_TARS, CLASSES, LABELS, TRAIN, VAL, check, extract, tar_of
from tests.each import each

KINDS = {"folders": [], "shards": ["--shards"]}


@each(name=["root", "root/train", "root/val", "root/train.part"], kind=["file", "dangling link"])
def test_a_file_in_the_way_is_found_at_once(tars, capsys, name, kind):
    shutil.rmtree(tars / "root", ignore_errors=True)
    (tars / "root").mkdir() if name != "root" else None
    place = tars / name
    place.write_bytes(b"1") if kind == "file" else place.symlink_to(tars / "nowhere" / "at all")
    assert extract(tars) == 2
    err = capsys.readouterr().err
    assert str(place) in err
    if name != "root":
        assert "expected a folder, or nothing, got a file; move it away" in err
        assert os.listdir(tars / "root") == [place.name]
    place.unlink()


@each(kind=KINDS)
def test_empty_folders_give_their_places(tars, kind):
    shutil.rmtree(tars / "root", ignore_errors=True)
    for part in ("train", "val", "train.part"):
        (tars / "root" / part).mkdir(parents=True)
    assert extract(tars, *KINDS[kind]) == 0
    assert kind == "shards" or check(tars / "root") is None


def lose(place):
    place.unlink()


def shorten(place):
    place.write_bytes(place.read_bytes()[:-1])


def add(place):
    (place.parent / "more.JPEG").write_bytes(b"1")


@each(part=["train", "val"], change=[lose, shorten, add], labels=["labels.txt", None])
def test_what_was_changed_later_is_not_complete(tars, capsys, part, change, labels):
    shutil.rmtree(tars / "root", ignore_errors=True)
    assert extract(tars) == 0
    change(next(p for p in sorted((tars / "root" / part / CLASSES[2]).iterdir()) if p.stat().st_size > 1))
    assert extract(tars, labels=labels) == 2
    err = capsys.readouterr().err
    assert f"root/{part}: it is there already" in err
    assert "expected" in err
    assert "move it away" in err


@each(change=[lose, shorten, lambda p: shutil.copy(p, p.parent / "n99999999.tar")])
def test_shards_that_were_changed_later_are_not_complete(tars, capsys, change):
    shutil.rmtree(tars / "root", ignore_errors=True)
    assert extract(tars, "--shards") == 0
    change(tars / "root" / "train" / f"{CLASSES[1]}.tar")
    assert extract(tars, "--shards") == 2
    assert "root/train: it is there already, but changed since it was made" in capsys.readouterr().err


@each(kind=KINDS, labels=["labels.txt", None])
def test_files_of_other_kinds_beside_images_do_not_matter(tars, kind, labels):
    shutil.rmtree(tars / "root", ignore_errors=True)
    assert extract(tars, *KINDS[kind]) == 0
    (tars / "root" / "notes.txt").write_text("?")
    if kind == "folders":
        (tars / "root" / "train" / CLASSES[0] / "Thumbs.db").write_text("?")
        (tars / "root" / "val" / ".hidden").mkdir()
    assert extract(tars, *KINDS[kind], labels=labels) == 0


@each(kind=KINDS)
def test_other_labels_do_not_find_the_validation_images_complete(tars, capsys, kind):
    shutil.rmtree(tars / "root", ignore_errors=True)
    (tars / "labels.txt").write_text(LABELS)
    assert extract(tars, *KINDS[kind]) == 0
    (tars / "labels.txt").write_text("".join(f"{name} {CLASSES[0]}\n" for name in VAL))
    assert extract(tars, *KINDS[kind]) == 2
    assert "root/val: it is there already, but n01440764 has 2 images of" in capsys.readouterr().err


def interrupted(tars, monkeypatch, kind, part):
    """An extraction that was ended before a part got its name."""
    shutil.rmtree(tars / "root", ignore_errors=True)
    whole = imagenet._finish

    def finish(work, given, folder):
        if given.name == part:
            raise KeyboardInterrupt
        whole(work, given, folder)

    with monkeypatch.context() as patch:
        patch.setattr(imagenet, "_finish", finish)
        assert extract(tars, *KINDS[kind]) == 130


@each(kind=KINDS)
def test_the_beginning_of_another_tar_is_not_continued(tars, capsys, monkeypatch, kind):
    interrupted(tars, monkeypatch, kind, "train")
    whole = (tars / "train.tar").read_bytes()
    (tars / "train.tar").write_bytes(tar_of({**CLASS_TARS, f"{CLASSES[0]}.tar": tar_of({"a.JPEG": b"1"})}))
    assert extract(tars, *KINDS[kind]) == 2
    err = capsys.readouterr().err
    assert "root/train.part: expected the beginning of" in err
    assert "but it was begun from another tar; move it away" in err
    (tars / "train.tar").write_bytes(whole)
    assert extract(tars, *KINDS[kind]) == 0


@each(kind=KINDS)
def test_the_beginning_with_other_labels_is_not_continued(tars, capsys, monkeypatch, kind):
    """Or an image would be in two classes."""
    (tars / "labels.txt").write_text(LABELS)
    interrupted(tars, monkeypatch, kind, "val")
    (tars / "labels.txt").write_text("".join(f"{name} {CLASSES[0]}\n" for name in VAL))
    assert extract(tars, *KINDS[kind]) == 2
    assert "but it was begun from another tar or with other labels; move it away" in capsys.readouterr().err


def test_a_beginning_of_somebody_elses_is_not_continued(tars, capsys):
    (tars / "root" / "train.part" / CLASSES[0]).mkdir(parents=True)
    assert extract(tars) == 2
    assert "but it was not begun by this command; move it away" in capsys.readouterr().err


@each(kind=KINDS)
def test_a_class_that_the_tar_does_not_have_keeps_the_rest_from_its_name(tars, capsys, monkeypatch, kind):
    interrupted(tars, monkeypatch, kind, "train")
    if kind == "folders":
        (tars / "root" / "train.part" / "n99999999").mkdir()
    else:
        (tars / "root" / "train.part" / "n99999999.tar").write_bytes(tar_of({}))
    assert extract(tars, *KINDS[kind]) == 2
    err = capsys.readouterr().err
    assert "got n99999999" in err
    assert "move that away" in err
    assert not (tars / "root" / "train").exists()


CALLS = ("rename", "replace", "makedirs", "remove")


@pytest.mark.slow
@each(kind=KINDS, after=[False, True])
def test_an_interruption_at_any_change_of_the_disk_continues(tars, monkeypatch, kind, after):
    """Each run is ended at its first change that no run has come to before, shortly before it or shortly after."""
    shutil.rmtree(tars / "root", ignore_errors=True)
    seen, codes = set(), []

    def ended(call, whole):
        def do(*args, **options):
            key = (call, *map(str, args[:1]))
            fresh = str(tars) in str(args[0]) and key not in seen
            seen.add(key)
            if fresh and not after:
                raise KeyboardInterrupt
            result = whole(*args, **options)
            if fresh:
                raise KeyboardInterrupt
            return result

        return do

    while not codes or codes[-1]:
        with monkeypatch.context() as patch:
            for call in CALLS:
                patch.setattr(imagenet.os, call, ended(call, getattr(os, call)))
            codes.append(extract(tars, *KINDS[kind]))
        assert codes[-1] in (0, 130)
        assert len(codes) < 100
        for part, number in (("train", 3), ("val", 3)):
            folder = tars / "root" / part
            if folder.exists():
                assert sum(1 for p in folder.iterdir() if p.name.startswith("n")) == number
    assert len(codes) > 12
    assert kind == "shards" or check(tars / "root") is None
    assert sorted(os.listdir(tars / "root")) == ["train", "val"]


@each(kind=KINDS)
def test_two_commands_at_once(tars, capsys, kind):
    (tars / "root").mkdir(exist_ok=True)
    with open(tars / "root" / ".extracting", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert extract(tars, *KINDS[kind]) == 2
        err = capsys.readouterr().err
        assert "root: another dbrdist-data imagenet extracts into this folder; wait until it ends" in err
        assert os.listdir(tars / "root") == [".extracting"]
    assert extract(tars, *KINDS[kind]) == 0  # the lock ends with its process; the file may stay
    assert sorted(os.listdir(tars / "root")) == ["train", "val"]
    shutil.rmtree(tars / "root")


@each(**{"number, words": [
    (errno.ENOSPC, "make room, and start the same command again: what is complete is kept"),
    (errno.EDQUOT, "make room, and start the same command again: what is complete is kept"),
    (errno.EROFS, "take a ROOT that you may write to"),
    (errno.EACCES, "take a ROOT that you may write to"),
]})  # fmt: skip
def test_a_disk_that_refuses(tars, capsys, monkeypatch, number, words):
    def refuse(*args):
        raise OSError(number, os.strerror(number), "the file")

    shutil.rmtree(tars / "root", ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(imagenet.os, "replace", refuse)
        assert extract(tars) == 2
    assert f"the file: {os.strerror(number)}; {words}" in capsys.readouterr().err
    assert not (tars / "root" / "train").exists()
    assert extract(tars) == 0
    check(tars / "root")


def test_labels_are_asked_for_before_the_training_images_are_extracted(tars, capsys):
    assert extract(tars, labels=None) == 2
    assert "give --labels" in capsys.readouterr().err
    assert os.listdir(tars / "root") == []


def test_room_is_looked_for_for_both_parts(tars, capsys, monkeypatch):
    train = sum(len(content) for content in CLASS_TARS.values())
    stat = type("Stat", (), {"f_bavail": train, "f_frsize": 1})()
    monkeypatch.setattr(imagenet_plan.os, "statvfs", lambda path: stat)
    assert extract(tars) == 2
    assert "root: the rest of the images need 0.00 GB" in capsys.readouterr().err
    assert os.listdir(tars / "root") == []


@each(num_of_first=[49, 51])
def test_official_labels_have_50_images_of_each_class(num_of_first):
    names = [f"{i}.JPEG" for i in range(100)]
    by_name = {name: CLASSES[i >= num_of_first] for i, name in enumerate(names)}
    with pytest.raises(
        ValueError, match=f"expected 50 validation images of each class, got {num_of_first} of n01440764"
    ):
        imagenet_plan._check_counts("labels", by_name)
    imagenet_plan._check_counts("labels", {name: CLASSES[i >= 50] for i, name in enumerate(names)})


def test_sizes_of_class_folders(tars):
    assert extract(tars) == 0
    found = imagenet_plan._sizes_in(str(tars / "root" / "train"), False)
    assert found == {wnid: (3, sum(map(len, TRAIN[wnid].values()))) for wnid in CLASSES}
    assert imagenet_plan._sizes_in(str(tars / "root" / "train"), True) == dict.fromkeys(CLASSES, (3, 0))
