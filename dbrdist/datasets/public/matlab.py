"""Reading MATLAB's files of level 5, as far as the development kits of data sets need it: numbers, text and structs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_MATRIX, _COMPRESSED = 14, 15
_MAX_BYTES = 1 << 28  # of an element; meta.mat has less than a megabyte
_TYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
    16: "u1",
    17: "u2",
}
_STRUCT, _CHAR, _CELL = 2, 4, 1


def read(content: bytes) -> dict[str, Any]:
    """The variables of a file by name: arrays, text, and structs as lists of dictionaries.

    Raises:
        ValueError: if it is not such a file, or damaged.
    """
    if len(content) < 128 or content[126:128] != b"IM":
        raise ValueError("expected a MATLAB file of level 5, little endian")
    found: dict[str, Any] = {}
    try:
        for kind, data in _elements(content[128:]):
            if kind == _COMPRESSED:
                [(kind, data)] = _elements(_decompressed(data))
            if kind == _MATRIX:
                name, value = _matrix(data)
                found[name] = value
    except (struct.error, zlib.error, IndexError, KeyError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the MATLAB file is damaged: {error}") from error
    return found


def _decompressed(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, _MAX_BYTES)
    if not stream.eof:
        raise ValueError(f"an element does not end within {_MAX_BYTES:,} bytes")
    return found


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # a short one, with its data in the tag
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        if at + 8 + size > len(data):
            raise ValueError("it ends within an element")
        yield kind, data[at + 8 : at + 8 + size]
        at += 8 + size + (0 if kind == _COMPRESSED else -size % 8)


def _matrix(data: bytes) -> tuple[str, Any]:
    if not data:
        return "", np.empty((0, 0))
    parts = list(_elements(data))
    flags = struct.unpack_from("<I", parts[0][1])[0] & 0xFF
    shape = tuple(int(n) for n in np.frombuffer(parts[1][1], "<i4"))
    name, values = parts[2][1].decode("ascii"), parts[3:]
    if flags == _STRUCT:
        width = struct.unpack("<i", values[0][1])[0]
        joined = values[1][1]
        fields = [joined[i : i + width].split(b"\0")[0].decode("ascii") for i in range(0, len(joined), width)]
        members = [_matrix(value)[1] for _, value in values[2:]]
        return name, [dict(zip(fields, members[i : i + len(fields)])) for i in range(0, len(members), len(fields))]
    if flags == _CELL:
        return name, [_matrix(value)[1] for _, value in values]
    array = np.frombuffer(values[0][1], f"<{_TYPES[values[0][0]]}")
    if flags == _CHAR:
        return name, "".join(map(chr, array.tolist()))
    return name, array.reshape(shape, order="F")
