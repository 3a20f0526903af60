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


def test_the_whole_entry_of_a_line(monkeypatch):
    """On a GPU with several ranks; without a step since the last line there is no speed."""
    updater = SimpleNamespace(step_seconds=1.0, data_seconds=0.5, epoch_detail=0.25)
    optimizer = SimpleNamespace(exposed_seconds=0.125)
    monkeypatch.setattr(meter, "peak_bytes", lambda: 1 << 33)
    monkeypatch.setattr(meter, "peak_memory_bytes", lambda: 1 << 30)
    monkeypatch.setattr(meter, "now", lambda: "2026-01-01T00:00:00")
    made = Meter(100, updater, optimizer, "gpu:0")
    entry = {"main/loss": 1.0}
    made(entry)
    memory = {"memory_bytes": 1 << 30, "device_memory_bytes": 1 << 33}
    assert entry == {"main/loss": 1.0, **memory, "epoch_detail": 0.25, "time": "2026-01-01T00:00:00"}
    assert made.position() == (1.0, 25.0, 0.5, 0.125) and made.measures_communication
    vars(updater).update(step_seconds=3.0, data_seconds=1.0, epoch_detail=0.75)
    optimizer.exposed_seconds = 0.625
    made.start()
    vars(updater).update(step_seconds=5.0, data_seconds=1.5, epoch_detail=1.75)
    optimizer.exposed_seconds = 0.875
    entry = {}
    made(entry)
    assert entry == {
        "examples_per_second": 50.0, "data_wait_fraction": 0.25, "communication_fraction": 0.125, **memory,
        "epoch_detail": 1.75, "time": "2026-01-01T00:00:00",
    }  # fmt: skip
    alone = Meter(100, updater)
    assert alone.memory() == {"memory_bytes": 1 << 30} and not alone.measures_communication
    assert alone.position() == (5.0, 175.0, 1.5, 0.0)


def test_the_largest_memory_of_this_process():
    """As Linux tells it elsewhere, in kilobytes."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmHWM:")]
    assert meter.peak_memory_bytes() == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)
