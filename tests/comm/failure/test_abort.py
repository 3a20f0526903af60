"""One rank's failure ends a real job: with the right exit code, the rank in the text, and soon."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from dbrdist.comm.communicators import create
from dbrdist.comm.failure import abort, exit_status, watch
from dbrdist.comm.transport import environment, mpi
from tests.comm import jobs
from tests.comm.comm_helpers import Clock
from tests.each import each

FAIL = jobs.PROGRAMS / "fail.py"
GUARDED = jobs.PROGRAMS / "guarded.py"


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("deed", "code", "text"),
    [
        ("exception", 1, "[rank 1] ValueError: broken on purpose"),
        ("setting", 1, "ArgumentError: TopK: fraction: expected a number above 0 and at most 1, got 1.5"),
        ("exit", 3, "[rank 1] exit status 3"),
        ("exit text", 1, "[rank 1] why I leave"),
        ("raise", 4, "[rank 1] exit status 4"),
        ("raise true", 1, "[rank 1] exit status 1"),
        ("raise 256", 1, "[rank 1] exit status 1"),
        ("thread", 1, "[rank 1] thread 'helper' died:"),
        ("interrupt", 130, "[rank 1] interrupted"),
    ],
)
def test_a_failure_on_one_rank_ends_the_job(deed, code, text):
    outcome = jobs.run(3, FAIL, deed, python=jobs.REAL)
    assert outcome.code == code, outcome.text
    assert text in outcome.text
    assert "the end of" not in outcome.text


@pytest.mark.mpiexec
@pytest.mark.parametrize("deed", ["kill", "os._exit"])
def test_a_rank_that_vanishes_ends_the_job(deed):
    """The launcher sees to that; which rank's code it passes on, the first's or that of those it killed, is a race."""
    outcome = jobs.run(3, FAIL, deed)
    assert outcome.code in (9, 137) + ((3,) if deed == "os._exit" else ())


PLACES = ["dataset", "forward", "backward", "hook", "evaluator", "extension", "snapshot"]


@pytest.mark.mpiexec
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_anywhere_in_training_ends_the_job(place, tmp_path):
    outcome = jobs.run(3, jobs.PROGRAMS / "fails_somewhere.py", place, tmp_path)
    assert outcome.code == 1, outcome.text
    assert f"[rank 1] ValueError: broken on purpose in {place}" in outcome.text
    assert "the end of" not in outcome.text


@pytest.mark.mpiexec
@pytest.mark.parametrize("deed", ["nothing", "caught", "thread exit"])
def test_a_program_that_fails_nowhere_is_not_ended(deed):
    outcome = jobs.run(3, FAIL, deed)
    assert outcome.code == 0, outcome.text
    assert sorted(outcome.lines("the end")) == [f"the end of rank {r}" for r in range(3)]
    assert not outcome.lines("[rank")


@pytest.mark.mpiexec
@pytest.mark.parametrize("deed", ["return", "exit none", "finalize", "early import"])
def test_a_rank_that_left_while_others_wait_for_it_is_reported_and_the_job_ended(deed):
    outcome = jobs.run(3, FAIL, deed, python=jobs.REAL if "import" in deed else None)
    assert outcome.code & 1, outcome.text  # mpiexec adds what the rank that left returned
    assert "rank 1 has left, but rank 0 has waited" in outcome.text
    assert "rank 2 has waited" in outcome.text
    assert "for rank 1 in allreduce (" in outcome.text
    assert "fail.py:" in outcome.text


@pytest.mark.mpiexec
def test_a_rank_that_works_on_alone_is_left_alone():
    outcome = jobs.run(3, FAIL, "slow")
    assert outcome.code == 0, outcome.text
    assert "the slow rank is done" in outcome.text
    assert outcome.lines("[rank") == ["[rank 0] finished 5 s ago; rank 1 of 3 still running"]


@pytest.mark.mpiexec
def test_ranks_that_fail_alike_all_say_so():
    outcome = jobs.run(3, FAIL, "all raise")
    assert outcome.code == 1, outcome.text
    assert {line[:8] for line in outcome.text.splitlines() if "ValueError:" in line} == {
        f"[rank {r}]" for r in range(3)
    }
    outcome = jobs.run(3, FAIL, "all exit")
    assert (outcome.code, outcome.lines("[rank")) == (75, [])


@pytest.mark.mpiexec
def test_an_earlier_hook_is_called_too():
    outcome = jobs.run(2, FAIL, "hook")
    assert outcome.code == 1
    assert "earlier hook: seen by both hooks" in outcome.text
    assert outcome.lines("[rank 1]")[0] == "[rank 1] ValueError: seen by both hooks"
    assert "of this rank are in" in outcome.lines("[rank 1]")[1]


@pytest.mark.mpiexec
def test_no_prefix_where_the_launcher_puts_it():
    outcome = jobs.run(2, FAIL, "exception", DBRDIST_LAUNCH="1")
    assert outcome.code == 1
    assert outcome.lines("ValueError: broken on purpose")
    assert not outcome.lines("[rank")


@pytest.mark.mpiexec
@pytest.mark.parametrize(
    ("deed", "code", "text"),
    [
        ("exception", 1, "[rank 1] ValueError: broken on purpose"),
        ("exit", 3, "exit status 3"),
        ("return 7", 7, "exit status 7"),
        ("exit text", 1, "[rank 1] why I leave"),
        ("before MPI", 1, "[rank 1] FileNotFoundError: no such data on this host"),
        ("all before MPI", 2, "the configuration is wrong"),
        ("all 75", 75, ""),
        ("nothing", 0, "done"),
    ],
)
def test_a_guarded_main(deed, code, text):
    outcome = jobs.run(3, GUARDED, deed, python=jobs.REAL)
    assert outcome.code == code, outcome.text
    assert text in outcome.text


def _installed(queue):
    queue.put((abort._is_interactive_or_worker(), sys.excepthook is sys.__excepthook__))


@pytest.mark.mpiexec
def test_nothing_is_installed_in_a_worker():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_installed, args=(queue,))
    worker.start()
    assert queue.get(timeout=60) == (True, True)
    worker.join(60)
    queue.close()
    assert abort._is_interactive_or_worker() is False


@pytest.mark.mpiexec
def test_nothing_is_installed_at_a_prompt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert abort._is_interactive_or_worker() is True


@pytest.mark.mpiexec
def test_one_rank_alone_behaves_as_any_program():
    """Without a launcher Python's own hooks stay, and so do its messages and exit codes."""
    program = "import sys; from dbrdist.comm import create_communicator as c; c('naive'); {}"
    for end, code, text in [
        ("sys.exit(3)", 3, ""),
        ("raise KeyError(5)", 1, "KeyError: 5"),
        ("sys.exit('x')", 1, "x\n"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", program.format(end)], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60
        )
        assert done.returncode == code
        assert done.stderr.endswith(text + ("\n" if "Key" in text else ""))
        assert "[rank" not in done.stderr


@pytest.mark.mpiexec
def test_importing_the_room_starts_nothing():
    program = "import sys, dbrdist.comm; print([m for m in ('mpi4py', 'cupy', 'pydantic', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=jobs.ROOT, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.mpiexec
def test_a_failing_test_under_mpiexec_ends_the_job(tmp_path):
    """The plugin in tests/mpi/conftest.py: the rank is named, and the other ranks do not wait for ever."""
    (tmp_path / "conftest.py").write_text((jobs.ROOT / "tests/mpi/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_it(world):\n    assert world.rank != 1\n    world.barrier()\n")
    outcome = jobs.run(3, "-m", "pytest", "-q", tmp_path, python=jobs.REAL)
    assert outcome.code == 1, outcome.text
    assert outcome.lines("[rank 1] FAILED test_it.py::test_it[naive]")
    assert "[rank 1] E       assert 1 != 1" in outcome.text


class Ended(Exception):
    """In the place of the end of a process or a job; its argument is the exit code."""


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
    monkeypatch.setattr(abort.environment, "launcher_socket", lambda *_: socket)
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
            # rank 0 says so for all
            (fails(KeyboardInterrupt()), 130, 130, "[rank 1] exit status 130\n"),
            (fails(KeyError(5)), 1, 1, "[rank 1] KeyError: 5\n"),
        ]
    }
)  # fmt: skip
def test_a_guarded_main_in_one_process(rank_1, installed, capfd, main, code, ended, words):
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


