"""Tests of dbrdist.cli.builders.build_updates."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

import dbrdist
from dbrdist import links as L
from dbrdist.cli.builders import build_updates
from dbrdist.cli.configuration import document, updates
from dbrdist.cli.configuration.derived import made_by
from dbrdist.cli.configuration.load import Origin, check
from dbrdist.errors import ConfigError
from dbrdist.optimizers import SGD
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import OWN_MODULE
from tests.cli.config_helpers import GOOD, config, configured
from tests.each import each

ORIGIN = SimpleNamespace(where=lambda path: f"run.yaml:{'.'.join(map(str, path))}")


@pytest.mark.parametrize("n", [6, 7])
def test_up_to_six_parameters_are_listed(n):
    task = SimpleNamespace(namedparams=lambda: [(f"/predictor/l{k}/W", None) for k in range(n)])
    names = [f"/l{k}/W" for k in range(6)]
    assert build_updates._names(task) == (names if n == 6 else [*names, "..."])


def test_an_optimizer_that_cannot_be_divided_is_refused(monkeypatch):
    task, checked = SimpleNamespace(params=lambda: iter(["a", "b"])), []
    made = SGD()
    monkeypatch.setattr(SGD, "check_divisible", lambda self, params: checked.append(params))
    build_updates._check_divisible(made, None, ORIGIN, task)
    assert checked == [["a", "b"]]

    def refuse(self, params):
        raise ValueError("its hook looks at all gradients")

    monkeypatch.setattr(SGD, "check_divisible", refuse)
    with pytest.raises(ConfigError, match=r"run.yaml:zero: zero: its hook looks at all gradients"):
        build_updates._check_divisible(made, None, ORIGIN, task)
    with pytest.raises(ConfigError, match="expected an optimizer with update rules, got SimpleNamespace, which has no"):
        build_updates._check_divisible(SimpleNamespace(), None, ORIGIN, task)


@pytest.mark.parametrize(
    ("overrides", "happened"),
    [
        ((), ["setup"]), (("dtype=float64",), ["setup"]), (("dtype=mixedbf16",), ["setup"]),
        (("dtype=float16",), ["setup", "single precision", "scaling"]),
        (("dtype=bfloat16",), ["setup", "single precision"]), (("dtype=mixed16",), ["setup", "scaling"]),
        (("dtype=mixed16", "loss_scale=8"), ["setup", 8.0]), (("loss_scale=2.5",), ["setup", 2.5]),
    ],
)  # fmt: skip
def test_narrow_types_have_updates_in_single_precision_and_a_scaled_loss(monkeypatch, overrides, happened):
    found = []
    made = SimpleNamespace(
        setup=lambda task: found.append("setup"), use_fp32_update=lambda: found.append("single precision"),
        set_loss_scale=found.append, loss_scaling=lambda: found.append("scaling"),
    )  # fmt: skip
    monkeypatch.setattr(build_updates, "made_by", lambda settings: lambda **values: made)
    assert build_updates.optimizer(config(GOOD, *overrides), ORIGIN, None) is made and found == happened


@pytest.fixture
def own_module(folder):
    (folder / "ends_own.py").write_text(OWN_MODULE)
    return folder


@pytest.mark.parametrize("name", ["fails_late", "becomes_nan"])
def test_an_own_schedule_is_looked_at_before_the_first_step(run, own_module, name):
    code, _, err = run("run.yaml", f"optimizer.schedule=ends_own:{name}")
    assert code == 2
    assert "optimizer.schedule: " in err and f"ends_own:{name}" in err
    assert not Path("result").exists()


@pytest.mark.parametrize(
    ("of", "value", "expected"),
    [
        ("lr", -0.5, "optimizer.schedule: ends_own:between_looks: expected 0 or more, got -0.5"),
        ("lr", "nan", "optimizer.schedule: ends_own:between_looks: expected a finite number, got nan"),
        ("lr", "inf", "optimizer.schedule: ends_own:between_looks: expected a finite number, got inf"),
        ("lr", "fast", "optimizer.schedule: ends_own:between_looks: expected a finite number, got 'fast'"),
        ("momentum", 1.5, "schedules.0.schedule: ends_own:between_looks: expected less than 1, got 1.5"),
    ],
)
def test_a_schedule_that_goes_wrong_at_a_step(run, own_module, of, value, expected):
    schedule = f"{{name: 'ends_own:between_looks', args: {{value: {value}}}}}"
    scheduled = f"schedules=[{{of: optimizer.{of}, schedule: {schedule}}}]"
    key = f"optimizer.schedule={schedule}" if of == "lr" else scheduled
    code, _, err = run("run.yaml", key, "epochs=10", "snapshot.every=1 iteration", "iterations=9")
    assert code == 2 and "Traceback" not in err, err
    assert expected in err and "for the step after " in err
    left = snapshots.newest("result")
    assert left is not None and f"for the step after {int(left.rpartition('_')[2]) + 1} (" in err
    assert json.loads(Path("result/summary.json").read_text())["status"] == "failed"


BASE = "model: mlp\ndata: digits\nbatch: 100\nepochs: 10\n"


def test_every_scheduled_hyperparameter_is_there():
    """Of each built-in optimizer, each number can have a schedule; its setter sets what the rule reads."""
    for derived in updates.OPTIMIZERS:
        name, made = name_in(derived), made_by(derived)()
        settings, _ = check((BASE + f"optimizer: {name}\n").encode(), "run.yaml")
        for key, value in settings.optimizer.model_dump().items():
            rate = "lr" if hasattr(settings.optimizer, "lr") else "alpha"
            if isinstance(value, float) and key != rate:
                setter = build_updates._target(f"optimizer.{key}", made, None)
                assert setter is not None, (name, key)
                setter(0.625)
                assert getattr(made.hyperparam, key) == 0.625


def test_a_schedule_sets_the_number_of_the_hook_that_it_names():
    first, second = SimpleNamespace(rate=1.0), SimpleNamespace(rate=2.0, threshold=3.0)
    hooks = SimpleNamespace(pre={"0: WeightDecay": first}, post={"1: Lasso": second, "11: Other": None})
    made = SimpleNamespace(_hooks=hooks, hyperparam=SimpleNamespace(own=lambda: {"lr": 0.1}), set_loss_scale="scale")
    build_updates._target("optimizer.hooks.1.rate", made, None)(0.5)
    build_updates._target("optimizer.hooks.0.rate", made, None)(0.25)
    assert (first.rate, second.rate) == (0.25, 0.5)
    assert build_updates._target("optimizer.hooks.0.threshold", made, None) is None
    assert build_updates._target("optimizer.hooks.2.rate", made, None) is None
    build_updates._target("optimizer.lr", made, None)(0.75)
    assert made.hyperparam.lr == 0.75 and build_updates._target("optimizer.momentum", made, None) is None
    assert build_updates._target("loss_scale", made, None) == "scale"
    arguments = {"smoothing": 0.0}
    task = SimpleNamespace(loss=SimpleNamespace(keywords=arguments))
    build_updates._target("loss.smoothing", made, task)(0.5)
    assert arguments == {"smoothing": 0.5} and build_updates._target("loss.other", made, task) is None
    assert build_updates._target("loss.smoothing", made, SimpleNamespace(loss=print)) is None


@each(
    **{
        "path, values, words": [
            ("rate", [0.5, 0.0], None),
            ("rate", [0.5, -0.25], "expected a rate of 0 or more from own:f(2.0), got -0.25"),
            ("other", [0.5, -0.25], None), ("other", [np.inf], "expected a finite number from own:f(0.0), got inf"),
            ("rate", [10**400], "expected a finite number from own:f(0.0), got an integer too large for a float"),
            ("rate", ["fast"], "expected a finite number from own:f(0.0), got 'fast'"),
        ]
    }
)  # fmt: skip
def test_an_own_schedule_is_looked_at_over_the_whole_run(monkeypatch, path, values, words):
    """The last of the values is that of the last epoch."""
    path = build_updates._RATE if path == "rate" else ("loss_scale",)
    monkeypatch.setattr(build_updates.resolve, "find", lambda settings, path, origin: lambda epochs: 7 * epochs)
    monkeypatch.setattr(
        build_updates.resolve, "call", lambda s, p, o, epoch: values[-1] if epoch == 2.0 or len(values) == 1 else 0.5
    )
    config, own = SimpleNamespace(epochs=2), SimpleNamespace(name="own:f", args={})
    origin = SimpleNamespace(where=lambda key: "run.yaml:3")
    if words is None:
        assert build_updates._own_schedule(config, own, path, origin)(1.5) == 10.5
    else:
        with pytest.raises(ConfigError, match=re.escape(words)):
            build_updates._own_schedule(config, own, path, origin)


def optimizer_of(settings, loss_scale="auto", epochs=10):
    config, origin = configured(f"optimizer: {settings}", f"loss_scale: {loss_scale}", epochs=epochs)
    link = L.Linear(2, 2, initialW=np.array([[3.0, -4.0], [1.0, 2.0]]), initial_bias=1.0)
    return config, build_updates.optimizer(config, origin, link), link


def name_in(derived):
    """The name of a component's settings."""
    return get_args(derived.model_fields["name"].annotation)[0]


