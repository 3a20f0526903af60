"""Parts of the communicators that only jobs of several ranks went through, each by itself."""

import fcntl
import json
import mmap
import os
import socket
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import (
    audit,
    cable,
    channel,
    checkpoints,
    compression,
    cores,
    create,
    create_communicator,
    extensions,
    gate,
    mailbox,
    mpi,
    run_threads,
    speed,
    trace,
)
from dbrdist.comm.courier import Courier
from dbrdist.comm.functions import pair
from dbrdist.comm.host_memory import Segment, attach
from dbrdist.comm.links import wiring
from dbrdist.comm.links.wiring import Component, Give, Run, Slot, Take
from dbrdist.comm.mailbox import Mailbox
from dbrdist.comm.model import Broadcast
from dbrdist.comm.record import Call, Record
from dbrdist.core.parameter import Parameter
from dbrdist.errors import CommunicatorError
from tests.each import each

# ---- the play of a pipeline -----------------------------------------------------------------------------------------


def test_two_ranks_work_on_different_parts_at_a_time():
    found = wiring.plan([[Component("a", None, (1,))], [Component("b", (0,), None)]], 2)
    to = Slot(1, 0, 0)
    assert found[0] == [Run(0, 0), Give(0, 0, 1, to), Run(0, 1), Give(0, 1, 1, to)]
    assert found[1] == [Take(to, 0, 0), Run(0, 0), Take(to, 1, 0), Run(0, 1)]
    assert [type(action) for action in found[1]] == [Take, Run, Take, Run]


def test_components_of_one_rank_hand_on_without_a_message():
    """There and back: a of rank 0 to b of rank 1, whose two outputs go to c and d of rank 0; c feeds d."""
    found = wiring.plan(
        [[Component("a", None, (1,)), Component("c", (1,), (0,)), Component("d", (1, 0), None)],
         [Component("b", (0,), (0, 0))]], 1,
    )  # fmt: skip
    b, c, d0, d1 = Slot(1, 0, 0), Slot(0, 1, 0), Slot(0, 2, 0), Slot(0, 2, 1)
    assert found[0] == [Run(0, 0), Give(0, 0, 1, b), Take(c, 0, 1), Take(d0, 0, 1), Run(1, 0), Give(1, 0, 0, d1),
                        Run(2, 0)]  # fmt: skip
    assert found[1] == [Take(b, 0, 0), Run(0, 0), Give(0, 0, 0, c), Give(0, 0, 0, d0)]


