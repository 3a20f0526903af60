"""Images and a check of gradients for the tests of functions of images."""

from __future__ import annotations

import numpy as np

from dbrdist.core.tape.gradient_check import check_backward, check_double_backward


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def check_gradients(function, inputs):
    """First and second derivatives along random directions; a small step, for kinks may be near."""
    gy = draw(99, *function(*inputs).shape)
    ggs = [draw(100 + i, *x.shape) for i, x in enumerate(inputs)]
    check_backward(function, inputs, gy, eps=1e-5, atol=1e-7, rtol=1e-6)
    check_double_backward(function, inputs, gy, ggs, eps=1e-5, atol=1e-6, rtol=1e-6)
