"""The provider ``onednn``: float32, and bfloat16 where the processor has instructions for it."""

from __future__ import annotations

from dbrdist.kernels.cpu import (
    onednn_blocks,
    onednn_convolution,
    onednn_elementwise,
    onednn_inference,
    onednn_layer_norm,
    onednn_matmul,
    onednn_normalization,
    onednn_pooling,
    onednn_softmax,
)

ROWS = {
    **onednn_blocks.ROWS,
    **onednn_convolution.ROWS,
    **onednn_elementwise.ROWS,
    **onednn_inference.ROWS,
    **onednn_layer_norm.ROWS,
    **onednn_matmul.ROWS,
    **onednn_normalization.ROWS,
    **onednn_pooling.ROWS,
    **onednn_softmax.ROWS,
}
