"""What a process was started with, where Python has changed it at its own start."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs

PROGRAM = """
import os, sys
sys.path[:] = {path!r}
from dbrdist_launch.inherited import restore_environment
os.environ["LC_CTYPE"] = {chosen!r}  # as Python itself does where the locale is C, or one that is not there
restore_environment()
print(os.environ.get("LC_CTYPE"))
"""


@pytest.mark.parametrize("chosen", ["C.UTF-8", "C.utf8", "UTF-8"])
@pytest.mark.parametrize("given", [None, "C.UTF-8", "C", "", "xx_YY.UTF-8"])
def test_the_locale_that_was_given_takes_the_place_of_the_one_that_python_chose(given, chosen):
    environ = {} if given is None else {"LC_CTYPE": given}
    words = [sys.executable, "-c", PROGRAM.format(path=sys.path, chosen=chosen)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{given}\n", "")


def test_another_locale_is_nobody_elses():
    words = [sys.executable, "-c", PROGRAM.format(path=sys.path, chosen="xx_YY.UTF-8")]
    done = subprocess.run(words, env={}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("xx_YY.UTF-8\n", "")
