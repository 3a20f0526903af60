"""YAML text as plain data together with the position of every key and value, and plain data as such text.

Scalars follow YAML 1.2: `1e-3` is a number, `on`, `off`, `yes` and `no` are words, `010` is ten, `12:30` is text, and
dates stay text. What a reader could not guess is a problem with its position: duplicate keys, unknown tags, keys that
are not words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

KeyPath = tuple[str | int, ...]

_STR, _SEQ, _MAP = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
_MERGE = "tag:yaml.org,2002:merge"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class _Resolver(BaseResolver):
    """The scalar types of YAML 1.2's core schema, and underscores between digits."""


for _tag, _pattern, _first in (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    (_MERGE, "<<", ["<"]),
):
    _Resolver.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str, name: str):
        Reader.__init__(self, text)
        self.name = name
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        """JSON writes a letter beyond U+FFFF as two escapes; PyYAML takes each for a letter of its own."""
        node = Composer.compose_scalar_node(self, anchor)
        node.value = _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), node.value)
        return node


@dataclass
class Document:
    """Plain data, where each part of it stands, and what is wrong with the text.

    `values` and `keys` map the path of an entry, such as `("optimizer", "lr")`, to `"file:line:column"`;
    `problems` are whole sentences that begin with a position.
    """

    name: str
    data: Any = None
    values: dict[KeyPath, str] = field(default_factory=dict)
    keys: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(text: str, name: str) -> Document:
    """Read one YAML document; never raises for what the text holds."""
    document = Document(name)
    try:
        node = _Loader(text, name).get_single_node()
    except yaml.MarkedYAMLError as error:
        document.problems.append(f"{_place(name, error.problem_mark or error.context_mark)}: {_sentence(error)}")
        return document
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        document.problems.append(
            f"{name}:{line}:{column}: the character {chr(error.character)!r} is not allowed in YAML"
        )
        return document
    except RecursionError:
        document.problems.append(f"{name}: nested too deeply to be a configuration")
        return document
    if node is not None:
        try:
            document.data = _Builder(document).build(node, (), ())
        except _TooLarge:
            document.problems.append(f"{name}: expected at most {_MAX_ENTRIES:,} entries, with aliases (*) expanded")
        except RecursionError:
            document.problems.append(f"{name}: nested too deeply to be a configuration")
    return document


def _place(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name


def _sentence(error: yaml.MarkedYAMLError) -> str:
    words = f"{error.problem} ({error.context})" if error.context else str(error.problem)
    if "'@'" in words or "'`'" in words:
        words += "; put the text in quotes"
    if "'\\t'" in words:
        words += "; indent with spaces, not with tabs"
    return words


_MAX_ENTRIES = 100_000


class _TooLarge(Exception):
    """Aliases unfold to more than a configuration can need."""


class _Builder:
    """Turns YAML nodes into data and notes where each stood."""

    def __init__(self, document: Document):
        self.document = document
        self.num_entries = 0

    def build(self, node: Node, path: KeyPath, parents: tuple[Node, ...]) -> Any:
        self.num_entries += 1
        if self.num_entries > _MAX_ENTRIES:
            raise _TooLarge
        self.document.values[path] = self.place(node)
        if node in parents:
            self.problem(node, "an alias (*) that contains itself")
            return None
        if isinstance(node, MappingNode) and node.tag == _MAP:
            return self.mapping(node, path, (*parents, node))
        if isinstance(node, SequenceNode) and node.tag == _SEQ:
            return [self.build(item, (*path, i), (*parents, node)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        self.problem(node, f"the tag {node.tag!r} is not supported; write plain values")
        return None

    def mapping(self, node: MappingNode, path: KeyPath, parents: tuple[Node, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        seen: dict[str, str] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problem(key_node, "a key must be a word")
            elif key_node.tag == _MERGE:
                self.problem(key_node, "merging with << is not part of YAML 1.2; write the entries out")
            elif key_node.value in seen:
                self.problem(key_node, f"duplicate key {key_node.value!r}, first given at {seen[key_node.value]}")
            else:
                key = key_node.value
                seen[key] = self.document.keys[*path, key] = self.place(key_node)
                data[key] = self.build(value_node, (*path, key), parents)
        return data

    def scalar(self, node: ScalarNode) -> float | str | None:
        text = node.value
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        if node.tag == _INT:
            return self.number(node, lambda: int(text, 0 if text[:2] in ("0x", "0o") else 10))
        if node.tag == _FLOAT:
            return self.number(
                node, lambda: float(text.lower().replace(".inf", "inf").replace(".nan", "nan").replace("_", ""))
            )
        if node.tag not in (_STR, _MERGE):
            self.problem(node, f"the tag {node.tag!r} is not supported; write plain values")
        return text

    def number(self, node: ScalarNode, convert: Any) -> Any:
        try:
            return convert()
        except ValueError:
            self.problem(node, f"{node.value!r} is not a number; put it in quotes if it is text")
            return None

    def place(self, node: Node) -> str:
        return _place(self.document.name, node.start_mark)

    def problem(self, node: Node, words: str) -> None:
        self.document.problems.append(f"{self.place(node)}: {words}")


# ---- writing --------------------------------------------------------------------------------------------------------


_resolver = _Resolver()


class _Dumper(yaml.SafeDumper):
    """Quotes what this reader or one of YAML 1.1 would take for something else than text."""

    def represent_text(self, text: str) -> ScalarNode:
        is_plain = _resolver.resolve(ScalarNode, text, (True, False)) == _STR
        # A line break that PyYAML folds is not always read back as it was; escapes in double quotes are.
        style = '"' if any(c in text for c in _BREAKS) else None if is_plain else "'"
        return self.represent_scalar(_STR, text, style=style)


_BREAKS = "\n\r\t\x85\u2028\u2029"
_Dumper.add_representer(str, _Dumper.represent_text)


def write(data: Any, **options: Any) -> str:
    """Plain data as YAML that :func:`read` gives back unchanged; ``options`` are PyYAML's."""
    options = {"sort_keys": False, "allow_unicode": True, "width": 120, **options}
    return str(yaml.dump(data, Dumper=_Dumper, **options))
