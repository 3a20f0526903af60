"""From a YAML file and `key=value` overrides to a Config, or to one error that lists every mistake with its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dbrdist.cli.configuration import document as yaml_document
from dbrdist.cli.configuration import extend
from dbrdist.cli.configuration.document import Document, KeyPath
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.configuration.settings import BY_TAG
from dbrdist.core.usage import mistakes
from dbrdist.errors import ConfigError


class Origin:
    """Where each entry of a configuration was written: `file:line:column`, or the override on the command line."""

    def __init__(self, document: Document, files: tuple[str, ...] = ()):
        self._document = document
        self.files = files  # the file, and those that it extends
        self.overrides: dict[KeyPath, str] = {}

    def override(self, path: KeyPath, words: str) -> None:
        self.overrides[path] = words

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """The place of the entry at `path`, or of the nearest one around it; of its key where `key` is true."""
        for end in range(len(path), -1, -1):
            part = path[:end]
            if part in self.overrides:
                return f"command line {self.overrides[part]!r}"
            if key and part in self._document.keys:
                return self._document.keys[part]
            if part in self._document.values:
                return self._document.values[part]
            made = [words for below, words in self.overrides.items() if below[:end] == part]
            if made and part:
                return f"command line {made[0]!r}"
        return self._document.name


def load(file: str | FilePath, overrides: Iterable[str] = ()) -> tuple[Config, Origin]:
    """Read and check a configuration.

    `overrides` are `dotted.key=value`, the value in YAML; list items are numbered from 0. Raises ConfigError with
    every mistake at once; raises OSError as `open` does where the file cannot be read.
    """
    return check(extend.read_file(str(file)), str(file), overrides)


def check(content: bytes, name: str, overrides: Iterable[str] = ()) -> tuple[Config, Origin]:
    """Like `load`, for text that was already read; `name` stands in the messages, and `extends` is relative to it."""
    document, files = extend.read(content, name)
    origin = Origin(document, files)
    problems = list(document.problems)
    raw = _apply(overrides, document.data, origin, problems)
    try:
        config = _validate(document.data, raw)
    except ValidationError as error:
        problems += [_sentence(dict(mistake), origin) for mistake in error.errors(include_url=False)]
    if problems:
        raise ConfigError("\n".join(sorted(problems, key=lambda sentence: _line_and_column(sentence, name))))
    return config, origin


def _line_and_column(sentence: str, name: str) -> tuple[float, float]:
    found = re.match(rf"{re.escape(name)}:(\d+):(\d+): ", sentence)
    return (int(found[1]), int(found[2])) if found else (float("inf"), 0)


def dump(config: BaseModel) -> str:
    """The configuration as YAML that `load` reads back to an equal one; what it `extends` is in it."""
    data = _name_first(config.model_dump(exclude={"extends"}))  # as JSON it would lose bytes of file names
    return yaml_document.write(data)


def described(config: BaseModel, origin: Origin) -> str:
    """As `dump`, with the files in front that the configuration was made from, where it extends others."""
    names = [name.encode("unicode_escape").decode() for name in origin.files]  # one line, whatever is in them
    return (f"# {' extends '.join(names)}\n" if len(names) > 1 else "") + dump(config)


def _name_first(data: Any) -> Any:
    if isinstance(data, dict):
        keys = sorted(data, key=lambda key: key != "name")
        return {key: _name_first(data[key]) for key in keys}
    return [_name_first(item) for item in data] if isinstance(data, list | tuple) else data


# ---- overrides ---------------------------------------------------------------------------------------------------


def _apply(overrides: Iterable[str], data: dict[str, Any], origin: Origin, problems: list[str]) -> dict[KeyPath, str]:
    """Put each override into `data`; returns their values as they were typed."""
    raw: dict[KeyPath, str] = {}
    for words in overrides:
        problem = _apply_one(words, data, origin, raw)
        if problem:
            problems.append(f"command line {words!r}: {problem}")
    return raw


def _apply_one(words: str, data: dict[str, Any], origin: Origin, raw: dict[KeyPath, str]) -> str | None:
    key, equals, text = words.partition("=")
    parts = key.split(".")
    if not equals or not all(re.fullmatch(r"\w+", part) for part in parts):
        return "expected key=value with a dotted key, such as optimizer.lr=0.1"
    if parts[0] == "extends":
        return "extends belongs in the file, not on the command line"
    value = yaml_document.read(text, "value")
    if value.problems:
        return "; ".join(problem.partition(": ")[2] for problem in value.problems)
    place: Any = data
    path: KeyPath = ()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        index = _index(place, part)
        if isinstance(index, str) and isinstance(place, list):
            return f"{'.'.join(parts[:i])} is a list of {len(place)}; number its items from 0, got {part!r}"
        path = (*path, index)
        if last:
            place[index] = value.data
            _drop_other_name(path, place)
        else:
            place = _inner(place, index)
            if place is None:
                return f"{'.'.join(parts[: i + 1])} is a value and has no entry {parts[i + 1]!r}"
    _drop_replaced(path, words, origin, raw, is_name=isinstance(value.data, str))
    origin.override(path, words)
    raw[path] = text
    return None


def _drop_replaced(path: KeyPath, words: str, origin: Origin, raw: dict[KeyPath, str], is_name: bool) -> None:
    """Forget overrides of entries of what a later one replaces as a whole; say so where that is a mere name."""
    for below in [other for other in raw if len(other) > len(path) and other[: len(path)] == path]:
        before = origin.overrides.pop(below)
        del raw[below]
        if is_name:
            mistakes.warn(
                f"command line {before!r}: this has no effect, for {words!r} behind it replaces all of "
                f"{'.'.join(map(str, path))}; write it behind that"
            )


_OF_RATE = {"lr": "alpha", "alpha": "lr"}


def _drop_other_name(path: KeyPath, place: Any) -> None:
    """An override of the learning rate holds, by whichever of its two names the file gives it."""
    other = _OF_RATE.get(str(path[-1])) if path[0] == "optimizer" and len(path) == 2 else None
    if other in place:
        plain = str(place.get("name")).replace("_", "").lower()
        for tag, cls in BY_TAG.items():
            names = get_args(cls.model_fields["name"].annotation) if tag.startswith("<optimizer ") else ()
            if plain in [str(name).replace("_", "") for name in names]:
                if not _OF_RATE.keys() <= cls.model_fields.keys():
                    del place[other]
                return


def _index(place: Any, part: str) -> str | int:
    is_index = isinstance(place, list) and re.fullmatch("[0-9]{1,9}", part) and int(part) < len(place)
    return int(part) if is_index else part


def _inner(place: Any, index: Any) -> dict[str, Any] | list[Any] | None:
    """The mapping or list at `index`, made where there is none; a component's bare name becomes `{name: ...}`."""
    inner = place.get(index) if isinstance(place, dict) else place[index]
    if inner is None:
        inner = {}
    elif isinstance(inner, str):
        inner = {"name": inner}
    elif not isinstance(inner, dict | list):
        return None
    place[index] = inner
    return inner


