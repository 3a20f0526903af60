"""How a run changes its parameters: optimizers with their hooks and schedules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dbrdist.cli.configuration.settings import (
    Count,
    Custom,
    Fraction,
    NotNegative,
    Positive,
    Settings,
    Tuple,
    component,
    refuse,
)

# ---- hooks ------------------------------------------------------------------------------------------------------


class OfGroup(Settings):
    """What a hook takes that may be for some parameters only."""

    only: Tuple(str) = ()
    """Patterns of the parameters that are meant, such as `*/W`: at least one fits the path; none given means all."""
    skip: Tuple(str) = ()
    """Patterns of parameters that are left out, such as `*/b` or `*/bn*`."""


class WeightDecay(OfGroup):
    """Add `rate` times the parameter to its gradient."""

    name: Literal["weight_decay"]
    """`weight_decay`."""
    rate: NotNegative
    """Decay per step, relative to the parameter."""


class DecoupledWeightDecay(OfGroup):
    """Shrink parameters beside the gradient, as fast as the schedule of the learning rate says (SGDW)."""

    name: Literal["decoupled_weight_decay"]
    """`decoupled_weight_decay`."""
    rate: NotNegative
    """Decay per step, relative to the parameter, at the optimizer's `lr`; it follows the schedule."""


class Lasso(OfGroup):
    """Add `rate` times the sign of the parameter to its gradient."""

    name: Literal["lasso"]
    """`lasso`."""
    rate: NotNegative
    """Weight of the sum of absolute values in the loss."""


class GradientClipping(Settings):
    """Scale all gradients down to a total norm."""

    name: Literal["gradient_clipping"]
    """`gradient_clipping`."""
    threshold: Positive
    """The largest allowed L2 norm of all gradients together."""


class GradientHardClipping(Settings):
    """Clip each element of the gradients."""

    name: Literal["gradient_hard_clipping"]
    """`gradient_hard_clipping`."""
    lower_bound: float
    """The smallest value that an element keeps."""
    upper_bound: float
    """The largest value that an element keeps."""

    @model_validator(mode="after")
    def _ordered(self) -> GradientHardClipping:
        if not self.lower_bound < self.upper_bound:
            refuse("upper_bound", f"must be above lower_bound, {self.lower_bound:g}, got {self.upper_bound:g}")
        return self


class GradientLars(Settings):
    """Scale each gradient to the norm of its parameter (You, Gitman and Ginsburg 2017, without their coefficient)."""

    name: Literal["gradient_lars"]
    """`gradient_lars`."""
    threshold: NotNegative = 0.01
    """Parameters with a norm of at most this keep their gradients."""
    weight_decay: NotNegative = 0.0
    """Decay per step, relative to the parameter; part of the norm that sets the scale."""
    eps: NotNegative = 1e-9
    """Added to the norm in the denominator."""


class GradientNoise(Settings):
    """Add normal noise to the gradients (Neelakantan et al. 2015)."""

    name: Literal["gradient_noise"]
    """`gradient_noise`."""
    eta: NotNegative
    """The variance of the noise at the first step; it falls as (1 + steps)^-0.55."""


_HOOKS = WeightDecay, DecoupledWeightDecay, Lasso, GradientClipping, GradientHardClipping, GradientLars, GradientNoise


# ---- schedules --------------------------------------------------------------------------------------------------


class Schedule(Settings):
    """What every schedule can do: climb to the learning rate first."""

    warmup_epochs: NotNegative = 0.0
    """Epochs, fractions allowed, in which the rate climbs linearly from `warmup_start`."""
    warmup_start: NotNegative = 0.0
    """The learning rate at which the climb starts."""
    whole_epochs: bool = False
    """Whether the rate, warm-up included, changes at the end of epochs only, not at each step."""


class Constant(Schedule):
    """The optimizer's learning rate all along."""

    name: Literal["constant"]
    """`constant`."""


