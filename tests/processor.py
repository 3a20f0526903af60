"""What the processor of this machine can do, as far as tests depend on it."""

import os
from pathlib import Path

_CPU = Path("/proc/cpuinfo")
# Elsewhere oneDNN has no kernels of this type, and NumPy serves.
MULTIPLIES_BFLOAT16 = _CPU.exists() and "avx512bw" in _CPU.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ
