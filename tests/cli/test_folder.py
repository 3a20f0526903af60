"""A run's folder loses nothing: locks, endings, honest resume, and nothing but data in it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import ROOT, lines, same_runs

import dbrdist
from dbrdist.cli import folder as folders
from dbrdist.cli import lock as locks
from dbrdist.cli.folder import RunFolder
from dbrdist.cli.lock import Lock
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.training.extensions import snapshots


def summary(folder="result"):
    return json.loads(Path(folder, "summary.json").read_text())


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


# ---- what lies in the way ----


def test_a_run_is_not_overwritten_by_a_forgotten_resume(run):
    assert run("run.yaml", "iterations=1")[0] == 0
    before = contents("result")
    code, _, err = run("run.yaml")
    assert code == 2
    assert "result holds a run (finished after 1 step); --resume continues it, --overwrite moves it aside" in err
    assert contents("result") == before


def test_overwrite_moves_the_old_run_aside_and_nothing_else(run):
    assert run("run.yaml", "iterations=5")[0] == 0
    Path("result/notes.tmp-draft.txt").write_text("mine")
    before = contents("result")
    code, out, _ = run("run.yaml", "iterations=2", "--overwrite")
    assert code == 0
    assert "the run that was in result is now in result.old-1" in out
    assert contents("result.old-1") == {k: v for k, v in before.items() if k != "notes.tmp-draft.txt"}
    assert [path.name for path in Path("result").glob("snapshot*")] == ["snapshot_iter_2"]
    assert Path("result/notes.tmp-draft.txt").read_text() == "mine"
    assert len(lines("result/log.jsonl")) == 1
    assert run("run.yaml", "iterations=2", "--overwrite")[0] == 0
    assert snapshots.newest("result.old-2") == "result.old-2/snapshot_iter_2"


@pytest.mark.parametrize("option", [[], ["--resume"], ["--overwrite"]])
def test_a_configuration_of_the_users_is_not_overwritten(run, option):
    text = Path("run.yaml").read_text() + "# with a comment\n"
    Path("config.yaml").write_text(text)
    code, _, err = run("config.yaml", "out=.", *option)
    assert code == 2
    assert "./config.yaml exists and would be overwritten; give the run its own folder" in err
    assert Path("config.yaml").read_text() == text


def test_only_leftovers_of_this_program_are_removed(run):
    os.mkdir("result")
    theirs = ["notes.tmp-1.txt", "data.tmp-17", "snapshot_iter_x.tmp-1", "log.txt.tmp-1.bak", "report.tmp-now"]
    ours = ["snapshot_iter_4.tmp-12", "config.yaml.tmp-12-140", "summary.json.tmp-1-2"]
    for name in theirs + ours:
        Path("result", name).write_text("x")
    assert run("run.yaml")[0] == 0
    left = os.listdir("result")
    assert all(name in left for name in theirs)
    assert not any(name in left for name in ours)


@pytest.mark.parametrize("out", ["run.yaml", "run.yaml/below"])
def test_a_folder_that_cannot_be_made(run, out):
    code, _, err = run("run.yaml", f"out={out}")
    assert code == 2
    assert f"out: the folder '{out}' cannot be created" in err
    assert "Traceback" not in err


def test_a_stored_configuration_that_cannot_be_read_lets_nothing_change_unseen(run):
    assert run("run.yaml")[0] == 0
    stored = Path("result/config.yaml")
    kept = stored.read_bytes()
    for content, words in (
        (b"", "it is damaged"),
        (b"{{{ [", "it is damaged"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
        (None, "there is none"),
    ):
        stored.unlink(missing_ok=True)
        if content is not None:
            stored.write_bytes(content)
        before = sorted(os.listdir("result"))
        code, _, err = run("run.yaml", "--resume", "seed=7", "epochs=9")
        assert code == 2 and f"to see what has changed, but {words}; put a copy of it there" in err, err
        assert sorted(os.listdir("result")) == before
    stored.write_bytes(kept)
    assert "seed: the run began with" in run("run.yaml", "--resume", "seed=7", "epochs=9")[2]


# ---- one process at a time ----

HOLD = """
import sys, time
from dbrdist.cli.folder import RunFolder
from dbrdist.errors import ConfigError
folder = RunFolder(sys.argv[1])
try:
    folder.open("resume")
