"""Tests of dbrdist.comm.communicators.nccl."""

import contextlib
import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.communicators import nccl
from dbrdist.comm.communicators.nccl import NcclGradients, NcclReducer, NcclRing
from dbrdist.comm.communicators.shared_memory import FlatReducer
from dbrdist.comm.protocol.wire_type import codec_for
from dbrdist.comm.transport import message
from dbrdist.core.array import backend
from dbrdist.core.array.backend import as_dtype
from tests.each import each


class OnDevice(np.ndarray):
    """An array whose memory has an address, as CuPy's; ``get`` and ``set`` copy between it and the host."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(x):
    return np.array(x).view(OnDevice)


class FakeNccl:
    """NCCL as rank 1 of three has it: the others have twice and thrice what it has at the start."""

    NCCL_SUM = "sum"

    def __init__(self, x):
        self.start, self.log, self.group = x.copy(), [], None
        for name in {name for name, _ in nccl._TYPES.values()}:
            setattr(self, name, name)

    def NcclCommunicator(self, size, unique_id, rank):
        self.log.append(("made", size, unique_id, rank))
        return self

    def destroy(self):
        self.log.append(("destroy",))

    def groupStart(self):
        assert self.group is None
        self.group = []

    def groupEnd(self):
        found, self.group = self.group, None
        self.log.append(("group", found))

    def allReduce(self, sent, received, count, kind, op, stream):
        self.log.append(("allReduce", sent == received, sent, count, kind, op, stream))

    def send(self, *args):
        self.group.append(("send", *args))

    def recv(self, *args):
        self.group.append(("recv", *args))


@pytest.fixture
def ring(monkeypatch):
    """Makes a ring of three of which this is rank 1, and its NCCL."""
    monkeypatch.setattr(backend, "current_device", lambda: "device 0")
    monkeypatch.setattr(backend, "current_stream", lambda: 77)

    def make(x):
        fake = FakeNccl(x)
        fake.NCCL_UINT8 = "NCCL_UINT8"
        return NcclRing(fake, 3, b"id", 1), fake

    return make


WIDTHS = {"complex64": ("NCCL_FLOAT32", 2), "complex128": ("NCCL_FLOAT64", 2)}


@each(dtype=list(nccl._TYPES), factors=[None, [9.0, 2.0, 9.0]], divisor=[None, 4.0])
def test_nccl_adds_the_types_that_it_has(ring, dtype, factors, divisor):
    if divisor and np.dtype(dtype).kind in "iu":
        pytest.skip("numbers without a fraction are only added")
    x = on_device(np.arange(4).astype(dtype))
    one, fake = ring(x)
    one.reduce(x, factors, divisor)
    name, width = WIDTHS.get(dtype, (f"NCCL_{dtype.upper()}", 1))
    assert fake.log == [("made", 3, b"id", 1), ("allReduce", True, x.ctypes.data, 4 * width, name, "sum", 77)]
    assert x.tolist() == (np.arange(4).astype(dtype) * (2 if factors else 1) / (divisor or 1)).tolist()
    one.reduce(x[:0])
    one.free()
    assert fake.log[2:] == [("destroy",)] and one.device == "device 0"


def memory(place, num_bytes):
    return (ctypes.c_uint8 * num_bytes).from_address(place)


@each(dtype=["f2", "bfloat16"], size=[10, 2], factors=[None, [1.0, 0.5, 2.0]])
def test_other_types_are_added_here(ring, monkeypatch, dtype, size, factors):
    """Each rank adds its block of all ranks in order, in float32, and gives the narrowed sum to all."""
    kind = as_dtype(dtype)
    everyone = [(np.arange(size) * (k + 1)).astype(kind) for k in range(3)]
    x = on_device(everyone[1])
    one, fake = ring(x)
    monkeypatch.setattr(backend, "empty", lambda shape, dtype, like: on_device(np.zeros(shape, dtype)))
    borders = message.blocks(size, 3)
    weights = factors or [1.0] * 3
    total = sum(np.float32(w) * e.astype("f4") for w, e in zip(weights, everyone)) / np.float32(2)
    end, groups = fake.groupEnd, []

    def finish():
        """The others' blocks come, first of what they have, then of sums."""
        groups.append(list(fake.group))
        for verb, place, num_bytes, how, peer, stream in fake.group:
            assert (how, stream) == ("NCCL_UINT8", 77) and peer in (0, 2)
            block = slice(*borders[peer : peer + 2]) if (len(groups) == 1) == (verb == "send") else slice(*borders[1:3])
            if verb == "send":
                given = (everyone[1] if len(groups) == 1 else total.astype(kind))[block]
                assert bytes(memory(place, num_bytes)) == given.tobytes()
            else:
                given = everyone[peer] if len(groups) == 1 else total.astype(kind)
                np.frombuffer(memory(place, num_bytes), np.uint8)[...] = given[block].view(np.uint8)
        end()

    fake.groupEnd = finish
    one.reduce(x, factors, 2.0)
    assert x.tobytes() == total.astype(kind).tobytes() and len(groups) == 2
    own = borders[2] - borders[1]
    num_moved = [sum(borders[p + 1] > borders[p] for p in (0, 2)), 2 * (own > 0)]
    assert [sum(g[0] == "send" for g in group) for group in groups] == num_moved
    assert [sum(g[0] == "recv" for g in group) for group in groups] == num_moved[::-1]


