"""Serializers: one walk over an object's entries both saves and loads them.

An object's ``serialize(serializer)`` names each entry once: ``self.t = serializer('t', self.t)`` for a value,
``child.serialize(serializer['child'])`` for a part. The walk does not know its container; ``DictionarySerializer`` and
``NpzDeserializer`` put entries into a flat dictionary and an ``.npz`` file, with paths such as ``l1/W`` as keys;
``core/files/hdf5.py`` has those of HDF5 files.

A file holds arrays and one entry ``dbrdist.json`` with the format's version, the names of types that ``.npz`` does not
know (bfloat16) and the entries that are None. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

import numpy as np

from dbrdist.core.array.backend import as_dtype, is_array, to_cpu
from dbrdist.core.array.chainer_mode import as_chainer, loading
from dbrdist.core.array.types import Array, HostArray
from dbrdist.core.files.filled import fill_entry
from dbrdist.core.files.regular_file import is_device, regular, send_to_device
from dbrdist.core.usage.mistakes import given_a_class, warn
from dbrdist.errors import CheckpointError, MissingEntryError

if TYPE_CHECKING:
    from typing import TypeVar

    Savable: TypeAlias = Array | complex | np.generic | str | Sequence["Savable"] | None  # what an entry may be
    Entry = TypeVar("Entry", bound=Savable)  # what is loaded is of the kind of what it replaces

FORMAT_VERSION = 1
_META = "dbrdist.json"


class Serializable(Protocol):
    """What names its entries in one walk, by which it is saved and loaded."""

    def serialize(self, serializer: AbstractSerializer, /) -> None: ...


IgnoredName: TypeAlias = str | Callable[[str], bool]  # a name, or whether a name is one
IgnoredNames: TypeAlias = IgnoredName | list[IgnoredName] | tuple[IgnoredName, ...] | None


class AbstractSerializer:
    """What saving and loading share: ``serializer[key]`` for a part, ``serializer(key, value)`` for a value.

    Example:
        >>> isinstance(serializers.DictionarySerializer(), serializers.AbstractSerializer)
        True
    """

    is_loading = False

    def __getitem__(self, key: str) -> AbstractSerializer:
        """The serializer of a part."""
        raise NotImplementedError

    def __call__(self, key: str, value: Entry) -> Entry:
        """Save ``value``, or give back what was saved in its place (arrays are filled in place)."""
        raise NotImplementedError


class Serializer(AbstractSerializer):
    """The base of what saves.

    Example:
        >>> isinstance(serializers.DictionarySerializer(), serializers.Serializer)
        True
    """

    def save(self, obj: Serializable) -> None:
        """Save an object with ``serialize``.

        Args:
            obj: for example a link, an optimizer or a trainer.
        """
        obj.serialize(self)


class Deserializer(AbstractSerializer):
    """The base of what loads.

    Example:
        >>> isinstance(serializers.NpzDeserializer({}), serializers.Deserializer)
        True
    """

    is_loading = True

    def load(self, obj: Serializable) -> None:
        """Load into an object with ``serialize``.

        Args:
            obj: for example a link, an optimizer or a trainer; it is changed in place.
        """
        obj.serialize(self)


SUBJECT = "__subject__"


def is_about(serializer: AbstractSerializer, subject: str, *before: str) -> bool:
    """Save with a state what it is about; when loading, whether the saved state is about the same.

    `before` has what earlier versions said of the same.

    ``if is_about(serializer, key): self.best = serializer('best', self.best)`` keeps the best value of one key from
    becoming that of another. A state that was saved without a subject counts as the same.
    """
    saved = described(serializer, SUBJECT, subject)
    return saved is None or saved in (subject, *before)


def loads(serializer: AbstractSerializer) -> bool:
    """Whether a serializer loads. One of a program's that does not say so, such as a function, is taken to load."""
    return bool(getattr(serializer, "is_loading", True))


def saved_entry(serializer: AbstractSerializer, *keys: str) -> Array | int | None:
    """The value that was saved under the first of these names that is there, else None; for a serializer that loads."""
    value: Array | int | None
    for key in keys:
        try:
            value = serializer(key, None)
        except KeyError:
            continue
        if value is not None:
            return value
    return None