def test_wirings_that_cannot_be():
    ring = [[Component("a", (1,), (1,))], [Component("b", (0,), (0,)), Component("e", None, None)]]
    words = r"form a cycle, and none can begin: rank 0 \(a, component 0\) waits for rank 1 \(b, component 0\) waits"
    with pytest.raises(ValueError, match=words):
        wiring.plan(ring, 1)
    with pytest.raises(ValueError, match=r"outputs of rank 0 for rank 1: 1 \(a, component 0\), .*: 0 \(no component\)"):
        wiring.plan([[Component("a", None, (1,))], [Component("b", None, None)]], 1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank_out of a on rank 0: expected ranks from 0 to 1, got {rank}"):
            wiring.plan([[Component("a", None, (rank,))], []], 1)
        with pytest.raises(ValueError, match=f"rank_in of b on rank 1: expected ranks from 0 to 1, got {rank}"):
            wiring.plan([[], [Component("b", (rank,), None)]], 1)


# ---- messages and rows ----------------------------------------------------------------------------------------------


def received(of, first):
    node = pair.Recv(SimpleNamespace(rank=0), 1, 3, of)
    return node._checked((first, np.ones(2)))


@each(
    **{
        "of, first, got": [
            (5, np.array([5]), None), (5, np.array([6]), "that of message 6"), (5, np.array([5, 5]), "another message"),
            (5, np.array([5.0]), "another message"), (5, np.array(5), "another message"),
            (1, np.array([1.0]), "another message"), (1, np.array([[1]]), "another message"),
        ]
    }
)  # fmt: skip
def test_a_gradient_is_that_of_its_message(of, first, got):
    if got is None:
        (kept,) = received(of, first)
        assert kept.tolist() == [1, 1]
    else:
        with pytest.raises(CommunicatorError, match=f"tag 3 the gradient of message {of}, got {got}; both ranks"):
            received(of, first)


def test_integers_in_a_row_are_found_by_their_place():
    raw = np.arange(gate.ROW_WORDS, dtype=np.int64).tobytes()
    assert len(raw) == gate.ROW_BYTES and gate.ROW_WORDS == 5 + gate.PAYLOAD_WORDS
    for begin, count in ((0, 1), (1, 2), (gate.PAYLOAD_WORDS - 1, 1), (0, gate.PAYLOAD_WORDS), (2, 0)):
        words = gate.words_of(raw[gate.payload_bytes(begin, count)])
        assert words == tuple(range(5 + begin, 5 + begin + count))


class Posted:
    """The number of another rank's last row, which comes at a given look."""

    def __init__(self, at):
        self.at, self.looks = at, 0

    def __getitem__(self, index):
        self.looks += 1
        return int(self.looks >= self.at)


@each(**{"at, pause, waits": [(1, 0.0, 0), (2, 0.0, 0), (300, 0.0, 0), (301, 0.0, 1), (302, 0.0, 1), (1, 0.1, 1)]})
def test_a_row_is_looked_for_300_times_before_a_longer_wait(at, pause, waits):
    asked = []
    box = Mailbox([np.zeros(mailbox.NUM_BYTES, np.uint8) for _ in range(2)], 0, lambda *args: asked.append(args[2]))
    box._posted_by_others = [posted] = [Posted(at)]
    with Call(Record(), "test", "test", (0,)) as call:
        call.pause_seconds = pause
        box._wait_for(call, 1)
    assert asked == ["row"] * waits and posted.looks == at


def test_tuples_of_arrays_are_known_again():
    box = Mailbox([np.zeros(mailbox.NUM_BYTES, np.uint8)], 0, None)
    tuples = [(np.full(3, k, "f"), np.arange(2.0)) for k in range(3)]
    assert box.takes(tuples[0]) and not box.takes((np.zeros(mailbox.ENCLOSED_BYTES + 1, np.uint8),))
    assert box.takes((np.zeros(mailbox.ENCLOSED_BYTES, np.uint8),)) and not box.takes((np.zeros(2, ">f4"),))
    made = [box._enclosure(one) for one in tuples]
    assert [box._enclosure(one) for one in reversed(tuples)] == made[::-1] and box._last_enclosure is made[0]
    a_list = list(tuples[0])
    assert box._enclosure(a_list) is not box._enclosure(a_list)
    big = (np.zeros(mailbox.ENCLOSED_BYTES, np.uint8),)
    for one in (big, *((np.zeros(k),) for k in range(12))):
        box._enclosure(one)
        assert box.takes(one) and len(box._enclosures) <= 8


# ---- the channel of the watches -------------------------------------------------------------------------------------


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
    one = [channel.Channel(line, members) for line in lines]
    assert [each.judge for each in one] == [2] * 3 and one[0].members == members
    one[1].tell(7, {"what": "ä", "n": [1, 2]})
    one[1].tell_all({"what": "all"})
    assert [each.hear() for each in one] == [[{"what": "all"}], [], [{"what": "ä", "n": [1, 2]}, {"what": "all"}]]
    assert [line.probes for line in lines] == [1] * 3 and one[2].hear() == []
    first, *_ = lines[1].requests
    first.is_done = True
    one[1].tell(2, {})
    one[1].tell(2, {})
    assert first.tests == 3  # what has gone is asked no more
    assert len(one[1]._sent) == 4
    lines[0].is_there = False
    assert one[0].arrive() is False
    lines[0].is_there = True
    assert one[0].arrive() is True and lines[0].barriers == 1


# ---- the courier ----------------------------------------------------------------------------------------------------


def test_a_courier_does_jobs_in_order_and_leaves_out_what_follows_an_error():
    resting, done = set(), []
    comm = SimpleNamespace(_gate=SimpleNamespace(record=SimpleNamespace(resting=resting)))
    one = Courier(comm)
    one.close()  # before it has begun
    one.wait()
    go_on, me = threading.Event(), threading.get_ident()

    def slow(given):
        assert go_on.wait(20)
        done.append((given is comm, threading.get_ident() in resting, me in resting))

    one.put(slow)
    threading.Timer(0.02, go_on.set).start()
    one.wait()
    assert done == [(True, False, True)] and me not in resting
    done.clear()
    for k in range(5):
        one.put(lambda given, k=k: done.append(k) if k != 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.wait()
    assert done == [0, 1] and me not in resting
    one.put(lambda given: done.append("again"))
    one.wait()
    assert done[-1] == "again"
    one.close()
    assert not one._thread.is_alive()


# ---- clocks, speeds, traces -----------------------------------------------------------------------------------------


def test_clocks_of_ranks_are_compared_with_that_of_rank_0(monkeypatch):
    """Rank k's clock is 1000 k ahead of the real one."""

    def perf_counter():
        name = threading.current_thread().name
        return time.perf_counter() + 1000 * int(name.rpartition(" ")[2])

    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=perf_counter))
    before = time.perf_counter()
    found = run_threads(3, trace.ask, timeout_seconds=60)
    after = time.perf_counter()
    for rank, (at, ahead) in enumerate(found):
        assert before <= at - 1000 * rank <= after and abs(ahead + 1000 * rank) <= after - before
    assert found[0][1] == 0.0


class Timed:
    """A communicator whose reductions take 0.1 ms and a nanosecond for each byte; only rank 0 has times."""

    def __init__(self, comm):
        self.comm, self.rank, self.asked = comm, comm.rank, []
        self.allgather_obj, self.bcast_obj = comm.allgather_obj, comm.bcast_obj

    def _between_hosts(self):
        return " over sockets"

    def _time_reduction(self, num_bytes):
        self.asked.append(num_bytes)
        noise = [5.0, 0.0, 1.0][len(self.asked) % 3]
        return 1e-4 + 1e-9 * num_bytes + noise if self.rank == 0 else 0.0


def test_the_size_of_buckets_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    kept, keep = [], speed._keep
    monkeypatch.setattr(speed, "_keep", lambda *args: (kept.append(threading.current_thread().name), keep(*args)))

    def body(comm):
        timed = Timed(comm)
        return speed.bucket_bytes(timed), speed.bucket_bytes(timed), timed.asked

    for first, again, asked in run_threads(2, body, timeout_seconds=60):
        assert first == again == pytest.approx(19e5, rel=1e-5)  # 0.1 ms of 2 ms
        assert asked == [1 << 14] * 3 + [1 << 18] * 3 + [1 << 21] * 3
    assert kept == ["rank 0"]
    (path,) = (tmp_path / "dbrdist").iterdir()
    assert json.loads(path.read_text())["cluster"] == "node#: 2 over sockets"


# ---- what is observed -----------------------------------------------------------------------------------------------


@each(
    **{
        "key, value, is_good": [
            ("main/loss", np.array(1.5, "f"), True), ("main/loss", np.float32(1.5), True), ("main/loss", 1.5, True),
            ("main/loss", np.array(np.nan), False), ("main/loss", float("inf"), False),
            ("main/loss", np.ones(2), False), ("x", np.ones(2), True), ("x", np.array(np.nan), True), ("x", 3, True),
        ]
    }
)  # fmt: skip
def test_numbers_that_are_observed_become_floats(key, value, is_good):
    observation = {key: value, "last": np.array(2.0)}
    assert extensions._become_numbers(observation) is is_good
    if getattr(value, "ndim", 0):
        assert observation[key] is value
    else:
        assert type(observation[key]) is float
        np.testing.assert_equal(observation[key], float(value))
    if is_good:
        assert type(observation["last"]) is float


@each(**{"verbose, rank, speaks": [(True, 0, True), (True, 1, False), (False, 0, False), (False, 1, False)]})
def test_one_rank_speaks_of_an_early_stop(monkeypatch, verbose, rank, speaks):
    made = []
    monkeypatch.setattr(extensions, "EarlyStoppingTrigger", lambda *args, **options: made.append((args, options)))
    monkeypatch.setattr(extensions, "ObservationAggregator", lambda *args, **options: None)
    comm = SimpleNamespace(rank=rank)
    extensions.MultiNodeEarlyStoppingTrigger(comm, verbose=verbose, patience=3, monitor="m")
    assert made == [(((1, "epoch"), "m_aggregated", 3, "auto", speaks, (100, "epoch")), {})]


@each(**{"num, words": [(1, "1 rank"), (2, "2 ranks")]})
def test_starts_of_a_run_are_described(num, words):
    check = object.__new__(audit._Check)
    head = SimpleNamespace(first_step=5, num_ranks=num, num_workers=3 - num)
    check._starts = {2: [head], 1: [SimpleNamespace(first_step=0, num_ranks=3, num_workers=1)]}
    workers = "2 workers" if num == 1 else "1 worker"
    assert list(check._describe_starts()) == [
        "start 1: from step 0, 3 ranks, 1 worker", f"start 2: from step 5, {words}, {workers}",
    ]  # fmt: skip


@each(
    **{
        "num_steps, workers, bad": [
            (0, {}, ""), (2, {1: {0, 1}, 2: {0, 1}}, ""), (0, {1: {0, 1}, 2: {0}}, "2"),
            (3, {1: {0, 1}, 2: {1, 0}}, "3"),
            (2, {2: {0, 1}}, "1"), (4, {1: {0, 1}, 2: {0, 1}, 3: {0}, 4: {0, 1}}, "4"),
        ]
    }
)  # fmt: skip
def test_every_worker_has_a_line_for_every_step(num_steps, workers, bad):
    """Two workers up to step 2, one from there on."""
    check = object.__new__(audit._Check)
    check._num_steps, check._workers, check._problems = num_steps, workers, []
    check._starts = {
        1: [SimpleNamespace(first_step=0, num_workers=2)], 2: [SimpleNamespace(first_step=2, num_workers=1)],
    }  # fmt: skip
    check._last_step = {1: 2, 2: 100}.get
    check._look_at_steps()
    assert check._problems == ([f"not every worker has a line for steps {bad}"] if bad else [])


# ---- compression, parameters, snapshots -----------------------------------------------------------------------------


class OneRank:
    size = 1

    def _meet(self, call):
        """Nobody else comes."""

    def _allgather_bytes(self, mine, raw, counts, starts):
        assert (counts, starts) == ([mine.nbytes], [0])
        raw[:] = mine


def test_the_largest_elements_travel_and_are_counted():
    assert compression.TopK().fraction == 0.01
    one, call = compression.TopK(0.2), SimpleNamespace(num_bytes=5)
    grad = np.array([1.0, -8.0, 3.0, 0.5, 7.0, -2.0, 0.0, 1.5, -1.0, 2.5], "f")
    error = grad.copy()
    one._reduce(OneRank(), call, 0, None, grad, error)
    assert grad.tolist() == [0, -8, 0, 0, 7, 0, 0, 0, 0, 0]
    assert error.tolist() == [1, 0, 3, 0.5, 0, -2, 0, 1.5, -1, 2.5]
    assert (one.num_bytes, call.num_bytes) == (16, 21)  # two indices and two values of four bytes


def test_ranks_that_initialise_different_parameters_are_told():
    def body(comm, names):
        p = Parameter(np.full(2, float(comm.rank)))
        Broadcast(comm, names[comm.rank], 1)(p)
        return p.array.tolist()

    assert run_threads(2, body, ("/a", "/a"), timeout_seconds=60) == [[1, 1]] * 2
    with pytest.raises(CommunicatorError, match="to initialise the same parameter"):
        run_threads(2, body, ("/a", "/b"), timeout_seconds=60)


@each(
    **{
        "autoload, filename, is_writer": [
            (True, "s_{.updater.iteration}.1", True), (False, "s_{.updater.iteration}.1", True),
            (True, lambda trainer: "s", True), (True, "s_{.updater.iteration}.1", False),
        ]
    }
)  # fmt: skip
def test_a_writer_finds_its_files(tmp_path, autoload, filename, is_writer):
    for name in ("s_2.1", "s_10.1", "s_3.0", "other"):
        (tmp_path / name).touch()
    one = object.__new__(checkpoints.MultiNodeSnapshot)
    one._snapshot, one._is_writer = SimpleNamespace(_autoload=autoload, _filename=filename), is_writer
    found = one._files(SimpleNamespace(out=str(tmp_path)))
    whole = autoload and is_writer and isinstance(filename, str)
    assert list(found.items()) == [(f"s_{k}", str(tmp_path / f"s_{k}.1")) for k in (2, 10)] * whole


# ---- hosts and cores ------------------------------------------------------------------------------------------------


@each(
    **{
        "of_name, of_interfaces, found": [
            (["10.0.0.1", "10.0.0.1"], {"eth0": "10.0.0.2"}, ["10.0.0.1", "10.0.0.2"]),
            (None, {"lo": "127.0.0.1", "eth0": "10.1.2.3", "none": None}, ["10.1.2.3"]),
            (["127.0.1.1"], {"lo": "127.0.0.1"}, ["127.0.0.1"]), (None, {}, ["127.0.0.1"]),
        ]
    }
)  # fmt: skip
def test_addresses_of_a_host(monkeypatch, of_name, of_interfaces, found):
    def getaddrinfo(name, port, family, kind):
        if of_name is None:
            raise OSError
        return [(family, kind, 0, "", (address, 0)) for address in of_name]

    def ioctl(probe, request, packed):
        name = struct.unpack("256s", packed)[0].rstrip(b"\0").decode()
        if of_interfaces[name] is None:
            raise OSError
        assert request == 0x8915  # SIOCGIFADDR
        return bytes(20) + socket.inet_aton(of_interfaces[name]) + bytes(232)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(of_interfaces, 1)))
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert cable.addresses() == found


def test_ranks_that_are_processes_share_the_cores_out(monkeypatch):
    seen = []
    monkeypatch.setattr(cores, "share_out", seen.append)
    alone = create_communicator("single")
    assert seen == [alone]
    assert run_threads(2, lambda comm: create_communicator("threads") is comm) == [True, True] and seen == [alone]
    assert create.name_of(alone) == "single"


def test_whole_pages_of_a_segment_are_given_back():
    page = mmap.PAGESIZE
    segment = Segment(4 * page)
    other = attach(segment.ticket)
    for begin, end, emptied in ((100, 3 * page + 5, [1, 2]), (page, 2 * page, [1]), (0, page - 1, []),
                                (1, 2 * page - 1, []), (0, 4 * page, [0, 1, 2, 3])):  # fmt: skip
        segment.raw[:] = 7
        assert segment.resident_bytes() == 4 * page
        segment.release(begin, end)
        pages = other.reshape(4, page)
        assert [k for k in range(4) if not pages[k].any()] == emptied
        assert all((pages[k] == 7).all() for k in range(4) if k not in emptied)
        assert os.fstat(segment.ticket.fd).st_size == 4 * page
    assert not other.any()
