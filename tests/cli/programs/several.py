"""Run under mpiexec: `dbrdist-train` several times in one job, since a start of Python costs more than most runs.

``several.py FOLDER`` reads the words of each run from ``FOLDER/cases.json`` and leaves, for each run and rank, what the
rank wrote and the code with which it would have ended. RANK in a word stands for the rank's number.
"""

import contextlib
import json
import os
import signal
import sys
import types
from pathlib import Path

from mpi4py import MPI

import dbrdist
from dbrdist.cli import train
from dbrdist.core.array import random

RANK = MPI.COMM_WORLD.Get_rank()


class Over(BaseException):
    """The launcher has ended this rank by now."""


def sleep(seconds):
    """The first rank ends the job while the others wait to say the same."""
    if RANK:
        raise Over


@contextlib.contextmanager
def written_to(out, err):
    """What the process writes goes into these files."""
    kept = [os.dup(1), os.dup(2)]
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in ((1, kept[0]), (2, kept[1])):
            os.dup2(file, number)
            os.close(file)


def one(words):
    """The code of one run, from the state of a fresh process; None where the launcher ends this rank."""
    sys.argv = ["dbrdist-train", *(word.replace("RANK", str(RANK)) for word in words)]
    sys.modules.pop("usernet", None)
    dbrdist.global_config.dtype = DTYPE
    random.set_seed(0)
    random.set_state(STATE)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    try:
        return train._main()
    except Over:
        return None


DTYPE, STATE = dbrdist.global_config.dtype, random.get_state()
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
folder = Path(sys.argv[1])
train.time = types.SimpleNamespace(sleep=sleep)
for number, words in enumerate(json.loads((folder / "cases.json").read_text())):
    MPI.COMM_WORLD.Barrier()
    with written_to(folder / f"{number}.{RANK}.out", folder / f"{number}.{RANK}.err"):
        code = one(words)
    (folder / f"{number}.{RANK}.code").write_text(json.dumps(code))
