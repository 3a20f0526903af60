"""What the providers ``cudnn`` and ``cuda`` serve; loaded once CuPy is: see ``kernels/providers.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbrdist.kernels.gpu import (
    cuda_fused_normalization,
    cuda_normalization,
    cuda_ops,
    cuda_pooling,
    cuda_products,
    cuda_recurrent,
    cuda_rows,
    cuda_transformer,
    cudnn_attention,
    cudnn_convolution,
)

ROWS: dict[str, dict[str, Callable[..., Any]]] = {
    "cudnn": {**cudnn_convolution.ROWS, **cudnn_attention.ROWS},
    "cuda": {
        **cuda_ops.ROWS,
        **cuda_products.ROWS,
        **cuda_normalization.ROWS,
        **cuda_fused_normalization.ROWS,
        **cuda_pooling.ROWS,
        **cuda_recurrent.ROWS,
        **cuda_rows.ROWS,
        **cuda_transformer.ROWS,
    },
}
