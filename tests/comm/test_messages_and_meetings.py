"""How threads meet, what verbs are given, and how connections move bytes: at the bounds of each part."""

import contextlib
import socket
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import arguments, create_communicator, handed_on, trace, way, world
from dbrdist.comm import cable as cables
from dbrdist.comm import iterators as iterators_of_ranks
from dbrdist.comm.compression import TopK
from dbrdist.comm.links import chain_list
from dbrdist.comm.pipeline import Messages
from dbrdist.comm.record import Call, Record
from dbrdist.comm.threads import ThreadCommunicator
from dbrdist.comm.world import Job, World
from dbrdist.core.variable import Variable
from dbrdist.errors import CommunicatorError
from tests.each import each

# ---- meetings of threads --------------------------------------------------------------------------------------------


class Changed:
    """A condition that counts who is woken; a wait does ``then`` and is as long as given."""

    def __init__(self, then=lambda: None, was_woken=True):
        self.woken, self.waits, self.then, self.was_woken = 0, [], then, was_woken

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def notify_all(self):
        self.woken += 1

    def wait(self, seconds):
        self.waits.append(seconds)
        self.then()
        return self.was_woken


def call_of(record=None):
    return Call(record or Record(), "recv", "threads", (0, 1))


def test_what_wakes_the_threads_that_wait():
    job = Job(2)
    changed = job.changed = Changed()
    both = World(job, "threads", (0, 1))
    both.show(1, 1, "b")
    assert changed.woken == 0 and not both.is_complete(1)
    both.show(1, 0, "a")
    assert changed.woken == 1 and both.is_complete(1)
    assert both.see(call_of(), 1) == ["a", "b"] and both.is_complete(1)
    assert both.see(call_of(), 1) == ["a", "b"]
    assert both._meetings == both._readers == {}
    both.put(call_of(), (0, 1, 7), "first", False)
    both.put(call_of(), (0, 1, 7), "second", False)
    assert changed.woken == 3
    assert [both.take(call_of(), (0, 1, 7)) for _ in range(2)] == ["first", "second"]
    assert changed.woken == 5 and both._mail == {}
    job.leave(1)
    assert job.left == {1} and changed.woken == 6
    job.fail("first reason")
    job.fail("second")
    assert job.failure == "first reason" and changed.woken == 8 and changed.waits == []
    for verb in (lambda: both.put(call_of(), (0, 1, 7), 1, False), lambda: both.take(call_of(), (0, 1, 8))):
        with pytest.raises(CommunicatorError, match="this rank cannot continue: first reason"):
            verb()


def test_a_long_message_waits_until_it_is_taken():
    job, call = Job(2), call_of()
    both = World(job, "threads", (0, 1))
    seen = []

    def take():
        seen.append(call.is_waiting)
        if len(seen) == 2:
            both.take(call_of(), (0, 1, 3))

    changed = job.changed = Changed(take)
    both.put(call, (0, 1, 3), "long", True)
    assert seen == [True, True] and not call.is_waiting and changed.waits == [world._LOOK_SECONDS] * 2


@each(**{"since, was_woken, looks": [(10.0, False, True), (9.0, False, False), (8.99, False, True),
                                     (10.0, True, False)]})  # fmt: skip
def test_a_rank_that_has_waited_for_long_looks_for_the_others(monkeypatch, since, was_woken, looks):
    """Since second 10 - since; it looks once it was not woken, and the patience of one second is over."""
    job, call, seen = Job(2), call_of(), []
    call.since = 10.0 - since if since == 10.0 else since
    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: 10.0))
    monkeypatch.setattr(job, "_look", lambda: seen.append(1))
    ends = iter([False, True])
    job.changed = Changed(was_woken=was_woken)
    job.wait(call, lambda: next(ends))
    assert seen == [1] * looks


def test_stuck_threads_are_woken_and_told(monkeypatch):
    job = Job(2)
    changed = job.changed = Changed()
    monkeypatch.setattr(world.deadlock, "stuck", lambda states: {})
    job._look()
    assert (job.failure, changed.woken) == ("", 0)
    monkeypatch.setattr(world.deadlock, "stuck", lambda states: {0: {1}})
    monkeypatch.setattr(world.deadlock, "describe", lambda states, waiting: f"{sorted(states)} {waiting}")
    job._look()
    assert (job.failure, changed.woken) == ("[0, 1] {0: {1}}", 1)


