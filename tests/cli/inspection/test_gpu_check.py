"""``dbrdist-train --check-gpu`` on modules that stand for CuPy and its libraries."""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
import pytest

from dbrdist.cli.inspection import gpu_check
from dbrdist.cli.output.refuse import Refused
from dbrdist.core.array.gpu import presence
from dbrdist.kernels.gpu import cublaslt, cudnn
from tests.each import each


@pytest.fixture
def cupy(monkeypatch):
    """CuPy 14 with two GPUs of 80 GB, NCCL, cuDNN and cuBLASLt."""
    module = types.ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.arange = np.arange
    nccl = types.SimpleNamespace(available=True, get_version=lambda: 22809)
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2, getDeviceProperties=lambda n: {"name": b"NVIDIA H100"},
        memGetInfo=lambda: (79_000_000_000, 80_000_000_000), deviceGetPCIBusId=lambda n: f"0000:{n}",
        runtimeGetVersion=lambda: 13000,
    )  # fmt: skip
    module.cuda = types.SimpleNamespace(
        runtime=runtime, is_available=lambda: True, nccl=nccl, Device=lambda n: contextlib.nullcontext()
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    monkeypatch.setattr(presence, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(presence, "cupy_wheels", lambda: ["cupy-cuda13x 14.2.0"])
    library = types.SimpleNamespace(cudnn=types.SimpleNamespace(backend_version=lambda: 91900))
    monkeypatch.setattr(cudnn, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "why_not", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module


def lines_of():
    """What it says, and the reason for which it fails, if it does."""
    lines, reason = [], ""
    try:
        for line in gpu_check.check_gpu():
            lines.append(line)
    except Refused as e:
        reason = str(e)
    return lines, reason


def test_each_part_is_named_with_its_version(cupy):
    lines, reason = lines_of()
    assert reason == "" and lines == [
        "driver:   supports CUDA up to 13.0",
        "CuPy:     14.2.0 (cupy-cuda13x 14.2.0)",
        "GPUs:     2 visible to this process; CUDA_VISIBLE_DEVICES is not set",
        "  GPU 0:  NVIDIA H100, 79 GB of 80 GB free, bus id 0000:0; a small computation is right",
        "  GPU 1:  NVIDIA H100, 79 GB of 80 GB free, bus id 0000:1; a small computation is right",
        "cuDNN:    9.19.0",
        "cuBLASLt: found",
        "NCCL:     2.28.9",
        "ready: write `device: gpu` in the configuration, or device=gpu behind its name",
    ]


def raising(error):
    def ask(*args, **kwargs):
        raise error

    return ask


def test_without_a_gpu_it_fails_and_says_what_to_install(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(presence, "cupy_wheels", list)
    lines, reason = lines_of()
    assert "no GPU" in reason and "install dbrdist[cuda13x] (this driver supports CUDA 13.0)" in lines[-1]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.cuda.runtime.getDeviceCount = raising(RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected"))
    lines, reason = lines_of()
    assert reason == "no GPU can be used" and "cudaErrorNoDevice" in lines[-1] and "--gpus-per-task=1" in lines[-1]


@each(
    error=[
        (RuntimeError("CUDA_ERROR: catastrophic"), "catastrophic; nvidia-smi"),
        (RuntimeError("Failed to find libnvrtc.so"), "NVRTC and CUDA's headers; install dbrdist"),
    ]
)
def test_a_gpu_that_computes_nothing_fails_the_check(cupy, error):
    cupy.arange = raising(error[0])
    lines, reason = lines_of()
    assert reason == "GPU 0 and 1 cannot be used" and error[1] in lines[3] and not lines[-1].startswith("ready")


def test_a_wrong_result_fails_the_check(cupy):
    cupy.arange = lambda n, dtype: np.zeros(n, dtype)
    lines, reason = lines_of()
    assert "GPU 0 and 1" in reason and "wrong: 1000.0, expected 332834500.0" in lines[3]


def test_what_training_can_do_without_is_named_with_what_it_costs(cupy, monkeypatch):
    monkeypatch.setattr(cudnn, "library", raising(cudnn.Unavailable("ModuleNotFoundError: No module named 'cudnn'")))
    monkeypatch.setattr(cublaslt, "why_not", lambda: "no libcublasLt")
    cupy.cuda.nccl.available = False
    lines, reason = lines_of()
    assert reason == "" and lines[-1].startswith("ready")
    assert "cuDNN:    missing (ModuleNotFoundError" in lines[5] and "install dbrdist[cudnn13x]" in lines[5]
    assert lines[6] == "cuBLASLt: missing (no libcublasLt): `graph: true` has no effect"
    assert "install nvidia-nccl-cu13" in lines[7] and "through host memory" in lines[7]
    cupy.cuda.nccl.get_version = raising(OSError("damaged\nlibrary"))
    cupy.cuda.nccl.available = True
    assert "NCCL:     missing (OSError: damaged)" in lines_of()[0][7]


def test_several_or_old_packages_of_cupy_are_named(cupy, monkeypatch):
    monkeypatch.setattr(presence, "cupy_wheels", lambda: ["cupy-cuda12x 13.6.0", "cupy-cuda13x 14.2.0"])
    assert "only one may be installed; remove what is there (pip uninstall cupy-cuda12x" in lines_of()[0][1]
    cupy.__version__ = "13.6.0"
    monkeypatch.setattr(presence, "cupy_wheels", lambda: ["cupy-cuda13x 13.6.0"])
    assert "is older than 14" in lines_of()[0][1]


def test_one_bad_gpu_of_several_fails_the_check_by_its_number(cupy, monkeypatch):
    """As docs/train.md says of the exit code: a job would take that one too."""
    device, good = gpu_check._device, "an H100; a small computation is right"
    monkeypatch.setattr(gpu_check, "_device", lambda number: (good, True) if number == 0 else device(number))
    cupy.arange = raising(RuntimeError("CUDA_ERROR: catastrophic"))
    lines, reason = lines_of()
    assert reason == "GPU 1 cannot be used" and not lines[-1].startswith("ready")
    assert Refused(reason).code == 1
