"""ImageNet (ILSVRC 2012) from the downloaded tars to class folders (ROOT/train/WNID/, ROOT/val/WNID/) or tar shards.

The training tar holds a tar for each class, named by its WordNet id; the validation tar holds 50,000 images whose
classes are in the development kit. Everything is extracted into ROOT/train.part and ROOT/val.part, and only what is
complete gets its final name, so that nothing partial looks whole, and an interrupted run continues where it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dbrdist.datasets.public import imagenet_shards, matlab
from dbrdist.errors import DatasetError

NUM_CLASSES, NUM_TRAIN, NUM_VAL = 1000, 1_281_167, 50_000
# Of the files as image-net.org has them: bytes and MD5.
TRAIN_FILE = (147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e")
VAL_FILE = (6_744_924_160, "29b22e2961454d5413ddabcf34fc5622")

_WNID = r"n[0-9]{8}"
_CLASS_TAR = re.compile(rf"({_WNID})\.tar")
_IMAGE = re.compile(r"[\w\-]+\.(JPEG|jpeg|jpg|JPG|png)")
_VAL_NUMBER = re.compile(r"_val_([0-9]{8})\.")
_CHUNK_BYTES = 1 << 22
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"

Say = Callable[[str], None]


class Skipped(NamedTuple):
    """An entry of a tar that is no image, and was left out."""

    tar: str
    name: str


class Extraction(NamedTuple):
    """What was made."""

    num_train: int
    num_val: int
    num_classes: int
    skipped: list[Skipped]


def extract(
    train: str, val: str, root: str, labels: str | None, *, shards: bool = False, is_official: bool = True,
    checksums: bool = True, say: Say = lambda words: None,
) -> Extraction:  # fmt: skip
    """Extract both tars below ``root``, into class folders or tar shards.

    Args:
        train, val: the tars.
        root: where the folders ``train`` and ``val`` are made.
        labels: the development kit (a tar.gz), or a text file with the classes of the validation images: lines of
            ``NAME WNID``, of a WNID for each image in the order of their names, or of ``NAME INDEX`` with numbers of
            the sorted classes from 0 on. None where ``root/val`` is complete already.
        shards: make a tar shard for each class, ``root/train/WNID.tar`` and ``root/val/WNID.tar``, and their index.
        is_official: expect the sizes and counts of ILSVRC 2012.
        checksums: compare the MD5 of both tars too.
        say: called with a sentence about each step.

    Raises:
        DatasetError: with what was expected, what was found, and what to do.
        OSError: if the file system refuses, for example on a full disk; call again to continue.
    """
    skipped: list[Skipped] = []
    os.makedirs(root, exist_ok=True)
    if is_official:
        for path, expected in ((train, TRAIN_FILE), (val, VAL_FILE)):
            _check_file(path, *expected, root, checksums, say)
    classes = _extract_train(train, root, shards, is_official, skipped, say)
    num_val = _extract_val(val, root, labels, classes, shards, is_official, skipped, say)
    num_train = _num_made(os.path.join(root, "train"))
    if is_official and num_train != NUM_TRAIN:
        raise DatasetError(f"{root}/train: expected {NUM_TRAIN:,} images, got {num_train:,}; remove it and start again")
    return Extraction(num_train, num_val, len(classes), skipped)


# ---- the files -------------------------------------------------------------------------------------------------------


def _check_file(path: str, num_bytes: int, md5: str, root: str, checksums: bool, say: Say) -> None:
    found = os.path.getsize(path)
    if found != num_bytes:
        kind = "cut short" if found < num_bytes else "another file"
        raise DatasetError(
            f"{path}: expected the {num_bytes:,} bytes of ILSVRC 2012, got {found:,}: it is {kind}; download it again, "
            "or take --any for tars of your own"
        )
    mark = os.path.join(root, f".verified-{md5}")
    state = f"{os.path.abspath(path)} {found} {os.stat(path).st_mtime_ns}"
    if not checksums or (os.path.exists(mark) and _text(mark) == state):
        return
    say(f"{path}: computing the MD5 of {found / 1e9:,.1f} GB")
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != md5:
        raise DatasetError(
            f"{path}: expected the MD5 {md5}, got {digest.hexdigest()}: it is damaged; download it again"
        )
    with open(mark, "w", encoding="utf-8") as file:
        file.write(state)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _members(tar: tarfile.TarFile, name: str, num_bytes: int) -> list[tarfile.TarInfo]:
    """The files in a tar, whose end must be there."""
    try:
        members = tar.getmembers()
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DatasetError(f"{name}: the tar is damaged: {error}; download it again") from error
    last = max((m.offset_data + -(-m.size // 512) * 512 for m in members), default=0)
    file: Any = tar.fileobj
    file.seek(last)
    if last + 512 > num_bytes or file.read(512).strip(b"\0"):
        raise DatasetError(
            f"{name}: the tar is cut short: after {len(members):,} entries there is no end mark; download it again"
        )
    return [m for m in members if m.isfile()]


def _opened(path: str) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a tar (not compressed), got another file, or a part of one: {error}"
        ) from error


def _unique(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DatasetError(f"{where}: {name} is there twice; expected each name once: download the tar again")
        seen.add(name)


def _store(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Extract one file, which has its name only when it is whole."""
    if os.path.exists(path) and os.path.getsize(path) == member.size:
        return
    source: Any = tar.extractfile(member)
    with open(f"{path}.part", "wb") as file:
        left = member.size
        while left:
            chunk = source.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise DatasetError(f"{tar.name}: the tar ends within {member.name}; download it again")
            file.write(chunk)
            left -= len(chunk)
    os.replace(f"{path}.part", path)