@each(**{"num_bytes, waits": [(0, False), (1 << 16, False), ((1 << 16) + 1, True)]})
def test_a_message_of_64_kib_waits_for_nobody(num_bytes, waits):
    comm, seen = ThreadCommunicator(), []
    comm._world = SimpleNamespace(put=lambda *args: seen.append(args))
    call, part = SimpleNamespace(num_bytes=num_bytes, peer=3, tag=4), np.ones(2)
    comm._send_parts(call, "head", [part])
    ((got, key, (head, (copy,)), waited),) = seen
    assert (got, key, head, waited) == (call, (0, 3, 4), "head", waits) and not np.shares_memory(copy, part)


# ---- arguments and settings -----------------------------------------------------------------------------------------


def test_colours_and_keys_fit_into_64_bits():
    assert arguments.color_and_key(None, 3) == (0, 0, 3) and arguments.color_and_key(np.True_, False) == (1, 1, 0)
    most, least = 2**63 - 1, -(2**63)
    assert arguments.color_and_key(most, least) == (1, most, least)
    for number in (most + 1, least - 1):
        with pytest.raises(ValueError, match=f"split: color expected a number of 64 bits, got {number}"):
            arguments.color_and_key(number, 0)
        with pytest.raises(ValueError, match=f"split: key expected a number of 64 bits, got {number}"):
            arguments.color_and_key(0, number)


def test_numbers_of_examples():
    assert arguments.num_samples(None, "update") is None and arguments.num_samples(np.int8(0), "update") == 0
    with pytest.raises(ValueError, match="update expected num_samples of 0 or more, or None, got -1"):
        arguments.num_samples(-1, "update")


@each(
    **{
        "options, carries": [
            ({}, False), ({"accumulate": 2}, True), ({"local_steps": 2}, True), ({"double_buffering": True}, True),
            ({"compression": TopK()}, True), ({"zero": 2}, False),
        ]
    }
)  # fmt: skip
def test_what_goes_from_one_step_into_the_next(options, carries):
    assert way.Way(**options).carries is carries
    text = "double_buffering False\nzero 0\ncompression None\naccumulate 1\nlocal_steps 1\nnone\n"
    assert way.Way().words() == text
    assert (way.Way(**options).words() == text) == (not options)


def test_what_a_wrapped_optimizer_is_told():
    told = []

    class Told:
        def __getattr__(self, name):
            return lambda *args: told.append((name, *args))

    outer = handed_on.HandsOn(Told())
    outer.loss_scaling()
    outer.loss_scaling(5, 2.0)
    outer.new_epoch()
    outer.new_epoch(True)
    outer.add_hook("hook")
    outer.call_hooks()
    outer.set_loss_scale(4.0)
    outer.remove_hook("a")
    assert told == [
        ("loss_scaling", 1000, None), ("loss_scaling", 5, 2.0), ("new_epoch", False), ("new_epoch", True),
        ("add_hook", "hook", None, "auto"), ("call_hooks", "pre"), ("set_loss_scale", 4.0), ("remove_hook", "a"),
    ]  # fmt: skip


class OfAnotherLibrary:
    batch_size, dataset = 4, range(10)

    def __init__(self, sampler):
        self.order_sampler, self.resets, self.seed = sampler, 0, 7

    def reset(self):
        self.resets += 1


def test_iterators_of_other_libraries_start_over_in_our_order():
    comm = create_communicator("single")
    shuffled, plain = OfAnotherLibrary(object()), OfAnotherLibrary(None)
    assert iterators_of_ranks.create_synchronized_iterator(shuffled, comm) is shuffled
    sampler = shuffled.order_sampler
    assert type(sampler) is iterators_of_ranks.ShuffleOrderSampler and shuffled.resets == 1
    assert sorted(sampler(np.arange(10), 0)) == list(range(10))
    iterators_of_ranks.create_synchronized_iterator(plain, comm)
    assert plain.order_sampler is None and plain.resets == 0


# ---- micro-batches --------------------------------------------------------------------------------------------------


