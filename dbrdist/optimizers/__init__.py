"""Update rules, hooks and schedules."""

from dbrdist.core.missing_names import explained as _explained
from dbrdist.optimizers.adam import Adam, AdamW
from dbrdist.optimizers.gradient_descent import SGD, CorrectedMomentumSGD, MomentumSGD, NesterovAG
from dbrdist.optimizers.hooks import GradientClipping, GradientHardClipping, WeightDecay
from dbrdist.optimizers.lars import LARS

__all__ = [
    "LARS",
    "SGD",
    "Adam",
    "AdamW",
    "CorrectedMomentumSGD",
    "GradientClipping",
    "GradientHardClipping",
    "MomentumSGD",
    "NesterovAG",
    "WeightDecay",
]

__getattr__ = _explained(__name__)
