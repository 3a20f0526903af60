"""Hooks of optimizers, under Chainer's module name."""

from dbrdist.optimizers.hooks import GradientClipping, GradientHardClipping, WeightDecay

__all__ = ["GradientClipping", "GradientHardClipping", "WeightDecay"]
