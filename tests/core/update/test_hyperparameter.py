"""Hyperparameters: names that nobody reads are warned of, values outside their limits too."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
from dbrdist.optimizer import UpdateRule

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, optimizers
from dbrdist.errors import UsageWarning
from tests.each import each


def set_up(optimizer):
    link = L.Linear(2, 2)
    return optimizer.setup(link), link.W.update_rule


@pytest.mark.parametrize(("assign", "words"), [
    (lambda o, rule: setattr(o.hyperparam, "alhpa", 3), "Adam: hyperparam.alhpa: there is no such.*mean 'alpha'"),
    (lambda o, rule: setattr(o.hyperparam, "speed", 3), "hyperparam.speed: there is no such entry"),
    (lambda o, rule: setattr(rule.hyperparam, "lr", 3), "hyperparam.lr: there is no such.*did you mean 'alpha'"),
    (lambda o, rule: setattr(rule.hyperparam, "beta3", 0.1), "hyperparam.beta3: there is no such.*did you mean 'beta"),
    (lambda o, rule: setattr(o.hyperparam, "alpha", -3), "Adam: alpha: expected a number of 0 or more, got -3"),
    (lambda o, rule: setattr(rule.hyperparam, "beta1", 1.5), "Adam: beta1: expected a number from 0 to below 1"),
])  # fmt: skip
def test_what_changes_nothing_or_too_much_is_warned_of(assign, words):
    optimizer, rule = set_up(optimizers.Adam())
    with pytest.warns(UsageWarning, match=words) as found:
        assign(optimizer, rule)
    assert len(found) == 1 and found[0].filename == __file__


def test_a_value_of_another_type_is_refused():
    optimizer, _ = set_up(optimizers.SGD())
    with pytest.raises(TypeError, match="SGD: lr: expected a number of 0 or more, got str"):
        optimizer.hyperparam.lr = "0.1"


class OwnRule(UpdateRule):
    def __init__(self, parent_hyperparam=None):
        super().__init__(parent_hyperparam)
        self.hyperparam.decay_rate = 0.5

    def update_core(self, param):
        param.array[...] -= self.hyperparam.decay_rate * self.hyperparam.lr * param.grad


class OwnOptimizer(optimizers.SGD):
    def create_update_rule(self):
        return OwnRule(self.hyperparam)


def own_rule_by_hand():
    optimizer, _ = set_up(optimizers.SGD())
    optimizer.target.W.update_rule = OwnRule(optimizer.hyperparam)
    optimizer.hyperparam.speed = 2.0


def own_hook():
    optimizer, rule = set_up(optimizers.SGD())
    rule.add_hook(lambda rule, param: None, name="own")
    rule.hyperparam.moment = 2.0
    optimizer.hyperparam.speed = 2.0


def rates():
    optimizer, rule = set_up(optimizers.Adam())
    rule.hyperparam.alpha = np.float32(0.5)
    optimizer.alpha, optimizer.lr, optimizer.hyperparam.eps = 2.0, 3.0, 0.0
    copied = copy.deepcopy(optimizer)
    copied.alpha = 1.0


@pytest.mark.parametrize("program", [lambda: set_up(OwnOptimizer()), own_rule_by_hand, own_hook, rates])
def test_what_somebody_reads_is_right(program):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program()


@pytest.mark.parametrize(("saved", "other"), [
    (optimizers.Adam, optimizers.MomentumSGD), (optimizers.Adam, optimizers.SGD),
    (optimizers.MomentumSGD, optimizers.AdaDelta), (optimizers.AdaDelta, optimizers.Adam),
])  # fmt: skip
def test_the_state_of_another_optimizer_is_refused(saved, other, tmp_path):
    net = L.Linear(2, 2)
    optimizer = saved().setup(net)
    optimizer.update(lambda: F.sum(net(np.ones((1, 2), np.float32))))
    dbrdist.serializers.save_npz(tmp_path / "o.npz", optimizer)
    dbrdist.serializers.load_npz(tmp_path / "o.npz", saved().setup(L.Linear(2, 2)))
    with pytest.raises(dbrdist.errors.CheckpointError, match=f"{other.__name__}: the saved state is that of another"):
        dbrdist.serializers.load_npz(tmp_path / "o.npz", other().setup(L.Linear(2, 2)))


def test_an_optimizer_without_a_target_saves_and_loads_counters_alone(tmp_path):
    with pytest.warns(UsageWarning, match=r"only counters are saved of it; call setup\(link\) first"):
        dbrdist.serializers.save_npz(tmp_path / "o.npz", optimizers.Adam())
    with pytest.warns(UsageWarning, match="only counters are loaded into it"):
        dbrdist.serializers.load_npz(tmp_path / "o.npz", optimizers.Adam())


@pytest.mark.parametrize(("value", "is_warned_of"), [(0.0, True), (1.0, False), (0.5, False), (-0.5, True), (0, True)])
def test_zero_is_no_rate_of_an_optimizer_that_divides_by_it(value, is_warned_of):
    optimizer, _ = set_up(optimizers.AdaBound())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.alpha = value
    assert [str(w.message).startswith("AdaBound: alpha: expected a number above 0") for w in said] == [True][
        :is_warned_of
    ]
    assert optimizer.alpha == value


RATES = {
    "SGD": "lr", "MomentumSGD": "momentum", "Adam": "beta1", "RMSprop": "lr", "AdaDelta": "rho", "LARS": "lr",
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
@each(kind=["assigned", "given", "of one parameter"])
def test_the_number_of_a_variable_is_meant(name, kind):
    """An array times a Variable wrote nothing into the array, so that SGD updated nothing and AdaDelta by 289."""
    found = []
    for value, rate in ((Variable(np.array(0.25, "f")), Variable(np.array([0.5]))), (0.25, 0.5)):
        link = L.Linear(4, 3, initialW=np.ones((3, 4), "f"))
        optimizer = getattr(optimizers, name)(**({RATES[name]: value} if kind == "given" else {})).setup(link)
        if kind != "given":
            owner = optimizer if kind == "assigned" else link.W.update_rule.hyperparam
            setattr(owner, RATES[name], value)
        optimizer.add_hook(optimizers.WeightDecay(rate))
        for _ in range(2):
            optimizer.update(lambda link=link: F.sum(link(np.ones((2, 4), "f"))))
        found.append(link.W.array)
    np.testing.assert_array_equal(*found)
