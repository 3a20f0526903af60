"""``python -m dbrdist.compat script.py arguments...``: run a program that was written for Chainer."""

from __future__ import annotations

import os
import runpy
import sys

from dbrdist.compat import absent, program
from dbrdist.compat.finder import call_here_and_in_spawned, install
from dbrdist.compat.numpy_1.numpy_names import restore_numpy_names
from dbrdist.compat.python_names import restore_python_names

USAGE = """usage: python -m dbrdist.compat [--numpy2] script.py [argument ...]
       python -m dbrdist.compat [--numpy2] -m module [argument ...]

Runs a program written for Chainer and ChainerMN on dbrdist, unchanged.

  --numpy2        the program sees NumPy 2 as it is. Otherwise its own files may use what NumPy 2 dropped: names such
                  as numpy.int, arrays of one element as numbers, arrays of sequences of different lengths.
  --numpy-names   accepted for older commands, without effect: these names are there anyway
"""
_OPTIONS = ("--numpy2", "--numpy-names")


def main(arguments: list[str]) -> None:
    words = list(arguments)
    numpy_1 = True
    while words and words[0] in _OPTIONS:
        numpy_1 = numpy_1 and words.pop(0) != "--numpy2"
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(0 if words else 2)
    is_module = words[0] == "-m"
    if words[0].startswith("-") and not (is_module and len(words) > 1):
        raise SystemExit(f"dbrdist.compat: expected a script or -m module, got {words[0]}\n\n{USAGE}")
    if not is_module and not os.path.isfile(words[0]):
        raise SystemExit(f"dbrdist.compat: {words[0]}: no such file")
    install()
    sys.argv = words[1:] if is_module else words
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    sys.path[0] = folder  # as Python does for a script
    call_here_and_in_spawned(restore_python_names)
    if numpy_1:
        call_here_and_in_spawned(restore_numpy_names, program.serve_numpy_1)
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            program.run(words[0], numpy_1)
    except TypeError as error:
        absent.explain_argument(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
