"""Ranks that can never go on, though every process lives. For tests/comm/failure/test_deadlock.py.

Each rank prints what it raises as one line, with the seconds that it took.
"""

import contextlib
import os
import sys
import threading
import time

import numpy as np

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import optimizers
from dbrdist.comm import create_communicator, create_multi_node_optimizer

MANY = np.ones(6_000_000, np.float32)  # 24 MB: MPI cannot keep them


def crossed_sends():
    comm.send(MANY, (comm.rank + 1) % comm.size, 0)
    comm.recv((comm.rank - 1) % comm.size, 0)


def crossed_receives():
    comm.recv((comm.rank - 1) % comm.size, 0)
    comm.send(MANY, (comm.rank + 1) % comm.size, 0)


def wrong_tag():
    if comm.rank == 0:
        comm.recv(1, 5)
    elif comm.rank == 1:
        comm.send(MANY, 0, 4)
    comm.barrier()


def message_and_collective():
    if comm.rank == 0:
        comm.recv(1, 0)
    comm.allreduce(np.ones(3))


def two_communicators():
    other = comm.split(0, comm.rank)
    for each in (comm, other) if comm.rank == 0 else (other, comm):
        each.allreduce(np.ones(3))


def construction():
    if comm.rank == 0:
        create_communicator("flat")
    comm.barrier()


def finalize_of_one():
    other = comm.split(0, 0)
    if comm.rank == 0:
        other.finalize()
    comm.barrier()


def left_out_step():
    """As of a rank that catches an exception in its loss function and goes on with the next step."""
    from dbrdist import optimizers
    from dbrdist.comm import create_multi_node_optimizer
    from tests.comm.training_contract import Net, batches

    model = Net()
    optimizer = create_multi_node_optimizer(optimizers.SGD().setup(model), comm)
    for step, (x, t) in enumerate(batches()):

        def loss(x, t, step=step):
            if step == 3 and comm.rank == 1:
                raise ValueError("mine")
            return model(x, t)

        try:
            optimizer.update(loss, x, t)
        except ValueError:
            continue


def one_step_more():
    if comm.rank == 0:
        comm.allreduce(np.ones(3))


def steps_given_up():
    """Rank 1 shows the header of each step before its loss fails, while the others wait for its gradients."""

    def loss(x):
        if comm.rank == 1:
            raise ArithmeticError("mine")
        return F.sum(model(x))

    model = L.Linear(200, 100)
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1), comm).setup(model)
    optimizer.update(lambda x: F.sum(model(x)), np.ones((2, 200), np.float32))
    for _ in range(3):
        with contextlib.suppress(ArithmeticError):
            optimizer.update(loss, np.ones((2, 200), np.float32))
    if comm.rank == 1:
        sys.exit(0)


def caught_and_left():
    try:
        if comm.rank == 1:
            raise ValueError("mine")
        comm.allgather_obj(1)
    except ValueError:
        sys.exit(0)


def thread_and_left():
    """The main thread of rank 0 waits for another of its threads, which waits for a rank that has left."""
    raised = []

    def receive():
        try:
            comm.recv(1, 0)
        except Exception as e:
            raised.append(e)

    if comm.rank == 0:
        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()
        raise raised[0]


deed = sys.argv[1]
comm = create_communicator(sys.argv[2] if len(sys.argv) > 2 else "flat")
comm.barrier()
began = time.monotonic()
try:
    globals()[deed]()
except Exception as e:
    os.write(1, f"{type(e).__name__}: {e}\nseconds {time.monotonic() - began:.1f}\n".encode())
    sys.exit(1)
