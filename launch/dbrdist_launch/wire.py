"""JSON for the processes that stand before each rank: `json` itself, with the regular expressions that it imports,
would cost each of them 9 ms at its start. The two functions of C below it do the same, and are loaded at once.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from typing import Any


class _Context:
    """What the scanner asks for: the defaults of `json.JSONDecoder`."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = staticmethod({"-Infinity": float("-inf"), "Infinity": float("inf"), "NaN": float("nan")}.get)


def _unknown(value: object) -> Any:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_encode: Any = None
_scan: Any = None
try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner  # type: ignore[import-not-found,unused-ignore]

    _encode = make_encoder(None, _unknown, encode_basestring_ascii, None, ": ", ", ", False, False, True)
    context: Any = _Context
    _scan = make_scanner(context)
except (ImportError, TypeError, AttributeError):  # another Python than CPython
    pass


def dumps(value: object) -> str:
    """JSON of a dictionary, list, string, number, truth or None."""
    if _encode is None:
        import json

        return json.dumps(value)
    return "".join(_encode(value, 0))


def loads(data: bytes) -> Any:
    """The value of one JSON text; ValueError where it is none, RecursionError where it is too deep."""
    text = data.decode()
    if _scan is None:
        import json

        return json.loads(text)
    try:
        value, end = _scan(text.lstrip(" \t\r\n"), 0)
    except (StopIteration, SystemError):  # without json.decoder the scanner of Python 3.11 has no exception to raise
        raise ValueError("no JSON") from None
    if end < len(text.lstrip(" \t\r\n").rstrip(" \t\r\n")):
        raise ValueError("more than one JSON text")
    return value


def valid(value: object) -> Any:
    """The same without what JSON has no words for: half a surrogate pair becomes `\\xff`, NaN and infinities None."""
    if isinstance(value, str):
        try:
            value.encode()
            return value
        except UnicodeEncodeError:
            data = value.encode("utf-8", "surrogateescape" if all(_is_byte(c) for c in value) else "surrogatepass")
            return data.decode("utf-8", "backslashreplace")
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {valid(str(name)): valid(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [valid(part) for part in value]
    return value


def _is_byte(letter: str) -> bool:
    """Whether a letter can be written, or stands for a byte that was no UTF-8."""
    return not 0xD800 <= ord(letter) <= 0xDFFF or 0xDC80 <= ord(letter) <= 0xDCFF


def whole(text: str | None) -> int | None:
    """The number of a text of the digits 0 to 9; None for anything else, also for digits of other scripts."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None
