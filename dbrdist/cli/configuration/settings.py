"""What all models of the configuration share: strict frozen settings, and components told apart by their name."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import sys
from typing import Annotated, Any, NoReturn, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

CALLABLE = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


def Tuple(item: Any, **limits: Any) -> Any:
    """A tuple of any length, which YAML writes as a list; everywhere else types are taken strictly."""
    return Annotated[tuple[item, ...], Field(strict=False, **limits)]


def _as_path(text: str) -> str:
    """With the home folder for a first part `~` or `~name`, which shells leave alone in `out=~/runs`."""
    if "\0" in text:
        raise PydanticCustomError("form", "expected text without the character NUL")
    return os.path.expanduser(text)


Path = Annotated[str, Field(min_length=1), AfterValidator(_as_path)]


_NAMELESS: set[type[BaseModel]] = set()  # what settings without a name are


def _in_any_case(names: list[str], *patterns: str) -> str:
    """A pattern of JSON schemas for the spellings of names that :func:`component` understands, and for others."""
    spaces = r"[_\s-]*"
    spellings = (
        spaces + spaces.join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in _plain(n)) + spaces
        for n in names
    )
    return f"^({'|'.join([*spellings, *patterns])})$"


@functools.cache
def _texts_of(module: str) -> dict[str, dict[str, str]]:
    """The text below each field of each class in a module, by the class's qualified name; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}

    def look(body: list[ast.stmt], place: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[place + node.name] = _texts_in(node)
                look(node.body, f"{place}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                look(node.body, f"{place}{node.name}.<locals>.")

    look(tree.body, "")
    return found


def _texts_in(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, below in itertools.pairwise(node.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            texts[field.target.id] = inspect.cleandoc(text.value)
    return texts


class Settings(BaseModel):
    """The base of all models here: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Take the text below a field as its description.

        Pydantic's `use_attribute_docstrings` parses a module anew for each class in it: two thirds of the start.
        """
        super().__pydantic_init_subclass__(**options)
        texts = _texts_of(cls.__module__).get(cls.__qualname__, {})
        for name, field in cls.model_fields.items():
            if field.description is None:
                field.description = texts.get(name)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        """As the command takes it: names in any case, and none where there is a default."""
        made = handler(schema)
        found = handler.resolve_ref_schema(made)
        for key, field in cls.model_fields.items():
            if field.description is not None and key in found.get("properties", {}):
                found["properties"][key].setdefault("description", field.description)
        name = found.get("properties", {}).get("name", {})
        names = [name["const"]] if "const" in name else name.get("enum")
        if names:
            for key in ("const", "enum", "type"):
                name.pop(key, None)
            name["anyOf"] = [{"enum": names}, {"type": "string", "pattern": _in_any_case(names)}]
        if cls in _NAMELESS and "name" in found.get("required", []):
            found["required"].remove("name")
        return made


def form(pattern: str, words: str) -> Any:
    """Text that matches the whole of `pattern`; `words` say it for people."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("form", "expected {words}", {"words": words})
        return text

    return Annotated[str, AfterValidator(check), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})]


OwnName = form(CALLABLE, "package.module:callable")


class Custom(Settings):
    """The user's own callable, imported from the working directory."""

    name: OwnName
    """Where it lives: `package.module:callable`."""
    args: dict[str, Any] = {}
    """Its keyword arguments."""


# tag of a component's class -> the class; the tag tells errors which of the alternatives was meant
BY_TAG: dict[str, type[Settings]] = {}


def _plain(name: str) -> str:
    return re.sub(r"[_\-\s]", "", name).lower()


def component(
    kind: str, *classes: type[Settings], custom: type[Custom] | None = Custom, default: str | None = None
) -> Any:
    """The type of a field that holds one of `classes`, told apart by `name`; a bare word is the name alone.

    Names are found in any case, with or without underscores: `MomentumSGD`. `custom` is the class for the user's own
    callables; None where there are none. `default` is the name of settings that give none.
    """
    by_name = {name: cls for cls in classes for name in get_args(cls.model_fields["name"].annotation)}
    members = {f"<{kind} {cls.__name__}>": cls for cls in (*classes, *([custom] if custom else []))}
    BY_TAG.update(members)
    tags = {cls: tag for tag, cls in members.items()}
    if default is not None:
        _NAMELESS.add(by_name[default])

    found = {_plain(name): name for name in by_name}

    def named(value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, dict):
            return value
        name = value.get("name", default)
        known = found.get(_plain(name)) if isinstance(name, str) else None
        return value if name is None else {**value, "name": known or name}

    def tag_of(value: Any) -> str | None:
        name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
        if isinstance(name, str) and custom and ":" in name:
            return tags[custom]
        return tags[by_name[name]] if isinstance(name, str) and name in by_name else None

    union: Any = Union[tuple(Annotated[cls, Tag(tag)] for tag, cls in members.items())]  # noqa: UP007 - made at run time
    known = ", ".join([*by_name, *(["or your own package.module:callable"] if custom else [])])
    if not by_name:
        known = "package.module:callable"
    article = "an" if kind[0] in "aeiou" else "a"
    discriminator = Discriminator(
        tag_of,
        custom_error_type="unknown_name",
        custom_error_message="expected the name of {kind}: {known}",
        custom_error_context={
            "kind": f"{article} {kind}",
            "known": known,
            "names": list(by_name),
        },
    )
    pattern = _in_any_case(list(by_name), *([CALLABLE] if custom else []))
    bare = Annotated[str, WithJsonSchema({"type": "string", "pattern": pattern, "format": kind})]
    written = Union[(bare, *members.values())]
    return Annotated[union, discriminator, BeforeValidator(named, json_schema_input_type=written)]


def own(kind: str, cls: type[Custom] = Custom) -> Any:
    """The type of a field that holds the user's own callable; a bare word is its name alone."""
    return component(kind, custom=cls)


def refuse(where: str, words: str) -> NoReturn:
    """Refuse a combination; `where` is the dotted path, from the model that refuses, of the entry to point at."""
    raise PydanticCustomError("refused", "{words}", {"words": words, "at": where})
