"""Start a Python program under mpiexec, with a time limit that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"


# In the place of `warm.python()`, for what depends on imports, on libraries' settings or on the shell's signals.
REAL = (sys.executable,)
is_expected = [True]  # whether the test that runs may start jobs
# A rank writes into a file of its own: in one stream the pieces of two ranks' lines may mix.
INTO_FILE = 'exec "$@" > "$0/${PMI_RANK-${OMPI_COMM_WORLD_RANK-$PMIX_RANK}}" 2>&1'


class Outcome(NamedTuple):
    """What became of a job; ``text`` is what mpiexec wrote, then what each rank wrote, in the order of ranks."""

    code: int
    text: str
    seconds: float

    def lines(self, start):
        return [line for line in self.text.splitlines() if line.startswith(start)]


def mpiexec():
    """The mpiexec beside this interpreter, or else on the path."""
    assert is_expected[0], "a test that starts ranks carries the mark mpiexec, for `make test-programs`"
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("needs mpiexec, beside the Python interpreter or on the path")
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    return found


def run(num_ranks, *arguments, limit_seconds=60, python=None, **environ):
    """Run ``python arguments`` on ``num_ranks`` ranks; fail if it takes longer than the limit.

    ``environ`` adds variables; None takes one away. ``python`` are the words that start Python.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PYTEST_", "DBRDIST_"))}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launch'}", "OMP_NUM_THREADS": "1", **environ}
    env = {name: value for name, value in env.items() if value is not None}
    # As root and on machines with few cores, Open MPI wants these.
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    with tempfile.TemporaryDirectory() as folder:
        program = ["/bin/sh", "-c", INTO_FILE, folder, *(python or warm.python()), *map(str, arguments)]
        start = time.monotonic()
        process = subprocess.Popen(
            [mpiexec(), "-n", str(num_ranks), *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            pytest.fail(f"the job hung: no end after {limit_seconds} s\n{text}{written(folder)}")
        except BaseException:  # the test's own time limit, say
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        if text and not text.endswith("\n"):  # as Open MPI leaves it
            text += "\n"
        return Outcome(process.returncode, text + written(folder), time.monotonic() - start)


def written(folder):
    """What the ranks wrote, in their order."""
    files = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
    return "".join(path.read_text(errors="backslashreplace") for path in files)
