"""How a supervisor feeds its program's stdin: as far as that takes it, to the end or until nobody reads."""

import os

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
