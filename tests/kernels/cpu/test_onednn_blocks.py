"""Tests of dbrdist.kernels.cpu.onednn_blocks."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn, onednn_blocks
from tests.kernels.provider_helpers import needs_onednn


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


@needs_onednn
def test_gradients_of_dense_images_of_two_blocks_are_masked_at_once(monkeypatch):
    monkeypatch.setattr(onednn_blocks, "_BLOCK", 60)
    like = backend.channels_last(np.ones((2, 3, 4, 5), "f"))
    plane, few, other = np.ones((2, 3, 4, 5), "f"), like[:1], backend.channels_last(np.ones((2, 3, 5, 4), "f"))
    matrix = np.ones((6, 20), "f")
    for planner, count in (
        (onednn_blocks._plan_relu_backward_over, 2),
        (onednn_blocks._plan_relu_backward_of_sum, 3),
    ):
        planner(*[like] * count)
        for wrong in (plane, other, few, like.astype("d")):
            for place in range(count):
                operands = [like] * count
                operands[place] = wrong
                refuses(planner, *operands)
        refuses(planner, *[few] * count)
        refuses(planner, *[matrix] * count)
        refuses(planner, *[plane] * count)
