"""Tests of dbrdist.comm.gradients.pipeline."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.gradients import pipeline
from dbrdist.comm.gradients.pipeline import Messages
from dbrdist.comm.protocol.wire_type import Codec, Narrowed
from dbrdist.core.array.backend import as_dtype
from tests.each import each


def test_a_wait_that_ends_keeps_what_mpi_still_uses():
    made, waited, abandoned = [], [], []

    def post(kind):
        return lambda buffer, peer: made.append((kind, buffer, peer)) or f"{kind} {len(made)}"

    def wait(call, request):
        waited.append(request)
        if call == "fails":
            raise KeyboardInterrupt

    comm = SimpleNamespace(rank=1, size=3, Isend=post("send"), Irecv=post("recv"))
    messages = Messages(comm, "byte", wait, abandoned)
    assert (messages.rank, messages.size) == (1, 3)
    messages.send(2, "a")
    ticket = messages.receive(0, "b")
    assert made == [("send", ["a", "byte"], 2), ("recv", ["b", "byte"], 0)] and ticket == "recv 2"
    messages.wait("call", ticket)
    messages.flush("call")
    assert waited == ["recv 2", "send 1", "recv 2"] and abandoned == []
    messages.flush("call")
    assert len(waited) == 3
    messages.send(0, "c")
    messages.receive(0, "d")
    with pytest.raises(KeyboardInterrupt):
        messages.wait("fails", "recv 4")
    assert abandoned == ["send 3", "recv 4"]


class Sent:
    """A way on which all ranks have the same: what is sent, and the sizes of it."""

    def __init__(self, rank, size):
        self.rank, self.size, self.sent, self.received, self.flushed = rank, size, [], [], 0

    def send(self, peer, raw):
        self.sent.append((peer, raw.size))

    def receive(self, peer, raw):
        self.received.append((peer, raw.size))
        raw[...] = 0

    def wait(self, call, ticket):
        pass

    def flush(self, call):
        self.flushed += 1


@each(codec=[Codec(), Narrowed(as_dtype("bfloat16"))], piece_bytes=[16, 40, 1])
def test_pieces_are_of_a_length_on_the_wire(monkeypatch, codec, piece_bytes):
    monkeypatch.setattr(pipeline, "PIECE_BYTES", piece_bytes)
    width = 4 if type(codec) is Codec else 2
    elements = max(piece_bytes // width, 1)
    one = Sent(1, 3)
    pipeline.PipelinedSum(one, "call", np.ones(60, "f4"), codec, None, None).run()
    pieces = [min(elements, 20 - begin) * width for begin in range(0, 20, elements)]
    for found in (one.sent, one.received):
        for peer in (0, 2):
            assert sorted(n for p, n in found if p == peer) == sorted(2 * pieces)
    assert one.flushed == 1
