"""Files that a real Chainer wrote are read: files_of_chainer/make.py made them and says how."""

import threading
from pathlib import Path

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L

FILES = Path(__file__).with_name("files_of_chainer")


class Net(dbrdist.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(2, 3, 3, pad=1)
            self.bn = L.BatchNormalization(3)
            self.lstm = L.LSTM(12, 4)
            self.out = L.Linear(4, 2)

    def forward(self, x):
        self.lstm.reset_state()
        h = F.relu(self.bn(self.conv(x)))
        return self.out(self.lstm(F.reshape(h, (len(x), -1))))


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_a_model_computes_what_it_did_in_chainer(kind):
    if kind == "h5":
        pytest.importorskip("h5py")
    net, results = Net(), np.load(FILES / "results.npz")
    load = dbrdist.serializers.load_npz if kind == "npz" else dbrdist.serializers.load_hdf5
    load(str(FILES / f"model.{kind}"), net)
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(net(results["x"]).array, results["before"], rtol=1e-5, atol=1e-6)


def test_an_optimizer_goes_on_as_it_did_in_chainer():
    net, results = Net(), np.load(FILES / "results.npz")
    dbrdist.serializers.load_npz(str(FILES / "model.npz"), net)
    optimizer = dbrdist.optimizers.Adam().setup(net)
    dbrdist.serializers.load_npz(str(FILES / "optimizer.npz"), optimizer)
    assert optimizer.t == 3
    optimizer.update(lambda: F.softmax_cross_entropy(net(results["x"]), results["t"]))
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(net(results["x"]).array, results["after"], rtol=1e-4, atol=1e-5)


def test_a_trainer_goes_on_as_chainers_was_saved(tmp_path):
    """Chainer numbers the links of a Sequential in another order, and saves sums in place of means."""
    from dbrdist import iterators, optimizers, training
    from dbrdist.training import extensions

    results = np.load(FILES / "trainer-results.npz")
    net = dbrdist.Sequential(L.Linear(3, 4), L.BatchNormalization(4), F.relu, L.Linear(4, 2))
    optimizer = optimizers.MomentumSGD(0.1).setup(L.Classifier(net))
    data = dbrdist.datasets.TupleDataset(results["x"], results["t"])
    iterator = iterators.SerialIterator(data, 4)
    trainer = training.Trainer(training.StandardUpdater(iterator, optimizer), (6, "iteration"), str(tmp_path))
    trainer.extend(extensions.ExponentialShift("lr", 0.5, 0.1), trigger=(2, "iteration"))
    dbrdist.serializers.load_npz(str(FILES / "trainer.npz"), trainer)
    with dbrdist.using_config("train", False):
        np.testing.assert_allclose(net(results["x"]).array, results["y"], rtol=1e-5, atol=1e-6)
    assert (iterator.epoch_detail, trainer.updater.iteration, optimizer.t) == (1 + 8 / 12, 5, 5)
    trainer.run()
    np.testing.assert_array_equal(iterator.indices, results["order"][8:12])
    assert optimizer.lr == pytest.approx(results["lr"] / 2)


def test_a_file_with_our_numbers_of_a_sequential_is_read_too(tmp_path):
    """Written with NumPy: nothing says who wrote it."""
    net = dbrdist.Sequential(L.Linear(2, 3), L.Linear(3, 4), L.Linear(4, 5))
    arrays = {name[1:]: np.random.rand(*p.shape).astype("f") for name, p in net.namedparams()}
    np.savez(tmp_path / "net.npz", **arrays)
    dbrdist.serializers.load_npz(tmp_path / "net.npz", net)
    for name, p in net.namedparams():
        np.testing.assert_array_equal(p.array, arrays[name[1:]])
    dbrdist.serializers.save_npz(tmp_path / "ours.npz", net)
    other = dbrdist.Sequential(L.Linear(2, 3), L.Linear(3, 4), L.Linear(4, 5))
    dbrdist.serializers.load_npz(tmp_path / "ours.npz", other)
    np.testing.assert_array_equal(other[2].W.array, net[2].W.array)


@pytest.mark.parametrize("first", [(), (F.relu,), (F.relu, F.tanh)])
def test_links_of_a_sequential_are_numbered_as_chainer_inserts_them(first):
    """Against the order that Chainer's insert makes: behind the first link, or behind what is at its place."""
    from dbrdist.core.array.chainer_mode import loading

    layers = [*first, L.Linear(1, 1), F.relu, L.Linear(1, 2), L.Linear(2, 3), F.tanh, L.Linear(3, 4)]
    expected = []
    for i, layer in enumerate(layers):
        if hasattr(layer, "namedparams"):
            before = [j for j in range(i) if hasattr(layers[j], "namedparams")]
            expected.insert(0 if i == 0 else (before[0] if before else 0) + 1, layer)
    loading.file_of_chainer = True
    try:
        found = [link for _, link in dbrdist.Sequential(*layers).namedlinks(skipself=True)]
    finally:
        loading.file_of_chainer = False
    assert [id(link) for link in found] == [id(link) for link in expected]


def test_a_file_in_our_order_gives_late_parameters_their_own_shapes(tmp_path):
    """The order of Chainer is tried first, and parameters that wait for a shape take any."""
    net = dbrdist.Sequential(L.Linear(2, 3), L.Linear(3, 4), L.Linear(4, 5))
    np.savez(tmp_path / "plain.npz", **{name[1:]: p.array for name, p in net.namedparams()})
    late = dbrdist.Sequential(L.Linear(None, 3), L.Linear(None, 4), L.Linear(None, 5))
    dbrdist.serializers.load_npz(tmp_path / "plain.npz", late)
    for (name, p), (_, own) in zip(net.namedparams(), late.namedparams()):
        np.testing.assert_array_equal(p.array, own.array, err_msg=name)


def test_the_order_of_chainer_is_that_of_the_thread_that_loads(tmp_path):
    layers = L.Linear(2, 3), L.Linear(3, 4), L.Linear(4, 5)
    names = []

    class Looks(dbrdist.Chain):
        def serialize(self, serializer):
            other = threading.Thread(target=lambda: names.extend(dbrdist.Sequential(*layers).namedlinks(skipself=True)))
            other.start()
            other.join()
            super().serialize(serializer)

    np.savez(tmp_path / "plain.npz", W=np.zeros(1))
    dbrdist.serializers.load_npz(tmp_path / "plain.npz", Looks())
    assert [link for _, link in names] == list(layers)
