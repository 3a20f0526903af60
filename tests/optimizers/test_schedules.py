"""Tests of dbrdist.optimizers.schedules."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.optimizers import schedules
from dbrdist.training.triggers import IntervalTrigger, ManualScheduleTrigger
from tests.each import each


def test_a_cosine_begins_where_the_warm_up_ends():
    f = schedules.cosine(2.0, 10.0, end=0.5, begin=4.0)
    expected = {0: 2.0, 4: 2.0, 5: 0.5 + 0.75 * (1 + math.cos(math.pi / 6)), 7: 1.25, 10: 0.5, 12: 0.5}
    assert {e: f(e) for e in expected} == pytest.approx(expected, rel=1e-14)


def test_a_polynomial_has_power_end_and_begin():
    f = schedules.polynomial(2.0, 10.0, power=3.0, end=0.5, begin=2.0)
    expected = {0: 2.0, 2: 2.0, 4: 0.5 + 1.5 * 0.75**3, 6: 0.5 + 1.5 * 0.125, 10: 0.5, 99: 0.5}
    assert {e: f(e) for e in expected} == pytest.approx(expected, rel=1e-14)


def test_steps_and_warm_up_at_their_edges():
    f = schedules.step(3.0, 0.5, [2.0, 4.0])
    assert [f(e) for e in (0, 1.999, 2, 3.999, 4, 100)] == [3, 3, 1.5, 1.5, 0.75, 0.75]
    g = schedules.warmup(f, 2.0, start=0.5)  # its peak is the rate at the end of the climb
    assert [g(e) for e in (0, 1, 2, 4)] == [0.5, 1.0, 1.5, 0.75]


def test_goyal_warm_up():
    """8,192 images, 157 iterations an epoch: 0.1 to 3.2 in 5 epochs, then a tenth at 30, 60, 80."""
    f = schedules.warmup(schedules.step(3.2, 0.1, [30, 60, 80]), 5, start=0.1)
    at = [f(i / 157) for i in (0, 157, 314, 785)]
    np.testing.assert_allclose(at, [0.1, 0.72, 1.34, 3.2], rtol=1e-12)
    np.testing.assert_allclose(np.diff([f(i / 157) for i in range(786)]), 3.1 / 785, rtol=1e-9)
    epochs = (29.99, 30, 59.99, 60, 79.99, 80)
    np.testing.assert_allclose([f(e) for e in epochs], [3.2, 0.32, 0.32, 0.032, 0.032, 0.0032], rtol=1e-12)


def test_akiba_steps():
    """Akiba et al. 2017 multiply the rate at epochs 40, 70 and 85; here by a tenth each time."""
    f = schedules.step(6.4, 0.1, [40, 70, 85])
    epochs = (0, 39.99, 40, 69.99, 70, 84.99, 85, 90)
    np.testing.assert_allclose([f(e) for e in epochs], [6.4, 6.4, 0.64, 0.64, 0.064, 0.064, 0.0064, 0.0064], rtol=1e-12)


def test_ffcv_schedule_repeats_the_published_log():
    f = schedules.warmup(schedules.polynomial(1.7, 16, begin=2), 2, start=1.7e-4)
    np.testing.assert_allclose([f(0), f(1), f(2), f(16)], [1.7e-4, 0.850085, 1.7, 0.0], rtol=1e-12)
    last = [f(e + 311 / 312) for e in (0, 1, 15)]
    np.testing.assert_allclose(last, [0.847360913, 1.697275913, 0.000389194], rtol=2e-6)


@pytest.mark.parametrize(
    ("peak", "half", "middle"), [(21.2, 10.6, 5.300075), (17, 8.5, 4.250075), (24.699, 12.3495, 6.174825)]
)
def test_mlperf_schedule(peak, half, middle):
    f = schedules.warmup(schedules.polynomial(peak, 72, power=2, end=1e-4, begin=18), 18)
    np.testing.assert_allclose([f(9), f(18), f(45), f(72), f(80)], [half, peak, middle, 1e-4, 1e-4], rtol=1e-12)


def test_other_schedules():
    assert schedules.constant(0.1)(7) == 0.1
    np.testing.assert_allclose(schedules.exponential(1.0, 0.97)(2), 0.9409)
    f = schedules.cosine(2.0, 10, end=1.0)
    np.testing.assert_allclose([f(0), f(5), f(10), f(11)], [2, 1.5, 1, 1])
    assert schedules.warmup(f, 0) is f
    np.testing.assert_allclose([schedules.stairs(2.0, 0.1, 1.5)(e) for e in (0, 1.4, 1.5, 3.1)], [2, 2, 0.2, 0.02])
    np.testing.assert_allclose([schedules.inverse(36.0, 0.5, 2)(e) for e in (0, 2, 4)], [36, 9, 4])
    np.testing.assert_allclose([schedules.polynomial(1.0, 3, end=5.0, begin=3)(e) for e in (2, 3, 3.1)], [1, 1, 5])


# ---- Schedules against closed forms and the tables of papers and published logs ----


ROOTS = {0: -4, 2: -3.2, 4: -2.4, 5: -2, 6: -1.6, 8: -0.8, 9: -0.4}  # a_sgd is half e to this
PRINTED = {0: 0.009158, 2: 0.020381, 4: 0.045359, 5: 0.067668, 6: 0.100948, 8: 0.224664, 9: 0.335160}


@each(literal=[False, True], epoch=ROOTS)
def test_the_share_of_sgd_rises_exponentially_to_one_half(literal, epoch):
    share = schedules.rmsprop_warmup(literal=literal)(epoch)
    assert share == pytest.approx(math.exp(ROOTS[epoch]) / 2, rel=1e-14)
    assert share == pytest.approx(PRINTED[epoch], abs=5e-7)


@each(**{"literal, values": [(False, (0.5, 0.7, 0.9, 1, 1)), (True, (0.5, 0.9, 1.3, 1, 1))]})
def test_the_share_of_sgd_after_the_centre(literal, values):
    share = schedules.rmsprop_warmup(10, 5, literal)
    assert [share(epoch) for epoch in (10, 11, 12, 12.5, 90)] == pytest.approx(values, rel=1e-14)


def test_the_share_of_sgd_is_smooth_at_the_centre_and_continuous_at_its_end():
    share, h = schedules.rmsprop_warmup(), 1e-6
    for side in (-h, h):
        assert (share(10 + side) - share(10)) / side == pytest.approx(0.2, rel=1e-5)
    assert share(12.5 - 1e-9) == pytest.approx(1, abs=1e-9)
    assert schedules.rmsprop_warmup(literal=True)(12.5 - 1e-9) == pytest.approx(1.5, abs=1e-8)


def test_the_share_of_sgd_by_whole_epochs():
    share = schedules.rmsprop_warmup(literal=True, whole_epochs=True)
    assert [share(12 + k / 10) for k in range(10)] == pytest.approx([1.3] * 10)
    assert share(9.9) == share(9) == pytest.approx(math.exp(-0.4) / 2)


def test_another_centre_and_period():
    share = schedules.rmsprop_warmup(4, 2)
    assert [share(e) for e in (3, 4, 4.5, 5)] == pytest.approx([math.exp(-1) / 2, 0.5, 0.75, 1])


@each(n=[1024, 8])
def test_akibas_slow_start(n):
    base = 0.1 * n * 32 / 256
    rate = schedules.step(base, 0.1, (0, 40, 70, 85), (0.5, 0.075, 0.01, 0.001))
    expected = {1024: (6.4, 6.4, 0.96, 0.128, 0.0128, 0.0128), 8: (0.05, 0.05, 0.0075, 0.001, 0.0001, 0.0001)}[n]
    assert [rate(epoch) for epoch in (0, 39.99, 40, 70, 85, 89.99)] == pytest.approx(expected, rel=1e-14)


def test_factors_hold_from_their_milestones_on():
    rate = schedules.step(2.0, 0.1, (3, 5), (0.25, 4))
    assert [rate(epoch) for epoch in (0, 2.9, 3, 4.9, 5, 9)] == [2, 2, 0.5, 0.5, 8, 8]
    with pytest.raises(ValueError, match="expected 2 factors, one for each milestone, got 1"):
        schedules.step(2.0, 0.1, (3, 5), (0.25,))


def test_goyals_gradual_warm_up_at_a_batch_of_8192():
    steps = schedules.step(3.2, 0.1, (30, 60, 80))
    rate = schedules.warmup(steps, 5, 0.1)
    values = [rate(t / 157) for t in range(90 * 157)]
    assert [values[t] for t in (0, 157, 314, 785)] == pytest.approx([0.1, 0.72, 1.34, 3.2], rel=1e-14)
    assert [b - a for a, b in itertools.pairwise(values[:786])] == pytest.approx([3.1 / 785] * 785, rel=1e-9)
    assert [values[157 * epoch] for epoch in (29, 30, 60, 80, 89)] == pytest.approx([3.2, 0.32, 0.032, 0.0032, 0.0032])


def test_ffcvs_rates_are_those_of_its_published_log():
    """The last rates of epochs 0, 1 and 15 of the run over 16 epochs, 312 steps each."""
    rate = schedules.piecewise_linear(1.7, ((0, 1e-4), (2, 1), (16, 0)))
    assert [rate(e) for e in (0, 1, 2, 16, 17)] == pytest.approx([1.7e-4, 0.850085, 1.7, 0, 0], abs=1e-15)
    last = [rate(epoch + 311 / 312) for epoch in (0, 1, 15)]
    assert last == pytest.approx([0.847360913, 1.697275913, 0.000389194], abs=5e-10)


def test_a_schedule_by_whole_epochs_keeps_the_value_of_their_beginning():
    """torchvision's cosine: 5 epochs of warm-up from a hundredth, then 595 values."""
    rate = schedules.by_whole_epochs(schedules.warmup(schedules.cosine(0.5, 600, begin=5), 5, 0.005))
    assert [rate(e) for e in (0, 0.99, 1, 4.5)] == pytest.approx([0.005, 0.005, 0.104, 0.401], rel=1e-14)
    for epoch in (5, 6, 300, 599):
        expected = 0.25 * (1 + math.cos(math.pi * (epoch - 5) / 595))
        assert rate(epoch) == rate(epoch + 0.999) == pytest.approx(expected, rel=1e-14)


