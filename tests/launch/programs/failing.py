"""An MPI program whose rank 1 fails at step 20 in the way that the first argument says, while the others communicate.

It uses mpi4py alone: nothing in it helps the launcher, except the beats where the second argument is `beat`.
"""

import os
import signal
import subprocess
import sys
import threading
import time

from dbrdist_launch import heartbeat
from mpi4py import MPI


def note_time():
    """Leave the time of the failure for the one who measures."""
    if "TEST_FAILED_AT" in os.environ:
        with open(os.environ["TEST_FAILED_AT"], "w") as file:
            file.write(str(time.time()))


def stuck():
    while True:
        time.sleep(1.0)


def dead_thread():
    threading.Thread(target=lambda: 1 / 0, name="loader").start()
    stuck()


def dead_worker():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    time.sleep(2.0)  # as a loader that has been at work for a while
    worker.kill()
    note_time()
    stuck()


def out_of_memory():
    """Take memory in a control group that allows little of it."""
    group = os.environ["TEST_MEMORY_GROUP"]
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(0.6)
    held = [bytearray(os.urandom(1 << 20)) * 4 for _ in range(200)]
    print(len(held))


def fail(how, communicator):
    note_time()
    if how == "exception":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "exit9":
        os._exit(9)
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sigsegv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "abort":
        communicator.Abort(7)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    actions = {"stuck": stuck, "thread": dead_thread, "worker": dead_worker, "oom": out_of_memory}
    if how in actions:
        actions[how]()


def main():
    how, beats = sys.argv[1], sys.argv[2:] == ["beat"]
    communicator = MPI.COMM_WORLD
    for step in range(int(os.environ.get("TEST_STEPS", "100000"))):
        if beats:
            heartbeat.beat(step)
        if step == 20 and communicator.rank == min(1, communicator.size - 1):
            if how == "return":
                return
            fail(how, communicator)
        communicator.allreduce(1)
        time.sleep(0.01)


main()
