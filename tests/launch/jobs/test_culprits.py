"""Who is blamed for what happens to real jobs: by the stacks of all ranks, and by who ended first."""

import os
import signal
import textwrap
from pathlib import Path

import pytest
from dbrdist_launch import linux
from support import launch, popen

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
    @pytest.mark.parametrize(("ranks", "by"), [(2, "file"), (3, "-c")])
    def test_the_rank_that_hangs_is_named(self, tmp_path, ranks, by):
        (tmp_path / "program.py").write_text(textwrap.dedent(STALL))
        words = ["program.py"] if by == "file" else ["-c", textwrap.dedent(STALL)]
        result = launch("-n", ranks, "--heartbeat-timeout", 3, "python", *words, cwd=tmp_path)
        assert result.returncode == 124 and f"rank {ranks - 1} on" in result.stderr.splitlines()[0], result.stderr

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