def test_a_group_ends_where_a_call_fails(ring):
    one, fake = ring(np.zeros(1))
    with pytest.raises(ZeroDivisionError):
        one._together(lambda k, stream: 1 // 0, None)
    assert fake.group is None and fake.log[-1] == ("group", [])


@each(**{"dtype, config, sent": [("f4", None, "f4"), ("f4", "f2", "f2"), ("f8", "f4", "f4"), ("f4", "f4", "f4")]},
      parts=[None, [(1, 2, 5)], [(0, 0, 4), (1, 0, 8)]])  # fmt: skip
def test_gradients_are_sent_by_nccl_in_the_configured_type(dtype, config, sent, parts):
    grads = [np.arange(8).astype(dtype), np.arange(8, 16).astype(dtype)]
    before = [g.copy() for g in grads]
    seen = []

    def reduce(x, factors, divisor):
        seen.append((x.dtype, x.size, factors, divisor))
        x *= 2

    plan = SimpleNamespace(runs=[SimpleNamespace(grad=g) for g in grads])
    comm = SimpleNamespace(size=2, get_config=lambda name: as_dtype(config) if config else None)
    comm.comm = comm.ranks = comm  # a reducer, as far as this asks
    call = SimpleNamespace(num_bytes=0, kind=None)
    one = NcclGradients(SimpleNamespace(reduce=reduce, size=2, largest=lambda x: None), plan)
    one.reduce(comm, call, None, 2.0, parts)
    found = [(0, 0, 8), (1, 0, 8)] if parts is None else parts
    assert seen == [(np.dtype(sent), end - begin, None, 2.0) for _, begin, end in found]
    for k, (grad, old) in enumerate(zip(grads, before)):
        expected = old.copy()
        for number, begin, end in found:
            if number == k:
                expected[begin:end] *= 2
        np.testing.assert_array_equal(grad, expected)
    assert call.num_bytes == sum(end - begin for _, begin, end in found) * np.dtype(dtype).itemsize
    seen.clear()
    one.reduce_scatter(comm, call, [1.0], None, [(0, 0, 1)])
    assert [s[1:] for s in seen] == [(8, [1.0], None)] * 2


@each(largest=[0.0, 1e-8, 3.5, 70000.0, 2.0**-140, np.inf, np.nan], others=[1.0, 2.0**20])
def test_gradients_of_16_bits_are_scaled_as_on_the_host(largest, others):
    """By the power of two on which ``wire_type.Scaled`` agrees, for the largest number of all ranks."""
    grad, dtype = np.array([0.0, -largest, largest / 2], np.float32), np.dtype(np.float16)

    def raise_to_others(x):
        x *= others

    scale = nccl._scale_for(dtype, SimpleNamespace(largest=raise_to_others), grad, 3.0)
    codec = codec_for(dtype)
    mine = float(grad.max() if not np.isnan(largest) else np.nan)
    codec.fit(float(np.float64(np.float32(largest)) * others * 3.0) if largest == largest else mine)
    assert scale.dtype == np.float32 and scale.tolist() == [codec.scale]


def test_means_are_divided_by_nccl_itself(ring):
    x = on_device(np.arange(4, dtype=np.float32))
    one, fake = ring(x)
    fake.NCCL_AVG = "mean"
    one.reduce(x, None, 3.0)
    one.reduce(x, [1.0] * 3, 2.0)
    assert [entry[5] for entry in fake.log[1:]] == ["mean", "sum"]
    assert x.tolist() == [0, 0.5, 1, 1.5]  # divided here only where the divisor is another
    y = on_device(np.arange(4, dtype=np.int32))
    one.reduce(y, None, None)
    assert fake.log[-1][5] == "sum"


@each(**{"places, rank, allowed, other": [
    ([(0, 1), (0, 2)], 0, "", None), ([(0, 1), (1, 1)], 0, "", None), ([(0, 1), (0, 1)], 0, "", 1),
    ([(0, 1), (0, 1)], 1, "0", 0), ([(0, 1), (0, 1)], 1, "1", None), ([(0, 1), (0, 2), (0, 1), (0, 1)], 2, "", 0),
]})  # fmt: skip
def test_two_ranks_do_not_share_a_gpu(monkeypatch, places, rank, allowed, other):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", allowed)
    error = nccl._shared_device(places, rank, "0000:17")
    assert (error is None) == (other is None)
    text = f"expected a GPU for each rank, but rank {rank} uses that of rank {other} (0000:17); call dbrdist.get_device"
    assert error is None or (type(error) is ValueError and text in str(error))


class Nccl(NcclReducer):
    """Rank 0 of two, without MPI and without a GPU."""

    def __init__(self, size=2, rank=0):
        super().__init__(SimpleNamespace(ranks=SimpleNamespace(size=size, rank=rank, inter_rank=3)))


@each(**{"size, others, has_ring": [(1, [1], False), (2, [1, 1], True), (2, [1, 0], False), (2, [0, 0], False)]})
def test_a_ring_is_made_where_all_ranks_have_their_arrays_on_devices(monkeypatch, size, others, has_ring):
    comm, made, asked = Nccl(size), [], []
    monkeypatch.setattr(comm, "_make_ring", lambda call: made.append(call) or "ring")
    call = SimpleNamespace(agree=lambda word: asked.append(word) or np.array([[n, 5] for n in others]))
    for _ in range(2):
        assert comm._ring_if_all(call, True) == ("ring" if has_ring else None)
    assert made == [call] * has_ring and asked == [[True]] * 2 * (size > 1)


@each(has_ring=[True, False])
def test_what_nccl_reduces(monkeypatch, has_ring):
    comm, asked, call = Nccl(), [], "call"
    ring = SimpleNamespace(reduce=lambda x: asked.append(("ring", x))) if has_ring else None
    monkeypatch.setattr(comm, "_are_on_my_device", lambda arrays: asked.append(arrays) or True)
    monkeypatch.setattr(comm, "_ring_if_all", lambda call, is_mine: asked.append(is_mine) or ring)
    comm.comm.get_config = lambda name: False  # no overlap
    for name in ("share_gradients", "overlap"):
        monkeypatch.setattr(FlatReducer, name, lambda self, call, plan, name=name: f"flat {name}")
    plan = SimpleNamespace(runs=[SimpleNamespace(grad="g")], shared=None)
    found = comm.share_gradients(call, plan)
    assert asked == [["g"], True]
    plan.shared = found
    assert comm.overlap(call, plan) == (None if has_ring else "flat overlap")
    assert type(found) is NcclGradients and found._grads == ["g"] if has_ring else found == "flat share_gradients"
    plan.place = 0
    assert comm.why_staged(None) is comm.why_staged(plan) is None  # not known yet
    plan.place = 1
    reason = comm.why_staged(plan)
    assert reason is None if has_ring else "not on the GPU that it uses for NCCL" in reason
    asked.clear()
    comm.share_gradients(call, SimpleNamespace(runs=[]))
    assert asked == [[], False]  # no gradients are on no device
    asked.clear()
    reduce = comm.for_arrays_like(call, "x")
    assert asked == [["x"], True]
    if has_ring:
        reduce("call", "y")
        assert asked[-1] == ("ring", "y")
    else:
        assert reduce == comm.reduce


@each(**{"ring, current, arrays, is_mine": [
    (None, 0, [0, 0], True), (None, 1, [0], False), (None, 0, [0, 1], False), (1, 0, [1], True), (1, 1, [0], False),
    (None, 0, [], True), (None, 0, ["host", 0], False), (None, 0, [0, "host"], False),
]})  # fmt: skip
def test_arrays_are_on_the_device_of_the_ring_or_the_current_one(monkeypatch, ring, current, arrays, is_mine):
    comm = Nccl()
    comm._ring = None if ring is None else SimpleNamespace(device=ring)
    monkeypatch.setattr(backend, "current_device", lambda: current)
    monkeypatch.setattr(backend, "device_of", lambda a: a)
    assert comm._are_on_my_device([np.ones(1) if a == "host" else a for a in arrays]) is is_mine


@each(rank=[0, 1])
def test_a_ring_is_made_with_the_id_of_rank_0(monkeypatch, rank):
    comm, shown, made, moves = Nccl(2, rank), [], [], []
    unique_id = bytes(range(128))
    monkeypatch.setattr(backend, "import_nccl", lambda: SimpleNamespace(get_unique_id=lambda: unique_id))
    monkeypatch.setattr(backend, "bus_id_of_device", lambda: "bus 7")
    monkeypatch.setattr(nccl, "NcclRing", lambda *args: made.append(args[1:]) or "ring")
    words = np.frombuffer(unique_id, np.int64)

    def agree(payload, error=None):
        shown.append((list(payload), error))
        return np.array([[3, 5, *words, *[9] * 24], [4, 5, *[0] * 16, *[9] * 24]])

    @contextlib.contextmanager
    def moving():
        moves.append(1)
        yield

    assert comm._make_ring(SimpleNamespace(agree=agree, moving=moving)) == "ring"
    own = words.tolist() if rank == 0 else [0] * 16
    assert shown == [([3, nccl.digest("bus 7"), *own], None), ([], None)]
    assert made == [(2, unique_id, rank)] and moves == [1]


def test_the_ring_is_given_back_before_the_rest(monkeypatch):
    done = []
    monkeypatch.setattr(FlatReducer, "free", lambda self: done.append("rest"))
    comm = Nccl()
    comm.free()
    comm._ring = SimpleNamespace(free=lambda: done.append("ring"))
    comm.free()
    assert done == ["rest", "ring", "rest"] and comm._ring is None


@each(reason=["", "CuPy finds no GPU"])
def test_pure_nccl_says_what_it_needs(monkeypatch, reason):
    monkeypatch.setattr(backend, "why_no_nccl", lambda: reason)
    error = Nccl().misfit()
    text = "'pure_nccl' expected CuPy with NCCL, and a GPU on every rank, but CuPy finds no GPU; use 'auto' or 'flat'"
    assert error is None if not reason else type(error) is RuntimeError and text in str(error)


# ---- errors of collectives under way


class Failing(FakeNccl):
    """One that finds an error at the third look."""

    looks = 0

    def check_async_error(self):
        self.looks += 1
        if self.looks == 3:
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR")

    def abort(self):
        self.log.append(("abort",))


def test_an_error_of_a_collective_aborts_it_and_ends_the_thread_with_a_report(monkeypatch):
    died = []
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(nccl.threading, "excepthook", died.append)
    monkeypatch.setattr(backend, "current_device", lambda: "device 0")
    fake = Failing(np.zeros(3))
    ring = NcclRing(fake, 3, b"id", 1)
    ring._errors._thread.join(60)
    assert fake.log[-1] == ("abort",) and fake.looks == 3
    (args,) = died
    assert isinstance(args.exc_value, nccl.CommunicatorError)
    assert "rank 1: NCCL reports an error" in str(args.exc_value) and "REMOTE_ERROR" in str(args.exc_value)
    ring.free()


def test_nobody_asks_for_a_ring_that_is_gone(monkeypatch):
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 1000)
    monkeypatch.setattr(backend, "current_device", lambda: "device 0")
    ring = NcclRing(Failing(np.zeros(3)), 3, b"id", 1)
    thread = ring._errors._thread
    del ring
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_nobody_asks_after_the_end(monkeypatch):
    monkeypatch.setattr(nccl, "_LOOK_SECONDS", 1000)
    monkeypatch.setattr(backend, "current_device", lambda: "device 0")
    fake = Failing(np.zeros(3))
    ring = NcclRing(fake, 3, b"id", 1)
    ring.free()
    assert not ring._errors._thread.is_alive() and fake.looks == 0 and fake.log[-1] == ("destroy",)


