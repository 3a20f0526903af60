"""A module that stands for cupy.cuda.nccl among processes of one host: what is sent lies in files of a folder.

It knows the calls that dbrdist makes, with CuPy's arguments, and refuses others. Addresses are those of the stand-in's
arrays, in host memory. Sends and receives between groupStart and groupEnd happen at the end, as NCCL's do.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from typing import Any

import numpy as np
import stand_in

available = True
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
LIMIT_SECONDS = 100
_TYPES = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 7: "f4", 8: "f8"}
_group: list[Any] | None = None
calls: list[str] = []  # what was called, for tests
streams: list[int] = []  # and on which streams


def get_unique_id() -> bytes:
    """The name of a folder in 128 bytes."""
    return tempfile.mkdtemp(prefix="nccl-").encode().ljust(128, b"\0")


def groupStart() -> None:
    global _group
    assert _group is None
    _group = []


def groupEnd() -> None:
    global _group
    work, _group = _group, None
    assert work is not None
    for is_send in (True, False):
        for sends, function in work:
            if sends == is_send:
                function()


def touched(stream: int, places: Any, num_bytes: int) -> None:
    """Tell the clocks that a call of NCCL's on a stream reads and writes the bytes at these addresses."""
    if stand_in.clocks.capture is not None:
        stand_in.clocks.capture.refuse("a call of NCCL, which all ranks would have to capture together,")
    queues = [s for some in stand_in.clocks._streams.values() for s in some if s.ptr == stream]
    here = [s for s in queues if s.device_id == stand_in.clocks.current_device()]
    leases = [part for place in places if (part := stand_in.part_at(place, num_bytes)) is not None]
    streams.append(stream)
    if leases and here:
        stand_in.clocks.touch(leases, leases, here[0])


def _memory(place: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(place), np.uint8)


class NcclCommunicator:
    """One rank."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert isinstance(commId, bytes) and len(commId) == 128
        assert 0 <= rank < ndev
        self._size, self._rank = ndev, rank
        self._folder = commId.rstrip(b"\0").decode()
        self._counts: dict[tuple[str, int, int], int] = {}
        self._put("here", rank, b"")
        for other in range(ndev):
            self._get("here", other, -1)

    def _path(self, what: str, source: int, dest: int) -> str:
        key = (what, source, dest)
        self._counts[key] = self._counts.get(key, 0) + 1
        return f"{self._folder}/{what}.{source}.{dest}.{self._counts[key]}"

    def _put(self, what: str, source: int, raw: bytes, dest: int = -1) -> None:
        path = self._path(what, source, dest)
        with open(f"{path}.part", "wb") as file:
            file.write(raw)
        os.rename(f"{path}.part", path)

    def _get(self, what: str, source: int, dest: int) -> bytes:
        path = self._path(what, source, dest) if (what, source) != ("here", self._rank) else None
        end = time.monotonic() + LIMIT_SECONDS
        while path is not None and not os.path.exists(path):
            if time.monotonic() > end:
                raise TimeoutError(f"NCCL would hang: no {path}")
            time.sleep(0.0005)
        if path is None:
            return b""
        with open(path, "rb") as file:
            return file.read()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert op in (NCCL_SUM, NCCL_MAX, NCCL_AVG) and _group is None and isinstance(stream, int)
        calls.append("allReduce")
        dtype = np.dtype(_TYPES[datatype])
        assert op != NCCL_AVG or dtype.kind == "f"
        mine = _memory(sendbuf, count * dtype.itemsize)
        touched(stream, (sendbuf, recvbuf), mine.nbytes)
        self._put("sum", self._rank, mine.tobytes())
        total = np.zeros(count, dtype) if op != NCCL_MAX else mine.view(dtype).copy()
        for rank in range(self._size):
            theirs = mine.view(dtype) if rank == self._rank else np.frombuffer(self._get("sum", rank, -1), dtype)
            total = np.maximum(total, theirs) if op == NCCL_MAX else total + theirs
        if op == NCCL_AVG:
            total /= self._size
        _memory(recvbuf, count * dtype.itemsize).view(dtype)[...] = total

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        touched(stream, (sendbuf,), count)
        self._in_group(True, lambda: self._put("p2p", self._rank, _memory(sendbuf, count).tobytes(), peer), datatype)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        def take() -> None:
            _memory(recvbuf, count)[...] = np.frombuffer(self._get("p2p", peer, self._rank), np.uint8)

        touched(stream, (recvbuf,), count)
        self._in_group(False, take, datatype)

    def _in_group(self, is_send: bool, function: Any, datatype: int) -> None:
        assert _group is not None and datatype == NCCL_UINT8
        calls.append("send" if is_send else "recv")
        _group.append((is_send, function))

    def destroy(self) -> None:
        self._put("end", self._rank, b"")
        if self._rank == 0:
            for other in range(1, self._size):
                self._get("end", other, -1)
            shutil.rmtree(self._folder, ignore_errors=True)
