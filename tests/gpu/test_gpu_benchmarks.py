"""The benchmarks for GPUs run with tiny sizes on the host, and say in one line what they miss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_device

ROOT = Path(__file__).resolve().parents[2]


def run(script, *arguments, **env):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **env})


@pytest.mark.parametrize(
    "script, arguments, expected",
    [
        ("memory.py", [], ["update MomentumSGD", "update LARS", "copy allreduce", "GB/s"]),
        ("steps.py", ["--models", "mlp", "resnet20"], ["mlp, batch 2, host", "resnet20, batch 2", "examples/s"]),
        ("steps.py", ["--models", "resnet20", "--dtype", "float16"], ["resnet20, batch 2"]),
    ],
)
def test_on_the_host(script, arguments, expected):
    done = run(script, "--on", "numpy", "--rounds", "2", "--seconds", "0", *arguments)
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout


@pytest.mark.parametrize("script", ["memory.py", "steps.py"])
def test_without_a_gpu(script):
    done = run(script, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script} needs a GPU, but CuPy ") and done.stderr.count("\n") == 1
