"""`extends: BASE.yaml` in a configuration: the entries of another one, which this one changes or adds to.

Mappings are merged deeply; everything else, lists too, replaces what the base has. A component with another `name`
replaces the base's: the keys of another optimizer mean nothing to it.
"""

from __future__ import annotations

import os
from typing import Any

from dbrdist.cli.configuration import document as yaml_document
from dbrdist.cli.configuration.document import Document, KeyPath
from dbrdist.core.files.regular_file import regular
from dbrdist.errors import ConfigError

MAX_BYTES = 10_000_000
_MAX_FILES = 10
_COMPONENTS = ("model", "data", "loss", "optimizer", "schedule")  # whose bare word is the name alone


def read_file(file: str) -> bytes:
    """The bytes of a configuration. Raises ConfigError for one that is too large, OSError as `open` does."""
    with open(file, "rb", opener=regular) as source:
        content = source.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: expected a configuration of at most {MAX_BYTES:,} bytes, this is larger")
    return content


def read(content: bytes, name: str, files: tuple[str, ...] = ()) -> tuple[Document, tuple[str, ...]]:
    """A document with those that it extends merged below it, and the names of all files, its own first.

    `files` are those that led here. Mistakes are in the document's `problems`.
    """
    document = _parsed(content, name)
    files = (*files, name)
    if not isinstance(document.data, dict) or document.data.get("extends") is None:
        return document, files
    base, words = document.data.pop("extends"), None
    path = os.path.join(os.path.dirname(name), os.path.expanduser(base)) if isinstance(base, str) else ""
    if not isinstance(base, str) or not base or "\0" in base:
        words = f"expected the path of a configuration, got {base!r}"
    elif any(_is_same(path, other) for other in files):
        words = f"{' extends '.join([*files, path])}: a cycle"
    elif len(files) >= _MAX_FILES:
        words = f"expected at most {_MAX_FILES} files that extend one another"
    try:
        below = None if words else read_file(path)
    except OSError as error:
        words = f"{path} cannot be read: {error.strerror}"
    if words or below is None:  # at once: what the base would have had must not be called missing
        raise ConfigError("\n".join([f"{document.values['extends',]}: extends: {words}", *document.problems]))
    lower, files = read(below, path, files)
    return _merged(lower, document), files


def _is_same(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _parsed(content: bytes, name: str) -> Document:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}:1: the file is not UTF-8 text: {error.reason}") from None
    document = yaml_document.read(text, name)
    if document.data is None and not document.problems:
        document.data = {}
    if not isinstance(document.data, dict):
        raise ConfigError("\n".join(document.problems or [f"{name}:1:1: expected `key: value` lines"]))
    return document


# ---- merging --------------------------------------------------------------------------------------------------------


def _merged(base: Document, over: Document) -> Document:
    result = Document(over.name, problems=[*over.problems, *base.problems])
    result.data = _merge(base, over, (), base.data, over.data, result)
    return result


def _merge(base: Document, over: Document, path: KeyPath, a: Any, b: Any, result: Document) -> Any:
    """The merged entry at `path`, and in `result` where each part of it stands."""
    if isinstance(a, str) and isinstance(b, dict) and path and path[-1] in _COMPONENTS:
        base.values[*path, "name"] = base.values[path]
        a = {"name": a}
    if not isinstance(a, dict) or not isinstance(b, dict) or b.get("name", a.get("name")) != a.get("name"):
        _take(over, path, result)
        return b
    result.values[path] = over.values[path]
    data: dict[str, Any] = {}
    for key in {**a, **b}:
        inner = (*path, key)
        for source in (base, over):
            if inner in source.keys:
                result.keys[inner] = source.keys[inner]
        if key in a and key in b:
            data[key] = _merge(base, over, inner, a[key], b[key], result)
        else:
            _take(base if key in a else over, inner, result)
            data[key] = a[key] if key in a else b[key]
    return data


def _take(source: Document, path: KeyPath, result: Document) -> None:
    """Note where an entry and all in it stand."""
    end = len(path)
    result.values |= {p: place for p, place in source.values.items() if p[:end] == path}
    result.keys |= {p: place for p, place in source.keys.items() if p[:end] == path}
