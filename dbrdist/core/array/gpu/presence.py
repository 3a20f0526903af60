"""What a process has for GPUs: the driver, CuPy, visible devices, NCCL; and in words what is missing, and what to do.

This is the one check for "no usable GPU": devices, ``to_gpu``, communicators and ``dbrdist-train`` all ask here.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable

from dbrdist.core.array.types import Module

_EXTRAS = {13: "dbrdist[cuda13x]", 12: "dbrdist[cuda12x]"}  # by the major version of CUDA


def import_cupy() -> Module:
    """The module cupy, or an error that names what to install."""
    try:
        import cupy
    except ImportError as e:
        raise ImportError(f"expected CuPy for a GPU device, but it cannot be imported{_why_no_cupy(e)}") from e
    return cupy


def _why_no_cupy(error: ImportError) -> str:
    """What to do about CuPy: install it for the driver's CUDA, or replace a wheel that cannot be loaded."""
    wheels = cupy_wheels()
    if not wheels:
        return f"; install {suitable_extra()}"
    return f": {str(error).strip().splitlines()[0]:.300}; found {' and '.join(wheels)}; {replacement(wheels)}"


def cupy_wheels() -> list[str]:
    """The installed packages that bring CuPy, such as ``cupy-cuda12x 14.2.0``: there should be one."""
    import importlib.metadata  # which loads sixty modules, for this message alone

    found = {
        f"{name.lower()} {d.version}"
        for d in importlib.metadata.distributions()
        if (name := str(d.metadata["Name"] or "")).lower() == "cupy" or name.lower().startswith(("cupy-cuda", "cupy_"))
    }
    return sorted(found)


def replacement(wheels: Iterable[str]) -> str:
    """How to replace packages of CuPy by the one for this machine's driver."""
    names = " ".join(wheel.split()[0] for wheel in wheels)
    return f"remove what is there (pip uninstall {names}) and install {suitable_extra()}"


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, such as (12, 4); None where there is no driver. Asks no GPU."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
            version = ctypes.c_int()
            if library.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value > 0:
                return version.value // 1000, version.value % 1000 // 10
        except (OSError, AttributeError):
            continue
    return None


def suitable_extra() -> str:
    """What to install for the driver of this machine."""
    version = driver_cuda()
    if version is None:
        return "dbrdist[cuda12x] or dbrdist[cuda13x] on a machine with NVIDIA's driver (nvidia-smi names its CUDA)"
    if version[0] < min(_EXTRAS):
        return f"a newer driver: this one supports CUDA {version[0]}.{version[1]}, and CuPy 14 needs 12 or 13"
    return f"{_EXTRAS[min(version[0], max(_EXTRAS))]} (this driver supports CUDA {version[0]}.{version[1]})"


def num_gpus() -> int:
    """How many GPUs this process can use; 0 where there is no driver."""
    try:
        return int(import_cupy().cuda.runtime.getDeviceCount())
    except ImportError:
        raise
    except Exception:  # CuPy's errors have classes of their own
        return 0


def shown() -> str:
    """What CUDA_VISIBLE_DEVICES says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"


def why_no_gpu(index: int = 0) -> str:
    """Why GPU ``index`` cannot be used in this process, and what to do; an empty text where it can."""
    try:
        runtime = import_cupy().cuda.runtime
    except ImportError as e:
        return str(e)
    try:
        count = int(runtime.getDeviceCount())
    except AttributeError:  # what stands for CuPy in a test
        return ""
    except Exception as e:
        return f"CuPy finds no GPU: {e}; {_advice(str(e), runtime)}; {shown()}"
    if count == 0:
        return f"CuPy finds no GPU; {shown()}; run on a machine with an NVIDIA GPU, or let this process see one"
    if index >= count:
        which = "only number 0" if count == 1 else f"numbers 0 to {count - 1}"
        return f"there is no GPU {index}: this process sees {which}; {shown()}"
    return ""


def _advice(said: str, runtime: Module) -> str:
    """What to do about an error of CUDA's runtime."""
    if "InsufficientDriver" in said:
        return _about_driver(runtime)
    if "NoDevice" in said:
        return "run on a machine with an NVIDIA GPU, and under Slurm ask for one (--gpus-per-task=1)"
    if "InitializationError" in said or "initialization error" in said:
        return (
            "a process that was forked after its parent had used a GPU cannot use one: start it with the method 'spawn'"
        )
    if "Mismatch" in said or "NotPermitted" in said or "SystemNotReady" in said:
        return "driver and kernel module are of different versions, or not started: reload the driver, or reboot"
    return "nvidia-smi says whether the driver works; dbrdist-train --check-gpu tries each part"


def _about_driver(runtime: Module) -> str:
    """No driver, or one that is older than the CUDA of CuPy's wheel."""
    version, wheels = driver_cuda(), cupy_wheels()
    try:
        built = int(runtime.runtimeGetVersion())
    except Exception:  # it may want the driver, too
        built = 0
    if version is None:
        return (
            "install NVIDIA's driver, or one that is new enough for this CuPy (`nvidia-smi` names its CUDA); "
            "dbrdist[cuda12x] and dbrdist[cuda13x] bring CuPy for CUDA 12 and 13"
        )
    needs = f", and {wheels[0] if wheels else 'this CuPy'} needs {built // 1000}" if built else ""
    return (
        f"install NVIDIA's driver in a newer version: this one supports CUDA {version[0]}.{version[1]}{needs}; or "
        f"{replacement(wheels or ['cupy'])}"
    )


def require_gpu(index: int = 0) -> None:
    """Raise RuntimeError (without CuPy ImportError) where a GPU cannot be used, saying why and what to do."""
    import_cupy()
    reason = why_no_gpu(index)
    if reason:
        raise RuntimeError(f"the device @cupy:{index} cannot be used: {reason}; '@numpy' computes on the CPU")


def import_cupyx_special() -> Module:
    """CuPy's counterpart of ``scipy.special``."""
    from cupyx.scipy import special

    return special


def import_nccl() -> Module:
    """CuPy's module for NCCL, or an error that names what is missing."""
    import_cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        version = driver_cuda()
        package = f"nvidia-nccl-cu{version[0]}" if version and version[0] in _EXTRAS else "nvidia-nccl-cu13 or -cu12"
        raise ImportError(f"CuPy finds no NCCL library (libnccl.so.2); install {package}")
    return nccl


def why_no_nccl() -> str:
    """Why NCCL cannot send arrays in this process, or an empty text."""
    try:
        if not import_cupy().cuda.is_available():
            return why_no_gpu() or "CuPy finds no GPU"
        import_nccl()
    except ImportError as e:
        return str(e)
    return ""


def bus_id_of_device() -> str:
    """Where this thread's device is in its host, whatever number this process has for it."""
    cupy = import_cupy()
    return str(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))
