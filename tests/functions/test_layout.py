"""4-d results and gradients stay channels-last, whatever the operation, also where CuPy's habits would lose it."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES

from dbrdist import Variable, backward
from dbrdist.core.backend import channels_last, is_channels_last

# What moves axes or cuts pieces gives views, whose order of axes in memory follows from the operation.
VIEWS = {
    "transpose", "swapaxes", "rollaxis", "get_item", "flip", "flipud", "fliplr", "split_axis", "split_axis_one_used",
    "get_item_arrays", "broadcast",
}  # fmt: skip
ROWS = [
    (case, shapes)
    for case in CASES
    for shapes in case.shapes
    if case.name not in VIEWS and any(len(s) == 4 and min(s) > 1 for s in shapes)
]
IDS = [f"{case.name}-{'-'.join('x'.join(map(str, s)) or '0d' for s in shapes)}" for case, shapes in ROWS]


@pytest.mark.parametrize("case, shapes", ROWS, ids=IDS)
def test_four_axes_stay_channels_last(case, shapes):
    arrays = [channels_last(a) if a.ndim == 4 else a for a in case.inputs(shapes, np.float32)]
    xs = [Variable(a) for a in arrays]
    ys = case.function(*xs)
    ys = [y * 1.0 for y in (ys if isinstance(ys, tuple) else (ys,))]  # a reader sees the layout that is handed on
    gys = [np.ones(y.shape, y.dtype) for y in ys]
    backward(ys, [channels_last(g) if g.ndim == 4 else g for g in gys])
    for y in ys:
        assert y.ndim != 4 or is_channels_last(y.array)
    filters = case.name.startswith(("convolution", "deconvolution"))
    for x in xs[:1] if filters else xs:  # the gradient of a filter is no activation
        assert x.ndim != 4 or lies_as_nhwc(x.grad)


def lies_as_nhwc(a):
    """True for channels-last arrays and for pieces of them."""
    strides = [s for n, s in zip(np.take(a.shape, (0, 2, 3, 1)), np.take(a.strides, (0, 2, 3, 1))) if n > 1]
    return strides == sorted(strides, reverse=True)
