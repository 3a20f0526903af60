"""Saving the whole state of a run, so that it can continue exactly."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import string
import warnings
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import (
    NpzDeserializer,
    check_archive_size,
    read_npz,
    replace_atomically,
    save_npz,
    saved_state,
    write_atomically,
)
from dbrdist.core.model.apart import owner
from dbrdist.core.model.link import Link
from dbrdist.core.names.limits import count_or_all
from dbrdist.core.usage.mistakes import warn
from dbrdist.errors import CheckpointError
from dbrdist.training.extension import Extension

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer

PRIORITY_SNAPSHOT = -100  # after everything else of the step


def snapshot(
    savefun: Callable[[Any, Any], None] | None = None,
    filename: str | Callable[[Any], str] = "snapshot_iter_{.updater.iteration}",
    *,
    target: Any = None,
    **kwargs: Any,
) -> Snapshot:
    """An extension that saves the trainer, or another object.

    Args:
        savefun: `savefun(path, target)`; None saves as .npz.
        filename: the name of the file, formatted with the trainer, or a function of the trainer that returns it;
            relative
            to the trainer's `out`.
        target: what to save; None is the trainer.
        kwargs: further arguments of :class:`Snapshot`, such as `n_retains` and `autoload`.

    Example:
        >>> save = extensions.snapshot(n_retains=2, autoload=True)  # trainer.extend(save, trigger=(1, "epoch"))
    """
    return Snapshot(target, filename, savefun, **kwargs)


def snapshot_object(
    target: Any,
    filename: str | Callable[[Any], str],
    savefun: Callable[[Any, Any], None] | None = None,
    **kwargs: Any,
) -> Snapshot:
    """An extension that saves an object, for example the model alone.

    Args:
        target: what to save.
        filename: the name of the file, formatted with the trainer, or a function of the trainer that returns it;
            relative
            to the trainer's `out`.
        savefun: `savefun(path, target)`; None saves as .npz.
        kwargs: further arguments of :class:`Snapshot`.

    Example:
        >>> save = extensions.snapshot_object(L.Linear(2, 1), "model_{.updater.epoch}.npz")
    """
    return Snapshot(target, filename, savefun, **kwargs)


class Snapshot(Extension):
    """Saves `target` (None: the trainer) as `filename`, formatted with the trainer, in the trainer's `out`.

    The file is written beside its place, flushed to disk and renamed: a crash or a full disk leaves the earlier
    snapshots as they were and no half of a new one. It ends with a checksum of all its bytes, tested when it is read.

    Args:
        savefun: `savefun(path, target)`; None saves as .npz.
        condition: a function without arguments; nothing is saved where it returns False.
        writer: who writes (:mod:`~dbrdist.training.extensions.snapshot_writers`), called with the file's name, the
            folder and a copy of the state as a dictionary of arrays, instead of savefun; None writes at once.
        n_retains: number of newest snapshots that stay; -1 keeps all. With a writer beside the training loop there is
            one more while the newest is being written.
        autoload: load the newest whole snapshot in `out`, if there is one, when the run starts.
        snapshot_on_error: save too when the loop ends by an exception.
        target: what to save; None is the trainer.
        filename: the name of the file, formatted with the trainer, or a function of the trainer that returns it;
            relative
            to the trainer's `out`.

    Raises:
        CheckpointError: when a file could not be written; the message has the reason and the newest whole snapshot.
        TypeError, ValueError: arguments exclude each other, `n_retains` is out of range, or the target cannot be saved.

    Example:
        >>> snapshot = extensions.Snapshot(None, "snapshot_iter_{.updater.iteration}", n_retains=2, autoload=True)
    """

    trigger = (1, "epoch")
    priority = PRIORITY_SNAPSHOT

    def __init__(
        self,
        target: Link | int | str | None,
        filename: str | Callable[[Any], str],
        savefun: Callable[[Any, Any], None] | None = None,
        *,
        condition: Callable[[], bool] | None = None,
        writer: Callable[[str, str, Any], None] | None = None,
        snapshot_on_error: bool = False,
        n_retains: Annotated[int, count_or_all, "Number of newest snapshots that are kept."] = -1,
        autoload: bool = False,
    ):
        if savefun is not None and writer is not None:
            raise TypeError("snapshot: expected savefun or writer, got both; give savefun to the writer")
        if callable(filename) and (n_retains != -1 or autoload):
            raise ValueError("n_retains and autoload must know earlier files: expected a format text as filename")
        if target is not None and savefun is None and not hasattr(target, "serialize") and not isinstance(target, dict):
            hint = "; write snapshot_object(object, filename)" if isinstance(target, str) else ""
            words = f"expected what has a state, such as a link, got {type(target).__name__}{hint}"
            raise TypeError(f"snapshot: target: {words}")
        if isinstance(filename, str):
            _check_format(filename)
        elif not callable(filename):
            words = f"expected a format text or a function of the trainer, got {type(filename).__name__}"
            raise TypeError(f"snapshot: filename: {words}")
        self.target = target
        self.filename = filename
        self._savefun = savefun
        for name, value in (("savefun", savefun), ("condition", condition)):
            if value is not None and (not callable(value) or isinstance(value, Link)):
                raise TypeError(
                    f"Snapshot: {name}: expected a function, got {type(value).__name__}; snapshot() saves the trainer "
                    "with its network, snapshot_object(network, filename) a network alone"
                )
        self._condition = condition
        self._writer = writer
        self._last: str | None = None  # the file that a writer may still be at work on
        self._num_kept = n_retains if n_retains > 0 else -1
        self.autoload = autoload
        self.may_come_later = autoload or snapshot_on_error  # than the end of the run: it works without a call too
        self._on_error = snapshot_on_error

    def find_newest(self, trainer: Trainer) -> str | None:
        """The snapshot of ``trainer`` that ``autoload`` continues from; None if there is none or it is off."""
        if not self.autoload or not isinstance(self.filename, str):
            return None
        return newest(trainer.out, self.filename)

    def resume(self, trainer: Trainer) -> None:
        path = self.find_newest(trainer)
        if path is not None:
            load(path, trainer if self.target is None else self.target)

    def initialize(self, trainer: Trainer) -> None:
        """Let the writer get ready for what it is going to copy."""
        if hasattr(self._writer, "prepare"):
            self._writer.prepare(state_bytes(trainer))

    def __call__(self, trainer: Trainer) -> None:
        if self._condition is None or self._condition():
            self.save(trainer)

    def on_error(self, trainer: Trainer, exc: BaseException, tb: Any) -> None:
        if self._on_error:
            self(trainer)

    def save(self, trainer: Trainer) -> str:
        """Save ``trainer`` now; returns the file's path. A background writer may still be working on it."""
        name = self.filename(trainer) if callable(self.filename) else self.filename.format(trainer)
        path, target = os.path.join(trainer.out, name), trainer if self.target is None else self.target
        if owner(_networks(target)) == 0 and not self._is_of_rank_0(name, trainer.out):
            warn(
                "snapshot: rank 0's own network is saved, which differs from the others' between two averages of "
                "local_steps, and the other ranks' are lost; write dbrdist.comm.snapshots.SharedSnapshot or "
                "create_multi_node_checkpointer on all ranks, or save where optimizer.num_local_steps is 0"
            )
        if self._writer is None:
            write(path, target, self._savefun)
        else:
            copy_of = getattr(self._writer, "copy_of", saved_state)  # of a writer that is a plain function, too
            self._writer(name, trainer.out, copy_of(target))
            self._last = path
        self._remove_oldest(path)
        return path

    def _is_of_rank_0(self, name: str, out: str) -> bool:
        """Whether its number is in the name of the file or the folder, as where each rank saves its own."""
        fixed = re.sub(r"{[^}]*}", "", self.filename) if isinstance(self.filename, str) else name
        return any(re.search(r"(?<!\d)0+(?!\d)", place) for place in (fixed, os.path.basename(os.path.normpath(out))))

    def _remove_oldest(self, just_written: str) -> None:
        if self._num_kept > 0 and isinstance(self.filename, str):
            remove_oldest(os.path.dirname(just_written), self.filename, self._num_kept, just_written)

    def finalize(self) -> None:
        """Wait until all is written. Raises CheckpointError where something was not."""
        if hasattr(self._writer, "finalize"):
            self._writer.finalize()
        if self._last is not None:
            self._remove_oldest(self._last)


