"""Files of public datasets: found in a folder, else downloaded, checked and kept there.

All of them lie under one root, ``~/.chainer/dataset`` unless said otherwise, as Chainer keeps them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array.types import Array
from dbrdist.core.files.dataset_root import get_dataset_root as get_dataset_root
from dbrdist.core.files.dataset_root import set_dataset_root as set_dataset_root
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import READING
from dbrdist.core.files.standard_streams import stderr

_TIMEOUT_SECONDS = 60


def get_dataset_directory(dataset_name: str, create_directory: bool = True) -> str:
    """The folder of one dataset, such as ``pfnet/chainer/mnist``, under the root; made where it is missing.

    Args:
        dataset_name: the path under the root.
        create_directory: make the folder if it is missing.

    Example:
        >>> dbrdist.dataset.get_dataset_directory("pfnet/chainer/mnist", False)  # doctest: +SKIP
        '/home/me/.chainer/dataset/pfnet/chainer/mnist'
    """
    path = os.path.join(get_dataset_root(), dataset_name)
    if create_directory:
        os.makedirs(path, exist_ok=True)
    return path


# ---- several processes at once --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone_with(path: str) -> Iterator[None]:
    """Within the block no other process or thread is in such a block for this path.

    The lock is a file beside the path, which goes away afterwards; a process that dies leaves it free. Where the file
    system has no locks nobody waits, and two processes may do the same work twice.
    """
    lock = path + ".lock"
    while True:
        with open(lock, "ab") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_open_as(file.fileno(), lock):  # else its holder has removed it meanwhile
                try:
                    yield
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(lock)
                return


def _is_open_as(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _room_in(folder: str) -> Any:
    """A folder for a file in the making, on the same disk."""
    from tempfile import TemporaryDirectory  # takes 3 ms, and is seldom needed

    return TemporaryDirectory(dir=folder, prefix=".making-")


def cache_or_load_file(path: str, creator: Callable[[str], Any], loader: Callable[[str], Any]) -> Any:
    """``loader(path)`` where the file exists; else ``creator(temporary)`` makes it, and its result is returned.

    ``temporary`` has the name of ``path`` in another folder; the file is renamed when it is whole. Of several processes
    that want it one makes it, and the others wait and load it.

    Args:
        path: the file.
        creator: ``creator(temporary)`` writes the file and returns its content.
        loader: ``loader(path)`` returns the content of the file.

    Returns:
        What the creator or the loader returned.

    Example:
        >>> from pathlib import Path
        >>> def create(path):
        ...     Path(path).write_text("made")
        ...     return "made"
        >>> with dbrdist.utils.tempdir() as folder:
        ...     [dbrdist.dataset.cache_or_load_file(f"{folder}/a", create, lambda p: "loaded") for _ in range(2)]
        ['made', 'loaded']
    """
    path = os.fspath(path)
    if os.path.exists(path):
        return loader(path)
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with _alone_with(path):
        if os.path.exists(path):
            return loader(path)
        with _room_in(folder) as room:
            made = os.path.join(room, name)
            content = creator(made)
            if not os.path.exists(made):
                raise FileNotFoundError(f"expected the creator to write the file that it was given, {name}; it did not")
            os.replace(made, path)
    return content


# ---- downloads ------------------------------------------------------------------------------------------------------


def cached_download(url: str) -> str:
    """The path of a file that was downloaded from a URL, now or before.

    Of several processes that want it one downloads, and the others wait.

    Args:
        url: the address, ``https://...``.

    Raises:
        OSError: it cannot be downloaded; the message has the reason.

    Example:
        >>> dbrdist.dataset.cached_download("https://example.org/data.gz")  # doctest: +SKIP
        '/home/me/.chainer/dataset/_dl_cache/0123456789abcdef0123456789abcdef'
    """
    return download(url)


def download(url: str, md5: str | None = None) -> str:
    """As :func:`cached_download`; a file with another checksum is not kept."""
    folder = os.path.join(get_dataset_root(), "_dl_cache")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, _md5(io.BytesIO(url.encode())))
    if os.path.exists(path):
        return path
    with _alone_with(path):
        if not os.path.exists(path):
            with _room_in(folder) as room:
                temporary = os.path.join(room, "file")
                _retrieve(url, temporary, md5)
                os.replace(temporary, path)
    return path


def _retrieve(url: str, path: str, md5: str | None) -> None:
    from urllib import request  # takes a fifth of what `import dbrdist` takes, and is seldom needed

    print(f"Downloading from {url}...", file=stderr)
    try:
        with request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer, open(path, "wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            announced = answer.headers.get("Content-Length")
    except Exception as e:  # of the connection, its encryption and its protocol
        raise OSError(f"expected to download {url}, but that failed: {e}") from e
    size = os.path.getsize(path)
    if announced is not None and announced.isdigit() and int(announced) != size:
        raise OSError(f"expected {announced} bytes from {url}, got {size}; try again")
    if md5 is not None and (found := _md5_of(path)) != md5:
        raise OSError(f"expected a file with the MD5 checksum {md5} from {url}, got {found}; the file was not kept")


def _md5_of(path: str) -> str:
    with open(path, "rb", opener=regular) as file:
        return _md5(file)


def _md5(file: Any) -> str:
    from hashlib import file_digest, md5  # loads OpenSSL

    return file_digest(file, lambda: md5(usedforsecurity=False)).hexdigest()


# ---- the files of a dataset -----------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A file of a public dataset: its name, where it can be had, and its checksum."""

    name: str
    urls: tuple[str, ...]
    md5: str


