"""What the launcher reads of its stdin: as much as is taken, from pipes and from files."""

import fcntl
import os
import pty
import socket
import subprocess

import pytest
from dbrdist_launch import limits
from dbrdist_launch.launcher.streams import input as inputs
from dbrdist_launch.launcher.streams.input import InputReader, KeptInput, Rank0, StarterPipe, has_input
from dbrdist_launch.loop import Loop
from dbrdist_launch.messages import In, Taken


@pytest.fixture
def stdin():
    """Makes a descriptor this process's stdin until the test is over."""
    kept = os.dup(0)
    yield lambda descriptor: os.dup2(descriptor, 0)
    os.dup2(kept, 0)
    os.close(kept)


class Channel:
    def __init__(self):
        self.sent = []

    def send(self, message):
        assert isinstance(message, In)
        self.sent.append(message.data)


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_no_more_is_read_than_rank_0_takes(tmp_path, stdin, kind):
    data = os.urandom(3 * limits.INPUT_BYTES)
    (tmp_path / "file").write_bytes(data)
    words = ["cat", tmp_path / "file"]
    cat = subprocess.Popen(words, stdout=subprocess.PIPE) if kind == "pipe" else None
    stdin(cat.stdout.fileno() if cat else os.open(tmp_path / "file", os.O_RDONLY))
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.begin_for_rank(1, channel)
    assert read.taker is None
    read.begin_for_rank(0, channel)
    while read.taker.room():
        loop.turn(0.1)
    loop.turn(0.0)
    assert sum(map(len, channel.sent)) == limits.INPUT_BYTES
    while b"" not in channel.sent:
        read.taken(Taken(1000, False))
        loop.turn(0.0)
    assert b"".join(channel.sent) == data and channel.sent.count(b"") == 1
    read.close()
    if cat:
        cat.communicate()
    loop.close()


def test_nothing_is_read_once_rank_0_has_closed_its_input(stdin):
    end, write = os.pipe()
    stdin(end)
    os.write(write, b"kept")
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.taker = Rank0(channel)
    read.taken(Taken(0, True))
    loop.turn(0.0)
    assert not channel.sent and os.read(end, 10) == b"kept"
    for descriptor in (end, write):
        os.close(descriptor)
    loop.close()


def test_the_end_of_a_terminals_maker_is_read_as_a_pipe(stdin):
    end, terminal = pty.openpty()
    stdin(end)
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.begin_for_rank(0, channel)
    os.write(terminal, b"shown")
    loop.turn(1.0)
    assert channel.sent == [b"shown"]
    read.close()
    for descriptor in (end, terminal):
        os.close(descriptor)
    loop.close()


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_somebody_else_who_reads_the_same_input_does_not_hold_the_launcher_up(stdin, kind):
    """As in `dbrdist-launch ... | less`. Nor is it changed for whom the launcher shares it with: he may wait for it."""
    if kind == "pipe":
        end, write = os.pipe()
    elif kind == "terminal":
        write, end = pty.openpty()
    else:
        write, end = (side.detach() for side in socket.socketpair())
    stdin(end)
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.begin_for_rank(0, channel)
    os.write(write, b"taken\n")
    assert os.read(end, 10) == b"taken\n"  # after the loop has heard of it
    read._read()
    assert not channel.sent and os.get_blocking(0)
    os.write(write, b"ours\n")
    loop.turn(1.0)
    assert channel.sent == [b"ours\n"]
    read.close()
    for descriptor in (end, write):
        os.close(descriptor)
    loop.close()


def test_a_named_pipe_whose_writer_has_gone_before_ends(tmp_path, stdin):
    os.mkfifo(tmp_path / "pipe")
    write = os.open(tmp_path / "pipe", os.O_RDWR)
    end = os.open(tmp_path / "pipe", os.O_RDONLY)
    os.write(write, b"all")
    os.close(write)
    stdin(end)
    os.close(end)
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.begin_for_rank(0, channel)
    for _ in range(2):
        loop.turn(1.0)
    assert channel.sent == [b"all", b""]
    read.close()
    loop.close()


def test_a_starter_that_reads_its_own_stdin_gets_it_by_a_pipe(stdin):
    end, write = os.pipe()
    given, taken = os.pipe()
    stdin(end)
    os.write(write, b"typed")
    os.close(write)
    loop = Loop()
    read = InputReader(loop, to_rank_0=False)
    read.begin_for_starter(taken)
    read.look()
    for _ in range(3):
        loop.turn(0.0)
    assert os.read(given, 10) == b"typed" and os.read(given, 10) == b""
    read.close()
    for descriptor in (end, given):
        os.close(descriptor)
    loop.close()


def test_a_starter_that_is_slow_holds_nothing_up_and_gets_all():
    read, write = os.pipe()
    data = os.urandom(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) + 1000)
    pipe = StarterPipe(write)
    assert not os.get_blocking(write) and pipe.room() == limits.READ_BYTES
    pipe.send(data)
    assert pipe.room() == 0
    came = os.read(read, len(data))
    assert pipe.room() == limits.READ_BYTES
    came += os.read(read, 1000)
    assert came == data
    pipe.close()
    assert (pipe.room(), pipe.pipe, os.read(read, 1)) == (0, -1, b"")
    pipe.close()
    os.close(read)


