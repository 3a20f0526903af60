"""What the benchmarks for GPUs share: the device or its stand-in, and clocks that stop when it is idle."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "launch"), str(_ROOT / "benchmarks")]  # the packages and the harness


def require(on: str) -> None:
    """End with one line where there is no GPU."""
    if on == "numpy":
        return
    try:
        import cupy

        found = "" if cupy.cuda.is_available() else "CuPy finds no GPU"
    except ImportError as e:
        found = f"CuPy cannot be imported ({e})"
    if found:
        sys.exit(f"{Path(sys.argv[0]).name} needs a GPU, but {found}; --on numpy runs it with tiny sizes, as a check")


def of(on: str) -> Any:
    """The dbrdist device."""
    import dbrdist

    return dbrdist.get_device("@numpy" if on == "numpy" else "@cupy:0")


class Cuda:
    """CUDA events and synchronisation by CuPy."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        cupy.get_default_memory_pool().free_all_blocks()  # of the case before

    def peak_bytes(self) -> int:
        """What the pools hold, which keep all that was in use at a time."""
        from dbrdist.core.array.gpu import device_memory

        return device_memory.held_bytes()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._cuda.Device().synchronize()

    def event(self) -> Any:
        """An event after all that was launched so far."""
        event = self._cuda.Event()
        event.record()
        return event

    def seconds_between(self, start: Any, stop: Any) -> float:
        """Between two events that have happened."""
        return float(self._cuda.get_elapsed_time(start, stop)) / 1e3


class TorchCuda:
    """The same by PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """What the allocator has reserved at most."""
        return int(self._torch.cuda.max_memory_reserved())

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._torch.cuda.synchronize()

    def event(self) -> Any:
        """An event after all that was launched so far."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, stop: Any) -> float:
        """Between two events that have happened."""
        return float(start.elapsed_time(stop)) / 1e3


class Host:
    """A host in the place of the device."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def event(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds_between(self, start: float, stop: float) -> float:
        """Between two moments."""
        return stop - start


class Timed:
    """A step with its clock: seconds per call on the device, or with ``launch`` until the calls have returned.

    The harness takes samples from it; each is the median over groups of calls, and starts and ends on an idle device.
    """

    def __init__(self, step: Callable[[], Any], clock: Any, launch: bool = False) -> None:
        self.step = step
        self.clock = clock
        self.launch = launch

    def peak_bytes(self) -> int:
        """The most memory that the device has had for this case; 0 where the clock does not know."""
        return int(self.clock.peak_bytes()) if hasattr(self.clock, "peak_bytes") else 0

    def __call__(self) -> None:
        self.step()
        self.clock.synchronize()

    def sample(self, min_seconds: float, calls: int) -> float:
        """Seconds per call."""
        self()
        times = []
        end = time.perf_counter() + min_seconds
        while not times or time.perf_counter() < end:
            times.append((self._launched if self.launch else self._elapsed)(calls) / calls)
        return statistics.median(times)

    def _elapsed(self, calls: int) -> float:
        start = self.clock.event()
        for _ in range(calls):
            self.step()
        stop = self.clock.event()
        self.clock.synchronize()
        return float(self.clock.seconds_between(start, stop))

    def _launched(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.step()
        seconds = time.perf_counter() - start
        self.clock.synchronize()
        return seconds


def about(on: str) -> dict[str, Any]:
    """The device and the versions of driver and libraries."""
    import numpy as np

    import dbrdist

    versions = {"python": sys.version.split()[0], "numpy": np.__version__, "dbrdist": dbrdist.__version__}
    if on == "numpy":
        return {**versions, "device": "numpy"}
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        **versions,
        "cupy": cupy.__version__,
        "device": properties["name"].decode(),
        "device_bytes": properties["totalGlobalMem"],
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
    }


def arguments(doc: str) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--on", choices=["cupy", "numpy"], default="cupy", help="numpy: tiny sizes, to check the code")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="least duration of a sample")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/records")
    return parser
