"""How arrays are described, copied and added, and how ranks get parts of a sum: values and bytes of one rank."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import message, primitives
from dbrdist.core.backend import as_dtype
from tests.each import each

# ---- arrays as messages ---------------------------------------------------------------------------------------------


def test_the_layout_of_a_header():
    """Number of axes, name of the type in 24 bytes, 32 lengths, whether it lies on a device, the order of axes."""
    found = message.encode(np.zeros((2, 3, 4), "<f4"), (2, 0, 1))
    assert found.dtype == np.int64 and found.size == message.HEADER_WORDS == 41 and message.NUM_SAME_WORDS == 36
    assert found[0] == 3 and found[1:4].tobytes() == b"<f4".ljust(24, b"\0")
    assert found[4:36].tolist() == [2, 3, 4] + [0] * 29 and found[36] == 0
    assert found[37:].view(np.uint8).tolist() == [2, 0, 1] + [0] * 29
    assert message.encode(np.zeros(2, as_dtype("bfloat16")), ())[1:4].tobytes().rstrip(b"\0") == b"bfloat16"
    assert message.no_header().tolist() == [0] * 41 and not message.is_on_device(found)
    found[36] = 1
    assert message.is_on_device(found)


IMAGE = np.arange(2 * 3 * 4 * 5, dtype="f4").reshape(2, 3, 4, 5)


@each(
    x=[
        IMAGE, IMAGE.transpose(0, 3, 1, 2), IMAGE.T, IMAGE[::2, :, 1:3], IMAGE[0, 0, 0, 0], IMAGE[:, :0], IMAGE[0, 0],
        IMAGE.astype(">f4"), IMAGE.astype(as_dtype("bfloat16")), IMAGE[:, ::-1],
        np.broadcast_to(IMAGE[:1], (3, 3, 4, 5)),
    ]
)  # fmt: skip
def test_arrays_arrive_as_they_lie(x):
    x = np.asarray(x)
    for y in (message.clone(x), through_a_block(x)):
        assert y.shape == x.shape and y.dtype == x.dtype.newbyteorder("=") and not np.shares_memory(x, y)
        np.testing.assert_array_equal(y.astype("f8"), x.astype("f8"))
        order = sorted(range(x.ndim), key=lambda axis: -abs(y.strides[axis]))
        assert y.transpose(order).flags.c_contiguous
        if x.size > 1 and 0 not in x.strides:
            assert order == sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


def through_a_block(x):
    """Between two others in one block of memory, each of which begins at a multiple of 64 bytes."""
    before, after = np.arange(3, dtype="u1"), np.arange(65, dtype="u1")
    found = [(message.encode(a, axes), flat) for a in (before, x, after) for flat, axes in [message.dense(a)]]
    headers = np.array([header for header, _ in found])
    raw, counts, starts = message.pack(headers, [flat for _, flat in found])
    assert counts == [3, x.nbytes, 65] and starts == [0, 64, 64 + -(-x.nbytes // 64) * 64]
    assert raw.size == starts[2] + 128 and raw[:3].tolist() == [0, 1, 2]
    first, y, last = message.unpack(raw, headers, starts)
    assert first.tolist() == [0, 1, 2] and last.tolist() == list(range(65))
    assert np.shares_memory(y, raw) == (y.size > 0)
    return y.copy(order="K")


TYPES = ["f8", "f4", "f2", "bfloat16", "i4", "c8"]


@each(dtype=TYPES, num=[1, 2, 3, 4], factors=[None, [0.5, 2.0, 0.25, 4.0]], divisor=[None, 2.0, 5.0], has_out=[0, 1])
def test_weighted_sums(dtype, num, factors, divisor, has_out):
    if dtype == "i4" and (factors or divisor):
        pytest.skip("numbers without a fraction are only added")
    kind = as_dtype(dtype)
    pieces = [(np.arange(6) + k).astype(kind) for k in range(num)]
    old = [x.copy() for x in pieces]
    out = pieces[0] if has_out else None
    total = message.weighted_sum(pieces, factors and factors[:num], divisor, out)
    weights = [1.0] * num if factors is None else factors
    expected = sum(w * x.astype("c16") for w, x in zip(weights, old)) / (divisor or 1)
    np.testing.assert_allclose(total.astype("c16"), expected, rtol=1e-6)
    assert total.dtype == ("f4" if dtype in ("f2", "bfloat16") else kind if dtype != "i4" else total.dtype)
    is_in_place = has_out and factors is None and dtype in ("f8", "f4", "c8") and num > 1
    assert (total is out) == bool(is_in_place)
    for k, (x, before) in enumerate(zip(pieces, old)):
        assert (k == 0 and is_in_place) or (x == before).all()
    assert not any(np.shares_memory(total, x) for x in pieces[bool(is_in_place) :])


class OnDevice:
    """An array of a device: no NumPy array, and it takes no arrays of the host."""

    dtype = np.dtype("f4")

    def __init__(self):
        self.seen = []

    def __imul__(self, other):
        self.seen.append(("*", other, type(other)))
        return self

    def __itruediv__(self, other):
        self.seen.append(("/", other, type(other)))
        return self


@each(**{"divisor, seen": [(4.0, ("*", 0.25, float)), (3.0, ("/", 3.0, np.float32)), (0.5, ("*", 2.0, float))]})
def test_arrays_of_a_device_are_divided_by_numbers(divisor, seen):
    x = OnDevice()
    message.divide(x, divisor)
    message.divide(x, None)
    assert x.seen == [seen]


@each(**{"divisor, factor": [(1.0, 1.0), (2.0, 0.5), (0.125, 8.0), (3.0, None), (6.0, None), (-2.0, None)]})
def test_a_power_of_two_is_a_factor(divisor, factor):
    for dtype in ("f4", "f8", "i4"):
        found = message._factor(divisor, np.dtype(dtype))
        assert found == factor
        assert found is None or dtype != "f4" or found.dtype == "f4"


@each(
    **{"dtype, narrow": [("f2", True), ("bfloat16", True), ("f4", False), ("f8", False), ("i4", False), ("c8", False)]}
)
def test_types_that_are_added_in_a_wider_one(dtype, narrow):
    assert message.is_narrow(as_dtype(dtype)) is narrow


# ---- a sum of which each rank gets a part ---------------------------------------------------------------------------


class Rank(primitives.Provider):
    """Rank 1 of three; the others have given arrays."""

    rank, size = 1, 3
    intra_rank = intra_size = inter_rank = inter_size = 0
    _post_row = _bcast_bytes = _allgather_bytes = _send_parts = _recv_parts = _reduce_host = _make_part = None

    def __init__(self, everyone):
        super().__init__()
        self.everyone, self.exchanges, self.met = [x.copy() for x in everyone], [], 0

    def _meet(self, call):
        self.met += 1

    def _exchange_bytes(self, sent, sent_counts, sent_starts, raw, counts, starts):
        self.exchanges.append((tuple(sent_counts), tuple(sent_starts)))
        self.everyone[1] = sent.view(self.everyone[1].dtype).copy()
        for k, (count, start) in enumerate(zip(counts, starts)):
            begin = sent_starts[1]
            raw[start : start + count] = self.everyone[k].view(np.uint8)[begin : begin + sent_counts[1]]

    def _allgather_own(self, raw, counts, starts):
        self.exchanges.append((tuple(counts), tuple(starts)))
        for k, (count, start) in enumerate(zip(counts, starts)):
            raw[start : start + count] = self.everyone[k].view(np.uint8)[start : start + count]


@each(dtype=["f4", ">f4", "f2"], per_turn=[2, 100], borders=[[0, 3, 8, 10], [4, 4, 7, 10]])
def test_a_rank_gets_its_part_of_a_sum_in_pieces(monkeypatch, dtype, per_turn, borders):
    everyone = [np.arange(10).astype(np.dtype(dtype).newbyteorder("=")) * (k + 1) for k in range(3)]
    comm, call = Rank(everyone), SimpleNamespace(num_bytes=5, kind=None)
    size = everyone[0].itemsize
    monkeypatch.setattr(primitives, "_SCATTERED_BYTES", per_turn * 3 * size + 1)
    x = everyone[1].astype(dtype)
    comm._reduce_scatter(call, x, borders, [1.0, 0.5, 2.0], 2.0)
    own = slice(borders[1], borders[2])
    assert x[own].tolist() == (np.arange(10) * (1 + 0.5 * 2 + 2 * 3) / 2)[own].tolist()
    assert comm.met == 1 and call.num_bytes == 5 + 10 * size and call.kind == np.dtype(dtype)
    longest = max(b - a for a, b in itertools.pairwise(borders))
    assert len(comm.exchanges) == -(-longest // per_turn)
    for turn, (counts, starts) in enumerate(comm.exchanges):
        for k, (a, b) in enumerate(itertools.pairwise(borders)):
            begin, end = min(a + turn * per_turn, b), min(a + (turn + 1) * per_turn, b)
            assert (counts[k], starts[k]) == ((end - begin) * size, begin * size)


def test_ranks_give_each_other_their_parts():
    everyone = [np.arange(10.0) * (k + 1) for k in range(3)]
    comm, call = Rank(everyone), SimpleNamespace(num_bytes=5, kind=None)
    x = everyone[1].copy()
    comm._share_parts(call, x, [0, 3, 3, 10])
    assert x.tolist() == [0, 1, 2, *(np.arange(3, 10.0) * 3)] and comm.exchanges == [((24, 0, 56), (0, 24, 24))]
    assert comm.met == 1 and call.num_bytes == 85 and call.kind == np.float64


@each(**{"dtype, size": [("f4", 3), (">f4", 3), ("f4", 0)]})
def test_what_is_done_on_the_host_comes_back(dtype, size):
    comm, call = Rank([np.zeros(1)]), SimpleNamespace(num_bytes=5, kind=None)
    x = np.arange(1, size + 1).astype(dtype)
    seen = []

    def double(host):
        seen.append(host.dtype.isnative)
        host *= 2

    comm._on_host(call, x, double)
    assert x.tolist() == [2.0 * k for k in range(1, size + 1)] and seen == [True] * (size > 0)
    assert call.num_bytes == 5 + 4 * size and call.kind == (np.dtype(dtype) if size else None)
