"""What every communicator must do, as functions of a communicator: run on thread ranks here, on processes in tests/mpi.

Every datum depends on the rank it comes from, so that a verb that does nothing, or sends to the wrong rank, fails.
"""

from __future__ import annotations

import itertools
import operator

import ml_dtypes
import numpy as np

from dbrdist.comm.communicators.threads import ThreadCommunicator
from dbrdist.core.array import backend
from dbrdist.errors import CommunicatorError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = [*map(np.dtype, "?bBhHiIlLqefdgFD"), BFLOAT16, FLOAT8]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (2, 3, 4, 5), (1, 2, 1, 2, 1)]


def array_of(rank, shape=(5,), dtype=np.float32):
    """Small whole numbers, exact in every type, that differ from rank to rank and from entry to entry."""
    n = int(np.prod(shape))
    return ((np.arange(n) + 3 * rank) % 5).astype(dtype).reshape(shape)


def same(a, b):
    assert type(a) is np.ndarray
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    np.testing.assert_array_equal(a.astype(np.complex128), b.astype(np.complex128))


def layouts(x):
    """The same values in several places of memory."""
    yield x
    yield np.asfortranarray(x)
    if x.ndim:
        wide = np.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)
        wide[::2] = x
        yield wide[::2]
        yield x[::-1].copy()[::-1]
    if x.ndim == 4:
        yield backend.channels_last(x)
    yield np.broadcast_to(x[:1], x.shape) if x.ndim and x.shape[0] == 1 else x


def reduce(comm, x, factors, divisor):
    """A weighted sum in place, as the reduction of gradients does it."""
    with comm.gate.call("reduce") as call:
        call.meet_without_row()
        comm.reducer.reduce(call, x, factors, divisor)


def check_rank_and_size(comm):
    assert 0 <= comm.rank < comm.size
    assert comm.allgather_obj(comm.rank) == list(range(comm.size))
    assert 0 <= comm.intra_rank < comm.intra_size <= comm.size
    assert 0 <= comm.inter_rank < comm.inter_size <= comm.size
    places = comm.allgather_obj((comm.inter_rank, comm.intra_rank))
    assert len(set(places)) == comm.size


def check_bcast_every_type_shape_and_root(comm):
    for root, dtype, shape in itertools.product(range(comm.size), DTYPES, SHAPES):
        expected = array_of(root, shape, dtype)
        mine = expected if comm.rank == root else None
        received = comm.bcast(mine, root=root)
        same(received, expected)
        if comm.rank == root:
            assert received is mine
    for max_buf_len in (1, 3, 1000):
        same(comm.bcast(array_of(comm.rank, (9,)), max_buf_len, 0), array_of(0, (9,)))


def check_layouts_arrive(comm):
    for shape in [(1, 3), (2, 3), (2, 3, 4, 5)]:
        for variant in range(5):
            mine, expected = (
                next(itertools.islice(layouts(array_of(r, shape)), variant, None), array_of(r, shape))
                for r in (comm.rank, 0)
            )
            same(comm.bcast(mine), expected)
            for r, x in enumerate(comm.allgather(mine)):
                same(x, array_of(r, shape))
            same(comm.allreduce(mine), sum(array_of(r, shape) for r in range(comm.size)))
    image = backend.channels_last(array_of(comm.rank, (2, 3, 4, 5)))
    others = np.ascontiguousarray(image) if comm.rank else image
    assert all(backend.is_channels_last(x) for x in comm.allgather(image))
    assert backend.is_channels_last(comm.allreduce(others))
    same(comm.allreduce(others), sum(array_of(r, (2, 3, 4, 5)) for r in range(comm.size)))


def check_received_arrays_have_their_own_memory(comm):
    mine = array_of(comm.rank)
    received = [*comm.allgather(mine), *comm.alltoall([mine] * comm.size), comm.allreduce(mine)]
    comm.barrier()
    mine[...] = 99
    comm.barrier()
    assert not any((x == 99).any() for x in received)
    for x in received:
        x[...] = -1
    assert (mine == 99).all()


