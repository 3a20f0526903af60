"""How a supervisor feeds its program's stdin: as far as that takes it, to the end or until nobody reads."""

import os
from types import SimpleNamespace

from dbrdist_launch.loop import Loop
from dbrdist_launch.rank.inputs import Inputs


def made():
    loop, told, (read, write) = Loop(), [], os.pipe()
    return loop, told, read, Inputs(loop, write, lambda count, closed: told.append((count, closed)))


def test_what_does_not_fit_waits_and_the_end_comes_last():
    loop, told, read, inputs = made()
    data = os.urandom(300_000)
    inputs.take(data)
    inputs.take(b"")
    assert 0 < told[0][0] < len(data) and not told[0][1]
    found = b""
    while part := os.read(read, 1 << 20):
        found += part
        loop.turn(0.0)
    assert found == data and sum(count for count, _ in told) == len(data) and told[-1][1]
    os.close(read)
    loop.close()


def test_a_program_that_reads_no_more_is_told_of():
    loop, told, read, inputs = made()
    inputs.take(b"x" * 300_000)
    os.close(read)
    loop.turn(1.0)
    assert told[-1] == (0, True)
    inputs.take(b"more")
    assert told[-1] == (0, True)
    inputs.close()
    loop.close()


def test_input_that_fits_is_told_at_once_and_nothing_by_nothing():
    loop, told, read, inputs = made()
    inputs.take(b"abc")
    assert told == [(3, False)] and os.read(read, 9) == b"abc"
    inputs._write()
    assert told == [(3, False)]
    inputs.take(b"de")
    inputs.take(b"")
    assert told == [(3, False), (2, False), (0, True)] and os.read(read, 9) == b"de" and os.read(read, 9) == b""
    assert inputs.pipe == -1
    inputs.close()
    os.close(read)
    loop.close()


def test_a_closed_pipe_is_waited_for_no_more():
    loop, _, read, inputs = made()
    forgotten, pipe = [], inputs.pipe
    inputs.loop = SimpleNamespace(forget_writable=forgotten.append)
    inputs._unsent += b"left"
    inputs.close()
    inputs.close()
    assert forgotten == [pipe] and not inputs._unsent and os.read(read, 9) == b""
    os.close(read)
    loop.close()


def test_standard_input_may_be_descriptor_0():
    """As where the supervisor itself was started without one."""
    loop, told, read, inputs = made()
    inputs.pipe, calls = 0, []
    write = os.write
    try:
        os.write = lambda pipe, data: calls.append((pipe, bytes(data))) or len(data)
        inputs.take(b"abc")
    finally:
        os.write = write
    inputs._write()
    assert calls == [(0, b"abc")] and told == [(3, False)]
    os.close(read)
    loop.close()
