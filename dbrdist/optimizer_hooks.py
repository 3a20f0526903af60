"""Hooks of optimizers, under Chainer's module name."""

from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.optimizers.hooks import (
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    WeightDecay,
)

__all__ = ["GradientClipping", "GradientHardClipping", "GradientLARS", "GradientNoise", "Lasso", "WeightDecay"]

__getattr__ = _explained(__name__)