def other_values(derived):
    """For each setting of an optimizer a value that is not its default."""
    own = [key for key in derived.model_fields if key not in ("name", "hooks", "schedule")]
    for k, key in enumerate(own, 1):
        default = derived.model_fields[key].default
        yield key, not default if isinstance(default, bool) else k / 16


@pytest.mark.parametrize("derived", updates.OPTIMIZERS)
def test_hyperparameters(derived):
    values = dict(other_values(derived))
    assert values
    _, made, _ = optimizer_of({"name": name_in(derived), **values})
    assert type(made) is made_by(derived)
    assert {key: getattr(made.hyperparam, key) for key in values} == values


def test_each_hook_is_tried():
    named = {name_in(hook) for hook in updates.HOOKS}
    assert set(MORE_HOOKS) | {"weight_decay", "gradient_clipping", "decoupled_weight_decay"} == named


def schedules_of(config, made, task=None):
    return list(build_updates.scheduled(config, Origin(document.read("", "run.yaml")), made, task))


def test_adadelta_has_no_rate_to_change():
    config, made, _ = optimizer_of("adadelta")
    assert schedules_of(config, made) == []
    with pytest.raises(dbrdist.errors.ConfigError, match="expected the name of a schedule: own"):
        optimizer_of("{name: adadelta, schedule: cosine}")