def test_inputs_are_cut_nearly_evenly():
    x, t = np.arange(7), list("abcdefg")
    assert chain_list._cut((x, t), 1) == [(x, t)] and chain_list._cut((), 3) == [()] * 3
    parts = chain_list._cut((x, t), 3)
    assert [(a.tolist(), b) for a, b in parts] == [([0, 1], ["a", "b"]), ([2, 3], ["c", "d"]),
                                                  ([4, 5, 6], ["e", "f", "g"])]  # fmt: skip
    assert [v.shape for (v,) in chain_list._cut((Variable(np.ones((4, 2))),), 2)] == [(2, 2)] * 2
    for inputs, got in (
        ((x, x[:3]), "7, 3"), ((np.array(3),), "none"), ((x, 3), "7, none"), ((3, x), "none, 7"),
        ((Variable(np.array(3.0)),), "none"),
    ):  # fmt: skip
        words = f"arrays, or lists, of one length, to be cut into micro-batches, got lengths {got}"
        with pytest.raises(ValueError, match=words):
            chain_list._cut(inputs, 2)


def test_outputs_are_joined():
    a, b = Variable(np.ones((2, 3))), Variable(np.zeros((1, 3)))
    assert chain_list._joined([a]) is a and chain_list._joined([3]) == 3
    assert chain_list._joined([a, b]).array.tolist() == [[1] * 3] * 2 + [[0] * 3]
    first, second = chain_list._joined([(a, b), (b, a)])
    assert first.shape == second.shape == (3, 3) and second.array[0].tolist() == [0] * 3
    assert chain_list._joined([np.ones(1), np.zeros(2)]).array.tolist() == [1, 0, 0]
    for ys in ([Variable(np.array(1.0)), a], [a, Variable(np.array(1.0))], [1.0, 2.0], ["ab", "cd"], [[1], [2]]):
        with pytest.raises(ValueError, match="an output with an axis of examples, to be joined over micro-batches"):
            chain_list._joined(ys)


# ---- messages of a sum, connections, clocks -------------------------------------------------------------------------


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


@pytest.fixture
def lines():
    """Both ends of a connection."""
    pair = socket.socketpair(socket.AF_UNIX)
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cables, "_keep_alive", lambda connection: None)
        ends = []
        for number, end in enumerate(pair):
            stack.enter_context(end)
            options = []
            fake = SimpleNamespace(
                setblocking=end.setblocking, send=end.send, recv_into=end.recv_into, close=end.close,
                setsockopt=lambda *args, options=options: options.append(args), fileno=end.fileno, options=options,
            )  # fmt: skip
            ends.append(cables._Line(fake, 1 - number))
        yield ends


def test_a_line_wants_what_it_waits_for(lines):
    one, other = lines
    wakes = lambda: [args[2] for args in one.connection.options if args[1] == socket.SO_RCVLOWAT]  # noqa: E731
    assert one.events() == 0 and wakes() == []
    one.going.append(memoryview(b"abc"))
    assert one.events() == cables.select.POLLOUT
    one.coming.append(memoryview(bytearray(3)))
    assert one.events() == cables.select.POLLOUT | cables.select.POLLIN and wakes() == [3]
    one.events()
    assert wakes() == [3]
    one.coming[0] = memoryview(bytearray((1 << 20) + 1))
    one.events()
    assert wakes() == [3, 1 << 20]  # no later than this
    one.going.clear()
    assert one.events() == cables.select.POLLIN
    one.ended_at = 1.0
    assert one.events() == 0
    raw = bytearray(5)
    other.coming += [memoryview(raw)[:2], memoryview(raw)[2:]]
    other.move()
    assert other.num_come == 0 and not other.ended_at
    one.ended_at = 0.0
    one.coming.clear()
    one.going += [memoryview(b"abc"), memoryview(b"de")]
    one.move()
    assert not one.going
    other.move()
    assert bytes(raw) == b"abcde" and other.num_come == 2 and not other.coming
    other.connection.close()
    one.coming.append(memoryview(raw))
    one.move()
    assert one.ended_at > 0
    at = one.ended_at
    one.going.append(memoryview(b"x"))
    one.move()  # nothing is tried any more
    assert one.ended_at == at and len(one.going) == 1


