"""Nets on the device: loss, gradients and statistics of a step against NumPy; dropout; snapshots; a few steps."""

from __future__ import annotations

import io

import numpy as np
import pytest
from support import assert_same, is_on, put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Sequential, Variable, kernels, using_config
from dbrdist.core.array import backend, random
from dbrdist.core.files.serializer import load_npz, save_npz
from dbrdist.datasets import get_digits
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.models import LeNet
from dbrdist.models.resnet import ResNet20
from dbrdist.optimizers import Adam, MomentumSGD, WeightDecay
from dbrdist.training import ParallelUpdater, StandardUpdater, Trainer, extensions

# Net, shape of a batch, tolerance in float32: there ReLUs near zero flip with the rounding, and 20 layers of batch
# normalization over a small batch carry it on. NumPy and oneDNN differ by 6 % in a gradient; float64 is the sharp test.
MODELS = {
    "LeNet": (lambda: LeNet(channels=(4, 6), units=16), (4, 1, 12, 12), 1e-3),
    "LeNet with dropout": (lambda: LeNet(channels=(4, 6), units=16, dropout=0.5), (4, 1, 12, 12), 1e-3),
    "ResNet-20": (lambda: ResNet20(10), (4, 3, 16, 16), 0.25),
}


def one_step(make, x, t, device, dtype):
    """Loss, gradients, parameters after an update, and persistent values, in host memory."""
    random.set_seed(3)
    with using_config("dtype", np.dtype(dtype)):
        net = make().to_device(device)
        optimizer = MomentumSGD(0.1).setup(net)
        optimizer.add_hook(WeightDecay(1e-3))
        loss = F.softmax_cross_entropy(net(put(device, x)), put(device, t))
        net.cleargrads()
        loss.backward()
        assert is_on(device, loss.array)
        grads = {name: backend.to_cpu(p.grad).copy() for name, p in net.namedparams()}
        optimizer.update()
        after = {name: backend.to_cpu(p.array) for name, p in net.namedparams()}
        assert all(is_on(device, p.array) for p in net.params())
    kept = {
        f"{path}/{name}": backend.to_cpu(getattr(link, name))
        for path, link in net.namedlinks()
        for name in link._persistent
        if backend.is_array(getattr(link, name))
    }
    return {"loss": backend.to_cpu(loss.array), **{f"gradient of {k}": g for k, g in grads.items()}, **after, **kept}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_one_step(name, dtype, device, rng):
    make, shape, tolerance = MODELS[name]
    tolerance = 1e-8 if dtype == "float64" else tolerance
    x, t = rng.standard_normal(shape).astype(dtype), np.arange(shape[0], dtype=np.int32)
    results = one_step(make, x, t, device, dtype)
    expected = one_step(make, x, t, backend.get_device("@numpy"), dtype)
    assert results.keys() == expected.keys()
    for key, b in expected.items():
        a, scale = results[key], float(abs(b).max())
        assert a.dtype == b.dtype, key
        assert key != "loss" or abs(a - b) <= min(tolerance, 1e-3) * scale
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-3), err_msg=key)


