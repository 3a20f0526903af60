"""How a rank reports its failure, meets the others at its end and ends the job: told to its parts one by one.

Whole jobs of real ranks are in test_abort.py and test_watch.py.
"""

import _thread
import ctypes
import gc
import os
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dbrdist.comm import abort, environment, exit_status, mpi, record, watch
from dbrdist.comm.deadlock import State
from dbrdist.errors import CommunicatorError
from tests.each import each


class Ended(Exception):
    """In the place of the end of a process or a job; its argument is the exit code."""


class Clock:
    """A clock that stands still until this thread sleeps; others, as earlier tests may have left, have the real one."""

    def __init__(self, monkeypatch):
        self.now, self.slept, self.thread = 1000.0, [], threading.get_ident()
        self.real_monotonic, self.real_sleep = time.monotonic, time.sleep
        monkeypatch.setattr(time, "monotonic", self.monotonic)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def monotonic(self):
        return self.now if threading.get_ident() == self.thread else self.real_monotonic()

    def sleep(self, seconds):
        if threading.get_ident() != self.thread:
            self.real_sleep(seconds)
            return
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def rank_1(monkeypatch):
    """Rank 1 of 3, whose MPI runs, as the room sees it; ``all_leave`` says whether all come to the meeting."""
    seen = SimpleNamespace(told=0, all_leave=False, met=[])

    def meet(seconds):
        seen.met.append(seconds)
        return seen.all_leave

    def end(code):
        raise Ended(code)

    def tell():
        seen.told += 1

    monkeypatch.setattr(mpi, "started", lambda: "MPI")
    monkeypatch.setattr(mpi, "world", lambda: (1, 3))
    monkeypatch.setattr(mpi, "end_job", end)
    monkeypatch.setattr(watch, "all_leave_within", meet)
    monkeypatch.setattr(watch, "tell_that_this_rank_fails", tell)
    monkeypatch.setattr(watch, "is_over", lambda: False)
    monkeypatch.setattr(abort, "_installed_in", os.getpid())
    monkeypatch.setattr(abort, "_is_within_hook", threading.Event())
    monkeypatch.setattr(abort, "_earlier_hook", sys.__excepthook__)
    monkeypatch.setattr(abort, "_earlier_thread_hook", threading.__excepthook__)
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
    return seen


class OwnExit(SystemExit):
    pass


class OwnInterrupt(KeyboardInterrupt):
    pass


def raised(error):
    """(class, value, traceback) of an error that was raised."""
    try:
        raise error
    except BaseException as e:
        return type(e), e, e.__traceback__


# ---- the hooks ------------------------------------------------------------------------------------------------------


@each(**{"error, code, words": [(ValueError("on purpose"), 1, "[rank 1] ValueError: on purpose\n"),
                                (KeyboardInterrupt(), 130, "[rank 1] interrupted\n"),
                                (OwnInterrupt(), 130, "[rank 1] interrupted\n")]})  # fmt: skip
def test_what_nobody_catches_ends_the_job(rank_1, capfd, error, code, words):
    capfd.readouterr()
    before = rank_1.told
    with pytest.raises(Ended) as ended:
        abort._on_exception(*raised(error))
    err = capfd.readouterr().err
    assert ended.value.args == (code,) and rank_1.told == before + 1 and err.endswith(words)
    assert ("Traceback" in err) == (code == 1) and all(line.startswith("[rank 1] ") for line in err.splitlines())


def test_a_hook_of_the_users_is_called_before_ours(rank_1, capfd, monkeypatch):
    seen = []
    monkeypatch.setattr(abort, "_earlier_hook", lambda *args: seen.append(args))
    found = raised(ValueError("on purpose"))
    with pytest.raises(Ended):
        abort._on_exception(*found)
    assert seen == [found] and capfd.readouterr().err == "[rank 1] ValueError: on purpose\n"
    abort._on_exception(*found)  # which a hook that was set after ours calls as the one before it
    assert len(seen) == 1 and "Traceback" in capfd.readouterr().err