# ---- auto


class Auto(nccl.AutoCommunicator):
    """One of several ranks, without MPI."""

    def __init__(self, leaders, rank=0):
        self.ranks = SimpleNamespace(
            leaders=leaders, rank=rank, size=len(leaders), intra_rank=leaders[:rank].count(leaders[rank])
        )
        self.config = {**nccl.FlatReducer.settings}
        self.reducer = "flat"


@pytest.fixture
def machine(monkeypatch):
    """A function that says what a rank has: GPUs, the current one, and why there is no NCCL."""
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nccl, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(nccl, "NcclReducer", lambda comm: "nccl")

    def has(count, current=0, why=""):
        runtime = SimpleNamespace(getDevice=lambda: current, deviceGetPCIBusId=lambda n: f"0000:{n}")
        cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        monkeypatch.setattr(backend, "import_cupy", lambda: cupy)
        monkeypatch.setattr(backend, "num_gpus", lambda: count)
        monkeypatch.setattr(backend, "why_no_nccl", lambda: why)

    return has


def settled(machine, ranks, leaders=None, rank=0):
    """The communicator of a rank, after each has told what it has: (GPUs, current one, why no NCCL)."""
    leaders = leaders or [0] * len(ranks)
    rows = []
    for k, what in enumerate(ranks):
        machine(*what)
        rows.append(Auto(leaders, k)._facts())
    machine(*ranks[rank])
    comm = Auto(leaders, rank)
    comm._facts()
    comm._settle(np.array(rows, np.int64))
    return comm