def test_what_a_restarted_program_reads_again(tmp_path, stdin, monkeypatch):
    monkeypatch.setattr(limits, "KEPT_INPUT_BYTES", 1 << 20)
    (tmp_path / "file").write_bytes(b"0123456789")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    stdin(file)
    os.lseek(0, 3, os.SEEK_SET)
    kept = KeptInput()
    kept.note(os.read(0, 4))
    assert (kept.rewind(), kept.again, os.read(0, 10)) == ("", b"", b"3456789")  # from where it was at the start
    end, write = os.pipe()
    stdin(end)
    kept = KeptInput()
    kept.note(b"one")
    kept.note(bytes((1 << 20) - 3))
    assert (kept.rewind(), kept.again) == ("", b"one" + bytes((1 << 20) - 3))
    kept.note(b"x")
    assert kept.rewind() == (
        "the restarted program does not get the first 1.0 MB of the input again: of a pipe at most 1 MiB are kept; "
        "a file (< FILE) is read from its beginning"
    )
    assert kept.again == b""
    for descriptor in (file, end, write):
        os.close(descriptor)


def test_what_is_read_of_a_pipe_is_kept_and_what_is_typed_is_not(stdin):
    for make, again in ((os.pipe, b"some\n"), (lambda: pty.openpty()[::-1], b"")):
        end, write = make()
        stdin(end)
        loop, channel, kept = Loop(), Channel(), KeptInput()
        read = InputReader(loop, kept=kept)
        read.begin_for_rank(0, channel)
        os.write(write, b"some\n")
        read._may_read = lambda: True
        loop.turn(1.0)
        assert channel.sent == [b"some\n"] and (kept.rewind(), kept.again) == ("", again)
        read.close()
        loop.close()
        for descriptor in (end, write):
            os.close(descriptor)


def test_nothing_is_read_once_the_attempt_is_over(stdin):
    end, write = os.pipe()
    stdin(end)
    os.write(write, b"for the next one")
    loop, channel = Loop(), Channel()
    read = InputReader(loop)
    read.begin_for_rank(0, channel)
    read.close()
    for _ in range(2):
        read.look()
        loop.turn(0.0)
    read.taken(Taken(5, False))
    loop.turn(0.0)
    assert not channel.sent and os.read(end, 100) == b"for the next one"
    loop.close()
    for descriptor in (end, write):
        os.close(descriptor)


def test_an_empty_device_is_no_input(stdin):
    null = os.open(os.devnull, os.O_RDONLY)
    stdin(null)
    assert not has_input()
    end, write = os.pipe()
    stdin(end)
    assert has_input()
    stdin(write)
    assert not has_input()
    for descriptor in (null, end, write):
        os.close(descriptor)


def test_a_starter_that_reads_no_more_is_not_written_to_again(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    pipe, tried, real = StarterPipe(write), [], os.write
    monkeypatch.setattr(os, "write", lambda target, data: tried.append(target) or real(target, data))
    pipe.send(b"lost")
    assert pipe.room() == pipe.room() == 0 and tried == [write]


@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_what_was_opened_for_the_input_is_closed_with_it_once(tmp_path, stdin, kind):
    (tmp_path / "file").write_text("x")
    if kind == "socket":
        write, end = (side.detach() for side in socket.socketpair())
    elif kind == "pipe":
        end, write = os.pipe()
    else:
        write, end = (os.open(tmp_path / "file", os.O_RDONLY) for _ in range(2))
    stdin(end)
    loop, before = Loop(), set(os.listdir("/proc/self/fd"))
    read = InputReader(loop)
    more = len(os.listdir("/proc/self/fd")) - len(before)
    assert more == (kind != "file")
    read.close()
    assert set(os.listdir("/proc/self/fd")) == before
    after = os.dup(0)  # takes the number that was given back
    read.close()
    os.close(after)
    os.fstat(0)
    loop.close()
    for descriptor in (end, write):
        os.close(descriptor)


def test_standard_input_is_watched_while_somebody_takes_it(stdin):
    end, write = os.pipe()
    stdin(end)
    watched, loop = [], Loop()
    loop.watch = lambda descriptor, call: watched.append(("watch", descriptor, call))
    loop.forget = lambda descriptor: watched.append(("forget", descriptor))
    read = InputReader(loop)
    read.look()
    assert watched == [] and not read._may_read()  # nobody takes it yet
    read.begin_for_rank(0, Channel())
    read.look()
    assert watched == [("watch", 0, read._read)]
    os.write(write, b"x" * limits.INPUT_BYTES)
    while read.taker.room():
        read._read()
    read.look()
    assert watched[1:] == [("forget", 0)]
    read.taken(Taken(1, False))
    assert watched[2:] == [("watch", 0, read._read)]
    read.close()
    read.close()
    assert watched[3:] == [("forget", 0)]
    loop.close()
    for descriptor in (end, write):
        os.close(descriptor)


def test_the_pipe_of_a_starter_is_closed_with_the_input(stdin):
    null = os.open(os.devnull, os.O_RDONLY)
    stdin(null)
    loop, (read, write) = Loop(), os.pipe()
    one = InputReader(loop, to_rank_0=False)
    one.begin_for_starter(None)
    assert one.taker is None
    one.begin_for_starter(write)
    one.close()
    assert os.read(read, 9) == b"" and one.taker.pipe == -1  # nobody holds the other end
    loop.close()
    for descriptor in (null, read):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "place"), [("read", 3), ("both", None), ("device", None), ("pipe", None), ("closed", None)]
)
def test_a_file_that_is_only_read_has_a_place_to_go_back_to(tmp_path, stdin, kind, place):
    (tmp_path / "file").write_text("0123456789")
    read, write = os.pipe()
    flags = os.O_RDWR if kind == "both" else os.O_RDONLY
    end = os.open(os.devnull, os.O_RDONLY) if kind == "device" else os.open(tmp_path / "file", flags)
    if kind != "device":
        os.lseek(end, 3, os.SEEK_SET)
    stdin(read if kind == "pipe" else end)
    if kind == "closed":
        os.close(0)
    assert inputs._place_in_file() == place
    for descriptor in (end, read, write):
        os.close(descriptor)
