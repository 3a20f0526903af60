"""Tests that need a GPU. They are not collected by default: ``python -m pytest tests/gpu``.

Without a GPU they are skipped with the reason, or run elsewhere, so that the tests themselves stay right:

    python -m pytest tests/gpu --on stand-in   # arrays that are not NumPy's and refuse what CuPy refuses
    python -m pytest tests/gpu --on numpy      # host memory in the place of the device
    python -m pytest tests/gpu/test_gpu_normalization.py --on host-cuda  # own CUDA kernels, compiled by g++; also _sums
    python -m pytest tests/gpu/test_gpu_cudnn.py --on host-cuda  # and a cuDNN of host memory; also test_host_cudnn.py
    python -m pytest tests/gpu/test_host_ops.py --on host-cuda  # products, cross entropy and updates
    python -m pytest tests/gpu/test_gpu_whole.py --on whole  # complete steps of own kernels and cuDNN, with sanitizers

``make test-fast`` runs them on the stand-in, ``make test-programs`` some on the host; tests/suites.py says which.
``device`` is the device under test, ``xp``
its array module.
"""

from __future__ import annotations

import contextlib
import sys
import warnings

import numpy as np
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--on",
        choices=["cupy", "stand-in", "numpy", "host-cuda", "whole"],
        default="cupy",
        help="what takes the GPU's part",
    )
    parser.addoption("--number", type=int, default=0, help="the number of the device under test; the current one is 0")
    parser.addoption("--peers", action="store_true", help="devices of the stand-in reach each other's memory")


def pytest_configure(config):
    config.addinivalue_line("markers", "without_device: runs where CuPy can be imported, also without a GPU")
    if config.getoption("--on") == "stand-in":
        import stand_in

        sys.modules["cupy"] = stand_in.module
        sys.modules["cupyx.scipy"] = stand_in.cupyx_scipy
        stand_in.peers.are_there = config.getoption("--peers")

    if config.getoption("--on") in ("host-cuda", "whole"):
        import host_cuda

        if hasattr(config, "cache"):
            host_cuda.folder = config.cache.mkdir("host_cuda")
        if config.getoption("--on") == "host-cuda":
            host_cuda.install()
        elif host_cuda.why_not() is None:
            import whole

            whole.install()


def _why_not() -> str | None:
    try:
        import cupy
    except ImportError as e:
        return f"CuPy cannot be imported: {e}"
    return None if cupy.cuda.is_available() else "CuPy finds no GPU"


def pytest_collection_modifyitems(config, items):
    reason = _why_not() if config.getoption("--on") == "cupy" else None
    if config.getoption("--on") in ("host-cuda", "whole"):
        import host_cuda

        reason = host_cuda.why_not()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("without_device") is None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def on(request):
    """What takes the GPU's part: 'cupy', 'stand-in', 'numpy', 'host-cuda' or 'whole'."""
    return request.config.getoption("--on")


@pytest.fixture
def device(on, request):
    """The device under test."""
    from dbrdist.core.array.backend import get_device

    return get_device("@numpy" if on == "numpy" else ("@cupy", request.config.getoption("--number")))


@pytest.fixture
def xp(device):
    """The array module of the device under test."""
    return device.xp


@pytest.fixture
def launched(on):
    """The names of the kernels that have been launched since the test began, by a call; on the whole bench alone."""
    if on != "whole":
        pytest.skip("runs with --on whole")
    import host_cuda

    host_cuda.launched.clear()
    return lambda: [name.partition("<")[0] for _, name, _, _ in host_cuda.launched]


@pytest.fixture
def no_waits(on):
    """A context in which it is an error that the host waits for the device; on NumPy it never does."""
    if on == "numpy":
        return contextlib.nullcontext
    if on in ("stand-in", "whole"):
        import stand_in

        return stand_in.no_waits
    return _cupy_without_waits


@contextlib.contextmanager
def _cupy_without_waits():
    """CuPy finds most of its own waits, and says that it cannot find all."""
    import cupyx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cupyx.allow_synchronize(False):
            yield


@pytest.fixture(autouse=True)
def reference():
    """Every test starts from the same random numbers, and NumPy computes what the device is compared with.

    The device has its own providers.
    """
    from dbrdist import kernels
    from dbrdist.core.array import random

    state = random.get_state()
    random.set_seed(0)
    if "stand_in" in sys.modules:
        import stand_in

        stand_in.clocks.begin_anew()
    with kernels.use("cuda", "cudnn"):
        yield
    random.set_state(state)


@pytest.fixture
def rng():
    """Numbers for inputs."""
    return np.random.default_rng(0)