def test_views_advance_by_what_was_moved():
    views = deque([memoryview(b"abc"), memoryview(b"de")])
    assert not cables._advance(views, 2) and [bytes(v) for v in views] == [b"c", b"de"]
    assert cables._advance(views, 1) and [bytes(v) for v in views] == [b"de"]


def test_a_message_leaves_at_once_behind_no_other(lines):
    one, _other = lines
    cable = object.__new__(cables.Cable)
    cable._lines = {1: one}
    moved = []
    one.move = lambda: moved.append(len(one.going))
    cable.send(1, np.zeros(2, np.uint8))
    cable.send(1, np.zeros(2, np.uint8))
    assert moved == [1]
    one.going.clear()
    one.ended_at = 1.0
    cable.send(1, np.zeros(2, np.uint8))
    assert moved == [1] and len(one.going) == 1
    tickets = [cable.receive(1, np.zeros(1, np.uint8)) for _ in range(2)]
    assert tickets == [(one, 1), (one, 2)] and len(one.coming) == 2


@each(**{"callers, kept": [([0, 1, 1, 4, 5, 2, 3], [2, 3]), ([2, 3], [2, 3]), ([2, 2, 3], [2, 3])]})
def test_ranks_above_are_answered_once(monkeypatch, callers, kept):
    """Rank 1 of 4 has called rank 0; whoever says that it is another one, or calls twice, is sent away."""
    connections = [SimpleNamespace(caller=c, is_closed=False) for c in callers]
    for connection in connections:
        connection.close = lambda connection=connection: setattr(connection, "is_closed", True)
    found = iter([[(c.caller, c)] for c in connections])
    door = SimpleNamespace(wait=lambda end: next(found), close=lambda: None)
    monkeypatch.setattr(cables, "_Door", lambda *args: door)
    monkeypatch.setattr(cables, "_call", lambda rank, peer, where, secret: f"to {peer}")
    made = {}
    cables._meet(1, [(1, ["a"])] * 4, b"", None, made)
    assert made[0] == "to 0" and sorted(made) == [0, *kept] and [made[k].caller for k in kept] == kept
    assert all(c.is_closed == (made.get(c.caller) is not c) for c in connections)


def test_a_door_forgets_whom_it_dismisses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = cables._Door(listener, 0, b"s")
        end = cables.time.monotonic() + 20
        caller = socket.create_connection(listener.getsockname())
        while not door._callers:
            door.wait(end)
        (file,) = door._callers
        connection = door._dismiss(file)
        assert door._callers == {} and connection.fileno() == file
        with pytest.raises(KeyError):
            door._poll.unregister(file)
        caller.close()
        connection.close()


@each(**{"rounds, found": [([4.0, 1.0, 3.0], 1), ([1.0, 1.0, 2.0], 0), ([3.0, 2.0, 1.0], 2)]})
def test_the_quickest_question_tells_the_time(monkeypatch, rounds, found):
    """Rank 1 asks; each answer is 500 ahead of the middle of its question, and says which one it was."""
    now, asked = [100.0], []

    def recv(source, tag):
        took = rounds[len(asked)]
        answer = now[0] + took / 2 + 500 + 1000 * len(asked)
        now[0] += took
        asked.append((source, tag))
        return answer

    sent = []
    comm = SimpleNamespace(rank=1, size=3, send_obj=lambda *args: sent.append(args), recv_obj=recv)
    monkeypatch.setattr(trace, "_NUM_QUESTIONS", len(rounds))
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    at, ahead = trace.ask(comm)
    assert at == 100.0 + sum(rounds[:found]) + rounds[found] / 2 and ahead == 500 + 1000 * found
    assert len(asked) == len(sent) == len(rounds) and {a[0] for a in asked} == {0} and {s[1] for s in sent} == {0}


def test_a_thread_waits_for_no_thread_to_enter_a_verb_again():
    """Neither a new verb nor the second half of one."""
    comm, found = create_communicator("single"), []
    with comm._gate.call("update") as call:
        call.post(())

    def other():
        for enter in (lambda: comm._gate.again(call), lambda: comm._gate.call("update")):
            with pytest.raises(CommunicatorError, match="update: expected one thread at a time, but another"):
                enter()
            found.append(1)

    with comm._gate.call("bcast"):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(20)
        assert found == [1, 1]
