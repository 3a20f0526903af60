"""The stacks of Pythons without our hooks, where py-spy is installed."""

from __future__ import annotations

import os
import sys

from .. import limits, linux


def by_py_spy(pids: list[int]) -> str:
    """What `py-spy dump` says of the first of these processes that is a Python; '' without py-spy."""
    python = next((pid for pid in pids if linux.is_python(pid)), None)
    if python is None:
        return ""
    import subprocess  # seldom needed, and each rank's supervisor should stay small

    for name in (os.path.join(os.path.dirname(sys.executable), "py-spy"), "py-spy"):
        words = [name, "dump", "--pid", str(python)]
        try:
            found = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=limits.SPY_SECONDS)
        except FileNotFoundError:
            continue
        except (OSError, subprocess.SubprocessError) as error:
            return f"py-spy: {error}"
        return (found.stdout or f"py-spy: {found.stderr.strip()}")[-limits.TAIL_BYTES :]
    return ""
