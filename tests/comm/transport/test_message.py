"""How arrays are described, copied and added, and how ranks get parts of a sum: values and bytes of one rank."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import Variable
from dbrdist.comm.transport import message
from dbrdist.core.array.backend import as_dtype
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
    found = found.copy()
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


def test_arrays_that_travel():
    for x in (
        np.float32(3),
        np.zeros((1,) * message.MAX_NDIM),
        np.zeros(2, as_dtype("bfloat16")),
        np.zeros((), complex),
    ):
        y = message.as_array(x, "send")
        assert isinstance(y, np.ndarray) and y.shape == x.shape and y.dtype == x.dtype
    with pytest.raises(ValueError, match="send expected at most 32 dimensions, got 33"):
        message.as_array(np.lib.stride_tricks.as_strided(np.zeros(1), (1,) * 33, (0,) * 33), "send")
    for x in ([1], None):
        with pytest.raises(TypeError, match=r"send expected an array, got .*; use send_obj for objects"):
            message.as_array(x, "send")
    with pytest.raises(TypeError, match=r"got Variable; write x\.array, or for a gradient send of dbrdist\.comm"):
        message.as_array(Variable(np.ones(1)), "send")
    for dtype in (object, "V3", [("a", "f4")]):
        with pytest.raises(
            TypeError, match=r"send expected an array of numbers, got dtype .*; use send_obj for objects"
        ):
            message.as_array(np.zeros(2, dtype), "send")


A = np.arange(24.0).reshape(2, 3, 4)


@each(
    x=[
        A, A.T, A[:, :, ::2], A[::-1], A[:, ::-1], A.transpose(1, 0, 2), A[:1], A[:, :0], A[0, 0, 0], A.astype(">f8"),
        np.broadcast_to(A[0], (2, 3, 4)), np.lib.stride_tricks.as_strided(A, (3, 3), (8, 8)), np.asfortranarray(A),
        np.lib.stride_tricks.as_strided(A, (2, 3), (8, 16)), A[:, 1:2], np.zeros((0, 3)).T,
    ]
)  # fmt: skip
def test_elements_in_the_order_in_which_they_lie(x):
    flat, axes = message.dense(np.asarray(x))
    assert flat.ndim == 1 and flat.flags.c_contiguous and flat.dtype.isnative and sorted(axes) == list(range(x.ndim))
    lengths = [x.shape[axis] for axis in axes]
    np.testing.assert_array_equal(flat.reshape(lengths).transpose(np.argsort(axes)) if axes else flat.reshape(()), x)


@each(divisor=[1, 2, 3, 0.5, 8, 10], dtype=["float16", "float32", "float64", "bfloat16", "complex64"])
def test_division_in_place(divisor, dtype):
    x = np.arange(5).astype(as_dtype(dtype))
    expected = (np.arange(5) / divisor).astype(as_dtype(dtype))
    message.divide(x, divisor)
    np.testing.assert_array_equal(x, expected)
    message.divide(x, None)
    np.testing.assert_array_equal(x, expected)


@each(
    shape=[(), (0,), (1,), (3,), (2, 3), (1, 5, 1), (2, 0, 3), (4, 1, 2, 3)],
    dtype=["f8", "f4", "f2", "i8", "u1", "?", "c16", "M8[s]"],
)
def test_an_array_in_one_message_is_what_a_head_and_its_parts_are(shape, dtype):
    x = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
    head = np.concatenate([[0, 1, x.nbytes], message.encode(x, range(x.ndim))])
    raw = message.whole(x)
    assert raw == message.join(head, [message.as_bytes(x.reshape(-1))])
    found = message.taken_whole(np.frombuffer(bytearray(raw), np.uint8))
    assert found.dtype == x.dtype and found.shape == x.shape and found.tobytes() == x.tobytes()
    found[...] = 0  # it is the receiver's own
    assert found.flags.aligned


def test_other_messages_are_not_taken_for_one_array():
    x = np.arange(6.0).reshape(2, 3)
    header, flat = message.encode(x, (0, 1)), message.as_bytes(x.reshape(-1))
    turned = message.encode(x, (1, 0))
    on_device = np.array(header)
    on_device[message._ON_DEVICE] = 1
    for head, parts in (
        ([0, 1, 48, *header], []),  # the parts come afterwards
        ([1, 1, 48, *header], [flat]),  # a list of one array
        ([1, 2, 48, 48, *header, *header], [flat, flat]),
        ([2, 1, 48], [flat]),  # an object
        ([3, 1, 3], [np.frombuffer(b"bad", np.uint8)]),
        ([0, 1, 48, *turned], [flat]),
        ([0, 1, 48, *on_device], [flat]),
    ):
        raw = message.join(np.array(head, np.int64), parts)
        assert message.taken_whole(np.frombuffer(raw, np.uint8)) is None, head[:3]


def test_a_row_in_order_is_sent_as_it_is():
    x = np.arange(3)
    flat, axes = message.dense(x)
    assert flat is x and axes == (0,)
    for other in (x[::2], x.astype(">i8"), np.broadcast_to(x[:1], 3)):
        flat, axes = message.dense(other)
        assert axes == (0,) and flat.flags.c_contiguous and flat.dtype.isnative and flat.tolist() == other.tolist()
