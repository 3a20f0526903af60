"""The fuzzer of numerics passes, and finds a planted fault of every kind."""

import importlib

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import sums
from dbrdist.core.tape import ops
from dbrdist.core.tape.elementwise_table import ROWS
from dbrdist.datasets.loading import convert
from dbrdist.distributions import Cauchy
from dbrdist.functions import class_loss, loss, math, pooling_nd, recompute
from dbrdist.kernels.reference import numpy_
from dbrdist.link_hooks.weight import WeightHook
from dbrdist.links import Linear
from dbrdist.optimizers import adam, schedules

pytest.importorskip("scipy")
from tests.fuzz import numerics


@pytest.mark.slow
def test_a_few_random_programs():
    assert numerics.main(["--cases", "45", "--seed", "7"]) == 0


def first_type(monkeypatch):
    monkeypatch.setattr(convert, "_common_type", lambda values, entry: values[0].dtype)


def lost_tails(monkeypatch):
    monkeypatch.setattr(ROWS["sigmoid"], "formula", lambda x: np.tanh(x * 0.5) * 0.5 + 0.5)


def rounded_quotients(monkeypatch):
    monkeypatch.setattr(ops, "remainder", lambda a, b, function=None: a - b * (a / b).array // 1)


def any_label(monkeypatch):
    monkeypatch.setattr(loss, "class_numbers", lambda function, argument, t, *bounds: t)


def tangent_alone(monkeypatch):
    monkeypatch.setattr(Cauchy, "_standard_quantile", lambda self, p: F.tan(np.pi * (p - 0.5)))


def places_in_padding(monkeypatch):
    monkeypatch.setattr(numpy_, "_first_pixels", lambda *arguments: np.zeros((1, 1, 1), np.int32))


def forgotten_surroundings(monkeypatch):
    monkeypatch.setattr(recompute, "_exchanged", lambda captured, stand_ins: recompute._switched({}))


def plain_quotients(monkeypatch):
    monkeypatch.setattr(schedules, "whole_periods", lambda position, period: position // period)


def weights_in_the_link(monkeypatch):
    stand_ins = WeightHook.stand_ins

    def planted(self, args, link):
        found = stand_ins(self, args, link)
        vars(args.link).update(found)
        return found

    monkeypatch.setattr(WeightHook, "stand_ins", planted)


def weights_left_out(monkeypatch):
    monkeypatch.setattr(class_loss, "_product", lambda xp, weight, logs: logs)


def sums_in_a_row(monkeypatch):
    def one_by_one(x, axis, keepdims):
        along = axis[0] if axis else 0
        return np.add.accumulate(x if axis else x.reshape(-1), axis=along, dtype=x.dtype).take(-1, along)

    monkeypatch.setattr(sums, "sum_over", one_by_one)


def stores_its_input(monkeypatch):
    forward = Linear.forward

    def planted(self, x, n_batch_axes=1):
        self.last = x
        return forward(self, x, n_batch_axes)

    monkeypatch.setattr(Linear, "forward", planted)


def gates_exchanged(monkeypatch):
    n_step_rnn = importlib.import_module("dbrdist.functions.n_step_rnn")  # the package has a function of that name
    monkeypatch.setattr(n_step_rnn._LSTMCell, "order", (2, 1, 0, 3))
    monkeypatch.setattr(n_step_rnn._GRUCell, "order", (2, 1, 0))


def whole_windows_alone(monkeypatch):
    """Padding counts where it should be left out, and sums of windows reach over NaN beside them."""
    average = pooling_nd._average
    monkeypatch.setattr(pooling_nd, "_average", lambda *arguments: average(*arguments[:-1], 0))


def sums_of_16_bits(monkeypatch):
    monkeypatch.setattr(sums, "accumulation_dtype", lambda dtype: dtype)
    monkeypatch.setattr(math, "accumulation_dtype", lambda dtype: dtype)


def no_bias_correction(monkeypatch):
    monkeypatch.setattr(adam, "_alpha_t", lambda hp, t: hp.alpha)


FAULTS = {
    "batch": first_type, "elementwise": lost_tails, "remainders": rounded_quotients, "labels": any_label,
    "quantiles": tangent_alone, "pooling": places_in_padding, "forgotten": forgotten_surroundings,
    "periods": plain_quotients, "threads": weights_in_the_link, "losses": weights_left_out, "sums": sums_in_a_row,
    "stored": stores_its_input, "recurrent": gates_exchanged, "averages": whole_windows_alone,
    "narrow": sums_of_16_bits, "updates": no_bias_correction,
}  # fmt: skip


def test_every_kind_has_a_fault():
    assert {kind.__name__ for kind in numerics.KINDS} == set(FAULTS)


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_planted_faults_are_found(kind, monkeypatch):
    FAULTS[kind](monkeypatch)
    place = [k.__name__ for k in numerics.KINDS].index(kind)
    with kernels.use("numpy") if kind in ("pooling", "elementwise") else np.errstate(all="ignore"):
        for number in range(place, len(numerics.KINDS) * 400, len(numerics.KINDS)):
            try:
                numerics.run_case(0, number)
            except Exception:
                return
    raise AssertionError(f"400 cases of {kind} did not find the planted fault")
