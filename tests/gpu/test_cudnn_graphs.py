"""cuDNN's graphs build for GPUs that are not there: those of ResNet-50 and of attention, as the kernels describe them.

Runs where cuDNN and its frontend are installed, with a GPU or without. A graph that builds is valid, has an engine for
the device and a plan with a known workspace, and cuDNN has compiled its kernels; what they compute and how fast they
are is not known. cuDNN calls libcuda.so.1 and libcublasLt.so.13 or .12 all the same: in their place come libraries made
here, which refuse everything but to load kernels, so that no engine of cuBLASLt serves.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_device

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "gpu" / "programs" / "cudnn_graphs.py"
DEVICES = ("a100", "h100", "h200")
FEWEST_BYTES = 16  # of a pixel: images of fewer get more channels

NO_DEVICE, NOT_SUPPORTED = 100, 15  # CUDA_ERROR_NO_DEVICE and CUBLAS_STATUS_NOT_SUPPORTED
# What the driver answers where cuDNN builds plans: kernels are loaded, and a block of them fits on a multiprocessor.
LOADS = "LibraryLoadData LibraryGetKernel LibraryGetModule KernelGetFunction ModuleLoadData ModuleLoadDataEx "
LOADS += "ModuleGetFunction"
DOES = "FuncSetAttribute KernelSetAttribute FuncSetCacheConfig LibraryUnload ModuleUnload"
FITS = "MaxActiveBlocksPerMultiprocessor MaxActiveBlocksPerMultiprocessorWithFlags MaxActiveClusters"
ANSWERS = {
    **{f"cu{name}": "(void** made) { *made = &somewhere; return 0; }" for name in LOADS.split()},
    **{f"cu{name}": "() { return 0; }" for name in DOES.split()},
    **{f"cuOccupancy{name}": "(int* number) { *number = 1; return 0; }" for name in FITS.split()},
    "cuFuncGetAttribute": "(int* value) { *value = 0; return 0; }",
    "cuKernelGetAttribute": "(int* value) { *value = 0; return 0; }",
    "cuDriverGetVersion": "(int* version) { *version = 13000; return 0; }",
    "cublasLtGetVersion": "() { return 130200; }",
}


def wheels():
    """The folder of cuDNN's libraries, or why there is none."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            importlib.metadata.distribution("nvidia-cudnn-frontend")
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError as e:
            reason = f"{e.name} is not installed"
            continue
        found = [Path(f.locate()).parent for f in files if f.name == "libcudnn_graph.so.9"]
        return found[0] if found else f"{name} has no libcudnn_graph.so.9"
    return reason


def called(library):
    """The functions of the driver and of cuBLASLt whose names a library holds, because it looks them up by these."""
    return {name.decode() for name in re.findall(rb"(?<=\0)cu(?:blasLt)?[A-Z]\w+(?=\0)", library.read_bytes())}


def stub(path, names, refusal):
    """A library with these functions."""
    functions = [f"long {name}{ANSWERS.get(name, f'() {{ return {refusal}; }}')}" for name in sorted(names)]
    text = "\n".join(["static char somewhere;", 'extern "C" {', *functions, "}"])
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)], input=text, text=True, check=True)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder with stubs of libcuda and libcublasLt."""
    folder = wheels()
    if isinstance(folder, str):
        pytest.skip(folder)
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    names = called(folder / "libcudnn_graph.so.9") | called(folder / "libcudnn_engines_precompiled.so.9")
    of_cublaslt = {name for name in names if name.startswith("cublasLt")}
    made = tmp_path_factory.mktemp("stubs")
    stub(made / "libcuda.so.1", names - of_cublaslt, NO_DEVICE)
    for version in (12, 13):
        stub(made / f"libcublasLt.so.{version}", of_cublaslt, NOT_SUPPORTED)
    return made


@pytest.fixture
def rows(libraries, on):
    """``rows(device, topic)``: what became of each graph, by programs/cudnn_graphs.py."""
    if on != "cupy":
        pytest.skip("starts a program with the stand-in by itself: run it without --on")

    def run(device, topic):
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'gpu'}", "LD_LIBRARY_PATH": str(libraries)}
        command = [sys.executable, str(PROGRAM), device, topic]
        done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr
        print(f"{device}, {topic}: {done.stderr.splitlines()[-1]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def assert_built(found):
    failed = [row for row in found if "error" in row]
    assert not failed, f"{len(failed)} of {len(found)} were not built, the first: {failed[0]}"
    assert all(row["plans"] > 0 and row["workspace"] >= 0 for row in found)
    assert sum(row["deterministic"] for row in found) * 2 == len(found)
    print(f"{Counter(row['kind'] for row in found)}, largest workspace {max(row['workspace'] for row in found)} bytes")


def weights_of(found, kind):
    """Shapes of weights, and strides, of the graphs of a kind."""
    return {(tuple(row["W"]), row["stride"]) for row in found if row["kind"] == kind}


def convolutions(fewest):
    """Weights of ResNet-50, the stem's with more channels, and strides."""
    import dbrdist.links as L
    from dbrdist.models import resnet

    links = [link for link in resnet.ResNet50(10).links() if isinstance(link, L.Convolution2D)]
    assert len(links) == 53
    shapes = [(link.W.shape, link.stride[0]) for link in links]
    return {((o, max(i, fewest), *window), stride) for (o, i, *window), stride in shapes}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("topic, size", [("float32", 4), ("tf32", 4), ("float16", 2), ("bfloat16", 2)])
def test_convolutions_build(device, topic, size, rows):
    found = rows(device, topic)
    assert_built(found)
    expected = convolutions(FEWEST_BYTES // size)
    assert weights_of(found, "forward") == expected
    assert {W for W, _ in weights_of(found, "weight")} == {W for W, _ in expected}
    assert {W for W, _ in weights_of(found, "data")} == {W for W, _ in expected if W[2] != 7}


@pytest.mark.parametrize("device", DEVICES)
def test_fused_convolutions_build(device, rows):
    found = rows(device, "fused")
    assert_built(found)
    of_blocks = {(W, stride) for W, stride in convolutions(0) if W[2] != 7}
    for kind in ("sums", "rectified sums", "rectified weight"):
        assert weights_of(found, kind) == of_blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_builds(device, dtype, rows):
    found = rows(device, f"attention-{dtype}")
    assert_built(found)
    assert len(found) == 2 * 44  # forward and backward


def test_a_wrong_description_is_refused(rows):
    (row,) = rows("h200", "wrong")
    assert "error" in row


def test_a_missing_wheel_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert wheels() == "nvidia-cudnn-frontend is not installed"