def test_a_forked_child_has_the_hooks_of_before(rank_1, capfd, monkeypatch):
    seen = []
    monkeypatch.setattr(abort, "_installed_in", os.getpid() + 1)
    monkeypatch.setattr(abort, "_earlier_hook", lambda *args: seen.append(args))
    monkeypatch.setattr(abort, "_earlier_thread_hook", seen.append)
    abort._on_exception(*raised(ValueError("on purpose")))
    args = of_thread(ValueError("on purpose"))
    abort._on_thread_exception(args)
    assert abort._on_system_exit(3) == 3
    assert len(seen) == 2 and seen[1] is args and capfd.readouterr().err == ""


def of_thread(error, thread=None):
    kind, value, tb = raised(error)
    return SimpleNamespace(exc_type=kind, exc_value=value, exc_traceback=tb, thread=thread)


def test_a_thread_that_dies_ends_the_job_at_once(rank_1, capfd, monkeypatch):
    for thread, name in ((threading.Thread(name="helper"), "helper"), (None, "unknown")):
        with pytest.raises(Ended) as ended:
            abort._on_thread_exception(of_thread(KeyError(5), thread))
        lines = capfd.readouterr().err.splitlines()
        assert lines[0] == f"[rank 1] thread '{name}' died:" and lines[-1] == "[rank 1] KeyError: 5"
        assert ended.value.args == (1,) and rank_1.met == []
    assert rank_1.told == 2
    seen = []
    monkeypatch.setattr(abort, "_earlier_thread_hook", seen.append)
    for _ in range(2):  # the second time from within a hook
        with pytest.raises(Ended):
            abort._on_thread_exception(of_thread(KeyError(5)))
    assert len(seen) == 1


@each(kind=[SystemExit, OwnExit])
def test_a_thread_that_exits_ends_itself_alone(rank_1, capfd, monkeypatch, kind):
    seen = []
    monkeypatch.setattr(abort, "_earlier_thread_hook", seen.append)
    abort._on_thread_exception(of_thread(kind(3)))
    assert len(seen) == 1 and rank_1.told == 0 and capfd.readouterr().err == ""


@each(**{"status, code, words": [(3, 3, "exit status 3"), ("words", 1, "words"), (259, 3, "exit status 3")]})
def test_an_exit_that_nobody_catches_ends_the_job(rank_1, capfd, status, code, words):
    with pytest.raises(Ended) as ended:
        abort._on_system_exit(status)
    assert ended.value.args == (code,) and capfd.readouterr().err == f"[rank 1] {words}\n"


def test_exits_that_end_no_job(rank_1, capfd, monkeypatch):
    for status in (0, None, False):
        assert abort._on_system_exit(status) == status
    assert rank_1.met == []
    rank_1.all_leave = True
    assert abort._on_system_exit("words") == 1  # not the text, which the interpreter would print again
    assert capfd.readouterr().err == "[rank 1] words\n" and rank_1.met == [abort._MEETING_SECONDS]
    monkeypatch.setattr(watch, "is_over", lambda: True)
    assert abort._on_system_exit(3) == 3 and len(rank_1.met) == 1


def test_hooks_are_taken_once_and_again_from_a_program_that_sets_its_own(rank_1, monkeypatch):
    monkeypatch.setattr(abort, "_installed_in", None)
    mine, of_threads = (lambda *_: None), (lambda args: None)
    monkeypatch.setattr(sys, "excepthook", mine)
    monkeypatch.setattr(threading, "excepthook", of_threads)
    for _ in range(2):
        abort._install()
        assert (abort._earlier_hook, abort._earlier_thread_hook) == (mine, of_threads)
        assert (sys.excepthook, threading.excepthook) == (abort._on_exception, abort._on_thread_exception)
        assert abort._installed_in == os.getpid()


# ---- where it is installed ------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """What is installed and joined, in the order in which it is."""
    done = []
    monkeypatch.setattr(abort, "_install", lambda: done.append("hooks"))
    monkeypatch.setattr(exit_status, "watch", lambda function: done.append(function))
    monkeypatch.setattr(watch, "join", lambda mpi_comm, members: done.append((mpi_comm, members)))
    return done


def test_library_use_is_guarded_on_several_ranks_outside_of_workers(installed, monkeypatch):
    both = SimpleNamespace(size=2, mpi_comm="comm", world_ranks=lambda: (0, 1))
    abort.guard_library_use(both)
    assert installed == [("comm", (0, 1)), "hooks", abort._on_system_exit]
    installed.clear()
    abort.guard_library_use(SimpleNamespace(size=1))
    monkeypatch.setattr(abort, "_is_interactive_or_worker", lambda: True)
    abort.guard_library_use(both)
    assert installed == []


