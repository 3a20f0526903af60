"""Connections between hosts, here between threads; between processes in tests/mpi/test_mpi_cable.py."""

import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import cable as cables
from dbrdist.comm.cable import connect
from dbrdist.comm.codec import Codec, Narrowed, Scaled
from dbrdist.comm.pipeline import Sum
from dbrdist.errors import CommunicatorError
from tests.each import each

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


class Ranks:
    """What connect needs of MPI, among threads."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._said = [None] * size

    def of(self, rank):
        part = object.__new__(type("Rank", (), {"bcast": self._bcast(rank), "allgather": self._allgather(rank)}))
        part.rank, part.size = rank, self.size
        return part

    def _allgather(self, rank):
        def allgather(_, mine):
            self._said[rank] = mine
            self._barrier.wait()
            found = list(self._said)
            self._barrier.wait()
            return found

        return allgather

    def _bcast(self, rank):
        return lambda _, mine: self._allgather(rank)(_, mine)[0]


class Waiting:
    """As much of a call as a wait looks at."""

    is_waiting = False
    error = ""


def on_ranks(size, function):
    """What ``function(rank, cable)`` returns on each rank; the first error of any."""
    ranks, found, errors = Ranks(size), [None] * size, []

    def work(rank):
        made, reason = connect(ranks.of(rank))
        try:
            assert reason == ""
            found[rank] = function(rank, made)
        except BaseException as e:
            errors.append(e)
        finally:
            if made is not None:
                made.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return found


def terms(size, n, dtype=np.float32):
    return [(np.random.default_rng([k, n]).normal(size=n) * 3).astype(dtype) for k in range(size)]


def expected_of(given, codec, factors, divisor):
    """Each term as it travels, added in order, divided, narrowed once; 32 bits are wide enough for 16."""
    wire = codec.wire_dtype(given[0].dtype)
    wide = np.float64 if wire == np.float64 else np.float32
    sent = [codec.encode(x.copy()).astype(wide) for x in given]
    total = sent[0] * wide(factors[0]) if factors else sent[0].copy()
    for k, x in enumerate(sent[1:], 1):
        total += x * wide(factors[k]) if factors else x
    total = total / wide(divisor) if divisor else total
    result = np.empty_like(given[0])
    codec.decode(total.astype(wire), result) if wire != result.dtype else result.__setitem__(..., total)
    return result


def scaled(power):
    codec = Scaled(FLOAT16)
    codec._scale = 2.0**power
    return codec


CASES = [  # ranks, elements, type, codec, factors, divisor
    (2, 3_001, np.float32, Codec(), None, 2.0),
    (2, 6_001, np.float32, scaled(9), None, 2.0),
    (2, 3_000, np.float32, Narrowed(BFLOAT16), None, 3.0),
    (2, 1, np.float32, Codec(), None, 2.0),
    (2, 3, np.float64, Codec(), [0.25, 0.75], None),
    (2, 0, np.float32, Codec(), None, 2.0),
    (3, 4_003, np.float32, Codec(), [0.5, 0.2, 0.3], None),
    (3, 2, np.float32, scaled(-3), None, 3.0),
    (3, 7_001, FLOAT16, Codec(), None, 3.0),
    (4, 10_003, np.float64, Codec(), None, 4.0),
    (4, 5, BFLOAT16, Codec(), None, 4.0),
]


@each(**{"size, n, dtype, codec, factors, divisor": CASES})
def test_sums_have_the_bits_of_a_sum_in_order(monkeypatch, size, n, dtype, codec, factors, divisor):
    monkeypatch.setattr("dbrdist.comm.pipeline.PIECE_BYTES", 1 << 11)
    given = terms(size, n, dtype)
    expected = expected_of(given, codec, factors, divisor)

    def work(rank, cable):
        x = given[rank].copy()
        for _ in range(2):  # the connections serve again
            x[...] = given[rank]
            Sum(cable, Waiting(), x, codec, factors, divisor).run()
        return x

    for x in on_ranks(size, work):
        np.testing.assert_array_equal(x.view(np.uint8), expected.view(np.uint8))


def test_more_than_the_kernel_buffers():
    given = terms(2, 4_000_001)

    def work(rank, cable):
        x = given[rank].copy()
        Sum(cable, Waiting(), x, Codec(), None, 2.0).run()
        return x

    for x in on_ranks(2, work):
        np.testing.assert_array_equal(x, (given[0] + given[1]) / np.float32(2))


def test_small_pieces_and_uneven_blocks(monkeypatch):
    monkeypatch.setattr("dbrdist.comm.pipeline.PIECE_BYTES", 12)
    for n in (1, 2, 7, 8, 9, 100):
        given = terms(3, n)
        expected = expected_of(given, Codec(), None, 3.0)

        def work(rank, cable, given=given):
            x = given[rank].copy()
            Sum(cable, Waiting(), x, Codec(), None, 3.0).run()
            return x

        for x in on_ranks(3, work):
            np.testing.assert_array_equal(x, expected)


def test_a_wait_ends_when_the_watch_says_so():
    def work(rank, cable):
        if rank == 1:
            time.sleep(0.1)
            return
        call = Waiting()
        threading.Timer(0.03, lambda: setattr(call, "error", "the ranks wait for each other")).start()
        ticket = cable.receive(1, np.empty(5, np.uint8))
        with pytest.raises(CommunicatorError, match="wait for each other"):
            cable.wait(call, ticket)
        assert not call.is_waiting

    on_ranks(2, work)


@pytest.mark.parametrize("has_queued", [False, True])
def test_a_connection_that_ends_is_an_error_once_the_watch_had_time(monkeypatch, has_queued):
    monkeypatch.setattr(cables, "_PATIENCE_SECONDS", 0.1)

    def work(rank, cable):
        if rank == 1:
            return  # closes
        if has_queued:
            cable.send(1, np.zeros(1 << 24, np.uint8))
        with pytest.raises(CommunicatorError, match="the connection to the rank on host 1 has ended"):
            cable.wait(Waiting(), cable.receive(1, np.empty(5, np.uint8)))

    on_ranks(2, work)


def test_strangers_are_sent_away(monkeypatch):
    """One that calls and says nothing, one that says something wrong: the ranks meet all the same."""
    answer, met = cables._answer, []

    def noted(connection, said, rank, secret):
        met.append(answer(connection, said, rank, secret))
        return met[-1]

    def disturbed(rank, peer, where, secret):
        for said in (b"", b"x" * 36, b"GET / HTTP/1.0\r\n\r\n"):
            stranger = socket.create_connection(("127.0.0.1", where[0]))
            stranger.sendall(said)
            stranger.close()
        return call(rank, peer, where, secret)

    call = cables._call
    monkeypatch.setattr(cables, "_answer", noted)
    monkeypatch.setattr(cables, "_call", disturbed)
    on_ranks(2, lambda rank, cable: None)
    assert sorted(met, key=str) == [1, None, None, None]


class Crowd:
    """Strangers that call before each rank does, and stay: most say nothing, some too little."""

    def __init__(self, num_strangers):
        self._num_strangers, self._there, self._call = num_strangers, [], cables._call

    def call(self, rank, peer, where, secret):
        for k in range(self._num_strangers):
            self._there.append(socket.create_connection(("127.0.0.1", where[0])))
            self._there[-1].sendall(b"x" * (k % 3))
        return self._call(rank, peer, where, secret)

    def leave(self):
        for stranger in self._there:
            stranger.close()


@pytest.mark.parametrize("size, num_strangers, most", [(3, 1, 256), (3, 5, 256), (2, 30, 4)])
def test_strangers_that_stay_keep_no_rank_waiting(monkeypatch, size, num_strangers, most):
    crowd = Crowd(num_strangers)
    monkeypatch.setattr(cables, "_call", crowd.call)
    monkeypatch.setattr(cables, "_MOST_CALLERS", most)
    given = terms(size, 100)

    def work(rank, cable):
        x = given[rank].copy()
        Sum(cable, Waiting(), x, Codec(), None, None).run()
        return x

    try:
        for x in on_ranks(size, work):
            np.testing.assert_array_equal(x, sum(given[1:], given[0]))
    finally:
        crowd.leave()


def test_a_rank_may_answer_late(monkeypatch):
    """It has others to call first, or no core: longer than one address of a host is tried."""
    meet = cables._meet

    def late(rank, *args):
        if rank == 0:
            time.sleep(0.2)
        meet(rank, *args)

    monkeypatch.setattr(cables, "_TRY_SECONDS", 0.08)
    monkeypatch.setattr(cables, "_meet", late)
    on_ranks(2, lambda rank, cable: None)


def test_a_name_that_python_cannot_look_up_has_no_address(monkeypatch):
    """One that failed on one rank alone would leave the others waiting."""
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64)
    assert cables.addresses()
    on_ranks(2, lambda rank, cable: None)


def test_the_kernel_asks_whether_the_other_host_is_there():
    def work(rank, cable):
        connection = cable._lines[1 - rank].connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 600  # firewalls forget after so long

    on_ranks(2, work)


def test_another_program_at_the_address_is_none_of_the_ranks():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"y" * 32)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match="another program answers there"):
            cables._call(1, 0, (server.getsockname()[1], ["127.0.0.1"]), b"secret")
        thread.join(5)


def test_where_no_address_answers_no_rank_has_connections(monkeypatch):
    monkeypatch.setattr(cables, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(cables, "_TRY_SECONDS", 0.1)
    monkeypatch.setattr(cables, "addresses", list)
    ranks, found = Ranks(2), [None, None]

    def work(rank):
        found[rank] = connect(ranks.of(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [made for made, _ in found] == [None, None]
    assert found[0][1] == found[1][1] != ""


def test_addresses_are_ours():
    found = cables.addresses()
    assert found
    for address in found:
        with socket.create_server((address, 0)):
            pass