except ConfigError as error:
    print(error, flush=True)
    sys.exit(2)
print("has it", flush=True)
sys.stdin.read()
folder.close()
"""


def start_holder(folder):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def holder(tmp_path):
    process = start_holder(tmp_path / "held")
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.programs
def test_two_runs_in_one_folder(run, holder):
    code, _, err = run("run.yaml", "out=held")
    assert code == 2
    expected = f"held: a run is writing to this folder (process {holder.pid} on {socket.gethostname()}, since "
    assert expected in err
    assert os.listdir("held") == ["run.lock"]


@pytest.mark.programs
def test_the_lock_of_a_killed_process_is_free(run, holder):
    holder.kill()
    holder.wait()
    assert Path("held/run.lock").exists()
    assert run("run.yaml", "out=held")[0] == 0
    assert not Path("held/run.lock").exists()


def test_double_starts_let_one_through(tmp_path):
    """20 pairs at the same moment, in threads: the kernel's lock belongs to the open file, not to the process."""
    for i in range(20):
        found, barrier = [], threading.Barrier(2)

        def start(folder, found=found, barrier=barrier):
            barrier.wait()
            try:
                folder.open("new")
                found.append(folder)
            except ConfigError as error:
                found.append(str(error))

        pair = [threading.Thread(target=start, args=(RunFolder(str(tmp_path / str(i))),)) for _ in range(2)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        won = [x for x in found if isinstance(x, RunFolder)]
        assert len(won) == 1, found
        won[0].close()


class Clock:
    """Time that passes while somebody sleeps, and then alone; who else lives does so meanwhile."""

    def __init__(self):
        self.now, self.meanwhile, self.naps = 100.0, lambda: None, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps.append(seconds)
        self.meanwhile()

    strftime = staticmethod(time.strftime)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(locks, "time", Clock())
    return locks.time


def test_a_holder_on_another_host_is_looked_for(tmp_path, clock, capfd):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1, "since": "noon"}))
    lock = Lock(str(path))
    lock.acquire()  # nobody touched it
    assert "names process 7 on elsewhere" in capfd.readouterr().out
    assert clock.naps == [1.0] * 35
    lock.release()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1, "since": "noon"}))
    begun = clock.now
    clock.meanwhile = lambda: clock.now >= begun + 10 and os.utime(path, (clock.now, clock.now))  # as a holder does
    with pytest.raises(ConfigError, match=r"process 7 on elsewhere, since noon"):
        Lock(str(path)).acquire()
    assert clock.now < begun + 12
    assert path.exists()


def test_a_file_system_without_locks(tmp_path, clock, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    first, path = Lock(str(tmp_path / "run.lock")), tmp_path / "run.lock"
    first.acquire()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        Lock(str(path)).acquire()
    first.release()
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": dead.pid, "started": 1, "since": "noon"}))
    second = Lock(str(path))
    second.acquire()
    second.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 5}', "\0" * 40, '{"host": 1, "pid": [], "started": {}}'])
def test_a_damaged_lock_is_taken(tmp_path, clock, text):
    path = tmp_path / "run.lock"
    path.write_text(text)
    lock = Lock(str(path))
    lock.acquire()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


# ---- every way to end ----


def test_the_summary_tells_what_runs(run):
    assert run("run.yaml", "out=here")[0] == 0
    told = summary("here")
    assert told["status"] == "finished" and told["reason"] is None
    assert told["command"] == "dbrdist-train run.yaml out=here"
    assert told["hosts"] == {socket.gethostname(): 1}
    assert told["pid"] == os.getpid()
    assert told["num_ranks"] == 1
    assert told["versions"]["numpy"] == np.__version__
    assert told["began"] <= told["ended"]
    assert told["earlier_starts"] == []
    text = Path("here/log.txt").read_text()
    assert "dbrdist-train run.yaml out=here" in text
    assert "finished: " in text and "examples/s" in text


