"""How many kernels a step launches on a GPU, as benchmarks/gpu/launches.py counts them: it must not become more.

Whoever saves launches lowers the numbers here. Those of ResNet-50 are of 16 images, above which they stay the same.
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


@pytest.mark.parametrize("most, options", [(MOST, ()), (MOST_OF_RESNET50, ("--batch", "16"))])
def test_steps_launch_no_more(most, options):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *options, "--steps", *most]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = {name: int(n) for name, n in re.findall(r"^([\w-]+), batch \d+ +(\d+) launches", done.stdout, re.MULTILINE)}
    assert found.keys() == most.keys(), done.stdout
    more = {name: n for name, n in found.items() if n > most[name]}
    assert not more, f"more launches than before: {more}, expected at most {most}"
