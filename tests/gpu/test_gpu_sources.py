"""The CUDA sources compile for every type, also where there is no GPU but CuPy with NVRTC and the CUDA headers."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dbrdist.core.array import backend
from dbrdist.kernels.gpu import cuda_source

pytestmark = pytest.mark.without_device

FLOATS = [np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), backend.as_dtype("bfloat16")]
WIDE = {dtype: backend.accumulation_dtype(dtype) for dtype in FLOATS}
LABELS = ["int", "long long"]
WIDTHS = [1, 4]  # channels that a thread reads at once
NORMALIZED = [(t, v) for t in FLOATS[1:] for v in sorted({*WIDTHS, 16 // t.itemsize})]
PLACES = ["unsigned char", "int"]
# File: kernel: template arguments.
KERNELS = {
    "elementwise": {
        **{name: [(t,) for t in FLOATS] for name in ("relu_forward", "relu_backward", "add", "relu_backward_of_sum")},
        "relu_dropout_backward": [(t,) for t in FLOATS],
        "add_bias": [*((t, t) for t in FLOATS), *((t, WIDE[t]) for t in FLOATS[2:])],
        "column_sums": [*((t, t) for t in FLOATS), *((t, WIDE[t]) for t in FLOATS[2:])],
    },
    "loss": {
        name: [(t, label, WIDE[t]) for t, label in itertools.product(FLOATS, LABELS)]
        for name in ("cross_entropy", "mean_of_losses", "cross_entropy_backward")
    },
    "layout": {
        **{name: list(itertools.product(FLOATS, FLOATS[1:])) for name in ("to_channels_last", "all_to_channels_last")},
        **{name: list(itertools.product(FLOATS[1:], FLOATS)) for name in ("to_plain", "all_to_plain")},
        "widen": [(t, t) for t in FLOATS[1:]],
        "by_table": [(t,) for t in FLOATS[1:]],
    },
    "normalization": {
        "bn_statistics": NORMALIZED,
        **{name: [(t,) for t in FLOATS[1:]] for name in ("bn_move", "bn_of_sums")},
        **dict.fromkeys(("bn_apply_two", "bn_sums_of_two"), NORMALIZED),
        **{
            name: [(*types, mode) for types, mode in itertools.product(NORMALIZED, modes)]
            for name, modes in (("bn_apply", [0, 1, 2]), ("bn_sums", [0, 1, 2]), ("bn_input_gradient", [0, 1]))
        },
    },
    "pooling": {
        "max_forward": list(itertools.product(FLOATS[1:], WIDTHS, PLACES)),
        "average_forward": list(itertools.product(FLOATS[1:], WIDTHS)),
        "backward": list(itertools.product(FLOATS[1:], WIDTHS, PLACES, [0, 1])),
    },
    "rows": {
        **{
            name: [(t, WIDE[t]) for t in FLOATS]
            for name in (
                "softmax",
                "log_softmax",
                "softmax_backward",
                "log_softmax_backward",
                "dropout",
                "masked",
                "attention_mask",
                "attention_weights",
                "attention_weights_backward",
            )
        },
        **{
            name: [*((t, t, WIDE[t]) for t in FLOATS), *((t, WIDE[t], WIDE[t]) for t in FLOATS[2:])]
            for name in (
                "ln_forward",
                "ln_backward",
                "ln_columns",
                "ln_of_sum_backward",
                "relu_dropout",
                "dropout_add",
                "split_heads",
            )
        },
        "ln_of_sum": [
            *((t, t, t, WIDE[t]) for t in FLOATS),
            *((t, b, WIDE[t], WIDE[t]) for t in FLOATS[2:] for b in (t, WIDE[t])),
        ],
        "merge_heads": [(t,) for t in FLOATS],
    },
    "recurrent": {
        name: [(t,) for t in FLOATS] for name in ("lstm_forward", "lstm_backward", "gru_forward", "gru_backward")
    },
    "update": {
        "sgd": [(t,) for t in FLOATS],
        **{
            name: [(t, WIDE[t]) for t in FLOATS]
            for name in (
                "momentum_sgd",
                "corrected_momentum_sgd",
                "nesterov_ag",
                "ada_grad",
                "rmsprop",
                "adam",
                "lars_norms",
                "lars",
            )
        },
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


def names_of(file):
    kernels = KERNELS[file].items()
    return [cuda_source.instance(name, *arguments) for name, instances in kernels for arguments in instances]


@pytest.mark.parametrize("file", KERNELS)
def test_sources_compile(file, compile):
    compile(cuda_source.source(file), tuple(names_of(file)))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("file", KERNELS)
def test_sources_compile_for_each_generation(file, tmp_path):
    """By NVIDIA's compiler, for A100, H100 and B200."""
    table = ", ".join(f"(void*){name}" for name in names_of(file))
    (tmp_path / "kernel.cu").write_text(f"{cuda_source.source(file)}\nvoid* instances_of_all[] = {{{table}}};\n")
    targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90, 100)]
    command = ["nvcc", "-fatbin", *targets, *cuda_source.OPTIONS, "kernel.cu", "-o", "kernel.fatbin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "kernel.fatbin").stat().st_size, done.stderr


def test_every_file_is_in_the_table():
    folder = Path(cuda_source.__file__).parent / "cuda"
    assert set(KERNELS) == {file.stem for file in folder.glob("*.cu")}
    for file, kernels in KERNELS.items():
        text = (folder / f"{file}.cu").read_text()
        assert set(kernels) == set(re.findall(r"__global__ void (\w+)\(", text)), file