def _validate(data: dict[str, Any], raw: dict[KeyPath, str]) -> Config:
    """Check; where text is wanted and an override looked like a number, as in `out=2026`, take it as it was typed."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        paths = [_data_path(e["loc"]) for e in error.errors() if e["type"] == "string_type"]
        for path in (path for path in paths if raw.get(path)):
            place: Any = data
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = raw[path]
        return Config.model_validate(data)


# ---- sentences ---------------------------------------------------------------------------------------------------


def _data_path(loc: Sequence[str | int]) -> KeyPath:
    """A location of pydantic's without the tags that tell alternatives apart."""
    return tuple(part for part in loc if part not in BY_TAG)


def _sentence(mistake: dict[str, Any], origin: Origin) -> str:
    path = _data_path(mistake["loc"])
    kind, got, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    if kind == "refused":
        path += tuple(int(part) if part.isdecimal() else part for part in context["at"].split("."))
        words = context["words"]
    elif kind == "missing":
        words = "is required and missing"
    elif kind == "extra_forbidden":
        words = "unknown key" + _nearest(str(path[-1]), _known_keys(mistake["loc"][:-1]))
        words += "" if "did you mean" in words else _owners(mistake["loc"])
    elif kind == "unknown_name" and isinstance(got, dict) and "name" not in got:
        words = f"`name` is required and missing: {context['known']}"
    elif kind == "unknown_name":
        name = got.get("name") if isinstance(got, dict) else got
        words = f"{mistake['msg']}; got {name!r}" + _nearest(str(name), context["names"], listed=False)
        path += ("name",) if isinstance(got, dict) else ()
    else:
        words = f"{_expected(mistake)}, got {_shown(got)}"
        if kind == "literal_error" and isinstance(got, str):
            words += _nearest(got, _options(context), listed=False)
    where = origin.where(path, key=kind == "extra_forbidden")
    return f"{where}: {'.'.join(map(str, path)) or 'configuration'}: {words}"


