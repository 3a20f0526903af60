"""ImageNet's tars as they come: what is in them, whether they are whole, and which entries are images."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterable
from typing import Any, NamedTuple

from dbrdist.datasets.image.scan import EXTENSIONS
from dbrdist.errors import DatasetError

CLASS_TAR = re.compile(r"(n[0-9]{8})\.tar")
_DAMAGED = (tarfile.TarError, EOFError, ValueError, OverflowError)
_OTHER_FILES = {
    b"\x1f\x8b": "a file compressed with gzip: unpack it with gunzip first",
    b"BZh": "a file compressed with bzip2: unpack it with bunzip2 first",
    b"\xfd7zXZ": "a file compressed with xz: unpack it with unxz first",
    b"\x28\xb5\x2f\xfd": "a file compressed with zstd: unpack it with unzstd first",
    b"PK": "a zip archive: unpack it, and take the tars of ILSVRC 2012",
    b"<": "a page of a web site, perhaps that of its login: download the tar again",
    b"\xff\xd8": "an image",
}


class Skipped(NamedTuple):
    """An entry of a tar that was left out, and why."""

    tar: str
    name: str
    reason: str = "is no image"


def opened(path: str) -> tarfile.TarFile:
    """A tar of the user's."""
    if os.path.isdir(path):
        raise DatasetError(f"{path}: expected a tar, got a folder; give the tar as it was downloaded")
    try:
        return tarfile.open(path, "r:")
    except _DAMAGED as error:
        got = _kind_of(path) or f"another file, or a part of one: {error}"
        raise DatasetError(f"{path}: expected a tar (not compressed), got {got}") from error


def _kind_of(path: str) -> str | None:
    with open(path, "rb") as file:
        head = file.read(16).lstrip()
    return next((words for magic, words in _OTHER_FILES.items() if head.startswith(magic)), None)


def opened_within(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> tarfile.TarFile:
    """A tar in a tar."""
    inner: Any = tar.extractfile(member)
    try:
        return tarfile.open(fileobj=inner, mode="r:")
    except _DAMAGED as error:
        raise DatasetError(f"{where}: expected a tar of images: {error}; download it again") from error


def check_ends(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> None:
    """A first look at a tar in a tar, of its beginning and its end."""
    opened_within(tar, member, where).close()
    file: Any = tar.fileobj
    file.seek(member.offset_data + max(member.size - 512, 0))
    if member.size < 1024 or file.read(512).strip(b"\0"):
        raise DatasetError(f"{where}: the tar is cut short: there is no end mark; download it again")


def files(tar: tarfile.TarFile, where: str, num_bytes: int, skipped: list[Skipped]) -> list[tarfile.TarInfo]:
    """The files in a tar, whose end must be there; what is neither a file nor a folder is noted."""
    try:
        members = tar.getmembers()
    except _DAMAGED as error:
        raise DatasetError(f"{where}: the tar is damaged: {error}; download it again") from error
    last = max((m.offset_data + -(-m.size // 512) * 512 for m in members), default=0)
    file: Any = tar.fileobj
    file.seek(last)
    if last + 512 > num_bytes or file.read(512).strip(b"\0"):
        raise DatasetError(
            f"{where}: the tar is cut short: after {len(members):,} entries there is no end mark; download it again"
        )
    skipped += [
        Skipped(where, m.name, "is a link" if m.issym() or m.islnk() else "is no file")
        for m in members
        if not m.isfile() and not m.isdir()
    ]
    return [m for m in members if m.isfile()]


def images(members: list[tarfile.TarInfo], where: str, skipped: list[Skipped]) -> list[tarfile.TarInfo]:
    """Those that are images by their names, empty ones too; the rest is noted."""
    found = [m for m in members if is_image(base(m))]
    skipped += [Skipped(where, m.name) for m in members if not is_image(base(m))]
    check_unique(map(base, found), where)
    return found


def with_content(members: list[tarfile.TarInfo], where: str, skipped: list[Skipped]) -> list[tarfile.TarInfo]:
    """Those that are not empty; the rest is noted."""
    skipped += [Skipped(where, m.name, "is empty") for m in members if not m.size]
    return [m for m in members if m.size]


def size_of(members: list[tarfile.TarInfo]) -> tuple[int, int]:
    """How many they are, and of how many bytes."""
    return len(members), sum(m.size for m in members)


def base(member: tarfile.TarInfo) -> str:
    """An entry's name without folders: where it is extracted to is not the tar's to say."""
    return os.path.basename(member.name)


def is_image(name: str) -> bool:
    """Whether a file of this name is read as an image; those of macOS that begin with ._ are not."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def check_unique(names: Iterable[str], where: str) -> None:
    """Refuse names that come twice: one would take the other's place."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DatasetError(f"{where}: {name} is there twice; expected each name once: download the tar again")
        seen.add(name)


def fingerprint(tar: tarfile.TarFile, members: Iterable[tarfile.TarInfo], labels: Iterable[str] = ()) -> str:
    """A text that is another one for other tars, or where their images get other classes."""
    total = hashlib.sha256()
    file: Any = tar.fileobj
    for m in members:
        total.update(f"{m.name}\0{m.size}\0{m.offset_data}\n".encode(errors="surrogateescape"))
        if CLASS_TAR.fullmatch(base(m)):  # tars are padded, so that their sizes say little: take their first head
            file.seek(m.offset_data)
            total.update(file.read(512))
    for label in labels:
        total.update(label.encode(errors="surrogateescape") + b"\n")
    return total.hexdigest()
