"""Rank 1 fails once both are there; rank 0 writes down the first signal that it gets, and ends."""

import os
import pathlib
import signal
import sys
import time

folder = pathlib.Path(os.environ["TEST_FOLDER"])
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def hear(number, frame):
    (folder / "heard").write_text(signal.Signals(number).name)
    sys.exit(1)


if rank == 0:
    signal.signal(signal.SIGTERM, hear)
    (folder / "checkpoint.json").touch()
while rank == 1 and not (folder / "checkpoint.json").exists():
    time.sleep(0.01)
if rank == 1:
    sys.exit(3)
while True:
    time.sleep(0.01)
