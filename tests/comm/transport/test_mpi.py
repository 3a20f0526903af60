"""Tests of dbrdist.comm.transport.mpi."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.transport import call_log, mpi
from dbrdist.errors import CommunicatorError
from tests.comm.comm_helpers import Clock
from tests.each import each


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class FakeMpi:
    """As much of mpi4py.MPI as its start and end take."""

    THREAD_MULTIPLE, THREAD_SERIALIZED = 3, 2

    def __init__(self, rank=2, size=5):
        self.done, self.is_initialized, self.is_finalized, self.level = [], True, False, 3
        self.COMM_WORLD = SimpleNamespace(rank=rank, size=size, Abort=lambda code: self.done.append(("abort", code)))
        self.COMM_SELF = SimpleNamespace(Set_attr=lambda key, value: self.done.append(("attribute", key)))
        self.Comm = SimpleNamespace(Create_keyval=self.create_keyval)

    def create_keyval(self, delete_fn):
        self.on_delete = delete_fn
        return 77

    def Is_initialized(self):
        return self.is_initialized

    def Is_finalized(self):
        return self.is_finalized

    def Init_thread(self, level):
        self.done.append(("init", level))
        self.is_initialized = True

    def Query_thread(self):
        return self.level

    def Finalize(self):
        self.done.append("finalize")
        self.is_finalized = True


@pytest.fixture
def fake(monkeypatch):
    """MPI that runs in this process, started by the program."""
    made = FakeMpi()
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=made, rc=SimpleNamespace(finalize=None)))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", made)
    for name, value in (("_module", None), ("_is_forked", False), ("_is_ending", False), ("_waiting", set())):
        monkeypatch.setattr(mpi, name, value)
    monkeypatch.setattr(mpi.atexit, "register", lambda function: made.done.append(function))
    return made


def test_mpi_runs_from_its_start_to_its_end_and_in_no_forked_child(fake, monkeypatch):
    assert mpi.started() is fake and mpi.world() == (2, 5)
    fake.level = fake.THREAD_SERIALIZED
    assert not mpi.watching_is_allowed()
    fake.level = fake.THREAD_MULTIPLE
    assert mpi.watching_is_allowed()
    for lacks in ("before", "after", "forked", "unknown"):
        with monkeypatch.context() as changed:
            changed.setattr(fake, "is_initialized", lacks != "before")
            changed.setattr(fake, "is_finalized", lacks == "after")
            changed.setattr(mpi, "_is_forked", lacks == "forked")
            if lacks == "unknown":
                changed.delitem(sys.modules, "mpi4py.MPI")
            assert mpi.started() is None and mpi.world() == (0, 1) and not mpi.watching_is_allowed()
            mpi.end_job(3)
    assert fake.done == []


def test_mpi_is_started_where_the_program_has_not(fake, monkeypatch):
    rc = sys.modules["mpi4py"].rc
    assert mpi.start() is fake and fake.done == [] and rc.finalize is None and mpi._module is fake
    fake.is_initialized = False
    assert mpi.start() is fake and fake.done == [("init", fake.THREAD_MULTIPLE)]
    monkeypatch.setattr(mpi, "_module", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    fake.done.clear()
    for _ in range(2):
        assert mpi.start() is fake and rc.finalize is False
    assert fake.done == [mpi._finalize]


def test_what_is_missing_for_mpi_is_said(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"expected mpi4py and an MPI library .*; install dbrdist\[mpich\]"):
        mpi.start()


@each(is_waiting=[False, True])
def test_mpi_ends_with_the_process_after_a_last_look_of_those_that_wait(fake, clock, monkeypatch, is_waiting):
    fake.done.clear()
    clock.slept.clear()
    fake.is_finalized = False
    monkeypatch.setattr(mpi, "_is_ending", False)
    monkeypatch.setattr(mpi, "_waiting", {5} if is_waiting else set())
    mpi._finalize()
    assert fake.done == ["finalize"] and clock.slept == [mpi._LAST_LOOK_SECONDS] * is_waiting and mpi._is_ending
    monkeypatch.setattr(mpi, "_is_ending", False)
    mpi._finalize()  # after the end there is nothing to do
    assert fake.done == ["finalize"] and not mpi._is_ending


def test_the_end_of_a_job_waits_until_its_last_words_are_forwarded(fake, clock):
    mpi.end_job(3)
    assert fake.done == [("abort", 3)] and clock.slept == [mpi.FORWARDING_SECONDS]


def test_a_program_that_ends_mpi_itself_calls_first(fake):
    called = []
    mpi.call_before_finalize(lambda: called.append(1))
    assert fake.done == [("attribute", 77)] and called == []
    fake.on_delete("comm", 77, "value")
    assert called == [1]


def test_why_no_verb_can_run(fake, monkeypatch):
    mpi.start()
    assert mpi.refusal() == ""
    fake.is_finalized = True
    assert mpi.refusal() == "MPI has been finalized, by the program or at its exit; communicate before that"
    monkeypatch.setattr(mpi, "_is_forked", True)
    assert mpi.refusal().startswith(f"process {os.getpid()} was forked from a rank but is not a rank itself")


def test_ranks_of_a_communicator_in_the_world(fake):
    class Group:
        def __init__(self, members):
            self.members, self.size, self.is_free = members, len(members), False

        def Translate_ranks(self, ranks, other):
            return [other.members.index(self.members[rank]) for rank in ranks]

        def Free(self):
            self.is_free = True

    groups = [Group("cae"), Group("abcde")]
    fake.COMM_WORLD.Get_group = lambda: groups[1]
    assert mpi.world_ranks(SimpleNamespace(Get_group=lambda: groups[0])) == (2, 0, 4)
    assert all(group.is_free for group in groups)


def test_names_of_mpichs_memory_are_removed_and_no_others(monkeypatch, tmp_path):
    front = "7f0 rw-s 00000000 00:19 5  "
    mpich, other = "/dev/shm/mpich_shm_a b", "/dev/shm/mine"
    (tmp_path / "maps").write_text(f"{front}{mpich}\n{front}{mpich}\n{front}{other}\n7f1 rw-p 0 00:00 0\n")
    removed = []

    def unlink(name):
        removed.append(name)
        raise FileNotFoundError  # another rank was faster

    monkeypatch.setattr(mpi.os, "unlink", unlink)
    monkeypatch.setattr(mpi, "open", lambda *args, **options: (tmp_path / "maps").open(), raising=False)
    mpi.unlink_segments()
    assert removed == [mpich]
    monkeypatch.setattr(mpi, "open", lambda *args, **options: (tmp_path / "none").open(), raising=False)
    mpi.unlink_segments()


def test_ranks_that_share_cores_spin_briefly(monkeypatch):
    monkeypatch.setattr(mpi, "_spins", mpi._SPINS)
    monkeypatch.setattr(mpi, "_num_ranks_on_host", 0)
    for are_enough, num_ranks, spins in (
        (True, 2, True), (False, 2, False), (True, 1, False), (True, 3, True), (False, 2, True), (False, 3, False),
    ):  # fmt: skip
        assert mpi.share_cores(are_enough, num_ranks) is spins
        assert mpi._spins == (mpi._SPINS if spins else mpi._SPINS_WITHOUT_CORE)


class Looks:
    """A test that succeeds at its n-th look."""

    def __init__(self, number, call):
        self.number, self.call, self.were_waiting = number, call, []

    def __call__(self):
        self.were_waiting.append((self.call.is_waiting, threading.get_ident() in mpi._waiting))
        return len(self.were_waiting) >= self.number and "found"


@pytest.fixture
def call():
    with call_log.Call(call_log.CallLog(), "bcast", "world", (0, 1), ("x.py", 3)) as made:
        yield made


@each(**{"number, slept": [(1, []), (2, []), (21, []), (22, [0.0]), (222, [0.0] * 201), (223, [0.0] * 201 + [1e-5])]})
def test_a_wait_spins_then_yields_then_sleeps(fake, clock, call, monkeypatch, number, slept):
    """The first look is none of the wait; of those after it the last does not sleep."""
    clock.slept.clear()
    monkeypatch.setattr(mpi, "_spins", mpi._SPINS_WITHOUT_CORE)
    looks = Looks(number, call)
    assert mpi.wait_until(looks, call) == "found"
    assert looks.were_waiting == [(False, False)] + [(True, True)] * (number - 1)
    assert clock.slept == pytest.approx(slept) and not call.is_waiting and not mpi._waiting


@each(
    **{"number, spins, calls": [(1, 40, 0), (16, 40, 0), (18, 40, 1), (34, 40, 2), (41, 40, 2), (44, 40, 5), (9, 0, 7)]}
)
def test_a_wait_does_something_else_now_and_then_and_at_each_pause(
    fake, clock, call, monkeypatch, number, spins, calls
):
    monkeypatch.setattr(mpi, "_spins", spins)
    done = []
    assert mpi.wait_until(Looks(number, call), call, lambda: done.append(1)) == "found"
    assert len(done) == calls


def test_sleeps_in_a_wait_grow_up_to_a_millisecond(fake, clock, call, monkeypatch):
    monkeypatch.setattr(mpi, "_spins", 0)
    assert mpi.wait_until(Looks(mpi._YIELDS + 150, call), call)
    pauses = [pause for pause in clock.slept if pause]
    assert pauses == pytest.approx([min(1e-5 * (k + 1), 1e-3) for k in range(len(pauses))]) and pauses[-1] == 1e-3


def test_a_wait_in_the_background_pauses_from_the_first_look_on(fake, clock, call):
    call.pause_seconds = 0.25
    assert mpi.wait_until(Looks(4, call), call) and clock.slept == [0.25, 0.25]
    call.error = "it cannot end"
    with pytest.raises(CommunicatorError, match="it cannot end"):
        mpi.wait_until(Looks(4, call), call)
    assert not call.is_waiting and not mpi._waiting


def test_a_wait_that_cannot_end_raises_once_it_has_spun(fake, clock, call, monkeypatch):
    monkeypatch.setattr(mpi, "_spins", 5)
    call.error = "it cannot end"
    looks = Looks(100, call)
    with pytest.raises(CommunicatorError, match="it cannot end"):
        mpi.wait_until(looks, call)
    assert len(looks.were_waiting) == 6 and clock.slept == []
