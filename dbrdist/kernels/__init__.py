"""The heavy operations on plain arrays: one interface, several providers."""

from dbrdist.kernels.dispatch import (
    add,
    bn_backward,
    bn_forward,
    bn_inference,
    conv_backward_data,
    conv_backward_weight,
    conv_forward,
    linear,
    matmul,
    pool_backward,
    pool_forward,
    pool_gather,
    pool_indices,
    provider_of,
    relu_backward,
    relu_forward,
    use,
)
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry

__all__ = [
    "ConvGeometry",
    "PoolGeometry",
    "add",
    "bn_backward",
    "bn_forward",
    "bn_inference",
    "conv_backward_data",
    "conv_backward_weight",
    "conv_forward",
    "linear",
    "matmul",
    "pool_backward",
    "pool_forward",
    "pool_gather",
    "pool_indices",
    "provider_of",
    "relu_backward",
    "relu_forward",
    "use",
]
