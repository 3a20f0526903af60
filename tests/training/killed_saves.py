"""Processes that save snapshots and are killed at random moments: `python killed_saves.py FOLDER 100 [thread]`.

Each process fills the weights with the number of the step before it saves, so that a file tells whether it is whole:
one number everywhere, that of its name. Prints how many kills came in the middle of a save. With `thread` a thread
writes, while the weights go on to change.
"""

import os
import random
import re
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np

from dbrdist import links as L
from dbrdist.core.files.serializer import read_npz
from dbrdist.training.extensions import snapshot, snapshots
from dbrdist.training.extensions.snapshot_writers import ThreadWriter


def save_on(folder: str, first: int) -> None:
    """Save steps from `first` on, for ever."""
    model = L.Linear(200, 200)
    saver = snapshot(n_retains=2, writer=ThreadWriter() if "thread" in sys.argv else None)
    saver.target = model
    for step in range(first, first + 10**9):
        model.W.array[...] = step
        model.b.array[...] = step
        saver.save(SimpleNamespace(out=folder, updater=SimpleNamespace(iteration=step)))


def check(folder: str) -> int:
    """The newest step; every snapshot is whole, but for what a process was killed over, which has another name."""
    found = snapshots.find(folder)
    assert found, "a kill left no snapshot"
    for path in found:
        assert snapshots.is_whole(path), path
        step = int(path.rpartition("_")[2])
        for key, value in read_npz(path).items():
            assert np.all(value == step), (path, key)
    return int(found[-1].rpartition("_")[2])


def unfinished(folder: str) -> list[str]:
    """The names of files that are being written."""
    return [name for name in os.listdir(folder) if re.search(r"\.tmp-\d+-\d+$", name)]


def stop_while_writing(child: int, folder: str) -> None:
    """Stop a process in which a file is half written, however seldom this one gets to look."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if unfinished(folder):
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, os.WUNTRACED)
            if unfinished(folder):
                return
            os.kill(child, signal.SIGCONT)
    raise AssertionError("no file was seen half written")


def main() -> None:
    folder, number = sys.argv[1], int(sys.argv[2])
    draw, step, num_halves = random.Random(0), 0, 0
    for k in range(number):
        child = os.fork()
        if child == 0:
            save_on(folder, step + 1)
        end = time.monotonic() + 60
        while len(snapshots.find(folder)) == 0 or (step and int(snapshots.find(folder)[-1].rpartition("_")[2]) == step):
            assert time.monotonic() < end, "no snapshot came"
            time.sleep(0.001)
        if k % 2:
            time.sleep(draw.uniform(0, 0.01))
        else:
            stop_while_writing(child, folder)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        now = check(folder)
        assert now > step
        step = now
        halves = unfinished(folder)
        num_halves += bool(halves)
        for name in halves:
            os.remove(os.path.join(folder, name))
    print(num_halves)


if __name__ == "__main__":
    main()