def check_gather_and_allgather(comm):
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        for r, x in enumerate(comm.allgather(array_of(comm.rank, shape, dtype))):
            same(x, array_of(r, shape, dtype))
    for root in range(comm.size):
        gathered = comm.gather(array_of(comm.rank, (2, 2)), root)
        if comm.rank != root:
            assert gathered is None
        else:
            assert isinstance(gathered, tuple)
            for r, x in enumerate(gathered):
                same(x, array_of(r, (2, 2)))


def _odd_one(r):
    """An array whose shape and type follow from the rank; empty on rank 0."""
    return array_of(r, (r, *range(1, r + 1)), DTYPES[(5 * r) % len(DTYPES)])


def check_shapes_may_differ_by_rank(comm):
    for r, x in enumerate(comm.allgather(_odd_one(comm.rank))):
        same(x, _odd_one(r))
    gathered = comm.gather(_odd_one(comm.rank), comm.size - 1)
    for r, x in enumerate(gathered or ()):
        same(x, _odd_one(r))
    for r, x in enumerate(comm.alltoall([_odd_one(comm.rank + 2 * to) for to in range(comm.size)])):
        same(x, _odd_one(r + 2 * comm.rank))


def check_scatter(comm):
    for root in range(comm.size):
        arrays = [_odd_one(r + root) for r in range(comm.size)] if comm.rank == root else None
        same(comm.scatter(arrays, root), _odd_one(comm.rank + root))
        rows = array_of(root, (comm.size, 3), BFLOAT16)
        same(comm.scatter(rows if comm.rank == root else None, root), rows[comm.rank])


def check_allreduce_every_type(comm):
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        mine = array_of(comm.rank, shape, dtype)
        kept = mine.copy()
        wide = np.sum([array_of(r, shape, dtype).astype(np.complex128) for r in range(comm.size)], 0)
        expected = wide.astype(bool) if dtype.kind == "b" else wide.real if dtype.kind != "c" else wide
        same(comm.allreduce(mine), np.asarray(expected).astype(dtype))
        same(mine, kept)
    same(comm.allreduce(np.float32(comm.rank)), np.array(sum(range(comm.size)), np.float32))


def check_sums_of_16_bit_types_run_in_float32(comm):
    rng = np.random.default_rng(5)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        everyone = rng.normal(size=(comm.size, 1001)).astype(dtype)
        exact = everyone.astype(np.float64).sum(0)
        same(comm.allreduce(everyone[comm.rank]), exact.astype(np.float32).astype(dtype))
    # A mean whose sum does not fit into float16: it must be divided before it is narrowed.
    x = np.full(3, 40000, np.float16)
    reduce(comm, x, None, float(comm.size))
    same(x, np.full(3, 40000, np.float16))


def check_weighted_sums(comm):
    weights = [0.5 + r for r in range(comm.size)]
    for dtype, tolerance in [(np.float64, 1e-15), (np.float32, 1e-6), (np.float16, 1e-3), (BFLOAT16, 8e-3)]:
        x = array_of(comm.rank, (1001,), dtype)
        reduce(comm, x, weights, 3.0)
        expected = sum(w * array_of(r, (1001,), np.float64) for r, w in enumerate(weights)) / 3
        np.testing.assert_allclose(x.astype(np.float64), expected, rtol=tolerance, atol=tolerance)
        same(comm.bcast(x), x)  # the same bits everywhere


