"""Connections between hosts, here between threads; between processes in tests/mpi/test_mpi_cable.py."""

import contextlib
import fcntl
import socket
import struct
import threading
import time
from collections import deque
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm.gradients.pipeline import PipelinedSum
from dbrdist.comm.protocol.wire_type import Codec, Narrowed, Scaled
from dbrdist.comm.transport import sockets
from dbrdist.comm.transport import sockets as cables
from dbrdist.comm.transport.sockets import connect
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
    codec.scale = 2.0**power
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
    monkeypatch.setattr("dbrdist.comm.gradients.pipeline.PIECE_BYTES", 1 << 11)
    given = terms(size, n, dtype)
    expected = expected_of(given, codec, factors, divisor)

    def work(rank, cable):
        x = given[rank].copy()
        for _ in range(2):  # the connections serve again
            x[...] = given[rank]
            PipelinedSum(cable, Waiting(), x, codec, factors, divisor).run()
        return x

    for x in on_ranks(size, work):
        np.testing.assert_array_equal(x.view(np.uint8), expected.view(np.uint8))


@pytest.mark.slow
def test_more_than_the_kernel_buffers():
    given = terms(2, 4_000_001)

    def work(rank, cable):
        x = given[rank].copy()
        PipelinedSum(cable, Waiting(), x, Codec(), None, 2.0).run()
        return x

    for x in on_ranks(2, work):
        np.testing.assert_array_equal(x, (given[0] + given[1]) / np.float32(2))


def test_small_pieces_and_uneven_blocks(monkeypatch):
    monkeypatch.setattr("dbrdist.comm.gradients.pipeline.PIECE_BYTES", 12)
    for n in (1, 2, 7, 8, 9, 100):
        given = terms(3, n)
        expected = expected_of(given, Codec(), None, 3.0)

        def work(rank, cable, given=given):
            x = given[rank].copy()
            PipelinedSum(cable, Waiting(), x, Codec(), None, 3.0).run()
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
        PipelinedSum(cable, Waiting(), x, Codec(), None, None).run()
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


@pytest.fixture
def lines():
    """Both ends of a connection."""
    pair = socket.socketpair(socket.AF_UNIX)
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cables, "_keep_alive", lambda connection: None)
        ends = []
        for number, end in enumerate(pair):
            stack.enter_context(end)
            options = []
            fake = SimpleNamespace(
                setblocking=end.setblocking, send=end.send, recv_into=end.recv_into, close=end.close,
                setsockopt=lambda *args, options=options: options.append(args), fileno=end.fileno, options=options,
            )  # fmt: skip
            ends.append(cables._Line(fake, 1 - number))
        yield ends


def test_a_line_wants_what_it_waits_for(lines):
    one, other = lines
    wakes = lambda: [args[2] for args in one.connection.options if args[1] == socket.SO_RCVLOWAT]  # noqa: E731
    assert one.events() == 0 and wakes() == []
    one.going.append(memoryview(b"abc"))
    assert one.events() == cables.select.POLLOUT
    one.coming.append(memoryview(bytearray(3)))
    assert one.events() == cables.select.POLLOUT | cables.select.POLLIN and wakes() == [3]
    one.events()
    assert wakes() == [3]
    one.coming[0] = memoryview(bytearray((1 << 20) + 1))
    one.events()
    assert wakes() == [3, 1 << 20]  # no later than this
    one.going.clear()
    assert one.events() == cables.select.POLLIN
    one.ended_at = 1.0
    assert one.events() == 0
    raw = bytearray(5)
    other.coming += [memoryview(raw)[:2], memoryview(raw)[2:]]
    other.move()
    assert other.num_come == 0 and not other.ended_at
    one.ended_at = 0.0
    one.coming.clear()
    one.going += [memoryview(b"abc"), memoryview(b"de")]
    one.move()
    assert not one.going
    other.move()
    assert bytes(raw) == b"abcde" and other.num_come == 2 and not other.coming
    other.connection.close()
    one.coming.append(memoryview(raw))
    one.move()
    assert one.ended_at > 0
    at = one.ended_at
    one.going.append(memoryview(b"x"))
    one.move()  # nothing is tried any more
    assert one.ended_at == at and len(one.going) == 1


