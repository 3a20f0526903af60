"""A run that has nothing left to do, a disk that is full, names that are not UTF-8, and lines of 80 characters."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dbrdist
from dbrdist.cli.console import Console
from dbrdist.cli.warned import Warned, in_words
from dbrdist.cli.words import folded, said
from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.create import name_of
from dbrdist.core import serializer
from dbrdist.training.extensions import snapshots

OWN = """
import os
import signal
import warnings

from usernet import Net

def fill(at, path):
    def fill_up(trainer):
        if trainer.updater.iteration == at:
            with open(path, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
    return fill_up

def asked_to_stop(at):
    calls = []
    def look(example, rng):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return example
    return look

def fails_late(epoch):
    return 1 / 0 if epoch > 0.7 else 0.1

def warns():
    def look(trainer):
        warnings.warn("the cache is cold\\nand slow", RuntimeWarning)
    return look

def net_that_warns():
    warnings.warn("made of old parts")
    return Net()

def becomes_nan(epoch):
    return float("nan") if epoch > 0.7 else 0.1

def between_looks(epoch, value):
    is_looked_at = abs(20 * epoch - round(20 * epoch)) < 1e-3
    return 0.1 if is_looked_at or epoch < 0.2 else float(value) if value in ("nan", "inf") else value
"""


@pytest.fixture
def own(folder):
    (folder / "ends_own.py").write_text(OWN)
    return folder


def contents(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ---- nothing left to do ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        (["batch=16"], ["not used: batch 16, the run had 100"]),
        (["iterations=2", "log.every=1 epoch"], ["not used: iterations 2, the run had 3"]),
    ],
)
def test_a_resume_without_a_step_records_nothing(run, words, expected):
    assert run("run.yaml", "log.every=1 iteration")[0] == 0
    before = contents("result")
    code, out, err = run("run.yaml", "log.every=1 iteration", "--resume", *words)
    assert code == 0, err
    assert "snapshot_iter_3 is the end of this run, after 3 steps" in out
    assert all(text in out for text in expected)
    assert contents("result") == before
    assert run("run.yaml", "--resume", "iterations=4", "batch=50")[0] == 0
    assert "batch: 50" in Path("result/config.yaml").read_text()


def test_a_run_that_was_killed_after_its_last_snapshot_is_finished(run):
    run("run.yaml")
    summary = json.loads(Path("result/summary.json").read_text())
    Path("result/summary.json").write_text(json.dumps({**summary, "status": "running"}))
    assert run("run.yaml", "--resume")[0] == 0
    assert json.loads(Path("result/summary.json").read_text())["status"] == "finished"


# ---- one name, and 80 characters ----


def test_the_communicator_has_the_name_that_makes_it(run):
    run("run.yaml")
    assert json.loads(Path("result/summary.json").read_text())["communicator"] == "single"
    assert ">single<" in Path("result/report/index.html").read_text()
    assert name_of(create_communicator("single")) == "single"
    assert run_threads(2, lambda comm: name_of(create_communicator("threads"))) == ["threads", "threads"]


def test_what_a_run_prints_fits_80_characters(run):
    place = "a-folder-of-a-run/" * 3 + "with-a-name"
    for words in (["--dry-run"], [], ["--resume", "iterations=4"]):
        code, out, err = run("run.yaml", f"out={place}", *words)
        assert code == 0, err
        assert "memory: about" in out
        long = [line for line in out.splitlines() if len(line) > 80 and " " in line.strip()]
        assert not long, long
    written = [line[21:] for line in Path(place, "log.txt").read_text().splitlines()]
    assert any(line.startswith("finished: ") and line.endswith(place) for line in written)  # whole in the file


def test_folded(capsys):
    line = "  a: " + "word " * 40
    assert all(len(part) <= 80 for part in folded(line).splitlines())
    assert folded(line).split() == line.split()
    assert folded("x" * 100) == "x" * 100 and folded("a  b") == "a  b"
    Console().say("y" * 50 + " " + "z" * 50)
    assert capsys.readouterr().out == "y" * 50 + "\n  " + "z" * 50 + "\n"


# ---- warnings ----


def test_a_run_says_a_warning_once_in_a_line_and_keeps_it(run, own):
    words = ["extensions=[{name: 'ends_own:warns', args: {}}]", "iterations=4"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("run.yaml", *words)
    assert code == 0, err
    line = next(k for k, text in enumerate(OWN.splitlines(), 1) if "warnings.warn(" in text)
    said = f"warning: the cache is cold and slow (RuntimeWarning at ends_own.py:{line})"
    assert [text for text in err.splitlines() if "cold" in text] == [said]
    assert [text[21:] for text in Path("result/log.txt").read_text().splitlines() if "cold" in text] == [said]
    assert "cold" not in out


def test_warnings_before_the_folder_is_taken_are_in_its_log(run, own):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("run.yaml", "model={name: 'ends_own:net_that_warns'}")[0] == 0
    written = [text[21:] for text in Path("result/log.txt").read_text().splitlines()]
    assert written[0].startswith("dbrdist-train ") or "dbrdist-train" in written[0]
    assert sum("made of old parts" in text for text in written) == 1


def test_warnings_of_other_ranks_alone_are_said_at_the_end(capsys):
    found = {}

    def main(comm):
        warned = found[comm.rank] = Warned(comm.rank, Console())
        for words in ["all were told", *(["alone"] if comm.rank == 1 else [])]:
            for _ in range(2):
                warned._take(UserWarning(words), UserWarning, dbrdist.__file__, 1)
        warned.gather(comm)

    run_threads(3, main)
    assert capsys.readouterr().err == "warning: all were told\nwarning: rank 1: alone\n"


def test_a_rank_whose_run_fails_says_its_own_warnings(capsys):
    def main(comm):
        warned = Warned(comm.rank, Console())
        warned._take(UserWarning(f"of rank {comm.rank}"), UserWarning, dbrdist.__file__, 1)
        warned.say_own()

    run_threads(2, main)
    lines = sorted(capsys.readouterr().err.splitlines())
    assert lines == ["warning: of rank 0", "warning: rank 1: of rank 1"]


def test_warnings_that_nobody_can_read_or_place_stop_nothing(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert in_words("odd", FutureWarning, "/else/where.py", 3) == "odd (FutureWarning at /else/where.py:3)"
    assert in_words("odd", FutureWarning, "where.py", 3) == "odd (FutureWarning at where.py:3)"
    monkeypatch.setattr(sys, "stderr", None)  # as in `2>&-`
    Console().warn("odd")


def test_a_warning_in_words():
    inner = str(Path(dbrdist.__file__).parent / "core" / "link.py")
    assert in_words(UserWarning("two\n  lines"), UserWarning, inner, 3) == "two lines"
    assert in_words("odd", FutureWarning, "/else/where.py", 3) == "odd (FutureWarning at /else/where.py:3)"


# ---- a full disk ----


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root's right to mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("log", ["1 iteration", "1 epoch"], ids=["the log is what fails", "the snapshot is"])
def test_a_disk_that_is_full_in_the_middle(run, own, small_disk, log):
    path = str(small_disk / "filler")
    ext = f"[{{name: 'ends_own:fill', args: {{at: 4, path: {path}}}, every: 1 iteration}}]"
    words = ["run.yaml", f"out={small_disk}/r", f"log.every={log}", "snapshot.every=2 iterations", "iterations=9"]
    code, _, err = run(*words, f"extensions={ext}")
    assert code == 2
    assert "No space left on device" in err and "unharmed" in err
    assert "Errno" not in err and "Traceback" not in err
    (left,) = Path(small_disk, "r").glob("snapshot_iter_*")
    assert left.name == "snapshot_iter_2" and snapshots.is_whole(str(left))
    assert json.loads(Path(small_disk, "r", "summary.json").read_text())["status"] == "failed"
    os.remove(path)
    code, _, err = run(*words, "--resume")
    assert code == 0, err
    assert run(*[w for w in words if "out=" not in w], "out=straight")[0] == 0
    one, other = (dict(np.load(f"{place}/snapshot_iter_9")) for place in (f"{small_disk}/r", "straight"))
    weights = [key for key in one if key.startswith("updater/model")]
    assert weights and all(np.array_equal(one[key], other[key]) for key in weights)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "log.jsonl"])
def test_a_disk_that_is_full_says_so_without_a_number(run, monkeypatch, name):
    """Simulated: the file cannot be flushed."""
    flush = serializer._flush

    def full(path):
        if f"{name}.tmp-" in str(path):
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(serializer, "_flush", full)
    code, _, err = run("run.yaml")
    assert code == (2 if name == "config.yaml" else code)
    assert "Errno" not in err and "Traceback" not in err


def test_an_error_of_the_system_is_said_without_its_number():
    assert said(OSError(28, "No space left on device")) == "No space left on device"
    assert said(FileNotFoundError(2, "No such file or directory", "x")) == "x: No such file or directory"


def test_what_cannot_be_written_has_the_name_that_was_given(run):
    run("run.yaml", "model=mlp")
    code, _, err = run("--export", "result", "nowhere/x.safetensors")
    assert (code, err) == (2, "dbrdist-train: nowhere/x.safetensors: No such file or directory\n")


# ---- bad input is 2 ----


def test_runs_that_are_not_there(run):
    run("run.yaml", "model=mlp", "transforms.train=[]")
    os.remove("result/snapshot_iter_3")
    for words in (
        ["--report", "nowhere"],
        ["--report", "result", "nowhere"],
        ["--export", "nowhere", "x.safetensors"],
        ["--export", "result", "x.safetensors"],
        ["--predict", "result", "."],
        ["--evaluate", "nowhere"],
        ["--evaluate", "result"],
        ["--audit", "nowhere"],
    ):
        code, _, err = run(*words)
        assert code == 2 and "Traceback" not in err, (words, err)


@pytest.mark.parametrize("name", ["fails_late", "becomes_nan"])
def test_an_own_schedule_is_looked_at_before_the_first_step(run, own, name):
    code, _, err = run("run.yaml", f"optimizer.schedule=ends_own:{name}")
    assert code == 2
    assert "optimizer.schedule: " in err and f"ends_own:{name}" in err
    assert not Path("result").exists()


@pytest.mark.parametrize(
    ("of", "value", "expected"),
    [
        ("lr", -0.5, "optimizer.schedule: ends_own:between_looks: expected 0 or more, got -0.5"),
        ("lr", "nan", "optimizer.schedule: ends_own:between_looks: expected a finite number, got nan"),
        ("lr", "inf", "optimizer.schedule: ends_own:between_looks: expected a finite number, got inf"),
        ("lr", "fast", "optimizer.schedule: ends_own:between_looks: expected a finite number, got 'fast'"),
        ("momentum", 1.5, "schedules.0.schedule: ends_own:between_looks: expected less than 1, got 1.5"),
    ],
)
def test_a_schedule_that_goes_wrong_at_a_step(run, own, of, value, expected):
    schedule = f"{{name: 'ends_own:between_looks', args: {{value: {value}}}}}"
    scheduled = f"schedules=[{{of: optimizer.{of}, schedule: {schedule}}}]"
    key = f"optimizer.schedule={schedule}" if of == "lr" else scheduled
    code, _, err = run("run.yaml", key, "epochs=10", "snapshot.every=1 iteration", "iterations=9")
    assert code == 2 and "Traceback" not in err, err
    assert expected in err and "for the step after " in err
    left = snapshots.newest("result")
    assert left is not None and f"for the step after {int(left.rpartition('_')[2]) + 1} (" in err
    assert json.loads(Path("result/summary.json").read_text())["status"] == "failed"


def test_what_is_no_regular_file_is_refused(run, folder):
    os.mkfifo("pipe")
    (folder / "own.yaml").write_text("extends: pipe\nbatch: 3\n")
    assert run("run.yaml")[0] == 0
    for name in ("log.jsonl", "log.txt", "model.json", "config.yaml", "summary.json"):
        shutil.copytree("result", f"of {name}")
        os.remove(f"of {name}/{name}")
        os.mkfifo(f"of {name}/{name}")
    for words in (
        ["pipe"],
        ["/dev/null"],
        ["own.yaml"],
        ["run.yaml", "init_from=pipe", "out=other"],
        ["run.yaml", "init_from=/dev/zero", "out=other"],
        ["run.yaml", "data={name: npz, train: pipe}", "out=other"],
        *(
            ["run.yaml", f"out=of {name}", "--resume", "iterations=5"]
            for name in ("log.jsonl", "log.txt", "config.yaml")
        ),
        ["--report", "of log.jsonl"],
        ["--evaluate", "of config.yaml"],
    ):
        code, _, err = run(*words)
        assert code == 2 and "expected a regular file, it is a" in err and "Traceback" not in err, (words, err)
    assert run("run.yaml", "out=of summary.json", "--resume", "iterations=5")[0] == 0
    assert run("run.yaml", "out=of model.json", "--resume", "iterations=5")[0] == 0


@pytest.mark.programs
def test_a_configuration_may_come_from_a_pipe(folder):
    words = f"cat run.yaml | {sys.executable} -m dbrdist.cli.train /dev/stdin --dry-run"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "momentum_sgd" in done.stdout, done.stderr


def test_a_base_that_is_missing_is_the_one_mistake(run, folder):
    (folder / "own.yaml").write_text("extends: nowhere.yaml\nbatch: 3\n")
    code, _, err = run("own.yaml")
    expected = "own.yaml:1:10: extends: nowhere.yaml cannot be read: No such file or directory\n"
    assert (code, err) == (2, expected)


# ---- names that are not UTF-8, and a stop while examples are read ----


def test_names_that_are_not_utf_8(run):
    for part in ("train", "test"):
        for k, name in enumerate((b"cat", b"d\xf6g")):
            folder = os.path.join(b"photos", part.encode(), name)
            os.makedirs(folder)
            for i in range(3):
                with open(os.path.join(folder, b"\xff%d.png" % i), "wb") as file:
                    Image.fromarray(np.full((8, 8, 3), 99 * k + i, np.uint8)).save(file, "png")
    bad = os.fsdecode(b"photos/train/cat/\xff broken.png")
    Path(bad).write_bytes(b"no image")
    config = os.fsdecode(b"run\xff.yaml")
    os.rename("run.yaml", config)
    words = [config, "data={name: image_folder, root: photos, corrupt: skip}", "model=mlp", "transforms.train=[]"]
    code, out, err = run(*words, "batch=2")
    assert code == 0, err
    assert "1 corrupt training example left out" in out and "could not be written" not in out
    assert "run\\udcff.yaml" in Path("result/report/index.html").read_text()
    assert json.loads(Path("result/summary.json").read_text())["num_skipped_examples"] == 1
    code, out, err = run("--predict", "result", os.fsdecode(b"photos/test/d\xf6g/\xff0.png"))
    assert code == 0, err


@pytest.mark.parametrize("at", [7, 150, 201])
def test_a_stop_while_examples_are_read_loses_none(run, own, at):
    """The signal comes while a batch is being read; the examples of that batch are used once, before or after."""
    start = ["run.yaml", "audit=true", "iterations=null", "epochs=2", "workers=0", "transforms.train="]
    start[-1] += f"[{{name: 'ends_own:asked_to_stop', args: {{at: {at}}}}}]"
    assert run(*start)[0] == 75
    assert run(*start[:-1], "transforms.train=[]", "--resume")[0] == 0
    code, out, err = run("--audit", "result")
    assert code == 0, err
    assert out.count("1,442 of 1,442 examples, each once") == 2