@pytest.mark.parametrize("name", ["adam", "rmsprop", "lamb", "amsbound"])
def test_a_schedule_sets_the_rate_of_every_other(name):
    config, made, _ = optimizer_of({"name": name, "schedule": "cosine"})
    before = made.lr
    made.lr = schedules_of(config, made)[0][0](5.0)
    assert made.lr == pytest.approx(before / 2)


# What a hook makes of the gradient g of a parameter w; both layers have norms above 1.
MORE_HOOKS = {
    "lasso": ({"rate": 0.25}, lambda g, w: g + 0.25 * np.sign(w)),
    "gradient_hard_clipping": ({"lower_bound": -0.25, "upper_bound": 0.375}, lambda g, w: np.clip(g, -0.25, 0.375)),
    "gradient_lars": (
        {"threshold": 2.0, "weight_decay": 0.5, "eps": 0.125},
        lambda g, w: (g + 0.5 * w) * (1 if norm(w) < 2 else norm(w) / (norm(g) + 0.5 * norm(w) + 0.125)),
    ),
    "gradient_noise": ({"eta": 0.0}, lambda g, w: g),
}


def norm(a):
    return math.sqrt((a**2).sum())


@pytest.mark.parametrize("name", MORE_HOOKS)
def test_more_hooks(name):
    fields, formula = MORE_HOOKS[name]
    _, made, link = optimizer_of({"name": "sgd", "lr": 1.0, "hooks": [{"name": name, **fields}]})
    before = [p.array.astype(float) for p in link.params()]
    given = [np.linspace(-1, 1, p.size).reshape(p.shape) for p in link.params()]
    for p, g in zip(link.params(), given):
        p.grad = g.astype(np.float32)
    made.update()
    for p, w, g in zip(link.params(), before, given):
        np.testing.assert_allclose(p.array, w - formula(g, w), rtol=1e-5, atol=1e-6)


