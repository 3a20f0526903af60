"""Communicators and processes that come and go. For tests/comm/communicators/test_communicator.py."""

import os
import signal
import sys
import tempfile
import threading
import time

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.errors import CommunicatorError


def take_most_of_mpi():
    """MPICH has 2,048 communicators: where few are left, one in each round that is not freed is noticed."""
    from mpi4py import MPI

    for _ in range(1990):
        MPI.COMM_SELF.Dup()


def many_parts():
    take_most_of_mpi()
    for i in range(int(sys.argv[2])):
        part = comm.split(i % 2 if comm.rank else 0, comm.rank)
        part.finalize()
    assert comm.allreduce(np.array(1)) == comm.size


def many_communicators():
    take_most_of_mpi()
    for _ in range(int(sys.argv[2])):
        create_communicator("hierarchical").finalize()  # which has all that the others have, and its hosts
    assert comm.allreduce(np.array(1)) == comm.size


def fork():
    """A child of the program's own ends as any process does, and MPI goes on in its parent."""
    for leave in (sys.exit, os._exit, lambda code: None):
        child = os.fork()
        if not child:
            try:
                comm.barrier()
            except CommunicatorError as e:
                os.write(1, f"child: {e}\n".encode())
            leave(0)
            os.write(1, b"child: at its end\n")
            return
        assert os.waitpid(child, 0)[1] == 0
        assert comm.allreduce(np.array(1)) == comm.size


def fork_that_fails():
    """Nor does the job end with it."""
    child = os.fork()
    if not child:
        raise ValueError("of the child alone")
    assert os.waitpid(child, 0)[1] == 256
    assert comm.allreduce(np.array(1)) == comm.size


def use_after_the_end_of_mpi():
    from mpi4py import MPI

    MPI.Finalize()
    for verb in (comm.barrier, lambda: comm.send(np.ones(1), 0, 0), lambda: comm.split(0, 0)):
        try:
            verb()
        except CommunicatorError as e:
            assert "MPI has been finalized" in str(e), e
    comm.finalize()


def windows_in_two_threads():
    parts = [comm.split(0, comm.rank) for _ in range(2)]
    results = [None, None]

    def work(i):
        results[i] = [float(parts[i].allreduce(np.full(50_000, comm.rank + i))[0]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = sum(range(comm.size))
    assert results == [[ranks + i * comm.size] * 20 for i in range(2)], results


def two_threads_on_one():
    """The second is refused; the first comes to its end."""
    if comm.rank == 0:
        waiter = threading.Thread(target=comm.barrier)
        waiter.start()
        while "unlocked" in repr(comm.gate.one_thread):
            time.sleep(0.01)
        try:
            comm.allreduce(np.ones(1))
        except CommunicatorError as e:
            assert "expected one thread at a time" in str(e), e
            assert "(barrier at " in str(e), e
        else:
            raise AssertionError("expected CommunicatorError")
        comm.send_obj("go on", 1, 0)
        waiter.join()
    else:
        if comm.rank == 1:
            comm.recv_obj(0, 0)
        comm.barrier()


def handled_signal():
    """A handler runs while its rank waits, and the wait goes on."""
    path = comm.bcast_obj(os.path.join(tempfile.mkdtemp(), "handled"))
    signal.signal(signal.SIGTERM, lambda number, frame: open(path, "w").close())
    if comm.rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    while comm.rank and not os.path.exists(path):  # the barrier waits for this, and the handler not for the barrier
        time.sleep(0.01)
    comm.barrier()


def interrupt():
    """Ctrl-C on a rank that waits for one that computes."""
    if comm.rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        getattr(comm, sys.argv[2])(*([1, 0] if sys.argv[2] == "recv" else []))
    time.sleep(200)


def failing():
    """One rank fails after some verbs: all write down what they did."""
    comm.allreduce(np.ones(6, np.float32))
    comm.bcast_obj("x" * 100)
    if comm.rank == 1:
        raise ValueError("broken on purpose")
    comm.allgather_obj(1)


deed = sys.argv[1]
comm = create_communicator("flat")
globals()[deed]()
os.write(1, f"the end of rank {comm.rank}\n".encode())