def described(serializer: AbstractSerializer, key: str, words: str) -> str | None:
    """Save words; when loading the saved ones, None where there are none: an earlier version saved."""
    if not loads(serializer):
        serializer(key, words)
        return words
    saved = saved_entry(serializer, key)
    return None if saved is None else str(saved)


class DictionarySerializer(Serializer):
    """Saves into a dictionary of NumPy arrays (None stays None), keyed by path.

    Args:
        target: the dictionary; a new one if not given.
        path: what keys begin with.
        copy: makes the copy of an array, in C order; None for one in new memory.

    Example:
        >>> serializer = serializers.DictionarySerializer()
        >>> serializer.save(L.Linear(2, 1))
        >>> sorted(serializer.target)
        ['W', 'b']
    """

    def __init__(
        self, target: dict[str, Array | None] | None = None, path: str = "", copy: _Copy | None = None,
    ) -> None:  # fmt: skip
        self.target: dict[str, Array | None] = {} if target is None else target
        self.path = path
        self._copy = copy

    def __getitem__(self, key: str) -> DictionarySerializer:
        return DictionarySerializer(self.target, self.path + key.strip("/") + "/", self._copy)

    def __call__(self, key: str, value: Entry) -> Entry:
        saved = None if value is None else as_saved(self.path + key, value, self._copy)
        self.target[self.path + key.lstrip("/")] = saved
        return value


_Copy = Callable[[HostArray], HostArray]


def as_saved(key: str, value: Any, copy: _Copy | None = None) -> HostArray:
    """A copy of a value as an array in host memory."""
    a = to_cpu(value) if is_array(value) else np.asarray(value)
    if a.dtype.kind == "O":
        raise TypeError(f"{key}: expected an array, a number, a string or None, got {type(value).__name__}")
    return np.array(a, copy=True, order="C") if copy is None else copy(a)


class NpzDeserializer(Deserializer):
    """Loads from a mapping of arrays keyed by path, such as an opened ``.npz`` file.

    Args:
        npz: the arrays by name.
        path: the prefix of the names to read.
        strict: True raises if an entry is missing, False keeps the value.
        ignore_names: names, or functions of a name, whose entries are not read; one or several.

    Raises:
        CheckpointError: at a call, an entry is missing or has another shape.

    Example:
        >>> model = L.Linear(2, 1)
        >>> serializers.NpzDeserializer({"W": np.ones((1, 2)), "b": np.zeros(1)}).load(model)
        >>> model.W.array
        array([[1., 1.]], dtype=float32)
    """

    def __init__(
        self, npz: Mapping[str, Array], path: str = "", strict: bool = True, ignore_names: IgnoredNames = None
    ) -> None:
        self.npz = npz
        self.path = path
        self.strict = strict
        self.ignore_names = ignore_names
        self.absent: list[str] = []  # the names that were asked for and are not there, of all parts
        self.present: list[str] = []  # and those that are

    def __getitem__(self, key: str) -> NpzDeserializer:
        part = NpzDeserializer(self.npz, self.path + key.strip("/") + "/", self.strict, self.ignore_names)
        part.absent, part.present = self.absent, self.present
        return part

    def _is_ignored(self, key: str) -> bool:
        names = self.ignore_names
        if names is None:
            return False
        names = names if isinstance(names, (tuple, list)) else [names]
        return any(n(key) if callable(n) else n == key for n in names)

    def __call__(self, key: str, value: Entry) -> Entry:
        key = self.path + key.lstrip("/")
        if self._is_ignored(key):
            return value
        if key not in self.npz:
            if self.strict:
                raise MissingEntryError(missing(key, self.npz))
            self.absent.append(key)
            return value
        self.present.append(key)
        saved = self.npz[key]
        is_none = saved is None or (saved.dtype.kind == "O" and not saved.ndim and saved[()] is None)
        return load_value(key, value, None if is_none else saved)


def missing(key: str, saved: Iterable[str]) -> str:
    """What is wrong where the names ``saved`` have no entry ``key``."""
    saved = list(saved)
    names = ", ".join(map(repr, saved[:3])) + (", ..." if len(saved) > 3 else "") if saved else "no entries"
    hint = f"has {names}: it belongs to another architecture, or load it with strict=False"
    if (rest := key.partition("/")[2]) in saved:
        hint = f"has {rest!r}: load it into the part {key[: -len(rest) - 1]!r} alone"
    for name in [name for name in saved if key and name != key and name.replace("/", "") == key.replace("/", "")][:1]:
        hint = f"has {name!r}: a path ends with a slash, such as path='predictor/'"
    for name in [name for name in saved if name.endswith("/" + key)][:1]:
        hint = f"has {name!r}: load it with path={name[: -len(key)]!r}"
    return f"{key}: expected this entry in the saved state, but it is not there; the state {hint}"