def test_noise_arrives():
    _, made, link = optimizer_of({"name": "sgd", "lr": 1.0, "hooks": [{"name": "gradient_noise", "eta": 1e6}]})
    for p in link.params():
        p.grad = np.zeros(p.shape, np.float32)
    made.update()
    assert np.mean([abs(p.array).mean() for p in link.params()]) > 100


def test_bounds_in_the_wrong_order_are_refused():
    for upper in (-1.0, 1.0):
        hook = f"{{name: gradient_hard_clipping, lower_bound: 1.0, upper_bound: {upper}}}"
        with pytest.raises(dbrdist.errors.ConfigError, match=f"must be above lower_bound, 1, got {upper:g}"):
            optimizer_of(f"{{name: sgd, hooks: [{hook}]}}")


def test_a_loss_scale_is_that_of_the_optimizer():
    _, made, link = optimizer_of("sgd", loss_scale=64)
    seen = []
    made.update(lambda: Spy(seen).apply((link.W,))[0])
    assert seen == [64.0]


class Spy(dbrdist.FunctionNode):
    """Notes the gradient that arrives."""

    def __init__(self, seen):
        self.seen = seen

    def forward(self, inputs):
        return (inputs[0].sum(keepdims=False),)

    def backward(self, indexes, grad_outputs):
        self.seen.append(float(grad_outputs[0].array))
        return (dbrdist.Variable(np.zeros((2, 2), np.float32)),)


@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_hooks(threshold):
    """Decay by 0.25, then clipping, in this order; the rate is 1 and the gradient is given."""
    clip = f"{{name: gradient_clipping, threshold: {threshold}}}"
    settings = f"{{name: sgd, lr: 1.0, hooks: [{{name: weight_decay, rate: 0.25}}, {clip}]}}"
    _, made, link = optimizer_of(settings)
    before, g = [p.array.astype(float) for p in link.params()], [np.full(p.shape, 0.5) for p in link.params()]
    for p, grad in zip(link.params(), g):
        p.grad = grad.astype(np.float32)
    made.update()
    decayed = [grad + 0.25 * w for grad, w in zip(g, before)]
    rate = min(1.0, threshold / math.sqrt(sum((d**2).sum() for d in decayed)))
    for p, w, d in zip(link.params(), before, decayed):
        np.testing.assert_allclose(p.array, w - rate * d, rtol=1e-5)


