"""Counts steps with a checkpoint, as a training run does; saves and ends with 75 when asked to stop.

TEST_FOLDER holds the checkpoint; TEST_STEPS is the end. At TEST_FAIL=rank:step a rank always exits with 3.
"""

import json
import os
import pathlib
import signal
import sys
import time

from dbrdist_launch import heartbeat
from mpi4py import MPI

world = MPI.COMM_WORLD
saved = pathlib.Path(os.environ["TEST_FOLDER"]) / "checkpoint.json"
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda number, _: asked.append(number))
step = world.bcast(json.loads(saved.read_text())["step"] if world.rank == 0 and saved.exists() else 0)
print(f"restart {os.environ['DBRDIST_RESTART']} of {world.size} from {step}", flush=True)
while step < int(os.environ["TEST_STEPS"]):
    if os.environ.get("TEST_FAIL") == f"{world.rank}:{step}":
        sys.exit(3)
    stop = world.allreduce(len(asked), MPI.MAX)
    step += 1
    heartbeat.beat(step, total=int(os.environ["TEST_STEPS"]))
    if world.rank == 0 and (step % 10 == 0 or stop):
        saved.with_suffix(".new").write_text(json.dumps({"step": step}))
        saved.with_suffix(".new").rename(saved)
    if stop:
        until = time.monotonic() + 2
        while not asked and time.monotonic() < until:  # the ranks agree before each has got its own request
            time.sleep(0.01)
        time.sleep(0.1)  # a second request would come now
        print(f"saved at {step}, asked {len(asked)} times", flush=True)
        sys.exit(75)
    time.sleep(0.01)
if world.rank == 0:
    print(f"done with {world.size}", flush=True)
