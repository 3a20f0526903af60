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

import numpy as np
import pytest

from dbrdist.cli.configuration import load
from dbrdist.cli.running import rehearsal

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "imagenet" / "twin" / "twin.py"
STEPS = 40
SMALL = [
    "data.resize=[32, 32]", "batch={virtual_workers: 4, per_worker: 2}", "evaluation.batch=16", f"iterations={STEPS}",
    "snapshot.every=1 iteration", "snapshot.keep=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def twin():
    spec = importlib.util.spec_from_file_location("twin", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
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


def test_words_may_stand_after_options(twin):
    args = twin.arguments(["images", "--only", "akiba-10-*", "iterations=78", "--ranks", "1", "seed=2"])
    assert (args.data, args.more, args.ranks) == ("images", ["iterations=78", "seed=2"], 1)


@pytest.fixture
def opened(twin, monkeypatch):
    """A Twin that leaves the signals of these tests alone."""
    monkeypatch.setattr(twin.signal, "signal", lambda *_: None)
    return lambda *arguments: twin.Twin("images", *arguments)


def finish(twin, folder, run, accuracies):
    """What a finished run leaves, as far as the program reads it."""
    summary = {"status": "finished", "iterations": 2, "num_ranks": 2, "seconds_over_all_starts": 3.25, "version": "1.0"}
    (folder / run.name).mkdir(parents=True)
    (folder / run.name / "summary.json").write_text(json.dumps(summary))
    log = [json.dumps({"validation/main/accuracy": value, "main/loss": 1.5}) for value in accuracies]
    (folder / run.name / "log.jsonl").write_text("\n".join(log))
    np.savez(folder / run.name / "snapshot_iter_2", **{"updater/model:W": np.arange(3)})
    (folder / run.name / "snapshot_iter_2.npz").rename(folder / run.name / "snapshot_iter_2")


def test_finished_runs_outlive_their_machine(twin, opened, tmp_path, capsys):
    """Another machine, with nothing but the file of results, trains none of them again, and adds its own."""
    first, second, *_ = twin.plan()
    file = tmp_path / "results.json"
    finish(twin, tmp_path / "here", first, [0.5, 0.75, 0.625])
    here = opened(tmp_path / "here", (), file)
    twin.report(here, [first])
    kept = json.loads(file.read_text())["runs"]
    assert kept[first.name]["accuracy"] == 0.625
    assert kept[first.name]["curve"] == [0.5, 0.75, 0.625]

    finish(twin, tmp_path / "there", second, [0.25, 0.5])
    there = opened(tmp_path / "there", (), file)
    assert [there.status(run) for run in twin.plan()[:3]] == ["finished", "finished", "new"]
    there.train(first, 2)  # starts nothing
    twin.report(there, [second])
    found = json.loads(file.read_text())
    assert found["runs"].keys() == {first.name, second.name}
    assert found["runs"][first.name] == kept[first.name]
    assert f"{first.name} " not in capsys.readouterr().out.split(f"{second.name} ")[-1]
    assert len(file.read_text().splitlines()) < 12  # a line for each run


def test_results_of_other_settings_are_not_taken_for_a_run(twin, opened, tmp_path):
    run = twin.plan()[0]
    file = tmp_path / "results.json"
    finish(twin, tmp_path / "here", run, [0.5])
    here = opened(tmp_path / "here", (), file)
    twin.report(here, [])
    changed = run._replace(words=(*run.words, "optimizer.lr=0.25"))
    assert opened(tmp_path / "there", (), file).status(run) == "finished"
    assert opened(tmp_path / "there", (), file).status(changed) == "new"
    assert opened(tmp_path / "there", ("iterations=78",), file).status(run) == "new"
    assert opened(tmp_path / "there", ("iterations=78",)).results == tmp_path / "there" / "results.json"
    assert here.settings(run) != here.settings(changed)


def test_two_programs_add_to_one_file(twin, opened, tmp_path):
    """Each began before the other had finished a run."""
    first, second, *_ = twin.plan()
    file = tmp_path / "results.json"
    programs = [opened(tmp_path / name, (), file) for name in "ab"]
    finish(twin, tmp_path / "a", first, [0.5])
    finish(twin, tmp_path / "b", second, [0.25])
    for program in programs:
        twin.report(program, [])
    assert {name: line["accuracy"] for name, line in json.loads(file.read_text())["runs"].items()} == {
        first.name: 0.5, second.name: 0.25,
    }  # fmt: skip


def test_results_of_other_settings_stay_until_the_run_is_done_again(twin, opened, tmp_path):
    run = twin.plan()[0]
    file = tmp_path / "results.json"
    finish(twin, tmp_path / "here", run, [0.5])
    twin.report(opened(tmp_path / "here", (), file), [])
    kept = file.read_text()
    changed = opened(tmp_path / "there", ("iterations=78",), file)
    twin.report(changed, [run])
    assert file.read_text() == kept
    finish(twin, tmp_path / "there", run, [0.75])
    twin.report(changed, [run])
    assert json.loads(file.read_text())["runs"][run.name]["accuracy"] == 0.75


@pytest.mark.parametrize("accuracies", [[], [0.1]])
def test_a_part_of_a_run_does_not_replace_its_results(twin, opened, tmp_path, accuracies):
    """Another machine finished it, before this one did."""
    run = twin.plan()[0]
    file = tmp_path / "results.json"
    finish(twin, tmp_path / "there", run, [0.5, 0.75])
    twin.report(opened(tmp_path / "there", (), file), [])
    finish(twin, tmp_path / "here", run, accuracies)
    summary = tmp_path / "here" / run.name / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "stopped"))
    twin.report(opened(tmp_path / "here", (), file), [run])
    assert json.loads(file.read_text())["runs"][run.name]["curve"] == [0.5, 0.75]


@pytest.mark.parametrize("text", ["", "<<<<<<< ours\n{}", "[]", "{}", '{"runs": []}', '{"runs": {"a": {}}}'])
def test_a_damaged_file_of_results_is_named(twin, opened, tmp_path, text):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match=r"results\.json is no file of results"):
        opened(tmp_path, (), file)
    assert file.read_text() == text


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
    for number, more in ((signal.SIGKILL, 3), (signal.SIGTERM, 3), (signal.SIGINT, 3), (None, 99)):
        step = newest(cut / "akiba-30-seed0") + more
        job = subprocess.Popen([*words, "--out", str(cut)], env=env, start_new_session=True)
        while job.poll() is None and newest(cut / "akiba-30-seed0") < step:
            time.sleep(0.02)
        if number is not None and job.poll() is None:
            job.send_signal(number)
        codes.append(job.wait(120))
        # the ranks of a killed start save and end by themselves, and none trains on
        while subprocess.run(["pgrep", "-f", str(cut)], stdout=subprocess.DEVNULL).returncode == 0:
            time.sleep(0.02)
        assert newest(cut / "akiba-30-seed0") < STEPS or number is None
    assert codes == [-signal.SIGKILL, twin.STOPPED, twin.STOPPED, 0]
    results = [json.loads((tmp_path / out / "results.json").read_text())["runs"] for out in ("whole", "cut")]
    first, second = (found["akiba-30-seed0"] for found in results)
    assert first["hash"] == second["hash"]
    assert first["steps"] == second["steps"] == STEPS
    again = subprocess.run([*words, "--out", str(cut)], env=env, capture_output=True, text=True)
    assert again.returncode == 0
    assert "dbrdist-train" not in again.stdout


def newest(folder):
    names = [path.name.removeprefix("snapshot_iter_") for path in folder.glob("snapshot_iter_*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
