"""The launcher's listener: whatever strangers send, it goes on listening to the ranks."""

import contextlib
import errno
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from clocks import STEP, Clock
from dbrdist_launch import limits, messages
from dbrdist_launch.channel import Channel, NonsenseError, Parser, same_token
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.launcher.running import listener
from dbrdist_launch.launcher.running.listener import ConnectionListener, problem_with
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import Ask, Hello, Ping
from support import launch

TOKEN = "0123456789abcdef"
HELLO = {"t": "hello", "token": TOKEN, "rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "host": "a", "pid": 7}
HOSTILE = [
    b'{"t":"hello","token":"\\ud800"}\n',
    b"[" * 3000 + b"\n",
    b'{"t":"hello","token":' + b"[" * 2000 + b"]" * 2000 + b"}\n",
    b'{"t": 1}\n',
    b"null\n",
    b"\n",
    b"\xff\xfe\n",
    b'{"t":"hello","token":"' + TOKEN.encode() + b'"}\n',
    b'{"t":"hello","n":99999999999}\n',
    b'{"t":"hello","n":-1}\n',
    b'{"t":"hello","n":true}\n',
    b"9" * 4000 + b"\n",
    b"z" * 9000,
    b"GET / HTTP/1.0\r\n\r\n",
    json.dumps({**HELLO, "rank": "1"}).encode() + b"\n",
    json.dumps({**HELLO, "size": 1e308}).encode() + b"\n",
    json.dumps({**HELLO, "host": None}).encode() + b"\n",
    json.dumps({**HELLO, "rank": True}).encode() + b"\n",
]


def taken(data):
    """Whether a listener would take a connection that begins so."""
    try:
        found = [messages.read(*line) for line in Parser(limits.HELLO_BYTES).feed(data)]
    except NonsenseError:
        return False
    return bool(found) and problem_with(found[0], TOKEN) is None


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_first_messages_are_refused(data):
    assert not taken(data)
    assert taken(json.dumps(HELLO).encode() + b"\n")


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_packets_do_nothing():
    chance = random.Random(14)
    good = json.dumps({**HELLO, "token": "x" * len(TOKEN)}).encode() + b"\n"
    alphabet = b'{}[]",:\\ud8\x00\xff\n0123456789eE+-.truefalsn' + bytes(range(256))
    for _ in range(100_000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(4)] = bytes(chance.choices(alphabet, k=chance.randrange(5)))
        assert not taken(bytes(data))


def test_messages_come_through_however_they_are_cut():
    data = b'{"t": "out", "n": 5}\n\n\n{}\x00{"t": "beat"}\n{"t": "out", "n": 0}\n'
    for size in range(1, len(data)):
        parser, found = Parser(), []
        for at in range(0, len(data), size):
            found += parser.feed(data[at : at + size])
        assert found == [({"t": "out"}, b"\n\n{}\x00"), ({"t": "beat"}, b""), ({"t": "out"}, b"")]


@pytest.mark.parametrize("token", [None, 3, "", "x", "\ud800" * 16, "é" * 16, ["x"]])
def test_tokens_of_any_kind_are_compared(token):
    assert not same_token(token, TOKEN) and same_token(TOKEN, TOKEN)


class Listening:
    """A listener on loopback, with what it took and said."""

    def __init__(self):
        self.loop, self.took, self.said = Loop(), [], []
        self.listener = ConnectionListener(
            self.loop, TOKEN, lambda channel, hello: self.took.append((channel, hello)), self.said.append, None,
            ("127.0.0.1",),
        )  # fmt: skip

    def connect(self):
        return socket.create_connection(("127.0.0.1", int(self.listener.address.rpartition(":")[2])))

    def turn(self, until, seconds=20.0):
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end
            self.loop.turn(0.05)
            self.listener.look(time.monotonic())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for channel, _ in self.took:
            channel.close()
        self.listener.close()
        self.loop.close()


def test_strangers_are_few_and_ranks_still_come():
    with Listening() as here:
        crowd = [here.connect() for _ in range(limits.MAX_STRANGERS + 50)]
        with here.connect() as rank:
            rank.sendall(json.dumps(HELLO).encode() + b"\n")
            here.turn(lambda: here.took)
        assert here.took[0][1].rank == 1
        assert len(here.listener.strangers) <= limits.MAX_STRANGERS
        for stranger in crowd:
            stranger.close()


def was_sent_away(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_no_files_left_is_survived():
    with Listening() as here:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        crowd, taken = [here.connect() for _ in range(20)], []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, before[1]))
            with contextlib.suppress(OSError):
                while True:  # gaps between the numbers are no room either
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for number in (taken.pop(), taken.pop()):
                os.close(number)
            for _ in range(100):
                here.loop.turn(0.001)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        assert sum(map(was_sent_away, crowd)) >= 18
        assert len(here.listener.strangers) <= 2
        with here.connect() as rank:
            rank.sendall(json.dumps(HELLO).encode() + b"\n")
            here.turn(lambda: here.took)
        for stranger in crowd:
            stranger.close()


