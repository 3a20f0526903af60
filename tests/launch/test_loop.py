"""The loop: whom it calls, and what it does about signals."""

import os
import signal
import types

import pytest
from dbrdist_launch import loop as loops
from dbrdist_launch.inherited import Inherited
from dbrdist_launch.loop import Loop


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


def test_who_is_full_is_called_once_when_it_takes_more():
    loop, called, (read, write) = Loop(), [], os.pipe()
    os.set_blocking(write, False)
    size = os.write(write, b"x" * (1 << 20))
    for _ in range(2):
        loop.when_writable(write, lambda: called.append(write))
    loop.turn(0.0)
    assert not called
    os.read(read, size)
    loop.turn(1.0)
    loop.turn(0.0)
    assert called == [write]
    loop.when_writable(write, lambda: called.append("forgotten"))
    loop.forget_writable(write)
    loop.turn(0.0)
    assert called == [write]
    loop.close()
    os.close(read)
    os.close(write)


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


def test_a_number_that_comes_again_is_no_channel_any_more():
    loop, called, (read, write) = Loop(), [], os.pipe()
    channel = types.SimpleNamespace(fileno=lambda: read, unsent=b"left", when_blocked=None, flush=lambda: 1 // 0)
    loop.watch_channel(channel, lambda: called.append("channel"))
    loop.forget(read)
    channel.when_blocked()  # it is not watched any more
    loop.watch(read, lambda: called.append("other"))
    os.write(write, b"x")
    loop.turn(1.0)
    assert called == ["other"] and loop._channels == {}
    loop.close()
    for descriptor in (read, write):
        os.close(descriptor)


def test_a_loop_that_is_closed_has_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    loop = Loop()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    loop.close()
    assert len(os.listdir("/proc/self/fd")) == before
