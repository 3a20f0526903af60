"""dbrdist-train tells dbrdist-launch that it makes progress."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from dbrdist_launch import heartbeat

from dbrdist.cli.output import beats
from dbrdist.cli.output.folder import SUMMARY, read_json
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT


def trainer(iteration):
    updater = SimpleNamespace(iteration=iteration, epoch_detail=iteration / 10)
    return SimpleNamespace(updater=updater, observation={"main/loss": np.float32(0.5)})


@pytest.fixture
def page(tmp_path, monkeypatch):
    path = tmp_path / "page"
    path.write_bytes(bytes(heartbeat.PAGE_BYTES))
    monkeypatch.setattr(heartbeat, "_writer", heartbeat._Writer(str(path)))
    return path


def test_step_and_loss_travel_and_the_long_part_is_a_pause(page):
    beats.ProgressBeat()(trainer(7))
    found = heartbeat.read(page.read_bytes())
    assert (found.step, found.paused, found.fields) == (7, True, {"epoch": 0.7, "loss": 0.5})
    beats.Resume()(trainer(7))
    assert not heartbeat.read(page.read_bytes()).paused


@pytest.mark.parametrize("loss", [None, "none", np.ones(2)])
def test_a_loss_that_is_no_number_does_not_travel(page, loss):
    given = trainer(7)
    given.observation["main/loss"] = loss
    beats.ProgressBeat()(given)
    assert heartbeat.read(page.read_bytes()).fields == {"epoch": 0.7}


def test_evaluation_and_snapshots_lie_within_the_pause():
    assert beats.ProgressBeat.priority > 300 > PRIORITY_SNAPSHOT > beats.Resume.priority


def test_without_the_launcher_nothing_is_read(monkeypatch):
    monkeypatch.setattr(heartbeat, "_writer", None)
    beats.ProgressBeat()(SimpleNamespace())
    beats.Resume()(SimpleNamespace())


@pytest.mark.parametrize("is_active", [False, True])
def test_a_run_under_the_launcher_beats_and_ends_its_pauses(run, monkeypatch, is_active):
    from dbrdist_launch import heartbeat

    said = []
    writer = SimpleNamespace(
        beat=lambda step, fields: said.append((step, sorted(fields))), pause=lambda: said.append("pause")
    )
    monkeypatch.setattr(heartbeat, "_writer", writer if is_active else None)
    assert beats.expected() == is_active
    code, out, _ = run("run.yaml", "model=mlp", "iterations=2")
    summary = read_json(f"result/{SUMMARY}")
    assert code == 0 and "\nmemory: about " in out and 0 < summary["seconds"] < 1e6
    wanted = [said for step in (1, 2) for said in ((step, ["epoch", "loss"]), "pause", (step, []))]
    assert said == (wanted if is_active else [])
