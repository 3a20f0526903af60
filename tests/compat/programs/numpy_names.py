"""A loop by hand with NumPy's names of its time, saved and loaded parameters, and device spellings."""

import copy
import os

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Variable, cuda, serializers
from chainer.backends.cuda import get_array_module, to_cpu
from chainer.dataset import concat_examples
from chainer.iterators import SerialIterator


class Model(chainer.Chain):
    def __init__(self):
        super(Model, self).__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, 4, ksize=3, pad=1)
            self.bn = L.BatchNormalization(4)
            self.fc = L.Linear(None, 3)
        self.add_persistent("seen", np.zeros((), dtype=np.int))

    def forward(self, x):
        xp = get_array_module(x)
        self.seen += int(xp.asarray(x.shape)[0])
        h = F.max_pooling_2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(F.dropout(h, ratio=0.1))


def main():
    rng = np.random.RandomState(1)
    labels = rng.randint(0, 3, 90).astype(np.int)
    images = rng.rand(90, 1, 8, 8).astype(np.float)
    for image, label in zip(images, labels):
        image[0, :, label * 2] += 2.0
    data = list(zip(images.astype(np.float32), labels.astype(np.int32)))

    model = Model()
    model.to_device("@numpy")
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    iterator = SerialIterator(data, 15)
    while iterator.epoch < 8:
        batch = iterator.next()
        x, t = concat_examples(batch, device=-1)
        y = model(Variable(x))
        loss = F.softmax_cross_entropy(y, t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
    assert model.seen == 8 * 90

    x, t = concat_examples(data)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        y = model(x)
        accuracy = F.accuracy(y, t)
    assert y.creator is None
    print(f"accuracy {float(to_cpu(accuracy.data)):.2f}")

    serializers.save_npz("model.npz", model)
    loaded = Model()
    serializers.load_npz("model.npz", loaded)
    twin = copy.deepcopy(model)
    with chainer.using_config("train", False):
        np.testing.assert_array_equal(loaded(x).data, y.data)
        np.testing.assert_array_equal(twin(x).data, y.data)
    os.remove("model.npz")

    weights = np.concatenate([p.data.ravel() for p in model.params()])
    assert np.product(weights.shape) == weights.size and not np.sometrue(np.isnan(weights))
    assert cuda.get_device_from_array(weights).id == -1
    assert isinstance(np.float_(1.0), np.float64)
    print(f"parameters: {model.count_params()}")


if __name__ == "__main__":
    main()
