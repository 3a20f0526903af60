"""Forward, backward, updates, copies and evaluation run on the device of their arrays, whichever device is current.

On the stand-in twice: with devices that refuse each other's memory, and with ones that reach it, as over NVLink. There
a kernel on the wrong device computes right numbers, but over the bus and on a stream that nothing orders: the clocks
find it. On GPUs, with two of them.
"""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Variable, iterators, optimizers, training, using_config
from dbrdist.core.array.backend import device_of, get_device, to_cpu
from dbrdist.optimizers import (
    GradientClipping,
    GradientHardClipping,
    GradientLARS,
    GradientNoise,
    Lasso,
    WeightDecay,
)


@pytest.fixture(params=["alone", "peers"], autouse=True)
def two_devices(on, device, request, monkeypatch):
    """Device 0 is current before and after each test, and no kernel reads memory of another one."""
    if on == "numpy" or device.xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    if on != "stand-in":
        if request.param == "peers":
            pytest.skip("GPUs are peers, or they are not")
        yield
    else:
        import stand_in

        monkeypatch.setattr(stand_in.peers, "are_there", request.param == "peers")
        monkeypatch.setattr(stand_in.peers, "accesses", 0)
        yield
        assert stand_in.peers.accesses == 0
    assert device.xp.cuda.Device().id == 0


X = np.random.default_rng(0).standard_normal((16, 5)).astype(np.float32)
IMAGES = np.random.default_rng(1).standard_normal((16, 1, 6, 6)).astype(np.float32)
T = np.random.default_rng(2).integers(0, 3, 16).astype(np.int32)