@each(error=[SystemExit(3), KeyError(5)])
def test_a_child_that_a_guarded_main_forked_ends_no_job(rank_1, installed, monkeypatch, error):
    def main():
        monkeypatch.setattr(abort, "_installed_in", os.getpid() + 1)  # as it is in a child
        raise error

    with pytest.raises(SystemExit) as caught:
        abort.guard(main)
    assert caught.value.code == (3 if isinstance(error, SystemExit) else 1)
    assert rank_1.met == [] and rank_1.told == 0


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


def test_what_was_written_before_comes_before_a_report(monkeypatch, rank_1):
    happened = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: happened.append(name)))
    monkeypatch.setattr(os, "write", lambda number, data: happened.append((number, data)))
    abort.report("words")
    assert happened == ["stdout", "stderr", (2, b"[rank 1] words\n")]


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


def test_a_failure_before_mpi_is_left_to_the_launcher(monkeypatch):
    monkeypatch.setattr(mpi, "started", lambda: None)
    monkeypatch.setattr(mpi, "FORWARDING_SECONDS", 0.0)
    monkeypatch.setattr(environment, "launched", lambda: (3, 0, "PMI_SIZE"))
    monkeypatch.setenv("DBRDIST_LAUNCH", "1")
    here, there = socket.socketpair()
    with here, there:
        monkeypatch.setenv("PMI_FD", str(there.fileno()))
        abort._fail_before_mpi(3, "said")
        here.setblocking(False)
        with pytest.raises(BlockingIOError):
            here.recv(100)


@each(rank=[0, 1, 2], is_hydra=[True, False])
def test_a_failure_before_mpi_is_told_to_hydra(rank_1, clock, monkeypatch, capfd, rank, is_hydra):
    monkeypatch.delenv("DBRDIST_LAUNCH", raising=False)
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
    monkeypatch.setattr(abort.environment, "launcher_socket", lambda *_: pytest.fail("it tells"))
    abort._fail_before_mpi(3, "")
    assert clock.slept == []


def test_the_line_to_hydra_is_a_socket_of_this_process(monkeypatch):
    monkeypatch.delenv("PMI_FD", raising=False)
    assert environment.launcher_socket() is None
    here, there = socket.socketpair()
    read, write = os.pipe()
    with here, there:
        for word, found in (("x", None), (here.fileno(), here.fileno()), (read, 0), (1 << 20, 0)):
            monkeypatch.setenv("PMI_FD", str(word))
            assert environment.launcher_socket() == found
    os.close(read)
    os.close(write)


def test_who_makes_a_communicator_over_mpi_is_guarded(monkeypatch):
    guarded = []
    monkeypatch.setattr(create.abort, "guard_library_use", guarded.append)
    made = create._over_mpi(lambda mpi_comm, settings: (mpi_comm, settings))("ranks", {"a": 1})
    assert made == ("ranks", {"a": 1}) and guarded == [made]
