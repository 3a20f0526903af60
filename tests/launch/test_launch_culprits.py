"""Who is blamed: by the stacks of all ranks, and by who ended first."""

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from dbrdist_launch import linux
from dbrdist_launch.launcher.judgement import stalls
from dbrdist_launch.launcher.judgement.ranks import Rank
from dbrdist_launch.messages import Exit
from support import launch, popen

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


STALL = """
    import queue, sys, time
    from mpi4py import MPI
    from dbrdist_launch import heartbeat
    world = MPI.COMM_WORLD
    for step in range(5):
        if step == 3 and world.rank == world.size - 1:
            time.sleep(0.8)
        heartbeat.beat(step)
        if step == 3 and world.rank == world.size - 1:
            queue.Queue().get()
        world.allreduce(1)
"""


def below(process, wanted):
    """The processes below our own launcher for which `wanted` is true."""
    return [pid for pid in linux.descendants(process.pid) if wanted(pid)]


def name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


@pytest.mark.programs
@pytest.mark.mpiexec
class TestJobs:
    @pytest.mark.parametrize("ranks", [2, 3])
    @pytest.mark.parametrize("by", ["file", "-c"])
    def test_the_rank_that_hangs_is_named(self, tmp_path, ranks, by):
        (tmp_path / "program.py").write_text(textwrap.dedent(STALL))
        words = ["program.py"] if by == "file" else ["-c", textwrap.dedent(STALL)]
        result = launch("-n", ranks, "--heartbeat-timeout", 3, "python", *words, cwd=tmp_path)
        assert result.returncode == 124 and f"rank {ranks - 1} on" in result.stderr.splitlines()[0], result.stderr

    def test_a_job_that_is_suspended_as_a_whole_goes_on(self, tmp_path):
        (tmp_path / "program.py").write_text(
            "import time\nfrom dbrdist_launch import heartbeat\nprint('up', flush=True)\n"
            "for step in range(80):\n    heartbeat.beat(step); time.sleep(0.05)\n"
        )
        process = popen("-n", 2, "--heartbeat-timeout", 4, "python", "program.py", cwd=tmp_path)
        for _ in range(2):
            assert "up" in process.stdout.readline()
        time.sleep(1.0)  # for beats to be known: they are read once a second
        pids = [process.pid, *linux.descendants(process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7.0)  # the suspension itself
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        _, err = process.communicate(timeout=40)
        assert process.returncode == 0, err

    @pytest.mark.parametrize("who", ["supervisor", "proxy"])
    def test_who_was_killed_is_named(self, who):
        program = "import time\nfrom mpi4py import MPI\nprint('up', flush=True)\ntime.sleep(60)"
        process = popen("-n", 3, "python", "-c", program)
        for _ in range(3):
            assert "up" in process.stdout.readline()
        proxies = below(process, lambda pid: name_of(pid) == "hydra_pmi_proxy")
        victims = proxies
        if who == "supervisor":
            outer = below(process, lambda pid: int((linux.stat(pid) or [0, 0])[1]) in proxies)
            victims = [pid for pid in outer if b"PMI_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        assert len(victims) == 1
        os.kill(victims[0], signal.SIGKILL)
        _, err = process.communicate(timeout=40)
        words = "rank 1 on" if who == "supervisor" else "the process of mpiexec that had started the ranks on"
        assert process.returncode == 137 and words in err and "failed first (signal)" in err, err

    def test_a_rank_without_hooks_that_left_is_named(self, tmp_path):
        (tmp_path / "program.py").write_text(
            "import os, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.barrier()\n"
            "if world.rank == 1: time.sleep(0.5); os._exit(0)\nworld.allreduce(1)\n"
        )
        result = launch("-n", 3, "--no-inject", "python", "program.py", cwd=tmp_path)
        assert "rank 1 on" in result.stderr and "ended with exit code 0 while the others were" in result.stderr
        assert result.returncode != 0
