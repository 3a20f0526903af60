"""``python -m dbrdist.compat script.py arguments...``: run a program that was written for Chainer."""

from __future__ import annotations

import os
import re
import runpy
import sys

from dbrdist.compat.finder import install
from dbrdist.compat.numpy_names import NAMES, restore_numpy_names

USAGE = """usage: python -m dbrdist.compat [--numpy-names] script.py [argument ...]
       python -m dbrdist.compat [--numpy-names] -m module [argument ...]

Runs a program written for Chainer and ChainerMN on dbrdist, unchanged.

  --numpy-names   files beside the script may use names that NumPy 2 dropped: numpy.int, numpy.float_, ...
"""


def main(arguments: list[str]) -> None:
    words = list(arguments)
    numpy_names = "--numpy-names" in words[:1]
    if numpy_names:
        del words[0]
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
    if numpy_names:
        restore_numpy_names(folder)
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except AttributeError as error:
        dropped = re.match(r"module 'numpy' has no attribute '(\w+)'|`np\.(\w+)` was removed", str(error))
        name = (dropped[1] or dropped[2]) if dropped else None
        if name in NAMES and not numpy_names:
            error.add_note(f"NumPy 2 dropped numpy.{name}; python -m dbrdist.compat --numpy-names restores it")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