def test_views_advance_by_what_was_moved():
    views = deque([memoryview(b"abc"), memoryview(b"de")])
    assert not cables._advance(views, 2) and [bytes(v) for v in views] == [b"c", b"de"]
    assert cables._advance(views, 1) and [bytes(v) for v in views] == [b"de"]


def test_a_message_leaves_at_once_behind_no_other(lines):
    one, _other = lines
    cable = object.__new__(cables.Cable)
    cable._lines = {1: one}
    moved = []
    one.move = lambda: moved.append(len(one.going))
    cable.send(1, np.zeros(2, np.uint8))
    cable.send(1, np.zeros(2, np.uint8))
    assert moved == [1]
    one.going.clear()
    one.ended_at = 1.0
    cable.send(1, np.zeros(2, np.uint8))
    assert moved == [1] and len(one.going) == 1
    tickets = [cable.receive(1, np.zeros(1, np.uint8)) for _ in range(2)]
    assert tickets == [(one, 1), (one, 2)] and len(one.coming) == 2


@each(**{"callers, kept": [([0, 1, 1, 4, 5, 2, 3], [2, 3]), ([2, 3], [2, 3]), ([2, 2, 3], [2, 3])]})
def test_ranks_above_are_answered_once(monkeypatch, callers, kept):
    """Rank 1 of 4 has called rank 0; whoever says that it is another one, or calls twice, is sent away."""
    connections = [SimpleNamespace(caller=c, is_closed=False) for c in callers]
    for connection in connections:
        connection.close = lambda connection=connection: setattr(connection, "is_closed", True)
    found = iter([[(c.caller, c)] for c in connections])
    door = SimpleNamespace(wait=lambda end: next(found), close=lambda: None)
    monkeypatch.setattr(cables, "_Door", lambda *args: door)
    monkeypatch.setattr(cables, "_call", lambda rank, peer, where, secret: f"to {peer}")
    made = {}
    cables._meet(1, [(1, ["a"])] * 4, b"", None, made)
    assert made[0] == "to 0" and sorted(made) == [0, *kept] and [made[k].caller for k in kept] == kept
    assert all(c.is_closed == (made.get(c.caller) is not c) for c in connections)


def test_a_door_forgets_whom_it_dismisses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = cables._Door(listener, 0, b"s")
        end = cables.time.monotonic() + 20
        caller = socket.create_connection(listener.getsockname())
        while not door._callers:
            door.wait(end)
        (file,) = door._callers
        connection = door._dismiss(file)
        assert door._callers == {} and connection.fileno() == file
        with pytest.raises(KeyError):
            door._poll.unregister(file)
        caller.close()
        connection.close()


def test_connections_that_have_ended_are_looked_at_in_a_while(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    one = object.__new__(sockets.Cable)
    lines = [SimpleNamespace(ended_at=0.0, peer=1), SimpleNamespace(ended_at=0.0, peer=2)]
    one._lines = dict(enumerate(lines))
    one._check_ends()
    assert slept == []
    lines[1].ended_at = 95.0
    one._check_ends()
    assert slept == [0.01]
    lines[1].ended_at = 94.9
    with pytest.raises(sockets.CommunicatorError, match="the connection to the rank on host 2 has ended"):
        one._check_ends()


@each(text=["", "stuck"])
def test_who_waits_for_a_connection_says_so(text):
    """Until bytes come, or the watch has found that they cannot."""
    seen, moved = [], []
    call = SimpleNamespace(is_waiting=False, error=text)
    one = object.__new__(sockets.Cable)
    lines = [
        SimpleNamespace(connection=f"c{k}", events=lambda k=k: k + 1, move=lambda k=k: moved.append(k), ended_at=0.0)
        for k in range(2)
    ]
    one._lines = dict(enumerate(lines))
    one._of_file = {10 + k: line for k, line in enumerate(lines)}
    one._poll = SimpleNamespace(
        register=lambda *args: seen.append(args), poll=lambda ms: seen.append((ms, call.is_waiting)) or [(11, 1)]
    )
    if text:
        with pytest.raises(sockets.CommunicatorError, match="stuck"):
            one._wait_for_any(call)
    else:
        one._wait_for_any(call)
    assert seen == [("c0", 1), ("c1", 2), (100, True)] and not call.is_waiting and moved == ([] if text else [1])


@each(**{"left, ends": [(0.5, False), (0.0, True), (-1.0, True)]})
def test_a_door_is_open_until_its_end(monkeypatch, left, ends):
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: 100.0))
    polled = []
    door = object.__new__(sockets._Door)
    door._poll = SimpleNamespace(poll=lambda ms: polled.append(ms) or [])
    door._callers, door._listener = {}, SimpleNamespace(fileno=lambda: 3)
    if ends:
        with pytest.raises(TimeoutError):
            door.wait(100.0 + left)
    else:
        assert door.wait(100.0 + left) == [] and polled == [500.0]


