"""Files that a real Chainer wrote are read: files_of_chainer/make.py made them and says how."""

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
