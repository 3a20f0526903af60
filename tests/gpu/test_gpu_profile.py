"""Ranges for NVIDIA's profiler: they name functions, layers and phases, and change nothing that runs."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import datasets, iterators, optimizers, training
from dbrdist.core.array import backend, random, spans
from dbrdist.core.model.chain import Sequential
from dbrdist.function_hooks import CUDAProfileRanges


@pytest.fixture(autouse=True)
def needs_ranges(on):
    if on == "numpy":
        pytest.skip("needs CuPy")
    if on != "cupy":
        import stand_in

        stand_in.ranges.clear()  # what another test left


def trained(device, profile=None):
    """Parameters after three steps of a trainer's updater."""
    random.set_seed(0)
    net = Sequential(L.Convolution2D(3, 4, 3), L.BatchNormalization(4), F.relu, L.Linear(None, 3))
    rng = np.random.default_rng(0)
    data = datasets.TupleDataset(rng.random((12, 3, 6, 6), np.float32), np.arange(12, dtype=np.int32) % 3)
    optimizer = optimizers.MomentumSGD(0.1).setup(L.Classifier(net))
    updater = training.StandardUpdater(iterators.SerialIterator(data, 4), optimizer, device=device)
    for k in range(3):
        if k == 1 and profile is not None:
            with profile:
                updater.update()
        else:
            updater.update()
    return [backend.to_cpu(p.array) for p in net.params()]


def test_ranges_are_nested_and_change_no_bit(device, on):
    """With engines of cuDNN that add in one order: others give other bits with each step, whoever looks on."""
    profile = CUDAProfileRanges()
    with dbrdist.using_config("cudnn_deterministic", True):
        alone, found = trained(device), trained(device, profile)
    for a, b in zip(alone, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert spans.recording() is None and profile.num_steps == 1
    if on == "cupy":
        return
    import stand_in

    ranges, depth = stand_in.ranges[:], 0
    stand_in.ranges.clear()
    for name in ranges:
        depth += 1 if name else -1
        assert depth >= 0
    assert depth == 0 and ranges[0] == "step 1"
    names = [name for name in ranges if name]
    assert "MomentumSGD.update" in names
    for phase in ("forward", "backward"):
        assert any(name.startswith("Convolution2D (/predictor/0)") and name.endswith(phase) for name in names), names


def test_a_trace_keeps_its_own_recorder(device):
    recorder = spans.Recorder()
    spans.record(recorder)
    try:
        trained(device, CUDAProfileRanges())
        assert spans.recording() is recorder and any(span.name == "step" for span in recorder.spans)
    finally:
        spans.record(None)


def test_a_refused_profile_leaves_no_recorder(device):
    with dbrdist.profile(), pytest.raises(RuntimeError, match="another profile"), CUDAProfileRanges():
        pass
    assert spans.recording() is None


def test_an_error_closes_all_ranges(device, on):
    if on == "cupy":
        pytest.skip("the stand-in keeps the ranges")
    import stand_in

    x = device.send(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError), CUDAProfileRanges():
        F.reshape(x, (5, 5))
    assert stand_in.ranges.count("") * 2 == len(stand_in.ranges)
    stand_in.ranges.clear()
    assert spans.recording() is None
