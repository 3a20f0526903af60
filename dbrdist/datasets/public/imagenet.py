"""ImageNet (ILSVRC 2012) from the downloaded tars to class folders (ROOT/train/WNID/, ROOT/val/WNID/) or tar shards.

The training tar holds a tar for each class, named by its WordNet id; the validation tar holds 50,000 images whose
classes are in the development kit. Tars, labels and ROOT are checked before anything is written. Everything is
extracted into ROOT/train.part and ROOT/val.part, and only what is complete gets its final name, so that nothing partial
looks whole, and an interrupted run continues where it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from dbrdist.datasets.public import imagenet_plan, imagenet_shards, imagenet_tars
from dbrdist.datasets.public.imagenet_labels import read_labels as read_labels
from dbrdist.datasets.public.imagenet_plan import Say, TarPlan, Work
from dbrdist.datasets.public.imagenet_tars import Skipped, base
from dbrdist.errors import DatasetError

# Of the files as image-net.org has them: bytes and MD5.
TRAIN_FILE = (147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e")
VAL_FILE = (6_744_924_160, "29b22e2961454d5413ddabcf34fc5622")

_CHUNK_BYTES = 1 << 22
_MAGIC = (b"\xff\xd8", b"\x89PNG")  # of JPEG and PNG
_ADVICE = {
    errno.ENOSPC: "make room, and start the same command again: what is complete is kept",
    errno.EDQUOT: "make room, and start the same command again: what is complete is kept",
    errno.EACCES: "take a ROOT that you may write to",
    errno.EPERM: "take a ROOT that you may write to",
    errno.EROFS: "take a ROOT that you may write to",
    errno.ENOENT: "give the path of a file that is there",
    errno.EEXIST: "take a ROOT that is a folder, or is not there yet",
    errno.ENOTDIR: "take a ROOT that is a folder, or is not there yet",
}


class Extraction(NamedTuple):
    """What was made."""

    num_train: int
    num_val: int
    num_classes: int
    skipped: list[Skipped]
    odd: list[str]  # images that begin neither as a JPEG nor as a PNG; they were extracted


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
        DatasetError: with what was expected, what was found, and what to do; also if the disk is full or must not be
            written to. Call again to continue.
        OSError: if the file system fails otherwise.
    """
    work = Work(root, shards, is_official, say, [], [])
    try:
        os.makedirs(root, exist_ok=True)
        with _alone_in(root):
            if is_official:
                for path, expected in ((train, TRAIN_FILE), (val, VAL_FILE)):
                    imagenet_plan.check_file(path, *expected, root, checksums, say)
            with imagenet_tars.opened(train) as train_tar, imagenet_tars.opened(val) as val_tar:
                parts = imagenet_plan.look(work, train, train_tar, val, val_tar, labels)
                return _make(work, *parts)
    except OSError as error:
        if error.errno in _ADVICE and not isinstance(error, DatasetError):
            raise DatasetError(f"{error.filename or root}: {error.strerror}; {_ADVICE[error.errno]}") from error
        raise


@contextlib.contextmanager
def _alone_in(root: str) -> Iterator[None]:
    """Within the block no other process extracts into ROOT; on file systems without locks nobody is kept out."""
    path = os.path.join(root, ".extracting")
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                words = "another dbrdist-data imagenet extracts into this folder; wait until it ends, or take another"
                raise DatasetError(f"{root}: {words} ROOT") from None
            except OSError:
                pass
            try:
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    continue
            except FileNotFoundError:  # its holder has just removed it
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.remove(path)
            return


# ---- making ----------------------------------------------------------------------------------------------------------


def _make(work: Work, train: TarPlan, val: TarPlan) -> Extraction:
    for part, store in ((train, _store_classes), (val, _store_val_shards if work.shards else _store_val_images)):
        if not part.is_made:
            folder = _begin(work, part)
            store(work, part, folder)
            _finish(work, part, folder)
        with contextlib.suppress(FileNotFoundError):
            os.remove(work.mark(part.name))
    return Extraction(_num_made(work.folder("train")), len(val.members), len(train.classes), work.skipped, work.odd)


