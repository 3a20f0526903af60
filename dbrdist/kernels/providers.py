"""The table of providers, and which of them serves a kernel.

``loops`` takes update rules on the CPU where dbrdist is compiled; ``columns`` takes small convolutions there;
``onednn`` takes float32 and bfloat16 on the CPU where the library is there and has an implementation; ``cudnn`` takes
convolutions of float32 and 16-bit types and attention of the latter on a GPU, ``cuda`` batch normalization and pooling
of them, linear, sums, rectified units, cross entropy, the parts of Transformers and updates there; ``numpy`` takes the
rest: every float type, every device, every geometry.
"""

from __future__ import annotations

import functools
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

from dbrdist.core.names.moved import loaded
from dbrdist.kernels.cpu import columns, loops, onednn, onednn_normalization, onednn_ops
from dbrdist.kernels.reference import numpy_
from dbrdist.kernels.unsupported import Unsupported

Plan = Callable[..., Any]

# In order of preference; those of GPUs are empty until CuPy is loaded, without which no array is there.
PROVIDERS: dict[str, dict[str, Callable[..., Plan]]] = {
    "loops": loops.ROWS | onednn_normalization.PLANE_ROWS,
    "columns": columns.ROWS,
    "onednn": onednn_ops.ROWS,
    "cudnn": {},
    "cuda": {},
    "numpy": numpy_.ROWS,
}
_forced: frozenset[str] | None = None
_warned: set[str] = set()
# What is said once of a library that is missing.
_COST = {
    "onednn": "oneDNN is not available ({}), so NumPy computes convolutions, pooling and batch normalization, 2 to 10 "
    f"times slower; install the package onednn-cpu-gomp, or name a libdnnl.so.3 in {onednn.ENVIRONMENT_VARIABLE}",
    "cudnn": "cuDNN is not available ({}), so convolutions on the GPU are computed as columns and products of float32, "
    "several times slower; install dbrdist[cudnn12x] or dbrdist[cudnn13x]",
}
# The kernels that are declared as light: NumPy's own code is not much slower, and a missing library worth no warning.
light: set[str] = set()


def choose(kernel: str, arguments: tuple[Any, ...]) -> tuple[str, Plan]:
    """The name and the plan of the first provider that takes these arguments; NumPy takes all."""
    if "cupy" in sys.modules:
        add_rows_of_gpus()
    for name, rows in PROVIDERS.items():
        if kernel in rows and (name == "numpy" or _forced is None or name in _forced):
            try:
                return name, rows[kernel](*arguments)
            except Unsupported:
                continue
            except onednn.Unavailable as e:
                if kernel not in light:
                    _warn(name, str(e))
    raise AssertionError(f"no provider has a row for {kernel}")


@functools.cache
def add_rows_of_gpus() -> None:
    """Load the files of the providers ``cudnn`` and ``cuda``, which take a tenth of the time of an import."""
    for name, rows in loaded("dbrdist.kernels.gpu.rows").ROWS.items():
        PROVIDERS[name].update(rows)


def _warn(name: str, reason: str) -> None:
    """Say once what the missing library of a provider costs, where it could be installed."""
    if name in _warned or not (platform.system() == "Linux" and (name == "cudnn" or platform.machine() == "x86_64")):
        return
    _warned.add(name)
    warnings.warn(_COST[name].format(reason), RuntimeWarning, stacklevel=2)


def take_only(names: frozenset[str] | None) -> frozenset[str] | None:
    """Let these providers serve where they can, and NumPy the rest; None is all. Returns what was taken before."""
    global _forced
    for name in sorted(names or ()):
        if name not in PROVIDERS:
            raise ValueError(f"expected a provider out of {sorted(PROVIDERS)}, got {name!r}")
    before, _forced = _forced, names
    return before
