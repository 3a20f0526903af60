"""Limits of settings are declared once, in signatures: schemas and checks are derived from them."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
from typing import Annotated

import numpy as np
import pytest
from pydantic import Field, TypeAdapter, ValidationError

from dbrdist import functions as F
from dbrdist import iterators, optimizers
from dbrdist import links as L
from dbrdist.cli.configuration import updates
from dbrdist.cli.configuration.derived import made_by
from dbrdist.core.names import limits
from dbrdist.core.names.limits import Declared, limits_of, within_limits
from dbrdist.core.usage import mistakes
from dbrdist.errors import UsageWarning
from dbrdist.optimizers import schedules
from dbrdist.training import extensions, goals, triggers
from tests.each import each

REQUIRED = {"rate": 1.0, "threshold": 1.0, "lower_bound": 0.0, "upper_bound": 1.0, "eta": 1.0, "initial_lr": 1.0}


def declared_by(cls):
    return {d.name: d for d in limits_of(cls.__init__) if not isinstance(d.limit, limits.Switch)}


def settings_of_optimizers():
    """Pairs of an optimizer and its settings in configurations."""
    for settings in updates.OPTIMIZERS:
        yield made_by(settings), settings


def test_configurations_accept_nothing_that_python_refuses():
    """At each bound of the signature, and just beyond it, the schema of dbrdist-train refuses what Python refuses."""
    num_compared = 0
    for optimizer, settings in settings_of_optimizers():
        for name, one in declared_by(optimizer).items():
            if name not in settings.model_fields or one.limit.is_whole:
                continue
            field = settings.model_fields[name]
            adapter = TypeAdapter(Annotated[(field.annotation, *field.metadata, "as in configurations")])
            for bound in one.limit.bounds().values():
                for value in (np.nextafter(bound, -9), bound, np.nextafter(bound, 9)):
                    num_compared += 1
                    if not one.limit.holds(float(value)):
                        with pytest.raises(ValidationError):
                            adapter.validate_python(float(value))
    assert num_compared > 100


def test_a_schema_follows_from_a_signature():
    one = declared_by(optimizers.Adam)["beta1"]
    schema = TypeAdapter(Annotated[float, Field(description=one.description, **one.limit.bounds())]).json_schema()
    assert schema == {"description": one.description, "type": "number", "minimum": 0, "exclusiveMaximum": 1}


@pytest.mark.parametrize("name", optimizers.__all__)
def test_every_number_of_an_optimizer_has_its_limit(name):
    cls = getattr(optimizers, name)
    module = sys.modules[cls.__module__]
    parameters = inspect.signature(cls).parameters.values()
    kinds = {p.name: str(getattr(module, str(p.annotation), p.annotation)) for p in parameters}
    numbers = {key for key, kind in kinds.items() if "float" in kind}
    assert numbers == set(declared_by(cls))
    required = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    given = {key: REQUIRED[key] for key in required}
    for one in declared_by(cls).values():
        wrong = [float("nan"), "0.1", [0.1], None]
        wrong += [-1.0] * (one.limit.ge == 0 or one.limit.gt == 0) + [1.5] * (1 in (one.limit.le, one.limit.lt))
        for value in wrong:
            with pytest.raises((TypeError, ValueError), match=f"{name}: {one.name}: expected a"):
                cls(**{**given, one.name: value})
        for value in (0.5, np.float32(0.5), np.array(0.5), np.array([0.5])):
            cls(**{**given, one.name: value})


@pytest.mark.parametrize("name", ["SGD", "Adam", "MomentumSGD", "RMSprop", "LAMB"])
def test_values_that_are_assigned_are_checked(name):
    optimizer = getattr(optimizers, name)()
    for value in ("0.1", None, [0.1], float("nan")):
        with pytest.raises((TypeError, ValueError), match="expected a number of 0 or more"):
            optimizer.lr = value
    optimizer.lr = 0.25
    optimizer.lr = np.float32(0.25)
    assert optimizer.lr == 0.25


# What extensions must be given, besides numbers.
EXTENSIONS = {
    "ExponentialShift": {"attr": "lr", "rate": 0.5},
    "GoalTrigger": {"epochs": 1, "iterations": None, "key": "main/loss"},
    "InverseShift": {"attr": "lr", "gamma": 1.0, "power": 1.0},
    "MultistepShift": {"attr": "lr", "gamma": 0.1, "step_value": [1, 2], "init": 0.1},
    "PolynomialShift": {"attr": "lr", "rate": 1.0, "max_count": 3},
    "ProgressBar": {},
    "Snapshot": {"target": None, "filename": "now"},
    "StepShift": {"attr": "lr", "gamma": 0.1, "step": 2},
    "VariableStatisticsPlot": {"targets": L.Linear(2, 2)},
    "WarmupShift": {"attr": "lr", "warmup_start": 0.1, "warmup_iter": 2, "init": 0.1},
    "WeightAverage": {"model": L.Linear(2, 2), "decay": 0.9},
}


def extensions_with_numbers():
    """Extensions with arguments that are numbers, and the names of these."""
    for cls in (*vars(extensions).values(), goals.GoalTrigger):
        if isinstance(cls, type):
            kinds = inspect.signature(cls).parameters.values()
            names = {p.name for p in kinds if re.match(r"(Annotated\[)?(float|int)\b", str(p.annotation))}
            yield cls.__name__, cls, names


def test_every_number_of_an_extension_has_its_limit():
    for name, cls, numbers in extensions_with_numbers():
        if name in EXTENSIONS or numbers:
            assert numbers - {"epochs", "iterations"} <= set(declared_by(cls)), name


@pytest.mark.parametrize("name", EXTENSIONS)
@each(is_chainers=[False, True])
def test_extensions_check_their_numbers(name, is_chainers, monkeypatch):
    """Outside of its limit a number is an error, and in a program of Chainer a warning."""
    monkeypatch.setattr(mistakes, "as_chainer", [is_chainers])
    cls, given = getattr(extensions, name, None) or getattr(goals, name), EXTENSIONS[name]
    cls(**given)
    limited = [one for one in declared_by(cls).values() if one.limit is not limits.whole]
    assert limited
    for one in limited:
        bounds = one.limit.bounds()
        outside = [float("nan")] if not one.limit.is_whole else []
        outside += [bounds["ge"] - (1 if one.limit.is_whole else 1.5)] if "ge" in bounds else []
        for wrong in outside:
            words = f"{name}: {one.name}: expected an? .*got {wrong}"
            if is_chainers and not one.limit.is_of_chainer:  # a few of which Chainer cannot do anything with either
                with contextlib.suppress(ValueError), pytest.warns(UsageWarning, match=words):
                    cls(**{**given, one.name: wrong})
                continue
            with pytest.raises(ValueError, match=words):
                cls(**{**given, one.name: wrong})


def test_what_chainer_lacks_is_refused_in_its_programs_too(monkeypatch):
    monkeypatch.setattr(mistakes, "as_chainer", [True])
    for made in (
        lambda: extensions.WeightAverage(L.Linear(1, 1), 1.0),
        lambda: extensions.WeightAverage(L.Linear(1, 1), 0.5, every=0),
        lambda: goals.GoalTrigger(1, None, "main/loss", patience=0),
        lambda: goals.GoalTrigger(1, None, "main/loss", "low"),
    ):
        with pytest.raises((ValueError, TypeError), match="expected a"):
            made()


SCORES = np.zeros((2, 3), np.float32)
LABELS = np.zeros(2, np.int32)
LOSSES = {
    "binary_cross_entropy": (SCORES, LABELS),
    "contrastive": (SCORES, SCORES, LABELS),
    "discriminative_margin_based_clustering_loss": (np.zeros((1, 2, 1, 2), "f"), np.zeros((1, 1, 2), "i"), 0.5, 1.5, 2),
    "huber_loss": (SCORES, SCORES, 1.0),
    "sigmoid_focal_loss": (SCORES, np.zeros((2, 3), np.int32)),
    "softmax_cross_entropy": (SCORES, LABELS),
    "top_k_accuracy": (SCORES, LABELS),
    "triplet": (SCORES, SCORES, SCORES),
}


def test_every_function_with_settings_is_tried():
    declared = {n for n in F.__all__ if any("Annotated" in str(a) for a in getattr(F, n).__annotations__.values())}
    assert declared | {"contrastive", "triplet"} == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
@each(is_chainers=[False, True])
def test_losses_check_their_settings(name, is_chainers, monkeypatch):
    monkeypatch.setattr(mistakes, "as_chainer", [is_chainers])
    function, arguments = getattr(F, name), LOSSES[name]
    place = {p: i for i, p in enumerate(inspect.signature(function).parameters)}
    function(*arguments)
    for one in (d for d in limits_of(function) if d.description and not isinstance(d.limit, limits.Switch)):
        before, after = list(place)[: place[one.name]], list(place)[place[one.name] + 1 :]
        rest = dict(zip(after, arguments[len(before) + 1 :], strict=False))
        for wrong in [0, 1.5] if one.limit.is_whole else [float("nan"), *[-0.5] * bool(one.limit.bounds())]:
            words = f"{name}: {one.name}: expected .*{wrong}"
            is_warned = is_chainers and not (one.limit.is_whole or one.limit.is_of_chainer)
            refused = pytest.raises((TypeError, ValueError), match=words)
            with pytest.warns(UsageWarning, match=words) if is_warned else refused:
                function(*arguments[: len(before)], **{one.name: wrong}, **rest)


def test_smoothing_has_its_limit_for_probabilities_too():
    with pytest.raises(
        ValueError, match="softmax_cross_entropy: label_smoothing: expected a number from 0 to 1, got 2"
    ):
        F.softmax_cross_entropy(SCORES, np.full((2, 3), 1 / 3, np.float32), label_smoothing=2.0)


def test_a_distance_may_be_one_for_each_element():
    x, delta = np.array([[0.5, 3.0]], np.float32), np.array([[1.0, 2.0]], np.float32)
    np.testing.assert_allclose(F.huber_loss(x, 0 * x, delta, reduce="no").array, [[0.125, 4.0]])
    with pytest.raises(ValueError, match="huber_loss: delta: expected a number of 0 or more"):
        F.huber_loss(x, 0 * x, -delta)


def test_all_is_minus_one():
    assert limits.count_or_all.refusal("f", "n", -1) is None and limits.count_or_all.refusal("f", "n", 3) is None
    for wrong in (0, -2, 1.0, None):
        assert limits.count_or_all.refusal("f", "n", wrong) is not None


SCHEDULES = {
    "constant": {"lr": 0.1},
    "step": {"lr": 0.1, "gamma": 0.1, "milestones": [1]},
    "exponential": {"lr": 0.1, "gamma": 0.9},
    "stairs": {"lr": 0.1, "gamma": 0.9, "every": 2},
    "inverse": {"lr": 0.1, "gamma": 0.9, "power": 1},
    "polynomial": {"lr": 0.1, "total": 3},
    "cosine": {"lr": 0.1, "total": 3},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_check_their_settings(name):
    schedule = getattr(schedules, name)
    schedule(**SCHEDULES[name])
    for key in SCHEDULES[name]:
        for wrong in (float("nan"), "1", None):
            if key != "milestones":
                with pytest.raises((TypeError, ValueError), match=f"{name}: {key}: expected a"):
                    schedule(**{**SCHEDULES[name], key: wrong})


@pytest.mark.parametrize("value", [-1, float("nan"), "3", None])
def test_a_warm_up_has_a_length(value):
    with pytest.raises((TypeError, ValueError), match="warmup: epochs: expected a number of 0 or more"):
        schedules.warmup(schedules.constant(1.0), value)


def test_what_counts_as_an_integer():
    for value in (3, np.int64(3), np.array(3), True):
        assert limits.whole.refusal("f", "n", value) is None
    for value in (3.0, 2.5, np.float32(3), "3", None, [3], float("nan"), int):
        assert limits.whole.refusal("f", "n", value) is not None
    assert limits.sizes.refusal("f", "n", (3, np.int64(2))) is None
    assert limits.sizes.refusal("f", "n", np.array([3, 2])) is None
    assert limits.sizes.refusal("f", "n", (3, 2.5)) is not None


def test_infinity_is_a_threshold_and_no_rate():
    assert limits.threshold.refusal("f", "n", float("inf")) is None
    assert limits.not_negative.refusal("f", "n", float("inf")) is not None
    assert limits.not_negative.refusal("f", "n", 10**400) is not None


def test_functions_declare_limits_too():
    @within_limits
    def area(a: Annotated[float, limits.positive, "side"], n: int = 1, *, b: Annotated[float, limits.share, ""] = 1):
        return a * b * n

    assert limits_of(area) == (
        Declared("a", 0, limits.positive, False, "side"),
        Declared("n", 1, limits.whole, False, ""),
        Declared("b", -1, limits.share, False, ""),
    )
    assert area(2, b=0.5) == 1
    for wrong in (lambda: area(0), lambda: area(1, 1.5), lambda: area(1, b=2)):
        with pytest.raises(ValueError, match=r"area: [anb]: expected"):
            wrong()


INF, NAN = float("inf"), float("nan")
# name: what it says, what it takes and what it does not
BOUNDS = {
    "number": ("a finite number", (-1e300, 0, 2.5), (INF, -INF, NAN)),
    "any_number": ("a number", (-INF, 0, INF), (NAN,)),
    "positive": ("a number above 0", (5e-324, 1), (0, -1, INF, NAN)),
    "not_negative": ("a number of 0 or more", (0, 5e-324), (-5e-324, INF)),
    "threshold": ("a number of 0 or more", (0, INF), (-5e-324, NAN)),
    "fraction": ("a number from 0 to below 1", (0, 0.5, 1 - 2**-53), (-5e-324, 1)),
    "part": ("a number above 0 and at most 1", (5e-324, 1), (0, 1 + 2**-52)),
    "share": ("a number from 0 to 1", (0, 1), (-5e-324, 1 + 2**-52)),
    "whole": ("an integer", (-3, 0, 2**40), (0.5, INF)),
    "count": ("an integer of 1 or more", (1, 2**40), (0, -1, 1.5)),
    "count_or_all": ("an integer of 1 or more, or -1 for all", (-1, 1, 2), (0, -2)),
    "count_or_zero": ("an integer of 0 or more", (0, 1), (-1,)),
    "rate": ("a number of 0 or more", (0, 5e-324), (-5e-324, INF)),
    "decay": ("a number from 0 to 1", (0, 1), (-5e-324, 1 + 2**-52)),
    "distances": ("a number of 0 or more", (0, INF, (0, 1)), (-1, (0, -1))),
    "margins": ("a number above 0", (5e-324, INF), (0, -1)),
    "level": ("a finite number", (-1, 0), (INF,)),
    "exponent": ("a finite number", (-1, 0), (INF,)),
    "largest": ("a number of 0 or more", (0, INF), (-1,)),
    "counts": ("integers of 1 or more", (1, (1, 2)), (0, (1, 0))),
}
# What a configuration may hold instead: a value that fits, and what does not.
CONFIGURED = {
    "count": ((1, 2**31 - 1), (0, 2**31)), "count_or_all": ((1, 2**31 - 1), (0, -1, 2**31)),
    "counts": ((1, 2**31 - 1), (0, 2**31)), "rate": ((5e-324,), (0,)), "decay": ((0, 0.5), (1,)),
    "level": ((0,), (-1,)), "exponent": ((5e-324,), (0,)), "largest": ((5e-324,), (0,)), "levels": ((0,), (-1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_each_limit_takes_what_it_says_and_nothing_beyond(name):
    words, fitting, others = BOUNDS[name]
    limit = getattr(limits, name)
    assert limit.words == words
    assert [value for value in fitting if limit.refusal("f", "x", value) is not None] == []
    assert [value for value in others if limit.refusal("f", "x", value) is None] == []


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_a_configuration_may_hold_is_within_other_bounds(name):
    fitting, others = CONFIGURED[name]
    configured = getattr(limits, name).configured
    assert [configured.holds(value) for value in (*fitting, *others)] == [True] * len(fitting) + [False] * len(others)


@each(value=[True, False, 1, 0, 1.0, None, np.bool_(True), np.float32(0), np.ones(1), np.array(False)])
def test_a_switch_is_true_or_false(value):
    assert limits.Switch("True or False").refusal("Where", "name", value) is None


@each(value=["yes", "1", np.zeros(2), 4, 0.5, -1, float("nan"), [1], (), print, np.float32])
def test_a_switch_is_nothing_else(value):
    error = limits.Switch("True or False", hint="a hint").refusal("Where", "name", value)
    assert isinstance(error, TypeError)
    assert str(error).startswith("Where: name: expected True or False, got ") and "a hint" in str(error)


PLACED = {
    "processes": (
        lambda: iterators.MultiprocessIterator(DATA, 2, 4),
        "repeat: .* got int 4; processes are n_processes",
    ),
    "a seed": (lambda: iterators.SerialIterator(DATA, 2, True, 42), "shuffle: .* got int 42; a seed is seed="),
    "an initializer": (
        lambda: L.Linear(4, 3, L.Linear),
        "nobias: .* got the class Linear; the values of W are initialW",
    ),
    "a decay": (lambda: optimizers.Adam(1e-3, 0.9, 0.999, 1e-8, 1.0, 0.0, 0.1), "amsgrad: .* got float 0.1"),
    "a start value": (lambda: L.BatchNormalization(4, 0.9, 2e-5, None, 0.5), "use_gamma: .* got float 0.5"),
    "statistics": (lambda: extensions.ParameterStatistics([], None, "mean"), "report_params: .* got str 'mean'"),
    "of a setting": (lambda: optimizers.LARS(skip_vectors="no"), "skip_vectors: .* got str 'no'"),
}
DATA = [0, 1, 2, 3]


@pytest.mark.parametrize("name", PLACED)
def test_what_takes_the_place_of_a_switch_is_refused(name):
    make, words = PLACED[name]
    with pytest.raises(TypeError, match=words):
        make()


def test_how_much_is_said_may_be_a_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert triggers.EarlyStoppingTrigger(verbose=2) is not None
