"""Whole programs on the second device while the first is current: extensions, hooks, communicators, states."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Sequential, datasets, iterators, link_hooks, optimizer_hooks, optimizers, serializers, training
from dbrdist.comm import create_multi_node_optimizer, run_threads
from dbrdist.comm.links import create_mnbn_model
from dbrdist.core.array import backend
from dbrdist.training import extensions


@pytest.fixture
def second(on, device):
    """The second device; the first is the current one, and still is at the end."""
    if on == "numpy" or device.xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second device")
    device.use()
    yield dbrdist.get_device("@cupy:1")
    assert backend.current_device() == device


def network():
    return Sequential(L.Linear(4, 8), L.BatchNormalization(8), F.relu, L.Linear(8, 3))


def data(count=12):
    rng = np.random.default_rng(0)
    return datasets.TupleDataset(rng.random((count, 4), np.float32), (np.arange(count) % 3).astype(np.int32))


def batch(where, count=5):
    x, t = zip(*data(count))
    return where.send(np.stack(x)), where.send(np.array(t, np.int32))


def trainer_on(where, out, epochs, optimizer=None):
    net = L.Classifier(network())
    optimizer = (optimizer or optimizers.Adam()).setup(net)
    updater = training.StandardUpdater(iterators.SerialIterator(data(), 4), optimizer, device=where)
    return net, training.Trainer(updater, (epochs, "epoch"), out=str(out))


def test_a_trainer_with_its_extensions_and_hooks(second, tmp_path):
    net, trainer = trainer_on(second, tmp_path, 2)
    for hook in (
        optimizer_hooks.WeightDecay(1e-3), optimizer_hooks.Lasso(1e-3), optimizer_hooks.GradientClipping(1.0),
        optimizer_hooks.GradientHardClipping(-1, 1), optimizer_hooks.GradientNoise(0.1),
    ):  # fmt: skip
        trainer.updater.get_optimizer("main").add_hook(hook)
    average = extensions.WeightAverage(net, 0.9)
    evaluator = extensions.Evaluator(
        iterators.SerialIterator(data(), 5, repeat=False, shuffle=False), net, device=second
    )
    trainer.extend(average)
    trainer.extend(average.around(evaluator), name="validation")
    trainer.extend(extensions.ParameterStatistics(net), trigger=(1, "iteration"))
    trainer.extend(extensions.VariableStatisticsPlot(net, trigger=(1, "iteration")))
    trainer.extend(extensions.FailOnNonNumber())
    trainer.extend(extensions.LogReport())
    best = training.triggers.MinValueTrigger("main/loss", (1, "iteration"))
    trainer.extend(extensions.snapshot(filename="best"), trigger=best)
    trainer.extend(extensions.snapshot(filename="last"))
    trainer.run()
    net, resumed = trainer_on(second, tmp_path, 3)
    serializers.load_npz(str(tmp_path / "last"), resumed)
    resumed.run()
    assert {backend.device_of(p.array) for p in net.params()} == {second}


NAMES = "SGD MomentumSGD NesterovAG Adam AdaGrad AdaDelta RMSprop RMSpropGraves SMORMS3 MSVAG LARS LAMB AdaBound"


@pytest.mark.parametrize("name", NAMES.split())
def test_each_optimizer(name, second):
    net = network().to_device(second)
    optimizer = getattr(optimizers, name)().setup(net)
    x, t = batch(second)
    for _ in range(2):
        optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
    assert backend.device_of(net[0].W.array) == second


def test_states_of_recurrent_links_move_with_them(device, second):
    x, there = np.ones((3, 4), np.float32), None
    for link in (L.LSTM(4, 5), L.StatefulGRU(4, 5), L.StatefulPeepholeLSTM(4, 5), L.StatefulZoneoutLSTM(4, 5)):
        link.to_device(second)
        for _ in range(2):
            there = link(second.send(x))
        F.sum(there * there).backward()
    lstm = L.LSTM(4, 5).to_device(second)
    lstm(second.send(x))
    assert backend.device_of(lstm.to_device(device)(device.send(x)).array) == device


def test_hooks_of_links_and_their_state(second, tmp_path):
    for hook in (link_hooks.SpectralNormalization(), link_hooks.WeightStandardization()):
        net = L.Convolution2D(2, 3, 3)
        net.add_hook(hook)
        net.to_device(second)
        for _ in range(2):
            net.cleargrads()
            F.sum(net(second.send(np.ones((2, 2, 5, 5), np.float32)))).backward()
        kept = {name: backend.to_cpu(getattr(net, name)).copy() for name in net._persistent}
        serializers.save_npz(tmp_path / "net", net)
        with dbrdist.using_device(second):
            for name in kept:
                getattr(net, name)[...] = 0
        serializers.load_npz(tmp_path / "net", net)
        assert backend.device_of(net.W.grad) == second
        for name, values in kept.items():
            state = getattr(net, name)
            assert backend.device_of(state) == second
            np.testing.assert_array_equal(backend.to_cpu(state), values)


def test_another_thread_uses_the_device_of_the_arrays(second):
    net, (x, _) = network().to_device(second), batch(second)
    found = []

    def work():
        F.sum(net(x)).backward()
        found.append(backend.device_of(net[0].W.grad))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [second]


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"local_steps": 2}, {"double_buffering": True}, {"dtype": "float16"}, {"bn": 1}]
)
def test_ranks_that_are_threads_on_the_second_device(options, second):
    def work(comm):
        ways = dict(options)
        comm.set_config("allreduce_grad_dtype", ways.pop("dtype", None))
        net = create_mnbn_model(network(), comm) if ways.pop("bn", None) else network()
        net.to_device(second)
        optimizer = create_multi_node_optimizer(optimizers.MomentumSGD(), comm, **ways).setup(net)
        x, t = batch(second)
        for _ in range(4):
            optimizer.update(lambda x, t: F.softmax_cross_entropy(net(x), t), x, t)
        comm.bcast_data(net)
        total = comm.allreduce(second.send(np.ones(3, np.float32)))
        assert backend.device_of(total) == second and backend.to_cpu(total).tolist() == [comm.size] * 3

    run_threads(2, work, timeout_seconds=60)


def test_an_optimizers_state_follows_the_network(device, second):
    net = network()
    optimizer = optimizers.Adam().setup(net)
    for where in (device, second, dbrdist.get_device("@numpy"), second):
        net.to_device(where)
        x, t = batch(where)
        optimizer.update(lambda x=x, t=t: F.softmax_cross_entropy(net(x), t))
        assert backend.device_of(net[0].W.update_rule.state["m"]) == where