def load_value(key: str, value: Any, saved: Array | None) -> Any:
    """What stands for ``value`` after loading the array ``saved``: arrays are filled in place, others keep their type.

    Raises:
        CheckpointError: the shape or the type does not fit.
    """
    if value is None or saved is None:
        return saved
    if is_array(value):
        return fill_entry(key, value, saved)
    if isinstance(value, str):
        return str(saved)
    return _as_loaded(key, value, saved)


def _as_loaded(key: str, value: Any, saved: Array) -> float | np.generic | Sequence[float]:
    """A saved number or list in the type of the value that it replaces."""
    if isinstance(value, (list, tuple)):
        return type(value)(saved.tolist())
    if saved.ndim:
        raise CheckpointError(
            f"{key}: expected one {type(value).__name__} as in the object, "
            f"found an array of shape {saved.shape} in the saved state"
        )
    number = saved.item()
    if isinstance(value, int) and isinstance(number, float):  # lr=1 that was 0.5 when it was saved
        return number
    return type(value)(number)


# ---- npz files ------------------------------------------------------------------------------------------------------


def encode(entries: Mapping[str, Array | None]) -> dict[str, Array]:
    """A dictionary of arrays and None as plain arrays that ``.npz`` and any reader understand."""
    arrays, dtypes, none = {}, {}, []
    for key, value in entries.items():
        if value is None:
            none.append(key)
            continue
        if value.dtype.kind == "V":  # a type that NumPy itself has no name for, such as bfloat16
            dtypes[key] = value.dtype.name
            value = value.view(f"u{value.dtype.itemsize}")
        arrays[key] = value
    meta = json.dumps({"format": FORMAT_VERSION, "dtypes": dtypes, "none": none})
    arrays[_META] = np.frombuffer(meta.encode(), np.uint8)
    return arrays


class SavedByOthers(dict[str, Any]):
    """The entries of a file that :func:`save_npz` did not write: Chainer's, most likely."""


def decode(npz: Mapping[str, HostArray]) -> dict[str, Any]:
    """The inverse of :func:`encode`; files without its entry (Chainer's) are taken as they are."""
    keys = list(npz)
    meta: dict[str, Any] = {"format": 1, "dtypes": {}, "none": []}
    if _META in keys:
        meta = json.loads(bytes(npz[_META]).decode())
    if meta["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"expected format {FORMAT_VERSION} or older, found format {meta['format']}; update dbrdist"
        )
    entries: dict[str, HostArray | None] = {}
    for key in keys:
        if key != _META:
            a = npz[key]
            entries[key] = a.view(as_dtype(meta["dtypes"][key])) if key in meta["dtypes"] else a
    entries.update(dict.fromkeys(meta["none"]))
    return entries if _META in keys else SavedByOthers(entries)


def replace_atomically(path: str | os.PathLike[str], make: Callable[[str], None]) -> None:
    """Let ``make(temporary)`` write a file beside its target, flush it to disk and rename it.

    No reader ever sees a half of it; where that fails, the target is as it was. A device, such as `/dev/null`, stays
    what it is and gets the bytes: where an administrator writes there, a rename would replace it.
    """
    target = os.fspath(path)
    if is_device(target):
        send_to_device(target, make)
        return
    temporary = f"{target}.tmp-{os.getpid()}-{threading.get_ident()}"
    try:
        make(temporary)
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = target  # the name that the caller knows
        raise
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder; the file itself is there
        _flush(os.path.dirname(target) or ".")


def _flush(path: str) -> None:
    """Make what was written last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], int | None]) -> None:
    """As :func:`replace_atomically`, for a function that writes to an open file."""

    def make(temporary: str) -> None:
        with open(temporary, "w+b") as f:
            write(f)

    replace_atomically(path, make)


def saved_state(obj: Serializable, copy: _Copy | None = None) -> dict[str, Array | None]:
    """A copy of an object's state as a flat dictionary of NumPy arrays (None stays None), by path."""
    serializer = DictionarySerializer(copy=copy)
    serializer.save(obj)
    return serializer.target