def test_piecewise_linear_is_constant_outside_its_points():
    rate = schedules.piecewise_linear(2.0, ((1, 0.5), (3, 1.5)))
    assert [rate(e) for e in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 3]
    with pytest.raises(ValueError, match="expected points with rising epochs"):
        schedules.piecewise_linear(1.0, ((1, 0.5), (1, 1.0)))


@each(
    **{
        "base, warmup, total, middle": [
            (21.2, 16, 58, 5.300075),
            (17.0, 5, 44, 4.250075),
            (24.699, 31, 89, 6.174825),
        ]
    }
)
def test_mlperfs_polynomial_begins_at_the_end_of_the_warm_up(base, warmup, total, middle):
    rate = schedules.warmup(schedules.polynomial(base, total, 2, 1e-4, begin=warmup), warmup)
    found = [rate(e) for e in (0, warmup / 2, warmup, (warmup + total) / 2, total)]
    assert found == pytest.approx([0, base / 2, base, middle, 1e-4], rel=1e-12)


def test_a_cosine_begins_at_the_end_of_the_warm_up():
    rate = schedules.warmup(schedules.cosine(2.048, 90, begin=8), 8)
    assert [rate(e) for e in (0, 4, 8, 49, 90)] == pytest.approx([0, 1.024, 2.048, 1.024, 0], abs=1e-14)


