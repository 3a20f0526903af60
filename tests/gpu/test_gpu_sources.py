"""The CUDA sources compile for every type, also where there is no GPU but CuPy with NVRTC and the CUDA headers."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.kernels.gpu import cuda_source

pytestmark = pytest.mark.without_device

FLOATS = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), backend.as_dtype("bfloat16")]
WIDE = {dtype: backend.accumulation_dtype(dtype) for dtype in FLOATS}
LABELS = ["int", "long long"]
WIDTHS = [1, 4]  # channels that a thread reads at once
PLACES = ["unsigned char", "int"]
# File: kernel: template arguments.
KERNELS = {
    "elementwise": {
        **{name: [(t,) for t in FLOATS] for name in ("relu_forward", "relu_backward", "add", "relu_backward_of_sum")},
        "add_bias": [*((t, t) for t in FLOATS), *((t, WIDE[t]) for t in FLOATS[2:])],
        "column_sums": [*((t, t) for t in FLOATS), *((t, WIDE[t]) for t in FLOATS[2:])],
    },
    "loss": {
        name: [(t, label, WIDE[t]) for t, label in itertools.product(FLOATS, LABELS)]
        for name in ("cross_entropy", "mean_of_losses", "cross_entropy_backward")
    },
    "layout": {
        "to_channels_last": list(itertools.product(FLOATS, FLOATS[1:])),
        "to_plain": list(itertools.product(FLOATS[1:], FLOATS)),
        "widen": [(t, t) for t in FLOATS[1:]],
    },
    "normalization": {
        "bn_statistics": list(itertools.product(FLOATS[1:], WIDTHS)),
        "bn_move": [(t,) for t in FLOATS[1:]],
        **{
            name: list(itertools.product(FLOATS[1:], WIDTHS, [0, 1]))
            for name in ("bn_apply", "bn_sums", "bn_input_gradient")
        },
    },
    "pooling": {
        "max_forward": list(itertools.product(FLOATS[1:], WIDTHS, PLACES)),
        "average_forward": list(itertools.product(FLOATS[1:], WIDTHS)),
        "backward": list(itertools.product(FLOATS[1:], WIDTHS, PLACES, [0, 1])),
    },
    "update": {
        "sgd": [(t,) for t in FLOATS],
        **{name: [(t, WIDE[t]) for t in FLOATS] for name in ("momentum_sgd", "adam", "lars_norms", "lars")},
    },
}


@pytest.fixture
def compile(on):
    """``compile(source, names)``: for compute capability 9.0, by NVRTC."""
    if on == "stand-in":
        pytest.skip("the stand-in has taken CuPy's place: run it without --on")
    pytest.importorskip("cupy")
    from cupy.cuda import compiler

    folder = os.path.join(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "include")
    if not os.path.exists(os.path.join(folder, "cuda_fp16.h")):
        pytest.skip(f"no CUDA headers in {folder}; CUDA_PATH names another place")

    def run(source, names):
        options = (*cuda_source.OPTIONS, f"-I{folder}", "-arch=sm_90")
        try:
            program = compiler._NVRTCProgram(source, "kernel.cu", name_expressions=names, method="cubin")
        except (RuntimeError, ImportError, OSError) as e:  # no libnvrtc
            pytest.skip(f"no NVRTC: {e}")
        found = program.compile(options)
        assert len(found[0]) and set(found[1]) == set(names)

    return run


@pytest.mark.parametrize("file", KERNELS)
def test_sources_compile(file, compile):
    kernels = KERNELS[file].items()
    names = [cuda_source.instance(name, *arguments) for name, instances in kernels for arguments in instances]
    compile(cuda_source.source(file), tuple(names))
