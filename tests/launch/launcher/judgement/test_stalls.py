"""Which rank is blamed where all beats have stopped."""

import pytest
from dbrdist_launch.launcher.judgement import stalls
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Exit


def stacks(name, line):
    return f'Current thread 0x1 (most recent call first):\n  File "t.py", line {line} in {name}\n'


def ranks_at(*what):
    """Late ranks: each (step, seconds since the beat, innermost function, state)."""
    found = []
    for number, (step, age, name, state) in enumerate(what):
        rank = Rank(number, "a", channel=None)
        rank.count, rank.step, rank.beat_at, rank.state = 1, step, 100.0 - age, state
        rank.stacks = stacks(name, number) if name else None
        found.append(rank)
    return found


@pytest.mark.parametrize(
    ("what", "culprit", "kind"),
    [
        ([(7, 9, "allreduce", "R"), (7, 9, "load", "S"), (7, 9, "allreduce", "R")], 1, "stalled"),
        ([(7, 9, "allreduce", "R"), (7, 9, None, "T"), (7, 9, "allreduce", "R")], 1, "stopped"),
        ([(7, 9, None, "R"), (7, 9, None, "R"), (6, 9, None, "R")], 2, "stalled"),
        ([(7, 8, None, "R"), (7, 9, None, "R")], 1, "stalled"),
    ],
)
def test_the_rank_that_others_wait_for_is_blamed(what, culprit, kind):
    ranks = ranks_at(*what)
    late = stalls.late_ranks(ranks, 100.0, 5.0)
    failure = stalls.blame(ranks, late, 100.0)
    assert (failure.rank, failure.kind, failure.code) == (culprit, kind, 124)


def test_paused_and_silent_ranks_do_not_stall():
    ranks = ranks_at((1, 9, None, "S"))
    ranks[0].paused = True
    assert stalls.late_ranks(ranks, 100.0, 5.0) == []
    ranks[0].paused, ranks[0].beat_at = False, None
    assert stalls.late_ranks(ranks, 100.0, 5.0) == []


def test_a_rank_without_a_stack_is_unknown():
    assert stalls.waits(Rank(0, "a", channel=None)) is None


def test_the_oldest_beat_is_that_of_the_lowest_rank_among_equals():
    ranks = {number: Rank(number, "a", None) for number in range(4)}
    for number, at in ((0, 7.0), (1, 5.0), (2, 5.0), (3, 9.0)):
        ranks[number].beat_at = at
    assert stalls._oldest(ranks, [3, 2, 1, 0]) == 1 and stalls._oldest(ranks, [3, 0]) == 0


NOW = 1000.0


STDLIB = "/usr/lib/python3.11/"


def stack(*frames, others=()):
    """faulthandler's words; a frame is (file, line, function), the innermost first."""

    def thread(head, rows):
        return [f"{head} (most recent call first):", *(f'  File "{f}", line {n} in {name}' for f, n, name in rows)]

    lines = [line for rows in others for line in thread("Thread 0x00007f2", rows)]
    return "\n".join([*lines, *thread("Current thread 0x00007f1", frames)])


def rank(number, frames, line="", age=9.0, step=3, others=(), **values):
    made = Rank(number, "a", channel=None, step=step, beat_at=NOW - age, heard_at=NOW, state="S", **values)
    made.stacks = stack(*frames, others=others) if frames else None
    made.sources = {f"{file}:{at}": line for file, at, _ in frames or ()}
    return made


MAIN = ("/home/me/train.py", 9, "<module>")


QUEUE = ((STDLIB + "threading.py", 327, "wait"), (STDLIB + "queue.py", 171, "get"), MAIN)


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("world.allreduce(1)", True), ("comm.Allreduce(MPI.IN_PLACE, x)", True),
        ("total = comm.bcast(x, root=0)", True),
        ("MPI.COMM_WORLD.Barrier()", True), ("req.Wait()", True), ("MPI.Request.Waitall(all)", True),
        ("allreduce(x)", True),
        ("comm.recv(source=1)", True), ("dist.all_reduce(t)", True), ("stream.synchronize()", True),
        ("comm.Spawn(program)", True), ("optimizer.allreduce_grad(model)", True),
        ("wait_for_disk(path)", False), ("send_report(x)", False), ("time.sleep(60)", False), ("os.wait()", False),
        ("sock.recv(1024)", False), ("self._socket.recv(8)", False), ("process.wait()", False), ("queue.get()", False),
        ("os.waitpid(pid, 0)", False), ("x = received(1)", False), ("functools.reduce(f, x)", False),
        ("reduce(f, x)", False), ("table.scan(x)", False), ("barriers = 3", False),
        ("time.sleep(0.01)  # in a loop with while not request.Test():", True),
        ("time.sleep(0.01)  # in a loop with while not future.query():", False),
    ],
)  # fmt: skip
def test_which_lines_wait_for_other_ranks(line, waits):
    assert stalls.waits(rank(0, [MAIN], line)) is waits


@pytest.mark.parametrize(
    ("frames", "line", "others", "waits"),
    [
        (QUEUE, "batch = batches.get()", (), False),
        ([(STDLIB + "selectors.py", 468, "select"), MAIN], "x", (), False),
        ([("/home/me/io.py", 3, "wait_for_disk"), MAIN], "time.sleep(1)", (), False),
        ([("/home/me/io.py", 3, "send_all"), MAIN], "fd.flush()", (), False),
        ([("/x/site-packages/torch/distributed/c10d.py", 3, "f"), MAIN], "", (), True),
        ([(STDLIB + "threading.py", 3, "wait"), ("/x/dbrdist/comm/steps/overlap.py", 3, "f"), MAIN], "", (), True),
        (QUEUE, "comm.allreduce(1)", [[("/home/me/comms.py", 4, "run")]], False),
        ([(STDLIB + "threading.py", 3, "wait"), MAIN], "x", [[("/x/site-packages/mpi4py/run.py", 4, "run")]], True),
        (None, "", (), None),
        ([("/home/me/io.py", 3, "broadcast_settings"), MAIN], "while True: pass", (), False),
        ([("/home/me/io.py", 3, "all_gather_files"), MAIN], "time.sleep(100)", (), False),
        ([("/home/me/io.py", 3, "allreduce_flat"), MAIN], "library.wait_all(handle)", (), True),
        ([("/home/me/io.pyx", 3, "allreduce_flat"), MAIN], "", (), True),
        (QUEUE, "x", [[(STDLIB + "threading.py", 982, "run"), (STDLIB + "threading.py", 1002, "_bootstrap")]], None),
        (QUEUE, "x", [[(STDLIB + "concurrent/futures/thread.py", 58, "run")]], None),
    ],
)  # fmt: skip
def test_who_waits_for_other_ranks_by_all_of_its_threads(frames, line, others, waits):
    assert stalls.waits(rank(0, frames, line, others=others)) is waits


def test_a_rank_that_beat_later_and_hangs_is_blamed_and_not_the_first_that_is_late():
    waiting = [rank(n, [MAIN], "comm.allreduce(1)") for n in (0, 1)]
    stuck = rank(2, QUEUE, "q.get()", age=4.0)
    ranks = [*waiting, stuck]
    assert stalls.late_ranks(ranks, NOW, 5.0) == [0, 1]
    assert stalls.suspected(ranks, [0, 1], NOW, 5.0) == [stuck]  # whether it is stuck shows in a moment
    for late in ([0], [0, 1], [0, 1, 2]):
        failure = stalls.blame(ranks, late, NOW)
        assert failure.rank == 2 and "the others wait in a communication call, this rank does not" in failure.message