def _images(members: list[tarfile.TarInfo], where: str, skipped: list[Skipped]) -> list[tarfile.TarInfo]:
    """Those that are images; the rest is noted."""
    images = []
    for member in members:
        if _IMAGE.fullmatch(os.path.basename(member.name)):
            images.append(member)
        else:
            skipped.append(Skipped(where, member.name))
    _unique((os.path.basename(m.name) for m in images), where)
    return images


def _needs_room(root: str, num_bytes: int, what: str) -> None:
    stat = os.statvfs(root)
    free = stat.f_bavail * stat.f_frsize
    if free < num_bytes:
        raise DatasetError(
            f"{root}: {what} needs {num_bytes / 1e9:,.2f} GB, but {free / 1e9:,.2f} GB are free; make room, or take "
            "another folder, and start again: what is there already is kept"
        )


# ---- training --------------------------------------------------------------------------------------------------------


def _extract_train(
    path: str, root: str, shards: bool, is_official: bool, skipped: list[Skipped], say: Say
) -> list[str]:
    """Make ROOT/train; the classes, sorted."""
    done, part = os.path.join(root, "train"), os.path.join(root, "train.part")
    with _opened(path) as tar:
        members = _members(tar, path, os.path.getsize(path))
        tars = [(m, found[1]) for m in members if (found := _CLASS_TAR.fullmatch(os.path.basename(m.name)))]
        if not tars:
            looks = ", which look like validation images: are the tars swapped?" if members else ""
            first = f"; it begins with {members[0].name}{looks}" if members else ", it is empty"
            raise DatasetError(f"{path}: expected a tar of one tar for each class, such as n01440764.tar{first}")
        known = {m.name for m, _ in tars}
        skipped += [Skipped(path, m.name) for m in members if m.name not in known]
        _unique((wnid for _, wnid in tars), path)
        if is_official and len(tars) != NUM_CLASSES:
            raise DatasetError(f"{path}: expected {NUM_CLASSES:,} classes, got {len(tars):,}; download it again")
        classes = sorted(wnid for _, wnid in tars)
        if os.path.isdir(done):
            _check_kind(done, shards)
            _check_made(done, classes)
            say(f"{done} is there already")
            return classes
        _begin(part, shards)
        ending = imagenet_shards.ENDING if shards else ""
        missing = [(m, wnid) for m, wnid in tars if not os.path.exists(os.path.join(part, wnid + ending))]
        if len(missing) < len(tars):
            say(f"{part}: continuing, {len(tars) - len(missing):,} of {len(tars):,} classes are there")
        _needs_room(root, sum(m.size for m, _ in missing), "the rest of the training images")
        for number, (member, wnid) in enumerate(missing, 1):
            label = classes.index(wnid) if shards else None
            _extract_class(tar, member, part, wnid, path, label, skipped)
            say(f"train: {len(tars) - len(missing) + number:,} of {len(tars):,} classes")
    _finish(part, done, classes if shards else None)
    return classes


def _begin(part: str, shards: bool) -> None:
    """Make the folder of what is not complete yet, or continue in it."""
    os.makedirs(part, exist_ok=True)
    _check_kind(part, shards)
    imagenet_shards.remove_remains(part)


