"""A real training job, killed at random on two fake hosts, ends with the weights of an undisturbed run, bit for bit."""

import subprocess
import sys

import fake_cluster
import pytest
from support import ROOT

pytestmark = [pytest.mark.launch_system, pytest.mark.mpiexec]


@pytest.mark.timeout(240)
def test_digits_killed_three_times_end_with_the_same_weights():
    if fake_cluster.missing():
        pytest.skip(fake_cluster.missing())
    words = [sys.executable, str(ROOT / "tests" / "launch" / "random_kills.py"), "--kills", "3", "--epochs", "25"]
    child = subprocess.run(words, capture_output=True, text=True, timeout=220)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "killed 3 times (0 hosts)" in child.stdout
    assert "arrays of the last snapshot but times, 0 differ" in child.stdout
