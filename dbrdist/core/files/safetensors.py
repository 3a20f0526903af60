"""Arrays as safetensors (github.com/huggingface/safetensors): a length, a header in JSON, the bytes of all arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import as_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import write_atomically
from dbrdist.errors import CheckpointError

if TYPE_CHECKING:
    from typing import Any

    from dbrdist.core.array.types import JSON

_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation


def save(path: str, arrays: Mapping[str, Array], facts: Mapping[str, str] | None = None) -> None:
    """Write arrays by name; `facts` are words about them."""
    header: dict[str, JSON] = {"__metadata__": dict(facts)} if facts else {}
    plain, end = [], 0
    for name, array in sorted(arrays.items()):
        a = np.ascontiguousarray(array).reshape(np.shape(array))
        if a.dtype.name not in TYPE_NAMES:
            raise TypeError(f"{name}: expected one of {', '.join(TYPE_NAMES)}, got {a.dtype}")
        header[name] = {
            "dtype": TYPE_NAMES[a.dtype.name],
            "shape": list(a.shape),
            "data_offsets": [end, end + a.nbytes],
        }
        plain.append(a)
        end += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin aligned

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in plain:
            file.write(a.reshape(-1).view(np.uint8))

    write_atomically(path, write)


def load(path: str) -> dict[str, Array]:
    """All arrays of a file by name. Raises CheckpointError where it is damaged."""
    with open(path, "rb", opener=regular) as file:
        try:
            return _parse(file.read())
        except MemoryError:
            size = os.fstat(file.fileno()).st_size
            raise CheckpointError(f"{path}: there is no memory for its {size:,} bytes") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{path}: cannot be read as a safetensors file: {error}") from error


def facts(path: str) -> dict[str, str]:
    """The words about the arrays of a file that :func:`load` has read."""
    with open(path, "rb", opener=regular) as file:
        length = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(min(length, _MAX_HEADER_BYTES))).get("__metadata__")
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _parse(data: bytes) -> dict[str, Array]:
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(len(data) - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header claims {length:,} bytes")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    arrays: dict[str, Array] = {}
    body = memoryview(data)[8 + length :]
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        dtype, shape = as_dtype(_TYPES[entry["dtype"]]), tuple(entry["shape"])
        if not 0 <= start <= end <= len(body) or any(n < 0 for n in shape):
            raise ValueError(f"{name} does not lie within the file")
        arrays[name] = np.frombuffer(body[start:end], dtype).reshape(shape)
    return arrays
