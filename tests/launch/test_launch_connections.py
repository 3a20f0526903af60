"""What goes over a connection and who may: messages and their bounds, the loop, strangers."""

import errno
import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from dbrdist_launch import channel as channels
from dbrdist_launch import limits, messages
from dbrdist_launch import loop as loops
from dbrdist_launch.channel import Channel, NonsenseError, Parser
from dbrdist_launch.errors import LaunchError
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.launcher.running import listener
from dbrdist_launch.launcher.running.listener import ConnectionListener, problem_with
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import Ask, Bye, Hello, Out, Ping
from test_launch_attempt import STEP, Clock

# ---- messages -------------------------------------------------------------------------------------------------------


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
    ("seconds", "every", "timeout"), [(8.0, 2, 8000), (7.9, 1, 7900), (0.0005, 1, 1), (0.002, 1, 2)]
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


# ---- the loop -------------------------------------------------------------------------------------------------------


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


def test_who_was_forgotten_in_this_turn_is_not_called():
    loop, called = Loop(), []
    pipes = [os.pipe() for _ in range(3)]
    for read, write in pipes:
        os.write(write, b"x")
        others = [other for other, _ in pipes if other != read]
        loop.watch(read, lambda read=read, others=others: (called.append(read), [loop.forget(n) for n in others]))
    loop.watch(pipes[0][0], lambda: called.append("another"))
    loop.turn(-1.0)
    assert len(called) == 1 and called != ["another"]
    loop.turn(0.0)
    assert len(called) == 2 and called[0] == called[1]
    loop.close()
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)


def test_signals_come_to_the_loop_and_go_back_to_who_had_them(monkeypatch):
    def before(number, frame):
        raise AssertionError

    kept = {number: signal.signal(number, before) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        loop, heard = Loop(), []
        signals = loops.Signals(loop, (signal.SIGUSR1, signal.SIGUSR2), heard.append, Inherited())
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        loop.turn(20.0)
        assert heard == [signal.SIGUSR1] * 2 and signals.noted == []
        signals._on_wake()  # for one that came with the others
        assert not os.get_blocking(signals._read) and not os.get_blocking(signals._write)
        signals.close()
        loop.close()
        assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == (before, signal.SIG_IGN)
        for descriptor in (signals._read, signals._write):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


# ---- strangers ------------------------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef"
HELLO = {"t": "hello", "token": TOKEN, "rank": 1, "size": 2, "local_rank": 1, "host": "a"}


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


@pytest.mark.parametrize(
    "changes",
    [{"t": "helo"}, {"t": None}, {"t": []}, {"token": None}, {"token": 3},
     *({name: value} for name in ("rank", "size", "local_rank", "host") for value in (None, True, 1.0, []))],
)  # fmt: skip
def test_a_line_that_is_no_message_is_nonsense(changes):
    assert messages.read(dict(HELLO)) == Hello(TOKEN, 1, 2, 1, "a")
    with pytest.raises(NonsenseError):
        messages.read({**HELLO, **changes})


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
        there.sendall(json.dumps(HELLO).encode()[6:] + b"\n")
        door.loop.watched[channel.fileno()]()
        assert door.took == [(channel, Hello(TOKEN, 1, 2, 1, "a"))] and door.strangers == {} and door.refused == 0
        assert channel.parser.limit_bytes == limits.MESSAGE_BYTES and door.loop.forgotten == [channel.fileno()]


def test_ten_strangers_are_named_and_all_are_closed(door):
    wrong = json.dumps({**HELLO, "token": "x"}).encode() + b"\n"
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
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(door.path)
        door._accept()
        assert door.loop.forgotten == ([real.fileno()] if makes_room else []) and not door.strangers
        assert door.again_at == (door.clock.now + 1.0 if makes_room else None)
        assert os.path.samestat(os.fstat(door.spare), spare)
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