class Step(Schedule):
    """Multiply the rate at given epochs."""

    name: Literal["step"]
    """`step`."""
    milestones: Tuple(NotNegative, min_length=1)
    """Epochs, rising, fractions allowed, at which the rate is multiplied by `gamma`."""
    gamma: Positive = 0.1
    """The factor."""
    factors: Tuple(NotNegative) = ()
    """In place of `gamma` one factor for each milestone, of the optimizer's own rate; in force from there on."""

    @model_validator(mode="after")
    def _rising(self) -> Step:
        if list(self.milestones) != sorted(set(self.milestones)):
            refuse("milestones", f"the epochs must rise, got {list(self.milestones)}")
        if self.factors and len(self.factors) != len(self.milestones):
            num_milestones = len(self.milestones)
            refuse("factors", f"expected {num_milestones}, one for each milestone, got {len(self.factors)}")
        return self


class Exponential(Schedule):
    """Multiply the rate every epoch."""

    name: Literal["exponential"]
    """`exponential`."""
    gamma: Positive
    """The factor per epoch; each step gets its fraction of it."""


class Polynomial(Schedule):
    """Fall as (1 - done)^power until the end of training."""

    name: Literal["polynomial"]
    """`polynomial`."""
    power: Positive = 1.0
    """The exponent; 1 is a straight line."""
    end: NotNegative = 0.0
    """The learning rate at the end."""
    begin: NotNegative | Literal["warmup"] = 0.0
    """The epoch at which the fall begins; `warmup` is the end of the warm-up."""


class Cosine(Schedule):
    """Fall along half a cosine until the end of training."""

    name: Literal["cosine"]
    """`cosine`."""
    end: NotNegative = 0.0
    """The learning rate at the end."""
    begin: NotNegative | Literal["warmup"] = 0.0
    """The epoch at which the fall begins; `warmup` is the end of the warm-up."""


class PiecewiseLinear(Schedule):
    """Go along straight lines between points."""

    name: Literal["piecewise_linear"]
    """`piecewise_linear`."""
    points: Tuple(Annotated[tuple[NotNegative, NotNegative], Field(strict=False)], min_length=2)
    """Pairs of an epoch, rising, and the factor of the optimizer's rate there; constant before and after them."""

    @model_validator(mode="after")
    def _rising(self) -> PiecewiseLinear:
        epochs = [epoch for epoch, _ in self.points]
        if epochs != sorted(set(epochs)):
            refuse("points", f"the epochs must rise, got {epochs}")
        return self


class RmsPropWarmupShare(Settings):
    """The share of SGD in `rmsprop_warmup` (Akiba et al. 2017): an ELU of the epoch."""

    name: Literal["elu"]
    """`elu`."""
    center: NotNegative = 10.0
    """The epoch at which the share is one half."""
    period: Positive = 5.0
    """Epochs: the share is 1 from `center` + `period` / 2 on."""
    literal: bool = False
    """Whether the linear part has twice the slope, as transcriptions of the paper print it: up to 1.5, then 1."""
    whole_epochs: bool = False
    """Whether the share changes at the end of epochs only, not at each step."""


class CustomSchedule(Schedule, Custom):
    """The user's own function of the epochs done, which gives the value."""


class Own(Settings):
    """What the user's own optimizer does by itself."""

    name: Literal["own"]
    """`own`: the learning rate is left alone."""


_SCHEDULES = Constant, Step, Exponential, Polynomial, Cosine, PiecewiseLinear


class Scheduled(Settings):
    """A number of the configuration that changes over the run."""

    of: str
    """Its key: `optimizer.momentum`, `optimizer.hooks.0.rate`, `loss.label_smoothing`, `loss_scale`."""
    schedule: component("schedule", *_SCHEDULES, RmsPropWarmupShare, custom=CustomSchedule, default="constant")
    """How it changes, beginning with its own value; `elu` gives values of its own."""


# ---- optimizers -------------------------------------------------------------------------------------------------