@each(
    **{
        "size, socket, is_worker, is_guarded": [
            (2, None, False, True), (2, 5, False, True), (1, None, False, False), (2, 0, False, False),
            (2, None, True, False),
        ]
    }
)  # fmt: skip
def test_what_a_launcher_started_is_guarded_from_the_import_on(
    installed, monkeypatch, size, socket, is_worker, is_guarded
):
    installed.clear()
    monkeypatch.setattr(environment, "launched", lambda: (size, 0, "PMI_SIZE"))
    monkeypatch.setattr(abort, "_launcher_socket", lambda: socket)
    monkeypatch.setattr(abort, "_is_interactive_or_worker", lambda: is_worker)
    abort.guard_launched()
    assert installed == (["hooks", abort._on_system_exit] if is_guarded else [])


def test_who_is_interactive_or_a_worker(monkeypatch):
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setattr(abort.multiprocessing, "parent_process", lambda: None)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not abort._is_interactive_or_worker()
    for get, is_within in ((lambda: None, False), (lambda: "shell", True)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=get))
        assert abort._is_interactive_or_worker() is is_within
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert abort._is_interactive_or_worker()
    monkeypatch.delattr(sys, "ps1")
    monkeypatch.setattr(abort.multiprocessing, "parent_process", lambda: "parent")
    assert abort._is_interactive_or_worker()


def fails(error):
    def main():
        raise error

    return main


@each(
    **{
        "main, code, ended, words": [
            (lambda: None, 0, None, ""), (lambda: 0, 0, None, ""), (lambda: 7, 7, 7, "[rank 1] exit status 7\n"),
            (fails(SystemExit(3)), 3, 3, "[rank 1] exit status 3\n"),
            (fails(SystemExit("why")), 1, 1, "[rank 1] why\n"), (fails(SystemExit()), 0, None, ""),
            (fails(KeyboardInterrupt()), 130, 130, "[rank 1] interrupted\n"),
            (fails(KeyError(5)), 1, 1, "[rank 1] KeyError: 5\n"),
        ]
    }
)  # fmt: skip
def test_a_guarded_main(rank_1, installed, capfd, main, code, ended, words):
    for all_leave in (False, True):
        rank_1.all_leave = all_leave
        with pytest.raises((Ended, SystemExit)) as caught:
            abort.guard(main)
        is_ended = ended is not None and not all_leave
        assert type(caught.value) is (Ended if is_ended else SystemExit) and caught.value.args == (code,)
        said = capfd.readouterr().err
        expected = words if is_ended or "exit status" not in words else ""  # of a mere status who ends the job speaks
        assert said.endswith(expected) and (said == "") == (expected == "")
    assert installed == ["hooks"] * 2
    installed.clear()


# ---- the end --------------------------------------------------------------------------------------------------------


@each(
    **{
        "world, launched, front": [
            ((2, 4), (1, 0), "[rank 2] "), ((0, 2), (1, 0), "[rank 0] "), ((0, 1), (3, 2), "[rank 2] "),
            ((0, 1), (2, 1), "[rank 1] "), ((0, 1), (1, 0), ""),
        ]
    }
)  # fmt: skip
def test_lines_carry_the_rank_where_there_are_several(monkeypatch, capfd, world, launched, front):
    monkeypatch.setattr(mpi, "world", lambda: world)
    monkeypatch.setattr(environment, "launched", lambda: (*launched, ""))
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
    abort.report("one\ntwo ü\n\n")
    assert capfd.readouterr().err == f"{front}one\n{front}two ü\n"
    abort.report("")
    abort.report("\udc80")
    assert capfd.readouterr().err == f"{front}\n{front}\\udc80\n"


def test_a_report_goes_on_without_streams(monkeypatch, rank_1, capfd):
    monkeypatch.setattr(sys, "stdout", None)
    with open(os.devnull) as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    abort.report("words")
    assert capfd.readouterr().err == "[rank 1] words\n"
    written = []

    def gone(number, data):
        written.append(data)
        raise OSError

    monkeypatch.setattr(os, "write", gone)
    abort.report("one\ntwo")
    assert written == [b"[rank 1] one\n"]


