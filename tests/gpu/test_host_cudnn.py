"""What cuDNN is asked for, and when, where its frontend is one that notes it (``--on host-cuda``)."""

from __future__ import annotations

import types

import host_cudnn
import numpy as np
import pytest
from support import images, put

from dbrdist import kernels, using_config
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.gpu import cudnn, cudnn_convolution
from dbrdist.kernels.reference import numpy_


@pytest.fixture(autouse=True)
def on_the_host(on):
    if on != "host-cuda":
        pytest.skip("runs with --on host-cuda")
    with kernels.use("cudnn", "cuda"):
        yield


PRECISE, EXACT = "REDUCED_PRECISION_REDUCTION", {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"}


@pytest.mark.parametrize(
    "use, dtype, unwanted",
    [
        ("auto", "float32", EXACT), ("never", "float32", EXACT), ("always", "float32", set()),
        ("auto", "float16", set()), ("never", "float16", EXACT), ("always", "bfloat16", set()),
    ],
)  # fmt: skip
def test_engines_that_switches_allow(use, dtype, unwanted):
    for is_deterministic in (False, True):
        with using_config("use_cudnn_tensor_core", use), using_config("cudnn_deterministic", is_deterministic):
            found = cudnn_convolution.notes(backend.as_dtype(dtype)).unwanted
        assert set(found) == {PRECISE, *unwanted, *(["NONDETERMINISTIC"] if is_deterministic else [])}


@pytest.mark.parametrize(
    "channels, dtype, groups, padded",
    [(1, "float32", 1, 4), (3, "float32", 1, 4), (4, "float32", 1, 4), (5, "float32", 1, 5),
     (3, "float16", 1, 8), (8, "bfloat16", 1, 8), (3, "float32", 3, 3), (2, "float16", 2, 2)],
)  # fmt: skip
def test_pixels_have_sixteen_bytes_at_least(channels, dtype, groups, padded):
    g = ConvGeometry(groups=groups)
    assert cudnn_convolution._padded_channels((2, channels, 5, 5), backend.as_dtype(dtype), g) == padded


def convolve(device, size, rng):
    """A convolution of a size that no other test has, and its value."""
    x, W = images(rng, (2, 8, size, 5), "float32"), rng.standard_normal((4, 8, 3, 2)).astype("f")
    xd, Wd = put(device, x), device.send(W.reshape(-1)).reshape(W.shape)
    return kernels.conv_forward(xd, Wd, None, ConvGeometry()), numpy_.conv_forward(x, W, None, ConvGeometry())


def test_versions_that_take_names_of_operands(device, rng, monkeypatch):
    monkeypatch.setattr(host_cudnn.module, "pygraph", host_cudnn.Graph)
    np.testing.assert_allclose(*convolve(device, 21, rng), rtol=1e-4, atol=1e-5)


def test_versions_that_list_other_operands_are_called_by_names(device, rng, monkeypatch):
    monkeypatch.setattr(host_cudnn.GraphByAddresses, "_get_variant_pack_uids_sorted", lambda self: [1, 2])
    np.testing.assert_allclose(*convolve(device, 22, rng), rtol=1e-4, atol=1e-5)


def test_tf32_is_asked_for_by_always_alone(device, rng):
    distances = {}
    for size, use in ((23, "auto"), (24, "always"), (25, "never")):
        with using_config("use_cudnn_tensor_core", use):
            found, exact = convolve(device, size, rng)
        distances[use] = np.abs(found - exact).max() / np.abs(exact).max()
    assert max(distances["auto"], distances["never"]) < 1e-5 < 1e-4 < distances["always"] < 1e-2


def test_what_has_no_engine_is_numpys(device, rng, monkeypatch):
    def refuse(self):
        raise RuntimeError("no engine")

    monkeypatch.setattr(host_cudnn.GraphByAddresses, "_validate", refuse)
    with pytest.raises(cudnn.Unsupported, match="cuDNN: no engine"):
        cudnn_convolution._build("forward", np.dtype("f"), (1, 4, 5, 5), (4, 4, 1, 1), (1, 4, 5, 5), ConvGeometry())
    np.testing.assert_allclose(*convolve(device, 26, rng), rtol=1e-4, atol=1e-5)


def test_the_stream_is_set_where_it_has_changed(device, rng, xp):
    convolve(device, 27, rng)
    before = len(host_cudnn.set_streams)
    for _ in range(3):
        convolve(device, 27, rng)
    assert len(host_cudnn.set_streams) == before
    with xp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            convolve(device, 27, rng)
    assert [s for _, s in host_cudnn.set_streams[before:]] == [stream.ptr]


def test_a_graph_for_no_device_runs_nothing():
    run = cudnn_convolution.describe(
        cudnn.Graph(np.dtype("f"), handle=None), "data", (1, 4, 5, 5), (4, 4, 1, 1), (1, 4, 5, 5), ConvGeometry()
    ).build(cudnn.Notes(True, True))
    assert run(0, 0, 0) is None


def test_frontends_that_do_not_serve_say_why_each_time(monkeypatch):
    for found, words in (
        (types.SimpleNamespace(backend_version=lambda: 89999), "expected cuDNN 9 or newer, found 89999"),
        (types.SimpleNamespace(), "AttributeError"),
        (None, "ModuleNotFoundError"),
    ):
        monkeypatch.setitem(cudnn.importlib.sys.modules, "cudnn", found)
        monkeypatch.setattr(cudnn, "_library", None)
        monkeypatch.setattr(cudnn, "_reason", None)
        for _ in range(2):
            with pytest.raises(cudnn.Unavailable, match=words):
                cudnn.library()
            monkeypatch.setitem(cudnn.importlib.sys.modules, "cudnn", host_cudnn.module)
    monkeypatch.setattr(cudnn, "_reason", None)
    monkeypatch.setattr(host_cudnn.module, "backend_version", lambda: 90000)
    assert cudnn.library() is cudnn.library()