def _check_kind(folder: str, shards: bool) -> None:
    kind, wanted = imagenet_shards.kind_of(folder), "tar shards" if shards else "class folders"
    if kind not in (None, wanted):
        change = "leave out --shards" if shards else "give --shards"
        raise DatasetError(f"{folder}: expected {wanted}, but it holds {kind}; {change}, or take another ROOT")


def _finish(part: str, done: str, classes: list[str] | None) -> None:
    """Give what is complete its name, shards with the index that names all classes."""
    if classes is not None:
        imagenet_shards.write_index_of(part, classes)
    os.rename(part, done)


def _num_made(folder: str) -> int:
    """How many images are there; what lies beside the class folders, such as an index, is none."""
    if imagenet_shards.kind_of(folder) == "tar shards":
        return imagenet_shards.num_images(folder)
    with os.scandir(folder) as entries:
        return sum(len(os.listdir(entry.path)) for entry in entries if entry.is_dir())


def _check_made(folder: str, classes: list[str]) -> None:
    if imagenet_shards.kind_of(folder) == "tar shards":
        found = imagenet_shards.classes_in(folder)
    else:
        found = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
    if found != classes:
        odd = sorted(set(found) ^ set(classes))
        raise DatasetError(
            f"{folder}: it is there already, but with other classes ({len(found):,}, expected {len(classes):,}; "
            f"{odd[0]} for one); move it away, or take another ROOT"
        )


def _extract_class(
    tar: tarfile.TarFile, member: tarfile.TarInfo, part: str, wnid: str, path: str, label: int | None,
    skipped: list[Skipped],
) -> None:  # fmt: skip
    """Make a class's folder, or where it has a label, its shard."""
    where = f"{path}: {member.name}"
    inner: Any = tar.extractfile(member)
    try:
        images_tar = tarfile.open(fileobj=inner, mode="r:")  # noqa: SIM115 - closed below
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DatasetError(f"{where}: expected a tar of images: {error}; download it again") from error
    with images_tar:
        images = _images(_members(images_tar, where, member.size), where, skipped)
        if not images:
            raise DatasetError(f"{where}: expected images of this class, got none; download it again")
        if label is not None:
            imagenet_shards.write_shard(part, wnid, label, images_tar, images)
            return
        folder = os.path.join(part, f"{wnid}.part")
        os.makedirs(folder, exist_ok=True)
        for image in images:
            _store(images_tar, image, os.path.join(folder, os.path.basename(image.name)))
    os.rename(folder, os.path.join(part, wnid))


# ---- validation ------------------------------------------------------------------------------------------------------


def _extract_val(
    path: str, root: str, labels: str | None, classes: list[str], shards: bool, is_official: bool,
    skipped: list[Skipped], say: Say,
) -> int:  # fmt: skip
    done, part = os.path.join(root, "val"), os.path.join(root, "val.part")
    with _opened(path) as tar:
        members = _members(tar, path, os.path.getsize(path))
        if any(_CLASS_TAR.fullmatch(os.path.basename(m.name)) for m in members):
            raise DatasetError(f"{path}: expected validation images, got a tar of classes: are the tars swapped?")
        images = _images(members, path, skipped)
        if not images:
            raise DatasetError(f"{path}: expected validation images, got none; download it again")
        if is_official and len(images) != NUM_VAL:
            raise DatasetError(f"{path}: expected {NUM_VAL:,} images, got {len(images):,}; download it again")
        if os.path.isdir(done):
            _check_kind(done, shards)
            _check_made(done, classes)
            found = _num_made(done)
            if found != len(images):
                raise DatasetError(
                    f"{done}: it is there already with {found:,} images, expected {len(images):,}; move it away"
                )
            say(f"{done} is there already")
            return len(images)
        names = sorted(os.path.basename(m.name) for m in images)
        by_name = read_labels(labels, names, classes)
        _needs_room(root, sum(m.size for m in images) if not os.path.isdir(part) else 0, "the validation images")
        _begin(part, shards)
        store = _store_val_shards if shards else _store_val_images
        store(tar, images, by_name, classes, part, say)
    _finish(part, done, classes if shards else None)
    return len(images)


def _store_val_images(
    tar: tarfile.TarFile,
    images: list[tarfile.TarInfo],
    by_name: dict[str, str],
    classes: list[str],
    part: str,
    say: Say,
) -> None:
    for wnid in classes:  # each class, also one without images: the folders of both parts must agree
        os.makedirs(os.path.join(part, wnid), exist_ok=True)
    for number, image in enumerate(images, 1):
        name = os.path.basename(image.name)
        _store(tar, image, os.path.join(part, by_name[name], name))
        if not number % 5000:
            say(f"val: {number:,} of {len(images):,} images")


