"""How a supervisor reads what its program writes, and passes it on: at once, gathered, or as far as it is taken."""

import os
import random
import time
from types import SimpleNamespace

import pytest
from dbrdist_launch import limits
from dbrdist_launch.loop import Loop
from dbrdist_launch.rank import outputs
from dbrdist_launch.rank.outputs import Outputs


class Pipes:
    """A rank's two pipes, read by `Outputs` into memory."""

    def __init__(self, credit=1 << 30):
        self.loop, self.pieces, self.writers, pipes = Loop(), [], {}, {}
        for stream in ("out", "err"):
            read, self.writers[stream] = os.pipe()
            pipes[read] = stream
        self.outputs = Outputs(self.loop, pipes, credit, lambda data, stream: self.pieces.append((stream, bytes(data))))

    def turn(self, seconds=0.0):
        self.loop.turn(seconds)
        self.outputs.look(outputs.time.monotonic())

    def came(self, stream):
        return b"".join(data for name, data in self.pieces if name == stream)

    def close(self):
        for pipe in [*self.outputs.pipes, *self.writers.values()]:
            os.close(pipe)
        self.loop.close()


def test_pieces_go_out_as_they_come_until_they_are_many(monkeypatch):
    pipes, clock = Pipes(), SimpleNamespace(now=1000.0)
    monkeypatch.setattr(outputs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for number in range(1000):
        os.write(pipes.writers["out"], b"%d\n" % number)
        pipes.turn()
        clock.now += 0.001
        if number < limits.PIECES:
            assert len(pipes.pieces) == number + 1  # at once
    assert limits.PIECES < len(pipes.pieces) < limits.PIECES + 2 + 2 / limits.GATHER_SECONDS
    clock.now += limits.GATHER_SECONDS
    pipes.turn()
    assert pipes.came("out") == b"".join(b"%d\n" % number for number in range(1000))
    pipes.close()


def test_who_writes_fast_is_not_held_up_by_the_gathering():
    """Each time its pipe has filled meanwhile, it is looked at sooner, until at once."""
    pipes, waits = Pipes(), 0
    for number in range(1, 301):
        os.write(pipes.writers["out"], b"x" * 60000)  # of the 65536 that it holds
        while sum(len(data) for _, data in pipes.pieces) < 60000 * number:
            pipes.turn(0.001)
            waits += pipes.outputs.gather_until is not None
    assert waits < 100  # of a millisecond each; 300 gatherings would be 15000
    pipes.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_outputs_pass_on_every_byte_whatever_comes_in_between(seed, monkeypatch):
    """Writes, credit, ends of either stream and of the program, in any order."""
    monkeypatch.setattr(limits, "GATHER_SECONDS", 0.0006)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(limits, "PIECES", seed % 4)
    chance, pipes, wrote = random.Random(seed), Pipes(credit=3000), {"out": b"", "err": b""}
    for _ in range(400):
        what = chance.choice(["write", "write", "write", "credit", "turn", "turn", "close"])
        stream = chance.choice(["out", "err"])
        if what == "write" and stream in pipes.writers:
            data = chance.randbytes(chance.choice((1, 20, 800)))
            if len(wrote[stream]) - len(pipes.came(stream)) + len(data) < 60000:  # or it would wait
                os.write(pipes.writers[stream], data)
                wrote[stream] += data
        elif what == "credit":
            pipes.outputs.give_credit(chance.randrange(4000))
        elif what == "close" and chance.random() < 0.02 and stream in pipes.writers:
            os.close(pipes.writers.pop(stream))
        pipes.turn(chance.choice((0.0, 0.0, 0.0004)))
    pipes.outputs.end()
    for stream in list(pipes.writers):
        os.close(pipes.writers.pop(stream))
    until = time.monotonic() + 10
    while pipes.outputs.pipes and time.monotonic() < until:
        pipes.turn(0.01)
    assert {stream: pipes.came(stream) for stream in wrote} == wrote
    assert not pipes.outputs.pipes and not pipes.outputs.waiting
    pipes.close()


class Flow:
    """What `Outputs` does with pieces at given times, without pipes."""

    def __init__(self, monkeypatch):
        self.now, self.pipes = 1000.0, Pipes()
        self.outputs = self.pipes.outputs
        monkeypatch.setattr(outputs, "time", SimpleNamespace(monotonic=lambda: self.now))

    def gathers(self, count, room=1000):
        return self.outputs._gathers(count, room)


def test_pieces_are_many_beyond_a_number_and_are_forgotten_at_a_rate(monkeypatch):
    flow = Flow(monkeypatch)
    assert [flow.gathers(1) for _ in range(limits.PIECES + 2)] == [False] * limits.PIECES + [True] * 2
    flow.now += 2.5 * limits.GATHER_SECONDS  # so many are forgotten, of at most one more than the number
    assert [flow.gathers(1) for _ in range(2)] == [False, True]
    flow.now += 1e6
    assert [flow.gathers(1) for _ in range(limits.PIECES + 1)] == [False] * limits.PIECES + [True]
    flow.pipes.close()


def test_the_moment_of_gathering_follows_how_full_a_pipe_is(monkeypatch):
    flow, most = Flow(monkeypatch), limits.GATHER_SECONDS
    for count, factor in ((750, 1.0), (751, 0.5), (751, 0.5), (500, 1.0), (750, 1.0), (499, 1.25)):
        before = flow.outputs._moment
        flow.gathers(count)
        assert flow.outputs._moment == before * factor
    for _ in range(20):
        flow.gathers(1)
    assert flow.outputs._moment == most and flow.gathers(1)
    while flow.outputs._moment > limits.LEAST_SECONDS:
        gathers = flow.gathers(751)
    assert not gathers
    flow.pipes.close()


def test_gathering_ends_at_the_same_time_for_all_ranks_of_a_host(monkeypatch):
    flow = Flow(monkeypatch)
    for _ in range(limits.PIECES + 1):
        os.write(flow.pipes.writers["out"], b"x")
        flow.pipes.loop.turn(0.0)
    until = flow.outputs.gather_until
    assert until == pytest.approx((1000.0 // limits.GATHER_SECONDS + 1) * limits.GATHER_SECONDS) and until > 1000.0
    assert flow.outputs.waiting == set(flow.outputs.pipes)
    for stream in ("err", "out"):
        os.write(flow.pipes.writers[stream], stream.encode())
    flow.pipes.loop.turn(0.0)
    flow.outputs.give_credit(1)  # changes nothing for who gathers
    flow.outputs.look(until - 2.0**-20)
    assert len(flow.pipes.pieces) == limits.PIECES + 1
    flow.outputs.look(until)
    assert flow.pipes.pieces[-2:] == [("out", b"out"), ("err", b"err")]
    flow.pipes.close()


def test_a_program_writes_as_far_as_the_launcher_takes_it(monkeypatch):
    piece = limits.PIECE_BYTES
    pipes = Pipes(credit=piece + 10)
    assert not any(os.get_blocking(pipe) for pipe in pipes.outputs.pipes)
    os.write(pipes.writers["out"], b"0123")
    pipes.turn()
    assert pipes.outputs.credit == 6
    os.write(pipes.writers["out"], b"x" * 10)
    pipes.turn()
    assert pipes.came("out") == b"0123" + b"x" * 6 and pipes.outputs.credit == -piece
    pipes.turn()
    assert len(pipes.pieces) == 2 and len(pipes.outputs.waiting) == 1
    pipes.outputs.give_credit(piece)
    pipes.turn()
    assert len(pipes.pieces) == 2
    pipes.outputs.give_credit(1)
    pipes.turn()
    assert pipes.came("out") == b"0123" + b"x" * 7
    pipes.outputs.end()  # from now on without credit
    pipes.turn()
    assert pipes.came("out") == b"0123" + b"x" * 10
    read = {stream: pipe for pipe, stream in pipes.outputs.pipes.items()}["out"]
    os.close(pipes.writers.pop("out"))
    pipes.turn()
    assert list(pipes.outputs.pipes.values()) == ["err"] and not pipes.outputs.waiting
    os.close(read)
    pipes.close()


def test_what_is_there_is_read_without_waiting_for_its_turn():
    """A process that was not run for a while has data in its pipes and time that is over: the data come first."""
    pipes = Pipes(credit=1)
    os.write(pipes.writers["out"], b"one")
    os.write(pipes.writers["err"], b"two")
    pipes.outputs.end()
    assert pipes.outputs.drain()
    assert (pipes.came("out"), pipes.came("err")) == (b"one", b"two")
    assert not pipes.outputs.drain() and len(pipes.outputs.pipes) == 2
    for stream in ("out", "err"):
        os.close(pipes.writers.pop(stream))
    assert not pipes.outputs.drain() and not pipes.outputs.pipes
    pipes.close()


def test_a_pipe_in_which_nothing_has_gathered_is_watched_again():
    read, write = os.pipe()
    loop, came = Loop(), []
    outputs = Outputs(loop, {read: "out"}, 1 << 20, lambda data, stream: came.append(bytes(data)))
    outputs._wait(read)
    outputs.gather_until = 5.0
    outputs.look(5.0)
    assert came == [] and not outputs.waiting
    os.write(write, b"x")
    loop.turn(1.0)
    assert came == [b"x"]
    outputs.gather_until = 9.0  # others are gathered: they are all looked at then
    outputs._wait(read)
    outputs._read(read)
    assert outputs.waiting == {read}
    loop.close()
    os.close(write)
    os.close(read)
