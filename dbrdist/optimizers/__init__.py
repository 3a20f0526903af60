"""Update rules, hooks and schedules."""

from dbrdist.core.names.constructors import explain_constructors as _explain_constructors
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.optimizers.adam import AdaBound, Adam, AdamW, AMSBound, AMSGrad
from dbrdist.optimizers.adaptive import MSVAG, SMORMS3, AdaDelta, AdaGrad, RMSprop, RMSpropGraves
from dbrdist.optimizers.gradient_descent import SGD, CorrectedMomentumSGD, CorrectedNesterovAG, MomentumSGD, NesterovAG
from dbrdist.optimizers.hooks import (
    DecoupledWeightDecay,
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    WeightDecay,
)
from dbrdist.optimizers.lamb import LAMB
from dbrdist.optimizers.lars import LARS, CorrectedLARS
from dbrdist.optimizers.rmsprop_warmup import RMSpropWarmup

__all__ = [
    "LAMB",
    "LARS",
    "MSVAG",
    "SGD",
    "SMORMS3",
    "AMSBound",
    "AMSGrad",
    "AdaBound",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "CorrectedLARS",
    "CorrectedMomentumSGD",
    "CorrectedNesterovAG",
    "DecoupledWeightDecay",
    "GradientClipping",
    "GradientHardClipping",
    "GradientLARS",
    "GradientNoise",
    "Lasso",
    "MomentumSGD",
    "NesterovAG",
    "RMSprop",
    "RMSpropGraves",
    "RMSpropWarmup",
    "WeightDecay",
]

_explain_constructors(globals())
__getattr__ = _explained(__name__)