# ---- Schedules at parts of an epoch, against exact fractions ----


# Examples of the dataset and of a batch, and a period in epochs as users write it.
RUNS = [(n, b, period) for n, b in ((10, 1), (100, 10), (50000, 128), (7, 1), (1000, 3), (60000, 64))
        for period in ("0.1", "0.3", "0.7", "1", "2.5", "30")]  # fmt: skip


def positions(n, b):
    """Epochs as loaders count them, exact and as a float: the first steps, and some after a long run."""
    for start in (0, 90 * n, 10_000 * n):
        for step in range(60):
            samples = start + step * b
            yield Fraction(samples, n), samples // n + samples % n / n


@each(**{"n, b, period": RUNS})
def test_stairs_count_whole_periods(n, b, period):
    schedule = schedules.stairs(1.0, 0.5, float(period))
    for exact, epoch in positions(n, b):
        if exact < 1000:  # of more periods nothing is left
            assert schedule(epoch) == 0.5 ** (exact // Fraction(period)), (epoch, period)


@pytest.mark.slow
@each(**{"n, b, period": RUNS})
def test_milestones_are_reached_by_the_step_that_reaches_them(n, b, period):
    points = [float(Fraction(period) * k) for k in range(1, 30)]
    schedule = schedules.step(1.0, 0.5, points)
    for exact, epoch in positions(n, b):
        assert schedule(epoch) == 0.5 ** sum(exact >= Fraction(period) * k for k in range(1, 30)), (epoch, period)


@pytest.mark.slow
@each(**{"n, b, period": RUNS})
def test_triggers_fire_with_the_step_that_ends_a_period(n, b, period):
    interval, manual = IntervalTrigger(float(period), "epoch"), ManualScheduleTrigger([float(period)], "epoch")
    before, last = Fraction(0), 0.0
    for exact, epoch in list(positions(n, b))[1:]:
        if exact < before:
            continue
        updater = SimpleNamespace(epoch_detail=epoch, previous_epoch_detail=last, iteration=1)
        trainer = SimpleNamespace(updater=updater)
        wanted = exact // Fraction(period) != before // Fraction(period)
        assert interval(trainer) == wanted, (epoch, period)
        assert manual(trainer) == (before < Fraction(period) <= exact), (epoch, period)
        before, last = exact, epoch
