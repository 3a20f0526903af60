"""Tests of dbrdist.kernels.cpu.onednn_inference."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn, onednn_inference
from tests.kernels.provider_helpers import needs_onednn

F32 = np.dtype("f")
BF16 = backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


@needs_onednn
def test_weights_for_inference_have_elements_in_order_of_their_own():
    x, W = np.ones((1, 2, 3, 3), "f"), np.ones((4, 2, 2, 2), "f")
    onednn_inference._check(x, W)
    onednn_inference._check(x, np.asfortranarray(W))
    for weights in (W[:0], W[..., ::-1], W[::-1], np.broadcast_to(W[:1], W.shape)):
        refuses(onednn_inference._check, x, weights)
    for images in (x.astype("d"), x[:0], x.view(np.ma.MaskedArray)):
        refuses(onednn_inference._check, images, W)


def test_vectors_are_dense_and_of_float32():
    row = np.arange(8, dtype="f")
    assert onednn_inference._f32(row) is row
    for a in (row[::2], row.astype("e")[::2], row.astype("i4"), row.astype("d"), row[::-1], row.astype(BF16)):
        made = onednn_inference._f32(a)
        assert made.dtype == F32 and made.strides == (4,) and made.tolist() == a.tolist()
