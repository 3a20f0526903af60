"""Files read by name must be regular ones: a named pipe would keep its reader waiting for a writer forever.

Devices are written to, never replaced.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# what the process has open already, such as `/dev/stdin` and the `<(...)` of a shell: whoever opened it writes to it,
# or reads it
_ALREADY_OPEN = re.compile(r"/dev/(stdin|stdout|stderr|fd/\d+)|/proc/(self|\d+)/fd/\d+")


def regular(path: str | bytes | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file, which writing may make; as ``open(path, opener=regular)``.

    Raises:
        OSError: as ``open`` does, and for a named pipe, a socket or a device, with the path and what it is.
    """
    if not flags & os.O_CREAT or os.path.exists(path):
        require_regular(path)
    return os.open(path, flags, 0o666)


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names a device, or what the process has open already, such as ``/dev/stdout``."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or _ALREADY_OPEN.fullmatch(os.fspath(path)) is not None


def send_to_device(path: str, make: Callable[[str], None]) -> None:
    """Let ``make(temporary)`` write a file elsewhere, and copy its bytes to a device."""
    import shutil  # for devices alone
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        temporary = os.path.join(folder, "file")
        make(temporary)
        with open(temporary, "rb") as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target)


def require_regular(path: str | bytes | os.PathLike[str]) -> None:
    """Raise OSError where ``path`` names a pipe, a socket or a device."""
    name = os.fsdecode(path)
    kind = _KINDS.get(stat.S_IFMT(os.stat(name).st_mode))
    if kind is not None and not _ALREADY_OPEN.fullmatch(name):
        raise OSError(errno.EINVAL, f"expected a regular file, it is {kind}", name)
