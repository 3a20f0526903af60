"""Names of Chainer's modules that programs use and that no module of dbrdist has under the same name."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.tape.node import VariableNode
from dbrdist.datasets.loading.convert import stack
from dbrdist.functions import log_softmax
from dbrdist.links import initializers
from dbrdist.utils.conv import get_conv_outsize

_workspace_bytes = [8 * 1024 * 1024]  # Chainer's default


def _get_max_workspace_size() -> int:
    """What was last given to ``set_max_workspace_size``, in bytes."""
    return _workspace_bytes[0]


def _set_max_workspace_size(size: int) -> None:
    """Remember the limit of cuDNN's workspace in bytes. It changes no result, and here no kernel either."""
    _workspace_bytes[0] = int(size)


def _as_tuple(x: Any, n: int) -> tuple[Any, ...]:
    """A number n times, or a sequence of n values as a tuple."""
    if hasattr(x, "__getitem__"):
        if len(x) != n:
            raise ValueError(f"expected {n} values, got {len(x)}")
        return tuple(x)
    return (x,) * n


def _pair(x: Any) -> Any:
    """(x, x) of a number; a sequence as it is."""
    return x if hasattr(x, "__getitem__") else (x, x)


def _im2col(
    img: Any, kh: int, kw: int, sy: int, sx: int, ph: int, pw: int, pval: float = 0, cover_all: bool = False,
    dy: int = 1, dx: int = 1, out_h: int | None = None, out_w: int | None = None,
) -> Any:  # fmt: skip
    """The windows of images (N, C, H, W), padded with ``pval``: (N, C, kh, kw, out_h, out_w)."""
    n, c, h, w = img.shape
    out_h = get_conv_outsize(h, kh, sy, ph, cover_all, dy) if out_h is None else out_h
    out_w = get_conv_outsize(w, kw, sx, pw, cover_all, dx) if out_w is None else out_w
    padded = np.pad(img, ((0, 0), (0, 0), (ph, ph + sy - 1), (pw, pw + sx - 1)), constant_values=pval)
    col = np.empty((n, c, kh, kw, out_h, out_w), img.dtype)
    for i in range(kh):
        for j in range(kw):
            rows, columns = slice(i * dy, i * dy + sy * out_h, sy), slice(j * dx, j * dx + sx * out_w, sx)
            col[:, :, i, j] = padded[:, :, rows, columns]
    return col


def _col2im(
    col: Any, sy: int, sx: int, ph: int, pw: int, h: int, w: int, dy: int = 1, dx: int = 1
) -> Any:  # fmt: skip
    """The sum of windows (N, C, kh, kw, out_h, out_w) where they lie in images (N, C, h, w)."""
    n, c, kh, kw, out_h, out_w = col.shape
    padded = np.zeros((n, c, h + 2 * ph + sy - 1, w + 2 * pw + sx - 1), col.dtype)
    for i in range(kh):
        for j in range(kw):
            rows, columns = slice(i * dy, i * dy + sy * out_h, sy), slice(j * dx, j * dx + sx * out_w, sx)
            padded[:, :, rows, columns] += col[:, :, i, j]
    return padded[:, :, ph : h + ph, pw : w + pw]


def _concat_arrays(arrays: Any, padding: Any) -> Any:
    """Arrays or numbers along a new first axis, filled up with ``padding``."""
    return stack(arrays, padding, None)


def _log_softmax(x: Any, axis: int = 1) -> Any:
    """:func:`dbrdist.functions.log_softmax` of an array, as an array."""
    return log_softmax(x, axis).array


_BY_PATH: dict[str, Any] = {
    "chainer.backends.cuda.get_max_workspace_size": _get_max_workspace_size,
    "chainer.backends.cuda.set_max_workspace_size": _set_max_workspace_size,
    "chainer.cuda.get_max_workspace_size": _get_max_workspace_size,
    "chainer.cuda.set_max_workspace_size": _set_max_workspace_size,
    "chainer.dataset.convert._concat_arrays": _concat_arrays,
    "chainer.functions.activation.log_softmax._log_softmax": _log_softmax,
    "chainer.functions.math.basic_math.div": lambda a, b: a / b,
    "chainer.functions.math.basic_math.mul": lambda a, b: a * b,
    "chainer.functions.math.basic_math.neg": lambda a: -a,
    "chainer.functions.math.basic_math.pow": lambda a, b: a**b,
    "chainer.functions.math.basic_math.sub": lambda a, b: a - b,
    "chainer.initializer.get_fans": initializers.get_fans,
    "chainer.initializers._get_initializer": initializers.get_initializer,
    "chainer.utils.collections_abc": collections.abc,
    "chainer.utils.conv.col2im": _col2im,
    "chainer.utils.conv.col2im_cpu": _col2im,
    "chainer.utils.conv.im2col": _im2col,
    "chainer.utils.conv.im2col_cpu": _im2col,
    "chainer.utils.conv_nd.as_tuple": _as_tuple,
    "chainer.variable.VariableNode": VariableNode,
}
# In any module of a package.
_BY_PACKAGE: dict[tuple[str, str], Callable[..., Any]] = {
    ("chainer.functions", "_as_tuple"): _as_tuple,
    ("chainer.functions", "_pair"): _pair,
    ("chainer.links", "_pair"): _pair,
}


def find(path: str, name: str) -> Any:
    """What ``name`` of Chainer's module ``path`` is here, or None."""
    found = _BY_PATH.get(f"{path}.{name}")
    return _BY_PACKAGE.get((".".join(path.split(".")[:2]), name)) if found is None else found
