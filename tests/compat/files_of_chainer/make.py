"""Files written by a real Chainer 7.8.1 (NumPy 1.23, h5py), for test_files_of_chainer.py.

python make.py    # in an environment with Chainer: writes model.npz, model.h5, optimizer.npz, results.npz,
                  # trainer.npz and trainer-results.npz here
"""

import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

HERE = pathlib.Path(__file__).parent


class Net(chainer.Chain):
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


def main():
    np.random.seed(7)
    net = Net()
    optimizer = chainer.optimizers.Adam().setup(net)
    x = np.random.randn(5, 2, 2, 2).astype(np.float32)
    t = np.array([0, 1, 1, 0, 1], np.int32)
    for _ in range(3):
        optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
    chainer.serializers.save_npz(HERE / "model.npz", net)
    chainer.serializers.save_hdf5(str(HERE / "model.h5"), net)
    chainer.serializers.save_npz(HERE / "optimizer.npz", optimizer)
    with chainer.using_config("train", False):
        before = net(x).array
    optimizer.update(lambda: F.softmax_cross_entropy(net(x), t))
    with chainer.using_config("train", False):
        after = net(x).array
    np.savez(HERE / "results.npz", x=x, t=t, before=before, after=after)


def trainer():
    np.random.seed(3)
    x = np.random.randn(12, 3).astype(np.float32)
    t = (x.sum(1) > 0).astype(np.int32)
    net = chainer.Sequential(L.Linear(3, 4), L.BatchNormalization(4), F.relu, L.Linear(4, 2))
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(L.Classifier(net))
    iterator = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(x, t), 4)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    run = chainer.training.Trainer(updater, (5, "iteration"), str(HERE))
    extensions = chainer.training.extensions
    run.extend(extensions.LogReport(trigger=(2, "iteration"), log_name=None))
    run.extend(extensions.ExponentialShift("lr", 0.5, 0.1), trigger=(2, "iteration"))
    run.extend(extensions.snapshot(filename="trainer.npz"), trigger=(5, "iteration"))
    run.run()
    with chainer.using_config("train", False):
        y = net(x).array
    np.savez(HERE / "trainer-results.npz", x=x, t=t, y=y, order=iterator._state.order, lr=optimizer.lr)


if __name__ == "__main__":
    main()
    trainer()