def save_npz(file: str | os.PathLike[str] | BinaryIO, obj: Serializable, compression: bool = True) -> None:
    """Save an object to an ``.npz`` file. A crash leaves no half of a file.

    Args:
        file: a path or an open binary file.
        obj: a link, an optimizer, a trainer, anything with ``serialize``, or a dictionary of arrays by name, such as
            :func:`saved_state` gives.
        compression: compress the arrays.

    Raises:
        TypeError: the arguments are exchanged, or ``obj`` cannot be saved.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> serializers.save_npz(file, L.Linear(2, 1))
        >>> sorted(np.load(io.BytesIO(file.getvalue())))
        ['W', 'b', 'dbrdist.json']
    """
    if isinstance(file, type) or hasattr(file, "serialize"):
        raise TypeError(f"save_npz: expected a file's name, got {type(file).__name__}; write save_npz(file, object)")
    if not isinstance(obj, dict):
        _check_serializable("save_npz", obj)
        _warn_of_no_values(obj)
    arrays = encode(obj if isinstance(obj, dict) else saved_state(obj))
    save: Callable[..., None] = np.savez_compressed if compression else np.savez
    if isinstance(file, (str, os.PathLike)):
        write_atomically(file, lambda f: save(f, **arrays))
    else:
        save(file, **arrays)


def load_npz(
    file: str | os.PathLike[str] | BinaryIO, obj: Serializable, path: str = "", strict: bool = True,
    ignore_names: IgnoredNames = None,
) -> None:  # fmt: skip
    """Load an object from an ``.npz`` file of :func:`save_npz` or of Chainer (whose None entries need pickle: refused).

    Args:
        file: the file, a path or an open binary file.
        obj: what to fill: a link, an optimizer, a trainer or anything with ``serialize``.
        path: the prefix of the names to read, for a part of what was saved.
        strict: True raises if an entry is missing, False keeps the value.
        ignore_names: names, or functions of a name, whose entries are not read; one or several.

    Raises:
        CheckpointError: the file is damaged, or an entry is missing or of another shape; the message names the entry.
        TypeError: the arguments are exchanged, or ``obj`` cannot be loaded.

    Example:
        >>> model, other = L.Linear(2, 1), L.Linear(2, 1)
        >>> with dbrdist.utils.tempdir() as folder:
        ...     serializers.save_npz(f"{folder}/model.npz", model)
        ...     serializers.load_npz(f"{folder}/model.npz", other)
        >>> bool((model.W.array == other.W.array).all())
        True
    """
    if isinstance(file, type) or hasattr(file, "serialize"):
        raise TypeError(f"load_npz: expected a file's name, got {type(file).__name__}; write load_npz(file, object)")
    saved = read_npz(file)
    _check_serializable("load_npz", obj)
    deserializer = NpzDeserializer(saved, path, strict, ignore_names)
    if isinstance(saved, SavedByOthers) and not loading.file_of_chainer:
        load_file_of_chainer(file, deserializer, obj)
    else:
        deserializer.load(obj)
    if not strict and saved and ignore_names is None and deserializer.absent and not deserializer.present:
        warn(
            f"load_npz: nothing is loaded from {file}: it has {', '.join(list(saved)[:3])}, ..., and the object "
            f"{', '.join(deserializer.absent[:3])}, ...; see path="
        )


def load_file_of_chainer(
    file: str | os.PathLike[str] | BinaryIO, deserializer: Deserializer, obj: Serializable
) -> None:
    """Load from a file that is not ours: a Sequential has the order of Chainer's or, where that does not fit, its own.

    Where both fit, a warning says which was taken, but not in a program of Chainer, whose files are Chainer's.
    """
    loading.file_of_chainer = True
    late = [p for p in obj.params() if not p.is_initialized] if hasattr(obj, "params") else []
    try:
        deserializer.load(obj)
    except CheckpointError:  # not of Chainer's Sequential either, or wrong in another way, which is said
        for p in late:  # it may have got the shape of another
            p.array = None
    else:
        links = obj.links() if hasattr(obj, "links") and not as_chainer[0] else ()
        if any(getattr(link, "has_two_orders", bool)() for link in links):
            warn(
                f"{file}: dbrdist did not write it, so it is read as Chainer's, whose Sequential numbers its links in "
                "another order; the layers fit in their own order too: if it is that, load it into ChainList(*links)"
            )
        return
    finally:
        loading.file_of_chainer = False
    deserializer.load(obj)


