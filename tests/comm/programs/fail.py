"""Rank 1 does what the first argument says, while the others go on to communicate. For failure/test_abort.py."""

import os
import signal
import sys
import threading
import time
from sys import exit as exit_imported_early

import numpy as np

from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.gradients.compression import TopK


def reduce_something():
    comm.allreduce(np.ones(3, np.float32))


def catch_own_exit():
    for leave in (sys.exit, exit_imported_early):
        try:
            leave(3)
        except SystemExit as e:
            assert e.code == 3
    try:
        raise SystemExit("text")
    except SystemExit as e:
        assert e.code == "text"


def raise_error():
    raise ValueError("broken on purpose")


def raise_exit(code):
    raise SystemExit(code)


def die_in_a_thread():
    threading.Thread(target=raise_error, name="helper").start()


def exit_in_a_thread():
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def leave_by_finalize():
    from mpi4py import MPI

    MPI.Finalize()


def with_earlier_hook():
    raise ValueError("seen by both hooks")


def ask_for_too_much():
    create_multi_node_optimizer(optimizers.SGD(), comm, compression=TopK(1.5))


DEEDS = {
    "exception": raise_error,
    "setting": ask_for_too_much,
    "hook": with_earlier_hook,
    "exit": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("why I leave"),
    "raise": lambda: raise_exit(4),
    "raise true": lambda: raise_exit(True),
    "raise 256": lambda: raise_exit(256),
    "early import": lambda: exit_imported_early(5),
    "thread": die_in_a_thread,
    "thread exit": exit_in_a_thread,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "caught": catch_own_exit,
    "return": lambda: sys.exit(0),
    "exit none": sys.exit,
    "finalize": leave_by_finalize,
    "os._exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nothing": lambda: None,
}

deed = sys.argv[1]
if deed == "hook":
    sys.excepthook = lambda kind, value, tb: print("earlier hook:", value, flush=True)
comm = create_communicator("naive")
reduce_something()
if deed == "all exit":
    sys.exit(75)
if deed == "all raise":
    raise_error()
if deed == "slow":
    if comm.rank == 1:
        time.sleep(7)
        print("the slow rank is done", flush=True)
    sys.exit(0)
if comm.rank == 1:
    DEEDS[deed]()
for _ in range(3):
    reduce_something()
if deed == "thread":
    time.sleep(1)
    reduce_something()
os.write(1, f"the end of rank {comm.rank}\n".encode())  # at once: ranks must not mix within a line