@each(**{"system, options": [("linux", 3), ("linux2", 3), ("darwin", 1)]})
def test_kernels_are_told_when_to_ask_for_the_other_host(monkeypatch, system, options):
    told = []
    monkeypatch.setattr(sockets.sys, "platform", system)
    sockets._keep_alive(SimpleNamespace(setsockopt=lambda *args: told.append(args)))
    socket = sockets.socket
    assert told == [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60),
    ][:options]  # fmt: skip


@each(
    **{
        "of_name, of_interfaces, found": [
            (["10.0.0.1", "10.0.0.1"], {"eth0": "10.0.0.2"}, ["10.0.0.1", "10.0.0.2"]),
            (None, {"lo": "127.0.0.1", "eth0": "10.1.2.3", "none": None}, ["10.1.2.3"]),
            (["127.0.1.1"], {"lo": "127.0.0.1"}, ["127.0.0.1"]), (None, {}, ["127.0.0.1"]),
        ]
    }
)  # fmt: skip
def test_addresses_of_a_host(monkeypatch, of_name, of_interfaces, found):
    def getaddrinfo(name, port, family, kind):
        if of_name is None:
            raise OSError
        return [(family, kind, 0, "", (address, 0)) for address in of_name]

    def ioctl(probe, request, packed):
        name = struct.unpack("256s", packed)[0].rstrip(b"\0").decode()
        if of_interfaces[name] is None:
            raise OSError
        assert request == 0x8915  # SIOCGIFADDR
        return bytes(20) + socket.inet_aton(of_interfaces[name]) + bytes(232)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(of_interfaces, 1)))
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert sockets.addresses() == found


def test_where_a_rank_cannot_listen_no_rank_has_connections(monkeypatch):
    """All are told why, and nobody waits for a call."""
    monkeypatch.setattr(cables, "_PATIENCE_SECONDS", 5.0)
    monkeypatch.setattr(cables, "_TRY_SECONDS", 1.0)
    original, ranks, found = socket.create_server, Ranks(2), [None, None]

    def create(*args, **kwargs):
        if threading.current_thread().name == "1":
            raise OSError("no ports left")
        return original(*args, **kwargs)

    def work(rank):
        found[rank] = connect(ranks.of(rank))

    monkeypatch.setattr(socket, "create_server", create)
    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [(None, "no ports left")] * 2


def test_a_crowd_at_the_door_pushes_out_whom_it_found_there(monkeypatch):
    """Files are limited: the caller that has been silent for longest goes first."""
    monkeypatch.setattr(cables, "_MOST_CALLERS", 2)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        door = stack.enter_context(contextlib.closing(cables._Door(listener, 0, b"s")))
        callers = []
        for _ in range(4):
            callers.append(stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20)))
            here = callers[-1].getsockname()
            while here not in [c.getpeername() for c, _ in door._callers.values()]:
                door.wait(cables.time.monotonic() + 20)
        there = [c.getpeername() for c, _ in door._callers.values()]
        assert there == [c.getsockname() for c in callers[2:]]
        assert [c.recv(1) for c in callers[:2]] == [b"", b""]  # they were hung up on
