"""How a run changes its parameters: optimizers with their hooks and schedules."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dbrdist import optimizers
from dbrdist.cli.configuration.derived import all_derived, derived, made_by
from dbrdist.cli.configuration.settings import Custom, NotNegative, Settings, Tuple, component, refuse
from dbrdist.comm.gradients.compression import PowerSGD, TopK
from dbrdist.core.update.optimizer import Optimizer
from dbrdist.optimizers import schedules

# ---- hooks ------------------------------------------------------------------------------------------------------


class OfGroup(Settings):
    """What a hook takes that may be for some parameters only."""

    only: Tuple(str) = ()
    """Patterns of the parameters that are meant, such as `*/W`: at least one fits the path; none given means all."""
    skip: Tuple(str) = ()
    """Patterns of parameters that are left out, such as `*/b` or `*/bn*`."""


class OrderedBounds(Settings):
    """The bounds of `gradient_hard_clipping`."""

    @model_validator(mode="after")
    def _ordered(self) -> OrderedBounds:
        bounds: Any = self
        if not bounds.lower_bound < bounds.upper_bound:
            words = f"must be above lower_bound, {bounds.lower_bound:g}, got {bounds.upper_bound:g}"
            refuse("upper_bound", words)
        return self


def _base_of_hook(hook: type) -> type[Settings]:
    if "params" in inspect.signature(hook).parameters:
        return OfGroup
    return OrderedBounds if hook is optimizers.GradientHardClipping else Settings


HOOKS = all_derived(optimizers, lambda cls: hasattr(cls, "timing"), _base_of_hook)


# ---- schedules --------------------------------------------------------------------------------------------------


class ScheduleSettings(Settings):
    """What every schedule can do: climb to the learning rate first."""

    warmup_epochs: NotNegative = 0.0
    """Epochs, fractions allowed, in which the rate climbs linearly from `warmup_start`."""
    warmup_start: NotNegative = 0.0
    """The learning rate at which the climb starts."""
    whole_epochs: bool = False
    """Whether the rate, warm-up included, changes at the end of epochs only, not at each step."""


class Rising(ScheduleSettings):
    """The milestones of `step`."""

    @model_validator(mode="after")
    def _rising(self) -> Rising:
        step: Any = self
        if list(step.milestones) != sorted(set(step.milestones)):
            refuse("milestones", f"the epochs must rise, got {list(step.milestones)}")
        if step.factors and len(step.factors) != len(step.milestones):
            num_milestones = len(step.milestones)
            refuse("factors", f"expected {num_milestones}, one for each milestone, got {len(step.factors)}")
        return self


class RisingPoints(ScheduleSettings):
    """The points of `piecewise_linear`."""

    @model_validator(mode="after")
    def _rising(self) -> RisingPoints:
        linear: Any = self
        epochs = [epoch for epoch, _ in linear.points]
        if epochs != sorted(set(epochs)):
            refuse("points", f"the epochs must rise, got {epochs}")
        return self


_BEGIN = NotNegative | Literal["warmup"], 0.0
_PAIR = Annotated[tuple[NotNegative, NotNegative], Field(strict=False)]
Constant = derived(schedules.constant, base=ScheduleSettings)
_SCHEDULES = (
    Constant,
    derived(schedules.step, base=Rising, milestones=(Tuple(NotNegative, min_length=1), ...)),
    derived(schedules.exponential, base=ScheduleSettings),
    derived(schedules.polynomial, base=ScheduleSettings, begin=_BEGIN),
    derived(schedules.cosine, base=ScheduleSettings, begin=_BEGIN),
    derived(schedules.piecewise_linear, base=RisingPoints, points=(Tuple(_PAIR, min_length=2), ...)),
)
RmsPropWarmupShare = derived(schedules.rmsprop_warmup, "elu")


class CustomSchedule(ScheduleSettings, Custom):
    """The user's own function of the epochs done, which gives the value."""


class Own(Settings):
    """What the user's own optimizer does by itself."""

    name: Literal["own"]
    """`own`: the learning rate is left alone."""


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

    hooks: Tuple(component("hook", *HOOKS)) = ()
    """What happens to the gradients before each update, in this order."""
    schedule: component("schedule", *_SCHEDULES, custom=CustomSchedule, default="constant") = Constant(name="constant")  # type: ignore[call-arg]
    """How the learning rate changes over the run."""


class CustomOptimizer(OptimizerSettings, Custom):
    """The user's own callable that returns an optimizer."""

    schedule: component("schedule", *_SCHEDULES, Own, custom=CustomSchedule, default="own") = Own(name="own")
    """How the learning rate changes over the run; `own` leaves it alone."""


class WithoutRate(OptimizerSettings):
    """An optimizer that has no learning rate."""

    schedule: component("schedule", Own, custom=None, default="own") = Own(name="own")
    """Only `own`: there is no learning rate to change."""


def _base_of_optimizer(cls: type) -> type[Settings]:
    return OptimizerSettings if hasattr(cls, "lr") else WithoutRate


OPTIMIZERS = all_derived(optimizers, lambda cls: issubclass(cls, Optimizer), _base_of_optimizer)
(MomentumSGD,) = (settings for settings in OPTIMIZERS if made_by(settings) is optimizers.MomentumSGD)


# ---- fewer bytes between ranks -------------------------------------------------------------------------------------


class NoCompression(Settings):
    """Gradients are sent whole."""

    name: Literal["none"]
    """`none`."""


COMPRESSIONS = derived(PowerSGD, "power_sgd"), derived(TopK)
