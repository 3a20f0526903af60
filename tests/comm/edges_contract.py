"""What communicators promise at their edges, as functions of a communicator: on thread ranks here, on processes in
tests/mpi. Own memory of what was received, messages to oneself, traffic apart, parameters that come late."""

from __future__ import annotations

import operator

import numpy as np

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist import optimizers
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.core.model.chain import Chain
from tests.comm.contract import array_of, raises, same


def check_a_broadcast_gives_each_rank_memory_of_its_own(comm):
    for root in range(comm.size):
        mine = array_of(root, (7,)) if comm.rank == root else None
        received = comm.bcast(mine, root=root)
        comm.barrier()
        received[...] = 100 + comm.rank  # the root's is its own array
        comm.barrier()
        assert (received == 100 + comm.rank).all()
        received = comm.scatter([array_of(r) for r in range(comm.size)] if comm.rank == root else None, root)
        gathered = comm.gather(received, root)
        received[...] = -1
        comm.barrier()
        for r, x in enumerate(gathered or ()):
            same(x, array_of(r))
        obj = comm.bcast_obj([comm.rank] if comm.rank == root else None, root=root)
        obj.append(comm.rank)
        comm.barrier()
        assert obj == [root, comm.rank]


def check_messages_to_oneself(comm):
    """In the order of their tags' queues, with memory of their own, and not mixed with those of others."""
    me, x = comm.rank, array_of(comm.rank, (3, 2))
    comm.send(x, me, 1)
    comm.send((x, x + 1), me, 2)
    comm.send_obj({"from": me}, me, 1)
    x[...] = 99
    pair = comm.recv(me, 2)
    assert type(pair) is tuple
    same(pair[1], array_of(me, (3, 2)) + np.float32(1))
    same(comm.recv(me, 1), array_of(me, (3, 2)))
    assert comm.recv_obj(me, 1) == {"from": me}
    right, left = (me + 1) % comm.size, (me - 1) % comm.size
    comm.send_obj("to myself", me, 3)
    if me % 2 == 0:
        comm.send_obj(f"from {me}", right, 3)
    if left % 2 == 0 and left != me:
        assert comm.recv_obj(left, 3) == f"from {left}"
    assert comm.recv_obj(me, 3) == "to myself"
    if right == me:
        assert comm.recv_obj(me, 3) == f"from {me}"
    comm.barrier()


def check_communicators_of_the_same_ranks_are_apart(comm):
    """A message on one is never received on the other, whatever the order."""
    other = comm.split(0, comm.rank)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size > 1:
        if comm.rank % 2 == 0 and right % 2:
            comm.send_obj("first", right, 4)
            other.send_obj("second", right, 4)
            comm.send(array_of(1), right, 4)
        if comm.rank % 2 and left % 2 == 0:
            assert other.recv_obj(left, 4) == "second"
            assert comm.recv_obj(left, 4) == "first"
            same(comm.recv(left, 4), array_of(1))
    same(other.allreduce(array_of(comm.rank)), comm.allreduce(array_of(comm.rank)))
    other.finalize()


def check_verbs_interleave_with_messages(comm):
    """Collectives between a send and its receive change nothing."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        comm.send_obj("around", right, 0)
        comm.barrier()
        assert comm.recv_obj(left, 0) == ("around" if comm.size == 1 else f"by {left}")
        return
    comm.barrier()
    assert comm.recv_obj(left, 0) == ("around" if left == 0 else f"by {left}")
    comm.send_obj(f"by {comm.rank}", right, 0)


class Branches(Chain):
    """A layer for each batch of a length of its own, made when it is first seen."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.short = L.Linear(None, 2, initialW=_own_values)
            self.long = L.Linear(None, 2, initialW=_own_values)

    def forward(self, x):
        return F.sum(self.short(x) if x.shape[1] < 4 else self.long(x))


def _own_values(a):
    """Initial values that differ at each call, and so between ranks."""
    a[...] = _own_values.rng.standard_normal(a.shape)


_own_values.rng = np.random.default_rng()
_own_values.dtype = None


def check_parameters_that_come_after_the_first_step(comm):
    """What the first step leaves without a shape is equal on all ranks when a later one brings it."""
    model = Branches()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1).setup(model), comm)
    for width in (3, 3, 5, 5, 3):
        x = np.full((2, width), comm.rank + 1, np.float32)
        optimizer.update(model, x)
        for name, p in sorted(model.namedparams()):
            if p.is_initialized:
                for theirs in comm.allgather(p.array):
                    assert (theirs == p.array).all(), name
    assert model.long.W.is_initialized


def check_parameters_that_come_between_two_steps(comm):
    """A forward pass outside an update gives them shape: rank 0's values everywhere."""
    model = Branches()
    optimizer = create_multi_node_optimizer(optimizers.SGD(lr=0.1).setup(model), comm)
    optimizer.update(model, np.ones((2, 3), np.float32))
    model(np.ones((2, 5), np.float32))
    for theirs in comm.allgather(model.long.W.array):
        assert (theirs == model.long.W.array).all()


def check_many_pieces(comm):
    """Called with pieces of 64 bytes: every verb that moves memory goes piece by piece, to the last."""
    big = np.arange(1001, dtype=np.float64) + comm.rank
    root = comm.size - 1
    same(comm.bcast(big if comm.rank == root else None, root=root), np.arange(1001.0) + root)
    same(comm.allreduce(big), np.arange(1001.0) * comm.size + comm.size * (comm.size - 1) / 2)
    narrow = (np.arange(333) % 50 + comm.rank).astype(np.float16)
    same(comm.allreduce(narrow), (np.arange(333) % 50 * comm.size + sum(range(comm.size))).astype(np.float16))
    for r, x in enumerate(comm.allgather(big)):
        same(x, np.arange(1001.0) + r)
    for r, x in enumerate(comm.alltoall([big + 10 * to for to in range(comm.size)])):
        same(x, np.arange(1001.0) + r + 10 * comm.rank)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(2):
        if comm.rank == 0:
            comm.send(big, right, 0)
        same(comm.recv(left, 0), np.arange(1001.0) + left)
        if comm.rank:
            comm.send(big, right, 0)
    text = {"text": "ä" * 1000, "rank": comm.rank}
    assert comm.bcast_obj(text if comm.rank == 0 else None)["text"] == text["text"]
    assert [o["rank"] for o in comm.allgather_obj(text)] == list(range(comm.size))
    comm.send_obj(text, comm.rank, 1)
    assert comm.recv_obj(comm.rank, 1) == text
    if comm.size > 1:
        comm.send_obj(text, 1, 2) if comm.rank == 0 else None
        assert comm.rank != 1 or comm.recv_obj(0, 2)["rank"] == 0
    raises(TypeError, "use recv_obj", lambda: (comm.send_obj([1], comm.rank, 0), comm.recv(comm.rank, 0)))
    comm.barrier()


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
