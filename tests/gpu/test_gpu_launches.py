"""How many kernels a step launches on a GPU, as benchmarks/gpu/launches.py counts them: it must not become more.

Whoever saves launches lowers the numbers here. Those of ResNet-50 are of 16 images, above which they stay the same; its
bytes with fused convolutions are of 128.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_device

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "launches.py"
MOST = {
    "mlp-float32": 19, "resnet20-float32": 162, "lstm-float32": 424, "lstm-mixed16": 443, "transformer-float32": 37,
    "transformer-mixed16": 35,
}  # fmt: skip
MOST_OF_RESNET50 = {"resnet50-float32": 389, "resnet50-mixed16": 389}

MOST_WITH_FUSED_CONVOLUTIONS, MOST_GIGABYTES = 350, 41.0


def counted(names, options):
    """Launches and gigabytes of steps by name."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *options, "--steps", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^([\w-]+), batch \d+ +(\d+) launches.*, ([\d.]+) GB", done.stdout, re.MULTILINE)
    found = {name: (int(n), float(size)) for name, n, size in rows}
    assert found.keys() == set(names), done.stdout
    return found


@pytest.mark.parametrize("most, options", [(MOST, ()), (MOST_OF_RESNET50, ("--batch", "16"))])
def test_steps_launch_no_more(most, options):
    found = counted(most, options)
    more = {name: n for name, (n, _) in found.items() if n > most[name]}
    assert not more, f"more launches than before: {more}, expected at most {most}"


def test_fused_convolutions_move_less():
    name = "resnet50-mixed16-fused"
    num, gigabytes = counted([name], ("--batch", "128"))[name]
    assert num <= MOST_WITH_FUSED_CONVOLUTIONS
    assert gigabytes <= MOST_GIGABYTES
