"""As much of JSON Schema (draft 2020-12) as the schema of configurations uses, written down from the standard."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "object": (dict,), "array": (list,),
    "number": (int, float), "integer": (int, float),
}  # fmt: skip
_WORDS = {"title", "description", "default", "format", "$defs", "discriminator"}  # which say nothing of validity


def is_valid(data: Any, schema: dict[str, Any], defs: dict[str, Any] | None = None) -> bool:
    """Whether a JSON schema accepts some data. Raises KeyError for a keyword that is not known here."""
    defs = schema.get("$defs", {}) if defs is None else defs
    return all(_KEYWORDS[key](data, rule, schema, defs) for key, rule in schema.items() if key not in _WORDS)


def _of_type(data: Any, rule: Any) -> bool:
    names = [rule] if isinstance(rule, str) else rule
    return any(_is(data, name) for name in names)


def _is(data: Any, name: str) -> bool:
    if isinstance(data, bool) and name in ("number", "integer"):
        return False
    return isinstance(data, _TYPES[name]) and (name != "integer" or data == int(data))


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _items(data: Any, rule: Any, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    rest = data[len(schema.get("prefixItems", ())) :] if isinstance(data, list) else []
    return all(is_valid(item, rule, defs) for item in rest)


def _no_more(data: Any, rule: Any, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    more = data.keys() - schema.get("properties", {}).keys() if isinstance(data, dict) else ()
    return not more if rule is False else all(rule is True or is_valid(data[key], rule, defs) for key in more)


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


_KEYWORDS: dict[str, Any] = {
    "$ref": lambda d, rule, s, defs: is_valid(d, defs[rule.rpartition("/")[2]], defs),
    "type": lambda d, rule, s, defs: _of_type(d, rule),
    "enum": lambda d, rule, s, defs: any(_same(d, value) for value in rule),
    "const": lambda d, rule, s, defs: _same(d, rule),
    "not": lambda d, rule, s, defs: not is_valid(d, rule, defs),
    "anyOf": lambda d, rule, s, defs: any(is_valid(d, one, defs) for one in rule),
    "oneOf": lambda d, rule, s, defs: sum(is_valid(d, one, defs) for one in rule) == 1,
    "pattern": lambda d, rule, s, defs: not isinstance(d, str) or re.search(rule, d) is not None,
    "minLength": lambda d, rule, s, defs: not isinstance(d, str) or len(d) >= rule,
    "minimum": lambda d, rule, s, defs: not _is_number(d) or d >= rule,
    "maximum": lambda d, rule, s, defs: not _is_number(d) or d <= rule,
    "exclusiveMinimum": lambda d, rule, s, defs: not _is_number(d) or d > rule,
    "exclusiveMaximum": lambda d, rule, s, defs: not _is_number(d) or d < rule,
    "minItems": lambda d, rule, s, defs: not isinstance(d, list) or len(d) >= rule,
    "maxItems": lambda d, rule, s, defs: not isinstance(d, list) or len(d) <= rule,
    "prefixItems": lambda d, rule, s, defs: (
        not isinstance(d, list) or all(is_valid(x, one, defs) for x, one in zip(d, rule))
    ),
    "items": _items,
    "required": lambda d, rule, s, defs: not isinstance(d, dict) or set(rule) <= d.keys(),
    "properties": lambda d, rule, s, defs: (
        not isinstance(d, dict) or all(is_valid(d[key], one, defs) for key, one in rule.items() if key in d)
    ),
    "additionalProperties": _no_more,
}