def _check_format(filename: str) -> None:
    """Refuse names in braces that are not those of the trainer; warn of a place that is never filled in."""
    for _, field, _, _ in string.Formatter().parse(filename):
        if field is not None and not field.startswith((".", "0.", "[", "0[")) and field not in ("", "0"):
            words = f"expected attributes of the trainer, such as {{.updater.iteration}}, got {{{field}}}"
            raise ValueError(f"snapshot: filename: {words}")
        if field in (".epoch", ".iteration"):
            raise ValueError(f"snapshot: filename: a trainer has no {field[1:]}; write {{.updater{field}}}")
    if re.search(r"%0?\d*d", filename):
        warn(f"snapshot: filename: {filename!r} is not formatted with %; write {{.updater.iteration}} for the number")


def _networks(target: Any) -> list[Any]:
    """The links that are saved with an object: a trainer's are those of its optimizers."""
    optimizers = getattr(getattr(target, "updater", None), "get_all_optimizers", None)
    return [target] if optimizers is None else [optimizer.target for optimizer in optimizers().values()]


def state_bytes(trainer: Trainer) -> int:
    """About how many bytes of parameters and of optimizers' states a trainer saves; 0 where it does not say."""
    total = 0
    for optimizer in getattr(trainer.updater, "get_all_optimizers", dict)().values():
        for p in optimizer.target.params(include_uninit=False) if optimizer.target is not None else ():
            total += p.lend().nbytes * (1 + len(getattr(p.update_rule, "state_names", ())))
    return total


