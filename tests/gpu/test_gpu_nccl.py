"""pure_nccl on several processes, on stand-ins for CuPy and its bindings of NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm import jobs

PROGRAM = Path(__file__).parent / "programs" / "nccl_ranks.py"


@pytest.mark.without_device
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_nccl_on_stand_ins(num_ranks, on):
    if on != "stand-in":
        pytest.skip("runs with --on stand-in")
    outcome = jobs.run(num_ranks, PROGRAM, limit_seconds=120)
    assert outcome.code == 0, outcome.text
    assert len(outcome.lines("all right")) == num_ranks
