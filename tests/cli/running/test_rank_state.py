"""Tests of dbrdist.cli.running.rank_state."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
from types import SimpleNamespace

import pytest

from dbrdist.cli.running import rank_state
from dbrdist.cli.running.rank_state import RankState, empty_states


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(rank_state.time, "monotonic", lambda: self.now)


def run_of(tmp_path, size=1, rank=0, num_epochs=10.0, measures=True):
    updater = SimpleNamespace(iteration=0, epoch_detail=0.0)
    position = [0.0, 0.0, 0.0, 0.0]
    meter = SimpleNamespace(
        memory=lambda: {"memory_bytes": 1 << 30, "device_memory_bytes": 1 << 40},
        position=lambda: tuple(position), measures_communication=measures,
    )  # fmt: skip
    extension = RankState(str(tmp_path / "ranks"), meter, SimpleNamespace(rank=rank, size=size), num_epochs)
    return extension, SimpleNamespace(updater=updater), position


def state(tmp_path, rank=0):
    return json.loads((tmp_path / "ranks" / f"{rank}.json").read_text())


def test_the_state_has_speed_and_time_left_since_the_last_one(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, position = run_of(tmp_path, rank=3, size=4)
    trainer.updater.iteration, trainer.updater.epoch_detail = 50, 1.0  # it was resumed
    extension.initialize(trainer)
    assert state(tmp_path, 3)["step"] == 50
    clock.now, position[:] = 120.0, [16.0, 800.0, 4.0, 2.0]
    trainer.updater.iteration, trainer.updater.epoch_detail = 90, 3.0
    extension(trainer)
    found = state(tmp_path, 3)
    assert found["seconds_per_step"] == 0.4 and found["examples_per_second"] == 50.0
    assert found["data_wait_fraction"] == 0.25 and found["communication_fraction"] == 0.125
    assert found["seconds_left"] == 70.0 and found["num_epochs"] == 10.0 and found["memory_bytes"] == 1 << 30
    assert found["device_memory_bytes"] == 1 << 40
    clock.now, trainer.updater.iteration = 121.0, 91
    extension(trainer)
    assert state(tmp_path, 3)["step"] == 90  # not due yet
    extension.finalize()
    found = state(tmp_path, 3)
    assert found["step"] == 91 and found["ended"] is True and "error" not in found


@pytest.mark.parametrize(("size", "period"), [(1, 2.0), (200, 2.0), (1000, 10.0)])
def test_many_ranks_write_less_often(tmp_path, monkeypatch, size, period):
    clock = Clock(monkeypatch)
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, _ = run_of(tmp_path, size=size, measures=False)
    extension.initialize(trainer)
    times = []
    for _ in range(1000):
        clock.now += 0.0625
        trainer.updater.iteration += 1
        extension(trainer)
        if not times or state(tmp_path)["step"] != times[-1][0]:
            times.append((state(tmp_path)["step"], clock.now))
    assert times[0][0] == 0 and times[1][1] == 100 + period / 4  # soon after the start
    gaps = [b - a for (_, a), (_, b) in itertools.pairwise(times[1:])]
    assert gaps and all(gap == period for gap in gaps)
    extension.finalize()


def test_a_rank_that_fails_says_why(tmp_path):
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)
    extension.on_error(trainer, ValueError("<bad> " + "x" * 5000), None)
    extension.finalize()
    found = state(tmp_path)
    assert found["ended"] is True and found["error"].startswith("ValueError: <bad> xxx") and len(found["error"]) == 300


def test_without_its_folder_a_rank_writes_nothing_and_goes_on(tmp_path, monkeypatch):
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)
    extension(trainer)
    extension.finalize()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ranks").mkdir()
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)
    trainer.updater.iteration = 7

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_state.os, "pwrite", full)
    extension._due = 0.0
    extension(trainer)
    extension(trainer)
    extension.finalize()
    assert state(tmp_path)["step"] == 0  # as it was before the disk was full


def test_states_of_an_earlier_start_are_removed(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "7.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    empty_states(str(folder))
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("")
    empty_states(str(tmp_path / "file"))


@pytest.mark.parametrize("letter", ["\u753b", "\U0001f600", "\0", '"', "\udcff"])
def test_an_error_in_any_script_is_told(tmp_path, letter):
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)
    extension.on_error(trainer, ValueError(letter * 5000), None)
    extension.finalize()
    found = state(tmp_path)
    assert found["ended"] is True
    kept = 225 if letter == "\U0001f600" else 300  # 12 bytes each in JSON: a quarter is cut off, once, to have 3000
    assert found["error"] == f"ValueError: {letter * 5000}"[:kept]


def test_a_disk_that_is_full_at_the_end_is_no_error(tmp_path, monkeypatch):
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rank_state.os, "pwrite", full)
    extension.finalize()
    extension.finalize()
    assert "ended" not in state(tmp_path)


def test_the_whole_state_of_a_rank(tmp_path, monkeypatch):
    """4096 bytes, so that each state takes the place of the last; shares are at most one."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(rank_state.time, "time", lambda: 1234.5)
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, position = run_of(tmp_path)
    trainer.updater.iteration, trainer.updater.epoch_detail = 5, 0.5
    extension.initialize(trainer)
    start = {"host": socket.gethostname(), "pid": os.getpid(), "num_epochs": 10.0, "time": 1234.5}
    assert state(tmp_path) == {**start, "step": 5, "epoch": 0.5}
    clock.now, position[:] = 110.0, [1.0, 0.0, 0.0, 0.0]  # an evaluation: time passes, and no step is made
    extension(trainer)
    memory = {"memory_bytes": 1 << 30, "device_memory_bytes": 1 << 40}
    assert state(tmp_path) == {**start, **memory, "step": 5, "epoch": 0.5}
    clock.now, position[:], trainer.updater.iteration, trainer.updater.epoch_detail = (
        120.0,
        [3.0, 60.0, 5.0, 7.0],
        7,
        1.5,
    )
    extension(trainer)
    speed = {"seconds_per_step": 1.0, "examples_per_second": 30.0}
    shares = {"data_wait_fraction": 1.0, "communication_fraction": 1.0}
    now = {"step": 7, "epoch": 1.5, "seconds_left": 8.5 * 20}
    assert state(tmp_path) == {**start, **memory, **speed, **shares, **now}
    clock.now, trainer.updater.iteration, trainer.updater.epoch_detail = 130.0, 8, 12.5  # no time was counted
    extension(trainer)
    assert state(tmp_path) == {**start, **memory, **speed, **shares, "step": 8, "epoch": 12.5, "seconds_left": 0.0}
    clock.now, position[:], trainer.updater.iteration = 140.0, [3.5, 70.0, 7.0, 7.0], 9  # one step of half a second
    extension(trainer)
    speed, shares["communication_fraction"] = {"seconds_per_step": 0.5, "examples_per_second": 20.0}, 0.0
    assert state(tmp_path) == {**start, **memory, **speed, **shares, "step": 9, "epoch": 12.5, "seconds_left": 0.0}
    path = tmp_path / "ranks" / "0.json"
    assert (path.stat().st_size, path.stat().st_mode & 0o700) == (4096, 0o600)
    assert (RankState.trigger, RankState.priority) == ((1, "iteration"), 899)  # after the log, before snapshots


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("x" * 400, 300), ("é" * 400, 300), ("😀" * 400, 225),  # 6 bytes and 12 in JSON
        ("x" * 40 + "é" * 5 + "😀" * 243, 300),  # just 3000 bytes, quotes and the name of the class included
        ("x" * 39 + "é" * 6 + "😀" * 243, 225), ("short", 17),
    ],
)  # fmt: skip
def test_an_error_is_cut_to_what_has_room(tmp_path, words, length):
    empty_states(str(tmp_path / "ranks"))
    extension, trainer, _ = run_of(tmp_path)
    extension.initialize(trainer)
    extension.on_error(trainer, ValueError(words), None)
    extension.finalize()
    assert state(tmp_path)["error"] == f"ValueError: {words}"[:length]
    assert (tmp_path / "ranks" / "0.json").stat().st_size == 4096
