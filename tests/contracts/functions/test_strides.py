"""Values and gradients do not depend on how operands lie in memory."""

from __future__ import annotations

import numpy as np

from tests.each import each
from tests.functions.cases import every_case
from tests.functions.gradient_helpers import gradients_of


def backwards(a):
    """The first and the last axis exchanged in memory, each from its end."""
    every = (..., *(slice(None, None, -1),) * a.ndim)
    a = a.swapaxes(0, -1) if a.ndim else a
    return a[every].copy()[every].swapaxes(0, -1) if a.ndim else a


def sparse(a):
    """Every fourth element along the last axis of a larger array, which nobody may write to."""
    if not a.ndim:
        return a
    large = np.full((*a.shape[:-1], 4 * a.shape[-1]), np.nan, a.dtype)
    large[..., ::4] = a
    large.flags.writeable = False
    return large[..., ::4]


@every_case
@each(shapes=lambda case: case.shapes, lay=[backwards, sparse])
def test_any_strides_give_the_same(case, shapes, lay):
    arrays = case.inputs(shapes, "float32")
    ys, grads = gradients_of(case, arrays)
    found, found_grads = gradients_of(case, [lay(a) for a in arrays])
    for a, b in zip([*found, *found_grads], [*ys, *grads], strict=True):
        if b is None:
            assert a is None
            continue
        scale = max(float(np.abs(b).max(initial=0)), 1.0)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * scale)
