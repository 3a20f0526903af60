"""The entry points: Ctrl-C from their first line on, and standard streams that are closed or full."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.cli_helpers import ROOT
from tests.each import each

CONFIG = "model: {name: mlp, units: [4]}\ndata: digits\nbatch: 200\nepochs: 1\n"
# Imports of the named module stop until a signal comes; a byte on the descriptor says that they have.
SLOW = """\
import os, sys, time


class Finder:
    def find_spec(self, name, path, target=None):
        if name == os.environ["STOPS_AT"] and os.environ.pop("TELLS", None):
            os.write(int(os.environ["AT"]), b".")
            time.sleep(60)


sys.meta_path.insert(0, Finder())
"""
TRAIN = "import sys; from dbrdist_launch.entry import train; sys.argv[0] = 'dbrdist-train'; train()"
DATA = "import sys; from dbrdist_launch.entry import data; sys.argv[0] = 'dbrdist-data'; data()"

pytestmark = [pytest.mark.slow, pytest.mark.programs]


def environment(**more):
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def interrupted(tmp_path, at, command, count):
    """Exit code and output of a command whose `count` processes got SIGINT while they imported `at`."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    (tmp_path / "run.yaml").write_text(CONFIG)
    reader, writer = os.pipe()
    found = environment(STOPS_AT=at, AT=str(writer), TELLS="1")
    found["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{found['PYTHONPATH']}"
    process = subprocess.Popen(
        command, env=found, cwd=tmp_path, pass_fds=[writer], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(writer)
    for _ in range(count):
        assert os.read(reader, 1) == b"."
    os.close(reader)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


@each(at=["numpy", "click", "dbrdist.cli.running.run", "dbrdist.cli.train"])
def test_ctrl_c_during_the_imports_is_one_line_and_130(tmp_path, at):
    code, out = interrupted(tmp_path, at, [sys.executable, "-c", TRAIN, "run.yaml"], 1)
    assert (code, out) == (130, "dbrdist-train: interrupted\n")


FIRST = """\
import os, sys

INTERRUPT = 2  # SIGINT, before the module `signal`


class Finder:
    def find_spec(self, name, path, target=None):
        if name == "typing":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), INTERRUPT)


sys.modules.pop("typing", None)
sys.meta_path.insert(0, Finder())
sys.argv[0] = "/bin/{program}"
from dbrdist_launch.entry import train
print("not reached")
"""


@each(program=["dbrdist-train", "dbrdist-launch", "own-program"])
def test_ctrl_c_in_the_first_lines_of_the_entry_module(tmp_path, program):
    (tmp_path / "program.py").write_text(FIRST.format(program=program))
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=environment(), capture_output=True, text=True, timeout=60
    )
    if program == "own-program":  # its own handling of KeyboardInterrupt
        assert done.stdout == "" and done.stderr.endswith("KeyboardInterrupt\n")
    else:
        assert (done.returncode, done.stderr) == (130, f"{program}: interrupted\n")


def test_the_other_command_too(tmp_path):
    code, out = interrupted(tmp_path, "numpy", [sys.executable, "-c", DATA, "info", "."], 1)
    assert (code, out) == (130, "dbrdist-data: interrupted\n")


@each(at=["numpy", "mpi4py"])
def test_ctrl_c_of_ranks_that_import_is_one_line_and_130(tmp_path, at):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("there is no mpiexec beside this Python; install dbrdist[mpich]")
    code, out = interrupted(tmp_path, at, [mpiexec, "-n", "2", sys.executable, "-c", TRAIN, "run.yaml"], 2)
    lines = [line for line in out.splitlines() if not line.startswith("[mpiexec@")]
    assert (code, lines) == (130, ["dbrdist-train: interrupted"])


@pytest.mark.mpiexec
class TestUnderTheLauncher:
    def test_ctrl_c_during_the_imports_is_130_and_leaves_no_process(self, tmp_path):
        words = [sys.executable, "-m", "dbrdist_launch", "-n", "2", sys.executable, "-c", TRAIN, "run.yaml"]
        code, out = interrupted(tmp_path, "numpy", words, 2)
        lines = [line.rpartition("] ")[2] for line in out.splitlines() if "SIGINT: asking all ranks" not in line]
        assert (code, lines) == (130, ["dbrdist-train: interrupted"])

    def test_ctrl_c_of_a_run_saves_and_is_130(self, tmp_path):
        (tmp_path / "run.yaml").write_text(CONFIG.replace("epochs: 1", "epochs: 100000") + "out: r\n")
        words = [sys.executable, "-m", "dbrdist_launch", "-n", "2", sys.executable, "-c", TRAIN, "run.yaml"]
        process = subprocess.Popen(
            words, env=environment(), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        lines = iter(process.stdout.readline, "")
        before = []
        for line in lines:
            before.append(line)
            if line.split("] ")[-1].split()[:1] == ["1"]:  # the first row of the table: it trains
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130, "".join(before) + out
        assert "SIGINT arrived on rank" in out and "and saved" in out and "Traceback" not in out
        assert list((tmp_path / "r").glob("snapshot_iter_*"))


@pytest.mark.timeout(300)  # sixteen programs
@each(
    streams=[">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", "| head -c 1"],
    command=["-m dbrdist.cli.train run.yaml --overwrite", f'-c "{TRAIN}" run.yaml --overwrite'],
)
def test_a_run_ends_whatever_its_streams_take(tmp_path, streams, command):
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = f"set -o pipefail; {sys.executable} {command} {streams}"
    done = subprocess.run(["bash", "-c", words], env=environment(), cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0, done
    assert json.loads((tmp_path / "result/summary.json").read_text())["status"] == "finished"


@pytest.mark.timeout(300)  # twelve programs
@each(
    words=[
        ("--version", 0),
        ("--help", 0),
        ("--print-schema", 0),
        ("--init digits", 0),
        ("nowhere.yaml", 2),
        ("--nothing", 2),
    ],
    streams=[">&- 2>&-", ">/dev/full 2>/dev/full"],
)
def test_the_exit_code_is_that_of_the_command(tmp_path, words, streams):
    command = f"{sys.executable} -m dbrdist.cli.train {words[0]} {streams}"
    assert subprocess.run(["bash", "-c", command], env=environment(), cwd=tmp_path, timeout=100).returncode == words[1]


@pytest.mark.timeout(300)  # eight programs
@each(
    words=[
        ("dbrdist.cli.train", "--schedule 'é漢.csv' --examples 9 run.yaml"),
        ("dbrdist.cli.train", "--dry-run run.yaml 'out=é漢'"),
        ("dbrdist.cli.train", "run.yaml --overwrite 'out=é漢'"),
        ("dbrdist.cli.data", "info 'photos/é漢'"),
    ],
    encoding=["latin-1:strict", "ascii:surrogateescape"],
)
def test_words_that_the_encoding_lacks_end_nothing(tmp_path, words, encoding):
    (tmp_path / "run.yaml").write_text(CONFIG)
    folder = tmp_path / "photos" / "é漢" / "é漢"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "é漢.png").write_bytes(b"")
    command = f"{sys.executable} -m {words[0]} {words[1]}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(PYTHONIOENCODING=encoding), cwd=tmp_path, capture_output=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done
    escaped = b"\xe9" if encoding.startswith("latin") else rb"\xe9"
    assert escaped + rb"\u6f22" in done.stdout, done.stdout


@each(words=["--help", "ps"], streams=[">/dev/full", "| head -c 0"])
def test_the_launchers_own_words_end_nothing(tmp_path, words, streams):
    command = f"set -o pipefail; {sys.executable} -m dbrdist_launch {words} {streams}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "internal error" not in done.stderr, done


def test_output_that_a_full_disk_lost_is_said(tmp_path):
    command = f"{sys.executable} -m dbrdist.cli.train --print-schema >/dev/full"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == "dbrdist-train: the standard output is incomplete: No space left on device\n"