def test_a_rank_alone_ends_no_job(rank_1, monkeypatch):
    monkeypatch.setattr(mpi, "world", lambda: (0, 1))
    abort._fail(3, "")
    assert rank_1.met == [] and rank_1.told == 0
    monkeypatch.setattr(mpi, "world", lambda: (0, 2))
    with pytest.raises(Ended):
        abort._fail(3, "")


def test_the_process_ends_where_mpi_does_not_run(monkeypatch):
    ended = []
    monkeypatch.setattr(mpi, "end_job", lambda code: ended.append(("job", code)))
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(("process", code)))
    abort._end(5)
    assert ended == [("job", 5), ("process", 5)]


@each(rank=[0, 1, 2], is_hydra=[True, False])
def test_a_failure_before_mpi_is_told_to_hydra(rank_1, clock, monkeypatch, capfd, rank, is_hydra):
    clock.slept.clear()
    monkeypatch.setattr(mpi, "started", lambda: None)
    monkeypatch.setattr(mpi, "world", lambda: (0, 1))
    monkeypatch.setattr(environment, "launched", lambda: (3, rank, "PMI_SIZE"))
    here, there = socket.socketpair()
    with here, there:
        if is_hydra:
            monkeypatch.setenv("PMI_FD", str(there.fileno()))
        else:
            monkeypatch.delenv("PMI_FD", raising=False)
        abort._fail(3, "")
        here.setblocking(False)
        if is_hydra:
            assert here.recv(100) == b"cmd=abort exitcode=3\n"
        with pytest.raises(BlockingIOError):
            here.recv(1)
        here.close()
        abort._fail_before_mpi(3, "said")  # hydra is gone
    meeting = [abort._MEETING_SECONDS] if rank else []
    assert clock.slept == [*meeting, mpi.FORWARDING_SECONDS] * 2 and rank_1.met == []
    assert capfd.readouterr().err == (f"[rank {rank}] exit status 3\n" if rank else "")


@each(**{"size, is_over": [(1, False), (3, True)]})
def test_nobody_is_told_where_nobody_waits(rank_1, clock, monkeypatch, size, is_over):
    monkeypatch.setattr(environment, "launched", lambda: (size, 1, ""))
    monkeypatch.setattr(watch, "is_over", lambda: is_over)
    monkeypatch.setattr(abort, "_launcher_socket", lambda: pytest.fail("it tells"))
    abort._fail_before_mpi(3, "")
    assert clock.slept == []


def test_the_line_to_hydra_is_a_socket_of_this_process(monkeypatch):
    monkeypatch.delenv("PMI_FD", raising=False)
    assert abort._launcher_socket() is None
    here, there = socket.socketpair()
    read, write = os.pipe()
    with here, there:
        for word, found in (("x", None), (here.fileno(), here.fileno()), (read, 0), (1 << 20, 0)):
            monkeypatch.setenv("PMI_FD", str(word))
            assert abort._launcher_socket() == found
    os.close(read)
    os.close(write)


# ---- exits that nobody catches --------------------------------------------------------------------------------------


@pytest.fixture
def exits(monkeypatch):
    """The attribute of SystemExit as it is without the watch, before and after."""
    attributes = gc.get_referents(SystemExit.__dict__)[0]
    original, leave = attributes["code"], sys.exit
    assert type(original).__name__ == "member_descriptor", "another test left its watch"
    monkeypatch.setattr(exit_status, "_watcher", None)
    yield
    attributes["code"], sys.exit = original, leave
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def test_the_code_of_an_exit_is_watched_where_the_interpreter_reads_it(exits):
    seen, came = [], threading.Event()

    def watcher(code):
        seen.append(code)
        came.set()
        return code

    assert exit_status.watch(watcher) and exit_status.watch(watcher)
    error = SystemExit(3)
    assert error.code == 3 and seen == []  # read by a program
    error.code = 4
    assert error.code == 4 and SystemExit((1, 2)).code == (1, 2) and SystemExit().code is None
    with pytest.raises(SystemExit, match="7"):
        sys.exit(7)
    assert seen == []
    _thread.start_new_thread(getattr, (error, "code"))  # a thread without a Python frame
    assert came.wait(20) and seen == [4]


def test_an_interpreter_that_is_not_cpython_is_not_watched(exits, monkeypatch):
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy"))
    assert exit_status.watch(print) is False and exit_status._watcher is None


