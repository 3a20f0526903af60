"""The block of bytes of an index of images: magic, version, CRC-32, number of bytes, length of the JSON header; the
header; then the columns, each aligned to 64 bytes. Nothing in it is executed or unpickled.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

from dbrdist.core.array.backend import Array
from dbrdist.errors import DatasetError

FILE_NAME = "dbrdist.index"  # where an index is in the folder whose images it lists
VERSION = 1
MAGIC = b"dbrdist images\n\0"
HEAD = struct.Struct("<16sIIQQ")  # magic, version, CRC-32 of all behind it, bytes in all, bytes of the JSON header
_SEALED_FROM = 24  # the CRC covers everything behind itself
ALIGNMENT = 64
IN_FOLDERS = (("labels", "<i4"), ("name_ends", "<u8"))
IN_SHARDS = (("offsets", "<u8"), ("sizes", "<u4"), *IN_FOLDERS)
MAX_CLASSES = 1_000_000
MAX_IMAGE_BYTES = 2**32 - 1  # of one image in a shard
AGAIN = "make it again with `dbrdist-data build`"


class Shard(NamedTuple):
    """A tar file: its name in the root, its size and time when it was indexed, and the images up to its end."""

    name: str
    size: int
    mtime_ns: int
    end: int


class Contents(NamedTuple):
    """What an index says, before it is written. ``names`` is all names in one, ``name_ends`` where each ends."""

    root: str
    classes: Sequence[str]
    folder_times: Sequence[int]  # modification times of the class folders in nanoseconds; empty for shards
    shards: Sequence[Shard]  # empty for class folders
    labels: Array
    name_ends: Array
    names: bytes
    offsets: Array | None = None
    sizes: Array | None = None

    def _identity(self, columns: Sequence[Array]) -> int:
        """A checksum of which images there are, whatever their root and times."""
        identity = zlib.crc32(json.dumps(list(self.classes)).encode())
        for piece in (*columns, self.names):
            identity = zlib.crc32(memoryview(piece).cast("B"), identity)
        return identity

    def write(self, file: BinaryIO) -> None:
        """Write the block of bytes."""
        columns = [getattr(self, n).astype(t, copy=False) for n, t in (IN_SHARDS if self.shards else IN_FOLDERS)]
        about = {
            "identity": self._identity(columns),
            "root": os.fsencode(self.root).hex(),
            "classes": list(self.classes),
            "folder_times": list(self.folder_times),
            "shards": [list(s) for s in self.shards],
            "num_images": len(self.labels),
        }
        header = json.dumps(about).encode()
        pieces: list[Any] = [header]
        position = HEAD.size + len(header)
        for piece in (*columns, self.names):
            gap = -position % ALIGNMENT
            pieces += [bytes(gap), memoryview(piece).cast("B")]
            position += gap + memoryview(piece).nbytes
        sizes = struct.pack("<QQ", position, len(header))
        crc = zlib.crc32(sizes)
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        file.write(HEAD.pack(MAGIC, VERSION, crc, position, len(header)))
        for piece in pieces:
            file.write(piece)


def are_names(names: Sequence[str]) -> bool:
    """Whether these are names of files or folders in one folder."""
    return isinstance(names, list) and all(
        isinstance(n, str) and n not in ("", ".", "..") and "/" not in n and "\0" not in n for n in names
    )


def same_time(now: int, then: int) -> bool:
    """Whether two times in nanoseconds are the same, also where a copy has kept whole seconds alone."""
    return now == then or (now % 10**9 == 0 and now == then // 10**9 * 10**9)


def read_header(block: Array, origin: str, check: bool) -> tuple[dict[str, Any], int]:
    """The JSON header and the position behind it; with ``check`` the checksum must be right."""
    raw = memoryview(block)
    if len(raw) < HEAD.size or bytes(raw[:16]) != MAGIC:
        raise DatasetError(f"{origin}: expected an index of images as `dbrdist-data build` writes it, got another file")
    _, version, crc, num_bytes, num_header = HEAD.unpack(raw[: HEAD.size])
    if version != VERSION:
        raise DatasetError(f"{origin}: expected an index of version {VERSION}, got version {version}; {AGAIN}")
    if num_bytes != len(raw):
        raise DatasetError(f"{origin}: the index has {len(raw):,} bytes instead of {num_bytes:,}; {AGAIN}")
    if check and zlib.crc32(raw[_SEALED_FROM:]) != crc:
        raise DatasetError(f"{origin}: the index is damaged: its checksum is wrong; {AGAIN}")
    try:
        about = json.loads(bytes(raw[HEAD.size : HEAD.size + num_header]))
        if not isinstance(about, dict):
            raise ValueError("its header is no mapping")
    except (ValueError, RecursionError) as e:
        raise DatasetError(f"{origin}: the index is damaged: {e}; {AGAIN}") from e
    return about, HEAD.size + num_header
