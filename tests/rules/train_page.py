"""The tables of docs/train.md, made from the settings of configurations.

python tests/rules/train_page.py --write    # after settings were added, or their descriptions changed
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from dbrdist.cli.configuration import document, schema, settings

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
BEGIN, END = "<!-- made by tests/rules/train_page.py: {} -->\n", "<!-- end -->\n"
SECTIONS = ("transforms", "batch_norm", "evaluation", "snapshot", "log")
KINDS = ("model", "data", "transform", "loss", "metric", "optimizer", "hook", "schedule", "compression")
# Where the page says more about a key of a run.
MORE = {
    "extends": "#one-configuration-on-top-of-another", "model": "#models", "data": "#data", "loss": "#losses",
    "transforms.train": "#transforms", "optimizer": "#optimizers", "schedules": "#schedules-of-other-numbers",
    "ema": "#the-average-of-the-weights", "updater": "#your-own-code", "init_from": "#weights-to-begin-with",
    "metrics": "#losses", "extensions": "#your-own-code", "batch": "reproducible.md", "reproducible": "reproducible.md",
    "communicator": "communicators.md#which", "zero": "#updates-by-several-ranks",
    "compression": "#updates-by-several-ranks", "gradient_dtype": "#updates-by-several-ranks",
    "batch_norm.statistics": "#batch-normalization", "stop": "#ending-at-a-target",
    "lr_finder": "#learning-rate-finder", "batch_finder": "#batch-size-finder",
    "log.wandb": "#loggers", "log.mlflow": "#loggers", "log.csv": "#loggers",
    "log.examples": "watch.md#test-images", "accumulate": "#updates-by-several-ranks",
    "local_steps": "#updates-by-several-ranks",
    "double_buffering": "#updates-by-several-ranks", "parameter_audit": "communicators.md#are-all-ranks-still-equal",
    "device": "gpu.md", "fused_convolutions": "gpu.md#fused-convolutions", "audit": "reproducible.md#audit",
}  # fmt: skip
_COUNTS = {2: "two", 3: "three"}


def keys_of_the_run() -> Iterator[tuple[str, type[settings.Settings], str]]:
    """Each key as it is written, the class that has it, and its name there."""
    for name, field in schema.Config.model_fields.items():
        if name in SECTIONS:
            section: Any = field.annotation
            yield from ((f"{name}.{inner}", section, inner) for inner in section.model_fields)
        else:
            yield name, schema.Config, name


def components(kind: str) -> Iterator[tuple[str, type[settings.Settings]]]:
    """The names of one kind of component, with their settings."""
    for tag, cls in settings.BY_TAG.items():
        if tag.startswith(f"<{kind} ") and not issubclass(cls, settings.Custom) and "name" in cls.model_fields:
            for name in get_args(cls.model_fields["name"].annotation):
                if (kind, name) != ("schedule", "own"):
                    yield name, cls


def default_of(field: Any) -> str:
    """A default as one writes it; that of a component is its name."""
    default = field.default
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, settings.Settings):
        return f"`{getattr(default, 'name', '{}')}`"
    plain = list(default) if isinstance(default, tuple) else default
    return f"`{document.write(plain, default_flow_style=True).replace(chr(10) + '...', '').strip()}`"


@functools.cache
def _schema(cls: type[settings.Settings]) -> dict[str, Any]:
    return cls.model_json_schema()


def type_of(cls: type[settings.Settings], key: str) -> str:
    """The type of a key in words, from its JSON schema."""
    made = _schema(cls)
    found = made if "properties" in made else made["$defs"][made["$ref"].rpartition("/")[2]]
    return _words(found["properties"][key], made.get("$defs", {}))


def _words(node: dict[str, Any], defs: dict[str, Any]) -> str:
    if "$ref" in node:
        node = defs[node["$ref"].rpartition("/")[2]]
    if "enum" in node or "const" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    choices = node.get("anyOf") or node.get("oneOf")
    if choices and "properties" not in node:
        return _either(choices, defs)
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _range("int" if kind == "integer" else "float", node)
    if kind == "array" and "prefixItems" in node:
        inner = [_words(item, defs) for item in node["prefixItems"]]
        return f"{_COUNTS[len(inner)]} {inner[0]}" if len(set(inner)) == 1 else f"({', '.join(inner)})"
    if kind == "array":
        return f"list of {_several(_words(node['items'], defs))}"
    if kind == "string":
        return str(node.get("format", "text"))
    return {"boolean": "bool", "null": "null", "object": "mapping"}[str(kind)]


def _several(words: str) -> str:
    return f"{words}s" if words in ("component", "mapping", "own callable") else words


def _either(choices: list[dict[str, Any]], defs: dict[str, Any]) -> str:
    """The words of several choices, a component's in one."""
    formats = {choice.get("format") for choice in choices} & {*KINDS, "extension"}
    if formats:
        return "component" if formats != {"extension"} else "own callable"
    found = list(dict.fromkeys(_words(choice, defs) for choice in choices))
    return " or ".join(found)


