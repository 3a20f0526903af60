"""Run under mpiexec: pure_nccl on the stand-ins for CuPy and its NCCL, a device for each rank."""

import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
stand_in, stand_in_nccl = __import__("stand_in"), __import__("stand_in_nccl")
sys.modules["cupy"] = stand_in.module
sys.modules["cupyx.scipy"] = stand_in.cupyx_scipy
sys.modules["cupy.cuda"] = types.ModuleType("cupy.cuda")
sys.modules["cupy.cuda"].nccl = stand_in_nccl
runpy.run_module("nccl_checks", run_name="__main__")