def _expected(mistake: dict[str, Any]) -> str:
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "bool_type":
        hint = " (yes, no, on and off are words)" if mistake["input"] in ("yes", "no", "on", "off") else ""
        return f"expected true or false{hint}"
    known = {
        "int_type": "expected a whole number",
        "float_type": "expected a number",
        "string_type": "expected text; put it in quotes if it is meant as text",
        "tuple_type": "expected a list",
        "dict_type": "expected a mapping",
        "model_type": "expected a mapping",
        "finite_number": "expected a finite number",
        "literal_error": f"expected {context.get('expected')}",
        "string_too_short": "expected some text",
        "too_short": f"expected at least {context.get('min_length')} in the list",
        "greater_than": f"must be greater than {_limit(context, 'gt')}",
        "greater_than_equal": f"must be at least {_limit(context, 'ge')}",
        "less_than": f"must be less than {_limit(context, 'lt')}",
        "less_than_equal": f"must be at most {_limit(context, 'le')}",
    }
    return known.get(kind, str(mistake["msg"]))


def _limit(context: dict[str, Any], which: str) -> str:
    return f"{context[which]:g}" if which in context else ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    words = repr(value)
    return words if len(words) <= 60 else words[:57] + "..."


def _options(context: dict[str, str]) -> list[str]:
    return re.findall(r"'([^']*)'", str(context.get("expected", "")))


def _nearest(word: str, known: list[str], *, listed: bool = True) -> str:
    by_small_letters = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_small_letters, 1)
    if close:
        return f", did you mean {by_small_letters[close[0]]!r}?"
    return f"; known here: {', '.join(known)}" if listed and known else ""


def _owners(loc: Sequence[str | int]) -> str:
    """Which other components of the kind have a key that this one does not: for example a key from another recipe."""
    tag = next((str(part) for part in reversed(loc[:-1]) if part in BY_TAG), None)
    if tag is None:
        return ""
    kind = tag.partition(" ")[0]
    owners = [cls for other, cls in BY_TAG.items() if other.startswith(f"{kind} ") and loc[-1] in cls.model_fields]
    names = [
        name for cls in owners if "name" in cls.model_fields for name in get_args(cls.model_fields["name"].annotation)
    ]
    return f"; it is a key of {', '.join(sorted(names))}" if names else ""


def _known_keys(loc: Sequence[str | int]) -> list[str]:
    """The keys of the model at a location of pydantic's."""
    model: Any = Config
    for part in loc:
        if part in BY_TAG:
            model = BY_TAG[str(part)]
        elif isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            inner = next((a for a in get_args(annotation) if isinstance(a, type) and a is not type(None)), annotation)
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
    return sorted(model.model_fields, key=lambda name: name != "name")
