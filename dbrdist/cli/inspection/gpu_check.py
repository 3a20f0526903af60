"""`dbrdist-train --check-gpu`: what this process has for training on a GPU, part by part, and how to get the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dbrdist.cli.builders.memory import size
from dbrdist.cli.builders.plan import NO_CUDNN
from dbrdist.cli.output.refuse import Refused
from dbrdist.core.array.gpu import presence
from dbrdist.core.array.types import Module
from dbrdist.kernels.cpu.onednn import Unavailable
from dbrdist.kernels.gpu import cublaslt, cudnn

_OLDEST_CUPY = 14


def check_gpu() -> Iterator[str]:
    """A line for each part; Refused after the last line if no GPU can be used, or if one computes wrong numbers."""
    yield f"driver:   {_driver()}"
    try:
        cupy = presence.import_cupy()
    except ImportError as error:
        yield f"CuPy:     missing: {error}"
        raise Refused("no GPU can be used: CuPy is missing") from None
    wheels = presence.cupy_wheels()
    yield f"CuPy:     {cupy.__version__} {_about_cupy(cupy.__version__, wheels)}".rstrip()
    reason = presence.why_no_gpu()
    if reason:
        yield f"GPUs:     none: {reason}"
        raise Refused("no GPU can be used")
    yield f"GPUs:     {presence.num_gpus()} visible to this process; {presence.shown()}"
    failed = []
    for number in range(presence.num_gpus()):
        words, is_right = _device(number)
        yield f"  GPU {number}:  {words}"
        failed += [] if is_right else [str(number)]
    yield from _libraries()
    if failed:
        raise Refused(f"GPU {' and '.join(failed)} cannot be used")
    yield "ready: write `device: gpu` in the configuration, or device=gpu behind its name"


def _driver() -> str:
    version = presence.driver_cuda()
    if version is None:
        return "none found (libcuda.so.1); install NVIDIA's driver, or start the container with access to GPUs"
    return f"supports CUDA up to {version[0]}.{version[1]}"


def _about_cupy(version: str, wheels: list[str]) -> str:
    """Which package it comes from, and what is wrong with that."""
    major = version.partition(".")[0]
    if len(wheels) > 1:
        return f"({' and '.join(wheels)}: only one may be installed; {presence.replacement(wheels)})"
    if major.isdigit() and int(major) < _OLDEST_CUPY:
        return (
            f"is older than {_OLDEST_CUPY}, which dbrdist was written for; {presence.replacement(wheels or ['cupy'])}"
        )
    return f"({wheels[0]})" if wheels else ""


def _device(number: int) -> tuple[str, bool]:
    """Name, memory and place of a GPU, after a small computation on it; and whether that was right."""
    cupy = presence.import_cupy()
    words = "unknown"
    try:
        with cupy.cuda.Device(number):
            words = _facts(cupy.cuda.runtime, number)
            x = cupy.arange(1000, dtype=np.float32)
            total = float((x * x + 1).sum())
    except Exception as error:  # CuPy's errors have classes of their own
        return f"{words}; a small computation failed: {_first_line(error)}; {_about_kernels(str(error))}", False
    expected = float(sum(k * k + 1 for k in range(1000)))
    is_right = abs(total - expected) <= 1e-5 * expected
    return (
        f"{words}; a small computation is {'right' if is_right else f'wrong: {total}, expected {expected}'}",
        is_right,
    )


def _facts(runtime: Module, number: int) -> str:
    found: list[str] = []
    asks: list[Callable[[], str]] = [
        lambda: runtime.getDeviceProperties(number)["name"].decode(),
        lambda: "{} of {} free".format(*map(size, runtime.memGetInfo())),
        lambda: f"bus id {runtime.deviceGetPCIBusId(number)}",
    ]
    for ask in asks:
        try:
            found.append(ask())
        except AttributeError:  # what stands for CuPy in a test
            continue
    return ", ".join(found)


def _about_kernels(said: str) -> str:
    if "nvrtc" in said.lower() or "header" in said.lower() or "cuda_fp16.h" in said:
        return "CuPy compiles kernels with NVRTC and CUDA's headers; install dbrdist[cuda13x] or [cuda12x] with them"
    return "nvidia-smi says whether another process uses the GPU, or the driver has failed"


def _libraries() -> Iterator[str]:
    """cuDNN, cuBLASLt and NCCL, each of which training can do without."""
    yield _part("cuDNN", _cudnn, NO_CUDNN)
    yield _part("cuBLASLt", _cublaslt, "`graph: true` has no effect")
    yield _part("NCCL", _nccl, "several ranks add gradients through host memory")


def _part(name: str, ask: Callable[[], str], without: str) -> str:
    try:
        return f"{name + ':':<9} {ask()}"
    except Exception as error:  # each library has errors of its own
        said = (
            str(error).strip().splitlines()[0] if isinstance(error, Unavailable | LookupError) else _first_line(error)
        )
        return f"{name + ':':<9} missing ({said}): {without}"


def _cudnn() -> str:
    return _version(cudnn.library().cudnn.backend_version())


def _cublaslt() -> str:
    reason = cublaslt.why_not()
    if reason is not None:
        raise LookupError(reason)
    return "found"


def _nccl() -> str:
    reason = presence.why_no_nccl()
    if reason:
        raise Unavailable(reason)
    return _version(presence.import_nccl().get_version())


def _version(number: int) -> str:
    """91900 of cuDNN is 9.19.0, 22809 of NCCL 2.28.9."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