def remove_oldest(folder: str, filename: str, num_kept: int, just_written: str) -> None:
    """Keep the newest ``num_kept`` snapshots, and in any case the one just written, whatever the others' numbers."""
    for old in find(folder, filename)[:-num_kept]:
        if old != just_written:
            with contextlib.suppress(FileNotFoundError):
                os.remove(old)


def write(path: str, target: Any, savefun: Callable[[Any, Any], None] | None = None) -> None:
    """Save `target` so that `path` is either its whole new state or what it was before."""
    try:
        if savefun is None:
            write_atomically(path, lambda file: _write_sealed(file, target))
        else:
            replace_atomically(path, lambda temporary: savefun(temporary, target))
    except OSError as error:
        raise CheckpointError(
            f"{path}: the snapshot could not be written: {error.strerror or error}; earlier snapshots are unharmed"
        ) from error


# ---- the seal: a checksum of all bytes, as the zip archive's comment ----

_SEAL = b"dbrdist blake2b "
_SEAL_BYTES = len(_SEAL) + 2 * 32


def _write_sealed(file: Any, target: Any) -> None:
    save_npz(file, target, compression=False)
    file.seek(-2, os.SEEK_END)  # a zip archive ends with the length of its comment, so far 0
    file.write(_SEAL_BYTES.to_bytes(2, "little"))
    file.write(_SEAL + _checksum(file, file.tell()))


def _checksum(file: Any, num_bytes: int) -> bytes:
    """The hexadecimal checksum of a file's first bytes."""
    digest = hashlib.blake2b(digest_size=32)
    file.seek(0)
    while part := file.read(min(num_bytes, 1 << 20)):
        digest.update(part)
        num_bytes -= len(part)
    return digest.hexdigest().encode()


def _seal_holds(file: Any) -> bool | None:
    """Whether the bytes are those that were sealed; None for a file without a seal, for example of another program."""
    end = file.seek(0, os.SEEK_END) - _SEAL_BYTES
    if end < 0:
        return None
    file.seek(end)
    seal = file.read(_SEAL_BYTES)
    if not seal.startswith(_SEAL):
        return None
    return bool(seal == _SEAL + _checksum(file, end))


def find(folder: str, filename: str = "snapshot_iter_{.updater.iteration}") -> list[str]:
    """Paths of the files in `folder` that the format `filename` made, the oldest (by number, then name) first."""
    pattern = "(.+)".join(re.escape(part) for part in re.split(r"\{[^{}]*\}", filename))
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = re.fullmatch(pattern, name)
        if match and ".tmp-" not in name:
            found.append(([(int(g), "") if g.isdigit() else (-1, g) for g in match.groups()], name))
    return [os.path.join(folder, name) for _, name in sorted(found)]


GONE = "it is no longer there"  # a run that continues has removed it
_MAX_LOOKS = 100
_CHANGED = "its bytes are not those that were saved"