# ---- MPI as this process has it -------------------------------------------------------------------------------------


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
    with record.Call(record.Record(), "bcast", "world", (0, 1), ("x.py", 3)) as made:
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


# ---- the watch ------------------------------------------------------------------------------------------------------


class Line:
    """A channel of the watch that keeps what it is told; all have come to the exit at look ``arrives_at``."""

    def __init__(self, members=(0, 1, 2), arrives_at=1):
        self.members, self.judge, self.arrives_at = members, members[0], arrives_at
        self.looks, self.told, self.heard = 0, [], []

    def arrive(self):
        self.looks += 1
        return self.looks >= self.arrives_at

    def tell(self, rank, words):
        self.told.append((rank, words))

    def tell_all(self, words):
        self.told.append(("all", words))

    def hear(self):
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """The watch of rank 1, and a record of its own."""
    state = watch._Watch()
    monkeypatch.setattr(watch, "_watch", state)
    monkeypatch.setattr(record, "process", record.Record(1, threading.get_ident()))
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(mpi, "started", lambda: "MPI")
    monkeypatch.setattr(mpi, "world", lambda: (1, 3))
    monkeypatch.setattr(mpi, "end_job", lambda code: state.ended.append(code))
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
    state.ended = []
    return state


@each(**{"rank, is_allowed": [(0, True), (1, True), (1, False)]})
def test_ranks_are_watched_once(monkeypatch, rank, is_allowed):
    state, done = watch._Watch(), []
    monkeypatch.setattr(watch, "_watch", state)
    monkeypatch.setattr(record, "process", record.Record(rank))
    monkeypatch.setattr(watch, "Channel", lambda mpi_comm, members: Line(members))
    monkeypatch.setattr(watch.atexit, "register", lambda function: done.append(("exit", function)))
    monkeypatch.setattr(mpi, "call_before_finalize", lambda function: done.append(("finalize", function)))
    monkeypatch.setattr(mpi, "watching_is_allowed", lambda: is_allowed)
    monkeypatch.setattr(watch, "_listen", lambda: done.append("listens"))
    watch.join("comm", (1, 2))
    if state.listener is not None:
        state.listener.join(20)
    for members in ((2, 1), (2,), (0, 1, 2), (1, 0)):
        watch.join("comm", members)
    assert [channel.members for channel in state.channels] == [(1, 2), (0, 1, 2)]
    assert [(number, judge.channel.judge) for number, judge in state.judges.items()] == ([(0, 1)] if rank else [(1, 0)])
    assert sorted(map(str, done)) == sorted(
        map(str, [("exit", watch._leave), ("finalize", watch._leave), *["listens"] * is_allowed])
    )
    assert (state.listener is not None and state.listener.daemon) == is_allowed


@each(**{"arrives_at, seconds, is_there": [(1, 0.0, True), (2, 0.0, True), (3, 0.0, False), (12, 1.0, True),
                                           (12, 0.2, False), (99, 1.0, False)]})  # fmt: skip
def test_a_meeting_at_the_exit(watched, clock, arrives_at, seconds, is_there):
    """Looks at 0, 0.5, 1.5, 3.5 ms and so on, with pauses of 50 ms at most."""
    watched.over = False
    watched.stop.clear()
    clock.slept.clear()
    early, late = Line(), Line((0, 1), arrives_at)
    watched.channels = [late, early]
    assert watch.all_leave_within(seconds) is is_there
    assert watch.is_over() is is_there is watched.stop.is_set()
    assert early.looks == late.looks == len(clock.slept) + 1  # on every channel, even if the first is late
    assert clock.slept == [min(0.0005 * 2**k, 0.05) for k in range(len(clock.slept))]
    if is_there:
        assert watch.all_leave_within(0.0) and late.looks == arrives_at
    else:
        assert seconds < sum(clock.slept) <= seconds + 0.05


def test_nobody_meets_without_channels_or_mpi(watched, clock, monkeypatch):
    assert not watch.all_leave_within(5.0)
    watched.channels = [Line()]
    monkeypatch.setattr(mpi, "started", lambda: None)
    assert not watch.all_leave_within(5.0) and watched.channels[0].looks == 0 and clock.slept == []


