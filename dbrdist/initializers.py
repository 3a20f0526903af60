"""Initializers of parameters, under Chainer's module name."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.links.initializers import (
    Constant,
    DownsamplingConvFilter,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    Identity,
    Initializer,
    LeCunNormal,
    LeCunUniform,
    NaN,
    Normal,
    One,
    Orthogonal,
    Uniform,
    UpsamplingDeconvFilter,
    Zero,
    generate_array,
)

__all__ = [
    "Constant",
    "DownsamplingConvFilter",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Identity",
    "Initializer",
    "LeCunNormal",
    "LeCunUniform",
    "NaN",
    "Normal",
    "One",
    "Orthogonal",
    "Uniform",
    "UpsamplingDeconvFilter",
    "Zero",
    "generate_array",
]

__getattr__ = _explained(__name__)