def test_a_channel_does_not_wait_for_its_reader():
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Channel(one), Channel(other)
        payload = os.urandom(1 << 19)
        for _ in range(4):
            sender.send(messages.Out("out", payload))
        assert sender.unsent
        found = []
        while len(found) < 4:
            found += receiver.receive()
            sender.flush()
        assert [message.data for message in found] == [payload] * 4


@pytest.mark.mpiexec
def test_hostile_packets_end_no_job():
    """One packet that nobody vouched for ended a job: here are all of them, and a thousand idle connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = f"""
import socket, sys
idle = []
for data in {HOSTILE!r}:
    with socket.create_connection(("127.0.0.1", {port})) as connection:
        connection.sendall(data)
for _ in range(300):
    idle.append(socket.create_connection(("127.0.0.1", {port})))
print("alive")
"""
    result = launch("-n", 1, "--port", port, "python", "-c", program)
    assert (result.returncode, result.stdout.count("alive")) == (0, 1), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("refused a connection from") == 10  # it does not fill the screen either


@pytest.mark.mpiexec
def test_where_all_is_local_there_is_no_port():
    program = (
        "import os; ppid = os.getppid(); "
        "print('unix' if any('dbrdist-launch' in line for line in open('/proc/net/unix')) else 'port')"
    )
    words = [sys.executable, "-c", program]
    result = launch("-n", 1, *words)
    assert result.stdout.endswith("unix\n"), result.stdout
    assert subprocess.run(words, capture_output=True, text=True).stdout in ("port\n", "unix\n")  # other jobs' sockets


def test_a_port_that_another_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loop = Loop()
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of 127.0.0.1: .*; omit --port"):
            ConnectionListener(loop, "t", None, None, None, ("127.0.0.1",), port)
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port} of all interfaces: "):
            ConnectionListener(loop, "t", None, None, None, ("127.0.0.1", "127.0.0.2"), port)
        loop.close()


GREETING = {"t": "hello", "token": TOKEN, "rank": 1, "size": 2, "local_rank": 1, "host": "a"}


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (Hello(TOKEN, 1, 2, 1, "a"), None), (Ask(TOKEN, "state"), None), (None, "it does not follow the protocol"),
        (Ping(), "it does not follow the protocol"),
        (Hello("x", 1, 2, 1, "a"), "wrong token (a rank of another job, or a stranger)"),
        *((hello, "it does not say which rank it is")
          for hello in (Hello(TOKEN), Hello(TOKEN, -1, 2, 1, "a"), Hello(TOKEN, 1, 0, 1, "a"), Hello(TOKEN, 1, 2, 1))),
        (Ask("é", "state"), "wrong token (a rank of another job, or a stranger)"),
    ],
)  # fmt: skip
def test_who_may_come(hello, problem):
    assert problem_with(hello, TOKEN) == problem


@pytest.fixture
def door(tmp_path, monkeypatch):
    """A listener on a Unix socket, with what it did to the loop, whom it took and what it said."""
    clock = Clock(monkeypatch)
    loop = SimpleNamespace(watched={}, forgotten=[])
    loop.watch = loop.watched.__setitem__
    loop.watch_channel = lambda channel, call: loop.watched.__setitem__(channel.fileno(), call)
    loop.forget = loop.forgotten.append
    took, said = [], []
    one = ConnectionListener(
        loop, TOKEN, lambda channel, hello: took.append((channel, hello)), said.append, str(tmp_path / "s")
    )
    one.clock, one.took, one.said = clock, took, said
    yield one
    for channel, _ in took:
        channel.close()
    if one.socket.fileno() >= 0:
        one.close()


def knock(door, data=b""):
    """A connection that was accepted, and its other end."""
    there = socket.socket(socket.AF_UNIX)
    there.connect(door.path)
    there.sendall(data)
    door._accept()
    return list(door.strangers)[-1], there


def test_a_rank_that_shows_the_token_is_handed_over(door):
    assert door.address == f"unix:{door.path}" and not door.socket.getblocking()
    assert door.loop.watched == {door.socket.fileno(): door._accept}
    channel, there = knock(door, b'{"t": ')
    with there:
        assert channel.parser.limit_bytes == limits.HELLO_BYTES and door.strangers == {channel: door.clock.now}
        door.loop.watched[channel.fileno()]()
        assert door.took == [] and list(door.strangers) == [channel]
        there.sendall(json.dumps(GREETING).encode()[6:] + b"\n")
        door.loop.watched[channel.fileno()]()
        assert door.took == [(channel, Hello(TOKEN, 1, 2, 1, "a"))] and door.strangers == {} and door.refused == 0
        assert channel.parser.limit_bytes == limits.MESSAGE_BYTES and door.loop.forgotten == [channel.fileno()]


def test_ten_strangers_are_named_and_all_are_closed(door):
    wrong = json.dumps({**GREETING, "token": "x"}).encode() + b"\n"
    for number in range(12):
        channel, there = knock(door, wrong if number % 2 else b"GET /\n")
        with there:
            door.loop.watched[channel.fileno()]()
            assert there.recv(1) == b"" and door.strangers == {} and channel.fileno() == -1
    words = ["it does not follow the protocol", "wrong token (a rank of another job, or a stranger)"]
    assert door.said == [f"refused a connection from a process on this machine: {words[k % 2]}" for k in range(10)]
    assert door.refused == 12 and len(door.loop.forgotten) == 12


def test_who_says_nothing_has_to_go_after_a_time(door):
    with knock(door)[1] as first:
        door.clock.now += 1.0
        with knock(door)[1] as second:
            door.look(door.clock.now - 1.0 + limits.HELLO_SECONDS)
            assert len(door.strangers) == 2
            door.look(door.clock.now - 1.0 + limits.HELLO_SECONDS + STEP)
            assert len(door.strangers) == 1 and first.recv(1) == b""
            door.close()
            assert door.strangers == {} and second.recv(1) == b"" and not os.path.exists(door.path)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(door.spare)


def test_of_too_many_strangers_the_oldest_goes(door, monkeypatch):
    monkeypatch.setattr(limits, "MAX_STRANGERS", 2)
    ends = [knock(door)[1] for _ in range(3)]
    assert len(door.strangers) == 2 and ends[0].recv(1) == b""
    for end in ends[1:]:
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)
    for end in ends:
        end.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED])
def test_without_files_the_listener_makes_room_and_rests(door, number):
    makes_room = number != errno.ECONNABORTED
    real, refusals = door.socket, [OSError(number, "")]

    def accept():
        if refusals:
            raise refusals.pop()
        return real.accept()

    door.socket = SimpleNamespace(accept=accept, fileno=real.fileno, close=real.close)
    spare = os.fstat(door.spare)
    num_open = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(door.path)
        door._accept()
        assert door.loop.forgotten == ([real.fileno()] if makes_room else []) and not door.strangers
        assert door.again_at == (door.clock.now + 1.0 if makes_room else None)
        assert os.path.samestat(os.fstat(door.spare), spare)
        assert len(os.listdir("/proc/self/fd")) == num_open + 1  # that of the one who knocks
        there.setblocking(False)
        if makes_room:
            assert there.recv(1) == b""
        else:
            with pytest.raises(BlockingIOError):
                there.recv(1)
    door.loop.watched.clear()
    if makes_room:
        door.look(door.again_at - STEP)
        assert not door.loop.watched
        door.look(door.again_at)
        assert door.loop.watched == {real.fileno(): door._accept} and door.again_at is None
    door.loop.watched.clear()
    door.look(door.clock.now + 99.0)
    assert not door.loop.watched


def test_without_files_a_stranger_goes_first(door):
    channel, there = knock(door)
    door._make_room()
    with there:
        assert there.recv(1) == b"" and door.again_at is None and channel.fileno() == -1


def test_how_strangers_are_named():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as there:
        found, (host, port) = server.accept()
        channel = Channel(found)
        with found:
            assert listener._peer(channel) == f"{host}:{port}" == "{}:{}".format(*there.getsockname())
        assert listener._peer(channel) == "a peer that is gone"
    one, other = socket.socketpair()
    with one, other:
        assert listener._peer(Channel(one)) == "a process on this machine"


def test_a_listener_on_tcp_names_its_port():
    loop = Loop()
    for addresses, bound in ((("127.0.0.1",), "127.0.0.1"), (("127.0.0.1", "10.9.9.9"), "0.0.0.0"), ((), "0.0.0.0")):
        one = ConnectionListener(loop, TOKEN, None, None, None, addresses)
        host, port = one.socket.getsockname()
        assert host == bound and one.address == f"{','.join(addresses)}:{port}"
        text = f"cannot listen on port {port} of {addresses[0] if len(addresses) == 1 else 'all interfaces'}: "
        with pytest.raises(LaunchError, match=text):
            ConnectionListener(loop, TOKEN, None, None, None, addresses, port)
        one.close()
    loop.close()
