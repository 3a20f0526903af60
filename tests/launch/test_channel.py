"""Messages over a connection: their bounds, their order, and what is no message."""

import socket

import pytest
from dbrdist_launch import channel as channels
from dbrdist_launch import limits, messages
from dbrdist_launch.channel import Channel, NonsenseError, Parser
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import Bye, Hello, Out, Ping


@pytest.mark.parametrize(
    "line",
    [b"", b" ", b"[]", b"3", b"{}", b'{"t": 1}', b'{"t": "x", "n": -1}', b'{"t": "x", "n": true}',
     b'{"t": "x", "n": 1.0}', b'{"t": "x", "n": null}', b'{"t": "x", "n": "1"}', b'{"t": "x", "n": 65}',
     b'{"t": "x"}' + b" " * 55],
)  # fmt: skip
def test_what_is_no_message_is_refused_at_once(line):
    with pytest.raises(NonsenseError):
        Parser(64).feed(line + b"\n")


def test_messages_and_their_bytes_are_as_long_as_they_may_be():
    assert Parser(64).feed(b'{"t": "x"}' + b" " * 54 + b"\n") == [({"t": "x"}, b"")]
    assert Parser(64).feed(b'{"t": "x", "n": 64}\n' + b"a" * 64) == [({"t": "x"}, b"a" * 64)]
    parser = Parser(64)
    assert parser.feed(b"x" * 64) == []
    with pytest.raises(NonsenseError, match="a line is too long"):
        parser.feed(b"x")
    assert Parser().limit_bytes == limits.MESSAGE_BYTES


class Socket:
    """A socket that takes and gives what the test says, and keeps what was done to it."""

    def __init__(self, family=socket.AF_INET, takes=(), gives=()):
        self.family, self.takes, self.gives, self.options, self.went = family, list(takes), list(gives), [], b""

    def setblocking(self, flag):
        self.is_blocking = flag

    def setsockopt(self, level, option, value):
        self.options.append((level, option, value))

    def fileno(self):
        return 7

    def sendmsg(self, parts):
        return self.send(b"".join(map(bytes, parts)))

    def send(self, data):
        count = self.takes.pop(0)
        if isinstance(count, BaseException):
            raise count
        self.went += bytes(data[:count])
        return len(data[:count])

    def recv(self, count):
        found = self.gives.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.mark.parametrize(
    ("seconds", "every", "timeout"),  # Linux takes at most 32767 s between two probes
    [(8.0, 2, 8000), (7.9, 1, 7900), (0.0005, 1, 1), (0.002, 1, 2), (-1.0, 1, 1), (1e9, 32767, 131068000)],
)
def test_the_kernel_gives_up_a_silent_host_in_time(seconds, every, timeout):
    one = Socket()
    channel = Channel(one)
    assert one.options == [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)] and one.is_blocking is False
    channel.watch_peer(seconds)
    assert one.options[1:] == [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),  # after three probes: four times a quarter of the time
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout),
    ]
    here = Socket(socket.AF_UNIX)
    Channel(here).watch_peer(seconds)
    assert here.options == []


MESSAGE = b'{"t": "out", "stream": "err", "n": 3}\nabc'


@pytest.mark.parametrize("first", [*range(len(MESSAGE) + 1), BlockingIOError(), InterruptedError()])
def test_what_does_not_go_out_at_once_waits(first):
    blocked = []
    one = Socket(takes=[first, BlockingIOError()])
    channel = Channel(one)
    channel.when_blocked = lambda: blocked.append(bytes(channel.unsent))
    channel.send(Out("err", b"abc"))
    left = MESSAGE[first if isinstance(first, int) else 0 :]
    assert (one.went, bytes(channel.unsent)) == (MESSAGE[: len(MESSAGE) - len(left)], left)
    assert blocked == ([left] if left else [])
    one.takes = [5, 1 << 10, 1 << 10]
    channel.flush()
    assert one.went == MESSAGE and not channel.unsent


def test_messages_keep_their_order_behind_one_that_waits():
    one = Socket(takes=[4, 2, BlockingIOError(), 1, BlockingIOError()])
    channel = Channel(one)
    channel.send(Ping())
    channel.send(Bye())
    assert one.went + channel.unsent == b'{"t": "ping"}\n{"t": "bye"}\n' and len(one.went) == 7
    one.takes = [InterruptedError()]
    channel.flush()
    assert len(channel.unsent) == 20
    one.takes = [ConnectionResetError()]
    channel.flush()
    assert channel.unsent == b""


def test_a_broken_connection_shows_where_it_is_read():
    one = Socket(takes=[BrokenPipeError()])
    channel = Channel(one)
    channel.send(Ping())
    assert channel.unsent == b""
    one.gives = [b"", ConnectionResetError(), b"nonsense\n"]
    assert [channel.receive() for _ in range(3)] == [None] * 3
    one.gives = [BlockingIOError(), InterruptedError(), b'{"t": "ping"}\n{"t"', b': "bye"}\n']
    assert [Channel(one).receive() for _ in range(2)] == [[], []]
    channel = Channel(one)
    assert [channel.receive(), channel.receive()] == [[Ping()], [Bye()]]


def test_tokens_are_long_and_differ():
    made = {channels.new_token() for _ in range(8)}
    assert len(made) == 8 and all(len(bytes.fromhex(token)) == 16 for token in made)


def test_a_channel_with_something_left_is_watched_for_room_until_it_is_gone():
    here, there = socket.socketpair()
    with here, there:
        loop, channel, heard, turns = Loop(), Channel(here), [], []
        loop.on_wake = lambda: turns.append(1)
        loop.watch_channel(channel, lambda: heard.append(channel.receive()))
        count = 0
        while not channel.unsent:
            channel.send(Out("out", bytes(1 << 16)))
            count += 1
        there.setblocking(False)
        arrived = 0
        while channel.unsent:
            arrived += len(there.recv(1 << 20))
            loop.turn(20.0)  # returns when there is room: nothing else happens here
        assert heard == [] and turns
        there.sendall(b'{"t": "ping"}\n')
        loop.turn(20.0)
        assert heard == [[Ping()]]
        loop.forget(here.fileno())
        loop.forget(here.fileno())
        channel.when_blocked()  # nothing, for one that is not watched any more
        channel.unsent += b"x"
        loop.watch_channel(channel, lambda: None)
        while len(arrived_now := there.recv(1 << 20)) == 1 << 20:
            pass
        loop.turn(20.0)
        assert not channel.unsent and arrived_now
        loop.close()


TOKEN = "0123456789abcdef"


GREETING = {"t": "hello", "token": TOKEN, "rank": 1, "size": 2, "local_rank": 1, "host": "a"}


@pytest.mark.parametrize(
    "changes",
    [{"t": "helo"}, {"t": None}, {"t": []}, {"token": None}, {"token": 3},
     *({name: value} for name in ("rank", "size", "local_rank", "host") for value in (None, True, 1.0, []))],
)  # fmt: skip
def test_a_line_that_is_no_message_is_nonsense(changes):
    assert messages.read(dict(GREETING)) == Hello(TOKEN, 1, 2, 1, "a")
    with pytest.raises(NonsenseError):
        messages.read({**GREETING, **changes})
