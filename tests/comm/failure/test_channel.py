"""Tests of dbrdist.comm.failure.channel."""

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm.failure import channel
from dbrdist.comm.transport import mpi


class Line:
    """A communicator of mpi4py for short messages, one rank of it."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes, self.requests, self.probes = rank, boxes, [], 0

    def Dup(self):
        return self

    def Isend(self, buffer, to, tag):
        raw, kind = buffer
        request = SimpleNamespace(is_done=False, tests=0)

        def test():
            request.tests += 1
            return request.is_done

        request.Test = test
        self.requests.append(request)
        assert kind == "bytes"
        self.boxes[to].append((raw.tobytes(), tag))
        return request

    def Iprobe(self, source, tag):
        self.probes += 1

    def Improbe(self, source, tag, status):
        if not self.boxes[self.rank]:
            return None
        raw, found_tag = self.boxes[self.rank].pop(0)
        assert source == "any" and tag == found_tag
        status.Get_count = lambda kind: len(raw)

        def receive(buffer):
            buffer[0][...] = np.frombuffer(raw, np.uint8)

        return SimpleNamespace(Recv=receive)

    def Ibarrier(self):
        self.barriers = getattr(self, "barriers", 0) + 1
        return SimpleNamespace(Test=lambda: int(self.is_there))


def test_watches_speak_to_ranks_as_numbered_in_the_job(monkeypatch):
    monkeypatch.setattr(
        mpi, "start", lambda: SimpleNamespace(BYTE="bytes", ANY_SOURCE="any", Status=lambda: SimpleNamespace())
    )
    boxes = [[], [], []]
    members = (2, 5, 7)
    lines = [Line(rank, boxes) for rank in range(3)]
    one = [channel.FailureChannel(line, members) for line in lines]
    assert [each.judge for each in one] == [2] * 3 and one[0].members == members
    one[1].tell(7, {"what": "ä", "n": [1, 2]})
    one[1].tell_all({"what": "all"})
    assert [each.hear() for each in one] == [[{"what": "all"}], [], [{"what": "ä", "n": [1, 2]}, {"what": "all"}]]
    assert [line.probes for line in lines] == [1] * 3 and one[2].hear() == []
    first, *_ = lines[1].requests
    first.is_done = True
    one[1].tell(2, {})
    one[1].tell(2, {})
    assert first.tests == 2  # what has gone is asked no more
    assert len(one[1]._sent) == 4
    lines[0].is_there = False
    assert one[0].arrive() is False
    lines[0].is_there = True
    assert one[0].arrive() is True and lines[0].barriers == 1


@pytest.mark.slow
def test_what_is_for_all_of_a_large_job_goes_by_way_of_a_few(monkeypatch):
    """A rank that speaks to each of a thousand others has a connection to each."""
    monkeypatch.setattr(
        mpi, "start", lambda: SimpleNamespace(BYTE="bytes", ANY_SOURCE="any", Status=lambda: SimpleNamespace())
    )
    size = 1500
    boxes = [[] for _ in range(size)]
    one = [channel.FailureChannel(Line(rank, boxes), tuple(range(size))) for rank in range(size)]
    one[7].tell_all({"what": "failing"})
    heard = {rank: one[rank].hear() for rank in range(size)}
    while any(boxes):
        for rank in range(size):
            heard[rank] += one[rank].hear()
    assert heard == {rank: [{"what": "failing"}] * (rank != 7) for rank in range(size)}
    assert max(len(each._comm.requests) for each in one) <= 64
