"""Steps of several ranks as CUDA graphs, under pure_nccl on stand-ins: ``--on whole``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm import jobs

PROGRAM = Path(__file__).parent / "programs" / "graph_ranks.py"


@pytest.fixture
def run(on):
    """Runs checks of ``graph_checks.py`` on some ranks, with the kernels that this process has built."""
    if on != "whole":
        pytest.skip("runs with --on whole")
    import host_cuda

    return lambda num_ranks, *checks: jobs.run(num_ranks, PROGRAM, host_cuda.folder, *checks, limit_seconds=300)


@pytest.mark.parametrize("num_ranks, checks", [(2, ()), (4, ("check_other_batches",))])
def test_the_bits_of_eager_steps(num_ranks, checks, run):
    outcome = run(num_ranks, *checks)
    assert outcome.code == 0, outcome.text
    assert len(outcome.lines("all right")) == num_ranks


@pytest.mark.parametrize("check, words", [("fails", "KeyError: 'mine'"), ("leaves", "exit status 3")])
def test_a_rank_that_is_lost_ends_the_job(check, words, run):
    outcome = run(2, check)
    assert outcome.code != 0 and not outcome.lines("all right")
    assert f"[rank 1] {words}" in outcome.text, outcome.text