class OptimizerSettings(Settings):
    """What every optimizer takes."""

    @model_validator(mode="before")
    @classmethod
    def _rate_by_either_name(cls, data: Any) -> Any:
        """The learning rate is `lr` or, with Adam, `alpha`: both are understood."""
        known = {"lr", "alpha"} & set(cls.model_fields)
        if isinstance(data, dict) and len(known) == 1:
            (own,) = known
            (other,) = {"lr", "alpha"} - known
            if other in data and own not in data:
                return {(own if key == other else key): value for key, value in data.items()}
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        made = super().__get_pydantic_json_schema__(schema, handler)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        known = {"lr", "alpha"} & set(properties)
        if len(known) == 1:
            (own,) = known
            (other,) = {"lr", "alpha"} - known
            properties[other] = {**properties[own], "description": f"Another name of `{own}`."}
        return made

    hooks: Tuple(component("hook", *_HOOKS)) = ()
    """What happens to the gradients before each update, in this order."""
    schedule: component("schedule", *_SCHEDULES, custom=CustomSchedule, default="constant") = Constant(name="constant")
    """How the learning rate changes over the run."""


class CustomOptimizer(OptimizerSettings, Custom):
    """The user's own callable that returns an optimizer."""

    schedule: component("schedule", *_SCHEDULES, Own, custom=CustomSchedule) = Own(name="own")
    """How the learning rate changes over the run; `own` leaves it alone."""


class Sgd(OptimizerSettings):
    """Gradient descent."""

    name: Literal["sgd"]
    """`sgd`."""
    lr: Positive = 0.01
    """Learning rate per step."""


class MomentumSgd(OptimizerSettings):
    """Gradient descent with momentum."""

    name: Literal["momentum_sgd", "corrected_momentum_sgd", "nesterov_ag", "corrected_nesterov_ag"]
    """`momentum_sgd`, or `nesterov_ag` for Nesterov's accelerated gradient; the momentum of `corrected_momentum_sgd`
    and `corrected_nesterov_ag` does not contain the learning rate, as in PyTorch."""
    lr: Positive = 0.01
    """Learning rate per step."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""


class AdamLike(OptimizerSettings):
    """What Adam and its descendants take."""

    alpha: Positive = 0.001
    """Learning rate per step."""
    beta1: Fraction = 0.9
    """Decay per step of the gradient's mean."""
    beta2: Fraction = 0.999
    """Decay per step of the squared gradient's mean."""
    eps: Positive = 1e-8
    """Added to the denominator."""


class Adam(AdamLike):
    """Adam (Kingma and Ba 2014)."""

    name: Literal["adam", "adamw"]
    """`adam`, or `adamw` for weight decay apart from the gradient."""
    weight_decay_rate: NotNegative = 0.0
    """Decay of the parameters per step, times the learning rate."""


class AmsGrad(AdamLike):
    """AMSGrad (Reddi, Kale and Kumar 2018)."""

    name: Literal["amsgrad"]
    """`amsgrad`."""


class AdaBound(AdamLike):
    """AdaBound (Luo et al. 2019)."""

    name: Literal["adabound", "amsbound"]
    """`adabound`, or `amsbound` for AMSGrad's denominator."""
    final_lr: Positive = 0.1
    """The learning rate of the SGD that it turns into; schedules scale it as they do `alpha`."""
    gamma: Positive = 0.001
    """How fast it turns into SGD: about 1 / `gamma` steps."""


class Lamb(AdamLike):
    """LAMB (You et al. 2020): Adam's direction, and a rate per layer from the norms of weights and direction."""

    name: Literal["lamb"]
    """`lamb`."""
    eps: Positive = 1e-6
    """Added to the denominator."""
    weight_decay_rate: NotNegative = 0.01
    """Decay relative to the parameter; part of the direction."""
    skip_vectors: bool = True
    """Whether biases and scales do without weight decay and the layer's own rate."""


class AdaGrad(OptimizerSettings):
    """AdaGrad (Duchi, Hazan and Singer 2011)."""

    name: Literal["adagrad"]
    """`adagrad`."""
    lr: Positive = 0.001
    """Learning rate per step."""
    eps: Positive = 1e-8
    """Added to the denominator."""


class AdaDelta(OptimizerSettings):
    """AdaDelta (Zeiler 2012), which has no learning rate."""

    name: Literal["adadelta"]
    """`adadelta`."""
    rho: Fraction = 0.95
    """Decay per step of the means of squared gradients and squared updates."""
    eps: Positive = 1e-6
    """Added to both means; it sets the size of the first updates."""
    schedule: component("schedule", Own, custom=None) = Own(name="own")
    """Only `own`: there is no learning rate to change."""