def find(dataset: str, folder: str, sources: list[Source]) -> list[str]:
    """The paths of a dataset's files: in its folder under the root (also without ``.gz``), else downloaded.

    Files in the folder are taken as they are; downloads must have the right checksum.
    """
    return [_find_one(dataset, folder, source, sources) for source in sources]


def _find_one(dataset: str, folder: str, source: Source, sources: list[Source]) -> str:
    here = get_dataset_directory(folder, create_directory=False)
    for name in (source.name, source.name.removesuffix(".gz")):
        if os.path.isfile(os.path.join(here, name)):
            return os.path.join(here, name)
    reasons = []
    for url in source.urls:
        try:
            return download(url, source.md5)
        except OSError as e:
            reasons.append(str(e))
    names = ", ".join(s.name for s in sources)
    raise OSError(
        f"{dataset} is not on this machine, and cannot be downloaded: {'; '.join(reasons)}. "
        f"Put the files {names} into the folder {here}; dbrdist.dataset.set_dataset_root(path) or the environment "
        f"variable CHAINER_DATASET_ROOT names another root than {get_dataset_root()}"
    )


def arrays_once(folder: str, name: str, keys: tuple[str, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Array]:
    """The arrays ``keys`` of ``name``, an .npz file in a dataset's folder; if it is missing, it is made of ``make()``.

    In a folder that cannot be written nothing is kept.
    """

    def create(path: str) -> dict[str, Array]:
        arrays = make()
        np.savez_compressed(path, **arrays)
        return arrays

    path = os.path.join(get_dataset_directory(folder, create_directory=False), name)
    if os.path.exists(path) or _can_be_written(os.path.dirname(path)):
        return cache_or_load_file(path, create, lambda path: _load_npz(path, keys))
    return make()


def _can_be_written(folder: str) -> bool:
    with contextlib.suppress(OSError):  # it may be there
        os.makedirs(folder)
    return os.access(folder, os.W_OK)


def _load_npz(path: str, keys: tuple[str, ...]) -> dict[str, Array]:
    try:
        with READING, open(path, "rb") as file:  # np.load leaves a damaged file open
            npz = np.load(file, allow_pickle=False)
            return {key: npz[key] for key in keys}
    except Exception as e:  # zipfile, zlib and NumPy have their own for damaged files
        raise ValueError(
            f"expected arrays in {path}, which cannot be read: {e}; delete it to have it made again"
        ) from e