def _range(kind: str, node: dict[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    high = None if high is not None and high > 1e8 else high
    below = None if below is not None and below > 1e8 else below
    if above is not None:
        low = None
    if (low, above) == (None, None):
        return kind
    if (high, below) == (None, None):
        return f"{kind} > {above:g}" if above is not None else f"{kind} ≥ {low:g}"
    left = f"[{low:g}" if low is not None else f"({above:g}"
    return f"{kind} in {left}, {f'{high:g}]' if high is not None else f'{below:g})'}"


def meaning(field: Any) -> str:
    """The description as a cell: without its full stop, and with a small letter where it begins with a word."""
    words = " ".join(str(field.description).split()).replace("|", "\\|")
    words = words if words.endswith("...") else words.removesuffix(".")
    return words if words[:1] == "`" or words[1:2].isupper() else words[:1].lower() + words[1:]


def table_of_the_run() -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, cls, name in keys_of_the_run():
        field = cls.model_fields[name]
        more = f" ([more]({MORE[key]}))" if key in MORE else ""
        rows.append(f"| `{key}` | {type_of(cls, name)} | {default_of(field)} | {meaning(field)}{more} |")
    return "\n".join(rows) + "\n"


def table_of(kinds: tuple[str, ...]) -> str:
    """The settings of components; those that several have in the same way are one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind in kinds:
        for name, cls in components(kind):
            for key, field in cls.model_fields.items():
                if key != "name":
                    row = (key, type_of(cls, key), default_of(field), meaning(field))
                    rows.setdefault(row, []).append(f"`{name}`")
    lines = ["| name | key | type | default | meaning |", "|---|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | `{key}` | {' | '.join(rest)} |" for (key, *rest), names in rows.items()]
    return "\n".join(lines) + "\n"


def list_of(kinds: tuple[str, ...]) -> str:
    """What the components are, a line each; those of one sentence together."""
    found: dict[str, list[str]] = {}
    for kind in kinds:
        for name, cls in components(kind):
            words = " ".join(str(cls.__doc__).split()).removesuffix(".")
            words = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", words).replace("``", "`").replace("*", "\\*")
            found.setdefault(words, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {words}" for words, names in found.items()) + "\n"


TABLES = {
    "keys": lambda: table_of_the_run(),
    "compression": lambda: table_of(("compression",)),
    "models": lambda: table_of(("model",)),
    "data": lambda: table_of(("data",)),
    "transforms": lambda: table_of(("transform",)),
    "losses": lambda: table_of(("loss", "metric")),
    "optimizers": lambda: list_of(("optimizer",)) + "\n" + table_of(("optimizer",)),
    "hooks": lambda: list_of(("hook",)) + "\n" + table_of(("hook",)),
    "schedules": lambda: list_of(("schedule",)) + "\n" + table_of(("schedule",)),
}


def with_tables(text: str) -> str:
    """The page's text with its tables brought up to date."""
    for name, make in TABLES.items():
        begin = BEGIN.format(name)
        assert text.count(begin) == 1, f"expected one {begin.strip()} on the page"
        made = make()
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{made}\n{rest[rest.index(END) :]}"
    return text


if __name__ == "__main__":
    page = with_tables(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(page)
    else:
        print(page)