def check_large_array(comm):
    # An odd number of elements; between processes more than a rendezvous and than a piece of two levels.
    n = 300_001 if isinstance(comm, ThreadCommunicator) else 3_000_001
    for dtype in (np.float32, np.float16):
        x = np.arange(n, dtype=np.uint32).view(np.float32).astype(dtype) * 0 + dtype(comm.rank + 1)
        x[-1] = comm.rank
        y = comm.allreduce(x)
        assert (y[:-1] == comm.size * (comm.size + 1) // 2).all()
        assert y[-1] == comm.size * (comm.size - 1) // 2
    last = comm.bcast(np.arange(n) if comm.rank == comm.size - 1 else None, root=comm.size - 1)
    assert last[-1] == n - 1
    assert [x[-1] for x in comm.allgather(np.full(n + comm.rank, comm.rank, np.int8))] == list(range(comm.size))


def check_send_and_recv(comm):
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, (dtype, shape) in enumerate(itertools.product(DTYPES[::3], SHAPES)):
        if comm.rank == 0:
            comm.send(array_of(0, shape, dtype), to, tag)
            same(comm.recv(source, tag), array_of(0, shape, dtype))
        else:
            received = comm.recv(source, tag)
            comm.send(received, to, tag)
    pair = (array_of(comm.rank, (2, 3)), array_of(comm.rank + 1, (0,), BFLOAT16))
    for sent, kind in [(pair, tuple), (list(pair), tuple), ((), tuple), (pair[:1], tuple)]:
        comm.send(sent, to, 7) if comm.rank == 0 else None
        received = comm.recv(source, 7)
        comm.send(sent, to, 7) if comm.rank else None
        assert type(received) is kind
        assert len(received) == len(sent)
        for x, y in zip(received, (array_of(source, (2, 3)), array_of(source + 1, (0,), BFLOAT16))):
            same(x, y)


def check_messages_keep_order_and_tag(comm):
    me = comm.rank
    for i in range(3):
        comm.send(np.array(10 * i + me), me, 1)
    comm.send_obj("other tag", me, 2)
    assert comm.recv_obj(me, 2) == "other tag"
    assert [int(comm.recv(me, 1)) for _ in range(3)] == [me, 10 + me, 20 + me]


def check_objects(comm):
    mine = {"rank": comm.rank, "text": "ä" * (comm.rank + 1)}
    assert comm.allgather_obj(mine) == [{"rank": r, "text": "ä" * (r + 1)} for r in range(comm.size)]
    for root in range(comm.size):
        assert comm.bcast_obj(mine if comm.rank == root else None, 7, root)["rank"] == root
        gathered = comm.gather_obj(comm.rank**2, root)
        assert gathered == ([r**2 for r in range(comm.size)] if comm.rank == root else None)
        assert comm.scatter_obj([f"for {r}" for r in range(comm.size)] if comm.rank == root else None, root) == (
            f"for {comm.rank}"
        )
    assert comm.allreduce_obj(comm.rank + 1) == comm.size * (comm.size + 1) // 2
    assert comm.allreduce_obj([comm.rank]) == list(range(comm.size))
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        comm.send_obj(mine, to, 3)
        assert comm.recv_obj(source, 3)["rank"] == source
    else:
        assert comm.recv_obj(source, 3)["rank"] == source
        comm.send_obj(mine, to, 3)


def check_split_keeps_configuration(comm):
    comm.set_config("batched_copy", False)
    comm.set_config("allreduce_grad_dtype", "bfloat16")
    part = comm.split(comm.rank % 2, -comm.rank)
    assert type(part) is type(comm)
    assert part.get_config("batched_copy") is False
    assert part.get_config("allreduce_grad_dtype") == BFLOAT16
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2][::-1]
    assert part.allgather_obj(comm.rank) == members
    assert members[part.rank] == comm.rank
    same(part.allreduce(array_of(comm.rank)), sum(array_of(r) for r in members))
    part.set_config("batched_copy", True)
    assert comm.get_config("batched_copy") is False
    alone = part.split(part.rank, 0)
    assert (alone.rank, alone.size) == (0, 1)
    same(alone.allreduce(array_of(comm.rank)), array_of(comm.rank))
    nobody = comm.split(None if comm.rank == 0 else 0, 0)
    assert (nobody is None) == (comm.rank == 0)
    for one in (alone, part, nobody):
        if one is not None:
            one.finalize()
    comm.set_config("batched_copy", True)
    comm.set_config("allreduce_grad_dtype", None)