def damage(path: str) -> str | None:
    """What is wrong with a snapshot; None if it is whole.

    It is if no byte of the file has changed; an .npz file without a seal is where its entries' checksums hold.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            sealed = _seal_holds(file)
            if sealed is False:
                return _CHANGED
            check_archive_size(file)
            with zipfile.ZipFile(file) as archive:
                is_changed = sealed is None and (archive.comment or archive.testzip() is not None)
            return _CHANGED if is_changed else None
    except FileNotFoundError:
        return GONE
    except PermissionError as error:
        return f"it cannot be read: {error.strerror}"
    except Exception:  # damage shows as nearly any exception of zipfile and zlib
        is_empty = os.path.isfile(path) and not os.path.getsize(path)
        return "it is empty" if is_empty else "it ends early, or was never a snapshot"


def is_whole(path: str) -> bool:
    """Whether nothing is wrong with a snapshot; see :func:`damage`."""
    return damage(path) is None


def search(folder: str, filename: str = "snapshot_iter_{.updater.iteration}") -> tuple[str | None, dict[str, str]]:
    """The newest whole snapshot in `folder`, or None, and what is wrong with each one after it, the newest first."""
    wrong: dict[str, str] = {}
    for _ in range(_MAX_LOOKS):
        wrong, is_all = {}, True
        for path in reversed(find(folder, filename)):
            words = damage(path)
            if words is None:
                return path, wrong
            if words == GONE:
                is_all = False  # there are newer ones by now
            else:
                wrong[path] = words
        if is_all:
            break
    return None, wrong


def newest(folder: str, filename: str = "snapshot_iter_{.updater.iteration}") -> str | None:
    """The newest whole snapshot in `folder`; a damaged one is passed over with a warning."""
    found, wrong = search(folder, filename)
    for path, words in wrong.items():
        warnings.warn(
            f"{path} is damaged ({words}) and passed over; an earlier snapshot is taken if there is one", stacklevel=2
        )
    return found


def load_newest(folder: str, target: Trainer, filename: str = "snapshot_iter_{.updater.iteration}") -> str | None:
    """Load the newest whole snapshot into `target`; returns its path, or None where there is none."""
    path = newest(folder, filename)
    if path is not None:
        load(path, target)
    return path


_OF_STEPS = "/carried/"  # of an optimizer over several ranks
_OF_EXTENSIONS = ("extensions/", "extension_triggers/")  # as a Trainer lists them


def load(path: str, target: Any) -> None:
    """Load a snapshot into `target`, which must have a place for every entry but those of extensions.

    An extension that the saved run did not have starts from the beginning.

    Raises:
        CheckpointError: the file is damaged, or belongs to another architecture; the message names the entry.
    """
    load_entries(path, read(path), target)


def read(path: str) -> dict[str, Any]:
    """All entries of a snapshot.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not is_whole(path):
        raise CheckpointError(f"{path}: the snapshot is damaged")
    return read_npz(path)


def load_entries(path: str, saved: dict[str, Array], target: Any) -> None:
    """As :func:`load`, from what was read; ``path`` is for the words of an error."""
    entries = _Noting(saved)
    known = {_owner(key) for key in entries if key.startswith(_OF_EXTENSIONS)}

    def is_new(key: str) -> bool:
        return key.startswith(_OF_EXTENSIONS) and _owner(key) not in known

    try:
        NpzDeserializer(entries, ignore_names=is_new).load(target)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    # extensions may differ (only some ranks write a log), and so may the end of the run
    may_be_left = (*_OF_EXTENSIONS, "stop_trigger/")
    left = sorted(key for key in set(entries) - entries.read if not key.startswith(may_be_left))
    left = _without_step_state(path, left)
    if left:
        raise CheckpointError(
            f"{path}: expected a place for {left[0]} and {len(left) - 1} entries more of the saved state, found none; "
            "the snapshot belongs to another architecture"
        )


def _without_step_state(path: str, left: list[str]) -> list[str]:
    """Without what goes from one step into the next by options that this run has no more, such as ``accumulate``."""
    carried = [key for key in left if _OF_STEPS in key]
    if any(f"{_OF_STEPS}rank" in key and "/value/" in key for key in carried):
        raise CheckpointError(
            f"{path}: it was saved between two averages of local_steps, when each rank had parameters of its own; "
            "continue with the same local_steps"
        )
    if any("/gradient/" in key for key in carried):
        warn(f"{path}: it has gradients of batches that wait for their update by accumulate; they are not applied")
    return [key for key in left if _OF_STEPS not in key]


def _owner(key: str) -> tuple[str, ...]:
    """Of an entry of an extension or of its trigger, which of both, and the extension's name."""
    return tuple(key.split("/")[:2])


class _Noting(dict[str, Any]):
    """A dictionary that notes what was read from it."""

    def __init__(self, entries: dict[str, Array]):
        super().__init__(entries)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Array:
        self.read.add(key)
        return super().__getitem__(key)
