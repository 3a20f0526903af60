"""A small file of facts about this machine's environments, so that they are found out once."""

from __future__ import annotations

import os
from typing import Any

from . import wire

_FALLBACK = f"/tmp/dbrdist-{os.getuid()}"


def directory() -> str:
    """Where facts are kept: $XDG_CACHE_HOME/dbrdist, or ~/.cache/dbrdist; without a home, a folder that vanishes."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "dbrdist") if os.path.isabs(base) else _FALLBACK


def _path() -> str:
    return os.path.join(directory(), "launch.json")


def _is_ours() -> bool:
    """Whether nobody else could have put facts there: they decide which mpiexec is run."""
    try:
        found = os.stat(directory(), follow_symlinks=directory() != _FALLBACK)
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def get(key: str) -> dict[str, Any] | None:
    """The fact stored under a key."""
    if not _is_ours():
        return None
    try:
        with open(_path(), "rb") as file:
            found = wire.loads(file.read()).get(key)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def put(key: str, fact: dict[str, Any]) -> None:
    """Store a fact; a cache that cannot be written costs time at the next start, nothing else."""
    import json  # seldom needed, and it costs each launcher's start 5 million instructions

    try:
        os.makedirs(directory(), mode=0o755 if directory() != _FALLBACK else 0o700, exist_ok=True)
        if not _is_ours():
            return
        try:
            with open(_path()) as file:
                content = json.load(file)
        except (OSError, ValueError, RecursionError):
            content = {}
        content = content if isinstance(content, dict) else {}
        content[key] = fact
        temporary = f"{_path()}.{os.getpid()}"
        with open(temporary, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, _path())
    except (OSError, TypeError):
        pass


def stamp(path: str) -> str:
    """A path with the time of its last change: a new file there makes a new key."""
    try:
        return f"{path}@{os.stat(path).st_mtime_ns}"
    except OSError:
        return f"{path}@-"
