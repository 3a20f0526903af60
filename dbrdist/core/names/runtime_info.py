"""What a bug report should include."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, TextIO

from dbrdist.core.tape import call

if TYPE_CHECKING:
    from dbrdist.core.array.types import Module

_LIBRARIES = {
    "NumPy": ("numpy",),
    "CuPy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"),
    "oneDNN": ("onednn-cpu-gomp",),
    "mpi4py": ("mpi4py",),
}


def is_compiled() -> bool:
    """True if dbrdist was installed with its modules compiled, as ``pip install`` does where it finds a compiler."""
    return not str(call.__file__).endswith(".py")


def _version(distributions: tuple[str, ...]) -> str:
    from importlib import metadata  # takes a tenth of the time of ``import dbrdist``

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return "not installed"


def print_runtime_info(out: TextIO | None = None) -> None:
    """Print the platform and the versions of dbrdist and of the libraries below it, one per line.

    Nothing is loaded for this: a oneDNN, CuPy or MPI that is not a wheel is not listed.

    Args:
        out: the stream; None is the standard output.

    Example:
        >>> dbrdist.print_runtime_info()  # doctest: +SKIP
    """
    out = sys.stdout if out is None else out
    package: Module = sys.modules["dbrdist"]
    lines = {
        "Platform": platform.platform(),
        "Python": platform.python_version(),
        "dbrdist": f"{package.__version__}, {'compiled' if is_compiled() else 'interpreted'}",
        **{name: _version(distributions) for name, distributions in _LIBRARIES.items()},
    }
    for name, value in lines.items():
        print(f"{name}: {value}", file=out)
