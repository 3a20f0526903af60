"""What extracting ImageNet's tars is going to do: tars, labels and ROOT are checked before anything is written."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dbrdist.datasets.public import imagenet_shards, imagenet_tars
from dbrdist.datasets.public.imagenet_labels import read_labels
from dbrdist.datasets.public.imagenet_tars import CLASS_TAR, Skipped, base
from dbrdist.errors import DatasetError

NUM_CLASSES, NUM_TRAIN, NUM_VAL = 1000, 1_281_167, 50_000
_CHUNK_BYTES = 1 << 22

Say = Callable[[str], None]
CountAndBytes = tuple[int, int]  # a number of images, and their bytes


class Work(NamedTuple):
    """How an extraction is done, and what it notes."""

    root: str
    shards: bool
    is_official: bool
    say: Say
    skipped: list[Skipped]
    odd: list[str]  # images that begin neither as a JPEG nor as a PNG; they are extracted

    def folder(self, name: str) -> str:
        """Where the images of `train` or `val` are in the end."""
        return os.path.join(self.root, name)

    def mark(self, name: str) -> str:
        """The file that says of which tar the unfinished images of `train` or `val` are."""
        return os.path.join(self.root, f".{name}-source")


class TarPlan(NamedTuple):
    """The training or the validation images: what their tar holds, and whether they are extracted already."""

    name: str  # train or val
    path: str
    tar: tarfile.TarFile
    members: list[tarfile.TarInfo]  # tars of classes, or images
    classes: list[str]
    labels: dict[str, str]  # the class of each validation image, where they are asked for
    is_made: bool

    def source(self) -> str:
        """What the tar and the labels are told apart by."""
        labels = (f"{name} {wnid}" for name, wnid in sorted(self.labels.items()))
        return imagenet_tars.fingerprint(self.tar, self.members, labels)


def look(
    work: Work, train: str, train_tar: tarfile.TarFile, val: str, val_tar: tarfile.TarFile, labels: str | None
) -> tuple[TarPlan, TarPlan]:
    """What is to be done; raises where it could not be done to the end."""
    tars = _class_tars(work, train, train_tar)
    classes = sorted(wnid for _, wnid in tars)
    images = _val_images(work, val, val_tar)
    are_made = [_is_made(work, name) for name in ("train", "val")]
    by_name: dict[str, str] = {}
    if labels is not None or not are_made[1]:
        by_name = read_labels(labels, sorted(map(base, images)), classes)
        if work.is_official:
            _check_counts(labels, by_name)
    images = imagenet_tars.with_content(images, val, work.skipped)
    if work.is_official and len(images) != NUM_VAL:
        raise DatasetError(f"{val}: expected {NUM_VAL:,} images, got {len(images):,}; download it again")
    without = sorted(set(classes) - {by_name[base(m)] for m in images}) if by_name and not work.shards else []
    if without:
        work.say(
            f"{val}: no image of {len(without):,} of {len(classes):,} classes, {without[0]} for one: training refuses "
            "class folders without images; take --shards, or a tar that has all classes"
        )
    parts = (
        TarPlan("train", train, train_tar, [m for m, _ in tars], classes, {}, are_made[0]),
        TarPlan("val", val, val_tar, images, classes, by_name, are_made[1]),
    )
    num_bytes = 0
    for part, what in zip(parts, ("the rest of the training images", "the rest of the images")):
        if part.is_made:
            _check_made(work, part)
            work.say(f"{work.folder(part.name)} is there already")
        else:
            _check_begun(work, part)
            num_bytes += sum(m.size for m in missing(work, part))
            check_room(work.root, num_bytes, what)
    return parts


# ---- the tars --------------------------------------------------------------------------------------------------------


def check_file(path: str, num_bytes: int, md5: str, root: str, checksums: bool, say: Say) -> None:
    found = os.path.getsize(path)
    if found != num_bytes:
        imagenet_tars.opened(path).close()  # says so if it is no tar at all
        kind = "cut short" if found < num_bytes else "another file"
        raise DatasetError(
            f"{path}: expected the {num_bytes:,} bytes of ILSVRC 2012, got {found:,}: it is {kind}; download it again, "
            "or take --any for tars of your own"
        )
    mark = os.path.join(root, f".verified-{md5}")
    state = f"{os.path.abspath(path)} {found} {os.stat(path).st_mtime_ns}"
    if not checksums or _text(mark) == state:
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


def _text(path: str) -> str | None:
    """What a small file of ours has; None without it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _class_tars(work: Work, path: str, tar: tarfile.TarFile) -> list[tuple[tarfile.TarInfo, str]]:
    """The tars of classes in the training tar, with their WNIDs."""
    members = imagenet_tars.files(tar, path, os.path.getsize(path), work.skipped)
    tars = [(m, found[1]) for m in members if (found := CLASS_TAR.fullmatch(base(m)))]
    if not tars:
        looks = ""
        if members and imagenet_tars.is_image(base(members[0])):
            looks = ", which look like validation images: are the tars swapped?"
        elif members and members[0].name.endswith((".tar", ".gz")):
            looks = ": extract that first, and give the tar of one tar for each class"
        first = f"; it begins with {members[0].name}{looks}" if members else ", it is empty"
        raise DatasetError(f"{path}: expected a tar of one tar for each class, such as n01440764.tar{first}")
    known = {id(m) for m, _ in tars}
    work.skipped.extend(Skipped(path, m.name, "is no tar of a class") for m in members if id(m) not in known)
    imagenet_tars.check_unique((wnid for _, wnid in tars), path)
    if work.is_official and len(tars) != NUM_CLASSES:
        raise DatasetError(f"{path}: expected {NUM_CLASSES:,} classes, got {len(tars):,}; download it again")
    for member, _ in tars:
        imagenet_tars.check_ends(tar, member, f"{path}: {member.name}")
    return tars