def test_a_late_rank_that_works_is_blamed_and_not_one_that_still_beats():
    ranks = [rank(0, [MAIN], "load()"), rank(1, [MAIN], "compute()", age=0.1), rank(2, [MAIN], "comm.recv()", age=0.2)]
    assert stalls.suspected(ranks, [0], NOW, 5.0) == [] and stalls.blame(ranks, [0], NOW).rank == 0


def test_a_rank_that_ended_well_is_not_blamed_where_another_one_hangs():
    gone = rank(0, None, exit=Exit(code=0, signal=0))
    ranks = [gone, rank(1, [MAIN], "comm.recv()"), rank(2, QUEUE, "q.get()")]
    assert stalls.blame(ranks, [1, 2], NOW).rank == 2
    assert stalls.blame(ranks[:2], [1], NOW).rank == 0


def test_who_does_not_wait_is_blamed_where_the_other_stacks_do_not_show_for_what_they_wait():
    pool = [[(STDLIB + "concurrent/futures/thread.py", 58, "run")]]
    ranks = [rank(0, QUEUE, "future.result()", others=pool), rank(1, [MAIN], "load()"), rank(2, QUEUE, others=pool)]
    failure = stalls.blame(ranks, [0, 1, 2], NOW)
    assert failure.rank == 1 and "the stacks of the others do not show what they wait for" in failure.message


@pytest.mark.parametrize(
    ("frames", "words"), [(QUEUE, "its stack does not show what it waits for"), (None, "its stack could not be read")]
)
def test_why_a_rank_is_blamed_of_which_nothing_is_known(frames, words):
    pool = [[(STDLIB + "concurrent/futures/thread.py", 58, "run")]]
    ranks = [rank(0, [MAIN], "comm.allreduce(1)"), rank(1, frames, "future.result()", others=pool)]
    failure = stalls.blame(ranks, [0, 1], NOW)
    assert failure.rank == 1 and words in failure.message


def test_a_rank_whose_supervisor_is_silent_is_not_late():
    silent = rank(0, None)
    silent.heard_at = NOW - 60.0
    assert stalls.late_ranks([silent], NOW, 5.0) == []


def test_the_main_thread_comes_first_as_both_tools_mark_it():
    frame = '  File "{}.py", line 3 in f\n'
    python = "Thread 0x2 (most recent call first):\n{}\nThread 0x3 (most recent call first):\n{}\n"
    python = (python + "Current thread 0x1 (most recent call first):\n{}").format(*map(frame.format, "abc"))
    assert [found[0].file for found in stalls.threads(python)] == ["c.py", "b.py", "a.py"]
    spied = 'Thread 1 (idle): "MainThread"\n    f (a.py:3)\nThread 2 (idle): "other"\n    f (b.py:4)\n'
    assert [found[0][1:] for found in stalls.threads(spied)] == [("3", "f"), ("4", "f")]
    assert stalls.threads(None) == stalls.threads("") == []


def test_one_late_rank_that_waits_as_the_others_do_is_no_culprit_for_being_alone():
    """Its heartbeat alone is overdue; all of them wait."""
    ranks = ranks_at((7, 9, "allreduce", "S"), (7, 1, "allreduce", "S"), (7, 1, "allreduce", "S"))
    failure = stalls.blame(ranks, [0], 100.0)
    assert failure.rank == 0 and "no other rank's heartbeat is overdue" not in failure.message
    works = ranks_at((7, 9, "load", "S"), (7, 1, "step", "S"))
    assert "no other rank's heartbeat is overdue" in stalls.blame(works, [0], 100.0).message


@pytest.mark.parametrize("depth", [4, 5, 6])
def test_a_package_of_calls_is_looked_for_in_the_six_innermost_frames(depth):
    own = [("/home/me/io.py", number, "f") for number in range(depth)]
    assert stalls.waits(rank(0, [*own, ("/x/mpi4py/run.py", 3, "g"), MAIN], "x = 1")) is (depth < 6)