def check_configuration(comm):
    assert comm.get_config()["batched_copy"] is True
    comm.set_config("batched_copy", False)
    assert comm.get_config("batched_copy") is False
    comm.set_config("batched_copy")
    assert comm.get_config("batched_copy") is True
    raises(ValueError, "did you mean 'batched_copy'", lambda: comm.set_config("batch_copy", True))
    raises(ValueError, "unknown configuration 'x'", lambda: comm.get_config("x"))
    raises(ValueError, "expected a float type", lambda: comm.set_config("allreduce_grad_dtype", "int8"))
    assert comm.within_config_scope is False
    with comm.config_scope():
        assert comm.within_config_scope
        comm.own_entry = comm.rank
    assert comm.get_config("own_entry") == comm.rank
    comm.after = 1
    assert "after" not in comm.get_config()


def raises(kind, text, function):
    try:
        function()
    except kind as e:
        assert text in str(e), str(e)
        return
    raise AssertionError(f"expected {kind.__name__} with {text!r}")


def check_wrong_arguments_raise_on_every_rank(comm):
    bad_rank = comm.size - 1
    bad = comm.rank == bad_rank
    good, objects = array_of(comm.rank), np.array([object()])
    for name, function in [
        ("allgather", lambda x: comm.allgather(x)),
        ("gather", lambda x: comm.gather(x, 0)),
        ("allreduce", lambda x: comm.allreduce(x)),
        ("bcast", lambda x: comm.bcast(x, root=bad_rank)),
        ("alltoall", lambda x: comm.alltoall([x] * comm.size)),
        ("scatter", lambda x: comm.scatter([x] * comm.size, bad_rank)),
    ]:
        raises(TypeError, f"{name} expected an array", lambda f=function: f(objects if bad else good))
        raises(TypeError, f"{name} expected an array", lambda f=function: f("text" if bad else good))
    for name in ("alltoall", "scatter"):
        verb = getattr(comm, name)
        raises(ValueError, f"expected {comm.size} arrays", lambda v=verb: v([good] * (comm.size + (comm.rank == 0))))
        arrays = None if comm.rank == 0 else [good] * comm.size
        raises(TypeError, f"expected {comm.size} arrays", lambda v=verb, a=arrays: v(a))
    raises(ValueError, "expected", lambda: comm.scatter_obj([1] * (comm.size + 1)))
    raises(ValueError, f"expected a rank from 0 to {comm.size - 1}", lambda: comm.bcast(good, root=comm.size))
    raises(ValueError, f"expected a rank from 0 to {comm.size - 1}", lambda: comm.send(good, -1, 0))
    raises(TypeError, "can be pickled", lambda: comm.bcast_obj((lambda: 0) if bad else None, root=bad_rank))
    raises(TypeError, "can be pickled", lambda: comm.allgather_obj((lambda: 0) if bad else None))
    raises(TypeError, "expected numbers", lambda: comm.allreduce(np.array(["2026"], "M8[Y]")))
    if comm.size > 1 and comm.rank == 0:
        raises(ValueError, "send expected at most 32 dimensions", lambda: comm.send(np.ones((1,) * 33), 1, 0))
    elif comm.rank == 1:
        raises(TypeError, "send expected at most 32 dimensions", lambda: comm.recv(0, 0))
    check_send_and_recv(comm)  # nothing is left over


def check_mismatched_sums_raise_on_every_rank(comm):
    if comm.size == 1:
        return
    wrong = comm.rank == comm.size - 1
    who = f"on rank {comm.size - 1}"
    raises(CommunicatorError, who, lambda: comm.allreduce(array_of(0, (4 + wrong,))))
    raises(CommunicatorError, f"float64 {who}", lambda: comm.allreduce(array_of(0, (4,), "d" if wrong else "f")))
    same(comm.allreduce(array_of(comm.rank)), sum(array_of(r) for r in range(comm.size)))


def check_objects_and_arrays_are_not_mixed_up(comm):
    comm.send_obj([1, 2], comm.rank, 0)
    raises(TypeError, "use recv_obj", lambda: comm.recv(comm.rank, 0))
    comm.send(array_of(0), comm.rank, 0)
    raises(TypeError, "use recv", lambda: comm.recv_obj(comm.rank, 0))
    comm.send_obj("next", comm.rank, 0)
    assert comm.recv_obj(comm.rank, 0) == "next"


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
by_name = operator.attrgetter("__name__")
