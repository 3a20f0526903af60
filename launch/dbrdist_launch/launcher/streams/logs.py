"""A file for each stream of each rank, with its bytes as they came; with a limit, the oldest ones give way."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable

from ... import limits
from .pieces import SPAWNED, Folder, Item, Piece


class Logs:
    """Files of one attempt. A disk that is full costs a warning."""

    def __init__(self, folder: str, note: Callable[[str], None], most_bytes: int | None = None, kept: int = 1) -> None:
        self.folder, self.note = folder, note
        self.most_bytes, self.kept = most_bytes, kept  # of one file; full ones that stay
        self._files: OrderedDict[str, int] = OrderedDict()
        self._sizes: dict[str, int] = {}  # of the files that are limited
        self._warned: deque[str] = deque(maxlen=16)

    def write(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Folder):
                self.close()
                self.folder = item.path
            elif isinstance(item, Piece):
                name = "spawned" if item.rank == SPAWNED else f"rank-{item.rank}"
                try:
                    self._write(f"{name}.{item.stream}", item.data)
                except OSError as error:
                    self._warn(error.strerror or str(error))

    def _write(self, name: str, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = len(view)
            if self.most_bytes is not None:
                room = self.most_bytes - self._size(name)
                if room <= 0:
                    self._rotate(name)
                    continue
            written = os.write(self._file(name), view[:room])
            if self.most_bytes is not None:
                self._sizes[name] += written
            view = view[written:]

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _file(self, name: str) -> int:
        if name not in self._files:
            if len(self._files) >= limits.OPEN_LOGS:
                os.close(self._files.popitem(last=False)[1])
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[name] = os.open(self._path(name), flags, 0o644)
        self._files.move_to_end(name)
        return self._files[name]

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            self._sizes[name] = os.fstat(self._file(name)).st_size
        return self._sizes[name]

    def _rotate(self, name: str) -> None:
        """The file becomes NAME.1, that one NAME.2 and so on; the last one goes."""
        if name in self._files:
            os.close(self._files.pop(name))
        self._sizes.pop(name, None)
        for number in range(self.kept, 0, -1):
            older = self._path(name) + (f".{number - 1}" if number > 1 else "")
            if os.path.exists(older):
                os.replace(older, f"{self._path(name)}.{number}")
        if self.kept == 0:
            os.unlink(self._path(name))

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.append(why)
            self.note(f"dbrdist-launch: output in {self.folder} is incomplete: {why}")

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        self._sizes.clear()