def _val_images(work: Work, path: str, tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members = imagenet_tars.files(tar, path, os.path.getsize(path), work.skipped)
    if any(CLASS_TAR.fullmatch(base(m)) for m in members):
        raise DatasetError(f"{path}: expected validation images, got a tar of classes: are the tars swapped?")
    images = imagenet_tars.images(members, path, work.skipped)
    if not images:
        raise DatasetError(f"{path}: expected validation images, got none; download it again")
    return images


def _check_counts(labels: str | None, by_name: dict[str, str]) -> None:
    """ILSVRC 2012 has as many validation images of each class."""
    for wnid, count in sorted(Counter(by_name.values()).items()):
        if count != NUM_VAL // NUM_CLASSES:
            raise DatasetError(
                f"{labels}: expected {NUM_VAL // NUM_CLASSES} validation images of each class, got {count} of {wnid}; "
                "give the development kit of ILSVRC 2012, ILSVRC2012_devkit_t12.tar.gz"
            )


# ---- ROOT ------------------------------------------------------------------------------------------------------------


def _is_made(work: Work, name: str) -> bool:
    folder = work.folder(name)
    for path in (folder, f"{folder}.part"):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise DatasetError(f"{path}: expected a folder, or nothing, got a file; move it away")
    if not os.path.isdir(folder) or not os.listdir(folder):  # an empty folder gives its place to the new one
        return False
    _check_kind(folder, work.shards)
    return True


def _check_kind(folder: str, shards: bool) -> None:
    kind, wanted = imagenet_shards.kind_of(folder), "tar shards" if shards else "class folders"
    if kind not in (None, wanted):
        change = "leave out --shards" if shards else "give --shards"
        raise DatasetError(f"{folder}: expected {wanted}, but it holds {kind}; {change}, or take another ROOT")


def _check_begun(work: Work, part: TarPlan) -> None:
    """Whether what is unfinished is of this tar, with these labels."""
    folder = f"{work.folder(part.name)}.part"
    if not os.path.isdir(folder) or not os.listdir(folder):
        return
    _check_kind(folder, work.shards)
    found = _text(work.mark(part.name))
    if found != part.source():
        labels = " or with other labels" if part.name == "val" else ""
        begun = f"begun from another tar{labels}" if found else "not begun by this command"
        raise DatasetError(f"{folder}: expected the beginning of {part.path}, but it was {begun}; move it away")


def missing(work: Work, part: TarPlan) -> list[tarfile.TarInfo]:
    """The entries that are not extracted yet."""
    folder = f"{work.folder(part.name)}.part"
    if part.name == "train" or work.shards:
        names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        ending = imagenet_shards.ENDING if work.shards else ""
        return [m for m in part.members if part_class(part, m) + ending not in names]
    return [m for m in part.members if not is_stored(m, os.path.join(folder, part_class(part, m), base(m)))]


def part_class(part: TarPlan, member: tarfile.TarInfo) -> str:
    """The WNID of a class's tar, or of a validation image."""
    return part.labels[base(member)] if part.name == "val" else base(member).removesuffix(".tar")


def is_stored(member: tarfile.TarInfo, path: str) -> bool:
    """Whether a file is extracted: files get their names when they are whole."""
    return os.path.exists(path) and os.path.getsize(path) == member.size


def _check_made(work: Work, part: TarPlan) -> None:
    """Whether what is there already is what the tar has."""
    folder = work.folder(part.name)
    counts_only = part.name == "train" and work.is_official  # asking 1.3 million files for their sizes takes too long
    found = imagenet_shards.sizes_in(folder) if work.shards else _sizes_in(folder, counts_only)
    classes = sorted(found)
    if classes != part.classes:
        odd = sorted(set(classes) ^ set(part.classes))
        raise DatasetError(
            f"{folder}: it is there already, but with other classes ({len(found):,}, expected {len(part.classes):,}; "
            f"{odd[0]} for one); move it away, or take another ROOT"
        )
    for wnid, expected in _expected(work, part, found):
        if found[wnid] != expected:
            raise DatasetError(
                f"{folder}: it is there already, but {wnid} has {_images(found[wnid])}, expected {_images(expected)}; "
                "move it away, or take another ROOT"
            )


def _expected(work: Work, part: TarPlan, found: dict[str, CountAndBytes]) -> Iterator[tuple[str, CountAndBytes]]:
    """How many images each class has, and of how many bytes."""
    if part.name == "train" and work.is_official:
        number = sum(count for count, _ in found.values())
        if number != NUM_TRAIN:
            raise DatasetError(
                f"{work.folder('train')}: expected {NUM_TRAIN:,} images, got {number:,}; move it away, and start again"
            )
    elif part.name == "train":
        for member in part.members:
            with imagenet_tars.opened_within(part.tar, member, f"{part.path}: {member.name}") as tar:
                yield part_class(part, member), imagenet_tars.size_of(images_of(work, part, tar, member))
    elif part.labels:
        of_class: dict[str, list[tarfile.TarInfo]] = {wnid: [] for wnid in part.classes}
        for image in part.members:
            of_class[part_class(part, image)].append(image)
        yield from ((wnid, imagenet_tars.size_of(images)) for wnid, images in of_class.items())
    else:
        total = tuple(map(sum, zip(*found.values())))
        if total != imagenet_tars.size_of(part.members):
            words = f"{_images(total)}, expected {_images(imagenet_tars.size_of(part.members))}"
            raise DatasetError(f"{work.folder('val')}: it is there already with {words}; move it away")


def _images(size: CountAndBytes) -> str:
    return f"{size[0]:,} image{'s' if size[0] != 1 else ''} of {size[1]:,} bytes"


def images_of(work: Work, part: TarPlan, tar: tarfile.TarFile, member: tarfile.TarInfo) -> list[tarfile.TarInfo]:
    """The images of a class, from its own tar."""
    where = f"{part.path}: {member.name}"
    files = imagenet_tars.files(tar, where, member.size, work.skipped)
    images = imagenet_tars.with_content(imagenet_tars.images(files, where, work.skipped), where, work.skipped)
    if not images:
        raise DatasetError(f"{where}: expected images of this class, got none; download it again")
    return images


def _sizes_in(folder: str, counts_only: bool) -> dict[str, CountAndBytes]:
    """How many images each class folder has, and of how many bytes; files beside the folders are none."""
    found = {}
    for name in os.listdir(folder):
        place = os.path.join(folder, name)
        if os.path.isdir(place) and not name.startswith("."):
            with os.scandir(place) as entries:
                images = (entry for entry in entries if imagenet_tars.is_image(entry.name))
                sizes = [0 if counts_only else entry.stat().st_size for entry in images]
            found[name] = (len(sizes), sum(sizes))
    return found


def check_room(root: str, num_bytes: int, what: str) -> None:
    """Refuse to begin what does not fit."""
    stat = os.statvfs(root)
    free = stat.f_bavail * stat.f_frsize
    if free < num_bytes:
        raise DatasetError(
            f"{root}: {what} need {num_bytes / 1e9:,.2f} GB, but {free / 1e9:,.2f} GB are free; make room, or take "
            "another folder, and start again: what is there already is kept"
        )
