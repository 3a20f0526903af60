"""The launcher's listener: whatever strangers send, it goes on listening to the ranks."""

import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time

import pytest
from dbrdist_launch import limits, messages
from dbrdist_launch.channel import Channel, NonsenseError, Parser, same_token
from dbrdist_launch.launcher.running.listener import ConnectionListener, problem_with
from dbrdist_launch.loop import Loop
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