def _begin(work: Work, part: TarPlan) -> str:
    """Make the folder of what is not complete yet, or continue in it."""
    folder = f"{work.folder(part.name)}.part"
    if not os.path.isdir(folder) or not os.listdir(folder):
        with open(work.mark(part.name), "w", encoding="utf-8") as file:
            file.write(part.source())
    os.makedirs(folder, exist_ok=True)
    imagenet_shards.remove_remains(folder)
    return folder


def _finish(work: Work, part: TarPlan, folder: str) -> None:
    """Give what is complete its name, shards with the index that names all classes."""
    ending = imagenet_shards.ENDING if work.shards else ""
    known = {wnid + ending for wnid in part.classes}
    for name in sorted(os.listdir(folder)):
        is_class = name.endswith(ending) if work.shards else os.path.isdir(os.path.join(folder, name))
        if is_class and name not in known:
            raise DatasetError(f"{folder}: expected the classes of {part.path} alone, got {name} too; move that away")
    if work.shards:
        imagenet_shards.write_index_of(folder, part.classes)
    elif work.is_official:
        os.sync()  # files are whole after a power cut, too
    os.rename(folder, work.folder(part.name))


def _num_made(folder: str) -> int:
    """How many images are there; what is beside the class folders, such as an index, is none."""
    if imagenet_shards.kind_of(folder) == "tar shards":
        return imagenet_shards.num_images(folder)
    with os.scandir(folder) as entries:
        folders = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sum(sum(map(imagenet_tars.is_image, os.listdir(path))) for path in folders)


def _store_classes(work: Work, part: TarPlan, folder: str) -> None:
    """Make a folder or a shard of each class of the training tar."""
    left = imagenet_plan.missing(work, part)
    if len(left) < len(part.members):
        num_there = len(part.members) - len(left)
        work.say(f"{folder}: continuing, {num_there:,} of {len(part.members):,} classes are there")
    for number, member in enumerate(left, len(part.members) - len(left) + 1):
        _store_class(work, part, member, folder)
        work.say(f"train: {number:,} of {len(part.members):,} classes")


def _store_class(work: Work, part: TarPlan, member: tarfile.TarInfo, folder: str) -> None:
    wnid, where = imagenet_plan.part_class(part, member), f"{part.path}: {member.name}"
    with imagenet_tars.opened_within(part.tar, member, where) as tar:
        images = imagenet_plan.images_of(work, part, tar, member)
        if work.shards:
            _note_odd(work, tar, images, where)
            imagenet_shards.write_shard(folder, wnid, part.classes.index(wnid), tar, images)
            return
        place = os.path.join(folder, f"{wnid}.part")
        os.makedirs(place, exist_ok=True)
        for image in images:
            _store(tar, image, os.path.join(place, base(image)))
        _note_odd(work, tar, images, where)
    os.rename(place, os.path.join(folder, wnid))


def _store(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Extract one file, which has its name only when it is whole."""
    if imagenet_plan.is_stored(member, path):
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


def _note_odd(work: Work, tar: tarfile.TarFile, images: list[tarfile.TarInfo], where: str) -> None:
    file: Any = tar.fileobj
    for image in images:
        file.seek(image.offset_data)
        if not file.read(4).startswith(_MAGIC):
            work.odd.append(f"{where}: {image.name}")


def _store_val_images(work: Work, part: TarPlan, folder: str) -> None:
    for wnid in part.classes:  # each class, also one without images: the folders of both parts must agree
        os.makedirs(os.path.join(folder, wnid), exist_ok=True)
    for number, image in enumerate(part.members, 1):
        _store(part.tar, image, os.path.join(folder, imagenet_plan.part_class(part, image), base(image)))
        if not number % 5000:
            work.say(f"val: {number:,} of {len(part.members):,} images")
    _note_odd(work, part.tar, part.members, part.path)


def _store_val_shards(work: Work, part: TarPlan, folder: str) -> None:
    of_class: dict[str, list[tarfile.TarInfo]] = {wnid: [] for wnid in part.classes}
    for image in imagenet_plan.missing(work, part):
        of_class[imagenet_plan.part_class(part, image)].append(image)
    for label, (wnid, images) in enumerate(of_class.items()):
        if images:
            _note_odd(work, part.tar, images, part.path)
            imagenet_shards.write_shard(folder, wnid, label, part.tar, images)
        work.say(f"val: {label + 1:,} of {len(part.classes):,} classes")
