"""A run's folder loses nothing: locks, endings, honest resume, and nothing but data in it."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import dbrdist
from dbrdist.cli.output import folder
from dbrdist.cli.output import folder as folders
from dbrdist.cli.output import lock as locks
from dbrdist.cli.output.folder import KILLED, LOCK, SUMMARY, RunFolder, earlier_starts, read_json, write_json
from dbrdist.errors import CheckpointError, ConfigError
from dbrdist.training.extensions import snapshots
from tests.cli.cli_helpers import ROOT, lines
from tests.each import each


def summary(folder="result"):
    return json.loads(Path(folder, "summary.json").read_text())


def contents_of(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


# ---- what lies in the way ----
def test_a_run_is_not_overwritten_by_a_forgotten_resume(run):
    assert run("run.yaml", "iterations=1")[0] == 0
    before = contents_of("result")
    code, _, err = run("run.yaml")
    assert code == 2
    assert "result holds a run (finished after 1 step); --resume continues it, --overwrite moves it aside" in err
    assert contents_of("result") == before


def test_overwrite_moves_the_old_run_aside_and_nothing_else(run):
    assert run("run.yaml", "iterations=5")[0] == 0
    Path("result/notes.tmp-draft.txt").write_text("mine")
    before = contents_of("result")
    code, out, _ = run("run.yaml", "iterations=2", "--overwrite")
    assert code == 0
    assert "the run that was in result is now in result.old-1" in out
    assert contents_of("result.old-1") == {k: v for k, v in before.items() if k != "notes.tmp-draft.txt"}
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


def test_the_end_of_a_run_is_written_in_brief_where_the_disk_is_full(tmp_path, monkeypatch):
    one = RunFolder(str(tmp_path))
    one.write_status("running", began="now")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_json", full)
    one.write_status("running", began="later")  # without its blanks; what is there stays
    one.write_status("failed", "x" * 20000, epochs=3)
    size, found = (tmp_path / SUMMARY).stat().st_size, json.loads((tmp_path / SUMMARY).read_text())
    assert found == {"status": "failed", "reason": "x" * 2000, "began": "later"} and size < 1 << 15
    one.summary = {}
    one.write_status("failed", None, note="y" * 20000)
    assert json.loads((tmp_path / SUMMARY).read_text()) == {"status": "failed", "reason": None}
    one.summary = {"note": "y" * 20000}
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", None)


@each(n=[0, 1, 4, 5])
def test_a_file_is_overwritten_where_its_room_suffices(n):
    with tempfile.TemporaryDirectory() as place:
        path = pathlib.Path(place, "x")
        path.write_bytes(b"abcd")
        assert folder._overwrite(str(path), b"z" * n) == (n <= 4)
        assert path.read_bytes() == (b"z" * n).ljust(4) if n <= 4 else b"abcd"
        assert not folder._overwrite(str(path) + "none", b"")


def test_a_run_that_is_taken_up_again_is_told_how_it_stood(tmp_path):
    for before, after in (
        ({"status": "running", "reason": None, "iterations": 7},
         {"status": "failed", "reason": KILLED, "iterations": 7}),
        ({"status": "stopped", "reason": "asked"}, {"status": "stopped", "reason": "asked"}),
        ({"status": "finished"}, {"status": "finished"}), ({}, {}),
    ):  # fmt: skip
        write_json(str(tmp_path / SUMMARY), before)
        folder = RunFolder(str(tmp_path))
        folder.open("resume")
        folder.close()
        assert folder.summary == after and not (tmp_path / LOCK).exists()


def test_earlier_starts_keep_what_tells_them_apart():
    start = {"status": "stopped", "reason": "asked", "began": "1", "ended": "2", "iterations": 3, "command": "c",
             "hosts": {"a": 1}, "version": "v", "commit": "d"}  # fmt: skip
    assert earlier_starts({}) == [] == earlier_starts({"earlier_starts": [1]})
    assert earlier_starts({**start, "seed": 1}) == [start]
    assert earlier_starts({"status": "failed", "earlier_starts": [start]}) == [start, {"status": "failed"}]


@each(damaged=[3, "x", None, {"status": "failed"}])
def test_damaged_earlier_starts_are_left_out(damaged):
    found = earlier_starts({"status": "finished", "earlier_starts": damaged})
    assert found == [{"status": "finished"}]


def test_a_summary_is_no_longer_than_it_may_be(tmp_path):
    """While a run goes on, 16 KiB of blanks follow its summary; the end is written over them where the disk is full."""
    folder = RunFolder(str(tmp_path))
    folder.write_status("running", began="now")
    path = tmp_path / SUMMARY
    text = '{\n  "status": "running",\n  "reason": null,\n  "began": "now"\n}\n'
    assert path.read_text() == text + " " * 16384
    folder.write_status("failed", "why")
    assert path.read_text() == text.replace("running", "failed").replace("null", '"why"')
    assert read_json(str(path)) == {"status": "failed", "reason": "why", "began": "now"}


@each(**{"resumed_from, damaged": [(None, [8, 9, 10, 12]), ("elsewhere", [8, 9, 10, 12]), (9, [10, 12]), (12, []),
                                   (8, [9, 10, 12])]})  # fmt: skip
def test_what_is_newer_than_the_snapshot_taken_is_set_apart(tmp_path, resumed_from, damaged):
    place = tmp_path / str(resumed_from)
    place.mkdir()
    for number in (8, 9, 10, 12):
        (place / f"snapshot_iter_{number}").write_text(str(number))
    (place / "snapshot_best").touch()
    one = folder.RunFolder(str(place))
    one.set_apart_damaged(one.file(f"snapshot_iter_{resumed_from}") if resumed_from else None)
    kept = [f"snapshot_iter_{k}" for k in (8, 9, 10, 12) if k not in damaged]
    moved = [f"damaged_snapshot_iter_{k}" for k in damaged]
    assert sorted(os.listdir(place)) == sorted(["snapshot_best", *kept, *moved])
    assert all((place / name).read_text() == name.rpartition("_")[2] for name in (*kept, *moved))


def test_an_ending_that_fits_nowhere_fails(tmp_path, monkeypatch):
    tried = []

    def full(path, data, num_blanks=0):
        tried.append(num_blanks)
        raise OSError(errno.ENOSPC, "No space left on device")

    one, path = folder.RunFolder(str(tmp_path)), tmp_path / "summary.json"
    monkeypatch.setattr(folder, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        one.write_status("running")
    assert tried == [1 << 14, 0]  # the blanks need not be there
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", "reason")
    path.write_text(" " * 60)
    one.summary = {}
    one.write_status("failed", "r", iterations=5, much="x" * 100)  # in brief
    assert json.loads(path.read_text()) == {"status": "failed", "reason": "r"} and len(path.read_text()) == 60
    path.write_text(" " * 20)
    with pytest.raises(OSError, match="No space left"):
        one.write_status("failed", "reason")
    assert path.read_text() == " " * 20


def test_how_a_run_stands(tmp_path, monkeypatch):
    """One that is said to run has failed, unless a process holds its folder."""
    for summary, is_held, status in (
        ({"status": "running"}, True, "running"), ({"status": "running"}, False, "failed"),
        ({"status": "stopped", "iterations": 1234}, False, "stopped after 1,234 steps"),
        ({"status": "finished", "iterations": 1}, True, "finished after 1 step"), ({}, True, "with no summary"),
        ({"status": "failed", "iterations": 0}, False, "failed"),
    ):  # fmt: skip
        held = {str(tmp_path / "run.lock")} if is_held else set()
        monkeypatch.setattr(folders, "holder_of", lambda path, held=held: "process 3" if path in held else None)
        monkeypatch.setattr(folders, "seems_held", held.__contains__)
        (tmp_path / SUMMARY).write_text(json.dumps(summary))
        assert folders.describe(str(tmp_path)) == status
        assert folders.state_seen(str(tmp_path), summary) == status.partition(" after")[0]


def test_what_is_kept_of_earlier_starts():
    first = {"status": "failed", "reason": "x", "began": "a", "ended": "b", "iterations": 3, "seconds": 9.0}
    kept = {key: value for key, value in first.items() if key != "seconds"}
    assert earlier_starts({}) == [] and earlier_starts(first) == [kept]
    assert earlier_starts({**first, "earlier_starts": [{"status": "stopped"}]}) == [{"status": "stopped"}, kept]
    assert earlier_starts({**first, "earlier_starts": "damaged"}) == [kept]
