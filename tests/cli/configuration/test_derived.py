"""Tests of dbrdist.cli.configuration.derived."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
from pydantic import ValidationError

from dbrdist import optimizers
from dbrdist.cli.configuration.derived import all_derived, derived, made_by, name_of, takes
from dbrdist.cli.configuration.updates import OptimizerSettings
from dbrdist.core.names.limits import counts, decay, fraction, rate
from dbrdist.optimizers.gradient_descent import SGD
from tests.each import each
from tests.rules import train_page


class SignDescent(SGD):
    """Steps of one size.

    More about it.
    """

    def __init__(
        self,
        lr: Annotated[float, rate, "Learning rate per step."] = 1e-4,
        beta: Annotated[float, fraction, "Share of the mean."] = 0.9,
        momentum: Annotated[float, decay, "What is kept."] = 0.5,
        is_quick: Annotated[bool, "Whether it hurries."] = False,
        inner: int = 3,
    ) -> None:
        super().__init__(lr)


def test_an_optimizer_is_its_class_and_an_export():
    """Its settings, their limits, their schema and their lines on the page all follow."""
    module = SimpleNamespace(__all__=["SGD", "SignDescent", "WeightDecay"], SGD=SGD, SignDescent=SignDescent)
    module.WeightDecay = optimizers.WeightDecay
    made = all_derived(module, lambda cls: issubclass(cls, SGD), lambda cls: OptimizerSettings)
    assert [made_by(one) for one in made] == [SGD, SignDescent]
    settings = made[1]
    own = {key: settings.model_fields[key].default for key in settings.model_fields if key not in ("hooks", "schedule")}
    assert list(own) == ["name", "lr", "beta", "momentum", "is_quick"] and own["is_quick"] is False
    assert settings(name="sign_descent").lr == 1e-4 and settings.__doc__ == "Steps of one size."
    assert settings(name="sign_descent", alpha=0.5).lr == 0.5
    for wrong in ({"lr": 0}, {"lr": -1}, {"beta": 1.0}, {"momentum": 1.0}, {"is_quick": 1}, {"inner": 3}, {"lr": "1"}):
        with pytest.raises(ValidationError):
            settings(name="sign_descent", **wrong)
    assert train_page.type_of(settings, "momentum") == "float in [0, 1)"
    assert train_page.meaning(settings.model_fields["beta"]) == "share of the mean"


@each(
    **{
        "cls, name": [
            (optimizers.MomentumSGD, "momentum_sgd"),
            (optimizers.SMORMS3, "smorms3"),
            (optimizers.AdaBound, "adabound"),
            (optimizers.RMSpropGraves, "rmsprop_graves"),
            (optimizers.GradientLARS, "gradient_lars"),
            (optimizers.CorrectedLARS, "corrected_lars"),
        ]
    }
)
def test_names(cls, name):
    assert name_of(cls) == name


def test_what_a_run_gives_is_no_setting():
    hook = derived(optimizers.DecoupledWeightDecay)
    assert takes(hook, "initial_lr") and takes(hook, "params") and not takes(hook, "threshold")
    assert set(hook.model_fields) == {"name", "rate"}


class Base:
    def __init__(
        self, depth: Annotated[int, counts, "Layers."] = 3, *, kind: Annotated[Literal["a", "b"], "Kind."] = "a"
    ):
        """Takes both."""


class Wide(Base):
    """Passes on what it does not name."""

    def __init__(self, widths: Annotated[tuple[int, int], counts, "Units."] = (1, 2), **settings: object) -> None:
        super().__init__(3, **settings)


def test_settings_that_are_passed_on():
    wide = derived(Wide)
    assert list(wide.model_fields) == ["name", "widths", "kind"]
    assert wide(name="wide", widths=[3, 4], kind="b").widths == (3, 4)
    for wrong in ({"widths": [1]}, {"widths": [0, 1]}, {"kind": "c"}, {"depth": 4}):
        with pytest.raises(ValidationError):
            wide(name="wide", **wrong)
