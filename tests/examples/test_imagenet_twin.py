"""The twin's command: its plan, and runs that are stopped, killed and started again."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbrdist.cli.configuration import load
from dbrdist.cli.running import rehearsal

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "imagenet" / "twin" / "twin.py"
SMALL = [
    "data.resize=[32, 32]", "batch={virtual_workers: 4, per_worker: 2}", "evaluation.batch=16", "iterations=14",
    "snapshot.every=1 iteration", "snapshot.keep=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def twin():
    spec = importlib.util.spec_from_file_location("twin", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_has_the_runs_that_the_page_promises(twin):
    runs = twin.plan()
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) == 6 + 5 + 1 + 6 + 6 + 4
    epochs = 0.0
    for run in runs:
        config, _ = load.load(PROGRAM.parent / f"{run.config}.yaml", run.words)
        epochs += config.epochs
        assert twin.workers_of(run) == config.virtual_workers
    assert f"All of it is {epochs:g} epochs" in (PROGRAM.parents[1] / "TWIN.md").read_text()


def test_schedules_shrink_with_the_run(twin):
    words = twin.shortened("akiba", 30)
    config, _ = load.load(PROGRAM.parent / "akiba.yaml", words)
    assert config.optimizer.schedule.milestones == pytest.approx((0, 40 / 3, 70 / 3, 85 / 3), abs=1e-4)
    assert config.schedules[0].schedule.center + config.schedules[0].schedule.period / 2 == pytest.approx(
        12.5 / 3, abs=1e-3
    )


def test_an_interval_needs_two_seeds(twin):
    found = {f"{name}{seed}": {"accuracy": 0.5 + 0.01 * seed * (name == "a")} for name in "ab" for seed in range(3)}
    assert twin.difference(found, "a{}", "b{}") == "+1.00 % +- 2.48 (3 seeds)"  # 4.303 / sqrt(3)
    assert twin.difference({}, "a{}", "b{}") == "0 of 3 seeds: no interval yet"


@pytest.mark.slow
@pytest.mark.programs
@pytest.mark.mpiexec
@pytest.mark.timeout(400)
def test_a_run_goes_on_after_each_kind_of_interruption(twin, tmp_path):
    """The same bits as a run that nobody disturbs, on two ranks; nothing is trained again once it is finished."""
    rehearsal.make_photographs(str(tmp_path / "data"))
    words = [sys.executable, str(PROGRAM), str(tmp_path / "data"), *SMALL, "--only", "akiba-30-seed0"]
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}", "PATH": paths, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run([*words, "--out", str(tmp_path / "whole")], env=env, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    cut, codes = tmp_path / "cut", []
    for number, step in ((signal.SIGKILL, 3), (signal.SIGTERM, 6), (signal.SIGINT, 9), (None, 99)):
        step = max(step, newest(cut / "akiba-30-seed0") + 1)
        said = tmp_path / f"said before {step}"
        with said.open("wb") as stdout:
            job = subprocess.Popen([*words, "--out", str(cut)], env=env, stdout=stdout, start_new_session=True)
        # no signal before it handles them; ranks of a killed start may have saved one more step by then
        while job.poll() is None and (not said.stat().st_size or newest(cut / "akiba-30-seed0") < step):
            time.sleep(0.02)
        if number is not None and job.poll() is None:
            job.send_signal(number)
        codes.append(job.wait(120))
    assert codes[-1] == 0
    assert set(codes[:3]) <= {-signal.SIGKILL, twin.STOPPED, 0}  # 0 where it was faster than the signal
    results = [json.loads((tmp_path / out / "results.json").read_text())["runs"] for out in ("whole", "cut")]
    first, second = (found["akiba-30-seed0"] for found in results)
    assert first["hash"] == second["hash"]
    assert first["steps"] == second["steps"] == 14
    again = subprocess.run([*words, "--out", str(cut)], env=env, capture_output=True, text=True)
    assert again.returncode == 0
    assert "dbrdist-train" not in again.stdout


def newest(folder):
    names = [path.name.removeprefix("snapshot_iter_") for path in folder.glob("snapshot_iter_*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