def test_float16_with_float32_statistics(device, rng):
    """Mixed precision: the loss follows float32."""
    x, t = rng.standard_normal((8, 3, 16, 16)), np.arange(8, dtype=np.int32)
    losses = {d: one_step(lambda: ResNet20(10), x.astype(d), t, device, d)["loss"] for d in ("float32", "float16")}
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=0.05)


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 5, 6), (16, 8, 8, 8)])
def test_running_statistics(shape, device, rng):
    link, host = L.BatchNormalization(shape[1]), L.BatchNormalization(shape[1])
    link.to_device(device)
    for k in range(3):
        x = (rng.standard_normal(shape) * (k + 1) + k).astype(np.float32)
        y, expected = link(put(device, x)), host(x)
        np.testing.assert_allclose(backend.to_cpu(y.array), expected.array, rtol=1e-4, atol=1e-5)
    assert is_on(device, link.avg_mean) and is_on(device, link.avg_var)
    np.testing.assert_allclose(backend.to_cpu(link.avg_mean), host.avg_mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(backend.to_cpu(link.avg_var), host.avg_var, rtol=1e-5)
    with using_config("train", False):
        np.testing.assert_allclose(backend.to_cpu(link(put(device, x)).array), host(x).array, rtol=1e-4, atol=1e-5)


def test_initial_values_may_lie_anywhere(device, xp):
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for given in (values, put(device, values)):
        link = L.Linear(3, 2, initialW=given).to_device(device)
        assert_same(device, link.W.array, values)
    link = L.BatchNormalization(3, initial_gamma=put(device, values[0])).to_device(device)
    assert_same(device, link.gamma.array, values[0])


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5, 2)])
def test_dropout_draws_the_masks_of_the_host(shape, device):
    masks = []
    for place in (device, backend.get_device("@numpy")):
        random.set_stream(5, 1, 2, row=3)
        y, mask = F.dropout(put(place, np.ones(shape, np.float32)), 0.3, return_mask=True)
        assert is_on(place, mask)
        assert len(shape) != 4 or backend.is_channels_last(mask)
        masks.append(backend.to_cpu(mask))
        np.testing.assert_array_equal(backend.to_cpu(y.array), masks[-1])
    np.testing.assert_array_equal(*masks)
    assert set(np.unique(masks[0])) == {np.float32(0), np.float32(1 / 0.7)}


def test_gaussian_draws_the_numbers_of_the_host(device):
    results = []
    for place in (device, backend.get_device("@numpy")):
        random.set_stream(5, 1, 2)
        zeros = put(place, np.zeros((6, 5)))
        results.append(backend.to_cpu(F.gaussian(zeros, zeros).array))
    np.testing.assert_allclose(*results, rtol=1e-12, atol=1e-14)


class Small(L.Classifier):
    """A net with all that a snapshot holds: late parameters, statistics, a counter."""

    def __init__(self):
        super().__init__(LeNet(channels=(2, 3), units=8, dropout=0.2))
        with self.init_scope():
            self.bn = L.BatchNormalization(1)

    def forward(self, x, t):
        return super().forward(self.bn(x), t)


def trained(device, num_steps, state=None):
    """A Small and its optimizer after some steps on digits; from a snapshot where one is given."""
    train, _ = get_digits(ndim=3)
    net = Small().to_device(device)
    optimizer = Adam(0.01, eps=1e-3).setup(net)  # steps that do not hang on the sign of a tiny gradient
    iterator = SerialIterator(train, 16, seed=1)
    updater = StandardUpdater(iterator, optimizer, device=device)
    if state is not None:
        state.seek(0)
        load_npz(state, updater)
    for _ in range(num_steps):
        updater.update()
    return updater


@pytest.mark.parametrize("saves_on_device", [True, False])
def test_snapshots_cross_between_device_and_host(saves_on_device, device):
    """Saved on one and loaded on the other: equal values, and the same next steps."""
    host = backend.get_device("@numpy")
    source, target = (device, host) if saves_on_device else (host, device)
    file = io.BytesIO()
    updater = trained(source, 3)
    save_npz(file, updater)
    other = trained(target, 0, file)
    model, loaded = (u.get_optimizer("main").target for u in (updater, other))
    for (name, p), (_, q) in zip(model.namedparams(), loaded.namedparams(), strict=True):
        assert is_on(target, q.array)
        np.testing.assert_array_equal(backend.to_cpu(q.array), backend.to_cpu(p.array), name)
    assert_same(target, loaded.bn.avg_var, backend.to_cpu(model.bn.avg_var))
    for u in (updater, other):
        for _ in range(2):
            u.update()
    for (name, p), (_, q) in zip(model.namedparams(), loaded.namedparams(), strict=True):
        assert is_on(target, q.array)
        pair = (backend.to_cpu(q.array), backend.to_cpu(p.array))
        np.testing.assert_allclose(*pair, rtol=1e-2, atol=1e-3, err_msg=name)