def test_a_run_that_goes_on_begins_with_a_summary_of_its_own(run, monkeypatch):
    """What is told of the start before lies among the earlier starts alone."""
    written, write = [], folders.write_json

    def noting(path, data, num_blanks=0):
        written.append(dict(data))
        write(path, data, num_blanks)

    assert run("run.yaml", "iterations=1")[0] == 0
    monkeypatch.setattr(folders, "write_json", noting)
    assert run("run.yaml", "iterations=2", "--resume")[0] == 0
    first = next(data for data in written if data.get("status") == "running")
    assert first["reason"] is None and "ended" not in first and "iterations" not in first
    (earlier,) = first["earlier_starts"]
    assert (earlier["status"], earlier["iterations"]) == ("finished", 1) and earlier["ended"]
    assert summary()["iterations"] == 2


ENDINGS = """
import os, signal, sys
import usernet

class Net(usernet.Net):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        import dbrdist
        if dbrdist.config.train and self.steps == 2:
            if self.how == "exit":
                sys.exit(0)
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "nan":
                x = x * float("nan")
            if self.how == "raise":
                raise RuntimeError("my own mistake")
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("exit", SystemExit, "the program called sys.exit(0)"),
        ("interrupt", KeyboardInterrupt, "interrupted (Ctrl-C)"),
        ("raise", RuntimeError, "RuntimeError: my own mistake"),
        ("nan", None, "NonFiniteLossError: iteration 3"),
    ],
)
def test_each_ending_is_written_down(run, folder, how, kind, reason):
    (folder / "ends.py").write_text(ENDINGS)
    words = ("run.yaml", f"model={{name: 'ends:Net', args: {{how: {how}}}}}")
    try:
        if kind is None:
            assert run(*words)[0] == 1
        else:
            with pytest.raises(kind) as raised:
                run(*words)
            if kind is SystemExit:
                assert raised.value.code == "dbrdist-train: the program called sys.exit(0) before the run was over"
    finally:
        sys.modules.pop("ends", None)
    told = summary()
    assert told["status"] == "failed"
    assert told["reason"].startswith(reason)
    assert not Path("result/run.lock").exists()


@pytest.mark.slow
def test_a_killed_run_is_seen_at_the_next_start(ranks, run, folder):
    (folder / "ends.py").write_text(ENDINGS)
    words = ("run.yaml", "model={name: 'ends:Net', args: {how: kill}}", "snapshot.every=2 iterations")
    process = ranks(0, *words)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert summary()["status"] == "running"
    assert folders.describe("result").startswith("failed")
    code, out, err = run("run.yaml", "model={name: 'ends:Net', args: {how: go}}", "--resume")
    sys.modules.pop("ends", None)
    assert code == 0, err
    assert "the last start of this run failed: its process ended without a report" in out
    told = summary()
    assert told["status"] == "finished"
    assert [start["status"] for start in told["earlier_starts"]] == ["failed"]
    assert told["earlier_starts"][0]["reason"] == folders.KILLED


@pytest.mark.programs
def test_a_reader_that_goes_away_does_not_end_the_run(folder):
    """`dbrdist-train run.yaml | head -1`"""
    command = f"{sys.executable} -m dbrdist.cli.train run.yaml 'log.every=1 iteration' iterations=8 | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model: ")
    assert summary()["status"] == "finished"
    assert summary()["iterations"] == 8
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# ---- honest resume ----


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["seed=1"], "seed: the run began with 0 and cannot continue with 1"),
        (["dtype=float64"], "dtype: the run began with float32"),
        (["optimizer.name=nesterov_ag"], "optimizer.name: the run began with momentum_sgd"),
        (["loss_scale=4"], "loss_scale: the run began with auto"),
        (["seed=1", "dtype=float64"], "dtype: the run began with float32"),
    ],
)
def test_what_a_snapshot_decides_is_refused_by_name(run, words, key):
    assert run("run.yaml", "iterations=2")[0] == 0
    before = contents("result")
    code, _, err = run("run.yaml", "--resume", *words)
    assert code == 2
    assert key in err
    assert err.count("command line") == len(words)
    assert contents("result") == before
    assert run("run.yaml", "--resume")[0] == 0  # the folder was given back


def test_changed_hyperparameters_are_applied_and_named(run):
    words = ("run.yaml", "log.every=1 iteration", "optimizer.schedule=constant")
    assert run(*words, "iterations=2")[0] == 0
    changed = ("optimizer.momentum=0.1", "optimizer.lr=0.01")
    code, out, _ = run(*words, "iterations=4", *changed, "--resume")
    assert code == 0
    assert "optimizer.momentum is now 0.1, was 0.9" in out
    assert "optimizer.lr is now 0.01, was 0.05" in out
    assert "iterations is now 4, was 2" in out
    saved = np.load(snapshots.newest("result"))
    assert float(saved["updater/optimizer:main/hyperparam/momentum"]) == 0.1
    assert float(saved["updater/optimizer:main/hyperparam/lr"]) == 0.01
    assert [entry["lr"] for entry in lines("result/log.jsonl")] == [0.05, 0.05, 0.01, 0.01]


def test_an_unchanged_resume_names_nothing(run):
    run("run.yaml", "iterations=2")
    _, out, _ = run("run.yaml", "iterations=2", "--resume")
    assert " is now " not in out


def test_a_damaged_newest_snapshot_costs_no_later_one(run):
    words = ("run.yaml", "snapshot.every=2 iterations", "snapshot.keep=1")
    assert run(*words, "iterations=4", "snapshot.keep=2")[0] == 0
    bad = Path("result/snapshot_iter_4")
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 4
    bad.write_bytes(data)
    code, out, _ = run(*words, "iterations=4", "--resume")
    assert code == 0
    said = "result/snapshot_iter_4 is damaged and was skipped: its bytes are not those that were saved"
    assert said in " ".join(out.split()) and said in Path("result/log.txt").read_text()
    assert "continuing from result/snapshot_iter_2" in out
    assert Path("result/damaged_snapshot_iter_4").read_bytes() == data
    assert snapshots.newest("result") == "result/snapshot_iter_4"
    assert run(*words, "iterations=4", "out=straight")[0] == 0
    same_runs("straight", "result")


def test_steps_are_announced_as_they_are_run(run):
    _, out, _ = run("run.yaml", "iterations=1000", "epochs=1")
    assert "steps: 15 per epoch, about 15 in all" in out
    assert summary()["iterations"] == 15


# ---- data, never code ----


def test_a_folder_runs_no_code(run, monkeypatch):
    run("run.yaml", "model=mlp")
    recipe = json.loads(Path("result/model.json").read_text())
    for bad in (
        "os:system",
        "dbrdist.models:os",
        "dbrdist.models:__builtins__.eval",
        "dbrdist.cli.train:main",
        ":",
        "",
    ):
        Path("result/model.json").write_text(json.dumps({**recipe, "callable": bad, "args": {"command": "touch ran"}}))
        with pytest.raises(CheckpointError, match="no code is run because a folder names it"):
            dbrdist.load("result")
    for damaged in ("", "[]", "{}", "[" * 10000, '{"callable": 1, "args": {}, "dtype": "float32"}'):
        Path("result/model.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="expected"):
            dbrdist.load("result")
    Path("result/model.json").write_text(json.dumps({**recipe, "args": {"unit": 3}}))
    with pytest.raises(CheckpointError, match="the network cannot be made"):
        dbrdist.load("result")
    assert not Path("ran").exists()


def test_evaluate_runs_only_code_that_was_named(run, folder, monkeypatch):
    run("run.yaml")
    code, _, err = run("--evaluate", "result")
    assert code == 2
    assert "model, transforms.train.1: this is your own code, and no code is run because a folder names it" in err
    code, _, err = run("--evaluate", "result", "model.name=usernet:Net", "transforms.train=[]")
    assert code == 0, err
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    sys.modules.pop("usernet", None)
    code, out, err = run("../run.yaml", "--evaluate", "../result")  # its modules lie beside it
    assert code == 0, err
    assert json.loads(out)["snapshot"] == "../result/snapshot_iter_3"


def test_wait_is_not_needed_for_a_clean_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: pytest.fail("it waits"))
    folder = RunFolder(str(tmp_path / "x"))
    folder.open("new")
    folder.close()
    assert os.listdir(tmp_path / "x") == []
