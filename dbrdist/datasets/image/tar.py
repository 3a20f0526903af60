"""Tar files as WebDataset lays them out: read without unpacking, and written.

A sample is a run of members with the same key, the name up to the first dot behind its last '/': ``n01440764/17.jpg``
with the image and ``n01440764/17.cls`` with the number of its class as text. See "WebDataset" (A. Aizman et al. 2019,
"High Performance I/O For Large Scale Deep Learning") and POSIX.1-2001 (pax) for the blocks.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from dbrdist.core.files.regular_file import regular
from dbrdist.errors import DatasetError

BLOCK = 512
_MAX_EXTRA_BYTES = 1 << 20  # of a long name or a pax header
_REGULAR, _FOLDER, _LONG_NAME, _PAX = (b"0", b"\0", b"7"), b"5", b"L", b"x"
_IGNORED = (b"g", b"K")  # a pax header for all members; the long name of a link


class Member(NamedTuple):
    """A member of a tar file: its name, the place of its data, and whether it is a regular file."""

    name: bytes
    offset: int
    size: int
    is_regular: bool


def members(path: str) -> Iterator[Member]:
    """The members of a tar file, in order. Raises DatasetError where it is damaged, cut short, or no tar file."""
    with open(path, "rb", opener=regular) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            yield from _members(file, end)
        except _Damage as e:
            raise DatasetError(f"{path}: {e}") from None


class _Damage(Exception):
    """What is wrong with a tar file."""


def _members(file: BinaryIO, end: int) -> Iterator[Member]:
    position, long_name, long_size = 0, None, None
    while True:
        file.seek(position)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise _Damage(f"the tar file is cut short: it ends at byte {end:,} without an end mark")
        if not any(header):
            _check_behind(file, position)
            return
        name, size, kind = _parsed(header, position)
        if kind == _LONG_NAME:
            long_name = _extra(file, size, end).rstrip(b"\0")
        elif kind == _PAX:
            long_name, long_size = _pax(_extra(file, size, end), position, long_name, long_size)
        elif kind not in _IGNORED:
            size = size if long_size is None else long_size
            member = Member(_plain(long_name or name, position), position + BLOCK, size, kind in _REGULAR)
            _check_size(member, end)
            if kind != _FOLDER:
                yield member
            long_name = long_size = None
        position += BLOCK + -(-size // BLOCK) * BLOCK


def _check_behind(file: BinaryIO, position: int) -> None:
    """Refuse another archive behind the end mark, whose members nobody would see; what else is there does not count."""
    file.seek(position)
    while block := file.read(1 << 20):
        if rest := block.lstrip(b"\0"):
            start = (position + len(block) - len(rest)) // BLOCK * BLOCK
            file.seek(start)
            if file.read(BLOCK)[257:262] == b"ustar":
                raise _Damage(
                    f"another archive begins behind the end mark, at byte {start:,}, as where `cat` has joined two: "
                    "make two files of them"
                )
            return
        position += len(block)


def _parsed(header: bytes, position: int) -> tuple[bytes, int, bytes]:
    """Name, size and kind. ``sum`` is of unsigned bytes, the checksum's own counted as blanks."""
    if header[257:262] != b"ustar":
        raise _Damage(f"expected the header of a member at byte {position:,}, found other data")
    if _number(header[148:156], position) != sum(header) - sum(header[148:156]) + 8 * 32:
        raise _Damage(f"the header of a member at byte {position:,} is damaged: its checksum is wrong")
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    if prefix and header[257:263] == b"ustar\0":  # GNU's own format has other things there
        name = prefix + b"/" + name
    return name, _number(header[124:136], position), header[156:157]


def _number(field: bytes, position: int) -> int:
    """Octal digits, or (GNU) the number itself behind a byte of 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise _Damage(f"the header of a member at byte {position:,} has {field!r} for a number") from None


def _extra(file: BinaryIO, size: int, end: int) -> bytes:
    if size > _MAX_EXTRA_BYTES or file.tell() + size > end:
        raise _Damage(f"a member claims a name or header of {size:,} bytes at byte {file.tell():,}")
    return file.read(size)


def _pax(data: bytes, position: int, name: bytes | None, size: int | None) -> tuple[bytes | None, int | None]:
    """The records ``length key=value`` of a pax header that concern us."""
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            raise _Damage(f"the pax header at byte {position:,} is damaged")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if key.startswith(b"GNU.sparse"):
            raise _Damage(f"the member at byte {position:,} is a sparse file, which is not supported")
        if key == b"path":
            name = value
        elif key == b"size":
            if not value.isdigit():
                raise _Damage(f"the pax header at byte {position:,} has {value!r} for a size")
            size = int(value)
        data = data[int(length) :]
    return name, size


def _plain(name: bytes, position: int) -> bytes:
    while name.startswith(b"./"):
        name = name[2:]
    if name.startswith(b"/") or b".." in name.split(b"/") or b"\0" in name:
        raise _Damage(f"the member {os.fsdecode(name)!r} at byte {position:,} leads out of the archive")
    return name


def _check_size(member: Member, end: int) -> None:
    if member.offset + member.size > end:
        raise _Damage(
            f"the member {os.fsdecode(member.name)!r} claims {member.size:,} bytes, but the file ends after "
            f"{max(end - member.offset, 0):,} of them"
        )


def key_and_extension(name: bytes) -> tuple[bytes, bytes]:
    """``b"a/b.seg.png"`` as (``b"a/b"``, ``b"seg.png"``), the extension in lower case."""
    folder, slash, base = name.rpartition(b"/")
    stem, _, extension = base.partition(b".")
    return folder + slash + stem, extension.lower()


class TarWriter:
    """Writes members to an open file; the same members give the same bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0

    def add(self, name: bytes, data: bytes) -> int:
        """Append a regular file; the offset of its data."""
        info: Any = tarfile.TarInfo(os.fsdecode(name))
        info.size = len(data)
        header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        self._file.write(header + data + bytes(-len(data) % BLOCK))
        offset = self.position + len(header)
        self.position = offset + len(data) + -len(data) % BLOCK
        return offset

    def close(self) -> None:
        """Write the end mark."""
        self._file.write(bytes(2 * BLOCK))