def _store_val_shards(
    tar: tarfile.TarFile,
    images: list[tarfile.TarInfo],
    by_name: dict[str, str],
    classes: list[str],
    part: str,
    say: Say,
) -> None:
    of_class: dict[str, list[tarfile.TarInfo]] = {wnid: [] for wnid in classes}
    for image in images:
        of_class[by_name[os.path.basename(image.name)]].append(image)
    for label, (wnid, own) in enumerate(of_class.items()):
        if own and not os.path.exists(os.path.join(part, wnid + imagenet_shards.ENDING)):
            imagenet_shards.write_shard(part, wnid, label, tar, own)
        say(f"val: {label + 1:,} of {len(classes):,} classes")


def read_labels(path: str | None, names: list[str], classes: list[str]) -> dict[str, str]:
    """The class of each validation image, by name."""
    if path is None:
        raise DatasetError(
            "expected the classes of the validation images, which their tar does not have: give --labels "
            "ILSVRC2012_devkit_t12.tar.gz, the development kit, or a text file with a line NAME WNID for each image"
        )
    found = _from_kit(path, names) if tarfile.is_tarfile(path) else _from_text(path, names, classes)
    missing = [name for name in names if name not in found]
    if missing:
        raise DatasetError(
            f"{path}: {len(missing):,} of {len(names):,} validation images have no label, {missing[0]} for one"
        )
    unknown = sorted({found[name] for name in names} - set(classes))
    if unknown:
        raise DatasetError(f"{path}: expected classes of the training tar, got {unknown[0]}, which it does not have")
    return found


def _from_kit(path: str, names: list[str]) -> dict[str, str]:
    """Classes by the development kit: numbers in the order of the images, and what they mean in ``meta.mat``."""
    wanted: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in (_GROUND_TRUTH, "meta.mat"):
                    wanted[name] = tar.extractfile(member).read()  # type: ignore[union-attr]
        for name in (_GROUND_TRUTH, "meta.mat"):
            if name not in wanted:
                raise DatasetError(f"{path}: expected the development kit of ILSVRC 2012, but there is no {name} in it")
        synsets = matlab.read(wanted["meta.mat"])["synsets"]
        by_id = {int(s["ILSVRC2012_ID"].item()): str(s["WNID"]) for s in synsets}
        ids = [int(word) for word in wanted[_GROUND_TRUTH].split()]
        wnids = [by_id[i] for i in ids]
    except (tarfile.TarError, EOFError, OSError, ValueError, KeyError) as error:
        raise DatasetError(f"{path}: the development kit is damaged: {error}; download it again") from error
    numbers = [_VAL_NUMBER.search(name) for name in names]
    if all(numbers):
        places = [int(found[1]) - 1 for found in numbers if found]
    else:
        places = list(range(len(names)))
    if len(wnids) < len(names) or max(places, default=0) >= len(wnids):
        raise DatasetError(f"{path}: it has classes of {len(wnids):,} validation images, expected {len(names):,}")
    return {name: wnids[place] for name, place in zip(names, places)}


def _from_text(path: str, names: list[str], classes: list[str]) -> dict[str, str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.replace(",", " ").split() for line in file]
    lines = [words for words in lines if words and not words[0].startswith("#")]
    if all(len(words) == 1 for words in lines):
        if len(lines) != len(names):
            raise DatasetError(
                f"{path}: expected a line for each of {len(names):,} validation images, got {len(lines):,}"
            )
        lines = [[name, words[0]] for name, words in zip(names, lines)]
    found: dict[str, str] = {}
    for number, words in enumerate(lines, 1):
        name = os.path.basename(words[0])
        name = name if _IMAGE.fullmatch(name) else f"{name}.JPEG"
        if len(words) < 2 or not (wnid := _class_of(words[1], classes)):
            raise DatasetError(
                f"{path}:{number}: expected an image and its class, NAME WNID, got {' '.join(words)!r:.80}"
            )
        if found.setdefault(name, wnid) != wnid:
            raise DatasetError(f"{path}:{number}: {name} has two classes, {found[name]} and {wnid}")
    return found


def _class_of(word: str, classes: list[str]) -> str | None:
    if re.fullmatch(_WNID, word):
        return word
    return classes[int(word)] if word.isdecimal() and int(word) < len(classes) else None
