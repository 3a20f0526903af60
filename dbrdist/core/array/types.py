"""The types of arrays in host memory, each declared once."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Shape: TypeAlias = tuple[int, ...]
HostArray: TypeAlias = np.ndarray[Shape, np.dtype[Any]]
IntArray: TypeAlias = np.ndarray[Shape, np.dtype[np.int64]]
ByteArray: TypeAlias = np.ndarray[Shape, np.dtype[np.uint8]]
FloatArray: TypeAlias = np.ndarray[Shape, np.dtype[np.float64]]