@each(**{"arrives_at, is_said, meetings": [(1, False, 1), (30, False, 2), (140, True, 3)]})
def test_who_leaves_says_so_after_a_while(watched, clock, capfd, arrives_at, is_said, meetings):
    watched.over, watched.has_left, watched.is_ending = False, False, False
    line, judge = Line(arrives_at=arrives_at), SimpleNamespace(heard=[])
    judge.hear = lambda state, is_answer: judge.heard.append((state.rank, state.has_left, is_answer))
    watched.channels, watched.judges = [line], {0: judge}
    watch._leave()
    assert watched.over and watched.has_left == (meetings > 1)
    assert judge.heard == [(1, True, False)] * (meetings > 1)
    assert [(to, words["what"], State.decode({k: v for k, v in words.items() if k != "what"}).has_left)
            for to, words in line.told] == [("all", "state", True)] * (meetings > 1)  # fmt: skip
    words = "[rank 1] finished 5 s ago; ranks 0, 2 of 3 still running\n"
    assert capfd.readouterr().err == (words if is_said else "")


def test_a_forked_child_and_a_process_without_mpi_leave_at_once(watched, clock, monkeypatch):
    watched.channels = [Line()]
    watched.process += 1
    watch._leave()
    watched.process -= 1
    monkeypatch.setattr(mpi, "started", lambda: None)
    watch._leave()
    assert watched.channels[0].looks == 0


@each(**{"left, words": [({0}, ""), ({2}, "[rank 1] finished 5 s ago; rank 0 of 3 still running\n"),
                         (set(), "[rank 1] finished 5 s ago; ranks 0, 2 of 3 still running\n")]})  # fmt: skip
def test_the_lowest_that_has_left_says_who_is_missing(watched, capfd, left, words):
    watched.others_left = left
    watch._say_who_is_missing()
    assert capfd.readouterr().err == words


def waits_in(own, verb="recv", since=0.0, is_waiting=True):
    """A verb in which this thread waits for others."""
    one = record.Call(own, verb, "world", (0, 1), ("x.py", 3))
    one.since, one.is_waiting, one.number = since, is_waiting, 1
    return one


def test_a_rank_says_once_where_it_waits(watched, clock):
    own, line = record.process, Line()
    watched.channels = [line]
    watch._say_where()
    with waits_in(own, since=clock.now - watch.patience_seconds) as one:
        watch._say_where()
        assert line.told == []
        clock.now += 2.0**-10
        one.is_waiting = False
        watch._say_where()
        assert line.told == []
        one.is_waiting = True
        watch._say_where()
        watch._say_where()
        ((to, words),) = line.told
        assert to == 0 and words.pop("what") == "state" and State.decode(words).wait_ids() == {one.wait_id}
    line.told.clear()
    with waits_in(own, since=clock.now - 5.0):
        own.home = None  # the main thread, which waits nowhere where this is another one
        if threading.current_thread() is threading.main_thread():
            own.threads.add(threading.get_ident())
        watch._say_where()
        assert len(line.told) == 1


def test_a_rank_that_computes_says_nothing(watched, clock):
    own, line = record.process, Line()
    watched.channels = [line]
    computing = threading.Event()
    other = threading.Thread(target=computing.wait, daemon=True)
    other.start()
    own.threads.add(other.ident)
    with waits_in(own, since=clock.now - 5.0):
        watch._say_where()
        assert line.told == [] and watched.said == set()
        computing.set()
        other.join(20)
        watch._say_where()
        assert len(line.told) == 1


class FakeJudge:
    def __init__(self, verdict=None, channel=None):
        self.heard, self.verdict, self.channel = [], verdict, channel

    def hear(self, state, is_answer):
        self.heard.append((state.rank, is_answer))

    def look(self):
        return self.verdict


def test_what_a_watch_is_told(watched, clock, capfd):
    own, line, judge = record.process, Line(), FakeJudge()
    for what, has_left in (("state", False), ("answer", False), ("state", True)):
        words = State(2, False, has_left).encode()
        watch._obey({"what": what, **words}, line, judge)
        watch._obey({"what": what, **words}, line, None)
        assert watched.others_left == ({2} if has_left else set())
    assert judge.heard == [(2, False), (2, True), (2, False)] and line.told == []
    watch._obey({"what": "ask"}, line, judge)
    ((to, words),) = line.told
    assert to == 0 and words.pop("what") == "answer" and State.decode(words).rank == 1
    with waits_in(own) as outer:
        watch._obey({"what": "end", "text": "stuck", "wait_ids": [outer.wait_id + 1]}, line, None)
        assert outer.error == "" and watched.told_at == clock.now
        watch._obey({"what": "end", "text": "stuck", "wait_ids": [outer.wait_id]}, line, None)
        assert outer.error == "stuck"
    assert not watched.is_ending
    watch._obey({"what": "failing"}, line, None)
    assert watched.is_ending and "the last 1 verbs of this rank are in" in capfd.readouterr().err


