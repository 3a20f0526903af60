"""Runs of `dbrdist-train`, in this process or under mpiexec."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dbrdist
from dbrdist.cli import train
from dbrdist.comm.transport import mpi
from dbrdist.core.array import random
from tests import warm
from tests.cli.cli_helpers import ROOT

SEVERAL = Path(__file__).parent / "programs" / "several.py"
NET = '''\
import os
import resource
import signal

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.core.model.reporter import report

RANK = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")


class Net(dbrdist.Chain):
    """Batch normalization and dropout, and a checksum of what each step sees; may end its own process."""

    def __init__(self, width=16, kill_at=-1, largest_file_bytes=None):
        super().__init__()
        if largest_file_bytes is not None and RANK == "0":
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
        self.steps, self.kill_at = 0, kill_at
        with self.init_scope():
            self.l1 = L.Linear(None, width)
            self.bn = L.BatchNormalization(width)
            self.l2 = L.Linear(width, 10)

    def forward(self, x):
        if dbrdist.config.train:
            self.steps += 1
            report({"seen": np.float64(x.astype(np.float64).sum())}, self)
            if self.steps == self.kill_at and RANK == os.environ.get("KILL_RANK", "0"):
                os.kill(os.getpid(), signal.SIGKILL)
        h = F.dropout(F.relu(self.bn(self.l1(x))), 0.3)
        return self.l2(h)


class Broken(Net):
    def forward(self, x):
        if dbrdist.config.train:
            raise RuntimeError("my own mistake")
        return super().forward(x)


class WrongShape(Net):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l2 = L.Linear(99, 10)


def noise(scale):
    def add(example, rng):
        return (example[0] + scale * rng.standard_normal(example[0].shape).astype(np.float32), *example[1:])

    return add


def few(n, num_test=0):
    x = np.random.default_rng(0).standard_normal((n, 1, 2, 2)).astype(np.float32)
    examples = [(v, np.int32(i % 10)) for i, v in enumerate(x)]
    return examples, examples[:num_test] or None
'''

CONFIG = """\
model: {name: 'usernet:Net', args: {width: 12}}
data: digits
transforms:
  train: [{name: random_crop, size: 8, padding: 1}, {name: 'usernet:noise', args: {scale: 0.05}}]
batch: 100
epochs: 1
iterations: 3
optimizer: {name: momentum_sgd, lr: 0.05, schedule: {name: cosine, warmup_epochs: 0.3}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a configuration and a network of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "usernet.py").write_text(NET)
    (tmp_path / "run.yaml").write_text(CONFIG)
    yield tmp_path
    for module in ("usernet", "ends_own"):
        sys.modules.pop(module, None)


@pytest.fixture
def run(folder, capfd, monkeypatch):
    """`run("run.yaml", "epochs=2")` in this process: exit code, standard output, standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr(mpi, "started", lambda: None)  # as if no other test of this process had started MPI
    dtype, state = dbrdist.global_config.dtype, random.get_state()

    def call(*words):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["dbrdist-train", *map(str, words)])
        code = train._main()
        return (code, *capfd.readouterr())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
    dbrdist.global_config.dtype, dbrdist.global_config.float32_products = dtype, "float32"
    dbrdist.global_config.fused_convolutions = False
    random.set_seed(0)
    random.set_state(state)


@pytest.fixture
def started(folder):
    """`started(2, "-m", "module", ...)` under mpiexec (0: without): a process, which is ended after the test."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("there is no mpiexec beside this Python; install dbrdist[mpich]")
    processes = []

    def start(n, *words, **environment):
        launcher = [mpiexec, "-n", str(n)] if n else []
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        python = [sys.executable] if "PYTHONPATH" in environment else warm.python()
        process = subprocess.Popen(
            [*launcher, *python, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


@pytest.fixture
def ranks(started):
    """`ranks(2, "run.yaml", ...)` under mpiexec (0: without): a started `dbrdist-train`."""
    return lambda n, *words, **environment: started(n, "-m", "dbrdist.cli.train", *words, **environment)


@pytest.fixture
def several(started, folder):
    """`several(2, ["run.yaml", "out=a"], ["run.yaml", "out=b"])`: runs of one job, each as a run of its own.

    RANK in a word stands for the rank's number. For each its code, standard output and standard error, of the ranks in
    their order; asked again it gives the same.
    """
    known = {}

    def outcome(place, n, number):
        codes = [json.loads((place / f"{number}.{rank}.code").read_text()) for rank in range(n)]
        (code,) = {code for code in codes if code is not None}
        return code, *(
            "".join((place / f"{number}.{rank}.{end}").read_text() for rank in range(n)) for end in ("out", "err")
        )

    def call(n, *cases):
        asked = json.dumps([n, cases])
        if asked not in known:
            place = folder / f"several-{len(known)}"
            place.mkdir()
            (place / "cases.json").write_text(json.dumps(cases))
            process = started(n, SEVERAL, place)
            words = process.communicate(timeout=80)
            assert process.returncode == 0, words
            known[asked] = [outcome(place, n, number) for number in range(len(cases))]
        return known[asked]

    return call
