"""No command leaves a temporary folder, shared memory or a process behind, whichever signal ends it, and when."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import uuid

import pytest
from dbrdist_launch import linux
from dbrdist_launch.launcher.records import scratch
from support import ROOT, assert_nothing_left, environment, marked, wait_until

TRAIN = "import sys; from dbrdist_launch.entry import train; sys.argv[0] = 'dbrdist-train'; train()"
PHOTOGRAPHS = (
    "model: {name: resnet20, num_classes: 4}\ndata: {name: image_folder, root: nowhere, test: null}\n"
    "transforms: {train: [{name: resize, size: 40}, {name: center_crop, size: 32}]}\nbatch: 64\nepochs: 1\n"
)
DIGITS = "model: {name: mlp, units: [4]}\ndata: digits\nbatch: 20\nepochs: 500\nout: run\nworkers: 1\n"
WAITS = "import time; print('here', flush=True); time.sleep(600)"
RUNS = f"import dbrdist_launch as d; d.run(['python', '-c', {WAITS!r}], ranks=2, log_dir='logs')"


def has(pattern):
    return lambda place: any(place.glob(pattern))


# name: (words behind the interpreter, files in the working folder, when it is under way)
COMMANDS = {
    "rehearse, making photographs": (
        ["-c", TRAIN, "run.yaml", "--rehearse", "64x8", "--examples", "9999"], {"run.yaml": PHOTOGRAPHS},
        has("tmp/dbrdist-rehearsal-*/train/*/*.jpg")),
    "rehearse, training": (
        ["-c", TRAIN, "run.yaml", "--rehearse", "64x8", "--examples", "9999"], {"run.yaml": PHOTOGRAPHS},
        has("tmp/dbrdist-rehearsal-*/run")),
    "train": (["-c", TRAIN, "run.yaml"], {"run.yaml": DIGITS}, has("run/log.jsonl")),
    "launch": (["-m", "dbrdist_launch", "-n", "2", "--log-dir", "logs", "python", "-c", WAITS], {},
               has("logs/latest/attempt-0/rank-1.out")),
    "run of the API": (["-c", RUNS], {}, has("logs/latest/attempt-0/rank-1.out")),
}  # fmt: skip


def hear_hangups():
    """Whoever started these tests, such as nohup, may ignore them, which a program inherits."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
# A killed launcher cannot clear up: the next one, or `dbrdist-launch ps`, takes away what it left.
SWEPT = [("launch", signal.SIGKILL), ("run of the API", signal.SIGKILL)]


def left_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.iterdir())


@pytest.mark.mpiexec
@pytest.mark.programs
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SIGNALS, ids=[number.name for number in SIGNALS])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_left_behind(tmp_path, name, number):
    words, files, is_under_way = COMMANDS[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    folders = {variable: tmp_path / variable.lower() for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    folders["TMPDIR"] = tmp_path / "tmp"
    for folder in folders.values():
        folder.mkdir(mode=0o700)
    mark, shared = uuid.uuid4().hex, set()
    env = environment(mark, **{variable: str(folder) for variable, folder in folders.items()})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "launch")])
    with open(tmp_path / "said", "wb") as said:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            preexec_fn=hear_hangups,
        )  # fmt: skip
    try:
        wait_until(lambda: is_under_way(tmp_path) or child.poll() is not None, 120.0)
        assert child.poll() is None, (tmp_path / "said").read_text()
        for line in marked(mark):
            shared |= linux.mapped_files(int(line.split()[0]), "/dev/shm/")
        child.send_signal(number)
        child.wait(60)
    finally:
        child.kill()
    assert_nothing_left(mark, 10.0)
    if (name, number) in SWEPT:
        subprocess.run([sys.executable, "-m", "dbrdist_launch", "ps"], env=env, check=True, capture_output=True)
    assert left_in(folders["TMPDIR"]) == []
    assert not any(left_in(path) for path in folders["XDG_RUNTIME_DIR"].iterdir())
    assert not [path for path in shared if os.path.exists(path)]
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]


@pytest.mark.programs
@pytest.mark.parametrize("number", SIGNALS, ids=[number.name for number in SIGNALS])
def test_the_folder_of_a_block_goes_with_its_process_group(tmp_path, number):
    program = (
        "import signal; from dbrdist_launch.launcher.records import scratch\n"
        "with scratch.folder('x-') as path:\n"
        "    open(path + '/file', 'w').close(); print(path, flush=True); signal.pause()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=environment("x", TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=hear_hangups,
    )  # fmt: skip
    path = pathlib.Path(child.stdout.readline().strip())
    assert (path / "file").exists() and path.parent == tmp_path
    os.killpg(child.pid, number)
    child.wait(60)
    child.stdout.close()
    wait_until(lambda: not path.exists())


def test_the_folder_is_there_in_the_block_only(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), scratch.folder("x-") as path:
        (pathlib.Path(path) / "file").write_text("text")
        assert pathlib.Path(path).parent == tmp_path
        1 / 0  # noqa: B018
    assert left_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_child_of_a_fork_that_lives_on_does_not_keep_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = 0
    try:
        with scratch.folder("x-"):
            child = os.fork()
            if not child:
                signal.pause()
                os._exit(0)
        assert left_in(tmp_path) == []  # the block has ended while it lives
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_block_whose_keeper_was_killed_ends_in_peace(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(linux.children(os.getpid()))  # of other tests
    with scratch.folder("x-"):
        (keeper,) = set(linux.children(os.getpid())) - before
        os.kill(keeper, signal.SIGKILL)


def test_no_place_for_a_folder_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr(scratch, "_KEEPER", "raise OSError('no room')")
    with pytest.raises(OSError, match="no temporary folder"), scratch.folder("x-"):
        pass
    assert "no room" in capfd.readouterr().err