def test_a_verdict_goes_to_those_whom_it_concerns():
    line = Line()
    watch._pronounce(FakeJudge(None, line))
    assert line.told == []
    watch._pronounce(FakeJudge(("stuck", {0: {3, 1}, 2: {5}}), line))
    assert line.told == [(0, {"what": "end", "text": "stuck", "wait_ids": [1, 3]}),
                         (2, {"what": "end", "text": "stuck", "wait_ids": [5]})]  # fmt: skip


def test_a_wait_inside_mpi_that_was_told_to_end_ends_the_job(watched, capfd):
    own = record.process
    watched.told_at = 5.0
    with waits_in(own) as one:
        watch._end_if_stuck()
        assert watched.told_at == 0.0 and watched.ended == [] and capfd.readouterr().err == ""
        one.error = "stuck"
        watch._end_if_stuck()
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "[rank 1] stuck; the job is ended" and "the last 1 verbs of this rank are in" in said[1]
    assert watched.ended == [1]


def test_a_failure_half_way_through_ends_the_job(watched, call, capfd):
    watch.end_for(call, "ValueError: e")
    assert watched.ended == []
    watched.channels = [Line()]
    watch.end_for(call, "ValueError: e")
    words = "[rank 1] bcast at x.py:3 ended with ValueError: e; the others wait in it, so the job is ended\n"
    assert watched.ended == [1] and capfd.readouterr().err == words


def test_the_record_is_written_once_where_there_is_one(watched, tmp_path, capfd):
    watched.channels = lines = [Line(), Line((0, 1))]
    watch.say_record()
    assert capfd.readouterr().err == "" and watched.is_ending
    watched.is_ending = False
    with waits_in(record.process):
        pass
    for _ in range(2):
        watch.tell_that_this_rank_fails()
    assert [line.told for line in lines] == [[("all", {"what": "failing"})] * 2] * 2
    (path,) = tmp_path.iterdir()
    assert capfd.readouterr().err == f"[rank 1] the last 1 verbs of this rank are in {path}\n"
    assert path.name == f"dbrdist-verbs-rank1-{os.getpid()}.txt" and "recv" in path.read_text()


def test_the_listener_hears_says_and_pronounces(watched, clock, monkeypatch):
    """Three turns: in the first one it hears, in the second it was told to end too long ago, in the third MPI ends."""
    own, line = record.process, Line()
    judge = FakeJudge(("stuck", {2: {5}}), line)
    watched.channels, watched.judges = [line], {0: judge}
    line.heard = [{"what": "state", **State(2, False).encode()}]
    turns, stuck = [], []

    def wait(seconds):
        assert seconds == watch._LOOK_SECONDS
        turns.append(len(line.told))
        if len(turns) == 2:
            watched.told_at = clock.now
            clock.now += watch._GRACE_SECONDS
        elif len(turns) == 3:
            clock.now += 2.0**-10
        elif len(turns) == 4:
            monkeypatch.setattr(mpi, "started", lambda: None)
        return False

    monkeypatch.setattr(watch, "_end_if_stuck", lambda: stuck.append(len(turns)))
    monkeypatch.setattr(watched, "stop", SimpleNamespace(wait=wait))
    with waits_in(own, since=clock.now - 5.0):
        watch._listen()
    assert judge.heard == [(2, False)] and len(turns) == 4 and stuck == [3]
    assert turns == [0, 2, 3, 4] and [words["what"] for _, words in line.told] == ["state", "end", "end", "end"]
    stopped = SimpleNamespace(wait=lambda seconds: True)
    monkeypatch.setattr(watched, "stop", stopped)
    watch._listen()


def test_the_listener_does_not_wait_for_itself(watched):
    watched.listener = threading.current_thread()
    watch._stop_listening()
    assert watched.stop.is_set()
