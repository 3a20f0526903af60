"""JSON without the module `json`."""

import subprocess
import sys

import pytest
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
