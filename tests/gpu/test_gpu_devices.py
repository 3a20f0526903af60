"""More than one device: arrays, links and runs lie where they are told to."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, optimizers
from dbrdist.core.array import backend
from dbrdist.core.array.backend import get_device, using_device
from dbrdist.core.model.chain import Sequential


@pytest.fixture
def second(on, device):
    """Another device than the one under test, which is the current one again after the test."""
    if on == "numpy" or device.xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second device")
    yield get_device("@cupy:1")
    device.use()


def test_using_device_switches_and_comes_back(device, second, xp):
    assert xp.ones(2).device.id == 0
    with using_device(second) as used:
        assert used == second
        assert xp.ones(2).device.id == 1
        with using_device("@cupy:0"):
            assert xp.ones(2).device.id == 0
        assert xp.ones(2).device.id == 1
    assert xp.ones(2).device.id == 0


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("current", [0, 1])
def test_copies_between_devices(device, second, shape, channels_last, current):
    a = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    if len(shape) == 4 and channels_last:
        a = backend.channels_last(a)
    with using_device(device):
        first = device.xp.asarray(a, order="C") if not channels_last else device.send(a)
    with using_device(get_device(current)):
        there = backend.to_device(first, second)
        back = backend.to_device(there, device)
        assert backend.to_device(there, second) is there
    assert_same(second, there, a)
    assert_same(device, back, a)
    with using_device(second):
        there[...] = -1
    assert_same(device, back, a)
    assert_same(device, first, a)


def test_a_gradient_comes_back_to_the_device_of_its_input(device, second, rng):
    x = Variable(device.send(rng.standard_normal((2, 3))))
    y = F.copy(x, second)
    assert backend.device_of(y.array) == second
    assert_same(second, y.array, backend.to_cpu(x.array))
    with using_device(second):
        y.grad = second.xp.full((2, 3), 2.0)
    y.backward()
    assert_same(device, x.grad, np.full((2, 3), 2.0))


def test_gradients_of_several_passes_add_up_on_the_device_of_their_input(device, second, rng):
    x = Variable(second.send(rng.standard_normal((2, 3))))
    for _ in range(2):
        y = F.copy(x, device)
        y.grad = device.xp.full((2, 3), 2.0)
        y.backward()
        assert backend.current_device() == device
    assert_same(second, x.grad, np.full((2, 3), 4.0))


def test_a_network_trains_on_the_second_device(device, second, rng):
    def train(where):
        dbrdist.random.set_seed(0)
        net = Sequential(L.Convolution2D(1, 4, 3), L.BatchNormalization(4), F.relu, L.Linear(None, 3))
        net.to_device(where)
        optimizer = optimizers.MomentumSGD(0.1).setup(net)
        x, t = where.send((x_host, np.array([0, 2], np.int32)))
        with using_device(where):
            for _ in range(3):
                optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
        assert all(backend.device_of(a) == where for p in net.params() for a in (p.array, p.grad))
        assert backend.device_of(net[1].avg_mean) == where
        return [backend.to_cpu(p.array) for p in net.params()]

    x_host = rng.standard_normal((2, 1, 6, 6)).astype(np.float32)
    for a, b in zip(train(second), train(get_device("@numpy")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec, intra_rank, index",
    [("gpu", 0, 0), ("gpu", 1, 1), ("gpu", 2, 0), ("gpu", 5, 1), ("gpu:0", 1, 0), ("gpu:1", 0, 1)],
)
def test_each_rank_takes_the_device_of_its_number(second, spec, intra_rank, index):
    """As a run does that was told ``device: gpu``."""
    pytest.importorskip("pydantic")
    from dbrdist.cli.builders.assemble import parts
    from dbrdist.cli.configuration.load import check

    config, origin = check(f"model: mlp\ndata: digits\nbatch: 4\nepochs: 1\ndevice: '{spec}'".encode(), "run.yaml")
    dtype = dbrdist.global_config.dtype
    try:
        made = parts(config, origin, intra_rank, 2)
    finally:
        dbrdist.global_config.dtype = dtype
    assert made.device == get_device(("@cupy", index))
    assert {backend.device_of(p.array) for p in made.task.params()} == {made.device}
    assert second.xp.cuda.Device().id == index


def test_a_rank_that_sees_one_gpu_takes_it(second, monkeypatch):
    """As under Slurm with ``--gpus-per-task=1``, or with ``dbrdist-launch --gpus rank``."""
    monkeypatch.setattr(second.xp.cuda.runtime, "getDeviceCount", lambda: 1)
    test_each_rank_takes_the_device_of_its_number(second, "gpu", 3, 0)


def test_one_check_says_why_a_gpu_cannot_be_used(device, monkeypatch):
    xp = device.xp
    monkeypatch.setattr(backend, "_usable", set())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    a, link = np.ones(2, np.float32), L.Linear(2, 2)
    ways = [
        lambda: get_device("@cupy:7").use(),
        lambda: get_device("@cupy:7").send(a),
        lambda: using_device(7).__enter__(),
        lambda: link.to_device(7),
    ]
    for way in ways:
        with pytest.raises(
            RuntimeError, match=r"@cupy:7 cannot be used: .*numbers 0 to 1; CUDA_VISIBLE_DEVICES is '0,1'; '@numpy'"
        ):
            way()

    def no_driver():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    monkeypatch.setattr(xp.cuda.runtime, "getDeviceCount", no_driver)
    for way in ways:
        with pytest.raises(RuntimeError, match=r"InsufficientDriver.*install NVIDIA's driver.*dbrdist\[cuda13x\]"):
            way()


@pytest.fixture(autouse=True)
def needs_a_gpu(on):
    if on == "numpy":
        pytest.skip("host memory is always there")
