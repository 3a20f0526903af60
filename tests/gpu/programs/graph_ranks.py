"""Run under mpiexec: steps of several ranks as CUDA graphs, on the whole bench and the stand-in for NCCL.

PYTHONPATH=.:launch mpiexec -n 2 python tests/gpu/programs/graph_ranks.py FOLDER [what]
"""

import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
host_cuda = __import__("host_cuda")
host_cuda.folder = Path(sys.argv[1])  # of libraries that have been built
__import__("whole").install()
sys.modules["cupy.cuda"] = types.ModuleType("cupy.cuda")
sys.modules["cupy.cuda"].nccl = __import__("stand_in_nccl")
runpy.run_module("graph_checks", run_name="__main__")
