"""Differentiable operations. They take arrays or Variables and always return Variables."""

from dbrdist.functions.activation import relu
from dbrdist.functions.convolution import convolution_2d, deconvolution_2d
from dbrdist.functions.normalization import batch_normalization, fixed_batch_normalization
from dbrdist.functions.pooling import average_pooling_2d, global_average_pooling_2d, max_pooling_2d

__all__ = [
    "average_pooling_2d",
    "batch_normalization",
    "convolution_2d",
    "deconvolution_2d",
    "fixed_batch_normalization",
    "global_average_pooling_2d",
    "max_pooling_2d",
    "relu",
]