WARM = {"warmup_epochs": 2.0, "warmup_start": 0.25}
SCHEDULES = {
    "constant": ({}, {2: 3.0, 5: 3.0, 10: 3.0}),
    "step": ({"milestones": [4.0, 6.5], "gamma": 0.5}, {2: 3.0, 3.9: 3.0, 4: 1.5, 6.5: 0.75, 10: 0.75}),
    "exponential": ({"gamma": 0.5}, {2: 0.75, 3: 0.375, 10: 3 * 0.5**10}),
    "polynomial": ({"power": 3.0, "end": 0.5}, {2: 0.5 + 2.5 * 0.8**3, 5: 0.5 + 2.5 / 8, 10: 0.5}),
    "polynomial after it": ({"power": 3.0, "end": 0.5, "begin": "warmup"}, {2: 3.0, 6: 0.5 + 2.5 / 8, 10: 0.5}),
    "cosine": ({"end": 0.5}, {2: 0.5 + 1.25 * (1 + math.cos(0.2 * math.pi)), 5: 1.75, 10: 0.5}),
    "cosine after it": (
        {"end": 0.5, "begin": "warmup"},
        {2: 3.0, 4: 0.5 + 1.25 * (1 + math.cos(0.25 * math.pi)), 6: 1.75, 10: 0.5},
    ),
    "piecewise_linear": ({"points": [[1.0, 0.5], [4.0, 2.0], [8.0, 0.0]]}, {2: 3.0, 3: 4.5, 4: 6.0, 6: 3.0, 10: 0.0}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    fields, expected = SCHEDULES[name]
    config, made, _ = optimizer_of({"name": "sgd", "lr": 3.0, "schedule": {"name": name.split()[0], **fields, **WARM}})
    ((rate, target, *_),) = schedules_of(config, made)
    assert target == "lr"
    assert {e: rate(e) for e in expected} == pytest.approx(expected, rel=1e-12)
    assert [rate(0), rate(1)] == pytest.approx([0.25, (0.25 + expected[2]) / 2], rel=1e-12)


MORE_SCHEDULES = {
    "step": ({"milestones": [0.0, 4.0], "factors": [0.5, 0.075]}, {0: 1.5, 3.9: 1.5, 4: 0.225, 10: 0.225}),
    "polynomial": ({"power": 3.0, "begin": 0.0}, {0: 3.0, 5: 3 / 8, 10: 0.0}),
    "cosine": ({"begin": 5.0}, {0: 3.0, 5: 3.0, 7.5: 1.5, 10: 0.0}),
}


@pytest.mark.parametrize("name", MORE_SCHEDULES)
def test_more_keys_of_schedules(name):
    fields, expected = MORE_SCHEDULES[name]
    config, made, _ = optimizer_of({"name": "sgd", "lr": 3.0, "schedule": {"name": name, **fields}})
    ((rate, *_),) = schedules_of(config, made)
    assert {e: rate(e) for e in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "schedule, words",
    [
        ("{name: step, milestones: [1, 2], factors: [0.5]}", "factors: expected 2, one for each milestone, got 1"),
        ("{name: piecewise_linear, points: [[0, 1], [0, 2]]}", r"points: the epochs must rise, got \[0.0, 0.0\]"),
        ("{name: piecewise_linear, points: [[0, 1]]}", "points: expected at least 2 in the list"),
        ("{name: cosine, begin: 10}", "begin: epoch 10 is never reached: the run has 10 epochs"),
        ("{name: elu}", "expected the name of a schedule"),
    ],
)
def test_bad_schedules_are_refused(schedule, words):
    with pytest.raises(dbrdist.errors.ConfigError, match=words):
        optimizer_of(f"{{name: sgd, schedule: {schedule}}}")


def test_the_share_of_sgd_is_scheduled():
    share = {"name": "elu", "center": 4.0, "period": 2.0, "literal": True, "whole_epochs": True}
    config, origin = configured("optimizer: rmsprop_warmup", f"schedules: [{{of: optimizer.a_sgd, schedule: {share}}}]")
    made = build_updates.optimizer(config, origin, L.Linear(2, 2))
    _, (schedule, target, *_) = build_updates.scheduled(config, origin, made, None)
    assert [schedule(e) for e in (3.5, 4.0, 4.9, 5.0)] == pytest.approx([math.exp(-1) / 2, 0.5, 0.5, 1.0])
    target(schedule(3.0))
    assert made.a_sgd == pytest.approx(math.exp(-1) / 2)


def test_decoupled_decay_follows_the_rate_and_keeps_to_its_group():
    hook = {"name": "decoupled_weight_decay", "rate": 0.25, "only": ["/W"]}
    _, made, link = optimizer_of({"name": "sgd", "lr": 2.0, "hooks": [hook]})
    before = [p.array.copy() for p in link.params()]
    made.lr = 1.0  # half of what the rate holds for
    for p in link.params():
        p.grad = np.zeros(p.shape, np.float32)
    made.update()
    np.testing.assert_allclose(link.W.array, before[0] * 0.875, rtol=1e-6)
    np.testing.assert_array_equal(link.b.array, before[1])
    with pytest.raises(dbrdist.errors.ConfigError, match="decoupled_weight_decay follows the rate lr, which adam"):
        optimizer_of({"name": "adam", "hooks": [hook]})


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_step_is_captured_as_a_graph_where_that_is_asked_for(is_captured):
    made, origin = configured(f"graph: {str(is_captured).lower()}")
    examples = dbrdist.iterators.SerialIterator(dbrdist.datasets.TupleDataset(np.zeros((4, 2)), np.zeros(4)), 2)
    updater = build_updates.updater(made, origin, examples, SGD().setup(L.Linear(2, 1)), None, None)
    assert (updater._captured is not None) == is_captured


def test_an_updater_of_ones_own_captures_by_itself():
    made, origin = configured("graph: true", "updater: {name: 'mine:Updater'}")
    with pytest.raises(ConfigError, match=r"run.yaml:3:8: graph: the updater is your own; .*capture=True"):
        build_updates.updater(made, origin, None, None, None, None)
