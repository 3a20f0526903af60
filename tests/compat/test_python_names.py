"""Names of Python's own modules that programs of Chainer's time use."""

import collections.abc
import subprocess
import sys
import textwrap

import pytest

from dbrdist.compat import python_names

SCRIPT = """
import base64, collections, fractions, inspect, os, time
import xml.etree.cElementTree as ET
from collections import Iterable, defaultdict

assert isinstance([], Iterable) and isinstance({}, collections.Mapping) and defaultdict is collections.defaultdict
assert base64.decodestring(base64.encodestring(b"x")) == b"x"
assert fractions.gcd(12, 18) == 6 and os.errno.ENOENT == 2 and time.clock() >= 0
assert inspect.getargspec(lambda a, b=1, *c, **d: 0) == (["a", "b"], "c", "d", (1,))
assert ET.fromstring("<box><x>3</x></box>").find("x").text == "3"
other = "try:\\n    c.Iterable\\nexcept AttributeError:\\n    print('others do not see it')"
exec(compile(other, collections.__file__, "exec"), {"c": collections})
try:
    collections.NoSuchThing
except AttributeError as error:
    print(error)
"""


@pytest.mark.programs
@pytest.mark.parametrize("options", [[], ["--numpy2"]])
def test_names_that_python_dropped_are_for_the_program_alone(options, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    words = [sys.executable, "-m", "dbrdist.compat", *options, str(tmp_path / "script.py")]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "others do not see it\nmodule 'collections' has no attribute 'NoSuchThing'\n"


def test_a_module_that_has_such_a_function_keeps_it(monkeypatch):
    monkeypatch.setattr(collections, "__getattr__", len, raising=False)
    python_names.restore_python_names((collections,))
    assert collections.__getattr__ is len


def test_every_old_name_is_gone_from_python_or_the_same():
    for module, names in python_names.NAMES.items():
        for name, value in names.items():
            assert getattr(module, name, value) is value, name