def on_1(a):
    return get_device("@cupy:1").send(a)


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(1, 4, 3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(4)
            self.fc = L.Linear(None, 3)

    def forward(self, x):
        return self.fc(F.dropout(F.max_pooling_2d(F.relu(self.bn(self.conv(x))), 2), 0.2))


def trained(folder, device=None, devices=None, rule=lambda: optimizers.MomentumSGD(0.1), hooks=()):
    """Parameters and statistics after three steps and evaluations of a Trainer."""
    dbrdist.random.set_seed(0)
    model = L.Classifier(Net())
    optimizer = rule().setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    data = dbrdist.datasets.TupleDataset(IMAGES, T)
    rows = iterators.SerialIterator(data, 8, shuffle=False)
    if devices is None:
        updater = training.updaters.StandardUpdater(rows, optimizer, device=device)
    else:
        updater = training.updaters.ParallelUpdater(rows, optimizer, devices=devices)
    trainer = training.Trainer(updater, (3, "iteration"), out=str(folder))
    test = iterators.SerialIterator(data, 4, repeat=False, shuffle=False)
    where = device if devices is None else devices["main"]
    trainer.extend(training.extensions.Evaluator(test, model, device=where))
    trainer.extend(training.extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    if devices is not None:
        assert device_of(updater._models["second"].predictor.fc.W.array) == get_device(devices["second"])
    net = model.predictor
    return [to_cpu(a) for a in (*[p.array for p in model.params()], net.bn.avg_mean, net.bn.avg_var)]


def assert_alike(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize("name", ["SGD", "MomentumSGD", "Adam", "AMSGrad", "NesterovAG", "AdaGrad", "LARS", "LAMB"])
def test_the_device_of_an_updater(name, tmp_path):
    rule = getattr(optimizers, name)
    assert_alike(trained(tmp_path, "@cupy:1", rule=rule), trained(tmp_path, rule=rule), 2e-3)


HOOKS = [
    WeightDecay(0.1), GradientClipping(0.1), Lasso(0.1), GradientLARS(), GradientHardClipping(-0.1, 0.1),
    GradientNoise(0.1),
]  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: type(hook).__name__)
def test_hooks(hook, tmp_path):
    assert_alike(trained(tmp_path, 1, hooks=[hook]), trained(tmp_path, hooks=[hook]), 1e-3)


@pytest.mark.parametrize("main", [0, 1])
def test_parallel_updater_on_two_devices(main, tmp_path):
    one = trained(tmp_path, devices={"main": -1, "second": -1})
    assert_alike(trained(tmp_path, devices={"main": main, "second": 1 - main}), one)


# ---- one model on several devices


class Divided(dbrdist.Chain):
    """Two layers on two devices, and the output on a third."""

    def __init__(self, devices):
        super().__init__()
        self.places = devices
        with self.init_scope():
            self.a = L.Linear(5, 7)
            self.b = L.Linear(7, 3)
        self.a.to_device(devices[0])
        self.b.to_device(devices[1])

    def forward(self, x):
        first, second, last = self.places
        h = F.tanh(self.a(F.copy(x, first)))
        y = self.b(F.relu(F.copy(h, second)))
        return F.copy(y, last) + 0.1 * F.copy(F.sum(h), last)


def divided(devices, rule=lambda: optimizers.Adam(0.01), hooks=(), is_scaled=False):
    dbrdist.random.set_seed(0)
    net = Divided(devices)
    optimizer = rule().setup(net)
    for hook in hooks:
        optimizer.add_hook(hook)
    if is_scaled:
        optimizer.loss_scaling()
    x, t = get_device(devices[0]).send(X), get_device(devices[2]).send(T)
    for _ in range(3):
        optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
    return [to_cpu(p.array) for p in net.params()]


HOST = (-1, -1, -1)


@pytest.mark.parametrize("devices", [(0, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, -1), (1, 1, 1)], ids=str)
def test_a_model_divided_by_copies(devices):
    assert_alike(divided(devices), divided(HOST))


@pytest.mark.parametrize(
    "how",
    [
        {"hooks": [GradientClipping(0.01), WeightDecay(0.1)]},
        {"is_scaled": True},
        {"rule": lambda: optimizers.LARS(0.1)},
    ],
    ids=["clipping", "loss scale", "LARS"],
)
def test_what_looks_at_all_parameters_of_a_divided_model(how):
    assert_alike(divided((0, 1, 0), **how), divided(HOST, **how))


def test_a_divided_model_on_streams_of_its_own(xp):
    expected = divided(HOST)
    with xp.cuda.Device(1):
        other = xp.cuda.Stream(non_blocking=True)
    with xp.cuda.Stream(non_blocking=True):
        assert_alike(divided((0, 0, 0)), expected)
        assert_alike(divided((0, 1, 0)), expected)
    with xp.cuda.Device(1), other:
        assert_alike(divided((0, 1, 0)), expected)
        assert_alike(divided((1, 0, 1)), expected)


# ---- arrays, functions and links


def test_functions_of_arrays_on_the_other_device():
    x, t = Variable(on_1(X)), on_1(T)
    y = F.linear(x, Variable(on_1(X[:3])))
    loss = F.softmax_cross_entropy(y, t, class_weight=on_1(np.array([1, 2, 3], np.float32)))
    loss += F.mean(F.dropout(y * y + 1 / (y**2 + 1))) * 2 + x[0, 1] + F.sum(x.T @ x)
    loss.backward(loss_scale=4.0)
    assert x.grad.device.id == 1
    F.accuracy(y, t)
    F.classification_summary(y, t)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.zerograd()
    x.addgrad(x)
    x.cleargrad()
    F.mean(x.mean(axis=0) * x.transpose(1, 0).sum(1)).backward(retain_grad=True)
    (g,) = dbrdist.grad([F.sum(x**3)], [x], enable_double_backprop=True)
    F.sum(g * g).backward()


def test_operands_of_two_devices_are_refused_by_name():
    a, b = Variable(get_device(0).send(X)), Variable(on_1(X))
    for call in (lambda: F.add(a, b), lambda: b * a, lambda: F.matmul(a, b, transb=True)):
        with pytest.raises(ValueError, match=r"on one device, got input 0 on @cupy:\d, 1 on @cupy:\d.*F\.copy"):
            call()


def test_recurrent_links():
    for link, num_states in ((L.NStepLSTM(2, 4, 6, 0.1), 2), (L.NStepGRU(1, 4, 6, 0.0), 1)):
        link.to_device(1)
        *_, ys = link(*[None] * num_states, [on_1(X[:k, :4]) for k in (5, 3)])
        link.cleargrads()
        F.sum(F.concat(ys, 0)).backward()
    y = L.EmbedID(7, 3).to_device(1)(on_1(T))
    link = L.LSTM(3, 4).to_device(1)
    link(y)
    F.sum(link(y)).backward()
    link.reset_state()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_snapshots_and_copies(tmp_path):
    import copy

    net = Net().to_device(1)
    optimizer = optimizers.Adam().setup(net)
    for _ in range(2):
        net.cleargrads()
        F.sum(net(on_1(IMAGES[:2])) ** 2).backward()
        optimizer.update()
    for thing in (optimizer, net):
        dbrdist.serializers.save_npz(tmp_path / "file.npz", thing)
        dbrdist.serializers.load_npz(tmp_path / "file.npz", thing)
    other = net.copy("copy")
    other.copyparams(net)
    other.addgrads(net)
    other.zerograds()
    copy.deepcopy(net)
    optimizer.update()
    assert_alike([to_cpu(other.fc.b.grad)], [np.zeros(3)])


def test_a_network_whose_shapes_follow_from_the_first_batch():
    model = L.Classifier(L.Linear(3)).to_device(1)
    optimizers.SGD(0.1).setup(model).update(model, on_1(X), on_1(T))


def test_16_bits():
    with using_config("dtype", np.dtype(np.float16)):
        model = L.Classifier(L.Linear(5, 3)).to_device(1)
        optimizer = optimizers.Adam(0.1, eps=1e-4).setup(model)
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
        optimizer.add_hook(WeightDecay(0.1))
        for _ in range(2):
            optimizer.update(model, on_1(X.astype(np.float16)), on_1(T))


def test_debug_mode_and_recomputation():
    x, link = Variable(on_1(X)), L.Linear(5, 5).to_device(1)
    with using_config("debug", True):
        F.sum(F.relu(x * 2)).backward()
    F.sum(F.forget(lambda x: F.relu(link(x)), x)).backward()


def test_a_thread_for_each_device(xp):
    expected, errors = divided(HOST), []

    def work(number):
        try:
            xp.cuda.Device(number).use()
            assert_alike(divided_at((number,) * 3), expected)
        except Exception as error:
            errors.append(error)

    lock = threading.Lock()  # the seed belongs to the process

    def divided_at(devices):
        with lock:
            return divided(devices)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_sparse_matrices_of_another_device():
    x = np.array([[0, 2, 0], [3, 0, 4]], np.float32)
    parts = np.array([2, 3, 4], np.float32), np.array([0, 1, 1]), np.array([1, 0, 2])
    matrix = dbrdist.utils.CooMatrix(*map(on_1, parts), x.shape)
    assert matrix.order == "C"
    dense = matrix.to_dense()
    assert device_of(dense) == get_device("@cupy:1")
    np.testing.assert_array_equal(to_cpu(dense), x)
    y = F.sparse_matmul(matrix, Variable(on_1(np.ones((3, 2), np.float32))))
    np.testing.assert_array_equal(to_cpu(y.array), [[2, 2], [7, 7]])


@pytest.mark.parametrize("first", ["@cupy:0", "@cupy:1"])
def test_a_gradient_that_is_watched_may_be_on_another_device(first):
    """After an optimizer's first update its gradients are watched, also in passes through other networks."""
    models = [L.Linear(5, 3).to_device(name) for name in (first, "@cupy:1" if first == "@cupy:0" else "@cupy:0")]
    chosen = [optimizers.SGD(0.01).setup(model) for model in models]
    expected = [to_cpu(model.W.array).astype(np.float64) for model in models]
    biases = [np.zeros(3), np.zeros(3)]
    for _ in range(2):
        for k, (model, optimizer) in enumerate(zip(models, chosen)):
            model.cleargrads()
            F.sum(model(device_of(model.W.array).send(X)) ** 2).backward()
            optimizer.update()
            slope = 2 * (X @ expected[k].T + biases[k])
            expected[k] -= 0.01 * slope.T @ X
            biases[k] -= 0.01 * slope.sum(0)
    for model, W in zip(models, expected):
        np.testing.assert_allclose(to_cpu(model.W.array), W, 1e-4, 1e-5)