def test_digits_are_learned(device, tmp_path):
    """A trainer with evaluator, log and snapshot; the loss falls as on the host."""
    train, test = get_digits(ndim=3)
    net = L.Classifier(LeNet(channels=(8, 16), units=32))
    optimizer = Adam(0.003).setup(net)
    updater = StandardUpdater(SerialIterator(train, 48), optimizer, device=device)
    trainer = Trainer(updater, (1, "epoch"), out=tmp_path)
    trainer.extend(extensions.Evaluator(SerialIterator(test, 100, repeat=False, shuffle=False), net, device=device))
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.extend(extensions.snapshot())
    trainer.run()
    assert all(is_on(device, p.array) for p in net.params())
    log = (tmp_path / "log.jsonl").read_text()
    assert '"validation/main/accuracy"' in log
    with using_config("train", False):
        x = np.stack([e[0] for e in test[:]])
        t = np.array([e[1] for e in test[:]], np.int32)
        accuracy = F.accuracy(net.predictor(put(device, x)), put(device, t))
    assert float(backend.to_cpu(accuracy.array)) > 0.6


def test_kernels_of_the_host_leave_the_device_alone(device, on):
    if on == "numpy":
        pytest.skip("host and device are the same here")
    with kernels.use("onednn"):
        x = put(device, np.ones((8, 64, 32, 32), np.float32))
        W, gamma = put(device, np.ones((8, 64, 3, 3), np.float32)), put(device, np.ones(64, np.float32))
        for kernel, *arguments in (
            ("conv_forward", x, W, None, kernels.ConvGeometry()),
            ("bn_forward", x, gamma, gamma, 1e-5, (0, 2, 3), False),
            ("pool_forward", x, kernels.PoolGeometry("max", 2, 2, 2, 2)),
            ("relu_forward", x),
        ):
            assert kernels.provider_of(kernel, *arguments) == "numpy"


def test_variables_move(device):
    v = Variable(np.arange(6.0).reshape(2, 3), grad=np.ones((2, 3)))
    v.to_device(device)
    assert is_on(device, v.array) and is_on(device, v.grad) and v.device == device
    y = F.sum(F.copy(v, "@numpy") * 2.0)
    assert isinstance(y.array, (np.ndarray, np.generic))
    v.cleargrad()
    y.backward()
    assert_same(device, v.grad, np.full((2, 3), 2.0))
    v.to_device("@numpy")
    assert isinstance(v.array, np.ndarray) and isinstance(v.grad, np.ndarray)


class NarrowResNet(L.ResNet50Layers):
    channels, num_classes = (4, 4, 6, 8), 5


def test_a_vision_model_takes_images_of_the_host(device, rng):
    random.set_seed(3)
    model, images = NarrowResNet(None), list(rng.integers(0, 256, (2, 256, 256, 3)).astype(np.uint8))
    with using_config("train", False):
        expected = [model.predict(images).array, model.extract(images, size=None)["pool5"].array]
        model.to_device(device)
        found = [model.predict(images).array, model.extract(images, size=None)["pool5"].array]
    for ours, theirs in zip(found, expected):
        assert_same(device, ours, theirs, 1e-3, 1e-3)


def test_a_step_on_host_and_device_together_is_that_of_the_host(device):
    def trained(make_updater):
        random.set_seed(3)
        net = L.Classifier(Sequential(L.Linear(None, 20), F.relu, F.dropout, L.Linear(20, 10)))
        optimizer = MomentumSGD(0.1).setup(net)
        updater = make_updater(SerialIterator(get_digits()[0], 16, seed=0), optimizer)
        for _ in range(3):
            updater.update()
        return net

    expected = trained(StandardUpdater)
    devices = {"main": device, "host": "@numpy", "again": device}
    found = trained(lambda i, o: ParallelUpdater(i, o, devices=devices))
    for ours, theirs in zip(found.params(), expected.params()):
        assert_same(device, ours.array, theirs.array, 1e-4, 1e-4)


def test_statistics_of_parameters_on_the_device(device):
    net = L.Linear(3, 2)
    numbers = dict(extensions.ParameterStatistics(net, report_grads=False)._observe())
    net.to_device(device)
    found = dict(extensions.ParameterStatistics(net, report_grads=False)._observe())
    assert found.keys() == numbers.keys()
    for key, number in found.items():
        assert float(number) == pytest.approx(float(numbers[key]), rel=1e-5, abs=1e-7), key
