"""JSON without the module `json`."""

import builtins
import subprocess
import sys

import pytest
from dbrdist_launch import wire
from support import ROOT

CUT_OFF = r"""
import sys
sys.path.append(PLACE)
from dbrdist_launch import wire
assert "json.decoder" not in sys.modules
whole = wire.dumps({"a": [1, -2.5, None, True, {"b": "c\"\u00e9\n"}], "": {}}).encode()
wrong = whole + b",", b'"\x01"', b'"\\x"', b'"\\u12"', b"{1: 2}", b"[1 2]"
for text in (*(whole[:end] for end in range(len(whole))), *wrong):
    try:
        print("taken", text, wire.loads(text))
    except ValueError:
        pass
assert wire.loads(whole) == {"a": [1, -2.5, None, True, {"b": "c\"\u00e9\n"}], "": {}}
"""


@pytest.mark.programs
def test_what_is_no_json_is_a_value_error_before_json_is_loaded():
    """`_json` finds its own exception in `json.decoder` alone, up to Python 3.11: a page that is just being written,
    a line of somebody else or a damaged cache was an internal error."""
    words = [sys.executable, "-I", "-S", "-c", CUT_OFF.replace("PLACE", repr(str(ROOT / "launch")))]
    child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\ud7ff", "\ud7ff"), ("\ud800", "\\xed\\xa0\\x80"), ("\udc7f", "\\xed\\xb1\\xbf"), ("\udc80", "\\x80"),
        ("\udcff", "\\xff"), ("\udd00", "\\xed\\xb4\\x80"), ("\udfff", "\\xed\\xbf\\xbf"), ("\ue000", "\ue000"),
        ("\udcc3\udca9", "é"), ("a\udcff\ud800", "a\\xed\\xb3\\xbf\\xed\\xa0\\x80"),
    ],
)  # fmt: skip
def test_halves_of_surrogate_pairs_are_written_as_the_bytes_that_they_stand_for(text, found):
    assert wire.valid(text) == found and wire.valid({text: [text, (1, text)]}) == {found: [found, [1, found]]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_has_no_number_for_is_none(value):
    assert wire.valid([value, 1.5, -0.0, 3, True, None]) == [None, 1.5, -0.0, 3, True, None]


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("123456789", 123456789), ("1234567890", None), ("", None), (None, None), ("-1", None),
     ("1.0", None), ("\u0663", None), (" 1", None)],
)  # fmt: skip
def test_whole_numbers_are_digits_alone(text, number):
    assert wire.whole(text) == number


@pytest.mark.parametrize(
    ("data", "value"),
    [(b' {"a": [1, -2.5e3, true, null, "\\u00e9"]}\r\n\t', {"a": [1, -2500.0, True, None, "é"]}), (b"3", 3)],
)
def test_one_text_of_json_with_space_around_it_is_read(data, value):
    assert wire.loads(data) == value == wire.loads(wire.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"  ", b"1 2", b"{} x", b"[1", b"tru", b"\xff"])
def test_what_is_not_one_text_of_json_is_a_value_error(data):
    with pytest.raises(ValueError):
        wire.loads(data)


def test_json_itself_is_not_loaded(monkeypatch):
    """It would cost each rank's start 9 ms."""
    plain = builtins.__import__

    def imports(name, *given, **more):
        assert name != "json"
        return plain(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", imports)
    assert wire.loads(wire.dumps({"a": [1.5, None]}).encode()) == {"a": [1.5, None]}


def test_another_python_has_json_itself(monkeypatch):
    monkeypatch.setattr(wire, "_scan", None)
    monkeypatch.setattr(wire, "_encode", None)
    assert wire.dumps({"a": [1, None]}) == '{"a": [1, null]}' and wire.loads(b' {"a": 1}') == {"a": 1}
    with pytest.raises(ValueError):
        wire.loads(b"{")