@each(**{"ranks, leaders, is_nccl": [
    ([(4,), (4,), (4,), (4,)], None, True),  # each sees all of them, and takes that of its number
    ([(1, 0), (1, 0)], [0, 1], True),  # on two hosts
    ([(1,), (1,)], None, False), ([(2,), (2,), (2,)], None, False), ([(2, 1), (2, 1)], None, False),
    ([(0,), (0,)], None, False), ([(2,), (2, 0, "no libnccl")], None, False), ([(2, 1), (2, 0)], None, False),
    ([(4,)], None, False),
]})  # fmt: skip
def test_auto_takes_nccl_where_each_rank_has_a_gpu_of_its_own(machine, ranks, leaders, is_nccl):
    for rank in range(len(ranks)):
        comm = settled(machine, ranks, leaders, rank)
        assert type(comm) is (nccl.NcclCommunicator if is_nccl else nccl.FlatCommunicator)
        assert comm.reducer == ("nccl" if is_nccl else "flat")


def test_auto_says_what_staging_costs_where_there_are_gpus_without_nccl(machine):
    assert settled(machine, [(2,), (2,)]).why.startswith("each rank has a GPU of its own: device arrays are added by")
    cost = "device arrays go through host memory, 640 ms for each GB on an H100; NCCL is not used: "
    assert settled(machine, [(1,), (1,)]).why == cost + "there are fewer GPUs than ranks"
    assert settled(machine, [(2, 0, "no libnccl"), (2,)]).why == cost + "no libnccl"
    assert settled(machine, [(2,), (2, 0, "no libnccl")]).why == cost + "rank 1 cannot use it"
    assert settled(machine, [(0,), (0,)]).why == "" and settled(machine, [(4,)]).why == ""
    words = "gradients: 102 MB go through host memory in each step, which takes about 65 ms by the copies of an H100"
    assert nccl.cost_of_staging(102_000_000).startswith(words)


def test_ranks_without_a_gpu_load_nothing(monkeypatch):
    def load():
        raise AssertionError("CuPy was loaded")

    monkeypatch.setattr(backend, "import_cupy", load)
    for found, driver in ((None, (13, 0)), ("cupy", None)):
        monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name, found=found: found)
        monkeypatch.setattr(nccl, "driver_cuda", lambda driver=driver: driver)
        assert nccl.own_gpu(0) == ("there is no GPU", "")


def test_an_error_of_cuda_is_a_reason_and_ends_nothing(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(backend, "num_gpus", lambda: 1 // 0)
    assert nccl.own_gpu(0) == ("ZeroDivisionError: integer division or modulo by zero", "")
