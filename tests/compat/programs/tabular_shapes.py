"""Classify drawings whose columns are computed, joined, cached and read back: tables, pickles, text and zip files."""

import argparse
import io
import os
import zipfile

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.dataset import tabular
from chainer.dataset.tabular.delegate_dataset import DelegateDataset
from chainer.datasets import open_pickle_dataset, open_pickle_dataset_writer
from chainer.training import extensions

SIZE = 8


class ShapesDataset(chainer.dataset.TabularDataset):
    """Disks, squares and crosses at random places; a row is drawn when it is asked for."""

    def __init__(self, n, seed):
        self._places = np.random.RandomState(seed).randint(2, SIZE - 2, (n, 2))

    def __len__(self):
        return len(self._places)

    @property
    def keys(self):
        return ("img", "label", "place")

    @property
    def mode(self):
        return tuple

    def get_examples(self, indices, key_indices):
        if indices is None:
            indices = slice(None)
        if isinstance(indices, slice):
            indices = range(len(self))[indices]
        getters = (self._img, lambda i: i % 3, lambda i: tuple(self._places[i]))
        if key_indices is None:
            key_indices = range(3)
        return tuple([getters[k](i) for i in indices] for k in key_indices)

    def _img(self, i):
        y, x = np.ogrid[:SIZE, :SIZE]
        y, x = y - self._places[i][0], x - self._places[i][1]
        shape = (y * y + x * x <= 4, np.maximum(abs(y), abs(x)) <= 1, (y * x == 0) & (abs(y) + abs(x) <= 2))[i % 3]
        return shape.astype(np.float32)[None]


class Named(DelegateDataset):
    """Adds the names of the shapes, which lie in a text file."""

    def __init__(self, dataset, path):
        super(Named, self).__init__(dataset)
        self._names = chainer.datasets.TextDataset(path)

    def name_of(self, label):
        return self._names[label].strip()


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, 8, 3)
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(None, n_out)

    def forward(self, x):
        h = F.relu(self.conv(x))
        return self.l2(F.relu(self.l1(h)))


def cached(dataset, path):
    """The examples of a dataset, read back from a file of pickles."""
    with open_pickle_dataset_writer(path) as writer:
        for example in dataset:
            writer.write(example)
    return open_pickle_dataset(path)


def check_zip(out):
    path = os.path.join(out, "images.zip")
    try:
        from PIL import Image
    except ImportError:
        return
    with zipfile.ZipFile(path, "w") as archive:
        for k in range(3):
            data = io.BytesIO()
            Image.fromarray(np.full((4, 5), 50 * k, np.uint8)).save(data, "PNG")
            archive.writestr("{}.png".format(k), data.getvalue())
    with open(os.path.join(out, "labels.txt"), "w") as f:
        f.write("2.png 1\n0.png 0\n")
    images = chainer.datasets.LabeledZippedImageDataset(path, os.path.join(out, "labels.txt"))
    assert [(float(x.max()), int(t)) for x, t in images] == [(100.0, 1), (0.0, 0)]
    assert images[0][0].shape == (1, 4, 5) and len(chainer.datasets.MultiZippedImageDataset([path, path])) == 6


def main():
    parser = argparse.ArgumentParser(description="Chainer example: tables")
    parser.add_argument("--batchsize", "-b", type=int, default=30)
    parser.add_argument("--epoch", "-e", type=int, default=8)
    parser.add_argument("--device", "-d", type=str, default="-1")
    parser.add_argument("--out", "-o", default="shapes")
    args = parser.parse_args()
    chainer.dataset.set_dataset_root(os.path.join(args.out, "data"))
    folder = chainer.dataset.get_dataset_directory("shapes")
    with open(os.path.join(folder, "names.txt"), "w") as f:
        f.write("disk\nsquare\ncross\n")

    shapes = Named(ShapesDataset(450, seed=0), os.path.join(folder, "names.txt"))
    assert [shapes.name_of(shapes[i][1]) for i in (0, 4, 8)] == ["disk", "square", "cross"]
    weights = tabular.from_data({"weight": np.linspace(0, 1, 450), "index": lambda i: i})
    joined = shapes.join(weights).asdict()
    assert joined.keys == ("img", "label", "place", "weight", "index") and joined[449]["weight"] == 1.0
    light = [w < 0.7 for w in joined.slice[:, "weight"].fetch()]
    pairs = joined.slice[:, ("img", "label")].astuple()
    train, test = pairs.slice[light], pairs.slice[np.flatnonzero(~np.array(light))]
    assert len(train) + len(test) == len(pairs.concat()) == 450

    noise = np.random.RandomState(1)

    def augment(img, label):
        return img + noise.normal(0, 0.1, img.shape).astype(np.float32), np.int32(label)

    train = train.transform(("img", "label"), augment)
    test = test.transform_batch(("img", "label"), lambda img, label: (np.stack(img), np.array(label, "i")))
    x, t = test.convert(test.fetch())
    assert x.shape == (len(test), 1, SIZE, SIZE) and t.dtype == np.int32
    stats = os.path.join(folder, "mean.npy")
    mean = chainer.dataset.cache_or_load_file(stats, lambda p: (np.save(p, x.mean(0)), x.mean(0))[1], np.load)
    assert np.array_equal(chainer.dataset.cache_or_load_file(stats, None, np.load), mean)
    test = cached(test, os.path.join(folder, "test.pickle"))

    model = L.Classifier(MLP(20, 3))
    device = chainer.get_device(args.device)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(0.01)
    optimizer.setup(model)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    converter = chainer.dataset.ConcatWithAsyncTransfer()
    updater = training.updaters.StandardUpdater(train_iter, optimizer, converter=converter, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/accuracy"]))
    trainer.run()
    check_zip(args.out)
    test.close()


if __name__ == "__main__":
    main()
