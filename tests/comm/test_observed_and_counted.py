"""What is counted, observed, said and saved, and how a sum goes in pieces: each part by itself."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import links as L
from dbrdist.comm import (
    cable,
    create,
    create_communicator,
    extensions,
    functions,
    host_memory,
    pipeline,
    run_threads,
    snapshots,
)
from dbrdist.comm.codec import Codec, Narrowed
from dbrdist.comm.functions import graph
from dbrdist.comm.observations import Observations
from dbrdist.core.backend import as_dtype
from dbrdist.core.chain import Sequential
from dbrdist.core.variable import Variable
from tests.descriptors import open_files
from tests.each import each

# ---- sums in pieces, calls that are counted -------------------------------------------------------------------------


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
    pipeline.Sum(one, "call", np.ones(60, "f4"), codec, None, None).run()
    pieces = [min(elements, 20 - begin) * width for begin in range(0, 20, elements)]
    for found in (one.sent, one.received):
        for peer in (0, 2):
            assert sorted(n for p, n in found if p == peer) == sorted(2 * pieces)
    assert one.flushed == 1


def test_connections_that_have_ended_are_looked_at_in_a_while(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr(cable, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    one = object.__new__(cable.Cable)
    lines = [SimpleNamespace(ended_at=0.0, peer=1), SimpleNamespace(ended_at=0.0, peer=2)]
    one._lines = dict(enumerate(lines))
    one._check_ends()
    assert slept == []
    lines[1].ended_at = 95.0
    one._check_ends()
    assert slept == [0.01]
    lines[1].ended_at = 94.9
    with pytest.raises(cable.CommunicatorError, match="the connection to the rank on host 2 has ended"):
        one._check_ends()


def test_calls_that_have_gradients_are_counted():
    comm = create_communicator("single")
    assert [graph.number_of_call(comm) for _ in range(3)] == [1, 2, 3]
    assert comm._gate.backward_of == 0
    with graph.going_back_through(comm, 7):
        assert comm._gate.backward_of == 7
        with graph.going_back_through(comm, 8):
            assert comm._gate.backward_of == 8
        assert comm._gate.backward_of == 7
    assert comm._gate.backward_of == 0
    y = functions.allreduce(comm, Variable(np.ones(2)))
    assert y.creator.number == 4 and functions.allreduce(comm, Variable(np.ones(2))).creator.number == 5


def test_communication_has_ranks_above_all_before_it():
    """In a thread of its own: earlier communication of this one counts too."""
    found = []

    def work():
        comm = create_communicator("single")
        assert graph.place() == 0
        y = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((y.creator.rank, y.node.rank, graph.place()))
        z = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((z.creator.rank, z.node.rank, graph.place()))
        graph.go_beyond(10)
        graph.go_beyond(3)
        w = functions.allreduce(comm, Variable(np.ones(2)))
        found.append((w.creator.rank, w.node.rank, graph.place()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(1, 2, 1), (2, 3, 2), (11, 12, 11)]


# ---- what is observed, said and saved -------------------------------------------------------------------------------


def test_means_of_what_ranks_observe():
    """Forty values, more than one row has; each rank weighs its examples, and one without has observed nothing."""
    names = [f"k{i:02}" for i in range(40)]

    def body(comm):
        one = Observations(comm)
        observed = {name: float(10 * i + comm.rank) for i, name in enumerate(names)}
        if comm.rank == 1:
            del observed["k05"]
        first = one.average(observed, [1, 3, 0][comm.rank])
        second = one.average({"k00": float(comm.rank)} if comm.rank == 2 else {}, 2)
        return first, second

    for first, second in run_threads(3, body, timeout_seconds=60):
        assert list(first) == names and second == {"k00": 2.0}
        for i, name in enumerate(names):
            assert first[name] == (50.0 if name == "k05" else 10 * i + 0.75)


@each(size=[1, 2])
def test_an_error_of_a_rank_is_raised_by_all(size):
    def body(comm):
        with pytest.raises(ValueError, match="on purpose"):
            Observations(comm).average({"a": 1.0}, 1, ValueError("on purpose") if comm.rank == 0 else None)
        return Observations(comm).average({"a": 1.0}, 0)

    assert run_threads(size, body, timeout_seconds=60) == [{}] * size


@each(
    value=[3, 3.0, np.float32(3), np.array(3), Variable(np.array(3.0)), np.array([3.0]), np.zeros(2), "three"],
    is_alone=[True, False],
)
def test_single_numbers_are_averaged(value, is_alone):
    comm = create_communicator("single")
    iterator = SimpleNamespace(num_read=2)
    one = extensions.StepAgreement(comm, iterator)
    one._is_alone = is_alone
    trainer = SimpleNamespace(observation={"x": value}, elapsed_time=5.0)
    is_number = getattr(value, "ndim", 0) == 0 and not isinstance(value, str)
    if isinstance(value, str):
        with pytest.raises(Exception, match=r".*"):
            one(trainer)
        return
    one(trainer)
    found = trainer.observation["x"]
    assert (type(found) is float and found == 3.0) if is_number and not is_alone else True


@each(
    **{
        "name, size, inter_size, shared, words": [
            ("flat", 1, 1, None, "'flat', 1 rank (why)"), ("naive", 3, 2, None, "'naive', 3 ranks (why)"),
            ("flat", 4, 1, None, "'flat', 4 ranks (one host: gradients are added in memory that its ranks share)"),
            ("flat", 4, 1, True, "'flat', 4 ranks (one host: gradients are added in memory that its ranks share)"),
            ("flat", 4, 1, False, "'flat', 4 ranks (one host: gradients are sent as messages)"),
            ("flat", 4, 2, None, "'flat', 4 ranks (2 hosts: within each, gradients are added in memory that its ranks "
                                 "share)"),
        ]
    }
)  # fmt: skip
def test_a_communicator_is_described(name, size, inter_size, shared, words):
    comm = SimpleNamespace(size=size, inter_size=inter_size, get_config=lambda key: {"shared_memory": shared}[key])
    assert create._description(name, "why", comm) == f"communicator {words}"
    if name != "flat":
        assert create._description(name, "", comm) == "communicator 'naive', 3 ranks"


@each(states=[[], [1.0], [1.0, 3.0]])
def test_a_snapshot_has_the_means_of_statistics_and_the_rank_keeps_its_own(states):
    model = L.BatchNormalization(2)
    model.avg_mean[...] = 9
    model.N = 4
    local = snapshots.LocalState(SimpleNamespace(rank=0, size=2), Sequential(model), SimpleNamespace(skipped=[]))
    local._gathered = [
        {"0/avg_mean": np.full(2, v), "0/avg_var": np.full(2, 2 * v), "0/N": np.array(7)} for v in states
    ]
    with pytest.raises(ValueError, match="on purpose"), local.averaged():
        inside = model.avg_mean.tolist(), model.avg_var.tolist(), model.N
        raise ValueError("on purpose")
    assert inside == (([2, 2], [4, 4], 4) if len(states) == 2 else ([9, 9], [1, 1], 4))
    assert model.avg_mean.tolist() == [9, 9] and model.avg_var.tolist() == [1, 1]


@each(text=["", "stuck"])
def test_who_waits_for_a_connection_says_so(text):
    """Until bytes come, or the watch has found that they cannot."""
    seen, moved = [], []
    call = SimpleNamespace(is_waiting=False, error=text)
    one = object.__new__(cable.Cable)
    lines = [
        SimpleNamespace(connection=f"c{k}", events=lambda k=k: k + 1, move=lambda k=k: moved.append(k), ended_at=0.0)
        for k in range(2)
    ]
    one._lines = dict(enumerate(lines))
    one._of_file = {10 + k: line for k, line in enumerate(lines)}
    one._poll = SimpleNamespace(
        register=lambda *args: seen.append(args), poll=lambda ms: seen.append((ms, call.is_waiting)) or [(11, 1)]
    )
    if text:
        with pytest.raises(cable.CommunicatorError, match="stuck"):
            one._wait_for_any(call)
    else:
        one._wait_for_any(call)
    assert seen == [("c0", 1), ("c1", 2), (100, True)] and not call.is_waiting and moved == ([] if text else [1])


def test_a_segment_that_is_attached_has_one_descriptor():
    """That of the mapping."""
    segment = host_memory.Segment(100)
    before = open_files()
    other = host_memory.attach(segment.ticket)
    segment.raw[7] = 3
    assert other[7] == 3 and len(open_files() - before) == 1
