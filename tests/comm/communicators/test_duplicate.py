"""Tests of dbrdist.comm.communicators.duplicate; those of real ranks are tests/mpi/test_mpi_duplicates.py."""

import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.communicators import duplicate
from dbrdist.errors import CommunicatorError
from tests.comm import jobs
from tests.comm.comm_helpers import Clock


@pytest.mark.mpiexec
def test_ranks_that_others_have_spawned_may_come_late():
    """They have another COMM_WORLD, where no third communicator could be made."""
    found = jobs.run(1, jobs.PROGRAMS / "spawned.py")
    assert found.code == 0, found.text
    assert found.lines("sum") == ["sum 3"]


class Request:
    """A request that is over at its last answer."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def Test(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Group:
    def __init__(self, ranks, freed):
        self.ranks, self.freed = ranks, freed

    def Translate_ranks(self, ranks, other):
        assert ranks is None
        return [rank if rank in other.ranks else -1 for rank in self.ranks]

    def Free(self):
        self.freed.append("group")


class Mpi:
    """MPI with a world of three ranks; ``happened`` is what was made and freed."""

    UNDEFINED = -1

    def __init__(self, version="MPICH 4.2", ranks=(0, 2), request=None, meetings=True):
        self.version, self.ranks, self.happened, self.size = version, ranks, [], len(ranks)
        self.request, self.meetings = request or Request(False), meetings
        self.COMM_WORLD = SimpleNamespace(
            Get_group=lambda: Group((0, 1, 2), self.happened), Create_group=self.create_group
        )

    def Get_library_version(self):
        return self.version

    def Get_group(self):
        return Group(self.ranks, self.happened)

    def Idup(self):
        return "duplicate", self.request

    def create_group(self, group, tag):
        self.happened.append(("made", group.ranks, tag))
        return SimpleNamespace(size=len(group.ranks), Free=lambda: self.happened.append("third"), Ibarrier=self.barrier)

    def barrier(self):
        self.happened.append("meets")
        return Request(False, self.meetings)


@pytest.fixture
def duplication(monkeypatch):
    """Makes a duplication that begins now."""

    def make(is_alone=True, **options):
        one = Mpi(**options)
        monkeypatch.setattr(duplicate.mpi, "start", lambda: one)
        monkeypatch.setattr(duplicate, "_is_alone", lambda: is_alone)
        return duplicate.Duplication(one, "call"), one

    return make


def test_ranks_look_after_ten_seconds_where_nothing_else_could_end_the_wait(duplication, monkeypatch):
    clock = Clock(monkeypatch)
    for is_alone, options in ((True, {}), (False, {}), (True, {"version": "Open MPI v5"}), (True, {"ranks": (0, 3)})):
        began = clock.now
        made, there = duplication(is_alone, **options)
        for seconds in (0.0, 10.0):
            clock.now = began + seconds
            assert not made._test() and not made.has_looked
        clock.now = began + 10.5
        assert not made._test() and made.has_looked is (is_alone and not options)
        if made.has_looked:
            made._maker.join()
            assert there.happened == ["group"] * 2 + [("made", (0, 2), 32721), "group"]  # world and ours, and once more
        made.finish()
        assert there.happened[-1] == "third" and [made[1:] for made in there.happened if made[0] == "made"] == [
            (options.get("ranks", (0, 2)), 32721)
        ]
        clock.now += 1.0


def test_a_duplicate_that_comes_in_time_is_the_answer(duplication, monkeypatch):
    made, there = duplication(request=Request(False, True))
    monkeypatch.setattr(duplicate.mpi, "wait_until", lambda test, call: [test(), test(), call])
    assert made.wait() == "duplicate" and not made.has_looked and there.happened == []


def test_ranks_that_meet_three_hundred_times_duplicate_different_communicators(duplication):
    made, there = duplication()
    made._maker = object()
    assert not made._test()  # the third one is not there yet
    made._make_third()
    looks = 0
    with pytest.raises(CommunicatorError) as caught:
        while True:
            looks += 1
            made._test()
    assert there.happened.count("meets") == 300 and looks == 900  # each begins, is asked in vain, and ends
    assert str(caught.value) == (
        "create_communicator: mpi_comm: expected the same MPI communicator on every rank, got different ones of the "
        "same 2 ranks, as of two duplicates in another order; create the communicators in the same order on all ranks"
    )


def test_a_wait_is_alone_without_other_threads_but_the_watch(monkeypatch):
    monkeypatch.setattr(duplicate.mpi, "watching_is_allowed", lambda: True)
    here = threading.main_thread()
    watch, other = SimpleNamespace(name="dbrdist watch"), SimpleNamespace(name="loader")
    for threads, is_alone in (([here], True), ([here, watch], True), ([here, watch, other], False)):
        monkeypatch.setattr(threading, "enumerate", lambda threads=threads: threads)
        assert duplicate._is_alone() is is_alone
    monkeypatch.setattr(threading, "enumerate", lambda: [here])
    monkeypatch.setattr(duplicate.mpi, "watching_is_allowed", lambda: False)
    assert not duplicate._is_alone()
    monkeypatch.setattr(duplicate.mpi, "watching_is_allowed", lambda: True)
    monkeypatch.setattr(threading, "main_thread", lambda: other)
    assert not duplicate._is_alone()