def _warn_of_no_values(obj: Serializable) -> None:
    """Warn where a network is saved before its first batch gave its parameters their shapes."""
    if hasattr(obj, "namedparams"):
        without = [name for name, p in obj.namedparams() if not p.is_initialized]
        if without:
            warn(
                f"save_npz: {', '.join(without[:3])}{', ...' if len(without) > 3 else ''}: no values are saved, since "
                "the network has seen no input yet; save it after its first batch"
            )


def _check_serializable(where: str, obj: Serializable) -> None:
    """Refuse what cannot be saved or loaded."""
    if isinstance(obj, type):
        raise given_a_class(where, obj, "an object with serialize, such as a link")
    if not hasattr(obj, "serialize"):
        raise TypeError(f"{where}: expected an object with serialize, such as a link, got {type(obj).__name__}")


# What one archive may unpack to: more than this factor of its own size, and more than this many bytes, is a bomb.
_MAX_FACTOR, _MIN_LIMIT_BYTES, _MAX_ENTRIES = 200, 1 << 28, 1_000_000


# NumPy reads headers by ast.literal_eval, which fails in CPython 3.11 when two threads are in it (gh-106905).
READING = threading.RLock()
os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


def read_npz(file: str | os.PathLike[str] | BinaryIO) -> dict[str, Any]:
    """All entries of an ``.npz`` file (a path or an open binary file).

    Raises:
        CheckpointError: the file is damaged, or unpacks to far more than it holds. OSError where it cannot be opened.
    """
    with contextlib.ExitStack() as stack:  # numpy.load leaves a damaged file open
        source = stack.enter_context(open(file, "rb", opener=regular)) if isinstance(file, (str, os.PathLike)) else file
        try:
            check_archive_size(source)
            _check_kind(source)
            with READING:
                return decode(stack.enter_context(np.load(source, allow_pickle=False)))
        except CheckpointError as e:
            raise type(e)(f"{file}: {e}") from e
        except Exception as e:  # damage shows as nearly any exception of zipfile, zlib, NumPy and json
            raise CheckpointError(f"{file}: cannot be read as an .npz file: {e or type(e).__name__}") from e


# How files begin that are no archives, and what they are.
_KINDS = {
    b"\x93NUMPY": "it holds a single array of numpy.save; expected an .npz file of save_npz",
    b"\x89HDF": "it is an HDF5 file; use load_hdf5",
    b"\x80": "it is a pickle; expected an .npz file of save_npz",
    b"": "it is empty",
}


def _check_kind(source: BinaryIO) -> None:
    """Say what an open file is that is no archive; of an archive, whether PyTorch made it."""
    start = source.read(8)
    source.seek(0)
    if start.startswith(b"PK"):
        import zipfile  # which loads much that a program without snapshots does not need

        if zipfile.is_zipfile(source):
            source.seek(0)
            with zipfile.ZipFile(source) as archive:
                if any(name.endswith("/data.pkl") for name in archive.namelist()):
                    raise CheckpointError("it is a file of torch.save; save its arrays by numpy.savez in PyTorch first")
        source.seek(0)
        return
    for magic, words in _KINDS.items():
        if start.startswith(magic) if magic else not start:
            raise CheckpointError(f"cannot be read as an .npz file: {words}")
    raise CheckpointError(f"cannot be read as an .npz file: it begins with {start!r}")


def check_archive_size(source: BinaryIO) -> None:
    """Refuse an open zip archive with too many entries, or with far more in it than its own size can hold."""
    import zipfile

    size = source.seek(0, os.SEEK_END)
    source.seek(0)
    if not zipfile.is_zipfile(source):
        source.seek(0)
        return
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
    source.seek(0)
    unpacked, limit = sum(entry.file_size for entry in entries), max(_MAX_FACTOR * size, _MIN_LIMIT_BYTES)
    if len(entries) > _MAX_ENTRIES:
        raise CheckpointError(f"expected at most {_MAX_ENTRIES:,} entries in an archive, found {len(entries):,}")
    if unpacked > limit:
        raise CheckpointError(
            f"expected an archive of {size:,} bytes to unpack to at most {limit:,}, but it claims {unpacked:,}"
        )
