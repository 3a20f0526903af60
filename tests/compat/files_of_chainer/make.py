"""Files written by a real Chainer 7.8.1 (NumPy 1.23, h5py), for test_files_of_chainer.py.

python make.py    # in an environment with Chainer: writes model.npz, model.h5, optimizer.npz, results.npz,
                  # trainer.npz, trainer-results.npz, pickled.pkl, pickled-results.npz and sequential.h5 here
"""

import pathlib
import pickle

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


def links():
    """Links, and for each what it is called with."""
    x, images = np.random.randn(4, 3).astype(np.float32), np.random.randn(2, 2, 4, 4).astype(np.float32)
    return {
        "linear": (L.Linear(3, 2), (x,)),
        "conv": (L.Convolution2D(2, 3, 3, pad=1), (images,)),
        "deconv": (L.Deconvolution2D(2, 3, 3, stride=2), (images,)),
        "bn": (L.BatchNormalization(3), (x,)),
        "ln": (L.LayerNormalization(3), (x,)),
        "scale": (L.Scale(1, (3,), True), (x,)),
        "prelu": (L.PReLU(), (x,)),
        "embed": (L.EmbedID(4, 2), (np.array([0, 3], np.int32),)),
        "lstm": (L.LSTM(3, 2), (x,)),
        "gru": (L.StatefulGRU(3, 2), (x,)),
        "maxout": (L.Maxout(3, 2, 2), (x,)),
        "mlp": (L.MLPConvolution2D(2, (3, 2), 1), (images,)),
        "conv1d": (L.Convolution1D(2, 3, 2), (images[:, :, 0],)),
        "convnd": (L.ConvolutionND(2, 2, 3, 3), (images,)),
        "deconvnd": (L.DeconvolutionND(2, 2, 3, 3), (images,)),
        "dilated": (L.DilatedConvolution2D(2, 3, 2, dilate=2), (images,)),
        "plain_bn": (L.BatchNormalization(3, use_gamma=False, use_beta=False), (x,)),
        "deformable": (L.DeformableConvolution2D(2, 3, 3, 1, 1), (images,)),
        "upsampling": (
            L.Deconvolution2D(2, 2, 4, 2, 1, initialW=chainer.initializers.UpsamplingDeconvFilter()),
            (images,),
        ),
        "mgu": (L.StatefulMGU(3, 2), (x,)),
        "sequential": (chainer.Sequential(L.Linear(3, 3), F.relu, L.Linear(3, 3), F.tanh, L.Linear(3, 3)), (x,)),
    }


def pickled():
    np.random.seed(5)
    found = links()
    x, t = np.random.randn(4, 3).astype(np.float32), np.array([0, 1, 1, 0], np.int32)
    with chainer.using_config("train", False):
        results = {name: link(*args).array for name, (link, args) in found.items()}
    for link, _ in found.values():
        if hasattr(link, "reset_state"):
            link.reset_state()
    chainer.serializers.save_hdf5(str(HERE / "sequential.h5"), found["sequential"][0])
    objects = {name: link for name, (link, _) in found.items()}
    objects["list"] = chainer.ChainList(L.Linear(None, 2), L.Linear(2, 2))
    objects["without sizes"] = [
        L.BatchNormalization(axis=0, initial_avg_var=4), L.LocalConvolution2D(None, 3, None, 3),
        L.DeformableConvolution2D(None, 3, 3),
    ]  # fmt: skip
    objects["link of a parameter"] = L.Parameter(x)
    objects["parameter"], objects["variable"] = chainer.Parameter(np.arange(3.0), name="p"), chainer.Variable(x)
    for name, optimizer in (
        ("adam", chainer.optimizers.Adam(0.1)), ("momentum", chainer.optimizers.MomentumSGD(0.1)),
        ("smorms3", chainer.optimizers.SMORMS3(0.1)), ("own", chainer.optimizers.MomentumSGD(0.1)),
    ):  # fmt: skip
        model = L.Classifier(L.Linear(3, 2))
        optimizer.setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
        if name == "own":
            rule = model.predictor.W.update_rule
            rule.hyperparam.lr = 0.5
            rule.add_hook(chainer.optimizer_hooks.Lasso(0.1))
            optimizer.loss_scaling(interval=10)
        optimizer.update(model, x, t)
        model.y = model.loss = model.accuracy = None
        objects[name] = pickle.dumps(optimizer, 2)  # as it is now
        optimizer.update(model, x, t)
        results[name] = model.predictor.W.array
    with open(HERE / "pickled.pkl", "wb") as file:
        pickle.dump(objects, file, 2)
    given = {f"{name}/{i}": a for name, (_, args) in found.items() for i, a in enumerate(args)}
    np.savez(HERE / "pickled-results.npz", x=x, t=t, **given, **{f"{name}/y": y for name, y in results.items()})


if __name__ == "__main__":
    main()
    trainer()
    pickled()
