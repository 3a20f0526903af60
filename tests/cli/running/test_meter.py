"""Tests of dbrdist.cli.running.meter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dbrdist.cli.running import meter
from dbrdist.cli.running.meter import Meter
from tests.each import each


@each(speed=[None, 10.0], waited=[0.0, 0.004, 0.005, 0.5])
def test_a_meter_names_waiting_that_is_any(speed, waited):
    own = SimpleNamespace(_at_look=(0.0,) * 4, position=lambda: (1.0,) * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "_speed", lambda before, after: (speed, waited, 0.0))
        text = meter.Meter.words(own, None)
    more = f", {100 * waited:.0f} % waiting for data" if waited >= 0.005 else ""
    assert text == ("0 examples/s" if speed is None else f"10 examples/s{more}")


def test_the_speed_between_two_looks():
    assert meter._speed((1.0, 10.0, 0.5, 0.25), (3.0, 50.0, 1.0, 0.5)) == (20.0, 0.25, 0.125)
    assert meter._speed((1.0, 10.0, 0.5, 0.25), (3.0, 50.0, 9.0, 9.0)) == (20.0, 1.0, 1.0)
    for after in ((1.0, 50.0, 9.0, 9.0), (0.5, 50.0, 9.0, 9.0)):
        assert meter._speed((1.0, 10.0, 0.5, 0.25), after) == (None, 0.0, 0.0)


@pytest.mark.slow
def test_the_meter_measures_between_lines():
    class Updater:
        step_seconds = data_seconds = epoch_detail = 0.0

    updater, entry = Updater(), {}
    meter = Meter(1000, updater)
    meter.start()
    updater.step_seconds, updater.data_seconds, updater.epoch_detail = 4.0, 1.0, 0.5
    meter(entry)
    assert (entry["examples_per_second"], entry["data_wait_fraction"]) == (125.0, 0.25)
    assert meter.words(None) == "125 examples/s, 25 % waiting for data"
    updater.step_seconds, updater.epoch_detail = 5.0, 2.5
    assert meter.words(None) == "2,000 examples/s"
    meter(entry)
    assert (entry["examples_per_second"], entry["data_wait_fraction"]) == (2000.0, 0.0)
    assert meter.words(None) == "0 examples/s"


@pytest.mark.slow
def test_the_meter_of_several_ranks_tells_what_communication_took():
    class Updater:
        step_seconds = data_seconds = epoch_detail = exposed_seconds = 0.0

    updater, entry = Updater(), {}
    meter = Meter(1000, updater, optimizer=updater)
    updater.step_seconds, updater.exposed_seconds, updater.epoch_detail = 4.0, 1.5, 0.5
    meter(entry)
    assert entry["communication_fraction"] == 0.375
    updater.step_seconds, updater.exposed_seconds = 5.0, 1.75
    meter(entry)
    assert entry["communication_fraction"] == 0.25
    assert "device_memory_bytes" not in entry
