"""All modules of a supervisor in one file, which the launcher of a large job puts beside its socket.

64 ranks of one machine would look for 33 files each, all at the same moment. `rank/main.py` reads the bundle, where it
is there and the same Python has made it. It is written anew for each job, so that it is never older than its sources.
"""

from __future__ import annotations

import marshal
import os
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec

FEWEST_RANKS = 8  # on this machine, for which a bundle pays: to make one takes as long as it saves three of them

_PACKAGES = ("dbrdist_launch", "dbrdist_launch.rank")
_LIBRARY = ("__future__", "struct")  # of Python's own
_COMPILED = ("_ctypes", "_json", "_socket", "_struct", "fcntl", "mmap", "resource", "select")  # the same, in C
# Each after those that it imports.
_MODULES = (
    "codes", "signals", "linux", "inherited", "wire", "named", "heartbeat", "limits", "messages", "channel", "errors",
    "identity", "loop", "rank.child", "rank.deaths", "rank.inputs", "rank.leftovers", "rank.outputs", "rank.pmi",
    "rank.pmix", "rank.spy", "rank.stacks", "cores", "rank.gpus", "rank.surroundings", "rank.workers",
    "rank.supervisor", "rank.outer",
)  # fmt: skip
# Run by rank/main.py, which has no more in it than it must: Python compiles that at each start.
_LOADING = """
import sys
from _frozen_importlib import ModuleSpec, _load
from _frozen_importlib_external import ExtensionFileLoader
for name, path in compiled:
    try:
        _load(ModuleSpec(name, ExtensionFileLoader(name, path), origin=path))
    except ImportError:
        pass  # a library is missing, or this is another Python: who needs the module looks for it, or does without
for name, given, code in modules:
    module = sys.modules[name] = type(sys)(name)
    module.__dict__.update(given)
    exec(code, module.__dict__)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)
"""


def pack() -> bytes:
    """Python's magic number, and marshalled: what loads modules, and of each its name, what it is given, its code.

    b"" where they are not in files of their own, such as a Python in an archive, or where somebody is just editing
    them: then ranks look for them.
    """
    library, own = os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        found = [_entry(name, os.path.join(library, f"{name}.py")) for name in _LIBRARY]
        for name in _PACKAGES:
            folder = os.path.join(own, *name.split(".")[1:])
            found.append(_entry(name, os.path.join(folder, "__init__.py"), {"__path__": [folder], "__package__": name}))
        for name in _MODULES:
            full = f"{_PACKAGES[0]}.{name}"
            path = os.path.join(own, *name.split(".")) + ".py"
            found.append(_entry(full, path, {"__package__": full.rpartition(".")[0]}))
    except (OSError, SyntaxError, ValueError):  # Python 3.11 calls a zero byte in a source a ValueError
        return b""
    specs = [(name, find_spec(name)) for name in _COMPILED]
    places = [(name, one.origin) for name, one in specs if one and isinstance(one.loader, ExtensionFileLoader)]
    loading = compile(_LOADING, __file__, "exec")
    return MAGIC_NUMBER + marshal.dumps((loading, {"modules": found, "compiled": places}))


def _entry(name: str, path: str, given: dict[str, object] | None = None) -> tuple[str, dict[str, object], object]:
    return name, {"__file__": path, **(given or {"__package__": ""})}, SourceFileLoader(name, path).get_code(name)