class RmsProp(OptimizerSettings):
    """RMSprop (Tieleman and Hinton 2012)."""

    name: Literal["rmsprop"]
    """`rmsprop`."""
    lr: Positive = 0.01
    """Learning rate per step."""
    alpha: Fraction = 0.99
    """Decay per step of the squared gradient's mean."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    eps_inside_sqrt: bool = False
    """Whether `eps` is added before the root is taken."""


class RmsPropGraves(OptimizerSettings):
    """RMSprop over the gradient's standard deviation, with momentum (Graves 2013)."""

    name: Literal["rmsprop_graves"]
    """`rmsprop_graves`."""
    lr: Positive = 1e-4
    """Learning rate per step."""
    alpha: Fraction = 0.95
    """Decay per step of the means of gradient and squared gradient."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""
    eps: Positive = 1e-4
    """Added to the variance."""


class Smorms3(OptimizerSettings):
    """SMORMS3 (Funk 2015)."""

    name: Literal["smorms3"]
    """`smorms3`."""
    lr: Positive = 0.001
    """The largest learning rate per step."""
    eps: Positive = 1e-16
    """Added to the denominators."""


class Msvag(OptimizerSettings):
    """M-SVAG: momentum with variance adaptation (Balles and Hennig 2018)."""

    name: Literal["msvag"]
    """`msvag`."""
    lr: Positive = 0.1
    """Learning rate per step."""
    beta: Fraction = 0.9
    """Decay per step of the means of gradient and squared gradient."""
    weight_decay_rate: NotNegative = 0.0
    """Decay of the parameters per step."""


class Lars(OptimizerSettings):
    """LARS (You, Gitman and Ginsburg 2017): a rate per layer from the norms of weights and gradients."""

    name: Literal["lars", "corrected_lars"]
    """`lars`, or `corrected_lars`, whose momentum holds no learning rate."""
    lr: Positive = 0.1
    """Learning rate per step."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""
    weight_decay: NotNegative = 1e-4
    """Decay per step, relative to the parameter; part of the norm that sets the layer's rate."""
    trust_coefficient: Positive = 0.001
    """The layer's rate relative to the ratio of its norms."""
    eps: NotNegative = 0.0
    """Added to the norm in the denominator."""
    skip_vectors: bool = True
    """Whether biases and scales do without weight decay and the layer's own rate."""


class RmsPropWarmup(OptimizerSettings):
    """Momentum SGD that begins as RMSprop (Akiba, Suzuki and Fukuda 2017)."""

    name: Literal["rmsprop_warmup"]
    """`rmsprop_warmup`."""
    lr: Positive = 0.1
    """Learning rate per step of the SGD part."""
    momentum: Fraction = 0.9
    """Fraction of the last update that is kept."""
    alpha: Fraction = 0.99
    """Decay per step of the squared gradient's mean."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    lr_rmsprop: Positive = 3e-4
    """Learning rate per step of the RMSprop part."""
    a_sgd: NotNegative = 1.0
    """The share of the SGD part; schedule it with `elu`."""


OPTIMIZERS = (
    *(Sgd, MomentumSgd, Adam, AmsGrad, AdaBound, Lars, Lamb),
    *(AdaGrad, AdaDelta, RmsProp, RmsPropGraves, Smorms3, Msvag),
    RmsPropWarmup,
)


# ---- fewer bytes between ranks -------------------------------------------------------------------------------------


class NoCompression(Settings):
    """Gradients are sent whole."""

    name: Literal["none"]
    """`none`."""


class PowerSgd(Settings):
    """PowerSGD (Vogels et al. 2019): gradients of low rank."""

    name: Literal["power_sgd"]
    """`power_sgd`."""
    rank: Count = 2
    """Columns of the two thin matrices that are sent for each parameter; the paper takes 1 to 4."""


class TopK(Settings):
    """Only a gradient's largest elements are sent (Aji and Heafield 2017; Stich et al. 2018)."""

    name: Literal["top_k"]
    """`top_k`."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The fraction of the elements that is sent."""
