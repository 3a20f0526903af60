"""What comes from SciPy, imported where it is first used: special functions, and MATLAB files."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from dbrdist.core.array.backend import Array, import_cupyx_special

# What the standard library has of them, one number at a time: seven times slower than SciPy, and as accurate.
_OF_NUMBERS = {"erf": math.erf, "erfc": math.erfc}


@functools.cache
def special_function(name: str, device_module: str = "numpy") -> Callable[..., Array]:
    """A function of ``scipy.special`` for arrays of NumPy or CuPy, or an error that names what to install."""
    found: Callable[..., Array]
    if device_module == "cupy":
        found = getattr(import_cupyx_special(), name)
        return found
    try:
        from scipy import special
    except ImportError as e:
        if name in _OF_NUMBERS:
            one_by_one = np.vectorize(_OF_NUMBERS[name], otypes=[np.float64])
            return lambda x: one_by_one(x).astype(x.dtype)
        raise ImportError(
            f"expected SciPy, which computes {name}, but it cannot be imported; install scipy or dbrdist[scipy]"
        ) from e
    found = getattr(special, name)
    return found


def read_mat(path: str) -> dict[str, Array]:
    """The arrays of a MATLAB file, by SciPy, or an error that names what to install; objects in it are left out."""
    try:
        from scipy import io
    except ImportError as e:
        raise ImportError(
            f"expected SciPy, which reads MATLAB files such as {path}, but it cannot be imported; install scipy or "
            "dbrdist[scipy]"
        ) from e
    try:
        found = io.loadmat(path)
    except Exception as e:  # a damaged file shows as one of many
        raise ValueError(f"expected a MATLAB file, but {path} cannot be read as one: {e}") from e
    return {name: a for name, a in found.items() if isinstance(a, np.ndarray) and a.dtype != object}
