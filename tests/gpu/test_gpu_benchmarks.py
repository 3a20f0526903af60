"""The benchmarks for GPUs run with tiny sizes on the host, and say in one line what they miss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_device

ROOT = Path(__file__).resolve().parents[2]


def run(script, *arguments, **env):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **env})


@pytest.mark.parametrize(
    "script, arguments, expected",
    [
        ("memory.py", [], ["update MomentumSGD", "update LARS", "copy allreduce", "GB/s"]),
        ("steps.py", ["--models", "mlp", "resnet20"], ["mlp, batch 2, host", "resnet20, batch 2", "examples/s"]),
        ("steps.py", ["--models", "resnet20", "--dtype", "float16"], ["resnet20, batch 2"]),
    ],
)
def test_on_the_host(script, arguments, expected):
    done = run(script, "--on", "numpy", "--rounds", "2", "--seconds", "0", *arguments)
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout


@pytest.mark.parametrize("script", ["memory.py", "steps.py"])
def test_without_a_gpu(script):
    done = run(script, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script} needs a GPU, but CuPy ") and done.stderr.count("\n") == 1


# ---- all of them within a time limit


@pytest.fixture
def jobs(monkeypatch):
    """The module, whose jobs get two seconds of grace."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import jobs

    monkeypatch.setattr(jobs, "_GRACE_SECONDS", 0.5)
    return jobs


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=False)
print(child.pid, flush=True)
time.sleep(600)
"""
POLITE = """
import os, signal, sys, time
def end(*_):
    open(os.path.join(os.environ["OUT"], "partial"), "w").write("what there is")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""


def test_jobs_have_limits_and_leave_what_they_have_done(jobs, tmp_path, capsys):
    todo = [
        jobs.Job("good", jobs.python("-c", "print('done')"), 60),
        jobs.Job("bad", jobs.python("-c", "raise SystemExit('no luck')"), 60),
        jobs.Job("polite", jobs.python("-c", POLITE), 2),
        jobs.Job("stubborn", jobs.python("-c", STUBBORN), 2),
        jobs.Job("last", jobs.python("-c", "import os; print(os.environ['DBRDIST_RECORDS'])"), 60),
    ]
    assert jobs.run(todo, tmp_path / "out", 100) == 3
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["jobs"]
    assert [job["status"] for job in found] == ["passed", "failed", "too long", "too long", "passed"]
    assert found[1]["why"] == "no luck" and "no luck" in capsys.readouterr().out
    assert (tmp_path / "out" / "partial").read_text() == "what there is"
    assert (tmp_path / "out" / "last.log").read_text().strip() == str(tmp_path / "out" / "records")
    child = int((tmp_path / "out" / "stubborn.log").read_text().split()[0])
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_jobs_for_which_no_time_is_left_are_named(jobs, tmp_path):
    todo = [jobs.Job("one", jobs.python("-c", "import time; time.sleep(600)"), 600), jobs.Job("two", ["true"], 5)]
    assert jobs.run(todo, tmp_path, 6.5) == 1
    found = json.loads((tmp_path / "summary.json").read_text())["jobs"]
    assert [job["status"] for job in found] == ["too long", "left out"] and found[1]["why"] == "no time was left"


def test_nothing_begins_without_what_is_needed(jobs, tmp_path):
    todo = [jobs.Job("check", jobs.python("-c", "raise SystemExit('no GPU')"), 60, True), jobs.Job("two", ["true"], 5)]
    assert jobs.run(todo, tmp_path, 60) == 2
    found = json.loads((tmp_path / "summary.json").read_text())["jobs"]
    assert [job["status"] for job in found] == ["failed", "left out"] and found[1]["why"] == "check has not passed"


def test_folders_of_output(jobs, monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path / "env"))
    assert jobs.folder_of(None) == tmp_path / "env" and jobs.folder_of(str(tmp_path)) == tmp_path
    monkeypatch.delenv("OUT")
    assert jobs.folder_of(None) == ROOT / "result" / "gpu"


def test_all_starts_and_ends_without_a_gpu(tmp_path):
    done = run("all.py", "--on", "stand-in", "--only", "benchmarks", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [job["name"] for job in json.loads((tmp_path / "summary.json").read_text())["jobs"]]
    assert names == ["small float32", "memory"] and f"everything is in {tmp_path}" in done.stdout
    records = sorted(path.name.rpartition("-20")[0] for path in (tmp_path / "records").iterdir())
    assert records == ["gpu-memory", "gpu-steps-small-float32"]


@pytest.mark.parametrize("script", ["all.py", "compiled.py"])
def test_both_commands_end_in_words_without_a_gpu(script, tmp_path):
    done = run(script, "--torch-python", sys.executable, OUT=str(tmp_path), CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 1 and "check has not passed" in done.stdout
    assert "GPU" in (tmp_path / "check.log").read_text()


def test_the_jobs_fit_into_eight_minutes(jobs):
    import all as everything
    import compiled

    for todo in (everything.tests("cupy") + everything.benchmarks("cupy", ["--torch"]), compiled.peers("cupy", [])):
        assert len({job.name for job in todo}) == len(todo)
    assert sum(job.seconds for job in everything.tests("cupy")) <= 240
    assert sum(job.seconds for job in everything.benchmarks("cupy", [])) <= 320
