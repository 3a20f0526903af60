"""Starts programs and commands of the installed package, as its users do; nothing here imports the package.

So these tests run on any version: `python -m pytest -c /dev/null --confcutdir tests/faults tests/faults`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
HUNG = "hung"  # in the place of an exit code
# Variables of the tests themselves, and of a batch job or a launcher that they run in.
NOT_HANDED_ON = (
    "PMI_", "PMIX_", "HYDRA_", "OMPI_", "SLURM_", "PBS_", "LSB_", "FLUX_", "PE_", "PYTEST_", "DBRDIST_", "PYTHONPATH",
)  # fmt: skip


def pytest_configure(config):
    """The marks of these tests, where another configuration than ours is given."""
    for name in ("programs", "mpiexec", "slow"):
        config.addinivalue_line("markers", name)


class Start:
    """Calls start commands in the test's folder, and return (exit code or HUNG, all that was written)."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []

    def end(self):
        """Nothing outlives the test."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def popen(self, *words, environ=(), **options):
        """What was started; its two streams are one unless other ones are given."""
        env = {n: v for n, v in os.environ.items() if not n.startswith(NOT_HANDED_ON)}
        env |= {"PATH": f"{BIN}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1", **dict(environ)}
        usual = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [str(word) for word in words], text=True, errors="replace", env=env, cwd=self.folder,
            **{**usual, "start_new_session": True, **options},
        )  # fmt: skip
        self.started.append(process)
        return process

    def __call__(self, *words, limit_seconds=60, stdin=subprocess.DEVNULL, preexec_fn=None, **environ):
        process = self.popen(*words, environ=environ, stdin=stdin, preexec_fn=preexec_fn)
        code = HUNG
        try:
            text, _ = process.communicate(timeout=limit_seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        return code, text

    def file(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, program, *words, **options):
        """A program on one rank."""
        return self(sys.executable, self.file("program.py", program), *words, **options)

    def ranks(self, num_ranks, program, *words, **options):
        """A program under mpiexec."""
        return self("mpiexec", "-n", num_ranks, sys.executable, self.file("program.py", program), *words, **options)

    def launch(self, *words, **options):
        return self("dbrdist-launch", *words, **options)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Start(tmp_path)
    yield made
    made.end()
