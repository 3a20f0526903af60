"""Saving the whole state of a run, so that it can go on exactly."""

from __future__ import annotations

import functools
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.serializer import NpzDeserializer, decode, save_npz
from dbrdist.errors import CheckpointError
from dbrdist.training.extension import Extension

PRIORITY_SNAPSHOT = -100  # after everything else of the step


def snapshot(
    savefun: Callable[[Any, Any], None] | None = None,
    filename: str | Callable[[Any], str] = "snapshot_iter_{.updater.iteration}",
    **kwargs: Any,
) -> Snapshot:
    """An extension that saves the trainer; see :class:`Snapshot` for the other arguments."""
    return Snapshot(None, filename, savefun, **kwargs)


def snapshot_object(
    target: Any,
    filename: str | Callable[[Any], str],
    savefun: Callable[[Any, Any], None] | None = None,
    **kwargs: Any,
) -> Snapshot:
    """An extension that saves `target`, a link say; see :class:`Snapshot` for the other arguments."""
    return Snapshot(target, filename, savefun, **kwargs)


class Snapshot(Extension):
    """Saves `target` (None: the trainer) as `filename`, formatted with the trainer, in the trainer's `out`.

    The file is written beside its place, flushed to disk and renamed: a crash or a full disk leaves the earlier
    snapshots as they were and no half of a new one. The container keeps a checksum of each entry, tested when it is
    read.

    Args:
        savefun: `savefun(path, target)`; None saves as .npz.
        condition: a function without arguments; nothing is saved where it returns False.
        n_retains: number of newest snapshots that stay; -1 keeps all.
        autoload: load the newest whole snapshot in `out`, if there is one, when the run starts.
        snapshot_on_error: save too when the loop ends by an exception.

    Raises:
        CheckpointError: when a file could not be written; the message has the reason and the newest whole snapshot.
    """

    trigger = (1, "epoch")
    priority = PRIORITY_SNAPSHOT

    def __init__(
        self,
        target: Any,
        filename: str | Callable[[Any], str],
        savefun: Callable[[Any, Any], None] | None = None,
        *,
        condition: Callable[[], bool] | None = None,
        n_retains: int = -1,
        autoload: bool = False,
        snapshot_on_error: bool = False,
    ):
        if n_retains == 0 or n_retains < -1:
            raise ValueError(f"expected n_retains of 1 or more, or -1 to keep all, got {n_retains}")
        if callable(filename) and (n_retains > 0 or autoload):
            raise ValueError("n_retains and autoload must know earlier files: expected a format text as filename")
        self._target = target
        self._filename = filename
        self._savefun = savefun
        self._condition = condition
        self._num_kept = n_retains
        self._autoload = autoload
        self._on_error = snapshot_on_error

    def resume(self, trainer: Any) -> None:
        if self._autoload and isinstance(self._filename, str):
            target = trainer if self._target is None else self._target
            load_newest(trainer.out, target, self._filename)

    def __call__(self, trainer: Any) -> None:
        if self._condition is None or self._condition():
            self.save(trainer)

    def on_error(self, trainer: Any, exc: BaseException, tb: Any) -> None:
        if self._on_error:
            self(trainer)

    def save(self, trainer: Any) -> str:
        """Save now; returns the file's path."""
        name = self._filename(trainer) if callable(self._filename) else self._filename.format(trainer)
        path = os.path.join(trainer.out, name)
        write(path, trainer if self._target is None else self._target, self._savefun)
        if self._num_kept > 0 and isinstance(self._filename, str):
            for old in find(trainer.out, self._filename)[: -self._num_kept]:
                os.remove(old)
        return path


def write(path: str, target: Any, savefun: Callable[[Any, Any], None] | None = None) -> None:
    """Save `target` so that `path` is either its whole new state or what it was before."""
    temporary = f"{path}.tmp-{os.getpid()}"
    save = functools.partial(save_npz, compression=False) if savefun is None else savefun
    try:
        save(temporary, target)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(os.path.dirname(path) or ".")
    except OSError as error:
        raise CheckpointError(
            f"{path}: the snapshot could not be written: {error.strerror or error}; earlier snapshots are unharmed"
        ) from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _flush_folder(folder: str) -> None:
    """Make a rename last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(folder: str, filename: str = "snapshot_iter_{.updater.iteration}") -> list[str]:
    """Paths of the files in `folder` that the format `filename` made, the oldest (by number, then name) first."""
    pattern = "(.+)".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", filename))
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = re.fullmatch(pattern, name)
        if match and ".tmp-" not in name:
            found.append(([(int(g), "") if g.isdigit() else (-1, g) for g in match.groups()], name))
    return [os.path.join(folder, name) for _, name in sorted(found)]


def is_whole(path: str) -> bool:
    """True where every entry of the .npz file has its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def newest(folder: str, filename: str = "snapshot_iter_{.updater.iteration}") -> str | None:
    """The newest whole snapshot in `folder`; a damaged one is passed over with a warning."""
    for path in reversed(find(folder, filename)):
        if is_whole(path):
            return path
        warnings.warn(f"{path} is damaged; going on with the snapshot before it", stacklevel=2)
    return None


def load_newest(folder: str, target: Any, filename: str = "snapshot_iter_{.updater.iteration}") -> str | None:
    """Load the newest whole snapshot into `target`; returns its path, or None where there is none."""
    path = newest(folder, filename)
    if path is not None:
        load(path, target)
    return path


def load(path: str, target: Any) -> None:
    """Load a snapshot into `target`, which must have a place for every entry but those of extensions.

    Raises:
        CheckpointError: the file is damaged, or belongs to another architecture; the message names the entry.
    """
    try:
        with np.load(path, allow_pickle=False) as npz:
            entries = _Noting(decode(npz))
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path}: the snapshot is damaged: {error}") from error
    try:
        NpzDeserializer(entries).load(target)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    # extensions may differ: only some ranks write a log, say
    left = sorted(key for key in set(entries) - entries.read if not key.startswith("extension"))
    if left:
        raise CheckpointError(
            f"{path}: expected a place for {left[0]} and {len(left) - 1} entries more of the saved state, found none; "
            "the snapshot belongs to another architecture"
        )


class _Noting(dict[str, Any]):
    """A dictionary that notes what was read from it."""

    def __init__(self, entries: dict[str, Any]):
        super().__init__(entries)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)
